"""Rollouts that are replayed equal those of the method, to the last bit; on a CPU the same code runs without a capture."""

import gymnasium as gym
import pytest
import torch
from small_updates import OBS, build, make_rollout, parameters
from torch_rollouts import ENVS, goes_on_bit_for_bit, named

import groupwise as gw
from groupwise.collectors.torch import TorchGroupCollector, TorchVectorCollector
from groupwise.config.algorithm import CollectionCfg
from groupwise.envs.torch_env import TorchCartPole
from groupwise.speed import graphs
from groupwise.speed.control import flat_adam
from groupwise.speed.graphs import RolloutGraph, adam_graph, filled_up, gradient_graph

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


UPDATES = {
    "ppo": {"num_epochs": 2, "minibatch_size": 25, "max_grad_norm": 0.5, "ent_coef": 0.01},
    "grpo": {"num_epochs": 2, "minibatch_size": 40, "micro_batch_size": 7, "kl_coef": 0.1},
}


def updated(kind, *, graph=True, device="cpu"):
    """An algorithm, the same each time."""
    torch.manual_seed(1)
    cfg = gw.PolicyCfg(hidden_sizes=(16, 8), normalize_obs=True)
    policy = gw.ActorCritic(OBS, gym.spaces.Discrete(3), cfg, actor_only=kind == "grpo").to(device)
    fast = {"optimizer": adam_graph, "gradient": gradient_graph} if graph else {"optimizer": flat_adam}
    return build(kind, policy=policy, fast=fast, optimizer={"name": "adam"}, learning_rate=2**-10, **UPDATES[kind])


@pytest.mark.parametrize("fills", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_the_method(kind, fills, monkeypatch):
    if not fills:  # then to the last bit
        monkeypatch.setattr(graphs, "filled_up", lambda count: count)
    fast, reference = updated(kind), updated(kind, graph=False)
    for seed in range(3):
        rollout = make_rollout(reference.policy, seed)
        expected, found = reference.update(rollout), fast.update(rollout)
        tolerance = {"rtol": 1e-4, "atol": 1e-6} if fills else {"rtol": 0, "atol": 0}
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, **tolerance, msg=name)
        torch.testing.assert_close(parameters(fast), parameters(reference), **tolerance)
    assert not fast.gradient.failed


def test_steps_of_the_optimiser_are_those_of_the_method():
    cfg = gw.PPOCfg(optimizer={"name": "adamw", "weight_decay": 0.1})
    fast, reference = (make(cfg, [torch.nn.Parameter(torch.ones(3))]) for make in (adam_graph, flat_adam))
    gradient = torch.tensor([3.0, -4.0, 0.5])
    for rate, scale, limit in [(0.5, 1, 1.0), (0.25, 10, 1.0), (0.25, float("nan"), 1.0), (0.125, 3, None)]:
        norms = []
        for flat in (fast, reference):
            flat.param_groups[0]["lr"] = rate
            flat.zero_grad()
            flat.gradient.copy_(scale * gradient)
            norms.append(flat.clip(limit))
            flat.step()
        assert torch.equal(fast.vector, reference.vector)
        torch.testing.assert_close(norms[0], norms[1], rtol=0, atol=0, equal_nan=True)
    assert fast.state["step"] == 3
    assert all(torch.equal(fast.state[name], value) for name, value in reference.state.items())
    assert fast.refused[0].isnan().all()


def test_what_fills_up_a_micro_batch_counts_for_nothing():
    algorithm = updated("ppo")
    elements = _elements(algorithm)
    for count in (32, 31, 29, 32):  # the rest holds what came before
        batch = {key: value[:count] for key, value in elements.items()}
        found = [_gradient(algorithm, batch, backward) for backward in (algorithm.gradient, algorithm.backward)]
        for one, other in zip(*found, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)
    assert len(algorithm.gradient._graphs) == 2


def _elements(algorithm):
    batches, backward = [], algorithm.backward
    algorithm.gradient, keep = lambda batch: batches.append(batch) or backward(batch), algorithm.gradient
    algorithm.update(make_rollout(algorithm.policy, rows=16))
    algorithm.gradient = keep
    return {key: torch.cat([batch[key] for batch in batches])[:32] for key in batches[0]}


def _gradient(algorithm, batch, backward):
    algorithm.optimizer.zero_grad()
    return backward(dict(batch)), algorithm.optimizer.gradient.clone()


def test_sizes_are_few():
    assert [filled_up(count) for count in (1, 7, 8, 9, 16, 17, 18, 4096, 4097, 16_384)] == [
        1, 7, 8, 9, 16, 18, 18, 4096, 4608, 16_384
    ]  # fmt: skip
    assert len({filled_up(count) for count in range(10_000, 16_385)}) <= 8
    assert all(count <= filled_up(count) <= count * 1.13 for count in range(1, 5000))


def test_other_settings_need_another_graph():
    fast, reference = updated("ppo"), updated("ppo", graph=False)
    rollout = make_rollout(reference.policy)
    for algorithm in (fast, reference):
        algorithm.update(rollout)
        algorithm.cfg = algorithm.cfg.model_copy(update={"ent_coef": 0.5})
        algorithm.update(rollout)
    torch.testing.assert_close(parameters(fast), parameters(reference), rtol=0, atol=1e-6)


def test_what_cannot_be_captured_is_computed_by_the_method(monkeypatch):
    def refuse(*args):
        raise RuntimeError("waits for the device")

    fast, reference = updated("ppo"), updated("ppo", graph=False)
    collector, buffer = made("ppo")
    monkeypatch.setattr(graphs, "Replay", refuse)
    rollout = make_rollout(reference.policy)
    reference.update(rollout)
    with pytest.warns(gw.errors.SlowPathWarning, match="updates are not replayed .*: waits for the device"):
        fast.update(rollout)
    assert torch.equal(parameters(fast), parameters(reference))
    with pytest.warns(gw.errors.SlowPathWarning, match="rollouts are not replayed .*: waits for the device"):
        equal((collector, buffer), made("ppo", graph=None))


class Waiting(TorchCartPole):
    """CartPole that asks the host at each step."""

    def transition(self, state, action, random):
        assert float(state.abs().max()) >= 0
        return super().transition(state, action, random)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_on_a_gpu_rollouts_are_those_of_the_method(kind):
    fast, reference = (
        made(
            kind, TorchCartPole(12, max_episode_steps=7, device="cuda"), graph=graph, device="cuda", normalize_obs=True
        )
        for graph in (RolloutGraph, None)
    )
    graph = equal(fast, reference)
    assert graph.captures == 1
    assert not graph.failure


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_on_a_gpu_a_simulator_that_waits_uses_the_method(kind):
    fast, reference = (
        made(kind, Waiting(12, device="cuda"), graph=graph, device="cuda") for graph in (RolloutGraph, None)
    )
    with pytest.warns(gw.errors.SlowPathWarning, match="rollouts are not replayed"):
        equal(fast, reference)
    assert torch.rand(2, device="cuda").isfinite().all()  # generators and streams are as before


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_on_a_gpu_gradients_are_those_of_the_method(kind):
    fast, reference = (updated(kind, graph=graph, device="cuda") for graph in (True, False))
    for seed in range(3):
        rollout = make_rollout(updated(kind).policy, seed).to("cuda")
        expected, found = reference.update(rollout), fast.update(rollout)
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-3, atol=1e-5, msg=name)
        torch.testing.assert_close(parameters(fast), parameters(reference), rtol=1e-3, atol=1e-5)
    assert not fast.gradient.failed
