"""Kullback-Leibler divergence KL(first || other): estimates from one sample, and closed forms.

Axes: batch = any shape, [B] or [B, T]; action = the last dimension, summed over.
"""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import logsigmoid


def k1(log_prob: Float[Tensor, "*batch"], ref_log_prob: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
    """``log_prob - ref_log_prob``: unbiased for samples of the policy, often negative.

    Source: Schulman 2020, http://joschu.net/blog/kl-approx.html.
    """
    return log_prob - ref_log_prob


def k2(log_prob: Float[Tensor, "*batch"], ref_log_prob: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
    """``(log_prob - ref_log_prob)^2 / 2``: biased in value, but its mean has the gradient of the KL.

    Source: Schulman 2020, http://joschu.net/blog/kl-approx.html.
    """
    return (log_prob - ref_log_prob).square() / 2


def k3(log_prob: Float[Tensor, "*batch"], ref_log_prob: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
    """``exp(d) - d - 1`` with ``d = ref_log_prob - log_prob``: unbiased for samples of the policy, never negative.

    ``d`` counts as at most 20, as in verl, so that one improbable step cannot overflow the mean.

    Source: Schulman 2020, http://joschu.net/blog/kl-approx.html; GRPO, https://arxiv.org/abs/2402.03300, eq. 4.
    """
    difference = ref_log_prob - log_prob
    return difference.clamp(max=20).expm1() - difference.clamp(max=20)


def k3_plus(log_prob: Float[Tensor, "*batch"], ref_log_prob: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
    """The value of ``k3`` with the gradient of ``k2``: unbiased in value and, for samples of the policy, in gradient.

    Source: verl's ``k3+``, https://github.com/volcengine/verl.
    """
    gradient = k2(log_prob, ref_log_prob)
    return k3(log_prob, ref_log_prob).detach() + (gradient - gradient.detach())


def absolute(log_prob: Float[Tensor, "*batch"], ref_log_prob: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
    """``|log_prob - ref_log_prob|``: no estimate of the KL, but a distance with a gradient of constant size.

    Source: verl's ``abs``, https://github.com/volcengine/verl.
    """
    return (log_prob - ref_log_prob).abs()


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
    """``p * log_ratio``, 0 where p is 0 whatever the ratio."""
    return probability * log_ratio.masked_fill(probability == 0, 0)
