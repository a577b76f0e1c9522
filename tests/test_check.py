import subprocess
import sys

import gymnasium
import pytest
from checked_envs import Alike, BreaksInReset, BreaksInStep, Calm, CannotBeMade, Cheats, Counts, Sound, Speaks

from groupwise.check import check_env
from groupwise.config.env import EnvCfg
from groupwise.envs import check
from groupwise.envs.findings import Finding, none, table, unknown
from groupwise.envs.rows import RowsGroupEnv
from groupwise.envs.torch_control import TorchCartPole
from groupwise.errors import EnvError, UnknownNameError


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


def test_a_task_in_torch_is_tried_out_where_it_is_asked_for():
    report = check_env(EnvCfg(id="Pendulum-v1", vectorization="torch"))
    assert report.env_id == "TorchPendulum"
    assert report.training.value[:2] == ("native", "torch")
    assert list(report.steps_per_second) == ["torch"]
    assert report.steps_per_second["torch"].value > 100
    assert "torch" not in check_env("Pendulum-v1").steps_per_second


def test_a_cheat_is_refused_with_the_reason_and_the_fix():
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
    assert rows["fix"].startswith("let the environment draw all its randomness from self.np_random")
    assert (rows["  replay"], rows["starts in mid-episode"]) == ("no, see 'seed'", "no: groups cannot start at all")
    assert rows["start depends on the seed"].startswith("unknown: ")
    text = " ".join(str(report).split())
    for reason in ("differ at the start", "captured again", "it registers no vectorised version", "self.np_random"):
        assert text.count(reason) == 1


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
    assert speaks.training.fix == speaks.observation.fix
    assert "ImgObsWrapper" in speaks.training.fix
    assert speaks.training.reason == speaks.tiers["seed"].reason == "its observations are not supported"
    assert speaks.action.value == "Discrete(2)"
    assert counts.action.value is None
    assert counts.training == none("its actions are not supported", counts.action.fix)
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
    ("env", "fix"),
    [
        (lambda: Sound(), r"fix: check_env\(lambda: Sound\(\.\.\.\)\)$"),
        (lambda: gymnasium.make("CartPole-v1"), r"fix: check_env\(lambda: gymnasium.make\('CartPole-v1', \.\.\.\)\)$"),
    ],
)
def test_an_environment_that_is_made_already_is_refused_with_the_fix(env, fix):
    with pytest.raises(EnvError, match=rf"that is made already, expected a Gymnasium id.*; {fix}"):
        check_env(env())


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


class Endless(Calm):
    """Nobody knows that it ends."""

    def __init__(self):
        pass


def test_without_a_known_step_limit_training_is_refused_with_the_fix():
    report = check_env(Endless)
    assert report.max_episode_steps == report.training
    assert report.training.verdict == "none"
    assert report.training.reason == "no step limit is known, so an attempt might never end"
    assert report.training.fix.startswith("env.max_episode_steps")
    assert report.tiers["seed"].value > 0
    rows = dict(table(report))
    assert rows["step limit"] == "no: no step limit is known, so an attempt might never end"
    assert rows["training uses"] == "no, see 'step limit'"
    assert rows["fix"] == report.training.fix


def test_the_step_limit_is_found_where_it_is_said():
    assert check.known_step_limit(EnvCfg(), lambda: gymnasium.wrappers.TimeLimit(Endless(), 7)) == 7
    assert check.known_step_limit(EnvCfg(id="Acrobot-v1"), None) == 500
    assert check.known_step_limit(EnvCfg(id="Acrobot-v1", max_episode_steps=8), None) == 8
    limited = check_env(EnvCfg(id="CliffWalking-v1", max_episode_steps=9))
    assert (limited.max_episode_steps, limited.training.verdict) == (Finding(9), "found")


class EndlessRows(TorchCartPole):
    def __init__(self, num_envs):
        super().__init__(num_envs=num_envs)
        self.max_episode_steps = None


def test_rows_without_a_known_step_limit_are_refused_too():
    report = check_env(EndlessRows)
    assert report.training == report.max_episode_steps
    assert "no step limit is known" in report.training.reason
    assert check_env(TorchCartPole).max_episode_steps == Finding(500)


SCRIPT = """
import sys
import groupwise as gw
from groupwise.envs import check

check._BUDGET_S = 0.01

def tell(word):
    with open(sys.argv[1], "a") as file:
        print(word, __name__, file=file)

def main():
    tell("before")
    found = gw.check_env("FrozenLake-v1")
    tell("after")
    print(found.steps_per_second["async"], found.training.verdict)
"""


def test_a_script_without_a_guard_runs_once_and_is_told_so(tmp_path):
    (tmp_path / "script.py").write_text(f"{SCRIPT}\nmain()\n")
    command = [sys.executable, "script.py", "told"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=True)
    told = (tmp_path / "told").read_text().splitlines()
    assert told == ["before __main__", "before __mp_main__", "after __main__"]  # one child came as far as to the check
    assert "verdict='unknown'" in done.stdout
    assert "a new process, which imports this script, ended with exit code 1" in done.stdout
    assert "if __name__ == '__main__':" in done.stdout
    assert done.stdout.endswith("found\n")
    assert "finished its bootstrapping phase" in " ".join(done.stderr.split())
