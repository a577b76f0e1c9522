"""Who writes the completions: backends of one protocol.

All of them draw the same tokens from the same seeds, up to the rounding of logits, and say what they drew from.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers.generation import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)

from groupwise.config.policy import SamplingCfg
from groupwise.text.decoding import Completion, Writing, complete, left_padded
from groupwise.text.policy import CausalLM


class Generator(ABC):
    """Writes completions with the weights that it was given last."""

    def sync(self, policy: CausalLM) -> None:  # noqa: B027 (in process there is nothing to do)
        """Give the generator the weights to write with. In process they are the policy's own, and nothing happens."""

    @abstractmethod
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        seeds: Int[Tensor, "prompt member"],
        sampling: SamplingCfg,
        deterministic: bool = False,
    ) -> list[list[Completion]]:
        """Completions of each prompt, one for each of its seeds.

        A completion follows from its prompt and its seed, whatever else is written in the same call.

        Args:
            deterministic: take the likeliest token each time; seeds do not matter then.

        Raises:
            DataError: a prompt without tokens.
            ConfigError: stop strings without a tokenizer.
        """


class NativeGenerator(Generator):
    """Reads each prompt once for all its members and drops finished rows from the batch.

    Args:
        tokenizer: needed where the sampling has stop strings; by default the policy's.
    """

    def __init__(self, policy: CausalLM, tokenizer: Any = None) -> None:
        self._policy = policy
        self._tokenizer = policy.tokenizer if tokenizer is None else tokenizer

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        seeds: Int[Tensor, "prompt member"],
        sampling: SamplingCfg,
        deterministic: bool = False,
    ) -> list[list[Completion]]:
        """Completions of each prompt, one for each of its seeds."""
        return complete(self._policy, prompts, seeds, sampling, tokenizer=self._tokenizer, deterministic=deterministic)


class TransformersGenerator(Generator):
    """``model.generate`` of transformers, without the model's own generation settings.

    Every member reads its prompt, and a finished row stays in the batch until the last one is: slower than the native
    backend, but it runs whatever transformers runs.

    Args:
        tokenizer: needed where the sampling has stop strings; by default the policy's.
    """

    def __init__(self, policy: CausalLM, tokenizer: Any = None) -> None:
        self._policy = policy
        self._tokenizer = policy.tokenizer if tokenizer is None else tokenizer

    @torch.no_grad()
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        seeds: Int[Tensor, "prompt member"],
        sampling: SamplingCfg,
        deterministic: bool = False,
    ) -> list[list[Completion]]:
        """Completions of each prompt, one for each of its seeds."""
        policy, group_size = self._policy, seeds.shape[1]
        rows = seeds.reshape(-1).to(policy.device)
        writing = Writing(rows, sampling, policy.eos_ids, self._tokenizer, deterministic=deterministic)
        tokens, valid = left_padded(prompts, policy.device)
        with policy.computing(), _without_settings(policy.network):
            policy.network.generate(
                input_ids=tokens.repeat_interleave(group_size, dim=0),
                attention_mask=valid.long().repeat_interleave(group_size, dim=0),
                do_sample=False,
                max_new_tokens=sampling.max_new_tokens,
                logits_processor=LogitsProcessorList([_Write(writing)]),
                stopping_criteria=StoppingCriteriaList([_Finished(writing)]),
            )
        return writing.groups(group_size)


class _Write(LogitsProcessor):  # type: ignore[misc]  # mypy does not follow transformers
    """Draws the next tokens and leaves no other to choose."""

    def __init__(self, writing: Writing) -> None:
        self._writing = writing

    def __call__(
        self, input_ids: Int[Tensor, "row place"], scores: Float[Tensor, "row vocabulary"]
    ) -> Float[Tensor, "row vocabulary"]:
        token = torch.zeros_like(input_ids[:, 0])  # a finished row goes on with anything
        rows = self._writing.running
        if len(rows):
            token[rows] = self._writing.write(scores[rows])[0]
        return torch.full_like(scores, -torch.inf).scatter_(1, token[:, None], 0.0)


class _Finished(StoppingCriteria):  # type: ignore[misc]  # mypy does not follow transformers
    """Which rows are finished."""

    def __init__(self, writing: Writing) -> None:
        self._writing = writing

    def __call__(self, input_ids: Int[Tensor, "row place"], scores: Any, **kwargs: Any) -> Bool[Tensor, " row"]:
        finished = torch.ones_like(input_ids[:, 0], dtype=torch.bool)
        finished[self._writing.running] = False
        return finished


@contextmanager
def _without_settings(model: Any) -> Iterator[None]:
    """Within it the model has no generation settings, which ``generate`` would fill its arguments up with."""
    settings = model.generation_config
    model.generation_config = GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = settings
