"""Simulators in torch of several kinds, and rollouts from them compared."""

from functools import partial

import gymnasium as gym
import numpy as np
import torch
from no_waiting import NoWaiting
from tensordict import TensorDict
from torch_pendulum import TorchPendulum

import groupwise as gw
from groupwise.envs.torch_env import TorchCartPole, TorchGroupEnv


class Corridor(TorchGroupEnv):
    """A walk of random pace that ends at 1; observations have names."""

    def __init__(self, num_envs, *, max_episode_steps=5, device="cpu"):
        box = gym.spaces.Box(-10, 10, (1,), np.float32)
        super().__init__(
            num_envs,
            env_id="Corridor",
            observation_space=gym.spaces.Dict({"place": box, "pace": box}),
            action_space=gym.spaces.Box(-1, 1, (1,), np.float32),
            max_episode_steps=max_episode_steps,
            device=device,
        )

    def initial(self, random):
        return {"place": random.uniform(1, low=-1.0, high=0.5), "pace": random.uniform(1)}

    def transition(self, state, action, random):
        place = state["place"] + state["pace"] * action + 0.1 * random.normal(1)
        return {"place": place, "pace": state["pace"]}, place[:, 0], place[:, 0] > 1

    def observe(self, state):
        return TensorDict(dict(state), batch_size=[self.num_envs])


ENVS = {
    "cartpole": TorchCartPole,
    "cut often": partial(TorchCartPole, max_episode_steps=7),
    "pendulum": partial(TorchPendulum, max_episode_steps=9),
    "named": Corridor,
    "never cut": partial(Corridor, max_episode_steps=None),
}

SETTINGS = {
    "ppo": gw.PPOCfg(num_steps=12, minibatch_size=24, num_epochs=3),
    "grpo": gw.GRPOCfg(
        num_steps=12,
        minibatch_size=24,
        num_epochs=3,
        group_size=4,
        credit={"baseline": "mean", "group_key": "group_step", "returns": "return_to_go", "scale": "batch_std"},
        collection={"partial_groups": "truncate"},
    ),
}
"""Algorithms on these simulators."""


def named(nested, prefix=""):
    """Every tensor by name."""
    if isinstance(nested, torch.Tensor):
        yield prefix, nested
        return
    for key, leaf in nested.items():
        yield from named(leaf, f"{prefix}.{key}")


def close(rollout, expected):
    """Equal to rounding, and what is counted, or follows from it, exactly."""
    found = dict(named(rollout))
    for key, tensor in named(expected):
        torch.testing.assert_close(found[key], tensor, rtol=1e-4, atol=2e-5, msg=key)


def same(rollout, expected):
    found = dict(named(rollout))
    for key, tensor in named(expected):
        if key in (".value", ".next_value"):  # of products of another size
            torch.testing.assert_close(found[key], tensor, rtol=0, atol=1e-6, msg=key)
        else:
            assert torch.equal(found[key], tensor), key


def goes_on_bit_for_bit(make):
    """A collector that continues from a saved state collects the same rollouts of 6 steps. ``make`` gives one and its buffer."""
    (collector, buffer), (resumed, other) = make(), make()
    for _ in range(3):
        collector.collect(6, buffer.start_rollout())
    resumed.load_state_dict(collector.state_dict())
    resumed.iteration = 3
    for _ in range(2):
        rollout = collector.collect(6, buffer.start_rollout())
        same(rollout, resumed.collect(6, other.start_rollout()))
        assert rollout["action"].device.type == collector.env.device.type
        assert collector.metrics() == resumed.metrics()


def never_waits(collector, buffer):
    """Rollouts of 12 steps, none of which waits for the device."""
    step = collector.step

    def without_waiting(*args):
        with NoWaiting():
            return step(*args)

    collector.step = without_waiting
    for _ in range(2):
        buffer.add(collector.collect(12, buffer.start_rollout()))
