"""From a ``RunCfg`` to the parts of a run: environments, policy, algorithm, collector, buffer, callbacks."""

import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import torch

from groupwise import config
from groupwise.algorithms.base import BaseAlgorithm
from groupwise.algorithms.configs import GRPOCfg
from groupwise.collectors.base import Collector
from groupwise.collectors.groups import GroupCollector
from groupwise.collectors.vector import VectorCollector
from groupwise.data.rollout import RolloutBuffer
from groupwise.engines.base import Engine
from groupwise.envs.base import GroupEnv, GroupStartReport, VectorEnv
from groupwise.envs.configs import EnvCfg
from groupwise.envs.local_rows import OnError
from groupwise.envs.make import make_env
from groupwise.errors import ConfigError, require_extra
from groupwise.policies.actor_critic import ActorCritic
from groupwise.policies.base import Policy
from groupwise.registry import algorithm_entry
from groupwise.report.folder import RunFolder
from groupwise.seeding import derive_seed
from groupwise.settings import RunCfg
from groupwise.training.base import Callback
from groupwise.training.callbacks import Evaluate, MetricsLog, Progress, SaveCheckpoints, StopAtScore, TimeLimit
from groupwise.training.checkpoint import Identity
from groupwise.training.evaluation import MAX_STEPS, EvaluationResult, evaluate_policy
from groupwise.training.loggers import TensorBoard, WandB
from groupwise.training.trainer import Trainer

log = logging.getLogger(__name__)

GIVEN = "<given in Python>"
"""Stands in a config for an object that was passed in."""
MAX_EVALUATION_ENVS = 128
_MAKE_VEC_KWARGS = {"num_envs", "vectorization_mode", "vector_kwargs"}
"""What ``gymnasium.make_vec`` records among an environment's own arguments."""


class Given(NamedTuple):
    """Python objects that a run was given instead of settings."""

    env: object | None = None
    """What ``make_env`` takes as ``env``: a callable, a ``GroupEnv`` or a ``gymnasium.vector.VectorEnv``."""
    policy: Policy | None = None

    def names(self) -> list[str]:
        """Which of them there are."""
        return [name for name, value in self._asdict().items() if value is not None]


class Parts(NamedTuple):
    """What training is made of."""

    cfg: RunCfg
    """With the settings that only the environment could tell."""
    env: VectorEnv
    algorithm: BaseAlgorithm
    collector: Collector
    buffer: RolloutBuffer
    identity: Identity

    def start_report(self) -> GroupStartReport | None:
        """What the check of the groups' shared start found; None for algorithms without groups."""
        return self.collector.start_report if isinstance(self.collector, GroupCollector) else None


def build_parts(cfg: RunCfg, given: Given, engine: Engine) -> Parts:
    """Environments, policy and what trains it, from a run's settings.

    Raises:
        ConfigError: settings that exclude each other, or an object that must be given and was not.
    """
    algorithm_type = algorithm_entry(cfg.algorithm.name).load()
    _check(cfg, given, algorithm_type)
    device = pick_device(cfg.device)
    env = make_env(
        cfg.env,
        grouped=algorithm_type.grouped,
        env=given.env,
        block_size=_block_size(cfg),
        on_error=_on_error(cfg),
        device=device,
    )
    cfg = _with_max_length(cfg, env)
    policy = build_policy(cfg, env, given, algorithm_type).to(device)
    seed = derive_seed(cfg.seed, "algorithm")
    algorithm = algorithm_type(cfg.algorithm, policy, engine, seed=seed)
    buffer = RolloutBuffer(
        env.num_envs,
        cfg.algorithm.num_steps,
        obs_spec=env.obs_spec,
        action_spec=policy.action_spec,
        value=not policy.actor_only,
        reward_parts=len(cfg.env.reward_parts),
        device=device,
    )
    return Parts(cfg, env, algorithm, _build_collector(cfg, env, policy, engine.rank), buffer, Identity.of(env))


def build_policy(cfg: RunCfg, env: VectorEnv, given: Given, algorithm_type: type[BaseAlgorithm]) -> Policy:
    """The policy that was given, or a new one whose weights follow from the run's seed."""
    if given.policy is not None:
        return given.policy
    # orthogonal weights come out differently on another number of threads
    with threads(1), torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(cfg.seed, "policy"))
        return ActorCritic(
            env.observation_space,
            env.action_space,
            cfg.policy,
            actor_only=algorithm_type.actor_only,
            gamma=cfg.algorithm.gamma,
        )


@contextmanager
def threads(number: int) -> Iterator[None]:
    """Torch on so many threads; on as many as before afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def build_trainer(parts: Parts, callbacks: Sequence[Callback], engine: Engine) -> Trainer:
    """The loop over the parts."""
    return Trainer(
        parts.algorithm,
        parts.collector,
        parts.buffer,
        num_steps=parts.cfg.algorithm.num_steps,
        total_steps=parts.cfg.total_steps,
        seed=parts.cfg.seed,
        callbacks=callbacks,
        engine=engine,
    )


def build_callbacks(
    parts: Parts, folder: RunFolder, users: Sequence[Callback], evaluator: "Evaluator", rank: int
) -> list[Callback]:
    """The user's callbacks and those that the settings ask for, in the order of ``callbacks.py``.

    Ranks other than 0 write and decide nothing: they have the user's, and restart their episodes at checkpoints.
    """
    cfg = parts.cfg
    tenth = max(1, cfg.total_steps // 10)
    interval = cfg.checkpoint_interval or tenth
    if rank != 0:
        return [*users, SaveCheckpoints(None, interval, parts.identity)]
    stop, logging = cfg.stop, cfg.logging
    built: list[Callback] = [*users]
    if stop.time_limit is not None:
        built.append(TimeLimit(stop.time_limit))
    if evaluator.is_possible():
        evaluator.start_as(parts.start_report())
        evaluator.prepare()
        built.append(Evaluate(evaluator, cfg.evaluation.interval or tenth, folder.best, parts.identity))
    else:
        log.warning("no evaluation: %s was given ready-made and cannot be made a second time", parts.identity.env_id)
    if stop.return_threshold is not None:
        built.append(StopAtScore(stop.return_threshold))
    built.append(MetricsLog(folder.metrics))
    if logging.tensorboard:
        built.append(TensorBoard(folder.tensorboard))
    if logging.wandb != "off":
        built.append(WandB(folder.path, folder.read_id(), json.loads(config.to_json(cfg)), logging.wandb))
    if logging.progress != "none":
        title = f"{parts.identity.env_id}: {cfg.algorithm.name}, seed {cfg.seed}, in {folder.path}"
        if report := parts.start_report():
            title += f"\nsiblings share their start, by {report.tier}: verified"
        title += _note_on_length(cfg)
        built.append(Progress(logging.progress, logging.interval, title))
    return [*built, SaveCheckpoints(folder.latest, interval, parts.identity)]


def _note_on_length(cfg: RunCfg) -> str:
    """A line for whoever wonders why more steps are taken than were asked for."""
    at_once, why = cfg.env.num_envs * cfg.algorithm.num_steps, "num_envs * num_steps"
    if isinstance(cfg.algorithm, GRPOCfg) and cfg.algorithm.collection.unfinished == "finish":
        members = cfg.algorithm.group_size + _greedy_attempts(cfg.algorithm)
        if members > at_once:
            at_once, why = members, "a group of so many attempts is finished"
    if cfg.total_steps >= at_once:
        return ""
    return (
        f"\none iteration takes at least {at_once:,} steps ({why}), so that the first one reaches "
        f"total_steps = {cfg.total_steps:,}"
    )


class Evaluator:
    """Evaluates a policy in environments of its own, made when first needed.

    Args:
        seed: of the episodes; the same ones at each call, so that two evaluations differ by the policy alone.
    """

    def __init__(
        self, cfg: RunCfg, given: Given, policy: Policy, *, episodes: int, deterministic: bool, seed: int
    ) -> None:
        self.cfg = cfg
        self.given = given
        self.policy = policy
        self.episodes = episodes
        self.deterministic = deterministic
        self.seed = seed
        self._group_start: Literal["auto", "replay"] = "auto"
        self._env: GroupEnv | None = None

    def start_as(self, report: GroupStartReport | None) -> None:
        """Start each episode in a fresh environment where a used one was found to start elsewhere.

        Else a resumed run, whose environments are fresh, would come to other scores than an uninterrupted one.
        """
        if report is not None and report.tier == "replay":
            self._group_start = "replay"

    def __call__(self) -> EvaluationResult:
        """Play the episodes."""
        env, algorithm = self.prepare(), self.cfg.algorithm
        window = algorithm.attempt_steps if isinstance(algorithm, GRPOCfg) else None
        limit = MAX_STEPS if env.max_episode_steps is not None or window is None else window
        return evaluate_policy(
            self.policy,
            env,
            episodes=self.episodes,
            seed=self.seed,
            deterministic=self.deterministic,
            max_steps=limit,
        )

    def prepare(self) -> GroupEnv:
        """The environments, made now if they were not yet.

        Raises:
            ConfigError: they cannot be made.
        """
        if self._env is None:
            self._env = self._make_env()
        return self._env

    def is_possible(self) -> bool:
        """Whether separate environments can be made."""
        return separate_env(self.cfg.env, self.given.env) is not None

    def close(self) -> None:
        """Free the environments."""
        if self._env is not None:
            self._env.close()

    def _make_env(self) -> GroupEnv:
        separate = separate_env(self.cfg.env, self.given.env)
        if separate is None:
            raise _no_second_env(self.given.env)
        cfg, source = separate
        processes = cfg.num_envs if cfg.vectorization == "async" else MAX_EVALUATION_ENVS
        num_envs = min(self.episodes, processes)
        cfg = cfg.model_copy(update={"group_start": self._group_start})
        return make_env(cfg, grouped=True, num_envs=num_envs, env=source, verify=False, device=self.policy.device)


def separate_env(cfg: EnvCfg, env: object | None) -> tuple[EnvCfg, object | None] | None:
    """What ``make_env`` needs for environments apart from the training ones, whose rows start one by one.

    None if a ``GroupEnv`` was given, or a vector environment that Gymnasium cannot make again.
    """
    import gymnasium

    if isinstance(env, GroupEnv):
        return None

    vectorization = "auto" if cfg.vectorization == "entry_point" else cfg.vectorization
    plain = {"autoreset": "disabled", "group_start": "auto", "random_prefix": 0, "reward_parts": ()}
    cfg = cfg.model_copy(update={**plain, "vectorization": vectorization})
    if not isinstance(env, gymnasium.vector.VectorEnv):
        return cfg, env
    wrapped = env is not env.unwrapped or "wrappers" in (env.spec.kwargs if env.spec else {})
    if env.spec is None or wrapped:
        return None
    kwargs = {key: value for key, value in env.spec.kwargs.items() if key not in _MAKE_VEC_KWARGS}
    return cfg.model_copy(update={"id": env.spec.id, "kwargs": kwargs}), None


def pick_device(name: str) -> torch.device:
    """The device that a config names.

    Raises:
        ConfigError: a GPU is asked for and there is none.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"device = {name!r}, but torch finds no GPU; mend: device='cpu' or 'auto'")
    return torch.device(name)


def _check(cfg: RunCfg, given: Given, algorithm_type: type[BaseAlgorithm]) -> None:
    if cfg.env.id == GIVEN and given.env is None:
        raise ConfigError("the environment was given in Python; mend: give it again as env=...")
    for package, wanted in {"tensorboard": cfg.logging.tensorboard, "wandb": cfg.logging.wandb != "off"}.items():
        if wanted:
            require_extra(package, "track")
    if cfg.evaluation.interval is not None and separate_env(cfg.env, given.env) is None:
        raise _no_second_env(given.env)
    if given.policy is not None and given.policy.actor_only and not algorithm_type.actor_only:
        raise ConfigError(
            f"{cfg.algorithm.name} needs a critic, and the given policy is actor_only; mend: actor_only=False"
        )
    if algorithm_type.grouped and not isinstance(cfg.algorithm, GRPOCfg):
        raise ConfigError(
            f"{algorithm_type.__name__} is grouped, but {type(cfg.algorithm).__name__} has no group_size; "
            "mend: derive the config from GRPOCfg"
        )


def _no_second_env(env: object) -> ConfigError:
    return ConfigError(
        f"{type(env).__name__} cannot be made a second time for evaluation; mend: leave evaluation.interval out, or give "
        "an id, a callable that returns one gymnasium.Env, or one with a parameter num_envs that returns a GroupEnv"
    )


def _with_max_length(cfg: RunCfg, env: VectorEnv) -> RunCfg:
    """The config with the longest episode filled in, where the loss divides by it and nobody said how long."""
    objective = cfg.algorithm.objective
    if objective.aggregation not in ("constant", "seq_mean_token_sum_norm") or objective.max_length is not None:
        return cfg
    window = cfg.algorithm.attempt_steps if isinstance(cfg.algorithm, GRPOCfg) else None
    objective = objective.model_copy(update={"max_length": window or env.max_episode_steps})
    return cfg.model_copy(update={"algorithm": cfg.algorithm.model_copy(update={"objective": objective})})


def _block_size(cfg: RunCfg) -> int:
    """Rows that the collector can start together: whole groups, unless rows are left over or attempts begin alone."""
    if not isinstance(cfg.algorithm, GRPOCfg) or cfg.algorithm.collection.lost_member == "complete":
        return 1
    if cfg.algorithm.collection.branching.points and cfg.algorithm.collection.branching.stem == "single":
        return 1
    members = cfg.algorithm.group_size + _greedy_attempts(cfg.algorithm)
    return members if cfg.env.num_envs % members == 0 else 1


def _greedy_attempts(algorithm: GRPOCfg) -> Literal[0, 1]:
    return 1 if algorithm.credit.baseline == "greedy" else 0


def _on_error(cfg: RunCfg) -> OnError:
    reports = isinstance(cfg.algorithm, GRPOCfg) and cfg.algorithm.collection.lost_member != "raise"
    return "report" if reports else "raise"


def _build_collector(cfg: RunCfg, env: VectorEnv, policy: Policy, rank: int) -> Collector:
    algorithm: Any = cfg.algorithm
    if isinstance(env, GroupEnv) and isinstance(algorithm, GRPOCfg):
        return GroupCollector(
            env,
            policy,
            group_size=algorithm.group_size,
            attempt_steps=algorithm.attempt_steps,
            collection=algorithm.collection,
            greedy_attempts=_greedy_attempts(algorithm),
            seed=cfg.seed,
            rank=rank,
        )
    return VectorCollector(env, policy, seed=cfg.seed, rank=rank)
