"""Acting of a small network on a few rows in NumPy, whose operations have a third of torch's overhead.

The random numbers are those of the action heads, so actions agree with ``policy.act`` to rounding.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from jaxtyping import Float32, Int64
from torch import Tensor, nn

from groupwise.data.rollout import Nested
from groupwise.data.spaces import space_kind
from groupwise.policies.actor_critic import ActorCritic
from groupwise.policies.base import Action, Policy, has_hooks
from groupwise.policies.discrete_heads import Categorical
from groupwise.policies.gaussian_heads import DiagGaussian
from groupwise.policies.networks import MLP, ObsEncoder

MAX_ROWS = 32
"""NumPy is faster up to here, and its products use a single thread."""
MAX_PARAMS = 256
"""The same of numbers that describe the rows' action distributions."""

_HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)
_TINY = torch.finfo(torch.float32).tiny
_CLIP = 10.0

Rows: TypeAlias = Float32[np.ndarray, "row _"]
Draw: TypeAlias = Callable[[Rows, torch.Generator | None], tuple[np.ndarray, Float32[np.ndarray, " row"]]]
"""Actions and their log-probabilities from the actor's outputs."""


class Layer(NamedTuple):
    """A linear layer and the activation that follows."""

    weight: Float32[np.ndarray, "input output"]
    bias: Float32[np.ndarray, " output"]
    activation: str | None


class NumPyActor:
    """``policy.act``, prepared for steps between which no parameter changes."""

    def __init__(self, policy: ActorCritic) -> None:
        self._policy = policy
        self._trunk = [] if policy.trunk is None else _layers(policy.trunk)
        self._ends = [_layers(end) for end in (policy.actor, policy.critic) if end is not None]
        self._draw = _draw_index if policy.log_std is None else _draw_gaussian(policy.log_std)
        self._shape = (-1, *policy.action_spec.shape)  # type: ignore[union-attr]
        self._scaling: tuple[np.ndarray, np.ndarray] | None = None
        if policy.obs_normalizer is not None:
            statistics: Any = policy.obs_normalizer.statistics[0]
            self._scaling = statistics.shift.numpy(), statistics.scale.numpy()
        self._max_rows = min(MAX_ROWS, MAX_PARAMS // policy.head.num_params)

    def __call__(self, obs: Nested, deterministic: bool = False, generator: torch.Generator | None = None) -> Action:
        """As ``policy.act``."""
        if deterministic or not isinstance(obs, Tensor) or len(obs) > self._max_rows:
            return self._policy.act(obs, deterministic, generator)
        with np.errstate(all="ignore"):  # a policy that diverged shows in its actions, as in torch
            x = _forward(self._normalized(obs.numpy()), self._trunk)
            outputs, *values = [_forward(x, end) for end in self._ends]
            action, log_prob = self._draw(outputs, generator)
        value = torch.from_numpy(values[0][:, 0]) if values else None
        return Action(torch.from_numpy(action).view(self._shape), torch.from_numpy(log_prob), value)

    def _normalized(self, obs: Rows) -> Rows:
        if self._scaling is None:
            return obs
        shift, scale = self._scaling
        scaled: Rows = np.subtract(obs, shift)
        np.multiply(scaled, scale, out=scaled)
        np.maximum(scaled, -_CLIP, out=scaled)
        np.minimum(scaled, _CLIP, out=scaled)
        return scaled


def numpy_actor(policy: Policy) -> Callable[..., Action]:
    """The policy's ``act`` in NumPy, else as it is: NumPy is for a plain ``ActorCritic`` on vectors of floats on a CPU."""
    if type(policy) is ActorCritic and _is_plain(policy) and not has_hooks(policy):
        return NumPyActor(policy)
    return policy.act


def _is_plain(policy: ActorCritic) -> bool:
    space = policy.observation_space
    on_vectors = (
        space_kind(space) == "box" and space.dtype.kind == "f" and len(space.shape) == 1
    )  # in torch all float32
    own_head = type(policy.head) is Categorical or (type(policy.head) is DiagGaussian and policy.log_std is not None)
    networks = [network for network in (policy.trunk, policy.actor, policy.critic) if network is not None]
    linears = [linear for network in networks for linear in _linears(network)]
    return (
        on_vectors
        and own_head
        and type(policy.encoder) is ObsEncoder
        and all(type(linear) is nn.Linear and linear.bias is not None for linear in linears)
        and all(type(n) is nn.Linear or (type(n) is MLP and n.activation in ("tanh", "relu")) for n in networks)
        and all(p.device.type == "cpu" and p.dtype == torch.float32 for p in policy.parameters())
    )


def _linears(network: nn.Module) -> list[Any]:
    if not isinstance(network, MLP):
        return [network]
    return [*network.hidden, *([] if network.head is None else [network.head])]


def _layers(network: nn.Module) -> list[Layer]:
    hidden = network.activation if isinstance(network, MLP) else None
    last = network.head if isinstance(network, MLP) else network
    return [
        Layer(linear.weight.detach().numpy().T, linear.bias.detach().numpy(), None if linear is last else hidden)
        for linear in _linears(network)
    ]


def _forward(x: Rows, layers: list[Layer]) -> Rows:
    for weight, bias, activation in layers:
        x = np.dot(x, weight)
        np.add(x, bias, out=x)
        if activation == "tanh":
            np.tanh(x, out=x)
        elif activation == "relu":
            np.maximum(x, 0, out=x)
    return x


def _draw_index(
    logits: Rows, generator: torch.Generator | None
) -> tuple[Int64[np.ndarray, " row"], Float32[np.ndarray, " row"]]:
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


def _draw_gaussian(log_std_parameter: Tensor) -> Draw:
    """Draws around means, with standard deviations that do not depend on the observation."""
    log_std = log_std_parameter.detach().numpy()
    with np.errstate(all="ignore"):
        deviation = np.exp(log_std)

    def draw(mean: Rows, generator: torch.Generator | None) -> tuple[Rows, Float32[np.ndarray, " row"]]:
        action = torch.randn(mean.shape, generator=generator).numpy()
        np.add(mean, np.multiply(deviation, action, out=action), out=action)
        distance = np.divide(np.subtract(action, mean), deviation)
        square = np.multiply(np.multiply(0.5, distance), distance)
        density = np.add.reduce(np.add(log_std, square, out=square), axis=1)
        np.add(density, np.float32(mean.shape[1] * _HALF_LOG_2PI), out=density)
        return action, np.negative(density, out=density)

    return draw
