"""Rollouts that servers write while the learner updates: which weights write them, what is bounded, and what errors do."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy

import pytest
import torch
from text_runs import copying, logged, same_weights, share_copied, train
from text_updates import SGD, updated
from tiny_models import tiny_model
from two_ranks import TwoThreads
from vllm_double import GENERATE, VLLMDouble

import groupwise as gw
from groupwise import serving as http
from groupwise.config.policy import SamplingCfg
from groupwise.config.run import TextRunCfg, TextTaskCfg
from groupwise.engines import Engine
from groupwise.serving import GroupRequest, HttpClient, VLLMServer
from groupwise.text import build as connect
from groupwise.text.collector import Dialogue, TextRow, Transcript, in_order
from groupwise.text.generation import Completion
from groupwise.text.load import load_causal_lm
from groupwise.text.policy import CausalLM
from groupwise.text.served import AsyncCollector, ServedCollector, ServedGenerator
from groupwise.text.task import EncodedPrompt, Example, PromptEncoder

PROMPTS = 2


ITERATIONS = 4


DECOUPLED = {"old_log_prob": "recomputed", "importance_sampling_correction": "tis"}


SHORT = {
    "num_prompts": PROMPTS,
    "total_steps": None,
    "total_iterations": ITERATIONS,
    "evaluation": {"interval": 10_000, "prompts": 1, "num_logged_groups": 0},
    "sampler_mismatch": {"warn": 10, "stop": None},
}


def run(model, path, double, staleness, *, callbacks=(), task=None, retries=0, **more):
    cfg = gw.GRPOCfg(group_size=4, learning_rate=1e-2, objective=DECOUPLED)
    generation = {"name": "server", "urls": [double.url], "timeout": 20, "retries": retries, "max_staleness": staleness}
    generation |= {"weights_dir": str(path.parent / "weights"), "in_flight_updates": double.in_flight}
    return train(task or copying(), model, path, cfg, generation=generation, callbacks=list(callbacks), **SHORT | more)


def assert_nothing_runs():
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith(("groupwise", "ThreadPool"))]


def assert_equal(one, other):
    names = ("rollout/sync", "rollout/staleness")
    assert logged(one, *names) == logged(other, *names)
    assert same_weights(one, other)


def test_without_staleness_it_is_the_synchronous_run_bit_for_bit(model, double, tmp_path, monkeypatch):
    synchronous = run(model, tmp_path / "synchronous", double, 0)
    monkeypatch.setattr(connect, "ServedCollector", AsyncCollector)
    asynchronous = run(model, tmp_path / "asynchronous", double, 0)
    assert {entry["rollout/staleness"] for entry in asynchronous.metrics()} == {0}
    assert_equal(asynchronous, synchronous)


@pytest.fixture(params=[False, True], ids=["in order", "in flight"])
def either(request, double):
    """A server that finishes rollouts before it reads new weights, or goes on with them."""
    double.in_flight = request.param
    return double


class Delayed(ServedCollector):
    """In turns, without threads: a rollout is written by the weights of two iterations before."""

    def _give_weights(self):
        self.generator.save(self.iteration)
        self.generator.load(max(0, self.iteration - 2))


class Pace(gw.Callback):
    """Looks at the server's requests before each update, which takes its time; some are shorter than a rollout."""

    def __init__(self, double, staleness):
        self.double, self.staleness, self.ahead = double, staleness, []

    def asked(self):
        return sum(path == GENERATE for path, _ in self.double.calls)

    def on_rollout_end(self, trainer, rollout):
        time.sleep(0.06 * (trainer.iteration % 2))
        limit = time.monotonic() + 10
        while self.asked() < (trainer.iteration + 2) * PROMPTS and time.monotonic() < limit:
            time.sleep(0.002)
        self.ahead.append(self.asked() - (trainer.iteration + 1) * PROMPTS)


def test_rollouts_are_written_ahead_by_the_weights_that_their_number_tells(model, double, tmp_path, monkeypatch):
    double.seconds_per_token = 0.01
    pace = Pace(double, 2)
    ahead = run(model, tmp_path / "ahead", double, 2, callbacks=[pace])
    # while the learner is at an update, servers have written or write the next rollouts, two at most
    assert all(PROMPTS <= count <= 2 * PROMPTS for count in pace.ahead)
    metrics = ahead.metrics()
    assert [entry["rollout/staleness"] for entry in metrics] == [0, 1, 2, 2]
    for name, most in [("learner_idle_fraction", 1), ("server_idle_fraction", 1), ("queue_length", 2)]:
        assert all(0 <= entry[f"time/{name}"] <= most for entry in metrics)
    double.seconds_per_token = 0.0
    monkeypatch.setattr(connect, "ServedCollector", Delayed)
    delayed = run(model, tmp_path / "delayed", double, 0)
    assert_equal(ahead, delayed)
    assert_nothing_runs()


class Prompts:
    """A reward that lists the prompts that training takes."""

    def __init__(self):
        self.taken = []

    def __call__(self, prompts, completions, **columns):
        self.taken += prompts[::4]
        return share_copied(prompts, completions)


class Dies(gw.Callback):
    """Raises in the third iteration, before the update."""

    def __init__(self, error):
        self.error = error

    def on_rollout_end(self, trainer, rollout):
        if trainer.iteration == 2:
            raise self.error


def test_a_run_that_was_killed_takes_every_prompt_once(model, either, tmp_path):
    reward = Prompts()
    rows = [{"prompt": f"{number:03}"} for number in range(40)]
    task = gw.TextTask(rows, reward=reward)
    with pytest.raises(OSError, match="killed"):
        run(model, tmp_path / "part", either, 1, task=task, callbacks=[Dies(OSError("killed"))], checkpoint_interval=1)
    assert_nothing_runs()
    assert len(reward.taken) == 3 * PROMPTS
    del reward.taken[2 * PROMPTS :]  # scored, and not trained on
    again = gw.resume(tmp_path / "part", **{name: one for name, one in task.given.items() if one is not None})
    assert reward.taken == [in_order(rows, number, 0)["prompt"] for number in range(ITERATIONS * PROMPTS)]
    # nothing was in flight at its start, so the first is of its own weights
    assert [entry["rollout/staleness"] for entry in again.metrics()][::2] == [0, 0]
    if not either.in_flight:
        assert [entry["rollout/staleness"] for entry in again.metrics()][1::2] == [1, 1]


SAID = {
    "500": "no answer in 1 tries: status 500: .*EngineDeadError",
    "version": "answered by weights 'another', expected '.*-1'",
}


@pytest.mark.parametrize("fault", SAID)
def test_an_error_behind_the_learner_ends_the_run(model, either, tmp_path, fault):
    either.faults[GENERATE] = [None] * 2 * PROMPTS + [fault] * 100  # the third rollout, by the weights of the second
    with pytest.raises(gw.errors.ServerError, match=SAID[fault]):
        run(model, tmp_path / "run", either, 1)
    assert_nothing_runs()
    assert list((tmp_path / "weights").iterdir()) == []


def test_an_interrupt_does_not_wait_for_the_servers(model, either, tmp_path, monkeypatch):
    monkeypatch.setattr(http, "_HEALTH_INTERVAL", 60.0)
    either.faults[GENERATE], either.seconds_of_a_hang = [None] * 3 * PROMPTS + ["hang"] * 100, 60.0
    begun = []

    class Interrupted(Dies):
        def on_rollout_end(self, trainer, rollout):
            while trainer.iteration == 2 and len(either.faults[GENERATE]) == 100:
                time.sleep(0.01)  # until a call hangs
            begun[:] = [time.monotonic()]
            super().on_rollout_end(trainer, rollout)

    with pytest.raises(KeyboardInterrupt):
        run(model, tmp_path / "run", either, 1, callbacks=[Interrupted(KeyboardInterrupt())], retries=5)
    assert time.monotonic() - begun[0] < 15  # such a call lasts 20 s
    assert_nothing_runs()


def test_what_cannot_be_is_refused(model):
    ahead = {"generation": {"name": "server", "max_staleness": 1}}
    recomputed, filtered = {"objective": {"old_log_prob": "recomputed"}}, {"collection": {"dynamic_sampling": 1}}
    for settings, said in [
        ({"generation": {"name": "server", "in_flight_updates": True}}, "in_flight_updates=True and max_staleness=0"),
        (ahead | {"algorithm": gw.GRPOCfg(**recomputed)}, "importance_sampling_correction='tis', or old_log"),
        (ahead | {"algorithm": gw.GRPOCfg(**filtered)}, "dynamic_sampling=None, or .*max_staleness=0"),
    ]:
        with pytest.raises(ValueError, match=said):
            TextRunCfg(**settings)
    adapted = load_causal_lm(gw.ModelCfg(path=str(model), lora={"r": 2}), SamplingCfg(max_new_tokens=1))
    for generation, policy, engine, said in [
        ({"in_flight_updates": True}, adapted, Engine(), "in_flight_updates=True with adapters"),
        ({}, CausalLM(tiny_model()), TwoThreads(0, None, None), "max_staleness=1 needs one process, got 2"),
    ]:
        with pytest.raises(gw.errors.ConfigError, match=said):
            connect.connect(TextRunCfg(generation=ahead["generation"] | generation), policy, engine)


OBJECTIVES = {
    "decoupled": {"old_log_prob": "recomputed", "importance_sampling_correction": {"name": "tis", "high": 1e3}},
    "against the sampler": {"old_log_prob": "sampled"},
    "uncorrected": {"old_log_prob": "recomputed"},
}


@pytest.mark.parametrize("kind", OBJECTIVES)
def test_stale_completions_give_the_gradient_of_the_policy_that_is_trained(kind):
    """The sampler is uniform over the first tokens, and a group has each of them once: its mean is the expectation."""
    policy = CausalLM(tiny_model())
    with torch.no_grad():
        policy.head.mul_(10)  # no longer nearly uniform itself
    size, prompt = len(policy.head), [5, 6, 7]
    reward, uniform = torch.arange(size) % 5 / 4, [-torch.tensor(size).log().item()]
    rows = [TextRow(prompt, [token], uniform, reward[token].item(), True, 0) for token in range(size)]
    with torch.enable_grad():
        probability = policy.model(torch.tensor([prompt])).logits[0, -1].softmax(-1)
        ((reward - reward.mean()) * probability).sum().backward()
    wanted, before = policy.head.grad.clone(), policy.head.detach().clone()
    policy.zero_grad()
    settings = SGD | {"group_size": size, "learning_rate": 1.0, "credit": {"baseline": "mean", "scale": "none"}}
    updated(policy, rows, **settings, objective=OBJECTIVES[kind] | {"trust_region": "none"})
    step = policy.head.detach() - before
    if kind == "uncorrected":
        assert (step - wanted).norm() > 0.1 * wanted.norm()
    else:
        torch.testing.assert_close(step, wanted, rtol=1e-3, atol=1e-6)


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
