"""Scripts of benchmarks, tools and examples import what exists, and the workflow calls targets that exist."""

import ast
import importlib
import re

import pytest
from scripts import ROOT

SCRIPTS = sorted(
    path for folder in ("benchmarks", "docs", "examples", "tools") for path in ROOT.glob(f"{folder}/**/*.py")
)


def names_of_the_library(source: str) -> set[str]:
    """Dotted names that a script takes from groupwise: ``from groupwise.x import y`` in functions, too, and ``gw.y``."""
    found, short = set(), {"groupwise"}
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "groupwise":
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.partition(".")[0] == "groupwise"}
            short |= {alias.asname for alias in node.names if alias.name == "groupwise" and alias.asname}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in short:
            found.add(f"groupwise.{node.attr}")
    return found


def exists(name: str) -> bool:
    """Whether a dotted name is a module, or something in one."""
    try:
        importlib.import_module(name)
    except ModuleNotFoundError:
        module, _, last = name.rpartition(".")
        return bool(module) and hasattr(importlib.import_module(module), last)
    return True


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_scripts_name_what_the_library_has(path):
    names = names_of_the_library(path.read_text(encoding="utf-8"))
    assert {name for name in names if not exists(name)} == set()


def test_a_name_that_is_gone_is_found():
    names = names_of_the_library(
        "import groupwise as gw\ndef f():\n    from groupwise.run import train, gone\n    gw.lost()"
    )
    assert {name for name in names if not exists(name)} == {"groupwise.run.gone", "groupwise.lost"}


def test_the_workflow_calls_targets_of_the_makefile():
    called = re.findall(r"run: make ([\w-]+)", (ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8"))
    assert called == ["test", "package"]
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in called)
