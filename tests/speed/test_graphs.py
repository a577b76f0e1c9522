"""Rollouts that are replayed equal those of the method, to the last bit; on a CPU the same code runs without a capture."""

import pytest
import torch
from torch_rollouts import ENVS, goes_on_bit_for_bit, named

import groupwise as gw
from groupwise.collectors.torch import TorchGroupCollector, TorchVectorCollector
from groupwise.config.algorithm import CollectionCfg
from groupwise.envs.torch_env import TorchCartPole
from groupwise.speed import graphs
from groupwise.speed.graphs import RolloutGraph

STEPS = 6
KINDS = ("ppo", "grpo")


def made(kind, env="cartpole", *, graph=RolloutGraph, normalize_obs=False, device="cpu", num_envs=12, num_steps=STEPS):
    """Collector and buffer, with a policy that is the same each time."""
    env = ENVS[env](num_envs) if isinstance(env, str) else env
    torch.manual_seed(0)
    settings = gw.PolicyCfg(hidden_sizes=(8,), normalize_obs=normalize_obs)
    policy = gw.ActorCritic(env.observation_space, env.action_space, settings, actor_only=kind == "grpo").to(device)
    specs = {"obs_spec": env.obs_spec, "action_spec": policy.action_spec, "value": kind == "ppo", "device": device}
    buffer = gw.RolloutBuffer(num_envs, num_steps, **specs)
    if kind == "ppo":
        return TorchVectorCollector(env, policy, graph=graph), buffer
    collection = CollectionCfg(partial_groups="truncate", horizon=4)
    return TorchGroupCollector(env, policy, group_size=3, collection=collection, graph=graph), buffer


def equal(fast, reference, rollouts=4, change=lambda collector: None):
    """Rollouts, episodes and metrics of two collectors are the same; parameters and statistics move in between."""
    (fast, buffer), (reference, other) = fast, reference
    for _ in range(rollouts):
        rollout, expected = (c.collect(STEPS, b.start_rollout()) for c, b in ((fast, buffer), (reference, other)))
        found = dict(named(rollout))
        for key, tensor in named(expected):
            assert torch.equal(found[key], tensor), key
        assert fast.metrics() == reference.metrics()
        assert fast.finished == reference.finished
        assert fast.last_steps == reference.last_steps
        for collector, one in ((fast, rollout), (reference, expected)):
            collector.policy.update_normalizers(one, gw.engines.Engine())
            with torch.no_grad():
                for parameter in collector.policy.parameters():
                    parameter.add_(0.05)
            change(collector)
    return fast.play


@pytest.mark.parametrize(
    ("env", "normalize_obs"), [("cartpole", True), ("cut often", False), ("pendulum", True), ("named", False)]
)
@pytest.mark.parametrize("kind", KINDS)
def test_they_are_those_of_the_method(kind, env, normalize_obs):
    how = {"normalize_obs": normalize_obs}
    graph = equal(made(kind, env, **how), made(kind, env, graph=None, **how))
    assert graph.captures == 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_collector_goes_on_bit_for_bit(kind):
    goes_on_bit_for_bit(lambda: made(kind, "pendulum"))


class Windy(TorchCartPole):
    """CartPole in a wind that may change."""

    def __init__(self, num_envs, **settings):
        super().__init__(num_envs, **settings)
        self.wind = 0.0
        self.gust = torch.zeros(1, device=self.device)

    def transition(self, state, action, random):
        state, reward, fell = super().transition(state, action, random)
        return state + self.wind + self.gust, reward, fell


def blown(collector):
    collector.env.wind += 0.001
    collector.env.gust = collector.env.gust + 0.001


def loaded(collector):
    """Parameters at other places."""
    state = {name: tensor.clone() for name, tensor in collector.policy.state_dict().items()}
    collector.policy.load_state_dict(state, assign=True)


@pytest.mark.parametrize("change", [blown, loaded])
@pytest.mark.parametrize("kind", KINDS)
def test_a_graph_is_made_anew_where_constants_change(kind, change):
    times = iter(range(10**6))

    def sometimes(collector):
        if next(times) // 2 % 2:
            change(collector)

    graph = equal(made(kind, Windy(12)), made(kind, Windy(12), graph=None), 6, sometimes)
    assert graph.captures == 3
    assert not graph.failure


def test_constants_that_change_every_time_end_it():
    with pytest.warns(gw.errors.SlowPathWarning, match="others in every rollout"):
        equal(made("ppo", Windy(12)), made("ppo", Windy(12), graph=None), change=blown)


def test_tensors_that_change_in_place_are_read_at_each_replay():
    def change(collector):
        collector.env.gust.add_(0.01)

    assert equal(made("ppo", Windy(12)), made("ppo", Windy(12), graph=None), change=change).captures == 1


@pytest.mark.parametrize("kind", KINDS)
def test_hooks_hear_every_step(kind, monkeypatch):
    collector, buffer = made(kind)
    heard = []
    with (
        collector.calling(lambda action, step: heard.append(step.reward)),
        pytest.warns(gw.errors.SlowPathWarning, match="on_step of a callback"),
    ):
        collector.collect(STEPS, buffer.start_rollout())
    assert len(heard) == STEPS
    collector.collect(STEPS, buffer.start_rollout())
    assert len(heard) == STEPS
    assert collector.play.captures == 1
    monkeypatch.setattr(graphs, "LONGEST", 5)
    with pytest.warns(gw.errors.SlowPathWarning, match="num_steps=6 is more than 5"):
        collector.collect(STEPS, buffer.start_rollout())


@pytest.mark.parametrize("kind", KINDS)
def test_results_outlive_the_next_replay(kind):
    collector, buffer = made(kind)
    rollout = collector.collect(STEPS, buffer.start_rollout())
    kept, rows = [(rollout, rollout.clone())], collector.env.state_dict()
    before = {name: tensor.clone() for name, tensor in named(rows)}
    collector.collect(STEPS, buffer.start_rollout())
    for now, then in kept:
        assert all(torch.equal(dict(named(now))[key], tensor) for key, tensor in named(then))
    assert all(torch.equal(tensor, before[name]) for name, tensor in named(rows))
