"""Callbacks and evaluation reports."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from tensordict import TensorDict

if TYPE_CHECKING:
    from groupwise.training.trainer import Trainer


@runtime_checkable
class EvaluationReport(Protocol):
    """Scores of a policy in episodes of an environment, or at prompts."""

    @property
    def episodes(self) -> int:
        """How many episodes, or prompts."""

    @property
    def return_mean(self) -> float:
        """Mean return of an episode, or reward of a completion."""

    @property
    def ci95(self) -> tuple[float, float] | None:
        """95 % confidence interval of that; None for a single one."""

    def metrics(self) -> dict[str, float]:
        """``eval/*`` numbers for the log."""

    def line(self) -> str:
        """The result as a line that scripts can read."""

    def report(self) -> dict[str, Any]:
        """All of it as plain data."""


class Callback:
    """Receives training events; override what you need. Values added to ``metrics`` are logged."""

    def on_training_start(self, trainer: "Trainer") -> None:
        """Before the first iteration, also of a resumed run."""

    def on_rollout_end(self, trainer: "Trainer", rollout: TensorDict) -> None:
        """After collection, before the update. The rollout must not be changed."""

    def on_iteration_end(self, trainer: "Trainer", rollout: TensorDict, metrics: dict[str, float]) -> None:
        """After the update."""

    def on_evaluation_end(self, trainer: "Trainer", evaluation: EvaluationReport) -> None:
        """After an evaluation, before its iteration ends."""

    def on_checkpoint(self, trainer: "Trainer", path: Path) -> None:
        """After a checkpoint was written."""

    def on_training_end(self, trainer: "Trainer") -> None:
        """After the last iteration, unless an error or the user's interrupt ended the run."""

    def on_interrupt(self, trainer: "Trainer") -> None:
        """After an interrupt or an error, unless it came during the update, or is a ``DataError`` or ``DivergedError``.

        The trainer is as its last complete iteration left it. ``on_iteration_end`` may not have been called for it.
        """

    def close(self) -> None:
        """The last call, also after an error: free files and displays."""

    def state_dict(self) -> dict[str, Any]:
        """Plain data that a resumed run needs; saved in every checkpoint."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a saved ``state_dict``."""
