"""What policies that see, read and act share: the spaces of robots, and the user's call."""

from abc import abstractmethod
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from groupwise.config.policy import VLACfg
from groupwise.data.rollout import Nested
from groupwise.data.spaces import is_batched, obs_to_tensor, space_kind, subspaces
from groupwise.embodied.vision_language import ObsSizes
from groupwise.errors import UnsupportedSpaceError, require_extra
from groupwise.policies.base import Policy

SelfPolicy = TypeVar("SelfPolicy", bound="RobotPolicy")


class RobotPolicy(Policy):
    """A policy on images, proprioception and an instruction, for chunks of C actions of A numbers.

    Args:
        observation_space: a Dict of ``image`` uint8 [views, H, W, 3], ``proprio`` float [P], ``instruction`` uint8 [L].
        action_space: a bounded Box of floats, ``[A]`` or a chunk of them ``[C, A]``.
        actor_only: False adds a value head: a linear layer on a summary of the observation, 0 at first.
        gamma: not used: rewards are not scaled.

    Raises:
        UnsupportedSpaceError: other spaces.
        ConfigError: the model does not fit images, proprioception or actions, or there is no such model.
        MissingExtraError: transformers or peft are not installed.
    """

    settings: ClassVar[type[VLACfg]]
    """The class of ``cfg``."""
    gives_distribution = False
    value_modules = ("value_head",)
    value_head: nn.Linear | None

    def __init__(
        self,
        observation_space: Any,
        action_space: Any,
        cfg: VLACfg,
        *,
        actor_only: bool = False,
        gamma: float = 0.99,
    ) -> None:
        super().__init__()
        require_extra("transformers", "text")
        self.cfg = cfg
        self.sizes = _obs_sizes(observation_space)
        low, high = _bounds(action_space)
        self.observation_space, self.action_space = observation_space, action_space
        self.actor_only = actor_only
        self.num_actions, self.num_dims = low.shape
        self.register_buffer("low", low, persistent=False)
        self.register_buffer("high", high, persistent=False)
        self.low: Tensor
        self.high: Tensor

    @classmethod
    def from_pretrained(
        cls: type[SelfPolicy],
        path: str | Path,
        observation_space: Any,
        action_space: Any,
        *,
        actor_only: bool = False,
        **settings: Any,
    ) -> SelfPolicy:
        """A policy on a model of yours: a folder, or an id of the hub.

        Args:
            settings: further fields of ``cfg``, such as ``lora``.
        """
        cfg = cls.settings(path=str(path), **settings)
        return cls(observation_space, action_space, cfg, actor_only=actor_only)

    @torch.no_grad()
    def predict(self, obs: Any, deterministic: bool = True) -> Any:
        """Environment actions for one observation or a batch of them: numpy in, numpy out.

        Raises:
            DataError: an observation that does not fit the space.
        """
        batched = is_batched(self.observation_space, obs)
        tensor = obs_to_tensor(self.observation_space, obs, self.device, batched=batched)
        own = self.act(tensor if batched else tensor.unsqueeze(0), deterministic).action
        array = self.env_action(own).cpu().numpy().astype(self.action_space.dtype, copy=False)
        return array if batched else array[0]

    @torch.no_grad()
    def value(self, obs: Nested) -> Tensor:
        """V(obs) of shape [B], without gradient."""
        if self.value_head is None:
            return super().value(obs)
        value: Tensor = self.value_head(self._summary(obs))
        return value.squeeze(-1).float()

    @abstractmethod
    def _summary(self, obs: Nested) -> Float[Tensor, "batch feature"]:
        """What the value head reads."""

    def _make_value_head(self, width: int) -> nn.Linear | None:
        """A linear critic whose values are 0 at first, unless there is none."""
        if self.actor_only:
            return None
        head = nn.Linear(width, 1)
        nn.init.zeros_(head.weight)
        nn.init.zeros_(head.bias)
        return head

    def _value(self, summary: Float[Tensor, "batch feature"]) -> Float[Tensor, " batch"] | None:
        return None if self.value_head is None else self.value_head(summary).squeeze(-1).float()

    def _from_share(self, share: Float[Tensor, "*batch action dim"]) -> Float[Tensor, "..."]:
        """The environment's actions ``[*batch, *action_space.shape]`` at these shares of the way from ``low`` to ``high``."""
        return torch.lerp(self.low, self.high, share).reshape(*share.shape[:-2], *self.action_space.shape)

    def _to_share(self, action: Float[Tensor, "..."]) -> Float[Tensor, "*batch action dim"]:
        """The inverse of ``_from_share``."""
        batch = action.shape[: action.dim() - len(self.action_space.shape)]
        return (action.reshape(*batch, *self.low.shape) - self.low) / (self.high - self.low)


def _obs_sizes(space: Any) -> ObsSizes:
    parts = subspaces(space) or {}
    forms = {
        name: (part.dtype.name if part.dtype.kind == "u" else part.dtype.kind, len(part.shape))
        for name, part in parts.items()
        if space_kind(part) == "box"
    }
    fits = forms == {"image": ("uint8", 4), "proprio": ("f", 1), "instruction": ("uint8", 1)} and len(parts) == 3
    if not fits or parts["image"].shape[-1] != 3:
        raise UnsupportedSpaceError(
            f"a VLA policy cannot read {space}; fix: a Dict of image uint8 [views, H, W, 3], proprio float [P] and "
            "instruction uint8 [L] (UTF-8, zero-padded)"
        )
    views, height, width, _ = parts["image"].shape
    return ObsSizes(views, height, width, parts["proprio"].shape[0])


def _bounds(space: Any) -> tuple[Float[Tensor, "action dim"], Float[Tensor, "action dim"]]:
    """Bounds of each dimension of each action of a chunk."""
    is_box = space_kind(space) == "box" and space.dtype.kind == "f" and len(space.shape) in (1, 2)
    if not is_box or not (np.isfinite([space.low, space.high]).all() and (space.low < space.high).all()):
        raise UnsupportedSpaceError(
            f"a VLA policy needs a Box of floats [A], or a chunk of them [C, A], with low < high and both finite, got {space}; "
            "fix: gymnasium.wrappers.RescaleAction or TransformAction"
        )
    low, high = (
        torch.from_numpy(bound.astype(np.float32)).reshape(-1, space.shape[-1]) for bound in (space.low, space.high)
    )
    return low, high
