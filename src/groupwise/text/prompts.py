"""From prompts to tokens, and from completions to texts."""

import functools
import math
import warnings
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from groupwise.config.text import TextTaskCfg
from groupwise.errors import ConfigError, DataError
from groupwise.text.data import Example, Message, encodable

_WRITTEN = "WRITTEN"
"""Placeholder of the model's turn, whose tokens are known."""
_PROBE = "84"


class EncodedPrompt(NamedTuple):
    """An example and the tokens that the model reads."""

    example: Example
    tokens: tuple[int, ...]


class PromptEncoder:
    """The tokens of prompts, as the task and the tokenizer's chat template have them.

    Args:
        tokenizer: what ``AutoTokenizer`` loads. It needs no pad token.
    """

    def __init__(self, tokenizer: Any, cfg: TextTaskCfg) -> None:
        self.tokenizer = tokenizer
        self.cfg = cfg
        self.conversational: bool = cfg.chat == "auto" and tokenizer.chat_template is not None
        """Whether texts become messages."""
        if cfg.system_prompt is not None and not self.conversational:
            raise self._no_template("system_prompt is")

    def encode(self, example: Example) -> list[int]:
        """The prompt's tokens, never cut; an error for messages that the template refuses."""
        if isinstance(example.prompt, str) and not self.conversational:
            return self._encode_text(example.prompt)
        if not self.conversational:
            raise self._no_template("the data's prompts are")
        return self._encode_messages(self._messages(example))

    def select(self, examples: Sequence[Example], context: int | None = None) -> list[EncodedPrompt]:
        """The examples whose prompts are short enough, encoded.

        Args:
            context: tokens that the model leaves for a prompt.

        Raises:
            DataError: a prompt is too long and ``on_long_prompt="error"``, or all are.
        """
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
            raise DataError(
                f"{message}; fix: shorter prompts, on_long_prompt='drop', or a "
                f"{'larger max_prompt_tokens' if limit == self.cfg.max_prompt_tokens else 'smaller max_new_tokens'}"
            )
        warnings.warn(f"{message}; they are dropped", stacklevel=2)
        return [prompt for prompt in encoded if len(prompt.tokens) <= limit]

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of a completion, without special tokens."""
        text: str = self.tokenizer.decode(list(tokens), skip_special_tokens=True)
        return text

    def inline(self, answer: str) -> str:
        """A tool's answer as plain text."""
        return self.cfg.tool_answer.replace("{}", answer)

    def encode_answer(self, answer: str, end: int | None = None) -> list[int]:
        """All tokens between two turns of the model: a message if prompts are messages, otherwise plain text.

        Args:
            answer: the tool's.
            end: the end-of-text token that the model wrote itself, and which is not repeated. None: it wrote none.

        Raises:
            ConfigError: the chat template has no place for an answer after the assistant's message.
        """
        if not self.conversational:
            return self._ids(self.inline(answer))
        rendered = self._render(self._answer_role, answer)
        place = rendered.index(_WRITTEN) + len(_WRITTEN)
        before, whole = self._ids(rendered[:place]), self._ids(rendered)
        if whole[: len(before)] != before:
            raise ConfigError(
                "a token of the chat template overlaps the assistant's text, so that no tool's answer can follow it; "
                "fix: another template, or chat='never'"
            )
        tokens = whole[len(before) :]
        place = tokens.index(end) if end in tokens else 0
        ends_turn = end in tokens and not self.tokenizer.decode(tokens[:place]).strip()
        return tokens[place + 1 :] if ends_turn else tokens

    @functools.cached_property
    def _answer_role(self) -> str:
        """``tool``, or ``user`` where the template refuses that or leaves it out."""
        from jinja2 import TemplateError

        for role in ("tool", "user"):
            with suppress(TemplateError):
                if _PROBE in self._render(role, _PROBE).partition(_WRITTEN)[2]:
                    return role
        raise ConfigError(
            "the tokenizer's chat template has no message of role 'tool' or 'user' after the assistant's, for a tool's "
            "answer; fix: another template, or chat='never'"
        )

    def _render(self, role: str, answer: str) -> str:
        """A conversation in which the answer follows a turn of the model."""
        messages = [
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": _WRITTEN},
            {"role": role, "content": answer},
        ]
        kwargs = self.cfg.chat_template_kwargs
        text: str = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **kwargs)
        return text

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def _encode_text(self, text: str) -> list[int]:
        tokens: list[int] = self.tokenizer(text)["input_ids"]
        end = self.tokenizer.eos_token
        if end is not None and tokens[-1:] == [self.tokenizer.eos_token_id] and not text.endswith(end):
            tokens = tokens[:-1]  # some tokenizers end every text
        if tokens:
            return tokens
        if self.tokenizer.bos_token_id is None:
            raise DataError("an empty prompt has no tokens, and the tokenizer no bos token; fix: a text")
        return [self.tokenizer.bos_token_id]

    def _messages(self, example: Example) -> list[Message]:
        text = isinstance(example.prompt, str)
        messages = [{"role": "user", "content": str(example.prompt)}] if text else [*example.prompt]
        if self.cfg.system_prompt is not None and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": encodable(self.cfg.system_prompt)})
        return messages

    def _encode_messages(self, messages: list[Message]) -> list[int]:
        from jinja2 import TemplateError

        continues = messages[-1]["role"] == "assistant"
        try:
            tokens: list[int] = self.tokenizer.apply_chat_template(
                messages,
                add_generation_prompt=not continues,
                continue_final_message=continues,
                return_dict=False,
                **self.cfg.chat_template_kwargs,
            )
        except TemplateError as error:
            raise DataError(
                f"the chat template refuses {messages}: {error}; fix: other roles, or their order"
            ) from error
        return tokens

    def _no_template(self, what: str) -> ConfigError:
        reason = "chat='never'" if self.cfg.chat == "never" else f"{self.tokenizer.name_or_path!r} has no chat template"
        return ConfigError(
            f"{what} for conversations, but {reason}; fix: the tokenizer of a chat model, chat='auto', or prompts that are texts"
        )
