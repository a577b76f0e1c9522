"""Adapters of a language model: the policy without them is its own reference."""

import sys
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from groupwise.data.rollout import Nested
from groupwise.errors import ConfigError
from groupwise.policies.base import Action, Batch, Evaluation, Policy

if TYPE_CHECKING:
    from groupwise.text.policy import CausalLM


class AdaptersOff(Policy):
    """The policy it was made of with its adapters switched off, without gradient: the reference that costs no memory.

    It has no weights: they are the other's, which is no part of it.
    """

    scored_by = "row"
    refreshable = False

    def __init__(self, policy: "CausalLM") -> None:
        super().__init__()
        self._policy = (policy,)  # in a tuple, it is no submodule
        self.actor_only, self.batch_keys, self.action_spec = policy.actor_only, policy.batch_keys, policy.action_spec

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> Evaluation:
        """Scores of the tokens in ``loss_mask``; zeros elsewhere."""
        with self._policy[0].adapters_off():
            return self._policy[0].evaluate(batch)

    def act(self, obs: Nested, deterministic: bool = False, generator: torch.Generator | None = None) -> Action:
        """Not one token at a time, as the policy itself."""
        return self._policy[0].act(obs, deterministic, generator)

    def predict(self, obs: Any, deterministic: bool = True) -> Any:
        """Not from arrays, as the policy itself."""
        return self._policy[0].predict(obs, deterministic)

    @property
    def shares_prefixes(self) -> bool:
        """As the policy itself."""
        return self._policy[0].shares_prefixes

    @property
    def device(self) -> torch.device:
        """Where the policy's parameters live."""
        return self._policy[0].device


def is_adapted(model: nn.Module) -> bool:
    """Whether it is a model that peft has put adapters into."""
    peft = sys.modules.get("peft")  # whoever made such a model has imported it
    return peft is not None and isinstance(model, peft.PeftModel)


def check_adapters(model: Any) -> None:
    """Adapters are in the layers of the model, whose hidden states are then all there is to score with.

    Raises:
        ConfigError: they are virtual tokens before the prompt, which only peft's own forward knows of.
    """
    kinds = model.peft_config.values() if is_adapted(model) else ()
    for kind in kinds:
        if kind.is_prompt_learning:
            raise ConfigError(
                f"adapters of peft's type {kind.peft_type.value} stand before the prompt, which a CausalLM does not read; "
                "fix: LoRA, or another type that changes layers"
            )
