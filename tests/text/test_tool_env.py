"""Functions and TRL's classes as environments: schemas, calls, errors, limits, rewards; environments at once, slow or broken ones."""

import asyncio
import copy
import functools
import json
import os
import random
import threading
import time
from functools import partial

import numpy as np
import pytest
from forked import run_script
from pydantic import TypeAdapter
from text_games import Guess
from text_runs import logged, same_weights, save_model, train
from vllm_double import VLLMDouble

import groupwise as gw
from groupwise.config.run import TextTaskCfg
from groupwise.errors import ConfigError, DataError, EnvError, RewardError
from groupwise.plugins import TEXT_ENVS
from groupwise.text import rewards, tool_env, tools
from groupwise.text.calls import Call
from groupwise.text.collector import Dialogue, Transcript, verified_envs, write
from groupwise.text.envs import TextEnvs, TextEpisode, TextStartReport, check_text_env, check_text_starts, play_samples
from groupwise.text.games import textarena
from groupwise.text.generation import Completion
from groupwise.text.load import load_causal_lm
from groupwise.text.task import EncodedPrompt, PromptEncoder, Start
from groupwise.text.tool_env import ToolEnv, Tools, bound_tool, env_of, make_text_env

WORDS = ("crane", "pearl", "mango", "olive")


class Wordle:
    """As TRL's documentation of ``environment_factory`` has it: it draws from the process's generator, without a seed."""

    def reset(self, **row):
        self._word, self._left, self.done, self.reward, self.row = random.choice(WORDS), 3, False, 0.0, row
        return "Guess a word of five letters."

    def guess(self, word: str) -> str:
        """Make a guess.

        Args:
            word: Five letters.
        """
        if self.done:
            raise ValueError("Game over.")
        self._left -= 1
        self.reward = float(word == self._word)
        self.done = not self._left or word == self._word
        return "".join(
            "G" if a == b else "Y" if a in self._word else "X" for a, b in zip(word, self._word, strict=False)
        )

    def _hidden(self):
        raise AssertionError

    def get_reward(self):
        return self.reward


class Echo:
    """As TRL's example: its reward is read by a function, and its prompt is in the data."""

    def reset(self, **row):
        self.reward = 0.0

    def echo(self, message: str) -> str:
        """Echo the message.

        Args:
            message: The message.
        """
        self.reward = len(message) / 10
        return message


def add(a: int, b: int = 1) -> int:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


async def later(a: float) -> dict:
    """Half of a number.

    Args:
        a: The number.
    """
    await asyncio.sleep(0)
    return {"half": a / 2}


def call(name, **arguments):
    return str(Call(name, arguments))


def played(env, *turns, row=None):
    episode = TextEpisode(env)
    episode.reset(Start(0, row))
    for turn in turns:
        episode.step(turn)
    return episode


# What the model is shown, and what its calls do


def test_public_methods_are_tools():
    episode = played(ToolEnv(Wordle()))
    [schema] = episode.tools
    assert schema["function"]["name"] == "guess"
    assert schema["function"]["parameters"]["properties"]["word"] == {"type": "string", "description": "Five letters."}
    assert episode.prompt == "Guess a word of five letters."


def test_an_episode_ends_by_a_turn_without_a_call_and_has_its_reward_then():
    env = ToolEnv(Wordle())
    episode = TextEpisode(env)
    episode.reset(Start(0))
    word = env.made._word
    episode.step(call("guess", word="crust"))
    assert episode.observations[-1] == "".join(
        "G" if a == b else "Y" if a in word else "X" for a, b in zip("crust", word, strict=True)
    )
    episode.step(call("guess", word=word))
    assert (episode.observations[-1], episode.ending, episode.total) == ("GGGGG", None, 0.0)
    episode.step(call("guess", word="crust"))
    assert episode.observations[-1] == "error: ValueError: Game over."
    episode.step("I won.")
    assert (episode.ending, episode.rewards, episode.final_reward, episode.total) == ("no_call", [0.0] * 4, 1.0, 1.0)
    assert episode.counts == {"tool_calls": 3, "tool_errors": 1, "parse_errors": 0}


def test_the_observation_of_reset_is_added_to_the_prompt_of_the_row():
    assert played(ToolEnv(Wordle()), row={"prompt": "Hi. "}).prompt == "Hi. Guess a word of five letters."
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "U "}]
    episode = played(ToolEnv(Wordle()), row={"prompt": messages, "level": 3})
    assert episode.prompt[-1] == {"role": "user", "content": "U Guess a word of five letters."}
    assert episode.env.made.row == {"prompt": messages, "level": 3}
    assert messages[-1]["content"] == "U "
    assert played(ToolEnv(Echo()), row={"prompt": "P"}).prompt == "P"
    with pytest.raises(EnvError, match=r"no prompt: the data have no column 'prompt', reset\(\) returned None"):
        played(ToolEnv(Echo()))


@pytest.mark.parametrize("block", [{"type": "image", "image": "a.png"}, {"type": "text", "text": None}, 3])
def test_blocks_of_reset_that_are_no_text_are_refused(block):
    made, text = Echo(), {"type": "text", "text": "Look."}
    made.reset = lambda **row: [text, text]
    assert played(ToolEnv(made), row={"prompt": "P "}).prompt == "P Look.Look."
    made.reset = lambda **row: [{"role": "user", "content": "Hi."}]
    assert played(ToolEnv(made)).prompt == ({"role": "user", "content": "Hi."},)
    made.reset = lambda **row: [text, block]
    with pytest.raises(
        EnvError, match=r"reset\(\) returned \[\{'type': 'text'.*expected a text, blocks of text or None"
    ):
        played(ToolEnv(made))


def test_functions_are_tools_sync_or_async_and_several_calls_keep_their_order():
    env = ToolEnv(tools=[add, later])
    turn = call("later", a=3) + call("add", a=1, b=2) + call("add", a="4") + call("later", a=1)
    episode = TextEpisode(env)
    episode.reset(Start(0, {"prompt": "?"}))
    messages = episode.step(f"Let me see.{turn}")
    assert [(m["role"], m["name"], m["content"]) for m in messages] == [
        ("tool", "later", '{"half": 1.5}'), ("tool", "add", "3"), ("tool", "add", "5"), ("tool", "later", '{"half": 0.5}')
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("turn", "told"),
    [
        (call("sub", a=1), "error: there is no tool 'sub'; there are add"),
        (call("add"), "error: wrong arguments of add: a: Missing required argument"),
        (call("add", a="x"), "error: wrong arguments of add: a: Input should be a valid integer"),
        (call("add", a=1, c=2), "error: wrong arguments of add: c: Unexpected keyword argument"),
        ("<tool_call>{a}</tool_call>", "error: the call is no JSON"),
        (call("__class__"), "error: there is no tool"),
        (call("reset"), "error: there is no tool"),
    ],
)
def test_calls_that_fit_no_tool_are_told_and_end_the_episode_after_some_in_a_row(turn, told):
    episode = played(ToolEnv(tools=[add], max_parse_errors=2), turn, call("add", a=1), turn, row={"prompt": "?"})
    assert told in episode.observations[0]
    assert episode.ending is None
    episode.step(turn)
    assert (episode.ending, episode.counts["parse_errors"]) == ("parse_errors", 3)
    assert told in episode.observations[-1]


def missing(a):
    raise KeyError("no such row")


@pytest.mark.parametrize(
    ("fails", "told"),
    [(missing, "KeyError: 'no such row'"), (TypeAdapter(list).validate_python, "ValidationError: 1 ")],
)
@pytest.mark.parametrize("is_async", [False, True])
def test_errors_of_tools_are_told_or_raised(fails, told, is_async):
    def broken(a: int) -> str:
        """Break.

        Args:
            a: Any.
        """
        return fails(a)

    @functools.wraps(broken)
    async def broken_later(a):
        return fails(a)

    tool = broken_later if is_async else broken
    episode = played(ToolEnv(tools=[tool]), call("broken", a=1), row={"prompt": "?"})
    assert episode.observations[0].startswith(f"error: {told}")
    assert episode.counts == {"tool_calls": 1, "tool_errors": 1, "parse_errors": 0}
    with pytest.raises(EnvError, match=f"(?s)tool 'broken' raised {told}.*; fix: the tool, or on_tool_error='tell'"):
        played(ToolEnv(tools=[tool], on_tool_error="raise"), call("broken", a=1), row={"prompt": "?"})


def test_calls_are_limited():
    turn = call("add", a=1) * 3
    episode = played(ToolEnv(tools=[add], max_tool_calls=4), turn, turn, row={"prompt": "?"})
    assert (episode.ending, episode.counts["tool_calls"], episode.observations) == (
        "max_tool_calls",
        4,
        ["2\n2\n2", "2"],
    )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            partial(ToolEnv, tools=[lambda x: x]),
            r"the tool <lambda> cannot be described to a model: .*docstring!; fix: a type hint",
        ),
        (partial(ToolEnv, object()), r"object has no method reset; fix: a gw.TextEnv, or reset\(\*\*row\)"),
    ],
)
def test_what_cannot_be_a_tool_is_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


@pytest.mark.parametrize(
    ("setting", "value"), [("max_tool_calls", 1), ("max_parse_errors", 1), ("on_tool_error", "raise")]
)
def test_a_text_env_reads_no_settings_of_calls(setting, value):
    cfg = TextTaskCfg(env="<given in Python>", **{setting: value})
    with pytest.raises(ConfigError, match=f"{setting}={value!r} is not read by Guess, a TextEnv; fix: leave it out"):
        make_text_env(cfg, Guess)()
    assert make_text_env(cfg, Wordle)().tools


def test_a_copy_of_an_episode_goes_on_by_itself():
    first = played(ToolEnv(Wordle(), max_tool_calls=2), call("guess", word="zzzzz"))
    second = copy.deepcopy(first)
    second.env.made._word = "zzzzz"
    second.step(call("guess", word="zzzzz"))
    assert (second.observations[-1], first.env.made.reward, second.env.made.reward) == (
        "GGGGG",
        first.env.made.reward,
        1.0,
    )
    second.step(call("guess", word="zzzzz"))
    assert second.ending == "max_tool_calls"  # calls before the copy count
    assert first.ending is None


@pytest.mark.parametrize("large", [True, False])
def test_results_that_have_no_text_are_errors_of_the_tool(large):
    class Unwritable:
        def __repr__(self):
            raise ValueError("no text")

    def give(a: int) -> int:
        """Give.

        Args:
            a: Any.
        """
        return 10**5000 if large else Unwritable()

    episode = played(ToolEnv(tools=[give]), call("give", a=1), row={"prompt": "?"})
    assert episode.observations[0].startswith("error: ValueError: ")
    assert episode.counts == {"tool_calls": 1, "tool_errors": 1, "parse_errors": 0}


def test_registered_functions_are_tools_by_name(monkeypatch):
    monkeypatch.setattr(tools, "TOOLS", {})
    monkeypatch.setattr(tool_env, "TOOLS", tools.TOOLS)
    gw.register_tool("plus")(add)
    env = make_text_env(TextTaskCfg(data="x.jsonl", tools=("plus",)))()
    assert played(env, call("add", a=3, b=4), row={"prompt": "?"}).observations == ["7"]


def test_an_async_tool_that_exits_is_an_error_of_the_environment():
    async def leave(a: int) -> int:
        """Leave.

        Args:
            a: Any.
        """
        raise SystemExit(3)

    episode = TextEpisode(ToolEnv(tools=[leave, later]), seconds=5.0)
    episode.reset(Start(0, {"prompt": "?"}))
    for _ in range(2):
        with pytest.raises(EnvError, match=r"raised SystemExit: 3"):
            episode.step(call("leave", a=1))
    episode.step(call("later", a=1))  # others go on
    assert episode.observations == ['{"half": 0.5}']


def test_all_async_tools_run_in_one_loop(monkeypatch):
    monkeypatch.setattr(threading.Thread, "start", slowly(threading.Thread.start))
    rewards._loop.cache_clear()
    found, together = [], threading.Barrier(4)

    def look():
        together.wait()
        found.append(rewards.awaited(where()))

    async def where():
        return asyncio.get_running_loop()

    threads = [threading.Thread(target=look) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(loop) for loop in found}) == 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="nothing is forked here")
def test_a_forked_process_has_a_loop_of_its_own():
    run_script(FORKED, lenient=True)


FORKED = """
import os, signal
from groupwise.text.rewards import awaited

async def two():
    return 2

assert awaited(two()) == 2
if child := os.fork():
    assert os.waitpid(child, 0)[1] == 0
else:
    signal.alarm(20)
    os._exit(awaited(two()) != 2)
"""


def slowly(function):
    def start(self):
        time.sleep(0.05)
        function(self)

    return start


def test_two_tools_of_one_name_are_refused():
    class Adds(Echo):
        add = Echo.echo

    with pytest.raises(ConfigError, match=r"two tools are called 'add'; fix: other names"):
        ToolEnv(tools=[add, add])
    Adds.add.__name__ = "add"
    try:
        with pytest.raises(ConfigError, match=r"two tools are called 'add'; fix: other names"):
            ToolEnv(Adds(), [add])
    finally:
        Echo.echo.__name__ = "echo"


def test_public_games_take_no_tools(monkeypatch):
    class Game(Guess):
        def __init__(self, game):
            super().__init__()

    monkeypatch.setattr(textarena, "TextArena", Game)
    with pytest.raises(ConfigError, match=r"Game is a TextEnv, which has tools of its own; fix: leave tools out"):
        make_text_env(TextTaskCfg(env="textarena:2048-v0", tools=("<given in Python>",)), None, [add])()


# Shared starts


def test_a_class_without_tools_is_checked_by_turns_without_calls():
    class Asks:
        def reset(self, **row):
            return "?"

        def get_reward(self):
            return 1.0

    report = check_text_env(make_text_env(TextTaskCfg(env="<given in Python>"), Asks))
    assert (report.mode, report.turns) == ("seed", 3)


def test_blocks_of_text_are_one_text_before_what_reset_returns():
    prompt = [{"role": "user", "content": [{"type": "text", "text": "Play"}, {"type": "text", "text": " a game."}]}]
    env = ToolEnv(Wordle())
    observation, _ = env.reset(seed=0, options={"prompt": prompt, "word": "crane"})
    assert observation == ({"role": "user", "content": "Play a game.Guess a word of five letters."},)


def test_classes_without_a_reward_add_none_whatever_names_them():
    def unsure(completions, **columns):
        return [None] * len(completions)

    rows = [{"prompt": "?", "environment": "a"}]
    gw.register_text_env("test/Echo-v0")(Echo)
    try:
        for env, data in ((Echo, "rows.jsonl"), ({"a": Echo}, rows), ("test/Echo-v0", "rows.jsonl")):
            assert gw.TextTask(data, env=env, reward=unsure).rewards().names == ("unsure",)
        assert gw.TextTask(rows, env={"a": Echo, "b": Wordle}, reward=unsure).rewards().names == (
            "environment",
            "unsure",
        )
    finally:
        del TEXT_ENVS["test/Echo-v0"]


def test_what_an_episode_does_to_its_row_is_its_own():
    class Takes:
        def reset(self, **row):
            self.items = row["items"]

        def take(self) -> str:
            """Take one."""
            return self.items.pop()

    row = {"items": ["a", "b"], "prompt": "?"}
    for _ in range(2):
        assert played(ToolEnv(Takes()), call("take"), row=row).observations == ["b"]
    assert row["items"] == ["a", "b"]


def test_the_check_has_the_time_limit_of_a_call(model, tmp_path):
    class Hangs(Guess):
        def reset(self, *, seed=None, options=None):
            time.sleep(60)

    task = gw.TextTask(env=Hangs, data_size=4, env_timeout=0.2)
    began = time.monotonic()
    with pytest.raises(EnvError, match=r"Hangs.reset\(\) took longer than env_timeout=0.2 seconds"):
        train(task, model, tmp_path / "run", total_steps=None, total_iterations=1)
    assert time.monotonic() - began < 30


def test_members_of_an_unchanged_class_that_draws_without_a_seed_share_a_start():
    make = make_text_env(TextTaskCfg(env="<given in Python>"), Wordle)
    report = check_text_env(make)
    assert (report.mode, report.kept, report.start_varies) == ("seed", ("random",), True)
    for kept, words in ((("random",), 1), ((), 2)):
        envs = TextEnvs(make, "seed", kept)
        found = [{e.env.made._word for e in envs.open(Start(seed), 8)[0]} for seed in range(10)]
        assert max(map(len, found)) >= words
        assert (max(map(len, found)) == 1) == bool(kept)
        envs.close()


def test_calls_are_sampled_by_the_schema():
    def many(a: int, b: float, c: bool, d: list[int], e: str, f: dict, g: int | None = None) -> str:
        """Many.

        Args:
            a: A.
            b: B.
            c: C.
            d: D.
            e: (choices: ["x", "y"]) E.
            f: F.
            g: G.
        """
        return json.dumps([a, b, c, d, e])

    env = ToolEnv(tools=[many, add])
    env.reset(seed=0, options={"prompt": "?"})
    rng = np.random.default_rng(0)
    for _ in range(40):
        observation, *_, info = env.step(env.sample_action(rng))
        assert info["counts"]["parse_errors"] == 0, observation


def test_rows_choose_their_environment():
    rows = [{"environment": "wordle", "level": 2}, {"environment": "guess", "level": 3}]
    task = gw.TextTask(rows, env={"wordle": Wordle, "guess": Guess})
    wordle, guess = (example.start for example in task.load()[0])
    envs = TextEnvs(make_text_env(task.cfg, task.given["env"]), "seed")
    [first], _ = envs.open(wordle, 1)
    assert first.tools[0]["function"]["name"] == "guess"
    assert first.env.unwrapped.row == {"level": 2}
    used = first.env
    envs.release(first)
    [second], _ = envs.open(guess, 1)
    assert second.tools == []
    assert isinstance(second.env.unwrapped, Guess)
    [again], _ = envs.open(wordle, 1)
    assert again.env is used
    envs.close()


def test_a_run_on_several_environments_is_resumed_and_sampled_with_them(model, tmp_path):
    class Other(Guess):
        pass

    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f'{{"environment": "{name}"}}\n' for name in ("one", "two") * 4))
    task = gw.TextTask(str(rows), env={"one": Guess, "two": Other}, max_turns=2)
    more = {"num_prompts": 2, "sampling": {"max_new_tokens": 2}, "logging": {"progress": "none"}}
    run = gw.train(
        task, gw.GRPOCfg(group_size=2), model=str(model), total_iterations=1, run_dir=tmp_path / "run", **more
    )
    again = gw.resume(run.path, total_iterations=2, env=task.given["env"])
    assert len(again.metrics()) == 2
    assert len(gw.sample(run.path, count=2, env=task.given["env"])) == 2
    with pytest.raises(ConfigError, match="a run is given its Python objects again"):
        gw.resume(run.path, total_iterations=3, env={"num_envs": 2})


def test_an_environment_that_earns_nothing_needs_a_reward():
    class Silent:
        def reset(self, **row):
            return "Say something."

    with pytest.raises(ConfigError, match="there is no reward; fix: reward=my_function"):
        gw.TextTask(env=Silent).rewards()
    assert gw.TextTask(env=Wordle).rewards().names == ("environment",)


def test_an_environment_that_needs_arguments_is_told_how_to_give_them():
    class Sized(gw.TextEnv):
        def __init__(self, size):
            raise AssertionError(size)

        def reset(self, **_):
            raise AssertionError

        step = reset

    task = gw.TextTask(env=Sized)
    with pytest.raises(
        ConfigError, match=r"Sized: missing a required argument: 'size'; fix: env=lambda: Sized\(\.\.\.\)"
    ):
        make_text_env(task.cfg, task.given["env"])()


@pytest.mark.parametrize("rows", [[{"environment": "chess"}], [{"level": 2}], [{"environment": ["guess"]}], ""])
def test_a_row_of_no_environment_is_refused_before_training(rows):
    task = gw.TextTask(rows, env={"wordle": Wordle, "guess": Guess})
    with pytest.raises(DataError, match=r"row 0 of the train data: environment = .*: expected one of wordle, guess"):
        task.load()


# Runs


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("lm") / "model", chat=True, positions=4096)


class Scripted(gw.Callback):
    """Keeps the members of each rollout."""

    def __init__(self):
        self.members = []

    def on_rollout_end(self, trainer, rollout):
        self.members += trainer.collector.members
        self.rollout = rollout


ROWS = [{"prompt": f"{n}", "environment": "echo"} for n in range(8)]
SHORT = {"max_new_tokens": 4}


def test_a_run_of_trls_echo_example(model, tmp_path):
    seen = []

    def reward(environments, **kwargs):
        seen.append((environments, kwargs))
        return [env.reward + 0.1 * n for n, env in enumerate(environments)]

    look = Scripted()
    run = train(
        gw.TextTask(ROWS, env=Echo, reward=reward),
        model,
        tmp_path / "run",
        sampling=SHORT,
        callbacks=[look],
        total_steps=None,
        total_iterations=1,
    )
    assert len(seen[0][0]) == 16
    assert all(isinstance(env, Echo) for env in seen[0][0])
    assert len({id(env) for env in seen[0][0]}) == 16  # one for each member
    assert "reward/environment_mean" not in run.metrics()[-1]  # the class has no reward of its own
    assert [member.reward for member in look.members] == pytest.approx([0.1 * n for n in range(16)])
    assert {member.episode.ending for member in look.members} <= {"no_call", "max_tokens"}


def test_a_run_with_functions_and_one_with_several_classes(model, tmp_path):
    run = train(
        gw.TextTask(ROWS, tools=[add, later], reward=lambda completions, **_: [0.0] * len(completions)), model,
        tmp_path / "tools", sampling=SHORT, total_steps=None, total_iterations=1,
    )  # fmt: skip
    assert {"rollout/tool_calls", "rollout/parse_errors", "rollout/stop_no_call"} <= run.metrics()[-1].keys()
    rows = [{"environment": ("echo", "wordle")[n % 2], "prompt": "?"} for n in range(8)]
    look = Scripted()
    task = gw.TextTask(
        rows, env={"echo": Echo, "wordle": Wordle}, reward=lambda completions, **_: [0.0] * len(completions)
    )
    run = train(
        task,
        model,
        tmp_path / "several",
        sampling=SHORT,
        callbacks=[look],
        total_steps=None,
        total_iterations=2,
        num_prompts=4,
    )
    assert {member.episode.tools[0]["function"]["name"] for member in look.members} == {"echo", "guess"}
    with pytest.raises(ConfigError, match=r"env"):
        gw.resume(run.path, total_iterations=3)


class Silent(gw.TextEnv):
    """Samples no turns."""

    def reset(self, *, seed=None, options=None):
        return "7", {}

    def step(self, text):
        return "8", float(len(text)), False, False, {}

    def state_key(self):
        return "one"


def test_an_environment_among_several_plays_turns_of_the_policy_if_it_samples_none(model, tmp_path):
    look = Scripted()
    task = gw.TextTask([{"environment": "silent"}] * 4, env={"silent": Silent}, max_turns=2)
    train(task, model, tmp_path / "run", sampling=ONE, total_steps=None, total_iterations=1, callbacks=[look])
    assert {anchor for member in look.members for anchor in member.episode.anchors} == {"key one"}


class Slow(Guess):
    """Takes a while, and no two calls of the same instance at once."""

    running, most = 0, 0
    lock = threading.Lock()

    def step(self, text):
        with Slow.lock:
            Slow.running += 1
            Slow.most = max(Slow.most, Slow.running)
        time.sleep(0.005)
        with Slow.lock:
            Slow.running -= 1
        return super().step(text)


ONE = {"max_new_tokens": 2, "stop": tuple("0123456789 ")}


def test_environments_play_at_once_and_results_do_not_depend_on_it(model, tmp_path):
    runs = []
    for count in (1, 4, 16):
        Slow.most = 0
        task = gw.TextTask(env=Slow, max_turns=3, data_size=20, env_threads=count)
        runs.append(
            train(task, model, tmp_path / str(count), sampling=ONE, total_steps=None, total_iterations=2, num_prompts=4)
        )
        assert (Slow.most > 1) == (count > 1)
        assert Slow.most <= count
    for run in runs[1:]:
        assert same_weights(runs[0], run)
        assert logged(runs[0]) == logged(run)


def test_environments_play_at_once_with_servers_too(tmp_path):
    model, runs = save_model(tmp_path / "model", positions=128), []
    for count in (1, 8):
        with VLLMDouble(model) as double:
            task = gw.TextTask(env=Slow, max_turns=3, data_size=20, env_threads=count)
            generation = {"name": "server", "urls": [double.url]}
            runs.append(
                train(
                    task,
                    model,
                    tmp_path / str(count),
                    sampling=ONE,
                    total_steps=None,
                    total_iterations=2,
                    num_prompts=2,
                    generation=generation,
                )
            )
    assert runs[0].metrics()[-1]["rollout/turns_mean"] > 1
    assert same_weights(*runs)


class Fails(Guess):
    """Fails at the second turn of some episodes."""

    made = 0
    how = "raise"

    def __init__(self):
        super().__init__()
        Fails.made += 1
        self.number = Fails.made

    def step(self, text):
        if self.left == 2 and self.fails():
            if Fails.how == "hang":
                time.sleep(3)
            elif Fails.how == "exit":
                raise SystemExit(3)
            elif Fails.how == "message":
                return [{"role": "user", "content": None}], 0.0, False, False, {}
            else:
                raise RuntimeError("the server is gone")
        return super().step(text)

    def fails(self):
        return self.secret < 5 and self.number > 1  # the check before training plays in the first


@pytest.mark.parametrize("how", ["raise", "hang", "exit", "message"])
def test_a_broken_episode_costs_itself_only(model, tmp_path, how, monkeypatch):
    monkeypatch.setattr(Fails, "how", how)
    monkeypatch.setattr(Fails, "made", 0)
    look = Scripted()
    task = gw.TextTask(env=Fails, max_turns=3, data_size=20, start_mode="none", env_timeout=0.2, env_threads=8)
    algorithm = gw.GRPOCfg(group_size=4, collection={"on_env_error": "drop"})
    run = train(
        task,
        model,
        tmp_path / "run",
        algorithm,
        sampling=ONE,
        total_steps=None,
        total_iterations=2,
        num_prompts=4,
        callbacks=[look],
    )
    broken = [member for member in look.members if member.episode.broken]
    assert broken
    assert len(broken) < len(look.members)
    assert all(
        member.reward is None and member.episode.ending == ("timeout" if how == "hang" else "env_error")
        for member in broken
    )
    assert sum(entry["rollout/env_errors"] for entry in run.metrics()) == len(broken)
    assert all(member.reward is not None for member in look.members if not member.episode.broken)


def test_a_first_rollout_whose_episodes_mostly_failed_does_not_blame_the_rewards(model, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(Fails, "how", "raise")
    monkeypatch.setattr(Fails, "made", 0)
    monkeypatch.setattr(Fails, "fails", lambda self: self.number > 1)  # the check before training plays in the first
    task = gw.TextTask(env=Fails, max_turns=3, data_size=20, start_mode="none")
    algorithm = gw.GRPOCfg(group_size=4, collection={"on_env_error": "drop"})
    settings = {"sampling": ONE, "total_steps": None, "num_prompts": 2}
    with pytest.raises(RewardError, match="no completion of the held-out prompts could be scored"):
        train(task, model, tmp_path / "run", algorithm, total_iterations=1, **settings)
    assert "episodes failed; fix: the environment or the tools" in caplog.text


class Once(Fails):
    """Fails in the first instances only."""

    def fails(self):
        return 1 < self.number <= 4


def test_a_broken_episode_is_played_again_up_to_where_it_was(model, tmp_path, monkeypatch):
    algorithm = gw.GRPOCfg(group_size=4, collection={"on_env_error": "retry"})
    runs = []
    for number, make in enumerate((Once, Guess)):
        monkeypatch.setattr(Fails, "made", 0)
        task = gw.TextTask(env=make, max_turns=3, data_size=20, start_mode="none")
        runs.append(
            train(
                task,
                model,
                tmp_path / str(number),
                algorithm,
                sampling=ONE,
                total_steps=None,
                total_iterations=2,
                num_prompts=2,
            )
        )
    assert sum(entry["rollout/env_errors"] for entry in runs[0].metrics()) > 0
    assert same_weights(*runs)


def test_reward_functions_get_no_broken_episodes(model, tmp_path, monkeypatch):
    monkeypatch.setattr(Fails, "how", "raise")
    monkeypatch.setattr(Fails, "made", 0)
    look, seen = Scripted(), []

    def reward(environments, episode_return, completions, **columns):
        seen.extend(environments)
        assert len(environments) == len(episode_return) == len(completions)
        return [env.left for env in environments]

    task = gw.TextTask(env=Fails, max_turns=3, data_size=20, eval_size=8, start_mode="none", reward=[reward, reward])
    algorithm = gw.GRPOCfg(group_size=4, collection={"on_env_error": "drop"})
    run = train(task, model, tmp_path / "run", algorithm, sampling=ONE, total_steps=None, total_iterations=1,
                callbacks=[look], evaluation={"interval": 1, "prompts": 8})  # fmt: skip
    assert {member.reward is None for member in look.members} == {True, False}
    broken = [row for row, member in enumerate(look.members) if member.episode.broken]
    assert not look.rollout["reward_parts"][broken].any()
    assert look.rollout["reward_parts"].any()
    assert all((member.reward is None) == member.episode.broken for member in look.members)
    assert all(isinstance(env, Fails) for env in seen)
    assert run.metrics()[-1]["reward/reward_mean"] >= 0


class Lost(Fails):
    """Fails at the second turn; an instance that plays the episode again fails at once."""

    def reset(self, *, seed=None, options=None):
        failed, Lost.failed = Lost.failed, False
        if failed:
            raise RuntimeError("the server is full")
        return super().reset(seed=seed)

    def fails(self):
        Lost.failed = 1 < self.number <= 4
        return Lost.failed


def test_an_episode_that_cannot_be_played_again_costs_itself_only(model, tmp_path, monkeypatch):
    monkeypatch.setattr(Fails, "how", "raise")
    monkeypatch.setattr(Fails, "made", 0)
    monkeypatch.setattr(Lost, "failed", False, raising=False)
    look = Scripted()
    algorithm = gw.GRPOCfg(group_size=4, collection={"on_env_error": "retry"})
    task = gw.TextTask(env=Lost, max_turns=3, data_size=20, start_mode="none")
    train(task, model, tmp_path / "run", algorithm, sampling=ONE, total_steps=None, total_iterations=1, num_prompts=1,
          callbacks=[look])  # fmt: skip
    assert any(member.episode.broken for member in look.members)


class Unpaid(Echo):
    """Its reward fails the first time that it is asked."""

    asked = 0

    def reset(self, **row):
        super().reset()
        return "?"

    def get_reward(self):
        Unpaid.asked += 1
        if Unpaid.asked == 1:
            raise RuntimeError("the server is gone")
        return self.reward


@pytest.mark.parametrize("turns", [0, 1, 2])
@pytest.mark.parametrize("ending", ["no_call", "max_turns"])
def test_an_episode_whose_last_reward_fails_is_played_again(turns, ending, monkeypatch):
    monkeypatch.setattr(Unpaid, "asked", 0)
    envs = TextEnvs(lambda: ToolEnv(Unpaid()), "seed", on_error="retry")
    [episode], _ = envs.open(Start(0), 1)
    for number in range(turns):
        envs.play(episode, call("echo", message="a" * (number + 1)))
    if ending == "no_call":
        envs.play(episode, "done")
    else:
        envs.finish(episode, ending)
    assert (episode.ending, episode.broken, episode.total) == (ending, False, pytest.approx(turns / 10))
    assert len(episode.turns) == len(episode.rewards) == turns + (ending == "no_call")
    envs.close()


def test_a_turn_without_a_call_is_an_end_of_the_model(model, tmp_path):
    look = Scripted()
    task = gw.TextTask(ROWS, tools=[add], reward=lambda completions, **_: [0.0] * len(completions))
    train(task, model, tmp_path / "run", sampling=ONE, total_steps=None, total_iterations=1, callbacks=[look])
    assert {member.episode.ending for member in look.members} >= {"no_call", "max_tokens"}
    for row, member in enumerate(look.members):
        ended = member.episode.ending == "no_call"
        assert (bool(look.rollout["terminated"][row].any()), bool(look.rollout["truncated"][row].any())) == (
            ended,
            not ended,
        )


@pytest.mark.parametrize("default", [{}, {"environments": None}], ids=["required", "optional"])
def test_reward_functions_in_a_process_of_their_own_get_no_environments(default):
    def reward(completions, environments):
        return [0.0] * len(completions)

    reward.__kwdefaults__, reward.__defaults__ = None, tuple(default.values()) or None
    with pytest.raises(ConfigError, match=r"reward 'reward' reads environments.*; fix: no reward_timeout"):
        gw.TextTask(env=Wordle, reward=reward, reward_timeout=5.0).rewards()


def test_errors_end_the_run_by_default(model, tmp_path):
    task = gw.TextTask(env=Fails, max_turns=3, data_size=20, start_mode="none")
    with pytest.raises(EnvError, match=r"Fails.step\(\) raised RuntimeError: the server is gone\n  the turn: "):
        train(task, model, tmp_path / "run", sampling=ONE, total_steps=None, total_iterations=2)


def test_an_episode_that_is_played_again_must_answer_as_before():
    class Other(Guess):
        def __init__(self):
            super().__init__(turns=5)
            self.answer = next(count)

        def step(self, text):
            observation, *others = super().step(text)
            if self.answer == 0 and self.left == 3:
                raise RuntimeError
            return f"{observation}{self.answer}", *others

    count = iter(range(10))
    envs = TextEnvs(Other, "seed", on_error="retry")
    [episode], _ = envs.open(Start(0), 1)
    envs.play(episode, "x")
    assert envs.play(episode, "x") == ()
    assert (episode.broken, episode.ending) == (True, "env_error")
    envs.close()


def test_instances_that_failed_are_not_used_again(monkeypatch):
    closed = []
    monkeypatch.setattr(Fails, "close", lambda self: closed.append(self), raising=False)
    monkeypatch.setattr(Fails, "fails", lambda self: True)
    envs = TextEnvs(Fails, "seed", on_error="drop")
    [episode], _ = envs.open(Start(0), 1)
    first = episode.env
    envs.play(episode, "x")
    envs.play(episode, "x")
    assert closed == [first]
    [other], _ = envs.open(Start(0), 1)
    assert other.env is not first
    envs.close()


def test_time_limits_need_a_generator_of_its_own(model, tmp_path):
    task = gw.TextTask(env=Wordle, data_size=4, env_timeout=5)
    with pytest.raises(ConfigError, match=r"draws from the process's random, so a call .*fix: a generator of its own"):
        train(task, model, tmp_path / "run", total_steps=None, total_iterations=1)


# Limits of texts


class Long(gw.TextEnv):
    """Answers by many characters."""

    def __init__(self, size=200, turns=3):
        self.size, self.turns = size, turns

    def reset(self, *, seed=None, options=None):
        self.left = self.turns
        return "1", {}

    def step(self, text):
        self.left -= 1
        return "0123456789" * (self.size // 10), 1.0, not self.left, False, {}

    def sample_action(self, rng):
        return "1"


def long_run(model, folder, make=Long, **settings):
    look, few = Scripted(), {"evaluation": {"prompts": 4}}
    task = gw.TextTask(env=make, max_turns=5, data_size=4, **settings)
    run = train(task, model, folder, sampling=ONE, total_steps=None, total_iterations=1, callbacks=[look], **few)
    return run, look.members


def test_long_observations_are_cut_in_the_middle_or_end_the_episode(tmp_path):
    texts = save_model(tmp_path / "texts", positions=4096)
    _, members = long_run(texts, tmp_path / "cut", max_observation_tokens=50)
    played_on = [member for member in members if member.turns > 1]
    assert played_on
    for member in played_on:
        for message in member.messages[1::2]:
            assert len(message["content"].replace("<unk>", "?")) <= 60
            assert message["content"].startswith("0123")
            assert message["content"].endswith("789")
        assert member.turn.count(-1) <= 50 * (member.turns - 1)
    run, members = long_run(texts, tmp_path / "end", max_observation_tokens=50, on_long_observation="end")
    assert {member.turns for member in members} == {1}
    assert run.metrics()[-1]["rollout/stop_max_tokens"] == 1


def test_episodes_have_at_most_so_many_tokens(tmp_path):
    texts = save_model(tmp_path / "texts", positions=4096)
    _, members = long_run(texts, tmp_path / "run", max_episode_tokens=300)
    assert max(len(member.tokens) for member in members) <= 300
    assert {member.turns for member in members if member.episode.turns} == {2}


def test_enormous_observations_cost_no_time(tmp_path):
    texts = save_model(tmp_path / "texts", positions=256)
    for settings in ({}, {"max_observation_tokens": 20}):
        began = time.process_time()
        long_run(texts, tmp_path / f"{len(settings)}", partial(Long, size=3_000_000), **settings)
        assert time.process_time() - began < 10


def test_episodes_have_a_time(model, tmp_path):
    class Sleeps(Guess):
        def step(self, text):
            time.sleep(0.1)
            return super().step(text)

    task = gw.TextTask(env=Sleeps, max_turns=3, data_size=8, start_mode="none", episode_timeout=0.05)
    look, few = Scripted(), {"num_prompts": 2, "evaluation": {"prompts": 1}}
    train(task, model, tmp_path / "run", sampling=ONE, total_steps=None, total_iterations=1, callbacks=[look], **few)
    late = [member for member in look.members if member.episode.ending == "timeout"]
    assert late
    assert all(member.reward is not None and len(member.episode.turns) == member.turns - 1 for member in late)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_tool_calls": 3}, "max_tool_calls=3 has no effect without an environment"),
        ({"env_threads": 2}, "env_threads=2 has no effect"),
        ({"tools": ("search",), "tool": "calculator"}, r"tools=\('search',\) and tool='calculator' both answer"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        TextTaskCfg(data="x.jsonl", **settings)


def test_functions_have_no_verified_start():
    assert (
        str(TextStartReport("seed", (), 0, start_varies=True)) == "shared (seed), not verified, as no turn was played"
    )


def test_tools_that_were_given_are_given_again():
    cfg = gw.TextTask(ROWS, tools=[add]).cfg
    assert cfg.tools == ("<given in Python>",)
    with pytest.raises(ConfigError, match=r"1 tool\(s\) were given in Python, but now 0; fix: give them again"):
        make_text_env(cfg)
    with pytest.raises(ConfigError, match=r"'calculator' is no function that a model calls by name; fix: tool="):
        make_text_env(TextTaskCfg(data="x.jsonl", tools=("calculator",)))
    with pytest.raises(ConfigError, match=r"tools = <function add.*expected a list of functions"):
        gw.TextTask(ROWS, tools=add)
    with pytest.raises((ConfigError, DataError), match=r"TextEnv, which has tools of its own"):
        make_text_env(gw.TextTask(env=Guess, tools=[add]).cfg, Guess, [add])()


def test_the_check_compares_what_the_object_earns():
    class Unfair(Wordle):
        def get_reward(self):
            return time.monotonic()

    make = make_text_env(TextTaskCfg(env="<given in Python>"), Unfair)
    starts = [Start(n) for n in range(2)]

    def to_the_end(episode, start, prompt):
        turns = play_samples(episode, start, prompt, max_turns=2)
        episode.step("end")
        return [*turns, "end"]

    with pytest.raises(EnvError, match=r"do not share a start"):
        check_text_starts(make, "seed", starts, to_the_end)


def test_what_a_tool_was_given_beforehand_is_not_lost():
    with pytest.raises(ConfigError, match=r"functools.partial.*cannot be described to a model"):
        ToolEnv(tools=[partial(add, b=5)])


def test_tools_of_an_episode_have_names_of_their_own():
    class Adds(Tools):
        def begin(self, seed):
            pass

        def tools(self):
            return [bound_tool(add)]

    with pytest.raises(ConfigError, match=r"two tools are called 'add'; fix: other names"):
        played(ToolEnv(tools=[add, Adds()]), row={"prompt": "?"})


def test_an_environment_is_closed_in_the_thread_that_made_it():
    threads = []

    class Bound(Guess):
        def __init__(self):
            super().__init__()
            threads.append(threading.current_thread())

        def close(self):
            threads.append(threading.current_thread())

    envs = TextEnvs(Bound, "seed")
    envs.open(Start(0), 2)
    envs.close()
    check_text_env(Bound)
    assert set(threads) == {threading.main_thread()}


def test_an_error_does_not_wait_for_an_environment_that_hangs():
    class Hangs(Guess):
        def step(self, text):
            if self.secret < 5:
                raise RuntimeError("gone")
            time.sleep(20)

    envs = TextEnvs(Hangs, "none", threads=8)
    episodes, _ = envs.open(Start(0), 8)
    assert len({episode.env.secret < 5 for episode in episodes}) == 2
    began = time.monotonic()
    with pytest.raises(EnvError, match="gone"):
        envs.each(lambda episode: envs.play(episode, "1"), episodes)
    assert time.monotonic() - began < 10


def test_a_close_that_fails_leaves_no_other_open(caplog):
    closed = []

    class Closes(Guess):
        def close(self):
            closed.append(self)
            raise OSError("no such connection")

    envs = TextEnvs(Closes, "seed")
    envs.open(Start(0), 3)
    envs.close()
    assert len(closed) == 3
    assert "Closes.close() failed: OSError('no such connection')" in caplog.text
    check_text_env(Closes)


def test_what_is_no_tool_is_refused_before_training(model, tmp_path):
    with pytest.raises(ConfigError, match="cannot be described to a model"):
        train(
            gw.TextTask(ROWS, tools=[lambda word: word], reward=lambda completions, **_: [0.0] * len(completions)),
            model,
            tmp_path / "run",
        )
    assert not (tmp_path / "run").exists()


class Lucky(gw.TextEnv):
    """Starts anywhere, by a generator that is not its own."""

    def reset(self, *, seed=None, options=None):
        return str(random.randrange(10**6)), {}

    def step(self, text):
        return "", 1.0, True, False, {}

    def sample_action(self, rng):
        return "1"


@pytest.mark.parametrize("names", ["aaaabbbb", "bababab", "abababab"])
def test_the_starts_of_each_environment_are_checked(names, model):
    policy = load_causal_lm(gw.ModelCfg(path=str(model)), gw.SamplingCfg(max_new_tokens=2))
    task = gw.TextTask([{"environment": name} for name in names], env={"a": Guess, "b": Lucky})
    cfg = gw.TextRunCfg(task=task.cfg, sampling={"max_new_tokens": 2})
    envs = verified_envs(cfg, task, PromptEncoder(policy.tokenizer, task.cfg), policy, task.load()[0])
    assert envs.kept == ("random",)
    start = next(example.start for example in task.load()[0] if example.start.environment == "b")
    _, prompts = envs.open(start, 4)
    assert len(set(prompts)) == 1
    envs.close()


def test_turns_end_as_the_environment_of_their_member_has_it(model, tmp_path):
    class Stops(Guess):
        stop = ("1",)

    seen = []

    def generate(texts, seeds, sampling, **how):
        seen.append((len(texts), sampling.stop))
        return [[Completion([5], [-1.0], "stop")] * seeds.shape[1] for _ in texts]

    policy = load_causal_lm(gw.ModelCfg(path=str(model)), gw.SamplingCfg(max_new_tokens=2))
    task = gw.TextTask([{"environment": name} for name in "aabb"], env={"a": Guess, "b": Stops}, max_turns=1)
    encoder = PromptEncoder(policy.tokenizer, task.cfg)
    members = [Transcript(EncodedPrompt(example, ()), n, n) for n, example in enumerate(task.load()[0])]
    sampling = gw.SamplingCfg(max_new_tokens=2, stop=("9",))
    write(members, generate, sampling, Dialogue(encoder, envs=TextEnvs(env_of(task), "seed")))
    assert sorted(seen) == [(2, ("9",)), (2, ("9", "1"))]


def test_a_property_that_needs_a_reset_is_no_matter_for_tools():
    class Board:
        """As TRL has it."""

        def __init__(self):
            self._cells = None

        @property
        def cells(self):
            return self._cells[0]

        def reset(self, **row):
            self._cells = [1]

        @classmethod
        def size(cls) -> int:
            """Tell the number of cells."""
            return 1

        def move(self, cell: int) -> str:
            """Make a move.

            Args:
                cell: Its number.
            """
            return f"{self.cells} {cell}"

    env = ToolEnv(Board())
    assert [tool["function"]["name"] for tool in env.tools] == ["move", "size"]
