"""Fast paths of small networks on a CPU; each gives the reference's results, and each is an argument of a constructor.

flat_adam          parameters as one vector: clipping and stepping a dozen small tensors is nearly all overhead
compiled_gradient  the gradient of a micro-batch as one compiled function
"""

import logging
import math
import warnings
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from groupwise.algorithms.base import BaseAlgorithm
from groupwise.algorithms.grpo import GRPO
from groupwise.algorithms.losses import finest_item
from groupwise.algorithms.memory import Batch
from groupwise.algorithms.ppo import PPO
from groupwise.config.algorithm import AlgorithmCfg
from groupwise.data.spaces import subspaces
from groupwise.errors import ConfigError, SlowPathWarning
from groupwise.policies.actor_critic import ActorCritic
from groupwise.policies.base import has_hooks

log = logging.getLogger(__name__)

# --- parameters as one vector, and Adam on it ---

LIMIT = 2**20
"""Elements; larger networks spend their time elsewhere."""


class FlatAdam:
    """``torch.optim.Adam(fused=True)`` of one vector: the same step and state, without the wrapper's overhead.

    Parameters become views of the vector, and their gradients views of its gradient, which needs no gathering.

    Args:
        group: the settings of ``torch.optim.Adam``'s parameter group.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], group: dict[str, Any]) -> None:
        self.parameters = parameters
        self.vector = nn.Parameter(torch.cat([parameter.detach().flatten() for parameter in parameters]))
        self.param_groups: list[dict[str, Any]] = [group | {"params": [self.vector]}]
        moments = {name: torch.zeros_like(self.vector.detach()) for name in ("exp_avg", "exp_avg_sq")}
        self.state: dict[str, Tensor] = {"step": torch.zeros((), device=self.vector.device), **moments}
        self.sizes = [parameter.numel() for parameter in self.parameters]
        self.gradient = torch.zeros_like(self.vector, requires_grad=False)
        for parameter, part in zip(self.parameters, torch.split(self.vector.detach(), self.sizes), strict=True):
            parameter.data = part.view_as(parameter)
        self._places = [parameter.data_ptr() for parameter in self.parameters]
        parts = torch.split(self.gradient, self.sizes)
        self._views = [part.view_as(parameter) for parameter, part in zip(self.parameters, parts, strict=True)]
        self.rate: Tensor | None = None
        """Takes the place of the group's learning rate."""
        self._norm = self.vector.new_zeros(())
        self._refused = torch.zeros_like(self.gradient)
        self.zero_grad()

    def zero_grad(self) -> None:
        """Set all gradients to zero, in place; a ``ConfigError`` if parameters were moved or replaced since."""
        if [parameter.data_ptr() for parameter in self.parameters] != self._places:
            raise ConfigError(
                "parameters of the policy were moved, converted or replaced after the algorithm was built; fix: do it before"
            )
        self.gradient.zero_()
        self.vector.grad = self.gradient
        for parameter, view in zip(self.parameters, self._views, strict=True):
            parameter.grad = view

    def add_gradient(self, loss: Float[Tensor, ""]) -> None:
        """Add the gradient of a loss, in place."""
        for view, part in zip(self._views, torch.autograd.grad(loss, self.parameters, allow_unused=True), strict=True):
            if part is not None:
                view.add_(part)

    def clip(self, limit: float | None) -> Float[Tensor, ""]:
        """Clip the gradient's norm; returns the old one. Same as ``clip_grad_norm_``, in a quarter of its time."""
        torch.linalg.vector_norm(self.gradient, out=self._norm)
        if limit is not None:
            self.gradient.mul_((limit / (self._norm + 1e-6)).clamp_(max=1.0))
        return self._norm.clone()

    @property
    def refused(self) -> list[Tensor]:
        """The gradient of each parameter in the last step whose norm was not finite."""
        parts = zip(self.parameters, torch.split(self._refused, self.sizes), strict=True)
        return [part.view_as(parameter) for parameter, part in parts]

    def step(self) -> None:
        """One step along the gradient, or none if the norm that ``clip`` found is not finite.

        Source: Kingma, Ba 2015, https://arxiv.org/abs/1412.6980, algorithm 1; decoupled weight decay: Loshchilov, Hutter
        2019, https://arxiv.org/abs/1711.05101.
        """
        group, state, finite = self.param_groups[0], self.state, self._norm.isfinite()
        move = torch._fused_adamw_ if group["decoupled_weight_decay"] else torch._fused_adam_
        torch.where(finite, self._refused, self.gradient, out=self._refused)
        state["step"].add_(finite)
        moments = [state["exp_avg"]], [state["exp_avg_sq"]]
        beta1, beta2 = group["betas"]
        settings = {name: group[name] for name in ("weight_decay", "eps", "amsgrad", "maximize")}
        settings |= {"lr": group["lr"] if self.rate is None else self.rate, "found_inf": (~finite).float()}
        vector, gradient = [self.vector.detach()], [self.gradient]
        move(vector, gradient, *moments, [], [state["step"]], beta1=beta1, beta2=beta2, **settings)

    def state_dict(self) -> dict[str, Any]:
        """State in the layout of ``torch.optim.Adam`` of the single parameters."""
        parts = {name: torch.split(self.state[name], self.sizes) for name in ("exp_avg", "exp_avg_sq")}
        state = {
            number: {
                "step": self.state["step"].clone(),
                **{name: part[number].view_as(one) for name, part in parts.items()},
            }
            for number, one in enumerate(self.parameters)
        }
        return {"state": state, "param_groups": [self.param_groups[0] | {"params": [*state]}]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a saved ``state_dict``."""
        self.param_groups[0].update(state["param_groups"][0] | {"params": [self.vector]})
        for name, value in self.state.items():
            value.zero_()
            if name == "step":
                for one in state["state"].values():
                    value.copy_(one[name])
            else:  # torch's own Adam keeps nothing of parameters without a gradient
                parts = torch.split(value, self.sizes)
                for number, one in state["state"].items():
                    parts[number].copy_(one[name].flatten())


def flat_adam(
    cfg: AlgorithmCfg, parameters: Sequence[nn.Parameter], kind: type[FlatAdam] = FlatAdam
) -> FlatAdam | None:
    """Adam on the parameters as one vector, for ``BaseAlgorithm(optimizer=flat_adam)``; None where that does not apply."""
    kinds = {(p.dtype, p.device) for p in parameters}
    small = sum(p.numel() for p in parameters) <= LIMIT
    if len(kinds) != 1 or not small or cfg.optimizer.name not in ("adam", "adamw"):
        return None
    # the settings of torch.optim.Adam, whose constructor imports the compiler
    unused = {"amsgrad": False, "maximize": False, "foreach": None, "capturable": False, "differentiable": False}
    own = {"lr": cfg.learning_rate, "weight_decay": 0, **cfg.optimizer.model_dump(exclude={"name"})}
    decoupled = {"fused": True, "decoupled_weight_decay": cfg.optimizer.name == "adamw"}
    return kind(parameters, own | unused | decoupled)


# --- the gradient of a micro-batch, compiled ---

WORTH_STEPS = 20_000
"""Optimiser steps that pay for compiling: it takes 4 to 12 seconds, and each step saves half a millisecond or more."""

OPTIONS: dict[str, Any] = {
    "cpp_wrapper": True,  # a call from C++ has less overhead
    "cpp.use_decompose_tanh": True,  # the compiler's own takes six times as long
    "compile_threads": 1,  # in this process
}
"""Options of ``torch.compile``."""

_TOLERANCE = 1e-3
"""Share of the gradient's norm: a compiled gradient that differs by more from the reference is not used."""


def compiled_gradient(algorithm: BaseAlgorithm) -> "CompiledBackward | None":
    """A compiled ``backward``, for ``BaseAlgorithm(gradient=compiled_gradient)``.

    None unless the loss is pure, and computed on a CPU.
    """
    on_cpu = algorithm.policy.device.type == "cpu"
    return CompiledBackward(algorithm) if on_cpu and has_pure_loss(algorithm) else None


def has_pure_loss(algorithm: BaseAlgorithm) -> bool:
    """Whether the loss is a function of parameters, buffers and micro-batch alone, of a small ``ActorCritic``."""
    cfg, policy, kind = algorithm.cfg, algorithm.policy, type(algorithm)
    return (
        isinstance(algorithm.optimizer, FlatAdam)
        and kind.loss in (PPO.loss, GRPO.loss)
        and kind.backward is BaseAlgorithm.backward
        and isinstance(policy, ActorCritic)
        and type(policy).evaluate is ActorCritic.evaluate
        and subspaces(policy.observation_space) is None
        and not any(True for _ in policy.encoder.parameters())
        and finest_item(cfg.objective) == "transition"
        and cfg.objective.old_log_prob != "recomputed"
        and algorithm.range_schedules is None
        and not has_hooks(policy)
    )


def compiled_for(function: Any, example: Sequence[Any]) -> Callable[..., Any]:
    """``function`` compiled ahead of time for arguments like ``example``.

    Sizes are constants unless marked as dynamic, also after other compilations in this process, so results are the same.

    Each call of ``torch.compile`` looks for a compiled version first: 124 us in place of 105 for a minibatch of HalfCheetah.
    """
    compiled: Any = torch.compile(function, fullgraph=True, dynamic=False, options=OPTIONS)
    try:
        found = compiled.aot_compile((tuple(example), {}))
    # torch asks for a second try where a number differs from that of an earlier compilation, and for scalars in float64
    except Exception:
        found = compiled.aot_compile((tuple(example), {}))
    found.disable_guard_check()  # what may change is checked here, in a tenth of the time
    return found  # type: ignore[no-any-return]


class CompiledBackward:
    """``algorithm.backward``, compiled at the first micro-batch.

    Where it cannot be compiled, or gives another gradient, a warning gives the reason, and the reference is used.
    """

    def __init__(self, algorithm: BaseAlgorithm) -> None:
        assert isinstance(algorithm.optimizer, FlatAdam)
        self._algorithm = algorithm
        self._flat = algorithm.optimizer
        self._cfg = algorithm.cfg
        self._vector = self._flat.vector.detach()
        self._function: _Gradient | None = None
        self._compiled: Callable[..., tuple[Tensor, Tensor]] | None = None
        self.failed = False
        """Whether it cannot be compiled."""

    def __call__(self, batch: Batch) -> Float[Tensor, " metric"]:
        """Add the gradient of a micro-batch to that of the parameters; returns the sums of its metrics."""
        if self._compiled is None and not self.failed:
            self._compile(batch)
        function = self._function
        # the settings' numbers are constants, and the number of elements is not 1
        others = self._algorithm.cfg is not self._cfg or len(batch["loss_mask"]) < 2
        if self._compiled is None or function is None or others or batch.keys() != function.keys:
            return BaseAlgorithm.backward(self._algorithm, batch)
        with torch.no_grad():
            gradient, metrics = self._compiled(self._vector, *function.values(batch))
            self._flat.gradient.add_(gradient)
        return metrics

    def _compile(self, batch: Batch) -> None:
        """Compile, and compare with the reference."""
        function, vector, rows = _Gradient(self._algorithm, self._flat, batch), self._vector, len(batch["loss_mask"])
        try:
            with warnings.catch_warnings(), torch.inference_mode(False), torch.no_grad():
                warnings.simplefilter("ignore")  # the compiler's own
                example = function.values(function.example(batch))
                for value in example:
                    torch._dynamo.mark_dynamic(value, 0)
                compiled = compiled_for(function.compute, [vector, *example])
                for size in (rows, rows + 1):
                    values = function.values(_resized(batch, max(size, 2)))
                    found, expected = compiled(vector, *values)[0], function.compute(vector, *values)[0]
                    norm = float(expected.norm())
                    if math.isfinite(norm) and not float((found - expected).norm()) <= _TOLERANCE * norm + 1e-6:
                        raise RuntimeError(
                            f"the compiled gradient differs from the reference, whose norm is {norm:.3g}"
                        )
        except Exception as error:  # the compiler raises errors of any type
            self.failed = True
            warnings.warn(
                f"updates are not compiled ({first_line(error)}); fix: a C++ compiler on the PATH if there is none, else speed='off'",
                SlowPathWarning,
                stacklevel=4,
            )
            return
        log.debug("updates are compiled")
        self._function, self._compiled = function, compiled


class _Gradient:
    """The gradient and the metrics of a micro-batch as a function of tensors."""

    def __init__(self, algorithm: BaseAlgorithm, flat: FlatAdam, batch: Batch) -> None:
        names = {id(parameter): f"policy.{name}" for name, parameter in algorithm.policy.named_parameters()}
        shapes = {names[id(parameter)]: parameter.shape for parameter in flat.parameters}
        module, sizes, keys = _Loss(algorithm), flat.sizes, list(batch)
        self._widths = {width for shape in shapes.values() for width in shape} | {sum(sizes)}
        self.keys = dict.fromkeys(batch).keys()
        """The keys that this is compiled for; shapes and types follow from the buffer's check."""

        def compute(vector: Tensor, *values: Tensor) -> tuple[Tensor, Tensor]:
            batch = dict(zip(keys, values, strict=True))

            def loss(vector: Tensor) -> tuple[Tensor, Tensor]:
                parts = zip(shapes.items(), torch.split(vector, sizes), strict=True)
                parameters = {name: part.view(shape) for (name, shape), part in parts}
                return torch.func.functional_call(module, parameters, (batch,))  # type: ignore[no-any-return]

            gradient, (_, metrics) = torch.func.grad_and_value(loss, has_aux=True)(vector)
            return gradient, metrics

        self.compute = compute
        """From the parameters' vector and a micro-batch's values to the gradient, and the sums of the metrics."""

    def values(self, batch: Batch) -> list[Tensor]:
        """The inputs besides the vector."""
        return [batch[key].contiguous() for key in self.keys]

    def example(self, batch: Batch) -> Batch:
        """A batch of similar size, but no other dimension's: the compiler would take equal sizes as always equal."""
        others = self._widths | {width for value in batch.values() for width in value.shape[1:]}
        rows = max(len(batch["loss_mask"]), 2)
        return _resized(batch, next(number for number in count(rows) if number not in others))


class _Loss(nn.Module):
    """``loss_and_metrics`` where ``functional_call`` can replace the policy's parameters."""

    def __init__(self, algorithm: BaseAlgorithm) -> None:
        super().__init__()
        self.policy = algorithm.policy
        self._loss_and_metrics = algorithm.loss_and_metrics

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        return self._loss_and_metrics(batch)


def first_line(error: Exception) -> str:
    """The type of an error, and the first line of its text."""
    return f"{type(error).__name__}: {str(error).strip()}".split("\n")[0][:300]


def _resized(batch: Batch, rows: int) -> Batch:
    """The batch cut to ``rows`` elements, or filled up with its own elements again."""
    return {key: value[torch.arange(rows) % len(value)] for key, value in batch.items()}
