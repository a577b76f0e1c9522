import ast
import subprocess
import sys
from pathlib import Path

import pytest

import groupwise

HEAVY = ("torch", "gymnasium", "transformers", "tensorboard", "matplotlib", "wandb", "tensordict", "pydantic", "rich")


@pytest.mark.parametrize(
    ("code", "absent"),
    [
        ("groupwise; dir(groupwise)", HEAVY),
        ("groupwise as gw; gw.RunCfg(), gw.GRPOCfg, gw.load_config", ("torch",)),
        (  # importing the compiler or transformers takes about as long as importing torch
            "groupwise as gw, torch; from groupwise.speed.control import flat_adam; gw.train, gw.ActorCritic;"
            "assert flat_adam(gw.PPOCfg(), [torch.nn.Parameter(torch.zeros(2))]) is not None",
            ("torch._dynamo", "transformers", "matplotlib", "scipy"),
        ),
    ],
)
def test_imports_are_cheap(code, absent):
    code = f"import sys, {code}; print([m for m in {absent} if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_the_stub_exports_every_name_to_type_checkers():
    stub = ast.parse(Path(groupwise.__file__).with_suffix(".pyi").read_text())
    names = [alias for node in stub.body if isinstance(node, ast.ImportFrom) for alias in node.names]
    assert all(alias.asname == alias.name for alias in names)
    assert set(groupwise.__all__) | {"config", "errors"} == {alias.name for alias in names}
    assert len(groupwise.__all__) <= 46


def test_every_public_name_resolves_and_an_unknown_one_is_an_attribute_error():
    for name in [*groupwise.__all__, "config", "errors"]:
        assert getattr(groupwise, name) is not None
        assert name in dir(groupwise)
    for name, message in (("nope", "no attribute 'nope'"), ("load", r"fix: gw\.Run\.load .* gw\.load_config")):
        with pytest.raises(AttributeError, match=message):
            getattr(groupwise, name)


@pytest.mark.slow
def test_texts_without_the_extra_name_it(tmp_path):
    code = (
        "import sys; sys.modules['transformers'] = None\n"
        "import groupwise as gw\n"
        f"gw.train(gw.TextTask(['a'], reward=lambda completions: [0.0]), model='m', run_dir={str(tmp_path / 'run')!r})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "MissingExtraError: 'transformers' is not installed; fix: pip install -e '.[text]'" in done.stderr
