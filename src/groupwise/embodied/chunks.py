"""Action chunks: the policy decides on several actions at once, and the environment executes them, or the
first of them, open loop.

A decision is the time step of everything else: rollouts, advantages, the discount. Its reward is the plain sum of its steps'.
Actions that are not executed count in no ratio.
"""

from collections.abc import Sequence
from typing import Any, SupportsFloat

import gymnasium
import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from groupwise.data.spaces import space_kind
from groupwise.envs.snapshots import DrawsOnDemand
from groupwise.errors import EnvError
from groupwise.policies.actor_critic import ActorCritic
from groupwise.policies.base import Batch
from groupwise.policies.distributions import make_head


class ActionChunk(gymnasium.Wrapper):
    """Takes ``size`` actions at once, and executes the first ``num_steps`` of them, or fewer where the episode ends.

    The action space is ``Box [C, *A]``, the reward the sum over the executed steps, ``info`` that of the last one with
    ``executed``, their number. Step limits inside count environment steps.

    Args:
        size: C, actions of a chunk.
        reward_parts: entries of ``info`` that are summed like the reward.
        num_steps: None: all of them.

    Raises:
        EnvError: the action space is no ``Box``.
    """

    def __init__(
        self, env: gymnasium.Env, size: int, reward_parts: Sequence[str] = (), num_steps: int | None = None
    ) -> None:
        super().__init__(env)
        space: Any = env.action_space
        if space_kind(space) != "box":
            raise EnvError(
                f"env.action_chunk={size} needs actions in a Box, and those of {env} are in {space}; fix: env.action_chunk=1"
            )
        self._num_steps = num_steps or size
        self._reward_parts = tuple(reward_parts)
        low, high = (np.broadcast_to(bound, (size, *space.shape)) for bound in (space.low, space.high))
        self.action_space = gymnasium.spaces.Box(low, high, dtype=space.dtype)

    def step(self, action: Any) -> tuple[Any, SupportsFloat, bool, bool, dict[str, Any]]:
        """Execute the first actions of ``[C, *A]`` one after another, as far as the episode goes. Images are drawn at the end only."""
        env = self.env.unwrapped
        if not isinstance(env, DrawsOnDemand) or not env.draws:
            return self._execute(action)
        env.draws = False
        try:
            obs, reward, terminated, truncated, info = self._execute(action)
        finally:
            env.draws = True
        return {**obs, "image": env.image()}, reward, terminated, truncated, info

    def _execute(self, actions: Any) -> tuple[Any, SupportsFloat, bool, bool, dict[str, Any]]:
        total, executed, parts = 0.0, 0, dict.fromkeys(self._reward_parts, 0.0)
        for action in actions[: self._num_steps]:
            executed += 1
            obs, reward, terminated, truncated, info = self.env.step(action)
            total += float(reward)
            parts = {name: parts[name] + info[name] for name in parts if name in info}
            if terminated or truncated:
                break
        return obs, total, terminated, truncated, info | parts | {"executed": executed}


class ChunkActorCritic(ActorCritic):
    """An ``ActorCritic`` for ``Box [C, *A]``: a Gaussian for each action of the chunk, and a probability ratio for each.

    Each action's log-probability is joint over its dimensions. Actions that were not executed count in no ratio and no
    entropy. Arguments as of ``ActorCritic``.
    """

    scored_by = "token"

    def __init__(self, observation_space: Any, action_space: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(observation_space, action_space, *args, **kwargs)
        self.num_units = len(action_space.low)
        one = gymnasium.spaces.Box(action_space.low[0], action_space.high[0], dtype=action_space.dtype)
        self.head = make_head(one, self.cfg)

    def unit_mask(self, batch: Batch) -> Bool[Tensor, "*batch unit"]:
        """The actions that were executed."""
        return executed_actions(batch, self.num_units)

    def _params(self, features: Tensor) -> Tensor:
        """Means and log standard deviations of each action, ``[B, C, 2 * A]``."""
        params = super()._params(features)
        parts = (part.reshape(*params.shape[:-1], self.num_units, -1) for part in params.chunk(2, dim=-1))
        return torch.cat(list(parts), dim=-1)


def executed_actions(batch: Batch, size: int) -> Bool[Tensor, "*batch action"]:
    """Which of a chunk's ``size`` actions were executed: the first ``executed``, or all where the rollout does not tell."""
    executed: Int[Tensor, "*batch"] | None = batch.get("executed")
    if executed is None:
        episode: Any = batch["episode_id"]
        return torch.ones(*episode.shape, size, dtype=torch.bool, device=episode.device)
    return torch.arange(size, device=executed.device) < executed.unsqueeze(-1)
