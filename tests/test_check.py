import subprocess
import sys
from functools import partial

import gymnasium
import pytest
from checked_envs import Alike, BreaksInReset, BreaksInStep, Calm, CannotBeMade, Cheats, Counts, Sound, Speaks
from success_envs import TorchTouch, Touch, TouchEither

from groupwise import check
from groupwise.check import Finding, Training, check_env
from groupwise.config.run import EnvCfg
from groupwise.envs.torch_env import TorchCartPole
from groupwise.errors import EnvError, UnknownNameError


class Late(Touch):
    """Tells at the end alone."""

    def step(self, action):
        *outcome, over, info = super().step(action)
        return *outcome, over, {"success": info["is_success"]} if over else {}


@pytest.fixture(autouse=True)
def hasty(monkeypatch):
    """Times are not what is tested."""
    monkeypatch.setattr(check, "_BUDGET_S", 0.01)


def test_a_sound_environment():
    report = check_env(Sound)
    assert report.env_id == "Sound"
    assert report.observation == Finding("Box[1] float32")
    assert report.action == Finding("Discrete(2)")
    assert report.max_episode_steps == Finding(20)
    assert (report.start_varies.value, report.noise_varies.value) == (True, True)
    assert {mode for mode, found in report.start_modes.items() if found.value} == {"snapshot", "seed", "fresh"}
    assert all(found.value is None or found.value > 0 for found in report.start_modes.values())
    assert report.start_modes["native"] == Finding(None, "it registers no vectorised version")
    assert report.training.value is not None
    assert report.training.value == Training("seed", "sync", 8, ())


@pytest.mark.parametrize(
    ("env", "start_varies", "noise"), [(Sound, True, True), (Calm, True, False), (Alike, False, False)]
)
def test_randomness(env, start_varies, noise):
    report = check_env(env)
    assert (report.start_varies.value, report.noise_varies.value) == (start_varies, noise)


def test_an_environment_with_a_vectorised_version():
    report = check_env("CartPole-v1")
    assert all(found.value is not None for found in report.start_modes.values())
    assert report.training.value.start_mode == "native"
    assert report.training.value.vectorization == "entry_point"


@pytest.mark.slow
def test_settings_of_the_environment_count():
    assert check_env(EnvCfg(vectorization="async")).training.value.vectorization == "async"
    for slippery in (False, True):
        report = check_env(EnvCfg(id="FrozenLake-v1", kwargs={"is_slippery": slippery}))
        assert report.noise_varies.value is slippery
    with pytest.raises(EnvError, match=r"FrozenLake-v1 cannot be made: .*sticky"):
        check_env(EnvCfg(id="FrozenLake-v1", kwargs={"sticky": False}))


def test_a_callable_that_makes_all_rows():
    report = check_env(TorchCartPole)
    assert report.env_id == "TorchCartPole"
    assert (report.observation.value, report.action.value) == ("Box[4] float32", "Discrete(2)")
    assert report.start_varies.value is True
    assert report.noise_varies.value is False
    assert report.start_modes["native"].value > 0
    assert report.start_modes["seed"].reason == "it makes its rows itself, and starts them by native"
    assert report.training.value == Training("native", "own", 8, ())
    assert "8 environments by own, shared starts: native" in str(report)


class LeaksTime(TorchCartPole):
    """Shifts its observations by the number of times it was asked for one."""

    asked = 0

    def observe(self, state):
        self.asked += 1
        return super().observe(state) + self.asked


def test_rows_that_cheat_are_a_finding_and_rows_that_cannot_be_made_an_error():
    report = check_env(LeaksTime)
    reason = "rows that were started with the same seed differ at the start"
    assert reason in report.training.reason
    assert reason in report.start_varies.reason

    def breaks(num_envs):
        raise OSError("no device")

    with pytest.raises(OSError, match="no device"):
        check_env(breaks)


def test_a_task_in_torch_is_tried_out_where_it_is_asked_for():
    report = check_env(EnvCfg(id="CartPole-v1", vectorization="torch"))
    assert report.env_id == "TorchCartPole"
    assert (report.training.value.start_mode, report.training.value.vectorization) == ("native", "torch")


def test_a_cheat_is_refused_with_the_reason_and_the_fix():
    report = check_env(Cheats)
    assert report.training.value is None
    assert report.training.reason.count("rows that were started with the same seed differ") == 1
    assert report.start_modes["seed"] == report.start_modes["fresh"]
    seed = report.start_modes["seed"]
    assert seed.reason == "rows that were started with the same seed differ at the start, in 'obs' of row 1"
    text = str(report)
    assert "shared start: fresh       no, see 'shared start: seed'" in text
    assert "fix                       let the environment draw all its randomness from self.np_random" in text


@pytest.mark.parametrize(
    ("env", "reason"),
    [(BreaksInStep, "RuntimeError: the motor is off"), (BreaksInReset, "RuntimeError: no room")],
)
def test_what_breaks_is_a_finding(env, reason):
    report = check_env(env)
    findings = [report.noise_varies, report.training, report.start_modes["seed"]]
    assert [(found.value, found.reason) for found in findings] == [(None, reason)] * 3


def test_an_environment_that_cannot_be_made_is_an_error():
    with pytest.raises(OSError, match="licence file not found"):
        check_env(CannotBeMade)


def test_spaces_that_are_not_supported():
    speaks, counts = check_env(Speaks), check_env(Counts)
    assert speaks.observation.value is None
    assert speaks.observation.reason.startswith("observation space Text(")
    assert speaks.training == speaks.observation
    assert speaks.action.value == "Discrete(2)"
    assert counts.training == counts.action
    assert counts.action.reason.startswith("action space Box(0, 5, (1,), int64) is not supported")
    assert counts.start_modes["seed"].value is not None


def test_a_ready_environment_is_refused_with_the_fix():
    with pytest.raises(EnvError, match=r"env is a Sound, expected .*; fix: check_env\(lambda: Sound\(\.\.\.\)\)$"):
        check_env(Sound())


def test_a_name_that_nobody_registered_is_an_error():
    with pytest.raises(UnknownNameError, match="did you mean 'CartPole-v1'"):
        check_env("CartPol-v1")


class Endless(Calm):
    """Nobody knows that it ends."""

    def __init__(self):
        pass


def test_without_a_known_step_limit_the_report_says_when_episodes_are_cut():
    report = check_env(Endless)
    assert report.max_episode_steps.value is None
    assert report.training.value is not None
    assert "step limit                no: none is known, so GRPO and evaluations cut episodes after" in str(report)


def test_the_step_limit_is_found_where_it_is_said():
    assert check_env(lambda: gymnasium.wrappers.TimeLimit(Endless(), 7)).max_episode_steps == Finding(7)
    limited = check_env(EnvCfg(id="CliffWalking-v1", max_episode_steps=9))
    assert limited.max_episode_steps == Finding(9)
    assert limited.training.value is not None


class EndlessRows(TorchCartPole):
    def __init__(self, num_envs):
        super().__init__(num_envs=num_envs)
        self.max_episode_steps = None


def test_the_step_limit_of_rows():
    report = check_env(EndlessRows)
    assert "none is known" in report.max_episode_steps.reason
    assert report.training.value is not None
    assert check_env(TorchCartPole).max_episode_steps == Finding(500)


SCRIPT = """
import sys
import groupwise as gw
from groupwise import check

check._BUDGET_S = 0.01

def tell(word):
    with open(sys.argv[1], "a") as file:
        print(word, __name__, file=file)

def main():
    tell("before")
    print(gw.check_env(gw.EnvCfg(id="FrozenLake-v1", vectorization="async")))
    tell("after")
"""


@pytest.mark.slow
def test_a_script_without_a_guard_runs_once_and_says_so(tmp_path):
    (tmp_path / "script.py").write_text(f"{SCRIPT}\nmain()\n")
    command = [sys.executable, "script.py", "told"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=True)
    told = (tmp_path / "told").read_text().splitlines()
    assert told[0] == "before __main__"
    assert told[-1] == "after __main__"
    assert set(told[1:-1]) <= {"before __mp_main__"}  # children come as far as to the check
    assert "if __name__ == '__main__':" in done.stdout


@pytest.mark.parametrize(
    ("env", "said"),
    [
        (Touch, "reported at the end of episodes"),
        (partial(TouchEither, "success"), "reported at the end of episodes, with the names of tasks"),
        (Late, "reported at the end of episodes"),
    ],
)
def test_whether_success_is_reported(env, said):
    assert check_env(lambda: gymnasium.wrappers.TimeLimit(env(), 9)).success.value == said


def test_whether_rows_that_make_themselves_report_success():
    assert check_env(TorchTouch).success.value == "reported at the end of episodes"


def test_without_success_the_report_says_how(monkeypatch):
    line = next(line for line in str(check_env(Sound)).splitlines() if line.startswith("success "))
    assert line.split(maxsplit=1)[1].startswith(
        "no: no flag at the end of an episode: success metrics will be missing; report"
    )
    monkeypatch.setattr(check, "_EPISODE_S", 0.01)
    assert "in 0.01 s, in which no episode ended" in check_env(lambda: Touch(None, length=10**9)).success.reason
