"""Training on completions of servers: equal to the native generator, and what faults do."""

import shutil
import threading

import pytest
import torch
from safetensors.torch import load_file
from served_groups import SAMPLING, TASK, assert_alike, move, native, served
from server_double import ServerDouble
from text_runs import copying, train
from tiny_models import tiny_model
from two_ranks import TwoThreads
from vllm_double import VLLMDouble, python_of_double

import groupwise as gw
from groupwise import serving as http
from groupwise.config.policy import SamplingCfg
from groupwise.engines import Engine
from groupwise.serving import HttpClient, LocalServer, VLLMServer
from groupwise.text.generation import complete
from groupwise.text.load import load_causal_lm
from groupwise.text.policy import CausalLM
from groupwise.text.served import ServedGenerator
from groupwise.text.tools import Tool


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(http, "_FIRST_WAIT", 0.01)


@pytest.fixture
def double(model):
    with VLLMDouble(model) as server:
        yield server


def settings(*servers, **more):
    return {"name": "server", "urls": [server.url for server in servers], "timeout": 20, "retries": 2} | more


@pytest.mark.parametrize("sampling", SAMPLING.values(), ids=SAMPLING)
def test_servers_write_what_the_policy_would(model, double, tmp_path, sampling):
    with VLLMDouble(model) as second:
        generate = served(model, tmp_path, double, second)
        generate.update(0)
        assert_alike(generate(**TASK, sampling=sampling), native(generate.policy, sampling))
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
            move(generate.policy)
            generate.update(iteration)
            assert_alike(generate(**TASK, sampling=SAMPLING["plain"]), native(generate.policy, SAMPLING["plain"]))
        assert double.adapter_loads() == 2
        double.restart()  # it has no adapters now
        assert_alike(generate(**TASK, sampling=SAMPLING["plain"]), native(generate.policy, SAMPLING["plain"]))


RECOVERS = [(VLLMDouble.generate_path, fault) for fault in ("500", "drop", "cut", "slow", "version", "restart", "hang")]
RECOVERS += VLLMDouble.passing


@pytest.mark.parametrize(("path", "fault"), RECOVERS)
def test_a_fault_that_passes_costs_nothing(model, double, tmp_path, monkeypatch, path, fault):
    generate = served(
        model, tmp_path, double, timeout={"slow": 0.3, "hang": 1000.0}.get(fault, 20.0)
    )  # a hang is not waited for
    if fault == "hang":
        monkeypatch.setattr(http, "_HEALTH_INTERVAL", 0.2)
    double.faults[path] = [fault]
    generate.update(0)
    assert_alike(generate(**TASK, sampling=SAMPLING["plain"]), native(generate.policy, SAMPLING["plain"]))
    assert double.faults[path] == []


ENDS = {
    "500": "no answer in 3 tries: status 500: .*EngineDeadError: out of memory.*resume the run",
    "drop": "no answer in 3 tries: RemoteDisconnected",
    "cut": "no answer in 3 tries: the connection was cut, .* bytes before the end",
    "slow": "no answer in 3 tries: it took longer than 0.3 s",
    "version": "answered by weights 'another', expected '.*-0'",
    "strange": r"token 1\d{6}, and the model has 15; fix: serve the model that is trained",
    "prompt": "read another prompt",
    "nan": "gave the log-probability None",
    "short": "gave 3 completions, asked for 4",
    "abort": "ended a completion by 'abort'",
}


@pytest.mark.parametrize("fault", ENDS)
def test_a_fault_that_stays_ends_clearly(model, double, tmp_path, fault):
    generate = served(model, tmp_path, double, timeout=0.3 if fault == "slow" else 20.0)
    generate.update(0)
    double.faults[double.generate_path] = [fault] * 100
    with pytest.raises(gw.errors.ServerError, match=ENDS[fault]):
        generate(**TASK, sampling=SAMPLING["plain"])


def test_old_weights_in_the_cache_end_clearly(model, tmp_path):
    with VLLMDouble(model) as double:
        double.faults["/reset_prefix_cache"] = ["busy"]
        with pytest.raises(gw.errors.ServerError, match="keeps cached prompts of the old weights"):
            served(model, tmp_path, double).update(0)


def test_no_server_and_one_with_other_log_probs_are_refused(model, tmp_path):
    with (
        VLLMDouble(model, logprobs_mode="raw_logprobs") as double,
        pytest.raises(
            gw.errors.ServerError,
            match="has logprobs_mode='raw_logprobs', expected 'processed_logprobs'; fix: start it by groupwise serve",
        ),
    ):
        served(model, tmp_path, double)
    with pytest.raises(gw.errors.ServerError, match="no answer in 3 tries: ConnectionRefusedError"):
        served(model, tmp_path, double)
    with (
        VLLMDouble(model) as double,
        pytest.raises(gw.errors.ServerError, match="serves no adapters; fix: --enable-lora"),
    ):
        served(model, tmp_path, double, lora={"r": 2})


class Foreign(ServerDouble):
    """Another server, which may have a ``/server_info``."""

    info = None

    def server_info(self, body, query, fault):
        return (404, {}) if self.info is None else (200, self.info)


def test_other_servers_are_refused(model, tmp_path):
    with Foreign(model) as foreign:
        with pytest.raises(gw.errors.ServerError, match=r"has no /server_info; fix: start it by groupwise serve"):
            served(model, tmp_path, foreign)
        for info in ({"version": "1"}, [], "hello", {"vllm_config": []}):
            foreign.info = info
            with pytest.raises(gw.errors.ServerError, match=r"in another format .*; fix: vLLM 0\.32 or later"):
                served(model, tmp_path, foreign)


def test_answers_in_another_format_are_refused(model, double, tmp_path):
    generate = served(model, tmp_path, double)
    generate.update(0)
    double.inference_v1_generate = lambda *call: (200, {"choices": [{"index": 0, "token_ids": []}]})
    with pytest.raises(gw.errors.ServerError, match=r"in another format .*; fix: vLLM 0\.32 or later"):
        generate(**TASK, sampling=SAMPLING["plain"])
    double.inference_v1_generate = lambda *call: (400, {"error": {"message": "too long"}})
    with pytest.raises(gw.errors.ServerError, match=r"was refused: status 400: .*too long"):
        generate(**TASK, sampling=SAMPLING["plain"])


def test_weights_that_take_long_are_waited_for(model, double, tmp_path, monkeypatch):
    monkeypatch.setattr(http, "_HEALTH_INTERVAL", 0.3)
    generate = served(model, tmp_path, double, retries=0)
    double.faults[double.load_path] = ["slow"]
    generate.update(0)
    assert double.version.endswith("-0")


def weights(run):
    return load_file(run.path / "checkpoints" / "latest" / "policy.safetensors")


def groups_seeded_by_their_first(policy, prompts, seeds, *args, **how):
    return complete(policy, prompts, seeds[:, :1] + torch.arange(seeds.shape[1]), *args, **how)


def without(run, *names):
    return [{k: v for k, v in entry.items() if not k.startswith(("time/", *names))} for entry in run.metrics()]


class Count(Tool):
    """Ends turns at some digits, and answers with how many characters they have."""

    stop = ("5", "6", "7")

    def __call__(self, text):
        return str(len(text)) if text.endswith(self.stop) else None


RUNS = {
    "groups": ({}, gw.GRPOCfg(group_size=4, learning_rate=1e-3)),
    "turns": ({"tool": Count(), "max_turns": 3}, gw.GRPOCfg(group_size=4, learning_rate=1e-3)),
    "greedy": ({}, gw.GRPOCfg(group_size=4, learning_rate=1e-3, credit={"baseline": "greedy", "scale": "none"})),
    "ppo": ({}, gw.PPOCfg(learning_rate=1e-3)),
}


@pytest.mark.slow
@pytest.mark.parametrize("setup", RUNS)
def test_a_run_on_a_server_is_the_native_run(model, double, tmp_path, monkeypatch, setup):
    task, cfg = RUNS[setup]
    few = {"num_prompts": 4, "evaluation": {"interval": 1000, "prompts": 2}}
    run = train(copying(**task), model, tmp_path / "served", cfg, generation=settings(double), **few)
    assert all(entry["rollout/sampler_kl"] < 1e-8 for entry in run.metrics())
    monkeypatch.setattr("groupwise.text.build.complete", groups_seeded_by_their_first)
    theirs = train(copying(**task), model, tmp_path / "native", cfg, **few)
    names = ("rollout/sampler_kl", "rollout/sync_seconds")
    for one, other in zip(without(run, *names), without(theirs, *names), strict=True):
        assert one == pytest.approx(other, abs=1e-4)
    for name, value in weights(theirs).items():
        torch.testing.assert_close(weights(run)[name], value, rtol=1e-3, atol=1e-4)


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
    assert without(again, "eval/", "rollout/sync_seconds")[-1] == without(whole, "eval/", "rollout/sync_seconds")[-1]
    assert all(torch.equal(weights(again)[name], value) for name, value in weights(whole).items())


def test_tokens_that_the_policy_did_not_write_stop_the_run(model, double, tmp_path):
    double.faults[double.generate_path] = ["shifted"] * 100
    sharp = {"sampling": {"max_new_tokens": 4, "temperature": 0.05}}
    with pytest.raises(gw.errors.SamplerMismatchError, match="sampler and trainer differ"):
        train(copying(), model, tmp_path / "run", generation=settings(double), **sharp)


def test_settings_that_cannot_be_are_refused(model, double, tmp_path):
    for generation, said in [
        ({"name": "server", "urls": []}, "has 0 urls and python='None'; fix: one of the two"),
        (settings(double, python="py"), "has 1 urls and python='py'; fix: one of the two"),
        ({"name": "server", "urls": ["localhost:8000"]}, "urls"),
        (settings(double, args=["--enforce-eager"]), "are of a server that the run starts"),
    ]:
        with pytest.raises(gw.errors.ConfigError, match=said):
            train(copying(), model, tmp_path / "run", generation=generation)
    with pytest.raises(gw.errors.ConfigError, match="gives no tokens that top_k, top_p and min_p keep"):
        train(copying(), model, tmp_path / "run", generation=settings(double), sampling={"top_k": 5})


def test_a_policy_without_a_folder_has_no_server_of_its_own(tmp_path):
    from groupwise.config.run import TextRunCfg
    from groupwise.text.build import connect

    cfg = TextRunCfg(generation={"name": "server", "python": "/usr/bin/python3"})
    with pytest.raises(gw.errors.ConfigError, match="made in Python is in no folder"):
        connect(cfg, CausalLM(tiny_model()), Engine())
    with pytest.raises(gw.errors.ConfigError, match="2 processes cannot share a server of one; fix: groupwise serve"):
        connect(cfg, CausalLM(tiny_model()), TwoThreads(0, None, None))


def test_ranks_share_servers_and_the_weights_of_the_first(model, double, tmp_path):
    found, table, meeting = [None, None], [None, None], threading.Barrier(2)

    def work(rank):
        policy = load_causal_lm(gw.ModelCfg(path=str(model)), SamplingCfg(max_new_tokens=4))
        move(policy)
        servers = [VLLMServer(HttpClient(double.url, timeout=20.0, retries=0), adapters=False)]
        generate = ServedGenerator(servers, policy, tmp_path / f"rank{rank}", TwoThreads(rank, meeting, table))
        for iteration in range(2):
            generate.update(iteration)
            meeting.wait(20)
            if iteration and rank == 1:
                found[1] = generate(**TASK, sampling=SAMPLING["plain"])
                double.restart()
                with pytest.raises(gw.errors.ServerError, match="answered by weights"):
                    generate(**TASK, sampling=SAMPLING["plain"])
            meeting.wait(20)
        found[0] = native(policy, SAMPLING["plain"]) if rank == 0 else found[0]

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert_alike(found[1], found[0])
    assert [path.name.partition("-")[2] for path in (tmp_path / "rank0").iterdir() if path.is_dir()] == ["1"]
    assert not (tmp_path / "rank1").exists()


def test_one_version_of_the_weights_lies_on_the_disk_and_none_in_the_end(model, double, tmp_path):
    folders = tmp_path / "weights"
    seen = []
    watch = gw.Callback()
    watch.on_rollout_end = lambda trainer, rollout: seen.append(len(list(folders.iterdir())))
    double.faults[double.load_path] = [None, "500", "500", "500"]
    generation, task = settings(double, weights_dir=str(folders)), copying()
    with pytest.raises(gw.errors.ServerError, match="no answer in 3 tries"):
        train(task, model, tmp_path / "run", generation=generation, total_steps=60, callbacks=[watch])
    assert list(folders.iterdir()) == []
    gw.resume(tmp_path / "run", callbacks=[watch], **task.given)
    assert set(seen) == {1}
    assert list(folders.iterdir()) == []


@pytest.mark.parametrize("where", ["the folder", "the collector"])
def test_an_error_before_the_first_iteration_ends_the_server_of_the_run(model, tmp_path, monkeypatch, where):
    started = []

    class Seen(LocalServer):
        def wait(self):
            super().wait()
            started.append(self)

    def fail(*args, **options):
        raise gw.errors.RunFolderError("no room")

    monkeypatch.setattr("groupwise.serving.LocalServer", Seen)
    if where == "the folder":
        monkeypatch.setattr("groupwise.run.RunFolder.create", fail)
    else:
        monkeypatch.setattr("groupwise.text.served.TextCollector.__init__", fail)
    generation = {"name": "server", "python": str(python_of_double(tmp_path))}
    with pytest.raises(gw.errors.RunFolderError, match="no room"):
        train(copying(), model, tmp_path / "run", generation=generation)
    [server] = started
    assert not server.is_healthy()


@pytest.mark.slow
def test_a_run_has_a_server_of_its_own(model, double, tmp_path):
    generation = {"name": "server", "python": str(python_of_double(tmp_path)), "retries": 1}
    run = train(copying(), model, tmp_path / "run", generation=settings(double))
    again = train(copying(), model, tmp_path / "again", generation=generation)
    assert all(entry["rollout/sampler_kl"] < 1e-8 for entry in again.metrics())
    assert all(torch.equal(weights(again)[name], value) for name, value in weights(run).items())
    dying = shutil.copytree(model, tmp_path / "dying")
    (dying / "dies").write_text("always")
    with pytest.raises(
        gw.errors.ServerError, match=r"no answer in 2 tries: .*its errors:\nRuntimeError: no memory\nits last lines:"
    ):
        train(copying(), dying, tmp_path / "lost", generation=generation)
