import json
import sys

import gymnasium
import pytest

from groupwise import check, cli


@pytest.fixture(autouse=True)
def hasty(monkeypatch):
    """Times are not what is tested."""
    monkeypatch.setattr(check, "_BUDGET_S", 0.01)


def test_check_env_command_prints_a_table(capsys):
    assert cli.main(["check-env", "Pendulum-v1", "--env.kwargs", '{"g": 9.0}']) == 0
    printed = capsys.readouterr().out
    assert "Pendulum-v1" in printed
    assert "Box[3] float32" in printed
    assert "shared starts: seed" in printed


def test_check_env_command_prints_json(capsys):
    assert cli.main(["check-env", "FrozenLake-v1", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["start_varies"] == {"value": False, "reason": "", "fix": ""}
    assert printed["start_modes"]["native"]["value"] is None
    assert printed["training"]["value"]["start_mode"] == "seed"


PLUGIN = """
import gymnasium
from gymnasium.envs.classic_control import CartPoleEnv

class Drifts(CartPoleEnv):
    resets = 0

    def reset(self, *, seed=None, options=None):
        obs, info = super().reset(seed=seed)
        Drifts.resets += 1
        self.state[0] += Drifts.resets
        return self.state.astype("float32"), info

gymnasium.register("Drifts-v0", Drifts, max_episode_steps=500)
"""


def test_check_env_command_says_by_its_exit_code_that_nothing_can_train(tmp_path, capsys):
    plugin = tmp_path / "drifts.py"
    plugin.write_text(PLUGIN)
    try:
        assert cli.main(["check-env", "Drifts-v0", "--plugin", str(plugin)]) == 1
    finally:
        gymnasium.registry.pop("Drifts-v0", None)
        sys.modules.pop("groupwise_plugin_drifts", None)
    assert "no: " in capsys.readouterr().out


def test_check_env_command_refuses_what_it_does_not_know(capsys):
    assert cli.main(["check-env", "CartPol-v1"]) == 2
    assert "did you mean 'CartPole-v1'" in capsys.readouterr().err


@pytest.mark.slow
def test_check_env_command_and_train_agree_that_no_step_limit_is_needed(tmp_path, capsys):
    assert cli.main(["check-env", "CliffWalking-v1"]) == 0
    assert "no: none is known" in capsys.readouterr().out
    few = ["--total-steps", "10", "--env.num-envs", "2", "--algorithm.group-size", "2", "--evaluation.episodes", "2"]
    assert cli.main(["train", "CliffWalking-v1", "--run-dir", str(tmp_path / "run"), *few]) == 0
    text = "".join(capsys.readouterr())
    assert text.count("CliffWalking-v1 has no step limit: episodes of groups are truncated after 1,000 steps") == 1


@pytest.mark.parametrize(
    "option",
    ["--algorithm ppo", "--algorithm=ppo", "--preset dr_grpo", "--algorithm.gamma 0.9", "--seed 3", "--env.num-envs 3"],
)
def test_check_env_command_refuses_settings_of_training(capsys, option):
    assert cli.main(["check-env", "CartPole-v1", *option.split()]) == 2
    flag = option.split()[0].split("=")[0]
    assert f"unknown option {flag}" in capsys.readouterr().err


def test_check_env_command_helps_shortly(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert cli.main(["check-env", "--help"]) == 0
    printed = capsys.readouterr().out
    assert len(printed.splitlines()) < 80
    assert "--env.kwargs" in printed
    assert "learning-rate" not in printed


def test_check_env_says_what_to_do_about_arguments_that_nobody_takes(capsys):
    assert cli.main(["check-env", "CartPole-v1", "--env.kwargs", '{"bogus": 1}']) == 2
    said = capsys.readouterr().err
    assert "CartPole-v1 cannot be made: " in said
    assert "'bogus'" in said
    assert "; fix: env.kwargs" in said
