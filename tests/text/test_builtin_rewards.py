"""Rewards that are registered: what is right, and what only looks so; answers, numbers, and tasks of reasoning-gym."""

from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction

import pytest
import reasoning_gym
from hypothesis import given
from hypothesis import strategies as st
from reasoning_gym.factory import DATASETS, get_score_answer_fn

from groupwise.config.run import RewardCfg
from groupwise.errors import ConfigError, GroupwiseError
from groupwise.text.builtin_rewards import (
    COMPUTED_TASKS,
    REFUSED_TASKS,
    as_number,
    computes,
    final_answer,
    gold_answer,
    is_right,
    last_number,
)
from groupwise.text.rewards import REWARDS, RewardSet, make_reward
from groupwise.text.task import gym_examples


@pytest.fixture
def score():
    opened = {}

    def call(name, completions, *, ids=None, prompts=None, columns=None, **kwargs):
        cfg = RewardCfg(name=name, kwargs=kwargs)
        if (key := cfg.model_dump_json()) not in opened:
            opened[key] = RewardSet([make_reward(cfg)])
        rewards, ids = opened[key], ids or [[1]] * len(completions)
        return [*rewards.score(prompts or ["?"] * len(completions), completions, ids, columns or {}).reward]

    yield call
    for rewards in opened.values():
        rewards.close()


def test_a_pattern_is_found_or_is_the_whole(score):
    texts = ["<b>1</b>", "x<b>1</b>", "none"]
    assert score("regex", texts, pattern="<b>.*</b>") == [1, 1, 0]
    assert score("regex", texts, pattern=r"\A<b>.*</b>\Z") == [1, 0, 0]


def test_an_exact_answer_is_all_of_it_and_nothing_more(score):
    texts = ["Paris", " Paris\n", "<answer>Paris</answer>", "It is Paris", "paris", "", "Paris Paris"]
    columns = {"answer": ["Paris"] * 7}
    assert score("exact", texts, columns=columns) == [1, 1, 1, 0, 0, 0, 0]
    assert score("exact", texts, columns=columns, case="ignored") == [1, 1, 1, 0, 1, 0, 0]
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
    assert score("numeric", ["4", "4"], columns={"answer": ["many", 4]}) == [None, 1]  # one wrong row ends no run


RIGHT = [
    *(
        r"\boxed{\$18}",
        r"\boxed{18\%}",
        "<answer>$18$</answer>",
        r"<answer>\boxed{18}</answer>",
        "<answer>**18**</answer>",
    ),
    *(
        r"<answer>\( 18 \)</answer>",
        "it costs $18",
        "x^2 = 18",
        "18 / year",
        "**18**",
        r"so $\frac{1}{2}$ of 36 is 18.",
    ),
]
WRONG = [r"it is $\frac{1}{18}$", r"x = 10^{18}", "10^18", "1 / 18", "1/18", "18^2", "18 / 5", "18.5", "a18", "-18"]


def test_a_number_is_read_in_the_marks_of_latex_and_no_part_of_another_one(score):
    assert score("numeric", RIGHT, columns={"answer": [18] * len(RIGHT)}) == [1] * len(RIGHT)
    assert score("numeric", WRONG, columns={"answer": [18] * len(WRONG)}) == [0] * len(WRONG)
    thousand = [r"\boxed{1{,}000}", r"\boxed{1,\!000}", "1,000"]
    assert score("numeric", thousand, columns={"answer": [1000] * 3}) == [1] * 3


def test_a_float_without_a_fraction_is_a_whole_number(score):
    assert score("exact", ["5", "5.0", "5.5"], columns={"answer": [5.0, 5.0, 5.5]}) == [1, 0, 1]


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
        ("exact", {"case": "lower"}, "case = 'lower'"),
        ("numeric", {"tolerance": 1.0}, "tolerance=1.0: expected a share"),
        ("numerik", {}, "unknown reward 'numerik': did you mean 'numeric'"),
        ("math", {}, "'math_verify' is not installed"),
    ],
)
def test_wrong_settings_are_refused_before_anything_is_scored(name, kwargs, message, monkeypatch):
    monkeypatch.setattr("groupwise.errors.find_spec", lambda module: None if module == "math_verify" else True)
    with pytest.raises(GroupwiseError, match=message):
        make_reward(RewardCfg(name=name, kwargs=kwargs))
    assert {"regex", "exact", "numeric", "math", "reasoning_gym"} <= REWARDS.keys()


@pytest.mark.parametrize(
    ("text", "where", "answer"),
    [
        ("<answer> 4 </answer>", "auto", "4"),
        ("<answer>3</answer> no, <answer>4</answer>", "auto", "4"),
        ("<answer><answer>4</answer>", "auto", "4"),
        ("<answer>4", "auto", "<answer>4"),
        ("<answer>4", "tag", None),
        (r"so \boxed{\frac{1}{2}} it is", "auto", r"\frac{1}{2}"),
        (r"\boxed{1} or \boxed{2}", "boxed", "2"),
        (r"\boxed{1", "boxed", None),
        (r"\boxed{1} <answer>2</answer>", "auto", "2"),
        (r"\boxed{1} <answer>2</answer>", "boxed", "1"),
        (" 4\n", "auto", "4"),
        ("<answer>4</answer>", "whole", "<answer>4</answer>"),
        ("", "auto", ""),
    ],
)
def test_the_answer_of_a_completion(text, where, answer):
    assert final_answer(text, where) == answer


def test_without_tag_or_box_another_rule_can_find_the_answer():
    assert final_answer("3 and 4.", otherwise=last_number) == "4"
    assert [last_number(text) for text in ("It is -$5.", "from 10-$5", "- $5", "-5")] == ["-$5", "5", "5", "-5"]
    assert final_answer("<answer>3</answer> and 4", otherwise=last_number) == "3"
    assert gold_answer("2 + 2 = 4\n#### 4") == gold_answer(4) == "4"  # it may follow its explanation


NUMBERS = {"72": 72, "-5": -5, "+0.50": Fraction(1, 2), ".5": Fraction(1, 2), "1,234,567.5": Fraction(2469135, 2)}
NUMBERS |= {
    "-$5": -5,
    "+€1,000": 1000,
    "$-5": -5,
    "-£.5": Fraction(-1, 2),
    "$18": 18,
    "18 %": 18,
    "18.": 18,
    "1/3": Fraction(1, 3),
    "2e-3": Fraction(1, 500),
    "\u22125": -5,
}
NO_NUMBERS = ["", "-", "x", "1 2", "12 apples", "1,23", "1/0", "1e9999", "٣", "1" * 101, "__import__('os')", "2+2"]
NO_NUMBERS += ["1.2.3", "nan", "inf", "--5", "-$", "-$-5"]


@pytest.mark.parametrize(("text", "number"), [*NUMBERS.items(), *((text, None) for text in NO_NUMBERS)])
def test_numbers(text, number):
    assert as_number(text) == number


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("The sum is 12.", "12"),
        ("3 + 4 = 7", "7"),
        ("between 1 and 1,000!", "1,000"),
        ("x=-5", "-5"),
        ("x = \u22125.", "-5"),
        ("10\u22125", "5"),
        ("version 1.2.3 of v8", None),
        ("area51 and 3rd", None),
        ("1/2", "1/2"),
        ("none", None),
    ],
)
def test_the_last_number_that_stands_alone(text, number):
    assert last_number(text) == number


@given(st.fractions(max_denominator=10**6), st.text(alphabet="ab \n.", max_size=20))
def test_a_number_is_found_after_any_words_and_read_back(number, words):
    assert as_number(str(number)) == number
    assert last_number(f"{words} {number}") == str(number)


@pytest.mark.parametrize("task", sorted(COMPUTED_TASKS))
def test_solutions_are_right_and_nothing_around_them(task):
    columns = gym_examples(task, size=1)[0].columns
    right = columns["answer"]
    for text in (right, f"({right})", f"{right} 1", f"x{right}", f"{right}\n{right}", "", "(" * 300):
        assert is_right(task, text, None, columns["metadata"]) == (text in (right, f"({right})"))


def test_tasks_that_cannot_be_judged_are_refused():
    assert DATASETS.keys() >= COMPUTED_TASKS | REFUSED_TASKS
    for task in REFUSED_TASKS:
        with pytest.raises(ConfigError, match=rf"reasoning-gym:{task} .*; fix: a reward of your own"):
            is_right(task, "1", "1", {})


@pytest.mark.parametrize(
    ("expression", "numbers", "result"),
    [
        ("3*(4+5)", [5, 4, 3], 27),
        ("8/(3 - 8/3)", [3, 3, 8, 8], 24),
        ("-1 + 25", [25, 1], 24),
        ("1/3*3*24", [1, 3, 3, 24], 24),
    ],
)
def test_expressions_are_computed_exactly(expression, numbers, result):
    assert computes(expression, numbers, result)
    assert not computes(expression, numbers, result + 1)
    assert not computes(expression, [*numbers, 1], result)
    assert not computes(expression, numbers[1:], result)


NO_ARITHMETIC = [
    "3*8.0",
    "3**1*8",
    "3*8//1",
    "int('3')*8",
    "3*8 # 24",
    "0x3*8",
    "3*0_8",
    "3*8,",
    "3*True*8",
    "(3*8",
    "3 8",
]


@pytest.mark.parametrize("expression", [*NO_ARITHMETIC, "(" * 150])
def test_other_than_arithmetic_is_no_expression(expression):
    assert not computes(expression, [3, 8], 24)


def test_close_is_not_equal():
    entry = {"answer": "", "metadata": {"numbers": [281, 1, 96, 97], "target": 281}}
    assert get_score_answer_fn("countdown")("281 + 1/(96*97)", entry) == 1, "the library itself accepts it"
    assert not computes("281 + 1/(96*97)", [281, 1, 96, 97], 281)
    assert not computes("1/(3 - 3)", [1, 3, 3], 24)
