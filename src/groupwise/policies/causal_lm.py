"""A causal language model as a policy: the observation is a token in its context, the action the next token.

Any transformers decoder whose logits are its last hidden states times its output embeddings; the constructor compares
the two. Scores are those of the distribution that completions are drawn from, temperature included.
"""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from groupwise.data.rollout import Nested, TensorSpec
from groupwise.errors import ConfigError
from groupwise.functional.vocabulary import token_scores
from groupwise.policies.base import Action, Batch, Evaluation, Policy
from groupwise.policies.configs import SamplingCfg
from groupwise.policies.prefixes import Prefixes, find_prefixes

_TOLERANCE = 0.02
"""Greatest difference between two ways to the same logits, relative to the largest; bfloat16 rounds to 0.004."""


class CausalLM(Policy):
    """Scores tokens with a transformers model.

    Rows of one group that begin alike, as siblings do with their prompt, go through that beginning once.

    Args:
        model: what ``AutoModelForCausalLM`` loads.
        eos_ids: tokens that end a completion; by default the model's own.

    Raises:
        ConfigError: the model's logits are not its hidden states times its output embeddings.
    """

    actor_only = True
    scored_by = "row"
    batch_keys = ("obs", "action", "valid", "group_id")

    def __init__(
        self, model: nn.Module, sampling: SamplingCfg | None = None, eos_ids: Sequence[int] | None = None
    ) -> None:
        super().__init__()
        self.model: Any = model
        self.sampling = sampling or SamplingCfg()
        self.action_spec = TensorSpec((), torch.int64)
        self.batch_keys = (*type(self).batch_keys, *_choice_keys(self.sampling))
        self.eval()  # dropout would make the sampler and the trainer two different policies
        self.eos_ids = _eos_ids(self.model) if eos_ids is None else tuple(eos_ids)
        self._check_head()

    @property
    def head(self) -> Float[Tensor, "vocabulary width"]:
        """Weights of the output embeddings."""
        weight: Tensor = self.model.get_output_embeddings().weight
        return weight

    def evaluate(self, batch: Batch) -> Evaluation:
        """Scores of the tokens in ``loss_mask``; zeros elsewhere."""
        tokens, valid, mask = batch["obs"], batch["valid"], batch["loss_mask"]
        prefixes = find_prefixes(tokens, valid, batch["group_id"])
        hidden = self._hidden(tokens, valid, mask) if prefixes is None else self._hidden_shared(prefixes, mask)
        choice = self._choice(batch, mask)
        scores = token_scores(hidden, self.head, batch["action"][mask], temperature=self.sampling.temperature, **choice)
        where = mask.nonzero(as_tuple=True)
        log_prob, entropy = (torch.zeros_like(mask, dtype=torch.float32).index_put(where, score) for score in scores)
        return Evaluation(log_prob, entropy)

    def hidden_states(
        self, tokens: Int[Tensor, "row step"], valid: Bool[Tensor, "row context"], cache: Any = None
    ) -> Float[Tensor, "row step width"]:
        """Last hidden states of the tokens; positions count from each row's first valid one, wherever its padding is.

        Args:
            valid: what is no padding, in the cache (if there is one) and in the tokens behind it.
            cache: of transformers; read, and written to.
        """
        position = (valid.cumsum(dim=1) - 1).clamp(min=0)[:, valid.shape[1] - tokens.shape[1] :]
        # padding behind the text is never looked at: without a mask attention takes its fast path
        masked = tokens.shape[1] < valid.shape[1] or bool((valid[:, 1:] & ~valid[:, :-1]).any())
        output = self.model.base_model(
            input_ids=tokens,
            attention_mask=valid.long() if masked else None,
            position_ids=position,
            past_key_values=cache,
            use_cache=cache is not None,
        )
        hidden: Tensor = output.last_hidden_state
        return hidden

    def logits(self, hidden: Float[Tensor, "row width"]) -> Float[Tensor, "row vocabulary"]:
        """Logits that completions are drawn from, in float32 and divided by the temperature."""
        return hidden.float() @ self.head.float().T / self.sampling.temperature

    def act(self, obs: Nested, deterministic: bool = False, generator: torch.Generator | None = None) -> Action:
        """Not one token at a time: ``decoding.complete`` writes whole completions."""
        raise TypeError("a CausalLM does not act token by token; mend: decoding.complete")

    def predict(self, obs: Any, deterministic: bool = True) -> Any:
        """Not from arrays: ``decoding.complete`` takes prompts."""
        raise TypeError("a CausalLM takes prompts, not arrays; mend: decoding.complete")

    def _hidden(self, tokens: Tensor, valid: Tensor, mask: Tensor) -> Float[Tensor, "token width"]:
        """Hidden states at the tokens of the mask, every row on its own."""
        used = valid.any(dim=0).nonzero()
        width = int(used[-1]) + 1 if len(used) else 1  # these rows may be shorter than the rollout's widest
        return self.hidden_states(tokens[:, :width], valid[:, :width])[mask[:, :width]]

    def _hidden_shared(self, prefixes: Prefixes, mask: Tensor) -> Float[Tensor, "token width"]:
        """Hidden states at the tokens of the mask, each prefix read once."""
        from transformers.cache_utils import DynamicCache

        cache: Any = DynamicCache(config=self.model.config)
        head = self.hidden_states(prefixes.head, prefixes.head_valid, cache)
        cache.batch_select_indices(prefixes.number)
        context = torch.cat([prefixes.head_valid[prefixes.number], prefixes.tail_valid], dim=1)
        tail = self.hidden_states(prefixes.tail, context, cache)
        return prefixes.gather(head, tail, mask)

    def _choice(self, batch: Batch, mask: Tensor) -> dict[str, Tensor]:
        """What the tokens of the mask were drawn from, as ``token_scores`` takes it; empty: from everything."""
        choice = {}
        if "support" in batch:
            choice["support"] = batch["support"][mask]
        if "eos_barred" in batch:
            choice["barred"] = batch["eos_barred"][mask]
            choice["barred_ids"] = torch.tensor(self.eos_ids, dtype=torch.long, device=mask.device)
        return choice

    @torch.no_grad()
    def _check_head(self) -> None:
        """Compare the model's logits with the head's on a few tokens."""
        name, embeddings = type(self.model).__name__, self.model.get_output_embeddings()
        if embeddings is None:
            raise ConfigError(f"{name} has no output embeddings; mend: a model for causal language modelling")
        tokens = torch.arange(4, device=self.device)[None] % len(self.head)
        ours = self.hidden_states(tokens, torch.ones_like(tokens, dtype=torch.bool))[0].float() @ self.head.float().T
        theirs = self.model(input_ids=tokens).logits[0].float()
        off = float((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1))
        if off > _TOLERANCE:
            raise ConfigError(
                f"the logits of {name} are not its hidden states times its output embeddings: they differ by {off:.1%}; "
                "mend: a model whose logits are not scaled, capped or biased"
            )


def _choice_keys(sampling: SamplingCfg) -> tuple[str, ...]:
    """Keys of the rollout that say what tokens were drawn from, where that is not everything."""
    keys = {"support": sampling.top_k is not None, "eos_barred": sampling.min_new_tokens > 0}
    return tuple(key for key, asked in keys.items() if asked)


def _eos_ids(model: Any) -> tuple[int, ...]:
    """The tokens that end a text, by the model's generation settings, else by its config."""
    found = model.generation_config.eos_token_id
    found = model.config.eos_token_id if found is None else found
    return tuple(found) if isinstance(found, list | tuple) else () if found is None else (int(found),)
