"""Ratios, clipped objectives and value losses: per element, to be minimised, never averaged here.

Trust regions other than the clip are in ``trust_regions``.

Axes: batch = any shape, [B] or [B, T]. Log-probabilities carry gradient, old ones and advantages are constants.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import mse_loss

from groupwise.functional.reduce import gather_segments, segment_mean, segment_sum

_MAX_LOG_RATIO = 20.0
"""Ratios stop growing at e^20 (verl's bound): the gradient of an infinite one is NaN even where it is clipped away."""


def bounded_exp(log_ratio: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
    """``exp(min(log_ratio, 20))``: finite, and so is its gradient."""
    return log_ratio.clamp(max=_MAX_LOG_RATIO).exp()


def token_ratio(log_prob: Float[Tensor, "*batch"], old_log_prob: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
    """Probability ratio of each element: ``exp(log_prob - old_log_prob)``.

    Source: PPO, https://arxiv.org/abs/1707.06347, sec. 3.
    """
    return bounded_exp(log_prob - old_log_prob)


def sequence_ratio(
    log_prob: Float[Tensor, "*batch"],
    old_log_prob: Float[Tensor, "*batch"],
    mask: Bool[Tensor, "*batch"],
    episode_id: Int[Tensor, "*batch"],
    num_episodes: int,
) -> Float[Tensor, "*batch"]:
    """Geometric mean of the episode's ratios over the mask, at each of its elements; 1 outside the mask.

    With the ids of turns in place of episodes it is the ratio of turns.

    Source: GSPO, https://arxiv.org/abs/2507.18071.
    """
    mean = _episode_log_ratio(log_prob, old_log_prob, mask, episode_id, num_episodes, mean=True)
    return bounded_exp(mean)


def sequence_token_ratio(
    log_prob: Float[Tensor, "*batch"],
    old_log_prob: Float[Tensor, "*batch"],
    mask: Bool[Tensor, "*batch"],
    episode_id: Int[Tensor, "*batch"],
    num_episodes: int,
) -> Float[Tensor, "*batch"]:
    """The value of ``sequence_ratio`` with the gradient of each element's own log-probability.

    ``sg(s_i) * exp(log_prob - sg(log_prob))``, so that advantages may differ within an episode.

    Source: GSPO-token, https://arxiv.org/abs/2507.18071.
    """
    mean = _episode_log_ratio(log_prob.detach(), old_log_prob, mask, episode_id, num_episodes, mean=True)
    return bounded_exp(mean + (log_prob - log_prob.detach()).masked_fill(~mask, 0))


def sequence_product_ratio(
    log_prob: Float[Tensor, "*batch"],
    old_log_prob: Float[Tensor, "*batch"],
    mask: Bool[Tensor, "*batch"],
    episode_id: Int[Tensor, "*batch"],
    num_episodes: int,
) -> Float[Tensor, "*batch"]:
    """Product of the episode's ratios over the mask, at each of its elements; 1 outside the mask.

    The true ratio of whole episodes; its spread grows exponentially with their length.
    """
    return bounded_exp(_episode_log_ratio(log_prob, old_log_prob, mask, episode_id, num_episodes, mean=False))


def clip_loss(
    ratio: Float[Tensor, "*batch"], advantage: Float[Tensor, "*batch"], clip_low: float, clip_high: float
) -> Float[Tensor, "*batch"]:
    """``-min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A)``: no gain from moving beyond the clip.

    Source: PPO, https://arxiv.org/abs/1707.06347, eq. 7; with clip_high > clip_low DAPO's clip-higher,
        https://arxiv.org/abs/2503.14476.
    """
    cost = -advantage
    return torch.maximum(ratio * cost, ratio.clamp(1 - clip_low, 1 + clip_high) * cost)


def dual_clip_loss(
    ratio: Float[Tensor, "*batch"],
    advantage: Float[Tensor, "*batch"],
    clip_low: float,
    clip_high: float,
    bound: float,
) -> Float[Tensor, "*batch"]:
    """``clip_loss``, at most ``-bound * A`` where the advantage is negative, however large the ratio.

    Source: Ye et al. 2020, https://arxiv.org/abs/1912.09729.
    """
    loss = clip_loss(ratio, advantage, clip_low, clip_high)
    return torch.where(advantage < 0, torch.minimum(loss, -bound * advantage), loss)


def unclipped_loss(ratio: Float[Tensor, "*batch"], advantage: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
    """``-ratio * A``: the importance-weighted policy gradient, without trust region."""
    return -ratio * advantage


def value_loss(value: Float[Tensor, "*batch"], target: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
    """Squared error, without a half."""
    return mse_loss(value, target, reduction="none")


def clipped_value_loss(
    value: Float[Tensor, "*batch"], old_value: Float[Tensor, "*batch"], target: Float[Tensor, "*batch"], clip: float
) -> Float[Tensor, "*batch"]:
    """The greater of the squared errors of the value and of the value held within ``clip`` of ``old_value``.

    Source: OpenAI's baselines (ppo2); the paper has no such term.
    """
    held = old_value + (value - old_value).clamp(-clip, clip)
    return torch.maximum(value_loss(value, target), value_loss(held, target))


def _episode_log_ratio(
    log_prob: Float[Tensor, "*batch"],
    old_log_prob: Float[Tensor, "*batch"],
    mask: Bool[Tensor, "*batch"],
    episode_id: Int[Tensor, "*batch"],
    num_episodes: int,
    *,
    mean: bool,
) -> Float[Tensor, "*batch"]:
    """Sum or mean of the episode's log-ratios over the mask, at each of its elements; 0 outside the mask."""
    reduce = segment_mean if mean else segment_sum
    per_episode = reduce(log_prob - old_log_prob, episode_id, num_episodes, mask)
    return gather_segments(per_episode, episode_id).masked_fill(~mask, 0)
