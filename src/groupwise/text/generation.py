"""Generation of completions: each group's prompt is encoded once (prefix sharing)."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional
from transformers.cache_utils import DynamicCache

from groupwise.config.policy import SamplingCfg
from groupwise.errors import DataError
from groupwise.policies.base import Action
from groupwise.text.sampling import Completion, DecodingState

if TYPE_CHECKING:
    from groupwise.text.policy import CausalLM

Head = Callable[[Tensor], Tensor]
"""Logits of hidden states, in float32."""
Generate = Callable[..., list[list[Completion]]]
"""``complete`` of a policy, or another backend with its other arguments."""


class Prompts(NamedTuple):
    """The prompts after the first forward pass."""

    cache: Any
    """Of transformers."""
    valid: Bool[Tensor, "prompt width"]
    """False at padding."""
    group_size: int
    """Completions of each."""
    max_new_tokens: int


class Step:
    """Extends each row by one token, through the model's own modules."""

    def __init__(self, policy: "CausalLM", prompts: Prompts) -> None:
        self._policy, self._cache = policy, prompts.cache
        self._valid = prompts.valid.repeat_interleave(prompts.group_size, dim=0)
        self._cache.batch_repeat_interleave(prompts.group_size)

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
        return Step(policy, prompts)


def complete(
    policy: "CausalLM",
    prompts: Sequence[Sequence[int]],
    seeds: Int[Tensor, "prompt member"],
    sampling: SamplingCfg | None = None,
    *,
    deterministic: bool = False,
) -> list[list[Completion]]:
    """Completions of each prompt, one for each of its seeds; none depends on what else the call generates.

    Args:
        sampling: by default the policy's.
        deterministic: take the most likely token each time; seeds do not matter then.
    """
    sampling = sampling or policy.sampling
    size = seeds.shape[1]
    with policy.decoder.context(policy), policy.computing():
        tokens, valid = left_padded(prompts, policy.device)
        rows = seeds.reshape(-1).to(policy.device)
        prompt = tokens.masked_fill(~valid, -1).repeat_interleave(size, dim=0)
        state = DecodingState(
            rows, sampling, policy.eos_ids, policy.tokenizer, prompt=prompt, deterministic=deterministic
        )
        _decode(policy, tokens, valid, size, state, sampling.max_new_tokens)
    flat = state.completions()
    return [flat[i : i + size] for i in range(0, len(flat), size)]


@torch.no_grad()
def next_token(
    policy: "CausalLM",
    contexts: Int[Tensor, "row step"] | Sequence[Sequence[int]],
    deterministic: bool = False,
    generator: torch.Generator | None = None,
) -> Action:
    """The next token of each context, its log-probability in the sampling distribution, and the context's value.

    To penalties the context is a prompt.
    """
    ids = contexts.tolist() if isinstance(contexts, Tensor) else contexts
    seeds = torch.randint(2**31, (len(ids), 1), generator=generator, device=policy.device)
    once = policy.sampling.model_copy(update={"max_new_tokens": 1, "stop": ()})
    completions = [one for (one,) in complete(policy, ids, seeds, once, deterministic=deterministic)]
    token = torch.tensor([one.tokens[0] for one in completions], device=policy.device)
    log_prob = torch.tensor([one.log_probs[0] for one in completions], device=policy.device)
    if policy.value_head is None:
        return Action(token, log_prob)
    hidden = policy.hidden_states(*left_padded(ids, policy.device))[:, -1]
    return Action(token, log_prob, policy.value_head(hidden.float())[:, 0])


def _decode(
    policy: "CausalLM", tokens: Tensor, valid: Tensor, group_size: int, state: DecodingState, max_new_tokens: int
) -> None:
    """Generate until every row is finished."""
    head = policy.decoder.head(policy)  # half precision is converted here once, not at each token
    cache: Any = DynamicCache(config=policy.network.config)
    hidden = policy.hidden_states(tokens, valid, cache)[:, -1]
    logits = head(hidden).repeat_interleave(group_size, dim=0)
    token, unfinished = state.write(logits)
    if not len(state.running):
        return
    step = policy.decoder.step(policy, Prompts(cache, valid, group_size, max_new_tokens), token, head)
    del cache  # it is the step's
    while len(state.running):
        if len(state.running) < len(token):  # finished rows leave the batch
            token = token[unfinished]
            step.keep(unfinished)
        token, unfinished = state.write(head(step(token)))


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
