"""The video of a run's policy."""

from pathlib import Path

from groupwise.config.run import RunCfg
from groupwise.policies.base import Policy
from groupwise.report.video import NoPictureError, film
from groupwise.seeding import derive_seed
from groupwise.training.components import UserObjects
from groupwise.training.env_evaluator import separate_env


def record(cfg: RunCfg, given: UserObjects, policy: Policy, path: Path, seed: int) -> None:
    """Write an episode of the greedy policy.

    Raises:
        NoPictureError: the environment does not render to arrays, or cannot be made a second time.
        EnvError: its renderer failed.
    """
    if (separate := separate_env(cfg.env, given.env)) is None:
        raise NoPictureError("no video: the environment was given ready-made; fix: give an id or a callable")
    film(policy, *separate, path, seed=derive_seed(seed, "video"))
