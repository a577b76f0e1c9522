"""GRPO as a Stable-Baselines3 algorithm: its interface outside, this library's ``GRPO.update`` inside.

    model = GRPO("MlpPolicy", "CartPole-v1").learn(100_000)

It differs from SB3's PPO in three ways. Episodes come in groups that share a start, and only whole groups are trained
on. There is no critic: the policies hold no value network. A rollout ends when the groups that were begun within
``n_steps`` are whole; episodes begun meanwhile continue in the next rollout, under the new policy, and its ratio is
against the probability under which each action was really drawn. So nothing is wasted, and nothing is older than one
update.
"""

import io
import warnings
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from stable_baselines3.common.policies import BasePolicy
from stable_baselines3.common.type_aliases import GymEnv, MaybeCallback, Schedule
from stable_baselines3.common.utils import obs_as_tensor
from stable_baselines3.common.vec_env import VecEnv

from groupwise.algorithms import grpo
from groupwise.algorithms.losses import clip_range
from groupwise.config.algorithm import AdaptiveEntropyCfg, CreditCfg, GRPOCfg, ObjectiveCfg
from groupwise.contrib.sb3.group_buffer import GroupBuffer, Tick, copy_obs, on_cpu
from groupwise.contrib.sb3.policy import (
    ActorPolicy,
    CnnActorPolicy,
    MultiInputActorPolicy,
    NormalizedExtractor,
    ScoredActor,
)
from groupwise.contrib.sb3.presets import DEFAULTS, preset_arguments
from groupwise.contrib.sb3.settings import ARGUMENTS, refuse, update_cfg, with_clip_range
from groupwise.contrib.sb3.start import insert_shared_start, verify_shared_start
from groupwise.errors import ConfigError, EnvError, UnsupportedSpaceError
from groupwise.seeding import derive_seed

SelfGRPO = TypeVar("SelfGRPO", bound="GRPO")

_WITHOUT_CRITIC: dict[str, Any] = {"gae_lambda": 1.0, "vf_coef": 0.0, "use_sde": False, "sde_sample_freq": -1}
"""What SB3 asks of every on-policy algorithm, and nothing here reads."""
_SAVED_BY_SB3 = ("optimizer", "reference")
"""Parts of the update's state that SB3 saves as state dicts; the rest goes with the settings."""


class GRPO(OnPolicyAlgorithm):
    """Group relative policy optimisation, for every place where a Stable-Baselines3 algorithm fits.

    Arguments of SB3's PPO mean the same here. None stands for the preset's value, or for that in ``presets.DEFAULTS``.

    Args:
        n_steps: steps of each environment after which a rollout waits for the groups under way, and ends.
        batch_size: steps in one minibatch; a rollout is split evenly into the nearest whole number of them.
        group_size: episodes at the same start.
        credit: from rewards to advantages, or the name of a preset.
        objective: ratio, trust region and aggregation, or the name of a preset.
        clip_range: replaces both clip ranges of the objective; a number, or a function of the progress that remains.
        preset: ``auto``, the tuned settings of the environment, or the name of a preset for credit and objective.
        kl_coef: weight of the KL to a reference policy; 0 makes no reference.
        kl_estimator: of that KL; this and the next two are also set by a preset that is named as ``objective``.
        top_entropy_quantile: share of the steps, those with the highest entropy, that have a policy loss.
        adaptive_entropy: adapts ``ent_coef`` to the entropy.
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
    group_size: int
    kl_coef: float
    shared_starts: Literal["verify", "trust", "off"]
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
        learning_rate: float | Schedule | None = None,
        n_steps: int | None = None,
        batch_size: int | None = None,
        n_epochs: int | None = None,
        gamma: float | None = None,
        group_size: int | None = None,
        credit: CreditCfg | dict[str, Any] | str | None = None,
        objective: ObjectiveCfg | dict[str, Any] | str | None = None,
        clip_range: float | Schedule | None = None,
        preset: str | None = None,
        kl_coef: float | None = None,
        kl_estimator: str | None = None,
        top_entropy_quantile: float | None = None,
        adaptive_entropy: AdaptiveEntropyCfg | dict[str, Any] | None = None,
        kl_ref_iterations: int | None = None,
        shared_starts: Literal["verify", "trust", "off"] = "verify",
        ent_coef: float | None = None,
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
            learning_rate=0.0,  # this and the next three: below, once the environment is known
            n_steps=0,
            gamma=0.0,
            ent_coef=0.0,
            max_grad_norm=max_grad_norm,
            stats_window_size=stats_window_size,
            tensorboard_log=tensorboard_log,
            policy_kwargs=policy_kwargs,
            verbose=verbose,
            seed=seed,
            device=device,
            _init_setup_model=False,
            supported_action_spaces=(spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary),
            **_WITHOUT_CRITIC,
        )
        observations = None if self.env is None else self.env.observation_space
        if isinstance(observations, spaces.Tuple):
            raise UnsupportedSpaceError(
                "Stable-Baselines3 has no Tuple observations; fix: gymnasium.wrappers.FlattenObservation(env)"
            )
        given = {name: value for name, value in locals().items() if name in {"learning_rate", *ARGUMENTS}}
        tuned = DEFAULTS if preset is None else DEFAULTS | preset_arguments(preset, self.env)
        for name, value in given.items():
            setattr(self, name, tuned.get(name) if value is None else value)
        if tuned.get("normalize_obs") and isinstance(observations, spaces.Box):
            self.policy_kwargs = {"features_extractor_class": NormalizedExtractor, **self.policy_kwargs}
        self.rollout_buffer = None
        self._core_state: dict[str, Any] = {}
        if _init_setup_model:
            self._setup_model()

    @classmethod
    def load(
        cls: type[SelfGRPO],
        path: str | Path | io.BufferedIOBase,
        env: GymEnv | None = None,
        device: torch.device | str = "auto",
        custom_objects: dict[str, Any] | None = None,
        print_system_info: bool = False,
        force_reset: bool = True,
        **kwargs: Any,
    ) -> SelfGRPO:
        """The model that was saved there, with other settings where ``kwargs`` has some.

        Raises:
            ConfigError: another algorithm saved it, or ``kwargs`` names no argument.
        """
        if "preset" in kwargs:
            raise ConfigError("a preset is chosen when the model is made; fix: leave it out of load()")
        refuse(kwargs, cls)
        return super().load(path, env, device, custom_objects, print_system_info, force_reset, **kwargs)

    @property
    def reference_policy(self) -> ActorPolicy:
        """The frozen policy that ``kl_coef`` draws towards."""
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
        stopped = self.num_timesteps < self._total_timesteps
        if self._core_state is before and not stopped:
            warnings.warn(
                f"nothing was learned: no group of {self.group_size} episodes was finished in "
                f"{self.num_timesteps - self._num_timesteps_at_start} steps; fix: more total_timesteps, a smaller "
                "group_size, or an environment with a step limit",
                stacklevel=2,
            )
        return self

    def collect_rollouts(
        self,
        env: VecEnv,
        callback: BaseCallback,
        rollout_buffer: GroupBuffer,  # type: ignore[override]
        n_rollout_steps: int,
    ) -> bool:
        """Step until the groups that were begun within ``n_rollout_steps`` are whole; False if a callback stopped it.

        The training's last rollout waits for nothing once all its steps are taken.
        """
        self.policy.set_training_mode(False)
        self._rollout_began_at = self.num_timesteps
        callback.on_rollout_start()
        n_steps, begun = 0, 0
        while n_steps < n_rollout_steps or (
            self.num_timesteps < self._total_timesteps and not rollout_buffer.all_finished(begun)
        ):
            assert self._last_obs is not None
            seen = copy_obs(self._last_obs)
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
                running = env.env_method("queue_start", rollout_buffer.queued(index), indices=index)[0]
                rollout_buffer.check(index, running)
            if n_steps == n_rollout_steps:
                begun = rollout_buffer.num_opened
            self._update_info_buffer(infos, dones)
            callback.update_locals(locals())
            if not callback.on_step():
                return False
        callback.update_locals(locals())
        callback.on_rollout_end()
        return True

    def train(self) -> None:
        """Improve the policy by the whole groups at hand; without any, leave it as it is."""
        assert self.rollout_buffer is not None
        self._next_group = self.rollout_buffer.next_group
        rollout = self.rollout_buffer.take_whole_groups(self.device)
        if rollout is None:
            return
        schedule = vars(self)["clip_range"]
        if callable(schedule):
            self.core.cfg = with_clip_range(self.core.cfg, float(schedule(self._current_progress_remaining)))
        else:
            self.core.set_progress(1 - self._current_progress_remaining)  # SB3 sets the learning rate
        self._update_learning_rate(self.policy.optimizer)
        metrics = {name: value.item() for name, value in self.core.update(rollout).items()}
        state = self.core.state_dict()
        self._core_state = {key: on_cpu(value) for key, value in state.items() if key not in _SAVED_BY_SB3}
        self._n_updates += int(metrics["train/optimizer_steps"])
        self._record(metrics, num_groups=int(rollout["group_id"].max()) + 1)

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
        # trains the policy in evaluation mode: what acted and what is scored are the same function
        self.core = grpo.GRPO(self._cfg(), ScoredActor(self.policy), seed=self._start_seed)
        self.core.optimizer = self.policy.optimizer
        self.core.load_state_dict(self.core.state_dict() | self._core_state)

    def _update_current_progress_remaining(self, num_timesteps: int, total_timesteps: int) -> None:
        """That of the rollout's start. SB3 asks at its end, where the last update of a ``learn`` would get a rate of 0.

        A training of one rollout would then learn nothing; and as a rollout may go beyond the end, the rate could be negative.
        """
        super()._update_current_progress_remaining(self._rollout_began_at, total_timesteps)

    def _cfg(self) -> GRPOCfg:
        """The update's settings, those of a preset included."""
        cfg = update_cfg({name: vars(self)[name] for name in ARGUMENTS})
        for name in ("credit", "objective", "kl_estimator", "top_entropy_quantile", "adaptive_entropy"):
            setattr(self, name, vars(cfg)[name])
        return cfg

    def _setup_learn(
        self,
        total_timesteps: int,
        callback: MaybeCallback = None,
        reset_num_timesteps: bool = True,
        tb_log_name: str = "run",
        progress_bar: bool = False,
    ) -> tuple[int, BaseCallback]:
        """Go on with the episodes under way, or start the first ones by the reset that SB3 does here."""
        if self.env is None:
            raise EnvError("there is no environment to learn from; fix: model.set_env(env), or load(path, env=env)")
        insert_shared_start(self.env)
        begins = reset_num_timesteps or not self._goes_on(self.env)
        if begins:
            self._open_groups(self.env)
            self._last_obs = None
        total_timesteps, callback = super()._setup_learn(
            total_timesteps, callback, reset_num_timesteps, tb_log_name, progress_bar
        )
        if begins:
            assert self.rollout_buffer is not None
            self.rollout_buffer.begin()
            self._queue(self.env, self.rollout_buffer)
        return total_timesteps, callback

    def _goes_on(self, env: VecEnv) -> bool:
        """Whether every environment is where training left it; then the next starts are queued again."""
        episodes = self.rollout_buffer
        if episodes is None or self._last_obs is None:
            return False
        found = self._queue(env, episodes)
        return all(running == episodes.running(index) for index, running in enumerate(found))

    def _open_groups(self, env: VecEnv) -> None:
        """New episodes, the first of which begin at the next reset."""
        assert self._start_seed is not None
        if self.shared_starts == "verify" and self._verified is not env:
            verify_shared_start(env, derive_seed(self._start_seed, "verify"))
            self._verified = env
        if self.rollout_buffer is not None:
            self._next_group = self.rollout_buffer.next_group
        self.rollout_buffer = GroupBuffer(
            env.num_envs,
            self.group_size,
            seed=self._start_seed,
            first_group=self._next_group,
            starts="own" if self.shared_starts == "off" else "shared",
        )
        self._queue(env, self.rollout_buffer)

    def _queue(self, env: VecEnv, episodes: GroupBuffer) -> list[Any]:
        """Tell each environment what it starts next; returns what each is doing now."""
        return [env.env_method("queue_start", episodes.queued(i), indices=i)[0] for i in range(env.num_envs)]

    def _record(self, metrics: dict[str, float], num_groups: int) -> None:
        """Log under SB3's names where it has one."""
        record = self.logger.record
        record("train/policy_gradient_loss", metrics["train/policy_loss"])
        record("train/entropy_loss", -metrics["train/entropy"])
        for name in ("loss", "approx_kl", "clip_fraction", "grad_norm"):
            record(f"train/{name}", metrics[f"train/{name}"])
        if self.kl_coef > 0:
            record("train/kl", metrics["train/kl"])
        if self.policy.log_std is not None:
            record("train/std", self.policy.log_std.exp().mean().item())
        record("train/n_updates", self._n_updates, exclude="tensorboard")
        record("train/clip_range", clip_range(self.core.cfg.objective.trust_region)[1])
        record("rollout/groups", num_groups)
        record("rollout/zero_variance_groups", metrics["rollout/zero_variance_groups"])

    def _excluded_save_params(self) -> list[str]:
        """Besides what SB3 leaves out: what follows from the rest, and the environments."""
        return [*super()._excluded_save_params(), "core", "_verified"]

    def _get_torch_save_params(self) -> tuple[list[str], list[str]]:
        """What is saved as state dicts: policy, optimiser, and the reference if there is one."""
        names, tensors = super()._get_torch_save_params()
        return names + ["reference_policy"] * (self.kl_coef > 0), tensors
