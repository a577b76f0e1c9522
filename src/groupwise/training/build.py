"""Builds the parts of a run from its settings: algorithm, collector, buffer, callbacks, evaluation."""

import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from groupwise.algorithms.base import BaseAlgorithm
from groupwise.algorithms.bc import BehaviorCloning
from groupwise.algorithms.grpo import GRPO
from groupwise.algorithms.ppo import PPO
from groupwise.collectors.groups import GroupCollector
from groupwise.collectors.torch import TorchGroupCollector, TorchVectorCollector
from groupwise.collectors.vector import Collector, VectorCollector, acting_on_finite
from groupwise.config.algorithm import AlgorithmCfg, BCCfg, GRPOCfg, PPOCfg, with_max_length
from groupwise.config.base import GIVEN, OTHER_NAMES, Cfg, meant
from groupwise.config.policy import AnyPolicyCfg, PolicyCfg, RecurrentCfg
from groupwise.config.run import (
    DEFAULT_HORIZON,
    CommonCfg,
    EnvCfg,
    EvaluationMetric,
    RunCfg,
    StartMode,
    TextRunCfg,
    TrackedRun,
)
from groupwise.data.rollout import RolloutBuffer
from groupwise.engines import Engine
from groupwise.envs.base import GroupEnv, VectorEnv
from groupwise.envs.make import make_env, make_one, make_own_rows
from groupwise.envs.torch_env import TorchGroupEnv
from groupwise.errors import ConfigError, DataError, DivergedError, EnvError
from groupwise.policies.actor_critic import ActorCritic, RunningMeanStd
from groupwise.policies.base import Policy
from groupwise.policies.heads import unexplored
from groupwise.policies.recurrent import RecurrentActorCritic
from groupwise.report.folder import RunFolder
from groupwise.report.video import NoPictureError, film, film_group
from groupwise.seeding import TORCH_GENERATOR, derive_seed
from groupwise.speed.control import WORTH_STEPS, compiled_gradient, flat_adam
from groupwise.speed.graphs import RolloutGraph, adam_graph, gradient_graph
from groupwise.training.callbacks import (
    CheckSamplerMismatch,
    Evaluate,
    KeepGroups,
    MetricsLog,
    Progress,
    SaveCheckpoints,
    StopEarly,
    Videos,
)
from groupwise.training.checkpoint import Identity, initialize
from groupwise.training.evaluation import MAX_STEPS, EvaluationResult, evaluate_policy
from groupwise.training.trackers import Report, make_tracker
from groupwise.training.trainer import Callback

log = logging.getLogger(__name__)


# Parts of a run, shared by environments and texts


class UserObjects(NamedTuple):
    """Python objects that the user gave in place of settings."""

    env: object | None = None
    """A callable, a ``VectorEnv`` or a ``gymnasium.vector.VectorEnv``; of texts what makes a ``TextEnv``."""
    policy: Policy | None = None
    data: object | None = None
    """Training prompts, as ``TextTask`` takes them."""
    eval_data: object | None = None
    """Held-out prompts, in the same form."""
    reward: Any = None
    """Functions that score completions, one or several."""
    tool: Any = None
    """A tool that a language model can call."""
    tools: Any = None
    """Functions that a language model calls by name."""

    @classmethod
    def again(cls, objects: Mapping[str, Any], cfg: CommonCfg | None = None) -> "UserObjects":
        """The objects by name, when a run is loaded or resumed; a ``ConfigError`` for what is no object of a run.

        Args:
            cfg: the run's settings; objects that they do not ask for are refused, too, since they would be ignored.
        """
        for name, value in objects.items():
            if name not in (*cls._fields, *RunCfg.model_fields, *TextRunCfg.model_fields):
                hint = f"; {meant([OTHER_NAMES[name]])}" if name in OTHER_NAMES else ""
                raise ConfigError(f"unknown argument {name!r}{hint}; fix: {', '.join(cls._fields)}, or the function's")
            several = isinstance(value, Mapping) and value and all(map(callable, value.values()))
            is_setting = isinstance(value, str | Mapping | Cfg) and not (name == "env" and several)  # text ones by name
            if name not in cls._fields or (name in ("env", "policy") and is_setting):
                raise ConfigError(
                    f"{name} = {value!r:.80}: a run is given its Python objects again ({', '.join(cls._fields)}), and has its "
                    f"settings; fix: leave it out, or change a setting in a new run: gw.fork(run, new_folder, {name}=...)"
                )
        kept: dict[str, Any] = {name: [*one] if isinstance(one, Iterator) else one for name, one in objects.items()}
        given = cls(**kept)  # data are read several times
        asked = cfg.task.given_in_python if isinstance(cfg, TextRunCfg) else {"env"}
        if cfg is not None and (unread := sorted(given.as_arguments().keys() - asked - {"policy"})):
            new = f", or begin a new run: gw.train(gw.TextTask(..., {unread[0]}=...), model={{'init_from': run.path}})"
            raise ConfigError(
                f"{' and '.join(unread)}: the run was trained without, or with what its settings name, and would not use it; fix: "
                f"leave it out{new if isinstance(cfg, TextRunCfg) else ''}"
            )
        return given

    def as_arguments(self) -> dict[str, Any]:
        """The objects that were given, by name."""
        return {name: value for name, value in self._asdict().items() if value is not None}


@dataclass(frozen=True)
class Components(ABC):
    """The parts of a run."""

    cfg: RunCfg | TextRunCfg
    """The settings, completed by values that the environment or the data determines."""
    given: UserObjects
    algorithm: BaseAlgorithm
    collector: Collector
    buffer: RolloutBuffer
    identity: Identity

    @property
    def policy(self) -> Policy:
        """The policy that is trained."""
        return self.algorithm.policy

    @property
    def metric(self) -> EvaluationMetric:
        """The score by which an evaluation is the best one."""
        return self.cfg.evaluation.metric

    @abstractmethod
    def evaluator(self) -> Any:
        """The evaluator of training: a call plays the episodes, ``close`` frees its resources. None if there can be none."""

    def notes(self) -> list[str]:
        """Lines to print when training starts."""
        return []

    def summary_fields(self) -> dict[str, Any]:
        """Fields of the summary besides scores."""
        return {}

    def own_callbacks(self, folder: RunFolder) -> list[Callback]:
        """Callbacks of this kind of run."""
        return []

    def render(self, path: Path, seed: int) -> None:  # noqa: B027 (not every run has pictures)
        """Write a video of the policy, where possible."""

    def render_groups(self, folder: RunFolder) -> None:  # noqa: B027 (not every run has pictures)
        """Draw members of a group that the run kept, where possible."""

    def close(self) -> None:
        """Free the run's own resources."""
        self.collector.close()


@contextmanager
def threads(number: int) -> Iterator[None]:
    """Torch on ``number`` threads, restored afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def first_weights(seed: int) -> Iterator[None]:
    """Torch's global generator at the stream of a run's first weights, in float32; both are restored afterwards."""
    with TORCH_GENERATOR, torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(seed, "policy"))
        dtype = torch.get_default_dtype()
        torch.set_default_dtype(torch.float32)
        try:
            yield
        finally:
            torch.set_default_dtype(dtype)


def pick_device(name: str) -> torch.device:
    """The device that a config names; a ``ConfigError`` if that is a GPU and there is none."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"device = {name!r}, but torch finds no GPU; fix: device='cpu' or 'auto'")
    return torch.device(name)


def build_callbacks(
    parts: Components,
    folder: RunFolder,
    users: Sequence[Callback],
    evaluator: Callable[[], EvaluationResult] | None,
    rank: int,
) -> list[Callback]:
    """The user's callbacks and those of the settings; on ranks above 0 the user's, and those that help to save.

    Their order: logs have what others add to the metrics, the last iteration is evaluated, and a checkpoint covers what
    the logs hold.
    """
    cfg, stop, logging = parts.cfg, parts.cfg.stop, parts.cfg.logging
    place = folder.latest if rank == 0 else None
    settings = cfg.model_dump(mode="json")
    saves = SaveCheckpoints(place, cfg.checkpoint_interval, parts.identity, cfg.keep_checkpoints, settings)
    if rank != 0:
        return [*users, saves]
    built = [*users, *parts.own_callbacks(folder)]
    if stop.changed("threshold", "time_limit"):
        built.append(StopEarly(stop, parts.metric))
    if evaluator is not None:
        interval = cfg.evaluation.interval
        built.append(Evaluate(evaluator, interval, folder.best, parts.identity, parts.metric))
    if cfg.evaluation.num_logged_groups and not isinstance(cfg.algorithm, BCCfg):
        built.append(KeepGroups(folder.groups, cfg.evaluation.interval, cfg.evaluation.num_logged_groups))
    built.append(MetricsLog(folder.metrics, saves))
    if logging.report_to:
        run = TrackedRun(folder.path, folder.read_provenance()["run_id"] or folder.path.name, settings)
        built += [Report(tracker.name, make_tracker(tracker, run)) for tracker in logging.report_to]
    if logging.progress != "none":
        title = f"{parts.identity.env_id} | {cfg.algorithm.name.upper()} | seed {cfg.seed} | {folder.shown}"
        words = cfg.score, f"{cfg.unit}s"
        built.append(Progress(logging.progress, title="\n".join([title, *parts.notes()]), words=words))
    return [*built, saves]


# Evaluation and video in separate environments

MAX_EVALUATION_ENVS = 128
_MAKE_VEC_KWARGS = {"num_envs", "vectorization_mode", "vector_kwargs"}
"""Arguments of ``gymnasium.make_vec`` that it records among those of the environment."""


class EnvEvaluator:
    """Plays the episodes that ``cfg.evaluation`` describes, in environments of its own.

    Args:
        seed: of the episodes. Each call plays the same ones, so two evaluations differ by the policy alone.
        fresh: start each episode in a new environment, for environments whose starts depend on earlier episodes.
            Otherwise a resumed run would get other scores.

    Raises:
        ConfigError: the environment cannot be made a second time.
    """

    def __init__(self, cfg: RunCfg, given: UserObjects, policy: Policy, *, seed: int, fresh: bool = False) -> None:
        separate = separate_env(cfg.env, given.env)
        if separate is None:
            raise no_second_env(given.env)
        env_cfg, source = separate
        most = env_cfg.num_envs if env_cfg.vectorization == "async" else MAX_EVALUATION_ENVS
        self.cfg = cfg
        self.policy = policy
        self.seed = seed
        self._collection = cfg.algorithm.groups.collection
        self._make: Callable[[], GroupEnv] = partial(
            make_env,
            env_cfg.model_copy(update={"start_mode": "fresh" if fresh else "auto"}),
            grouped=True,
            num_envs=min(cfg.evaluation.episodes, most),
            env=source,
            verify=False,
            device=policy.device,
        )
        self.env = self._make()
        self._warned = False

    def __call__(self) -> EvaluationResult:
        """Play the episodes; once again in new environments if these fail, unless ``on_env_error`` is ``raise``."""
        try:
            return self._play()
        except (DataError, DivergedError):  # of the policy's actions; other environments would not help
            raise
        except Exception as error:
            if self._collection.on_env_error == "raise":
                raise
            log.warning("the evaluation failed, and begins again in new environments: %r", error)
        with suppress(Exception):
            self.env.close()
        self.env = self._make()
        return self._play()

    def _play(self) -> EvaluationResult:
        horizon = self._collection.horizon or DEFAULT_HORIZON
        limit = MAX_STEPS if self.env.max_episode_steps is not None else horizon
        result = evaluate_policy(
            self.policy,
            self.env,
            episodes=self.cfg.evaluation.episodes,
            seed=self.seed,
            deterministic=self.cfg.evaluation.deterministic,
            on_nonfinite=self.cfg.algorithm.on_nonfinite,
            max_steps=limit,
        )
        if result.cut_episodes and not self._warned:
            self._warned = True
            log.warning(
                "%d of %d evaluation episodes were cut after %s steps, because %s has no step limit; fix: env.max_episode_steps",
                result.cut_episodes,
                result.episodes,
                f"{limit:,}",
                self.env.env_id,
            )
        return result

    def close(self) -> None:
        """Free the environments."""
        self.env.close()


def record(cfg: RunCfg, given: UserObjects, policy: Policy, path: Path, seed: int) -> None:
    """Film an episode of the greedy policy.

    Raises:
        NoPictureError: the environment does not render to arrays, or cannot be made a second time.
        EnvError: its renderer failed.
    """
    if (separate := separate_env(cfg.env, given.env)) is None:
        raise NoPictureError("no video: the environment cannot be made a second time; fix: give an id or a callable")
    film(policy, *separate, path, seed=derive_seed(seed, "video"))


def separate_env(cfg: EnvCfg, env: object | None) -> tuple[EnvCfg, object | None] | None:
    """Arguments of ``make_env`` for a second set of environments, whose rows start one by one.

    None for a ready ``VectorEnv``, and for a vector environment that Gymnasium cannot make again, or whose single
    environments have other spaces.
    """
    import gymnasium

    if isinstance(env, VectorEnv):
        return None

    vectorization = "auto" if cfg.vectorization == "entry_point" else cfg.vectorization
    plain = {"start_mode": "auto", "num_random_noops": 0, "log_info": ()}
    single = cfg.model_copy(update={**plain, "vectorization": vectorization})
    if not isinstance(env, gymnasium.vector.VectorEnv):
        spec = gymnasium.registry.get(cfg.id) if env is None else None
        if spec is not None and spec.entry_point is None:
            return None
        if env is not None or vectorization == cfg.vectorization:
            return single, env
        with closing(make_own_rows(cfg, 1)) as rows:
            return (single, None) if _has_same_spaces(single, rows) else None
    wrapped = env is not env.unwrapped or "wrappers" in (env.spec.kwargs if env.spec else {})
    if env.spec is None or env.spec.entry_point is None or wrapped:
        return None
    kwargs = {key: value for key, value in env.spec.kwargs.items() if key not in _MAKE_VEC_KWARGS}
    single = single.model_copy(update={"id": env.spec.id, "kwargs": kwargs})
    is_own = env.spec.kwargs.get("vectorization_mode") == "vector_entry_point"  # others are made of single ones
    return None if is_own and not _has_same_spaces(single, env) else (single, None)


def _has_same_spaces(cfg: EnvCfg, rows: Any) -> bool:
    """Whether single environments can be made, and have the spaces of these rows of a ``gymnasium.vector.VectorEnv``."""
    try:
        one = make_one(cfg, None)
    except Exception as error:  # such as arguments that only the vector environment takes
        log.info("a single environment of %s cannot be made: %s", cfg.id, error)
        return False
    with closing(one):
        return (one.observation_space, one.action_space) == (rows.single_observation_space, rows.single_action_space)


def no_second_env(env: object) -> ConfigError:
    """The error for an environment that cannot be made again."""
    if env is None:
        return ConfigError(
            "env.vectorization='entry_point' allows no evaluation here: its single environments cannot be made, or have other "
            "spaces; fix: leave evaluation.interval and stop.threshold out, and evaluate by a loop of your own"
        )
    return ConfigError(
        f"{type(env).__name__} cannot be made a second time for evaluation; fix: leave evaluation.interval and stop.threshold out, or give "
        "an id, a callable that returns one gymnasium.Env, or one with a parameter num_envs that returns a GroupEnv"
    )


# Check that rollouts fit in memory, before anything is allocated

_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


def check_rollout_fits(cfg: RunCfg | TextRunCfg, slot_bytes: int = 40, device: torch.device | None = None) -> None:
    """Raise a ``ConfigError`` if a rollout needs more memory than there is, even with episodes of a single step.

    Args:
        slot_bytes: of one step of one environment, or one token. 40: the least that reward, masks, ids, log-probability, and
            small observations and actions take.
        device: that holds the rollout.
    """
    size, of_episode, sums = cfg.algorithm.groups.size, slot_bytes + 250, {}  # 250: bookkeeping in a group
    if isinstance(cfg, RunCfg):
        rows, steps = cfg.env.num_envs, cfg.algorithm.num_steps
        window = f"env.num_envs={rows:,} x (algorithm.num_steps={steps:,} + 1) x {slot_bytes} bytes"
        sums[window] = rows * (steps + 1) * slot_bytes
    group = f"algorithm.group_size={size:,} x at least {of_episode} bytes an episode"
    if isinstance(cfg, TextRunCfg):
        group, size = f"num_prompts={cfg.num_prompts:,} x {group}", cfg.num_prompts * size
    sums[group] = size * of_episode
    what, need = max(sums.items(), key=lambda item: item[1])
    there = total_memory(device)
    if there is not None and need > there:
        raise ConfigError(
            f"a rollout needs at least {need / 2**30:,.1f} GiB: {what}; there are {there / 2**30:,.1f} GiB; fix: smaller "
            "numbers"
        )


def total_memory(device: torch.device | None = None) -> int | None:
    """Bytes of memory of a GPU, or of this machine or container; None if it cannot be found out."""
    if device is not None and device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    if not {"SC_PHYS_PAGES", "SC_PAGE_SIZE"} <= getattr(os, "sysconf_names", {}).keys():
        return None
    limit = _CGROUP_LIMIT.read_text().strip() if _CGROUP_LIMIT.is_file() else "max"
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(physical, int(limit)) if limit.isdecimal() else physical


@dataclass(frozen=True)
class EnvComponents(Components):
    """The parts of a run on an environment."""

    cfg: RunCfg
    env: VectorEnv
    initialized: str = ""
    """Where the policy's first weights come from, if not from random numbers."""
    more_callbacks: tuple[Callback, ...] = ()
    """Callbacks that the algorithm brings."""

    def evaluator(self) -> EnvEvaluator | None:
        """The evaluator; None if the environment cannot be made a second time."""
        if separate_env(self.cfg.env, self.given.env) is None:
            log.warning("no evaluation: %s cannot be made a second time, with the same spaces", self.identity.env_id)
            return None
        seed = derive_seed(self.cfg.seed, "evaluation")
        return EnvEvaluator(self.cfg, self.given, self.policy, seed=seed, fresh=self._start_mode() == "fresh")

    def notes(self) -> list[str]:
        """Where the weights come from, how the members of a group share their start, and what to know about the environment."""
        mode, lines = self._start_mode(), [self.initialized] if self.initialized else []
        if mode:
            lines.append(f"Group starts: {'not shared' if mode == 'none' else f'shared ({mode}), verified'}.")
        horizon = self.cfg.algorithm.groups.collection.horizon
        if horizon is not None and self.env.max_episode_steps is None:
            steps = f"{horizon:,} steps (algorithm.collection.horizon)"
            lines.append(f"{self.env.env_id} has no step limit: episodes of groups are truncated after {steps}.")
        if isinstance(self.cfg.policy, PolicyCfg) and self.given.policy is None:
            lines += filter(None, [unexplored(self.env.action_space, self.cfg.policy)])
        total, ranks = self.cfg.total_steps or 0, self.algorithm.engine.world_size
        # a cloning run counts demonstrated steps
        each = 1 if isinstance(self.cfg.algorithm, BCCfg) else self.cfg.env.decision_steps
        size = self.env.num_envs * ranks * self.cfg.algorithm.num_steps  # decisions, of at most ``each`` steps
        end = size * each * -(-total // (size * each))
        if isinstance(collector := self.collector, GroupCollector):
            # the last group opens below the size; then every row, and all its members but one, may begin an episode
            episodes = self.env.num_envs + collector.group_size + collector.greedy_members - 1
            limit = min(steps for steps in (self.env.max_episode_steps, horizon) if steps is not None)
            most = round(size * (1 + (collector.collection.dynamic_sampling or 0))) + ranks * episodes * limit
            more = " or more" if collector.collection.on_env_error == "retry" else f" to {most * each:,}"
            if 10 * most * each > total > 0:
                last = f"Training ends with the iteration that reaches {total:,} steps"
                lines.append(f"{last}: one takes {size:,}{more}, because it completes its groups.")
        elif end > 1.1 * total:
            about = "about " if each > 1 else ""
            lines.append(
                f"Training ends at {about}{end:,} steps in place of {total:,}: an iteration takes {about}{size * each:,}."
            )
        return [*lines, *self.env.notes]

    def summary_fields(self) -> dict[str, Any]:
        """How the members of a group share their start."""
        mode = self._start_mode()
        return {"start_mode": "not shared" if mode == "none" else f"{mode}, verified"} if mode else {}

    def own_callbacks(self, folder: RunFolder) -> list[Callback]:
        """A check of the sampler; videos after evaluations; those that the algorithm brings."""
        fix = (
            "act() and evaluate() of the policy must give an action the same log-probability, and nothing may change its "
            "weights between sampling and update; or other limits in sampler_mismatch"
        )
        built: list[Callback] = [CheckSamplerMismatch(self.cfg.sampler_mismatch, fix)]
        if (interval := self.cfg.evaluation.video_interval) is not None:
            film = partial(self._film, seed=derive_seed(self.cfg.seed, "evaluation"))
            built.append(Videos(film, interval, folder.videos))
        return [*built, *self.more_callbacks]

    def render(self, path: Path, seed: int) -> None:
        """Film an episode, where the environment renders."""
        try:
            self._film(path, seed)
        except NoPictureError as error:
            log.info("%s", error)

    def _film(self, path: Path, seed: int) -> None:
        """Film an episode; a ``NoPictureError`` where the environment does not render, a warning where that fails."""
        try:
            record(self.cfg, self.given, self.policy, path, seed)
        except NoPictureError:
            raise
        except EnvError as error:
            log.warning("%s", error)

    def render_groups(self, folder: RunFolder) -> None:
        """Draw members of a group, where the environment renders."""
        start_mode, separate = self._start_mode(), separate_env(self.cfg.env, self.given.env)
        if start_mode is None or separate is None:
            return
        env_cfg, source = separate
        mode = "seed" if start_mode == "native" else start_mode  # one environment is not native
        as_in_training = {"num_random_noops": self.cfg.env.num_random_noops, "start_mode": mode}
        try:
            film_group(self.policy, env_cfg.model_copy(update=as_in_training), source, folder.groups, folder.frames)
        except EnvError as error:
            log.info("%s", error)  # the video has warned

    def close(self) -> None:
        """Close the environments, unless they are the user's own."""
        close_env(self.collector, self.given)

    def _start_mode(self) -> StartMode | None:
        """How the members of a group share their start, which was verified; None for algorithms without groups."""
        report = self.env.start_report if isinstance(self.env, GroupEnv) and self.algorithm.grouped else None
        return None if report is None else report.start_mode


def close_env(env: VectorEnv | Collector, given: UserObjects) -> None:
    """Close environments, or a collector with its own, unless they are the user's."""
    import gymnasium

    if not isinstance(given.env, gymnasium.vector.VectorEnv | VectorEnv):
        env.close()


def algorithm_class(cfg: AlgorithmCfg) -> type[BaseAlgorithm]:
    """The algorithm that was registered with these settings, or a built-in one; a ``ConfigError`` if there is none."""
    if cfg.algorithm is not None:
        return cfg.algorithm
    for kind, algorithm in ((GRPOCfg, GRPO), (PPOCfg, PPO), (BCCfg, BehaviorCloning)):
        if isinstance(cfg, kind):
            return algorithm
    raise ConfigError(f"{type(cfg).__name__} has no algorithm; fix: @gw.register_algorithm({type(cfg).__name__})")


def policy_class(cfg: AnyPolicyCfg) -> type[Policy]:
    """The policy that was registered with these settings, or a built-in one; a ``ConfigError`` if there is none."""
    if cfg.policy is not None:
        return cfg.policy
    if isinstance(cfg, RecurrentCfg):
        return RecurrentActorCritic
    if isinstance(cfg, PolicyCfg):
        return ActorCritic
    raise ConfigError(f"{type(cfg).__name__} has no policy; fix: @gw.register_policy(name, {type(cfg).__name__})")


def build_components(
    cfg: RunCfg,
    given: UserObjects,
    engine: Engine,
    *,
    restored: bool = False,
    policy_type: type[Policy] | None = None,
    make_collector: Callable[..., tuple[Collector, tuple[Callback, ...]]] | None = None,
) -> EnvComponents:
    """The parts of a run from its settings.

    Args:
        restored: the weights will come from a checkpoint of the run itself, so ``policy.init_from`` is not read.
        policy_type, make_collector: in place of those that the core has for the settings. ``make_collector``
            also gives the callbacks that come with it.

    Raises:
        ConfigError: settings that exclude each other, or an object that must be given and was not.
        CheckpointError: ``policy.init_from`` does not fit the policy.
        DataError: demonstrations that do not fit the environment.
    """
    algorithm_type = algorithm_class(cfg.algorithm)
    if cfg.env.id == GIVEN and given.env is None:
        raise ConfigError("the environment was given in Python; fix: give it again as env=...")
    if algorithm_type.grouped and cfg.algorithm.groups.size == 1:
        raise ConfigError(
            f"{algorithm_type.__name__} is grouped, but {type(cfg.algorithm).__name__} has no group_size; "
            "fix: derive the config from GRPOCfg"
        )
    device = pick_device(cfg.device)
    check_rollout_fits(cfg)
    env = make_env(
        cfg.env,
        grouped=algorithm_type.grouped,
        env=given.env,
        on_error="raise" if cfg.algorithm.groups.collection.on_env_error == "raise" else "report",
        reward_parts=cfg.algorithm.reward_parts,
        device=device,
    )
    try:
        evaluates = cfg.evaluation.interval is not None or cfg.stop.threshold is not None
        if evaluates and separate_env(cfg.env, given.env) is None:
            raise no_second_env(given.env)
        return _components(cfg, given, engine, env, device, restored, policy_type, make_collector)
    except BaseException:
        close_env(env, given)
        raise


def _components(
    cfg: RunCfg,
    given: UserObjects,
    engine: Engine,
    env: VectorEnv,
    device: torch.device,
    restored: bool,
    policy_type: type[Policy] | None,
    make_collector: Callable[..., tuple[Collector, tuple[Callback, ...]]] | None,
) -> EnvComponents:
    """The parts of a run in an environment; ``build_components`` explains the arguments."""
    algorithm_type = algorithm_class(cfg.algorithm)
    policy = given.policy
    if policy is None:  # orthogonal weights come out differently on another number of threads
        with threads(1), first_weights(cfg.seed):
            kind: Any = policy_type or policy_class(cfg.policy)
            spaces, kwargs = (env.observation_space, env.action_space), {"gamma": cfg.algorithm.gamma}
            policy = kind(*spaces, cfg.policy, actor_only=algorithm_type.actor_only, **kwargs)
    policy = policy.to(device)
    identity = Identity(env.env_id, str(env.observation_space), str(env.action_space))
    source = None if restored else cfg.policy.init_from
    initialized = "" if source is None else initialize(policy, source, identity)
    groups, longest, changed = cfg.algorithm.groups, env.max_episode_steps, cfg.algorithm
    collection = groups.collection
    if longest is None and groups.size > 1 and collection.horizon is None and collection.partial_groups == "complete":
        # nothing else ends the episodes of a group
        collection = collection.model_copy(update={"horizon": DEFAULT_HORIZON})
        changed = changed.model_copy(update={"collection": collection})
    longest = min(filter(None, (collection.horizon, longest)), default=None)  # in units, where the loss divides by it
    units, chunk = policy.num_units, cfg.env.action_chunk
    if units % chunk == 0:  # each belongs to an action, and counts if that is executed
        units = units // chunk * cfg.env.actions_executed
    changed = with_max_length(changed, None if longest is None else longest * units)
    cfg = cfg.model_copy(update={"algorithm": changed})
    fast, seed = fast_paths(cfg, engine.world_size, device), derive_seed(cfg.seed, "algorithm")
    algorithm = algorithm_type(cfg.algorithm, policy, engine, seed=seed, **fast)
    more_callbacks: tuple[Callback, ...] = ()
    shared: dict[str, Any] = {"seed": cfg.seed, "rank": engine.rank}
    if cfg.algorithm.on_nonfinite != "stop":
        shared["actor"] = lambda policy: acting_on_finite(policy.act)
    in_groups: dict[str, Any] = {"group_size": groups.size, "collection": collection}
    graph = RolloutGraph if cfg.speed == "auto" and device.type == "cuda" else None
    collector: Collector
    if make_collector is not None:
        counts = {float(part.count) for part in policy.modules() if isinstance(part, RunningMeanStd)}
        # a policy of the user's that was trained keeps its statistics
        fit = not initialized and (given.policy is None or counts == {0.0})
        collector, more_callbacks = make_collector(cfg, env, algorithm, engine, read=not restored, fit_normalizers=fit)
    elif groups.size == 1 or not isinstance(env, GroupEnv):
        if isinstance(env, TorchGroupEnv) and not policy.state_size:
            collector = TorchVectorCollector(env, policy, graph=graph, **shared)
        else:
            collector = VectorCollector(env, policy, **shared)
    elif collection.partial_groups == "truncate" and groups.greedy_members:
        raise ConfigError("credit.baseline='greedy' needs whole groups; fix: collection.partial_groups='complete'")
    elif collection.partial_groups == "truncate" and isinstance(env, TorchGroupEnv):
        collector = TorchGroupCollector(env, policy, graph=graph, **in_groups, **shared)
    else:
        collector = GroupCollector(env, policy, greedy_members=groups.greedy_members, **in_groups, **shared)
    buffer = RolloutBuffer(
        env.num_envs,
        cfg.algorithm.num_steps,
        obs_spec=env.obs_spec,
        action_spec=policy.action_spec,
        state_size=policy.state_size,
        num_units=policy.num_units if policy.scored_by == "token" else None,
        value=not policy.actor_only,
        chunked=cfg.env.is_multi_step,
        reward_parts=len(cfg.algorithm.reward_parts),
        on_nonfinite=cfg.algorithm.on_nonfinite,
        device=device,
    )
    check_rollout_fits(cfg, buffer.slot_bytes, device)
    return EnvComponents(cfg, given, algorithm, collector, buffer, identity, env, initialized, more_callbacks)


def fast_paths(cfg: RunCfg, world_size: int = 1, device: torch.device | None = None) -> dict[str, Any]:
    """Arguments of the algorithm for speed: flat parameters, and updates that are compiled, or CUDA graphs."""
    if cfg.speed == "off":
        return {}
    if device is not None and device.type == "cuda":
        return {"optimizer": adam_graph, "gradient": gradient_graph}
    elements = cfg.env.num_envs * world_size * cfg.algorithm.num_steps
    minibatches = max(1, round(elements / (cfg.algorithm.minibatch_size or elements)))
    iterations = cfg.total_iterations or (cfg.total_steps or 0) // (elements * cfg.env.decision_steps)
    steps = iterations * cfg.algorithm.num_epochs * minibatches
    return {"optimizer": flat_adam} | ({"gradient": compiled_gradient} if steps >= WORTH_STEPS else {})
