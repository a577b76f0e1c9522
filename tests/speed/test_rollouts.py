"""Compiled rollouts of torch environments are the reference's to rounding, from the same draws."""

import pytest
import torch
from compiled_cases import check_compiled

import groupwise as gw
from groupwise.errors import SlowPathWarning
from groupwise.speed.rollouts import CompiledStepper, why_not_compiled

ROWS, STEPS = 24, 20


def make(kind):
    torch.manual_seed(0)
    env = gw.TorchCartPole(ROWS)
    policy = gw.ActorCritic(env.observation_space, env.action_space, actor_only=kind == "grpo")
    collector = (
        gw.TorchVectorCollector(env, policy, seed=1)
        if kind == "ppo"
        else gw.TorchGroupCollector(
            env, policy, group_size=8, collection=gw.CollectionCfg(partial_groups="truncate", attempt_steps=30), seed=1
        )
    )
    specs = {"obs_spec": env.obs_spec, "action_spec": policy.action_spec}
    return collector, gw.RolloutBuffer(ROWS, STEPS, value=kind == "ppo", **specs)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ppo", "grpo"])
def test_compiled_rollouts_are_the_references(kind, tmp_path):
    check_compiled(f"{kind}_rollouts", tmp_path)


def test_a_step_that_cannot_be_compiled_warns_and_the_reference_goes_on(monkeypatch):
    def fail(*args, **more):
        raise OSError("no compiler")

    (reference, buffer), (fast, other) = make("ppo"), make("ppo")
    fast.stepper = CompiledStepper(fast)
    monkeypatch.setattr("groupwise.speed.rollouts.compile_once", lambda function, **options: fail)
    with pytest.warns(SlowPathWarning, match="no compiler"):
        found = fast.collect(STEPS, rollout=other.start_rollout())
    expected = reference.collect(STEPS, rollout=buffer.start_rollout())
    assert torch.equal(found["obs"], expected["obs"])
    fast.collect(STEPS, rollout=other.start_rollout())


def test_other_collectors_and_policies_are_not_compiled():
    collector, _ = make("ppo")
    assert why_not_compiled(collector) is None
    handle = collector.policy.actor.register_forward_hook(lambda module, inputs, output: None)
    assert "hooks" in why_not_compiled(collector)
    handle.remove()
    env = gw.make_env(gw.EnvCfg(id="CartPole-v1", num_envs=2), grouped=False)
    policy = gw.ActorCritic(env.observation_space, env.action_space)
    assert "no torch environment" in why_not_compiled(gw.VectorCollector(env, policy))
