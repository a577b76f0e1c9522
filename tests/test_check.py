import subprocess
import sys
from functools import partial

import gymnasium
import numpy as np
import pytest
from gymnasium.envs.registration import EnvSpec
from noisy_envs import Noisy
from success_envs import TorchTouch, Touch, TouchEither

from groupwise import check
from groupwise.check import Finding, Training, check_env
from groupwise.config.run import EnvCfg
from groupwise.envs.torch_env import TorchCartPole
from groupwise.errors import EnvError, UnknownNameError

limited = gymnasium.wrappers.TimeLimit


class Sound(Noisy):
    """A random start, random steps, a known end; subclasses break something."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)
    length = 20

    def __init__(self):
        self.spec = EnvSpec(type(self).__name__, max_episode_steps=20)

    def look(self):
        return np.array([self.state], np.float32)


class Calm(Sound):
    def draw_noise(self):
        return 0.0


class Cheats(Sound):
    """Draws its start from the global generator, which no seed of a reset reaches."""

    def draw_start(self):
        return np.random.normal()


class BreaksInStep(Sound):
    def step(self, action):
        raise RuntimeError("the motor is off; fix: switch it on")


class BreaksInReset(Sound):
    def reset(self, *, seed=None, options=None):
        raise RuntimeError("no room")


class ShowsNaN(Sound):
    def step(self, action):
        obs, *rest = super().step(action)
        return obs * np.nan, *rest


class Doubles(Sound):
    """Its observations are not of their space."""

    observation_space = gymnasium.spaces.Box(-1e-9, 1e-9, (1,), np.float32)

    def look(self):
        return np.array([self.state])


class PaysNaN(Sound):
    def step(self, action):
        obs, _, *ends = super().step(action)
        return obs, float("nan"), *ends


class CannotBeMade(Sound):
    def __init__(self):
        raise OSError("licence file not found")


class Speaks(Sound):
    observation_space = gymnasium.spaces.Text(5)

    def look(self):
        return "hello"


class Counts(Sound):
    action_space = gymnasium.spaces.Box(0, 5, (1,), np.int64)


class Alike(Calm):
    def draw_start(self):
        return 0.0


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
    assert report.training.value == Training("seed", "sync", 8, ())
    assert (report.start_varies.value, report.noise_varies.value) == (True, True)
    report = check_env(Alike)
    assert (report.start_varies.value, report.noise_varies.value) == (False, False)


@pytest.mark.slow
def test_settings_of_the_environment_count():
    assert check_env("CartPole-v1").training.value == Training("native", "entry_point", 8, ())
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
    assert report.training.value == Training("native", "own", 8, ())
    assert "8 environments by own, shared starts: native" in str(report)
    named = check_env(EnvCfg(id="CartPole-v1", vectorization="torch"))
    assert (named.env_id, named.training.value) == ("TorchCartPole", Training("native", "torch", 8, ()))


def test_rows_that_cheat_are_a_finding():
    report = check_env(LeaksTime)
    reason = "two starts with the same seed differ at the start"
    assert reason in report.training.reason
    assert reason in report.start_varies.reason


def test_a_cheat_is_refused_with_the_reason_and_the_fix():
    report = check_env(Cheats)
    assert report.training.value is None
    reason = (
        "seed, fresh: two starts with the same seed differ at the start, in 'obs' of row 1; "
        "snapshot: the start of a seed is another state when it is captured again"
    )
    assert report.training.reason == reason
    text = str(report)
    assert f"problem                   {reason}" in text
    assert "training uses             no, see 'problem'" in text
    assert "fix                       let the environment draw all its randomness from self.np_random" in text


@pytest.mark.parametrize(
    ("env", "reason"), [(BreaksInStep, "RuntimeError: the motor is off"), (BreaksInReset, "RuntimeError: no room")]
)
def test_what_breaks_is_a_finding(env, reason):
    report = check_env(env)
    findings = [report.noise_varies, report.training]
    assert [(found.value, found.reason) for found in findings] == [(None, reason)] * 2


def test_a_reward_that_is_not_finite_is_a_finding():
    report = check_env(PaysNaN)
    assert report.training.reason == report.success.reason == "the reward of step 1 is nan"
    assert "problem                   the reward of step 1 is nan" in str(report)


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
    assert counts.noise_varies.value


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
    lines = (tmp_path / "told").read_text().splitlines()
    assert (lines[0], lines[-1]) == ("before __main__", "after __main__")
    assert set(lines[1:-1]) == {"before __mp_main__"}  # children come as far as to the check
    assert "if __name__ == '__main__':" in done.stdout


@pytest.mark.parametrize(
    ("env", "text"),
    [
        (lambda: limited(Touch(), 9), "reported at the end of episodes"),
        (lambda: limited(TouchEither("success"), 9), "reported at the end of episodes, with the names of tasks"),
        (TorchTouch, "reported at the end of episodes"),
    ],
)
def test_whether_success_is_reported(env, text):
    assert check_env(env).success.value == text


def test_without_success_the_report_says_how(monkeypatch):
    assert "\nsuccess                   no: no flag at the end of an episode: success metrics will" in str(
        check_env(Sound)
    )
    monkeypatch.setattr(check, "_EPISODE_S", 0.01)
    endless = partial(Touch, None, length=10**9)
    assert "in 0.01 s, in which no episode ended" in check_env(endless).success.reason


class Rounds(Sound):
    """Says that it shows bytes, and shows numbers between 0 and 1."""

    observation_space = gymnasium.spaces.Box(0, 255, (1,), np.uint8)


def test_numbers_that_the_space_cannot_hold():
    report = check_env(Rounds)
    assert report.training.value is None
    assert report.training.reason.startswith("reset() of Rounds returned what its observation_space does not allow")
    assert "dtype float32, expected uint8" in report.training.reason
    assert report.training.fix.startswith("return uint8")


@pytest.mark.parametrize("wrapper", [gymnasium.wrappers.NormalizeObservation, gymnasium.wrappers.NormalizeReward])
def test_whether_episodes_are_independent(wrapper):
    assert check_env(Sound).forgets == check_env(TorchCartPole).forgets == Finding(True)
    forgets = check_env(lambda: wrapper(Sound())).forgets
    assert forgets.value is None
    assert forgets.reason.startswith(
        f"an episode depends on those before it (running statistics of {wrapper.__name__})"
    )
    assert forgets.fix.startswith("policy.normalize_obs or policy.normalize_reward")


def test_an_observation_that_is_not_finite_is_a_finding():
    report = check_env(ShowsNaN)
    assert report.success.reason == "the observation of step 1 is not finite"
    assert "training uses             no" in str(report)
    assert "PPO " not in str(report)


def test_warnings_of_gymnasium_are_shown_once():
    report = check_env(lambda: gymnasium.wrappers.PassiveEnvChecker(Doubles()))
    said = [line for line in str(report).splitlines() if line.startswith("warning  ")]
    assert len(said) == len(set(said)) >= 2
    assert "dtype to be float32, actual type: float64" in said[0]
    assert not any("\x1b" in line or "WARN" in line for line in said)
    assert "PPO " not in str(report)


def test_ppo_takes_what_cannot_share_a_start():
    assert f"{'PPO':<26}can train here: it needs no shared starts" in str(check_env(Cheats))
