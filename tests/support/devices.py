"""Functions on tensors, computed on another device."""

import functools

import torch
from torch.utils._pytree import tree_map_only


def moving(function, device):
    """The function with its tensors moved to the device, and its results moved back."""

    @functools.wraps(function)
    def moved(*args, **kwargs):
        args, kwargs = tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), (args, kwargs))
        return tree_map_only(torch.Tensor, lambda tensor: tensor.cpu(), function(*args, **kwargs))

    return moved
