"""From a ``RunCfg`` to the parts of a run on an environment."""

import logging
import pkgutil
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from groupwise.algorithms.base import BaseAlgorithm
from groupwise.collectors.base import Collector, MakeActor, acting_on_finite
from groupwise.collectors.groups import GroupCollector
from groupwise.collectors.torch_groups import TorchGroupCollector
from groupwise.collectors.torch_vector import MakeStepper, TorchVectorCollector
from groupwise.collectors.vector import VectorCollector
from groupwise.config.algorithm import BCCfg, GRPOCfg, with_max_length
from groupwise.config.base import GIVEN
from groupwise.config.env import StartMode
from groupwise.config.policy import PolicyCfg
from groupwise.config.run import DEFAULT_HORIZON, EvaluationMetric, RunCfg, SamplerMismatchCfg
from groupwise.data.rollout import RolloutBuffer
from groupwise.engines.base import Engine
from groupwise.envs.base import GroupEnv, VectorEnv
from groupwise.envs.make import make_env, torch_fix
from groupwise.envs.torch_env import TorchGroupEnv
from groupwise.errors import ConfigError, EnvError
from groupwise.policies.base import Policy
from groupwise.report.folder import RunFolder
from groupwise.report.video import NoPictureError
from groupwise.seeding import derive_seed
from groupwise.speed import compile, rollouts
from groupwise.speed.flat import flat_adam
from groupwise.speed.numpy_actor import numpy_actor
from groupwise.training.base import Callback
from groupwise.training.callbacks import CheckSamplerMismatch
from groupwise.training.checkpoint import Identity
from groupwise.training.components import Components, UserObjects, pick_device, threads
from groupwise.training.env_evaluator import EnvEvaluator, no_second_env, record, record_group, separate_env
from groupwise.training.initialize import initialize
from groupwise.training.memory_check import check_rollout_fits
from groupwise.training.videos import Videos

CLONING = "groupwise.embodied.cloning"
"""Behaviour cloning, which is no part of the core."""
CHUNK_POLICY = "groupwise.embodied.chunks:ChunkActorCritic"
"""``PolicyCfg``'s policy with ``env.action_chunk``, which is no part of the core."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class EnvComponents(Components):
    """The parts of a run on an environment."""

    cfg: RunCfg
    env: VectorEnv
    initialized: str = ""
    """Where the policy's first weights come from, if not from random numbers."""

    @property
    def metric(self) -> EvaluationMetric:
        """What makes an evaluation the best one."""
        return self.cfg.evaluation.metric

    def evaluator(self) -> EnvEvaluator | None:
        """The evaluator; None if the user's environment cannot be made a second time."""
        if separate_env(self.cfg.env, self.given.env) is None:
            log.warning("no evaluation: %s was given ready-made and cannot be made a second time", self.identity.env_id)
            return None
        seed = derive_seed(self.cfg.seed, "evaluation")
        return EnvEvaluator(self.cfg, self.given, self.policy, seed=seed, fresh=self._start_mode() == "fresh")

    def notes(self) -> list[str]:
        """Where the weights come from, how the members of a group share their start, and what to know about the environment."""
        mode = self._start_mode()
        shared = "not shared." if mode == "none" else f"shared ({mode}), verified."
        weights = [self.initialized] if self.initialized else []
        return [*weights, *([f"Group starts: {shared}"] if mode else []), *self._horizon_note(), *self.env.notes]

    def summary_fields(self) -> dict[str, Any]:
        """How the members of a group share their start."""
        mode = self._start_mode()
        return {"start_mode": "not shared" if mode == "none" else f"{mode}, verified"} if mode else {}

    def own_callbacks(self, folder: RunFolder) -> list[Callback]:
        """A check of the sampler; videos after evaluations; scores on held-out demonstrations."""
        fix = "act() and evaluate() of the policy must give an action the same log-probability"
        built: list[Callback] = [CheckSamplerMismatch(SamplerMismatchCfg(stop=None), fix)]
        if self.cfg.evaluation.video_interval is not None:
            seed = derive_seed(self.cfg.seed, "evaluation")
            built.append(Videos(partial(self.render, seed=seed), self.cfg.evaluation.video_interval, folder.videos))
        if isinstance(self.cfg.algorithm, BCCfg):
            built.append(pkgutil.resolve_name(f"{CLONING}:DemoScores")(self.algorithm, self.collector))
        return built

    def render(self, path: Path, seed: int) -> None:
        """Film an episode, where the environment renders."""
        try:
            record(self.cfg, self.given, self.policy, path, seed)
        except EnvError as error:
            log.log(logging.INFO if isinstance(error, NoPictureError) else logging.WARNING, "%s", error)

    def render_groups(self, folder: RunFolder) -> None:
        """Draw members of a group, where the environment renders."""
        start_mode = self._start_mode()
        if start_mode is None:
            return
        try:
            record_group(self.cfg, self.given, self.policy, folder, start_mode)
        except EnvError as error:
            log.info("%s", error)  # the video has warned

    def close(self) -> None:
        """Close the environments, unless they are the user's own."""
        import gymnasium

        if not isinstance(self.given.env, gymnasium.vector.VectorEnv | VectorEnv):
            super().close()

    def _horizon_note(self) -> list[str]:
        """How long episodes are where only the horizon ends them."""
        horizon = self.cfg.algorithm.collection.horizon if isinstance(self.cfg.algorithm, GRPOCfg) else None
        if horizon is None or self.env.max_episode_steps is not None:
            return []
        steps = f"{horizon:,} steps (algorithm.collection.horizon)"
        return [f"{self.env.env_id} has no step limit: episodes of groups are truncated after {steps}."]

    def _start_mode(self) -> StartMode | None:
        """How the members of a group share their start, which was verified; None for algorithms without groups."""
        report = self.env.start_report if isinstance(self.env, GroupEnv) and self.algorithm.grouped else None
        return None if report is None else report.start_mode


def build_components(cfg: RunCfg, given: UserObjects, engine: Engine, *, restored: bool = False) -> EnvComponents:
    """The parts of a run from its settings.

    Args:
        restored: the weights will come from a checkpoint of the run itself, so ``policy.init_from`` is not read.

    Raises:
        ConfigError: settings that exclude each other, or an object that must be given and was not.
        CheckpointError: ``policy.init_from`` does not fit the policy.
        DataError: demonstrations that do not fit the environment.
    """
    algorithm_type = cfg.algorithm.load()
    _check(cfg, given, algorithm_type)
    device, grpo = pick_device(cfg.device), cfg.algorithm
    check_rollout_fits(cfg)
    env = make_env(
        cfg.env,
        grouped=algorithm_type.grouped,
        env=given.env,
        on_error="raise" if not isinstance(grpo, GRPOCfg) or grpo.collection.on_env_error == "raise" else "report",
        reward_parts=cfg.algorithm.reward_parts,
        device=device,
    )
    policy = build_policy(cfg, env, given, algorithm_type).to(device)
    initialized = "" if restored or cfg.policy.init_from is None else initialize(policy, cfg.policy.init_from)
    cfg = _with_max_length(_with_horizon(cfg, env), env, policy.num_units)
    of_algorithm, of_collector = fast_paths(cfg, engine.world_size)
    algorithm = algorithm_type(cfg.algorithm, policy, engine, seed=derive_seed(cfg.seed, "algorithm"), **of_algorithm)
    if isinstance(cfg.algorithm, BCCfg):
        collector = pkgutil.resolve_name(f"{CLONING}:demo_collector")(
            cfg, env, policy, engine, read=not restored, fit_normalizers=given.policy is None and not initialized
        )
    else:
        collector = _build_collector(cfg, env, policy, engine, **of_collector)
    buffer = RolloutBuffer(
        env.num_envs,
        cfg.algorithm.num_steps,
        obs_spec=env.obs_spec,
        action_spec=policy.action_spec,
        state_size=policy.state_size,
        num_units=policy.num_units if policy.scored_by == "token" else None,
        value=not policy.actor_only,
        chunked=cfg.env.action_chunk > 1,
        reward_parts=len(cfg.algorithm.reward_parts),
        on_nonfinite=cfg.algorithm.on_nonfinite,
        device=device,
    )
    check_rollout_fits(cfg, buffer.slot_bytes, device)
    identity = Identity(env.env_id, str(env.observation_space), str(env.action_space))
    return EnvComponents(cfg, given, algorithm, collector, buffer, identity, env, initialized)


def fast_paths(cfg: RunCfg, world_size: int = 1) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arguments of the algorithm and the collector that speed up a run: flat parameters, acting in NumPy, what pays to compile."""
    fast, stops = cfg.speed == "auto", cfg.algorithm.on_nonfinite == "stop"
    act: MakeActor = numpy_actor if fast else lambda policy: policy.act
    actor = act if stops else lambda policy: acting_on_finite(act(policy))
    of_algorithm: dict[str, Any] = {}
    of_collector: dict[str, Any] = {"actor": actor}
    if not fast:
        return of_algorithm, of_collector
    of_algorithm["optimizer"] = flat_adam
    steps, rows = cfg.expected_steps(world_size), cfg.env.num_envs * world_size
    elements = rows * cfg.algorithm.num_steps
    minibatches = max(1, round(elements / (cfg.algorithm.minibatch_size or elements)))
    if steps // elements * cfg.algorithm.num_epochs * minibatches >= compile.WORTH_STEPS:
        of_algorithm["gradient"] = compile.compiled_gradient
    if stops and steps // rows >= rollouts.WORTH_STEPS:  # else actions are replaced on their way to the environment
        of_collector["stepper"] = rollouts.compiled_stepper
    return of_algorithm, of_collector


def build_policy(cfg: RunCfg, env: VectorEnv, given: UserObjects, algorithm_type: type[BaseAlgorithm]) -> Policy:
    """The policy that was given, or a new one whose weights follow from the run's seed."""
    if given.policy is not None:
        return given.policy
    # orthogonal weights come out differently on another number of threads
    with threads(1), torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(cfg.seed, "policy"))
        chunked = cfg.env.action_chunk > 1 and type(cfg.policy) is PolicyCfg
        kind: Any = CHUNK_POLICY if chunked else cfg.policy.policy
        kind = pkgutil.resolve_name(kind) if isinstance(kind, str) else kind
        made: Policy = kind(
            env.observation_space,
            env.action_space,
            cfg.policy,
            actor_only=algorithm_type.actor_only,
            gamma=cfg.algorithm.gamma,
        )
        return made


def _check(cfg: RunCfg, given: UserObjects, algorithm_type: type[BaseAlgorithm]) -> None:
    if cfg.env.id == GIVEN and given.env is None:
        raise ConfigError("the environment was given in Python; fix: give it again as env=...")
    if cfg.evaluation.interval is not None and separate_env(cfg.env, given.env) is None:
        raise no_second_env(given.env)
    if given.policy is not None and given.policy.actor_only and not algorithm_type.actor_only:
        raise ConfigError(
            f"{cfg.algorithm.name} needs a critic, and the given policy is actor_only; fix: actor_only=False"
        )
    if algorithm_type.grouped and not isinstance(cfg.algorithm, GRPOCfg):
        raise ConfigError(
            f"{algorithm_type.__name__} is grouped, but {type(cfg.algorithm).__name__} has no group_size; "
            "fix: derive the config from GRPOCfg"
        )


def _with_horizon(cfg: RunCfg, env: VectorEnv) -> RunCfg:
    """The config with a horizon, where whole groups are collected and nothing else ends their episodes."""
    if not isinstance(cfg.algorithm, GRPOCfg) or env.max_episode_steps is not None:
        return cfg
    collection = cfg.algorithm.collection
    if collection.horizon is not None or collection.partial_groups != "complete":
        return cfg
    collection = collection.model_copy(update={"horizon": DEFAULT_HORIZON})
    return cfg.model_copy(update={"algorithm": cfg.algorithm.model_copy(update={"collection": collection})})


def _with_max_length(cfg: RunCfg, env: VectorEnv, num_units: int) -> RunCfg:
    """The config with the longest episode filled in, in units, where the loss divides by it and it is not set."""
    horizon = cfg.algorithm.collection.horizon if isinstance(cfg.algorithm, GRPOCfg) else None
    longest = horizon or env.max_episode_steps
    longest = None if longest is None else longest * num_units
    return cfg.model_copy(update={"algorithm": with_max_length(cfg.algorithm, longest)})


def _build_collector(
    cfg: RunCfg,
    env: VectorEnv,
    policy: Policy,
    engine: Engine,
    *,
    actor: MakeActor | None = None,
    stepper: MakeStepper | None = None,
) -> Collector:
    algorithm = cfg.algorithm
    shared: dict[str, Any] = {"seed": cfg.seed, "rank": engine.rank, "actor": actor}
    if not isinstance(algorithm, GRPOCfg) or not isinstance(env, GroupEnv):
        if isinstance(env, TorchGroupEnv) and not policy.state_size:
            return TorchVectorCollector(env, policy, stepper=stepper, **shared)
        return VectorCollector(env, policy, **shared)
    greedy_members = algorithm.credit.baseline.greedy_members
    shared |= {"group_size": algorithm.group_size, "collection": algorithm.collection}
    if algorithm.collection.partial_groups == "complete":
        return GroupCollector(env, policy, greedy_members=greedy_members, **shared)
    if greedy_members:
        raise ConfigError(
            "collection.partial_groups='truncate' excludes credit.baseline='greedy'; fix: partial_groups='complete'"
        )
    if not isinstance(env, TorchGroupEnv):
        raise ConfigError(
            f"collection.partial_groups='truncate' needs an environment in torch, and {env.env_id} is none; "
            f"fix: {torch_fix(env.env_id)}collection.partial_groups='complete'"
        )
    return TorchGroupCollector(env, policy, stepper=stepper, **shared)
