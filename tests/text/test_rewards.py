"""Functions of TRL's signature: what they get, what they may return, and what happens when they fail or hang."""

import asyncio
import functools
import math
import re
import threading

import numpy as np
import pytest
import torch

from groupwise.config.run import RewardCfg
from groupwise.errors import ConfigError, DataError, RewardError
from groupwise.text.rewards import (
    REWARDS,
    RewardObject,
    RewardSet,
    TrainingState,
    make_registered,
    make_reward,
    register_reward,
)

USER = {"role": "user", "content": "1+1="}


def reward_set(*functions, weights=None):
    cfgs = [RewardCfg(name="given", weight=w) for w in weights or [1.0] * len(functions)]
    return RewardSet([make_reward(cfg, function) for cfg, function in zip(cfgs, functions, strict=True)])


def score(rewards, completions=("a", "b"), prompts=None, columns=None, state=None):
    prompts = prompts or [f"p{number}" for number in range(len(completions))]
    ids = [[number] for number in range(len(completions))]
    return rewards.score(prompts, completions, ids, columns or {}, state)


def lengths(completions, **_):
    return [len(completion) for completion in completions]


def test_functions_are_called_as_trl_calls_them():
    # TRL 1.16 passes keywords alone: these six, and every column but prompt, completion and completion_ids
    seen = {}

    def reward(**kwargs):
        seen.update(kwargs)
        return [0.0] * 2

    columns = {"answer": ["x", "y"], "completion": ["no"] * 2, "prompt": ["no"] * 2}
    score(reward_set(reward), columns=columns, state=TrainingState(3, 10, 0.5))
    assert callable(seen.pop("log_extra"))
    assert callable(seen.pop("log_metric"))
    assert seen.pop("trainer_state").global_step == 3
    texts = {"prompts": ["p0", "p1"], "completions": ["a", "b"], "completion_ids": [[0], [1]]}
    assert seen == texts | {"answer": ["x", "y"]}
    messages = [[{"role": "assistant", "content": text}] for text in "ab"]
    score(reward_set(reward), messages, prompts=[(USER,), (USER,)])
    assert (seen["prompts"], seen["completions"]) == ([[USER], [USER]], messages)


def right(completion, answer, question):
    return float(completion.strip() == answer) + 0.5 * question.endswith("=")


async def async_right(completion, answer, question):
    await asyncio.sleep(0)
    return right(completion, answer, question)


def test_arguments_of_the_other_form_are_columns():
    for function, column in (
        (lambda completions, prompt: [], "prompt"),
        (lambda completion, trainer_state: 0.0, "trainer_state"),
    ):
        with pytest.raises(DataError, match=f"needs the column '{column}'"):
            reward_set(function).check_columns(["answer"])


@pytest.mark.parametrize("function", [right, async_right, functools.partial(right)])
@pytest.mark.parametrize("timeout", [None, 60.0])
def test_a_function_of_one_completion_scores_each(function, timeout):
    rewards = RewardSet([make_reward(RewardCfg(name="given"), function)], timeout=timeout)
    rewards.check_columns(["answer"])
    columns = {"answer": ["3", "4"], "question": ["1+2", "2+2="]}
    assert score(rewards, [" 3", "5"], columns=columns).reward == (1.0, 0.5)
    # without a column of that name, the question is the prompt
    assert score(rewards, [" 3", "5"], ["1+2=", "2+2"], columns={"answer": ["3", "4"]}).reward == (1.5, 0.0)
    rewards.close()
    with pytest.raises(DataError, match=r"reward '\w+' needs the column 'answer'; the data have 'solution'"):
        rewards.check_columns(["solution"])


def test_a_function_of_one_completion_gets_its_own_tokens_and_the_text_of_a_conversation():
    seen = []

    def reward(completion, prompt, completion_ids, level=1, **rest):
        seen.append((completion, prompt, completion_ids, level, rest))
        return 1.0

    messages = [[{"role": "assistant", "content": text}] for text in "23"]
    score(reward_set(reward), messages, [(USER,)] * 2, columns={"level": [3, 4], "other": [4, 4]})
    rest = {"other": 4, "question": [USER]}
    assert seen == [("2", [USER], [0], 3, rest), ("3", [USER], [1], 4, rest)]


def test_a_function_that_changes_its_arguments_does_not_change_the_data():
    def vandal(prompts, completions, completion_ids, answer):
        prompts[0][0]["content"] = "?"
        completion_ids[0].append(9)
        answer.clear()
        completions.clear()
        return [0, 0]

    columns = {"answer": ["x", "y"]}
    prompts = [(dict(USER),), (dict(USER),)]
    assert score(reward_set(vandal), prompts=prompts, columns=columns).reward == (0, 0)
    assert prompts == [(USER,), (USER,)]
    assert columns == {"answer": ["x", "y"]}


def test_a_function_that_changes_its_arguments_does_not_change_those_of_others_nor_rows():
    def vandal(completions, answer, meta, pair, row):
        completions[0] = "longer"
        answer[0], meta[0]["n"][0] = "longer", 7
        meta[1]["n"].append(7)
        pair[0][0].append(7)
        row[0][0] = 7
        return [0, 0]

    def honest(completions, answer, meta):
        return [len(a) + len(b) + sum(m["n"]) for a, b, m in zip(completions, answer, meta, strict=True)]

    def vandal_of_one(completion, meta):
        meta["n"].append(7)
        return 0

    row = [np.zeros(2), np.zeros(2)]
    columns = {"answer": ["x", "y"], "meta": [{"n": [1]}, {"n": [2]}], "pair": [([],), ([],)], "row": row}
    for _ in range(2):
        assert score(reward_set(vandal, vandal_of_one, honest), columns=columns).reward == (3, 4)
    assert columns["meta"] == [{"n": [1]}, {"n": [2]}]
    assert (columns["answer"], columns["pair"], np.sum(row)) == (["x", "y"], [([],), ([],)], 0)


async def later():
    return [1, 0.5]


@pytest.mark.parametrize(
    "returned",
    [
        [1, 0.5],
        (1, 0.5),
        np.array([1, 0.5]),
        torch.tensor([1, 0.5]),
        [True, np.float32(0.5)],
        [torch.tensor(1), 0.5],
        iter([1, 0.5]),
        later(),
    ],
    ids=["list", "tuple", "array", "tensor", "numpy", "tensors", "iterator", "coroutine"],
)
def test_any_numbers_are_scores(returned):
    assert score(reward_set(lambda **_: returned)).reward == (1, 0.5)


def test_weighted_scores_add_up_where_functions_say_something():
    # 2*1 - 0.5*10 = -3 and 2*0 - 0.5*20 = -10
    scores = score(reward_set(lambda **_: [1, 0], lambda **_: [10, 20], weights=[2.0, -0.5]))
    assert scores.reward == (-3, -10)
    assert scores.parts == ((1, 0), (10, 20))
    scores = score(reward_set(lambda **_: [None, None], lambda **_: [3, None]))
    assert scores.reward == (3, None)
    assert scores.parts == ((None, None), (3, None))
    with pytest.raises(ConfigError, match="there is no reward; fix: reward=my_function"):
        RewardSet([])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e39, np.nan, torch.tensor(torch.nan)])
def test_a_score_that_is_not_finite_ends_training_has_no_score_or_is_0(bad, caplog):
    functions = reward_set(lambda **_: [2, bad], lambda **_: [3, 4])
    with pytest.raises(RewardError, match=rf"is {re.escape(str(float(bad)))} for completion 1 of 2; fix: a finite"):
        score(functions)
    functions.on_nonfinite = "drop"
    assert score(functions).parts == ((2, None), (3, 4))
    functions.on_nonfinite = "zero"
    assert score(functions).parts == ((2, 0), (3, 4))
    assert caplog.messages[-1].endswith(f"is {float(bad)} for completion 1 of 2 (1 in all); on_nonfinite='zero'")


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ([1], r"reward 'broken' returned \[1\]: no list, or another number of scores; expected a list of 2 numbers"),
        (0.5, "returned 0.5: .*; expected a list of 2 numbers"),
        (None, "returned None: .*; expected a list"),
        ("ab", "returned 'ab': could not convert string to float: 'a'"),
        ("11", "returned '11': no list, .*; expected a list of 2 numbers"),
        ({0: 1.0, 1: 0.5}, "returned {0: 1.0, 1: 0.5}: no list, .*; expected a list of 2 numbers"),
        ({1.0, 0.5}, "returned {.*}: no list, .*; expected a list of 2 numbers"),
        ([1, "b"], r"returned \[1, 'b'\]: could not convert .* 'b'; expected a list of 2 numbers"),
        ([1, [2]], "not 'list'; expected"),
    ],
)
def test_what_is_no_score_is_an_error_that_names_the_function(returned, message):
    def broken(**_):
        return returned

    with pytest.raises(RewardError, match=message):
        score(reward_set(broken))


def fails_on_b(completions, **_):
    raise KeyError("no b")


async def async_fails_on_b(completions, **_):
    await asyncio.sleep(0)
    raise KeyError("no b")


@pytest.mark.parametrize(
    ("function", "kind", "message"),
    [
        (fails_on_b, KeyError, r"reward 'fails_on_b' raised KeyError: 'no b'; fix: the function"),
        (async_fails_on_b, KeyError, r"reward 'async_fails_on_b' raised KeyError: 'no b'; fix: the function"),
        (lambda completions, gold: [1, 1], TypeError, r"raised TypeError: .*missing 1 required .* 'gold'"),
    ],
)
def test_an_exception_ends_the_run_and_names_the_function(function, kind, message):
    with pytest.raises(RewardError, match=message) as caught:
        score(reward_set(function))
    assert isinstance(caught.value.__cause__, kind)


def test_an_error_of_one_function_cancels_async_ones_that_still_run():
    begun, cancelled = threading.Event(), threading.Event()

    async def judge(**_):
        begun.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    def fails(**_):
        assert begun.wait(5)
        raise ValueError("no answer")

    with pytest.raises(RewardError, match="reward 'fails' raised ValueError: no answer"):
        score(reward_set(judge, fails))
    assert cancelled.wait(5)


def test_async_functions_run_at_the_same_time_in_one_loop_while_others_run_in_the_main_thread():
    here, done = [], threading.Event()

    async def meet(**_):
        here.append(asyncio.get_running_loop())
        while len(here) % 2:
            await asyncio.sleep(0.001)
        return [1, 1]

    async def sets(**_):
        done.set()
        return [0, 0]

    def waits(**_):
        assert threading.current_thread() is threading.main_thread()
        assert done.wait(5)
        return [1, 1]

    async def notebook():
        return score(reward_set(waits, sets)).reward

    rewards = reward_set(meet, meet)
    assert rewards.names == ("meet", "meet_2")
    assert score(rewards).reward == (2, 2)
    score(rewards)
    assert len(set(here)) == 1, "clients that are bound to a loop live on from call to call"
    rewards.close()
    for functions in ((sets, waits), (waits, sets)):
        done.clear()
        assert score(reward_set(*functions)).reward == (1, 1)
    assert asyncio.run(notebook()) == (1, 1)  # even where a loop runs already


def test_objects_and_partial_functions_are_functions():
    class Judge:
        async def __call__(self, completions, **_):
            return [1] * len(completions)

    def scaled(completions, scale, **_):
        return [scale] * len(completions)

    rewards = reward_set(Judge(), functools.partial(scaled, scale=3), functools.partial(Judge()))
    assert rewards.names == ("Judge", "scaled", "Judge_2")
    assert score(rewards).reward == (5, 5)


def test_what_functions_log_is_collected_once(caplog):
    def logs(completions, log_metric, log_extra, **_):
        log_metric("share", len(completions))
        log_metric("share", 4)
        log_extra("correct", [True, False])
        log_extra("length", [np.float32(1.5), torch.tensor(2), None])
        log_extra("said", [c.upper() for c in completions])
        return lengths(completions)

    rewards = reward_set(logs)
    score(rewards)
    assert rewards.take_logged() == {"share": 3.0, "correct": 0.5, "length": 1.75}
    assert rewards.take_logged() == {}
    score(rewards)
    [warning] = caplog.messages
    assert "log_extra('said', ...) has no numbers, and texts are not kept; fix: " in warning


@pytest.mark.parametrize(("count", "length"), [(100, 100), (101, 9), (1, 101)])
def test_the_number_of_logged_metrics_and_the_length_of_names_are_limited(count, length):
    def logs(completions, log_metric, log_extra, **_):
        for number in range(2 * count):
            (log_extra if number % 2 else log_metric)(f"{number // 2:0{length}}", [1.0] if number % 2 else 1.0)
        return lengths(completions)

    rewards = reward_set(logs)
    if (count, length) == (100, 100):
        score(rewards)
        score(rewards)
        assert len(rewards.take_logged()) == 100
    else:
        with pytest.raises(
            RewardError, match=r"'logs' .* at most 100 names, of at most 100 characters; got '0.* others; "
        ):
            score(rewards)


def test_missing_columns_are_named_before_anything_is_scored():
    def needs(completions, gold, level=1, **_):
        return lengths(completions)

    rewards = reward_set(needs, lengths)
    rewards.check_columns(["gold"])
    exact = RewardSet([make_reward(RewardCfg(name="exact", kwargs={"column": "solution"}))])
    for functions, columns, message in [
        (rewards, ["x", "golden", "completion"], "'needs' needs the column 'gold'; the data have 'golden', 'x'"),
        (exact, [], "'exact' needs the column 'solution'; the data have none"),
        (rewards, ["gold", "completions"], "a column 'completions', an argument of every reward"),
    ]:
        with pytest.raises(DataError, match=message):
            functions.check_columns(columns)


def test_a_registered_function_is_bound_to_its_settings_whatever_the_columns_are(monkeypatch):
    monkeypatch.setattr("groupwise.text.rewards.REWARDS", dict(REWARDS))

    @register_reward("share")
    def share(completions, letter, answer, **columns):
        assert "letter" not in columns
        return [c.count(letter) / len(c) for c in completions]

    @register_reward("longer")
    def longer(completion, than: int, letter):
        return float(len(completion) > than) + (letter in completion)

    rewards = RewardSet([make_reward(RewardCfg(name="share", weight=2.0, kwargs={"letter": "a"}))])
    rewards.check_columns(["answer"])
    with pytest.raises(DataError, match="needs the column 'answer'"):
        rewards.check_columns([])
    columns = {"answer": [1, 2], "letter": ["b", "b"]}
    assert score(rewards, ["ab", "aa"], columns=columns).reward == (1, 2)
    with pytest.raises(ConfigError, match="reward 'share' is registered already"):
        register_reward("share")(share)
    rewards = RewardSet([make_reward(RewardCfg(name="longer", kwargs={"than": 1}))])
    rewards.check_columns(["letter"])
    assert score(rewards, ["b", "ab"], columns={"letter": ["b", "c"], "than": [9, 9]}).reward == (1.0, 1.0)


def test_a_registered_class_is_made_once_and_closed(monkeypatch):
    monkeypatch.setattr("groupwise.text.rewards.REWARDS", dict(REWARDS))
    closed = []

    @register_reward("made")
    class Made(RewardObject):
        def __init__(self, value: float) -> None:
            self.value = value

        def __call__(self, completions, **_):
            return [self.value] * len(completions)

        def close(self):
            closed.append(self.value)

    rewards = RewardSet([make_reward(RewardCfg(name="made", kwargs={"value": 2.0}))])
    assert score(rewards).reward == (2, 2)
    rewards.close()
    assert closed == [2.0]
    for kwargs, message in [({}, "missing a required argument: 'value'"), ({"value": "x"}, "value = 'x'")]:
        with pytest.raises(ConfigError, match=f"reward 'made': {message}"):
            make_reward(RewardCfg(name="made", kwargs=kwargs))


def test_settings_are_as_files_have_them(tmp_path):
    """There a tuple is a list."""
    seen = []

    def among(completions, words: tuple[str, ...] = (), low: float = 0.0, **columns):
        seen.append((words, low))
        return [float(text in words) for text in completions]

    for words in (("a", "b"), ["a", "b"]):
        reward = make_registered("reward", {"among": among}, "among", {"words": words, "low": -math.inf}, ["a"])
        assert reward(["a"]) == [1.0]
    assert seen == [(("a", "b"), -math.inf)] * 2
    with pytest.raises(ConfigError, match=r"reward 'among': low = '3': .*; fix: its value"):
        make_registered("reward", {"among": among}, "among", {"low": "3"}, ["a"])
