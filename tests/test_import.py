import ast
import subprocess
import sys
from pathlib import Path

import pytest

import groupwise

HEAVY = ("torch", "gymnasium", "transformers", "tensorboard", "matplotlib", "wandb", "tensordict", "pydantic", "rich")


def test_import_is_cheap():
    code = f"import sys, groupwise; dir(groupwise); print([m for m in {HEAVY} if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_config_needs_no_torch():
    code = "import sys, groupwise as gw; gw.RunCfg(), gw.GRPOCfg, gw.load_config; print('torch' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "False"


def test_type_checkers_see_the_same_names():
    tree = ast.parse(Path(groupwise.__file__).read_text())
    guard = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {
        (node.module, alias.name) for node in guard.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    lazy = {(module, name) for module, names in groupwise._MODULES.items() for name in names.split()}
    assert seen == lazy
    assert set(groupwise.__all__) == {"__version__", *(name for _, name in lazy)}


@pytest.mark.parametrize("name", groupwise.__all__)
def test_every_public_name_resolves(name):
    assert getattr(groupwise, name) is not None
    assert name in dir(groupwise)


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'nope'"):
        groupwise.nope  # noqa: B018
