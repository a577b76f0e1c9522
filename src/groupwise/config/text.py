"""Settings of texts and rewards. Imports no torch and no transformers."""

from typing import Any, Literal

from pydantic import model_validator

from groupwise.config.base import GIVEN, Cfg, PositiveInt

GYM = "reasoning-gym:"
"""Begins the name of a task of that library."""


class RewardCfg(Cfg):
    """A function that scores completions."""

    name: str
    """A registered one: ``regex``, ``length``, ``exact``, ``numeric``, ``math``, ``reasoning_gym``, or your own. ``<given in Python>`` stands for a function that was passed in."""
    weight: float = 1.0
    """Its scores count so many times."""
    kwargs: dict[str, Any] = {}
    """Its own settings."""


class TextTaskCfg(Cfg):
    """Prompts, and what completions of them are worth."""

    data: str = ""
    """File of training prompts (``.jsonl``, ``.json``, ``.csv``, ``.parquet``), or ``reasoning-gym:`` and the name of a task. ``<given in Python>`` stands for an object that was passed in."""
    eval_data: str | None = None
    """Likewise, of prompts that are held out for evaluation. None: there are none."""
    data_kwargs: dict[str, Any] = {}
    """Settings of a reasoning-gym task, training and evaluation alike."""
    data_size: PositiveInt = 1000
    """Training prompts that reasoning-gym makes."""
    eval_size: PositiveInt = 100
    """Evaluation prompts that reasoning-gym makes."""
    eval_overlap: Literal["drop", "keep", "error"] = "drop"
    """Training prompts that stand in the evaluation data, too: left out of training; kept; or refused. Both of the former warn. What reasoning-gym makes twice is replaced without a word."""
    prompt_column: str = "prompt"
    """Where the prompt stands: a text, or a list of messages ``{"role": ..., "content": ...}``. All other columns go to the rewards."""
    system_prompt: str | None = None
    """Begins every conversation that does not begin with one of its own. Needs a chat template."""
    chat: Literal["auto", "never"] = "auto"
    """``auto``: a text becomes a user's message if the tokenizer has a chat template, as those of chat models do; ``never``: texts go in as they are."""
    chat_template_kwargs: dict[str, Any] = {}
    """What else the template takes, such as ``{"enable_thinking": false}``."""
    max_prompt_tokens: PositiveInt | None = None
    """A prompt of more tokens is too long. None: only the model's context limits it."""
    on_long_prompt: Literal["error", "drop"] = "error"
    """What becomes of prompts that are too long: refused, or left out with a warning. They are never cut."""
    rewards: tuple[RewardCfg, ...] = ()
    """Functions whose weighted scores add up. Empty: for reasoning-gym data, ``reasoning_gym``."""
    on_reward_error: Literal["fail", "skip"] = "fail"
    """When a function raises: the run stops, or the completions of that call have no reward, so that they neither count nor are compared. A function may return None for a completion that it cannot score."""
    success_threshold: float = 1.0
    """From this reward on a completion counts as right (pass@k)."""
    tool: str | None = None
    """What the model can call, to write on when it has read the answer, which is not trained on: ``calculator``, or your own registered one. ``<given in Python>`` stands for an object that was passed in. None: a completion is one turn."""
    tool_kwargs: dict[str, Any] = {}
    """Its own settings."""
    tool_answer: str = "<result>{}</result>"
    """How an answer, ``{}``, stands in a text. In a conversation it is a message."""
    max_turns: PositiveInt = 2
    """So often the model writes at most; after its last turn the tool is not asked."""

    @model_validator(mode="after")
    def _check_tool(self) -> "TextTaskCfg":
        fields = type(self).model_fields
        for name in ("tool_kwargs", "tool_answer", "max_turns"):
            if self.tool is None and vars(self)[name] != fields[name].default:
                raise ValueError(
                    f"{name}={vars(self)[name]!r} does nothing without a tool; fix: tool='calculator', or leave it out"
                )
        if self.tool == GIVEN and self.tool_kwargs:
            raise ValueError(
                f"tool_kwargs={self.tool_kwargs!r} are of a registered tool; got one that was made in Python, fix: make it so"
            )
        if self.tool_answer.count("{}") != 1:
            raise ValueError(
                f"tool_answer={self.tool_answer!r}: expected {{}} once, where the answer goes; fix: '<result>{{}}</result>'"
            )
        return self

    @model_validator(mode="after")
    def _check_system_prompt(self) -> "TextTaskCfg":
        if self.system_prompt is not None and self.chat == "never":
            raise ValueError(
                "system_prompt is the first message of a conversation, and chat='never' has none; fix: chat='auto', or "
                "begin the prompts with it"
            )
        return self
