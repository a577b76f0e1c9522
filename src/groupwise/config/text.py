"""Settings of texts and rewards. Imports no torch and no transformers."""

from typing import Any, Literal

from pydantic import model_validator

from groupwise.config.base import GIVEN, Cfg, Positive, PositiveInt

GYM = "reasoning-gym:"
"""Prefix of reasoning-gym tasks."""


class RewardCfg(Cfg):
    """One reward function."""

    name: str
    """A registered reward: ``regex``, ``exact``, ``numeric``, ``math``, ``reasoning_gym``, or your own. ``<given in Python>`` stands for an object passed in Python."""
    weight: float = 1.0
    """Factor of its scores."""
    kwargs: dict[str, Any] = {}
    """Arguments of the reward."""


class TextTaskCfg(Cfg):
    """Prompts and their rewards."""

    data: str = ""
    """Training prompts: a file (``.jsonl``, ``.json``, ``.csv``, ``.parquet``) or ``reasoning-gym:<task>``. ``<given in Python>`` stands for an object passed in Python."""
    eval_data: str | None = None
    """Held-out prompts for evaluation, given in the same way. None: no evaluation."""
    data_kwargs: dict[str, Any] = {}
    """Arguments of a reasoning-gym task."""
    data_size: PositiveInt = 1000
    """Number of training prompts of a reasoning-gym task."""
    eval_size: PositiveInt = 100
    """Number of evaluation prompts of a reasoning-gym task."""
    eval_overlap: Literal["drop", "keep"] = "drop"
    """Training prompts that are also in the evaluation data: drop them with a warning, or keep them."""
    prompt_column: str = "prompt"
    """Column of the prompt: a string, or a list of messages ``{"role": ..., "content": ...}``. Other columns go to the rewards."""
    system_prompt: str | None = None
    """First message of every conversation that has no system message. Needs a chat template."""
    chat: Literal["auto", "never"] = "auto"
    """``auto``: a string becomes a user message if the tokenizer has a chat template; ``never``: strings are used as they are."""
    chat_template_kwargs: dict[str, Any] = {}
    """Further arguments of the chat template, such as ``{"enable_thinking": false}``."""
    max_prompt_tokens: PositiveInt | None = None
    """Longest prompt, in tokens. None: limited by the model's context only."""
    on_long_prompt: Literal["error", "drop"] = "error"
    """Prompts that are too long: raise an error, or drop them with a warning. They are never cut."""
    rewards: tuple[RewardCfg, ...] = ()
    """Reward functions; their weighted scores are added. Empty: ``reasoning_gym`` for reasoning-gym data."""
    reward_timeout: Positive | None = None
    """Seconds that a call of a reward function may take, in a process of its own; a call that takes longer gives no reward. It draws its own random numbers. None: rewards run in the process of training, without a limit. Built-in rewards have limits of their own."""
    success_threshold: float = 1.0
    """A completion with at least this reward counts as a success (pass@k)."""
    tool: str | None = None
    """A tool that answers the model's calls: ``calculator``, or your own registered one. Answers are not trained on. None: a completion is one turn."""
    tool_kwargs: dict[str, Any] = {}
    """Arguments of the tool."""
    tool_timeout: Positive | None = None
    """Seconds that a call of the tool may take, in a process of its own; a call that takes longer is answered by an error, which the model reads. None: the tool runs in the process of training, without a limit."""
    tool_answer: str = "<result>{}</result>"
    """Format of an answer ``{}`` in plain text. In a conversation it is a message."""
    max_turns: PositiveInt = 2
    """Most turns of the model in one episode."""

    @model_validator(mode="after")
    def _check(self) -> "TextTaskCfg":
        if self.tool is None:
            for name, value in self.changed("tool_kwargs", "tool_timeout", "tool_answer", "max_turns").items():
                raise ValueError(
                    f"{name}={value!r} has no effect without a tool; fix: tool='calculator', or leave it out"
                )
        gym = {"data": self.data.startswith(GYM), "eval_data": (self.eval_data or "").startswith(GYM)}
        for name, read in {
            "data_size": gym["data"],
            "eval_size": gym["eval_data"],
            "data_kwargs": any(gym.values()),
        }.items():
            if not read and (value := self.changed(name)):
                raise ValueError(
                    f"{name}={value[name]!r} is of reasoning-gym tasks, which "
                    f"{'eval_data' if name == 'eval_size' else 'data'} does not name; fix: leave it out, or '{GYM}<task>'"
                )
        if self.tool == GIVEN and self.tool_kwargs:
            raise ValueError(
                f"tool_kwargs={self.tool_kwargs!r} are for registered tools, got a Python object; fix: leave them out"
            )
        if self.tool_answer.count("{}") != 1:
            raise ValueError(
                f"tool_answer={self.tool_answer!r}: expected {{}} once, where the answer goes; fix: '<result>{{}}</result>'"
            )
        if self.system_prompt is not None and self.chat == "never":
            raise ValueError(
                "system_prompt is a message of a conversation, and chat='never' has none; fix: chat='auto', or add it to "
                "the prompts"
            )
        return self
