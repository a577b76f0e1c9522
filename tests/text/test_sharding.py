"""``engine="fsdp"``: ranks that hold parts train what one process trains on all the rows."""

import shutil
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from forked import Script, run_script
from sharded_runs import CASES, ON_THE_HOST, updated
from text_runs import save_model
from tiny_models import tiny_model
from torch.distributed.fsdp import CPUOffloadPolicy
from two_ranks import in_two_threads

import groupwise as gw
from groupwise import run
from groupwise.algorithms.memory import EqualMicroBatches
from groupwise.engines import Engine, backend_of, from_environment
from groupwise.report.folder import RunFolder
from groupwise.text import sharding
from groupwise.text.policy import CausalLM
from groupwise.text.sharding import ShardedEngine
from groupwise.training.checkpoint import load_checkpoint

SCRIPT = Path(__file__).parents[1] / "support" / "sharded_runs.py"


def finish(*args, ranks=1):
    run_script(SCRIPT, *args, ranks=ranks)


@pytest.fixture(scope="module")
def updates(tmp_path_factory):
    folder = tmp_path_factory.mktemp("updates")
    finish("updates", folder / "two", ranks=2)
    one = {case: updated(Engine(), **settings) for case, settings in CASES.items()}
    return [one, *(torch.load(folder / name, weights_only=True) for name in ("two.0", "two.1"))]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_parts_of_two_ranks_are_trained_as_one_process_on_all_rows(updates, case):
    one, first, second = (found[case] for found in updates)
    # rounding of bfloat16, by 1 part in 256, depends on which rows are computed together, and on the CPU
    off = 1e-6 if case not in ("half", "tied") else 1 / 256
    for name, parameter in one["policy"].items():
        torch.testing.assert_close(first["policy"][name], parameter, atol=off, rtol=0, msg=name)
        assert torch.equal(first["policy"][name], second["policy"][name])
    assert first["metrics"] == second["metrics"]
    for name, value in one["metrics"].items():
        assert first["metrics"][name] == pytest.approx(value, abs=10 * off, rel=10 * off), name


@pytest.mark.slow
@pytest.mark.parametrize("case", ["adam", "adapters", "reference"])
def test_the_state_is_whole_on_rank_0_and_each_rank_holds_half_of_it(updates, case):
    held, part, rest = (found[case]["held"] for found in updates)
    assert part + rest == held
    assert part <= 0.51 * held
    one, first, second = (found[case]["state"] for found in updates)
    for state in (first, second):
        assert state["optimizer"]["param_groups"] == one["optimizer"]["param_groups"]
        assert state["optimizer"]["state"].keys() == one["optimizer"]["state"].keys()
    for index, entries in one["optimizer"]["state"].items():
        for name, value in entries.items():
            torch.testing.assert_close(first["optimizer"]["state"][index][name], value, atol=1e-6, rtol=0)
            assert second["optimizer"]["state"][index][name].shape == value.shape
    for name, value in one.get("reference", {}).items():
        torch.testing.assert_close(first["reference"][name], value, atol=1e-6, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("case", ON_THE_HOST)
def test_parts_on_the_host_are_trained_to_the_same_bits(updates, case):
    for found in updates[1:]:
        host, device = found[f"{case} on the host"], found[case]
        assert (host["metrics"], host["held"]) == (device["metrics"], device["held"])
        for what in ("policy", "state"):
            torch.testing.assert_close(host[what], device[what], atol=0, rtol=0)


@pytest.mark.parametrize("offload", [False, True])
def test_every_part_is_offloaded_or_none(monkeypatch, offload):
    policies, divide = [], sharding.fully_shard

    def recorded(module, *, offload_policy, **options):
        policies.append(offload_policy)
        return divide(module, offload_policy=offload_policy, **options)

    monkeypatch.setattr(sharding, "fully_shard", recorded)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        policy = CausalLM(tiny_model())
        ShardedEngine("cpu", 60.0, cpu_offload=offload).learner(policy)
    finally:
        dist.destroy_process_group()
    assert len(policies) == len(policy.blocks()) + 1
    assert all(isinstance(found, CPUOffloadPolicy) == offload for found in policies)


def test_settings_reach_the_engine_and_those_that_cannot_be_are_refused(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert type(from_environment("cpu", ShardedEngine)) is Engine
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(sharding, "ShardedEngine", lambda *args, **options: (*args, options))
    for offload in (False, True):
        cfg = gw.TextRunCfg(engine="fsdp", cpu_offload=offload, device="cpu", ddp_timeout=9.0)
        assert run._engine(cfg) == ("cpu", 9.0, {"cpu_offload": offload})
        assert backend_of("cpu", offload) == "gloo"
        assert backend_of("cuda", offload) == ("cpu:gloo,cuda:nccl" if offload else "nccl")
    for settings, message in [
        ({"engine": "fsdp", "model": {"quantization": "int8", "lora": {"r": 4}}}, "engine='fsdp' .*model.quantization"),
        ({"cpu_offload": True}, "cpu_offload=True .* engine='ddp'; fix: engine='fsdp'"),
    ]:
        with pytest.raises(gw.errors.ConfigError, match=message):
            gw.TextRunCfg(**settings)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of two iterations by two ranks."""
    folder = tmp_path_factory.mktemp("runs")
    save_model(folder / "model")
    finish("train", folder / "run", 2, ranks=2)
    return folder / "run"


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 3])
def test_a_run_goes_on_with_another_number_of_ranks(trained, tmp_path, ranks):
    shutil.copytree(trained, tmp_path / "run")
    saved = load_checkpoint(tmp_path / "run" / "checkpoints" / "latest")
    finish("resume", tmp_path / "run", 4, ranks=ranks)
    loaded = torch.load(tmp_path / "run.loaded", weights_only=True)
    state, expected = loaded["state"], saved.state["algorithm"]
    assert len(expected["optimizer"]["state"]) > 10
    for found, wanted in [
        (loaded["policy"], saved.policy),
        (state["optimizer"]["state"], expected["optimizer"]["state"]),
        (state["reference"], expected["reference"]),
    ]:
        torch.testing.assert_close(found, wanted, atol=0, rtol=0)
    assert loaded["position"] == 16 // ranks
    run = RunFolder(tmp_path / "run")
    assert [entry["iteration"] for entry in run.read_metrics()] == [1, 2, 3, 4]
    # what is trained is what generates
    assert all(entry["rollout/sampler_kl"] < 1e-8 for entry in run.read_metrics())
    after = load_checkpoint(run.latest)
    assert after.state["iteration"] == 4
    assert not torch.equal(after.policy["model.model.norm.weight"], saved.policy["model.model.norm.weight"])


@pytest.mark.slow
def test_a_resumed_run_of_adapters_ends_where_an_uninterrupted_one_does(trained, tmp_path):
    shutil.copytree(trained.with_name("model"), tmp_path / "model")
    whole, copy = RunFolder(tmp_path / "whole"), RunFolder(tmp_path / "copy")
    finish("train_adapters", whole.path, 4, ranks=2)
    checkpoint = load_checkpoint(copy.latest)
    saved = checkpoint.policy
    assert checkpoint.state["iteration"] == 2
    finish("resume", copy.path, 4, ranks=2)
    loaded = torch.load(tmp_path / "copy.loaded", weights_only=True)["policy"]
    after, expected = load_checkpoint(copy.latest), load_checkpoint(whole.latest)
    assert all(torch.equal(loaded[name], value) for name, value in saved.items())
    assert all("lora_" in name for name in saved)
    assert not any(torch.equal(saved[name], value) for name, value in expected.policy.items())
    torch.testing.assert_close(after.policy, expected.policy, atol=0, rtol=0)
    optimizers = [checkpoint.state["algorithm"]["optimizer"] for checkpoint in (after, expected)]
    torch.testing.assert_close(*optimizers, atol=0, rtol=0)


@pytest.mark.slow
def test_a_rank_that_fails_ends_the_run_with_its_traceback(trained, tmp_path):
    shutil.copytree(trained.with_name("model"), tmp_path / "model")
    script = Script(SCRIPT, "fail", tmp_path / "run", 10, ranks=2)  # saves each iteration
    for process in script.processes:
        process.join(100)
    assert all(process.exitcode == 1 for process in script.processes)
    assert "RuntimeError: the reward of rank 1 is broken" in script.errors(1)
    script.kill()
    assert load_checkpoint(tmp_path / "run" / "checkpoints" / "latest").state["iteration"] == 1


@pytest.mark.slow
def test_an_interrupted_run_saves_its_last_iteration(trained, tmp_path):
    shutil.copytree(trained.with_name("model"), tmp_path / "model")
    run = RunFolder(tmp_path / "run")
    script = Script(SCRIPT, "train", run.path, 1000, ranks=2)
    while not run.metrics.is_file() and all(process.is_alive() for process in script.processes):
        time.sleep(0.1)
    for process in script.processes:
        process.terminate()
    for process in script.processes:
        process.join(100)
    script.kill()
    iterations = len(run.read_metrics())
    assert 0 < iterations < 1000
    assert load_checkpoint(run.latest).state["iteration"] == iterations


def rows(first, *lengths):
    return [
        {"loss_mask": torch.ones(n, 2, dtype=torch.bool), "weight": torch.ones(n, 2), "obs": torch.full((n, 2), first)}
        for n in lengths
    ]


@pytest.mark.parametrize(("here", "there"), [((2, 1), (3, 1)), ((2, 1, 4), (3,)), ((2,), ())])
def test_every_rank_has_as_many_micro_batches(here, there):
    on_ranks = rows(7, *here), rows(8, *there)

    def run(engine):
        return EqualMicroBatches("row", engine, torch.device("cpu")).run(on_ranks[engine.rank], list)

    found = in_two_threads(run)
    assert len(found[0]) == len(found[1]) == max(len(here), len(there))
    for batches, own in zip(found, (here, there), strict=True):
        assert [len(batch["obs"]) for batch in batches] == [*own, *[1] * (len(batches) - len(own))]
        for batch in batches[len(own) :]:
            assert not batch["loss_mask"].any()
            assert not batch["weight"].any()

    def fails(batches):
        raise MemoryError

    with pytest.raises(MemoryError):  # the error of a rank
        EqualMicroBatches("row", Engine(), torch.device("cpu")).run(rows(1, 4), fails)
