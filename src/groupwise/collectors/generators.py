"""Who writes the completions: backends of one protocol.

All of them draw the same tokens from the same seeds, up to the rounding of logits, and say what they drew from.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from jaxtyping import Int
from torch import Tensor

from groupwise.policies.causal_lm import CausalLM
from groupwise.policies.configs import SamplingCfg
from groupwise.policies.decoding import Completion, complete


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
        tokenizer: of transformers; only needed where the sampling has stop strings.
    """

    def __init__(self, policy: CausalLM, tokenizer: Any = None) -> None:
        self._policy, self._tokenizer = policy, tokenizer

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        seeds: Int[Tensor, "prompt member"],
        sampling: SamplingCfg,
        deterministic: bool = False,
    ) -> list[list[Completion]]:
        """Completions of each prompt, one for each of its seeds."""
        return complete(self._policy, prompts, seeds, sampling, tokenizer=self._tokenizer, deterministic=deterministic)
