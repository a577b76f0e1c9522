"""The calculator, by hand and on nonsense; how tools are named, made and asked."""

import operator
from fractions import Fraction

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from groupwise.config.base import GIVEN
from groupwise.config.run import TextTaskCfg
from groupwise.errors import ConfigError, GroupwiseError, ToolError
from groupwise.text import tools
from groupwise.text.task import TextTask
from groupwise.text.tools import Calculator, ask, calculate, make_tool, register_tool

VALUES = (
    "12*(3+4) = 84; 1 + 2 = 3; 0.1+0.2 = 0.3; 0.1*10-1 = 0; 1/4 = 0.25; 2/3 = 0.666666666667; 1/3*3 = 1; 10/5 = 2; "
    "7//2 = 3; -7//2 = -4; -7%3 = 2; 7.5%2 = 1.5; 2**10 = 1024; -2**2 = -4; 2**3**2 = 512; 2**-2 = 0.25; "
    "2**0.5 = 1.41421356237; +3 = 3; 123456789123456789*10 = 1234567891234567890; 1**99999999999999999999 = 1"
)


@pytest.mark.parametrize("line", [*VALUES.split("; "), f"2**511+(2**511-1) = {2**512 - 1}"])
def test_values(line):
    expression, value = line.split(" = ")
    assert calculate(f" {expression} ") == value


NO_VALUE = {
    "division by zero": ["1/0", "1%0", "0**-1"],
    "too large": [
        *["9" * 160, f"{2**512}", f"{2**511}*2", "1e300", f"{9**150}*{9**150}"],
        *["9**9**9", "2**513", "3**500", "9.5**9999.5", "2**512", "2**511*2"],
    ],
    "expected numbers, parentheses and + - * / // % **": [
        *["(0-8)**(1/3)", "(0-8)**0.5", "1+", "", " ", "()", "2(3)", "...", "007", "1 2", "1+(2", "*(1)", "1,2"],
        *["__import__('os').system('true')", "True", "٣+1"],
    ],
}


@pytest.mark.parametrize(("reason", "expression"), [(why, one) for why, some in NO_VALUE.items() for one in some])
def test_what_has_no_value_says_why(reason, expression):
    assert calculate(expression) == f"error: {reason}"


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
@example("(" * 200)
@example("-" * 199 + "1")
@example("(" * 90 + "1" + ")" * 90)
@example("2**" * 66 + "2")
def test_nonsense_is_answered(text):
    answer = calculate(text)
    assert answer.startswith("error: ") or Fraction(answer) is not None


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
def test_a_call_ends_the_turn_and_its_tag_may_be_another(text, answer):
    assert (Calculator()(text), Calculator().stop) == (answer, ("</calc>",))
    other = make_tool(TextTaskCfg(tool="calculator", tool_kwargs={"tag": "c."}))
    assert other.stop == ("</c.>",)
    assert other(text.replace("calc>", "c.>")) == answer
    assert other("<cx>1+1</cx>") is None


def test_registered_tools_take_their_settings(monkeypatch):
    monkeypatch.setattr(tools, "TOOLS", dict(tools.TOOLS))

    @register_tool("repeated")
    def repeated(text, times):
        return text * times

    @register_tool("plain")
    class Plain:
        def __call__(self, text):
            return text.upper()

    assert make_tool(TextTaskCfg(tool="repeated", tool_kwargs={"times": 2}))("ab") == "abab"
    assert make_tool(TextTaskCfg(tool="plain"))("a") == "A"
    with pytest.raises(ConfigError, match="tool 'repeated' is registered already; fix: choose another name"):
        register_tool("repeated")(repeated)
    for kwargs, wrong in [({"time": 2}, "times"), ({"text": 2}, "text"), ({}, "times")]:
        with pytest.raises(ConfigError, match=f"tool 'repeated': .* argument:? '{wrong}'"):
            make_tool(TextTaskCfg(tool="repeated", tool_kwargs=kwargs))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tool": "calculater"}, "unknown tool 'calculater': did you mean 'calculator'"),
        ({"tool": "calculator", "tool_kwargs": {"tags": "x"}}, "argument 'tags'; did you mean 'tag'"),
        ({"tool": GIVEN}, r"the tool was given in Python; fix: give it again as tool=\.\.\."),
    ],
)
def test_tools_that_cannot_be_made(settings, message):
    with pytest.raises(GroupwiseError, match=message):
        make_tool(TextTaskCfg(**settings))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_turns": 3}, "max_turns=3 has no effect without a tool; fix: tool='calculator'"),
        ({"tool_kwargs": {"tag": "x"}}, "tool_kwargs=.* has no effect without a tool"),
        ({"tool_answer": "[{}]"}, "tool_answer=.* has no effect without a tool"),
        ({"tool": "calculator", "tool_answer": "[]"}, r"tool_answer='\[\]': expected \{\} once"),
        ({"tool": "calculator", "tool_answer": "{}{}"}, "expected {} once"),
        ({"tool": Calculator(), "tool_kwargs": {"tag": "x"}}, "tool_kwargs=.* are for a registered tool;"),
        ({"tool": "calculator", "max_turns": 0}, "max_turns = 0"),
    ],
)
def test_settings_that_contradict_each_other(settings, message):
    with pytest.raises(ConfigError, match=message):
        TextTask(["1"], reward="exact", **settings)


def test_a_tool_that_fails_is_told_with_what_it_was_given():
    def fails(text):
        raise KeyError("x")

    for tool, message in [(fails, r"raised KeyError: 'x'\s+its input: 'abc'"), (lambda text: 3, "returned 3")]:
        with pytest.raises(ToolError, match=f"the tool {message}"):
            ask(tool, "abc")
    assert ask(lambda text: None, "abc") is None
    with pytest.warns(UserWarning, match="lone surrogates"):
        assert ask(lambda text: "a\ud800b\ud83d\ude00", "") == "a\ufffdb\U0001f600"
