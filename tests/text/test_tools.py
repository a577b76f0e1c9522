"""The calculator, by hand and on nonsense; how tools are named, made and asked."""

import operator
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from groupwise.config.base import GIVEN
from groupwise.config.run import TextTaskCfg
from groupwise.errors import ConfigError, ToolError, UnknownNameError
from groupwise.text import tools
from groupwise.text.task import TextTask
from groupwise.text.tools import Calculator, Tool, ask, calculate, make_tool, register_tool
from groupwise.training.build import UserObjects

VALUES = (
    "12*(3+4) = 84; 1 + 2 = 3; 0.1+0.2 = 0.3; 0.1*10-1 = 0; 1/4 = 0.25; 2/3 = 0.666666666667; 1/3*3 = 1; 10/5 = 2; "
    "7//2 = 3; -7//2 = -4; -7%3 = 2; 7.5%2 = 1.5; 2**10 = 1024; -2**2 = -4; 2**3**2 = 512; 2**-2 = 0.25; "
    "2**0.5 = 1.41421356237; +3 = 3; 123456789123456789*10 = 1234567891234567890; 1**99999999999999999999 = 1"
)


@pytest.mark.parametrize("line", VALUES.split("; "))
def test_values(line):
    expression, value = line.split(" = ")
    assert calculate(f" {expression} ") == value


NO_VALUE = {
    "division by zero": ["1/0", "1%0", "0**-1"],
    "too large": ["9**9**9", "2**513", "3**500", "9" * 160, "9.5**9999.5", "2**512", "2**511*2"],
    "expected numbers, parentheses and + - * / // % **": [
        "(0-8)**(1/3)",
        "(0-8)**0.5",
        "1+",
        "",
        " ",
        "()",
        "2(3)",
        "...",
        "007",
        "1 2",
        "1+(2",
        "*(1)",
        "1,2",
        "__import__('os').system('true')",
        "True",
        "٣+1",
    ],
}


@pytest.mark.parametrize(("reason", "expression"), [(why, one) for why, some in NO_VALUE.items() for one in some])
def test_what_has_no_value_says_why(reason, expression):
    assert calculate(expression) == f"error: {reason}"


def test_the_largest_numbers_are_those_of_512_bits():
    assert calculate("2**511+(2**511-1)") == str(2**512 - 1)


def _combined(left, right):
    signs = {"+": operator.add, "-": operator.sub, "*": operator.mul}
    return st.sampled_from(sorted(signs)).map(
        lambda sign: (f"({left[0]}{sign}{right[0]})", signs[sign](left[1], right[1]))
    )


EXPRESSIONS = st.recursive(
    st.integers(0, 99).map(lambda n: (str(n), n)),
    lambda inner: st.tuples(inner, inner).flatmap(lambda pair: _combined(*pair)),
    max_leaves=12,
)


@given(EXPRESSIONS)
def test_sums_and_products_are_exact(made):
    text, value = made
    assert calculate(text) == str(value)


@given(st.integers(-999, 999), st.integers(1, 999))
def test_a_quotient_is_right_to_twelve_digits(top, bottom):
    assert abs(Fraction(calculate(f"{top}/{bottom}")) - Fraction(top, bottom)) <= abs(Fraction(top, bottom)) / 10**11


@given(st.text("0123456789+-*/%(). ", max_size=200))
def test_nonsense_is_answered(text):
    answer = calculate(text)
    assert answer.startswith("error: ") or Fraction(answer) is not None


@pytest.mark.parametrize("text", ["(" * 200, "-" * 199 + "1", "(" * 90 + "1" + ")" * 90, "2**" * 66 + "2"])
def test_deep_nesting_is_answered(text):
    assert calculate(text) in ("1", "-1") or calculate(text).startswith("error: ")


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("So <calc>12*(3+4)</calc>", "84"),
        ("<calc> 1+1 </calc>\n", "2"),
        ("<calc>1</calc> and <calc>2</calc>", "2"),
        ("<calc>1+<calc>2</calc>", "2"),
        ("<calc></calc>", "error: expected numbers, parentheses and + - * / // % **"),
        ("<calc>1+1", None),
        ("1+1</calc>", None),
        ("12", None),
    ],
)
def test_calls(text, answer):
    assert Calculator()(text) == answer


def test_a_call_ends_the_turn_and_its_tag_may_be_another():
    assert Calculator().stop == ("</calc>",)
    other = Calculator(tag="c.")
    assert other.stop == ("</c.>",)
    assert (other("<c.>1+1</c.>"), other("<cx>1+1</cx>")) == ("2", None)


def test_a_tool_is_made_from_settings_or_given():
    assert make_tool(TextTaskCfg()) is None
    assert make_tool(TextTaskCfg(tool="calculator", tool_kwargs={"tag": "x"})).stop == ("</x>",)
    calculator = Calculator()
    assert make_tool(TextTaskCfg(tool=GIVEN), calculator) is calculator
    assert make_tool(TextTaskCfg(tool=GIVEN), str.upper) is str.upper


def test_registered_tools_take_their_settings(monkeypatch):
    monkeypatch.setattr(tools, "TOOLS", dict(tools.TOOLS))

    @register_tool("repeated")
    def repeated(text, times=1):
        return text * times

    assert make_tool(TextTaskCfg(tool="repeated", tool_kwargs={"times": 2}))("ab") == "abab"
    with pytest.raises(ConfigError, match="tool 'repeated' is registered already; fix: choose another name"):
        register_tool("repeated")(repeated)
    for wrong in ("time", "text"):
        with pytest.raises(ConfigError, match=f"tool 'repeated': .* argument '{wrong}'"):
            make_tool(TextTaskCfg(tool="repeated", tool_kwargs={wrong: 2}))


def test_registered_tools_are_called_and_have_what_they_need(monkeypatch):
    monkeypatch.setattr(tools, "TOOLS", dict(tools.TOOLS))

    @register_tool("times")
    def times(text, count):
        return text * count

    @register_tool("plain")
    class Plain:
        def __call__(self, text):
            return text.upper()

    with pytest.raises(ConfigError, match="tool 'times': missing a required argument: 'count'"):
        make_tool(TextTaskCfg(tool="times"))
    assert make_tool(TextTaskCfg(tool="plain"))("a") == "A"


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"tool": "calculater"}, UnknownNameError, r"unknown tool 'calculater': did you mean 'calculator'\?"),
        (
            {"tool": "calculator", "tool_kwargs": {"tags": "x"}},
            ConfigError,
            "tool 'calculator': .* unexpected keyword argument 'tags'; did you mean 'tag'",
        ),
        ({"tool": GIVEN}, ConfigError, r"the tool was given in Python; fix: give it again as tool=\.\.\."),
    ],
)
def test_tools_that_cannot_be_made(settings, error, message):
    with pytest.raises(error, match=message):
        make_tool(TextTaskCfg(**settings))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_turns": 3}, "max_turns=3 has no effect without a tool; fix: tool='calculator'"),
        ({"tool_kwargs": {"tag": "x"}}, "tool_kwargs=.* has no effect without a tool"),
        ({"tool_answer": "[{}]"}, "tool_answer=.* has no effect without a tool"),
        ({"tool": "calculator", "tool_answer": "[]"}, r"tool_answer='\[\]': expected \{\} once"),
        ({"tool": "calculator", "tool_answer": "{}{}"}, "expected {} once"),
        ({"tool": Calculator(), "tool_kwargs": {"tag": "x"}}, "tool_kwargs=.* are for registered tools"),
        ({"tool": "calculator", "max_turns": 0}, "max_turns = 0"),
    ],
)
def test_settings_that_contradict_each_other(settings, message):
    with pytest.raises(ConfigError, match=message):
        TextTask(["1"], reward="exact", **settings)


def test_a_task_records_its_tool_and_is_made_again_with_it():
    named = TextTask(["1"], reward="exact", tool="calculator", max_turns=3)
    assert (named.cfg.tool, named.cfg.max_turns, named.given["tool"]) == ("calculator", 3, None)
    assert isinstance(TextTask.from_cfg(named.cfg, UserObjects(data=["1"])).tool(), Calculator)
    tool = Calculator()
    task = TextTask(["1"], reward="exact", tool=tool)
    assert task.cfg.tool == GIVEN
    assert TextTask.from_cfg(task.cfg, UserObjects(data=["1"], tool=tool)).tool() is tool
    with pytest.raises(ConfigError, match="the tool was given in Python"):
        TextTask.from_cfg(task.cfg, UserObjects(data=["1"])).tool()
    assert TextTask(["1"], reward="exact").tool() is None


class Failing(Tool):
    def __init__(self, result):
        self.result = result

    def __call__(self, text):
        if isinstance(self.result, Exception):
            raise self.result
        return self.result


def test_a_tool_that_fails_is_told_with_what_it_was_given():
    with pytest.raises(ToolError, match=r"the tool raised KeyError: 'x'\s+its input: 'abc'\s+fix: the tool"):
        ask(Failing(KeyError("x")), "abc")
    with pytest.raises(
        ToolError, match=r"the tool returned 3; expected a text, or None for no call; fix: str\(\.\.\.\)"
    ):
        ask(Failing(3), "abc")
    assert ask(Failing(None), "abc") is None
    assert ask(Failing("3"), "abc") == "3"


def test_lone_surrogates_of_an_answer_are_replaced():
    with pytest.warns(UserWarning, match="lone surrogates"):
        assert ask(lambda text: "a\ud800b\ud83d\ude00", "") == "a\ufffdb\U0001f600"
