import copy

import pytest
import torch
from objective_updates import (
    make_policy,
    make_rollout,
    parameters,
    updated,
)

from groupwise.algorithms.base import EntropyBonus
from groupwise.algorithms.grpo import GRPO
from groupwise.config.algorithm import AdaptiveEntropyCfg, GRPOCfg
from groupwise.errors import ConfigError

ADAPTIVE = {"target": 0.5, "step": 0.1, "max_coef": 0.25}


def entropy_control(ent_coef=0.0, **entropy):
    cfg = GRPOCfg(ent_coef=ent_coef, adaptive_entropy=entropy or None)
    return EntropyBonus(cfg, torch.device("cpu"))


def test_the_bonus_rises_while_the_entropy_is_low_and_is_off_while_it_is_high():
    control = entropy_control(ent_coef=0.1, **ADAPTIVE)
    one = torch.ones(1)
    trace = [control.loss(one).item()]
    for entropy in (0.4, 0.5, 0.6, 0.3, 0.2, 0.9, 0.9, 0.9, 0.1):
        control.adapt({"entropy": torch.tensor(entropy)})
        trace.append(round(control.loss(one).item(), 6) + 0.0)
    # coefficients .1 .2 .25 (greatest) .15 .25 .25 .15 .05 0 (least) .1, no bonus after entropies above .5
    assert trace == pytest.approx([-0.1, -0.2, -0.25, 0.0, -0.25, -0.25, 0.0, 0.0, 0.0, -0.1])


def test_a_constant_bonus_never_moves():
    control = entropy_control(ent_coef=0.3)
    assert not control.adaptive
    assert control.loss(torch.tensor(2.0)).item() == pytest.approx(-0.6)
    assert control.enabled
    assert not entropy_control().enabled


def test_a_saved_control_goes_on_where_it_was():
    # coefficients .1 .2 .25 .15, then .25; the first of them in force until the entropy .9
    one = entropy_control(ent_coef=0.1, **ADAPTIVE)
    for entropy, coef, in_force in [(0.4, 0.2, 1.0), (0.4, 0.25, 1.0), (0.9, 0.15, 0.0), (0.1, 0.25, 1.0)]:
        one.adapt({"entropy": torch.tensor(entropy)})
        two = entropy_control(ent_coef=0.1, **ADAPTIVE)
        two.load_state_dict(one.state_dict())
        assert two.state_dict() == one.state_dict() == pytest.approx({"coef": coef, "in_force": in_force})
        assert two.loss(torch.ones(1)).item() == pytest.approx(-coef * in_force)


def test_an_adaptive_bonus_is_in_force_from_the_first_step_even_from_0():
    control = entropy_control(ent_coef=0.0, **ADAPTIVE)
    assert control.enabled
    assert control.state_dict() == {"coef": 0.0, "in_force": 1.0}


def test_the_entropy_of_every_optimiser_step_moves_the_weight():
    # 68 steps in 4 minibatches, 2 epochs: 8 times up from 0, entropy ln 3 at most
    _, metrics = updated(
        {"adaptive_entropy": ADAPTIVE | {"target": 9.0, "step": 0.01}}, minibatch_size=17, num_epochs=2
    )
    assert metrics["train/ent_coef"].item() == pytest.approx(0.08)
    _, metrics = updated({"adaptive_entropy": ADAPTIVE | {"target": -9.0, "step": 0.01}}, ent_coef=0.2, num_epochs=3)
    assert metrics["train/ent_coef"].item() == pytest.approx(0.17)


def test_the_bonus_keeps_the_entropy_up():
    low = updated({}, num_epochs=30)[1]["train/entropy"]
    held = updated({"adaptive_entropy": ADAPTIVE | {"target": 1.05, "max_coef": 1.0}}, num_epochs=30)[1][
        "train/entropy"
    ]
    assert held > low + 0.01


def test_the_weight_goes_on_where_it_was():
    adaptive = AdaptiveEntropyCfg(target=1.0, step=0.013)
    cfg = GRPOCfg(num_epochs=3, minibatch_size=30, learning_rate=0.05, ent_coef=0.01, adaptive_entropy=adaptive)
    one = GRPO(cfg, make_policy())
    rollout = make_rollout(one.policy)
    one.update(rollout)
    two = GRPO(cfg, copy.deepcopy(one.policy))
    two.load_state_dict(copy.deepcopy(one.state_dict()))
    metrics = [algorithm.update(rollout) for algorithm in (one, two)]
    assert torch.equal(parameters(one), parameters(two))
    assert torch.equal(metrics[0]["train/ent_coef"], metrics[1]["train/ent_coef"])
    assert one.state_dict()["entropy"] == two.state_dict()["entropy"]


def test_adapting_needs_an_algorithm_that_measures_the_entropy():
    class Silent(GRPO):
        metric_names = ("loss",)

    with pytest.raises(ConfigError, match="Silent does not measure; fix"):
        Silent(GRPOCfg(adaptive_entropy=AdaptiveEntropyCfg()), make_policy())
