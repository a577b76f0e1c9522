"""The action head of Dict and Tuple spaces."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from groupwise.data.rollout import TensorSpec
from groupwise.policies.action_head import ActionHead


class Composite(ActionHead):
    """Independent parts, each with a head of its own; log-probabilities, entropies and KL are sums over them.

    An action is one vector, the parts one after another; those of the environment are float64, which holds all integers.
    ``params`` are the network's outputs for all parts, then the log standard deviations of all parts.
    """

    def __init__(self, heads: Sequence[ActionHead]) -> None:
        super().__init__()
        self.heads: Any = nn.ModuleList(heads)
        self.num_outputs = sum(head.num_outputs for head in heads)
        self.num_params = sum(head.num_params for head in heads)
        self._held = [head.num_params - head.num_outputs for head in heads]
        self._sizes = [math.prod(head.action_spec.shape) for head in heads]
        self.action_spec = TensorSpec((sum(self._sizes),), torch.float32)

    def sample(self, params: Float[Tensor, "*batch P"], generator: torch.Generator | None = None) -> Tensor:
        """Random actions of all parts."""
        parts = zip(self.heads, self._params(params), strict=True)
        return self._joined((head.sample(part, generator) for head, part in parts), torch.float32)

    def mode(self, params: Float[Tensor, "*batch P"]) -> Tensor:
        """The likeliest action of each part."""
        parts = zip(self.heads, self._params(params), strict=True)
        return self._joined((head.mode(part) for head, part in parts), torch.float32)

    def log_prob(self, params: Float[Tensor, "*batch P"], action: Tensor) -> Float[Tensor, "*batch"]:
        """Log-probability or log-density of the parts together."""
        parts = zip(self.heads, self._params(params), self._parts(action), strict=True)
        return torch.stack([head.log_prob(of_head, part) for head, of_head, part in parts]).sum(dim=0)

    def entropy(self, params: Float[Tensor, "*batch P"]) -> Float[Tensor, "*batch"]:
        """Sum of the entropies of the parts."""
        parts = zip(self.heads, self._params(params), strict=True)
        return torch.stack([head.entropy(part) for head, part in parts]).sum(dim=0)

    def kl(self, params: Float[Tensor, "*batch P"], other: Float[Tensor, "*batch P"]) -> Float[Tensor, "*batch"]:
        """Sum of the KL of the parts."""
        parts = zip(self.heads, self._params(params), self._params(other), strict=True)
        return torch.stack([head.kl(first, second) for head, first, second in parts]).sum(dim=0)

    def env_action(self, action: Tensor) -> Tensor:
        """The environment's numbers of all parts."""
        parts = zip(self.heads, self._parts(action), strict=True)
        return self._joined((head.env_action(part) for head, part in parts), torch.float64)

    def own_action(self, action: Tensor) -> Tensor:
        """The policy's own numbers of all parts."""
        parts = zip(self.heads, self._parts(action, own=False), strict=True)
        return self._joined((head.own_action(part) for head, part in parts), torch.float32)

    def _params(self, params: Tensor) -> list[Tensor]:
        """Those of each part."""
        outputs, held = torch.split(params, [self.num_outputs, self.num_params - self.num_outputs], dim=-1)
        outputs_of = torch.split(outputs, [head.num_outputs for head in self.heads], dim=-1)
        held_of = torch.split(held, self._held, dim=-1)
        return [torch.cat(both, dim=-1) for both in zip(outputs_of, held_of, strict=True)]

    def _parts(self, action: Tensor, *, own: bool = True) -> list[Tensor]:
        """The action of each part ``[*batch, ...]``, with the types of the policy's own."""
        batch, specs = action.shape[:-1], [head.action_spec for head in self.heads]
        parts = [
            part.reshape(*batch, *spec.shape)
            for part, spec in zip(torch.split(action, self._sizes, dim=-1), specs, strict=True)
        ]
        return [part.to(spec.dtype) for part, spec in zip(parts, specs, strict=True)] if own else parts

    def _joined(self, parts: Iterable[Tensor], dtype: torch.dtype) -> Tensor:
        """One vector of actions ``[*batch, ...]`` of each part."""
        dims = [len(head.action_spec.shape) for head in self.heads]
        flat = [part.reshape(*part.shape[: part.dim() - n], -1) for part, n in zip(parts, dims, strict=True)]
        return torch.cat([part.to(dtype) for part in flat], dim=-1)
