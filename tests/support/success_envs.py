"""Tasks that say whether they are done."""

import gymnasium
import numpy as np
import torch

import groupwise as gw


class Unread(dict):
    """An info that must not be looked into."""

    def _refuse(self, *args):
        raise AssertionError("the info of a step that ends no episode was read")

    __contains__ = __getitem__ = __iter__ = get = items = keys = _refuse


class Touch(gymnasium.Env):
    """Lasts ``length`` steps. The goal is touched exactly while the last action is 1, and the reward is its flag, of type
    ``kind`` under ``key`` of the info, unless that is None. An info that is ``sealed`` may only be read at the end."""

    observation_space = gymnasium.spaces.Box(0, 10, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, key="is_success", length=3, kind=bool, sealed=False):
        self.key, self.length, self.kind, self.sealed = key, length, kind, sealed

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.count += 1
        over = self.count == self.length
        info = {"other": 3} if self.key is None else {self.key: self.kind(action == 1)}
        obs = np.array([self.count], np.float32)
        return obs, float(action), False, over, info if over or not self.sealed else Unread()


class TouchEither(Touch):
    """``Touch`` under two names. The start picks one, and the second number of the observation is its index."""

    names = ("left", "right")
    observation_space = gymnasium.spaces.Box(0, 10, (2,), np.float32)

    def reset(self, *, seed=None, options=None):
        obs, info = super().reset(seed=seed)
        self.index = int(self.np_random.integers(2))
        return self.look(obs), info | self.named()

    def step(self, action):
        obs, *outcome, info = super().step(action)
        return self.look(obs), *outcome, info | self.named()

    def named(self):
        return {"task": self.names[self.index]}

    def look(self, obs):
        return np.array([obs[0], self.index], np.float32)


class TorchTouch(gw.TorchGroupEnv):
    """``Touch`` in torch; row ``k`` lasts three steps, or ``lengths[k]``."""

    def __init__(self, num_envs, lengths=None, device="cpu"):
        super().__init__(
            num_envs,
            observation_space=gymnasium.spaces.Box(0, 10, (2,), np.float32),
            action_space=gymnasium.spaces.Discrete(2),
            max_episode_steps=None,
            env_id="TorchTouch",
            device=device,
        )
        self.lengths = torch.tensor([3] * num_envs if lengths is None else lengths, device=device)

    def initial(self, random):
        return torch.zeros(self.num_envs, 2, device=self.device)

    def transition(self, state, action, random):
        count = state[:, 0] + 1
        return torch.stack([count, action.float()], dim=1), action.float(), count >= self.lengths

    def success(self, state):
        return state[:, 1] == 1
