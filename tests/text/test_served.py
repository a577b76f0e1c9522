"""Training on completions of servers: equal to the native generator, and what faults do."""

import shutil

import pytest
import torch
from served_groups import SAMPLING, TASK, assert_alike, native, served
from text_runs import Count, copying, logged, same_weights, train, weights
from tiny_models import moved, tiny_model
from two_ranks import TwoThreads, in_two_threads
from vllm_double import VLLMDouble, python_of_double, python_of_files

import groupwise as gw
from groupwise import serving as http
from groupwise.config.policy import SamplingCfg
from groupwise.config.run import TextRunCfg
from groupwise.engines import Engine
from groupwise.serving import HttpClient, LocalServer, VLLMServer, is_healthy
from groupwise.text.build import connect
from groupwise.text.generation import complete
from groupwise.text.load import load_causal_lm
from groupwise.text.policy import CausalLM
from groupwise.text.served import ServedGenerator


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


RECOVERS = [(VLLMDouble.generate_path, fault) for fault in ("500", "drop", "cut", "slow", "version", "restart", "hang")]
RECOVERS += VLLMDouble.passing


@pytest.mark.parametrize(("path", "fault"), RECOVERS)
def test_a_fault_that_passes_costs_nothing(model, double, tmp_path, monkeypatch, path, fault):
    # a hang is not waited for
    generate = served(model, tmp_path, double, timeout={"slow": 0.3, "hang": 1000.0}.get(fault, 20.0))
    if fault == "hang":
        monkeypatch.setattr(http, "_HEALTH_INTERVAL", 0.2)
    double.faults[path] = [fault]
    generate.update(0)
    assert_native(generate)
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


def test_servers_that_cannot_be_used_are_refused(model, tmp_path):
    def refused(match, double, **settings):
        with pytest.raises(gw.errors.ServerError, match=match):
            served(model, tmp_path, double, **settings).update(0)

    with VLLMDouble(model) as double:
        double.faults["/reset_prefix_cache"] = ["busy"]
        refused("keeps cached prompts of the old weights", double)
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
    for answer, said in [
        ((200, {"choices": [{"index": 0, "token_ids": []}]}), r"in another format .*; fix: vLLM 0\.32 or later"),
        ((400, {"error": {"message": "too long"}}), "was refused: status 400: .*too long"),
    ]:
        double.inference_v1_generate = lambda *call, answer=answer: answer
        with pytest.raises(gw.errors.ServerError, match=said):
            generate(**TASK, sampling=SAMPLING["plain"])


def test_weights_that_take_long_are_waited_for(model, double, tmp_path, monkeypatch):
    monkeypatch.setattr(http, "_HEALTH_INTERVAL", 0.3)
    generate = served(model, tmp_path, double, retries=0)
    double.faults[double.load_path] = ["slow"]
    generate.update(0)
    assert double.version.endswith("-0")


def groups_seeded_by_their_first(policy, prompts, seeds, *args, **how):
    return complete(policy, prompts, seeds[:, :1] + torch.arange(seeds.shape[1]), *args, **how)


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
    for one, other in zip(logged(run, *names), logged(theirs, *names), strict=True):
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
    assert logged(again, "eval/", "rollout/sync_seconds")[-1] == logged(whole, "eval/", "rollout/sync_seconds")[-1]
    assert same_weights(again, whole)


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
    cfg = TextRunCfg(generation={"name": "server", "python": "/usr/bin/python3"})
    for engine, said in [
        (Engine(), "made in Python is in no folder"),
        (TwoThreads(0, None, None), "2 processes cannot share a server of one; fix: groupwise serve"),
    ]:
        with pytest.raises(gw.errors.ConfigError, match=said):
            connect(cfg, CausalLM(tiny_model()), engine)


def test_ranks_share_servers_and_the_weights_of_the_first(model, double, tmp_path):
    def work(engine):
        policy = moved(load_causal_lm(gw.ModelCfg(path=str(model)), SamplingCfg(max_new_tokens=4)))
        servers = [VLLMServer(HttpClient(double.url, timeout=20.0, retries=0), adapters=False)]
        generate, found = ServedGenerator(servers, policy, tmp_path / f"rank{engine.rank}", engine), None
        for iteration in range(2):
            generate.update(iteration)
            engine.meeting.wait(20)
            if iteration and engine.rank == 1:
                found = generate(**TASK, sampling=SAMPLING["plain"])
                double.restart()
                with pytest.raises(gw.errors.ServerError, match="answered by weights"):
                    generate(**TASK, sampling=SAMPLING["plain"])
            engine.meeting.wait(20)
        return found or native(policy, SAMPLING["plain"])

    expected, found = in_two_threads(work)
    assert_alike(found, expected)
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
def test_a_run_has_a_server_of_its_own(model, double, tmp_path):
    generation = {"name": "server", "python": str(python_of_double(tmp_path)), "retries": 1}
    run = train(copying(), model, tmp_path / "run", generation=settings(double))
    again = train(copying(), model, tmp_path / "again", generation=generation)
    assert all(entry["rollout/sampler_kl"] < 1e-8 for entry in again.metrics())
    assert same_weights(again, run)
    dying = shutil.copytree(model, tmp_path / "dying")
    (dying / "dies").touch()
    cfg = gw.GRPOCfg(group_size=4, objective={"old_log_prob": "sampled"})
    errors = r"no answer in 2 tries: .*its errors:\nRuntimeError: no memory\nits last lines:"
    with pytest.raises(gw.errors.ServerError, match=errors):
        train(copying(), dying, tmp_path / "lost", cfg, generation=generation | {"max_staleness": 1})
