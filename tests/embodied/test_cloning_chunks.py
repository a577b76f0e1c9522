"""Cloning with chunks of actions: what was not demonstrated counts for nothing."""

import math

import pytest
import torch
import toy_robots

import groupwise as gw
from groupwise.config import resolve
from groupwise.embodied.demos import record_demos
from groupwise.engines import Engine
from groupwise.report.folder import RunFolder
from groupwise.run import build
from groupwise.training.build import UserObjects

pytest.importorskip("pyarrow")
pytest.importorskip("groupwise.embodied.vla")
pytestmark = pytest.mark.contrib
toy_robots.register()
CHUNK = 3


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return record_demos("ToyReaching-v0", toy_robots.straight, episodes=8, out=tmp_path_factory.mktemp("demos")).path


def parts_of(data):
    env = {"num_envs": 2, "action_chunk": CHUNK}
    cfg = resolve("ToyReaching-v0", gw.config.BCCfg(data=data, num_steps=16, label_noise=0.0), env=env)
    parts = build(cfg, UserObjects(), Engine())
    parts.close()
    return parts


def updated(parts):
    """Metrics of an update, and the parameters after it."""
    rollout = parts.collector.collect(16, parts.buffer.start_rollout())
    metrics = parts.algorithm.update(rollout)
    return metrics, torch.cat([parameter.flatten() for parameter in parts.policy.parameters()])


def test_labels_behind_the_end_change_nothing(data):
    first, second = parts_of(data), parts_of(data)
    labels = second.collector.labels
    behind = torch.arange(CHUNK) >= labels["executed"][:, None]
    assert behind.any()
    labels["action"][behind] = 0.9
    (metrics, parameters), (others, other_parameters) = updated(first), updated(second)
    assert metrics["train/loss"] == others["train/loss"]
    assert torch.equal(parameters, other_parameters)


def test_labels_before_the_end_change_the_update(data):
    first, second = parts_of(data), parts_of(data)
    second.collector.labels["action"][:, 1][second.collector.labels["executed"] > 1] = 0.9
    assert updated(first)[0]["train/loss"] != updated(second)[0]["train/loss"]


def test_the_loss_is_the_mean_over_actions_that_were_demonstrated(data):
    parts = parts_of(data)
    with torch.no_grad():
        for parameter in parts.policy.parameters():
            parameter.zero_()
    *_, scores = parts.own_callbacks(RunFolder(data))
    labels = parts.collector.labels
    steps = torch.arange(len(labels["executed"]))
    shown = labels["action"][torch.arange(CHUNK) < labels["executed"][:, None]]
    found = scores.scores(steps)
    assert found["eval/demo_loss"] == pytest.approx(
        math.log(2 * math.pi) + 0.5 * shown.square().sum(dim=1).mean().item()
    )
    assert found["eval/demo_error"] == pytest.approx(shown.abs().mean().item(), rel=1e-5)
