"""Choices by name, with parameters of their own: how they are read, merged, saved and registered."""

import json
import pickle

import pytest
from objective_updates import make_policy, make_rollout

import groupwise as gw
from groupwise.algorithms.advantages import Scores
from groupwise.algorithms.losses import LossInputs, cispo, dppo, sapo
from groupwise.config import load_config, resolve
from groupwise.config.algorithm import (
    AggregationCfg,
    BaselineCfg,
    ClipCfg,
    CorrectionCfg,
    CreditCfg,
    ObjectiveCfg,
    OptimizerCfg,
    ScheduleCfg,
    TrustRegionCfg,
)
from groupwise.errors import ConfigError

FAMILIES = (TrustRegionCfg, BaselineCfg, CorrectionCfg, AggregationCfg, OptimizerCfg, ScheduleCfg)


@pytest.mark.parametrize(
    "given",
    ["cispo", {"name": "cispo"}, cispo.Settings(), {"name": "cispo", "high": 5.0}, {"name": "cispo", "low": None}],
)
def test_a_name_alone_stands_for_its_defaults(given):
    assert ObjectiveCfg(trust_region=given).trust_region == cispo.Settings(low=None, high=5.0)


def test_parameters_without_a_name_are_the_defaults():
    assert ObjectiveCfg(trust_region={"clip_high": 0.3}).trust_region == ClipCfg(clip_high=0.3)
    assert ObjectiveCfg().trust_region == ClipCfg()


@pytest.mark.parametrize("family", FAMILIES)
def test_every_member_of_a_family_has_a_name_a_note_and_a_source(family):
    for kind in family.members():
        assert kind.named(kind.own_name()) is kind
        assert kind.note()
        assert kind.source == "groupwise" or kind.source.startswith("https://")
        assert all(field.description for key, field in kind.model_fields.items() if key != "name")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("cisp", r"trust_region: unknown trust region 'cisp': did you mean 'cispo'"),
        ({"name": "cispo", "hgh": 4}, r"trust_region: unknown key 'hgh'; did you mean 'high'\?"),
        ({"name": "cispo", "high": -1}, r"trust_region\.high = -1: input should be greater than 0"),
        ({"high": 1.2}, r"trust_region: unknown key 'high'"),
    ],
)
def test_mistakes_name_the_nearest(given, message):
    with pytest.raises(ConfigError, match=message):
        ObjectiveCfg(trust_region=given)


@pytest.mark.parametrize(
    ("preset", "given", "expected"),
    [
        ("prime_rl", {"high": 2.0}, dppo.Settings(low=0.2, high=2.0, max_ratio=None, pull=1e-3)),
        ("prime_rl", {"name": "dppo", "low": 0.1}, dppo.Settings(low=0.1, high=0.2, max_ratio=None, pull=1e-3)),
        ("prime_rl", "dppo", dppo.Settings(low=0.2, high=0.2, max_ratio=None, pull=1e-3)),
        ("prime_rl", "sapo", sapo.Settings()),
        ("prime_rl", {"name": "sapo", "positive": 2.0}, sapo.Settings(positive=2.0)),
    ],
)
def test_over_a_preset_parameters_are_merged_and_other_names_replace(preset, given, expected):
    found = resolve("CartPole-v1", {"objective": {"trust_region": given}}, preset=preset)
    assert found.algorithm.objective.trust_region == expected
    config = gw.GRPOCfg(objective=ObjectiveCfg(trust_region=given)) if given != {"high": 2.0} else None
    if config:
        assert resolve("CartPole-v1", config, preset=preset).algorithm.objective.trust_region == expected


def test_a_loss_and_a_baseline_of_the_users_own(registry, tmp_path):
    @gw.register_loss("half")
    def half(x: LossInputs, share: float = 0.5):
        """Half the policy gradient.

        Args:
            share: How much of it.
        """
        return -share * x.ratio * x.advantage

    @gw.register_baseline("twice")
    def twice(scores: Scores):
        """Twice the mean's advantage."""
        return 2 * scores.relative()

    path = tmp_path / "run.json"
    credit = {"baseline": "twice"}
    path.write_text(json.dumps({"env": {"id": "X-v0"}, "algorithm": {"objective": {"trust_region": "half"}}}))
    cfg = load_config(path, {"credit": credit | {"group_key": "group", "returns": "outcome"}}).algorithm
    assert cfg.objective.trust_region == TrustRegionCfg.named("half")(share=0.5)
    assert TrustRegionCfg.named("half").model_fields["share"].description == "How much of it."
    one, two = (
        gw.GRPO(
            gw.GRPOCfg(credit=CreditCfg(**kind), objective=objective, num_epochs=1, minibatch_size=None), make_policy()
        )
        for kind, objective in (
            ({}, {"trust_region": "none"}),
            (credit, {"trust_region": {"name": "half", "share": 1.0}}),
        )
    )
    losses = [float(algorithm.update(make_rollout(algorithm.policy))["train/policy_loss"]) for algorithm in (one, two)]
    assert losses[1] == pytest.approx(2 * losses[0], rel=1e-5)


@pytest.mark.parametrize(
    ("loss", "got"), [(lambda x: -(x.ratio * x.advantage).mean(), r"shape \[\]"), (lambda x: None, "None")]
)
def test_a_loss_that_is_not_one_of_each_step_is_refused_before_training(registry, loss, got):
    gw.register_loss("mine")(loss)
    with pytest.raises(
        ConfigError, match=rf"trust_region='mine' returned {got}, expected the loss of each step, \[1, 2\]"
    ):
        gw.GRPO(gw.GRPOCfg(objective={"trust_region": "mine"}), make_policy())


def test_names_that_are_taken_or_missing_and_settings_without_a_type_are_refused(registry):
    def mine(x: LossInputs, share: float = 0.5):
        return x.ratio

    def untyped(x, share=0.5):
        return x.ratio

    with pytest.raises(ConfigError, match="trust region 'clip' is registered already"):
        gw.register_loss("clip")(mine)
    with pytest.raises(ConfigError, match="baseline 'mean' is registered already"):
        gw.register_baseline("mean")(mine)
    with pytest.raises(ConfigError, match="setting 'share' of trust region 'untyped' has no type"):
        gw.register_loss("untyped")(untyped)
    with pytest.raises(ConfigError, match="trust region 'clip' is registered already"):

        class MineCfg(TrustRegionCfg, name="clip"):
            pass


@pytest.mark.parametrize("cfg", [cispo.Settings(low=0.5), ObjectiveCfg(trust_region={"name": "cispo", "high": 2.0})])
def test_settings_made_from_a_signature_are_pickled(cfg):
    assert pickle.loads(pickle.dumps(cfg)) == cfg


def test_advantages_that_are_not_finite_are_named(registry):
    @gw.register_baseline("broken")
    def broken(scores: Scores):
        return scores.relative() * float("nan")

    cfg = gw.GRPOCfg(credit={"baseline": "broken", "group_key": "group", "returns": "outcome"})
    algorithm = gw.GRPO(cfg, make_policy())
    with pytest.raises(gw.errors.DivergedError, match="advantages of update 1 are not finite"):
        algorithm.update(make_rollout(algorithm.policy))


def test_the_logged_rate_is_the_optimisers():
    algorithm = gw.GRPO(gw.GRPOCfg(learning_rate=1e-3), make_policy())
    assert algorithm.update(make_rollout(algorithm.policy))["train/learning_rate"] == 1e-3
    algorithm.optimizer.param_groups[0]["lr"] = 1e-5  # as a callback may
    assert algorithm.update(make_rollout(algorithm.policy))["train/learning_rate"] == 1e-5
