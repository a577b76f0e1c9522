import sys

import gymnasium
import pytest

from groupwise import cli

MODULE = """
import gymnasium
from gymnasium.envs.classic_control import CartPoleEnv

gymnasium.register("FromModule-v0", CartPoleEnv)
"""


def test_a_plugin_may_be_a_module_by_its_name(tmp_path, monkeypatch, capsys):
    (tmp_path / "registers_one.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    try:
        assert cli.main(["config", "FromModule-v0", "--plugin", "registers_one"]) == 0
    finally:
        gymnasium.registry.pop("FromModule-v0", None)
        sys.modules.pop("registers_one", None)
    assert cli.main(["config", "CartPole-v1", "--plugin", "nobody_has_this"]) == 2
    said = capsys.readouterr().err
    assert "--plugin nobody_has_this: expected an existing Python file or an installed module" in said
    assert "; fix: its path with .py" in said


def test_a_module_whose_own_imports_fail_says_so(tmp_path, monkeypatch):
    (tmp_path / "needs_another.py").write_text("import nobody_has_this")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="nobody_has_this"):
        cli.main(["config", "CartPole-v1", "--plugin", "needs_another"])
