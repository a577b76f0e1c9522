"""The control policy: an actor, and for PPO a critic, on any fixed-shape observation and action space."""

import copy
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from groupwise.config.policy import PolicyCfg
from groupwise.data import action_masks
from groupwise.data.nested_actions import nested_action
from groupwise.data.rollout import Nested
from groupwise.data.spaces import is_batched, obs_to_tensor, space_kind
from groupwise.errors import ConfigError, DataError
from groupwise.policies.base import Action, Batch, Evaluation, Policy
from groupwise.policies.distributions import make_head
from groupwise.policies.entries import Entries
from groupwise.policies.networks import ACTOR_GAIN, CRITIC_GAIN, MLP, ObsEncoder, orthogonal
from groupwise.policies.normalization import ObsNormalizer, RewardNormalizer

if TYPE_CHECKING:
    from groupwise.engines.base import Engine

_DEFAULT = PolicyCfg()


class ActorCritic(Policy):
    """Normalises and encodes the observation, then acts and values.

    Args:
        observation_space: the single environment's Gymnasium space.
        action_space: likewise.
        actor_only: builds no critic at all.
        gamma: discount of the return that scales rewards (``cfg.normalize_reward``).
        actor: replaces the actor's network. It maps the encoder's features ``[B, F]`` (normalised, flat, one-hot, or
            from the CNN) to the action head's outputs: logits, or the means of a Gaussian, whose log standard
            deviation the policy then holds; a Gaussian actor with twice the outputs gives the log standard deviations,
            too.
        critic: replaces the critic's network, ``[B, F]`` to ``[B, 1]``. A custom network shares no trunk but the encoder.

    Raises:
        UnsupportedSpaceError: an observation or action space without a fixed shape.
        ConfigError: a custom network with wrong outputs, or settings that do not fit the spaces.
    """

    def __init__(
        self,
        observation_space: Any,
        action_space: Any,
        cfg: PolicyCfg = _DEFAULT,
        *,
        actor_only: bool = False,
        gamma: float = 0.99,
        actor: nn.Module | None = None,
        critic: nn.Module | None = None,
    ) -> None:
        super().__init__()
        if actor_only and critic is not None:
            raise ConfigError("a critic was given with actor_only=True, which has none; fix: drop one of them")
        self.observation_space = observation_space
        self.action_space = action_space
        self.cfg = cfg
        self.actor_only = actor_only
        self.head = make_head(action_space, cfg)
        self.action_spec = self.head.action_spec
        self.entries = Entries.of(observation_space, action_space, cfg)
        self.obs_normalizer = ObsNormalizer(observation_space) if cfg.normalize_obs else None
        self.reward_normalizer = RewardNormalizer(gamma) if cfg.normalize_reward else None
        self.encoder = self._make_encoder(self.entries.actor)
        self.critic_encoder = self._make_critic_encoder()
        self._build_networks(actor, critic)
        # Act and evaluate must be the same function: dropout in a custom network would move the ratio off 1.
        self.eval()

    def _make_encoder(self, space: Any) -> ObsEncoder:
        return ObsEncoder(space, self.cfg)

    def _make_critic_encoder(self) -> ObsEncoder | None:
        """The critic's own encoder, None where features can be shared: no critic, a shared trunk, nothing to learn."""
        learns = any(True for _ in self.encoder.parameters()) or self.entries.critic is not self.entries.actor
        own = learns and self.cfg.trunk == "separate" and not self.actor_only
        return self._make_encoder(self.entries.critic) if own else None

    def _build_networks(self, actor: nn.Module | None, critic: nn.Module | None) -> None:
        num_features, num_outputs = self.encoder.num_features, self.head.num_outputs
        num_critic_features = (self.critic_encoder or self.encoder).num_features
        self.trunk: MLP | None = None
        self.actor: nn.Module
        self.critic: nn.Module | None
        if self.cfg.trunk == "shared" and actor is None and critic is None:
            self.trunk = MLP(num_features, self.cfg)
            width = self.trunk.num_outputs
            self.actor = orthogonal(nn.Linear(width, num_outputs), ACTOR_GAIN)
            self.critic = None if self.actor_only else orthogonal(nn.Linear(width, 1), CRITIC_GAIN)
        else:
            self.actor = actor or MLP(num_features, self.cfg, num_outputs, ACTOR_GAIN)
            self.critic = None if self.actor_only else critic or MLP(num_critic_features, self.cfg, 1, CRITIC_GAIN)
        if critic is not None:
            _count_outputs(critic, "critic", num_critic_features, (1,))
        if actor is not None:
            num_outputs = _count_outputs(actor, "actor", num_features, (num_outputs, self.head.num_params))
        held = self.head.num_params - num_outputs
        self.log_std = nn.Parameter(torch.full((held,), self.cfg.log_std_init)) if held else None

    @torch.no_grad()
    def act(self, obs: Nested, deterministic: bool = False, generator: torch.Generator | None = None) -> Action:
        """Actions for B observations, without gradient; ``deterministic`` takes the mode."""
        params, value = self._forward(obs)
        action = self.head.mode(params) if deterministic else self.head.sample(params, generator)
        return Action(action, self.head.log_prob(params, action), value)

    def evaluate(self, batch: Batch) -> Evaluation:
        """Scores of ``batch["action"]`` given ``batch["obs"]``, with gradient."""
        params, value = self._forward(batch["obs"])
        log_prob, entropy = self.head.score(params, batch["action"])
        return Evaluation(log_prob, entropy, value, params)

    @torch.no_grad()
    def value(self, obs: Nested) -> Tensor:
        """V(obs) of shape [B], without gradient."""
        value = self._forward(obs)[1]
        return super().value(obs) if value is None else value

    @torch.no_grad()
    def predict(self, obs: Any, deterministic: bool = True) -> Any:
        """Environment actions for one observation or a batch of them: numpy in, numpy out.

        One observation in a Discrete action space gives an int. What only the critic reads may be missing.

        Raises:
            DataError: an observation of the wrong shape or structure, or one that is not finite.
        """
        tensor, batched = self._read(obs)
        params = self._actor_params(self.encoder(self._normalized(tensor)), tensor)
        return self._written(self.head.mode(params) if deterministic else self.head.sample(params), batched)

    def env_action(self, action: Tensor) -> Tensor:
        """The environment's action: numbered from ``start``, clipped or squashed into the box."""
        return self.head.env_action(action)

    def own_action(self, action: Tensor) -> Tensor:
        """The inverse of ``env_action``."""
        return self.head.own_action(action)

    def kl(self, dist: Tensor, other: Tensor) -> Tensor:
        """Exact KL(dist || other) per element."""
        return self.head.kl(dist, other)

    def normalize_reward(self, reward: Tensor) -> Tensor:
        """Rewards over the running standard deviation of the return, if ``cfg.normalize_reward``."""
        return reward if self.reward_normalizer is None else self.reward_normalizer(reward)

    @torch.no_grad()
    def update_normalizers(self, rollout: TensorDict, engine: "Engine") -> None:
        """Update the normalisers' statistics by the rollout's valid steps of all ranks.

        Those of observations that came with the weights stay: the weights were trained on them.
        """
        if self.obs_normalizer is not None and self.cfg.init_from is None:
            self.obs_normalizer.update(rollout["obs"], rollout["valid"], engine.sum)
        if self.reward_normalizer is not None:
            self.reward_normalizer.update(rollout, engine.sum)

    def without_critic(self) -> "ActorCritic":
        """A copy that only acts, on what the actor reads."""
        actor = copy.deepcopy(self)
        actor.actor_only, actor.observation_space = True, self.entries.to_act
        actor.critic = actor.critic_encoder = None
        return actor

    def _read(self, obs: Any) -> tuple[Nested, bool]:
        """A user's observations ``[B, ...]`` as tensors, and whether they came as a batch."""
        space = self.entries.to_act
        batched = is_batched(space, obs)
        tensor: Any = obs_to_tensor(space, obs, self.device, batched=batched)
        _check_finite(tensor, "obs")
        if self.entries.masked:
            action_masks.check(tensor[action_masks.KEY], self.action_space)
        return tensor if batched else tensor.unsqueeze(0), batched

    def _written(self, action: Tensor, batched: bool) -> Any:
        """The environment's actions for the policy's own, as the action space has them."""
        array = self.head.env_action(action).cpu().numpy()
        found = nested_action(self.action_space, array if batched else array[0])
        return found if batched or space_kind(self.action_space) != "discrete" else int(found)

    def _forward(self, obs: Nested) -> tuple[Tensor, Tensor | None]:
        """Flat parameters of the action distribution, and the value if there is a critic."""
        normalized = self._normalized(obs)
        features = self.encoder(normalized)
        for_critic = features if self.critic_encoder is None else self.critic_encoder(normalized)
        params, value = self._heads(features, for_critic)
        return self._allowed(params, obs), value

    def _heads(self, features: Tensor, for_critic: Tensor) -> tuple[Tensor, Tensor | None]:
        """``_forward`` from what the encoders of actor and critic give."""
        if self.trunk is not None:
            features = for_critic = self.trunk(features)
        params = self._params(features)
        return params, None if self.critic is None else self.critic(for_critic).squeeze(-1)

    def _allowed(self, params: Tensor, obs: Any) -> Tensor:
        """The parameters, with probability 0 for actions that the observation's mask forbids."""
        return action_masks.allowed_logits(params, obs[action_masks.KEY]) if self.entries.masked else params

    def _normalized(self, obs: Nested) -> Nested:
        return obs if self.obs_normalizer is None else self.obs_normalizer(obs)

    def _actor_params(self, features: Tensor, obs: Any) -> Tensor:
        """Parameters of the action distribution alone, from the encoder's features."""
        return self._allowed(self._params(features if self.trunk is None else self.trunk(features)), obs)

    def _params(self, features: Tensor) -> Tensor:
        outputs: Tensor = self.actor(features)
        if self.log_std is None:
            return outputs
        return torch.cat([outputs, self.log_std.expand(*outputs.shape[:-1], -1)], dim=-1)


@torch.no_grad()
def _count_outputs(network: nn.Module, name: str, num_inputs: int, allowed: tuple[int, ...]) -> int:
    """How many outputs a custom network gives, found by running it once.

    Raises:
        ConfigError: it gives another number than ``allowed``.
    """
    parameter = next(network.parameters(), torch.empty(0))
    shape = network.eval()(torch.zeros(2, num_inputs, device=parameter.device)).shape
    if shape not in [(2, width) for width in allowed]:
        wanted = " or ".join(f"[B, {width}]" for width in allowed)
        raise ConfigError(f"the {name} maps features [2, {num_inputs}] to {list(shape)}, expected {wanted}")
    return int(shape[1])


def _check_finite(obs: Nested, name: str) -> None:
    if not isinstance(obs, Tensor):
        for key, leaf in obs.items():
            _check_finite(leaf, f"{name}.{key}")
    elif obs.is_floating_point() and not obs.isfinite().all():
        index = (~obs.isfinite()).nonzero()[0].tolist()
        raise DataError(f"{name}{index} is {obs[tuple(index)].item()}, expected a finite number; fix its source")
