"""Built-in callbacks: they save, keep groups, check, evaluate, stop and show."""

import json
import logging
import math
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from random import Random
from typing import Any, Literal, NoReturn

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from torch import Tensor

from groupwise import system as files
from groupwise.config.run import BUDGETS, EvaluationMetric, SamplerMismatchCfg, StopCfg
from groupwise.data.rollout import Nested, TensorDict, transition_view
from groupwise.errors import DivergedError, RunFolderError, SamplerMismatchError
from groupwise.report.folder import MAX_LINE, MAX_WIDTH, SCORES, RunFolder, Values, kept_iterations, write_groups
from groupwise.report.video import NoPictureError
from groupwise.system import SafeStream, printable
from groupwise.training.checkpoint import (
    Checkpoint,
    Identity,
    changes,
    has_checkpoint,
    nonfinite_parameter,
    serialize,
    write_checkpoint,
)
from groupwise.training.evaluation import EvaluationResult
from groupwise.training.trainer import Callback, Trainer

# Checkpoints and metrics; a full or read-only disk does not end training

log = logging.getLogger(__name__)

SAVE_SECONDS = "time/save_seconds"


_NOT_LEARNING = (
    *BUDGETS, "run_dir", "logging", "evaluation", "stop", "checkpoint_interval", "keep_checkpoints", "engine",
    "ddp_timeout", "sampler_mismatch",
)  # fmt: skip
"""Settings that do not change what is learned."""


class SaveCheckpoints(Callback):
    """Saves regularly and at the end, also an early one.

    A thread writes the files while training continues. A full disk gives a warning, and the checkpoint is tried again after
    the next ``interval``.

    Args:
        folder: of the checkpoint. None, on ranks above 0: hands over the part of the state that this rank has.
        interval: environment steps between checkpoints. None: a tenth of the budget.
        keep: checkpoints that stay.
        settings: those of the run. They are saved, so that a resumed run notices changes.
    """

    def __init__(
        self,
        folder: Path | None,
        interval: int | None,
        identity: Identity,
        keep: int,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        self.settings = dict(settings or {})
        self.folder = folder
        self.interval = interval
        self.identity = identity
        self.keep = keep
        self.saved_at = 0
        """Iteration of the newest checkpoint on disk."""
        self.seconds = 0.0
        """Seconds that training waited for checkpoints."""
        self._thread = ThreadPoolExecutor(1, "groupwise checkpoints")
        self._writing: tuple[Future[None], int, int] | None = None
        """The checkpoint that is being written, with its iteration and environment steps."""

    def on_training_start(self, trainer: Trainer) -> None:
        """Start from the checkpoint of a resumed run. If an evaluation was made up for since, it is saved again at the end."""
        self.saved_at = 0 if trainer.metrics else trainer.iteration
        self._thread.submit(int)  # the thread starts now: when memory is short, it could not

    def on_iteration_end(self, trainer: Trainer, rollout: TensorDict, metrics: dict[str, float]) -> None:
        """Save when it is time."""
        start = time.perf_counter()
        if self._writing is not None and self._writing[0].done():
            self._finish(trainer)
        if trainer.passed(self.interval):
            self._begin(trainer)
        self.seconds += time.perf_counter() - start

    def on_training_end(self, trainer: Trainer) -> None:
        """Save, unless the last complete iteration is saved."""
        self._finish(trainer)
        if any(trainer.engine.gather_objects(self.folder is not None and trainer.iteration != self.saved_at)):
            self._begin(trainer)
            self._finish(trainer)

    def on_interrupt(self, trainer: Trainer) -> None:
        """Save after an error: this rank alone, or not at all if the state is spread over ranks."""
        if trainer.doing == "stopping":
            self.on_training_end(trainer)
            return
        self._finish(trainer)
        if self.folder is not None and trainer.iteration != self.saved_at and not trainer.engine.sharded:
            self._begin(trainer)
            self._finish(trainer)

    def state_dict(self) -> dict[str, Any]:
        """The settings."""
        return {"settings": self.settings}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Warn of settings that are not those of the checkpoint."""
        saved = (self.folder and state.get("settings")) or self.settings
        if changed := [
            f"{name} from {old!r:.80} to {new!r:.80}"
            for name, (old, new) in changes(saved, self.settings).items()
            if name.partition(".")[0] not in _NOT_LEARNING
        ]:
            log.warning(
                "config.json was changed since the checkpoint: %s; training continues with these values, and will not equal a "
                "run that was trained with either of them from the start",
                ", ".join(changed),
            )

    def close(self) -> None:
        """Wait until everything is written."""
        self._wait()
        self._thread.shutdown()

    def _begin(self, trainer: Trainer) -> None:
        if self.folder is None:
            trainer.algorithm.state_dict()
            return
        self._finish(trainer)
        check_weights(trainer)
        content = serialize(Checkpoint(trainer.algorithm.policy.state_dict(), trainer.state_dict()))
        is_first = not has_checkpoint(self.folder)
        written = self._thread.submit(write_checkpoint, self.folder, content, self.identity, self.keep)
        self._writing = written, trainer.iteration, trainer.env_steps
        if is_first:  # later iterations show that there was one: a run that lost it does not begin again
            self._finish(trainer)

    def _finish(self, trainer: Trainer) -> None:
        if self._wait() and self.folder is not None:
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


class MetricsLog(Callback):
    """Appends one JSON object per iteration to a file, a line at a time. A full disk delays lines.

    A metric that is NaN or infinite has no value in that iteration and is left out.

    Args:
        saves: the checkpoints, which follow the log: it has the seconds that training waited for them since the last entry.

    Raises:
        TypeError: a callback set a metric to something other than a number.
        RunFolderError: there are too many metrics to be read again.
    """

    def __init__(self, path: Path, saves: SaveCheckpoints | None = None) -> None:
        self.path = path
        self.saves = saves
        self._logged = 0
        self.waiting: list[str] = []
        """Lines that the disk refused."""

    def on_training_start(self, trainer: Trainer) -> None:
        """Continue after the iterations of a resumed run. Write the last line again if its evaluation was made up for."""
        self._logged, folder = trainer.iteration, RunFolder(self.path.parent)
        logged = folder.read_metrics()
        if trainer.metrics and logged and logged[-1]["iteration"] == trainer.iteration:
            folder.truncate_metrics(trainer.iteration - 1)
            trainer.metrics = {k: v for k, v in logged[-1].items() if "/" in k} | trainer.metrics
            self._logged -= 1
            self.on_training_end(trainer)
        missing = trainer.iteration - len(logged)
        if missing > 0:
            log.warning("%s lacks %d of %d iterations: it was cut or changed", self.path, missing, trainer.iteration)

    def on_iteration_end(self, trainer: Trainer, rollout: TensorDict, metrics: dict[str, float]) -> None:
        """Write a line."""
        if self.saves is not None:
            metrics[SAVE_SECONDS] = metrics.get(SAVE_SECONDS, 0.0) + self.saves.seconds
            self.saves.seconds = 0.0
        self.on_training_end(trainer)

    def on_training_end(self, trainer: Trainer) -> None:
        """Write the last complete iteration, unless it is written, and all waiting lines."""
        if trainer.iteration != self._logged:
            self._logged = trainer.iteration
            position = {"iteration": trainer.iteration, "env_steps": trainer.env_steps}
            floats = {k: v if type(v) is float else _to_float(k, v) for k, v in trainer.metrics.items()}
            entry = position | {name: number for name, number in floats.items() if math.isfinite(number)} | position
            line = f"{json.dumps(entry)}\n"
            self.waiting.append(line if len(line) <= MAX_LINE else _too_long(entry))
        elif not self.waiting:
            return
        try:
            files.append(self.path, "".join(self.waiting).encode())
            self.waiting = []
        except OSError as error:
            if len(self.waiting) == 1:
                files.warn_unsaved(f"metrics from iteration {trainer.iteration} on", error)

    on_interrupt = on_training_end


def _to_float(name: str, value: Any) -> float:
    """The metric as a float; scalars of NumPy and tensors with one element are numbers, too."""
    try:
        if isinstance(value, str):
            raise TypeError
        return float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            f"a callback set metrics[{name!r}] to {value!r:.100}, expected a number; fix: write it to a file of your own"
        ) from error


def _too_long(entry: Mapping[str, Any]) -> NoReturn:
    raise RunFolderError(
        f"{len(entry):,} metrics of iteration {entry['iteration']} ({', '.join(entry):.100} ...) are a line of more than "
        f"{MAX_LINE:,} bytes, which cannot be read again; fix: fewer metrics, or shorter names"
    )


def check_weights(trainer: Trainer) -> None:
    """Raise a ``DivergedError`` before parameters that are not finite are saved."""
    if (name := nonfinite_parameter(trainer.algorithm.policy)) is not None:
        raise DivergedError.because(f"{name} is not finite after iteration {trainer.iteration}")


# Groups of training that are kept for the report


class KeepGroups(Callback):
    """Writes some groups of the rollout to ``<folder>/<iteration>.parquet``: of the first one, with each evaluation, at the end.

    Nothing that training depends on changes.

    Args:
        interval: environment steps in between. None: a tenth of the budget.
        num_groups: half of them with the largest spread of returns, a quarter with the smallest, others at random. For
            algorithms without groups, the episodes of a row count as one group.
    """

    def __init__(self, folder: Path, interval: int | None, num_groups: int) -> None:
        self.folder = folder
        self.interval = interval
        self.num_groups = num_groups
        self._buffers: dict[str, Tensor] = {}

    def on_training_start(self, trainer: Trainer) -> None:
        """Remove groups that a resumed run writes again."""
        import pyarrow.parquet  # noqa: F401  # takes 0.1 s and memory, better here than in the midst of training

        for iteration, path in kept_iterations(self.folder).items():
            if iteration > trainer.iteration:
                files.remove(path)

    def on_rollout_end(self, trainer: Trainer, rollout: TensorDict) -> None:
        """Keep the statistics of normalisers, which the update changes at its end."""
        self._buffers = {name: buffer.clone() for name, buffer in trainer.algorithm.policy.named_buffers()}

    def on_iteration_end(self, trainer: Trainer, rollout: TensorDict, metrics: dict[str, float]) -> None:
        """Write groups when it is time, unless all were dropped."""
        if (trainer.iteration == 1 or trainer.passed(self.interval) or trainer.is_done()) and rollout["valid"].any():
            self._write(trainer, rollout, metrics)

    def _write(self, trainer: Trainer, rollout: TensorDict, metrics: dict[str, float]) -> None:
        start = time.perf_counter()
        columns = kept_steps(transition_view(rollout), self.num_groups, trainer, self._buffers)
        write_groups(self.folder, trainer.iteration, columns)
        metrics[SAVE_SECONDS] = time.perf_counter() - start


def kept_steps(
    batch: TensorDict, num_groups: int, trainer: Trainer, buffers: Mapping[str, Tensor]
) -> dict[str, Values]:
    """The columns of kept groups: steps of some groups of ``batch`` ``[N, T]``, ordered by group, member and time.

    Args:
        buffers: of the policy, as they were during the update.
    """
    algorithm, collector = trainer.algorithm, trainer.collector
    is_text = "turn_id" in batch.keys()  # noqa: SIM118  iterating goes over rows
    written = batch["valid"]
    if is_text:  # from the completion's first token on
        written = written & ((batch["turn_id"] >= 0).cumsum(dim=1) > 0)
    row, time = written.nonzero(as_tuple=True)
    episode = batch["episode_id"][row, time].cpu().numpy()
    group = batch["group_id"][row, time].cpu().numpy() if algorithm.grouped else row.cpu().numpy()
    order = np.lexsort((time.cpu().numpy(), episode, group))
    reward = batch["reward"][row, time].cpu().double().numpy()
    chosen = choose(_spreads(group, episode, reward), num_groups, seed=trainer.iteration)
    order = order[np.isin(group[order], chosen)]
    row, time = row[order.copy()], time[order.copy()]
    group, episode = group[order], episode[order]

    def at(values: Tensor) -> np.ndarray:
        return values[row, time].cpu().numpy()

    def vectors(values: Nested | None) -> np.ndarray | None:
        """The numbers of each step ``[step, width]``; None where there are none or too many."""
        if values is None:
            return None
        leaves = [values] if isinstance(values, Tensor) else list(values.values(True, True))
        if sum(leaf[0, 0].numel() for leaf in leaves) > MAX_WIDTH:
            return None
        flat = [leaf[row, time].float().reshape(len(group), -1) for leaf in leaves]
        return torch.cat(flat, dim=1).cpu().numpy()

    # the probability ratio of the updated policy to the sampler, and where the loss counts it
    rows: Tensor = torch.unique(row)
    inputs = algorithm.policy_inputs(batch[rows])
    now = {name: buffer.clone() for name, buffer in algorithm.policy.named_buffers()}
    for name, buffer in algorithm.policy.named_buffers():
        buffer.copy_(buffers[name])
    after = algorithm.score(algorithm.policy, inputs).log_prob
    for name, buffer in algorithm.policy.named_buffers():
        buffer.copy_(now[name])
    ratio = algorithm.layout.per_decision(after - batch["sample_log_prob"][rows]).exp()
    slots, mask = (torch.searchsorted(rows, row), time), inputs["loss_mask"]
    counts = (mask.any(dim=-1) if mask.dim() > 2 else mask)[slots].cpu().numpy()

    ends = np.where(at(batch["terminated"]), "terminated", np.where(at(batch["truncated"]), "truncated", "running"))
    begins = np.diff(episode, prepend=-1) != 0
    number = begins.cumsum()
    before = np.maximum.accumulate(np.where(np.diff(group, prepend=-1) != 0, number, 0))  # of the group's first member
    step, groups = at(batch["step"]), at(batch["group_id"]).tolist()
    starts = {number: collector.group_start(number) for number in set(groups)}
    told = [collector.conversation(int(place)) for place in row[begins]] if is_text else []  # by each member
    prompts, said = (one.start for one in told), (json.dumps(one.messages, default=str, skipkeys=True) for one in told)
    won = np.array([np.nan if one.success is None else one.success for one in told])
    tokens = at(batch["action"]).tolist() if is_text else []
    kinds = sorted(set(tokens))
    texts = dict(zip(kinds, collector.token_texts(kinds) if is_text else (), strict=True))
    return {
        "env_steps": np.full(len(group), trainer.env_steps),
        "group": group,
        "start": [next(prompts) if begin else None for begin in begins] if is_text else [starts[g] for g in groups],
        "member": number - before,
        "step": step - step[np.flatnonzero(begins)[number - 1]] if is_text else step,  # prompts are left out
        "observation": None if is_text else vectors(batch["obs"]),
        "action": vectors(batch["action"]),
        "token": [texts[token] for token in tokens] if is_text else None,
        "turn": at(batch["turn_id"]) if is_text else None,
        "messages": [next(said) if begin else None for begin in begins] if is_text else None,
        "reward": at(batch["reward"]),
        "reward_parts": vectors(batch.get("reward_parts", None)),
        "log_prob": at(algorithm.layout.per_decision(batch["sample_log_prob"])),
        "ratio": np.where(counts, ratio[slots].cpu().numpy(), np.nan),
        "advantage": None if algorithm.advantage is None else at(algorithm.advantage),
        "loss_mask": counts,
        "greedy": at(batch.get("greedy", torch.zeros_like(batch["valid"]))),
        "end": ends.tolist(),
        "stop_reason": [told[place - 1].stop_reason for place in number] if is_text else None,
        "success": won[number - 1] if is_text else None,
    }


def choose(spread: dict[int, float], count: int, seed: int) -> list[int]:
    """Groups to keep: half of ``count`` have the largest spread, a quarter the smallest, others are random."""
    ranked = sorted(spread, key=lambda group: -spread[group])
    if len(ranked) <= count:
        return ranked
    most, least = count - count // 2, count // 4
    middle = ranked[most : len(ranked) - least]
    picked = Random(seed).sample(middle, count - most - least)
    return ranked[:most] + picked + ranked[len(ranked) - least :]


def _spreads(group: np.ndarray, episode: np.ndarray, reward: np.ndarray) -> dict[int, float]:
    """Highest less lowest return of each group."""
    (groups, _), index = np.unique(np.stack([group, episode]), axis=1, return_inverse=True)
    returns = np.bincount(index.reshape(-1), weights=reward)
    first = np.flatnonzero(np.diff(groups, prepend=-1))
    spreads = np.maximum.reduceat(returns, first) - np.minimum.reduceat(returns, first)
    return dict(zip(groups[first].tolist(), spreads.tolist(), strict=True))


class CheckSamplerMismatch(Callback):
    """Warns once, and then stops the run, when the KL between sampler and trainer is too large.

    Args:
        fix: what the user can do.
    """

    def __init__(self, cfg: SamplerMismatchCfg, fix: str) -> None:
        self.cfg = cfg
        self.fix = fix
        self._warned = False

    def on_iteration_end(self, trainer: Trainer, rollout: TensorDict, metrics: dict[str, float]) -> None:
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
        self._is_due = False
        """Whether the evaluation of the last iteration was interrupted or failed."""

    def on_training_start(self, trainer: Trainer) -> None:
        """Make up for an evaluation that was interrupted or failed; its metrics are of the last iteration."""
        if self._is_due:
            self._is_due = False
            try:
                self._evaluate(trainer, trainer.metrics)
            except Exception as error:
                log.warning(
                    "the evaluation of iteration %d failed again, and is left out: %r", trainer.iteration, error
                )

    def on_iteration_end(self, trainer: Trainer, rollout: TensorDict, metrics: dict[str, float]) -> None:
        """Evaluate when it is time."""
        if trainer.passed(self.interval) or trainer.is_done():
            self._evaluate(trainer, metrics)

    def on_interrupt(self, trainer: Trainer) -> None:
        """Note an evaluation that is missing."""
        is_wanted = trainer.passed(self.interval) or trainer.done >= trainer.budget.total
        self._is_due = is_wanted and bool(trainer.metrics) and "eval/return_mean" not in trainer.metrics

    def _evaluate(self, trainer: Trainer, metrics: dict[str, float]) -> None:
        """Add ``eval/*`` to the metrics, and save the policy if it is the best one so far."""
        start = time.perf_counter()
        result = self.evaluate()
        metrics |= result.metrics() | {"time/evaluate_seconds": time.perf_counter() - start}
        score = result.score(self.metric)
        if self.best_score is None or score > self.best_score:
            counters = {
                "iteration": trainer.iteration,
                "env_steps": trainer.env_steps,
                "epochs": trainer.epochs,
                "seconds": trainer.seconds,
                "position": trainer.collector.position * trainer.engine.world_size,  # over all ranks
                SCORES[self.metric]: score,
            }
            check_weights(trainer)
            with files.warning_if_unwritable(self.best):
                content = serialize(Checkpoint(trainer.algorithm.policy.state_dict(), counters))
                write_checkpoint(self.best, content, self.identity)
                self.best_score = score
        for callback in trainer.callbacks:
            callback.on_evaluation_end(trainer, result)

    def state_dict(self) -> dict[str, Any]:
        """The best score so far, and whether an evaluation is missing."""
        return {"best_score": self.best_score, "is_due": self._is_due}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a saved ``state_dict``; the best score, if its checkpoint is there: a fork may lack it."""
        best, self._is_due = state["best_score"], bool(state.get("is_due", False))
        self.best_score = float(best) if best is not None and has_checkpoint(self.best) else None


class StopEarly(Callback):
    """Stops at a score of an evaluation, or after seconds of this process's training, evaluations included."""

    def __init__(self, cfg: StopCfg, metric: EvaluationMetric = "return") -> None:
        self.cfg = cfg
        self.metric = metric
        self._start = 0.0
        self._reached = ""
        """How the threshold was reached: such a run is finished."""

    def on_training_start(self, trainer: Trainer) -> None:
        """Start the clock. A run that had reached the threshold stays as it is."""
        self._start = time.perf_counter()
        if self._reached:
            trainer.stop(self._reached)

    def on_iteration_end(self, trainer: Trainer, rollout: TensorDict, metrics: dict[str, float]) -> None:
        """Stop if time is over; else the metrics say how much is left."""
        limit = self.cfg.time_limit
        if limit is None:
            return
        left = limit - (time.perf_counter() - self._start)
        metrics["time/left_seconds"] = max(left, 0.0)
        if left <= 0:
            trainer.stop(f"time: the limit of {limit:g} s is over")

    def on_evaluation_end(self, trainer: Trainer, evaluation: EvaluationResult) -> None:
        """Stop if the score is reached, in float32: a sum of 1s with weights is not always their sum."""
        threshold = self.cfg.threshold
        if threshold is not None and np.float32(score := evaluation.score(self.metric)) >= np.float32(threshold):
            self._reached = f"score: {self.metric} {score:.6g} reached the threshold {threshold:g}"
            trainer.stop(self._reached)

    def state_dict(self) -> dict[str, Any]:
        """How the threshold was reached."""
        return {"reached": self._reached}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a saved ``state_dict``."""
        self._reached = str(state["reached"])


class Videos(Callback):
    """Films an episode after every ``interval`` evaluations; warns once where the environment does not render.

    Args:
        film: writes a video to a path.
        folder: of the videos.
    """

    def __init__(self, film: Callable[[Path], None], interval: int, folder: Path) -> None:
        self.film = film
        self.interval = interval
        self.folder = folder
        self.evaluations = 0
        self._renders = True

    def on_evaluation_end(self, trainer: Trainer, evaluation: EvaluationResult) -> None:
        """Film when it is time."""
        self.evaluations += 1
        if self.evaluations % self.interval or not self._renders:
            return
        with files.warning_if_unwritable(self.folder):
            self.folder.mkdir(exist_ok=True)
            try:
                self.film(self.folder / f"step_{trainer.env_steps}.gif")
            except NoPictureError as error:
                self._renders = False
                log.warning("evaluation.video_interval = %d: %s", self.interval, error)
                with suppress(OSError):  # it has videos
                    self.folder.rmdir()

    def state_dict(self) -> dict[str, Any]:
        """How many evaluations there were."""
        return {"evaluations": self.evaluations}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore it."""
        self.evaluations = int(state["evaluations"])


# Progress in the terminal


class Progress(Callback):
    """Shows progress: a live bar, or a line every ``interval`` seconds and at the end.

    Args:
        mode: ``auto`` is the bar on a terminal, and in a notebook that has ipywidgets, and lines elsewhere; ``iterations`` is a
            line for each.
        title: printed first.
        words: what an episode earns, and a unit of experience.
    """

    def __init__(
        self,
        mode: Literal["auto", "bar", "lines", "iterations"],
        interval: float = 5.0,
        title: str = "",
        console: Console | None = None,
        words: tuple[str, str] = ("return", "steps"),
    ) -> None:
        stderr: Any = SafeStream(sys.stderr)
        self.console = console or Console(file=stderr)
        self.interval = 0.0 if mode == "iterations" else interval
        self.title = title
        self.score, self.unit = words
        notebook = self.console.is_jupyter and find_spec("ipywidgets") is not None
        live = mode == "bar" or (mode == "auto" and (self.console.is_terminal or notebook))
        columns = (BarColumn(15), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
        self.bar = Bar(*columns, console=self.console, refresh_per_second=5) if live else None
        self._shown = 0.0
        self._evaluation: EvaluationResult | None = None

    def on_training_start(self, trainer: Trainer) -> None:
        """Print the title, and show the bar."""
        self._shown = time.perf_counter()
        if self.title:
            self._print(self.title)
        if self.bar is not None:
            self.bar.add_task("", total=trainer.budget.total, completed=trainer.done)  # type: ignore[arg-type]
            self.bar.start()

    def on_evaluation_end(self, trainer: Trainer, evaluation: EvaluationResult) -> None:
        """Keep the score for the next line."""
        self._evaluation = evaluation

    def on_iteration_end(self, trainer: Trainer, rollout: TensorDict, metrics: dict[str, float]) -> None:
        """Update the bar, or print a line when it is time."""
        if self.bar is not None or trainer.is_done() or time.perf_counter() - self._shown >= self.interval:
            self._show(trainer, metrics)

    def _show(self, trainer: Trainer, metrics: Mapping[str, float]) -> None:
        self._shown = time.perf_counter()
        done, total = min(trainer.done, trainer.budget.total), trainer.budget.total
        if self.bar is not None:
            text = " ".join(self._text(metrics).split())
            self.bar.update(self.bar.task_ids[0], completed=done, description=text)
        else:
            left = int((total - done) * trainer.seconds / max(done, 1e-9))
            unit = self.unit if trainer.budget.unit == "steps" else trainer.budget.unit
            steps = f"{round(trainer.done, 2):>12,} / {total:,} {unit}"
            self._print(f"{done / total:5.0%}{steps}   {self._text(metrics)}   {left // 60}:{left % 60:02} left")

    def close(self) -> None:
        """Leave the terminal as it was."""
        if self.bar is not None:
            self.bar.refresh()  # in a notebook, stopping does not show the last iteration
            self.bar.stop()

    def _text(self, metrics: Mapping[str, float]) -> str:
        parts = []
        if "rollout/return_mean" in metrics:
            parts.append(f"{self.score} {_score(metrics['rollout/return_mean'])}")
        if "rollout/success_rate" in metrics:
            parts.append(f"success {metrics['rollout/success_rate']:4.0%}")
        if self._evaluation is not None:
            parts.append(f"eval {_score(self._evaluation.return_mean)}")
            if self._evaluation.success_rate is not None:
                parts.append(f"eval success {self._evaluation.success_rate:4.0%}")
        speed = metrics["time/steps_per_second"]
        rate = f"{speed / 1000:.1f}k" if speed >= 1000 else f"{speed:.0f}"
        return "   ".join([*parts, f"{rate} {self.unit}/s"])

    def _print(self, line: str) -> None:
        self.console.print(printable(line), highlight=False, markup=False, emoji=False, soft_wrap=True)
        self.console.file.flush()


def _score(value: float) -> str:
    """One decimal for large returns, three for small ones."""
    return f"{value:8.1f}" if abs(value) >= 10 else f"{value:8.3f}"
