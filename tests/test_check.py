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

limited = gymnasium.wrappers.TimeLimit


class Late(Touch):
    """Tells at the end alone."""

    def step(self, action):
        *outcome, over, info = super().step(action)
        return *outcome, over, {"success": info["is_success"]} if over else {}


class Endless(Calm):
    """Nobody knows that it ends."""

    def __init__(self):
        pass


class EndlessRows(TorchCartPole):
    def __init__(self, num_envs):
        super().__init__(num_envs=num_envs)
        self.max_episode_steps = None


class LeaksTime(TorchCartPole):
    """Shifts its observations by the number of times it was asked for one."""

    asked = 0

    def observe(self, state):
        self.asked += 1
        return super().observe(state) + self.asked


def test_a_sound_environment():
    report = check_env(Sound)
    assert report.env_id == "Sound"
    assert report.observation == Finding("Box[1] float32")
    assert report.action == Finding("Discrete(2)")
    assert report.max_episode_steps == Finding(20)
    assert {mode for mode, found in report.start_modes.items() if found.value} == {"snapshot", "seed", "fresh"}
    assert report.start_modes["native"] == Finding(None, "it registers no vectorised version")
    assert report.training.value == Training("seed", "sync", 8, ())


@pytest.mark.parametrize(
    ("env", "start_varies", "noise"), [(Sound, True, True), (Calm, True, False), (Alike, False, False)]
)
def test_randomness(env, start_varies, noise):
    report = check_env(env)
    assert (report.start_varies.value, report.noise_varies.value) == (start_varies, noise)


def test_an_environment_with_a_vectorised_version():
    report = check_env("CartPole-v1")
    assert all(found.value for found in report.start_modes.values())
    assert report.training.value == Training("native", "entry_point", 8, ())


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
    assert (report.env_id, report.observation.value, report.action.value) == (
        "TorchCartPole",
        "Box[4] float32",
        "Discrete(2)",
    )
    assert (report.start_varies.value, report.noise_varies.value) == (True, False)
    assert report.start_modes["native"].value
    assert report.start_modes["seed"].reason == "it makes its rows itself, and starts them by native"
    assert report.training.value == Training("native", "own", 8, ())
    assert "8 environments by own, shared starts: native" in str(report)
    named = check_env(EnvCfg(id="CartPole-v1", vectorization="torch"))
    assert (named.env_id, named.training.value) == ("TorchCartPole", Training("native", "torch", 8, ()))


def test_rows_that_cheat_are_a_finding():
    report = check_env(LeaksTime)
    reason = "rows that were started with the same seed differ at the start"
    assert reason in report.training.reason
    assert reason in report.start_varies.reason


def test_a_cheat_is_refused_with_the_reason_and_the_fix():
    report = check_env(Cheats)
    assert report.training.value is None
    assert report.training.reason.count("rows that were started with the same seed differ") == 1
    seed = report.start_modes["seed"]
    assert seed == report.start_modes["fresh"]
    assert seed.reason == "rows that were started with the same seed differ at the start, in 'obs' of row 1"
    text = str(report)
    assert "shared start: fresh       no, see 'shared start: seed'" in text
    assert "fix                       let the environment draw all its randomness from self.np_random" in text


@pytest.mark.parametrize(
    ("env", "reason"), [(BreaksInStep, "RuntimeError: the motor is off"), (BreaksInReset, "RuntimeError: no room")]
)
def test_what_breaks_is_a_finding(env, reason):
    report = check_env(env)
    findings = [report.noise_varies, report.training, report.start_modes["seed"]]
    assert [(found.value, found.reason) for found in findings] == [(None, reason)] * 3


def rows_that_break(num_envs):
    raise OSError("no device")


@pytest.mark.parametrize(
    ("env", "error", "message"),
    [
        (CannotBeMade, OSError, "licence file not found"),
        (rows_that_break, OSError, "no device"),
        (Sound(), EnvError, r"env is a Sound, .*; fix: check_env\(lambda: Sound\(\.\.\.\)\)$"),
        ("CartPol-v1", UnknownNameError, "did you mean 'CartPole-v1'"),
    ],
)
def test_what_cannot_be_made_is_an_error(env, error, message):
    with pytest.raises(error, match=message):
        check_env(env)


def test_spaces_that_are_not_supported():
    speaks, counts = check_env(Speaks), check_env(Counts)
    assert speaks.observation.value is None
    assert speaks.observation.reason.startswith("observation space Text(")
    assert speaks.training == speaks.observation
    assert speaks.action.value == "Discrete(2)"
    assert counts.training == counts.action
    assert counts.action.reason.startswith("action space Box(0, 5, (1,), int64) is not supported")
    assert counts.start_modes["seed"].value


@pytest.mark.parametrize(
    ("env", "limit"),
    [
        (Endless, None),
        (EndlessRows, None),
        (TorchCartPole, 500),
        (lambda: limited(Endless(), 7), 7),
        (EnvCfg(id="CliffWalking-v1", max_episode_steps=9), 9),
    ],
)
def test_the_step_limit(env, limit):
    report = check_env(env)
    assert report.max_episode_steps.value == limit
    assert ("step limit                no: none is known, so GRPO and evaluations" in str(report)) == (limit is None)
    assert report.training.value is not None


SCRIPT = """
import sys
import groupwise as gw

def tell(word):
    with open("told", "a") as file:
        print(word, __name__, file=file)

tell("before")
found = gw.check_env(gw.EnvCfg(id="FrozenLake-v1", vectorization="async"))
tell("after")
print(found.training)
"""


@pytest.mark.slow
def test_a_script_without_a_guard_runs_once_and_says_so(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "script.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=True)
    told = (tmp_path / "told").read_text().splitlines()
    assert (told[0], told[-1]) == ("before __main__", "after __main__")
    assert set(told[1:-1]) == {"before __mp_main__"}  # children come as far as to the check
    assert "if __name__ == '__main__':" in done.stdout


@pytest.mark.parametrize(
    ("env", "said"),
    [
        (lambda: limited(Touch(), 9), "reported at the end of episodes"),
        (lambda: limited(TouchEither("success"), 9), "reported at the end of episodes, with the names of tasks"),
        (lambda: limited(Late(), 9), "reported at the end of episodes"),
        (TorchTouch, "reported at the end of episodes"),
    ],
)
def test_whether_success_is_reported(env, said):
    assert check_env(env).success.value == said


def test_without_success_the_report_says_how(monkeypatch):
    assert "\nsuccess                   no: no flag at the end of an episode: success metrics will" in str(
        check_env(Sound)
    )
    monkeypatch.setattr(check, "_EPISODE_S", 0.01)
    endless = partial(Touch, None, length=10**9)
    assert "in 0.01 s, in which no episode ended" in check_env(endless).success.reason
