"""The control policy: an actor, and for PPO a critic, on any fixed-shape observation and action space."""

import copy
import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor, nn
from torch.nn.functional import elu, linear, silu

from groupwise.config.policy import PolicyCfg
from groupwise.data.rollout import Nested, TensorDict
from groupwise.data.spaces import (
    KEY,
    allowed_logits,
    chosen_entries,
    has_mask,
    is_batched,
    leaf_spaces,
    nested_action,
    obs_spec,
    obs_to_tensor,
    space_kind,
)
from groupwise.data.spaces import check as check_masks
from groupwise.engines import Engine
from groupwise.errors import ConfigError, DataError
from groupwise.functional.advantages import return_to_go
from groupwise.functional.reduce import AllSum, local
from groupwise.policies.base import Action, Batch, Evaluation, Policy
from groupwise.policies.heads import make_head

# Networks: encoders of observations, and MLPs on top of them

HIDDEN_GAIN = math.sqrt(2)
ACTOR_GAIN = 0.01
CRITIC_GAIN = 1.0

Layer = TypeVar("Layer", nn.Linear, nn.Conv2d)

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"tanh": torch.tanh, "relu": torch.relu, "elu": elu, "silu": silu}
_LARGE = (32, 8, 4, 0), (64, 4, 2, 0), (64, 3, 1, 0)
_SMALL = (32, 3, 1, 1), (64, 3, 2, 1)
"""Outputs, kernel, stride and padding of the convolutions for large and for small images."""


def orthogonal(layer: Layer, gain: float = HIDDEN_GAIN) -> Layer:
    """The layer, its weight orthogonal times ``gain`` and its bias 0."""
    nn.init.orthogonal_(layer.weight, gain)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
    return layer


def _linear(layer: Any, x: Tensor) -> Tensor:
    """``layer(x)`` in the layer's dtype, in two thirds of the time on a small batch, for it runs no module hooks."""
    return linear(x.to(layer.weight.dtype), layer.weight, layer.bias)


class MLP(nn.Module):
    """Linear layers with activations between them.

    Args:
        num_outputs: width of a last linear layer; None ends with the last hidden layer's activation.
        gain: scale of the last layer's weight.
    """

    def __init__(self, num_inputs: int, cfg: PolicyCfg, num_outputs: int | None = None, gain: float = 1.0) -> None:
        super().__init__()
        sizes = (num_inputs, *cfg.hidden_sizes)
        self.num_outputs = sizes[-1] if num_outputs is None else num_outputs
        self.hidden = nn.ModuleList(orthogonal(nn.Linear(a, b)) for a, b in pairwise(sizes))
        self.head = None if num_outputs is None else orthogonal(nn.Linear(sizes[-1], num_outputs), gain)
        self.activation = cfg.activation

    def forward(self, x: Float[Tensor, "*batch input"]) -> Float[Tensor, "*batch output"]:
        """Outputs of the last layer."""
        activation = _ACTIVATIONS[self.activation]
        for layer in self.hidden:
            x = activation(_linear(layer, x))
        return x if self.head is None else _linear(self.head, x)


def image_layout(space: Any) -> tuple[int, int, int, bool] | None:
    """Channels, height, width, and whether channels come first; None if the space is no image.

    An image is a uint8 Box of three dimensions. Its channels are the smaller one of the first and the last dimension
    (a stack of 4 grey frames is [4, 84, 84], a colour image [210, 160, 3]), the last one on a tie.
    """
    if space_kind(space) != "box" or space.dtype != np.uint8 or len(space.shape) != 3:
        return None
    first, middle, last = space.shape
    return (first, middle, last, True) if first < last else (last, first, middle, False)


class ObsEncoder(nn.Module):
    """Features of any observation: those of every leaf of the space, one after another.

    A Box is flattened (uint8 that is not normalised is scaled from the bounds of the space to 0 and 1, as in images), Discrete and MultiDiscrete
    become one-hot, MultiBinary stays zeros and ones, and images go through a CNN. Leaves of a Dict or Tuple follow in the
    order of the space.

    Raises:
        UnsupportedSpaceError: a space without a fixed shape.
        ConfigError: an image too small for the CNN.
    """

    def __init__(self, space: Any, cfg: PolicyCfg) -> None:
        super().__init__()
        obs_spec(space)  # refuses spaces without a fixed shape
        leaves = leaf_spaces(space)
        self.paths = list(leaves)
        self.encoders = nn.ModuleList()
        for leaf in leaves.values():
            kind, layout = space_kind(leaf), image_layout(leaf)
            if kind in ("discrete", "multi_discrete"):
                self.encoders.append(
                    _OneHot(np.array(leaf.n if kind == "discrete" else leaf.nvec), np.array(leaf.start))
                )
            else:
                self.encoders.append(_Flat(leaf) if layout is None else _Image(leaf, layout))
        self.num_features = sum(encoder.num_features for encoder in self.encoders)  # type: ignore[misc]

    def forward(self, obs: Nested) -> Float[Tensor, "*batch feature"]:
        """Features of observations with any leading dimensions."""
        if isinstance(obs, Tensor):
            features: Tensor = self.encoders[0](obs)
            return features
        leaves = zip(self.paths, self.encoders, strict=True)
        return torch.cat([encoder(obs[path]) for path, encoder in leaves], dim=-1)


def make_state_encoder(space: Any) -> ObsEncoder | None:
    """Encoder of observations without parameters; None for images, which need a network."""
    has_image = any(image_layout(leaf) for leaf in leaf_spaces(space).values())
    return None if has_image else ObsEncoder(space, PolicyCfg())


class _Bounded(nn.Module):
    """Scales uint8 from the bounds of its space to 0 and 1."""

    low: Any
    span: Any

    def __init__(self, space: Any) -> None:
        super().__init__()
        low, span = np.zeros(1, np.float32), np.ones(1, np.float32)
        if space.dtype == np.uint8 and math.prod(space.shape):
            low = space.low.astype(np.float32)
            span = np.maximum(space.high - low, 1)  # nothing is divided by 0 where an element never varies
        self.is_shifted = bool(low.any())
        for name, value in (("low", low), ("span", span)):
            if (value == value.flat[0]).all():
                setattr(self, name, float(value.flat[0]))  # dividing by a number is faster on a GPU
            else:
                self.register_buffer(name, torch.from_numpy(value), persistent=False)

    def scaled(self, numbers: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        """The numbers between 0 and 1, where they are in the bounds."""
        scaled: Tensor = (numbers - self.low if self.is_shifted else numbers) / self.span
        return scaled


class _Flat(_Bounded):
    def __init__(self, space: Any) -> None:
        super().__init__(space)
        self.num_dims = len(space.shape)
        self.num_features = math.prod(space.shape)
        for name, value in self.named_buffers():
            setattr(self, name, value.flatten())

    def forward(self, obs: Shaped[Tensor, "*batch"]) -> Float[Tensor, "..."]:
        flat = obs if self.num_dims == 1 else obs.reshape(*_batch(obs, self.num_dims), self.num_features)
        return flat if flat.is_floating_point() else self.scaled(flat.float())


class _OneHot(nn.Module):
    """A one for each number, among the options of its choice; a number out of range has only zeros."""

    def __init__(self, sizes: np.ndarray, start: np.ndarray) -> None:
        super().__init__()
        self.num_dims = sizes.ndim
        self.num_choices = sizes.size
        self.num_features = int(sizes.sum())
        options = [first + np.arange(size) for size, first in zip(sizes.ravel(), start.ravel(), strict=True)]
        choice = np.repeat(np.arange(sizes.size), sizes.ravel())
        self.register_buffer("option", torch.from_numpy(np.concatenate(options)), persistent=False)
        self.register_buffer("choice", torch.from_numpy(choice), persistent=False)
        self.option: Tensor
        self.choice: Tensor

    def forward(self, obs: Shaped[Tensor, "*batch"]) -> Float[Tensor, "..."]:
        flat = obs.reshape(*_batch(obs, self.num_dims), self.num_choices)
        return (flat[..., self.choice] == self.option).float()


class _Image(_Bounded):
    """512 features of an image of 36x36 or more, by the network of DQN; 128 of a smaller one, such as a grid of cells.

    Source: Mnih et al. 2015, https://doi.org/10.1038/nature14236.
    """

    def __init__(self, space: Any, layout: tuple[int, int, int, bool]) -> None:
        super().__init__(space)
        channels, height, width, self.channels_first = layout
        sizes, is_small = [height, width], min(height, width) < 36
        layers: list[nn.Module] = []
        for outputs, kernel, stride, padding in _SMALL if is_small else _LARGE:
            layers += [orthogonal(nn.Conv2d(channels, outputs, kernel, stride, padding)), nn.ReLU()]
            channels, sizes = outputs, [(size + 2 * padding - kernel) // stride + 1 for size in sizes]
        self.num_features = 128 if is_small else 512
        layers += [nn.Flatten(), orthogonal(nn.Linear(channels * math.prod(sizes), self.num_features)), nn.ReLU()]
        self.network: Any = nn.Sequential(*layers)

    def forward(self, obs: Shaped[Tensor, "*batch a b c"]) -> Float[Tensor, "*batch feature"]:
        scaled = self.scaled(obs.to(self.network[0].weight.dtype))
        image = scaled if self.channels_first else scaled.movedim(-1, -3)
        features: Tensor = self.network(image.reshape(-1, *image.shape[-3:]))
        return features.reshape(*_batch(obs, 3), self.num_features)


def _batch(obs: Tensor, num_dims: int) -> torch.Size:
    """The leading dimensions of an observation with ``num_dims`` of its own."""
    return obs.shape[: obs.dim() - num_dims]


# Normalisers of observations and rewards; only update changes their statistics, acting and training do not

_EPS = 1e-8
CLIP = 10.0


class RunningMeanStd(nn.Module):
    """Mean and population variance of everything seen so far, per dimension; 0 and 1 before anything was.

    ``shift`` and ``scale`` are the mean and one over the standard deviation in float32, kept at hand because acting needs them
    at every step.
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(shape, dtype=torch.float64))
        self.register_buffer("var", torch.ones(shape, dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.register_buffer("shift", torch.zeros(shape))
        self.register_buffer("scale", torch.ones(shape))
        self.mean: Tensor
        self.var: Tensor
        self.count: Tensor
        self.shift: Tensor
        self.scale: Tensor

    def update(self, x: Shaped[Tensor, "..."], mask: Bool[Tensor, "*batch"], all_sum: AllSum = local) -> None:
        """Take in the elements of ``x`` ``[*batch, *shape]`` where the mask is True, those of all ranks together.

        Masked-out elements may hold anything, NaN included.

        Source: Chan et al. 1979, "Updating formulae and a pairwise algorithm for computing sample variances".
        """
        outside = ~mask.reshape(-1, *[1] * self.mean.dim())
        flat = x.reshape(-1, *self.mean.shape).double().masked_fill(outside, 0)
        sums = all_sum(torch.cat([flat.sum(dim=0).flatten(), mask.sum().double().reshape(1)]))
        count = sums[-1]
        mean = sums[:-1].reshape(self.mean.shape) / count.clamp(min=1)
        squares = (flat - mean).square().masked_fill(outside, 0).sum(dim=0)
        var = all_sum(squares) / count.clamp(min=1)
        total = self.count + count
        share = count / total.clamp(min=1)
        delta = mean - self.mean
        merged = (1 - share) * self.var + share * var + share * (1 - share) * delta.square()
        self.mean += share * delta
        self.var.copy_(torch.where(total > 0, merged, self.var))
        self.count.copy_(total)
        self.shift.copy_(self.mean)
        self.scale.copy_((self.var + _EPS).rsqrt())

    def normalize(self, x: Shaped[Tensor, "*any"]) -> Float[Tensor, "*any"]:
        """``(x - mean) / std``, clipped to ``[-CLIP, CLIP]``."""
        return ((x - self.shift) * self.scale).clamp(-CLIP, CLIP)


class ObsNormalizer(nn.Module):
    """Scales Boxes of floats, and of uint8 that are no images, to running mean 0 and standard deviation 1, clipped at 10.

    The rest passes. Bounds of uint8 say little of its scale: cells of MiniGrid are below 11 of 255.
    """

    def __init__(self, space: Any) -> None:
        super().__init__()
        boxes = {path: leaf for path, leaf in leaf_spaces(space).items() if space_kind(leaf) == "box"}
        leaves = {
            path: leaf
            for path, leaf in boxes.items()
            if leaf.dtype.kind == "f" or (leaf.dtype == np.uint8 and image_layout(leaf) is None)
        }
        self.paths = list(leaves)
        self.statistics = nn.ModuleList(RunningMeanStd(tuple(leaf.shape)) for leaf in leaves.values())

    def forward(self, obs: Nested) -> Nested:
        """The normalised observation; the given one stays as it is."""
        out = obs if isinstance(obs, Tensor) else obs.copy()
        statistics: Any
        for path, statistics in zip(self.paths, self.statistics, strict=True):
            if isinstance(out, Tensor):
                return statistics.normalize(out)
            if (leaf := out.get(path, None)) is not None:  # an actor alone is not given the critic's entries
                out[path] = statistics.normalize(leaf)
        return out

    def update(self, obs: Nested, valid: Bool[Tensor, "*batch"], all_sum: AllSum = local) -> None:
        """Take the valid observations ``[*batch, ...]`` of all ranks into the statistics."""
        statistics: Any
        for path, statistics in zip(self.paths, self.statistics, strict=True):
            statistics.update(obs if isinstance(obs, Tensor) else obs[path], valid, all_sum)


class RewardNormalizer(nn.Module):
    """Divides rewards by the running standard deviation of the discounted return, clipped at 10.

    The return is the discounted reward-to-go from each valid step to the end of its episode or of the rollout. Its mean
    is never subtracted, for that would change which behaviour is best.

    Source: Engstrom et al. 2020, https://arxiv.org/abs/2005.12729, section 3, who sum forwards from the episode's start.
    """

    def __init__(self, gamma: float) -> None:
        super().__init__()
        self.gamma = gamma
        self.statistics = RunningMeanStd(())

    def forward(self, reward: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
        """The scaled rewards."""
        return (reward * self.statistics.scale).clamp(-CLIP, CLIP)

    def update(self, rollout: TensorDict, all_sum: AllSum = local) -> None:
        """Take the discounted returns of the rollout's valid steps into the statistics."""
        valid = rollout["valid"]
        done = rollout["terminated"] | rollout["truncated"] | ~valid
        returns = return_to_go(rollout["reward"].masked_fill(~valid, 0), done, self.gamma)
        self.statistics.update(returns, valid & returns.isfinite(), all_sum)  # sums of large rewards may overflow


_DEFAULT = PolicyCfg()


class ActorCritic(Policy):
    """Normalises and encodes the observation, then acts and values.

    Args:
        observation_space: the single environment's Gymnasium space.
        action_space: the single environment's Gymnasium space.
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

    encoder_class: type[ObsEncoder] = ObsEncoder

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
        for name, network in (("actor", actor), ("critic", critic)):
            if not isinstance(network, nn.Module | None):
                raise ConfigError(f"{name} = {network!r:.80}: expected a Module; fix: leave it out, or actor_only=True")
        if actor_only and critic is not None:
            raise ConfigError("a critic was given with actor_only=True, which has none; fix: drop one of them")
        self.observation_space = observation_space
        self.action_space = action_space
        self.cfg = cfg
        self.actor_only = actor_only
        self.head = make_head(action_space, cfg)
        self.action_spec = self.head.action_spec
        # which entries of the observation actor and critic read; a mask of allowed actions is no feature
        self.masked = has_mask(observation_space, action_space)
        features = observation_space
        if self.masked:
            kind = type(observation_space)
            features = kind({key: space for key, space in observation_space.spaces.items() if key != KEY})
        actor_space = self._acts_on = chosen_entries(features, cfg.actor_keys, "policy.actor_keys")
        critic_space = chosen_entries(features, cfg.critic_keys, "policy.critic_keys")
        if self.masked:
            self._acts_on = kind({**actor_space.spaces, KEY: observation_space[KEY]})
        self.obs_normalizer = ObsNormalizer(observation_space) if cfg.normalize_obs else None
        self.reward_normalizer = RewardNormalizer(gamma) if cfg.normalize_reward else None
        self.encoder = self.encoder_class(actor_space, cfg)
        self.state_encoder = make_state_encoder(critic_space)
        # the critic has an encoder of its own, unless there is no critic, the trunk is shared, or there is nothing to learn
        learns = any(True for _ in self.encoder.parameters()) or critic_space is not actor_space
        own = learns and cfg.trunk == "separate" and not actor_only
        self.critic_encoder = self.encoder_class(critic_space, cfg) if own else None
        num_features, num_outputs = self.encoder.num_features, self.head.num_outputs
        num_critic_features = (self.critic_encoder or self.encoder).num_features
        self.trunk: MLP | None = None
        self.actor: nn.Module
        self.critic: nn.Module | None
        if cfg.trunk == "shared" and actor is None and critic is None:
            self.trunk = MLP(num_features, cfg)
            width = self.trunk.num_outputs
            self.actor = orthogonal(nn.Linear(width, num_outputs), ACTOR_GAIN)
            self.critic = None if actor_only else orthogonal(nn.Linear(width, 1), CRITIC_GAIN)
        else:
            self.actor = actor or MLP(num_features, cfg, num_outputs, ACTOR_GAIN)
            self.critic = None if actor_only else critic or MLP(num_critic_features, cfg, 1, CRITIC_GAIN)
        if critic is not None:
            _count_outputs(critic, "critic", num_critic_features, (1,))
        if actor is not None:
            num_outputs = _count_outputs(actor, "actor", num_features, (num_outputs, self.head.num_params))
        free = self.head.num_params - num_outputs
        self.log_std = nn.Parameter(torch.full((free,), cfg.log_std_init)) if free else None
        # Act and evaluate must be the same function: dropout in a custom network would move the ratio off 1.
        self.eval()

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

        One observation in a Discrete action space gives an int. Entries that only the critic reads may be missing.

        Raises:
            DataError: an observation of the wrong shape or structure, or one that is not finite.
        """
        tensor, batched = self._read(obs)
        params = self._actor_params(tensor)
        return self._written(self.head.mode(params) if deterministic else self.head.sample(params), batched)

    @torch.no_grad()
    def mode(self, obs: Nested) -> Tensor:
        """The most likely actions for B observations, without gradient and without the critic."""
        return self.head.mode(self._actor_params(obs))

    def _actor_params(self, obs: Nested) -> Tensor:
        normalized = obs if self.obs_normalizer is None else self.obs_normalizer(obs)
        return self._heads(self.encoder(normalized), None, obs)[0]

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
    def update_normalizers(self, rollout: TensorDict, engine: Engine) -> None:
        """Update the normalisers' statistics by the rollout's valid steps of all ranks.

        Statistics of observations that came with the weights stay: the weights were trained on them.
        """
        if self.obs_normalizer is not None and self.cfg.init_from is None:
            self.obs_normalizer.update(rollout["obs"], rollout["valid"], engine.sum)
        if self.reward_normalizer is not None:
            self.reward_normalizer.update(rollout, engine.sum)

    def without_critic(self) -> "ActorCritic":
        """A copy that only acts, on the actor's entries."""
        actor = copy.deepcopy(self)
        actor.actor_only, actor.observation_space = True, self._acts_on
        actor.critic = actor.critic_encoder = actor.state_encoder = None
        return actor

    def _read(self, obs: Any) -> tuple[Nested, bool]:
        """A user's observations ``[B, ...]`` as tensors, and whether they came as a batch."""
        space = self._acts_on
        batched = is_batched(space, obs)
        tensor: Any = obs_to_tensor(space, obs, self.device, batched=batched)
        _check_finite(tensor, "obs")
        if self.masked:
            check_masks(tensor[KEY], self.action_space)
        return tensor if batched else tensor.unsqueeze(0), batched

    def _written(self, action: Tensor, batched: bool) -> Any:
        """The environment's actions for the policy's own, as the action space has them."""
        array = self.head.env_action(action).cpu().numpy()
        found = nested_action(self.action_space, array if batched else array[0])
        return found if batched or space_kind(self.action_space) != "discrete" else int(found)

    def _forward(self, obs: Nested) -> tuple[Tensor, Tensor | None]:
        """Flat parameters of the action distribution, and the value if there is a critic."""
        normalized = obs if self.obs_normalizer is None else self.obs_normalizer(obs)
        features = self.encoder(normalized)
        return self._heads(features, features if self.critic_encoder is None else self.critic_encoder(normalized), obs)

    def _heads(self, features: Tensor, for_critic: Tensor | None, obs: Any) -> tuple[Tensor, Tensor | None]:
        """Parameters and value from the features that the encoders of actor and critic give; without the latter no value."""
        if self.trunk is not None:
            features = for_critic = self.trunk(features)
        params = self._params(features)
        if self.masked:  # probability 0 for what the observation's mask forbids
            params = allowed_logits(params, obs[KEY])
        if self.critic is None or for_critic is None:
            return params, None
        return params, self.critic(for_critic).squeeze(-1)

    def _params(self, features: Tensor) -> Tensor:
        outputs: Tensor = self.actor(features)
        if self.log_std is None:
            return outputs
        return torch.cat([outputs, self.log_std.expand(*outputs.shape[:-1], -1)], dim=-1)


@torch.no_grad()
def _count_outputs(network: nn.Module, name: str, num_inputs: int, allowed: tuple[int, ...]) -> int:
    """How many outputs a custom network gives, found by running it once; a ``ConfigError`` if not as ``allowed``."""
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
