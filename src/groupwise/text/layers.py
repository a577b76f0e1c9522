"""Changes to the layers of transformers models for training: no dropout, gradient checkpointing, shared prefixes."""

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
    """Set every dropout probability to 0, also those in attributes of modules: attention, layer drop, routers' jitter."""
    for module in model.modules():
        if isinstance(module, _DROPOUTS):
            module.p = 0.0
        for name, value in list(vars(module).items()):
            if isinstance(value, float) and any(word in name for word in _NOISES):
                setattr(module, name, 0.0)


def decoder_layers(model: nn.Module) -> list[Any]:
    """The layers that a model repeats."""
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def recompute_layers(model: nn.Module) -> None:
    """Gradient checkpointing. transformers' own switch needs training mode, and disables the cache for shared prefixes."""
    layers = decoder_layers(model)
    if not layers:
        raise ConfigError(
            f"{type(model).__name__} has no layers for gradient checkpointing; fix: gradient_checkpointing=False"
        )
    for layer in layers:
        layer.forward = MethodType(_forward_recomputed, layer)  # bound, so that it can be copied


def _forward_recomputed(layer: Any, *args: Any, **kwargs: Any) -> Any:
    forward = type(layer).forward
    if not torch.is_grad_enabled():  # sampling: `checkpoint` would do the same, slower
        return forward(layer, *args, **kwargs)
    return checkpoint(forward, layer, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)


def keep_differentiable(model: nn.Module) -> None:
    """Keep layers quantised by bitsandbytes in training mode.

    In evaluation mode, some CPUs repack their weights for a kernel without a backward pass; 8-bit ones round activations.
    """
    library = sys.modules.get("bitsandbytes")  # imported by the code that made such layers
    if library is None:
        return
    for module in model.modules():
        if isinstance(module, library.nn.Linear4bit | library.nn.Linear8bitLt):
            module.train()


class PrefixCacheLayer(DynamicLayer):  # type: ignore[misc]  # mypy does not follow transformers
    """A layer's cache that keeps the keys and values of one pass, with their gradient."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """The new keys and values."""
        self.keys, self.values, self.is_initialized = key_states, value_states, True
        return key_states, value_states


class SuffixCacheLayer(DynamicLayer):  # type: ignore[misc]
    """A layer's cache of prefixes that is only read, so that the suffixes may be recomputed."""

    def __init__(self, prefix: PrefixCacheLayer, number: Int[Tensor, " row"]) -> None:
        super().__init__()
        self.keys, self.values, self.is_initialized = prefix.keys, prefix.values, True
        self.number = number

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """The keys and values of each row's prefix and suffix."""
        keys, values = self.keys[self.number], self.values[self.number]
        return torch.cat([keys, key_states], dim=-2), torch.cat([values, value_states], dim=-2)


def prefix_cache(config: Any) -> Any:
    """An empty cache for a pass over prefixes; a ``ConfigError`` if it is not the keys and values of all tokens."""
    cache: Any = DynamicCache(config=config)
    odd = {type(layer).__name__ for layer in cache.layers if type(layer) is not DynamicLayer}
    if odd:
        raise ConfigError(f"its cache has a {' and a '.join(sorted(odd))}, not the keys and values of every token")
    cache.layers = [PrefixCacheLayer() for _ in cache.layers]
    return cache


def suffix_cache(config: Any, prefixes: Any, number: Int[Tensor, " row"]) -> Any:
    """The cache for a pass over suffixes; ``prefixes`` is a filled ``prefix_cache``, ``number`` the prefix of each row."""
    cache: Any = DynamicCache(config=config)
    cache.layers = [SuffixCacheLayer(layer, number) for layer in prefixes.layers]
    return cache
