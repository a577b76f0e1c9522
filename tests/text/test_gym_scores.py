"""Tasks of reasoning-gym: right answers count, others do not, and what cannot be told is refused."""

import itertools

import pytest
from reasoning_gym.factory import DATASETS, get_score_answer_fn

from groupwise.errors import ConfigError
from groupwise.text.builtin_rewards import COMPUTED_TASKS, REFUSED_TASKS, SCORED_TASKS, computes, is_right
from groupwise.text.task import gym_examples


def solution(example):
    """A right answer of the example."""
    return example.columns["answer"]


JUNK = ["", "[]", "{}", "()", "0x", "a", "1", "__import__('os').getpid()", "nan", "(" * 300]


def expect_solutions_alone(task, size):
    for example, other in itertools.pairwise([*gym_examples(task, size=size), None]):
        columns, right = example.columns, solution(example)

        def judged(given, columns=columns):
            return is_right(columns["task"], given, columns["answer"], columns["metadata"])

        assert judged(right), (task, right)
        wrong = [f"{right} 1", f"x{right}", f"The answer is {right}", f"{right}\n{right}", *JUNK]
        if other is not None and task != "palindrome_generation":
            wrong.append(solution(other))
        assert [given for given in wrong if given.strip() != right.strip() and judged(given)] == [], task


@pytest.mark.parametrize("task", sorted(SCORED_TASKS | COMPUTED_TASKS))
def test_of_tasks_with_several_right_answers_solutions_count_alone(task):
    expect_solutions_alone(task, 4)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of what the tasks import
def test_every_task_is_scored_or_refused():
    assert DATASETS.keys() >= {*SCORED_TASKS, *COMPUTED_TASKS, *REFUSED_TASKS}
    for task in sorted(DATASETS.keys() - REFUSED_TASKS):
        expect_solutions_alone(task, 1)


@pytest.mark.parametrize("task", sorted(REFUSED_TASKS))
def test_tasks_that_cannot_be_judged_are_refused(task):
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


def test_another_solution_counts():
    assert is_right("countdown", "5 + 1", "1 + 5", {"numbers": [1, 5], "target": 6})
