"""An MLP forwards and backwards as one operation of autograd, for small networks on a CPU.

NumPy's tanh takes a tenth of the time of torch's there, and one node of autograd less than a dozen
(``benchmarks/mlp_kernel.py``). ``MLP`` computes the same layer by layer: it is the reference, and serves everything else.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from groupwise.errors import ConfigError

ACTIVATIONS = ("tanh", "relu")
"""Whose derivative follows from their output, so that inputs need not be kept."""


ROWS, ROWS_WITH_GRADIENT = 128, 256
"""From so many rows on the kernel is the faster; below, nearly all of its time is Python's."""


def knows(weight: Tensor, activation: str) -> bool:
    """Whether the kernel computes such a network: in float32 on a CPU."""
    return activation in ACTIVATIONS and weight.dtype == torch.float32 and weight.device.type == "cpu"


def pays(x: Float[Tensor, "*batch input"]) -> bool:
    """Whether the kernel is the faster way for these inputs; a compiler is to see the layers."""
    rows = ROWS_WITH_GRADIENT if torch.is_grad_enabled() else ROWS
    return (
        x.numel() >= rows * x.shape[-1]
        and x.dtype == torch.float32
        and x.device.type == "cpu"
        and not torch.compiler.is_compiling()
    )


def mlp(
    x: Float[Tensor, "batch input"], activation: str, parameters: Sequence[Tensor], *, ends_linear: bool
) -> Float[Tensor, "batch output"]:
    """Outputs of the last layer.

    Args:
        parameters: weight and bias of each layer, from the first on.
        ends_linear: no activation behind the last layer.

    Raises:
        ConfigError: in a backward pass with ``create_graph=True``: there is no second derivative.
    """
    if not torch.is_grad_enabled():
        return _outputs(x, activation, parameters, ends_linear)[-1]
    found: Tensor = _MLP.apply(x, activation, ends_linear, *parameters)  # type: ignore[no-untyped-call]
    return found


def _outputs(x: Tensor, activation: str, parameters: Sequence[Tensor], ends_linear: bool) -> list[Tensor]:
    """The input, and the output of each layer."""
    outputs = [x]
    last = len(parameters) // 2 if ends_linear else 0
    for number, (weight, bias) in enumerate(zip(parameters[::2], parameters[1::2], strict=True), start=1):
        output = torch.addmm(bias, outputs[-1], weight.t())
        if number != last:
            _activate(output, activation)
        outputs.append(output)
    return outputs


def _activate(output: Tensor, activation: str) -> None:
    if activation == "relu":
        output.relu_()
        return
    array = output.numpy()
    np.tanh(array, out=array)


class _MLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, activation: str, ends_linear: bool, *parameters: Tensor) -> Tensor:
        outputs = _outputs(x, activation, parameters, ends_linear)
        ctx.save_for_backward(*outputs, *parameters[::2])
        ctx.activation, ctx.ends_linear = activation, ends_linear
        return outputs[-1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # else what depends on a second derivative would silently be constant
            raise ConfigError(
                "the MLP kernel has a first derivative only; mend: mlp_kernel='torch' in the policy's settings"
            )
        count = len(ctx.saved_tensors) // 2
        outputs, weights = ctx.saved_tensors[: count + 1], ctx.saved_tensors[count + 1 :]
        grads: list[Tensor] = []
        for number in reversed(range(count)):
            if number < count - 1 or not ctx.ends_linear:
                grad = _before(grad, outputs[number + 1], ctx.activation)
            grads = [_products(grad, outputs[number]), grad.sum(dim=0), *grads]
            if number or ctx.needs_input_grad[0]:
                grad = grad @ weights[number]
        return grad if ctx.needs_input_grad[0] else None, None, None, *grads


def _products(grad: Float[Tensor, "batch out"], x: Float[Tensor, "batch in"]) -> Float[Tensor, "out in"]:
    """Sums of ``grad x``; with the narrower factor first, which takes a fifth of the time where it is narrow."""
    return grad.t() @ x if grad.shape[1] <= x.shape[1] else (x.t() @ grad).t()


def _before(grad: Tensor, output: Tensor, activation: str) -> Tensor:
    """The gradient at the input of an activation."""
    found: Tensor
    if activation == "tanh":
        found = torch.ops.aten.tanh_backward(grad, output)
    else:
        found = torch.ops.aten.threshold_backward(grad, output, 0)
    return found
