"""Built-in rewards: 1 or 0.

An answer is right as a whole or not at all: it is not searched for in a longer one, and never run as code.
"""

import functools
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any, Literal

from groupwise.config.run import GYM
from groupwise.errors import ConfigError, RewardError, require_extra
from groupwise.text.rewards import Completion, RewardObject, Score, register_reward
from groupwise.text.sandbox import MathVerifier
from groupwise.text.tools import ARITHMETIC_ERRORS, value_of

# Tasks of reasoning-gym: one right answer, expressions that are computed, and tasks that cannot be scored

COMPUTED_TASKS = frozenset(["countdown", "puzzle24"])
"""Tasks whose expressions are computed here, exactly: their own scorers run them as code, and accept results that are close."""
REFUSED_TASKS = frozenset(
    [
        "boxnet",
        "composite",
        "graph_color",
        "group_anagrams",
        "intermediate_integration",
        "jugs",
        "knight_swap",
        "n_queens",
        "palindrome_generation",
        "palindrome_partitioning",
        "polynomial_equations",
        "propositional_logic",
        "quantum_lock",
        "rubiks_cube",
        "rush_hour",
        "shortest_path",
        "simple_integration",
        "sokoban",
        "tower_of_hanoi",
    ]
)
"""Other tasks with several right answers. Scorers of some run answers as code, or accept malformed ones."""
_EXPRESSION = re.compile(r"(?!.*(\*\*|//))[0-9\s()+*/-]{1,200}", re.DOTALL)


def check_gym_task(task: str) -> None:
    """Refuse one of ``REFUSED_TASKS`` by a ``ConfigError``."""
    if task in REFUSED_TASKS:
        raise ConfigError(f"{GYM}{task} has many right answers, of which the data have one; fix: a reward of your own")


def is_right(task: str, given: str, answer: str | None, metadata: Mapping[str, Any]) -> bool:
    """Whether the given answer solves the task of an example; a ``ConfigError`` if it is one of ``REFUSED_TASKS``."""
    check_gym_task(task)
    if answer is not None and given == answer.strip():
        return True
    return task in COMPUTED_TASKS and computes(given, metadata["numbers"], metadata.get("target", 24))


def computes(expression: str, numbers: list[int], result: int) -> bool:
    """Whether an expression of ``+ - * /`` and brackets has exactly these numbers, in any order, and this result."""
    if _EXPRESSION.fullmatch(expression) is None:
        return False
    used = map(int, re.findall(r"[0-9]+", expression))
    try:
        return Counter(used) == Counter(numbers) and bool(value_of(expression, Fraction) == result)
    except ARITHMETIC_ERRORS:
        return False


Where = Literal["auto", "tag", "boxed", "whole"]
"""The part of a completion that is its answer: the last ``<answer>...</answer>``; the last ``\\boxed{...}``; all of it,
stripped; ``auto``: the first of these that exists."""

_TAG = re.compile(r"<answer>((?:(?!</?answer>).)*)</answer>", re.DOTALL)
_NUMBER = r"[+-]?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)?(?:\.[0-9]+)?(?<=[0-9])(?:[eE][+-]?[0-9]{1,3})?"
_SIGN = r"[+-](?=[$€£]\s*[0-9.])"  # before a currency
_WHOLE_NUMBER = re.compile(rf"({_SIGN})?[$€£]?\s*({_NUMBER})(?:\s*/\s*({_NUMBER}))?\s*%?\.?")
_NUMBER_INSIDE = re.compile(
    rf"(?<![\w.,/^{{])(?<!/ )(?:{_SIGN}[$€£]\s*)?(?:{_NUMBER})(?:\s?/\s?{_NUMBER})?(?![\w/^]|[.,][0-9])"
)
"""A number that is no part of another, of a power or of a fraction in LaTeX."""
_MARKUP = re.compile(r"^(?:\$|\*\*|\\\()\s*(.*?)\s*(?:\$|\*\*|\\\))$", re.DOTALL)
_COMMAND, _WORD = re.compile(r"\\(?:text|mathrm)\b|\\[A-Za-z]+"), re.compile(r"[A-Za-z]{3}")
_MINUS = str.maketrans("\u2212", "-")  # that of Unicode, which some models write
_LONGEST_NUMBER = 100
_SECONDS_PER_SEARCH = 1.0


def text_of(completion: Completion) -> str:
    """A completion as a text; of several messages the last, which answers."""
    return completion if isinstance(completion, str) else completion[-1]["content"]


@register_reward("regex")
class RegexReward(RewardObject):
    """1 if the pattern is found, searched by the package ``regex``, which has a time limit."""

    def __init__(self, pattern: str) -> None:
        require_extra("regex", "text")
        import regex

        try:
            self._pattern = regex.compile(pattern)
        except regex.error as error:
            raise ConfigError(f"pattern = {pattern!r}: {error}; fix: a regular expression of Python's re") from error

    def __call__(self, completions: Sequence[Completion], **_: Any) -> list[Score]:
        """1 or 0 for each, and an error where the search takes longer than a second."""
        scores: list[Score] = []
        for text in map(text_of, completions):
            try:
                scores.append(float(self._pattern.search(text, timeout=_SECONDS_PER_SEARCH) is not None))
            except TimeoutError:
                scores.append(RewardError(f"the pattern took longer than {_SECONDS_PER_SEARCH:g} s in {text!r:.80}"))
        return scores


class AnswerReward(RewardObject, ABC):
    """Base of rewards that compare the answer with a column; None where the column is."""

    def __init__(self, column: str = "answer", where: Where = "auto") -> None:
        self.columns = (column,)
        self._where: Where = where

    def __call__(self, completions: Sequence[Completion], **columns: Any) -> list[Score]:
        """1 or 0 for each, None where there is no right answer, and an error where the comparison failed."""
        golds = columns[self.columns[0]]
        return [
            None if gold is None else self._score(gold, text_of(completion))
            for gold, completion in zip(golds, completions, strict=True)
        ]

    @abstractmethod
    def _score(self, gold: object, completion: str) -> Score: ...


@register_reward("exact")
class ExactReward(AnswerReward):
    """1 if the answer is the column's text, white space at the ends aside; a float without a fraction is a whole number."""

    def __init__(
        self, column: str = "answer", where: Where = "auto", case: Literal["matters", "ignored"] = "matters"
    ) -> None:
        super().__init__(column, where)
        self._fold: Callable[[str], str] = str.casefold if case == "ignored" else str

    def _score(self, gold: object, completion: str) -> Score:
        answer = final_answer(completion, self._where)
        whole = isinstance(gold, float) and gold.is_integer()  # as tables with gaps have whole numbers
        wanted = str(int(gold) if whole else gold).strip()  # type: ignore[call-overload]
        return float(answer is not None and self._fold(answer) == self._fold(wanted))


@register_reward("numeric")
class NumericReward(AnswerReward):
    """1 if the answer is the column's number, exactly or up to ``tolerance`` times its size.

    ``where="auto"``: in the tag or box if there is one, else the last number of the completion.
    """

    def __init__(self, column: str = "answer", where: Where = "auto", tolerance: float = 0.0) -> None:
        super().__init__(column, where)
        if not 0 <= tolerance < 1:
            raise ConfigError(f"tolerance={tolerance}: expected a share of the number, 0 to 1; fix: 0.01 for 1 %")
        self._tolerance = Fraction(tolerance)

    def _score(self, gold: object, completion: str) -> Score:
        wanted = as_number(gold_answer(gold))
        if wanted is None:
            return RewardError(f"the column {self.columns[0]!r} has {gold!r:.80}, no number; fix: the data, or exact")
        answer = final_answer(completion, self._where, otherwise=last_number)
        given = None if answer is None else as_number(answer)
        return float(given is not None and abs(given - wanted) <= self._tolerance * abs(wanted))


@register_reward("math")
class MathReward(AnswerReward):
    """1 if the answer is the column's number, set or expression, both read as LaTeX by math-verify.

    Another process compares them, with limits of CPU time and memory; an answer that exceeds them is wrong. Words are
    compared as texts: as factors, the letters of ``north`` equal those of ``thorn``.
    """

    def __init__(self, column: str = "answer", where: Where = "auto", seconds: float = 3.0) -> None:
        super().__init__(column, where)
        require_extra("math_verify", "text")
        self._verifier = MathVerifier(seconds)
        self._same = functools.lru_cache(maxsize=4096)(self._verifier.same)

    def close(self) -> None:
        """End the process."""
        self._verifier.close()

    def _score(self, gold: object, completion: str) -> Score:
        wanted, given = gold_answer(gold).strip("$ "), (final_answer(completion, self._where) or "").strip("$ ")
        if wanted == given:
            return 1.0
        if not given or any(_WORD.search(_COMMAND.sub(" ", text)) for text in (wanted, given)):
            return 0.0
        try:
            return float(self._same(wanted, given))
        except TimeoutError:  # wrong, and not remembered: the cache keeps no exceptions
            return 0.0
        except ChildProcessError as error:
            return RewardError(str(error))


@register_reward("reasoning_gym")
class GymReward(RewardObject):
    """1 if the answer, in its tag or the whole completion, is right for its task of reasoning-gym."""

    columns = ("task", "answer", "metadata")

    def __call__(self, completions: Sequence[Completion], **columns: Any) -> list[float]:
        """1 or 0 for each; a ``ConfigError`` for ``REFUSED_TASKS``."""
        rows = zip(completions, *(columns[name] for name in self.columns), strict=True)
        answers = ((final_answer(text_of(completion)), *row) for completion, *row in rows)
        return [0.0 if given is None else float(is_right(name, given, *row)) for given, name, *row in answers]


def final_answer(
    completion: str, where: Where = "auto", otherwise: Callable[[str], str | None] = str.strip
) -> str | None:
    """The answer of the completion, for ``where="auto"`` without tag and box by ``otherwise``; None if it has none."""
    tagged = _TAG.findall(completion)
    if tagged and where in ("tag", "auto"):
        inside = _boxed(tagged[-1]) if where == "auto" else None
        return str(tagged[-1]).strip() if inside is None else inside
    boxed = _boxed(completion) if where in ("boxed", "auto") else None
    if boxed is not None or where in ("tag", "boxed"):
        return boxed
    return otherwise(completion) if where == "auto" else completion.strip()


def gold_answer(column: object) -> str:
    """The right answer: the column's text, or its part after ``####``, as in GSM8K."""
    return str(column).rpartition("####")[2].strip()


def last_number(text: str) -> str | None:
    """The last number of a text that stands alone; None if there is none."""
    found = _NUMBER_INSIDE.findall(text.translate(_MINUS))
    return found[-1] if found else None


def as_number(text: str) -> Fraction | None:
    """The exact number that the whole text is, such as ``-5``, ``-$1,234.5``, ``18%``, ``1/3`` or ``2e-3``; None otherwise.

    LaTeX's marks around it and inside are left out, as in ``$1{,}000$``, and asterisks around it.
    """
    if len(text := text.strip()) > _LONGEST_NUMBER:
        return None
    while (inside := _MARKUP.match(text)) is not None:
        text = inside[1]
    for mark, plain in (("\\$", "$"), ("\\%", "%"), ("{,}", ","), ("\\!", "")):
        text = text.replace(mark, plain)
    found = _WHOLE_NUMBER.fullmatch(text.translate(_MINUS))
    if found is None:
        return None
    over, under = (Fraction(part.replace(",", "")) for part in (found[2], found[3] or "1"))
    return (-over if found[1] == "-" else over) / under if under else None


def _boxed(text: str) -> str | None:
    r"""The content of the last ``\boxed{``, up to the brace that closes it."""
    _, opened, rest = text.rpartition("\\boxed{")
    if not opened:
        return None
    depth = 1
    for place, character in enumerate(rest):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth == 0:
            return rest[:place].strip()
    return None
