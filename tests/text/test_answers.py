"""Which part of a completion is its answer, and which texts are the same number."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from groupwise.text.builtin_rewards import as_number, final_answer, gold_answer, last_number


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
    assert final_answer("<answer>3</answer> and 4", otherwise=last_number) == "3"
    assert gold_answer("2 + 2 = 4\n#### 4") == gold_answer(4) == "4"  # it may follow its explanation


NUMBERS = {"72": 72, "-5": -5, "+0.50": Fraction(1, 2), ".5": Fraction(1, 2), "1,234,567.5": Fraction(2469135, 2)}
NUMBERS |= {"$18": 18, "18 %": 18, "18.": 18, "1/3": Fraction(1, 3), "2e-3": Fraction(1, 500)}
NO_NUMBERS = ["", "-", "x", "1 2", "12 apples", "1,23", "1/0", "1e9999", "٣", "1" * 101, "__import__('os')", "2+2"]
NO_NUMBERS += ["1.2.3", "nan", "inf"]


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
