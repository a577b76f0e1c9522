import re
import sys

import gymnasium
import pytest
from safetensors.torch import load_file

import groupwise as gw
from groupwise import cli
from groupwise.errors import require_name

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


POLICY = """
import groupwise as gw
from torch import nn


class WideCfg(gw.PolicyCfg):
    width: int = 16


@gw.register_policy("wide", WideCfg)
class Wide(gw.ActorCritic):
    def __init__(self, observation_space, action_space, cfg, *, actor_only, gamma):
        actor = nn.Sequential(nn.Linear(4, cfg.width), nn.ReLU(), nn.Linear(cfg.width, 2))
        super().__init__(observation_space, action_space, cfg, actor_only=actor_only, gamma=gamma, actor=actor)
"""


def test_a_policy_of_a_plugin_is_chosen_by_name_and_every_command_finds_it_again(registry, tmp_path, capsys):
    plugin, run = tmp_path / "my_policy.py", str(tmp_path / "run")
    plugin.write_text(POLICY)

    def groupwise(*words):
        return cli.main([*map(str, words), "--plugin", str(plugin)])

    small = ("--total-steps", 32, "--env.num-envs", 4, "--algorithm.num-steps", 8, "--evaluation.episodes", 2)
    chosen = ("--policy", "wide", "--policy.width", 8)
    assert groupwise("train", "CartPole-v1", "--algorithm", "ppo", *chosen, *small, "--run-dir", run) == 0
    assert groupwise("resume", run, "--total-steps", 64) == 0
    assert groupwise("eval", run, "--episodes", 2) == 0
    assert groupwise("export", run, "--to", "safetensors") == 0
    kept = load_file(tmp_path / "run" / "policy.safetensors")
    assert (8, 4) in {tuple(tensor.shape) for tensor in kept.values()}
    start = ("--policy.init-from", run)
    assert groupwise("train", "CartPole-v1", "--algorithm", "ppo", *start, *small, "--run-dir", tmp_path / "next") == 0
    assert f"Weights: {len(kept)} tensors from {run}" in capsys.readouterr().err
    assert gw.load_config(tmp_path / "next" / "config.json").policy.width == 8


@pytest.mark.parametrize("kind", ["policy", "credit rule"])
def test_a_decorator_without_a_name_is_refused(kind):
    fix = re.escape(f"fix: @register_{kind.split()[0]}('my_name')")
    with pytest.raises(
        gw.errors.ConfigError, match=f"the name of a {kind} is .*ActorCritic.*, expected a string; {fix}"
    ):
        require_name(kind, gw.ActorCritic)  # as in @register_policy without brackets


def test_a_taken_name_of_a_policy_is_refused(registry):
    with pytest.raises(gw.errors.ConfigError, match="policy 'actor_critic' is registered already; fix: another name"):

        @gw.register_policy("actor_critic")
        class Wide(gw.ActorCritic):
            pass
