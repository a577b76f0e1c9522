"""Sampling: the next token of each completion, and what ends a completion."""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional

from groupwise.config.policy import SamplingCfg
from groupwise.errors import ConfigError
from groupwise.functional.random import hash_pair, mix, unit
from groupwise.text.processing import kept_tokens, penalized

BLOCK = 256
"""Probabilities in one running sum: one over a whole vocabulary is slow."""
_TINY = 1e-30
_STOPS: tuple[Literal["length", "eos", "stop"], ...] = ("length", "eos", "stop")


class Completion(NamedTuple):
    """One completion of a prompt."""

    tokens: list[int]
    """The token that ended it included."""
    log_probs: list[float]
    """Of each token, under the distribution that it was drawn from."""
    stop: Literal["eos", "stop", "length"]
    """What ended it: an end-of-text token, a stop string, or ``max_new_tokens``."""
    support: list[Int[Tensor, " kept"]] | None = None
    """With ``top_k``, ``top_p`` or ``min_p``: the tokens that could be drawn at each step, by rising id; -1 fills up."""
    policy_version: list[int] | None = None
    """From servers: the iteration whose policy generated each token."""


class DecodingState:
    """The state of decoding: all completions; each step adds a token to every unfinished one.

    A row's choices follow from its seed and its own tokens alone, up to the rounding of logits in another batch.

    Args:
        prompt: the tokens before each completion, -1 at padding; only needed for the repetition penalty.
        eos_ids: tokens that end a completion.
        tokenizer: of transformers; only needed for stop strings.
        deterministic: take the most likely token each time; seeds do not matter then.
    """

    def __init__(
        self,
        seeds: Int[Tensor, " row"],
        sampling: SamplingCfg,
        eos_ids: Sequence[int],
        tokenizer: Any = None,
        *,
        prompt: Int[Tensor, "row place"] | None = None,
        deterministic: bool = False,
    ) -> None:
        if sampling.stop and tokenizer is None:
            raise ConfigError(f"stop={sampling.stop!r} needs a tokenizer; fix: give the policy one, or stop=()")
        count, device = len(seeds), seeds.device
        self.running = torch.arange(count, device=device)
        """Rows that are unfinished."""
        self._sampling, self._tokenizer, self._deterministic = sampling, tokenizer, deterministic
        # of all steps at once: one by one, a small model would spend a tenth of its time on this
        self._chances = unit(hash_pair(mix(seeds)[:, None], torch.arange(sampling.max_new_tokens, device=device)))
        self._ends = torch.tensor(eos_ids, dtype=torch.long, device=device)
        self._step = 0
        shape = (count, sampling.max_new_tokens)
        self._tokens = torch.zeros(shape, dtype=torch.long, device=device)
        self._log_probs = torch.zeros(shape, device=device)
        self._prompt = self._tokens[:, :0] if prompt is None else prompt
        self._supports: list[tuple[Tensor, Tensor]] = []
        self._lengths, self._stops = torch.zeros(2, count, dtype=torch.long, device=device)

    def write(
        self, logits: Float[Tensor, "running vocabulary"]
    ) -> tuple[Int[Tensor, " running"], Bool[Tensor, " running"]]:
        """The next token of each unfinished row, and whether the row is still unfinished."""
        rows, step = self.running, self._step
        if self._sampling.has_penalties:
            written = self._tokens[rows, :step]
            logits, _ = penalized(logits, self._sampling, torch.cat([self._prompt[rows], written], dim=1), written)
        token, log_prob, support = draw(
            logits, self._chances[rows, step], self._sampling, deterministic=self._deterministic
        )
        self._tokens[rows, step], self._log_probs[rows, step] = token, log_prob
        if support is not None:
            self._supports.append((rows, support.int()))
        self._step = step + 1
        stop = torch.isin(token, self._ends).long()
        if self._sampling.stop:
            stop[self._has_stop_string(rows) & (stop == 0)] = _STOPS.index("stop")
        self._stops[rows], self._lengths[rows] = stop, self._step
        unfinished = (stop == 0) & (self._step < self._sampling.max_new_tokens)
        self.running = rows[unfinished]
        return token, unfinished

    def completions(self) -> list[Completion]:
        """Of all rows, in their order; of unfinished ones, their tokens so far."""
        columns = (self._tokens, self._log_probs, self._stops, self._lengths)
        supports: list[list[Tensor]] = [[] for _ in self._tokens]
        for numbers, support in self._supports:
            for row, ids in zip(numbers.tolist(), support.cpu(), strict=True):
                supports[row].append(ids)
        rows = zip(*(column.tolist() for column in columns), supports, strict=True)
        return [Completion(t[:n], lp[:n], _STOPS[stop], support or None) for t, lp, stop, n, support in rows]

    def _has_stop_string(self, rows: Int[Tensor, " running"]) -> Bool[Tensor, " running"]:
        """Whether the text of each row ends with or just after a stop string."""
        strings = self._sampling.stop
        window = 4 * max(map(len, strings)) + 8  # a character takes at most 4 tokens; its first bytes may be cut off
        last = self._tokens[rows, max(0, self._step - window) : self._step].tolist()
        texts = [self._tokenizer.decode(tokens, clean_up_tokenization_spaces=False) for tokens in last]
        return torch.tensor([any(s in text for s in strings) for text in texts], device=rows.device)


def draw(
    logits: Float[Tensor, "row vocabulary"],
    chance: Float[Tensor, " row"],
    sampling: SamplingCfg,
    *,
    deterministic: bool = False,
) -> tuple[Int[Tensor, " row"], Float[Tensor, " row"], Int[Tensor, "row kept"] | None]:
    """A token of each row, from ``softmax(logits / temperature)`` among those that the filters keep.

    Args:
        chance: uniform in [0, 1); equal numbers draw equal tokens.
        deterministic: take the most likely token instead, of equally likely ones the first.

    Returns:
        The tokens, their log-probabilities in that distribution, and with filters the tokens that are kept (``kept_tokens``).
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
