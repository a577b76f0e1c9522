"""Action heads: sampling, probabilities, and conversion between the policy's own actions and the environment's."""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, pad, softplus

from groupwise.config.policy import PolicyCfg
from groupwise.data.rollout import TensorSpec
from groupwise.data.spaces import leaf_spaces, space_kind
from groupwise.errors import ConfigError, UnsupportedSpaceError
from groupwise.functional.kl import bernoulli_kl, categorical_kl, gaussian_kl


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

    def score(self, params: Float[Tensor, "*batch P"], action: Tensor) -> tuple[Tensor, Tensor]:
        """``log_prob`` and ``entropy``, at one price where they share work."""
        return self.log_prob(params, action), self.entropy(params)

    def env_action(self, action: Tensor) -> Tensor:
        """The environment's action for the policy's own."""
        return action

    def own_action(self, action: Tensor) -> Tensor:
        """The policy's own action for the environment's: the inverse of ``env_action``."""
        return action.to(self.action_spec.dtype)

    def _shaped(self, flat: Tensor) -> Tensor:
        return flat.reshape(flat.shape[:-1] + self.action_spec.shape)


# Discrete actions

_LOWEST = torch.finfo(torch.float32).min
_TINY = torch.finfo(torch.float32).tiny


class Categorical(ActionHead):
    """Independent choices; ``params`` are their logits, one choice after another, and -inf forbids an option.

    Args:
        nvec: options of each choice, of any shape; the action has that shape: () for a single choice.
        start: the environment's number of each choice's first option, shaped like ``nvec``.
    """

    def __init__(self, nvec: np.ndarray, start: np.ndarray) -> None:
        super().__init__()
        sizes = nvec.ravel()
        self.num_params = self.num_outputs = int(sizes.sum())
        self.action_spec = TensorSpec(tuple(nvec.shape), torch.int64)
        # logits of several choices as one table [choice, option]; short rows point at a column of impossible options
        option = np.arange(sizes.max())
        table = np.where(option < sizes[:, None], (sizes.cumsum() - sizes)[:, None] + option, self.num_params)
        self.table: Tensor | None
        self.register_buffer("table", torch.from_numpy(table) if len(table) > 1 else None, persistent=False)
        self.start: Tensor | None
        first = torch.from_numpy(np.array(start, np.int64))
        self.register_buffer("start", first if first.any() else None, persistent=False)

    def _logits(self, params: Tensor) -> Float[Tensor, "*batch choice option"]:
        return params.unsqueeze(-2) if self.table is None else pad(params, (0, 1), value=_LOWEST)[..., self.table]

    def _pick(self, log_probs: Float[Tensor, "*batch choice option"], action: Tensor) -> Float[Tensor, "*batch"]:
        return log_probs.gather(-1, action.reshape(*log_probs.shape[:-1], 1)).squeeze(-1).sum(dim=-1)

    def sample(self, params: Float[Tensor, "*batch P"], generator: torch.Generator | None = None) -> Tensor:
        """Random indices, each by the Gumbel-max trick; an option of probability 0 is never taken."""
        logits = self._logits(params).detach()
        # argmax of logit - log(-log u); u = 0 would be noise of -inf, as if the option were forbidden
        uniform = torch.rand(logits.shape, generator=generator, dtype=logits.dtype, device=logits.device)
        return self._shaped((logits - uniform.clamp_(min=_TINY).log_().neg_().log_()).argmax(dim=-1))

    def mode(self, params: Float[Tensor, "*batch P"]) -> Tensor:
        """Index of each choice's largest logit, the first one on a tie."""
        return self._shaped(self._logits(params).argmax(dim=-1))

    def log_prob(self, params: Float[Tensor, "*batch P"], action: Tensor) -> Float[Tensor, "*batch"]:
        """Log-softmax at the action, summed over choices."""
        return self._pick(torch.log_softmax(self._logits(params), dim=-1), action)

    def entropy(self, params: Float[Tensor, "*batch P"]) -> Float[Tensor, "*batch"]:
        """Entropy of the softmaxes, ``-sum p log p``, summed over choices."""
        return self.score(params, self.mode(params))[1]

    def score(self, params: Float[Tensor, "*batch P"], action: Tensor) -> tuple[Tensor, Tensor]:
        """``log_prob`` and ``entropy`` from one softmax."""
        log_probs = torch.log_softmax(self._logits(params), dim=-1)
        log_prob = self._pick(log_probs, action)
        # a forbidden option has p log p = 0 * -inf, whose limit is 0
        return log_prob, -(log_probs.exp() * log_probs.clamp(min=_LOWEST)).sum(dim=-1).sum(dim=-1)

    def kl(self, params: Float[Tensor, "*batch P"], other: Float[Tensor, "*batch P"]) -> Float[Tensor, "*batch"]:
        """Exact KL of the softmaxes, summed over choices."""
        return categorical_kl(self._logits(params), self._logits(other)).sum(dim=-1)

    def env_action(self, action: Tensor) -> Tensor:
        """The environment's numbers: indices from ``start``."""
        return action if self.start is None else action + self.start

    def own_action(self, action: Tensor) -> Tensor:
        """Indices from 0."""
        own = action.to(torch.int64)
        return own if self.start is None else own - self.start


class Bernoulli(ActionHead):
    """Independent coins; ``params`` are logits of 1."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.num_params = self.num_outputs = math.prod(shape)
        self.action_spec = TensorSpec(shape, torch.int8)

    def sample(self, params: Float[Tensor, "*batch P"], generator: torch.Generator | None = None) -> Tensor:
        """Random zeros and ones."""
        uniform = torch.rand(params.shape, generator=generator, dtype=params.dtype, device=params.device)
        return self._shaped((uniform < params.sigmoid()).to(torch.int8))

    def mode(self, params: Float[Tensor, "*batch P"]) -> Tensor:
        """1 where its probability exceeds one half."""
        return self._shaped((params > 0).to(torch.int8))

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


# Continuous actions

_LOG_2PI = math.log(2 * math.pi)
_QUADRATURE_NODES = 32
_MARGIN = 1e-3
"""A latent of 3.5."""


class DiagGaussian(ActionHead):
    """Independent Gaussians; ``params`` are the means, then the log standard deviations.

    Bounds clip the sample only on its way to the environment, each by itself (a box may be bounded on one side).
    The density is that of the unclipped sample, which the rollout stores.

    Args:
        low: the box's lower bounds, float32, -inf where it has none.
        high: the box's upper bounds, float32, inf where it has none.
    """

    def __init__(self, low: Tensor, high: Tensor) -> None:
        super().__init__()
        self.num_outputs = low.numel()
        self.num_params = 2 * self.num_outputs
        self.action_spec = TensorSpec(tuple(low.shape), torch.float32)
        self.bounded = bool(torch.isfinite(low).any() or torch.isfinite(high).any())
        self.register_buffer("low", low, persistent=False)
        self.register_buffer("high", high, persistent=False)
        self.low: Tensor
        self.high: Tensor

    def sample(self, params: Float[Tensor, "*batch P"], generator: torch.Generator | None = None) -> Tensor:
        """``mean + exp(log_std) * noise``."""
        mean, log_std = params.detach().chunk(2, dim=-1)
        noise = torch.randn(mean.shape, generator=generator, dtype=mean.dtype, device=mean.device)
        return self._shaped(mean + log_std.exp() * noise)

    def mode(self, params: Float[Tensor, "*batch P"]) -> Tensor:
        """The mean."""
        return self._shaped(params.chunk(2, dim=-1)[0])

    def log_prob(self, params: Float[Tensor, "*batch P"], action: Tensor) -> Float[Tensor, "*batch"]:
        """Log-density of the unclipped action."""
        mean, log_std = params.chunk(2, dim=-1)
        deviations = (action.reshape(mean.shape) - mean) / log_std.exp()
        density = torch.add(log_std, deviations * deviations, alpha=0.5).sum(dim=-1)
        return -0.5 * self.num_outputs * _LOG_2PI - density

    def entropy(self, params: Float[Tensor, "*batch P"]) -> Float[Tensor, "*batch"]:
        """``sum log_std + (1 + log 2 pi) / 2``."""
        log_std = params.chunk(2, dim=-1)[1]
        return log_std.sum(dim=-1) + 0.5 * self.num_outputs * (1 + _LOG_2PI)

    def kl(self, params: Float[Tensor, "*batch P"], other: Float[Tensor, "*batch P"]) -> Float[Tensor, "*batch"]:
        """Exact KL of the Gaussians."""
        return gaussian_kl(*params.chunk(2, dim=-1), *other.chunk(2, dim=-1))

    def env_action(self, action: Tensor) -> Tensor:
        """The action clipped into the box."""
        return action.clamp(self.low, self.high) if self.bounded else action


class SquashedGaussian(DiagGaussian):
    """A Gaussian latent ``u`` squashed into a bounded box: ``a = low + (high - low) (tanh(u) + 1) / 2``.

    The policy's own action, which the rollout stores, is ``u``: tanh saturates in float32 from |u| of about 9, and a
    ratio computed from ``a`` would be wrong there. Densities are still those of ``a``:
    ``log p(a) = log N(u) - sum log |da/du|``. The mode is that of the latent.

    Raises:
        ConfigError: a dimension without finite bounds on both sides.

    Source: Haarnoja et al. 2018, https://arxiv.org/abs/1801.01290, appendix C.
    """

    def __init__(self, low: Tensor, high: Tensor) -> None:
        super().__init__(low, high)
        half_range = 0.5 * high.double().sub(low.double()).flatten()
        if not (high - low).isfinite().all() or not (half_range > 0).all():
            raise ConfigError(
                f"squash_output=True needs low < high, both finite, in every dimension; the box has low={low.tolist()}, "
                f"high={high.tolist()}; fix: squash_output=False"
            )
        nodes, weights = np.polynomial.hermite_e.hermegauss(_QUADRATURE_NODES)
        self.log_half_range = float(half_range.log().sum())
        self.register_buffer("nodes", torch.from_numpy(nodes).float(), persistent=False)
        self.register_buffer("weights", torch.from_numpy(weights / weights.sum()).float(), persistent=False)
        self.nodes: Tensor
        self.weights: Tensor

    def log_prob(self, params: Float[Tensor, "*batch P"], action: Tensor) -> Float[Tensor, "*batch"]:
        """Log-density of the squashed action whose latent is ``action``."""
        latent = action.reshape(*params.shape[:-1], self.num_outputs)
        return super().log_prob(params, action) - _log_tanh_slope(latent).sum(dim=-1) - self.log_half_range

    def entropy(self, params: Float[Tensor, "*batch P"]) -> Float[Tensor, "*batch"]:
        """Entropy of the squashed action, ``H[u] + E[log |da/du|]``.

        The expectation is by Gauss-Hermite quadrature with fixed nodes: deterministic, and differentiable. Its error
        is below 1e-6 for a latent standard deviation up to 1, and about 2e-3 at 2.7.
        """
        mean, log_std = params.chunk(2, dim=-1)
        latent = mean.unsqueeze(-1) + log_std.exp().unsqueeze(-1) * self.nodes
        expected_slope = (_log_tanh_slope(latent) @ self.weights).sum(dim=-1)
        return super().entropy(params) + expected_slope + self.log_half_range

    def env_action(self, action: Tensor) -> Tensor:
        """The latent squashed into the box; rounding never leaves it."""
        unit = 0.5 * (action.tanh() + 1)
        return torch.lerp(self.low, self.high, unit).clamp(self.low, self.high)

    def own_action(self, action: Tensor) -> Tensor:
        """The latent of an action; at the bounds, where it is infinite, that of an action ``_MARGIN`` of the range inside."""
        share = (action.float() - self.low) / (self.high - self.low)
        return torch.logit(share, eps=_MARGIN) / 2


def _log_tanh_slope(latent: Tensor) -> Tensor:
    """``log(1 - tanh(u)^2)`` without cancellation."""
    return 2 * (math.log(2) - latent - softplus(-2 * latent))


# Dict and Tuple spaces


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
        self._free = [head.num_params - head.num_outputs for head in heads]
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
        """Parameters of each part."""
        outputs, free = torch.split(params, [self.num_outputs, self.num_params - self.num_outputs], dim=-1)
        outputs_of = torch.split(outputs, [head.num_outputs for head in self.heads], dim=-1)
        free_of = torch.split(free, self._free, dim=-1)
        return [torch.cat(both, dim=-1) for both in zip(outputs_of, free_of, strict=True)]

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


# The head for a Gymnasium action space


def make_head(action_space: Any, cfg: PolicyCfg) -> ActionHead:
    """The head for an action space.

    Raises:
        UnsupportedSpaceError: no head exists for the space.
        ConfigError: ``squash_output=True`` on a Box that is not bounded everywhere.
    """
    kind = space_kind(action_space)
    if kind in ("discrete", "multi_discrete"):
        nvec = action_space.n if kind == "discrete" else action_space.nvec
        return Categorical(np.array(nvec), np.array(action_space.start))
    if kind == "multi_binary":
        return Bernoulli(tuple(action_space.shape))
    if kind == "box" and action_space.dtype.kind == "f":
        bounds = inner_float32(action_space.low, action_space.high)
        return SquashedGaussian(*bounds) if cfg.squash_output else DiagGaussian(*bounds)
    if (leaves := leaf_spaces(action_space)) and () not in leaves:
        return Composite([make_head(leaf, cfg) for leaf in leaves.values()])
    raise UnsupportedSpaceError(
        f"action space {action_space} is not supported; supported: Discrete, MultiDiscrete, MultiBinary, Box of floats, and "
        "Dict or Tuple of them; fix: wrap the environment with gymnasium.wrappers.TransformAction"
    )


def unexplored(action_space: Any, cfg: PolicyCfg) -> str:
    """Advice where the first Gaussian of a policy hardly explores a bounded Box; empty if it does explore."""
    std = math.exp(cfg.log_std_init)
    for leaf in leaf_spaces(action_space).values():
        if space_kind(leaf) != "box" or cfg.squash_output:
            continue
        half = 0.5 * leaf.high.astype(float) - 0.5 * leaf.low.astype(float)
        far = (leaf.low > 2 * std) | (leaf.high < -2 * std) | (half > 20 * std) | (half < 0.05 * std)
        if (far & np.isfinite(half)).any():
            return (
                f"Actions of {leaf!s:.80} are hardly explored: the policy begins with mean 0 and deviation {std:g}; "
                "fix: policy.squash_output=True, which acts within the bounds"
            )
    return ""


def inner_float32(low: np.ndarray, high: np.ndarray) -> tuple[Tensor, Tensor]:
    """The bounds in float32, rounded inwards, so that numbers clipped to them are inside the space's own."""
    with np.errstate(over="ignore"):
        low32, high32 = low.astype(np.float32), high.astype(np.float32)
    low32 = np.where(low32 < low, np.nextafter(low32, np.float32(np.inf)), low32)
    high32 = np.where(high32 > high, np.nextafter(high32, np.float32(-np.inf)), high32)
    return torch.from_numpy(low32), torch.from_numpy(high32)
