"""The parts of a run, shared by environments and texts, and its callbacks."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch

from groupwise.algorithms.base import BaseAlgorithm
from groupwise.collectors.vector import Collector
from groupwise.config.base import Cfg
from groupwise.config.run import EvaluationMetric, RunCfg, TextRunCfg
from groupwise.data.rollout import RolloutBuffer
from groupwise.errors import ConfigError
from groupwise.policies.base import Policy
from groupwise.report.folder import RunFolder
from groupwise.training.checkpoint import Identity
from groupwise.training.evaluation import EvaluationResult
from groupwise.training.trainer import Callback


class UserObjects(NamedTuple):
    """Python objects that the user gave in place of settings."""

    env: object | None = None
    """A callable, a ``VectorEnv`` or a ``gymnasium.vector.VectorEnv``."""
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
        """The objects by name, when a run is loaded or resumed.

        Raises:
            ConfigError: one is no object of a run, but perhaps a setting.
        """
        for name, value in objects.items():
            if name not in (*cls._fields, *RunCfg.model_fields, *TextRunCfg.model_fields):
                raise ConfigError(
                    f"unknown argument {name!r}; fix: one of the function's own, or {', '.join(cls._fields)}"
                )
            if name not in cls._fields or (name in ("env", "policy") and isinstance(value, str | Mapping | Cfg)):
                raise ConfigError(
                    f"{name} = {value!r:.80}: a run is given its Python objects again ({', '.join(cls._fields)}), and has its "
                    f"settings; fix: leave it out, or change a setting in a new run: gw.fork(run, new_folder, {name}=...)"
                )
        return cls(**objects)

    def as_arguments(self) -> dict[str, Any]:
        """The objects that were given, by name."""
        return {name: value for name, value in self._asdict().items() if value is not None}

    def names(self) -> list[str]:
        """The names of the objects that were given."""
        return list(self.as_arguments())


class Evaluator(ABC):
    """Evaluates a policy apart from training, in the same way at each call."""

    @abstractmethod
    def __call__(self) -> EvaluationResult:
        """Scores of the policy as it is now."""

    @abstractmethod
    def close(self) -> None:
        """Free its resources."""


@dataclass(frozen=True)
class Components(ABC):
    """The parts of a run."""

    kind: ClassVar[str] = "env"
    """Key of what was trained on in the summary."""
    axes: ClassVar[tuple[str, str]] = ("environment steps", "episode return")
    """Labels of the learning curve."""

    cfg: RunCfg | TextRunCfg
    """The settings, completed by what the environment or the data determines."""
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
        """What makes an evaluation the best one."""
        return "return"

    @abstractmethod
    def evaluator(self) -> Evaluator | None:
        """The evaluator of training; None if there can be none."""

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

    def render_groups(self, folder: RunFolder) -> None:  # noqa: B027  likewise
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
