"""Evaluation and video of a run's policy in environments of its own."""

import logging
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

from groupwise.config.algorithm import CollectionCfg, GRPOCfg
from groupwise.config.env import EnvCfg, StartMode
from groupwise.config.run import DEFAULT_HORIZON, RunCfg
from groupwise.envs.base import GroupEnv, VectorEnv
from groupwise.envs.make import make_env
from groupwise.errors import ConfigError, DataError
from groupwise.policies.base import Policy
from groupwise.report.folder import RunFolder
from groupwise.report.replay import film_group
from groupwise.report.video import NoPictureError, film
from groupwise.seeding import derive_seed
from groupwise.training.components import Evaluator, UserObjects
from groupwise.training.evaluation import MAX_STEPS, EvaluationResult, evaluate_policy

log = logging.getLogger(__name__)

MAX_EVALUATION_ENVS = 128
_MAKE_VEC_KWARGS = {"num_envs", "vectorization_mode", "vector_kwargs"}
"""Arguments of ``gymnasium.make_vec`` that it records among those of the environment."""


class EnvEvaluator(Evaluator):
    """Plays the episodes that ``cfg.evaluation`` describes, in environments of its own.

    Args:
        seed: of the episodes. Each call plays the same ones, so two evaluations differ by the policy alone.
        fresh: start each episode in a new environment, for environments that start elsewhere when used. Else a
            resumed run would get other scores.

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
        self._collection = cfg.algorithm.collection if isinstance(cfg.algorithm, GRPOCfg) else CollectionCfg()
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
        except DataError:  # of the policy's actions; other environments would not help
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
        raise NoPictureError("no video: the environment was given ready-made; fix: give an id or a callable")
    film(policy, *separate, path, seed=derive_seed(seed, "video"))


def record_group(cfg: RunCfg, given: UserObjects, policy: Policy, folder: RunFolder, start_mode: StartMode) -> None:
    """Draw members of a group that the run kept, if its environment can be made a second time.

    Args:
        start_mode: of the group.

    Raises:
        EnvError: the renderer failed, or there is none.
    """
    if (separate := separate_env(cfg.env, given.env)) is not None:
        env_cfg, source = separate
        mode = "seed" if start_mode == "native" else start_mode  # one environment is not native
        as_in_training = {"num_random_noops": cfg.env.num_random_noops, "start_mode": mode}
        film_group(policy, env_cfg.model_copy(update=as_in_training), source, folder.groups, folder.frames)


def separate_env(cfg: EnvCfg, env: object | None) -> tuple[EnvCfg, object | None] | None:
    """What ``make_env`` needs for a second set of environments, whose rows start one by one.

    None for a ready ``VectorEnv``, or a vector environment that Gymnasium cannot make again.
    """
    import gymnasium

    if isinstance(env, VectorEnv):
        return None

    vectorization = "auto" if cfg.vectorization == "entry_point" else cfg.vectorization
    plain = {"start_mode": "auto", "num_random_noops": 0, "log_info": ()}
    cfg = cfg.model_copy(update={**plain, "vectorization": vectorization})
    if not isinstance(env, gymnasium.vector.VectorEnv):
        return cfg, env
    wrapped = env is not env.unwrapped or "wrappers" in (env.spec.kwargs if env.spec else {})
    if env.spec is None or wrapped:
        return None
    kwargs = {key: value for key, value in env.spec.kwargs.items() if key not in _MAKE_VEC_KWARGS}
    return cfg.model_copy(update={"id": env.spec.id, "kwargs": kwargs}), None


def no_second_env(env: object) -> ConfigError:
    """The error for an environment that cannot be made again."""
    return ConfigError(
        f"{type(env).__name__} cannot be made a second time for evaluation; fix: leave evaluation.interval out, or give "
        "an id, a callable that returns one gymnasium.Env, or one with a parameter num_envs that returns a GroupEnv"
    )
