"""Random streams by counter: the seed of any draw follows from the run's seed and the place of the draw.

Nothing here has state, so a resumed run has the same streams as an uninterrupted one.
"""

import threading
from hashlib import blake2b

TORCH_GENERATOR = threading.RLock()
"""Held by a run while it seeds torch's global generator, or draws from it: another thread may train another run."""


def derive_seed(seed: int, *path: int | str) -> int:
    """Seed in [0, 2**31) of the stream that ``path`` names, e.g. ``derive_seed(0, "start", iteration, group)``.

    31 bits, because some simulators take no more. Different paths give independent streams.
    """
    text = "/".join(map(str, (seed, *path)))
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little") & 0x7FFF_FFFF


def row_seeds(seed: int, num_rows: int) -> list[int]:
    """A seed for each row of a vector environment. Gymnasium's own ``seed + row`` is the next row of the next seed's run."""
    return [derive_seed(seed, row) for row in range(num_rows)]
