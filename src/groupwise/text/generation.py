"""Generation of completions: each group's prompt is encoded once (prefix sharing)."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional
from transformers.cache_utils import DynamicCache, DynamicLayer

from groupwise.config.policy import SamplingCfg
from groupwise.errors import DataError
from groupwise.text.sampling import Completion, DecodingState

if TYPE_CHECKING:
    from groupwise.text.policy import CausalLM

Head = Callable[[Tensor], Tensor]
"""Logits of hidden states, in float32."""
ROOM = 64
"""Tokens that a cache grows by."""


class Generator:
    """Generates completions with the policy's weights. Subclass it for another backend, such as a server.

    Args:
        tokenizer: needed where the sampling has stop strings; by default the policy's.
    """

    def __init__(self, policy: "CausalLM", tokenizer: Any = None) -> None:
        self._policy = policy
        self._tokenizer = policy.tokenizer if tokenizer is None else tokenizer

    def sync(self, policy: "CausalLM") -> None:
        """Take the weights to write with. In process they are the policy's own, and nothing happens."""

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        seeds: Int[Tensor, "prompt member"],
        sampling: SamplingCfg,
        deterministic: bool = False,
    ) -> list[list[Completion]]:
        """Completions of each prompt, one for each of its seeds, whatever else is written in the same call.

        Args:
            deterministic: take the likeliest token each time; seeds do not matter then.

        Raises:
            DataError: a prompt without tokens.
            ConfigError: stop strings without a tokenizer.
        """
        return complete(self._policy, prompts, seeds, sampling, tokenizer=self._tokenizer, deterministic=deterministic)


class PreallocatedCacheLayer(DynamicLayer):  # type: ignore[misc]  # mypy does not follow transformers
    """A layer's preallocated cache: ``torch.cat`` would copy all of it at each token."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        super().__init__()
        self.dtype, self.device, self.is_initialized = keys.dtype, keys.device, True
        self._length = keys.shape[-2]
        self._store = (keys, values)
        self.keys, self.values = keys, values

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """All keys and values, the new ones included."""
        end = self._length + key_states.shape[-2]
        if end > self._store[0].shape[-2]:
            self._store = (self._grown(self._store[0], end), self._grown(self._store[1], end))
        for store, new in zip(self._store, (key_states, value_states), strict=True):
            store[..., self._length : end, :] = new
        self._length = end
        self.keys, self.values = (store[..., :end, :] for store in self._store)
        return self.keys, self.values

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep some rows."""
        self._store = (self._store[0][indices], self._store[1][indices])
        self.keys, self.values = (store[..., : self._length, :] for store in self._store)

    def _grown(self, store: Tensor, end: int) -> Tensor:
        grown = store.new_empty(*store.shape[:-2], end + ROOM, store.shape[-1])
        grown[..., : self._length, :] = store[..., : self._length, :]
        return grown


class Prompts(NamedTuple):
    """The encoded prompts, before the first step."""

    cache: Any
    """Of transformers, after one pass over the prompts."""
    valid: Bool[Tensor, "prompt width"]
    """What of them is no padding."""
    group_size: int
    """Rows that follow each."""
    max_new_tokens: int
    """The most that a row may have to read."""


class Step(ABC):
    """Extends rows by one token each."""

    @abstractmethod
    def __call__(self, token: Int[Tensor, " row"]) -> Float[Tensor, "row width"]:
        """The last hidden state of each row, after its token."""

    @abstractmethod
    def keep(self, kept: Bool[Tensor, " row"]) -> None:
        """Drop the other rows."""


class TransformersStep(Step):
    """Extends each row by one token, through the model's own modules."""

    def __init__(self, policy: "CausalLM", prompts: Prompts) -> None:
        self._policy, self._cache = policy, prompts.cache
        self._valid = prompts.valid.repeat_interleave(prompts.group_size, dim=0)
        layers = self._cache.layers
        self._cache.batch_repeat_interleave(prompts.group_size)
        self._cache.layers = [
            PreallocatedCacheLayer(c.keys, c.values) if type(c) is DynamicLayer else c for c in layers
        ]

    def __call__(self, token: Int[Tensor, " row"]) -> Float[Tensor, "row width"]:
        """The last hidden state of each row, after its token."""
        self._valid = torch.cat([self._valid, self._valid.new_ones(len(token), 1)], dim=1)
        return self._policy.hidden_states(token[:, None], self._valid, self._cache)[:, -1]

    def keep(self, kept: Bool[Tensor, " row"]) -> None:
        """Drop the other rows."""
        self._valid = self._valid[kept]
        self._cache.batch_select_indices(kept.nonzero()[:, 0])


class Decoder:
    """The decoding step of a policy: its model's own modules. ``speed/`` replaces ``policy.decoder``."""

    def context(self, policy: "CausalLM") -> AbstractContextManager:
        """The context of a generation: no gradient."""
        return torch.no_grad()

    def head(self, policy: "CausalLM") -> Head:
        """The output embeddings, for one call of ``complete``."""
        weight = policy.head.float()

        def logits(hidden: Tensor) -> Tensor:
            with torch.autocast(hidden.device.type, enabled=False):
                return functional.linear(hidden.float(), weight)

        return logits

    def step(self, policy: "CausalLM", prompts: Prompts, token: Int[Tensor, " row"], head: Head) -> Step:
        """The step that extends the rows, whose first tokens are ``token``."""
        return TransformersStep(policy, prompts)


def complete(
    policy: "CausalLM",
    prompts: Sequence[Sequence[int]],
    seeds: Int[Tensor, "prompt member"],
    sampling: SamplingCfg | None = None,
    *,
    tokenizer: Any = None,
    deterministic: bool = False,
) -> list[list[Completion]]:
    """Completions of each prompt, one for each of its seeds.

    Args:
        sampling: by default the policy's.
        tokenizer: of transformers; only needed where the sampling has stop strings.
        deterministic: take the likeliest token each time; seeds do not matter then.

    Raises:
        DataError: a prompt without tokens.
        ConfigError: stop strings without a tokenizer.
    """
    sampling = sampling or policy.sampling
    with policy.decoder.context(policy), policy.computing():
        tokens, valid = left_padded(prompts, policy.device)
        rows = seeds.reshape(-1).to(policy.device)
        state = DecodingState(rows, sampling, policy.eos_ids, tokenizer, deterministic=deterministic)
        _decode(policy, tokens, valid, seeds.shape[1], state, sampling.max_new_tokens)
    return state.groups(seeds.shape[1])


def _decode(
    policy: "CausalLM", tokens: Tensor, valid: Tensor, group_size: int, state: DecodingState, max_new_tokens: int
) -> None:
    """Write until every row is finished."""
    head = policy.decoder.head(policy)  # half precision is converted here, once, and not at each token
    cache: Any = DynamicCache(config=policy.network.config)
    hidden = policy.hidden_states(tokens, valid, cache)[:, -1]
    logits = head(hidden).repeat_interleave(group_size, dim=0)
    token, goes_on = state.write(logits)
    if not len(state.running):
        return
    step = policy.decoder.step(policy, Prompts(cache, valid, group_size, max_new_tokens), token, head)
    del cache  # it is the step's
    while len(state.running):
        if len(state.running) < len(token):  # finished rows leave the batch
            token = token[goes_on]
            step.keep(goes_on)
        token, goes_on = state.write(head(step(token)))


def left_padded(
    prompts: Sequence[Sequence[int]], device: torch.device
) -> tuple[Int[Tensor, "prompt width"], Bool[Tensor, "prompt width"]]:
    """The prompts' tokens, and what of them is no padding.

    Raises:
        DataError: a prompt without tokens.
    """
    for number, prompt in enumerate(prompts):
        if not len(prompt):
            raise DataError(f"prompt {number} has no tokens; fix: at least one, such as the beginning-of-text token")
    width = max(map(len, prompts))
    tokens = torch.tensor([[0] * (width - len(p)) + list(p) for p in prompts], device=device)
    lengths = torch.tensor([len(p) for p in prompts], device=device)
    return tokens, torch.arange(width, device=device) >= (width - lengths)[:, None]
