import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from groupwise import plugins
from groupwise.errors import ConfigError, EnvError
from groupwise.report.folder import RunFolder

PLUGIN = """
import gymnasium
from gymnasium.envs.classic_control import CartPoleEnv

gymnasium.register("OfAPlugin-v0", CartPoleEnv, max_episode_steps=20)
"""


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(plugins, "_loaded", [])


def groupwise(command: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "groupwise", *shlex.split(command)]
    return subprocess.run(words, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_the_printed_commands_work_as_they_stand_and_an_error_names_what_lacks():
    Path("my env.py").write_text(PLUGIN)
    settings = "--total-steps 32 --env.num-envs 4 --algorithm.num-steps 8 --evaluation.episodes 2 --run-dir r"
    trained = groupwise(f"train OfAPlugin-v0 --algorithm ppo {settings} --plugin 'my env.py'")
    assert trained.returncode == 0, trained.stderr
    following = trained.stdout.splitlines()[-1]
    assert following == "Next:  groupwise eval r --plugin 'my env.py'"
    again = groupwise(following.removeprefix("Next:  groupwise ") + " --episodes 2")
    assert again.returncode == 0, again.stderr
    without = groupwise("resume r")
    assert without.returncode == 2
    assert "unknown environment 'OfAPlugin-v0'" in without.stderr
    assert "r was trained with --plugin 'my env.py'; fix: add --plugin 'my env.py' (in" in without.stderr


def test_what_was_loaded_is_what_the_last_command_named():
    Path("a.py").write_text("")
    Path("b.py").write_text("")
    plugins.load([Path("a.py"), Path("b.py")])
    assert plugins.options(plugins.loaded()) == " --plugin a.py --plugin b.py"
    plugins.load([])
    assert plugins.options(plugins.loaded()) == ""


def test_a_run_folder_records_them():
    Path("a.py").write_text("")
    plugins.load([Path("a.py")])
    assert RunFolder.create({}, Path("run")).read_provenance()["plugins"] == ["a.py"]


def test_absent_plugins_are_blamed_and_given_ones_are_not():
    plugins._loaded.append("a.py")
    blamed = pytest.raises(ConfigError, match=r"^odd; r was trained with --plugin b\.py; fix: ")
    with blamed as caught, plugins.blaming_absence(Path("r"), ["a.py", "b.py"]):
        raise EnvError("odd")
    assert "a.py" not in str(caught.value)
    with pytest.raises(EnvError, match=r"^odd$"), plugins.blaming_absence(Path("r"), ["a.py"]):
        raise EnvError("odd")
