"""Compiled updates give the reference's parameters and metrics."""

import warnings

import gymnasium as gym
import pytest
import torch
from compiled_cases import check_compiled
from small_updates import OBS, build, make_rollout

import groupwise as gw
from groupwise.config.policy import PolicyCfg
from groupwise.errors import SlowPathWarning
from groupwise.policies.actor_critic import ActorCritic
from groupwise.speed.control import CompiledBackward, compiled_gradient, flat_adam
from groupwise.training.build import fast_paths

ADAM = {"optimizer": {"name": "adam"}, "learning_rate": 1e-3}
PPO = ("ppo", {"num_epochs": 3, "minibatch_size": 30, "max_grad_norm": 0.5})


FLAT = {"optimizer": flat_adam}
COMPILED = FLAT | {"gradient": compiled_gradient}


def make(kind, settings, fast=FLAT):
    torch.manual_seed(1)
    cfg = PolicyCfg(hidden_sizes=(16, 8))
    policy = ActorCritic(OBS, gym.spaces.Discrete(3), cfg, actor_only=kind == "grpo")
    return build(kind, policy=policy, fast=fast, **ADAM | settings)


@pytest.mark.slow
@pytest.mark.timeout(600)  # a minute of a processor, of which others may take most
def test_updates_and_runs_are_compiled_in_one_process_and_resumed_exactly_in_another(tmp_path):
    check_compiled(tmp_path, "updates whole", "resumed")


def test_a_function_that_cannot_be_compiled_warns_once_and_the_reference_goes_on(monkeypatch):
    reference, fast = (make(*PPO, fast=how) for how in (FLAT, COMPILED))

    def fail(*args, **more):
        raise OSError("no compiler")

    monkeypatch.setattr("groupwise.speed.control.compiled_for", fail)
    rollout = make_rollout(reference.policy)
    with pytest.warns(SlowPathWarning, match="no compiler"):
        fast.update(rollout)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fast.update(rollout)
    for _ in range(2):
        reference.update(rollout)
    for one, other in zip(fast.policy.parameters(), reference.policy.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)


class OwnLoss(gw.PPO):
    def loss(self, batch, evaluation):
        return super().loss(batch, evaluation)


def test_what_is_no_function_of_the_micro_batch_is_not_compiled():
    assert compiled_gradient(make(*PPO))
    sequence = {"objective": {"ratio": "sequence"}}
    scheduled = {"clip_coef": {"name": "linear", "start": 0.2}}
    for settings in (sequence, scheduled, {"objective": {"old_log_prob": "recomputed"}}):
        assert compiled_gradient(make("grpo", settings)) is None, settings
    hooked = make(*PPO)
    hooked.policy.actor.register_forward_hook(lambda module, inputs, output: None)
    assert compiled_gradient(hooked) is None
    own = make(*PPO)
    own.__class__ = OwnLoss
    assert compiled_gradient(own) is None


@pytest.mark.parametrize(
    ("how", "total_steps", "is_compiled"), [("auto", 19_999, False), ("auto", 20_000, True), ("off", 10**6, False)]
)
def test_runs_of_many_optimiser_steps_are_compiled(how, total_steps, is_compiled):
    algorithm = make("ppo", {"num_epochs": 10, "minibatch_size": 10, "num_steps": 20})
    cfg = gw.RunCfg(env={"num_envs": 5}, algorithm=algorithm.cfg, speed=how, total_steps=total_steps)
    of_algorithm = fast_paths(cfg)
    made = make("ppo", {}, fast=of_algorithm)
    assert isinstance(made.gradient, CompiledBackward) is is_compiled
    assert (len(made.parameters) == 1) is (how == "auto")
