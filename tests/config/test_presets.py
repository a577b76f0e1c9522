"""Presets and the variants of the docs; tests/golden holds what each of them computes."""

import json
from pathlib import Path
from typing import Literal, get_args, get_origin

import pytest
from variants import SETTINGS, VARIANTS

import groupwise as gw
from groupwise.config import load as presets
from groupwise.config import resolve
from groupwise.config.algorithm import CreditCfg, GroupStepCfg, GRPOCfg, ObjectiveCfg, PartsCfg
from groupwise.config.base import Choice
from groupwise.errors import ConfigError

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "golden.json").read_text())


def test_every_preset_and_variant_is_valid_recorded_and_has_a_source():
    for name, preset in presets.objective_presets().items():
        assert preset.source.startswith("https://"), name
        assert preset.settings.keys() >= {"credit", "objective"}, name
    assert {f"preset {name}" for name in SETTINGS} == {case for case in GOLDEN if case.startswith("preset ")}
    assert len(VARIANTS) == 17
    for name, (preset, settings) in VARIANTS.items():
        found, whole = resolve("CartPole-v1", settings, preset=preset).algorithm, GRPOCfg(**SETTINGS[name])
        assert name not in presets.objective_presets()
        assert whole != GRPOCfg(**presets.objective_preset(preset).settings), name
        assert all(getattr(found, part) == getattr(whole, part) for part in whole.model_fields_set - {"objective"}), (
            name
        )


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_environments_have_presets(algorithm):
    expected = {"CartPole-v1", "Acrobot-v1", "MountainCarContinuous-v0", "Pendulum-v1", "LunarLander-v3"}
    assert expected | {"Ant-v5", "HalfCheetah-v5", "Hopper-v5", "Swimmer-v5", "Walker2d-v5"} <= set(presets.env_ids())
    for env_id in (*presets.env_ids(), "Other-v0"):
        assert resolve(env_id, algorithm).algorithm.name == algorithm
        own = presets.env_preset(env_id)[algorithm].get("algorithm", {})
        assert "clip_coef" not in own, "it would beat the user's objective"


def test_presets_of_lstd_have_the_lambda_that_ends_higher():
    envs = {"LunarLander-v3": 0.95, "HalfCheetah-v5": 0.95, "Walker2d-v5": 0.95, "Hopper-v5": 0.99, "Swimmer-v5": 0.99}
    credits = {env: resolve(env, "grpo").algorithm.credit for env in envs}
    assert {env: credit.baseline.gae_lambda for env, credit in credits.items()} == envs
    # rewards a thousand steps ahead count on Swimmer
    assert {resolve("Swimmer-v5", name).algorithm.gamma for name in ("ppo", "grpo")} == {0.9999}


def test_every_choice_of_credit_and_objective_is_described():
    parts = {"credit": CreditCfg, "objective": ObjectiveCfg, "credit.group_key": GroupStepCfg}
    expected = {f"kl_estimator.{name}" for name in get_args(GRPOCfg.model_fields["kl_estimator"].annotation)}
    for part, cfg_type in parts.items():
        for name, field in cfg_type.model_fields.items():
            if get_origin(field.annotation) is Literal and name != "name":
                expected |= {f"{part}.{name}.{choice}" for choice in get_args(field.annotation)}
            elif isinstance(field.default, Choice):
                expected |= {f"{part}.{name}.{kind.own_name()}" for kind in field.default.members()}
    assert presets.choices().keys() == expected
    assert all(choice.note and choice.source for choice in presets.choices().values())


@pytest.mark.parametrize(
    ("algorithm", "preset", "message"),
    [
        ("grpo", "gdpo", r"credit\.reward='parts' .* fix: credit\.reward\.names="),
        ("grpo", "agilerl_turn_ratio", r"ratio='turn' needs turn_id"),
        ("ppo", "grpo", "algorithm 'ppo' lacks"),
        ("grpo", "dr_grp", "did you mean 'dr_grpo'"),
    ],
)
def test_what_a_preset_lacks_is_named_before_there_is_a_run_folder(algorithm, preset, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=message):
        gw.train("CartPole-v1", algorithm, preset=preset, total_steps=10)
    assert list(tmp_path.iterdir()) == []


def test_parts_that_are_named_and_turns_that_are_steps_are_fine():
    parts = resolve("CartPole-v1", {"credit": {"reward": {"names": ["a", "b"]}}}, preset="gdpo")
    assert parts.algorithm.credit.reward == PartsCfg(names=("a", "b"))
    turns = resolve("CartPole-v1", {"credit": {"group_key": "group_step", "returns": "turn"}}, preset="embodichain")
    assert turns.algorithm.credit.returns == "turn"


@pytest.mark.parametrize("env_id", ["CartPole-v1", "LunarLander-v3", "FrozenLake-v1"])
def test_a_registered_rule_is_not_bound_by_the_baseline_of_a_preset(env_id):
    """It takes the place of the composition, so nothing reads ``knn`` or ``lstd``."""
    sampled = {"name": "grpo", "credit": {"rule": "mine"}, "collection": {"dynamic_sampling": 0.5}}
    cfg = resolve(env_id, sampled).algorithm
    assert (cfg.collection.dynamic_sampling, cfg.credit.composed_baseline.name) == (0.5, "mean")
    parts = {"name": "grpo", "credit": {"rule": "mine", "reward": {"name": "parts", "names": ["a", "b"]}}}
    assert resolve(env_id, parts).algorithm.credit.reward.names == ("a", "b")


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (
            {"names": ["a", "b"], "weights": [1.0]},
            r"weights=\(1\.0,\) are not as many as names=\('a', 'b'\); fix: one for each",
        ),
        ({"names": ["a", "a"]}, r"names=\('a', 'a'\) has one of them twice"),
    ],
)
def test_parts_that_do_not_fit_are_refused(reward, message):
    with pytest.raises(ConfigError, match=message):
        resolve("CartPole-v1", {"credit": {"reward": {"name": "parts"} | reward}})


@pytest.mark.parametrize("preset", ["remax", "reinforce_plus_plus", "gdpo", "knn"])
def test_groups_that_teach_although_equal_are_not_left_out(preset):
    with pytest.raises(ConfigError, match=r"learns from groups of equal whole return.*dynamic_sampling"):
        resolve("CartPole-v1", {"name": "grpo", "collection": {"dynamic_sampling": 0}}, preset=preset)
