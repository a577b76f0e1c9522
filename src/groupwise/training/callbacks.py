"""Built-in callbacks: evaluate, check, track, show, stop; those that save are in ``saving``.

``build_callbacks`` orders them: logs have what others add to the metrics, the last iteration is evaluated, and a
checkpoint covers what the logs hold.
"""

import logging
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tensordict import TensorDict

from groupwise.config.algorithm import BCCfg
from groupwise.config.run import EvaluationMetric, SamplerMismatchCfg
from groupwise.config.trackers import TrackedRun
from groupwise.errors import SamplerMismatchError
from groupwise.report.folder import RunFolder
from groupwise.report.scores import SCORES
from groupwise.system import files
from groupwise.system.terminal import SafeStream, printable
from groupwise.training.base import Callback
from groupwise.training.checkpoint import Checkpoint, Identity, has_checkpoint, save_checkpoint
from groupwise.training.components import Components, Evaluator
from groupwise.training.evaluation import EvaluationResult
from groupwise.training.groups import KeepGroups
from groupwise.training.saving import LogSaveTime, MetricsLog, SaveCheckpoints, check_weights
from groupwise.training.trackers import Report

if TYPE_CHECKING:
    from rich.console import Console

    from groupwise.training.trainer import Trainer

log = logging.getLogger(__name__)


def build_callbacks(
    parts: Components, folder: RunFolder, users: Sequence[Callback], evaluator: Evaluator | None, rank: int
) -> list[Callback]:
    """The user's callbacks and those of the settings, in their order; only the user's on ranks above 0."""
    if rank != 0:
        return [*users]
    cfg, stop, logging = parts.cfg, parts.cfg.stop, parts.cfg.logging
    built = [*users, *parts.own_callbacks(folder)]
    if stop.time_limit is not None:
        built.append(TimeLimit(stop.time_limit))
    if evaluator is not None:
        interval = cfg.evaluation.interval
        built.append(Evaluate(evaluator, interval, folder.best, parts.identity, parts.metric))
    if stop.threshold is not None:
        built.append(StopAtScore(stop.threshold, parts.metric))
    if cfg.evaluation.num_logged_groups and not isinstance(cfg.algorithm, BCCfg):
        built.append(KeepGroups(folder.groups, cfg.evaluation.interval, cfg.evaluation.num_logged_groups))
    settings = cfg.model_dump(mode="json")
    saves = SaveCheckpoints(folder.latest, cfg.checkpoint_interval, parts.identity, cfg.keep_checkpoints, settings)
    built += [LogSaveTime(saves), MetricsLog(folder.metrics)]
    if logging.report_to:
        run = TrackedRun(folder.path, folder.read_provenance()["run_id"], settings)
        built += [Report(tracker.name, tracker.build(run)) for tracker in logging.report_to]
    if logging.progress != "none":
        title = f"{parts.identity.env_id} | {cfg.algorithm.name.upper()} | seed {cfg.seed} | {folder.path}"
        built.append(Progress(logging.progress, title="\n".join([title, *parts.notes()])))
    return [*built, saves]


class CheckSamplerMismatch(Callback):
    """Warns once, and then stops the run, when the KL between sampler and trainer is too large.

    Args:
        fix: what the user can do.
    """

    def __init__(self, cfg: SamplerMismatchCfg, fix: str) -> None:
        self.cfg = cfg
        self.fix = fix
        self._warned = False

    def on_iteration_end(self, trainer: "Trainer", rollout: TensorDict, metrics: dict[str, float]) -> None:
        """Check the KL of this iteration's first minibatch."""
        self.check(metrics, trainer.iteration)

    def check(self, metrics: Mapping[str, float], iteration: int) -> None:
        """Warn, or raise a ``SamplerMismatchError``."""
        found = metrics.get("rollout/sampler_kl", 0.0)
        if found > min(self.cfg.warn, self.cfg.stop or self.cfg.warn):
            self._tell(found, iteration)

    def _tell(self, found: float, iteration: int) -> None:
        differ = f"sampler and trainer differ: KL {found:.3g} nats in iteration {iteration}, more than"
        if self.cfg.stop is not None and found > self.cfg.stop:
            raise SamplerMismatchError(f"{differ} {self.cfg.stop:g}; fix: {self.fix}")
        if not self._warned:
            self._warned = True
            log.warning("%s %g; fix: %s", differ, self.cfg.warn, self.fix)


class Evaluate(Callback):
    """Evaluates regularly and after the last iteration; keeps the weights of the best evaluation.

    Args:
        evaluate: plays the episodes.
        interval: environment steps between evaluations. None: a tenth of the budget.
        best: folder for the policy with the highest score so far.
        metric: the score.

    Raises:
        EnvError: ``metric`` is the success rate, and the environment does not say.
    """

    def __init__(
        self,
        evaluate: Callable[[], EvaluationResult],
        interval: int | None,
        best: Path,
        identity: Identity,
        metric: EvaluationMetric = "return",
    ) -> None:
        self.evaluate = evaluate
        self.interval = interval
        self.best = best
        self.identity = identity
        self.metric = metric
        self.best_score: float | None = None

    def on_training_start(self, trainer: "Trainer") -> None:
        """A score whose checkpoint is not there, as in a fork, is forgotten."""
        if not has_checkpoint(self.best):
            self.best_score = None

    def on_iteration_end(self, trainer: "Trainer", rollout: TensorDict, metrics: dict[str, float]) -> None:
        """Add ``eval/*`` to the metrics when it is time."""
        if trainer.passed(self.interval) or trainer.is_done():
            self._evaluate(trainer, metrics)

    def _evaluate(self, trainer: "Trainer", metrics: dict[str, float]) -> None:
        start = time.perf_counter()
        result = self.evaluate()
        metrics |= result.metrics() | {"time/evaluate_seconds": time.perf_counter() - start}
        score = result.score(self.metric)
        if self.best_score is None or score > self.best_score:
            counters = {
                "iteration": trainer.iteration,
                "env_steps": trainer.env_steps,
                "epochs": trainer.counts["epochs"],
                "position": trainer.collector.position,
                SCORES[self.metric]: score,
            }
            check_weights(trainer)
            with files.warning_if_unwritable(self.best):
                save_checkpoint(self.best, Checkpoint(trainer.algorithm.policy.state_dict(), counters), self.identity)
                self.best_score = score
        for callback in trainer.callbacks:
            callback.on_evaluation_end(trainer, result)

    def state_dict(self) -> dict[str, Any]:
        """The best score so far."""
        return {"best_score": self.best_score}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the best score."""
        best = state["best_score"]
        self.best_score = None if best is None else float(best)


class StopAtScore(Callback):
    """Stops when an evaluation's score reaches ``threshold``."""

    def __init__(self, threshold: float, metric: EvaluationMetric = "return") -> None:
        self.threshold = threshold
        self.metric = metric

    def on_evaluation_end(self, trainer: "Trainer", evaluation: EvaluationResult) -> None:
        """Stop if the score is reached."""
        score = evaluation.score(self.metric)
        if score >= self.threshold:
            trainer.stop(f"score: {self.metric} {score:.6g} reached the threshold {self.threshold:g}")


class TimeLimit(Callback):
    """Stops after ``seconds`` of this process's training, evaluations included."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._start = 0.0

    def on_training_start(self, trainer: "Trainer") -> None:
        """Start the clock."""
        self._start = time.perf_counter()

    def on_iteration_end(self, trainer: "Trainer", rollout: TensorDict, metrics: dict[str, float]) -> None:
        """Stop if time is over."""
        if time.perf_counter() - self._start >= self.seconds:
            trainer.stop(f"time: the limit of {self.seconds:g} s is over")


class Progress(Callback):
    """Shows progress: a live bar, or a line every ``interval`` seconds and at the end.

    Args:
        mode: ``auto`` is the bar on a terminal and lines elsewhere; ``iterations`` is a line for each.
        title: printed first.
    """

    def __init__(
        self,
        mode: Literal["auto", "bar", "lines", "iterations"],
        interval: float = 5.0,
        title: str = "",
        console: "Console | None" = None,
    ) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        stderr: Any = SafeStream(sys.stderr)
        self.console = console or Console(file=stderr)
        self.interval = 0.0 if mode == "iterations" else interval
        self.title = title
        columns = (BarColumn(15), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
        self.live = mode == "bar" or (mode == "auto" and self.console.is_terminal)
        self.bar = Bar(*columns, console=self.console, refresh_per_second=5)
        self._shown = 0.0
        self._evaluation: EvaluationResult | None = None

    def on_training_start(self, trainer: "Trainer") -> None:
        """Print the title, and show the empty bar."""
        self._shown = time.perf_counter()
        if self.title:
            self._print(self.title)
        if self.live:
            self._task = self.bar.add_task("", total=trainer.budget.total)
            self.bar.update(self._task, completed=trainer.done)
            self.bar.start()

    def on_evaluation_end(self, trainer: "Trainer", evaluation: EvaluationResult) -> None:
        """Keep the score for the next line."""
        self._evaluation = evaluation

    def on_iteration_end(self, trainer: "Trainer", rollout: TensorDict, metrics: dict[str, float]) -> None:
        """Move the bar, or print a line when it is time."""
        if self.live:
            done = min(trainer.done, trainer.budget.total)
            self.bar.update(self._task, completed=done, description=" ".join(self._text(metrics).split()))
        elif trainer.is_done() or time.perf_counter() - self._shown >= self.interval:
            self._shown = time.perf_counter()
            self._print_line(trainer, metrics)

    def _print_line(self, trainer: "Trainer", metrics: Mapping[str, float]) -> None:
        done, total = min(trainer.done, trainer.budget.total), trainer.budget.total
        left = int((total - done) * trainer.seconds / max(done, 1e-9))
        steps = f"{round(trainer.done, 2):>12,} / {total:,} {trainer.budget.unit}"
        self._print(f"{done / total:5.0%}{steps}   {self._text(metrics)}   {left // 60}:{left % 60:02} left")

    def close(self) -> None:
        """Leave the terminal as it was."""
        if self.live:
            self.bar.stop()

    def _text(self, metrics: Mapping[str, float]) -> str:
        parts = []
        if "rollout/return_mean" in metrics:
            parts.append(f"return {_score(metrics['rollout/return_mean'])}")
        if "rollout/success_rate" in metrics:
            parts.append(f"success {metrics['rollout/success_rate']:4.0%}")
        if self._evaluation is not None:
            parts.append(f"eval {_score(self._evaluation.return_mean)}")
            if self._evaluation.success_rate is not None:
                parts.append(f"eval success {self._evaluation.success_rate:4.0%}")
        speed = metrics["time/steps_per_second"]
        rate = f"{speed / 1000:.1f}k" if speed >= 1000 else f"{speed:.0f}"
        return "   ".join([*parts, f"{rate} steps/s"])

    def _print(self, line: str) -> None:
        self.console.print(printable(line), highlight=False, markup=False, emoji=False, soft_wrap=True)
        self.console.file.flush()


def _score(value: float) -> str:
    """One decimal for large returns, three for small ones."""
    return f"{value:8.1f}" if abs(value) >= 10 else f"{value:8.3f}"
