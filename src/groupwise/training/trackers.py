"""Trackers: where metrics go besides ``metrics.jsonl``. Each has a thread of its own, so none delays or ends training."""

import logging
import os
from collections.abc import Mapping
from queue import Full, Queue
from threading import Thread
from typing import Any, Protocol, runtime_checkable

import torch

from groupwise.config.run import TensorBoardCfg, TrackedRun, TrackerCfg, WandBCfg
from groupwise.data.rollout import TensorDict
from groupwise.errors import ConfigError, require_count, require_extra
from groupwise.report.folder import RunFolder
from groupwise.system import printable, show
from groupwise.training.trainer import Callback, Trainer

log = logging.getLogger(__name__)

_MAX_WAITING = 10_000
"""Iterations that wait for a slow tracker."""
_SECONDS_TO_OPEN = 20.0
_SECONDS_TO_CLOSE = 30.0
_SECONDS_AFTER_INTERRUPT = 5.0


@runtime_checkable
class Tracker(Protocol):
    """Receives the metrics of a run. May raise any error, and take its time."""

    def open(self, step: int) -> None:
        """Begin after ``step`` environment steps: more than 0 in a resumed run."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """The metrics of one iteration."""

    def close(self) -> None:
        """Send the rest."""


class Report(Callback):
    """Passes the metrics on to a tracker. An error of the tracker is one warning, and training continues without it."""

    def __init__(self, name: str, tracker: Tracker) -> None:
        self.name = name
        self.tracker = tracker
        self._seconds = _SECONDS_TO_CLOSE
        self._waiting: Queue[tuple[dict[str, float], int] | None] = Queue(_MAX_WAITING)
        self._thread: Thread | None = None
        self._sent = 0

    def on_training_start(self, trainer: Trainer) -> None:
        """Begin after the iterations of a resumed run."""
        self._sent = trainer.iteration
        self._thread = Thread(target=self._work, args=(trainer.env_steps,), name=f"groupwise {self.name}", daemon=True)
        self._thread.start()
        if trainer.metrics:  # of an evaluation that was made up for
            self._put((dict(trainer.metrics), trainer.env_steps))

    def on_iteration_end(self, trainer: Trainer, rollout: TensorDict, metrics: dict[str, float]) -> None:
        """Leave the metrics to the tracker's thread."""
        self.on_training_end(trainer)

    def on_training_end(self, trainer: Trainer) -> None:
        """Send the last complete iteration, unless it is sent."""
        if trainer.iteration != self._sent:
            self._sent = trainer.iteration
            self._put((dict(trainer.metrics), trainer.env_steps))

    def on_interrupt(self, trainer: Trainer) -> None:
        """Send the iteration after which a callback failed, and wait less: the user interrupts."""
        self.on_training_end(trainer)
        self._seconds = _SECONDS_AFTER_INTERRUPT

    def close(self) -> None:
        """Wait until everything is sent, but not for long."""
        self._put(None)
        if self._thread is not None:
            self._thread.join(self._seconds)
            if self._thread.is_alive():
                self._warn(f"it is still busy after {self._seconds:g} s")

    def _put(self, item: tuple[dict[str, float], int] | None) -> None:
        if self._thread is not None and self._thread.is_alive():
            try:
                self._waiting.put_nowait(item)
            except Full:
                self._warn(f"{_MAX_WAITING:,} iterations wait for it")
                self._thread = None

    def _work(self, step: int) -> None:
        try:
            self.tracker.open(step)
            try:
                while (item := self._waiting.get()) is not None:
                    self.tracker.log(*item)
            finally:
                self.tracker.close()
        except BaseException as error:  # no error of a tracker may end training
            self._warn(f"{type(error).__name__}: {error}")

    def _warn(self, why: str) -> None:
        log.warning("%s gets no more metrics (%s); training goes on, metrics.jsonl has all", self.name, printable(why))


class TensorBoard:
    """Writes events into ``tensorboard/`` of the run folder.

    Raises:
        MissingExtraError: it is not installed.
    """

    def __init__(self, cfg: TensorBoardCfg, run: TrackedRun) -> None:
        self.folder = RunFolder(run.folder).tensorboard
        self._writer: Any = None

    def open(self, step: int) -> None:
        """Open the event file."""
        require_extra("tensorboard", "track")
        from torch.utils.tensorboard import SummaryWriter

        # purge_step hides entries that a killed run wrote after its last checkpoint
        self._writer = SummaryWriter(str(self.folder), purge_step=step + 1)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Write every number."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Close the event file."""
        self._writer.close()


class WandB:
    """Sends to Weights & Biases, or keeps the run on disk where its mode is offline.

    Raises:
        MissingExtraError: it is not installed.
        ConfigError: there is no API key.
    """

    def __init__(self, cfg: WandBCfg, run: TrackedRun) -> None:
        self.cfg = cfg
        self.run = run
        self._run: Any = None

    def open(self, step: int) -> None:
        """Open the run, or continue it."""
        require_extra("wandb", "track")
        import wandb

        cfg, theirs = self.cfg, wandb.setup().settings  # WANDB_* variables and wandb's settings files
        # wandb itself would ask on the terminal, in the middle of training
        if (cfg.mode or theirs.mode) == "online" and not wandb.login(prompt=False):
            raise ConfigError("no API key; fix: wandb login, or mode='offline' (WANDB_MODE=offline)")
        settings = wandb.Settings(
            init_timeout=_SECONDS_TO_OPEN,
            finish_timeout=_SECONDS_TO_CLOSE,
            console="off",
            disable_git=True,  # the repository may be a stranger's
        )
        self._run = wandb.init(
            project=cfg.project or theirs.project or "groupwise",
            name=cfg.run_name or theirs.run_name or self.run.folder.name,
            id=theirs.run_id or self.run.run_id,
            dir=os.environ.get("WANDB_DIR", str(self.run.folder)),
            config=self.run.settings, resume="allow", settings=settings,
            entity=cfg.entity, group=cfg.group, tags=cfg.tags, mode=cfg.mode,
        )  # fmt: skip

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Send every number."""
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


def make_tracker(cfg: TrackerCfg, run: TrackedRun) -> Tracker:
    """The tracker that settings describe: a built-in one, or their own ``build``."""
    if type(cfg).build is TrackerCfg.build and isinstance(cfg, WandBCfg | TensorBoardCfg):
        return WandB(cfg, run) if isinstance(cfg, WandBCfg) else TensorBoard(cfg, run)
    tracker: Tracker = cfg.build(run)
    return tracker


# Traces of some iterations by torch.profiler


class Profiler(Callback):
    """Records iterations with ``torch.profiler``, from the second one of this process on, which is the first at full speed.

    Writes ``trace.json``, for https://ui.perfetto.dev, and ``operators.txt``, the slowest operators, into ``profile/`` of
    the run folder; of several processes each has files of its own.

    Args:
        iterations: how many.
    """

    def __init__(self, iterations: int = 3) -> None:
        require_count("iterations", iterations)
        self.iterations = iterations
        self._profile: torch.profiler.profile | None = None
        self._recorded = 0
        self._suffix = ""

    def on_training_start(self, trainer: Trainer) -> None:
        """Begin: the first iteration is the warm-up."""
        if trainer.run_dir is None:
            raise ConfigError("Profiler writes into the run folder; fix: Trainer(..., run_dir=...)")
        self._folder, self._recorded = trainer.run_dir / "profile", -1
        self._suffix = f"-{trainer.engine.rank}" if trainer.engine.world_size > 1 else ""
        steps = torch.profiler.schedule(wait=0, warmup=1, active=self.iterations, repeat=1)
        self._profile = torch.profiler.profile(schedule=steps, on_trace_ready=self._write)
        self._profile.start()

    def on_iteration_end(self, trainer: Trainer, rollout: TensorDict, metrics: dict[str, float]) -> None:
        """Go on to the next iteration; after the last one to record, write."""
        if self._profile is not None:
            self._recorded += 1
            self._profile.step()

    def close(self) -> None:
        """Write the recorded part, if training ended earlier."""
        if self._profile is not None:
            self._profile.stop()
            if self._recorded < 1:
                show("no profile: no iteration ended after the first, the warm-up; fix: train longer", to="stderr")

    def _write(self, profile: torch.profiler.profile) -> None:
        if self._recorded < 1:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        trace = self._folder / f"trace{self._suffix}.json"
        profile.export_chrome_trace(str(trace))
        table = profile.key_averages().table(sort_by="self_cpu_time_total", row_limit=40)
        (self._folder / f"operators{self._suffix}.txt").write_text(table, encoding="utf-8")
        show(f"Profile of {self._recorded} iterations: {trace} (open it in https://ui.perfetto.dev)", to="stderr")
