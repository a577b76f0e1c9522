"""Imports without the compiler, which takes a second: half of the time in which a training starts.

On import tensordict marks some of its functions for ``torch.compile``, and that imports the compiler; so does the first
optimiser that is made. Here both wait until something else imports it. ``groupwise/__init__`` installs this.
"""

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_COMPILER = "torch._dynamo"
_MARKS = ("allow_in_graph", "assume_constant_result")
"""Of ``torch.compiler``: functions that mark another one and return it."""
_DISABLED = "__dynamo_disable"
"""Attribute where torch caches the uncompiled version of a function; creating it imports the compiler."""


def install() -> None:
    """Have tensordict and optimisers do without the compiler, unless either is there already."""
    if {"tensordict", _COMPILER}.isdisjoint(sys.modules):
        sys.meta_path.insert(0, _LeanImports())


class _LeanImports(MetaPathFinder, Loader):
    """Stands where ``import`` looks for tensordict and for the compiler, until both are there."""

    def __init__(self) -> None:
        self._waiting: list[tuple[Callable[..., Any], Any]] = []
        self._waits = True
        self._loaders: dict[str, Loader] = {}

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        """The module's own spec, loaded by this; to ask for it changes nothing."""
        if name not in ("tensordict", _COMPILER):
            return None
        specs = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and spec.loader is not None:
            self._loaders[name], spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """As the module's own loader does."""
        return self._loaders[spec.name].create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Load tensordict with its marks put off, or load the compiler and then mark."""
        assert module.__spec__ is not None
        loader = self._loaders[module.__name__]
        module.__spec__.loader = module.__loader__ = loader
        if module.__name__ == _COMPILER:
            loader.exec_module(module)
            self._mark()
            return
        with self._put_off():
            loader.exec_module(module)
        if _COMPILER in sys.modules:
            self._mark()
        else:
            add_group = _add_param_group()
            setattr(add_group, _DISABLED, add_group)

    @contextmanager
    def _put_off(self) -> Iterator[None]:
        import torch.compiler

        marks = {name: getattr(torch.compiler, name) for name in _MARKS}
        try:
            for name, mark in marks.items():
                setattr(torch.compiler, name, self._later(mark))
            yield
        finally:
            for name, mark in marks.items():
                setattr(torch.compiler, name, mark)

    def _later(self, mark: Callable[..., Any]) -> Callable[..., Any]:
        """In place of ``mark``, which tensordict keeps."""

        def later(function: Any) -> Any:
            if not self._waits:
                return mark(function)
            self._waiting.append((mark, function))
            return function

        return later

    def _mark(self) -> None:
        """Mark what waits, and from now on at once."""
        self._waits = False
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        for mark, function in self._waiting:
            mark(function)
        self._waiting.clear()
        vars(_add_param_group()).pop(_DISABLED, None)


def _add_param_group() -> Any:
    """Torch's function as it is defined, behind what keeps the compiler from it."""
    import torch

    return inspect.unwrap(torch.optim.Optimizer.add_param_group)
