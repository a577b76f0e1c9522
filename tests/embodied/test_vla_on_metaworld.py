"""A vision-language-action policy clones an expert of Meta-World from images, and GRPO goes on from the clone."""

from pathlib import Path
from typing import Any

import pytest
import torch

import groupwise as gw
from groupwise.embodied.demos import record_demos
from groupwise.training.checkpoint import load_checkpoint

for package in ("metaworld", "transformers", "pyarrow"):
    pytest.importorskip(package)
pytestmark = [pytest.mark.contrib, pytest.mark.slow]

IMAGES = {"obs": "image", "views": ["corner2"], "pixels": 32, "hide_arm": True, "reward": "dense"}
ENV = gw.EnvCfg(id="MetaWorld/button-press-topdown-v3", action_chunk=5, kwargs=IMAGES)
POLICY = gw.config.VLACfg(hidden_size=32, num_layers=1, bins=11)
SETTINGS: dict[str, Any] = {"num_envs": 4, "logging": {"progress": "none"}}


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> gw.Run:
    folder: Path = tmp_path_factory.mktemp("cloning")
    demos = record_demos(ENV, episodes=3, out=folder / "demos")
    cfg = gw.config.BCCfg(data=demos.path, holdout=0.3, num_steps=16, minibatch_size=64, learning_rate=3e-3)
    evaluation = {"episodes": 1, "interval": 10 * 64}
    return gw.train(
        ENV, cfg, policy=POLICY, total_steps=20 * 64, evaluation=evaluation, run_dir=folder / "run", **SETTINGS
    )


def test_the_clone_comes_closer_to_the_expert(clone: gw.Run):
    metrics = clone.metrics()
    losses = [entry["train/loss"] for entry in metrics]
    assert len(losses) == 20
    assert losses[0] > 2.2  # nearly uniform over 11 bins is ln 11 = 2.4
    assert losses[-1] < 1.7
    first, last = (entry for entry in metrics if "eval/demo_loss" in entry)
    assert last["eval/demo_loss"] < first["eval/demo_loss"]
    assert 1 / 11 < first["eval/demo_accuracy"] < last["eval/demo_accuracy"]


def test_grpo_begins_with_the_clone(clone: gw.Run, tmp_path: Path):
    algorithm = gw.GRPOCfg(group_size=2, num_steps=20, num_epochs=1, minibatch_size=None)
    policy = {"name": "vla", "init_from": clone.path}
    settings = SETTINGS | {"evaluation": {"episodes": 1}}
    run = gw.train(ENV, algorithm, policy=policy, total_steps=1, run_dir=tmp_path / "run", **settings)
    (metrics,) = run.metrics()
    assert metrics["train/approx_kl"] == pytest.approx(0.0, abs=1e-6)  # in one optimiser step every ratio is 1
    assert metrics["train/clip_fraction"] == 0.0
    assert metrics["train/grad_norm"] > 0.0
    before, after = (load_checkpoint(path / "checkpoints" / "latest").policy for path in (clone.path, run.path))
    moved = [torch.max(torch.abs(after[name] - before[name])).item() for name in before]
    assert 0.0 < max(moved) <= 2 * algorithm.learning_rate  # a step of Adam from the clone's weights
