"""Anchor states: steps of a group with the same observation (GiGPO)."""

import numpy as np
from jaxtyping import Bool, Int
from numpy.typing import NDArray
from torch import Tensor

from groupwise.data.rollout import Nested


def anchors(
    obs: Nested, group_id: Int[Tensor, "row step"], member: Bool[Tensor, "row step"]
) -> tuple[Int[Tensor, "row step"], int]:
    """Id 0..n-1 of each step's group and observation, -1 outside ``member``; and n.

    Observations are compared bit for bit, except that 0 equals -0. Runs on the host, once per update.
    """
    seen = _bytes(obs, member)
    ids: dict[tuple[int, bytes], int] = {}
    groups = group_id[member].tolist()
    dense = [ids.setdefault((group, row.tobytes()), len(ids)) for group, row in zip(groups, seen, strict=True)]
    out = group_id.new_full(group_id.shape, -1)
    out[member] = group_id.new_tensor(dense, dtype=group_id.dtype)
    return out, len(ids)


def _bytes(obs: Nested, member: Bool[Tensor, "row step"]) -> NDArray[np.uint8]:
    """Each observation as a row of bytes."""
    if not isinstance(obs, Tensor):
        return np.concatenate([_bytes(leaf, member) for _, leaf in sorted(obs.items())], axis=1)
    rows = obs[member].cpu().numpy()
    if rows.dtype.kind == "f":
        rows = rows + 0.0  # -0.0 becomes 0.0
    return np.frombuffer(rows.tobytes(), np.uint8).reshape(len(rows), -1 if len(rows) else 0)
