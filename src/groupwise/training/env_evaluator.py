"""Evaluation of a run's policy in environments of its own."""

from typing import Literal

from groupwise.config.algorithm import GRPOCfg
from groupwise.config.env import EnvCfg
from groupwise.config.run import RunCfg
from groupwise.envs.base import GroupEnv, GroupStartReport
from groupwise.envs.make import make_env
from groupwise.errors import ConfigError
from groupwise.policies.base import Policy
from groupwise.training.components import Evaluator, UserObjects
from groupwise.training.evaluation import MAX_STEPS, EvaluationResult, evaluate_policy

MAX_EVALUATION_ENVS = 128
_MAKE_VEC_KWARGS = {"num_envs", "vectorization_mode", "vector_kwargs"}
"""What ``gymnasium.make_vec`` records among an environment's own arguments."""


class EnvEvaluator(Evaluator):
    """Plays episodes in environments of its own, made when first needed.

    Args:
        seed: of the episodes; the same ones at each call, so that two evaluations differ by the policy alone.
    """

    def __init__(
        self, cfg: RunCfg, given: UserObjects, policy: Policy, *, episodes: int, deterministic: bool, seed: int
    ) -> None:
        self.cfg = cfg
        self.given = given
        self.policy = policy
        self.episodes = episodes
        self.deterministic = deterministic
        self.seed = seed
        self._start_mode: Literal["auto", "fresh"] = "auto"
        self._env: GroupEnv | None = None

    def start_as(self, report: GroupStartReport | None) -> None:
        """Start each episode in a fresh environment where a used one was found to start elsewhere.

        Else a resumed run, whose environments are fresh, would come to other scores than an uninterrupted one.
        """
        if report is not None and report.start_mode == "fresh":
            self._start_mode = "fresh"

    def __call__(self) -> EvaluationResult:
        """Play the episodes."""
        env, algorithm = self.prepare(), self.cfg.algorithm
        window = algorithm.collection.horizon if isinstance(algorithm, GRPOCfg) else None
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

    def close(self) -> None:
        """Free the environments."""
        if self._env is not None:
            self._env.close()

    def _make_env(self) -> GroupEnv:
        separate = separate_env(self.cfg.env, self.given.env)
        if separate is None:
            raise no_second_env(self.given.env)
        cfg, source = separate
        processes = cfg.num_envs if cfg.vectorization == "async" else MAX_EVALUATION_ENVS
        num_envs = min(self.episodes, processes)
        cfg = cfg.model_copy(update={"start_mode": self._start_mode})
        return make_env(cfg, grouped=True, num_envs=num_envs, env=source, verify=False, device=self.policy.device)


def separate_env(cfg: EnvCfg, env: object | None) -> tuple[EnvCfg, object | None] | None:
    """What ``make_env`` needs for environments apart from the training ones, whose rows start one by one.

    None if a ``GroupEnv`` was given, or a vector environment that Gymnasium cannot make again.
    """
    import gymnasium

    if isinstance(env, GroupEnv):
        return None

    vectorization = "auto" if cfg.vectorization == "entry_point" else cfg.vectorization
    plain = {"start_mode": "auto", "num_random_noops": 0, "reward_parts": ()}
    cfg = cfg.model_copy(update={**plain, "vectorization": vectorization})
    if not isinstance(env, gymnasium.vector.VectorEnv):
        return cfg, env
    wrapped = env is not env.unwrapped or "wrappers" in (env.spec.kwargs if env.spec else {})
    if env.spec is None or wrapped:
        return None
    kwargs = {key: value for key, value in env.spec.kwargs.items() if key not in _MAKE_VEC_KWARGS}
    return cfg.model_copy(update={"id": env.spec.id, "kwargs": kwargs}), None


def no_second_env(env: object) -> ConfigError:
    """What to say where evaluation needs an environment that cannot be made again."""
    return ConfigError(
        f"{type(env).__name__} cannot be made a second time for evaluation; fix: leave evaluation.interval out, or give "
        "an id, a callable that returns one gymnasium.Env, or one with a parameter num_envs that returns a GroupEnv"
    )
