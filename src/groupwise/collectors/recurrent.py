"""Environments for a recurrent policy, which acts on what it remembers, too."""

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Bool
from tensordict import TensorDict
from torch import Tensor

from groupwise.data.rollout import Nested
from groupwise.envs.base import EnvStep, GroupEnv, Mask, Seeds, VectorEnv
from groupwise.policies.base import Action, Policy, with_state


class RecurrentEnv(GroupEnv):
    """Environments with the policy's state in each row's observation: ``{"obs": [N, ...], "state": [N, S]}``.

    The state is 0 where an episode begins, else what the policy's last action left. Final observations have the state that
    follows the last action, so that their values can be computed.
    """

    outcome: EnvStep
    """Of the last step, without states."""

    def __init__(self, env: VectorEnv, policy: Policy) -> None:
        self.env = env
        self.env_id, self.num_envs, self.device = env.env_id, env.num_envs, env.device
        self.max_episode_steps, self.autoreset = env.max_episode_steps, env.autoreset
        self.block_size = env.block_size if isinstance(env, GroupEnv) else 1
        self._state = torch.zeros(env.num_envs, policy.state_size, device=policy.device)
        self._resetting = torch.zeros(env.num_envs, dtype=torch.bool, device=policy.device)
        """Rows whose next step only resets them, with ``next_step``."""

    def remember(self, action: Action) -> None:
        """Keep the state that the actions left. Call it before ``step``."""
        assert action.state is not None
        self._state = action.state

    def reset(self, *, seed: int | None = None, mask: Mask | None = None) -> Nested:
        """First observations; rows that are not reset keep theirs, and their states."""
        obs = self.env.reset(seed=seed, mask=mask)
        self._resetting = torch.zeros_like(self._resetting)
        return self._begin(obs, mask)

    def start(self, mask: Mask, start_seed: Seeds, noise_seed: Seeds) -> Nested:
        """As ``reset``, from given seeds."""
        assert isinstance(self.env, GroupEnv)
        return self._begin(self.env.start(mask, start_seed, noise_seed), mask)

    def step(self, action: Tensor) -> EnvStep:
        """One step of every row."""
        step, state = self.env.step(action), self._state
        self.outcome = step
        done = step.terminated | step.truncated
        if self.autoreset == "same_step":
            if step.final_obs is not None:
                step = step._replace(final_obs=with_state(step.final_obs, state))
            state = _zeroed(state, done)
        elif self.autoreset == "next_step":
            state, self._resetting = _zeroed(state, self._resetting), done
        return step._replace(obs=with_state(step.obs, state))

    def pause(self, mask: Mask) -> None:
        """Pause the rows of ``mask``."""
        assert isinstance(self.env, GroupEnv)
        self.env.pause(mask)

    def state_dict(self) -> dict[str, Any] | None:
        """That of the environments. The policy's states are in the observations."""
        env = self.env.state_dict()
        return None if env is None else {"env": env, "resetting": self._resetting}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved ``state_dict``."""
        self.env.load_state_dict(state["env"])
        self._resetting = state["resetting"].to(self._resetting.device)

    def close(self) -> None:
        """Free the environments."""
        self.env.close()

    def _begin(self, obs: Nested, mask: Mask | None) -> TensorDict:
        """Observations after episodes began in the rows of ``mask``, in all of None."""
        begun = torch.ones_like(self._resetting) if mask is None else torch.from_numpy(mask).to(self._state.device)
        self._state = _zeroed(self._state, begun)
        return with_state(obs, self._state)


def _zeroed(state: Tensor, rows: Bool[Tensor, " row"]) -> Tensor:
    return state.masked_fill(rows.unsqueeze(-1), 0.0)
