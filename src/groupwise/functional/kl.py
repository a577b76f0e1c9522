"""Kullback-Leibler divergence KL(first || other) in closed form.

Axes: batch = any shape, [B] or [B, T]; action = the last dimension, summed over.
"""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import logsigmoid


def categorical_kl(
    logits: Float[Tensor, "*batch action"], other_logits: Float[Tensor, "*batch action"]
) -> Float[Tensor, "*batch"]:
    """``sum_a p_a log(p_a / q_a)`` of two softmaxes; the logits need no normalisation.

    An action that ``logits`` exclude (-inf) adds nothing.
    """
    log_p, log_q = logits.log_softmax(dim=-1), other_logits.log_softmax(dim=-1)
    return _weighted(log_p.exp(), log_p - log_q).sum(dim=-1)


def bernoulli_kl(
    logits: Float[Tensor, "*batch action"], other_logits: Float[Tensor, "*batch action"]
) -> Float[Tensor, "*batch"]:
    """KL of independent coins, whose chance of 1 is ``sigmoid(logits)``, summed over the last dimension."""
    ones = _weighted(logits.sigmoid(), logsigmoid(logits) - logsigmoid(other_logits))
    zeros = _weighted((-logits).sigmoid(), logsigmoid(-logits) - logsigmoid(-other_logits))
    return (ones + zeros).sum(dim=-1)


def gaussian_kl(
    mean: Float[Tensor, "*batch action"],
    log_std: Float[Tensor, "*#batch action"],
    other_mean: Float[Tensor, "*batch action"],
    other_log_std: Float[Tensor, "*#batch action"],
) -> Float[Tensor, "*batch"]:
    """KL of diagonal Gaussians, summed over the last dimension.

    ``log(s_q / s_p) + (s_p^2 + (m_p - m_q)^2) / (2 s_q^2) - 1/2``, arranged so that nearly equal ones do not cancel.
    """
    log_variance_ratio = 2 * (log_std - other_log_std)
    distance = ((mean - other_mean) * torch.exp(-other_log_std)).square()
    return (log_variance_ratio.expm1() - log_variance_ratio + distance).sum(dim=-1) / 2


def _weighted(
    probability: Float[Tensor, "*batch action"], log_ratio: Float[Tensor, "*batch action"]
) -> Float[Tensor, "*batch action"]:
    """``p * log_ratio``, 0 where p is 0 for any ratio."""
    return probability * log_ratio.masked_fill(probability == 0, 0)
