"""What training is made of, whatever is trained: the parts, and the loop and callbacks around them."""

import json
import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch

from groupwise import config
from groupwise.algorithms.base import BaseAlgorithm
from groupwise.collectors.base import Collector
from groupwise.config.run import CommonCfg
from groupwise.data.rollout import RolloutBuffer
from groupwise.engines.base import Engine
from groupwise.errors import ConfigError, nearest, require_extra
from groupwise.policies.base import Policy
from groupwise.report.folder import RunFolder
from groupwise.training.base import Callback, EvaluationReport
from groupwise.training.callbacks import Evaluate, MetricsLog, Progress, SaveCheckpoints, StopAtScore, TimeLimit
from groupwise.training.checkpoint import Identity
from groupwise.training.loggers import TensorBoard, WandB
from groupwise.training.trainer import Trainer

log = logging.getLogger(__name__)


class UserObjects(NamedTuple):
    """Python objects that a run was given instead of settings."""

    env: object | None = None
    """What ``make_env`` takes as ``env``: a callable, a ``GroupEnv`` or a ``gymnasium.vector.VectorEnv``."""
    policy: Policy | None = None
    data: object | None = None
    """Training prompts, as ``TextTask`` takes them."""
    eval_data: object | None = None
    """Held-out prompts, likewise."""
    reward: Any = None
    """Functions that score completions, one or several."""
    tool: Any = None
    """What a language model can call."""

    @classmethod
    def again(cls, objects: Mapping[str, Any]) -> "UserObjects":
        """Those that a run is given again by name.

        Raises:
            ConfigError: there is no such object.
        """
        if unknown := [name for name in objects if name not in cls._fields]:
            raise ConfigError(
                f"a run is given no {unknown[0]!r} again; fix: {', '.join(cls._fields)}{nearest(unknown[0], cls._fields)}"
            )
        return cls(**objects)

    def names(self) -> list[str]:
        """Which of them there are."""
        return [name for name, value in self._asdict().items() if value is not None]


class Evaluator(ABC):
    """Evaluates a policy apart from training, the same way at each call."""

    @abstractmethod
    def __call__(self) -> EvaluationReport:
        """How well the policy does as it is now."""

    @abstractmethod
    def prepare(self) -> Any:
        """Make what is needed now, so that what cannot be made is known before training begins."""

    @abstractmethod
    def close(self) -> None:
        """Free what was made."""


@dataclass(frozen=True)
class Components(ABC):
    """What training is made of."""

    kind: ClassVar[str] = "env"
    """What the run is about, as the summary says it."""
    axes: ClassVar[tuple[str, str]] = ("environment steps", "episode return")
    """What the learning curve shows."""

    cfg: CommonCfg
    """With the settings that only the environment or the data could tell."""
    given: UserObjects
    algorithm: BaseAlgorithm
    collector: Collector
    buffer: RolloutBuffer
    identity: Identity

    @property
    def policy(self) -> Policy:
        """What is trained."""
        return self.algorithm.policy

    @abstractmethod
    def evaluator(self) -> Evaluator | None:
        """What evaluates the policy in training; None if nothing can."""

    @abstractmethod
    def evaluation_interval(self) -> int | None:
        """Steps between two evaluations, if the settings say so."""

    def notes(self) -> list[str]:
        """Lines about the run for who watches it begin."""
        return []

    def summary_fields(self) -> dict[str, Any]:
        """What the summary says besides scores."""
        return {}

    def own_callbacks(self, folder: RunFolder) -> list[Callback]:
        """Callbacks that this kind of run has."""
        return []

    def render(self, folder: RunFolder, seed: int) -> None:  # noqa: B027 (not every run has pictures)
        """Leave a picture of what was trained, if that works."""

    def close(self) -> None:
        """Free what the run made for itself."""
        self.collector.close()


def build_trainer(parts: Components, callbacks: Sequence[Callback], engine: Engine) -> Trainer:
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
    parts: Components, folder: RunFolder, users: Sequence[Callback], evaluator: Evaluator | None, rank: int
) -> list[Callback]:
    """The user's callbacks and those that the settings ask for, in the order of ``callbacks.py``.

    Ranks other than 0 write and decide nothing: they have the user's.
    """
    cfg = parts.cfg
    if rank != 0:
        return [*users]
    tenth = max(1, cfg.total_steps // 10)
    stop, logging = cfg.stop, cfg.logging
    built: list[Callback] = [*users, *parts.own_callbacks(folder)]
    if stop.time_limit is not None:
        built.append(TimeLimit(stop.time_limit))
    if evaluator is not None:
        evaluator.prepare()
        built.append(Evaluate(evaluator, parts.evaluation_interval() or tenth, folder.best, parts.identity))
    if stop.return_threshold is not None:
        built.append(StopAtScore(stop.return_threshold))
    built.append(MetricsLog(folder.metrics))
    if "tensorboard" in logging.report_to:
        built.append(TensorBoard(folder.tensorboard))
    if "wandb" in logging.report_to:
        built.append(WandB(folder.path, folder.read_id(), json.loads(config.to_json(cfg))))
    if logging.progress != "none":
        title = f"{parts.identity.env_id} | {cfg.algorithm.name.upper()} | seed {cfg.seed} | {folder.path}"
        built.append(Progress(logging.progress, title="\n".join([title, *parts.notes()])))
    return [*built, SaveCheckpoints(folder.latest, cfg.checkpoint_interval or tenth, parts.identity)]


@contextmanager
def threads(number: int) -> Iterator[None]:
    """Torch on so many threads; on as many as before afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def pick_device(name: str) -> torch.device:
    """The device that a config names.

    Raises:
        ConfigError: a GPU is asked for and there is none.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"device = {name!r}, but torch finds no GPU; fix: device='cpu' or 'auto'")
    return torch.device(name)


def check_trackers(cfg: CommonCfg) -> None:
    """Refuse trackers that are not installed, before anything is built.

    Raises:
        MissingExtraError: one is not.
    """
    for package in cfg.logging.report_to:
        require_extra(package, "track")
