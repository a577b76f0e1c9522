"""What is compiled of rollouts; ``test_compile`` compares them with the reference."""

import pytest
import torch
from compiled_cases import STEPS, collecting

import groupwise as gw
from groupwise.errors import SlowPathWarning
from groupwise.speed.control import compiled_stepper
from groupwise.speed.control import why_rollouts_not_compiled as why_not_compiled


def test_a_step_that_cannot_be_compiled_warns_and_the_reference_goes_on(monkeypatch):
    def fail(*args, **more):
        raise OSError("no compiler")

    (reference, buffer), (fast, other) = collecting("ppo"), collecting("ppo", stepper=compiled_stepper)
    monkeypatch.setattr("groupwise.speed.control.compiled_for", lambda function, example, **options: fail)
    with pytest.warns(SlowPathWarning, match="no compiler"):
        found = fast.collect(STEPS, rollout=other.start_rollout())
    expected = reference.collect(STEPS, rollout=buffer.start_rollout())
    assert torch.equal(found["obs"], expected["obs"])
    fast.collect(STEPS, rollout=other.start_rollout())


def test_other_collectors_and_policies_are_not_compiled():
    collector, _ = collecting("ppo")
    assert why_not_compiled(collector) is None
    handle = collector.policy.actor.register_forward_hook(lambda module, inputs, output: None)
    assert "hooks" in why_not_compiled(collector)
    handle.remove()
    env = gw.make_env(gw.EnvCfg(id="CartPole-v1", num_envs=2), grouped=False)
    policy = gw.ActorCritic(env.observation_space, env.action_space)
    assert "no torch environment" in why_not_compiled(gw.VectorCollector(env, policy))
