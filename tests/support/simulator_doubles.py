"""Small simulators with the interfaces of known ones, also where these are inconvenient.

All have the same task: push a point on a line to the origin. It moves by a fifth of the action. Success (closer than 0.1)
terminates, and ``LIMIT`` steps truncate. All of them reset a row in the step in which its episode ends.
"""

from types import SimpleNamespace

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from tensordict import TensorDict

LIMIT = 8
ACTION_SPACE = spaces.Box(-1, 1, (1,), np.float32)


class _Points:
    """The task itself: ``position`` [N, 1] and ``elapsed`` [N]."""

    single_action_space = ACTION_SPACE

    def __init__(self, num_envs, limit=LIMIT):
        self.num_envs, self.limit = num_envs, limit
        self.device = torch.device("cpu")
        self.position, self.elapsed = torch.zeros(num_envs, 1), torch.zeros(num_envs, dtype=torch.int64)

    def move(self, action):
        """Rewards, successes and time-outs [N]."""
        self.position = self.position + 0.2 * action.clamp(-1, 1)
        self.elapsed = self.elapsed + 1
        distance = self.position.abs().squeeze(1)
        return -distance, distance < 0.1, self.elapsed >= self.limit

    def begin(self, rows, generator=None):
        """Starts drawn for the rows at once, as simulators do."""
        self.position, self.elapsed = self.position.clone(), self.elapsed.clone()
        self.position[rows] = torch.rand(len(rows), 1, generator=generator) * 2 - 1
        self.elapsed[rows] = 0


class LearningEnv(_Points):
    """As EmbodiChain's ``LearningVecEnv``: a flat tensor, one generator, ``env_ids``; the final observation is lost."""

    max_episode_steps = LIMIT

    def __init__(self, num_envs):
        super().__init__(num_envs)
        self.single_observation_space = spaces.Box(-np.inf, np.inf, (1,), np.float32)
        self._generator = torch.Generator().manual_seed(0)

    def reset(self, *, seed=None, options=None):
        if seed is not None:
            self._generator.manual_seed(seed)
        rows = (options or {}).get("env_ids")
        self.begin(torch.arange(self.num_envs) if rows is None else rows, self._generator)
        return self.position, {}

    def step(self, action):
        reward, success, late = self.move(action)
        self.begin(torch.nonzero(success | late).squeeze(1), self._generator)
        return self.position, reward, success, late, {"success": success}

    def close(self):
        pass


class EmbodiChainEnv(_Points):
    """As EmbodiChain's ``BaseEnv``: nested TensorDicts written in place, torch's global generator, ``reset_ids``."""

    max_episode_steps = LIMIT

    def __init__(self, num_envs):
        super().__init__(num_envs)
        robot = TensorDict({"qpos": torch.zeros(num_envs, 1, dtype=torch.float64)}, [num_envs])
        self._obs = TensorDict({"robot": robot, "limit": torch.full((num_envs, 1), float(LIMIT))}, [num_envs])

    def reset(self, seed=None, options=None):
        if seed is not None:
            torch.manual_seed(seed)
        self._initialize(**(options or {}))
        return self._observe(), TensorDict({}, [self.num_envs])

    def step(self, action):
        reward, success, late = self.move(action)
        info = TensorDict({"success": success, "fail": torch.zeros_like(success)}, [self.num_envs])
        obs, ended = self._observe(), torch.nonzero(success | late).squeeze(1)
        if len(ended) > 0:
            obs, _ = self.reset(options={"reset_ids": ended})
        return obs, reward, success, late, info

    def _initialize(self, reset_ids=None):
        self.begin(torch.arange(self.num_envs) if reset_ids is None else reset_ids)

    def _observe(self):
        self._obs["robot", "qpos"].copy_(self.position)
        return self._obs


class IsaacLabEnv(_Points):
    """As Isaac Lab's ``RslRlVecEnvWrapper``: groups of observations, four values, time-outs only with an infinite horizon.

    It is reset when it is made, and never again from outside.
    """

    def __init__(self, num_envs, is_finite_horizon=False):
        super().__init__(num_envs)
        self.cfg = SimpleNamespace(is_finite_horizon=is_finite_horizon)
        self.max_episode_length, self.num_actions = LIMIT, 1
        self.begin(torch.arange(num_envs))

    @property
    def unwrapped(self):
        return self

    @property
    def episode_length_buf(self):
        return self.elapsed

    @episode_length_buf.setter
    def episode_length_buf(self, value):
        self.elapsed = value

    def get_observations(self):
        return TensorDict({"policy": self.position, "critic": self.position.repeat(1, 2)}, [self.num_envs])

    def step(self, action):
        reward, success, late = self.move(action)
        self.begin(torch.nonzero(success | late).squeeze(1))
        extras = {"log": {}} if self.cfg.is_finite_horizon else {"log": {}, "time_outs": late & ~success}
        return self.get_observations(), reward, (success | late).long(), extras


class RslRlEnv:
    """As rsl_rl's ``VecEnv`` at its barest, with episode lengths that the runner has randomised, and a limit per row."""

    num_actions = 1
    device = "cpu"

    def __init__(self, num_envs):
        self.num_envs = num_envs
        self.points = _Points(num_envs, limit=torch.full((num_envs,), LIMIT))
        self.points.begin(torch.arange(num_envs))
        self.max_episode_length = torch.full((num_envs,), LIMIT)
        self.episode_length_buf = torch.arange(num_envs) % LIMIT

    def get_observations(self):
        return TensorDict({"policy": self.points.position}, [self.num_envs])

    def step(self, action):
        self.points.elapsed = self.episode_length_buf
        reward, success, late = self.points.move(action)
        self.points.begin(torch.nonzero(success | late).squeeze(1))
        self.episode_length_buf = self.points.elapsed
        return self.get_observations(), reward, success | late, {"time_outs": (late & ~success).float()}


class PlaygroundEnv(_Points):
    """As mujoco_playground's ``RSLRLBraxWrapper``: every reset, also inside ``step``, is to the row's own first state."""

    single_action_space = None
    num_actions = 1
    max_episode_length = LIMIT

    def __init__(self, num_envs):
        super().__init__(num_envs)
        del self.device
        self._first = torch.linspace(-1, 1, num_envs)[:, None]
        self.num_resets = 0

    def reset(self):
        self.num_resets += 1
        self.position, self.elapsed = self._first, torch.zeros_like(self.elapsed)
        return TensorDict({"state": self.position}, [self.num_envs])

    def get_observations(self):
        return self.reset()

    def step(self, action):
        reward, success, late = self.move(action)
        done = success | late
        self.position = torch.where(done[:, None], self._first, self.position)
        self.elapsed = torch.where(done, 0, self.elapsed)
        info = {"time_outs": (late & ~success).float(), "observations": {"critic": None}, "log": {}}
        return TensorDict({"state": self.position}, [self.num_envs]), reward, done.float(), info


class ManiSkillEnv(gymnasium.vector.VectorEnv):
    """As ManiSkill's ``ManiSkillVectorEnv``: seeds per row, states, final observations, and starts from ``torch.rand``."""

    metadata = {"autoreset_mode": gymnasium.vector.AutoresetMode.SAME_STEP}

    def __init__(self, num_envs, auto_reset=True):
        self.num_envs, self.auto_reset = num_envs, auto_reset
        self.base_env = _ManiSkillBase(num_envs)
        self.spec = SimpleNamespace(id="Push-v1", max_episode_steps=LIMIT)
        self.single_action_space = ACTION_SPACE
        self.device = self.base_env.device

    @property
    def unwrapped(self):
        return self.base_env

    def reset(self, *, seed=None, options=None):
        return self.base_env.reset(seed=seed, options=options)

    def step(self, actions):
        reward, success, late = self.base_env.move(actions)
        obs, info = self.base_env.observe(), {"success": success}
        done = success | late
        if done.any() and self.auto_reset:
            final_obs, final_info = obs, info
            obs, info = self.reset(options={"env_idx": torch.arange(self.num_envs)[done]})
            info |= {"final_observation": final_obs, "final_info": final_info}
            info |= {"_final_observation": done, "_final_info": done}
        return obs, reward, success, late, info


class _ManiSkillBase(_Points):
    def reset(self, seed=None, options=None):
        rows = torch.arange(self.num_envs) if options is None else options["env_idx"]
        with torch.random.fork_rng():
            if seed is not None:
                torch.manual_seed(seed if isinstance(seed, int) else seed[0])
            self.begin(rows)
        return self.observe(), {"success": self.position.abs().squeeze(1) < 0.1, "reconfigure": False}

    def observe(self):
        rgb = (127.5 * (self.position.clamp(-1, 1) + 1)).to(torch.uint8)[:, :, None].repeat(1, 2, 3)
        return {"agent": {"qpos": self.position.clone()}, "sensor_data": {"base": {"rgb": rgb}}}

    def get_state_dict(self):
        return {"actors": {"point": self.position.clone()}}

    def set_state_dict(self, state, env_idx=None):
        self.position = self.position.clone()
        self.position[torch.arange(self.num_envs) if env_idx is None else env_idx] = state["actors"]["point"]


DOUBLES = (LearningEnv, EmbodiChainEnv, IsaacLabEnv, RslRlEnv, PlaygroundEnv, ManiSkillEnv)
