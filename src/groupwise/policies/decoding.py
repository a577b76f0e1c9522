"""Writing completions with a language model: each prompt read once, its cache repeated for the group."""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer

from groupwise.errors import DataError
from groupwise.functional.row_random import hash_pair, mix, unit
from groupwise.policies.causal_lm import CausalLM
from groupwise.policies.configs import SamplingCfg

ROOM = 64
"""Tokens that a cache grows by."""


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


@torch.no_grad()
def complete(
    policy: CausalLM,
    prompts: Sequence[Sequence[int]],
    seeds: Int[Tensor, "prompt member"],
    sampling: SamplingCfg | None = None,
    *,
    tokenizer: Any = None,
    deterministic: bool = False,
) -> list[list[Completion]]:
    """Completions of each prompt, one for each of its seeds.

    A row's choices follow from its seed and its own tokens alone, up to the rounding of logits in another batch.

    Args:
        sampling: by default the policy's.
        tokenizer: of transformers; only needed where the sampling has stop strings.
        deterministic: take the likeliest token each time; seeds do not matter then.

    Raises:
        DataError: a prompt without tokens.
    """
    for number, prompt in enumerate(prompts):
        if not prompt:
            raise DataError(f"prompt {number} has no tokens; mend: at least one, such as the beginning-of-text token")
    group_size, sampling = seeds.shape[1], sampling or policy.sampling
    cache: Any = DynamicCache(config=policy.model.config)
    tokens, valid = _left_padded(prompts, policy.device)
    logits = policy.logits(policy.hidden_states(tokens, valid, cache)[:, -1]).repeat_interleave(group_size, dim=0)
    cache.batch_repeat_interleave(group_size)
    cache.layers = [RoomyLayer(c.keys, c.values) if type(c) is DynamicLayer else c for c in cache.layers]
    valid = valid.repeat_interleave(group_size, dim=0)
    streams = mix(seeds.reshape(-1).to(policy.device))
    ends = torch.tensor(policy.eos_ids, dtype=torch.long, device=policy.device)
    running = torch.arange(len(streams), device=policy.device)
    shape = (len(streams), sampling.max_new_tokens)
    chosen = torch.zeros(shape, dtype=torch.long, device=policy.device)
    log_probs = torch.zeros(shape, device=policy.device)
    lengths = torch.full((len(streams),), sampling.max_new_tokens, device=policy.device)
    ended = torch.zeros(len(streams), dtype=torch.bool, device=policy.device)
    for step in range(sampling.max_new_tokens):
        log_p = logits.log_softmax(dim=-1)
        chance = unit(hash_pair(streams[running], torch.full_like(running, step)))
        token = log_p.argmax(dim=-1) if deterministic else _draw(log_p.exp(), chance)
        chosen[running, step] = token
        log_probs[running, step] = log_p.gather(1, token[:, None])[:, 0]
        stops = torch.isin(token, ends)
        ended[running[stops]], lengths[running[stops]] = True, step + 1
        if step + 1 == sampling.max_new_tokens or bool(stops.all()):
            break
        if bool(stops.any()):  # finished rows leave the batch
            keep = (~stops).nonzero()[:, 0]
            running, token, valid = running[keep], token[keep], valid[keep]
            cache.batch_select_indices(keep)
        valid = torch.cat([valid, valid.new_ones(len(valid), 1)], dim=1)
        logits = policy.logits(policy.hidden_states(token[:, None], valid, cache)[:, -1])
    rows = zip(chosen.tolist(), log_probs.tolist(), lengths.tolist(), ended.tolist(), strict=True)
    flat = [Completion(t[:n], lp[:n], "eos" if end else "length") for t, lp, n, end in rows]
    return [flat[i : i + group_size] for i in range(0, len(flat), group_size)]


def _left_padded(prompts: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    width = max(map(len, prompts))
    tokens = torch.tensor([[0] * (width - len(p)) + list(p) for p in prompts], device=device)
    lengths = torch.tensor([len(p) for p in prompts], device=device)
    return tokens, torch.arange(width, device=device) >= (width - lengths)[:, None]


def _draw(probability: Float[Tensor, "row vocabulary"], chance: Float[Tensor, " row"]) -> Int[Tensor, " row"]:
    """The token at which the summed probability reaches 1 - chance of its total; never one of probability 0."""
    summed = probability.cumsum(dim=-1)
    place: Tensor = torch.searchsorted(summed, ((1 - chance) * summed[:, -1])[:, None])[:, 0]
    return place
