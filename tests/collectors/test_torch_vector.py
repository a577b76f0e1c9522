"""Windows that stay on the device are those of the reference collector, number for number."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch_rollouts import ENVS, goes_on_bit_for_bit, never_waits, same

import groupwise as gw
from groupwise.collectors.torch import TorchVectorCollector
from groupwise.envs.torch_env import TorchCartPole


def made(env, num_envs, num_steps, *, in_torch, seed=0, actor_only=False, device="cpu", **cfg):
    """Collector and buffer, with a policy that is the same each time."""
    env = ENVS[env](num_envs, device=device)
    torch.manual_seed(seed)
    settings = gw.PolicyCfg(hidden_sizes=(8,), **cfg)
    policy = gw.ActorCritic(env.observation_space, env.action_space, settings, actor_only=actor_only).to(device)
    specs = {"obs_spec": env.obs_spec, "action_spec": policy.action_spec}
    buffer = gw.RolloutBuffer(num_envs, num_steps, **specs, value=not actor_only, device=device)
    if not in_torch:
        return gw.VectorCollector(env, policy, seed=seed), buffer
    return TorchVectorCollector(env, policy, seed=seed), buffer


@pytest.mark.slow
@settings(max_examples=25)
@given(
    env=st.sampled_from(sorted(ENVS)),
    num_envs=st.integers(1, 40),
    num_steps=st.integers(1, 30),
    seed=st.integers(0, 1000),
    actor_only=st.booleans(),
)
def test_they_are_those_of_the_reference(env, num_envs, num_steps, seed, actor_only):
    how = {"seed": seed, "actor_only": actor_only}
    collector, buffer = made(env, num_envs, num_steps, in_torch=True, **how)
    reference, other = made(env, num_envs, num_steps, in_torch=False, **how)
    for _ in range(4):
        rollout = collector.collect(num_steps, buffer.start_rollout())
        expected = reference.collect(num_steps, other.start_rollout())
        buffer.add(rollout)
        other.add(expected)
        same(rollout, expected)
        assert collector.metrics() == pytest.approx(reference.metrics(), rel=1e-6, abs=1e-6)
        assert collector.last_steps == reference.last_steps
        assert [e[1:] for e in collector.recent] == [e[1:] for e in reference.recent]
        for episode, other_episode in zip(collector.recent, reference.recent, strict=True):
            assert episode.episode_return == pytest.approx(other_episode.episode_return, abs=1e-5)
        assert len(collector.finished) == len(reference.finished)


@pytest.mark.parametrize("env", ENVS)
def test_no_step_waits_for_the_device(env):
    collector, buffer = made(env, 70, 12, in_torch=True, normalize_obs=True)
    never_waits(collector, buffer)
    assert collector.last_steps == 70 * 12


def test_a_resumed_collector_goes_on_bit_for_bit(device):
    goes_on_bit_for_bit(lambda: made("pendulum", 9, 6, in_torch=True, device=device))


def test_another_device_is_refused():
    env = TorchCartPole(4)
    policy = gw.ActorCritic(env.observation_space, env.action_space).to("meta")
    with pytest.raises(gw.errors.EnvError, match="TorchCartPole is on cpu, and the policy on meta; fix: device='meta'"):
        TorchVectorCollector(env, policy)


class Spoiled(TorchCartPole):
    """Some episodes, as their starts say, have rewards that are no numbers."""

    def transition(self, state, action, random):
        after, reward, terminated = super().transition(state, action, random)
        return after, torch.where(random.uniform() < 0.05, torch.nan, reward), terminated


def test_a_reward_that_is_no_number_spoils_its_own_episode_only():
    how = {"num_envs": 9, "num_steps": 40, "actor_only": False}
    found = []
    for in_torch in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(ENVS, "spoiled", partial(Spoiled, max_episode_steps=7))
            collector, buffer = made("spoiled", in_torch=in_torch, **how)
        for _ in range(3):  # some episodes go on in the next rollout
            rollout = collector.collect(40, buffer.start_rollout())
            found.append([episode[:2] for episode in collector.finished])
    ends = rollout["terminated"] | rollout["truncated"]
    assert found[:3] == found[3:]
    assert 0 < len(found[2]) < ends.sum()
