"""Reinforcement learning with GRPO and PPO.

``__init__.pyi`` lists the public names. They are imported on first use, so ``import groupwise`` is fast.
"""

import ast
from importlib import import_module
from pathlib import Path

from groupwise.speed import lean_imports

lean_imports.install()


def _homes() -> dict[str, str]:
    """The module of each public name."""
    stub = ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    return {alias.name: str(node.module) for node in imports for alias in node.names}


_HOMES = _homes()
__all__ = sorted([*_HOMES, "__version__"])


def __getattr__(name: str) -> object:
    """Import a public name on first use (PEP 562)."""
    if name == "__version__":
        from importlib.metadata import version

        return version("groupwise")
    if name not in _HOMES:
        from groupwise.errors import nearest

        loads = "; fix: gw.Run.load for a run folder, gw.load_config for a file of settings"
        hint = loads if name.startswith("load") else nearest(name, __all__)
        raise AttributeError(f"module 'groupwise' has no attribute {name!r}{hint}")
    value = vars(import_module(_HOMES[name]))[name]
    globals()[name] = value  # the next use does not call this function
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
