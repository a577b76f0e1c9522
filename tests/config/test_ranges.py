"""Clip ranges: numbers, or schedules over training."""

import json
import re

import pytest
import torch
from small_updates import build, make_rollout

import groupwise as gw
from groupwise.config import load_config, resolve, to_json

FALLING = {"name": "linear", "start": 0.3, "end": 0.1}
SLOW = {"learning_rate": 0.01}


def dual_clip(high):
    return {"trust_region": {"name": "dual_clip", "clip_high": high}}


def updated(kind: str, progress: float, **settings):
    """The parameters after epochs in which ratios leave the clip range."""
    algorithm = build(kind, **{"num_epochs": 6, "learning_rate": 2.0} | settings)
    algorithm.set_progress(progress)
    rollout = make_rollout(algorithm.policy)
    algorithm.update(rollout)
    return torch.cat([parameter.detach().flatten() for parameter in algorithm.policy.parameters()])


@pytest.mark.parametrize(
    ("kind", "schedule", "number"),
    [
        ("ppo", {"clip_coef": FALLING}, {"clip_coef": 0.15}),
        ("grpo", {"clip_coef": FALLING}, {"clip_coef": 0.15}),
        ("ppo", {"clip_range_vf": {"start": 0.2}} | SLOW, {"clip_range_vf": 0.05} | SLOW),
        ("grpo", {"objective": dual_clip(FALLING)}, {"objective": dual_clip(0.15)}),
    ],
)
def test_an_update_takes_the_range_of_its_time(kind: str, schedule: dict, number: dict):
    """At 3/4 of training, 0.3 falling to 0.1 is 0.15, and 0.2 falling to 0 is 0.05."""
    torch.testing.assert_close(updated(kind, 0.75, **schedule), updated(kind, 0.75, **number))
    early = updated(kind, 0.0, **schedule)
    assert not torch.allclose(early, updated(kind, 0.0, **number), atol=1e-4)


def test_what_was_given_can_be_read_and_saved(tmp_path):
    assert gw.GRPOCfg(clip_coef=0.1).clip_coef == 0.1
    assert gw.GRPOCfg().clip_coef is None
    cfg = resolve("CartPole-v1", gw.PPOCfg(clip_coef=FALLING, clip_range_vf=0.5))
    region = cfg.algorithm.objective.trust_region
    assert cfg.algorithm.clip_coef is None  # it stands in the trust region, in memory as in files
    assert (region.clip_high.start, region.clip_high.end) == (0.3, 0.1)
    saved = json.loads(to_json(cfg))["algorithm"]
    assert saved["objective"]["trust_region"] == {"name": "clip", "clip_low": FALLING, "clip_high": FALLING}
    assert "clip_coef" not in saved  # else it would undo a later change of the trust region
    (tmp_path / "run.json").write_text(to_json(cfg))
    assert load_config(tmp_path / "run.json").algorithm.objective == cfg.algorithm.objective


def test_a_run_with_schedules_resumes_exactly(tmp_path):
    algorithm = gw.PPOCfg(clip_coef=FALLING, clip_range_vf={"start": 0.2}, num_steps=16, num_epochs=2)
    settings = {"num_envs": 4, "total_steps": 192, "evaluation": {"episodes": 1}, "checkpoint_interval": 64}
    whole = gw.train("CartPole-v1", algorithm, run_dir=tmp_path / "whole", **settings)
    gw.train("CartPole-v1", algorithm, run_dir=tmp_path / "cut", stop={"time_limit": 1e-9}, **settings)
    config = tmp_path / "cut/config.json"
    config.write_text(config.read_text().replace('"time_limit": 1e-09', '"time_limit": null'))
    resumed = gw.resume(tmp_path / "cut")
    for one, other in zip(whole.policy.parameters(), resumed.policy.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"clip_coef": -1}, "clip_coef = -1: input should be greater than 0"),
        ({"clip_coef": {"start": -1}}, "clip_coef.start = -1: input should be greater than 0"),
        ({"clip_coef": {"name": "cos", "start": 1}}, "clip_coef.name = 'cos': expected one of linear"),
        ({"clip_range_vf": {"strt": 1}}, "clip_range_vf: unknown key 'strt'; did you mean 'start'?"),
        (
            {"clip_coef": FALLING, "objective": {"trust_region": "cispo"}},
            "trust_region='cispo' has no clip_high and clip_low",
        ),
        ({"clip_coef": float("nan")}, "clip_coef = nan: input should be a finite number"),
    ],
)
def test_mistakes_are_named(given: dict, said: str):
    with pytest.raises(gw.errors.ConfigError, match=re.escape(said)):
        gw.PPOCfg(**given)
