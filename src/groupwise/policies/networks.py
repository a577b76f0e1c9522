"""Networks of control policies: encoders that turn any observation into features, and MLPs on top of them.

All weights start orthogonal and all biases 0, as in the reference PPO (Huang et al. 2022, "The 37 implementation
details of PPO", on orthogonal initialisation).
"""

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from jaxtyping import Float, Shaped
from torch import Tensor, nn
from torch.nn.functional import elu, linear, silu

from groupwise.config.policy import PolicyCfg
from groupwise.data.rollout import Nested
from groupwise.data.spaces import leaf_spaces, obs_spec, space_kind

HIDDEN_GAIN = math.sqrt(2)
ACTOR_GAIN = 0.01
CRITIC_GAIN = 1.0

Layer = TypeVar("Layer", nn.Linear, nn.Conv2d)

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh,
    "relu": torch.relu,
    "elu": elu,
    "silu": silu,
}


def orthogonal(layer: Layer, gain: float = HIDDEN_GAIN) -> Layer:
    """The layer, its weight orthogonal times ``gain`` and its bias 0."""
    nn.init.orthogonal_(layer.weight, gain)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
    return layer


def _linear(layer: Any, x: Tensor) -> Tensor:
    """``layer(x)`` in the layer's dtype, in two thirds of the time on a small batch, for it runs no module hooks."""
    return linear(x.to(layer.weight.dtype), layer.weight, layer.bias)


class MLP(nn.Module):
    """Linear layers with activations between them.

    Args:
        num_outputs: width of a last linear layer; None ends with the last hidden layer's activation.
        gain: of the last layer's weight.
    """

    def __init__(self, num_inputs: int, cfg: PolicyCfg, num_outputs: int | None = None, gain: float = 1.0) -> None:
        super().__init__()
        sizes = (num_inputs, *cfg.hidden_sizes)
        self.num_outputs = sizes[-1] if num_outputs is None else num_outputs
        self.hidden = nn.ModuleList(orthogonal(nn.Linear(a, b)) for a, b in pairwise(sizes))
        self.head = None if num_outputs is None else orthogonal(nn.Linear(sizes[-1], num_outputs), gain)
        self.activation = cfg.activation

    def forward(self, x: Float[Tensor, "*batch input"]) -> Float[Tensor, "*batch output"]:
        """Outputs of the last layer."""
        activation = _ACTIVATIONS[self.activation]
        for layer in self.hidden:
            x = activation(_linear(layer, x))
        return x if self.head is None else _linear(self.head, x)


class NatureCNN(nn.Sequential):
    """512 features of an image of 36x36 or more.

    Source: Mnih et al. 2015, https://doi.org/10.1038/nature14236.
    """

    num_features = 512
    min_size = 36

    def __init__(self, channels: int, height: int, width: int) -> None:
        h, w = (((((size - 8) // 4 + 1) - 4) // 2 + 1) - 2 for size in (height, width))
        super().__init__(
            orthogonal(nn.Conv2d(channels, 32, 8, stride=4)),
            nn.ReLU(),
            orthogonal(nn.Conv2d(32, 64, 4, stride=2)),
            nn.ReLU(),
            orthogonal(nn.Conv2d(64, 64, 3)),
            nn.ReLU(),
            nn.Flatten(),
            orthogonal(nn.Linear(64 * h * w, self.num_features)),
            nn.ReLU(),
        )


class SmallCNN(nn.Sequential):
    """128 features of a small image, such as a grid of cells."""

    num_features = 128
    min_size = 1

    def __init__(self, channels: int, height: int, width: int) -> None:
        super().__init__(
            orthogonal(nn.Conv2d(channels, 32, 3, padding=1)),
            nn.ReLU(),
            orthogonal(nn.Conv2d(32, 64, 3, stride=2, padding=1)),
            nn.ReLU(),
            nn.Flatten(),
            orthogonal(nn.Linear(64 * ((height + 1) // 2) * ((width + 1) // 2), self.num_features)),
            nn.ReLU(),
        )


class ImageLayout(NamedTuple):
    """Size of an image space, and where its channels are."""

    channels: int
    height: int
    width: int
    channels_first: bool


def image_layout(space: Any) -> ImageLayout | None:
    """How the space lays out an image; None if it is none.

    An image is a uint8 Box of three dimensions. Its channels are the smaller one of the first and the last dimension
    (a stack of 4 grey frames is [4, 84, 84], a colour image [210, 160, 3]), the last one on a tie.
    """
    if space_kind(space) != "box" or space.dtype != np.uint8 or len(space.shape) != 3:
        return None
    first, middle, last = space.shape
    return ImageLayout(first, middle, last, True) if first < last else ImageLayout(last, first, middle, False)


class ObsEncoder(nn.Module):
    """Features of any observation: those of every leaf of the space, one after another.

    A Box is flattened (uint8 divided by 255), Discrete and MultiDiscrete become one-hot, MultiBinary stays zeros and
    ones, and images go through a CNN. Leaves of a Dict or Tuple follow in the order of the space.

    Raises:
        UnsupportedSpaceError: as ``obs_spec``.
        ConfigError: an image too small for the CNN.
    """

    def __init__(self, space: Any, cfg: PolicyCfg) -> None:
        super().__init__()
        obs_spec(space)  # refuses what has no fixed shape
        leaves = leaf_spaces(space)
        self.paths = list(leaves)
        self.encoders = nn.ModuleList(_leaf_encoder(leaf, cfg) for leaf in leaves.values())
        self.num_features = sum(encoder.num_features for encoder in self.encoders)  # type: ignore[misc]

    def forward(self, obs: Nested) -> Float[Tensor, "*batch feature"]:
        """Features of observations with any leading dimensions."""
        if isinstance(obs, Tensor):
            features: Tensor = self.encoders[0](obs)
            return features
        leaves = zip(self.paths, self.encoders, strict=True)
        return torch.cat([encoder(obs[path]) for path, encoder in leaves], dim=-1)


def _leaf_encoder(space: Any, cfg: PolicyCfg) -> "_Flat | _OneHot | _Image":
    kind = space_kind(space)
    if kind == "discrete":
        return _OneHot(np.array(space.n), np.array(space.start))
    if kind == "multi_discrete":
        return _OneHot(space.nvec, space.start)
    layout = image_layout(space)
    return _Flat(tuple(space.shape)) if layout is None else _Image(layout, cfg)


class _Flat(nn.Module):
    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.num_dims = len(shape)
        self.num_features = math.prod(shape)

    def forward(self, obs: Shaped[Tensor, "*batch"]) -> Float[Tensor, "..."]:
        flat = obs if self.num_dims == 1 else obs.reshape(*_batch(obs, self.num_dims), self.num_features)
        if flat.is_floating_point():
            return flat
        return flat.float() / 255 if flat.dtype == torch.uint8 else flat.float()


class _OneHot(nn.Module):
    """A one for each number, among the options of its choice; a number out of range has only zeros."""

    def __init__(self, sizes: np.ndarray, start: np.ndarray) -> None:
        super().__init__()
        self.num_dims = sizes.ndim
        self.num_choices = sizes.size
        self.num_features = int(sizes.sum())
        options = [first + np.arange(size) for size, first in zip(sizes.ravel(), start.ravel(), strict=True)]
        choice = np.repeat(np.arange(sizes.size), sizes.ravel())
        self.register_buffer("option", torch.from_numpy(np.concatenate(options)), persistent=False)
        self.register_buffer("choice", torch.from_numpy(choice), persistent=False)
        self.option: Tensor
        self.choice: Tensor

    def forward(self, obs: Shaped[Tensor, "*batch"]) -> Float[Tensor, "..."]:
        flat = obs.reshape(*_batch(obs, self.num_dims), self.num_choices)
        return (flat[..., self.choice] == self.option).float()


class _Image(nn.Module):
    def __init__(self, layout: ImageLayout, cfg: PolicyCfg) -> None:
        super().__init__()
        channels, height, width, self.channels_first = layout
        network = NatureCNN if min(height, width) >= NatureCNN.min_size else SmallCNN
        self.network: Any = network(channels, height, width)
        self.num_features = network.num_features

    def forward(self, obs: Shaped[Tensor, "*batch a b c"]) -> Float[Tensor, "*batch feature"]:
        image = obs if self.channels_first else obs.movedim(-1, -3)
        features: Tensor = self.network(image.reshape(-1, *image.shape[-3:]).to(self.network[0].weight.dtype) / 255)
        return features.reshape(*_batch(obs, 3), self.num_features)


def _batch(obs: Tensor, num_dims: int) -> torch.Size:
    """The leading dimensions of an observation with ``num_dims`` of its own."""
    return obs.shape[: obs.dim() - num_dims]
