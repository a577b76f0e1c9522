"""Writing completions with a language model: each prompt read once, its cache repeated for the group."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional
from transformers.cache_utils import DynamicCache, DynamicLayer

from groupwise.config.policy import SamplingCfg
from groupwise.errors import ConfigError, DataError
from groupwise.functional.row_random import hash_pair, mix, unit
from groupwise.text.drawing import draw

if TYPE_CHECKING:
    from groupwise.text.policy import CausalLM

Head = Callable[[Tensor], Tensor]
"""Logits of hidden states, in float32."""
_BYTES, _MORE = 4, 8
"""Tokens that a character may take, and tokens kept besides: of what is cut off, a character's last bytes may remain."""
ROOM = 64
"""Tokens that a cache grows by."""
_STOPS: tuple[Literal["length", "eos", "stop"], ...] = ("length", "eos", "stop")


class Completion(NamedTuple):
    """What was written after a prompt."""

    tokens: list[int]
    """With the token that ended it."""
    log_probs: list[float]
    """Of each token, under the distribution that it was drawn from."""
    stop: Literal["eos", "stop", "length"]
    """What ended it: a token that ends texts, a stop string, or ``max_new_tokens``."""
    support: list[list[int]] | None = None
    """With ``top_k``: the tokens that could be drawn at each place, by rising id."""
    eos_barred: list[bool] | None = None
    """With ``min_new_tokens``: where tokens that end the text could not be drawn."""


class Writing:
    """Completions while they are written, a token of each unfinished one at a time.

    A row's choices follow from its seed and its own tokens alone, up to the rounding of logits in another batch.

    Args:
        seeds: of the rows.
        eos_ids: tokens that end a completion.
        tokenizer: of transformers; only needed where the sampling has stop strings.
        deterministic: take the likeliest token each time; seeds do not matter then.

    Raises:
        ConfigError: stop strings without a tokenizer.
    """

    def __init__(
        self,
        seeds: Int[Tensor, " row"],
        sampling: SamplingCfg,
        eos_ids: Sequence[int],
        tokenizer: Any = None,
        *,
        deterministic: bool = False,
    ) -> None:
        count, device = len(seeds), seeds.device
        self.running = torch.arange(count, device=device)
        """Rows that are unfinished."""
        self._sampling, self._deterministic = sampling, deterministic
        # of all places at once: one by one, a small model would spend a tenth of its time on this
        self._chances = unit(hash_pair(mix(seeds)[:, None], torch.arange(sampling.max_new_tokens, device=device)))
        self._ends = torch.tensor(eos_ids, dtype=torch.long, device=device)
        self._strings = _StopStrings(sampling.stop, tokenizer, count) if sampling.stop else None
        self._step = 0
        shape = (count, sampling.max_new_tokens)
        self._tokens = torch.zeros(shape, dtype=torch.long, device=device)
        self._log_probs = torch.zeros(shape, device=device)
        self._supports: list[tuple[Tensor, Tensor]] = []
        self._lengths = torch.full((count,), sampling.max_new_tokens, device=device)
        self._stops = torch.zeros(count, dtype=torch.long, device=device)

    def write(
        self, logits: Float[Tensor, "running vocabulary"]
    ) -> tuple[Int[Tensor, " running"], Bool[Tensor, " running"]]:
        """The next token of each unfinished row, and whether the row goes on after it."""
        step, everyone = self._step, len(self.running) == len(self._stops)
        rows: slice | Tensor = slice(None) if everyone else self.running  # a slice is the faster index
        may_end = step >= self._sampling.min_new_tokens
        drawn = draw(
            logits,
            self._chances[rows, step],
            self._sampling,
            None if may_end else self._ends,
            deterministic=self._deterministic,
        )
        self._tokens[rows, step], self._log_probs[rows, step] = drawn.token, drawn.log_prob
        if drawn.support is not None:
            self._supports.append((self.running, drawn.support))
        stop = torch.isin(drawn.token, self._ends).long()
        if self._strings is not None:
            complete = self._strings.completed(self.running.tolist(), drawn.token.tolist())
            stop[torch.tensor(complete, device=stop.device) & (stop == 0) & may_end] = _STOPS.index("stop")
        self._step = step + 1
        goes_on = stop == 0
        some_stop = not goes_on.all()
        if some_stop:
            finished = self.running[~goes_on]
            self._stops[finished], self._lengths[finished] = stop[~goes_on], self._step
        if self._step == self._sampling.max_new_tokens:
            goes_on = torch.zeros_like(goes_on)
            self.running = self.running[:0]
        elif some_stop:
            self.running = self.running[goes_on]
        return drawn.token, goes_on

    def completions(self) -> list[Completion]:
        """Of all rows, in their order; of unfinished ones, what there is."""
        lengths, sampling = self._lengths.clamp(max=self._step).tolist(), self._sampling
        supports = self._supports_of_rows() if self._supports else [None] * len(lengths)
        rows = zip(
            self._tokens.tolist(), self._log_probs.tolist(), self._stops.tolist(), lengths, supports, strict=True
        )
        barred = [step < sampling.min_new_tokens for step in range(sampling.max_new_tokens)]
        return [
            Completion(t[:n], lp[:n], _STOPS[stop], support, barred[:n] if sampling.min_new_tokens else None)
            for t, lp, stop, n, support in rows
        ]

    def groups(self, size: int) -> list[list[Completion]]:
        """The completions, so many rows to a prompt."""
        flat = self.completions()
        return [flat[i : i + size] for i in range(0, len(flat), size)]

    def _supports_of_rows(self) -> list[list[list[int]]]:
        kept: list[list[list[int]]] = [[] for _ in self._tokens]
        for rows, support in self._supports:
            for row, ids in zip(rows.tolist(), support.tolist(), strict=True):
                kept[row].append(ids)
        return kept


class _StopStrings:
    """Tells which completions' texts a token has brought a stop string to."""

    def __init__(self, strings: Sequence[str], tokenizer: Any, count: int) -> None:
        if tokenizer is None:
            raise ConfigError(f"stop={tuple(strings)!r} but no tokenizer that reads texts; fix: give one, or stop=()")
        self._strings, self._tokenizer = strings, tokenizer
        self._least = _BYTES * max(map(len, strings)) + _MORE
        self._tokens: list[list[int]] = [[] for _ in range(count)]
        self._texts = [""] * count

    def completed(self, rows: Sequence[int], tokens: Sequence[int]) -> list[bool]:
        """Whether each of the rows' texts, with one token more, holds a string that it did not hold before."""
        return [self._completed(row, token) for row, token in zip(rows, tokens, strict=True)]

    def _completed(self, row: int, token: int) -> bool:
        tokens = self._tokens[row]
        if len(tokens) >= 2 * self._least:  # a string ends here: what is far before it need not be read again and again
            del tokens[: -self._least]
            self._texts[row] = self._text(tokens)
        tokens.append(token)
        text, old = self._text(tokens), self._texts[row]
        self._texts[row] = text
        while not text.startswith(old):  # a character's first bytes, alone, read as another character
            old = old[:-1]
        return any(text.find(s, max(0, len(old) - len(s) + 1)) >= 0 for s in self._strings)

    def _text(self, tokens: list[int]) -> str:
        text: str = self._tokenizer.decode(tokens, clean_up_tokenization_spaces=False)
        return text


class RoomyLayer(DynamicLayer):  # type: ignore[misc]  # mypy does not follow transformers
    """A layer's cache that writes into room it has: ``torch.cat`` would copy all of it at each token."""

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
    """What has been read before the first step."""

    cache: Any
    """Of transformers, after one pass over the prompts."""
    valid: Bool[Tensor, "prompt width"]
    """What of them is no padding."""
    group_size: int
    """Rows that follow each."""
    max_new_tokens: int
    """The most that a row may have to read."""


class Step(ABC):
    """Reads tokens one by one."""

    @abstractmethod
    def __call__(self, token: Int[Tensor, " row"]) -> Float[Tensor, "row width"]:
        """The last hidden state of each row, its token read."""

    @abstractmethod
    def keep(self, kept: Bool[Tensor, " row"]) -> None:
        """Drop the other rows."""


class TransformersStep(Step):
    """Reads a token of each row, behind those that it has read before, through the model's own modules."""

    def __init__(self, policy: "CausalLM", prompts: Prompts) -> None:
        self._policy, self._cache = policy, prompts.cache
        self._valid = prompts.valid.repeat_interleave(prompts.group_size, dim=0)
        layers = self._cache.layers
        self._cache.batch_repeat_interleave(prompts.group_size)
        self._cache.layers = [RoomyLayer(c.keys, c.values) if type(c) is DynamicLayer else c for c in layers]

    def __call__(self, token: Int[Tensor, " row"]) -> Float[Tensor, "row width"]:
        """The last hidden state of each row, its token read."""
        self._valid = torch.cat([self._valid, self._valid.new_ones(len(token), 1)], dim=1)
        return self._policy.hidden_states(token[:, None], self._valid, self._cache)[:, -1]

    def keep(self, kept: Bool[Tensor, " row"]) -> None:
        """Drop the other rows."""
        self._valid = self._valid[kept]
        self._cache.batch_select_indices(kept.nonzero()[:, 0])


class Decoder:
    """How a policy reads the tokens that it has written: by its model's own modules. Others replace ``policy.decoder``."""

    def context(self, policy: "CausalLM") -> AbstractContextManager:
        """What completions are written in."""
        return torch.no_grad()

    def head(self, policy: "CausalLM") -> Head:
        """The output embeddings, for one call of ``complete``."""
        weight = policy.head.float()

        def logits(hidden: Tensor) -> Tensor:
            with torch.autocast(hidden.device.type, enabled=False):
                return functional.linear(hidden.float(), weight)

        return logits

    def step(self, policy: "CausalLM", prompts: Prompts, token: Int[Tensor, " row"], head: Head) -> Step:
        """What reads the rows' tokens, of which ``token`` are the first."""
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
        writing = Writing(rows, sampling, policy.eos_ids, tokenizer, deterministic=deterministic)
        _decode(policy, tokens, valid, seeds.shape[1], writing, sampling.max_new_tokens)
    return writing.groups(seeds.shape[1])


def _decode(
    policy: "CausalLM", tokens: Tensor, valid: Tensor, group_size: int, writing: Writing, max_new_tokens: int
) -> None:
    """Write until every row is finished."""
    head = policy.decoder.head(policy)  # half precision is converted here, once, and not at each token
    cache: Any = DynamicCache(config=policy.network.config)
    hidden = policy.hidden_states(tokens, valid, cache)[:, -1]
    logits = head(hidden).repeat_interleave(group_size, dim=0)
    token, goes_on = writing.write(logits)
    if not len(writing.running):
        return
    step = policy.decoder.step(policy, Prompts(cache, valid, group_size, max_new_tokens), token, head)
    del cache  # it is the step's
    while len(writing.running):
        if len(writing.running) < len(token):  # finished rows leave the batch
            token = token[goes_on]
            step.keep(goes_on)
        token, goes_on = writing.write(head(step(token)))


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
