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


def test_training_starts_without_the_compiler_and_transformers():
    """Importing either takes about as long as importing torch."""
    code = (
        "import sys, groupwise as gw; from groupwise.speed.control import flat_adam; import torch;"
        "assert flat_adam(gw.PPOCfg(), [torch.nn.Parameter(torch.zeros(2))]) is not None; gw.train, gw.ActorCritic;"
        "print([m for m in ('torch._dynamo', 'transformers', 'matplotlib', 'scipy') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_the_stub_exports_every_name_to_type_checkers():
    stub = ast.parse(Path(groupwise.__file__).with_suffix(".pyi").read_text())
    names = [alias for node in stub.body if isinstance(node, ast.ImportFrom) for alias in node.names]
    assert all(alias.asname == alias.name for alias in names)
    assert set(groupwise.__all__) | {"config", "errors"} == {alias.name for alias in names}
    assert len(groupwise.__all__) <= 45


@pytest.mark.parametrize("name", [*groupwise.__all__, "config", "errors"])
def test_every_public_name_resolves(name):
    assert getattr(groupwise, name) is not None
    assert name in dir(groupwise)


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'nope'"):
        groupwise.nope  # noqa: B018
    with pytest.raises(
        AttributeError, match=r"'load'; fix: gw\.Run\.load for a run folder, gw\.load_config for a file"
    ):
        groupwise.load  # noqa: B018


@pytest.mark.slow
def test_texts_without_the_extra_name_it(tmp_path):
    code = (
        "import sys; sys.modules['transformers'] = None\n"
        "import groupwise as gw\n"
        f"gw.train(gw.TextTask(['a'], reward=lambda completions: [0.0]), model='m', run_dir={str(tmp_path / 'run')!r})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (
        done.stderr.strip()
        .splitlines()[-1]
        .endswith("MissingExtraError: 'transformers' is not installed; fix: pip install -e '.[text]' in the checkout")
    )
