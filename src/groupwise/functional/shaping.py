"""What is taken off rewards of texts."""

import torch
from jaxtyping import Float, Int
from torch import Tensor


@torch.no_grad()
def overlong_punishment(
    length: Int[Tensor, " attempt"], max_length: int, punished_tokens: int
) -> Float[Tensor, " attempt"]:
    """Share of the punishment, in [0, 1]: 0 up to ``max_length - punished_tokens``, from there linearly to 1 at ``max_length``.

    Args:
        punished_tokens: at least 1, at most ``max_length``.

    Source: DAPO, https://arxiv.org/abs/2503.14476, eq. 13.
    """
    return ((length - (max_length - punished_tokens)).float() / punished_tokens).clamp(0.0, 1.0)
