"""What benchmarks take from the scripts beside them is there; most run only where a peer is installed, and none in the tests."""

import ast
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

from groupwise import config

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SCRIPTS = sorted(BENCHMARKS.rglob("*.py"))


def names(script: Path) -> set[str]:
    """What is defined or imported at its top level."""
    found: set[str] = set()
    for node in ast.parse(script.read_text()).body:
        match node:
            case ast.FunctionDef() | ast.ClassDef():
                found.add(node.name)
            case ast.Assign():
                found |= {name.id for target in node.targets for name in ast.walk(target) if isinstance(name, ast.Name)}
            case ast.AnnAssign(target=ast.Name(name)):
                found.add(name)
            case ast.Import() | ast.ImportFrom():
                found |= {alias.asname or alias.name for alias in node.names}
    return found


def missing(script: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(script.read_text())):
        if isinstance(node, ast.ImportFrom) and (beside := script.parent / f"{node.module}.py").exists():
            yield from (f"{node.module}.{alias.name}" for alias in node.names if alias.name not in names(beside))


@pytest.mark.parametrize("script", SCRIPTS, ids=[str(script.relative_to(BENCHMARKS)) for script in SCRIPTS])
def test_what_is_imported_from_beside_exists(script: Path) -> None:
    assert not list(missing(script))


def test_imports_from_beside_are_found_and_looked_at(tmp_path: Path) -> None:
    (tmp_path / "worker.py").write_text("HERE = 1\n")
    (tmp_path / "peer.py").write_text("from worker import HERE, GONE\n")
    assert list(missing(tmp_path / "peer.py")) == ["worker.GONE"]


def test_what_is_compared_for_the_cost_of_a_critic_differs_in_nothing_else() -> None:
    """Whatever the environment's presets say."""
    spec = importlib.util.spec_from_file_location("critic_cost", BENCHMARKS / "critic_cost.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    shared = (
        "num_steps",
        "num_epochs",
        "minibatch_size",
        "learning_rate",
        "gamma",
        "schedule",
        "ent_coef",
        "objective",
    )
    found = {
        name: config.resolve("Pendulum-v1", told | script.SHARED).algorithm for name, told in script.METHODS.items()
    }
    for name in shared:
        assert len({str(getattr(cfg, name)) for cfg in found.values()}) == 1, name
    assert [found[name].credit.baseline.name for name in ("grpo", "knn")] == ["mean", "knn"]
