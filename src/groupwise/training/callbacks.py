"""Built-in callbacks: evaluate, check, track, show, stop; those that save are in ``saving``.

``build_callbacks`` orders them: logs have what others add to the metrics, the last iteration is evaluated, and a
checkpoint covers what the logs hold.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tensordict import TensorDict

from groupwise.config.algorithm import BCCfg
from groupwise.config.run import EvaluationMetric, SamplerMismatchCfg
from groupwise.config.trackers import TrackedRun
from groupwise.errors import SamplerMismatchError
from groupwise.report.folder import RunFolder
from groupwise.report.scores import SCORES
from groupwise.system import files
from groupwise.training.base import Callback
from groupwise.training.checkpoint import Checkpoint, Identity, has_checkpoint, save_checkpoint
from groupwise.training.components import Components, Evaluator
from groupwise.training.evaluation import EvaluationResult
from groupwise.training.groups import KeepGroups
from groupwise.training.saving import JoinCheckpoints, LogSaveTime, MetricsLog, SaveCheckpoints, check_weights
from groupwise.training.trackers import Report

if TYPE_CHECKING:
    from groupwise.training.trainer import Trainer

log = logging.getLogger(__name__)


def build_callbacks(
    parts: Components, folder: RunFolder, users: Sequence[Callback], evaluator: Evaluator | None, rank: int
) -> list[Callback]:
    """The user's callbacks and those of the settings, in their order; on ranks above 0 the user's, and what helps to save."""
    if rank != 0:
        return [*users, JoinCheckpoints(parts.cfg.checkpoint_interval)]
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
        from groupwise.training.progress import Progress  # rich takes a while to import

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
