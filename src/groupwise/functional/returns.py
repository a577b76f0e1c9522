"""Sums of rewards, backwards in time or over episodes.

Axes: row = N environments or samples, step = T. A row may hold several episodes one after another.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

from groupwise.functional.reduce import segment_sum


def discounted_sum(x: Float[Tensor, "row step"], discount: Float[Tensor, "row step"]) -> Float[Tensor, "row step"]:
    """The solution y of ``y_t = x_t + discount_t * y_{t+1}``, with y = 0 behind the last step.

    A discount of 0 stops even NaN from flowing back. Every round doubles how far each step has summed, so T steps take
    log2(T) rounds of whole-tensor operations; equal parts of a row give equal bits wherever they are.
    """
    span = 1
    while span < x.shape[1]:
        ahead = (discount[:, :-span] * x[:, span:]).masked_fill(discount[:, :-span] == 0, 0)
        x = torch.cat([x[:, :-span] + ahead, x[:, -span:]], dim=1)
        # The last steps keep a stale product: they are complete, and no later round reads it.
        discount = torch.cat([discount[:, :-span] * discount[:, span:], discount[:, -span:]], dim=1)
        span *= 2
    return x


def return_to_go(
    reward: Float[Tensor, "row step"], done: Bool[Tensor, "row step"], gamma: float
) -> Float[Tensor, "row step"]:
    """Discounted reward from each step to the end of its episode: ``R_t = r_t + gamma * (1 - done_t) * R_{t+1}``.

    Args:
        done: True at an episode's last step, however it ended. Without one, the sum stops at the end of the row.
    """
    return discounted_sum(reward, torch.full_like(reward, gamma).masked_fill(done, 0))


def episode_return(
    reward: Float[Tensor, "*batch"], episode_id: Int[Tensor, "*batch"], num_episodes: int
) -> Float[Tensor, " episode"]:
    """Undiscounted sum of each episode's rewards; elements with id -1 belong to none.

    Summed in float64, so that equal rewards in another order have the same sum.
    """
    return segment_sum(reward.double(), episode_id, num_episodes).to(reward.dtype)


def running_sum(x: Float[Tensor, "row step"], episode_id: Int[Tensor, "row step"]) -> Float[Tensor, "row step"]:
    """Sum of each episode's elements up to and including each step; an episode's steps are contiguous in its row."""
    goes_on = pad((episode_id[:, 1:] == episode_id[:, :-1]).to(x), (1, 0))
    return discounted_sum(x.flip(1), goes_on.flip(1)).flip(1)
