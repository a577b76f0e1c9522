"""What is taken off rewards of texts."""

import torch
from jaxtyping import Float, Int
from torch import Tensor


@torch.no_grad()
def overlong_penalty(
    length: Int[Tensor, " completion"], max_length: int, overlong_buffer: int
) -> Float[Tensor, " completion"]:
    """Share of the penalty, in [0, 1]: 0 up to ``max_length - overlong_buffer``, from there linearly to 1 at ``max_length``.

    Args:
        overlong_buffer: at least 1, at most ``max_length``.

    Source: DAPO, https://arxiv.org/abs/2503.14476, eq. 13.
    """
    return ((length - (max_length - overlong_buffer)).float() / overlong_buffer).clamp(0.0, 1.0)
