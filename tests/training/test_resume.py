"""A run that was killed and resumed equals one that never stopped, bit for bit."""

import json
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from at_events import interrupt_after, on
from forked import Script
from run_folders import logged
from torch_pendulum import TorchPendulum

import groupwise as gw
from groupwise.report.folder import RunFolder
from groupwise.training.checkpoint import load_checkpoint

COMMON = {"evaluation": {"interval": 500, "episodes": 2}, "logging": {"progress": "none"}, "checkpoint_interval": 400}
RUNS: dict[str, dict[str, Any]] = {
    "ppo": {
        "algorithm": gw.PPOCfg(num_steps=32, num_epochs=2, minibatch_size=64, schedule={"name": "linear"}),
        "policy": gw.PolicyCfg(normalize_obs=True, normalize_reward=True),
        "env": {"num_envs": 4},
    },
    "recurrent": {
        "algorithm": gw.PPOCfg(num_steps=32, num_epochs=2, minibatch_size=64),
        "policy": {"name": "recurrent", "hidden_size": 8, "hidden_sizes": (8,), "normalize_obs": True},
        "env": {"num_envs": 4},
    },
    "grpo": {
        "algorithm": gw.GRPOCfg(
            num_steps=50, num_epochs=2, group_size=4, kl_coef=0.1, sync_ref_model={"steps": 2, "mixup_alpha": 0.6}
        ),
        "env": {"num_envs": 4},
    },
}
SLOW = """
import sys, time
import groupwise as gw

class Slow(gw.Callback):
    def on_iteration_end(self, trainer, rollout, metrics):
        time.sleep(0.1)

gw.train(gw.RunCfg.model_validate_json(sys.argv[1]), callbacks=[Slow()])
"""


def settings(name: str, run_dir: Path) -> gw.RunCfg:
    cfg = gw.RunCfg.model_validate(COMMON | RUNS[name] | {"seed": 7, "total_steps": 1600})
    return cfg.model_copy(update={"run_dir": run_dir})


def assert_same_run(a: Path, b: Path) -> None:
    assert logged(a) == logged(b)
    for folder in ("latest", "best"):
        first, second = (load_checkpoint(path / "checkpoints" / folder) for path in (a, b))
        assert_same(first.policy, second.policy)
        assert_same(first.state, second.state)


def assert_same(a: Any, b: Any, name: str = "") -> None:
    if isinstance(a, torch.Tensor):
        assert torch.equal(a, b), name
    elif isinstance(a, np.ndarray):
        assert np.array_equal(a, b), name
    elif isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a.keys() - {"seconds"}:
            assert_same(a[key], b[key], f"{name}/{key}")
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for index, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_same(x, y, f"{name}/{index}")
    else:
        assert a == b, name


@pytest.fixture(scope="module", params=["ppo", pytest.param("recurrent", marks=pytest.mark.slow), "grpo"])
def uninterrupted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> gw.Run:
    return gw.train(settings(request.param, tmp_path_factory.mktemp(request.param) / "whole"))


def test_the_same_seed_gives_the_same_run(uninterrupted: gw.Run, tmp_path: Path):
    gw.train(uninterrupted.cfg.model_copy(update={"run_dir": tmp_path / "again"}))
    assert_same_run(uninterrupted.path, tmp_path / "again")


def test_killed_and_resumed_equals_uninterrupted(uninterrupted: gw.Run, tmp_path: Path):
    path = tmp_path / "killed"
    cfg = uninterrupted.cfg.model_copy(update={"run_dir": path})
    child = Script(SLOW, cfg.model_dump_json())
    deadline = time.monotonic() + 60
    wanted = 1 + next(e["iteration"] for e in logged(uninterrupted.path) if e["env_steps"] >= 800)
    while len(RunFolder(path).read_metrics()) < wanted and time.monotonic() < deadline:
        time.sleep(0.02)
    child.kill()
    assert 0 < len(logged(path)) < len(logged(uninterrupted.path))
    assert RunFolder(path).read_summary() == {}

    run = gw.resume(path)
    assert_same_run(uninterrupted.path, path)
    assert run.summary["env_steps"] == uninterrupted.summary["env_steps"]


def test_interrupted_and_resumed_equals_uninterrupted(uninterrupted: gw.Run, tmp_path: Path):
    cfg = uninterrupted.cfg.model_copy(update={"run_dir": tmp_path / "interrupted"})
    with pytest.raises(KeyboardInterrupt):
        gw.train(cfg, callbacks=[interrupt_after(2)])
    gw.resume(tmp_path / "interrupted")
    assert_same_run(uninterrupted.path, tmp_path / "interrupted")


def test_a_run_killed_before_its_first_checkpoint_begins_again(uninterrupted: gw.Run, tmp_path: Path):
    folder = RunFolder.create(json.loads(uninterrupted.cfg.model_dump_json()), tmp_path / "early")
    folder.metrics.write_text('{"iteration": 1, "env_steps": 128, "time/total_seconds": 1.0}\n{"iterat')
    gw.resume(folder.path)
    assert_same_run(uninterrupted.path, folder.path)


def test_a_finished_run_can_go_on(uninterrupted: gw.Run, tmp_path: Path):
    path = Path(shutil.copytree(uninterrupted.path, tmp_path / "copy"))
    idle = gw.resume(path)
    # memory is of this process, which ran other tests since; the folder has its curve and video by now
    assert idle.summary == uninterrupted.summary | {"peak_memory_mib": idle.summary["peak_memory_mib"]}
    assert_same(idle.policy.state_dict(), uninterrupted.policy.state_dict())

    longer = gw.resume(path, total_steps=2200)
    assert longer.summary["env_steps"] >= 2200
    assert longer.cfg.total_steps == RunFolder(path).read_config()["total_steps"] == 2200
    iterations = [entry["iteration"] for entry in longer.metrics()]
    assert iterations == list(range(1, len(iterations) + 1))


@pytest.mark.parametrize("name", ["ppo", "grpo"])
def test_checkpoints_do_not_change_what_is_learned(name: str, tmp_path: Path):
    cfg = settings(name, tmp_path / "a").model_copy(update={"total_steps": 1200})
    often = gw.train(cfg.model_copy(update={"checkpoint_interval": 100}))
    seldom = gw.train(cfg.model_copy(update={"checkpoint_interval": 10_000, "run_dir": tmp_path / "b"}))
    assert logged(often.path) == logged(seldom.path)
    assert_same(often.policy.state_dict(), seldom.policy.state_dict())


def test_nothing_restarts_where_no_checkpoint_is_resumed(tmp_path: Path):
    """A tenth of this run is 16 steps in every environment; cut there, no episode would ever end."""
    common = {key: value for key, value in COMMON.items() if key != "checkpoint_interval"}
    cfg = gw.PPOCfg(num_steps=8, num_epochs=1)
    run = gw.train(
        TorchPendulum, cfg, num_envs=8, max_episode_steps=40, total_steps=8 * 160, run_dir=tmp_path / "run", **common
    )
    assert sum(row["rollout/episodes"] for row in run.metrics()) == 8 * 4
    assert {row["rollout/length_mean"] for row in run.metrics() if "rollout/length_mean" in row} == {40.0}


def test_a_run_of_an_earlier_version_is_refused_in_a_line(uninterrupted: gw.Run, tmp_path: Path):
    path = Path(shutil.copytree(uninterrupted.path, tmp_path / "old"))
    settings = json.loads((path / "config.json").read_text())
    del settings["provenance"]["format"]
    settings["stay_on_device"] = "auto"
    (path / "config.json").write_text(json.dumps(settings))
    for again in (gw.resume, gw.evaluate, gw.Run.load):
        with pytest.raises(
            gw.errors.RunFolderError, match=r"old was made by an earlier version .*format 1.*; fix: train again"
        ) as caught:
            again(path)
        assert "\n" not in str(caught.value)


def test_a_resumed_run_that_is_killed_does_not_show_its_former_end(tmp_path: Path) -> None:
    seen: list[bool] = []
    look = on("iteration_end", lambda *_: seen.append(RunFolder(tmp_path / "run").summary.exists()))
    assert gw.train(settings("ppo", tmp_path / "run")).summary["stopped"] == "total_steps"
    again = gw.resume(tmp_path / "run", total_steps=2400, callbacks=[look])
    assert set(seen) == {False}
    assert again.summary["env_steps"] == 2432
