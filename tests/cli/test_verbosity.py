"""``train --quiet`` and ``--verbose``, as a user runs them."""

import subprocess
import sys

import pytest

from groupwise import cli

CHATTY = """
import logging
import warnings

import gymnasium
from gymnasium.envs.classic_control import CartPoleEnv

log = logging.getLogger("groupwise.mine")


class Chatty(CartPoleEnv):
    def reset(self, **options):
        warnings.warn("a warning")
        log.warning("a message")
        log.debug("a detail")
        return super().reset(**options)


gymnasium.register("Chatty-v0", Chatty, max_episode_steps=50)
"""


@pytest.fixture
def train(tmp_path):
    def run(*options):
        (tmp_path / "chatty.py").write_text(CHATTY)
        argv = ["train", "Chatty-v0", "--plugin", "chatty.py", "--run-dir", "run"]
        argv += ["--total-iterations", "3", "--evaluation.episodes", "2"]
        command = [sys.executable, "-m", "groupwise", *argv, *options]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)

    return run


@pytest.mark.slow
def test_quiet_prints_one_line_and_errors(train):
    done = train("--quiet")
    assert (done.returncode, done.stderr) == (0, "")
    [line] = done.stdout.splitlines()
    assert line.startswith("Done in ")
    assert line.endswith(" Run folder: run")
    done = train("-q")
    assert done.returncode == 2
    assert "run folder 'run' is taken" in done.stderr


@pytest.mark.slow
def test_verbose_prints_every_iteration(train):
    done = train("-v")
    assert done.returncode == 0
    assert done.stderr.count(" iterations   return") == 3
    assert "DEBUG groupwise.mine: a detail" in done.stderr
    assert "a warning" in done.stderr


def test_both_exclude_each_other(capsys):
    assert cli.main(["train", "CartPole-v1", "-q", "--verbose"]) == 2
    assert "not allowed with argument" in capsys.readouterr().err
