"""Trust regions beyond the clip: losses per element, to be minimised, never averaged here.

Axes: batch = any shape, [B] or [B, T]. Log-probabilities carry gradient, old ones and advantages are constants. Each loss
has the gradient ``-A`` with respect to ``log_prob`` at ratio 1, unless its docstring differs.
"""

from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from groupwise.functional.objective import bounded_exp, clip_loss
from groupwise.functional.reduce import gather_segments, segment_mean

_LEAST_RATIO = 1e-8
"""Where VESPO's ratio stops falling (e^-18.42), so that its logarithm is finite."""


def two_sided_loss(
    ratio: Float[Tensor, "*batch"],
    advantage: Float[Tensor, "*batch"],
    clip_low: float,
    clip_high: float,
    bound: float,
) -> Float[Tensor, "*batch"]:
    """``-min(min(ratio, bound) * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A)``: bounded at negative advantage too.

    Args:
        bound: above ``1 + clip_high``.

    Source: INTELLECT-2, https://arxiv.org/abs/2505.07291.
    """
    return clip_loss(ratio.clamp(max=bound), advantage, clip_low, clip_high)


def reinforce_loss(log_prob: Float[Tensor, "*batch"], advantage: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
    """``-log_prob * A``: the plain policy gradient, right for a single pass over fresh data only.

    Source: Williams 1992; in groups GPG, https://arxiv.org/abs/2504.02546.
    """
    return -log_prob * advantage


def cispo_loss(
    log_prob: Float[Tensor, "*batch"],
    ratio: Float[Tensor, "*batch"],
    advantage: Float[Tensor, "*batch"],
    low: float | None,
    high: float | None,
) -> Float[Tensor, "*batch"]:
    """``-sg(clip(ratio, low, high)) * A * log_prob``: the weight is clipped, and no step loses its gradient.

    Args:
        low, high: absolute bounds of the ratio; None leaves a side open.

    Source: MiniMax-M1, https://arxiv.org/abs/2506.13585.
    """
    weight = ratio.detach()
    if low is not None:
        weight = weight.clamp(min=low)
    if high is not None:
        weight = weight.clamp(max=high)
    return -weight * advantage * log_prob


def sapo_loss(
    ratio: Float[Tensor, "*batch"], advantage: Float[Tensor, "*batch"], positive: float, negative: float
) -> Float[Tensor, "*batch"]:
    """``-(4 / tau) sigmoid(tau (ratio - 1)) * A``: a gradient that fades smoothly on both sides of ratio 1.

    Args:
        positive, negative: the temperature tau where the advantage is above 0, and elsewhere.

    Source: SAPO, https://arxiv.org/abs/2511.20347.
    """
    tau = torch.where(advantage > 0, positive, negative)
    return -(4 / tau) * torch.sigmoid(tau * (ratio - 1)) * advantage


def gmpo_loss(
    log_prob: Float[Tensor, "*batch"],
    old_log_prob: Float[Tensor, "*batch"],
    advantage: Float[Tensor, "*batch"],
    mask: Bool[Tensor, "*batch"],
    episode_id: Int[Tensor, "*batch"],
    num_episodes: int,
    clip_low: float,
    clip_high: float,
) -> Float[Tensor, "*batch"]:
    """``-A * exp(mean of u over the episode)``, the geometric mean of ratios that are clipped step by step.

    ``u = sgn(A) min(sgn(A) x, sgn(A) clip(x, -clip_low, clip_high))`` with ``x = log_prob - old_log_prob``. At ratio 1
    the losses of an episode together have the gradient ``-A`` with respect to each of its log-probabilities.

    Source: GMPO, https://arxiv.org/abs/2507.20673.
    """
    moved = log_prob - old_log_prob
    clipped = torch.where(advantage > 0, moved.clamp(max=clip_high), moved.clamp(min=-clip_low))
    clipped = clipped.masked_fill(advantage == 0, 0)
    mean = gather_segments(segment_mean(clipped, episode_id, num_episodes, mask), episode_id)
    return -advantage * bounded_exp(mean)


def vespo_loss(
    log_prob: Float[Tensor, "*batch"],
    ratio: Float[Tensor, "*batch"],
    advantage: Float[Tensor, "*batch"],
    *,
    positive: tuple[float, float],
    negative: tuple[float, float],
) -> Float[Tensor, "*batch"]:
    """``-sg(w^k exp(lambda (1 - w))) * A * log_prob``: a weight that is 1 at ratio w = 1 and fades on both sides.

    Args:
        ratio: of the whole episode (``sequence_product_ratio``), held at 1e-8 and above.
        positive, negative: power k and decay lambda where the advantage is 0 and above, and elsewhere.

    Source: VESPO, https://arxiv.org/abs/2602.10693.
    """
    w = ratio.detach().clamp(min=_LEAST_RATIO)
    good = advantage >= 0
    power = torch.where(good, positive[0], negative[0])
    decay = torch.where(good, positive[1], negative[1])
    weight = torch.exp(decay + power * w.log() - decay * w)
    return -weight * advantage * log_prob


def kl_cov_loss(
    log_prob: Float[Tensor, "*batch"],
    old_log_prob: Float[Tensor, "*batch"],
    ratio: Float[Tensor, "*batch"],
    advantage: Float[Tensor, "*batch"],
    pulled: Bool[Tensor, "*batch"],
    penalty: float,
) -> Float[Tensor, "*batch"]:
    """``-ratio * A``, plus ``penalty * |log_prob - old_log_prob|`` on the steps that are pulled back.

    Source: KL-Cov, https://arxiv.org/abs/2505.22617.
    """
    distance = (log_prob - old_log_prob).abs().masked_fill(~pulled, 0)
    return -ratio * advantage + penalty * distance


@torch.no_grad()
def dppo_keeps(
    log_prob: Float[Tensor, "*batch"],
    sample_log_prob: Float[Tensor, "*batch"],
    advantage: Float[Tensor, "*batch"],
    divergence: Literal["tv", "kl"],
    low: float,
    high: float,
) -> Bool[Tensor, "*batch"]:
    """False where the action's probability has moved further than the bound in the direction of its advantage.

    With p the probability now and q the sampler's, of "this action or another", the distance is ``|p - q|`` (``tv``) or
    ``q log(q / p) + (1 - q) log((1 - q) / (1 - p))`` (``kl``). Only for probabilities: densities can exceed 1.

    Args:
        low: bound where the probability fell and the advantage is not above 0.
        high: bound where it rose and the advantage is above 0.

    Source: DPPO as in TRL and prime-rl, https://github.com/PrimeIntellect-ai/prime-rl.
    """
    rose = log_prob > sample_log_prob
    if divergence == "tv":
        distance = (log_prob.exp() - sample_log_prob.exp()).abs()
    else:
        distance = _binary_kl(sample_log_prob, log_prob)
    return torch.where(advantage > 0, ~(rose & (distance > high)), rose | (distance <= low))


def dppo_loss(
    log_prob: Float[Tensor, "*batch"],
    ratio: Float[Tensor, "*batch"],
    advantage: Float[Tensor, "*batch"],
    keeps: Bool[Tensor, "*batch"],
    max_ratio: float | None,
) -> Float[Tensor, "*batch"]:
    """``-A * sg(min(ratio, max_ratio)) * log_prob``, 0 on the steps that are not kept.

    Source: DPPO as in TRL, https://github.com/huggingface/trl.
    """
    return cispo_loss(log_prob, ratio, advantage, None, max_ratio).masked_fill(~keeps, 0)


def _binary_kl(log_prob: Float[Tensor, "*batch"], other_log_prob: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
    """KL of two coins from the log-probabilities of one side; that of the other side is kept finite."""
    p, other = (x.exp().clamp(max=1 - 2**-23) for x in (log_prob, other_log_prob))
    return p * (log_prob - other_log_prob) + (1 - p) * (torch.log1p(-p) - torch.log1p(-other))
