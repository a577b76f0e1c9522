"""Normalisers of observations and rewards. Their statistics change in ``update`` only, never while acting or training."""

from typing import Any

import torch
from jaxtyping import Bool, Float, Shaped
from tensordict import TensorDict
from torch import Tensor, nn

from groupwise.data.rollout import Nested
from groupwise.data.spaces import leaf_spaces, space_kind
from groupwise.functional.advantages import return_to_go
from groupwise.functional.reduce import AllSum, local

_EPS = 1e-8
CLIP = 10.0


class RunningMeanStd(nn.Module):
    """Mean and population variance of everything seen so far, per dimension; 0 and 1 before anything was.

    ``shift`` and ``scale`` are the mean and one over the standard deviation in float32, kept at hand because acting needs them
    at every step.
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(shape, dtype=torch.float64))
        self.register_buffer("var", torch.ones(shape, dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.register_buffer("shift", torch.zeros(shape))
        self.register_buffer("scale", torch.ones(shape))
        self.mean: Tensor
        self.var: Tensor
        self.count: Tensor
        self.shift: Tensor
        self.scale: Tensor

    def update(self, x: Shaped[Tensor, "..."], mask: Bool[Tensor, "*batch"], all_sum: AllSum = local) -> None:
        """Take in the elements of ``x`` ``[*batch, *shape]`` where the mask is True, those of all ranks together.

        What is masked out may hold anything, NaN included.
        """
        outside = ~mask.reshape(-1, *[1] * self.mean.dim())
        flat = x.reshape(-1, *self.mean.shape).double().masked_fill(outside, 0)
        sums = all_sum(torch.cat([flat.sum(dim=0).flatten(), mask.sum().double().reshape(1)]))
        count = sums[-1]
        mean = sums[:-1].reshape(self.mean.shape) / count.clamp(min=1)
        squares = (flat - mean).square().masked_fill(outside, 0).sum(dim=0)
        self.update_from_moments(mean, all_sum(squares) / count.clamp(min=1), count)

    def update_from_moments(
        self, mean: Float[Tensor, "*shape"], var: Float[Tensor, "*shape"], count: Float[Tensor, ""]
    ) -> None:
        """Take in ``count`` elements known by their mean and population variance.

        Source: Chan et al. 1979, "Updating formulae and a pairwise algorithm for computing sample variances".
        """
        total = self.count + count
        share = count / total.clamp(min=1)
        delta = mean - self.mean
        merged = (1 - share) * self.var + share * var + share * (1 - share) * delta.square()
        self.mean += share * delta
        self.var.copy_(torch.where(total > 0, merged, self.var))
        self.count.copy_(total)
        self.shift.copy_(self.mean)
        self.scale.copy_((self.var + _EPS).rsqrt())

    def normalize(self, x: Float[Tensor, "*any"]) -> Float[Tensor, "*any"]:
        """``(x - mean) / std``, clipped to ``[-CLIP, CLIP]``."""
        return ((x - self.shift) * self.scale).clamp(-CLIP, CLIP)


class ObsNormalizer(nn.Module):
    """Scales the float Boxes of an observation to running mean 0 and standard deviation 1, clipped at 10; the rest passes."""

    def __init__(self, space: Any) -> None:
        super().__init__()
        leaves = {path: leaf for path, leaf in leaf_spaces(space).items() if _is_float_box(leaf)}
        self.paths = list(leaves)
        self.statistics = nn.ModuleList(RunningMeanStd(tuple(leaf.shape)) for leaf in leaves.values())

    def _leaves(self) -> list[tuple[tuple[str, ...], Any]]:
        return list(zip(self.paths, self.statistics, strict=True))

    def forward(self, obs: Nested) -> Nested:
        """The normalised observation; the given one stays as it is."""
        out = obs if isinstance(obs, Tensor) else obs.copy()
        for path, statistics in self._leaves():
            if isinstance(out, Tensor):
                return statistics.normalize(out)
            if (leaf := out.get(path, None)) is not None:  # an actor alone is not given the critic's entries
                out[path] = statistics.normalize(leaf)
        return out

    def update(self, obs: Nested, valid: Bool[Tensor, "*batch"], all_sum: AllSum = local) -> None:
        """Take the valid observations ``[*batch, ...]`` of all ranks into the statistics."""
        for path, statistics in self._leaves():
            statistics.update(obs if isinstance(obs, Tensor) else obs[path], valid, all_sum)


class RewardNormalizer(nn.Module):
    """Divides rewards by the running standard deviation of the discounted return, clipped at 10.

    The return is the discounted reward-to-go from each valid step to the end of its episode or of the rollout. Its mean
    is never subtracted, for that would change which behaviour is best.

    Source: Engstrom et al. 2020, https://arxiv.org/abs/2005.12729, section 3, who sum forwards from the episode's start.
    """

    def __init__(self, gamma: float) -> None:
        super().__init__()
        self.gamma = gamma
        self.statistics = RunningMeanStd(())

    def forward(self, reward: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
        """The scaled rewards."""
        return (reward * self.statistics.scale).clamp(-CLIP, CLIP)

    def update(self, rollout: TensorDict, all_sum: AllSum = local) -> None:
        """Take the discounted returns of the rollout's valid steps into the statistics."""
        valid = rollout["valid"]
        done = rollout["terminated"] | rollout["truncated"] | ~valid
        returns = return_to_go(rollout["reward"].masked_fill(~valid, 0), done, self.gamma)
        self.statistics.update(returns, valid & returns.isfinite(), all_sum)  # sums of large rewards may overflow


def _is_float_box(space: Any) -> bool:
    return space_kind(space) == "box" and space.dtype.kind == "f"
