"""Small networks on a CPU by hand: acting with NumPy's tanh, and all networks of a policy as one operation of autograd.

A dozen nodes and a dozen parameters of autograd cost a small minibatch about as much as its products, and ``torch.tanh`` takes
ten times as long as NumPy's on some machines (``benchmarks/README.md``). ``MLP`` computes the same layer by layer: it is the
reference, and serves everything else.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from groupwise.errors import ConfigError

ACTIVATIONS = ("tanh", "relu")
"""Whose derivative follows from their output, so that inputs need not be kept."""

NUMPY_ROWS = 32
"""Up to so many rows NumPy acts faster than torch; OpenBLAS takes no second thread for them."""


class Layer(NamedTuple):
    """Of a network: a linear one, and what follows it."""

    linear: nn.Linear
    activation: str | None


def knows(layers: Sequence[Layer]) -> bool:
    """Whether the kernel computes these: plain ones in float32 on a CPU, none of them twice."""
    return len({id(layer.linear) for layer in layers}) == len(layers) > 0 and all(
        layer.activation in (None, *ACTIVATIONS)
        and type(layer.linear) is nn.Linear  # not one with a parametrisation
        and layer.linear.bias is not None
        and layer.linear.weight.dtype == torch.float32
        and layer.linear.weight.device.type == "cpu"
        for layer in layers
    )


def learns(layers: Sequence[Layer]) -> bool:
    """Whether every parameter of these is trained: ``VectorNetworks`` has a gradient for all of them or for none."""
    return all(parameter.requires_grad for layer in layers for parameter in layer.linear.parameters())


class ActingNetworks:
    """Networks on one input without gradient, prepared for many steps with the same parameters.

    Args:
        trunk: layers that the networks share; none: all begin at the input.
        heads: the layers of each network behind the trunk.
        numpy_rows: up to so many rows NumPy computes.
    """

    def __init__(
        self, trunk: Sequence[Layer], heads: Sequence[Sequence[Layer]], *, numpy_rows: int = NUMPY_ROWS
    ) -> None:
        self._numpy_rows = numpy_rows
        self._trunk = [_Prepared.of(layer) for layer in trunk]
        self._heads = [[_Prepared.of(layer) for layer in head] for head in heads]

    def __call__(self, x: Float[Tensor, "*batch input"]) -> list[Float[Tensor, "*batch _"]]:
        """Outputs of each network."""
        if x.dim() != 2:
            return [y.view(*x.shape[:-1], y.shape[-1]) for y in self(x.reshape(-1, x.shape[-1]))]
        if x.shape[0] > self._numpy_rows:
            x = self._many(x, self._trunk)
            return [self._many(x, head) for head in self._heads]
        return [torch.from_numpy(output) for output in self.few(x.numpy())]

    def few(self, x: np.ndarray) -> list[np.ndarray]:
        """As a call, of a few rows ``[batch, input]`` in NumPy."""
        x = self._few(x, self._trunk)
        return [self._few(x, head) for head in self._heads]

    @staticmethod
    def _many(x: Tensor, layers: "Sequence[_Prepared]") -> Tensor:
        for layer in layers:
            x = _forward(x, layer.weight, layer.bias, layer.activation)
        return x

    @staticmethod
    def _few(x: np.ndarray, layers: "Sequence[_Prepared]") -> np.ndarray:
        for _, _, array, bias, activation in layers:
            x = np.dot(x, array)
            np.add(x, bias, out=x)
            if activation == "tanh":
                np.tanh(x, out=x)
            elif activation == "relu":
                np.maximum(x, 0, out=x)
        return x


class _Prepared(NamedTuple):
    weight: Tensor
    bias: Tensor
    array: np.ndarray
    """The weight, inputs first."""
    bias_array: np.ndarray
    activation: str | None

    @classmethod
    def of(cls, layer: Layer) -> "_Prepared":
        weight, bias = layer.linear.weight.detach(), layer.linear.bias.detach()
        return cls(weight, bias, weight.numpy().T, bias.numpy(), layer.activation)


class VectorNetworks:
    """Networks on one input, whose parameters all are views of one vector, as a function of that vector.

    The gradient arrives in the vector's, in one piece. The parameters' own gradients are left alone.

    Args:
        vector: float32, on the CPU.
        trunk: layers that the networks share; none: all begin at the input.
        heads: the layers of each network behind the trunk, the last one without activation.

    Raises:
        ConfigError: a parameter is no part of the vector.
    """

    def __init__(self, vector: nn.Parameter, trunk: Sequence[Layer], heads: Sequence[Sequence[Layer]]) -> None:
        self.vector = vector
        self.gradient = torch.zeros_like(vector, requires_grad=False)
        self.trunk = [self._laid(layer) for layer in trunk]
        self.heads = [[self._laid(layer) for layer in head] for head in heads]

    def __call__(self, x: Float[Tensor, "*batch input"]) -> list[Float[Tensor, "*batch _"]]:
        """Outputs of each network.

        Raises:
            ConfigError: in a backward pass with ``create_graph=True``: there is no second derivative.
        """
        if x.dim() != 2:
            return [y.view(*x.shape[:-1], y.shape[-1]) for y in self(x.reshape(-1, x.shape[-1]))]
        outputs: tuple[Tensor, ...] = _Networks.apply(x, self.vector, self)  # type: ignore[no-untyped-call]
        return [*outputs]

    def _laid(self, layer: Layer) -> "_LaidLayer":
        (weight, grad_weight), (bias, grad_bias) = map(self._views, (layer.linear.weight, layer.linear.bias))
        return _LaidLayer(weight, bias, grad_weight, grad_bias, layer.activation)

    def _views(self, parameter: Tensor) -> tuple[Tensor, Tensor]:
        """The parameter's part of the vector, and of the gradient."""
        begin = (parameter.data_ptr() - self.vector.data_ptr()) // self.vector.element_size()
        part = slice(begin, begin + parameter.numel())
        if not 0 <= begin <= part.stop <= self.vector.numel():
            raise ConfigError(
                "parameters of the policy were moved, converted, replaced or unfrozen after the algorithm was built; "
                "fix: do it before"
            )
        return self.vector.detach()[part].view_as(parameter), self.gradient[part].view_as(parameter)


class _LaidLayer(NamedTuple):
    weight: Tensor
    bias: Tensor
    grad_weight: Tensor
    grad_bias: Tensor
    activation: str | None


class _Networks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, vector: Tensor, networks: VectorNetworks) -> tuple[Tensor, ...]:
        trunk = _outputs(x, networks.trunk)
        heads = [_outputs(trunk[-1], head) for head in networks.heads]
        # an output kept here would keep itself alive, through its node of the graph
        ctx.networks, ctx.trunk, ctx.heads = networks, trunk, [head[:-1] for head in heads]
        ctx.save_for_backward(vector)  # autograd refuses a backward pass after the vector has changed
        return tuple(head[-1] for head in heads)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # else what depends on a second derivative would silently be constant
            raise ConfigError(
                "the MLP kernel has a first derivative only; fix: mlp_kernel='torch' in the policy's settings"
            )
        assert not ctx.needs_input_grad[0]
        _ = ctx.saved_tensors
        networks: VectorNetworks = ctx.networks
        goes_on = bool(networks.trunk)
        heads = zip(grads, networks.heads, ctx.heads, strict=True)
        below = [_backward(grad, layers, outputs, goes_on) for grad, layers, outputs in heads]
        if goes_on:
            _backward(sum(below[1:], below[0]), networks.trunk, ctx.trunk, False)
        return None, networks.gradient.clone(), None


def _forward(x: Tensor, weight: Tensor, bias: Tensor, activation: str | None) -> Tensor:
    output = torch.addmm(bias, x, weight.t())
    if activation == "relu":
        output.relu_()
    elif activation == "tanh":
        array = output.numpy()
        np.tanh(array, out=array)
    return output


def _outputs(x: Tensor, layers: Sequence[_LaidLayer]) -> list[Tensor]:
    """The input, and the output of each layer."""
    outputs = [x]
    for weight, bias, _, _, activation in layers:
        outputs.append(_forward(outputs[-1], weight, bias, activation))
    return outputs


def _backward(grad: Tensor, layers: Sequence[_LaidLayer], outputs: Sequence[Tensor], goes_on: bool) -> Tensor:
    """Write the gradients of the layers; returns that of their input, if it ``goes_on`` to there."""
    for number in reversed(range(len(layers))):
        weight, _, grad_weight, grad_bias, activation = layers[number]
        if activation is not None:
            grad = _before(grad, outputs[number + 1], activation)
        _write_products(grad, outputs[number], grad_weight)
        torch.sum(grad, 0, out=grad_bias)
        if number or goes_on:
            grad = grad @ weight
    return grad


def _write_products(
    grad: Float[Tensor, "batch out"], x: Float[Tensor, "batch in"], out: Float[Tensor, "out in"]
) -> None:
    """Sums of ``grad x``; with the narrower factor first, which takes a fifth of the time where it is narrow."""
    if grad.shape[1] <= x.shape[1]:
        torch.mm(grad.t(), x, out=out)
    else:
        out.copy_((x.t() @ grad).t())


def _before(grad: Tensor, output: Tensor, activation: str) -> Tensor:
    """The gradient at the input of an activation."""
    found: Tensor
    if activation == "tanh":
        found = torch.ops.aten.tanh_backward(grad, output)
    else:
        found = torch.ops.aten.threshold_backward(grad, output, 0)
    return found
