"""A training starts without the compiler, and who wants the compiler finds tensordict's marks in it."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

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


def test_a_training_never_imports_the_compiler():
    code = """
import tempfile, groupwise as gw
with tempfile.TemporaryDirectory() as folder:
    for number, cfg in enumerate([gw.PPOCfg(num_steps=64), gw.GRPOCfg(group_size=2, num_steps=50)]):
        gw.train("CartPole-v1", cfg, seed=0, total_steps=400, run_dir=f"{folder}/{number}")
print([name for name in ("torch._dynamo", "sympy") if name in sys.modules])
"""
    assert said(code)[-1] == "[]"


@pytest.mark.parametrize(
    "before",
    [
        "import tensordict, groupwise",
        "import torch._dynamo, groupwise",
        "import groupwise, tensordict, importlib.util; assert importlib.util.find_spec('torch._dynamo').origin",
        "import groupwise, tensordict, torch; torch.compile(lambda x: x)",
    ],
)
def test_the_compiler_knows_the_marks_whoever_is_imported_first(before):
    assert said(before + MARKS) == MARKED


def test_an_import_of_the_compiler_that_failed_can_be_repeated():
    code = """
import groupwise, tensordict.utils as utils
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


def test_torch_gets_its_own_functions_back():
    code = """
import torch.compiler as c
before = c.allow_in_graph, c.assume_constant_result
import groupwise, tensordict
print(before == (c.allow_in_graph, c.assume_constant_result), c.allow_in_graph.__module__)
"""
    assert said(code) == ["True torch.compiler"]


def test_compiled_functions_take_tensordicts():
    code = """
import groupwise
from tensordict import TensorDict
import torch
def double(td):
    return td + td
td = TensorDict({"a": torch.arange(3.0), "b": {"c": torch.ones(3, 2)}}, batch_size=[3])
out = torch.compile(double, backend="eager", fullgraph=True)(td)
print(out["a"].tolist(), out["b", "c"].sum().item(), type(out).__name__)
"""
    assert said(code) == ["[0.0, 2.0, 4.0] 12.0 TensorDict"]


def test_an_optimiser_made_before_the_compiler_is_one_like_others():
    code = """
import groupwise as gw, torch
gw.PPO
optimizer = torch.optim.Adam([torch.nn.Parameter(torch.ones(2))])
print("torch._dynamo" in sys.modules)
import torch._dynamo
optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})
print(len(optimizer.param_groups))
"""
    assert said(code) == ["False", "2"]
