"""GRPO as a Stable-Baselines3 algorithm: its interface outside, this library's ``GRPO.update`` inside.

    model = GRPO("MlpPolicy", "CartPole-v1").learn(100_000)

It differs from SB3's PPO in three ways. Only whole groups of episodes that share a start are trained on. There is no
critic. A rollout ends when the groups that were begun within ``n_steps`` are whole; the ratio of episodes begun meanwhile
is against the policy that really drew each action.
"""

from groupwise.errors import require_extra

require_extra("stable_baselines3", "sb3")

import copy
import inspect
import io
import warnings
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar

import gymnasium
import numpy as np
import numpy.typing as npt
import torch
from gymnasium import spaces
from pydantic import ValidationError
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from stable_baselines3.common.policies import BasePolicy
from stable_baselines3.common.torch_layers import (
    BaseFeaturesExtractor,
    CombinedExtractor,
    FlattenExtractor,
    NatureCNN,
    create_mlp,
)
from stable_baselines3.common.type_aliases import GymEnv, MaybeCallback, PyTorchObs, Schedule
from stable_baselines3.common.utils import LinearSchedule, obs_as_tensor
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv
from torch import Tensor, nn

from groupwise.algorithms import grpo
from groupwise.algorithms.losses import CLIP
from groupwise.config.algorithm import CreditCfg, GroupStepCfg, GRPOCfg, ObjectiveCfg
from groupwise.config.base import OTHER_NAMES, Choice, explain, meant
from groupwise.config.load import objective_preset
from groupwise.config.policy import PolicyCfg
from groupwise.data.rollout import Nested, TensorDict
from groupwise.envs.snapshots import reseed_noise
from groupwise.errors import ConfigError, DataError, EnvError, GroupStartError, UnknownNameError, UnsupportedSpaceError
from groupwise.policies.actor_critic import make_state_encoder
from groupwise.policies.base import Action, Batch, Evaluation, Policy
from groupwise.policies.heads import make_head
from groupwise.seeding import derive_seed

SelfGRPO = TypeVar("SelfGRPO", bound="GRPO")
Array = npt.NDArray[Any]

__all__ = ["GRPO", "ActorPolicy", "CnnActorPolicy", "MultiInputActorPolicy", "SharedStart"]

# Settings: SB3's arguments as fields of the update's config, and SB3's names in error messages

CFG_NAMES = {
    "n_steps": "num_steps",
    "n_epochs": "num_epochs",
    "batch_size": "minibatch_size",
    "clip_range": "clip_coef",
}
"""Arguments that ``GRPOCfg`` has under another name."""
OF_OBJECTIVE = ("objective", "kl_estimator", "top_entropy_quantile")
"""Settings that a preset which is named as ``objective`` has."""
ELSEWHERE = {
    name: reason
    for names, reason in (
        ("clip_range_vf vf_coef", "there is no critic; fix: leave it out"),
        ("gae_lambda", "advantages compare members; fix: leave it out, or choose a credit=..."),
        ("normalize_advantage scale_rewards", "credit has a scale; fix: credit=CreditCfg(scale='std'), or 'none'"),
        ("use_sde sde_sample_freq", "actions are drawn independently at every step; fix: ent_coef is what explores"),
        ("rollout_buffer_class rollout_buffer_kwargs", "whole groups have a store of their own; fix: leave it out"),
        ("kl_beta", "it has another name here; fix: kl_coef=..."),
    )
    for name in names.split()
}
"""Arguments of SB3's on-policy algorithms and of sb3-contrib's proposed GRPO: why they are missing."""
_ABSENT = {"credit.reward": "parts", "credit.baseline": "greedy", "objective.ratio": "turn"}
"""Choices that need data which the rollouts of SB3's environments lack."""
LEARNING_RATE = LinearSchedule(1e-3, 0.0, 1.0)
"""An update takes the rate of its rollout's start."""
CREDIT = CreditCfg(group_key=GroupStepCfg(), returns="return_to_go", scale="batch_std")
"""The return-to-go at each time step among the members still running, over one scale for the rollout."""
OBJECTIVE = ObjectiveCfg()


def refuse(names: Iterable[str], algorithm: type) -> None:
    """Refuse names that are no arguments of the algorithm; the error has the counterpart, or the nearest name."""
    parameters = inspect.signature(algorithm).parameters.values()
    known = {p.name for p in parameters if p.kind is not p.VAR_KEYWORD and not p.name.startswith("_")}
    for name in names:
        if name in ELSEWHERE:
            raise ConfigError(f"GRPO takes no {name}: {ELSEWHERE[name]}")
        if name not in known:
            hint = meant([repr(OTHER_NAMES[name])]) if OTHER_NAMES.get(name) in known else None
            raise UnknownNameError("argument of GRPO", name, known, hint=hint)


def update_names() -> dict[str, str]:
    """The arguments of ``GRPO`` that ``GRPOCfg`` has, too, with their names there."""
    names = {name: CFG_NAMES.get(name, name) for name in inspect.signature(GRPO).parameters if name != "learning_rate"}
    return {sb3: name for sb3, name in names.items() if name in GRPOCfg.model_fields}


def update_cfg(model: "GRPO") -> GRPOCfg:
    """Settings of the update, from the model's attributes. Errors name them as SB3 does."""
    tree = {name: vars(model)[sb3] for sb3, name in update_names().items()}
    if callable(tree["clip_coef"]):
        tree["clip_coef"] = float(tree["clip_coef"](1.0))
    if model.shared_starts not in ("verify", "trust", "off"):
        raise ConfigError(f"shared_starts is {model.shared_starts!r}; fix: 'verify', 'trust' or 'off'")
    if model.kl_ref_iterations is not None:
        tree["sync_ref_model"] = {"steps": model.kl_ref_iterations}
    for part, own in (("credit", ("credit",)), ("objective", OF_OBJECTIVE)):
        if isinstance(tree[part], str):
            settings = objective_preset(tree[part]).settings
            tree |= {name: settings[name] for name in own if name in settings}
    try:
        cfg = GRPOCfg.model_validate(tree)
    except ValidationError as error:
        places = {(cfg,): sb3 for sb3, cfg in CFG_NAMES.items()} | {("sync_ref_model", "steps"): "kl_ref_iterations"}
        items = [{**item, "loc": (places[item["loc"]],)} if item["loc"] in places else item for item in error.errors()]
        said = "\n".join(explain(items)).replace("clip_coef", "clip_range")
        raise ConfigError(said.replace("sync_ref_model", "kl_ref_iterations")) from error
    for place, value in _ABSENT.items():
        part, name = place.split(".")
        found = vars(vars(cfg)[part])[name]
        if (found.name if isinstance(found, Choice) else found) == value:
            raise ConfigError(f"rollouts of Stable-Baselines3 lack what {place}={value!r} reads; fix: another {place}")
    return cfg


# Episodes with given starts. A ``VecEnv`` resets a sub-environment inside the step that ended its episode, and without a
# seed: the start of the next episode is queued beforehand in a wrapper inside each sub-environment.

_TRIAL_STEPS = 16
Running = tuple[int, int]
"""The state of an environment: number of its episode, -1 when that was not started from the queue; and steps since its start."""


class Start(NamedTuple):
    """How an episode begins."""

    episode: int
    """Number of the episode."""
    start_seed: int
    """Equal seeds, equal starts."""
    noise_seed: int
    """Seeds everything that is drawn after the start."""


class SharedStart(gymnasium.Wrapper):
    """A sub-environment whose next reset takes the queued start; without one it resets as usual.

    The start seed also seeds the environment's spaces, since some environments draw from these; after the reset the
    noise seed takes over there, in ``np_random`` and in generators that the environment or a wrapper keeps. A queued
    start goes before the seed given to ``reset``.
    """

    def __init__(self, env: gymnasium.Env) -> None:
        super().__init__(env)
        self._queued: Start | None = None
        self._episode = -1
        self._steps = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """First observation of the queued episode, or of an ordinary episode."""
        queued, self._queued = self._queued, None
        self._episode = -1 if queued is None else queued.episode
        self._steps = 0
        if queued is None:
            return self.env.reset(seed=seed, options=options)
        return _start(self.env, queued, options)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """One step of the environment."""
        self._steps += 1
        return self.env.step(action)

    def queue_start(self, start: Start | None) -> Running:
        """Set the start of the next reset (None: the usual reset); returns the running episode."""
        self._queued = start
        return self._episode, self._steps

    def try_start(self, start: Start, actions: Sequence[Any]) -> list[tuple[Any, ...]]:
        """Each step's observation as bits, reward, terminated and truncated, from a start to the end of the episode.

        Reset it afterwards.
        """
        env, monitors = self.env, []
        while isinstance(env, gymnasium.Wrapper):
            if isinstance(env, Monitor):
                monitors.append((env, {key: copy.copy(value) for key, value in vars(env).items() if key != "env"}))
                env.results_writer = None  # a monitor must not log this episode
            env = env.env
        try:
            moments: list[tuple[Any, ...]] = [(_bits(_start(self.env, start, None)[0]),)]
            for action in actions:
                obs, reward, terminated, truncated, _ = self.env.step(copy.deepcopy(action))
                moments.append((_bits(obs), repr(float(reward)), bool(terminated), bool(truncated)))
                if terminated or truncated:
                    break
        finally:
            for monitor, before in monitors:
                vars(monitor).update(before)
        return moments


def _bits(obs: Any) -> Any:
    """An observation (array, or dictionary of them) in a form in which NaN equals NaN."""
    if isinstance(obs, dict):
        return {key: _bits(value) for key, value in obs.items()}
    array = np.asarray(obs)
    return array.dtype.str, array.shape, array.tobytes()


def _start(env: gymnasium.Env, start: Start, options: dict[str, Any] | None) -> tuple[Any, dict[str, Any]]:
    _seed_spaces(env.unwrapped, start.start_seed)
    first = env.reset(seed=start.start_seed, options=options)
    _seed_spaces(env.unwrapped, start.noise_seed)
    reseed_noise(env, start.noise_seed)
    return first


def _seed_spaces(env: gymnasium.Env, seed: int) -> None:
    env.observation_space.seed(seed)
    env.action_space.seed(seed)


def insert_shared_start(env: VecEnv) -> None:
    """Make every sub-environment a ``SharedStart``, however it is wrapped; an ``EnvError`` where that is too late."""
    wrapped = env.env_is_wrapped(SharedStart)
    if all(wrapped):
        return
    inner = env.unwrapped
    if not isinstance(inner, DummyVecEnv):
        raise EnvError(
            f"{wrapped.count(False)} of the {env.num_envs} environments of this {type(inner).__name__} have no "
            "SharedStart; fix: make_vec_env(..., wrapper_class=SharedStart), with "
            "`from groupwise.contrib.sb3 import SharedStart`, or wrap each environment in SharedStart yourself"
        )
    inner.envs = [sub if known else SharedStart(sub) for sub, known in zip(inner.envs, wrapped, strict=True)]


def verify_shared_start(env: VecEnv, seed: int) -> None:
    """Find out by trying that members share their start bit for bit; resets the sub-environments.

    With equal start and equal noise, all of them and a second try must agree for some steps of equal actions; with
    noise of their own, at the start. The ``GroupStartError`` names the sub-environment and the step where they differ.
    """
    space = copy.deepcopy(env.action_space)
    space.seed(seed)
    actions = [space.sample() for _ in range(_TRIAL_STEPS)]
    start = Start(-1, derive_seed(seed, "start"), derive_seed(seed, "noise"))
    other = start._replace(noise_seed=derive_seed(seed, "other"))
    tries = [(start, actions), (start, actions), (other, [])]
    traces = [env.env_method("try_start", *arguments) for arguments in tries]
    expected = traces[0][0]
    for index, trace in ((index, trace[index]) for index in range(env.num_envs) for trace in traces):
        for step, (right, left) in enumerate(zip(expected, trace, strict=False)):
            if right != left:
                when = "at the start" if step == 0 else f"at step {step} of equal actions with equal noise"
                raise GroupStartError(
                    f"members cannot share a start: what was started with the same seed differs {when}, in environment "
                    f"{index}; fix: let the environment draw all its randomness from self.np_random, after "
                    "super().reset(seed=seed), and keep nothing from one episode to the next; or compare episodes from "
                    "different starts, with shared_starts='off'"
                )


# The episode that each environment works on, and the steps that are not trained on yet


class Tick(NamedTuple):
    """One step of all E environments; every array is [E, ...]."""

    obs: Array | dict[str, Array]
    """Observation that the policy saw, normalised with the statistics of that time."""
    action: Array
    """The policy's own action, before it was clipped."""
    log_prob: Array
    """Log-probability under the policy that drew the action."""
    reward: Array
    terminated: Array
    truncated: Array


class GroupBuffer:
    """Hands out episodes in order, records their steps, and gives out whole groups.

    Episode ``a`` is member ``a % group_size`` of group ``a // group_size``; members may run one after another or side by
    side. Each environment holds one episode and knows the next one, for it resets itself.

    Args:
        seed: seeds all starts and all noise.
        first_group: number of the first group.
        starts: whether members share theirs.
    """

    def __init__(
        self, num_envs: int, group_size: int, *, seed: int, first_group: int, starts: Literal["shared", "own"]
    ) -> None:
        self.group_size = group_size
        self.seed = seed
        self.starts = starts
        first = first_group * group_size
        self._queued = list(range(first, first + num_envs))
        self._next = first + num_envs
        self._current: list[int] = []
        """Number of the episode of each environment."""
        self._episodes: dict[int, list[Tick]] = {}
        """Steps, which have no leading dimension, of the episodes that were not given out, in the order of their begins."""

    @property
    def num_opened(self) -> int:
        """Every group below this number was begun."""
        return max(self._episodes, default=-1) // self.group_size + 1

    @property
    def next_group(self) -> int:
        """Number of the first group that has not begun."""
        return -(-self._next // self.group_size)

    def begin(self) -> None:
        """Note that all environments have just been reset to their queued starts."""
        self._current = [self._begin(env) for env in range(len(self._queued))]

    def queued(self, env: int) -> Start:
        """The next start of an environment."""
        number = self._queued[env]
        group, member = divmod(number, self.group_size)
        path = (group,) if self.starts == "shared" else (group, member)
        return Start(number, derive_seed(self.seed, "start", *path), derive_seed(self.seed, "noise", group, member))

    def running(self, env: int) -> Running:
        """The state in which an environment should be."""
        return self._current[env], len(self._episodes[self._current[env]])

    def record(self, tick: Tick) -> list[int]:
        """Take one step of all; returns environments that began an episode. A ``DataError`` if a number is not finite."""
        for name, values in (("reward", tick.reward), ("log-probability", tick.log_prob)):
            if not np.isfinite(values).all():
                env = int(np.flatnonzero(~np.isfinite(values))[0])
                raise DataError(
                    f"the {name} of environment {env} is {values[env]}, expected a finite number; fix the environment "
                    "or the policy that produced it (stable_baselines3's VecCheckNan finds which)"
                )
        for env, number in enumerate(self._current):
            obs = {key: x[env] for key, x in tick.obs.items()} if isinstance(tick.obs, dict) else tick.obs[env]
            self._episodes[number].append(Tick(obs, *(values[env] for values in tick[1:])))
        ended: list[int] = np.flatnonzero(tick.terminated | tick.truncated).tolist()
        for env in ended:
            self._current[env] = self._begin(env)
        return ended

    def all_finished(self, below: int) -> bool:
        """Whether no group with a number under ``below`` is waited for."""
        return all(self._is_whole(group) for number in self._episodes if (group := number // self.group_size) < below)

    def take_whole_groups(self, device: torch.device) -> TensorDict | None:
        """The steps of all whole groups as a rollout of one row ``[1, T+1]``; they are then forgotten. None without any."""
        chosen = [number for number in self._episodes if self._is_whole(number // self.group_size)]
        if not chosen:
            return None
        chosen.sort(key=lambda number: number // self.group_size)
        group = np.unique([number // self.group_size for number in chosen], return_inverse=True)[1]
        episodes = [self._episodes.pop(number) for number in chosen]
        lengths = [len(episode) for episode in episodes]
        steps = [step for episode in episodes for step in episode]
        obs, *columns = zip(*steps, steps[-1], strict=True)  # the last slot is padding

        def stacked(values: Sequence[Any]) -> Tensor:
            return torch.as_tensor(np.stack(values)[None], device=device)

        def label(values: Array, padding: int) -> Tensor:
            return torch.as_tensor(np.append(values, padding)[None], device=device)

        shape, is_dict = [1, len(obs)], isinstance(obs[0], dict)
        counts = label(np.ones(len(steps)), 0).bool()
        names = ("action", "sample_log_prob", "reward", "terminated", "truncated")
        data = {
            "obs": TensorDict({k: stacked([o[k] for o in obs]) for k in obs[0]}, shape) if is_dict else stacked(obs),
            **{name: stacked(values) for name, values in zip(names, columns, strict=True)},
            "valid": counts,
            "loss_mask": counts.clone(),
            "group_id": label(np.repeat(group, lengths), -1),
            "episode_id": label(np.repeat(np.arange(len(episodes)), lengths), -1),
            "step": label(np.concatenate([np.arange(length) for length in lengths]), 0),
        }
        return TensorDict(data, batch_size=shape, device=device)

    def _begin(self, env: int) -> int:
        number = self._queued[env]
        self._episodes[number] = []
        self._queued[env], self._next = self._next, self._next + 1
        return number

    def _is_whole(self, group: int) -> bool:
        members = range(group * self.group_size, (group + 1) * self.group_size)
        return all(number in self._episodes and number not in self._current for number in members)


# Policies without a critic


class ActorPolicy(BasePolicy):
    """``MlpPolicy``: features, hidden layers, parameters of the action distribution. No value network anywhere.

    Box actions are Gaussian and clipped on their way to the environment, as in Stable-Baselines3; their density is
    that of the unclipped sample. Discrete actions are numbered from the space's ``start``.

    Args:
        net_arch: width of each hidden layer, or ``dict(pi=...)`` with it. Default: 64, 64; none behind a ``NatureCNN``.
        optimizer_kwargs: default for Adam: ``eps=1e-5, fused=True``.
        others: ``features_extractor_kwargs`` and ``normalize_images``.

    Raises:
        ConfigError: ``net_arch`` describes more than the policy network, or ``squash_output`` is set.
        UnsupportedSpaceError: actions are neither Discrete, MultiDiscrete, MultiBinary nor a Box of floats.
    """

    default_extractor: ClassVar[type[BaseFeaturesExtractor]] = FlattenExtractor

    def __init__(
        self,
        observation_space: spaces.Space,
        action_space: spaces.Space,
        lr_schedule: Schedule,
        net_arch: list[int] | dict[str, list[int]] | None = None,
        activation_fn: type[nn.Module] = nn.Tanh,
        ortho_init: bool = True,
        log_std_init: float = 0.0,
        features_extractor_class: type[BaseFeaturesExtractor] | None = None,
        optimizer_class: type[torch.optim.Optimizer] = torch.optim.Adam,
        optimizer_kwargs: dict[str, Any] | None = None,
        **others: Any,
    ) -> None:
        if others.pop("squash_output", False):
            raise ConfigError("squash_output=True: actions are clipped here, not squashed; fix: leave it out")
        features_extractor_class = features_extractor_class or self.default_extractor
        if optimizer_kwargs is None:
            optimizer_kwargs = {"eps": 1e-5, "fused": True} if optimizer_class is torch.optim.Adam else {}
        super().__init__(
            observation_space,
            action_space,
            features_extractor_class,
            optimizer_class=optimizer_class,
            optimizer_kwargs=optimizer_kwargs,
            **others,
        )
        if net_arch is None:
            net_arch = [] if features_extractor_class is NatureCNN else [64, 64]
        elif isinstance(net_arch, dict):
            if net_arch.keys() != {"pi"}:
                raise ConfigError(
                    f"net_arch={net_arch!r} describes {sorted(net_arch)}, but without a critic there is a policy network "
                    "only; fix: net_arch=[64, 64] or net_arch=dict(pi=[64, 64])"
                )
            net_arch = net_arch["pi"]
        self.net_arch = net_arch
        self.activation_fn = activation_fn
        self.ortho_init = ortho_init
        self.log_std_init = log_std_init
        self.features_extractor = self.make_features_extractor()
        self.features_dim = self.features_extractor.features_dim
        self.head = make_head(action_space, PolicyCfg())
        self.policy_net = nn.Sequential(*create_mlp(self.features_dim, -1, net_arch, activation_fn))
        self.action_net = nn.Linear(net_arch[-1] if net_arch else self.features_dim, self.head.num_outputs)
        free = self.head.num_params - self.head.num_outputs
        self.log_std = nn.Parameter(torch.full((free,), log_std_init)) if free else None
        if ortho_init:
            self.features_extractor.apply(partial(self.init_weights, gain=float(np.sqrt(2))))
            self.policy_net.apply(partial(self.init_weights, gain=float(np.sqrt(2))))
            self.action_net.apply(partial(self.init_weights, gain=0.01))
        self.optimizer = optimizer_class(self.parameters(), lr=lr_schedule(1), **self.optimizer_kwargs)  # type: ignore[call-arg]

    def forward(
        self, obs: PyTorchObs, deterministic: bool = False, generator: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor]:
        """Actions [B, ...] before they are clipped, and their log-probabilities."""
        params = self.action_params(obs)
        action = self.head.mode(params) if deterministic else self.head.sample(params, generator)
        return action, self.head.log_prob(params, action)

    def action_params(self, obs: PyTorchObs) -> Tensor:
        """Flat parameters of the action distribution: logits, or means and log standard deviations."""
        outputs: Tensor = self.action_net(self.policy_net(self.extract_features(obs, self.features_extractor)))
        if self.log_std is None:
            return outputs
        return torch.cat([outputs, self.log_std.expand_as(outputs)], dim=-1)

    def _predict(self, observation: PyTorchObs, deterministic: bool = False) -> Tensor:
        return self.head.env_action(self(observation, deterministic)[0])

    def _get_constructor_parameters(self) -> dict[str, Any]:
        """Arguments with which ``load`` calls the constructor."""
        names = "net_arch activation_fn ortho_init log_std_init features_extractor_class features_extractor_kwargs"
        own = {name: getattr(self, name) for name in (*names.split(), "optimizer_class", "optimizer_kwargs")}
        return super()._get_constructor_parameters() | {"lr_schedule": self._dummy_schedule} | own


class CnnActorPolicy(ActorPolicy):
    """``CnnPolicy``: an ``ActorPolicy`` for images."""

    default_extractor = NatureCNN


class MultiInputActorPolicy(ActorPolicy):
    """``MultiInputPolicy``: an ``ActorPolicy`` for dictionaries of observations."""

    default_extractor = CombinedExtractor


class ScoredActor(Policy):
    """An ``ActorPolicy`` as the algorithms of this library see it: it acts and scores, and has no critic."""

    actor_only = True

    def __init__(self, actor: ActorPolicy) -> None:
        super().__init__()
        self.actor = actor
        self.action_spec = actor.head.action_spec
        encoder = make_state_encoder(actor.observation_space)
        self.state_encoder = encoder and encoder.to(actor.device)

    @torch.no_grad()
    def act(self, obs: Nested, deterministic: bool = False, generator: torch.Generator | None = None) -> Action:
        """Actions for B observations, without gradient."""
        return Action(*self.actor(_plain(obs), deterministic, generator))

    def evaluate(self, batch: Batch) -> Evaluation:
        """Scores of ``batch["action"]`` given ``batch["obs"]``, with gradient."""
        params = self.actor.action_params(_plain(batch["obs"]))
        log_prob, entropy = self.actor.head.score(params, batch["action"])
        return Evaluation(log_prob, entropy, None, params)

    def kl(self, dist: Tensor, other: Tensor) -> Tensor:
        """Exact KL(dist || other) per element."""
        return self.actor.head.kl(dist, other)


def _plain(obs: Nested) -> PyTorchObs:
    return obs if isinstance(obs, Tensor) else {key: obs[key] for key in obs.keys()}  # noqa: SIM118


# The algorithm


class GRPO(OnPolicyAlgorithm):
    """Group relative policy optimisation, for every place where a Stable-Baselines3 algorithm fits.

    Arguments of SB3's PPO mean the same here.

    Args:
        n_steps: steps of each environment after which a rollout waits for the groups under way, and ends.
        batch_size: steps in one minibatch; a rollout is split evenly into the nearest whole number of them.
        group_size: episodes at the same start.
        credit: from rewards to advantages, or the name of a preset.
        objective: ratio, trust region and aggregation, or the name of a preset, whose estimator of the KL counts, too.
        clip_range: replaces both clip ranges of the objective; a number, or a function of the progress that remains.
        kl_coef: weight of the KL to a reference policy; 0 makes no reference.
        kl_ref_iterations: rollouts between two renewals of the reference; None keeps the first policy.
        shared_starts: ``verify``: members share their start, which is tried out before training; ``trust``: without
            the trial; ``off``: every episode has a start of its own.

    Raises:
        ConfigError: a setting that is unknown, mistyped or impossible.
    """

    policy_aliases: ClassVar[dict[str, type[BasePolicy]]] = {
        "MlpPolicy": ActorPolicy,
        "CnnPolicy": CnnActorPolicy,
        "MultiInputPolicy": MultiInputActorPolicy,
    }
    policy: ActorPolicy  # type: ignore[assignment]
    rollout_buffer: GroupBuffer | None  # type: ignore[assignment]
    core: grpo.GRPO
    """Groupwise's own algorithm, which makes the updates."""
    _start_seed: int | None = None
    _next_group = 0
    _rollout_began_at = 0
    _verified: VecEnv | None = None

    def __init__(
        self,
        policy: str | type[BasePolicy],
        env: GymEnv | str | None,
        learning_rate: float | Schedule = LEARNING_RATE,
        n_steps: int = 1024,
        batch_size: int = 128,
        n_epochs: int = 10,
        gamma: float = 0.99,
        group_size: int = 4,
        credit: CreditCfg | dict[str, Any] | str = CREDIT,
        objective: ObjectiveCfg | dict[str, Any] | str = OBJECTIVE,
        clip_range: float | Schedule | None = None,
        kl_coef: float = 0.0,
        kl_ref_iterations: int | None = None,
        shared_starts: Literal["verify", "trust", "off"] = "verify",
        ent_coef: float = 0.0,
        max_grad_norm: float = 0.5,
        target_kl: float | None = None,
        stats_window_size: int = 100,
        tensorboard_log: str | None = None,
        policy_kwargs: dict[str, Any] | None = None,
        verbose: int = 0,
        seed: int | None = None,
        device: torch.device | str = "auto",
        _init_setup_model: bool = True,
        **others: Any,
    ) -> None:
        refuse(others, GRPO)
        super().__init__(
            policy,  # type: ignore[arg-type]
            env,  # type: ignore[arg-type]
            learning_rate=learning_rate,
            n_steps=n_steps,
            gamma=gamma,
            ent_coef=ent_coef,
            max_grad_norm=max_grad_norm,
            stats_window_size=stats_window_size,
            tensorboard_log=tensorboard_log,
            policy_kwargs=policy_kwargs,
            verbose=verbose,
            seed=seed,
            device=device,
            _init_setup_model=False,
            supported_action_spaces=(spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary),
            gae_lambda=1.0,  # nothing here reads this and the next three
            vf_coef=0.0,
            use_sde=False,
            sde_sample_freq=-1,
        )
        if self.env is not None and isinstance(self.env.observation_space, spaces.Tuple):
            raise UnsupportedSpaceError("SB3 has no Tuple observations; fix: gymnasium's FlattenObservation(env)")
        self.batch_size = batch_size
        self.n_epochs = n_epochs
        self.group_size = group_size
        self.credit = credit
        self.objective = objective
        self.clip_range = clip_range
        self.kl_coef = kl_coef
        self.kl_ref_iterations = kl_ref_iterations
        self.shared_starts = shared_starts
        self.target_kl = target_kl
        self.rollout_buffer = None
        self._core_state: dict[str, Any] = {}
        self._core_settings: tuple[GRPOCfg, float | Schedule | None] | None = None
        """Settings that ``core`` was made with; None before it is made for the policy."""
        if _init_setup_model:
            self._setup_model()

    def _setup_model(self) -> None:
        """Create policy and optimiser, and the update that trains them."""
        if not issubclass(self.policy_class, ActorPolicy):
            raise ConfigError(
                f"{self.policy_class.__name__} is not a policy without a critic; fix: 'MlpPolicy', 'CnnPolicy', "
                "'MultiInputPolicy' or a subclass of groupwise.contrib.sb3.ActorPolicy; load a file with the class that saved it"
            )
        self._setup_lr_schedule()
        self.set_random_seed(self.seed)
        if self.seed is not None:
            self._start_seed = self.seed
        elif self._start_seed is None:
            self._start_seed = int(np.random.randint(2**31))
        policy = self.policy_class(self.observation_space, self.action_space, self.lr_schedule, **self.policy_kwargs)
        self.policy = policy.to(self.device)
        self._maybe_recommend_cpu(ActorPolicy.__name__)
        self._core_settings = None
        self._update_core()

    def _update_core(self) -> None:
        """Make the update that trains the policy, again if attributes were set since: SB3's algorithms read theirs when they train.

        A reference that was not there before begins as the policy is now.
        """
        settings = update_cfg(self), self.clip_range
        if settings == self._core_settings:
            return
        state = self._core_state if self._core_settings is None else self.core.state_dict()
        # trains the policy in evaluation mode, so that acting and scoring use the same function
        self.core = grpo.GRPO(settings[0], ScoredActor(self.policy), seed=self._start_seed or 0)
        self.core.optimizer = self.policy.optimizer
        self.core.load_state_dict(self.core.state_dict() | state)
        self._core_settings = settings

    @property
    def reference_policy(self) -> ActorPolicy:
        """The frozen policy that ``kl_coef`` draws towards."""
        self._update_core()
        reference = self.core.reference
        if not isinstance(reference, ScoredActor):
            raise ConfigError("kl_coef is 0, so there is no reference policy; fix: GRPO(..., kl_coef=0.02)")
        return reference.actor

    def learn(
        self: SelfGRPO,
        total_timesteps: int,
        callback: MaybeCallback = None,
        log_interval: int = 1,
        tb_log_name: str = "GRPO",
        reset_num_timesteps: bool = True,
        progress_bar: bool = False,
    ) -> SelfGRPO:
        """The model itself, trained for at least ``total_timesteps`` environment steps.

        Raises:
            EnvError: the starts of the environments cannot be set.
            GroupStartError: members do not share their start.
        """
        before = self._core_state
        super().learn(total_timesteps, callback, log_interval, tb_log_name, reset_num_timesteps, progress_bar)
        assert self.env is not None
        self.env.env_method("queue_start", None)  # the next user of the environments resets them normally
        if self._core_state is before and self.num_timesteps >= self._total_timesteps:
            warnings.warn(
                f"nothing was learned: no group of {self.group_size} episodes was finished in "
                f"{self.num_timesteps - self._num_timesteps_at_start} steps; fix: more total_timesteps, a smaller "
                "group_size, or an environment with a step limit",
                stacklevel=2,
            )
        return self

    def _setup_learn(
        self, total_timesteps: int, callback: MaybeCallback = None, reset_num_timesteps: bool = True, *log: Any
    ) -> tuple[int, BaseCallback]:
        """Continue the running episodes, or start the first ones by the reset that SB3 does here."""
        env, groups = self.env, self.rollout_buffer
        if env is None:
            raise EnvError("there is no environment to learn from; fix: model.set_env(env), or load(path, env=env)")
        normalizer = self.get_vec_normalize_env()
        if normalizer is not None and normalizer.norm_reward and update_cfg(self).credit.remembers:
            raise ConfigError(
                "VecNormalize(norm_reward=True) changes the unit of rewards all the time, and the baseline 'lstd' keeps sums of "
                "earlier ones; fix: VecNormalize(..., norm_reward=False), as these advantages do not need it"
            )
        insert_shared_start(env)
        # episodes continue if every environment is where training left it
        goes_on = not reset_num_timesteps and groups is not None and self._last_obs is not None
        if goes_on and groups is not None:
            goes_on = groups.group_size == self.group_size and (groups.starts == "own") == (self.shared_starts == "off")
            goes_on &= all(running == groups.running(i) for i, running in enumerate(self._queue(env, groups)))
        if not goes_on:
            assert self._start_seed is not None
            if self.shared_starts == "verify" and self._verified is not env:
                verify_shared_start(env, derive_seed(self._start_seed, "verify"))
                self._verified = env
            if groups is not None:
                self._next_group = groups.next_group
            groups = self.rollout_buffer = GroupBuffer(
                env.num_envs,
                self.group_size,
                seed=self._start_seed,
                first_group=self._next_group,
                starts="own" if self.shared_starts == "off" else "shared",
            )
            self._queue(env, groups)
            self._last_obs = None
        total_timesteps, callback = super()._setup_learn(total_timesteps, callback, reset_num_timesteps, *log)
        if not goes_on and groups is not None:
            groups.begin()
            self._queue(env, groups)
        return total_timesteps, callback

    def _queue(self, env: VecEnv, groups: GroupBuffer) -> list[Running]:
        """Queue the next start of each environment; returns the episode that each is running now."""
        return [env.env_method("queue_start", groups.queued(i), indices=i)[0] for i in range(env.num_envs)]

    def collect_rollouts(
        self,
        env: VecEnv,
        callback: BaseCallback,
        rollout_buffer: GroupBuffer,  # type: ignore[override]
        n_rollout_steps: int,
    ) -> bool:
        """Step until the groups that were begun within ``n_rollout_steps`` are whole; False if a callback stopped it.

        The training's last rollout waits for nothing once all its steps are taken. An ``EnvError`` if others reset an environment.
        """
        self.policy.set_training_mode(False)
        self._rollout_began_at = self.num_timesteps
        callback.on_rollout_start()
        n_steps, begun = 0, 0
        while n_steps < n_rollout_steps or (
            self.num_timesteps < self._total_timesteps and not rollout_buffer.all_finished(begun)
        ):
            assert self._last_obs is not None
            seen = copy.deepcopy(self._last_obs)  # environments may reuse their arrays
            with torch.no_grad():
                obs_tensor = obs_as_tensor(seen, self.device)
                actions, log_probs = self.policy(obs_tensor)
                clipped_actions = self.policy.head.env_action(actions).cpu().numpy()
            actions = actions.cpu().numpy()
            new_obs, rewards, dones, infos = env.step(clipped_actions)
            n_steps += 1
            self.num_timesteps += env.num_envs
            # all of it is recorded before a callback may stop the training, so that it can continue later
            cut = [info.get("TimeLimit.truncated", False) for info in infos]
            truncated = np.array(cut, dtype=np.bool_) & dones
            self._last_obs = new_obs  # type: ignore[assignment]
            reward = np.array(rewards, dtype=np.float32)
            tick = Tick(seen, actions, log_probs.cpu().numpy(), reward, dones & ~truncated, truncated)
            for index in rollout_buffer.record(tick):
                found = env.env_method("queue_start", rollout_buffer.queued(index), indices=index)[0]
                if found != (expected := rollout_buffer.running(index)):
                    raise EnvError(
                        f"environment {index} should be at {expected} and is at {found}: something else reset or "
                        "stepped it during learn(); fix: evaluate on an environment of its own"
                    )
            if n_steps == n_rollout_steps:
                begun = rollout_buffer.num_opened
            self._update_info_buffer(infos, dones)
            callback.update_locals(locals())
            if not callback.on_step():
                return False
        callback.update_locals(locals())
        callback.on_rollout_end()
        return True

    def _update_current_progress_remaining(self, num_timesteps: int, total_timesteps: int) -> None:
        """Take the progress at the rollout's start. SB3 asks at its end, where the last update of a ``learn`` would get a rate of 0.

        A training of one rollout would then learn nothing; and as a rollout may go beyond the end, the rate could be negative.
        """
        super()._update_current_progress_remaining(self._rollout_began_at, total_timesteps)

    def train(self) -> None:
        """Improve the policy by the whole groups at hand; without any, leave it as it is."""
        assert self.rollout_buffer is not None
        self._next_group = self.rollout_buffer.next_group
        rollout = self.rollout_buffer.take_whole_groups(self.device)
        if rollout is None:
            return
        self._update_core()
        schedule = self.clip_range
        if callable(schedule):
            width = float(schedule(self._current_progress_remaining))
            objective = self.core.cfg.objective
            region = objective.trust_region.model_copy(update={"clip_low": width, "clip_high": width})
            objective = objective.model_copy(update={"trust_region": region})
            self.core.cfg = self.core.cfg.model_copy(update={"objective": objective})
        else:
            self.core.set_progress(1 - self._current_progress_remaining)  # SB3 sets the learning rate
        self._update_learning_rate(self.policy.optimizer)
        metrics = self.core.update(rollout)
        self._core_state = {
            key: value.cpu() if isinstance(value, Tensor) else value
            for key, value in self.core.state_dict().items()
            if key not in ("optimizer", "reference")  # SB3 saves them, as state dicts
        }
        self._n_updates += int(metrics["train/optimizer_steps"])
        # logged under SB3's names where it has one
        record = self.logger.record
        record("train/policy_gradient_loss", metrics["train/policy_loss"])
        record("train/entropy_loss", -metrics["train/entropy"])
        for name in ("loss", "approx_kl", "clip_fraction", "grad_norm", *(["kl"] if self.kl_coef > 0 else [])):
            record(f"train/{name}", metrics[f"train/{name}"])
        if self.policy.log_std is not None:
            record("train/std", self.policy.log_std.exp().mean().item())
        record("train/n_updates", self._n_updates, exclude="tensorboard")
        record("train/clip_range", self.core.cfg.objective.trust_region.parameters().get("clip_high", CLIP))
        record("rollout/groups", int(rollout["group_id"].max()) + 1)
        if (alike := metrics.get("rollout/zero_variance_groups")) is not None:
            record("rollout/zero_variance_groups", alike)

    @classmethod
    def load(cls: type[SelfGRPO], path: str | Path | io.BufferedIOBase, *args: Any, **kwargs: Any) -> SelfGRPO:
        """The model that was saved there: SB3's arguments, and settings that replace the saved ones.

        Raises:
            ConfigError: another algorithm saved it, or ``kwargs`` names no argument.
        """
        refuse(kwargs.keys() - inspect.signature(super().load).parameters.keys(), cls)
        # set when all is loaded: a file has a reference or not as its own kl_coef says
        later = {name: kwargs.pop(name) for name in [*update_names(), "kl_ref_iterations"] if name in kwargs}
        model = super().load(path, *args, **kwargs)
        vars(model).update(later)
        model._update_core()
        return model

    def _excluded_save_params(self) -> list[str]:
        """Names that are not saved: SB3's, attributes that follow from others, and the environments."""
        return [*super()._excluded_save_params(), "core", "_core_settings", "_verified"]

    def _get_torch_save_params(self) -> tuple[list[str], list[str]]:
        """Names that are saved as state dicts: policy, optimiser, and the reference if there is one."""
        self._update_core()  # kl_coef may have been set since the last update
        names, tensors = super()._get_torch_save_params()
        return names + ["reference_policy"] * (self.kl_coef > 0), tensors
