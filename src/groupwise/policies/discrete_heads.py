"""Action heads of choices and coins."""

import math

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, pad

from groupwise.data.rollout import TensorSpec
from groupwise.functional.kl import bernoulli_kl, categorical_kl
from groupwise.policies.action_head import ActionHead

_LOWEST = torch.finfo(torch.float32).min
_TINY = torch.finfo(torch.float32).tiny


class Categorical(ActionHead):
    """One of ``n`` choices; ``params`` are logits, -inf forbids a choice.

    Args:
        start: the environment's number of the first choice.
    """

    def __init__(self, n: int, start: int = 0) -> None:
        super().__init__()
        self.num_params = self.num_outputs = n
        self.start = start
        self.action_spec = TensorSpec((), torch.int64)

    def sample(self, params: Float[Tensor, "*batch P"], generator: torch.Generator | None = None) -> Tensor:
        """Random indices by the Gumbel-max trick; a choice of probability 0 is never taken."""
        return _sample_index(params, generator)

    def mode(self, params: Float[Tensor, "*batch P"]) -> Tensor:
        """Index of the largest logit, the first one on a tie."""
        return params.argmax(dim=-1)

    def log_prob(self, params: Float[Tensor, "*batch P"], action: Tensor) -> Float[Tensor, "*batch"]:
        """Log-softmax at the action."""
        return _pick(torch.log_softmax(params, dim=-1), action)

    def entropy(self, params: Float[Tensor, "*batch P"]) -> Float[Tensor, "*batch"]:
        """Entropy of the softmax, ``-sum p log p``."""
        return _categorical_entropy(torch.log_softmax(params, dim=-1))

    def score(
        self, params: Float[Tensor, "*batch P"], action: Tensor
    ) -> tuple[Float[Tensor, "*batch"], Float[Tensor, "*batch"]]:
        """``log_prob`` and ``entropy`` from one softmax."""
        log_probs = torch.log_softmax(params, dim=-1)
        return _pick(log_probs, action), _categorical_entropy(log_probs)

    def kl(self, params: Float[Tensor, "*batch P"], other: Float[Tensor, "*batch P"]) -> Float[Tensor, "*batch"]:
        """Exact KL of the softmaxes."""
        return categorical_kl(params, other)

    def env_action(self, action: Tensor) -> Tensor:
        """The environment's numbers: indices from ``start``."""
        return action + self.start if self.start else action

    def own_action(self, action: Tensor) -> Tensor:
        """Indices from 0."""
        return action.to(torch.int64) - self.start


class MultiCategorical(ActionHead):
    """Independent choices; ``params`` are their logits, one choice after another in the order of ``nvec.ravel()``.

    Args:
        nvec: options of each choice, of any shape; the action has that shape.
        start: the environment's number of each choice's first option, shaped like ``nvec``.
    """

    def __init__(self, nvec: np.ndarray, start: np.ndarray) -> None:
        super().__init__()
        sizes = nvec.ravel()
        self.num_params = self.num_outputs = int(sizes.sum())
        self.action_spec = TensorSpec(tuple(nvec.shape), torch.int64)
        # logits of all choices as one table [choice, option]; short rows point at a column of impossible options
        option = np.arange(sizes.max())
        table = np.where(option < sizes[:, None], (sizes.cumsum() - sizes)[:, None] + option, self.num_params)
        self.register_buffer("table", torch.from_numpy(table), persistent=False)
        self.register_buffer("start", torch.from_numpy(np.array(start, np.int64)), persistent=False)
        self.table: Tensor
        self.start: Tensor

    def _logits(self, params: Tensor) -> Float[Tensor, "*batch choice option"]:
        return pad(params, (0, 1), value=_LOWEST)[..., self.table]

    def _flat(self, action: Tensor) -> Tensor:
        return action.reshape(*action.shape[: action.dim() - len(self.action_spec.shape)], len(self.table))

    def _shaped(self, index: Tensor) -> Tensor:
        return index.reshape(index.shape[:-1] + self.action_spec.shape)

    def sample(self, params: Float[Tensor, "*batch P"], generator: torch.Generator | None = None) -> Tensor:
        """Random indices, each choice by the Gumbel-max trick."""
        return self._shaped(_sample_index(self._logits(params), generator))

    def mode(self, params: Float[Tensor, "*batch P"]) -> Tensor:
        """Index of each choice's largest logit."""
        return self._shaped(self._logits(params).argmax(dim=-1))

    def log_prob(self, params: Float[Tensor, "*batch P"], action: Tensor) -> Float[Tensor, "*batch"]:
        """Log-softmax at the action, summed over choices."""
        return _pick(torch.log_softmax(self._logits(params), dim=-1), self._flat(action)).sum(dim=-1)

    def entropy(self, params: Float[Tensor, "*batch P"]) -> Float[Tensor, "*batch"]:
        """Entropy of the softmaxes, summed over choices."""
        return _categorical_entropy(torch.log_softmax(self._logits(params), dim=-1)).sum(dim=-1)

    def score(
        self, params: Float[Tensor, "*batch P"], action: Tensor
    ) -> tuple[Float[Tensor, "*batch"], Float[Tensor, "*batch"]]:
        """``log_prob`` and ``entropy`` from one softmax."""
        log_probs = torch.log_softmax(self._logits(params), dim=-1)
        return _pick(log_probs, self._flat(action)).sum(dim=-1), _categorical_entropy(log_probs).sum(dim=-1)

    def kl(self, params: Float[Tensor, "*batch P"], other: Float[Tensor, "*batch P"]) -> Float[Tensor, "*batch"]:
        """Exact KL of the softmaxes, summed over choices."""
        return categorical_kl(self._logits(params), self._logits(other)).sum(dim=-1)

    def env_action(self, action: Tensor) -> Tensor:
        """The environment's numbers: indices from ``start``."""
        return action + self.start

    def own_action(self, action: Tensor) -> Tensor:
        """Indices from 0."""
        return action.to(torch.int64) - self.start


class Bernoulli(ActionHead):
    """Independent coins; ``params`` are logits of 1."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.num_params = self.num_outputs = math.prod(shape)
        self.action_spec = TensorSpec(shape, torch.int8)

    def sample(self, params: Float[Tensor, "*batch P"], generator: torch.Generator | None = None) -> Tensor:
        """Random zeros and ones."""
        uniform = torch.rand(params.shape, generator=generator, dtype=params.dtype, device=params.device)
        return self._shaped(uniform < params.sigmoid())

    def mode(self, params: Float[Tensor, "*batch P"]) -> Tensor:
        """1 where its probability exceeds one half."""
        return self._shaped(params > 0)

    def _shaped(self, bits: Tensor) -> Tensor:
        return bits.to(torch.int8).reshape(bits.shape[:-1] + self.action_spec.shape)

    def log_prob(self, params: Float[Tensor, "*batch P"], action: Tensor) -> Float[Tensor, "*batch"]:
        """``sum log sigmoid(+-logit)``."""
        bits = action.reshape(params.shape).to(params.dtype)
        return -binary_cross_entropy_with_logits(params, bits, reduction="none").sum(dim=-1)

    def entropy(self, params: Float[Tensor, "*batch P"]) -> Float[Tensor, "*batch"]:
        """Entropy of the coins."""
        return binary_cross_entropy_with_logits(params, params.sigmoid(), reduction="none").sum(dim=-1)

    def kl(self, params: Float[Tensor, "*batch P"], other: Float[Tensor, "*batch P"]) -> Float[Tensor, "*batch"]:
        """Exact KL of the coins."""
        return bernoulli_kl(params, other)


def _sample_index(logits: Tensor, generator: torch.Generator | None) -> Tensor:
    # argmax of logit - log(-log u); u = 0 would be noise of -inf, as if the choice were forbidden
    uniform = torch.rand(logits.shape, generator=generator, dtype=logits.dtype, device=logits.device)
    noise = uniform.clamp_(min=_TINY).log_().neg_().log_()
    return (logits.detach() - noise).argmax(dim=-1)


def _pick(log_probs: Tensor, index: Tensor) -> Tensor:
    return log_probs.gather(-1, index.unsqueeze(-1)).squeeze(-1)


def _categorical_entropy(log_probs: Tensor) -> Tensor:
    # a forbidden choice has p log p = 0 * -inf, whose limit is 0
    return -(log_probs.exp() * log_probs.clamp(min=_LOWEST)).sum(dim=-1)
