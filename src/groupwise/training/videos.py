"""Videos during training."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from groupwise.system import files
from groupwise.training.base import Callback
from groupwise.training.evaluation import EvaluationResult

if TYPE_CHECKING:
    from groupwise.training.trainer import Trainer


class Videos(Callback):
    """Films an episode after every ``interval`` evaluations.

    Args:
        film: writes a video to a path.
        folder: of the videos.
    """

    def __init__(self, film: Callable[[Path], None], interval: int, folder: Path) -> None:
        self.film = film
        self.interval = interval
        self.folder = folder
        self.evaluations = 0

    def on_evaluation_end(self, trainer: "Trainer", evaluation: EvaluationResult) -> None:
        """Film when it is time."""
        self.evaluations += 1
        if self.evaluations % self.interval:
            return
        with files.warning_if_unwritable(self.folder):
            self.folder.mkdir(exist_ok=True)
            self.film(self.folder / f"step_{trainer.env_steps}.gif")

    def state_dict(self) -> dict[str, Any]:
        """How many evaluations there were."""
        return {"evaluations": self.evaluations}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore it."""
        self.evaluations = int(state["evaluations"])
