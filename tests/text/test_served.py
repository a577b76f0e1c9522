"""Training on completions of servers: equal to the native generator, and what faults and restarts do."""

import itertools
import os
import shutil
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from at_events import on
from text_runs import Count, copying, logged, same_weights, train, weights
from tiny_models import moved, tiny_model
from two_ranks import TwoThreads, in_two_threads
from vllm_double import GENERATE, VLLMDouble, python_of_double, python_of_files

import groupwise as gw
from groupwise import serving as http
from groupwise.config.policy import SamplingCfg
from groupwise.config.run import TextRunCfg
from groupwise.engines import Engine
from groupwise.report.folder import RunFolder
from groupwise.serving import HttpClient, LocalServer, VLLMServer, is_healthy
from groupwise.text import build
from groupwise.text import served as serving
from groupwise.text.generation import complete
from groupwise.text.load import load_causal_lm
from groupwise.text.policy import CausalLM
from groupwise.text.served import ServedGenerator

TASK = {"prompts": [[5, 6, 7], [9, 8], [4]], "seeds": torch.arange(100, 112).view(3, 4)}
SAMPLING = {
    "plain": SamplingCfg(max_new_tokens=4),
    "hot": SamplingCfg(max_new_tokens=4, temperature=1.7),
    "penalties": SamplingCfg(max_new_tokens=6, repetition_penalty=1.5, presence_penalty=0.5),
    "stop": SamplingCfg(max_new_tokens=6, stop=("3", "4")),
    "minimum": SamplingCfg(max_new_tokens=6, min_new_tokens=3, stop=("3", "4")),
}


def served(model, tmp_path, *doubles, timeout=20.0, retries=2, lora=None):
    """A generator of a policy that is not the one that the servers began with."""
    policy = load_causal_lm(gw.ModelCfg(path=str(model), lora=lora), SamplingCfg(max_new_tokens=4))
    moved(policy)
    clients = [HttpClient(double.url, timeout=timeout, retries=retries) for double in doubles]
    servers = [VLLMServer(client, adapters=policy.has_adapters) for client in clients]
    return ServedGenerator(servers, policy, tmp_path / "weights")


def native(policy, sampling, **how):
    """What the policy itself would write; a group's seeds follow from its first."""
    seeds = TASK["seeds"][:, :1] + torch.arange(4)
    return complete(policy, TASK["prompts"], seeds, sampling, **how)


def assert_alike(ours, theirs):
    assert [[(c.tokens, c.stop) for c in group] for group in ours] == [[(c.tokens, c.stop) for c in g] for g in theirs]
    numbers = [torch.tensor([p for group in groups for c in group for p in c.log_probs]) for groups in (ours, theirs)]
    torch.testing.assert_close(*numbers, rtol=1e-5, atol=1e-5)


def settings(*servers, **more):
    return {"name": "server", "urls": [server.url for server in servers], "timeout": 20, "retries": 2} | more


def assert_native(generate, sampling=SAMPLING["plain"]):
    assert_alike(generate(**TASK, sampling=sampling), native(generate.policy, sampling))


@pytest.mark.parametrize("sampling", SAMPLING.values(), ids=SAMPLING)
def test_servers_write_what_the_policy_would(model, double, tmp_path, sampling):
    with VLLMDouble(model) as second:
        generate = served(model, tmp_path, double, second)
        generate.update(0)
        assert_native(generate, sampling)
        greedy = generate(**TASK, sampling=sampling, deterministic=True)
        assert [[c.tokens for c in g] for g in greedy] == [
            [c.tokens for c in g] for g in native(generate.policy, sampling, deterministic=True)
        ]
        # groups in turn, each whole on one server
        asked = [[prompt for prompt, _ in server.prompts()] for server in (double, second)]
        assert [sorted(prompts) for prompts in asked] == [sorted(2 * TASK["prompts"][::2]), 2 * TASK["prompts"][1:2]]
        assert {size for _, size in double.prompts()} == {4}


def test_adapters_are_served(model, tmp_path):
    with VLLMDouble(model, lora=True) as double:
        generate = served(model, tmp_path, double, lora={"r": 2})
        for iteration in range(2):
            moved(generate.policy)
            generate.update(iteration)
            assert_native(generate)
        assert double.adapter_loads() == 2
        double.restart()  # it has no adapters now
        assert_native(generate)


RECOVERS = [*((VLLMDouble.generate_path, fault) for fault in ("500", "drop", "cut", "version", "restart"))]
RECOVERS += [*VLLMDouble.passing, (VLLMDouble.load_path, "slow")]


def test_faults_that_pass_cost_nothing(model, double, tmp_path, monkeypatch):
    monkeypatch.setattr(http, "_HEALTH_INTERVAL", 0.2)  # a hang is not waited for, but weights that take longer are
    generate = served(model, tmp_path, double, timeout=1000.0)
    for iteration, (path, fault) in enumerate(RECOVERS):
        double.faults[path] = [fault]
        generate.update(iteration)
        assert_native(generate)
        assert double.faults[path] == [], (path, fault)


ENDS = {
    "500": "no answer in 3 tries: status 500: .*EngineDeadError: out of memory.*resume the run",
    "drop": "no answer in 3 tries: RemoteDisconnected",
    "cut": "no answer in 3 tries: ConnectionError: cut .* bytes before the end",
    "slow": "no answer in 3 tries: it took longer than 0.3 s",
    "version": "answered by weights 'another', expected '.*-0'",
    "strange": r"token 1\d{6}, and the model has 15; fix: serve the model that is trained",
    "prompt": "read another prompt",
    "nan": "gave the log-probability None",
    "short": "gave 3 completions, asked for 4",
    "abort": "ended a completion by 'abort'",
}


def test_faults_that_stay_end_clearly(model, double, tmp_path):
    generate = served(model, tmp_path, double)
    generate.update(0)
    client = generate.servers[0]._client
    for fault, message in ENDS.items():
        client.timeout = 0.3 if fault == "slow" else 20.0
        double.faults[double.generate_path] = [fault] * 100
        with pytest.raises(gw.errors.ServerError, match=message):
            generate(**TASK, sampling=SAMPLING["plain"])


def test_servers_that_cannot_be_used_are_refused(model, tmp_path):
    def refused(match, double, **settings):
        with pytest.raises(gw.errors.ServerError, match=match):
            served(model, tmp_path, double, **settings).update(0)

    with VLLMDouble(model) as double:
        double.faults["/reset_prefix_cache"] = ["busy"]
        refused("keeps cached prompts of old weights", double)
        refused("serves no adapters; fix: --enable-lora", double, lora={"r": 2})
        double.config["model_config"]["logprobs_mode"] = "raw_logprobs"
        refused("has logprobs_mode='raw_logprobs', expected 'processed_logprobs'; fix: start it by", double)
        double.server_info = lambda *call: (404, {})
        refused("has no /server_info; fix: start it by groupwise serve", double)
        for info in ({"version": "1"}, [], "hello", {"vllm_config": []}):
            double.server_info = lambda *call, info=info: (200, info)
            refused(r"in another format .*; fix: vLLM 0\.32 or later", double)
    refused("no answer in 3 tries: ConnectionRefusedError", double)


def test_answers_in_another_format_are_refused(model, double, tmp_path):
    generate = served(model, tmp_path, double)
    generate.update(0)
    for answer, message in [
        ((200, {"choices": [{"index": 0, "token_ids": []}]}), r"in another format .*; fix: vLLM 0\.32 or later"),
        ((400, {"error": {"message": "too long"}}), "was refused: status 400: .*too long"),
    ]:
        double.inference_v1_generate = lambda *call, answer=answer: answer
        with pytest.raises(gw.errors.ServerError, match=message):
            generate(**TASK, sampling=SAMPLING["plain"])


def groups_seeded_by_their_first(policy, prompts, seeds, *args, pasts=None, **how):
    """A request of servers begins a group; later turns are requests of single members."""
    if not any(past is not None for past in pasts or ()):
        seeds = seeds[:, :1] + torch.arange(seeds.shape[1])
    return complete(policy, prompts, seeds, *args, pasts=pasts, **how)


TURNS = {"tool": Count(), "max_turns": 3}
PENALTIES = {"max_new_tokens": 4, "repetition_penalty": 1.5, "presence_penalty": 1.0}
RUNS = {
    "turns": (TURNS, gw.GRPOCfg(group_size=4, learning_rate=1e-3), {}),
    "penalties": (TURNS, gw.GRPOCfg(group_size=4, learning_rate=1e-3), {"sampling": PENALTIES}),
    "greedy": ({}, gw.GRPOCfg(group_size=4, learning_rate=1e-3, credit={"baseline": "greedy", "scale": "none"}), {}),
    "ppo": ({}, gw.PPOCfg(learning_rate=1e-3), {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("setup", RUNS)
def test_a_run_on_a_server_is_the_native_run(model, double, tmp_path, monkeypatch, setup):
    task, cfg, more = RUNS[setup]
    few = {"num_prompts": 4, "evaluation": {"interval": 1000, "prompts": 2}} | more
    run = train(copying(**task), model, tmp_path / "served", cfg, generation=settings(double), **few)
    assert all(entry["rollout/sampler_kl"] < 1e-8 for entry in run.metrics())
    monkeypatch.setattr("groupwise.text.build.complete", groups_seeded_by_their_first)
    theirs = train(copying(**task), model, tmp_path / "native", cfg, **few)
    names = ("rollout/sampler_kl", "rollout/sync_seconds")
    for one, other in zip(logged(run, *names), logged(theirs, *names), strict=True):
        assert one == pytest.approx(other, abs=1e-4)
    for name, value in weights(theirs).items():
        torch.testing.assert_close(weights(run)[name], value, rtol=1e-3, atol=1e-4)


def test_no_member_waits_for_the_turns_of_another(model, double, tmp_path):
    """The first member ends its first turn when the other has played all three of its own."""
    begun, over = threading.Event(), threading.Event()

    class Waits(gw.TextEnv):
        def reset(self, *, seed=None, options=None):
            self.left = 3
            return "12", {}

        def step(self, text):
            self.left -= 1
            if text != "check" and not begun.is_set():
                begun.set()
                assert over.wait(20), "the other member waits for this one"
            elif text != "check" and not self.left:
                over.set()
            return "3", float(len(text)), not self.left, False, {}

        def sample_action(self, rng):
            return "check"

    task = gw.TextTask(env=Waits, start_mode="none", max_turns=3, env_threads=2, data_size=2)
    few = {"num_prompts": 1, "total_steps": None, "total_iterations": 1, "evaluation": {"interval": 1000, "prompts": 1}}
    stops = {"max_new_tokens": 4, "stop": list("0123456789")}
    cfg = gw.GRPOCfg(group_size=2, learning_rate=1e-3)
    run = train(task, model, tmp_path / "run", cfg, generation=settings(double), sampling=stops, **few)
    assert over.is_set()
    [entry] = run.metrics()
    assert entry["rollout/turns_mean"] == 3
    assert entry["rollout/sampler_kl"] < 1e-8


class Steps(gw.TextEnv):
    """Two turns; ``happening`` is called in each, with the turn's text."""

    happening = None

    def reset(self, *, seed=None, options=None):
        self.left = 2
        return "12", {}

    def step(self, text):
        self.left -= 1
        if text != "check":
            type(self).happening()
        return "3", float(len(text)), not self.left, False, {}

    def sample_action(self, rng):
        return "check"


def many(model, tmp_path, double, env, **more):
    task = gw.TextTask(env=env, start_mode="none", max_turns=2, env_threads=8, data_size=2)
    few = {"num_prompts": 1, "total_steps": None, "total_iterations": 1, "evaluation": {"interval": 1000, "prompts": 1}}
    few["sampling"] = {"max_new_tokens": 4, "stop": list("0123456789")}
    cfg = gw.GRPOCfg(group_size=8, learning_rate=1e-3)
    return train(task, model, tmp_path / "run", cfg, generation=settings(double), **few | more)


def test_a_server_that_lost_its_weights_gets_them_once_however_many_members_find_out(model, double, tmp_path, caplog):
    lock, calls = threading.Barrier(8, timeout=20), itertools.count()

    def restart():
        if (number := next(calls)) >= 8:  # a later turn
            return
        lock.wait()
        if number == 7:
            double.restart()
        lock.wait()

    class Restarts(Steps):
        happening = staticmethod(restart)

    many(model, tmp_path, double, Restarts)
    assert caplog.text.count("it gets the weights again") == 1


def test_an_error_of_one_member_ends_the_rollout_at_once(model, double, tmp_path):
    first, over = itertools.count(), threading.Event()

    def fail():
        if next(first):
            over.wait(60)
        raise ValueError("broken")

    class Breaks(Steps):
        happening = staticmethod(fail)

    begun = time.monotonic()
    with pytest.raises(gw.errors.EnvError, match="broken"):
        many(model, tmp_path, double, Breaks)
    assert time.monotonic() - begun < 50
    over.set()


def test_a_run_whose_server_dies_is_resumed_and_loses_nothing(model, double, tmp_path):
    few = {"total_steps": 60, "num_prompts": 2, "evaluation": {"interval": 1000}}
    whole = train(copying(), model, tmp_path / "whole", generation=settings(double), **few)
    calls = len(double.prompts())
    double.faults[double.generate_path] = [None] * (calls // 2 + 1) + ["drop"] * 50
    task = copying()
    with pytest.raises(gw.errors.ServerError, match="no answer in 3 tries"):
        train(task, model, tmp_path / "part", generation=settings(double), **few)
    double.faults.clear()
    double.restart()
    again = gw.resume(tmp_path / "part", **task.given)
    assert logged(again, "eval/", "rollout/sync_seconds")[-1] == logged(whole, "eval/", "rollout/sync_seconds")[-1]
    assert same_weights(again, whole)


def test_tokens_that_the_policy_did_not_write_stop_the_run(model, double, tmp_path):
    double.faults[double.generate_path] = ["shifted"] * 100
    sharp = {"sampling": {"max_new_tokens": 4, "temperature": 0.05}}
    with pytest.raises(gw.errors.SamplerMismatchError, match="sampler and trainer differ"):
        train(copying(), model, tmp_path / "run", generation=settings(double), **sharp)


def test_settings_that_cannot_be_are_refused(model, double, tmp_path):
    for generation, message in [
        ({"name": "server", "urls": []}, "has 0 urls and python='None'; fix: one of them"),
        (settings(double, python="py"), "has 1 urls and python='py'; fix: one of them"),
        ({"name": "server", "urls": ["localhost:8000"]}, "urls"),
        ({"name": "server", "urls": ["http://localhost:99999"]}, "urls = 'http://localhost:99999': Port out of range"),
        (settings(double, args=["--enforce-eager"]), "are of a server that the run starts"),
    ]:
        with pytest.raises(gw.errors.ConfigError, match=message):
            train(copying(), model, tmp_path / "run", generation=generation)
    with pytest.raises(gw.errors.ConfigError, match="gives no tokens that top_k, top_p and min_p keep"):
        train(copying(), model, tmp_path / "run", generation=settings(double), sampling={"top_k": 5})
    with pytest.raises(gw.errors.ConfigError, match=r"presence_penalty=-2\.5: vLLM takes -2 to 2; fix: "):
        train(copying(), model, tmp_path / "run", generation=settings(double), sampling={"presence_penalty": -2.5})
    with pytest.raises(gw.errors.ConfigError, match="vLLM takes no DoRA adapters; fix: generation='native'"):
        train(copying(), model, tmp_path / "run", generation=settings(double), lora={"r": 2, "dora": True})
    cfg = TextRunCfg(generation={"name": "server", "python": "/usr/bin/python3"})
    for engine, message in [
        (Engine(), "made in Python is in no folder"),
        (TwoThreads(0, None, None), "2 processes cannot share a server of one; fix: generation.urls"),
    ]:
        with pytest.raises(gw.errors.ConfigError, match=message):
            build.connect(cfg, CausalLM(tiny_model()), engine)


def test_ranks_share_servers_which_get_the_weights_of_the_first_also_when_they_lost_them(model, double, tmp_path):
    double.holds_requests = True  # of one rank, while the other gives the weights again

    def work(engine):
        policy = moved(load_causal_lm(gw.ModelCfg(path=str(model)), SamplingCfg(max_new_tokens=4)))
        servers = [VLLMServer(HttpClient(double.url, timeout=20.0, retries=0), adapters=False)]
        generate = ServedGenerator(servers, policy, tmp_path / f"rank{engine.rank}", engine)
        for iteration in range(2):
            generate.update(iteration)
            engine.meeting.wait(20)
            if iteration and engine.rank == 0:
                double.restart()
            engine.meeting.wait(20)
        found = generate(**TASK, sampling=SAMPLING["plain"])  # both find out, and give the weights again
        return found if engine.rank else native(policy, SAMPLING["plain"])

    expected, found = in_two_threads(work)
    assert_alike(found, expected)
    assert [path.name.partition("-")[2] for path in (tmp_path / "rank0").iterdir() if path.is_dir()] == ["1"]
    assert not (tmp_path / "rank1").exists()


def test_one_version_of_the_weights_lies_on_the_disk_and_none_in_the_end(model, double, tmp_path):
    folders = tmp_path / "weights"
    seen = []
    watch = on("rollout_end", lambda *_: seen.append(len(list(folders.iterdir()))))
    double.faults[double.load_path] = [None, "500", "500", "500"]
    generation, task = settings(double, weights_dir=str(folders)), copying()
    with pytest.raises(gw.errors.ServerError, match="no answer in 3 tries"):
        train(task, model, tmp_path / "run", generation=generation, total_steps=60, callbacks=[watch])
    assert list(folders.iterdir()) == []
    gw.resume(tmp_path / "run", callbacks=[watch], **task.given)
    assert set(seen) == {1}
    assert list(folders.iterdir()) == []


@pytest.mark.parametrize("where", ["groupwise.run.RunFolder.create", "groupwise.text.served.TextCollector.__init__"])
def test_an_error_before_the_first_iteration_ends_the_server_of_the_run(model, tmp_path, monkeypatch, where):
    started = []

    class Seen(LocalServer):
        def wait(self):
            super().wait()
            started.append(self)

    def fail(*args, **options):
        raise gw.errors.RunFolderError("no room")

    monkeypatch.setattr("groupwise.serving.LocalServer", Seen)
    monkeypatch.setattr(where, fail)
    generation = {"name": "server", "python": str(python_of_files(tmp_path))}
    with pytest.raises(gw.errors.RunFolderError, match="no room"):
        train(copying(), model, tmp_path / "run", generation=generation)
    [server] = started
    assert not is_healthy(server.url)


@pytest.mark.slow
def test_a_run_has_a_server_of_its_own_whose_errors_end_it(model, tmp_path):
    dying = shutil.copytree(model, tmp_path / "dying")
    (dying / "dies").touch()  # at its third answer
    generation = {"name": "server", "python": str(python_of_double(tmp_path)), "retries": 1}
    errors = r"no answer in 2 tries: .*its errors:\nRuntimeError: no memory\nits last lines:"
    with pytest.raises(gw.errors.ServerError, match=errors):
        train(copying(), dying, tmp_path / "run", generation=generation, num_prompts=2)
    (entry,) = RunFolder(tmp_path / "run").read_metrics()
    assert entry["rollout/sampler_kl"] < 1e-8


def test_failures_of_calls_count_for_their_thread_alone():
    client = HttpClient("http://127.0.0.1:9", timeout=5.0, retries=0)

    def fail():
        with pytest.raises(gw.errors.ServerError, match="no answer in 1 tries"):
            client.call("/health")
        return client.failures

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(fail).result() == 1
    assert client.failures == 0


def test_an_interrupt_does_not_wait_for_a_rollout(model, tmp_path, monkeypatch):
    monkeypatch.setattr(http, "_HEALTH_INTERVAL", 60.0)
    with VLLMDouble(model) as double:
        double.seconds_of_a_hang, double.faults[GENERATE] = 60.0, ["hang"]
        generate = served(model, tmp_path, double)
        with ThreadPoolExecutor(1) as pool:
            began = pool.submit(interrupt_once_called, double, GENERATE)
            with pytest.raises(KeyboardInterrupt):
                generate([[4]], torch.tensor([[1]]), SamplingCfg(max_new_tokens=1))
        generate.close()
        assert time.monotonic() - began.result() < 10


def test_an_interrupt_lets_a_server_finish_loading(model, tmp_path):
    with VLLMDouble(model) as double:
        double.faults[double.load_path] = ["slow"]
        generate = served(model, tmp_path, double)
        with ThreadPoolExecutor(1) as pool:
            pool.submit(interrupt_once_called, double, double.load_path)
            with pytest.raises(KeyboardInterrupt):
                generate.update(0)
        generate.close()
        assert double.version.endswith("-0")
        assert not double._paused


def interrupt_once_called(double, path):
    """Interrupt the main thread as soon as a call has met its fault, at the latest after 20 s; returns the time."""
    until = time.monotonic() + 20
    while double.faults[path] and time.monotonic() < until:
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGINT)
    return time.monotonic()


def test_an_interrupt_does_not_wait_for_servers_that_load_weights(model, tmp_path, monkeypatch):
    monkeypatch.setattr(http, "_HEALTH_INTERVAL", 60.0)
    monkeypatch.setattr(serving, "_SECONDS_TO_LOAD", 0.3)
    with VLLMDouble(model) as double:
        double.seconds_of_a_hang = 60.0
        generate = served(model, tmp_path, double)
        double.faults[double.load_path] = ["hang"]
        with ThreadPoolExecutor(1) as pool:
            loading = pool.submit(generate.update, 0)
            while double.faults[double.load_path]:
                time.sleep(0.01)
            begun = time.monotonic()
            generate.close()
            with pytest.raises(gw.errors.ServerError, match="the client was closed"):
                loading.result()
        assert time.monotonic() - begun < 10
    assert list((tmp_path / "weights").iterdir()) == []
