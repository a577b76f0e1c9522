"""Functions on tensors, computed on another device."""

import functools

import pytest
import torch
from torch.utils._pytree import tree_map_only


def moving(function, device):
    """The function with its tensors moved to the device, and its results moved back."""

    @functools.wraps(function)
    def moved(*args, **kwargs):
        args, kwargs = tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), (args, kwargs))
        return tree_map_only(torch.Tensor, lambda tensor: tensor.cpu(), function(*args, **kwargs))

    return moved


def check_updates(device, updated, make_policy, rollout):
    """``updated(rollout, policy)`` gives parameters and metrics: on the device those of the CPU, and the same each time."""
    expected, expected_metrics = updated(rollout, make_policy())
    (found, metrics), (again, _) = (updated(rollout.to(device), make_policy().to(device)) for _ in range(2))
    assert torch.equal(found, again)
    assert found.device.type == device.type
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-4, atol=1e-5)
    assert metrics.keys() == expected_metrics.keys()
    for name, value in expected_metrics.items():
        assert metrics[name] == pytest.approx(value, rel=1e-3, abs=1e-5), name
