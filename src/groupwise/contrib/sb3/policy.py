"""Stable-Baselines3 policies without a critic, and how the algorithms here see them."""

from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from gymnasium import spaces
from jaxtyping import Float
from stable_baselines3.common.policies import BasePolicy
from stable_baselines3.common.preprocessing import get_flattened_obs_dim
from stable_baselines3.common.torch_layers import (
    BaseFeaturesExtractor,
    CombinedExtractor,
    FlattenExtractor,
    NatureCNN,
    create_mlp,
)
from stable_baselines3.common.type_aliases import PyTorchObs, Schedule
from tensordict import TensorDict
from torch import Tensor, nn

from groupwise.config.policy import PolicyCfg
from groupwise.data.rollout import Nested
from groupwise.engines import Engine
from groupwise.errors import ConfigError
from groupwise.policies.actor_critic import ObsNormalizer
from groupwise.policies.base import Action, Batch, Evaluation, Policy
from groupwise.policies.heads import make_head

NetArch = list[int] | dict[str, list[int]]
_HIDDEN_GAIN = float(np.sqrt(2))
_ACTION_GAIN = 0.01


class NormalizedExtractor(BaseFeaturesExtractor):
    """Flat observations, scaled to running mean 0 and standard deviation 1 if they are floats."""

    def __init__(self, observation_space: spaces.Space) -> None:
        super().__init__(observation_space, get_flattened_obs_dim(observation_space))
        self.normalizer = ObsNormalizer(observation_space)

    def forward(self, observations: Tensor) -> Tensor:
        """Features [B, F]."""
        scaled: Tensor = self.normalizer(observations)
        return scaled.flatten(start_dim=1)


class ActorPolicy(BasePolicy):
    """``MlpPolicy``: features, hidden layers, parameters of the action distribution. No value network anywhere.

    Box actions are Gaussian and clipped on their way to the environment, as in Stable-Baselines3; their density is
    that of the unclipped sample. Discrete actions are numbered from the space's ``start``.

    Args:
        net_arch: width of each hidden layer, or ``dict(pi=...)`` with it. Default: 64, 64; none behind a ``NatureCNN``.
        optimizer_kwargs: default for Adam: ``eps=1e-5, fused=True``.

    Raises:
        ConfigError: ``net_arch`` describes more than the policy network.
        UnsupportedSpaceError: actions are neither Discrete, MultiDiscrete, MultiBinary nor a Box of floats.
    """

    default_extractor: ClassVar[type[BaseFeaturesExtractor]] = FlattenExtractor

    def __init__(
        self,
        observation_space: spaces.Space,
        action_space: spaces.Space,
        lr_schedule: Schedule,
        net_arch: NetArch | None = None,
        activation_fn: type[nn.Module] = nn.Tanh,
        ortho_init: bool = True,
        log_std_init: float = 0.0,
        features_extractor_class: type[BaseFeaturesExtractor] | None = None,
        features_extractor_kwargs: dict[str, Any] | None = None,
        normalize_images: bool = True,
        optimizer_class: type[torch.optim.Optimizer] = torch.optim.Adam,
        optimizer_kwargs: dict[str, Any] | None = None,
    ) -> None:
        features_extractor_class = features_extractor_class or self.default_extractor
        if optimizer_kwargs is None:
            optimizer_kwargs = {"eps": 1e-5, "fused": True} if optimizer_class is torch.optim.Adam else {}
        super().__init__(
            observation_space,
            action_space,
            features_extractor_class,
            features_extractor_kwargs,
            optimizer_class=optimizer_class,
            optimizer_kwargs=optimizer_kwargs,
            normalize_images=normalize_images,
        )
        self.net_arch = _hidden_sizes(net_arch, features_extractor_class)
        self.activation_fn = activation_fn
        self.ortho_init = ortho_init
        self.log_std_init = log_std_init
        self.features_extractor = self.make_features_extractor()
        self.features_dim = self.features_extractor.features_dim
        self.head = make_head(action_space, PolicyCfg())
        self._build(lr_schedule)

    def forward(self, obs: PyTorchObs, deterministic: bool = False) -> tuple[Tensor, Float[Tensor, " batch"]]:
        """Actions [B, ...] before they are clipped, and their log-probabilities."""
        params = self.action_params(obs)
        action = self.head.mode(params) if deterministic else self.head.sample(params)
        return action, self.head.log_prob(params, action)

    def action_params(self, obs: PyTorchObs) -> Float[Tensor, "batch P"]:
        """Flat parameters of the action distribution: logits, or means and log standard deviations."""
        outputs: Tensor = self.action_net(self.policy_net(self.extract_features(obs, self.features_extractor)))
        if self.log_std is None:
            return outputs
        return torch.cat([outputs, self.log_std.expand_as(outputs)], dim=-1)

    def evaluate_actions(
        self, obs: PyTorchObs, actions: Tensor
    ) -> tuple[Float[Tensor, " batch"], Float[Tensor, " batch"]]:
        """Log-probability and entropy of actions as ``forward`` returns them, with gradient."""
        return self.head.score(self.action_params(obs), actions)

    def _predict(self, observation: PyTorchObs, deterministic: bool = False) -> Tensor:
        params = self.action_params(observation)
        return self.head.env_action(self.head.mode(params) if deterministic else self.head.sample(params))

    def _build(self, lr_schedule: Schedule) -> None:
        self.policy_net = nn.Sequential(*create_mlp(self.features_dim, -1, self.net_arch, self.activation_fn))
        width = self.net_arch[-1] if self.net_arch else self.features_dim
        self.action_net = nn.Linear(width, self.head.num_outputs)
        held = self.head.num_params - self.head.num_outputs
        self.log_std = nn.Parameter(torch.full((held,), self.log_std_init)) if held else None
        if self.ortho_init:
            self.features_extractor.apply(partial(self.init_weights, gain=_HIDDEN_GAIN))
            self.policy_net.apply(partial(self.init_weights, gain=_HIDDEN_GAIN))
            self.action_net.apply(partial(self.init_weights, gain=_ACTION_GAIN))
        self.optimizer = self.optimizer_class(self.parameters(), lr=lr_schedule(1), **self.optimizer_kwargs)  # type: ignore[call-arg]

    def _get_constructor_parameters(self) -> dict[str, Any]:
        """What ``load`` calls the constructor with."""
        return super()._get_constructor_parameters() | {
            "lr_schedule": self._dummy_schedule,
            "net_arch": self.net_arch,
            "activation_fn": self.activation_fn,
            "ortho_init": self.ortho_init,
            "log_std_init": self.log_std_init,
            "features_extractor_class": self.features_extractor_class,
            "features_extractor_kwargs": self.features_extractor_kwargs,
            "optimizer_class": self.optimizer_class,
            "optimizer_kwargs": self.optimizer_kwargs,
        }


class CnnActorPolicy(ActorPolicy):
    """``CnnPolicy``: as ``ActorPolicy``, for images."""

    default_extractor = NatureCNN


class MultiInputActorPolicy(ActorPolicy):
    """``MultiInputPolicy``: as ``ActorPolicy``, for dictionaries of observations."""

    default_extractor = CombinedExtractor


class ScoredActor(Policy):
    """An ``ActorPolicy`` as the algorithms of this library see it: it acts and scores, and has no critic."""

    actor_only = True

    def __init__(self, actor: ActorPolicy) -> None:
        super().__init__()
        self.actor = actor
        self.action_spec = actor.head.action_spec

    @torch.no_grad()
    def act(self, obs: Nested, deterministic: bool = False, generator: torch.Generator | None = None) -> Action:
        """Actions for B observations, without gradient."""
        head, params = self.actor.head, self.actor.action_params(_plain(obs))
        action = head.mode(params) if deterministic else head.sample(params, generator)
        return Action(action, head.log_prob(params, action))

    def evaluate(self, batch: Batch) -> Evaluation:
        """Scores of ``batch["action"]`` given ``batch["obs"]``, with gradient."""
        params = self.actor.action_params(_plain(batch["obs"]))
        log_prob, entropy = self.actor.head.score(params, batch["action"])
        return Evaluation(log_prob, entropy, None, params)

    def update_normalizers(self, rollout: TensorDict, engine: Engine) -> None:
        """Update the statistics of a ``NormalizedExtractor``."""
        if isinstance(self.actor.features_extractor, NormalizedExtractor):
            self.actor.features_extractor.normalizer.update(rollout["obs"], rollout["valid"], engine.sum)

    def predict(self, obs: Any, deterministic: bool = True) -> Any:
        """Environment actions for one observation or a batch of them: numpy in, numpy out."""
        return self.actor.predict(obs, deterministic=deterministic)[0]

    def kl(self, dist: Float[Tensor, "*batch P"], other: Float[Tensor, "*batch P"]) -> Float[Tensor, "*batch"]:
        """Exact KL(dist || other) per element."""
        return self.actor.head.kl(dist, other)


def _plain(obs: Nested) -> PyTorchObs:
    return obs if isinstance(obs, Tensor) else {key: obs[key] for key in obs.keys()}  # noqa: SIM118


def _hidden_sizes(net_arch: NetArch | None, features_extractor_class: type[BaseFeaturesExtractor]) -> list[int]:
    if net_arch is None:
        return [] if features_extractor_class is NatureCNN else [64, 64]
    if isinstance(net_arch, dict):
        if net_arch.keys() != {"pi"}:
            raise ConfigError(
                f"net_arch={net_arch!r} describes {sorted(net_arch)}, but without a critic there is a policy network "
                "only; fix: net_arch=[64, 64] or net_arch=dict(pi=[64, 64])"
            )
        return net_arch["pi"]
    return net_arch
