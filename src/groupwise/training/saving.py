"""Callbacks that save: checkpoints and metrics. A disk that is full or read-only ends no training."""

import json
import logging
import math
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tensordict import TensorDict

from groupwise.comparison.methods import differences
from groupwise.config.base import flat
from groupwise.config.budget import BUDGETS
from groupwise.errors import DivergedError
from groupwise.report.folder import RunFolder
from groupwise.system import files
from groupwise.training.base import Callback
from groupwise.training.checkpoint import Checkpoint, Identity, has_checkpoint, serialize, write_checkpoint

if TYPE_CHECKING:
    from groupwise.training.trainer import Trainer

log = logging.getLogger(__name__)

SAVE_SECONDS = "time/save_seconds"
_NOT_LEARNING = (
    *BUDGETS, "run_dir", "logging", "evaluation", "stop", "checkpoint_interval", "keep_checkpoints", "engine",
    "ddp_timeout",
)  # fmt: skip
"""Settings that do not change what is learned."""


class SaveCheckpoints(Callback):
    """Saves regularly and at the end, also an early one.

    A thread writes the files while training continues. A full disk gives a warning, and the checkpoint is tried again after
    the next ``interval``.

    Args:
        interval: environment steps between checkpoints. None: a tenth of the budget.
        keep: checkpoints that stay.
        settings: those of the run. They are saved, so that a resumed run notices changes.
    """

    def __init__(
        self, folder: Path, interval: int | None, identity: Identity, keep: int, settings: Mapping[str, Any]
    ) -> None:
        self.folder = folder
        self.interval = interval
        self.identity = identity
        self.keep = keep
        self.settings = dict(settings)
        self.saved_at = 0
        """Iteration of the newest checkpoint on disk."""
        self.seconds = 0.0
        """For which training waited."""
        self._thread = ThreadPoolExecutor(1, "groupwise checkpoints")
        self._writing: tuple[Future[None], int, int] | None = None
        """The checkpoint that is being written, with its iteration and environment steps."""

    def on_training_start(self, trainer: "Trainer") -> None:
        """Start from the checkpoint of a resumed run."""
        self.saved_at = trainer.iteration
        self._thread.submit(int)  # the thread starts now: when memory is short, it could not

    def on_iteration_end(self, trainer: "Trainer", rollout: TensorDict, metrics: dict[str, float]) -> None:
        """Save when it is time."""
        start = time.perf_counter()
        if self._writing is not None and self._writing[0].done():
            self._finish(trainer)
        if trainer.passed(self.interval):
            self._begin(trainer)
        self.seconds += time.perf_counter() - start

    def on_training_end(self, trainer: "Trainer") -> None:
        """Save, unless the last complete iteration is saved."""
        self._finish(trainer)
        if any(trainer.engine.gather_objects(trainer.iteration != self.saved_at)):
            self._begin(trainer)
            self._finish(trainer)

    def on_interrupt(self, trainer: "Trainer") -> None:
        """Likewise; after an error without the other ranks, or not at all if it takes them."""
        if trainer.doing == "stopping":
            self.on_training_end(trainer)
            return
        self._finish(trainer)
        if trainer.iteration != self.saved_at and not trainer.engine.sharded:
            self._begin(trainer)
            self._finish(trainer)

    def close(self) -> None:
        """Wait until everything is written."""
        self._wait()
        self._thread.shutdown()

    def _begin(self, trainer: "Trainer") -> None:
        self._finish(trainer)
        check_weights(trainer)
        content = serialize(Checkpoint(trainer.algorithm.policy.state_dict(), trainer.state_dict()))
        is_first = not has_checkpoint(self.folder)
        written = self._thread.submit(write_checkpoint, self.folder, content, self.identity, self.keep)
        self._writing = written, trainer.iteration, trainer.env_steps
        if is_first:  # later iterations show that there was one: a run that lost it does not begin again
            self._finish(trainer)

    def _finish(self, trainer: "Trainer") -> None:
        if self._wait():
            for callback in trainer.callbacks:
                callback.on_checkpoint(trainer, self.folder)

    def _wait(self) -> bool:
        """Wait for the checkpoint that is being written; whether there is a new one on disk now."""
        if self._writing is None:
            return False
        written, iteration, env_steps = self._writing
        with files.warning_if_unwritable(f"the checkpoint of step {env_steps:,}"):
            written.result()
            self.saved_at = iteration
        self._writing = None
        return self.saved_at == iteration

    def state_dict(self) -> dict[str, Any]:
        """The settings."""
        return {"settings": self.settings}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Warn of settings that are not those of the checkpoint."""
        if not (saved := state.get("settings")):
            return
        changed = [
            f"{name} from {values.get('saved')!r:.80} to {values.get('now')!r:.80}"
            for name, values in differences({"saved": flat(saved), "now": flat(self.settings)}).items()
            if name.partition(".")[0] not in _NOT_LEARNING
        ]
        if changed:
            log.warning(
                "config.json was changed since the checkpoint: %s; training continues with these values, and will not equal a "
                "run that was trained with either of them from the start",
                ", ".join(changed),
            )


class JoinCheckpoints(Callback):
    """What ranks above 0 do for ``SaveCheckpoints``: hand over their parts of the state.

    Args:
        interval: that of ``SaveCheckpoints``.
    """

    def __init__(self, interval: int | None) -> None:
        self.interval = interval

    def on_iteration_end(self, trainer: "Trainer", rollout: TensorDict, metrics: dict[str, float]) -> None:
        """When rank 0 saves."""
        if trainer.passed(self.interval):
            trainer.algorithm.state_dict()

    def on_training_end(self, trainer: "Trainer") -> None:
        """If rank 0 still has to save."""
        if any(trainer.engine.gather_objects(False)):
            trainer.algorithm.state_dict()

    def on_interrupt(self, trainer: "Trainer") -> None:
        """Likewise, unless an error came first."""
        if trainer.doing == "stopping":
            self.on_training_end(trainer)


class LogSaveTime(Callback):
    """Adds to the metrics for how long training waited for checkpoints since the last entry: they follow the log."""

    def __init__(self, saves: SaveCheckpoints) -> None:
        self.saves = saves

    def on_iteration_end(self, trainer: "Trainer", rollout: TensorDict, metrics: dict[str, float]) -> None:
        """Add the seconds."""
        metrics[SAVE_SECONDS] = metrics.get(SAVE_SECONDS, 0.0) + self.saves.seconds
        self.saves.seconds = 0.0


class MetricsLog(Callback):
    """Appends one JSON object per iteration to a file, a line at a time. What a full disk refuses is written later.

    A metric that is NaN or infinite has no value in that iteration and is left out.

    Raises:
        TypeError: a callback set a metric to something else than a number.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._logged = 0
        self.waiting: list[str] = []
        """Lines that the disk refused."""

    def on_training_start(self, trainer: "Trainer") -> None:
        """Go on after the iterations of a resumed run."""
        self._logged = trainer.iteration
        missing = trainer.iteration - len(RunFolder(self.path.parent).read_metrics())
        if missing > 0:
            log.warning("%s lacks %d of %d iterations: it was cut or changed", self.path, missing, trainer.iteration)

    def on_iteration_end(self, trainer: "Trainer", rollout: TensorDict, metrics: dict[str, float]) -> None:
        """Write a line."""
        self._log(trainer)

    def on_training_end(self, trainer: "Trainer") -> None:
        """Write the last complete iteration, if an error of another callback came first, and what waits."""
        if trainer.iteration != self._logged:
            self._log(trainer)
        elif self.waiting:
            self._write(trainer)

    on_interrupt = on_training_end

    def _log(self, trainer: "Trainer") -> None:
        self._logged = trainer.iteration
        position = {"iteration": trainer.iteration, "env_steps": trainer.env_steps}
        numbers = {k: value if type(value) is float else _to_float(k, value) for k, value in trainer.metrics.items()}
        entry = position | {name: number for name, number in numbers.items() if math.isfinite(number)} | position
        self.waiting.append(f"{json.dumps(entry)}\n")
        self._write(trainer)

    def _write(self, trainer: "Trainer") -> None:
        """Write the lines that wait, or let them wait on."""
        lines, self.waiting = self.waiting, []
        try:
            files.append(self.path, "".join(lines).encode())
        except OSError as error:
            self.waiting = lines
            if len(lines) == 1:
                files.warn_unsaved(f"metrics from iteration {trainer.iteration} on", error)


def _to_float(name: str, value: Any) -> float:
    """Also of a scalar of NumPy and of a tensor with one element."""
    try:
        if isinstance(value, str):
            raise TypeError
        return float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            f"a callback set metrics[{name!r}] to {value!r:.100}, expected a number; fix: write it to a file of your own"
        ) from error


def check_weights(trainer: "Trainer") -> None:
    """Raise a ``DivergedError`` before parameters that are not finite are saved."""
    for name, parameter in trainer.algorithm.policy.named_parameters():
        if not bool(parameter.isfinite().all()):
            raise DivergedError.because(f"{name} is not finite after iteration {trainer.iteration}")
