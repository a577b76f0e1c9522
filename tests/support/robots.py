"""A robot that needs no simulator: a bright square, moved by the policy to the side that an instruction names."""

import gymnasium as gym
import numpy as np
import torch

from groupwise.data.rollout import RolloutBuffer
from groupwise.data.spaces import obs_spec, obs_to_tensor

PIXELS, VIEWS, BYTES = 16, 2, 24
TASKS = ("go left", "go to the right")


def encoded(text, size=BYTES):
    """UTF-8, padded with zeros."""
    return np.frombuffer(text.encode().ljust(size, b"\0"), np.uint8).copy()


class Robot(gym.Env):
    """The square starts anywhere; it succeeds at the side that the instruction names, within ``limit`` steps."""

    def __init__(self, limit=12, task=None):
        self.limit, self.task = limit, task
        self.observation_space = gym.spaces.Dict(
            image=gym.spaces.Box(0, 255, (VIEWS, PIXELS, PIXELS, 3), np.uint8),
            proprio=gym.spaces.Box(-np.inf, np.inf, (2,), np.float32),
            instruction=gym.spaces.Box(0, 255, (BYTES,), np.uint8),
        )
        self.action_space = gym.spaces.Box(-1, 1, (2,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.side = int(self.np_random.integers(2)) if self.task is None else TASKS.index(self.task)
        self.place = self.np_random.uniform(-0.4, 0.4, 2)
        self.count = 0
        return self.observe(), {}

    def step(self, action):
        self.count += 1
        self.place = np.clip(self.place + 0.25 * np.asarray(action), -1, 1)
        done = bool(self.place[0] * (2 * self.side - 1) > 0.7)
        return self.observe(), float(done), done, self.count >= self.limit, {"is_success": done}

    def observe(self):
        image = np.zeros((VIEWS, PIXELS, PIXELS, 3), np.uint8)
        column, row = (int((x + 1) / 2 * (PIXELS - 3)) for x in self.place)
        image[0, row : row + 3, column : column + 3] = 255
        image[1, column : column + 3, row : row + 3] = (255, 0, 0)
        return {"image": image, "proprio": self.place.astype(np.float32), "instruction": encoded(TASKS[self.side])}


def register():
    """Register it as ``Robot-v0``."""
    if "Robot-v0" not in gym.registry:
        gym.register("Robot-v0", entry_point=Robot, max_episode_steps=12)


def observations(env, count=4, texts=TASKS):
    """First observations of episodes, which tell the texts one after another."""
    seen = [env.reset(seed=seed)[0] for seed in range(count)]
    batch = {key: np.stack([obs[key] for obs in seen]) for key in seen[0]}
    batch["instruction"] = np.stack([encoded(texts[i % len(texts)]) for i in range(count)])
    return obs_to_tensor(env.observation_space, batch, batched=True)


def make_rollout(env, policy, rows=4, steps=3):
    """What the policy would do in ``rows`` episodes of one group, whose last chunks are executed in part."""
    buffer = RolloutBuffer(
        rows,
        steps,
        obs_spec=obs_spec(env.observation_space),
        action_spec=policy.action_spec,
        num_units=policy.num_units if policy.scored_by == "token" else None,
        chunked=True,
        value=not policy.actor_only,
    )
    rollout = buffer.start_rollout()
    obs = observations(env, rows * (steps + 1))
    action = policy.act(obs, generator=torch.Generator().manual_seed(0))
    rollout["obs"] = obs.reshape(rows, steps + 1)
    for key, value in (("action", action.action), ("sample_log_prob", action.log_prob), ("value", action.value)):
        if value is not None:
            rollout[key].copy_(value.reshape(rollout[key].shape))
    real = rollout[:, :-1]
    for key in ("valid", "loss_mask"):
        real[key].fill_(True)
    real["episode_id"].copy_(torch.arange(rows)[:, None])
    real["group_id"].zero_()
    real["step"].copy_(torch.arange(steps))
    size = len(env.action_space.low)
    real["executed"].fill_(size)
    real["executed"][:, -1] = torch.arange(rows) % size + 1
    real["terminated"][:, -1] = True
    real["reward"][:, -1] = torch.arange(rows) % 2
    buffer.add(rollout)
    return rollout
