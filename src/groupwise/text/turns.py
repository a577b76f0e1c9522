"""Between two turns of a model's: the tokens that it reads there, and several turns as a completion for rewards."""

from collections.abc import Sequence
from typing import Any

from groupwise.config.text import TextTaskCfg
from groupwise.errors import ConfigError
from groupwise.text.data import Message
from groupwise.text.prompts import PromptEncoder

_WRITTEN = "WRITTEN"
"""Stands for what the model wrote, which is never encoded again."""
_PROBE = "84"


class AnswerEncoder:
    """The tokens between the model's last one and where it writes again: a message if prompts are, else a text.

    Args:
        encoder: of the prompts.

    Raises:
        ConfigError: the chat template has no place for an answer behind the assistant's message.
    """

    def __init__(self, tokenizer: Any, cfg: TextTaskCfg, encoder: PromptEncoder) -> None:
        self._tokenizer = tokenizer
        self._cfg = cfg
        self._encoder = encoder
        self._role = self._find_role() if encoder.conversational else None
        self.encode(_PROBE)

    def encode(self, answer: str, end: int | None = None) -> list[int]:
        """What stands between the turns.

        Args:
            end: the token that ends texts which the model wrote itself, and which is not repeated. None: it wrote none.
        """
        if self._role is None:
            return self._ids(self._encoder.inline(answer))
        rendered = self._render(self._role, answer)
        place = rendered.index(_WRITTEN) + len(_WRITTEN)
        before, whole = self._ids(rendered[:place]), self._ids(rendered)
        if whole[: len(before)] != before:
            raise ConfigError(
                "a token of the chat template reaches into what the assistant writes, so that a tool's answer cannot be put "
                "behind it; fix: another template, or chat='never'"
            )
        return self._behind_end(whole[len(before) :], end)

    def _find_role(self) -> str:
        """``tool``, or ``user`` where the template refuses that or leaves it out."""
        from jinja2 import TemplateError

        for role in ("tool", "user"):
            try:
                behind = self._render(role, _PROBE).partition(_WRITTEN)[2]
            except TemplateError:
                continue
            if _PROBE in behind:
                return role
        raise ConfigError(
            "the tokenizer's chat template has no message of role 'tool' or 'user' behind the assistant's, where a tool's "
            "answer could go; fix: another template, or chat='never'"
        )

    def _render(self, role: str, answer: str) -> str:
        messages = [
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": _WRITTEN},
            {"role": role, "content": answer},
        ]
        kwargs = self._cfg.chat_template_kwargs
        text: str = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **kwargs)
        return text

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def _behind_end(self, tokens: list[int], end: int | None) -> list[int]:
        """The tokens without the end of the model's turn, if that is what they begin with."""
        if end not in tokens:
            return tokens
        place = tokens.index(end)
        begins = not self._tokenizer.decode(tokens[:place]).strip()
        return tokens[place + 1 :] if begins else tokens


def as_messages(written: Sequence[str], answers: Sequence[str]) -> list[Message]:
    """Turns and what came between them, as TRL has them: messages of the assistant, and of the tool."""
    messages: list[Message] = []
    for turn, text in enumerate(written):
        messages.append({"role": "assistant", "content": text})
        if turn < len(answers):
            messages.append({"role": "tool", "content": answers[turn]})
    return messages
