"""Rollouts that servers write while the learner updates: which weights write them, what is bounded, and what errors do."""

import ast
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy

import pytest
import torch
from at_events import on
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
from groupwise.text.envs import TextEnvs
from groupwise.text.generation import Completion
from groupwise.text.load import load_causal_lm
from groupwise.text.policy import CausalLM
from groupwise.text.served import ServedCollector, ServedGenerator
from groupwise.text.task import EncodedPrompt, Example, PromptEncoder, Start
from groupwise.text.tool_env import make_text_env

PROMPTS, ITERATIONS = 2, 4
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
    assert all(0 <= entry["time/learner_idle_fraction"] <= 1 for entry in metrics)
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


def dies(error, first=lambda trainer: None):
    """Raises in the third iteration, before the update."""

    def die(trainer, rollout):
        first(trainer)
        if trainer.iteration == 2:
            raise error

    return on("rollout_end", die)


def test_a_run_that_was_killed_takes_every_prompt_once(model, either, tmp_path):
    reward = Prompts()
    rows = [{"prompt": f"{number:03}"} for number in range(40)]
    task = gw.TextTask(rows, reward=reward)
    with pytest.raises(OSError, match="killed"):
        run(model, tmp_path / "part", either, 1, task=task, callbacks=[dies(OSError("killed"))], checkpoint_interval=1)
    assert_nothing_runs()
    assert len(reward.taken) == 3 * PROMPTS
    del reward.taken[2 * PROMPTS :]  # scored, and not trained on
    again = gw.resume(tmp_path / "part", **{name: one for name, one in task.given.items() if one is not None})
    assert reward.taken == [in_order(rows, number, 0)["prompt"] for number in range(ITERATIONS * PROMPTS)]
    # nothing was in flight at its start, so the first is of its own weights
    assert [entry["rollout/staleness"] for entry in again.metrics()][::2] == [0, 0]
    if not either.in_flight:
        assert [entry["rollout/staleness"] for entry in again.metrics()][1::2] == [1, 1]


ERRORS = {
    "500": "no answer in 1 tries: status 500: .*EngineDeadError",
    "version": "answered by weights 'another', expected '.*-1'",
}


@pytest.mark.parametrize("fault", ERRORS)
def test_an_error_behind_the_learner_ends_the_run(model, either, tmp_path, fault):
    either.faults[GENERATE] = [None] * 2 * PROMPTS + [fault] * 100  # the third rollout, by the weights of the second
    with pytest.raises(gw.errors.ServerError, match=ERRORS[fault]):
        run(model, tmp_path / "run", either, 1)
    assert_nothing_runs()
    assert list((tmp_path / "weights").iterdir()) == []


def test_an_interrupt_does_not_wait_for_the_servers(model, double, tmp_path, monkeypatch):
    monkeypatch.setattr(http, "_HEALTH_INTERVAL", 60.0)
    double.faults[GENERATE], double.seconds_of_a_hang = [None] * 3 * PROMPTS + ["hang"] * 100, 60.0
    begun = []

    def until_a_call_hangs(trainer):
        while trainer.iteration == 2 and len(double.faults[GENERATE]) == 100:
            time.sleep(0.01)
        begun[:] = [time.monotonic()]

    with pytest.raises(KeyboardInterrupt):
        run(model, tmp_path / "run", double, 1, callbacks=[dies(KeyboardInterrupt(), until_a_call_hangs)], retries=5)
    assert time.monotonic() - begun[0] < 15  # such a call lasts 20 s
    assert_nothing_runs()


def test_what_cannot_be_is_refused(model):
    ahead = {"generation": {"name": "server", "max_staleness": 1}}
    recomputed, filtered = {"objective": {"old_log_prob": "recomputed"}}, {"collection": {"dynamic_sampling": 1}}
    for settings, message in [
        ({"generation": {"name": "server", "in_flight_updates": True}}, "in_flight_updates=True and max_staleness=0"),
        (ahead | {"algorithm": gw.GRPOCfg(**filtered)}, "dynamic_sampling=None, or .*max_staleness=0"),
    ]:
        with pytest.raises(ValueError, match=message):
            TextRunCfg(**settings)
    with pytest.raises(ValueError, match="max_staleness=1 needs the probabilities of earlier weights") as refused:
        TextRunCfg(algorithm=gw.GRPOCfg(**recomputed), **ahead)
    for advice in (advices := re.findall(r"\{'.+?'\}", str(refused.value))):
        TextRunCfg(algorithm=gw.GRPOCfg(objective=ast.literal_eval(advice)), **ahead)
    assert len(advices) == 2
    adapted = load_causal_lm(gw.ModelCfg(path=str(model), lora={"r": 2}), SamplingCfg(max_new_tokens=1))
    for generation, policy, engine, message in [
        ({"in_flight_updates": True}, adapted, Engine(), "in_flight_updates=True with adapters"),
        ({}, CausalLM(tiny_model()), TwoThreads(0, None, None), "max_staleness=1 needs one process; fix"),
    ]:
        with pytest.raises(gw.errors.ConfigError, match=message):
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


def test_completions_go_on_under_new_weights(model, tmp_path):
    policies, rollouts = {}, []

    def keep(trainer, rollout):  # of each iteration, before its update
        policies[trainer.iteration] = deepcopy(trainer.algorithm.policy)
        rollouts.append(rollout.clone())
        time.sleep(0.05)

    with VLLMDouble(model) as double:
        double.in_flight, double.seconds_per_token = True, 0.01
        found = run(model, tmp_path / "run", double, 2, callbacks=[on("rollout_end", keep)], total_iterations=8)
    mixed = 0
    for iteration, (rollout, entry) in enumerate(zip(rollouts, found.metrics(), strict=True)):
        mask, version = rollout["loss_mask"], rollout["policy_version"]
        assert (iteration - 2 <= version[mask]).all()
        assert (version[mask] <= iteration).all()
        assert (version[~mask] == -1).all()
        assert entry["rollout/staleness"] == pytest.approx((iteration - version[mask].double()).mean().item())
        for row, by in zip(mask, version, strict=True):
            assert by[row].tolist() == sorted(by[row].tolist())
            mixed += len(set(by[row].tolist())) > 1
        for number in version[mask].unique().tolist():
            batch = rollout[:, :-1].to_dict()
            with torch.no_grad():
                log_prob = policies[number].evaluate(batch).log_prob
            of_these = (mask & (version == number))[:, :-1]
            torch.testing.assert_close(log_prob[of_these], batch["sample_log_prob"][of_these], atol=1e-4, rtol=0)
    assert mixed
    assert_nothing_runs()


def test_servers_begin_the_next_rollout_before_the_last_one_is_complete(model, double, tmp_path):
    begun, generate = [], double.inference_v1_generate

    def slow_first(body, query, fault):
        begun.append(body["sampling_params"]["seed"])
        if len(begun) == 1:  # a completion that takes as long as three other rollouts
            limit = time.monotonic() + 10
            while len(begun) < 3 * PROMPTS and time.monotonic() < limit:
                double._let_others_call()
            assert len(begun) == 3 * PROMPTS
        return generate(body, query, fault)

    double.in_flight, double.inference_v1_generate = True, slow_first
    assert len(run(model, tmp_path / "run", double, 2).metrics()) == ITERATIONS


def test_only_the_policy_asked_for_or_a_later_one_of_the_run_may_generate():
    def allowed(asked, version, *, in_flight=True):
        request = GroupRequest([5], 1, 0, SamplingCfg(max_new_tokens=1), (), 15, asked)
        client = HttpClient("http://127.0.0.1:9", timeout=1.0, retries=0)
        return VLLMServer(client, adapters=False, in_flight_updates=in_flight).allows(version, request)

    assert all(allowed("run-9", version) for version in ("run-9", "run-10"))
    assert not any(allowed("run-9", version) for version in ("run-8", "other-10", "default", "run-"))
    assert allowed("run-9", "run-9", in_flight=False)
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


def test_a_tool_is_called_by_one_rollout_at_a_time(model):
    busy, calls = threading.Lock(), []

    def tool(text):
        assert busy.acquire(blocking=False)
        calls.append(text)
        time.sleep(0.005)
        busy.release()
        return "1"

    tokenizer = load_causal_lm(gw.ModelCfg(path=str(model)), SamplingCfg(max_new_tokens=1)).tokenizer
    cfg = TextTaskCfg(tool="calculator", max_turns=99)
    dialogue = Dialogue(PromptEncoder(tokenizer, cfg), envs=TextEnvs(make_text_env(cfg, tool=tool), "seed"))

    def talk(number):
        member = Transcript(EncodedPrompt(Example("1", {}, Start(0, {"prompt": "1"})), [5]), 0, number)
        dialogue.begin([member], 4)
        for _ in range(9):
            member.add_turn(Completion([5], [-1.0], "stop"), "1")
            dialogue.answer([member], 4)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(talk, range(4)))
    assert len(calls) == 36


def test_a_server_that_restarts_in_flight_gets_the_newest_weights(model, double, tmp_path):
    double.in_flight, double.seconds_per_token = True, 0.01
    double.faults[GENERATE] = [None] * 3 * PROMPTS + ["restart"]
    metrics = run(model, tmp_path / "run", double, 1, retries=2).metrics()
    assert double.faults[GENERATE] == []
    assert len(metrics) == ITERATIONS
