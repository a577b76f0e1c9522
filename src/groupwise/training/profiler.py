"""A trace of some iterations, by ``torch.profiler``."""

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from tensordict import TensorDict

from groupwise.errors import ConfigError
from groupwise.system.terminal import show
from groupwise.training.base import Callback

if TYPE_CHECKING:
    from groupwise.training.trainer import Trainer


class Profiler(Callback):
    """Records iterations with ``torch.profiler``, from the second one of this process on, which is the first at full speed.

    Writes ``trace.json``, for https://ui.perfetto.dev, and ``operators.txt``, the slowest operators, into ``profile/`` of
    the run folder; of several processes each has files of its own.

    Args:
        iterations: how many.
        folder: in place of ``profile/``; needed without a run folder.
    """

    def __init__(self, iterations: int = 3, folder: Path | str | None = None) -> None:
        if iterations < 1:
            raise ConfigError(f"iterations = {iterations}: expected at least 1")
        self.iterations = iterations
        self.folder = None if folder is None else Path(folder)
        self._profile: torch.profiler.profile | None = None
        self._suffix = ""

    def on_training_start(self, trainer: "Trainer") -> None:
        """Choose the folder, and begin: the first iteration is the warm-up."""
        if self.folder is None and trainer.run_dir is None:
            raise ConfigError("Profiler has no folder to write to; fix: Profiler(folder=...)")
        self.folder = self.folder or Path(trainer.run_dir or "", "profile")
        self._suffix = f"-{trainer.engine.rank}" if trainer.engine.world_size > 1 else ""
        steps = torch.profiler.schedule(wait=0, warmup=1, active=self.iterations, repeat=1)
        self._profile = torch.profiler.profile(schedule=steps, on_trace_ready=self._write)
        self._profile.start()

    def on_iteration_end(self, trainer: "Trainer", rollout: TensorDict, metrics: dict[str, float]) -> None:
        """Go on to the next iteration; after the last one to record, write."""
        if self._profile is not None:
            self._profile.step()

    def close(self) -> None:
        """Write what was recorded, if training ended before."""
        if self._profile is not None:
            self._profile.stop()

    def _write(self, profile: torch.profiler.profile) -> None:
        assert self.folder is not None
        self.folder.mkdir(parents=True, exist_ok=True)
        trace = self.folder / f"trace{self._suffix}.json"
        profile.export_chrome_trace(str(trace))
        table = profile.key_averages().table(sort_by="self_cpu_time_total", row_limit=40)
        (self.folder / f"operators{self._suffix}.txt").write_text(table, encoding="utf-8")
        show(f"Profile of {self.iterations} iterations: {trace} (open it in https://ui.perfetto.dev)", to="stderr")
