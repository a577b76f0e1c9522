"""A training starts without the compiler, and who wants the compiler finds tensordict's marks in it."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import groupwise

SOURCE = Path(groupwise.__file__).parent

MARKS = """
import torch._dynamo, tensordict.base as base, tensordict.utils as utils
from torch._dynamo.trace_rules import lookup_callable
from torch._dynamo.variables import TorchInGraphFunctionVariable as InGraph
print([lookup_callable(f) is InGraph for f in (base._foreach_copy_compiled, utils._add_batch_dim_c)])
print(utils._lock_warn._dynamo_marked_constant, type(torch._dynamo.__loader__).__name__)
print(torch._dynamo.__spec__.loader is torch._dynamo.__loader__, [type(f).__name__ for f in sys.meta_path if type(f).__module__.startswith("groupwise")])
def g(): pass
print(base.allow_in_graph(g) is g, lookup_callable(g) is InGraph)  # a mark set later is set at once
"""
MARKED = ["[True, True]", "True SourceFileLoader", "True []", "True True"]


def said(code):
    done = subprocess.run([sys.executable, "-c", "import sys\n" + code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip().splitlines()


@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
def test_a_training_never_imports_the_compiler(algorithm):
    cfg = {"ppo": "gw.PPOCfg(num_steps=64)", "grpo": "gw.GRPOCfg(group_size=2, num_steps=50)"}[algorithm]
    code = f"""
import tempfile, groupwise as gw
with tempfile.TemporaryDirectory() as folder:
    run = gw.train("CartPole-v1", {cfg}, seed=0, total_steps=400, run_dir=folder + "/run")
print([name for name in ("torch._dynamo", "sympy") if name in sys.modules])
"""
    assert said(code)[-1] == "[]"


@pytest.mark.parametrize(
    "before",
    [
        "import tensordict",
        "import groupwise.lean_tensordict",
        "import tensordict, groupwise.lean_tensordict",
        "import torch._dynamo, groupwise.lean_tensordict",
        "import groupwise.lean_tensordict, importlib.util; assert importlib.util.find_spec('torch._dynamo').origin",
        "import groupwise.lean_tensordict, torch; torch.compile(lambda x: x)",
    ],
)
def test_the_compiler_knows_the_marks_whoever_is_imported_first(before):
    assert said(before + MARKS) == MARKED


def test_an_import_of_the_compiler_that_failed_can_be_repeated():
    code = """
import groupwise.lean_tensordict, tensordict.utils as utils
sys.modules["torch._dynamo.config"] = None
try:
    import torch._dynamo
except ImportError:
    print("refused", "torch._dynamo" in sys.modules)
for name in [name for name in sys.modules if name.startswith("torch._dynamo")]:
    del sys.modules[name]
import torch._dynamo
print(utils._lock_warn._dynamo_marked_constant)
"""
    assert said(code) == ["refused False", "True"]


def test_marks_are_set_at_once_where_tensordict_imports_the_compiler_itself():
    """As other versions of it may do."""
    code = """
import importlib
import_module = importlib.import_module
def both(*args, **more):
    module = import_module(*args, **more)
    if args == ("tensordict",):
        import torch._dynamo
    return module
importlib.import_module = both
import groupwise.lean_tensordict
"""
    assert said(code + MARKS) == MARKED


def test_torch_gets_its_own_functions_back():
    code = """
import torch.compiler as c
before = c.allow_in_graph, c.assume_constant_result
import groupwise.lean_tensordict
print(before == (c.allow_in_graph, c.assume_constant_result), c.allow_in_graph.__module__)
"""
    assert said(code) == ["True torch.compiler"]


def test_compiled_functions_take_tensordicts():
    code = """
from groupwise.lean_tensordict import TensorDict
import torch
def double(td):
    return td + td
td = TensorDict({"a": torch.arange(3.0), "b": {"c": torch.ones(3, 2)}}, batch_size=[3])
out = torch.compile(double, backend="eager", fullgraph=True)(td)
print(out["a"].tolist(), out["b", "c"].sum().item(), type(out).__name__)
"""
    assert said(code) == ["[0.0, 2.0, 4.0] 12.0 TensorDict"]


def imported(path):
    """Names of the modules that a file imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield str(node.module)


def test_every_module_takes_tensordict_from_the_lean_one():
    direct = {
        str(path.relative_to(SOURCE))
        for path in SOURCE.rglob("*.py")
        if any(name.split(".")[0] == "tensordict" for name in imported(path))
    }
    assert direct == {"lean_tensordict.py"}
