"""Environments whose every number is known beforehand, and policies to match."""

from itertools import cycle

import gymnasium
import numpy as np
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from groupwise.collectors.groups import GroupCollector
from groupwise.config.algorithm import CollectionCfg
from groupwise.data.rollout import RolloutBuffer, TensorSpec
from groupwise.envs.base import EnvStep, GroupEnv, GroupStartReport, VectorEnv
from groupwise.envs.gymnasium import GymnasiumVectorEnv
from groupwise.policies.base import Action, Policy

CHECKED = GroupStartReport("Scripted", "native", start_varies=True, noise_varies=True)
"""Of environments whose starts need no check."""


class ScriptedEnv(gymnasium.Env):
    """Observes 100 * row + 10 * episode + steps taken; the reward is the steps taken; episodes end as scripted
    ("terminated", "truncated" or "both")."""

    observation_space = gymnasium.spaces.Box(0, 1000, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, row, script):
        self.row, self.script, self.episode, self.actions = row, cycle(script), -1, []

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.episode, self.count = self.episode + 1, 0
        self.length, self.end = next(self.script)
        return self.obs(), {}

    def step(self, action):
        self.actions.append(int(action))
        self.count += 1
        over = self.count == self.length
        return self.obs(), float(self.count), over and self.end != "truncated", over and self.end != "terminated", {}

    def obs(self):
        return np.array([100 * self.row + 10 * self.episode + self.count], np.float32)


class ScriptedGroupEnv(GroupEnv):
    """Episode ``k`` (in order of starting) lasts ``lengths[k]`` steps; observes 10 * k + steps taken; reward 1, or ``rewards[k]``.
    It raises an error at its step ``fails[k]`` (the first is 1)."""

    start_mode = "native"
    start_report = CHECKED
    env_id = "Scripted"
    obs_spec = TensorSpec((1,), torch.float32)
    observation_space = gymnasium.spaces.Box(0, 1e6, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, num_envs, lengths, end="terminated", limit=99, *, rewards=(1.0,), fails=None, block_size=1):
        self.num_envs, self.end, self.max_episode_steps, self.block_size = num_envs, end, limit, block_size
        self.lengths, self.rewards, self.fails = lengths, rewards, fails or {}
        self.started, self.taken, self.start_calls, self.paused, self.actions = 0, 0, [], [], []
        self.member, self.count, self.running = (np.zeros(num_envs, np.int64) for _ in range(3))

    def start(self, mask, start_seed, noise_seed):
        rows = np.flatnonzero(mask)
        self.start_calls.append((rows.tolist(), start_seed[mask].tolist(), noise_seed[mask].tolist()))
        self.member[rows] = np.arange(self.started, self.started + len(rows))
        self.count[rows], self.running[rows] = 0, 1
        self.started += len(rows)
        return self.obs()

    def pause(self, mask):
        self.paused.append(np.flatnonzero(mask).tolist())
        self.running[mask] = 0

    def step(self, action):
        running = self.running == 1
        self.taken += int(running.sum())
        self.actions.append(action.tolist())
        self.count[running] += 1
        failed = running & (self.count == np.array([self.fails.get(k, 0) for k in self.member.tolist()]))
        over = running & ~failed & (self.count == np.array(self.lengths)[self.member % len(self.lengths)])
        self.running[over | failed] = 0
        terminated = torch.from_numpy(over & (self.end != "truncated"))
        truncated = torch.from_numpy(over & (self.end != "terminated"))
        reward = np.where(running & ~failed, np.array(self.rewards)[self.member % len(self.rewards)], 0)
        lost = torch.from_numpy(failed) if failed.any() else None
        return EnvStep(self.obs(), torch.from_numpy(reward.astype(np.float32)), terminated, truncated, failed=lost)

    def obs(self):
        return torch.from_numpy((10 * self.member + self.count).astype(np.float32)[:, None])

    def reset(self, *, seed=None, mask=None):
        raise AssertionError("groups are started, never reset")

    def close(self):
        pass


class WalkEnv(gymnasium.Env):
    """A random start, noise in every step, and an end that depends on both: everything from ``np_random``."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self):
        self.steps_taken = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count, self.position, self.start = 0, self.np_random.normal(), self.np_random.normal()
        return self.obs(), {}

    def step(self, action):
        self.steps_taken += 1
        self.count += 1
        self.position += self.np_random.normal() + 0.1 * action
        return self.obs(), 1.0, bool(self.count >= 2 and self.position > 1.0), self.count >= 12, {}

    def obs(self):
        return np.array([self.start, self.position], np.float32)


class FakePolicy(Policy):
    """Uniform actions, 0 when deterministic; V(obs) is the first number of the observation, so values can be written out by hand."""

    action_spec = TensorSpec((), torch.int64)

    def __init__(self, actor_only=False, shift=0):
        super().__init__()
        self.actor_only, self.shift, self.value_calls = actor_only, shift, 0
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def act(self, obs, deterministic=False, generator=None):
        rows = obs.shape[0]
        action = (
            torch.zeros(rows, dtype=torch.int64) if deterministic else torch.randint(0, 2, (rows,), generator=generator)
        )
        return Action(action, torch.full((rows,), -0.75), None if self.actor_only else self.v(obs))

    def value(self, obs):
        self.value_calls += 1
        return self.v(obs)

    def v(self, obs):
        return (obs if isinstance(obs, torch.Tensor) else obs["position"])[:, 0].clone()

    def env_action(self, action):
        return action + self.shift

    def evaluate(self, batch):
        raise NotImplementedError


def scripted(autoreset: str, *scripts: list[tuple[int, str]]) -> VectorEnv:
    """Rows that follow the scripts, by Gymnasium's vector environment."""
    makers = [lambda row=row, script=script: ScriptedEnv(row, script) for row, script in enumerate(scripts)]
    env = SyncVectorEnv(makers, copy=False, autoreset_mode=AutoresetMode[autoreset.upper()])
    return GymnasiumVectorEnv(env, env_id="Scripted", max_episode_steps=None)


def buffer_for(env: VectorEnv, policy: Policy, num_steps: int) -> RolloutBuffer:
    return RolloutBuffer(
        env.num_envs, num_steps, obs_spec=env.obs_spec, action_spec=policy.action_spec, value=not policy.actor_only
    )


def collect_groups(env, num_steps, *, slots=8, actor_only=False, iteration=0, **kwargs):
    """A ``GroupCollector`` and its first rollout."""
    policy = FakePolicy(actor_only)
    if "horizon" in kwargs:
        cfg = kwargs.pop("collection", CollectionCfg())
        kwargs["collection"] = cfg.model_copy(update={"horizon": kwargs.pop("horizon")})
    collector = GroupCollector(env, policy, **kwargs)
    collector.iteration = iteration
    buffer = buffer_for(env, policy, slots)
    rollout = collector.collect(num_steps, buffer.start_rollout())
    buffer.add(rollout)
    return collector, rollout


def check(rollout, **expected):
    """The rollout has these numbers."""
    for key, numbers in expected.items():
        dtype = rollout[key].dtype
        assert rollout[key].squeeze(-1).tolist() == torch.tensor(numbers, dtype=dtype).tolist(), key
