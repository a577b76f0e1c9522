"""Acting in a few environments on a CPU, in NumPy: there each of torch's operations takes longer to begin than to compute.

What is drawn, and from which numbers, is as in the action heads.
"""

import math
from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import torch
from jaxtyping import Float32, Int64

Generator: TypeAlias = torch.Generator | None
DrawFew: TypeAlias = Callable[[np.ndarray, Generator], tuple[np.ndarray, np.ndarray]]
"""Flat actions and their log-probabilities, from what the network gives [batch, outputs] in float32."""

_HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)
_TINY = torch.finfo(torch.float32).tiny


def draw_index(
    logits: Float32[np.ndarray, "batch n"], generator: Generator
) -> tuple[Int64[np.ndarray, " batch"], Float32[np.ndarray, " batch"]]:
    """Indices by the Gumbel-max trick, and the log-softmax there."""
    noise = torch.rand(logits.shape, generator=generator).numpy()
    np.maximum(noise, _TINY, out=noise)
    np.negative(np.log(noise, out=noise), out=noise)
    np.subtract(logits, np.log(noise, out=noise), out=noise)
    index = noise.argmax(axis=1)
    shifted = np.subtract(logits, np.maximum.reduce(logits, axis=1, keepdims=True), out=noise)
    chosen = shifted[np.arange(len(index)), index]
    total = np.add.reduce(np.exp(shifted, out=noise), axis=1)
    return index, np.subtract(chosen, np.log(total, out=total), out=chosen)


def gaussian(log_std: Float32[np.ndarray, " dim"]) -> DrawFew:
    """What draws from means [batch, dim], with deviations that do not depend on the observation."""
    with np.errstate(all="ignore"):  # a policy that diverged is told by what it does
        deviation = np.exp(log_std)

    def draw(mean: np.ndarray, generator: Generator) -> tuple[np.ndarray, np.ndarray]:
        return _draw_gaussian(mean, log_std, deviation, generator)

    return draw


def draw_gaussian(
    params: Float32[np.ndarray, "batch P"], generator: Generator
) -> tuple[Float32[np.ndarray, "batch dim"], Float32[np.ndarray, " batch"]]:
    """Draws from means and log deviations, one behind the other."""
    mean, log_std = np.split(params, 2, axis=1)
    return _draw_gaussian(mean, log_std, np.exp(log_std), generator)


def _draw_gaussian(
    mean: np.ndarray, log_std: np.ndarray, deviation: np.ndarray, generator: Generator
) -> tuple[np.ndarray, np.ndarray]:
    action = torch.randn(mean.shape, generator=generator).numpy()
    np.add(mean, np.multiply(deviation, action, out=action), out=action)
    distance = np.subtract(action, mean)
    np.divide(distance, deviation, out=distance)
    square = np.multiply(0.5, distance)
    np.multiply(square, distance, out=square)
    density = np.add.reduce(np.add(log_std, square, out=square), axis=1)
    np.add(density, np.float32(mean.shape[1] * _HALF_LOG_2PI), out=density)
    return action, np.negative(density, out=density)
