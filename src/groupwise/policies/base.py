"""The interface of policies: a policy acts, and it scores actions that were taken.

Algorithms and collectors know this module only; no class here knows an environment.
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping, MutableMapping
from itertools import chain
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from groupwise.data.rollout import Nested, Spec, TensorDict
from groupwise.data.spaces import is_batched, nested_action, obs_to_tensor
from groupwise.engines import Engine

Batch = Mapping[str, Nested]
"""Keys of a rollout, all of one batch shape: [B] transitions, or [B, T] rows."""


class Action(NamedTuple):
    """Actions of a policy in B environments."""

    action: Tensor
    """[B, ...] the policy's own action, before ``env_action`` maps it into the space."""
    log_prob: Tensor
    """[B] log-probability under the distribution that was sampled; [B, K] for policies scored by ``token``."""
    value: Tensor | None = None
    """[B] V(obs), None without a critic."""
    state: Tensor | None = None
    """[B, S] state of a recurrent policy after this step; None for other policies."""


class Evaluation(NamedTuple):
    """Scores of a batch under the policy as it is now, shaped like the batch, with gradient.

    For policies scored by ``token``: log_prob and entropy [B, K], value [B], dist [B, K, P].
    """

    log_prob: Tensor
    entropy: Tensor
    value: Tensor | None = None
    dist: Tensor | None = None
    """[..., P] flat parameters of the action distribution; ``Policy.kl`` understands them."""

    def masked(self, padding: Tensor) -> "Evaluation":
        """The same with 0 where there is ``padding``, a mask shaped like ``log_prob``."""
        log_prob, entropy = self.log_prob.masked_fill(padding, 0.0), self.entropy.masked_fill(padding, 0.0)
        value = None if self.value is None else self.value.masked_fill(padding, 0.0)
        dist = None if self.dist is None else self.dist.masked_fill(padding.unsqueeze(-1), 0.0)
        return Evaluation(log_prob, entropy, value, dist)


class Policy(nn.Module, ABC):
    """Maps observations to actions, and scores (observation, action) pairs.

    It owns its observation and reward normalisers, so they are part of every checkpoint. Their statistics are frozen from
    collection to the end of the update, so the ratio is exactly 1 on the first minibatch.
    """

    actor_only: bool
    """True without a critic: no ``value`` anywhere."""
    scored_by: Literal["transition", "row", "token"] = "transition"
    """``row`` for sequence models, which score ``[B, T]`` at once; ``token`` if a decision has several probability ratios."""
    num_units: int = 1
    """K, probability ratios of a decision; 1 unless the policy is scored by ``token``."""
    state_size: int = 0
    """S, numbers that a recurrent policy remembers; ``act`` and ``value`` then take ``{"obs": ..., "state": [B, S]}``. 0 of other policies."""
    gives_distribution: bool = True
    """Whether ``Evaluation.dist`` holds the whole distribution. Language models score single tokens only."""
    batch_keys: tuple[str, ...] = ("obs", "action")
    """Keys of the rollout that ``evaluate`` reads."""
    action_spec: Spec
    """The policy's own action, as the rollout stores it."""
    state_encoder: nn.Module | None
    """Maps observations to vectors of numbers, for credit that compares states. None: credit gets the observations as they are."""
    observation_space: Any
    """Gymnasium space of one observation, which ``predict`` needs."""
    action_space: Any
    """Gymnasium space of one action, which ``predict`` needs."""
    value_modules: tuple[str, ...] = ("critic", "critic_encoder", "reward_normalizer")
    """Modules that only values and rewards need, which start fresh where other weights have none for them."""

    def __init__(self) -> None:
        super().__init__()
        self.state_encoder = None

    @abstractmethod
    def act(self, obs: Nested, deterministic: bool = False, generator: torch.Generator | None = None) -> Action:
        """Actions for B observations, without gradient; ``generator`` makes them repeatable."""

    @abstractmethod
    def evaluate(self, batch: Batch) -> Evaluation:
        """Scores of ``batch["action"]`` given ``batch["obs"]`` (and other stored data), with gradient."""

    @torch.no_grad()
    def predict(self, obs: Any, deterministic: bool = True) -> Any:
        """Environment actions for one observation or a batch of them: numpy in, numpy out.

        Raises:
            DataError: an observation that does not fit the policy's ``observation_space``.
            TypeError: the policy has no ``observation_space`` or ``action_space``.
        """
        if not hasattr(self, "observation_space") or not hasattr(self, "action_space"):
            raise TypeError(f"{type(self).__name__} has no spaces; fix: set its observation_space and action_space")
        space = self.observation_space
        batched = is_batched(space, obs)
        tensor: Any = obs_to_tensor(space, obs, self.device, batched=batched)
        own = self.act(tensor if batched else tensor.unsqueeze(0), deterministic).action
        array = self.env_action(own).cpu().numpy()
        return nested_action(self.action_space, array if batched else array[0])

    def player(self) -> Any:
        """A player of episodes that begin now, with the policy's ``act`` and ``predict``; a recurrent one keeps the hidden state."""
        return self

    def value(self, obs: Nested) -> Tensor:
        """V(obs) of shape [B], without gradient. Only policies with a critic have it."""
        raise TypeError(f"{type(self).__name__} has no critic: an actor_only policy has no value")

    def unit_mask(self, batch: Batch) -> Tensor:
        """Which units of each decision were executed, ``[*batch, K]``; only of policies scored by ``token``.

        Args:
            batch: keys of the rollout, with any leading dimensions; ``executed`` among them if decisions take several steps.
        """
        raise TypeError(f"{type(self).__name__} is scored by {self.scored_by!r}: a decision is one unit")

    def env_action(self, action: Tensor) -> Tensor:
        """The environment's action for the policy's own: clipped or squashed into the space where it is bounded."""
        return action

    def own_action(self, action: Tensor) -> Tensor:
        """The policy's own action for the environment's: what ``env_action`` maps to it, or nearest to it."""
        return action

    def label(self, action: Tensor, noise: float, generator: torch.Generator) -> Tensor:
        """Own actions of demonstrations as cloning learns them this time, with random numbers for ``imitate``.

        Args:
            noise: standard deviation of Gaussian noise that is added to floats.
        """
        if not noise or not action.is_floating_point():
            return action
        return action + noise * torch.randn(action.shape, generator=generator)

    def imitate(self, batch: Batch) -> Evaluation:
        """Scores of demonstrated steps, with gradient; cloning maximises ``log_prob``.

        A policy that is cloned by another loss than its density returns minus the loss of each step there.
        """
        return self.evaluate(batch)

    def kl(self, dist: Tensor, other: Tensor) -> Tensor:
        """Exact KL(dist || other) per element, from the flat parameters in ``Evaluation.dist``."""
        raise TypeError(f"{type(self).__name__} has no closed-form KL; fix: use kl_estimator k1, k2 or k3")

    def normalize_reward(self, reward: Tensor) -> Tensor:
        """Rewards in the scale that credit is computed in; the identity unless the policy normalises them."""
        return reward

    def update_normalizers(self, rollout: TensorDict, engine: Engine) -> None:
        """Update the normalisers' statistics by the rollout's valid steps. Called once, after the update."""

    def make_reference(self) -> "Policy":
        """A frozen policy that scores like this one does now."""
        return copy.deepcopy(self).requires_grad_(False).eval()

    @torch.no_grad()
    def move_towards(self, policy: "Policy", share: float) -> None:
        """Move parameters and statistics towards those of ``policy``, by this share of the way; 1 copies them."""
        theirs = chain(policy.parameters(), policy.buffers())
        for own, other in zip(chain(self.parameters(), self.buffers()), theirs, strict=True):
            if own.is_floating_point():
                own.lerp_(other, share)
            else:
                own.copy_(other)

    def without_critic(self) -> "Policy":
        """A copy that only acts, if it can be made."""
        return copy.deepcopy(self)

    def save_only(self, names: set[str]) -> None:
        """Leave all other tensors out of state dicts, and do not miss them when one is loaded."""
        self._saved = names
        self.register_state_dict_post_hook(_keep_saved)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_post_hook(_expect_saved)  # type: ignore[no-untyped-call]

    @property
    def shares_prefixes(self) -> bool:
        """Whether the common prefix of a group is encoded once, and micro-batches count it once."""
        return False

    @property
    def device(self) -> torch.device:
        """Device of the parameters."""
        return next(self.parameters()).device


def _keep_saved(policy: Policy, state: MutableMapping[str, Tensor], prefix: str, metadata: dict[str, Any]) -> None:
    for name in [name for name in state if name.startswith(prefix) and name.removeprefix(prefix) not in policy._saved]:
        del state[name]


def _expect_saved(policy: Policy, keys: Any) -> None:
    keys.missing_keys[:] = [name for name in keys.missing_keys if name in policy._saved]


def with_state(obs: Nested, state: Tensor) -> TensorDict:
    """Observations [B, ...] and states [B, S] as a recurrent policy takes them."""
    return TensorDict({"obs": obs, "state": state}, batch_size=[len(state)])


def has_hooks(network: nn.Module) -> bool:
    """Whether any module or parameter has a forward or backward hook."""
    of_modules = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    of_parameters = ("_backward_hooks", "_post_accumulate_grad_hooks")
    return any(getattr(module, name) for module in network.modules() for name in of_modules) or any(
        getattr(parameter, name) for parameter in network.parameters() for name in of_parameters
    )
