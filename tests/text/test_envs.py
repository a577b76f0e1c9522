"""Text environments: shared starts, also of games that draw from the process's generators; turns, rewards and ends of rollouts."""

import functools
import itertools
import os
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from at_events import interrupt_after
from text_games import First, Guess, Repeat
from text_runs import logged, same_weights, save_model, train

import groupwise as gw
from groupwise.cli import main
from groupwise.config.run import TextRunCfg, TextTaskCfg
from groupwise.errors import EnvError
from groupwise.plugins import TEXT_ENVS
from groupwise.text.envs import TextEnvs, TextEpisode, check_text_starts
from groupwise.text.task import Start
from groupwise.text.tool_env import make_text_env


class ByRandom(Guess):
    """Draws by ``random``, which reset seeds, and again in each step."""

    def draw(self, seed):
        random.seed(seed)
        return random.randrange(10)

    def step(self, text):
        observation, *rest = super().step(text)
        return observation + str(random.randrange(10**6)), *rest


class Unseeded(ByRandom):
    """As users of TRL write: nothing seeds ``random``."""

    def draw(self, seed):
        return random.randrange(10)


class ByNumPy(ByRandom):
    def draw(self, seed):
        return int(np.random.randint(10))

    def step(self, text):
        observation, *rest = Guess.step(self, text)
        return observation + str(np.random.randint(10**6)), *rest


class SeedsBoth(ByRandom):
    """Draws by ``random`` alone, but would take NumPy's generator back at each reset."""

    def draw(self, seed):
        np.random.seed(seed)
        return super().draw(seed)


class Leaves(Guess):
    """The second episode of an instance has another secret."""

    episodes = 0

    def draw(self, seed):
        self.episodes += 1
        return (super().draw(seed) + self.episodes) % 10


class Entropy(Guess):
    """Draws what no seed repeats, when it is reset."""

    def draw(self, seed):
        return os.urandom(1)[0] % 10

    def step(self, text):
        observation, *rest = super().step(text)
        return f"{observation}{self.secret}", *rest


class Clock(Guess):
    def step(self, text):
        return f"{time.perf_counter_ns()}", *super().step(text)[1:]


STARTS = [Start(seed) for seed in (3, 4, 5)]


def by_samples(episode, start, prompt):
    rng, turns = np.random.default_rng(start.seed + 100), []
    while episode.ending is None:
        turns.append(episode.env.sample_action(rng))
        episode.step(turns[-1])
    return turns


def parted(make, kept, mode="seed"):
    """Episodes of groups whose members, stepped in turns, were not alike."""
    envs, apart = TextEnvs(make, mode, kept), 0
    for start in (Start(seed) for seed in range(20)):
        episodes, prompts = envs.open(start, 3)
        assert len(set(prompts)) == 1
        for turn in ("0", "1", "2"):
            answers = {(repr(e.step(turn)), e.ending) for e in episodes if e.ending is None}
            if len(answers) > 1:
                apart += 1
                break
    return apart


@pytest.mark.parametrize(
    ("make", "mode", "kept"),
    [
        (Guess, "seed", ()),
        (ByRandom, "seed", ("random",)),
        (Unseeded, "seed", ("random",)),
        (ByNumPy, "seed", ("numpy.random",)),
        (SeedsBoth, "seed", ("random", "numpy.random")),
        (Leaves, "fresh", ()),
        (Entropy, "snapshot", ()),
    ],
)
def test_the_check_finds_how_members_share_a_start(make, mode, kept):
    report = check_text_starts(make, "auto", STARTS, by_samples)
    assert (report.mode, report.kept, report.start_varies) == (mode, kept, True)
    assert report.turns > 3
    assert len(report.rejected) == ("seed", "fresh", "snapshot").index(mode)
    assert parted(make, kept, mode) == 0


@pytest.mark.parametrize("make", [ByRandom, Unseeded, ByNumPy])
def test_members_part_where_generators_of_the_process_are_not_kept(make):
    """Although they agree when one is played after the other."""
    assert parted(make, ()) > 15
    assert parted(make, ("random", "numpy.random")) == 0


def test_episodes_leave_the_generators_of_the_process_alone():
    before, legacy = random.getstate(), np.random.get_state(legacy=False)
    assert parted(ByRandom, ("random", "numpy.random")) == 0
    check_text_starts(ByNumPy, "auto", STARTS, by_samples)
    assert random.getstate() == before
    np.testing.assert_equal(np.random.get_state(legacy=False), legacy)


def test_what_no_mode_shares_is_refused_with_both_answers():
    with pytest.raises(
        EnvError, match=r"do not share a start(.|\n)*'snapshot': after turn 1, '\d', members have \('\d+'"
    ):
        check_text_starts(Clock, "auto", STARTS, by_samples)
    with pytest.raises(
        EnvError, match=r"start_mode='seed': after turn(.|\n)*likely reasons: .*fix: draw all from the seed"
    ):
        check_text_starts(Leaves, "seed", STARTS, by_samples)
    assert check_text_starts(Clock, "none", STARTS, by_samples).mode == "none"


class Returns(Guess):
    """Returns what it is told."""

    def __init__(self, reset=("0", {}), step=("0", 0.0, False, False, {})):
        self.made = {"reset": reset, "step": step}

    def _made(self, name):
        if isinstance(self.made[name], Exception):
            raise self.made[name]
        return self.made[name]

    def reset(self, *, seed=None, options=None):
        return self._made("reset")

    def step(self, text):
        return self._made("step")


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (
            {"reset": "0"},
            r"Returns.reset\(\) returned '0'; expected an observation and an info; fix: return observation, \{\}",
        ),
        ({"reset": (3, {})}, r"Returns.reset\(\): prompt = 3: expected a text or a list of messages"),
        ({"reset": OSError("no licence")}, r"Returns.reset\(\) raised OSError: no licence"),
        (
            {"step": ("0", 1.0, True, {})},
            r"Returns.step\(\) returned .*expected observation, reward, terminated, truncated",
        ),
        (
            {"step": (None, 1.0, True, False, {})},
            r"returned None, not text or messages; fix: str",
        ),
        ({"step": ([], 0.0, False, False, {})}, r"returned no message, and the episode goes on; fix: a text"),
        ({"step": ("0", None, True, False, {})}, r"returned None; expected a finite number; fix: a float"),
        ({"step": ("0", float("nan"), True, False, {})}, "returned nan; expected a finite number"),
        ({"step": ("0", "1", True, False, {})}, "returned '1'; expected a finite number"),
        ({"step": ("0", np.zeros(2), True, False, {})}, r"returned array\(\[0\., 0\.\]\); expected a finite number"),
        (
            {"step": ("0", 1.0, "False", False, {})},
            r"step\(\): terminated = 'False'; expected True or False; fix: bool",
        ),
        ({"step": ("0", 1.0, True, None, {})}, r"step\(\): truncated = None; expected True or False; fix: bool"),
        ({"step": KeyError("x")}, r"Returns.step\(\) raised KeyError: 'x'\n  the turn: '7'"),
    ],
)
def test_what_an_environment_returns_is_checked(made, message):
    episode = TextEpisode(Returns(**made))
    if "step" in made:
        assert episode.reset(Start(0)) == "0"
    with pytest.raises((EnvError, gw.errors.DataError), match=message):
        episode.step("7") if "step" in made else episode.reset(Start(0))


@pytest.mark.parametrize("success", ["no", 0.5, [True], np.array([True, False])])
def test_success_is_yes_or_no(success):
    episode = TextEpisode(Returns(step=("0", 0.0, True, False, {"success": success})))
    episode.reset(Start(0))
    with pytest.raises(EnvError, match=r"Returns.step\(\): info\['success'\] = .*; expected True or False; fix: bool"):
        episode.step("7")
    for said, expected in ((np.True_, True), (0, False), (1.0, True), (None, None)):
        episode = TextEpisode(Returns(step=("0", 0.0, True, False, {"success": said})))
        episode.reset(Start(0))
        episode.step("7")
        assert episode.success is expected


@pytest.mark.parametrize("counts", [3, [("a", 1)], {"tool_calls": "1"}])
def test_counts_are_numbers_by_name(counts):
    episode = TextEpisode(Returns(step=("0", 0.0, True, False, {"counts": counts})))
    episode.reset(Start(0))
    with pytest.raises(EnvError, match=r"Returns.step\(\): info\['counts'\] = .*; expected numbers by name; fix: "):
        episode.step("7")


@pytest.mark.parametrize("mode", ["seed", "snapshot"])
def test_no_more_environments_work_at_a_time_than_there_are_threads(mode):
    """Also where several rollouts begin and play at the same time."""
    working, most, counting = [], [], threading.Lock()

    class Busy(Guess):
        def work(self):
            with counting:
                working.append(self)
                most.append(len(working))
            time.sleep(0.02)
            working.pop()

        def reset(self, **settings):
            self.work()
            return super().reset(**settings)

        def __deepcopy__(self, memo):
            self.work()
            return Busy()

    envs = TextEnvs(Busy, mode, threads=1)
    with ThreadPoolExecutor(3) as pool:
        assert len([*pool.map(lambda seed: envs.open(Start(seed), 2), range(3))]) == 3
    assert max(most) == 1


class Fails(Guess):
    """Raises an error in each of the steps ``at``, counted over all instances."""

    def __init__(self, steps, at):
        super().__init__()
        self.steps, self.at = steps, at

    def step(self, text):
        if next(self.steps) in self.at:
            raise OSError("now and then")
        return super().step(text)


def test_starts_are_checked_again_where_errors_of_environments_are_allowed(model, tmp_path):
    settings = {"total_steps": 8, "sampling": ONE}
    for how in ("drop", "retry"):
        cfg = gw.GRPOCfg(group_size=2, collection={"on_env_error": how})
        now_and_then = functools.partial(Fails, itertools.count(), (0, 12, 25))
        assert train(task(now_and_then), model, tmp_path / how, cfg, **settings).metrics()
    with pytest.raises(EnvError, match=r"check of shared starts failed 5 times in a row, at last by: Fails\.step"):
        train(task(lambda: Fails(itertools.count(), range(10**6))), model, tmp_path / "always", cfg, **settings)
    with pytest.raises(EnvError, match=r"^Fails\.step\(\) raised OSError"):
        train(task(functools.partial(Fails, itertools.count(), (3,))), model, tmp_path / "raise", **settings)


@pytest.mark.parametrize("how", ["raise", "drop", "retry"])
def test_an_instance_that_cannot_be_made_is_an_error_of_the_environment(how):
    calls = itertools.count()

    def make():
        if next(calls) == 1:
            raise ConnectionError("no container")
        return Guess()

    envs = TextEnvs(make, "fresh", threads=1, on_error=how)
    if how == "raise":
        with pytest.raises(EnvError, match=r"making the environment raised ConnectionError: no container\nfix: "):
            envs.open(Start(0), 2)
    else:
        episodes, _ = envs.open(Start(0), 2)
        assert [episode.counts["env_errors"] for episode in episodes] == [0, 1]
    envs.close()


class Look(gw.Callback):
    """Keeps the members of each rollout."""

    def __init__(self):
        self.rollouts = []

    def on_rollout_end(self, trainer, rollout):
        self.rollouts.append((trainer.collector.members, rollout))


@pytest.fixture(scope="module", params=[False, True], ids=["texts", "chat"])
def either(request, tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("lm") / "model", chat=request.param, positions=128)


def task(make=Guess, **settings):
    return gw.TextTask(env=make, **{"max_turns": 5, "data_size": 20, "eval_size": 4} | settings)


SAMPLING = {"max_new_tokens": 2}
ONE = SAMPLING | {"stop": tuple("0123456789 ")}
"""A turn is one character, unless it is a special token."""


@pytest.mark.parametrize(("sampling", "warned"), [({"max_new_tokens": 1, "min_new_tokens": 1}, True), (ONE, False)])
def test_turns_that_are_all_cut_are_told(sampling, warned, model, tmp_path, caplog):
    train(task(), model, tmp_path / "run", total_steps=8, sampling=sampling)
    assert ("every first turn was cut at sampling.max_new_tokens=1, so no tool" in caplog.text) == warned


class Dice(gw.TextEnv):
    """Ends turns by strings of its own, and draws by ``random``, which nothing seeds."""

    stop = tuple("0123456789 ")

    def reset(self, *, seed=None, options=None):
        self.left = 3
        return "12", {}

    def step(self, text):
        self.left -= 1
        return str(random.randrange(10)), 0.0, not self.left, False, {}


def test_the_check_plays_turns_of_the_policy_as_training_does_and_warns_if_there_are_none(model, tmp_path, caplog):
    for limits, compared in (({"max_new_tokens": 2}, True), ({"max_new_tokens": 1, "min_new_tokens": 1}, False)):
        caplog.clear()
        sampling = {"temperature": 0.01} | limits  # members write the same
        run = train(task(Dice), model, tmp_path / str(compared), total_steps=40, sampling=sampling)
        assert run.metrics()[0]["rollout/starts_apart"] == 0
        assert ("check of shared starts compared no turn, as the policy ended none" in caplog.text) != compared


def test_rollouts_have_the_episodes_turns_rewards_and_ends(either, tmp_path):
    look = Look()
    run = train(
        task(lambda: Guess(turns=4)), either, tmp_path / "run", sampling=ONE | {"max_new_tokens": 3}, callbacks=[look],
        algorithm=gw.GRPOCfg(group_size=16, credit={"returns": "turn", "group_key": "group_step"}), total_steps=1000,
    )  # fmt: skip
    endings = set()
    for members, rollout in look.rollouts:
        for row, member in enumerate(members):
            endings.add(member.episode.ending)
            turns = [message["content"] for message in member.messages if message["role"] == "assistant"]
            replay = TextEpisode(Guess(turns=4))
            replay.reset(member.prompt.example.start)
            played = len(turns) - (member.episode.ending == "max_tokens")  # a cut turn is not played, the last one is
            assert turns[:played] == member.episode.turns
            for turn in turns[:played]:
                replay.step(turn)
            assert replay.observations == member.episode.observations
            assert (replay.rewards, replay.success) == (member.episode.rewards, member.episode.success)
            assert member.reward == pytest.approx(sum(replay.rewards))
            # the model wrote what has a loss, and each turn's reward is at its last token
            start, tokens = len(member.prompt.tokens) - 1, len(member.tokens)
            written = torch.tensor(member.turn) >= 0
            assert torch.equal(rollout["loss_mask"][row, start : start + tokens], written)
            assert not rollout["loss_mask"][row, start + tokens :].any()
            expected = [0.0] * tokens
            for turn, reward in enumerate(replay.rewards):
                expected[max(i for i, number in enumerate(member.turn) if number == turn)] = reward
            assert rollout["reward"][row, start : start + tokens].tolist() == pytest.approx(expected)
            last = start + tokens - 1
            assert rollout["terminated"][row, last] == (member.episode.ending == "terminated")
            assert rollout["terminated"][row, last] != rollout["truncated"][row, last]
        assert member.episode.env is None  # given back
    assert {"terminated", "truncated", "max_tokens"} <= endings
    for entry in run.metrics():
        assert entry["rollout/sampler_kl"] < 1e-8  # log-probabilities over all turns are those that were sampled
        assert entry["rollout/starts_apart"] == 0
        assert sum(entry[f"rollout/stop_{e}"] for e in ("terminated", "truncated", "max_turns", "max_tokens")) == 1
    assert {"eval/success_rate", "rollout/success_rate"} <= run.metrics()[-1].keys()
    assert run.metrics()[-1]["train/grad_norm"] > 0


def test_the_last_allowed_turn_is_played(model, tmp_path):
    look = Look()
    train(
        task(lambda: Guess(turns=9), max_turns=2), model, tmp_path / "run", total_steps=40, callbacks=[look],
        sampling=ONE,
    )  # fmt: skip
    members = [member for member in look.rollouts[0][0] if member.episode.ending != "max_tokens"]
    assert {member.episode.ending for member in members} == {"max_turns", "terminated"}
    for member in members:
        assert member.turns == len(member.episode.rewards) <= 2
        assert member.messages[-1]["role"] == "assistant"  # what it led to is not read


def test_members_have_starts_of_their_own_by_request(model, tmp_path):
    class Shown(Guess):
        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            return f"{seed % 1000}", {}

    look, settings = Look(), {"total_steps": 20, "sampling": SAMPLING}
    train(task(Shown, start_mode="none"), model, tmp_path / "own", callbacks=[look], **settings)
    train(task(Shown), model, tmp_path / "shared", callbacks=[look], **settings)
    (own, rollout), (shared, _) = look.rollouts[0], look.rollouts[-1]
    for members, count in ((own, 4), (shared, 1)):
        prompts = {number: set() for number in range(4)}
        for member in members:
            prompts[member.group].add(member.prompt.example.prompt)
        assert {len(found) for found in prompts.values()} == {count}
    for row, member in enumerate(own):
        assert rollout["obs"][row, : len(member.prompt.tokens)].tolist() == list(member.prompt.tokens)


def test_members_that_part_in_training_are_counted_or_end_it(model, tmp_path):
    class Later(Guess):
        """Alike in the check, apart from the third instance on, in what it answers or in how it begins."""

        made = itertools.count()
        begins = False

        def __init__(self):
            super().__init__()
            self.number = next(self.made)

        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            return str(self.number % 10 if self.begins and self.number > 9 else 0), {}

        def step(self, text):
            observation, *rest = super().step(text)
            return observation + str(self.number % 10 if self.number > 9 else 0), *rest

    groups = gw.GRPOCfg(group_size=16)
    run = train(task(Later), model, tmp_path / "run", algorithm=groups, total_steps=200, sampling=ONE)
    assert max(entry["rollout/starts_apart"] for entry in run.metrics()) >= 1
    Later.made, Later.begins = itertools.count(), True
    with pytest.raises(
        EnvError, match=r"members begin with '.' and '.', although they were alike before training; fix: "
    ):
        train(task(Later), model, tmp_path / "other", total_steps=40, sampling=SAMPLING)


def test_an_interrupted_run_goes_on_as_if_nothing_happened(model, tmp_path):
    settings = {"total_steps": 200, "sampling": ONE}
    whole = train(task(ByRandom), model, tmp_path / "whole", **settings)
    with pytest.raises(KeyboardInterrupt):
        train(task(ByRandom), model, tmp_path / "run", callbacks=[interrupt_after(2)], **settings)
    with pytest.raises(gw.errors.ConfigError, match="given env in Python"):
        gw.resume(tmp_path / "run")
    resumed = gw.resume(tmp_path / "run", env=ByRandom)
    assert logged(resumed) == logged(whole)
    assert same_weights(resumed, whole)
    scores = gw.evaluate(resumed, 4, completions_per_prompt=8)
    assert scores.successes is not None
    assert f"success_rate={scores.success_rate:.6g}" in scores.line()
    assert gw.Run.load(tmp_path / "run").summary == resumed.summary  # to write texts, it needs no environment


@pytest.mark.parametrize("mode", ["seed", "fresh", "snapshot", "none"])
def test_every_instance_is_closed_once_also_of_episodes_that_go_on(mode):
    closed, made = [], []

    class Closes(Guess):
        def close(self):
            closed.append(id(self))

    def make():
        made.append(Closes())
        return made[-1]

    envs = TextEnvs(make, mode)
    ended, _ = envs.open(Start(1), 3)
    going_on, _ = envs.open(Start(2), 2)
    instances = {id(episode.env) for episode in (*ended, *going_on)}
    for episode in ended:
        envs.release(episode)
        envs.release(episode)
    envs.close()
    assert sorted(closed) == sorted(instances)
    assert len(made) == (2 if mode == "snapshot" else 5)


def test_no_thread_trains_while_an_environment_draws_from_the_process(model, tmp_path):
    served = {"name": "server", "max_staleness": 1}
    cfg = gw.GRPOCfg(group_size=4, objective={"old_log_prob": "sampled"})
    message = "draws from the process's random, while another thread trains; fix: "
    with pytest.raises(gw.errors.ConfigError, match=message):
        train(task(ByRandom), model, tmp_path / "run", cfg, generation=served, sampling=ONE)


def test_rows_of_data_are_options_and_rewards_add_up(model, tmp_path):
    class Row(Guess):
        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            return str(options["number"]), {}

    def one(completions, number, **columns):
        assert all(isinstance(n, int) for n in number)
        return [1.0] * len(completions)

    look, rows = Look(), [{"number": n} for n in range(30)]
    train(
        task(Row, data=rows, reward=one, data_size=1000, eval_size=100), model, tmp_path / "run", total_steps=20,
        sampling=SAMPLING, callbacks=[look],
    )  # fmt: skip
    members, rollout = look.rollouts[0]
    for row, member in enumerate(members):
        assert member.prompt.example.prompt == str(member.prompt.example.columns["number"])
        assert member.reward == pytest.approx(1 + sum(member.episode.rewards))
        assert rollout["reward"][row].sum() == pytest.approx(member.reward)


class Known(Guess):
    """Its state is the span in which the secret is known to be."""

    def reset(self, *, seed=None, options=None):
        self.low, self.high = 0, 9
        return super().reset(seed=seed)

    def step(self, text):
        made = super().step(text)
        if text.isdigit():
            low, high = (int(text) + 1, 9) if int(text) < self.secret else (0, int(text) - 1)
            self.low, self.high = max(self.low, low), min(self.high, high)
        return made

    def state_key(self):
        return f"{self.low}-{self.high}"


@pytest.mark.parametrize("game", [Known, Guess])
def test_turns_are_compared_in_the_state_that_the_environment_names_or_shows(game, model, tmp_path):
    """Before each turn, that is; where it names none, states are equal if what is observed is."""
    look, cfg = Look(), gw.GRPOCfg(group_size=8, learning_rate=1e-3)
    run = train(
        task(lambda: game(turns=4)), model, tmp_path / "run", cfg, preset="gigpo", total_steps=200, sampling=ONE, callbacks=[look],
    )  # fmt: skip
    assert run.metrics()[-1]["train/grad_norm"] > 0
    assert run.cfg.algorithm.credit.baseline.name == "gigpo"
    for members, rollout in look.rollouts:
        names, numbers = [], []
        for row, member in enumerate(members):
            turns = [message["content"] for message in member.messages if message["role"] == "assistant"]
            replay = TextEpisode(game(turns=4))
            shown, keys = [replay.reset(member.prompt.example.start)], [replay.env.state_key()]
            for turn in turns[:-1]:
                shown.append(replay.step(turn))
                keys.append(replay.env.state_key())
            written = rollout["turn_id"][row]
            assert (rollout["anchor"][row][written < 0] == -1).all()
            for number, state in enumerate(keys if game is Known else shown):
                [found] = set(rollout["anchor"][row][written == number].tolist())
                names.append(str(state))  # what is observed may be messages
                numbers.append(found)
        assert sorted(set(numbers)) == list(range(len(set(names))))
        assert len(set(zip(names, numbers, strict=True))) == len(set(names))  # numbers are equal where names are
        assert len(set(names)) > 2


@pytest.mark.parametrize("key", [3, b"a", ("a",)])
def test_keys_of_states_are_texts(key):
    game = Guess()
    game.state_key = lambda: key
    with pytest.raises(EnvError, match=r"Guess.state_key\(\) returned .*; expected a text or None; fix: str"):
        TextEpisode(game).reset(Start(0))


def test_members_in_the_same_state_must_have_the_same_key():
    class Own(Guess):
        def state_key(self):
            return str(id(self))

    with pytest.raises(EnvError, match="do not share a start"):
        check_text_starts(Own, "auto", STARTS, by_samples)


PLUGIN = """
import groupwise as gw
from text_games import Guess

gw.register_text_env("plugin/Guess-v0")(Guess)
gw.register_text_env("plugin/Silent-v0")(type("Silent", (Guess,), {"sample_action": gw.TextEnv.sample_action}))
"""


@pytest.fixture
def plugin(tmp_path):
    file = tmp_path / "my_game.py"
    file.write_text(PLUGIN, encoding="utf-8")
    yield ["--plugin", str(file)]
    for name in [name for name in TEXT_ENVS if name.startswith("plugin/")]:
        del TEXT_ENVS[name]


def test_the_command_line_checks_by_name(plugin, capsys):
    assert main(["check-env", "plugin/Guess-v0", *plugin, "--task.max-turns", "4"]) == 0
    assert "plugin/Guess-v0\nGroup starts: shared (seed), verified over " in capsys.readouterr().out
    assert main(["check-env", "plugin/Silent-v0"]) == 1
    assert "Silent has no sample_action(rng), whose turns are played; fix: " in capsys.readouterr().err


def test_the_command_line_trains_and_evaluates_by_name(model, tmp_path, plugin, capsys):
    path = str(tmp_path / "run")
    words = [
        "plugin/Guess-v0",
        "--model",
        str(model),
        "--task.env-kwargs",
        '{"turns": 2}',
        "--task.max-turns",
        "3",
        "--run-dir",
        path,
    ]
    assert main(["train", *words, "--total-iterations", "1", "--sampling.max-new-tokens", "2", *plugin]) == 0
    out = capsys.readouterr()
    assert "1,000 episodes of at most 3 turns" in out.out + out.err
    assert "Group starts: shared (seed), verified over " in out.out + out.err
    assert main(["eval", path, "--episodes", "3"]) == 0
    assert "prompts=3" in capsys.readouterr().out


def test_an_environment_is_found_by_its_name_also_in_a_file(model, tmp_path):
    name = "test/Guess-v0"
    gw.register_text_env(name)(Guess)
    try:
        cfg = TextRunCfg.model_validate(
            {
                "task": {"env": name, "env_kwargs": {"turns": 2}, "max_turns": 5, "data_size": 20, "eval_size": 4},
                "model": {"path": str(model)}, "total_steps": 40, "run_dir": str(tmp_path / "run"),
                "sampling": SAMPLING, "algorithm": {"group_size": 4}, "num_prompts": 2, "logging": {"progress": "none"},
            }
        )  # fmt: skip
        run = gw.train(cfg)
        assert run.summary["task"] == "Guess-v0"
        assert max(entry["rollout/turns_max"] for entry in run.metrics()) <= 2
        wrong = cfg.model_copy(update={"task": TextTaskCfg(env="test/Gues-v0"), "run_dir": None})
        with pytest.raises(gw.errors.ConfigError, match="did you mean 'test/Guess-v0'"):
            gw.train(wrong)
    finally:
        del TEXT_ENVS[name]


def test_a_registered_function_makes_the_environment():
    @gw.register_text_env("test/Function-v0")
    def make(turns: int):
        return Guess(turns)

    try:
        cfg = TextTaskCfg(env="test/Function-v0", env_kwargs={"turns": 2})
        assert make_text_env(cfg)().turns == 2
        with pytest.raises(
            gw.errors.ConfigError, match=r"missing a required argument: 'turns'; fix: settings that fit"
        ):
            make_text_env(TextTaskCfg(env="test/Function-v0"))()
    finally:
        del TEXT_ENVS["test/Function-v0"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"env": "x", "eval_data": "rows.jsonl"}, "eval_data has no effect without data: held-out episodes have seeds"),
        ({"env": "x", "tool": "calculator"}, "env='x' and tool='calculator' both answer the model"),
        ({"env_kwargs": {"a": 1}}, "has no effect without an environment; fix: env="),
        ({"start_mode": "seed"}, "start_mode='seed' has no effect without an environment"),
        ({"max_turns": 3}, "max_turns=3 has no effect without a tool"),
        ({"env": "x", "data": "reasoning-gym:sum"}, "takes no prompts of reasoning-gym"),
        ({"env": "<given in Python>", "env_kwargs": {"a": 1}}, r"env_kwargs=\{'a': 1\} are for a registered env"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        TextTaskCfg(**settings)


def test_an_instance_is_no_way_to_make_several():
    with pytest.raises(gw.errors.ConfigError, match=r"each member of a group plays in its own; fix: env=lambda: Guess"):
        gw.TextTask(env=Guess())


@pytest.mark.learn
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("game", [Repeat, First])
def test_what_is_observed_is_read_and_what_an_early_turn_earns_late_is_learned(game, seed, tmp_path):
    """Both reach 1.0 within 60 iterations; chance is 0.06."""
    model = save_model(tmp_path / "model", hidden_size=64, intermediate_size=128)
    cfg = gw.GRPOCfg(group_size=16, learning_rate=2e-3, ent_coef=0.01)
    run = train(
        gw.TextTask(env=game, max_turns=3, data_size=200), model, tmp_path / "run", cfg, seed=seed, total_steps=None,
        total_iterations=60, sampling=ONE, evaluation={"interval": 10**9},
    )  # fmt: skip
    assert run.summary["success_rate"] > 0.9


@pytest.mark.parametrize("reward", [True, np.bool_(True), np.float32(1), np.array(1), torch.tensor([1])])
def test_rewards_are_numbers_of_any_library(reward):
    episode = TextEpisode(Returns(step=("0", reward, True, False, {})))
    episode.reset(Start(0))
    episode.step("7")
    assert episode.rewards == [1.0]
    assert type(episode.rewards[0]) is float
