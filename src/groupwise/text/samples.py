"""Completions of prompts of the user's, apart from training."""

from collections.abc import Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import Any

import torch

from groupwise.config.policy import SamplingCfg
from groupwise.config.text import TextTaskCfg
from groupwise.errors import ConfigError
from groupwise.seeding import derive_seed
from groupwise.text.data import Example, Prompt, read_prompt
from groupwise.text.generation import complete
from groupwise.text.policy import CausalLM
from groupwise.text.prompts import PromptEncoder
from groupwise.text.tools import AnyTool, make_tool
from groupwise.text.transcripts import Dialogue, Transcript, write

_PROMPTS_AT_ONCE = 32


def is_single(prompts: object) -> bool:
    """Whether it is one prompt, a text or a list of messages, and not several."""
    return isinstance(prompts, str) or (isinstance(prompts, Sequence) and any(isinstance(p, Mapping) for p in prompts))


def read_prompts(prompts: str | Sequence[Any]) -> list[Prompt]:
    """One prompt or several, checked; a ``DataError`` names the one that is neither a text nor messages."""
    several = [prompts] if is_single(prompts) else prompts
    return [read_prompt(f"prompt {number}", prompt) for number, prompt in enumerate(several)]


def write_texts(
    policy: CausalLM,
    prompts: Sequence[Prompt],
    count: int,
    *,
    sampling: SamplingCfg,
    task: TextTaskCfg | None = None,
    deterministic: bool,
    seed: int,
    tool: AnyTool | None = None,
) -> list[list[str]]:
    """``count`` completions of each prompt.

    Args:
        task: how prompts become tokens, and which tool there is.
        tool: the task's tool, if it was given in Python.

    Raises:
        ConfigError: the policy has no tokenizer.
        DataError: a prompt is too long.
    """
    if policy.tokenizer is None:
        raise ConfigError("the policy has no tokenizer; fix: CausalLM(model, tokenizer=...)")
    task = task or TextTaskCfg()
    encoder = PromptEncoder(policy.tokenizer, task.model_copy(update={"on_long_prompt": "error"}))
    room = policy.max_prompt_length(sampling.max_new_tokens)
    encoded = encoder.select([Example(prompt, {}) for prompt in prompts], room)
    groups = [
        [Transcript(prompt, number, derive_seed(seed, "sample", number, i), deterministic) for i in range(count)]
        for number, prompt in enumerate(encoded)
    ]
    with closing(Dialogue(encoder, make_tool(task, tool), policy.context_length)) as dialogue:
        for first in range(0, len(groups), _PROMPTS_AT_ONCE):
            some = groups[first : first + _PROMPTS_AT_ONCE]
            write([member for group in some for member in group], partial(complete, policy), sampling, dialogue)
    return [[member.text for member in group] for group in groups]


def predict(policy: CausalLM, prompts: str | Sequence[Any], deterministic: bool) -> str | list[str]:
    """A completion of each prompt, as ``policy.predict`` returns it; random ones by torch's global generator."""
    seed = 0 if deterministic else int(torch.randint(2**31, ()))
    read = read_prompts(prompts)
    texts = write_texts(policy, read, 1, sampling=policy.sampling, deterministic=deterministic, seed=seed)
    return texts[0][0] if is_single(prompts) else [text for (text,) in texts]
