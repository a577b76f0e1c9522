"""Adapters of a language model, by peft."""

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
    """The policy with its adapters switched off, without gradient: a reference without weights of its own."""

    scored_by = "row"
    refreshable = False

    def __init__(self, policy: "CausalLM") -> None:
        super().__init__()
        self._policy = (policy,)  # in a tuple, it is no submodule
        self.actor_only, self.batch_keys, self.action_spec = policy.actor_only, policy.batch_keys, policy.action_spec

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> Evaluation:
        """Scores of the tokens in ``loss_mask``; zeros elsewhere."""
        with self._policy[0].model.disable_adapter():
            return self._policy[0].evaluate(batch)

    def act(self, obs: Nested, deterministic: bool = False, generator: torch.Generator | None = None) -> Action:
        """Raises, like the policy's."""
        return self._policy[0].act(obs, deterministic, generator)

    def predict(self, obs: Any, deterministic: bool = True) -> Any:
        """Raises, like the policy's."""
        return self._policy[0].predict(obs, deterministic)

    @property
    def shares_prefixes(self) -> bool:
        """Whether the policy shares prefixes."""
        return self._policy[0].shares_prefixes

    @property
    def device(self) -> torch.device:
        """The policy's device."""
        return self._policy[0].device


def is_adapted(model: nn.Module) -> bool:
    """Whether it is a model with adapters by peft."""
    peft = sys.modules.get("peft")  # imported by whoever made such a model
    return peft is not None and isinstance(model, peft.PeftModel)


def check_adapters(model: Any) -> None:
    """Refuse adapters that are virtual tokens before the prompt: ``CausalLM`` bypasses peft's own forward pass.

    Raises:
        ConfigError: names their type.
    """
    for cfg in model.peft_config.values() if is_adapted(model) else ():
        if cfg.is_prompt_learning:
            raise ConfigError(
                f"a CausalLM cannot use adapters of peft's type {cfg.peft_type.value}, tokens before the prompt; fix: LoRA, or "
                "another type that changes layers"
            )
