import json
import random
import sys

import gymnasium
import numpy as np
import pytest
import torch

from groupwise import cli
from groupwise.check import check_env
from groupwise.envs import check
from groupwise.envs.configs import EnvCfg
from groupwise.envs.findings import EnvReport, Finding, duration, none, speed, table, unknown
from groupwise.envs.noise import step_noise
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
    assert report.entry_point_autoreset == none("it registers no vectorised version")
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
    assert report.noise == unknown("siblings stayed together in some tens of steps")
    assert report.tiers["native"].value > 0
    assert report.tiers["seed"] == none("it makes its rows itself, and starts them by native")
    assert report.branching.value.states == "native"
    assert list(report.steps_per_second) == ["own"]
    assert report.steps_per_second["own"].value > 100
    assert report.training.value[:4] == ("native", "own", 8, "disabled")
    assert ("training uses", "8 environments by own, starts by native") in table(report)


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
    assert report.start_varies.verdict == report.noise.verdict == "unknown"
    assert reason in report.noise.reason
    assert report.tiers["native"].verdict == "none"

    def breaks(num_envs):
        raise OSError("no device")

    assert check_env(breaks).training == none("cannot be made: OSError: no device")


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


def test_a_cheat_is_refused_with_the_reason_and_the_mend():
    report = check_env(Cheats)
    assert report.training.verdict == "none"
    assert report.training.reason.count("rows that were started with the same seed differ") == 1
    assert report.tiers["seed"] == report.tiers["replay"]
    assert (
        report.tiers["seed"].reason
        == "rows that were started with the same seed differ at the start, in 'obs' of row 1"
    )
    assert report.start_varies == unknown("equal seeds start with different observations")
    rows = dict(table(report))
    assert rows["training uses"] == "no: GRPO refuses it, since no way above to share a start works"
    assert rows["mend"].startswith("let the environment draw all its randomness from self.np_random")
    assert (rows["  replay"], rows["starts in mid-episode"]) == ("no, see 'seed'", "no: groups cannot start at all")
    assert rows["start depends on the seed"].startswith("unknown: ")
    text = " ".join(str(report).split())
    for reason in ("differ at the start", "captured again", "it registers no vectorised version", "self.np_random"):
        assert text.count(reason) == 1


class Pays(Calm):
    """Steady observations; only the reward is random. Subclasses say from where."""

    def step(self, action):
        obs, _, *rest = super().step(action)
        return obs, float(self.pay()), *rest


class PaysByNumpy(Pays):
    def pay(self):
        return np.random.normal()


class PaysByPython(Pays):
    def pay(self):
        return random.random()


class PaysByTorch(Pays):
    def pay(self):
        return torch.rand(())


class PaysBySpace(Pays):
    def pay(self):
        return self.action_space.sample()


class Seeds(Pays):
    def reset(self, *, seed=None, options=None):
        obs, info = super().reset(seed=seed)
        self.keep(np.random.default_rng(seed))
        return obs, info


class PaysFromDictionary(Seeds):
    def keep(self, generator):
        self.generators = {"noise": generator}

    def pay(self):
        return self.generators["noise"].normal()


class Wind:
    def __init__(self, generator):
        self.sources = [{"noise": generator}]


class PaysFromObject(Seeds):
    def keep(self, generator):
        self.wind = Wind(generator)

    def pay(self):
        return self.wind.sources[0]["noise"].normal()


class PaysFromClosure(Seeds):
    def keep(self, generator):
        self.pay = lambda: generator.normal()


class PaysBySystem(Pays):
    def pay(self):
        return random.SystemRandom().random()


class EndsByNumpy(Calm):
    def step(self, action):
        obs, reward, _, truncated, info = super().step(action)
        return obs, reward, bool(np.random.random() < 0.5), truncated, info


class DrawsInVain(Calm):
    def step(self, action):
        np.random.random()
        return super().step(action)


@pytest.mark.parametrize(
    ("env", "noise"),
    [
        (PaysByNumpy, Finding("stray")),
        (PaysByPython, Finding("stray")),
        (PaysByTorch, Finding("stray")),
        (PaysBySpace, Finding("stray")),
        (PaysFromDictionary, Finding("seen")),
        (PaysFromObject, Finding("stray")),
        (PaysFromClosure, Finding("stray")),
        (EndsByNumpy, Finding("stray")),
        (DrawsInVain, Finding("drawn")),
        (PaysBySystem, unknown("equal seeds and equal actions gave other observations, rewards or flags")),
    ],
)
def test_randomness_of_steps_is_found_wherever_it_comes_from(env, noise):
    assert check.attempt(lambda: step_noise(EnvCfg(), env)) == noise


def test_the_trial_of_noise_is_in_the_report_and_leaves_the_global_generators_alone():
    def states():
        return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()

    before = states()
    assert check.attempt(lambda: step_noise(EnvCfg(), PaysByTorch)).value == "stray"
    assert states() == before
    assert check_env(PaysByNumpy).noise.value == "stray"
    assert check_env(PaysFromDictionary).noise.value == "seen"  # training gives siblings numbers of their own


@pytest.mark.parametrize(
    ("env", "reason", "num_reasons"),
    [
        (BreaksInStep, "RuntimeError: the motor is off", 4),
        (BreaksInReset, "RuntimeError: no room", 4),
        (CannotBeMade, "cannot be made: OSError: licence file not found", 5),
    ],
)
def test_what_breaks_is_a_finding(env, reason, num_reasons):
    report = check_env(env)
    findings = [report.noise, report.training, report.branching, report.tiers["seed"], report.steps_per_second["sync"]]
    assert [found.value for found in findings] == [None] * 5
    assert [found.reason for found in findings if found.reason != "groups cannot start at all"] == [
        reason
    ] * num_reasons
    assert [found.verdict for found in findings] == ["unknown", "none", "unknown", "unknown", "unknown"]
    assert "Traceback" not in report.steps_per_second["async"].reason
    assert reason.partition(": ")[2] in report.steps_per_second["async"].reason
    assert all(text for _, text in table(report)[:4])


def test_spaces_that_are_not_supported():
    speaks, counts = check_env(Speaks), check_env(Counts)
    assert speaks.observation.verdict == "none"
    assert speaks.observation.reason == "'word' is a Text, which has no fixed shape"
    assert speaks.training.mend == speaks.observation.mend
    assert "ImgObsWrapper" in speaks.training.mend
    assert speaks.training.reason == speaks.tiers["seed"].reason == "its observations are not supported"
    assert speaks.action.value == "Discrete(2)"
    assert counts.action.value is None
    assert counts.training == none("its actions are not supported", counts.action.mend)
    assert counts.tiers["seed"].value is not None
    assert counts.action.reason.startswith("action space Box(0, 5, (1,), int64) is not supported")


class KeepsCount(Alike):
    """Starts elsewhere in every episode: only fresh ones show that seeds make no difference."""

    episodes = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.episodes += 1
        self.place = float(self.episodes)
        return self.look(), {}


def test_starts_are_compared_in_fresh_environments_where_used_ones_remember():
    assert check_env(KeepsCount).start_varies == Finding(False)


@pytest.mark.parametrize(
    ("env", "mend"),
    [
        (lambda: Sound(), r"mend: check_env\(lambda: Sound\(\.\.\.\)\)$"),
        (lambda: gymnasium.make("CartPole-v1"), r"mend: check_env\(lambda: gymnasium.make\('CartPole-v1', \.\.\.\)\)$"),
    ],
)
def test_an_environment_that_is_made_already_is_refused_with_the_mend(env, mend):
    with pytest.raises(EnvError, match=rf"that is made already, expected a Gymnasium id.*; {mend}"):
        check_env(env())


def test_a_report_prints_as_the_table(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "70")
    report = EnvReport(
        "Some-v0",
        Finding("Box[2] float32"),
        Finding("Discrete(2)"),
        Finding(False),
        unknown("RuntimeError: it broke"),
        {"native": none("nothing"), "seed": Finding(12.3)},
        none("nothing"),
        Finding("same_step"),
        {"sync": Finding(12345.0), "async": unknown("RuntimeError: it broke")},
        none("a long reason that does not fit into what is left of the line", "do it"),
    )
    expected = """Some-v0
observation                Box[2] float32
action                     Discrete(2)
start depends on the seed  no
steps are random           unknown: RuntimeError: it broke
siblings share a start by
  native                   no: nothing
  seed                     yes, 12 us a start
starts in mid-episode      no, see 'native'
own vectorised version     yes, resets itself: same_step
steps a second, 8 at once
  sync                     12,000
  async                    unknown, see 'steps are random'
training uses              no: a long reason that does not fit into
                           what is left of the line
mend                       do it"""
    assert str(report) == expected


def test_the_docstring_of_the_report_says_every_field():
    for field in EnvReport._fields:
        assert f"``{field}``" in EnvReport.__doc__


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
    assert printed["start_varies"] == {"value": False, "verdict": "found", "reason": "", "mend": ""}
    assert printed["tiers"]["native"]["verdict"] == "none"
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


@pytest.mark.parametrize("option", ["--algorithm ppo", "--algorithm=ppo", "--preset dr_grpo", "--algorithm.gamma 0.9"])
def test_check_env_command_refuses_an_algorithm(capsys, option):
    assert cli.main(["check-env", "CartPole-v1", *option.split()]) == 2
    error = capsys.readouterr().err
    assert "takes no algorithm and no preset" in error
    assert "mend: groupwise check-env CartPole-v1" in error


@pytest.mark.parametrize("option", ["--seed", "--env.num-envs", "--env.autoreset"])
def test_check_env_command_refuses_what_makes_no_difference(capsys, option):
    assert cli.main(["check-env", "CartPole-v1", option, "3"]) == 2
    assert f"takes no {option}; it takes --env.kwargs, " in capsys.readouterr().err


def test_check_env_command_helps_shortly(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert cli.main(["check-env", "--help"]) == 0
    printed = capsys.readouterr().out
    assert len(printed.splitlines()) < 80
    assert "--env.kwargs" in printed
    assert "learning-rate" not in printed


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
    assert "--plugin nobody_has_this: expected an existing Python file, or a module" in capsys.readouterr().err


def test_a_module_whose_own_imports_fail_says_so(tmp_path, monkeypatch):
    (tmp_path / "needs_another.py").write_text("import nobody_has_this")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="nobody_has_this"):
        cli.main(["config", "CartPole-v1", "--plugin", "needs_another"])
