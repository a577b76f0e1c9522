"""Pure functions of tensors, traced and compiled ahead of time into one call without what stands around ``torch.compile``.

On a CPU a hundred operations on small tensors take far longer to be started than to be computed.
"""

import logging
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from types import MethodType
from typing import Any, Generic, Literal, TypeVar
from weakref import WeakMethod

import torch
from torch import Tensor, fx
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from groupwise.errors import SlowPathWarning

log = logging.getLogger(__name__)

Out = TypeVar("Out")

_RTOL, _ATOL = 1e-3, 1e-5
"""A compiled function whose numbers differ by more from the traced one's is not used."""


def compile_function(
    function: Callable[..., tuple[Tensor | None, ...]], inputs: list[Tensor], *, sizes: Literal["fixed", "any"]
) -> Callable[[list[Tensor]], Any]:
    """``function`` compiled for inputs of these kinds; it empties the list that it is called with.

    Args:
        sizes: "any": of dimensions, but for 0 and 1; equal ones are taken as equal for ever. "fixed": those of ``inputs``;
            tensors that the function reads besides them are read at each call, too.

    Raises:
        Exception: of any kind, among others where sizes are free and the function reads a tensor that is no input, whose
            changes would go unseen.
    """
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.decomposition import select_decomp_table
    from torch.fx.experimental.proxy_tensor import make_fx

    fixed = sizes == "fixed"
    decompositions = {**select_decomp_table(), torch.ops.aten.tanh.default: _tanh}
    mode: Literal["fake", "symbolic"] = "fake" if fixed else "symbolic"
    pure = torch.func.functionalize(function, remove="mutations") if fixed else function
    graph = make_fx(pure, decompositions, tracing_mode=mode, _allow_non_fake_inputs=fixed)(*inputs)
    others = _as_inputs(graph) if fixed else []
    examples = [node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder"]
    # arithmetic on positions is done in numbers without an end, where that of tensors wraps around, and hashes live by that
    with torch.no_grad(), config.patch(compile_threads=1, constant_and_index_propagation=False):
        compiled: Any = compile_fx_inner(graph, examples, cpp_wrapper=True)
    call: Callable[[list[Tensor]], Any] = getattr(compiled, "current_callable", compiled)
    return (lambda tensors: call([*tensors, *others])) if others else call


def _tanh(x: Tensor) -> Tensor:
    """To 1e-7: the compiler's own takes six times as long as torch's, this one less than torch's."""
    return 1 - 2 / ((2 * x).exp() + 1)


def _as_inputs(graph: fx.GraphModule) -> list[Tensor]:
    """The tensors that were traced as parts of the graph, which takes them as further inputs from here on."""
    others: dict[str, Tensor] = {}
    inputs: dict[str, fx.Node] = {}
    last = [node for node in graph.graph.nodes if node.op == "placeholder"][-1]
    for node in [node for node in graph.graph.nodes if node.op == "get_attr"]:
        if node.target not in others:
            others[node.target] = getattr(graph, node.target)
            with graph.graph.inserting_after(last):
                last = inputs[node.target] = graph.graph.placeholder(node.target)
            last.meta = dict(node.meta)
        node.replace_all_uses_with(inputs[node.target])
        graph.graph.erase_node(node)
    graph.recompile()
    return list(others.values())


class Compiled(Generic[Out]):
    """A pure function of tensors and of random draws, compiled at its first call, on a CPU. Other shapes run as they stand.

    Arguments and results may be tuples and dictionaries of tensors, results also hold None. They agree to rounding: what the function draws by
    ``torch.rand`` and ``torch.randn`` is drawn in the same order from the same generators. Where it cannot be compiled, or
    does not give what the function gives, a warning says why, and it is called as it stands.

    Args:
        name: of what it does, for that warning.
        fix: what switches compiling off.
    """

    def __init__(self, function: Callable[..., Out], *, name: str, fix: str) -> None:
        # held weakly where it is a method: whose it is holds this, and would wait for a search for cycles to be freed
        self._method = WeakMethod(function) if isinstance(function, MethodType) else lambda: function
        self.name = name
        self.fix = fix
        self._tried = False
        self._call: Callable[[list[Tensor]], Any] | None = None
        self._draws: list[Callable[[], Tensor]] = []

    def __call__(self, *args: Any) -> Out:
        """What the function returns."""
        if self._call is None:
            return self._function(*args) if self._tried else self._first(*args)
        # what was compiled reads memory as the example's lay there
        flat = [tensor.contiguous() for tensor in pytree.tree_leaves(args)]
        if [tensor.shape for tensor in flat] != self._shapes:
            return self._function(*args)
        out: Out = pytree.tree_unflatten(self._call([*flat, *(draw() for draw in self._draws)]), self._results)
        return out

    @property
    def is_compiled(self) -> bool:
        """Whether calls are compiled."""
        return self._call is not None

    @property
    def has_failed(self) -> bool:
        """Whether it cannot be compiled."""
        return self._tried and self._call is None

    def _function(self, *args: Any) -> Out:
        function = self._method()
        assert function is not None
        return function(*args)

    def _first(self, *args: Any) -> Out:
        """What the function returns; compile it for what comes."""
        self._tried = True
        with _Drawing() as drawing:
            out = self._function(*args)
        try:
            with torch.inference_mode(False), torch.no_grad(), warnings.catch_warnings():  # the compiler's own
                warnings.simplefilter("ignore")
                self._call, found = self._compiled(args, out, drawing.drawn)
        except Exception as error:  # the compiler raises what it likes, and whatever it is, eager torch goes on
            why = str(error).strip().split("\n")[0][:300]
            warnings.warn(
                f"{self.name} runs without the compiler ({type(error).__name__}: {why}); fix: a C++ compiler on the "
                f"PATH, or {self.fix}",
                SlowPathWarning,
                stacklevel=3,
            )
            return out
        self._draws = drawing.draws
        log.info("%s is compiled; %s switches that off", self.name, self.fix)
        return found  # as later calls round

    def _compiled(self, args: Any, out: Out, drawn: list[Tensor]) -> tuple[Callable[[list[Tensor]], Any], Out]:
        """What computes the function from its arguments' tensors and draws, and what that gives from these."""
        flat, layout = pytree.tree_flatten(args)
        expected, self._results = pytree.tree_flatten(out)
        inputs = [tensor.clone(memory_format=torch.contiguous_format) for tensor in [*flat, *drawn]]
        self._shapes = [tensor.shape for tensor in flat]

        def function(*inputs: Tensor) -> tuple[Tensor | None, ...]:
            with _Drawing(inputs[len(flat) :]):
                return tuple(pytree.tree_leaves(self._function(*pytree.tree_unflatten(inputs[: len(flat)], layout))))

        call = compile_function(function, inputs, sizes="fixed")
        found = call(inputs)
        _check(found, expected)
        return call, pytree.tree_unflatten(found, self._results)


class _Drawing(TorchFunctionMode):
    """Looks on at random draws, or gives what was drawn before in their place.

    Args:
        given: of each draw, in order; None: they are drawn.
    """

    def __init__(self, given: Sequence[Tensor] | None = None) -> None:
        super().__init__()
        self.draws: list[Callable[[], Tensor]] = []
        self.drawn: list[Tensor] = []
        self._given = None if given is None else iter(given)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the function, or not."""
        kwargs = kwargs or {}
        if func not in (torch.rand, torch.randn):
            if self._given is not None and kwargs.get("generator") is not None:
                raise RuntimeError(f"{func.__name__} draws from a generator, which only torch.rand and torch.randn may")
            return func(*args, **kwargs)
        if self._given is not None:
            return next(self._given)
        self.draws.append(partial(func, *args, **kwargs))
        result: Tensor = func(*args, **kwargs)
        self.drawn.append(result.clone())  # whoever asked may write into it
        return result


def _check(found: Any, expected: list[Any]) -> None:
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        if other is not None and not _alike(one, other):
            raise RuntimeError(f"result {number} differs from the traced function's")


def _alike(one: Tensor, other: Tensor) -> bool:
    """To rounding where numbers round; seeds, counts and masks to the bit."""
    if not other.is_floating_point():
        return torch.equal(one, other)
    return torch.allclose(one.double(), other.double(), rtol=_RTOL, atol=_ATOL, equal_nan=True)
