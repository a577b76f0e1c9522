"""What is done to the layers of a transformers model so that it can be trained: no dropout, less memory, shared prefixes."""

import sys
from types import MethodType
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.cache_utils import DynamicCache, DynamicLayer
from transformers.modeling_layers import GradientCheckpointingLayer

from groupwise.errors import ConfigError

_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
_NOISES = ("drop", "jitter")


def silence_dropout(model: nn.Module) -> None:
    """Make training mode the same function as evaluation mode: every probability of dropout becomes 0.

    Attention takes its own from an attribute of the module (``attention_dropout``), as layer drop and routers' noise do.
    The model's config stays as it is.
    """
    for module in model.modules():
        if isinstance(module, _DROPOUTS):
            module.p = 0.0
        noises = [name for name, value in vars(module).items() if isinstance(value, float) and _is_noise(name)]
        for name in noises:
            setattr(module, name, 0.0)


def _is_noise(name: str) -> bool:
    return any(word in name for word in _NOISES)


def recompute_layers(model: nn.Module) -> None:
    """Keep only each layer's input for the backward pass, which computes the layer again (gradient checkpointing).

    transformers' own switch needs training mode, and takes the cache away that prefixes are shared by.

    Raises:
        ConfigError: the model has no layers that transformers knows how to compute again.
    """
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ConfigError(
            f"{type(model).__name__} has no layers for gradient checkpointing; fix: gradient_checkpointing=False"
        )
    for layer in layers:
        layer.forward = MethodType(_forward_recomputed, layer)  # bound, so that a copy's layer is the copy


def _forward_recomputed(layer: Any, *args: Any, **kwargs: Any) -> Any:
    forward = type(layer).forward
    if not torch.is_grad_enabled():  # sampling: `checkpoint` would do the same, slower
        return forward(layer, *args, **kwargs)
    return checkpoint(forward, layer, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)


def keep_differentiable(model: nn.Module) -> None:
    """Put layers that bitsandbytes has quantised into training mode, which changes nothing but how they compute.

    In evaluation mode, without a gradient at their input, some CPUs make them repack their weights for a kernel that has no
    backward pass, for good; and 8-bit ones round the activations, too.
    """
    library = sys.modules.get("bitsandbytes")  # whoever made such layers has imported it
    if library is None:
        return
    for module in model.modules():
        if isinstance(module, library.nn.Linear4bit | library.nn.Linear8bitLt):
            module.train()


class PrefixCacheLayer(DynamicLayer):  # type: ignore[misc]  # mypy does not follow transformers
    """A layer's cache that keeps the keys and values of one pass, with their gradient."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Those it is given."""
        self.keys, self.values, self.is_initialized = key_states, value_states, True
        return key_states, value_states


class SuffixCacheLayer(DynamicLayer):  # type: ignore[misc]
    """A layer's cache that is only read: what comes behind the prefixes is not kept, so that it may be computed twice."""

    def __init__(self, prefix: PrefixCacheLayer, number: Int[Tensor, " row"]) -> None:
        super().__init__()
        self.keys, self.values, self.is_initialized = prefix.keys, prefix.values, True
        self.number = number

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Each row's prefix and its own."""
        keys, values = self.keys[self.number], self.values[self.number]
        return torch.cat([keys, key_states], dim=-2), torch.cat([values, value_states], dim=-2)


def prefix_cache(config: Any) -> Any:
    """An empty cache for a pass over prefixes.

    Raises:
        ConfigError: the model keeps something else than all keys and values of each layer; says what.
    """
    cache: Any = DynamicCache(config=config)
    odd = {type(layer).__name__ for layer in cache.layers if type(layer) is not DynamicLayer}
    if odd:
        raise ConfigError(f"its cache has a {' and a '.join(sorted(odd))}, not the keys and values of every token")
    cache.layers = [PrefixCacheLayer() for _ in cache.layers]
    return cache


def suffix_cache(config: Any, prefixes: Any, number: Int[Tensor, " row"]) -> Any:
    """The cache for a pass over rows behind their prefixes.

    Args:
        prefixes: a ``prefix_cache`` that a pass has filled.
        number: which prefix each row has.
    """
    cache: Any = DynamicCache(config=config)
    cache.layers = [SuffixCacheLayer(layer, number) for layer in prefixes.layers]
    return cache
