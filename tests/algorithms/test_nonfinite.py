"""No optimiser step on a gradient that is not finite."""

import math

import pytest
import torch
from small_updates import build, make_rollout, parameters

from groupwise.errors import DivergedError
from groupwise.speed.control import FlatAdam, flat_adam

ADAM = {"optimizer": "adam", "learning_rate": 1e-2, "num_epochs": 3}
SGD = {"optimizer": {"name": "sgd", "momentum": 0.9}, "learning_rate": 1e-2, "num_epochs": 3}


def spoil(algorithm, value, steps):
    """Put ``value`` into the gradient in these optimiser steps, counted from 0 over all updates."""
    backward, seen = algorithm.backward, []

    def spoilt(batch):
        metrics = backward(batch)
        if len(seen) in steps:
            dict(algorithm.policy.named_parameters())["actor.head.bias"].grad[1] = value
        seen.append(1)
        return metrics

    algorithm.backward = spoilt
    return algorithm


def finite(algorithm):
    state = [t for s in algorithm.optimizer.state_dict()["state"].values() for t in s.values() if torch.is_tensor(t)]
    return bool(parameters(algorithm).isfinite().all()) and all(bool(tensor.isfinite().all()) for tensor in state)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e30])
@pytest.mark.parametrize("limit", [None, 0.5])
@pytest.mark.parametrize(("optimizer", "is_flat"), [(ADAM, False), (ADAM, True), (SGD, False)])
@pytest.mark.parametrize("kind", ["ppo", "grpo"])
def test_the_step_is_not_taken(kind, value, limit, optimizer, is_flat):
    fast = {"optimizer": flat_adam} if is_flat else {}
    algorithm = build(kind, max_grad_norm=limit, fast=fast, **optimizer)
    assert isinstance(algorithm.optimizer, FlatAdam) is is_flat
    spoil(algorithm, value, [1])
    with pytest.raises(DivergedError, match=r"the gradient of step 2 of update 1 is (not finite|too large)"):
        algorithm.update(make_rollout(algorithm.policy))
    assert finite(algorithm)


def test_the_parameter_is_named():
    algorithm = build("ppo", fast={"optimizer": flat_adam}, **ADAM)
    spoil(algorithm, math.nan, [0])
    with pytest.raises(
        DivergedError, match=r"step 1 of update 1 is not finite \(first actor.head.bias\); fix: lower learning_rate"
    ):
        algorithm.update(make_rollout(algorithm.policy))


@pytest.mark.parametrize("mode", ["drop", "zero"])
def test_other_steps_are_taken_as_if_the_skipped_one_had_not_been(mode, caplog):
    spoilt, shorter = (build("grpo", on_nonfinite=mode, **ADAM | {"num_epochs": epochs}) for epochs in (3, 2))
    metrics = spoil(spoilt, math.nan, [1]).update(make_rollout(spoilt.policy))
    expected = shorter.update(make_rollout(shorter.policy))
    assert torch.equal(parameters(spoilt), parameters(shorter))
    assert metrics.pop("train/skipped_steps") == 1
    assert metrics == expected
    assert (
        caplog.messages
        == [
            "the gradient of step 2 of update 1 is not finite: such steps are skipped"  # torch's clipping makes all of it NaN
        ]
    )


def test_equal_returns_are_warned_of_once_and_not_when_something_was_learned(caplog):
    algorithm = build("grpo", **ADAM)
    rollout = make_rollout(algorithm.policy)
    equal = rollout.clone()
    equal["reward"].zero_()
    for _ in range(2):
        assert algorithm.update(equal)["train/optimizer_steps"] == 0
    assert caplog.messages[0].startswith("update 1 learns nothing: no group has members with different returns")
    assert len(caplog.messages) == 1
    caplog.clear()
    learned = build("grpo", **ADAM)
    learned.update(rollout)
    learned.update(equal)
    resumed = build("grpo", **ADAM)
    resumed.load_state_dict(learned.state_dict())
    resumed.update(equal)
    assert caplog.messages == []


def test_a_kl_without_gradient_does_not_hide_equal_returns(caplog):
    algorithm = build("grpo", kl_coef=0.1, **ADAM)
    rollout = make_rollout(algorithm.policy).clone()
    rollout["reward"].zero_()
    assert algorithm.update(rollout)["train/grad_norm"] < 1e-6
    assert [message[:23] for message in caplog.messages] == ["update 1 learns nothing"]
    build("grpo", ent_coef=0.01, **ADAM).update(rollout)
    assert len(caplog.messages) == 1


def test_equal_returns_are_warned_of_at_the_first_update_with_data(caplog):
    algorithm = build("grpo", **ADAM)
    rollout = make_rollout(algorithm.policy).clone()
    rollout["reward"].zero_()
    nothing = rollout.clone()
    nothing["loss_mask"].zero_()
    algorithm.update(nothing)
    assert caplog.messages == []
    algorithm.update(rollout)
    assert [message[:23] for message in caplog.messages] == ["update 2 learns nothing"]


@pytest.mark.parametrize(("is_flat", "number"), [(False, 1), (True, 3)])
def test_the_step_and_the_parameter_that_are_named_belong_together(is_flat, number, caplog):
    """A fast optimiser, which does not wait for the gradient's norm, keeps the last gradient that it refused."""
    algorithm = build("ppo", on_nonfinite="drop", fast={"optimizer": flat_adam} if is_flat else {}, **ADAM)
    names, backward, seen = {0: "actor.head.bias", 2: "critic.head.bias"}, algorithm.backward, []

    def spoilt(batch):
        metrics = backward(batch)
        if (name := names.get(len(seen))) is not None:
            dict(algorithm.policy.named_parameters())[name].grad.fill_(math.nan)
        seen.append(1)
        return metrics

    algorithm.backward = spoilt
    algorithm.update(make_rollout(algorithm.policy))
    [message] = caplog.messages
    assert f"step {number} of update 1" in message
    if is_flat:
        assert f"(first {names[number - 1]})" in message
