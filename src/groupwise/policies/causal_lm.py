"""A causal language model as a policy: the observation is a token in its context, the action the next token.

Any transformers decoder whose logits are its last hidden states times its output embeddings; the first use compares
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

TOKEN = TensorSpec((), torch.int64)


class CausalLM(Policy):
    """Scores and writes tokens with a transformers model.

    Args:
        model: what ``AutoModelForCausalLM`` loads, or a PEFT model around one.
        eos_ids: tokens that end a completion, the model's own by default.

    Raises:
        ConfigError: the model's logits are not its hidden states times its output embeddings.
    """

    actor_only = True
    scored_by = "row"
    batch_keys = ("obs", "action", "valid")

    def __init__(self, model: nn.Module, sampling: SamplingCfg | None = None, eos_ids: Sequence[int] | None = None) -> None:
        super().__init__()
        self.model = model
        self.sampling = sampling or SamplingCfg()
        self.action_spec = TOKEN
        self.eval()  # dropout would make the sampler and the trainer two different policies
        self.eos_ids = _eos_ids(self.decoder) if eos_ids is None else tuple(eos_ids)
        self._check_head()

    @property
    def decoder(self) -> Any:
        """The transformers model, inside its adapters if it has any."""
        wrapped: Any = self.model
        return wrapped.get_base_model() if "get_base_model" in dir(type(wrapped)) else wrapped

    @property
    def head(self) -> Float[Tensor, "vocabulary width"]:
        """Weights of the output embeddings."""
        weight: Tensor = self.decoder.get_output_embeddings().weight
        return weight

    def evaluate(self, batch: Batch) -> Evaluation:
        """Scores of the tokens in ``loss_mask``; zeros elsewhere."""
        obs, valid, mask = batch["obs"], batch["valid"], batch["loss_mask"]
        used = valid.any(dim=0).nonzero()
        width = int(used[-1]) + 1 if len(used) else 1  # rows are shorter than the widest of the whole rollout
        chosen = mask[:, :width]
        hidden = self.hidden_states(obs[:, :width], valid[:, :width])
        token = batch["action"][:, :width][chosen]
        scores = token_scores(hidden[chosen], self.head, token, temperature=self.sampling.temperature)
        log_prob, entropy = (torch.zeros_like(mask, dtype=torch.float32) for _ in scores)
        where = mask.nonzero(as_tuple=True)
        return Evaluation(log_prob.index_put(where, scores.log_prob), entropy.index_put(where, scores.entropy))

    def hidden_states(
        self, tokens: Int[Tensor, "row step"], valid: Bool[Tensor, "row step"], cache: Any = None
    ) -> Float[Tensor, "row step width"]:
        """Last hidden states; positions count from each row's first valid token, wherever its padding is."""
        position = (valid.cumsum(dim=1) - 1).clamp(min=0)[:, -tokens.shape[1] :]
        late = valid[:, 1:] & ~valid[:, :-1]
        # behind the text nothing looks at padding: without a mask attention takes its fast path
        mask = valid.long() if cache is not None or bool(late.any()) else None
        output = self.decoder.base_model(
            input_ids=tokens, attention_mask=mask, position_ids=position, past_key_values=cache, use_cache=cache is not None
        )
        hidden: Tensor = output.last_hidden_state
        return hidden

    def logits(self, hidden: Float[Tensor, "row width"]) -> Float[Tensor, "row vocabulary"]:
        """Logits that completions are drawn from, in float32 and divided by the temperature."""
        return hidden.float() @ self.head.float().T / self.sampling.temperature

    def act(self, obs: Nested, deterministic: bool = False, generator: torch.Generator | None = None) -> Action:
        """Not one token at a time: a generator writes whole completions."""
        raise TypeError("a CausalLM does not act token by token; mend: generate completions with a Generator")

    def predict(self, obs: Any, deterministic: bool = True) -> Any:
        """Not arrays: see ``act``."""
        raise TypeError("a CausalLM takes prompts; mend: generate completions with a Generator")

    @torch.no_grad()
    def _check_head(self) -> None:
        """Compare the plain logits with the head's on a few tokens."""
        if self.decoder.get_output_embeddings() is None:
            raise ConfigError(f"{type(self.decoder).__name__} has no output embeddings; mend: a model for causal LM")
        tokens = torch.arange(4, device=self.device)[None] % self.head.shape[0]
        ours = self.hidden_states(tokens, torch.ones_like(tokens, dtype=torch.bool))[0].float() @ self.head.float().T
        theirs = self.model(input_ids=tokens).logits[0].float()
        off = float((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1))
        if off > 0.02:
            raise ConfigError(
                f"{type(self.decoder).__name__} computes its logits in another way than hidden states times output embeddings "
                f"(they differ by {off:.1%}); mend: a model without scaled, capped or biased logits"
            )


def _eos_ids(model: Any) -> tuple[int, ...]:
    """The tokens that end a text, by the model's generation settings, else by its config."""
    found = model.generation_config.eos_token_id
    found = model.config.eos_token_id if found is None else found
    return tuple(found) if isinstance(found, list | tuple) else () if found is None else (int(found),)
