"""Sampling: which token comes next, and what ends a completion."""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional

from groupwise.config.policy import EvalSamplingCfg, SamplingCfg
from groupwise.errors import ConfigError
from groupwise.functional.row_random import hash_pair, mix, unit

BLOCK = 256
"""Probabilities summed at once where a drawn number is looked up: a running sum over a whole vocabulary is slow."""
_TINY = 1e-30
_BYTES, _MORE = 4, 8
"""Tokens that a character may take, and tokens kept besides: of what is cut off, a character's last bytes may remain."""
_STOPS: tuple[Literal["length", "eos", "stop"], ...] = ("length", "eos", "stop")


class Completion(NamedTuple):
    """One completion of a prompt."""

    tokens: list[int]
    """With the token that ended it."""
    log_probs: list[float]
    """Of each token, under the distribution that it was drawn from."""
    stop: Literal["eos", "stop", "length"]
    """What ended it: a token that ends texts, a stop string, or ``max_new_tokens``."""
    support: list[list[int]] | None = None
    """With ``top_k``: the tokens that could be drawn at each place, by rising id."""


class DecodingState:
    """The state of decoding: all completions, a token of each unfinished one at a time.

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
        drawn = draw(
            logits,
            self._chances[rows, step],
            self._sampling,
            deterministic=self._deterministic,
        )
        self._tokens[rows, step], self._log_probs[rows, step] = drawn.token, drawn.log_prob
        if drawn.support is not None:
            self._supports.append((self.running, drawn.support))
        stop = torch.isin(drawn.token, self._ends).long()
        if self._strings is not None:
            complete = self._strings.completed(self.running.tolist(), drawn.token.tolist())
            stop[torch.tensor(complete, device=stop.device) & (stop == 0)] = _STOPS.index("stop")
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
        lengths = self._lengths.clamp(max=self._step).tolist()
        supports = self._supports_of_rows() if self._supports else [None] * len(lengths)
        rows = zip(
            self._tokens.tolist(), self._log_probs.tolist(), self._stops.tolist(), lengths, supports, strict=True
        )
        return [Completion(t[:n], lp[:n], _STOPS[stop], support) for t, lp, stop, n, support in rows]

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


class Drawn(NamedTuple):
    """The next token of each row."""

    token: Int[Tensor, " row"]
    log_prob: Float[Tensor, " row"]
    """Under the distribution that the token was drawn from."""
    support: Int[Tensor, "row kept"] | None
    """With ``top_k``: the tokens that could be drawn, by rising id."""


def draw(
    logits: Float[Tensor, "row vocabulary"],
    chance: Float[Tensor, " row"],
    sampling: SamplingCfg,
    *,
    deterministic: bool = False,
) -> Drawn:
    """A token of each row, from ``softmax(logits / temperature)`` among those that the settings keep.

    Exactly ``top_k`` tokens are kept, of several equally likely ones some.

    Args:
        chance: uniform in [0, 1); equal numbers draw equal tokens.
        deterministic: the likeliest token instead, of equally likely ones the first.
    """
    if sampling.temperature != 1:
        logits = logits / sampling.temperature
    support = None
    if sampling.top_k is not None:
        kept = logits.topk(min(sampling.top_k, logits.shape[1]), sorted=False).indices
        support = kept.sort(dim=-1).values  # by id, as rounding in another batch may change the order by likelihood
        logits = logits.gather(1, support)
    probability = logits.softmax(dim=-1)
    if isinstance(sampling, EvalSamplingCfg):
        probability = _nucleus(probability, sampling)
    place = probability.argmax(dim=-1) if deterministic else pick(probability, chance)
    log_prob = probability.gather(1, place[:, None])[:, 0].log()
    return Drawn(place if support is None else support.gather(1, place[:, None])[:, 0], log_prob, support)


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
    place = block * BLOCK + _reach(blocks[rows, block], (goal - before).clamp(min=_TINY))[0]
    return place.clamp(max=width - 1)  # what NaN leads to lies behind


def _reach(
    mass: Float[Tensor, "row place"], goal: Float[Tensor, " row"]
) -> tuple[Int[Tensor, " row"], Float[Tensor, "row place"], Float[Tensor, " row"]]:
    """The first place with mass at which the running sum reaches the goal; the running sums; and the goal itself.

    Where rounding leaves the goal above every sum, the greatest is the goal.
    """
    summed = mass.cumsum(dim=-1)
    # a CPU adds one by one, so that the sums rise where there is mass and stay where there is none
    place, goal = _first_in_order(summed, goal) if summed.device.type == "cpu" else _first(mass, summed, goal)
    return place, summed, goal


def _first_in_order(summed: Float[Tensor, "row place"], goal: Float[Tensor, " row"]) -> tuple[Tensor, Tensor]:
    """The first place at which sums in rising order reach the goal, and the goal itself: in a third of the time."""
    goal = torch.minimum(goal, summed[:, -1])
    place = torch.searchsorted(summed, goal[:, None])[:, 0]
    return place.clamp(max=summed.shape[1] - 1), goal  # NaN is behind them all: who reads the log-probability will tell


def _first(
    mass: Float[Tensor, "row place"], summed: Float[Tensor, "row place"], goal: Float[Tensor, " row"]
) -> tuple[Tensor, Tensor]:
    """The same where rounding may let the sums rise or fall without mass."""
    reached = torch.where(mass > 0, summed, 0)
    goal = torch.minimum(goal, reached.amax(dim=-1))
    return (reached >= goal[:, None]).int().argmax(dim=-1), goal


def _nucleus(probability: Float[Tensor, "row place"], sampling: EvalSamplingCfg) -> Float[Tensor, "row place"]:
    """Probabilities among the tokens that ``top_p`` and then ``min_p`` keep; the likeliest always is.

    Source: Holtzman et al., "The Curious Case of Neural Text Degeneration", 2020, section 3.1; Nguyen et al., "Turning Up
    the Heat: Min-p Sampling", 2024, section 3.
    """
    if sampling.top_p is not None:
        ordered, order = probability.sort(dim=-1, descending=True, stable=True)
        before = ordered.cumsum(dim=-1) - ordered
        ordered = ordered.masked_fill(before >= sampling.top_p, 0)
        probability = torch.zeros_like(probability).scatter(1, order, ordered)
    if sampling.min_p is not None:
        least = sampling.min_p * probability.amax(dim=-1, keepdim=True)
        probability = probability.masked_fill(probability < least, 0)
    return probability / probability.sum(dim=-1, keepdim=True)
