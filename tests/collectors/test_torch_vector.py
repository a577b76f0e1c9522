"""Windows that stay on the device are those of the reference collector, number for number."""

from contextlib import nullcontext

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from no_waiting import NoWaiting
from tape import Tape
from torch_rollouts import ENVS, Corridor, close, same

import groupwise as gw
from groupwise.engines import compiler
from groupwise.engines.replay import WARM_UP
from groupwise.errors import EnvError, SlowPathWarning


def made(env, num_envs, num_steps, *, resident, seed=0, actor_only=False, recorder=None, compiled=False, **cfg):
    """Collector and buffer, with a policy that is the same each time."""
    env = ENVS[env](num_envs)
    torch.manual_seed(seed)
    settings = gw.PolicyCfg(hidden_sizes=(8,), **cfg)
    policy = gw.ActorCritic(env.observation_space, env.action_space, settings, actor_only=actor_only)
    buffer = gw.RolloutBuffer(
        num_envs,
        num_steps,
        obs_spec=env.obs_spec,
        action_spec=policy.action_spec,
        value=not actor_only,
        resident=resident,
    )
    if not resident:
        return gw.VectorCollector(env, policy, seed=seed), buffer
    return gw.TorchVectorCollector(env, policy, seed=seed, recorder=recorder, compiled=compiled), buffer


def same_metrics(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=1e-6, abs=1e-6), name


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
    collector, buffer = made(env, num_envs, num_steps, resident=True, **how)
    reference, other = made(env, num_envs, num_steps, resident=False, **how)
    for iteration in range(4):
        if iteration == 2:
            collector.restart()
            reference.restart()
        rollout = collector.collect(num_steps, buffer.start_rollout())
        expected = reference.collect(num_steps, other.start_rollout())
        buffer.add(rollout)
        other.add(expected)
        same(rollout, expected)
        same_metrics(collector.metrics(), reference.metrics())
        assert collector.last_steps == reference.last_steps
        assert [e[1:] for e in collector.recent] == [e[1:] for e in reference.recent]
        for episode, other_episode in zip(collector.recent, reference.recent, strict=True):
            assert episode.episode_return == pytest.approx(other_episode.episode_return, abs=1e-5)
        assert len(collector.finished) == min(len(reference.finished), 100)


@pytest.mark.parametrize("env", ["cut often", "pendulum", "named", "reacher"])
def test_compiled_ones_are_the_others_to_rounding(env):
    """Parameters change between rollouts, in place, as an optimiser changes them."""
    compiled, reference = (
        made(env, 24, 12, resident=True, compiled=how, normalize_obs=env != "named") for how in (True, False)
    )
    for iteration, num_steps in enumerate((12, 5, 9)):
        if iteration == 2:
            compiled[0].restart()
            reference[0].restart()
        rollouts = [collector.collect(num_steps, buffer.start_rollout()) for collector, buffer in (compiled, reference)]
        close(*rollouts)
        same_metrics(compiled[0].metrics(), reference[0].metrics())
        for collector, _ in (compiled, reference):
            with torch.no_grad():
                for parameter in collector.policy.parameters():
                    parameter.mul_(1.5)
    assert compiled[0].compiles
    assert compiled[0]._compiled.is_compiled


def test_a_policy_that_is_changed_after_compiling_acts_as_it_is_then():
    compiled, reference = (made("pendulum", 8, 4, resident=True, compiled=how) for how in (True, False))

    def rollouts():
        return [collector.collect(4, buffer.start_rollout()) for collector, buffer in (compiled, reference)]

    close(*rollouts())
    first = compiled[0]._compiled
    for collector, _ in (compiled, reference):
        collector.policy.log_std = torch.nn.Parameter(torch.full((1,), -2.0))
    close(*rollouts())
    assert compiled[0]._compiled is not first
    looked = []
    compiled[0].policy.actor.register_forward_hook(lambda *_: looked.append(1))
    close(*rollouts())
    assert looked


def test_where_compiling_fails_collecting_goes_on_as_it_would_have(monkeypatch):
    def broken(*_, **__):
        raise OSError("no g++")

    monkeypatch.setattr(compiler, "compile_function", broken)
    compiled, reference = (made("cut often", 8, 4, resident=True, compiled=how) for how in (True, False))
    with pytest.warns(SlowPathWarning, match=r"collecting runs without the compiler \(OSError: no g\+\+\)"):
        first = compiled[0].collect(4, compiled[1].start_rollout())
    close(first, reference[0].collect(4, reference[1].start_rollout()))
    same(*(collector.collect(4, buffer.start_rollout()) for collector, buffer in (compiled, reference)))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"mlp_kernel": "torch"}, "the policy is not known to act as a function"),
        ({"activation": "elu"}, "the policy is not known to act as a function"),
    ],
)
def test_only_policies_that_act_purely_are_compiled(change, says):
    with pytest.raises(EnvError, match=says):
        made("cartpole", 4, 4, resident=True, compiled=True, **change)


def test_only_simulators_of_torchs_operations_alone_are_compiled(monkeypatch):
    monkeypatch.setattr(gw.TorchCartPole, "traceable", False)
    with pytest.raises(EnvError, match="TorchCartPole is not stepped by torch's operations alone"):
        made("cartpole", 4, 4, resident=True, compiled=True)


def test_a_hundred_episodes_and_more_have_their_mean():
    collector, buffer = made("cut often", 64, 30, resident=True)
    reference, other = made("cut often", 64, 30, resident=False)
    collector.collect(30, buffer.start_rollout())
    reference.collect(30, other.start_rollout())
    assert len(reference.finished) > 200
    same_metrics(collector.metrics(), reference.metrics())
    assert list(collector.recent) == list(reference.recent)


@pytest.mark.parametrize("env", ENVS)
@pytest.mark.parametrize("actor_only", [True, False])
def test_nothing_waits(env, actor_only):
    collector, buffer = made(env, 70, 12, resident=True, actor_only=actor_only, mlp_kernel="torch", normalize_obs=True)
    for iteration in range(3):
        with NoWaiting() if iteration else nullcontext():
            buffer.add(collector.collect(12, buffer.start_rollout()))
            assert collector.pending() is not None
        collector.metrics()
    collector.restart()
    with NoWaiting():
        buffer.add(collector.collect(12, buffer.start_rollout()))


@pytest.mark.parametrize("env", ["cut often", "named", "point mass"])
def test_a_replay_collects_what_a_call_does(env):
    tape = Tape()
    collector, buffer = made(env, 33, 11, resident=True, mlp_kernel="torch", recorder=tape)
    plain, other = made(env, 33, 11, resident=True, mlp_kernel="torch")
    for iteration in range(WARM_UP + 4):
        if iteration == WARM_UP + 2:
            collector.restart()
            plain.restart()
        for each in (collector, plain):  # what is learned meanwhile is seen
            with torch.no_grad():
                next(each.policy.parameters()).add_(0.01)
        rollout, expected = (c.collect(11, b.start_rollout()) for c, b in ((collector, buffer), (plain, other)))
        same(rollout, expected)
        assert collector.metrics() == plain.metrics()
    assert tape.replays == 4


def test_numbers_that_are_not_finite_are_told_when_they_cross():
    class Failing(Corridor):
        def transition(self, state, action, random):
            after, reward, terminated = super().transition(state, action, random)
            return after, torch.where(torch.arange(self.num_envs) == 3, torch.nan, reward), terminated

    env = Failing(5)
    policy = gw.ActorCritic(env.observation_space, env.action_space)
    buffer = gw.RolloutBuffer(5, 4, obs_spec=env.obs_spec, action_spec=policy.action_spec, value=True, resident=True)
    collector = gw.TorchVectorCollector(env, policy)
    buffer.add(collector.collect(4, buffer.start_rollout()))
    with pytest.raises(gw.DataError, match="reward of environment 3 at step 0"):
        collector.metrics()


def test_a_resumed_collector_goes_on_like_one_that_restarted():
    collector, buffer = made("point mass", 9, 6, resident=True)
    for _ in range(3):
        collector.collect(6, buffer.start_rollout())
        collector.metrics()
    collector.restart()
    state = collector.state_dict()
    resumed, other = made("point mass", 9, 6, resident=True)
    resumed.load_state_dict(state)
    resumed.iteration = 3
    for _ in range(2):
        same(collector.collect(6, buffer.start_rollout()), resumed.collect(6, other.start_rollout()))
        assert collector.metrics() == resumed.metrics()


def test_another_device_is_refused():
    env = gw.TorchCartPole(4)
    policy = gw.ActorCritic(env.observation_space, env.action_space).to("meta")
    with pytest.raises(gw.EnvError, match="TorchCartPole is on cpu, and the policy on meta; fix: device='meta'"):
        gw.TorchVectorCollector(env, policy)
