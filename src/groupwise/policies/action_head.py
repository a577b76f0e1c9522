"""What every action head can do: sample, tell probabilities, and turn its own actions into the environment's."""

from abc import ABC, abstractmethod

import torch
from jaxtyping import Float
from torch import Tensor, nn

from groupwise.data.rollout import TensorSpec


class ActionHead(nn.Module, ABC):
    """A family of distributions over one action space."""

    num_params: int
    """P, flat parameters of one distribution."""
    num_outputs: int
    """How many of them the network gives; the rest is ``log_std``, which does not depend on the observation."""
    action_spec: TensorSpec
    """The policy's own action."""

    @abstractmethod
    def sample(self, params: Float[Tensor, "*batch P"], generator: torch.Generator | None = None) -> Tensor:
        """Random actions ``[*batch, ...]``, without gradient."""

    @abstractmethod
    def mode(self, params: Float[Tensor, "*batch P"]) -> Tensor:
        """The likeliest actions ``[*batch, ...]``."""

    @abstractmethod
    def log_prob(self, params: Float[Tensor, "*batch P"], action: Tensor) -> Float[Tensor, "*batch"]:
        """Log-probability or log-density of the policy's own actions, joint over their dimensions."""

    @abstractmethod
    def entropy(self, params: Float[Tensor, "*batch P"]) -> Float[Tensor, "*batch"]:
        """Entropy in nats, summed over the action's dimensions."""

    @abstractmethod
    def kl(self, params: Float[Tensor, "*batch P"], other: Float[Tensor, "*batch P"]) -> Float[Tensor, "*batch"]:
        """Exact KL(params || other) in nats, summed over the action's dimensions."""

    def score(
        self, params: Float[Tensor, "*batch P"], action: Tensor
    ) -> tuple[Float[Tensor, "*batch"], Float[Tensor, "*batch"]]:
        """``log_prob`` and ``entropy``, at one price where they share work."""
        return self.log_prob(params, action), self.entropy(params)

    def env_action(self, action: Tensor) -> Tensor:
        """What the environment receives for the policy's own actions."""
        return action

    def own_action(self, action: Tensor) -> Tensor:
        """The policy's own action for the environment's: the inverse of ``env_action``."""
        return action.to(self.action_spec.dtype)
