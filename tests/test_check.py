import json
import sys

import gymnasium
import numpy as np
import pytest

from groupwise import cli
from groupwise.check import check_env
from groupwise.check_table import duration, speed, table
from groupwise.envs import check
from groupwise.envs.check import Finding
from groupwise.envs.configs import EnvCfg
from groupwise.envs.rows import RowsGroupEnv
from groupwise.envs.torch_control import TorchCartPole
from groupwise.errors import EnvError, UnknownNameError


@pytest.fixture(autouse=True)
def hasty(monkeypatch):
    """Times are not what is tested."""
    monkeypatch.setattr(check, "_BUDGET_S", 0.01)


class Sound(gymnasium.Env):
    """A random start, random steps; subclasses break something."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count, self.place = 0, float(self.np_random.normal())
        return self.look(), {}

    def step(self, action):
        self.count += 1
        self.place += float(np.sum(action)) + self.draw()
        return self.look(), 1.0, False, self.count >= 20, {}

    def draw(self):
        return float(self.np_random.normal())

    def look(self):
        return np.array([self.place], np.float32)


class Calm(Sound):
    def draw(self):
        return 0.0


class Cheats(Sound):
    """Draws its start from the global generator, which no seed of a reset reaches."""

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place = float(np.random.normal())
        return self.look(), {}


class BreaksInStep(Sound):
    def step(self, action):
        raise RuntimeError("the motor is off; mend: switch it on")


class BreaksInReset(Sound):
    def reset(self, *, seed=None, options=None):
        raise RuntimeError("no room")


class CannotBeMade(Sound):
    def __init__(self):
        raise OSError("licence file not found")


class Speaks(Sound):
    observation_space = gymnasium.spaces.Dict(
        {"place": Sound.observation_space, "word": gymnasium.spaces.Text(5)},
    )

    def look(self):
        return {"place": super().look(), "word": "hello"}


class Counts(Sound):
    action_space = gymnasium.spaces.Box(0, 5, (1,), np.int64)


class Alike(Calm):
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place = 0.0
        return self.look(), {}


def test_a_sound_environment():
    report = check_env(Sound)
    assert report.env_id == "Sound"
    assert report.observation == Finding("Box[1] float32")
    assert report.action == Finding("Discrete(2)")
    assert (report.start_varies.value, report.noise.value) == (True, "seen")
    assert {tier for tier, found in report.tiers.items() if found.value is not None} == {"snapshot", "seed", "replay"}
    assert all(found.value is None or found.value > 0 for found in report.tiers.values())
    assert report.branching.value is not None
    assert report.branching.value.states == "fields"
    assert report.entry_point_autoreset == Finding(None, "none is registered")
    assert set(report.steps_per_second) == {"entry_point", "sync", "async"}
    assert report.steps_per_second["sync"].value > 100
    assert report.steps_per_second["async"].value > 10
    assert report.training.value is not None
    assert report.training.value[:4] == ("seed", "sync", 8, "disabled")


@pytest.mark.parametrize(("env", "start_varies", "noise"), [(Calm, True, "none"), (Alike, False, "none")])
def test_randomness(env, start_varies, noise):
    report = check_env(env)
    assert (report.start_varies.value, report.noise.value) == (start_varies, noise)


def test_an_environment_with_a_vectorised_version():
    report = check_env("CartPole-v1")
    assert report.entry_point_autoreset.value == "next_step"
    assert all(found.value is not None for found in (*report.tiers.values(), *report.steps_per_second.values()))
    assert report.training.value.tier == "native"
    assert report.training.value.vectorization == "entry_point"
    assert report.branching.value.states == "native"


def test_settings_of_the_environment_count():
    assert check_env(EnvCfg(vectorization="async")).training.value.vectorization == "async"
    assert (
        check_env(EnvCfg(id="FrozenLake-v1", kwargs={"is_slippery": False})).noise.value == "drawn"
    )  # from one outcome
    assert check_env(EnvCfg(id="FrozenLake-v1", kwargs={"is_slippery": True})).noise.value == "seen"
    with pytest.raises(EnvError, match=r"FrozenLake-v1 cannot be made: .*sticky"):
        check_env(EnvCfg(id="FrozenLake-v1", kwargs={"sticky": False}))


@pytest.mark.parametrize("setting", [{"random_prefix": 5}, {"reward_parts": ("bonus",)}, {"group_start": "seed"}])
def test_what_only_groups_have_does_not_stand_in_the_way_of_speeds(setting):
    speeds = check_env(EnvCfg(**setting)).steps_per_second
    assert {way: found.reason for way, found in speeds.items()} == dict.fromkeys(speeds, "")


def test_rows_in_groups_are_timed_and_started_again_where_they_end(monkeypatch):
    made = []

    def make_env(*args, **settings):
        made.append((settings["grouped"], args[0].vectorization, make(*args, **settings)))
        return made[-1][-1]

    make = check.make_env
    monkeypatch.setattr(check, "make_env", make_env)
    cfg = EnvCfg(id="CartPole-v1", max_episode_steps=3)
    assert check.steps_per_second(cfg, None, "sync") > 100
    assert check.steps_per_second(cfg, None, "entry_point") > 100
    assert [grouped for grouped, _, _ in made] == [True, False]
    rows = made[0][2]
    assert isinstance(rows, RowsGroupEnv)
    assert min(rows._num_resets) >= 8 // 3  # every third of at least 8 steps


def test_a_callable_that_makes_all_rows():
    report = check_env(TorchCartPole)
    assert report.env_id == "TorchCartPole"
    assert (report.observation.value, report.action.value) == ("Box[4] float32", "Discrete(2)")
    assert report.start_varies.value is True
    assert report.noise == Finding(None, "siblings stayed together in some tens of steps")
    assert report.tiers["native"].value > 0
    assert report.tiers["seed"] == Finding(None, "it makes its rows itself, and starts them by native")
    assert report.branching.value.states == "native"
    assert list(report.steps_per_second) == ["own"]
    assert report.steps_per_second["own"].value > 100
    assert report.training.value[:4] == ("native", "own", 8, "disabled")
    assert ("training uses", "8 x own, starts by native, autoreset disabled") in table(report)


class LeaksTime(TorchCartPole):
    """Shifts its observations by the number of times it was asked for one."""

    asked = 0

    def observe(self, state):
        self.asked += 1
        return super().observe(state) + self.asked


def test_rows_that_cheat_and_rows_that_cannot_be_made_are_findings():
    report = check_env(LeaksTime)
    reason = "rows that were started with the same seed differ at the start"
    assert reason in report.training.reason
    assert reason in report.start_varies.reason
    assert report.tiers["native"].value is None

    def breaks(num_envs):
        raise OSError("no device")

    assert check_env(breaks).training == Finding(None, "cannot be made: OSError: no device")


def test_envpool_is_timed_where_it_has_the_task_and_tried_out_where_it_is_asked_for():
    pytest.importorskip("envpool")
    assert check_env("CartPole-v1").steps_per_second["envpool"].value > 100
    assert not check.in_envpool("Mine-v0")
    report = check_env(EnvCfg(id="Catch-v0", vectorization="envpool"))  # no such environment in Gymnasium
    assert report.training.value[:2] == ("seed", "envpool")
    assert report.steps_per_second["envpool"].value > 100
    assert report.tiers["seed"].value > 0
    assert report.branching.value is None
    with pytest.raises(UnknownNameError):
        check_env(EnvCfg(id="Catsh-v0", vectorization="envpool"))


def test_a_cheat_is_refused_with_the_reason():
    report = check_env(Cheats)
    assert report.training.value is None
    assert "rows that were started with the same seed differ" in report.training.reason
    assert "the same seed differ at the start" in report.tiers["seed"].reason
    assert report.tiers["replay"].value is None


@pytest.mark.parametrize(
    ("env", "reason"),
    [
        (BreaksInStep, "RuntimeError: the motor is off"),
        (BreaksInReset, "RuntimeError: no room"),
        (CannotBeMade, "cannot be made: OSError: licence file not found"),
    ],
)
def test_what_breaks_is_a_finding(env, reason):
    report = check_env(env)
    findings = [report.noise, report.training, report.branching, report.tiers["seed"], report.steps_per_second["sync"]]
    assert [found.value for found in findings] == [None] * 5
    assert [found.reason for found in findings] == [reason] * 5
    assert "Traceback" not in report.steps_per_second["async"].reason
    assert reason.partition(": ")[2] in report.steps_per_second["async"].reason
    assert all(text for _, text in table(report)[:4])


def test_spaces_that_are_not_supported():
    speaks, counts = check_env(Speaks), check_env(Counts)
    assert speaks.observation == Finding(None, "'word' is a Text, which has no fixed shape")
    assert speaks.training.reason == speaks.tiers["seed"].reason == "its observations are not supported"
    assert speaks.action.value == "Discrete(2)"
    assert counts.action.value is None
    assert counts.training == Finding(None, "its actions are not supported")
    assert counts.tiers["seed"].value is not None
    assert counts.action.reason.startswith("action space Box(0, 5, (1,), int64) is not supported")


def test_a_name_that_nobody_registered_is_an_error():
    with pytest.raises(UnknownNameError, match="did you mean 'CartPole-v1'"):
        check_env("CartPol-v1")


def test_the_first_of_many_seeds_that_starts_elsewhere_is_found():
    """One seed in eight: two seeds alone would mostly look alike."""

    class Rarely(Alike):
        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            self.place = float(self.np_random.integers(8) == 0)
            return self.look(), {}

    assert check_env(Rarely).start_varies.value is True


@pytest.mark.parametrize(
    ("value", "text"), [(1.63, "1.6 us"), (126.4, "130 us"), (999.0, "1000 us"), (1260.0, "1.3 ms"), (0.04, "0.0 us")]
)
def test_durations_have_two_digits(value, text):
    assert duration(value) == text


def test_speeds_have_two_digits():
    assert [speed(44608.5), speed(7.3), speed(123.0)] == ["45,000", "7", "120"]


def test_check_env_command_prints_a_table(capsys):
    assert cli.main(["check-env", "Pendulum-v1", "--env.kwargs", '{"g": 9.0}']) == 0
    printed = capsys.readouterr().out
    assert "Pendulum-v1" in printed
    assert "Box[3] float32" in printed
    assert "starts by seed" in printed


def test_check_env_command_prints_json(capsys):
    assert cli.main(["check-env", "FrozenLake-v1", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["start_varies"] == {"value": False, "reason": ""}
    assert printed["training"]["value"]["tier"] == "seed"
    assert printed["branching"]["value"]["states"] == "fields"


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

gymnasium.register("Drifts-v0", Drifts)
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
