"""Random numbers by counter, a stream a row: what batched simulators and generators of text draw from.

A number is a hash of its row's seed, the step and its place among the draws of that step. So there is no generator to
keep, rows do not disturb each other, and the number of rows, the device's speed and the order of resets change nothing.
"""

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15 - 2**64  # torch's integers are signed; products and sums wrap around as in C
_FIRST = 0xBF58476D1CE4E5B9 - 2**64
_SECOND = 0x94D049BB133111EB - 2**64
_ULP = 2.0**-24


def mix(number: Int[Tensor, "..."]) -> Int[Tensor, "..."]:
    """A hash of 64 bits: every bit of ``number`` flips each bit of the result with probability near one half.

    Source: the finaliser of SplitMix64; Steele, Lea, Flood, "Fast Splittable Pseudorandom Number Generators",
    OOPSLA 2014, figure 16, with the constants of Stafford's variant 13 that the generator's reference code uses.
    """
    number = (number ^ _shift(number, 30)) * _FIRST
    number = (number ^ _shift(number, 27)) * _SECOND
    return number ^ _shift(number, 31)


def hash_pair(seed: Int[Tensor, "..."], counter: Int[Tensor, "..."]) -> Int[Tensor, "..."]:
    """Number ``counter`` of the SplitMix64 stream that begins at ``seed``; its first one is number 0."""
    return mix(torch.add(seed, counter + 1, alpha=_GOLDEN))


def step_key(seed: Int[Tensor, "..."], step: Int[Tensor, "..."]) -> Int[Tensor, "..."]:
    """Seed of the numbers of one step of a row's stream."""
    return hash_pair(mix(seed), step)


def unit(number: Int[Tensor, "..."]) -> Float[Tensor, "..."]:
    """The upper 24 bits of each hash as float32 in [0, 1), which holds them exactly."""
    return _shift(number, 40).to(torch.float32) * _ULP


def _shift(number: Tensor, bits: int) -> Tensor:
    """Logical shift to the right; torch's own drags the sign along."""
    return (number >> bits) & ((1 << 64 - bits) - 1)


class RowRandom:
    """Random numbers for N rows, each from its own stream. Drawing twice gives different numbers.

    Args:
        seed: [N] of each row's stream.
        step: [N] position of each row in its stream; every step has its own numbers.
        key: their ``step_key``, where it is known. None: it is computed at the first draw.
    """

    def __init__(
        self, seed: Int[Tensor, " row"], step: Int[Tensor, " row"], key: Int[Tensor, " row"] | None = None
    ) -> None:
        self._seed = seed
        self._step = step
        self._key = key
        self._drawn = 0

    def uniform(self, *shape: int, low: float = 0.0, high: float = 1.0) -> Float[Tensor, "row ..."]:
        """Numbers ``[N, *shape]`` uniform in [low, high), of 24 random bits each."""
        return (high - low) * unit(self._bits(shape)) + low

    def normal(self, *shape: int, mean: float = 0.0, std: float = 1.0) -> Float[Tensor, "row ..."]:
        """Numbers ``[N, *shape]`` from a normal distribution, cut at 5.8 standard deviations by their 24 bits.

        Source: Box, Muller, "A Note on the Generation of Random Normal Deviates", 1958, equation 1.
        """
        bits = self._bits(shape)
        radius = torch.sqrt(-2.0 * torch.log(1.0 - unit(bits)))
        angle = (2.0 * math.pi) * ((bits & 0xFFFFFF).to(torch.float32) * _ULP)
        return std * radius * torch.cos(angle) + mean

    def integers(self, high: int, *shape: int) -> Int[Tensor, "row ..."]:
        """Numbers ``[N, *shape]`` from 0 to ``high`` - 1, equally likely but for a relative error of ``high`` / 2**63."""
        return _shift(self._bits(shape), 1) % high

    def _bits(self, shape: tuple[int, ...]) -> Int[Tensor, "row ..."]:
        if self._key is None:
            self._key = step_key(self._seed, self._step)
        count = math.prod(shape)
        places = torch.arange(self._drawn, self._drawn + count, device=self._key.device)
        self._drawn += count
        return hash_pair(self._key[:, None], places).reshape(-1, *shape)
