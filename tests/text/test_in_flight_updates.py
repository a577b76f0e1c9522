"""In-flight updates: completions that go on under new weights, and which policy generated each token."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy

import pytest
import torch
from async_runs import ITERATIONS, PROMPTS, assert_nothing_runs, run
from vllm_double import GENERATE, VLLMDouble

import groupwise as gw
from groupwise.config.policy import SamplingCfg
from groupwise.config.run import TextTaskCfg
from groupwise.serving import GroupRequest, HttpClient, VLLMServer
from groupwise.text.collector import Dialogue, Transcript
from groupwise.text.generation import Completion
from groupwise.text.load import load_causal_lm
from groupwise.text.served import ServedGenerator
from groupwise.text.task import EncodedPrompt, Example, PromptEncoder


class Weights(gw.Callback):
    """The policy of each iteration, before its update."""

    def __init__(self):
        self.of, self.rollouts = {}, []

    def on_rollout_end(self, trainer, rollout):
        self.of[trainer.iteration] = deepcopy(trainer.algorithm.policy)
        self.rollouts.append(rollout.clone())
        time.sleep(0.05)


def test_completions_go_on_under_new_weights(model, tmp_path):
    seen = Weights()
    with VLLMDouble(model) as double:
        double.in_flight, double.seconds_per_token = True, 0.01
        found = run(model, tmp_path / "run", double, 2, callbacks=[seen], total_iterations=8)
    metrics = found.metrics()
    shares = [[entry[f"rollout/staleness_{age}"] for age in range(3)] for entry in metrics]
    assert all(sum(share) == pytest.approx(1) for share in shares)
    ages = [share[1] + 2 * share[2] for share in shares]
    assert ages == pytest.approx([entry["rollout/staleness"] for entry in metrics])
    mixed = 0
    for iteration, rollout in enumerate(seen.rollouts):
        mask, version = rollout["loss_mask"], rollout["policy_version"]
        assert (iteration - 2 <= version[mask]).all()
        assert (version[mask] <= iteration).all()
        assert (version[~mask] == -1).all()
        for row, by in zip(mask, version, strict=True):
            assert by[row].tolist() == sorted(by[row].tolist())
            mixed += len(set(by[row].tolist())) > 1
        for number in version[mask].unique().tolist():
            batch = rollout[:, :-1].to_dict()
            with torch.no_grad():
                log_prob = seen.of[number].evaluate(batch).log_prob
            of_these = (mask & (version == number))[:, :-1]
            torch.testing.assert_close(log_prob[of_these], batch["sample_log_prob"][of_these], atol=1e-4, rtol=0)
    assert mixed
    assert_nothing_runs()


def test_servers_begin_the_next_rollout_before_the_last_one_is_complete(model, double, tmp_path):
    begun = []
    generate = double.inference_v1_generate

    def slow_first(body, query, fault):
        begun.append(body["sampling_params"]["seed"])
        if len(begun) == 1:  # a completion that takes as long as three other rollouts
            limit = time.monotonic() + 10
            while len(begun) < 3 * PROMPTS and time.monotonic() < limit:
                double._let_others_call()
            assert len(begun) == 3 * PROMPTS
        return generate(body, query, fault)

    double.in_flight, double.inference_v1_generate = True, slow_first
    metrics = run(model, tmp_path / "run", double, 2).metrics()
    assert len(metrics) == ITERATIONS


def test_only_the_policy_asked_for_or_a_later_one_of_the_run_may_generate():
    def allowed(asked, version, *, in_flight=True):
        client = HttpClient("http://127.0.0.1:9", timeout=1.0, retries=0)
        request = GroupRequest([5], 1, 0, SamplingCfg(max_new_tokens=1), (), 15, asked)
        return VLLMServer(client, adapters=False, in_flight_updates=in_flight).allows(version, request)

    assert allowed("run-9", "run-9")
    assert allowed("run-9", "run-10")
    assert allowed("run-9", "run-9", in_flight=False)
    assert not any(allowed("run-9", version) for version in ("run-8", "other-10", "default", "run-"))
    assert not allowed("run-10", "run-9")
    assert not allowed("run-9", "run-10", in_flight=False)


def test_servers_never_go_back_to_an_earlier_policy(model, double, tmp_path):
    policy = load_causal_lm(gw.ModelCfg(path=str(model)), SamplingCfg(max_new_tokens=1))
    server = VLLMServer(HttpClient(double.url, timeout=20.0, retries=0), adapters=False)
    generate = ServedGenerator([server], policy, tmp_path / "weights")
    for iteration in (1, 2):
        generate.save(iteration)
    generate.load(2)
    generate.load(1)
    assert double.version.endswith("-2")
    assert generate.policy_version == 2


class OneAtATime:
    """A tool that notices if it is called while it works."""

    def __init__(self):
        self.busy, self.calls = threading.Lock(), 0

    def __call__(self, text):
        assert self.busy.acquire(blocking=False)
        self.calls += 1
        time.sleep(0.005)
        self.busy.release()
        return "1"


def test_a_tool_is_called_by_one_rollout_at_a_time(model):
    tool = OneAtATime()
    tokenizer = load_causal_lm(gw.ModelCfg(path=str(model)), SamplingCfg(max_new_tokens=1)).tokenizer
    dialogue = Dialogue(PromptEncoder(tokenizer, TextTaskCfg(tool="calculator", max_turns=99)), tool)

    def talk(number):
        member = Transcript(EncodedPrompt(Example("1", {}), [5]), 0, number)
        for _ in range(20):
            member.add_turn(Completion([5], [-1.0], "stop"), "1")
            dialogue.answer(member, 4)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(talk, range(4)))
    assert tool.calls == 80


def test_a_server_that_restarts_in_flight_gets_the_newest_weights(model, double, tmp_path):
    double.in_flight, double.seconds_per_token = True, 0.01
    double.faults[GENERATE] = [None] * 3 * PROMPTS + ["restart"]
    metrics = run(model, tmp_path / "run", double, 1, retries=2).metrics()
    assert double.faults[GENERATE] == []
    assert len(metrics) == ITERATIONS
