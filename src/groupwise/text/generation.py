"""Generation of completions: each group's prompt goes through the model once (prefix sharing)."""

import logging
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional

from groupwise.algorithms.memory import ran_out_of_memory
from groupwise.config.policy import MAX_KEPT, SamplingCfg
from groupwise.errors import ConfigError, DataError
from groupwise.functional.random import hash_pair, mix, unit
from groupwise.text.vocabulary import logits_of, penalized, widened

if TYPE_CHECKING:
    from groupwise.text.policy import CausalLM

log = logging.getLogger(__name__)


# Filters that keep the likeliest tokens


def kept_tokens(logits: Float[Tensor, "row vocabulary"], sampling: SamplingCfg) -> Int[Tensor, "row kept"]:
    """Ids that ``top_k``, then ``top_p``, then ``min_p`` keep, by rising id.

    If tokens at the border are equally likely, as many as fit are kept. The most likely one is always kept.

    Source: Holtzman et al., "The Curious Case of Neural Text Degeneration", 2020, section 3.1; Nguyen et al., "Turning Up
    the Heat: Min-p Sampling", 2024, section 3.
    """
    vocabulary = logits.shape[1]
    top, ids = logits.topk(min(sampling.top_k or MAX_KEPT, vocabulary))
    likely = logits.softmax(dim=-1).gather(1, ids) if sampling.top_k is None else top.softmax(dim=-1)
    keep = torch.ones_like(ids, dtype=torch.bool)
    if sampling.top_p is not None:
        keep &= likely.cumsum(dim=-1) - likely < sampling.top_p
    if sampling.min_p is not None:
        keep &= likely >= sampling.min_p * likely[:, :1]
    keep[:, 0] = True  # where logits are NaN, too
    # by id, as rounding in another batch may change the order by likelihood
    ids = ids.masked_fill(~keep, vocabulary).sort(dim=-1).values[:, : int(keep.sum(dim=-1).max())]
    return ids.masked_fill(ids == vocabulary, -1)


# Sampling of tokens, and the ends of completions

BLOCK = 256
"""Probabilities in one running sum: one over a whole vocabulary is slow."""
_TINY = 1e-30
_STOPS: tuple[Literal["length", "eos", "stop"], ...] = ("length", "eos", "stop")


Past = list[tuple[Float[Tensor, "_head _token _channel"], Float[Tensor, "_head _token _channel"]]]
"""Keys and values of a text that the model has read, of each layer, without padding."""


class Completion(NamedTuple):
    """One completion of a prompt."""

    tokens: list[int]
    """The token that ended it included."""
    log_probs: list[float]
    stop: Literal["eos", "stop", "length"]
    """Reason why it ended: an end-of-text token, a stop string, or ``max_new_tokens``."""
    support: list[Int[Tensor, " kept"]] | None = None
    """Tokens that could be drawn at each step with ``top_k``, ``top_p`` or ``min_p``, by rising id; -1 fills up."""
    policy_version: list[int] | None = None
    """Iteration whose policy generated each token, for completions from servers."""
    past: Past | None = None
    """Keys and values of prompt and completion, for the next turn."""


def text_within(tokenizer: Any, tokens: Sequence[int], **options: Any) -> str:
    """The text of tokens in the midst of others: with the first space, which decoders of SentencePiece take off a text."""
    text, first, twice = (tokenizer.decode(ids, **options) for ids in (tokens, tokens[:1], [*tokens[:1], *tokens]))
    return f" {text}" if twice == f"{first} {text}" else text


class DecodingState:
    """The state of decoding: all completions; each step adds a token to every row of the batch.

    A row's choices follow from its seed and its own tokens alone, up to the rounding of logits in another batch. The tokenizer
    is only needed for stop strings.
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
        if sampling.stop and tokenizer is None:
            raise ConfigError(f"stop={sampling.stop!r} needs a tokenizer; fix: give the policy one, or stop=()")
        count, device = len(seeds), seeds.device
        self.rows = torch.arange(count, device=device)
        """Rows of the batch. What is drawn for those that have ended does not count."""
        self.unfinished = torch.ones(count, dtype=torch.bool, device=device)
        """Which of them have not ended."""
        self.length = 0
        """Tokens of each unfinished row."""
        self._sampling, self._tokenizer, self._deterministic = sampling, tokenizer, deterministic
        # of all steps at once: one by one, a small model would spend a tenth of its time on this
        self._chances = unit(hash_pair(mix(seeds)[:, None], torch.arange(sampling.max_new_tokens, device=device)))
        self._ends = torch.tensor(eos_ids, dtype=torch.long, device=device)
        self._tokens = torch.zeros(count, sampling.max_new_tokens, dtype=torch.long, device=device)
        self._log_probs = torch.zeros(count, sampling.max_new_tokens, dtype=torch.float32, device=device)
        self._supports: list[tuple[Tensor, Tensor]] = []
        self.lengths, self._stops = torch.zeros(2, count, dtype=torch.long, device=device)

    def write(self, logits: Float[Tensor, "batch vocabulary"]) -> Int[Tensor, " batch"]:
        """The next token of each row of the batch. Without filters and stop strings, nothing waits for the device."""
        rows, place = self.rows, self.length
        chance = self._chances[rows, place]
        token, log_prob, support = draw(logits, chance, self._sampling, deterministic=self._deterministic)
        self._tokens[rows, place], self._log_probs[rows, place] = token, log_prob
        if support is not None:
            self._supports.append((rows, support.int()))
        self.length += 1
        stop = torch.isin(token, self._ends).long()
        if self._sampling.stop and self.length > self._sampling.min_new_tokens:
            stop[self._has_stop_string() & (stop == 0)] = _STOPS.index("stop")
        self._stops[rows] = torch.where(self.unfinished, stop, self._stops[rows])
        self.lengths[rows] += self.unfinished
        self.unfinished = self.unfinished & (stop == 0)
        return token

    def _has_stop_string(self) -> Bool[Tensor, " batch"]:
        strings = self._sampling.stop
        window = 4 * max(map(len, strings)) + 8  # a character takes at most 4 tokens; its first bytes may be cut off
        last = self._tokens[self.rows, max(0, self.length - window) : self.length].tolist()
        first = self.length <= window and any(string.startswith(" ") for string in strings)
        decode = partial(text_within, self._tokenizer) if first else self._tokenizer.decode
        decode = partial(decode, clean_up_tokenization_spaces=False)
        texts, known = map(decode, last), [0] * len(last)
        # A string within the minimum stays: only what the last token completes counts.
        if self._sampling.min_new_tokens:
            known = [len(decode(tokens[:-1]).rstrip("\ufffd")) for tokens in last]
        found = [
            any(s in text[max(0, n + 1 - len(s)) :] for s in strings) for text, n in zip(texts, known, strict=True)
        ]
        return torch.tensor(found, device=self.rows.device)

    def completions(self) -> list[Completion]:
        """Completions of all rows, in their order; unfinished ones have their tokens so far."""
        columns = (self._tokens, self._log_probs, self._stops, self.lengths)
        supports: list[list[Tensor]] = [[] for _ in self._tokens]
        for numbers, support in self._supports:
            for row, ids in zip(numbers.tolist(), support.cpu(), strict=True):
                supports[row].append(ids)
        rows = zip(*(column.tolist() for column in columns), supports, strict=True)
        return [Completion(t[:n], lp[:n], _STOPS[stop], support[:n] or None) for t, lp, stop, n, support in rows]


class PenalizedState(DecodingState):
    """The state of decoding with penalties or a least length; ``tokens`` are the prompts."""

    def __init__(self, tokens: Tensor, valid: Tensor, seeds: Tensor, *args: Any, **options: Any) -> None:
        super().__init__(seeds, *args, **options)
        self._prompt = tokens.masked_fill(~valid, -1).repeat_interleave(len(seeds) // len(tokens), dim=0)

    def write(self, logits: Tensor) -> Tensor:
        """The next tokens, drawn from the logits after the penalties."""
        written = self._tokens[self.rows, : self.length]
        text = torch.cat([self._prompt[self.rows], written], dim=1)
        return super().write(penalized(logits, self._sampling, text, written, self._ends))


def draw(
    logits: Float[Tensor, "row vocabulary"],
    chance: Float[Tensor, " row"],
    sampling: SamplingCfg,
    *,
    deterministic: bool = False,
) -> tuple[Int[Tensor, " row"], Float[Tensor, " row"], Int[Tensor, "row kept"] | None]:
    """A token of each row, from ``softmax(logits / temperature)`` among those that the filters keep; or the most likely one.

    Equal chances, uniform in [0, 1), draw equal tokens. Returns the tokens, their log-probabilities in that distribution, and
    with filters the tokens that are kept (``kept_tokens``).
    """
    if sampling.temperature != 1:
        logits = logits / sampling.temperature
    support = None
    if sampling.has_filters:
        support = kept_tokens(logits, sampling)
        logits = logits.gather(1, support.clamp(min=0)).masked_fill(support < 0, -torch.inf)
    probability = logits.softmax(dim=-1)
    place = probability.argmax(dim=-1) if deterministic else pick(probability, chance)
    log_prob = probability.gather(1, place[:, None])[:, 0].log()
    return place if support is None else support.gather(1, place[:, None])[:, 0], log_prob, support


def pick(probability: Float[Tensor, "row place"], chance: Float[Tensor, " row"]) -> Int[Tensor, " row"]:
    """The place at which the running sum reaches 1 - chance of the total; never one of probability 0."""
    goal = 1 - chance
    width = probability.shape[1]
    if width <= BLOCK:
        return _reach(probability, goal)[0]
    padded = functional.pad(probability, (0, -width % BLOCK)) if width % BLOCK else probability
    blocks = padded.view(len(padded), -1, BLOCK)
    mass = blocks.sum(dim=-1)
    block, summed, goal = _reach(mass, goal)
    before = (summed - mass).gather(1, block[:, None])[:, 0]
    rows = torch.arange(len(blocks), device=block.device)
    return block * BLOCK + _reach(blocks[rows, block], (goal - before).clamp(min=_TINY))[0]


def _reach(
    mass: Float[Tensor, "row place"], goal: Float[Tensor, " row"]
) -> tuple[Int[Tensor, " row"], Float[Tensor, "row place"], Float[Tensor, " row"]]:
    """The first place with mass at which the running sum reaches the goal; the running sums; and the goal itself.

    Where rounding leaves the goal above every sum, the greatest is the goal.
    """
    summed = mass.cumsum(dim=-1)
    reached = torch.where(mass > 0, summed, 0)  # on a GPU, rounding may let sums rise or fall without mass
    goal = torch.minimum(goal, reached.amax(dim=-1))
    return (reached >= goal[:, None]).int().argmax(dim=-1), summed, goal


# The model's passes: over the prompts, and over each next token

Head = Callable[[Tensor], Tensor]
"""Logits of hidden states, in float32."""
Generate = Callable[..., list[list[Completion]]]
"""Called as ``complete`` without its policy; servers may take its place."""


class Prompts(NamedTuple):
    """The prompts after the first forward pass, and how many completions of each follow."""

    cache: Any
    valid: Bool[Tensor, "prompt width"]
    """False at padding."""
    group_size: int
    max_new_tokens: int


class Step:
    """Extends each row by one token, through the model's own modules."""

    patience: ClassVar[int] = 1
    """Tokens after which it is found out which rows have ended; finding out waits for the device."""
    least: ClassVar[int] = 1
    share: ClassVar[float] = 0.0
    """Number and share of rows that have ended before they leave the batch."""

    def __init__(self, policy: "CausalLM", prompts: Prompts) -> None:
        self._policy, self._cache = policy, prompts.cache
        self._valid = prompts.valid.repeat_interleave(prompts.group_size, dim=0)
        rows = torch.arange(len(prompts.valid), device=self._valid.device)
        self._cache.reorder_cache(rows.repeat_interleave(prompts.group_size))  # also states of recurrent layers

    def __call__(self, token: Int[Tensor, " row"]) -> Float[Tensor, "row width"]:
        """The last hidden state of each row, after its token."""
        self._valid = torch.cat([self._valid, self._valid.new_ones(len(token), 1)], dim=1)
        return self._policy.hidden_states(token[:, None], self._valid, self._cache)[:, -1]

    def keep(self, kept: Bool[Tensor, " row"]) -> None:
        """Drop the other rows."""
        self._valid = self._valid[kept]
        self._cache.reorder_cache(kept.nonzero()[:, 0])

    def past(self, row: int, count: int) -> Past:
        """Keys and values of a row: of its prompt, and of ``count`` tokens."""
        return past_of(self._cache, self._valid, row)


def holds_all(cache: Any) -> bool:
    """Whether a cache of transformers is the keys and values of every token, in all layers."""
    from transformers.cache_utils import DynamicLayer

    return all(type(layer) is DynamicLayer for layer in cache.layers)


def past_of(cache: Any, valid: Bool[Tensor, "row width"], row: int) -> Past:
    """Keys and values of a row of a cache."""
    read = valid[row]
    return [(layer.keys[row][:, read], layer.values[row][:, read]) for layer in cache.layers]


def fill(
    cache: Any, pasts: Sequence[Past | None], prompts: Sequence[Sequence[int]], device: torch.device
) -> tuple[Int[Tensor, "row step"], Bool[Tensor, "row context"]]:
    """Fill an empty cache with keys and values of each prompt's beginning, none for None; the tokens that are left to read, and
    the mask of both, False at padding.

    As many tokens are read in each row as in the one with most: padding between the two parts would move what models with
    ALiBi or local attention count by places.
    """
    lengths = [0 if past is None else past[0][0].shape[1] for past in pasts]
    most = max(len(prompt) - length for prompt, length in zip(prompts, lengths, strict=True))
    lengths = [min(length, max(0, len(prompt) - most)) for prompt, length in zip(prompts, lengths, strict=True)]
    tokens, valid = left_padded([prompt[length:] for prompt, length in zip(prompts, lengths, strict=True)], device)
    if (width := max(lengths)) == 0:
        return tokens, valid
    for number, layer in enumerate(next(past for past in pasts if past is not None)):
        keys, values = (half.new_zeros(len(pasts), half.shape[0], width, half.shape[2]) for half in layer)
        for row, (past, length) in enumerate(zip(pasts, lengths, strict=True)):
            if past is not None:
                keys[row, :, width - length :] = past[number][0][:, :length]
                values[row, :, width - length :] = past[number][1][:, :length]
        cache.update(keys, values, number)
    known = torch.arange(width, device=device) >= width - torch.tensor(lengths, device=device)[:, None]
    return tokens, torch.cat([known, valid], dim=1)


class Decoder:
    """The decoding step of a policy: its model's own modules. ``speed/`` replaces ``policy.decoder``."""

    most_rows: float = math.inf
    """Rows that fit in memory at once, where more did not."""

    def refuse_rows(self, rows: int, error: Exception) -> None:
        """Generate fewer rows at once from now on if the error is that memory ran out; else raise it."""
        if not ran_out_of_memory(error):
            raise error
        if rows == 1:
            error.add_note("no row fits; fix: a smaller sampling.max_new_tokens, shorter prompts or a smaller model")
            raise error
        self.most_rows = rows // 2
        log.warning(
            "out of memory in generation: at most %d rows at once from now on, which changes rounding alone", rows // 2
        )

    def step(self, policy: "CausalLM", prompts: Prompts, token: Int[Tensor, " row"], head: Head) -> Step:
        """The step that extends the rows, whose first tokens are ``token``."""
        return Step(policy, prompts)


def complete(
    policy: "CausalLM",
    prompts: Sequence[Sequence[int]],
    seeds: Int[Tensor, "prompt member"],
    sampling: SamplingCfg | None = None,
    *,
    deterministic: bool = False,
    pasts: Sequence[Past | None] | None = None,
) -> list[list[Completion]]:
    """Completions of each prompt, one for each of its seeds; none depends on the others that the call generates.

    Args:
        sampling: by default the policy's.
        deterministic: take the most likely token each time; seeds do not matter then.
        pasts: of the beginning of each prompt, which is not read again, by the completion that it continues. Completions then have
            a ``past``, unless the model keeps another state of a text than keys and values. None: they have none.
    """
    sampling, rows = sampling or policy.sampling, seeds.numel()
    if rows <= policy.decoder.most_rows:
        try:
            return _complete(policy, prompts, seeds, sampling, deterministic, pasts)
        except (RuntimeError, MemoryError) as error:
            policy.decoder.refuse_rows(rows, error)
    return _in_halves(policy, prompts, seeds, sampling, deterministic, pasts)


def _in_halves(
    policy: "CausalLM", prompts: Any, seeds: Tensor, sampling: SamplingCfg, deterministic: bool, pasts: Any
) -> list[list[Completion]]:
    """``complete`` of half of the prompts, then of the others; of a single prompt, of half of its members."""
    generate = partial(complete, policy, sampling=sampling, deterministic=deterministic)
    if len(prompts) == 1:
        one, other = (generate(prompts, part, pasts=pasts)[0] for part in seeds.chunk(2, dim=1))
        return [one + other]
    halves = [slice(len(prompts) // 2), slice(len(prompts) // 2, None)]
    parts = [generate(prompts[half], seeds[half], pasts=pasts and pasts[half]) for half in halves]
    return [group for part in parts for group in part]


def _complete(
    policy: "CausalLM",
    prompts: Sequence[Sequence[int]],
    seeds: Int[Tensor, "prompt member"],
    sampling: SamplingCfg,
    deterministic: bool,
    pasts: Sequence[Past | None] | None,
) -> list[list[Completion]]:
    """``complete`` in one batch."""
    from transformers.cache_utils import DynamicCache

    size = seeds.shape[1]
    with torch.no_grad(), policy.computing():
        tokens, valid = left_padded(prompts, policy.device)
        rows = seeds.reshape(-1).to(policy.device)
        make = partial(PenalizedState, tokens, valid) if sampling.has_penalties else DecodingState
        state = make(rows, sampling, policy.eos_ids, policy.tokenizer, deterministic=deterministic)
        cache: Any = DynamicCache(config=policy.network.config)
        keeps = pasts is not None and holds_all(cache)
        if pasts is not None and keeps:
            tokens, valid = fill(cache, pasts, prompts, policy.device)
        hidden = policy.hidden_states(tokens, valid, cache)[:, -1]
        weight = widened(policy.head, hidden)  # half precision is converted here once, not at each token

        def head(hidden: Tensor) -> Tensor:
            with torch.autocast(hidden.device.type, enabled=False):
                return logits_of(hidden, weight)

        token = state.write(head(hidden).repeat_interleave(size, dim=0))
        most, step, found = sampling.max_new_tokens, None, dict[int, Past]()
        while True:
            if step is None or state.length == most or state.length % step.patience == 0:
                ended = (~state.unfinished).nonzero()[:, 0].tolist()  # waits for the device
                for place in ended if keeps else ():
                    row = int(state.rows[place])
                    if row not in found:
                        read = int(state.lengths[row]) - 1
                        found[row] = past_of(cache, valid, row // size) if step is None else step.past(place, read)
                if state.length == most or len(ended) == len(token):
                    break
                if step is None:
                    step = policy.decoder.step(policy, Prompts(cache, valid, size, most), token, head)
                    del cache  # it is the step's
                if len(ended) >= max(step.least, step.share * len(token)):  # they leave the batch
                    kept = state.unfinished
                    token, state.rows, state.unfinished = token[kept], state.rows[kept], kept[kept]
                    step.keep(kept)
            token = state.write(head(step(token)))
    flat = [one._replace(past=found.get(row)) for row, one in enumerate(state.completions())]
    return [flat[i : i + size] for i in range(0, len(flat), size)]


def left_padded(
    prompts: Sequence[Sequence[int]], device: torch.device
) -> tuple[Int[Tensor, "prompt width"], Bool[Tensor, "prompt width"]]:
    """The prompts' tokens, at least one each, and a mask that is False at padding."""
    for number, prompt in enumerate(prompts):
        if not len(prompt):
            raise DataError(f"prompt {number} has no tokens; fix: at least one, such as the beginning-of-text token")
    width = max(map(len, prompts))
    tokens = torch.tensor([[0] * (width - len(p)) + list(p) for p in prompts], device=device)
    lengths = torch.tensor([len(p) for p in prompts], device=device)
    return tokens, torch.arange(width, device=device) >= (width - lengths)[:, None]
