"""Tasks of reasoning-gym: what is computed, and tasks that are refused."""

import pytest
from reasoning_gym.factory import DATASETS, get_score_answer_fn

from groupwise.errors import ConfigError
from groupwise.text.builtin_rewards import COMPUTED_TASKS, REFUSED_TASKS, computes, is_right
from groupwise.text.task import gym_examples


@pytest.mark.parametrize("task", sorted(COMPUTED_TASKS))
def test_solutions_are_right_and_nothing_around_them(task):
    columns = gym_examples(task, size=1)[0].columns
    right = columns["answer"]
    for given in (right, f"({right})", f"{right} 1", f"x{right}", f"{right}\n{right}", "", "(" * 300):
        assert is_right(task, given, None, columns["metadata"]) == (given in (right, f"({right})"))


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
