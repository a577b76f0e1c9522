"""Fixed windows of experience, for PPO."""

from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Int
from tensordict import TensorDict
from torch import Tensor

from groupwise.collectors.base import EnvCollector, Episode, MakeActor, env_steps
from groupwise.collectors.writer import RolloutWriter
from groupwise.data.rollout import Nested
from groupwise.envs.base import VectorEnv
from groupwise.errors import EnvError
from groupwise.policies.base import Policy
from groupwise.seeding import derive_seed


class VectorCollector(EnvCollector):
    """Steps every row ``num_steps`` times; episodes continue across windows. Works in every autoreset mode.

    A checkpoint keeps the running episodes where ``env.state_dict`` captures them (classic control, MuJoCo, environments in
    torch, and others made of numbers and arrays, or that clone a state of these). Elsewhere, and on ranks other than the one
    that saves, resuming a run starts new episodes.

    Args:
        env: gives observations on the policy's device.
        rank: of this process; each draws its own streams.
    """

    def __init__(
        self, env: VectorEnv, policy: Policy, *, seed: int = 0, rank: int = 0, actor: MakeActor | None = None
    ) -> None:
        super().__init__(env, policy, seed=seed, rank=rank, actor=actor)
        self._obs: Nested | None = None

    def collect(self, num_steps: int, rollout: TensorDict) -> TensorDict:
        """Exactly ``num_steps`` steps of every row.

        Raises:
            EnvError: ``num_steps`` is 1 with ``next_step`` resets, which take a step each.
        """
        if self.env.autoreset == "next_step" and num_steps < 2:
            raise EnvError(f"num_steps is {num_steps}, but {self.env.env_id} resets in an extra step; fix: at least 2")
        obs = self._begin() if self._obs is None else self._obs
        self._obs = None  # after an error, the next rollout begins anew
        writer = RolloutWriter(rollout, self.policy)
        obs = self._fill(num_steps, writer, obs)
        rollout = writer.finish(num_steps, obs)
        self._label(rollout, writer)
        self._obs = obs
        self.last_steps = env_steps(rollout, self.env.num_envs * num_steps)
        self.iteration += 1
        return rollout

    def state_dict(self) -> dict[str, Any]:
        """With the running episodes, where the environment's state can be captured."""
        env = None if self._obs is None else self.env.state_dict()
        if env is None or self._obs is None:
            return super().state_dict()
        obs = self._obs.clone() if isinstance(self._obs, Tensor) else self._obs.clone().to_dict()
        running = {"rank": self.rank, "env": env, "obs": obs, "dead": self._dead, "age": self._age}
        return super().state_dict() | {"running": running | {"return": self._return}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved ``state_dict``, with its running episodes if this rank saved them."""
        super().load_state_dict(state)
        running = state.get("running")
        if running is None or running["rank"] != self.rank:
            return
        for name in ("dead", "age", "return"):
            if running[name].shape != (self.env.num_envs,):
                raise ValueError(f"running.{name} has shape {running[name].shape}, expected ({self.env.num_envs},)")
        self.env.load_state_dict(running["env"])
        obs, device = running["obs"], self.policy.device
        self._obs = obs.to(device) if isinstance(obs, Tensor) else TensorDict(obs, [self.env.num_envs], device=device)
        self._dead, self._age, self._return = running["dead"], running["age"], running["return"]

    def _begin(self) -> Nested:
        rows = self.env.num_envs
        self._dead = np.zeros(rows, dtype=np.bool_)
        self._age = np.zeros(rows, dtype=np.int64)
        self._return = np.zeros(rows, dtype=np.float64)
        return self.env.reset(seed=derive_seed(self.seed, "env", self.rank, self.iteration))

    def _fill(self, num_steps: int, writer: RolloutWriter, obs: Nested) -> Nested:
        """Act, step and write; the observations to act on next."""
        act, generator = self.actor(), self.action_generator()
        for t in range(num_steps):
            writer.observe(t, obs)
            action = act(obs, generator=generator)
            writer.act(t, action)
            step = self.step_env(action)
            writer.outcome(t, step)
            obs = step.obs
            if self.env.autoreset != "next_step" and (done := step.terminated | step.truncated).any():
                final_obs = step.final_obs if self.env.autoreset == "same_step" else obs
                assert final_obs is not None
                writer.cut(t, step.truncated & ~step.terminated, final_obs)
                if self.env.autoreset == "disabled":
                    obs = self.env.reset(mask=done.cpu().numpy())
        return obs

    def _label(self, rollout: TensorDict, writer: RolloutWriter) -> None:
        """Fill masks, ids and steps from the ends of episodes; count the finished ones."""
        reward, terminated, truncated = (
            rollout[k][:, :-1].cpu().numpy() for k in ("reward", "terminated", "truncated")
        )
        done = terminated | truncated
        dead = self._resets_after(done) if self.env.autoreset == "next_step" else np.zeros_like(done)
        live = ~dead
        episode_id, step = label_episodes(done, dead, self._age)
        labels = {"valid": live, "loss_mask": live, "step": step, "group_id": episode_id, "episode_id": episode_id}
        for key, label in labels.items():
            rollout[key][:, :-1] = torch.from_numpy(label)

        returns = np.bincount(episode_id[live], weights=reward[live], minlength=done.size)
        goes_on = live[:, 0]
        returns[episode_id[goes_on, 0]] += self._return[goes_on]
        time, row = done.T.nonzero()
        ends = (returns[episode_id[row, time]], step[row, time] + 1, terminated[row, time])
        outcomes = writer.outcomes(row.tolist(), time.tolist())
        ended = zip(*(part.tolist() for part in ends), outcomes, strict=True)
        self.record(Episode(*end, *outcome) for *end, outcome in ended)
        over = done[:, -1] | dead[:, -1]
        self._return = np.where(over, 0.0, returns[episode_id[:, -1]])
        self._age = np.where(over, 0, step[:, -1] + 1)
        self._metrics = {"rollout/idle_fraction": float(dead.mean())}  # lost to ``next_step`` resets

    def _resets_after(self, done: Bool[np.ndarray, "row step"]) -> Bool[np.ndarray, "row step"]:
        """The slots in which a ``next_step`` environment only reset: those behind the ends of episodes."""
        dead = np.concatenate([self._dead[:, None], done[:, :-1]], axis=1)
        self._dead = done[:, -1]
        return dead


def label_episodes(
    done: Bool[np.ndarray, "row step"], dead: Bool[np.ndarray, "row step"], age: Int[np.ndarray, " row"]
) -> tuple[Int[np.ndarray, "row step"], Int[np.ndarray, "row step"]]:
    """The episode that each slot belongs to, numbered densely (-1 on dead slots), and its step there (0 on dead slots).

    Args:
        dead: the environment was resetting: no transition happened.
        age: steps that the episode running at slot 0 had taken before; 0 where none runs there.
    """
    begins = np.ones_like(done)
    begins[:, 1:] = (done | dead)[:, :-1]
    begins &= ~dead
    episode_id = begins.cumsum().reshape(done.shape) - 1
    slot = np.arange(done.shape[1])
    began = np.maximum.accumulate(np.where(begins, slot, 0), axis=1)
    step = slot - began + np.where(began == 0, age[:, None], 0)
    return np.where(dead, -1, episode_id), np.where(dead, 0, step)
