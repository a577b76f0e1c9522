"""``engine="fsdp"``: ranks that hold parts train what one process trains on all the rows."""

import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from forked import run_script
from sharded_runs import CASES
from text_runs import save_model
from two_ranks import in_two_threads

import groupwise as gw
from groupwise.algorithms.memory import EqualMicroBatches
from groupwise.engines.base import Engine
from groupwise.engines.distributed import from_environment
from groupwise.report.folder import RunFolder
from groupwise.text.sharding import ShardedEngine
from groupwise.training.checkpoint import load_checkpoint

SCRIPT = Path(__file__).parents[1] / "support" / "sharded_runs.py"


def command(*args, ranks=1):
    several = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    return [sys.executable, *several, str(SCRIPT), *map(str, args)]


def start(*args, ranks=1):
    return subprocess.run(command(*args, ranks=ranks), capture_output=True, text=True, timeout=280, check=False)


def finish(*args, ranks=1):
    run_script(SCRIPT, *args, ranks=ranks)


@pytest.fixture(scope="module")
def updates(tmp_path_factory):
    folder = tmp_path_factory.mktemp("updates")
    finish("updates", folder / "one")
    finish("updates", folder / "two", ranks=2)
    return [torch.load(folder / name, weights_only=True) for name in ("one.0", "two.0", "two.1")]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_parts_of_two_ranks_are_trained_as_one_process_on_all_rows(updates, case):
    one, first, second = (found[case] for found in updates)
    # rounding of bfloat16 depends on which rows are computed together
    off = 1e-6 if case not in ("half", "autocast") else 1e-3
    for name, parameter in one["policy"].items():
        torch.testing.assert_close(first["policy"][name], parameter, atol=off, rtol=0, msg=name)
        assert torch.equal(first["policy"][name], second["policy"][name])
    assert first["metrics"] == second["metrics"]
    for name, value in one["metrics"].items():
        assert first["metrics"][name] == pytest.approx(value, abs=10 * off, rel=10 * off), name


@pytest.mark.slow
@pytest.mark.parametrize("case", ["adam", "adapters", "reference"])
def test_the_state_is_whole_on_rank_0(updates, case):
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
@pytest.mark.parametrize("case", ["adam", "tied", "adapters"])
def test_each_rank_holds_its_part_alone(updates, case):
    one, first, second = (found[case]["held"] for found in updates)
    assert first + second == one
    assert first <= 0.51 * one


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
    for name, value in saved.policy.items():
        assert torch.equal(loaded["policy"][name], value), name
    state, expected = loaded["state"], saved.state["algorithm"]
    assert len(expected["optimizer"]["state"]) > 10
    for index, entries in expected["optimizer"]["state"].items():
        for name, value in entries.items():
            assert torch.equal(state["optimizer"]["state"][index][name], value)
    for name, value in expected["reference"].items():
        assert torch.equal(state["reference"][name], value)
    assert loaded["position"] == 16 // ranks
    run = RunFolder(tmp_path / "run")
    assert [entry["iteration"] for entry in run.read_metrics()] == [1, 2, 3, 4]
    # what is trained is what generates
    assert all(entry["rollout/sampler_kl"] < 1e-8 for entry in run.read_metrics())
    after = load_checkpoint(run.latest)
    assert after.state["iteration"] == 4
    assert not torch.equal(after.policy["model.model.norm.weight"], saved.policy["model.model.norm.weight"])


@pytest.mark.slow
def test_a_rank_that_fails_ends_the_run_with_its_traceback(trained, tmp_path):
    shutil.copytree(trained.with_name("model"), tmp_path / "model")
    begun = time.monotonic()
    done = start("fail", tmp_path / "run", 10, ranks=2)  # saves each iteration
    assert done.returncode != 0
    assert time.monotonic() - begun < 120
    assert "RuntimeError: the reward of rank 1 is broken" in done.stderr
    assert load_checkpoint(tmp_path / "run" / "checkpoints" / "latest").state["iteration"] == 1


@pytest.mark.slow
def test_an_interrupted_run_saves_its_last_iteration(trained, tmp_path):
    shutil.copytree(trained.with_name("model"), tmp_path / "model")
    run = RunFolder(tmp_path / "run")
    process = subprocess.Popen(command("train", run.path, 1000, ranks=2), stderr=subprocess.PIPE, text=True)
    while not run.metrics.is_file() and process.poll() is None:
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=100)
    iterations = len(run.read_metrics())
    assert 0 < iterations < 1000
    assert load_checkpoint(run.latest).state["iteration"] == iterations, errors[-3000:]


def test_one_process_trains_without_parts(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert type(from_environment("cpu", ShardedEngine)) is Engine


@pytest.mark.parametrize("settings", [{"compile": "on"}, {"model": {"quantization": "int8", "lora": {"r": 4}}}])
def test_what_parts_cannot_be_is_refused(settings):
    with pytest.raises(gw.ConfigError, match=r"engine='fsdp' cannot .*; fix: "):
        gw.TextRunCfg(engine="fsdp", **settings)


def rows(first, *lengths):
    return [
        {"loss_mask": torch.ones(n, 2, dtype=torch.bool), "weight": torch.ones(n, 2), "obs": torch.full((n, 2), first)}
        for n in lengths
    ]


@pytest.mark.parametrize(("here", "there"), [((2, 1), (3, 1)), ((2, 1, 4), (3,)), ((2,), ())])
def test_every_rank_has_as_many_micro_batches(here, there):
    given = rows(7, *here), rows(8, *there)

    def run(engine):
        return EqualMicroBatches("row", engine, torch.device("cpu")).run(given[engine.rank], list)

    found = in_two_threads(run)
    assert len(found[0]) == len(found[1]) == max(len(here), len(there))
    for batches, own in zip(found, (here, there), strict=True):
        assert [len(batch["obs"]) for batch in batches] == [*own, *[1] * (len(batches) - len(own))]
        for batch in batches[len(own) :]:
            assert not batch["loss_mask"].any()
            assert not batch["weight"].any()


def test_running_out_of_memory_is_the_error_of_a_rank():
    def fails(batches):
        raise MemoryError

    with pytest.raises(MemoryError):
        EqualMicroBatches("row", Engine(), torch.device("cpu")).run(rows(1, 4), fails)
