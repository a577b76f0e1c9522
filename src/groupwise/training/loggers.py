"""Experiment trackers: they get the metrics that ``metrics.jsonl`` holds."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from tensordict import TensorDict

from groupwise.errors import require_extra
from groupwise.training.base import Callback

if TYPE_CHECKING:
    from groupwise.training.trainer import Trainer


class TensorBoard(Callback):
    """Writes the metrics as TensorBoard events against environment steps.

    Raises:
        MissingExtraError: tensorboard is not installed.
    """

    def __init__(self, folder: Path) -> None:
        require_extra("tensorboard", "track")
        self.folder = folder
        self._writer: Any = None

    def on_training_start(self, trainer: "Trainer") -> None:
        """Open the event file."""
        from torch.utils.tensorboard import SummaryWriter

        # purge_step hides what a killed run wrote after its last checkpoint
        self._writer = SummaryWriter(str(self.folder), purge_step=trainer.env_steps + 1)

    def on_iteration_end(self, trainer: "Trainer", rollout: TensorDict, metrics: dict[str, float]) -> None:
        """Write every number."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, trainer.env_steps)

    def close(self) -> None:
        """Close the event file."""
        if self._writer is not None:
            self._writer.close()


class WandB(Callback):
    """Sends the metrics to Weights & Biases, or keeps them in the run folder with ``WANDB_MODE=offline``.

    Args:
        run_id: unique; a resumed run keeps it.

    Raises:
        MissingExtraError: wandb is not installed.
    """

    def __init__(self, folder: Path, run_id: str, config: dict[str, Any], project: str = "groupwise") -> None:
        require_extra("wandb", "track")
        self.folder = folder
        self.run_id = run_id
        self.config = config
        self.project = project
        self._run: Any = None

    def on_training_start(self, trainer: "Trainer") -> None:
        """Open the run, or go on with it."""
        import wandb

        self._run = wandb.init(
            project=self.project, id=self.run_id, name=self.folder.name, dir=str(self.folder),
            config=self.config, resume="allow",
        )  # fmt: skip

    def on_iteration_end(self, trainer: "Trainer", rollout: TensorDict, metrics: dict[str, float]) -> None:
        """Send every number."""
        self._run.log(metrics, step=trainer.env_steps)

    def close(self) -> None:
        """Finish the run."""
        if self._run is not None:
            self._run.finish()
