"""Rewards that are registered: what is right, and what only looks so."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import reasoning_gym

from groupwise.config.run import RewardCfg
from groupwise.errors import GroupwiseError
from groupwise.text.rewards import REWARDS, RewardSet, make_reward
from groupwise.text.task import gym_examples


@pytest.fixture
def score():
    opened = []

    def call(name, completions, *, ids=None, prompts=None, columns=None, **kwargs):
        rewards = RewardSet([make_reward(RewardCfg(name=name, kwargs=kwargs))])
        opened.append(rewards)
        ids = ids or [[1]] * len(completions)
        return [*rewards.score(prompts or ["?"] * len(completions), completions, ids, columns or {}).reward]

    yield call
    for rewards in opened:
        rewards.close()


def test_a_pattern_is_found_or_is_the_whole(score):
    texts = ["<b>1</b>", "x<b>1</b>", "none"]
    assert score("regex", texts, pattern="<b>.*</b>") == [1, 1, 0]
    assert score("regex", texts, pattern=r"\A<b>.*</b>\Z") == [1, 0, 0]


def test_an_exact_answer_is_all_of_it_and_nothing_more(score):
    texts = ["Paris", " Paris\n", "<answer>Paris</answer>", "It is Paris", "paris", "", "Paris Paris"]
    columns = {"answer": ["Paris"] * 7}
    assert score("exact", texts, columns=columns) == [1, 1, 1, 0, 0, 0, 0]
    assert score("exact", texts, columns=columns, where="tag") == [0, 0, 1, 0, 0, 0, 0]
    assert score("exact", ["a"], columns={"solution": ["a"]}, column="solution") == [1]
    assert score("exact", ["a", "b"], columns={"answer": [None, "b"]}) == [None, 1]  # no right answer is no score
    messages = ({"role": "user", "content": "?"},)
    assert score("exact", ["4", "5"], prompts=[messages] * 2, columns={"answer": ["4", "4"]}) == [1, 0]


def test_a_numeric_answer_is_one_number_or_near(score):
    texts = ["4", "4.0", "so 2 + 2 = 4.", "40", "14", "4 5", "four", "", "<answer>4 or 5</answer>", r"\boxed{8/2}"]
    assert score("numeric", texts, columns={"answer": ["4"] * 10}) == [1, 1, 1, 0, 0, 0, 0, 0, 0, 1]
    assert score("numeric", texts, columns={"answer": [4] * 10}, where="whole")[:3] == [1, 1, 0]
    texts = ["-198", "-202", "-197.9", "200"]  # one percent of -200 is 2
    assert score("numeric", texts, columns={"answer": ["-200"] * 4}, tolerance=0.01) == [1, 1, 0, 0]
    with pytest.raises(RuntimeError, match="'many', which is no number"):
        score("numeric", ["4"], columns={"answer": ["many"]})


def test_mathematics(score):
    texts = ["0.5", "1/2", r"\boxed{\frac{2}{4}}", "<answer>$1/2$</answer>", "1/2 or 1/3", "2", "", "__import__('os')"]
    with ThreadPoolExecutor(1) as pool:  # it works outside the main thread
        found = pool.submit(score, "math", texts, columns={"answer": [r"\frac{1}{2}"] * 8}).result()
    assert found == [1, 1, 1, 1, 0, 0, 0, 0]
    assert score("math", ["1+x^2", "x^2", "(x+1)^2-2x"], columns={"answer": ["$x^2+1$"] * 3}) == [1, 0, 1]
    assert score("math", ["cat", "act"], columns={"answer": ["act"] * 2}) == [0, 1], "letters are no factors"


def test_a_gym_answer_that_contains_the_right_one_is_wrong_and_another_right_one_counts(score):
    example = gym_examples("word_sequence_reversal", size=1)[0]
    gold = example.columns["answer"]
    texts = [gold, f"<answer>{gold}</answer>", f"{gold}, x", f"The answer is {gold}", gold[:-1], "", gold + gold]
    columns = {name: [value] * len(texts) for name, value in example.columns.items()}
    own = reasoning_gym.create_dataset("word_sequence_reversal", size=1)
    assert own.score_answer(f"{gold}, x", {"answer": gold}) > 0.5, "the library itself rewards it, so we do not ask it"
    assert score("reasoning_gym", texts, columns=columns) == [1, 1, 0, 0, 0, 0, 0]
    countdown = {"task": ["countdown"], "answer": ["1 + 5"], "metadata": [{"numbers": [1, 5], "target": 6}]}
    assert score("reasoning_gym", ["5 + 1"], columns=countdown) == [1]


@pytest.mark.parametrize(
    ("name", "kwargs", "message"),
    [
        ("regex", {"pattern": "("}, r"pattern = '\(': missing \)"),
        ("regex", {"pattern": 3}, "pattern = 3: Input should be a valid string"),
        ("regex", {}, "'regex': missing a required argument: 'pattern'"),
        ("regex", {"patern": "a"}, "; did you mean 'pattern'"),
        ("exact", {"where": "end"}, "where = 'end'"),
        ("numeric", {"tolerance": 1.0}, "tolerance=1.0: expected a part"),
        ("numerik", {}, "unknown reward 'numerik': did you mean 'numeric'"),
        ("math", {}, "'math_verify' is not installed"),
    ],
)
def test_wrong_settings_are_refused_before_anything_is_scored(name, kwargs, message, monkeypatch):
    monkeypatch.setattr("groupwise.errors.find_spec", lambda module: None if module == "math_verify" else True)
    with pytest.raises(GroupwiseError, match=message):
        make_reward(RewardCfg(name=name, kwargs=kwargs))
    assert {"regex", "exact", "numeric", "math", "reasoning_gym"} <= REWARDS.keys()
