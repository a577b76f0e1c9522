import json
import sys

import gymnasium
import pytest

from groupwise import cli


def test_check_env_command_prints_a_table_or_json(capsys):
    assert cli.main(["check-env", "Pendulum-v1", "--env.kwargs", '{"g": 9.0}']) == 0
    printed = capsys.readouterr().out
    assert all(word in printed for word in ("Pendulum-v1", "Box[3] float32", "shared starts: seed"))
    assert cli.main(["check-env", "--help"]) == 0
    printed = capsys.readouterr().out
    assert "--env.kwargs" in printed
    assert "learning-rate" not in printed
    assert cli.main(["check-env", "FrozenLake-v1", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["start_varies"] == {"value": False, "reason": "", "fix": ""}
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


@pytest.mark.slow
def test_check_env_command_and_train_agree_that_no_step_limit_is_needed(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("groupwise.training.build.DEFAULT_HORIZON", 50)
    assert cli.main(["check-env", "CliffWalking-v1"]) == 0
    assert "no: none is known" in capsys.readouterr().out
    few = ["--total-steps", "10", "--env.num-envs", "2", "--algorithm.group-size", "2", "--evaluation.episodes", "1"]
    assert cli.main(["train", "CliffWalking-v1", "--run-dir", str(tmp_path / "run"), *few]) == 0
    text = "".join(capsys.readouterr())
    assert text.count("CliffWalking-v1 has no step limit: episodes of groups are truncated after 50 steps") == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("CartPol-v1", "did you mean 'CartPole-v1'"),
        ('CartPole-v1 --env.kwargs {"bogus":1}', "; fix: env.kwargs"),
        ("CartPole-v1 --algorithm ppo", "unknown option --algorithm"),
        ("CartPole-v1 --preset dr_grpo", "unknown option --preset"),
        ("CartPole-v1 --env.num-envs 3", "unknown option --env.num-envs"),
    ],
)
def test_check_env_command_refuses_what_it_does_not_know(words, message, capsys):
    assert cli.main(["check-env", *words.split()]) == 2
    assert message in capsys.readouterr().err
