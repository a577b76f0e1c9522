"""Records a video of the policy. Raises only if the user asked for it."""

import logging
from pathlib import Path

from groupwise.config.run import RunCfg
from groupwise.errors import EnvError
from groupwise.policies.base import Policy
from groupwise.report.video import NoPictureError, film
from groupwise.seeding import derive_seed
from groupwise.training.components import UserObjects
from groupwise.training.env_evaluator import separate_env

log = logging.getLogger(__name__)


def record(cfg: RunCfg, given: UserObjects, policy: Policy, path: Path, seed: int) -> None:
    """Write an episode of the greedy policy.

    Raises:
        NoPictureError: the environment does not render to arrays, or cannot be made a second time.
        EnvError: its renderer failed.
    """
    if (separate := separate_env(cfg.env, given.env)) is None:
        raise NoPictureError("no video: the environment was given ready-made; fix: give an id or a callable")
    film(policy, *separate, path, seed=derive_seed(seed, "video"))


def record_if_possible(cfg: RunCfg, given: UserObjects, policy: Policy, path: Path, seed: int) -> None:
    """Write an episode of the greedy policy, or log why that is impossible."""
    try:
        record(cfg, given, policy, path, seed)
    except NoPictureError as error:
        log.info("%s", error)
    except EnvError as error:
        log.warning("%s", error)
