"""The text of tool calls: how a chat template writes them, found out from what it renders, and one form for environments."""

import ast
import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import accumulate
from typing import Any, NamedTuple

from groupwise.errors import GroupwiseError

Schema = Mapping[str, Any]
"""A tool as chat templates take it: ``{"type": "function", "function": {"name", "description", "parameters"}}``."""


class Call(NamedTuple):
    """A tool's name and arguments."""

    name: str
    arguments: dict[str, Any]

    def message(self, *, as_text: bool = False) -> dict[str, Any]:
        """An entry of a message's ``tool_calls``; some templates take the arguments as a text."""
        arguments = json.dumps(self.arguments) if as_text else self.arguments
        return {"type": "function", "function": {"name": self.name, "arguments": arguments}}

    def __str__(self) -> str:
        text = json.dumps({"name": self.name, "arguments": self.arguments}, ensure_ascii=False)
        return _OPEN + text.replace(_CLOSE, _CLOSE.replace("/", r"\/")) + _CLOSE  # which an argument may have


_DEEPEST = 100
"""Levels of a call's arguments. Much deeper ones cannot be sent to another process."""
_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_CALL = re.compile(f"{_OPEN}(.*?)(?:{_CLOSE}|$)", re.DOTALL)


def read_calls(text: str) -> tuple[str, list[Call | str]]:
    """The text without its calls, ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, and these; the reason for one that
    cannot be read.
    """
    return _CALL.sub("", text).strip(), [_read_call(found) for found in _CALL.findall(text)]


def _read_call(text: str) -> Call | str:
    levels = accumulate((mark in "[{") - (mark in "]}") for mark in text)
    if max(levels, default=0) > _DEEPEST:
        return f"the call has more than {_DEEPEST} levels"
    try:
        call = json.loads(text, parse_constant=_refuse)
        json.dumps(call, ensure_ascii=False).encode()  # lone surrogates end a server's session
    except (ValueError, RecursionError) as error:
        return f"the call is no JSON: {error}"
    arguments = call.get("arguments", {}) if isinstance(call, Mapping) else None
    if not isinstance(arguments, Mapping) or not isinstance(call.get("name"), str):
        return 'expected {"name": "...", "arguments": {...}}'
    return Call(call["name"], dict(arguments))


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is no number of JSON")


def describe(tools: Sequence[Schema]) -> str:
    """Tools, and how to call them, for models whose chat template does not say."""
    lines = [json.dumps(tool["function"], ensure_ascii=False) for tool in tools]
    example = Call("name", {"argument": "value"})
    return (
        f"You have tools. To call one, write\n{example}\nand read its result in the next message. Tools:\n"
        + "\n".join(lines)
    )


class CallForm(NamedTuple):
    """How a chat template writes calls, found out from what it renders."""

    start: str
    """Text before each call, or its name. Empty: the whole turn is a call."""
    keys: tuple[str, str] | None = None
    """Keys of the name and the arguments in a call's JSON. None: the name is before the JSON of the arguments."""
    argument: tuple[str, str, str] | None = None
    """Text before an argument's name, between it and the value, and after the value, where arguments are no JSON."""
    python: bool = False
    """Whether calls are Python's, in a list."""

    def canonical(self, text: str, tools: Sequence[Schema] = ()) -> str:
        """The text with calls as ``read_calls`` reads them; one that cannot be read stays as it is, between the same marks.

        Args:
            tools: say which arguments are texts, where the form writes these without quotes.
        """
        if not self.start:
            text = text.strip()
            return self._call(text, tools) if text[:1] in ("{", "[") else text
        if self.keys is None and self.start != _OPEN:  # tags around another form
            text = text.replace(_OPEN, "")
        plain, *calls = text.split(self.start)
        return plain + "".join(self._call(call, tools) for call in calls)

    def _call(self, text: str, tools: Sequence[Schema]) -> str:
        # text after the call stays where _CLOSE ends it, which may stand in an argument or in that text, too
        cuts = [text.partition(_CLOSE), text.rpartition(_CLOSE)] if _CLOSE in text else [(text, "", "")]
        for written, _, after in cuts:
            with suppress(AttributeError, LookupError, MemoryError, RecursionError, SyntaxError, TypeError, ValueError):
                return "".join(map(str, self._calls(written, tools))) + after
        return f"{_OPEN}{written.strip()}{_CLOSE}{after}"

    def _calls(self, text: str, tools: Sequence[Schema]) -> list[Call]:
        decode = json.JSONDecoder(parse_constant=_refuse).raw_decode
        if self.keys is not None:
            found, _ = decode(text.lstrip())
            several = found if isinstance(found, list) else [found]
            return [Call(_text(one[self.keys[0]]), _mapping(one.get(self.keys[1], {}))) for one in several]
        if self.python:
            listed = ast.parse(text[: text.rindex("]") + 1].strip(), mode="eval").body
            calls = listed.elts if isinstance(listed, ast.List) else []
            return [Call(_text(c.func.id), {k.arg: ast.literal_eval(k.value) for k in c.keywords}) for c in calls]  # type: ignore
        name = re.match(r"[\w.-]+", text)
        if name is None:
            raise ValueError
        rest = text[name.end() :]
        if self.argument is None:
            return [Call(name[0], _mapping(decode(rest[rest.index("{") :])[0]))]
        before, between, after = map(re.escape, self.argument)
        pairs = re.findall(rf"{before}(.*?){between}(.*?){after}", rest, re.DOTALL)
        declared = {tool["function"]["name"]: tool["function"].get("parameters", {}) for tool in tools}
        kinds = declared.get(name[0], {}).get("properties", {})
        # templates put at most one line break at each end
        values = {key.strip(): value.removeprefix("\n").removesuffix("\n") for key, value in pairs}
        return [Call(name[0], {key: _value(value, kinds.get(key, {})) for key, value in values.items()})]


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value


def _mapping(value: Any) -> dict[str, Any]:
    value = json.loads(value) if isinstance(value, str) else value
    if not isinstance(value, Mapping):
        raise TypeError
    return dict(value)


def _value(text: str, kind: Mapping[str, Any]) -> Any:
    """The argument of a form whose texts have no quotes, by its JSON schema."""
    types = {one.get("type") for one in (kind, *kind.get("anyOf", ()))} - {None}
    if types == {"string"} or (types == {"string", "null"} and text != "null"):
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


PROBE: Schema = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Look up.",
        "parameters": {
            "type": "object",
            "properties": {"word": {"type": "string", "description": "A word."}, "times": {"type": "integer", "description": "How often."}},
            "required": ["word"],
        },
    },
}  # fmt: skip
"""A tool whose calls a chat template renders, so that its form is found out."""
_PROBED = [Call("look_up", {"word": "azure", "times": 3}), Call("look_up", {"word": "pear", "times": 47})]


def call_form(render: Callable[[list[Call]], str]) -> CallForm | None:
    """The form in which a chat template writes calls; None if it writes none, or not in a form that is known.

    Args:
        render: the assistant's message with the calls, as the template has it after the prompt.
    """
    try:
        text = render(_PROBED[:1])
    except GroupwiseError:
        return None
    name = text.rfind("look_up")
    for form in _candidates(text, name) if name >= 0 else ():
        for calls in (_PROBED[:1], _PROBED):
            try:
                rendered = render(calls)
            except GroupwiseError:
                if calls == _PROBED:
                    continue  # some templates refuse several calls in a turn
                break
            found = read_calls(form.canonical(rendered))[1]
            if not found or found != calls[: len(found)]:  # some render the first one only
                break
        else:
            return form
    return None


def _candidates(text: str, name: int) -> list[CallForm]:
    forms, decode = list[CallForm](), json.JSONDecoder().raw_decode
    for start in (place for place, letter in enumerate(text[:name]) if letter in "{["):
        try:
            found, _ = decode(text[start:])
        except ValueError:
            continue
        call = found[0] if isinstance(found, list) else found
        keys = [next((k for k in call if want(call[k])), "") for want in (lambda v: v == "look_up", _is_probed)]
        before = "" if text.lstrip().startswith(text[start:]) else _mark(text[:start])
        forms.append(CallForm(before, keys=(keys[0], keys[1])))
    mark, rest = _mark(text[:name]), text[name + len("look_up") :]
    if mark:
        forms += [CallForm(mark), CallForm(_mark(text[:name], "["), python=True)]
        parts = re.search(r"(\S*)word(.*?)azure\s*(\S+?>|\S+)", rest, re.DOTALL)
        if parts is not None:
            forms.append(CallForm(mark, argument=(parts[1], parts[2].strip("\n"), parts[3])))
    return forms


def _is_probed(value: Any) -> bool:
    try:
        return _mapping(value) == _PROBED[0].arguments
    except (TypeError, ValueError):
        return False


def _mark(text: str, opened: str = "[{") -> str:
    """The last mark of a text: a tag, a word in brackets or what no space divides."""
    found = re.search(r"(<[^<>\s]*>?|\[\w+\]|[^\s<>]+)$", text.rstrip(f" \n{opened}"))
    return "" if found is None else found[0]
