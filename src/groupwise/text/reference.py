"""The reference of a language model with adapters."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from groupwise.policies.base import Action, Batch, Evaluation, Policy

if TYPE_CHECKING:
    from groupwise.text.policy import CausalLM


class AdapterReference(Policy):
    """The policy with a frozen copy of its trained parameters: a reference that shares the base model."""

    scored_by = "row"

    def __init__(self, policy: "CausalLM") -> None:
        super().__init__()
        self._policy = (policy,)  # in a tuple, it is no submodule
        self.actor_only, self.batch_keys, self.action_spec = policy.actor_only, policy.batch_keys, policy.action_spec
        self.copies = nn.ParameterList(
            nn.Parameter(parameter.detach().clone(), requires_grad=False) for parameter in self._trained()
        )

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> Evaluation:
        """Scores of the tokens in ``loss_mask``, without gradient; zeros elsewhere."""
        with self._swapped() as policy:
            return policy.evaluate(batch)

    def act(self, obs: Any, deterministic: bool = False, generator: torch.Generator | None = None) -> Action:
        """As the policy's."""
        with self._swapped() as policy:
            return policy.act(obs, deterministic, generator)

    def predict(self, obs: Any, deterministic: bool = True) -> Any:
        """As the policy's."""
        with self._swapped() as policy:
            return policy.predict(obs, deterministic)

    @torch.no_grad()
    def move_towards(self, policy: Policy, share: float) -> None:
        """Move the copies towards the policy's trained parameters, by this share of the way."""
        for copy, parameter in zip(self.copies, self._trained(), strict=True):
            copy.lerp_(parameter, share)

    @property
    def shares_prefixes(self) -> bool:
        """Whether the policy shares prefixes."""
        return self._policy[0].shares_prefixes

    @property
    def device(self) -> torch.device:
        """The policy's device."""
        return self._policy[0].device

    def _trained(self) -> list[nn.Parameter]:
        return [parameter for parameter in self._policy[0].parameters() if parameter.requires_grad]

    @contextmanager
    def _swapped(self) -> Iterator["CausalLM"]:
        """The policy, with the copies in place of its trained parameters."""
        pairs = [*zip(self.copies, self._trained(), strict=True)]

        def swap() -> None:
            for copy, parameter in pairs:
                copy.data, parameter.data = parameter.data, copy.data

        swap()
        try:
            yield self._policy[0]
        finally:
            swap()
