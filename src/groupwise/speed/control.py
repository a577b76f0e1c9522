"""Fast paths of small networks on a CPU; each gives the reference's results, and each is an argument of a constructor.

flat_adam          parameters as one vector: clipping and stepping a dozen small tensors is nearly all overhead
numpy_actor        acting on a few rows in NumPy, whose operations have a third of torch's overhead
compiled_gradient  the gradient of a micro-batch as one compiled function
compiled_stepper   acting and stepping of torch environments as one compiled function
"""

import copy
import logging
import math
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
import torch
from jaxtyping import Float, Float32, Int64
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from groupwise.algorithms.base import BaseAlgorithm
from groupwise.algorithms.grpo import GRPO
from groupwise.algorithms.losses import finest_unit
from groupwise.algorithms.ppo import PPO
from groupwise.collectors.torch import StepOutput, TorchCollector
from groupwise.collectors.vector import Collector
from groupwise.config.algorithm import AlgorithmCfg
from groupwise.data.rollout import Nested
from groupwise.data.spaces import space_kind, subspaces
from groupwise.errors import ConfigError, SlowPathWarning
from groupwise.policies.actor_critic import CLIP, MLP, ActorCritic, ObsEncoder
from groupwise.policies.base import Action, Policy, has_hooks
from groupwise.policies.heads import Categorical, DiagGaussian

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
        self._lay_out()

    def __deepcopy__(self, memo: dict[int, Any]) -> "FlatAdam":
        """Copied parameters are tensors of their own, so they become views of the copied vector again."""
        copied = memo[id(self)] = object.__new__(FlatAdam)
        for name in ("parameters", "vector", "param_groups", "state"):
            setattr(copied, name, copy.deepcopy(getattr(self, name), memo))
        copied._lay_out()
        return copied

    def _lay_out(self) -> None:
        self.sizes = [parameter.numel() for parameter in self.parameters]
        self.gradient = torch.zeros_like(self.vector, requires_grad=False)
        for parameter, part in zip(self.parameters, torch.split(self.vector.detach(), self.sizes), strict=True):
            parameter.data = part.view_as(parameter)
        self._places = [parameter.data_ptr() for parameter in self.parameters]
        parts = torch.split(self.gradient, self.sizes)
        self._views = [part.view_as(parameter) for parameter, part in zip(self.parameters, parts, strict=True)]
        self.zero_grad()

    def zero_grad(self) -> None:
        """Set all gradients to zero, in place.

        Raises:
            ConfigError: parameters were moved, converted or replaced since.
        """
        if [parameter.data_ptr() for parameter in self.parameters] != self._places:
            raise ConfigError(
                "parameters of the policy were moved, converted or replaced after the algorithm was built; fix: do it before"
            )
        self.gradient.zero_()
        self.vector.grad = self.gradient
        for parameter, view in zip(self.parameters, self._views, strict=True):
            parameter.grad = view

    def clip(self, limit: float | None) -> Float[Tensor, ""]:
        """Clip the gradient's norm; returns the old one. Same as ``clip_grad_norm_``, in a quarter of its time."""
        norm: Tensor = torch.linalg.vector_norm(self.gradient)
        if limit is not None:
            self.gradient.mul_((limit / (norm + 1e-6)).clamp_(max=1.0))
        return norm

    def step(self) -> None:
        """One step along the gradient.

        Source: Kingma, Ba 2015, https://arxiv.org/abs/1412.6980, algorithm 1; decoupled weight decay: Loshchilov, Hutter
        2019, https://arxiv.org/abs/1711.05101.
        """
        group, state = self.param_groups[0], self.state
        move = torch._fused_adamw_ if group["decoupled_weight_decay"] else torch._fused_adam_
        state["step"].add_(1)
        move(
            [self.vector.detach()],
            [self.gradient],
            [state["exp_avg"]],
            [state["exp_avg_sq"]],
            [],
            [state["step"]],
            lr=group["lr"],
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
        )

    def state_dict(self) -> dict[str, Any]:
        """State in the layout of ``torch.optim.Adam``."""
        return {"state": {0: dict(self.state)}, "param_groups": [self.param_groups[0] | {"params": [0]}]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a saved ``state_dict``."""
        self.param_groups[0].update(state["param_groups"][0] | {"params": [self.vector]})
        saved = state["state"].get(0, {})
        for name, value in self.state.items():
            value.copy_(saved.get(name, torch.zeros_like(value)))


def flat_adam(cfg: AlgorithmCfg, parameters: Sequence[nn.Parameter]) -> FlatAdam | None:
    """Adam on the parameters as one vector, for ``BaseAlgorithm(optimizer=flat_adam)``; None where that does not apply."""
    kinds = {(p.dtype, p.device) for p in parameters}
    small = sum(p.numel() for p in parameters) <= LIMIT
    if len(kinds) != 1 or not small or cfg.optimizer.name not in ("adam", "adamw"):
        return None
    # the settings of torch.optim.Adam, whose constructor imports the compiler
    unused = {"amsgrad": False, "maximize": False, "foreach": None, "capturable": False, "differentiable": False}
    own = {"lr": cfg.learning_rate, "weight_decay": 0, **cfg.optimizer.model_dump(exclude={"name"})}
    decoupled = {"fused": True, "decoupled_weight_decay": cfg.optimizer.name == "adamw"}
    return FlatAdam(parameters, own | unused | decoupled)


# --- acting in NumPy ---

MAX_ROWS = 32
"""NumPy is faster up to here, and its products use a single thread."""

_HALF_LOG_2PI = np.float32(0.5 * math.log(2 * math.pi))
_TINY = torch.finfo(torch.float32).tiny
_ACTIVATIONS: dict[str, Callable[[Any], Any]] = {"tanh": np.tanh, "relu": partial(np.maximum, np.float32(0))}

Rows: TypeAlias = Float32[np.ndarray, "row _"]


class Layer(NamedTuple):
    """A linear layer and the activation that follows."""

    weight: Float32[np.ndarray, "input output"]
    bias: Float32[np.ndarray, " output"]
    activation: Callable[[Any], Any] | None


class NumPyActor:
    """``policy.act``, prepared for steps between which no parameter changes."""

    def __init__(self, policy: ActorCritic) -> None:
        self._policy = policy
        self._trunk, self._actor, self._critic = map(_layers, (policy.trunk, policy.actor, policy.critic))
        self._draw = _draw_index if policy.log_std is None else partial(_draw_gaussian, policy.log_std.detach().numpy())
        self._shape = (-1, *policy.head.action_spec.shape)
        normalizer = policy.obs_normalizer
        self._statistics: Any = None if normalizer is None else normalizer.statistics[0]

    def __call__(self, obs: Nested, deterministic: bool = False, generator: torch.Generator | None = None) -> Action:
        """Act like ``policy.act``."""
        if not isinstance(obs, Tensor) or len(obs) > MAX_ROWS:
            return self._policy.act(obs, deterministic, generator)
        with np.errstate(all="ignore"):  # a policy that diverged shows in its actions, as in torch
            rows = obs.numpy()
            if self._statistics is not None:
                rows = (rows - self._statistics.shift.numpy()) * self._statistics.scale.numpy()
                np.maximum(rows, -CLIP, out=rows)  # with the next in a fifth of np.clip's time
                np.minimum(rows, CLIP, out=rows)
            features = _forward(rows, self._trunk)
            action, log_prob = self._draw(_forward(features, self._actor), deterministic, generator)
            value = torch.from_numpy(_forward(features, self._critic)[:, 0]) if self._critic else None
        return Action(torch.from_numpy(action).view(self._shape), torch.from_numpy(log_prob), value)


def numpy_actor(policy: Policy) -> Callable[..., Action]:
    """The policy's ``act``, in NumPy for a plain ``ActorCritic`` on vectors of floats on a CPU."""
    if type(policy) is not ActorCritic or has_hooks(policy):
        return policy.act
    space, head = policy.observation_space, type(policy.head)
    networks = [network for network in (policy.trunk, policy.actor, policy.critic) if network is not None]
    modules = [module for network in networks for module in network.modules()]
    plain = (
        space_kind(space) == "box"
        and space.dtype.kind == "f"
        and len(space.shape) == 1
        and (head is Categorical or (head is DiagGaussian and policy.log_std is not None))
        and type(policy.encoder) is ObsEncoder
        and all(type(module) in (MLP, nn.Linear, nn.ModuleList) for module in modules)
        and all(module.activation in _ACTIVATIONS for module in modules if isinstance(module, MLP))
        and all(module.bias is not None for module in modules if isinstance(module, nn.Linear))
        and all(p.device.type == "cpu" and p.dtype == torch.float32 for p in policy.parameters())
    )
    return NumPyActor(policy) if plain else policy.act


def _layers(network: nn.Module | None) -> list[Layer]:
    if network is None:
        return []
    linears: list[tuple[Any, Callable[[Any], Any] | None]] = [(network, None)]
    if isinstance(network, MLP):
        head = [] if network.head is None else [(network.head, None)]
        linears = [*((linear, _ACTIVATIONS[network.activation]) for linear in network.hidden), *head]
    return [Layer(one.weight.detach().numpy().T, one.bias.detach().numpy(), activation) for one, activation in linears]


def _forward(x: Rows, layers: list[Layer]) -> Rows:
    for weight, bias, activation in layers:
        x = np.dot(x, weight) + bias
        if activation is not None:
            x = activation(x)
    return x


def _draw_index(
    logits: Rows, deterministic: bool, generator: torch.Generator | None
) -> tuple[Int64[np.ndarray, " row"], Float32[np.ndarray, " row"]]:
    """Indices by the Gumbel-max trick, or the largest logit; and the log-softmax there."""
    if deterministic:
        index = logits.argmax(axis=1)
    else:
        uniform = torch.rand(logits.shape, generator=generator).numpy()
        index = (logits - np.log(-np.log(np.maximum(uniform, _TINY)))).argmax(axis=1)
    shifted = logits - logits.max(axis=1, keepdims=True)
    return index, shifted[np.arange(len(index)), index] - np.log(np.exp(shifted).sum(axis=1))


def _draw_gaussian(
    log_std: Float32[np.ndarray, " width"], mean: Rows, deterministic: bool, generator: torch.Generator | None
) -> tuple[Rows, Float32[np.ndarray, " row"]]:
    """Draws around means, with standard deviations that do not depend on the observation, or the means; and their log-densities."""
    deviation = np.exp(log_std)
    action = mean if deterministic else mean + deviation * torch.randn(mean.shape, generator=generator).numpy()
    distance = (action - mean) / deviation
    return action, -(log_std + 0.5 * distance * distance + _HALF_LOG_2PI).sum(axis=1)


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

Batch = dict[str, Nested]
Built = TypeVar("Built")


def why_not_compiled(algorithm: BaseAlgorithm) -> str | None:
    """The reason that keeps the loss from being a function of parameters, buffers and micro-batch alone; None if nothing does."""
    cfg, policy = algorithm.cfg, algorithm.policy
    if not isinstance(algorithm.optimizer, FlatAdam):
        return "parameters are many or of several types, or the optimiser is not Adam"
    known = type(algorithm).loss in (PPO.loss, GRPO.loss) and type(algorithm).backward is BaseAlgorithm.backward
    if not known or type(policy).evaluate is not ActorCritic.evaluate:
        return "the loss or the policy's scores are a subclass's own"
    assert isinstance(policy, ActorCritic)
    if subspaces(policy.observation_space) is not None:
        return "observations have several parts"
    if policy.device.type != "cpu" or any(True for _ in policy.encoder.parameters()):
        return "networks are large or not on a CPU"
    if finest_unit(cfg.objective) != "transition" or algorithm.entropy.adaptive:
        return "the objective looks at whole episodes, or changes its entropy bonus"
    if algorithm.range_schedules is not None:
        return "the clip range has a schedule"
    if cfg.objective.old_log_prob == "recomputed" or has_hooks(policy):
        return "old_log_prob is recomputed, or there are hooks"
    return None


def compiled_gradient(algorithm: BaseAlgorithm) -> "CompiledBackward | None":
    """A compiled ``backward``, for ``BaseAlgorithm(gradient=compiled_gradient)``; None where it cannot be compiled."""
    return CompiledBackward(algorithm) if why_not_compiled(algorithm) is None else None


def compiled_for(function: Any, example: Sequence[Any], **options: Any) -> Callable[..., Any]:
    """``function`` compiled ahead of time for arguments like ``example``.

    Sizes are constants unless marked as dynamic, also after other compilations in this process, so results are the same.

    Each call of ``torch.compile`` looks for a compiled version first: 124 us in place of 105 for a minibatch of HalfCheetah.
    """
    compiled: Any = torch.compile(function, fullgraph=True, dynamic=False, options=OPTIONS | options)
    try:
        found = compiled.aot_compile((tuple(example), {}))
    except Exception:  # torch asks for a second try where a number differs from that of an earlier compilation
        found = compiled.aot_compile((tuple(example), {}))
    found.disable_guard_check()  # what may change is checked here, in a tenth of the time
    return found  # type: ignore[no-any-return]


def compiled_or_none(what: str, build: Callable[[], Built]) -> Built | None:
    """The function that ``build`` compiles and compares with the reference; None where that fails, with a warning."""
    try:
        with warnings.catch_warnings(), torch.inference_mode(False), torch.no_grad():
            warnings.simplefilter("ignore")  # the compiler's own
            built = build()
    except Exception as error:  # the compiler raises errors of any type
        why = str(error).strip().split("\n")[0][:300]
        warnings.warn(
            f"{what} are not compiled ({type(error).__name__}: {why}); fix: a C++ compiler on the PATH, or speed='off'",
            SlowPathWarning,
            stacklevel=5,
        )
        return None
    log.debug("%s are compiled", what)
    return built


class CompiledBackward:
    """``algorithm.backward``, compiled at the first micro-batch.

    Where it cannot be compiled, or gives another gradient, a warning gives the reason, and the reference is used.
    """

    def __init__(self, algorithm: BaseAlgorithm) -> None:
        assert isinstance(algorithm.optimizer, FlatAdam)
        self._algorithm = algorithm
        self._flat = algorithm.optimizer
        self._vector = self._flat.vector.detach()
        self._function: _Gradient | None = None
        self._compiled: Callable[..., tuple[Tensor, Tensor]] | None = None
        self.failed = False
        """Whether it cannot be compiled."""

    def __deepcopy__(self, memo: dict[int, Any]) -> "CompiledBackward":
        """The compiled function reads this policy's buffers, so the copy compiles its own."""
        copied = memo[id(self)] = object.__new__(CompiledBackward)
        copied._algorithm = copy.deepcopy(self._algorithm, memo)
        copied._flat = copy.deepcopy(self._flat, memo)
        copied._vector = copied._flat.vector.detach()
        copied._function = copied._compiled = None
        copied.failed = False
        return copied

    def __call__(self, batch: Batch) -> Float[Tensor, " metric"]:
        """Add the gradient of a micro-batch to that of the parameters; returns the sums of its metrics."""
        if self._compiled is None and not self.failed:
            self._compile(batch)
        function = self._function
        # compiled for a number of elements that is not 1
        if self._compiled is None or function is None or len(batch["loss_mask"]) < 2 or batch.keys() != function.keys:
            return BaseAlgorithm.backward(self._algorithm, batch)
        with torch.no_grad():
            gradient, metrics = self._compiled(self._vector, *function.values(batch))
            self._flat.gradient.add_(gradient)
        return metrics

    def _compile(self, batch: Batch) -> None:
        function = _Gradient(self._algorithm, self._flat, batch)
        vector, rows = self._vector, len(batch["loss_mask"])

        def build() -> Callable[..., tuple[Tensor, Tensor]]:
            example = function.values(function.example(batch))
            for value in example:
                torch._dynamo.mark_dynamic(value, 0)
            compiled = compiled_for(function.compute, [vector, *example])
            for size in (rows, rows + 1):
                values = function.values(_resized(batch, max(size, 2)))
                _check(compiled(vector, *values)[0], function.compute(vector, *values)[0])
            return compiled

        self._function, self._compiled = function, compiled_or_none("updates", build)
        self.failed = self._compiled is None


class _Gradient:
    """The gradient and the metrics of a micro-batch as a function of tensors."""

    def __init__(self, algorithm: BaseAlgorithm, flat: FlatAdam, batch: Batch) -> None:
        names = {id(parameter): f"policy.{name}" for name, parameter in algorithm.policy.named_parameters()}
        self._sizes = flat.sizes
        self._shapes = {names[id(parameter)]: parameter.shape for parameter in flat.parameters}
        self.keys = dict.fromkeys(batch).keys()
        """The keys that this is compiled for; shapes and types follow from the buffer's check."""
        self.compute = _differentiated(_Loss(algorithm), self._shapes, self._sizes, list(batch))

    def values(self, batch: Batch) -> list[Tensor]:
        """The inputs besides the vector."""
        return [batch[key].contiguous() for key in self.keys]

    def example(self, batch: Batch) -> Batch:
        """A batch of similar size, but no other dimension's: the compiler would take equal sizes as always equal."""
        others = {width for value in batch.values() for width in value.shape[1:]}
        others |= {width for shape in self._shapes.values() for width in shape} | {sum(self._sizes)}
        rows = max(len(batch["loss_mask"]), 2)
        return _resized(batch, next(number for number in count(rows) if number not in others))


def _differentiated(
    module: nn.Module, shapes: dict[str, torch.Size], sizes: list[int], keys: list[str]
) -> Callable[..., tuple[Tensor, Tensor]]:
    """A function of the parameters' vector and a micro-batch's values: the gradient, and the sums of the metrics."""

    def compute(vector: Tensor, *values: Tensor) -> tuple[Tensor, Tensor]:
        batch = dict(zip(keys, values, strict=True))

        def loss(vector: Tensor) -> tuple[Tensor, Tensor]:
            parts = zip(shapes.items(), torch.split(vector, sizes), strict=True)
            parameters = {name: part.view(shape) for (name, shape), part in parts}
            return torch.func.functional_call(module, parameters, (batch,))  # type: ignore[no-any-return]

        gradient, (_, metrics) = torch.func.grad_and_value(loss, has_aux=True)(vector)
        return gradient, metrics

    return compute


class _Loss(nn.Module):
    """``loss_and_metrics`` where ``functional_call`` can replace the policy's parameters."""

    def __init__(self, algorithm: BaseAlgorithm) -> None:
        super().__init__()
        self.policy = algorithm.policy
        self._loss_and_metrics = algorithm.loss_and_metrics

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        return self._loss_and_metrics(batch)


def _resized(batch: Batch, rows: int) -> Batch:
    """The batch cut to ``rows`` elements, or filled up with its own elements again."""
    return {key: value[torch.arange(rows) % len(value)] for key, value in batch.items()}


def _check(found: Tensor, expected: Tensor) -> None:
    norm = float(expected.norm())
    if math.isfinite(norm) and not float((found - expected).norm()) <= _TOLERANCE * norm + 1e-6:
        raise RuntimeError(f"the compiled gradient differs from the reference, whose norm is {norm:.3g}")


# --- acting and stepping of torch environments, compiled ---

WORTH_ROLLOUT_STEPS = 50_000
"""Steps of every row that pay for compiling: it takes 5 to 15 seconds, and each step saves a quarter of a millisecond or more."""

_RTOL, _ATOL = 1e-3, 1e-5
"""A compiled step whose numbers differ by more from the reference is not used."""

Step: TypeAlias = Callable[..., StepOutput]


def compiled_stepper(collector: TorchCollector) -> "CompiledStepper | None":
    """A compiled ``stepper``, for ``TorchCollector(stepper=compiled_stepper)``; None where it cannot be compiled."""
    return CompiledStepper(collector) if why_rollouts_not_compiled(collector) is None else None


def why_rollouts_not_compiled(collector: Collector) -> str | None:
    """The reason that keeps acting and stepping from being a function of tensors and draws alone; None if nothing does."""
    if not isinstance(collector, TorchCollector):
        return "the environment is no torch environment"
    if collector.env.device.type != "cpu" or not collector.env.traceable:
        return "the environment is not on a CPU, or takes more than operations of torch"
    if type(collector.policy) is not ActorCritic or has_hooks(collector.policy):
        return "the policy is a subclass, or has hooks"
    return None


class CompiledStepper:
    """A torch collector's ``stepper``, compiled at the first step.

    Where it cannot be compiled, or gives other results, a warning gives the reason, and the reference is used.
    """

    def __init__(self, collector: TorchCollector) -> None:
        self._step = collector.step
        self._policy = collector.policy
        self._reference = collector.reference_stepper
        self._draws: list[Callable[..., Tensor]] = []
        self._compiled: Callable[..., StepOutput] | None = None
        self.failed = False
        """Whether it cannot be compiled."""

    def __call__(self, generator: torch.Generator) -> Step:
        """A function that acts and steps all rows in one rollout."""
        if self.failed or has_hooks(self._policy):
            return self._reference(generator)
        return partial(self._call, generator)

    def _call(self, generator: torch.Generator, *args: Any) -> StepOutput:
        if self._compiled is None:
            return self._reference(generator)(*args) if self.failed else self._compile(generator, *args)
        draws = [draw(generator=generator) for draw in self._draws]
        return self._compiled(draws, *pytree.tree_map(torch.Tensor.contiguous, args))

    def _compile(self, generator: torch.Generator, *args: Any) -> StepOutput:
        """A step; compiles those that follow."""
        reference = partial(self._step, partial(self._policy.act, generator=generator))
        with _Draws() as draws:
            expected = reference(*args)
        # separate tensors: if one came twice, the compiler would assume that these arguments are always the same tensor
        example, given = pytree.tree_map(_own, (args, draws.drawn))
        step, act = self._step, self._policy.act

        def pure(draws: list[Tensor], *args: Any) -> StepOutput:
            with _Draws(draws):
                return step(act, *args)

        def build() -> tuple[Step, StepOutput]:
            # hashes need integers that wrap around
            compiled = compiled_for(pure, [given, *example], constant_and_index_propagation=False)
            found: StepOutput = compiled(given, *example)
            _check_rollouts(found, expected)
            return compiled, found

        built = compiled_or_none("rollouts", build)
        self.failed = built is None
        if built is None:
            return expected
        self._compiled, found = built
        self._draws = draws.calls
        return found  # rounded as later ones, so that a resumed run is the same


class _Draws(TorchFunctionMode):
    """Records random draws, or returns recorded ones in their place.

    Args:
        given: of each draw, in order; None: they are drawn.
    """

    def __init__(self, given: Sequence[Tensor] | None = None) -> None:
        super().__init__()
        self.calls: list[Callable[..., Tensor]] = []
        self.drawn: list[Tensor] = []
        self._given = given
        self._next = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the function, or not."""
        kwargs = kwargs or {}
        if func is not torch.rand and func is not torch.randn:
            return func(*args, **kwargs)
        if self._given is not None:
            self._next += 1
            return self._given[self._next - 1].clone()  # the caller may write into it
        result: Tensor = func(*args, **kwargs)
        self.calls.append(partial(func, *args, **{key: value for key, value in kwargs.items() if key != "generator"}))
        self.drawn.append(result.clone())
        return result


def _own(tensor: Tensor) -> Tensor:
    with torch.inference_mode(False):
        return tensor.clone(memory_format=torch.contiguous_format)


def _check_rollouts(found: Any, expected: Any) -> None:
    pairs = zip(pytree.tree_leaves(found), pytree.tree_leaves(expected), strict=True)
    for number, (one, other) in enumerate(pairs):
        if other is None:
            continue
        exact = not other.is_floating_point()
        same = torch.equal(one, other) if exact else torch.allclose(one, other, rtol=_RTOL, atol=_ATOL, equal_nan=True)
        if not same:
            raise RuntimeError(f"result {number} differs from the reference")
