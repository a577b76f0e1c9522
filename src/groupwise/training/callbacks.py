"""Built-in callbacks: they save, keep groups, check, evaluate, stop and show."""

import json
import logging
import math
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from random import Random
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import torch
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.text import Text
from torch import Tensor

from groupwise import system as files
from groupwise.comparison.compare import differences
from groupwise.config.base import flat
from groupwise.config.run import BUDGETS, EvaluationMetric, SamplerMismatchCfg
from groupwise.data.rollout import Nested, TensorDict, transition_view
from groupwise.errors import DivergedError, SamplerMismatchError
from groupwise.policies.base import Policy
from groupwise.report.folder import MAX_WIDTH, SCORES, RunFolder, Values, kept_iterations, write_groups
from groupwise.report.health import examine
from groupwise.system import SafeStream, printable
from groupwise.training.checkpoint import (
    Checkpoint,
    Identity,
    has_checkpoint,
    save_checkpoint,
    serialize,
    write_checkpoint,
)
from groupwise.training.evaluation import EvaluationResult
from groupwise.training.trainer import Callback

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from groupwise.training.trainer import Trainer


# Checkpoints and metrics; a full or read-only disk does not end training

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
        """Seconds that training waited for checkpoints."""
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
        """Save after an error: this rank alone, or not at all if the state is spread over ranks."""
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
    """Hands over the parts of the state that ranks above 0 have, for the ``SaveCheckpoints`` of rank 0.

    Args:
        interval: that of ``SaveCheckpoints``.
    """

    def __init__(self, interval: int | None) -> None:
        self.interval = interval

    def on_iteration_end(self, trainer: "Trainer", rollout: TensorDict, metrics: dict[str, float]) -> None:
        """Hand over when rank 0 saves."""
        if trainer.passed(self.interval):
            trainer.algorithm.state_dict()

    def on_training_end(self, trainer: "Trainer") -> None:
        """Hand over if rank 0 still has to save."""
        if any(trainer.engine.gather_objects(False)):
            trainer.algorithm.state_dict()

    def on_interrupt(self, trainer: "Trainer") -> None:
        """Hand over, unless an error came first."""
        if trainer.doing == "stopping":
            self.on_training_end(trainer)


class MetricsLog(Callback):
    """Appends one JSON object per iteration to a file, a line at a time. A full disk delays lines.

    A metric that is NaN or infinite has no value in that iteration and is left out.

    Args:
        saves: the checkpoints, which follow the log: it has the seconds that training waited for them since the last entry.

    Raises:
        TypeError: a callback set a metric to something other than a number.
    """

    def __init__(self, path: Path, saves: SaveCheckpoints | None = None) -> None:
        self.path = path
        self.saves = saves
        self._logged = 0
        self.waiting: list[str] = []
        """Lines that the disk refused."""

    def on_training_start(self, trainer: "Trainer") -> None:
        """Continue after the iterations of a resumed run."""
        self._logged = trainer.iteration
        missing = trainer.iteration - len(RunFolder(self.path.parent).read_metrics())
        if missing > 0:
            log.warning("%s lacks %d of %d iterations: it was cut or changed", self.path, missing, trainer.iteration)

    def on_iteration_end(self, trainer: "Trainer", rollout: TensorDict, metrics: dict[str, float]) -> None:
        """Write a line."""
        if self.saves is not None:
            metrics[SAVE_SECONDS] = metrics.get(SAVE_SECONDS, 0.0) + self.saves.seconds
            self.saves.seconds = 0.0
        self._log(trainer)

    def on_training_end(self, trainer: "Trainer") -> None:
        """Write the last complete iteration, if an error of another callback came first, and all waiting lines."""
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
    """The metric as a float; scalars of NumPy and tensors with one element are numbers, too."""
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


# Groups of training that are kept for the report

Array: TypeAlias = np.ndarray


class KeepGroups(Callback):
    """Writes some groups of the rollout to ``<folder>/<iteration>.parquet``, with each evaluation and at the end.

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

    def on_training_start(self, trainer: "Trainer") -> None:
        """Remove groups that a resumed run writes again."""
        import pyarrow.parquet  # noqa: F401  # takes 0.1 s and memory, better here than in the midst of training

        for iteration, path in kept_iterations(self.folder).items():
            if iteration > trainer.iteration:
                files.remove(path)

    def on_rollout_end(self, trainer: "Trainer", rollout: TensorDict) -> None:
        """Keep the statistics of normalisers, which the update changes in its end."""
        self._buffers = _buffers(trainer.algorithm.policy)

    def on_iteration_end(self, trainer: "Trainer", rollout: TensorDict, metrics: dict[str, float]) -> None:
        """Write groups when it is time."""
        if trainer.passed(self.interval) or trainer.is_done():
            start = time.perf_counter()
            steps = Steps(transition_view(rollout), self.num_groups, trainer)
            write_groups(self.folder, trainer.iteration, steps.columns(self._buffers))
            metrics[SAVE_SECONDS] = time.perf_counter() - start


class Steps:
    """The steps of some groups of a rollout ``[N, T]``, ordered by group, member and time."""

    def __init__(self, batch: TensorDict, num_groups: int, trainer: "Trainer") -> None:
        self.trainer = trainer
        self.batch = batch
        row, time = _written(batch).nonzero(as_tuple=True)
        episode = batch["episode_id"][row, time].cpu().numpy()
        group = batch["group_id"][row, time].cpu().numpy() if trainer.algorithm.grouped else row.cpu().numpy()
        order = np.lexsort((time.cpu().numpy(), episode, group))
        reward = batch["reward"][row, time].cpu().double().numpy()
        chosen = choose(_spreads(group, episode, reward), num_groups, seed=trainer.iteration)
        order = order[np.isin(group[order], chosen)]
        self.slots = row[order.copy()], time[order.copy()]
        self.group, self.episode = group[order], episode[order]

    def columns(self, buffers: dict[str, Tensor]) -> dict[str, Values]:
        """The columns of ``report.groups``.

        Args:
            buffers: of the policy, as they were during the update.
        """
        batch, algorithm, count = self.batch, self.trainer.algorithm, len(self.group)
        ratio, counts = self._ratio(buffers)
        ends = np.where(self._at("terminated"), "terminated", np.where(self._at("truncated"), "truncated", "running"))
        is_text = "turn_id" in batch.keys()  # noqa: SIM118  iterating goes over rows
        step, collector = self._at("step"), self.trainer.collector
        groups = self._at("group_id").tolist()
        starts = {number: collector.group_start(number) for number in set(groups)}
        tokens = self._at("action").tolist() if is_text else []
        kinds = sorted(set(tokens))
        texts = dict(zip(kinds, collector.token_texts(kinds) if is_text else (), strict=True))
        return {
            "env_steps": np.full(count, self.trainer.env_steps),
            "group": self.group,
            "start": [starts[number] for number in groups],
            "member": _members(self.group, self.episode),
            "step": step - step[_firsts(self.episode)] if is_text else step,  # prompts are left out
            "observation": None if is_text else self._vectors(batch["obs"]),
            "action": self._vectors(batch["action"]),
            "token": [texts[token] for token in tokens] if is_text else None,
            "reward": self._at("reward"),
            "reward_parts": self._vectors(batch.get("reward_parts", None)),
            "log_prob": self._pick(algorithm.layout.per_decision(batch["sample_log_prob"])),
            "ratio": np.where(counts, ratio, np.nan),
            "advantage": None if algorithm.advantage is None else self._pick(algorithm.advantage),
            "loss_mask": counts,
            "greedy": self._pick(batch.get("greedy", torch.zeros_like(batch["valid"]))),
            "end": ends.tolist(),
        }

    def _ratio(self, buffers: dict[str, Tensor]) -> tuple[Array, Array]:
        """The probability ratio of the updated policy to the sampler, and where the loss counts it."""
        algorithm = self.trainer.algorithm
        rows: Tensor = torch.unique(self.slots[0])
        inputs = algorithm.policy_inputs(self.batch[rows])
        now = _buffers(algorithm.policy)
        for name, buffer in algorithm.policy.named_buffers():
            buffer.copy_(buffers[name])
        after = algorithm.score(algorithm.policy, inputs).log_prob
        for name, buffer in algorithm.policy.named_buffers():
            buffer.copy_(now[name])
        ratio = algorithm.layout.per_decision(after - self.batch["sample_log_prob"][rows]).exp()
        slots = torch.searchsorted(rows, self.slots[0]), self.slots[1]
        mask = inputs["loss_mask"]
        counts = mask.any(dim=-1) if mask.dim() > 2 else mask
        return ratio[slots].cpu().numpy(), counts[slots].cpu().numpy()

    def _vectors(self, values: Nested | None) -> Array | None:
        """The numbers of each step ``[step, width]``; None where there are none or too many."""
        if values is None:
            return None
        leaves = [values] if isinstance(values, Tensor) else list(values.values(True, True))
        if sum(leaf[0, 0].numel() for leaf in leaves) > MAX_WIDTH:
            return None
        flat = [leaf[self.slots].float().reshape(len(self.group), -1) for leaf in leaves]
        return torch.cat(flat, dim=1).cpu().numpy()

    def _at(self, key: str) -> Array:
        return self._pick(self.batch[key])

    def _pick(self, values: Tensor) -> Array:
        return values[self.slots].cpu().numpy()


def choose(spread: dict[int, float], count: int, seed: int) -> list[int]:
    """Groups to keep: half of ``count`` have the largest spread, a quarter the smallest, others are random."""
    ranked = sorted(spread, key=lambda group: -spread[group])
    if len(ranked) <= count:
        return ranked
    most, least = count - count // 2, count // 4
    middle = ranked[most : len(ranked) - least]
    picked = Random(seed).sample(middle, count - most - least)
    return ranked[:most] + picked + ranked[len(ranked) - least :]


def _written(batch: TensorDict) -> Tensor:
    """The steps that were taken; of texts, those from the completion's first token on."""
    valid: Tensor = batch["valid"]
    turn = batch.get("turn_id", None)
    return valid if turn is None else valid & ((turn >= 0).cumsum(dim=1) > 0)


def _spreads(group: Array, episode: Array, reward: Array) -> dict[int, float]:
    """Highest less lowest return of each group."""
    ids, index = np.unique(np.stack([group, episode]), axis=1, return_inverse=True)
    returns = np.bincount(index.reshape(-1), weights=reward)
    groups = np.unique(group)
    place = np.searchsorted(groups, ids[0])
    high, low = np.full(len(groups), -np.inf), np.full(len(groups), np.inf)
    np.maximum.at(high, place, returns)
    np.minimum.at(low, place, returns)
    return dict(zip(groups.tolist(), (high - low).tolist(), strict=True))


def _firsts(episode: Array) -> Array:
    """The place of the first step of each step's episode."""
    begins = np.flatnonzero(np.diff(episode, prepend=-1))
    return begins.repeat(np.diff(begins, append=len(episode)))


def _members(group: Array, episode: Array) -> Array:
    """The number of each step's episode in its group."""
    begins = np.diff(episode, prepend=-1) != 0
    number = begins.cumsum()
    starts = np.diff(group, prepend=-1) != 0
    members: Array = number - np.maximum.accumulate(np.where(starts, number, 0))
    return members


def _buffers(policy: Policy) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in policy.named_buffers()}


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
        if found <= min(self.cfg.warn, self.cfg.stop or self.cfg.warn):
            return
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
        if not trainer.passed(self.interval) and not trainer.is_done():
            return
        start = time.perf_counter()
        result = self.evaluate()
        metrics |= result.metrics() | {"time/evaluate_seconds": time.perf_counter() - start}
        score = result.score(self.metric)
        if self.best_score is None or score > self.best_score:
            self._save_best(trainer, score)
        for callback in trainer.callbacks:
            callback.on_evaluation_end(trainer, result)

    def _save_best(self, trainer: "Trainer", score: float) -> None:
        """Save the policy as the best one so far."""
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


# Progress in the terminal

BLOCKS = "▁▂▃▄▅▆▇█"
MAX_ENTRIES = 1000
"""Iterations that the panel keeps."""


class Panel(Bar):
    """A bar; below it the returns of training as a sparkline, the best evaluation, and warnings."""

    def __init__(self, console: "Console") -> None:
        self._metrics: list[dict[str, float]] = []
        self._stride = 1
        """Iterations from one entry to the next: doubled whenever there are too many."""
        self._best: tuple[float, int] | None = None
        self._troubles: list[str] = []
        columns = (BarColumn(15), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
        super().__init__(*columns, console=console, refresh_per_second=5)
        self._task = self.add_task("")

    def begin(self, trainer: "Trainer") -> None:
        """Show it."""
        super().update(self._task, total=trainer.budget.total, completed=trainer.done)
        self.start()

    def add_evaluation(self, trainer: "Trainer", evaluation: EvaluationResult) -> None:
        """Keep the best score, and examine the metrics so far."""
        if self._best is None or evaluation.return_mean > self._best[0]:
            self._best = evaluation.return_mean, trainer.env_steps
        self._troubles = [finding.title for finding in examine(self._metrics) if finding.verdict == "bad"]

    def advance_to(self, trainer: "Trainer", metrics: Mapping[str, float], text: str) -> None:
        """Show an iteration."""
        if trainer.iteration % self._stride == 0:
            self._metrics.append({**metrics, "env_steps": trainer.env_steps, "iteration": trainer.iteration})
        if len(self._metrics) > MAX_ENTRIES:
            self._metrics = [entry for entry in self._metrics if entry["iteration"] % (2 * self._stride) == 0]
            self._stride *= 2
        super().update(self._task, completed=min(trainer.done, trainer.budget.total), description=text)

    def get_renderables(self) -> "Iterable[RenderableType]":
        """The bar, and the lines below it."""
        yield from super().get_renderables()
        returns = [entry["rollout/return_mean"] for entry in self._metrics if "rollout/return_mean" in entry]
        parts = [f"returns {sparkline(returns)}"] if returns and self.console.encoding.startswith("utf") else []
        if self._best is not None:
            parts.append(f"best evaluation {_score(self._best[0]).strip()} at step {self._best[1]:,}")
        if parts:
            yield Text("   ".join(parts), no_wrap=True)
        if self._troubles:
            yield Text(f"trouble: {', '.join(self._troubles)} (see: groupwise doctor)", style="yellow", no_wrap=True)


class Progress(Callback):
    """Shows progress: a live panel, or a line every ``interval`` seconds and at the end.

    Args:
        mode: ``auto`` is the panel on a terminal, and in a notebook that has ipywidgets, and lines elsewhere; ``iterations`` is a
            line for each.
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

        stderr: Any = SafeStream(sys.stderr)
        self.console = console or Console(file=stderr)
        self.interval = 0.0 if mode == "iterations" else interval
        self.title = title
        notebook = self.console.is_jupyter and find_spec("ipywidgets") is not None
        live = mode == "bar" or (mode == "auto" and (self.console.is_terminal or notebook))
        self.panel = Panel(self.console) if live else None
        self._shown = 0.0
        self._evaluation: EvaluationResult | None = None

    def on_training_start(self, trainer: "Trainer") -> None:
        """Print the title, and show the empty panel."""
        self._shown = time.perf_counter()
        if self.title:
            self._print(self.title)
        if self.panel is not None:
            self.panel.begin(trainer)

    def on_evaluation_end(self, trainer: "Trainer", evaluation: EvaluationResult) -> None:
        """Keep the score for the next line."""
        self._evaluation = evaluation
        if self.panel is not None:
            self.panel.add_evaluation(trainer, evaluation)

    def on_iteration_end(self, trainer: "Trainer", rollout: TensorDict, metrics: dict[str, float]) -> None:
        """Update the panel, or print a line when it is time."""
        if self.panel is not None:
            self.panel.advance_to(trainer, metrics, " ".join(self._text(metrics).split()))
        elif trainer.is_done() or time.perf_counter() - self._shown >= self.interval:
            self._shown = time.perf_counter()
            done, total = min(trainer.done, trainer.budget.total), trainer.budget.total
            left = int((total - done) * trainer.seconds / max(done, 1e-9))
            steps = f"{round(trainer.done, 2):>12,} / {total:,} {trainer.budget.unit}"
            self._print(f"{done / total:5.0%}{steps}   {self._text(metrics)}   {left // 60}:{left % 60:02} left")

    def close(self) -> None:
        """Leave the terminal as it was."""
        if self.panel is not None:
            self.panel.refresh()  # in a notebook, stopping does not show the last iteration
            self.panel.stop()

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


def sparkline(values: Sequence[float], width: int = 30) -> str:
    """The course of some numbers in at most ``width`` characters, each the mean of as many numbers."""
    finite = [value for value in values if math.isfinite(value)]
    count = min(width, len(finite))
    borders = [len(finite) * part // count for part in range(count + 1)] if count else []
    means = [fmean(finite[start:end]) for start, end in pairwise(borders)]
    low, high = min(means, default=0.0), max(means, default=0.0)
    scale = (len(BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(BLOCKS[round((mean - low) * scale)] for mean in means)
