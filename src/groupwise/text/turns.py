"""The tokens of a tool's answer between two turns of the model."""

from typing import Any

from groupwise.errors import ConfigError
from groupwise.text.prompts import PromptEncoder

_WRITTEN = "WRITTEN"
"""Placeholder of the model's turn, whose tokens are known."""
_PROBE = "84"


class AnswerEncoder:
    """Encodes all tokens between two turns of the model: a message if prompts are messages, otherwise plain text.

    Raises:
        ConfigError: the chat template has no place for an answer after the assistant's message.
    """

    def __init__(self, encoder: PromptEncoder) -> None:
        self._tokenizer: Any = encoder.tokenizer
        self._encoder = encoder
        self._role = self._find_role() if encoder.conversational else None
        self.encode(_PROBE)

    def encode(self, answer: str, end: int | None = None) -> list[int]:
        """The tokens between the turns.

        Args:
            end: the end-of-text token that the model wrote itself, and which is not repeated. None: it wrote none.
        """
        if self._role is None:
            return self._ids(self._encoder.inline(answer))
        rendered = self._render(self._role, answer)
        place = rendered.index(_WRITTEN) + len(_WRITTEN)
        before, whole = self._ids(rendered[:place]), self._ids(rendered)
        if whole[: len(before)] != before:
            raise ConfigError(
                "a token of the chat template overlaps the assistant's text, so that no tool's answer can follow it; "
                "fix: another template, or chat='never'"
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
            "the tokenizer's chat template has no message of role 'tool' or 'user' after the assistant's, for a tool's "
            "answer; fix: another template, or chat='never'"
        )

    def _render(self, role: str, answer: str) -> str:
        messages = [
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": _WRITTEN},
            {"role": role, "content": answer},
        ]
        kwargs = self._encoder.cfg.chat_template_kwargs
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
