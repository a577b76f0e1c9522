"""``TensorDict``, imported without the compiler: every module takes it from here.

On import tensordict marks some of its functions for ``torch.compile``, and that alone imports the compiler: half of the
time in which a training starts (``docs/performance.md``). Here the marks wait until somebody else imports it.
"""

import importlib
import sys
from collections.abc import Callable
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch.compiler

_COMPILER = "torch._dynamo"
_MARKS = ("allow_in_graph", "assume_constant_result")
"""Of ``torch.compiler``: functions that mark another one and return it."""


class _MarksWhenImported(MetaPathFinder, Loader):
    """Stands where ``import`` looks for the compiler, until it is there: then marks what waits."""

    def __init__(self) -> None:
        self._waiting: list[tuple[Callable[..., Any], Any]] = []
        self._waits = True
        self._loader: Loader | None = None

    def note(self, mark: Callable[..., Any]) -> Callable[..., Any]:
        """In place of ``mark``, which tensordict keeps."""

        def later(function: Any) -> Any:
            if not self._waits:
                return mark(function)
            self._waiting.append((mark, function))
            return function

        return later

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        """The compiler's own spec, loaded by this; to ask for it changes nothing."""
        if name != _COMPILER:
            return None
        specs = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None:
            self._loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """As the compiler's own loader does."""
        assert self._loader is not None
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Load the compiler, then mark."""
        assert self._loader is not None
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        sys.meta_path.remove(self)
        self.mark()

    def mark(self) -> None:
        """Mark what waits, and from now on at once."""
        self._waits = False
        for mark, function in self._waiting:
            mark(function)
        self._waiting.clear()


def _import_tensordict() -> None:
    """Import tensordict with its marks put off, unless they cost nothing any more."""
    if not {"tensordict", _COMPILER}.isdisjoint(sys.modules):
        return
    marks, later = {name: getattr(torch.compiler, name) for name in _MARKS}, _MarksWhenImported()
    try:
        for name, mark in marks.items():
            setattr(torch.compiler, name, later.note(mark))
        importlib.import_module("tensordict")
    finally:
        for name, mark in marks.items():
            setattr(torch.compiler, name, mark)
    if _COMPILER in sys.modules:  # something else in tensordict, or beside it, imported it
        later.mark()
    else:
        sys.meta_path.insert(0, later)


_import_tensordict()

from tensordict import TensorDict  # noqa: E402  after the marks were put off

__all__ = ["TensorDict"]
