"""The task of a language model: prompts, their tokens, and rewards."""

import csv
import dataclasses
import functools
import inspect
import io
import itertools
import json
import math
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from groupwise import config
from groupwise import system as files
from groupwise.config.algorithm import AlgorithmCfg, OnNonFinite
from groupwise.config.base import GIVEN, OTHER_NAMES, refuse_unknown
from groupwise.config.policy import ModelCfg
from groupwise.config.run import GYM, RewardCfg, TextRunCfg, TextTaskCfg
from groupwise.errors import ConfigError, DataError, UnknownNameError, nearest, require_extra
from groupwise.plugins import TEXT_ENVS
from groupwise.seeding import derive_seed
from groupwise.text.builtin_rewards import check_gym_task
from groupwise.text.calls import PROBE, Call, CallForm, Schema, call_form, describe
from groupwise.text.rewards import Message, Prompt, RewardSet, make_reward
from groupwise.text.tools import encodable, make_tool

if TYPE_CHECKING:
    from groupwise.text.tool_env import Tools
    from groupwise.training.build import UserObjects

# Examples from files, objects and reasoning-gym


class Start(NamedTuple):
    """Start of an episode of a text environment."""

    seed: int
    options: Mapping[str, Any] | None = None
    """The row of the data that it is about, if there are data."""
    environment: str = ""
    """The name of its environment, if there are several."""


class Example(NamedTuple):
    """A prompt and its columns."""

    prompt: Prompt
    """A text, or messages with ``role`` and ``content``."""
    columns: dict[str, Any]
    """All other columns; they are passed to the rewards."""
    start: Start | None = None
    """Start of an episode, whose first observation is the prompt as soon as it begins."""
    turns: tuple[Message, ...] = ()
    """Messages of a demonstration after the prompt: the model's messages, and an answer between two of them."""


def load_examples(source: object, *, prompt_column: str | None = "prompt") -> list[Example]:
    """The examples of a file or an object; columns that a row lacks are None.

    Args:
        prompt_column: None: all columns are options of an environment, which gives the prompt.
        source: path of a ``.jsonl``, ``.json``, ``.csv`` or ``.parquet`` file; or a ``datasets.Dataset``, a pandas data
            frame or any other iterable of mappings, or of texts, which are prompts without columns.

    Raises:
        DataError: no examples, a row that cannot be read (names file and line), or a missing column.
    """
    where = str(source) if isinstance(source, str | Path) else "the data"
    if isinstance(source, str | Path):
        path = Path(source)
        if path.suffix.lower() not in (".jsonl", ".json", ".csv", ".parquet"):
            hub = f", of the Hub: datasets.load_dataset({str(path)!r}, split='train').to_json('train.jsonl')"
            raise DataError(
                f"data = {str(path)!r}: expected a file that ends in .jsonl, .json, .csv or .parquet; fix: convert it"
                f"{'' if path.suffix or path.exists() else hub}"
            )
        if not path.is_file():
            raise DataError(f"{str(path)!r}: there is no such file of prompts; fix: its path, seen from {Path.cwd()}")
        try:
            source = _read_file(path)
        except (ValueError, RecursionError) as error:  # also of JSON, Parquet and UTF-8
            raise DataError(f"{path}, {error}; fix: write it again, texts in UTF-8") from error
    elif "pandas" in sys.modules and isinstance(source, sys.modules["pandas"].DataFrame):
        source = _lists(source.astype(object).where(source.notna(), None).to_dict("records"))  # NaN is a text's absence
    if isinstance(source, Mapping) or not isinstance(source, Iterable):
        raise DataError(
            f"{where}: expected a path or a list of examples; got {source!r:.80}; fix: a list of mappings, or one part of "
            "a mapping, such as data['train']"
        )
    rows = [{prompt_column: row} if isinstance(row, str) and prompt_column else row for row in source]
    if not rows:
        raise DataError(f"{where} has no examples; fix: at least one prompt")
    for number, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise DataError(f"{where}, example {number}: got {row!r:.80}, no columns or text; fix: {{'prompt': ...}}")
    columns = list(dict.fromkeys(column for row in rows for column in row))
    if prompt_column is None:
        return [Example("", {column: _cell(row, column) for column in columns}) for row in rows]
    if prompt_column not in columns:
        there = ", ".join(sorted(map(repr, columns)))
        raise DataError(
            f"{where} has no column {prompt_column!r}; it has {there}; fix: prompt_column{nearest(prompt_column, columns)}"
        )
    examples = []
    for number, row in enumerate(rows):
        prompt = read_prompt(f"{where}, example {number}", row.get(prompt_column))
        examples.append(Example(prompt, {column: _cell(row, column) for column in columns if column != prompt_column}))
    if len({isinstance(example.prompt, str) for example in examples}) > 1:
        raise DataError(f"some prompts of {where} are texts and some are messages; fix: all of one kind")
    return examples


def gym_examples(
    name: str, *, size: int, part: str = "train", kwargs: Mapping[str, Any] | None = None
) -> list[Example]:
    """Examples of ``reasoning-gym:<task>`` for ``train`` or ``eval``, with the columns ``task``, ``answer`` and ``metadata``.

    The library draws item i from ``seed + i``; the seeds of the two parts are 2**30 apart.

    Raises:
        ConfigError: no such task, or a setting that the task does not have or refuses.
    """
    require_extra("reasoning_gym", "text")
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    task, kwargs = name.removeprefix(GYM), kwargs or {}
    if task not in DATASETS:
        raise UnknownNameError("reasoning-gym task", task, DATASETS)
    seed = derive_seed(0, "reasoning-gym") // 2 + (2**30 if part == "eval" else 0)
    try:
        items = reasoning_gym.create_dataset(task, seed=seed, size=size, **kwargs)
    except (TypeError, AssertionError) as error:
        known = ", ".join(field.name for field in dataclasses.fields(DATASETS[task][1]))
        raise ConfigError(f"data_kwargs of {GYM}{task}: {error}; fix: {known}") from error
    return [Example(one["question"], {"task": task} | {k: one[k] for k in ("answer", "metadata")}) for one in items]


def without_overlap(train: Sequence[Example], held_out: Sequence[Example]) -> list[Example]:
    """The training examples, at least one, whose prompts are not held out but for white space. Warns of the others.

    A prompt of a demonstration is all that the assistant answers, also in later turns.
    """

    def key(example: Example) -> tuple[tuple[str, str], ...]:
        prompt = example.prompt
        messages = ({"role": "user", "content": prompt},) if isinstance(prompt, str) else prompt
        messages += tuple(message for message in example.turns if message["role"] != "assistant")
        return tuple((message["role"], " ".join(message["content"].split())) for message in messages)

    keys = {*map(key, held_out)}
    kept = [example for example in train if key(example) not in keys]
    if not kept:
        raise DataError("all training prompts are in the evaluation data; fix: other eval_data, or eval_overlap='keep'")
    if dropped := len(train) - len(kept):
        warnings.warn(f"{dropped} of {len(train)} training prompts are in the evaluation data: dropped", stacklevel=2)
    return kept


def _read_file(path: Path) -> Any:
    """The content of a file; a ``ValueError`` if it is broken."""
    if path.suffix.lower() == ".parquet":
        from pyarrow.parquet import read_table

        return read_table(path).to_pylist()
    text = path.read_bytes().decode("utf-8-sig")  # line ends inside quotes are part of the text
    if path.suffix.lower() == ".json":
        return json.loads(text, object_pairs_hook=_once)
    rows: list[Any] = []
    if path.suffix.lower() == ".csv":
        reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
        limit = csv.field_size_limit(len(text))  # the module's own is 131,072 characters
        try:
            _once([(name, None) for name in reader.fieldnames or ()])
            for row in reader:
                if None in row or None in row.values():
                    raise csv.Error("not as many fields as columns")
                rows.append(row)
        except csv.Error as error:
            raise ValueError(f"near line {reader.line_num}: {error}") from error
        finally:
            csv.field_size_limit(limit)
        return rows
    for number, line in enumerate(text.split("\n"), 1):
        try:
            rows += [json.loads(line, object_pairs_hook=_once)] if line.strip() else []
        except json.JSONDecodeError as error:
            raise ValueError(f"line {number}: {error.msg}") from error
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from error
    return rows


def _once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """The mapping of these pairs; a ``ValueError`` if a name comes twice, of which the last would win."""
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{name!r:.80} comes twice")
        found[name] = value
    return found


def _cell(row: Mapping[Any, Any], column: str) -> Any:
    """The row's entry; None for NaN, by which tables mark one that is absent."""
    value = row.get(column)
    return None if isinstance(value, float) and math.isnan(value) else value


def _lists(value: object) -> Any:
    """The value with lists in place of NumPy's arrays, which data frames and some formats of ``datasets`` make of lists."""
    if isinstance(value, np.ndarray | list):
        return [_lists(one) for one in value]
    return {key: _lists(one) for key, one in value.items()} if isinstance(value, Mapping) else value


def read_prompt(where: str, prompt: object) -> Prompt:
    """The prompt, checked; a ``DataError`` that begins with ``where`` if it is neither a text nor messages."""
    if isinstance(prompt, str):
        return encodable(prompt)
    prompt = _lists(prompt)
    if not isinstance(prompt, Sequence) or not prompt:
        raise DataError(f"{where}: prompt = {prompt!r:.80}: expected a text or a list of messages; fix: one of these")
    messages = []
    for message in prompt:
        items = message.items() if isinstance(message, Mapping) else ()
        found: dict[str, Any] = {key: value for key, value in items if value is not None}
        content = found.get("content", "" if "tool_calls" in found else None)
        if isinstance(content, list):  # parts, as of APIs
            texts = [part.get("text") if isinstance(part, Mapping) else None for part in content]
            content = "".join(texts) if all(isinstance(text, str) for text in texts) else None  # type: ignore[arg-type]
        if not isinstance(content, str) or not isinstance(found.get("role"), str):
            raise DataError(
                f"{where}: message = {message!r:.80}: expected the texts role and content; fix: "
                "{'role': 'user', 'content': '...'}"
            )
        messages.append(found | {"role": encodable(found["role"]), "content": encodable(content)})
    if messages[-1]["role"] == "assistant" and messages[-1].get("tool_calls"):
        raise DataError(
            f"{where}: the last message has tool_calls, which a completion cannot continue: they would be dropped; fix: "
            "add the tool's answer, {'role': 'tool', 'content': '...'}, or leave the message out"
        )
    return tuple(messages)


def demonstration(example: Example) -> Example:
    """The example with its turns: the column ``completion``, a text or messages; else its prompt from the first message of the
    assistant on. A ``DataError`` if it has neither, or the assistant's messages are not in turn with answers.
    """
    if example.turns:
        return example
    prompt, columns = example.prompt, dict(example.columns)
    where, found = f"prompt {str(prompt)[:80]!r}", columns.pop("completion", None)
    if found is not None:
        message = [{"role": "assistant", "content": found}]
        turns = read_prompt(f"{where}, completion", message if isinstance(found, str) else found)
    else:
        roles = [] if isinstance(prompt, str) else [message["role"] for message in prompt]
        first = roles.index("assistant") if "assistant" in roles else len(prompt)
        prompt, turns = prompt[:first], prompt[first:]
    if not turns or isinstance(turns, str) or prompt == ():
        raise DataError(
            f"{where} has no completion to learn, and the columns {', '.join(sorted(columns)) or 'none'}; fix: a column "
            "'completion', or messages with the assistant's (prompt_column='messages')"
        )
    turns = turns if turns[-1]["role"] == "assistant" else turns[:-1]
    wrong = any((message["role"] == "assistant") == bool(number % 2) for number, message in enumerate(turns))
    if wrong or any(message.get("tool_calls") for message in turns):
        raise DataError(
            f"{where} goes on with {', '.join(message['role'] for message in turns)}; expected the assistant's messages, with one answer "
            "between two of them, and calls of tools as their text; fix: the row"
        )
    start = example.start
    if start is not None and start.options is not None:  # a tool's episode begins with the prompt, not the answers
        row = {name: prompt if value is example.prompt else value for name, value in start.options.items()}
        row.pop("completion", None)
        start = start._replace(options=row)
    return Example(prompt, columns, start=start, turns=turns)


# Encoding of prompts, decoding of completions

SECONDS_OF_TEMPLATE = 10.0
"""CPU time of a chat template for a prompt. It is a program in the model's folder, which can loop."""
LONGEST_TOKEN = 32
"""Characters; those of texts have fewer on average."""
_WRITTEN, _ANSWER = "WRITTEN", "ANSWER"
"""Placeholders of the model's turn, whose tokens are known, and of an answer whose pieces are encoded by themselves."""


class EncodedPrompt(NamedTuple):
    """An example and the tokens that the model reads."""

    example: Example
    tokens: tuple[int, ...]


class PromptEncoder:
    """The tokens of prompts, as the task and the tokenizer's chat template have them."""

    def __init__(self, tokenizer: Any, cfg: TextTaskCfg) -> None:
        if tokenizer is None:
            raise ConfigError("the policy has no tokenizer; fix: CausalLM(model, tokenizer=...)")
        self.tokenizer = tokenizer
        self.cfg = cfg
        self.conversational: bool = cfg.chat == "auto" and tokenizer.chat_template is not None
        """Whether texts become messages."""
        for name in cfg.changed("system_prompt", "chat_template_kwargs") if not self.conversational else ():
            raise self._no_template(f"{name} is")

    def encode(self, example: Example, tools: Sequence[Schema] = ()) -> list[int]:
        """The prompt's tokens, never cut; an error for messages that the template refuses.

        Args:
            tools: that the model may call. A template without a form for calls gets their description as part of the first message.
        """
        described = describe(tools) if tools and self.call_form is None else None
        if not self.conversational:
            if not isinstance(example.prompt, str):
                raise self._no_template("the data's prompts are")
            text = example.prompt if described is None else f"{described}\n\n{example.prompt}"
            ids: list[int] = self.tokenizer(text)["input_ids"]
            if ids[:2] == [self.tokenizer.bos_token_id] * 2 and not text.startswith(2 * self.tokenizer.bos_token):
                ids = ids[1:]  # the text begins with it, and so do all texts
            end = self.tokenizer.eos_token
            if end is not None and ids[-1:] == [self.tokenizer.eos_token_id] and not text.endswith(end):
                ids = ids[:-1]  # some tokenizers end every text
            if not ids and self.tokenizer.bos_token_id is None:
                raise DataError("an empty prompt has no tokens, and the tokenizer no bos token; fix: a text")
            return ids or [self.tokenizer.bos_token_id]
        prompt = example.prompt
        messages: list[Message] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [*prompt]
        if self.cfg.system_prompt is not None and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": encodable(self.cfg.system_prompt)})
        continues = messages[-1]["role"] == "assistant"
        how = {"add_generation_prompt": not continues, "continue_final_message": continues, "return_dict": False}
        if described is not None:
            messages[0] = {**messages[0], "content": f"{described}\n\n{messages[0]['content']}"}
        elif tools:
            how |= {"tools": [*tools]}
        tokens: list[int] = self._apply(messages, **how)
        return tokens

    @functools.cached_property
    def call_form(self) -> CallForm | None:
        """How the chat template writes calls of tools; None if it writes none, or in no form that is found out."""
        if not self.conversational:
            return None
        user: Message = {"role": "user", "content": "?"}

        def whole(calls: Sequence[Call], *, as_text: bool) -> str:
            functions = [call.message(as_text=as_text) for call in calls]
            said: Message = {"role": "assistant", "content": "", "tool_calls": functions}
            text: str = self._apply([user, said], tokenize=False, tools=[PROBE])
            return text

        def render(calls: Sequence[Call]) -> str:
            begun = self._apply([user], tokenize=False, add_generation_prompt=True, tools=[PROBE])
            try:
                text = whole(calls, as_text=False)
            except DataError:
                text = whole(calls, as_text=True)
            return text[_same(begun, text) :]

        return call_form(render)

    def read_turn(self, tokens: Sequence[int], text: str, tools: Sequence[Schema] = ()) -> str:
        """A turn with its calls as environments read them; ``text`` is the turn without special tokens."""
        if self.call_form is None:
            return text
        ends = [token for token in tokens[-1:] if not self.tokenizer.decode([token], skip_special_tokens=True)]
        return self.call_form.canonical(self.tokenizer.decode(tokens[: len(tokens) - len(ends)]), tools)

    def select(self, examples: Sequence[Example], context: int | None = None) -> list[EncodedPrompt]:
        """The examples whose prompts are short enough, encoded; ``context`` is the room that the model leaves for a prompt.

        Raises:
            DataError: a prompt is too long and ``on_long_prompt="error"``, or all are.
        """
        messages = itertools.chain(*(example.prompt for example in examples if not isinstance(example.prompt, str)))
        for key in sorted(set(itertools.chain(*messages)) - {"role", "content"}):
            if key not in str(self.tokenizer.chat_template):
                warnings.warn(f"the chat template does not use {key!r} of the messages", stacklevel=2)
        if self.cfg.env is not None or self.cfg.tools:
            return [EncodedPrompt(example, ()) for example in examples]  # encoded when an episode begins
        encoded = [EncodedPrompt(example, tuple(self.encode(example))) for example in examples]
        limit = min(self.cfg.max_prompt_tokens or math.inf, context or math.inf)
        too_long = [prompt for prompt in encoded if len(prompt.tokens) > limit]
        if not too_long:
            return encoded
        longest = max(len(prompt.tokens) for prompt in too_long)
        message = (
            f"{len(too_long)} of {len(encoded)} prompts have more than {limit} tokens (the longest {longest}); the first: "
            f"{str(too_long[0].example.prompt)[:80]!r}"
        )
        if self.cfg.on_long_prompt == "error" or len(too_long) == len(encoded):
            room = "a larger max_prompt_tokens" if limit == self.cfg.max_prompt_tokens else "a smaller max_new_tokens"
            drop = ", or in training gw.TextTask(on_long_prompt='drop')" * (len(too_long) < len(encoded))
            raise DataError(f"{message}; fix: shorter prompts, {room}{drop}")
        warnings.warn(f"{message}; they are dropped", stacklevel=2)
        return [prompt for prompt in encoded if len(prompt.tokens) <= limit]

    def encode_turn(self, text: str, end: int | None = None) -> list[int]:
        """The tokens of a turn that the model has not sampled, and the token ``end`` after it."""
        return [*self._ids(text), *([] if end is None else [end])]

    def encode_answer(self, messages: Sequence[Message], end: int | None = None) -> list[int]:
        """All tokens between two turns of the model: messages of tools, or of the user, which are rendered together; plain text if
        prompts are no messages.

        An end-of-text token that the model wrote itself, ``end``, is not repeated. Special tokens that a message spells are
        plain text, so it cannot end a turn or begin a call. A ``ConfigError`` if the chat template has no place for an answer
        after the assistant's message.
        """
        pieces = [self._pieces(message["content"]) for message in messages]
        if any(len(several) > 1 or _ANSWER in several[0] for several in pieces):
            messages = [{**message, "content": f"{_ANSWER}{n}."} for n, message in enumerate(messages)]
        place, rendered = 0, "".join(map(self.as_text, messages))
        if self.conversational:
            of_tools = messages[0]["role"] == "tool"
            role, with_calls = self._answer_style if of_tools else ("user", False)
            if role == "user":  # some templates take no two in a row
                messages = [{"role": "user", "content": "\n".join(message["content"] for message in messages)}]
            rendered = self._render(messages, with_calls=with_calls)
            place = rendered.index(_WRITTEN) + len(_WRITTEN)
            if with_calls:  # up to what ends the calls, which the model wrote
                called = rendered[: _same(rendered, self._render(messages, with_calls=True, answered=False))]
                place = max((found.start() for found in self._special_token.finditer(called)), default=len(called))
        texts = [""]
        for number, part in enumerate(re.split(rf"{_ANSWER}(\d+)\.", rendered)):
            first, *others = pieces[int(part)] if number % 2 else [part]
            texts[-1] += first
            texts += others
        whole = [*itertools.chain(*map(self._ids, texts))]
        if not self.conversational:
            return whole
        before = self._ids(rendered[:place])
        if whole[: len(before)] != before:
            raise ConfigError(
                "a token of the chat template overlaps the assistant's text, so that no tool's answer can follow it; "
                "fix: another template, or chat='never'"
            )
        tokens = whole[len(before) :]
        place = tokens.index(end) if end in tokens else 0
        ends_turn = end in tokens and not self.tokenizer.decode(tokens[:place]).strip()
        return tokens[place + 1 :] if ends_turn else tokens

    def as_text(self, message: Message) -> str:
        """A message after a turn as plain text."""
        content: str = message["content"]
        return self.cfg.tool_answer.replace("{}", content) if message["role"] == "tool" else content

    def shorten(self, text: str, limit: int) -> str:
        """The text in at most ``limit`` tokens, about: the middle is left out, and a note says so."""
        longest = LONGEST_TOKEN * limit
        ends = text if len(text) <= 2 * longest else text[:longest] + text[-longest:]  # encoding more may take minutes
        tokens, note = self._ids(ends), "\n[the middle is left out]\n"
        if len(tokens) <= limit and ends == text:
            return text
        room = max(limit - len(self._ids(note)), 0)
        first, last = tokens[: room - room // 2], tokens[len(tokens) - room // 2 :]
        return f"{self.tokenizer.decode(first)}{note}{self.tokenizer.decode(last)}"

    def _pieces(self, text: str) -> list[str]:
        """The text, cut so that no piece spells a special token."""
        pieces, last = [], 0
        while found := self._special_token.search(text, last):
            pieces.append(text[last : found.start() + 1])
            last = found.start() + 1
        return [*pieces, text[last:]]

    @functools.cached_property
    def _special_token(self) -> re.Pattern[str]:
        """Tokens that are looked for in a text before it is divided into others; runs of spaces, which some add, are harmless."""
        added = [token.content for token in self.tokenizer.added_tokens_decoder.values()]
        return re.compile("|".join(re.escape(token) for token in added if len(token.strip()) > 1) or "(?!)")

    @functools.cached_property
    def _answer_style(self) -> tuple[str, bool]:
        """Role of a tool's answer, and whether it must follow a message with a call: ``tool``, or ``user`` where the template refuses
        that or leaves it out.
        """
        for role, with_calls in (("tool", False), ("tool", True), ("user", False)):
            with suppress(DataError, ConfigError, ValueError):
                rendered = self._render([{"role": role, "name": "look_up", "content": "84"}], with_calls=with_calls)
                if "84" in rendered.partition(_WRITTEN)[2]:
                    return role, with_calls
        raise ConfigError(
            "the tokenizer's chat template has no message of role 'tool' or 'user' after the assistant's, for a tool's "
            "answer; fix: another template, or chat='never'"
        )

    def _render(self, answers: Sequence[Message], *, with_calls: bool = False, answered: bool = True) -> str:
        """A conversation in which the answers follow a turn of the model, with calls of the tools that they name."""
        said: Message = {"role": "assistant", "content": _WRITTEN}
        if with_calls:
            calls = [Call(answer.get("name") or "look_up", {"word": _WRITTEN}) for answer in answers]
            said = {"role": "assistant", "content": "", "tool_calls": [call.message() for call in calls]}
        messages = [{"role": "user", "content": "?"}, said, *(answers if answered else ())]
        text: str = self._apply(messages, tokenize=False, add_generation_prompt=answered)
        return text

    def _apply(self, messages: list[Message], **how: Any) -> Any:
        """Render messages by the chat template; a ``DataError`` if it refuses them, fails or takes too long."""
        from jinja2 import TemplateError

        failures = ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError, TypeError, ValueError
        try:
            with files.limiting(SECONDS_OF_TEMPLATE):
                return self.tokenizer.apply_chat_template(messages, **how, **self.cfg.chat_template_kwargs)
        except (TemplateError, TimeoutError, *failures) as error:
            raise DataError(
                f"the chat template refuses {messages}: {error or repr(error)}; fix: other roles, or their order, or another "
                "template"
            ) from error

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def _no_template(self, what: str) -> ConfigError:
        never = self.cfg.chat == "never"
        reason = "chat='never'" if never else f"{self.tokenizer.name_or_path!r} has no chat template"
        fix = "chat='auto'" if never else "the tokenizer of a chat model, or one with a chat_template"
        return ConfigError(f"{what} for conversations, but {reason}; fix: {fix}, or prompts that are texts")


def _same(one: str, other: str) -> int:
    """Number of characters with which both begin."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((number for number, (a, b) in pairs if a != b), min(len(one), len(other)))


# The task


class TextTask:
    """Prompts and rewards, as ``gw.train`` takes them.

    Args:
        data: a path, ``reasoning-gym:<task>``, or an iterable of texts or mappings, such as a ``datasets.Dataset``.
        reward: a function of TRL's signature, the name of a registered one, a ``RewardCfg``, or several of these. None: that
            of reasoning-gym data.
        eval_data: held-out data, like ``data``.
        reward_weights: one for each reward, in place of theirs.
        tool: a ``Tool``, a function from the text of a turn to the answer (None: no call), or the name of a registered
            tool.
        tools: functions that the model calls by name, with type hints and a docstring that describes their arguments; or names of
            registered ones.
        env: a ``TextEnv`` class, a function that makes one, or the name of a registered one. ``data`` are its episodes' options,
            none by default: then episodes differ by their seeds, ``data_size`` of them. Also a class as TRL's
            ``environment_factory`` takes it, or several by the name that the data's column ``environment`` has.
        settings: other fields of ``TextTaskCfg``.

    Raises:
        ConfigError: a setting that does not exist or is impossible, or not one weight for each reward.
    """

    def __init__(
        self,
        data: object = "",
        *,
        reward: object = None,
        eval_data: object = None,
        reward_weights: Iterable[float] | None = None,
        tool: "str | Callable[[str], str | None] | None" = None,
        tools: "Sequence[str | Callable[..., Any] | Tools]" = (),
        env: object = None,
        **settings: Any,
    ) -> None:
        refuse_unknown(settings, {*TextTaskCfg.model_fields, "reward", "reward_weights"} - {"rewards"}, "TextTask")
        if not isinstance(tools, list | tuple):
            raise ConfigError(f"tools = {tools!r:.80}: expected a list of functions; fix: tools=[...]")
        if env is not None and not isinstance(env, str | Mapping) and not callable(env):
            raise ConfigError(
                f"env = {env!r:.80}: expected a class or a function that makes an environment, since each member of a group plays "
                f"in its own; fix: env=lambda: {type(env).__name__}(...)"
            )
        data, eval_data = ([*one] if isinstance(one, Iterator) else one for one in (data, eval_data))  # read twice
        rewards = _several(reward)
        for one in rewards:
            if not isinstance(one, RewardCfg | str) and not callable(one):
                raise ConfigError(
                    f"reward = {one!r}: expected a function, the name of a registered one, or RewardCfg; fix: reward=my_function"
                )
        names = [one if isinstance(one, RewardCfg | str) else GIVEN for one in rewards]
        cfgs = [RewardCfg(name=one) if isinstance(one, str) else one for one in names]
        if reward_weights is not None:
            weights = [*reward_weights] if isinstance(reward_weights, Iterable) else [reward_weights]
            if len(weights) != len(cfgs):
                raise ConfigError(f"reward_weights = {weights} for {len(cfgs)} rewards; fix: one for each")
            cfgs = [RewardCfg(**dict(cfg) | {"weight": w}) for cfg, w in zip(cfgs, weights, strict=True)]
        self.cfg = TextTaskCfg(
            data=str(data) if isinstance(data, str | Path) else GIVEN,
            eval_data=str(eval_data) if isinstance(eval_data, str | Path) else None if eval_data is None else GIVEN,
            rewards=tuple(cfgs),
            tool=GIVEN if callable(tool) else tool,
            tools=tuple(one if isinstance(one, str) else GIVEN for one in tools),
            env=env if env is None or isinstance(env, str) else GIVEN,
            **settings,
        )
        """The settings, with ``<given in Python>`` in place of objects."""
        self.given: dict[str, Any] = {
            "data": None if isinstance(data, str | Path) else data,
            "eval_data": None if isinstance(eval_data, str | Path) else eval_data,
            "reward": [one for one in rewards if callable(one)] or None,
            "tool": tool if callable(tool) else None,
            "tools": [one for one in tools if not isinstance(one, str)] or None,
            "env": None if isinstance(env, str) else env,
        }
        """The objects, as ``gw.resume`` takes them again."""

    def tool(self) -> Callable[[str], str | None] | None:
        """The model's tool, as ``make_tool`` makes it; None if it has none."""
        return make_tool(self.cfg, self.given["tool"]) if self.cfg.tool else None

    @classmethod
    def from_cfg(cls, cfg: TextTaskCfg, given: "UserObjects") -> "TextTask":
        """The task that the settings describe, with the objects that were given in Python."""
        task = cls.__new__(cls)
        task.cfg, task.given = cfg, given._asdict()
        return task

    def load(self, *, demos: bool = False) -> tuple[list[Example], list[Example]]:
        """Examples to train on, and those held out; the former without the latter unless ``eval_overlap="keep"``.

        Args:
            demos: whether they are demonstrations, with their ``turns``.

        Raises:
            ConfigError: data that were given in Python are missing.
            DataError: no examples, or examples that cannot be read.
        """
        train, held_out = self._examples("data"), self.held_out()
        if demos:
            train, held_out = ([demonstration(one) for one in part] for part in (train, held_out))
        if self.cfg.eval_overlap == "keep" or self.cfg.env is not None:
            return train, held_out
        return without_overlap(train, held_out), held_out

    def held_out(self, least: int = 0) -> list[Example]:
        """Examples that are held out, none without ``eval_data``, and episodes of an environment by other seeds; errors as ``load``.

        Args:
            least: number of those by seeds.
        """
        return [] if self.cfg.eval_data is None and not self.cfg.by_seeds else self._examples("eval_data", least)

    def rewards(self, on_nonfinite: OnNonFinite = "stop") -> RewardSet:
        """The functions, ready to score; ``on_nonfinite`` as ``AlgorithmCfg.on_nonfinite``.

        Raises:
            ConfigError: there is none, it does not take its settings, or it was given in Python and is missing.
        """
        cfgs = self.cfg.rewards
        if not cfgs and self.cfg.data.startswith(GYM):
            check_gym_task(self.cfg.data.removeprefix(GYM))
            cfgs = (RewardCfg(name="reasoning_gym"),)
        functions = [one for one in _several(self.given["reward"]) if callable(one)]
        count = sum(cfg.name == GIVEN for cfg in cfgs)
        if len(functions) != count:
            raise ConfigError(
                f"{count} reward(s) were given in Python, but now {len(functions)}; fix: give them again, in their order, as "
                "reward=..."
            )
        given = iter(functions)
        made = [make_reward(cfg, next(given) if cfg.name == GIVEN else None) for cfg in cfgs]
        if self.cfg.env is not None and not self._rewards_nothing():
            made.insert(0, make_reward(RewardCfg(name=GIVEN), environment))
        return RewardSet(made, on_nonfinite, self.cfg.reward_timeout)

    def _rewards_nothing(self) -> bool:
        """Whether the environments are classes of TRL's that have no reward of their own."""
        env = self.given["env"] if self.cfg.env == GIVEN else TEXT_ENVS.get(self.cfg.env or "")
        several = env.values() if isinstance(env, Mapping) else [env]
        return all(inspect.isclass(one) and not {"step", "get_reward"} & {*dir(one)} for one in several)

    def _examples(self, name: Literal["data", "eval_data"], least: int = 0) -> list[Example]:
        cfg, source = self.cfg, vars(self.cfg)[name]
        size, part = (cfg.data_size, "train") if name == "data" else (cfg.eval_size, "eval")
        if cfg.by_seeds:
            examples = [Example("", {})] * max(size, least)
        elif source.startswith(GYM):
            examples = gym_examples(source, size=size, part=part, kwargs=cfg.data_kwargs)
        else:
            if source == GIVEN:
                source = self.given[name]
                if source is None:
                    raise ConfigError(f"the {name} were given in Python; fix: give them again as {name}=...")
            examples = load_examples(source, prompt_column=None if cfg.env else cfg.prompt_column)
        return [self._begun(example, part, n) for n, example in enumerate(examples)] if cfg.has_env else examples

    def _begun(self, example: Example, part: str, number: int) -> Example:
        """The example with the start of its episode; a ``DataError`` if it is of no environment."""
        row, environment = dict(example.columns), ""
        if self.cfg.env is None:
            row[self.cfg.prompt_column] = example.prompt
        if isinstance(several := self.given["env"], Mapping):
            environment = row.pop("environment", None)
            if not isinstance(environment, str) or environment not in several:
                raise DataError(
                    f"row {number} of the {part} data: environment = {environment!r:.80}: expected one of {', '.join(several)}; fix: data "
                    "with a column 'environment'"
                )
        seed = derive_seed(0, "text env", part, number)
        return example._replace(start=Start(seed, None if self.cfg.by_seeds else row, environment))


def environment(completions: Sequence[object], episode_return: Sequence[float] = (), **columns: object) -> list[float]:
    """The reward of a text environment: the sum over an episode's turns."""
    return [*episode_return]


def _several(reward: object) -> list[Any]:
    """The rewards, of which there may be none, one or several."""
    if reward is None:
        return []
    return [*reward] if isinstance(reward, list | tuple) else [reward]


# Settings of a run from data and rewards given in Python


def text_cfg(
    task: TextTaskCfg,
    algorithm: str | AlgorithmCfg | dict[str, Any] | None,
    preset: str | None,
    policy: object,
    settings: dict[str, Any],
) -> TextRunCfg:
    """The settings of a run on a task, from ``model``, ``lora`` and other fields of ``TextRunCfg``. A given policy has its own model
    and sampling.

    Raises:
        ConfigError: a setting is unknown or impossible, or there is no model.
    """
    require_extra("transformers", "text")
    from groupwise.text.policy import CausalLM

    if policy is not None and not isinstance(policy, CausalLM):
        raise ConfigError(f"policy = {policy!r:.80}: expected a gw.CausalLM; fix: model='path-or-hub-id', lora=...")
    model, lora = settings.pop("model", None), settings.pop("lora", settings.get("peft_config"))
    if dataclasses.is_dataclass(lora):
        given = {OTHER_NAMES.get(name, name): sorted(v) if isinstance(v, set) else v for name, v in vars(lora).items()}
        shown = {name: given[name] for name in ("r", "alpha", "targets", "rslora", "dora") if given.get(name)}
        raise ConfigError(f"lora is a {type(lora).__name__} of peft, expected settings by name; fix: lora={shown}")
    if policy is not None:
        others = {"model": model, "lora": lora, "sampling": settings.get("sampling")}
        if named := [key for key, value in others.items() if value is not None]:
            fix = "gw.CausalLM(..., sampling=...)" if named == ["sampling"] else "leave them out"
            raise ConfigError(f"a policy has its own model and sampling, got {', '.join(named)}; fix: {fix}")
        model, settings["sampling"] = ModelCfg(path=GIVEN), policy.sampling
        settings["adapters"] = policy.has_adapters
    elif model is None:
        raise ConfigError("no model; fix: model='path-or-hub-id', or policy=CausalLM(...)")
    if isinstance(model, str | Path):
        model = {"path": str(model)}
    elif isinstance(model, ModelCfg):
        model = model.model_dump(exclude_unset=True)
    if lora is not None and isinstance(model, Mapping):
        model = {**model, "lora": lora}
    return config.resolve_text(algorithm, preset, task=task, model=model, **settings)
