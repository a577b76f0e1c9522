"""Two ways to read tokens one by one, side by side."""

import torch

_LEAVING = {3: [0, 4], 5: [1], 70: [2]}
"""Rows that finish, at which tokens."""


def exact(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-5)


def rounded(found, expected):
    assert found.dtype == expected.dtype
    assert (found - expected).float().square().mean().sqrt() < 0.02 * expected.float().square().mean().sqrt()


@torch.no_grad()
def read_in_turn(one, other, device, compare=exact, count=75, rows=6):
    """Both read the same tokens, while rows leave; the hidden states of all steps agree."""
    generator = torch.Generator().manual_seed(3)
    for number in range(count):
        if number in _LEAVING:
            kept = torch.ones(rows, dtype=torch.bool, device=device)
            kept[_LEAVING[number]] = False
            one.keep(kept)
            other.keep(kept)
            rows = int(kept.sum())
        token = torch.randint(40, (rows,), generator=generator).to(device)
        compare(one(token), other(token))
