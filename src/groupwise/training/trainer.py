"""The training loop. Evaluation, logging, saving and display are callbacks."""

import inspect
import logging
import math
import random
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from groupwise.algorithms.base import BaseAlgorithm
from groupwise.collectors.vector import Collector, pool_metrics
from groupwise.config.run import Budget
from groupwise.data.rollout import RolloutBuffer, TensorDict
from groupwise.engines import Engine
from groupwise.errors import ConfigError, DataError, DivergedError, nearest
from groupwise.seeding import TORCH_GENERATOR, derive_seed

if TYPE_CHECKING:
    from groupwise.envs.base import EnvStep
    from groupwise.training.evaluation import EvaluationResult


# Events of a run


def check_callbacks(callbacks: Any) -> tuple["Callback", ...]:
    """The user's callbacks; a ``ConfigError`` if they are no list, no ``Callback``, or a method would not be called."""
    if not isinstance(callbacks, Sequence):
        raise ConfigError(f"callbacks = {callbacks!r:.80}: expected a list; fix: callbacks=[...]")
    for callback in callbacks:
        if not isinstance(callback, Callback):
            raise ConfigError(
                f"{callback!r:.80} is no Callback; fix: give instances of subclasses of gw.Callback, with methods like "
                f"on_iteration_end(self, trainer, rollout, metrics); {_OF_SB3}"
            )
        own = [kind for kind in type(callback).__mro__ if kind is not Callback and issubclass(kind, Callback)]
        for name in [
            name for kind in own for name, value in vars(kind).items() if callable(value) or name in vars(Callback)
        ]:
            if name.startswith("on_") or (name.startswith("_on_") and name[1:] in vars(Callback)):
                _check_event(callback, name)
    return tuple(callbacks)


_OF_SB3 = "_on_step of Stable-Baselines3 is on_step(self, trainer, action, step), return False trainer.stop('reason')"


def _check_event(callback: "Callback", name: str) -> None:
    """Refuse a method that is no event, or cannot take an event's arguments."""
    what, events = f"{type(callback).__name__}.{name}", [event for event in vars(Callback) if event.startswith("on_")]
    if name not in events:
        near = nearest(name.lstrip("_"), events)
        raise ConfigError(f"{what} is no event, and is never called{near}; events: {', '.join(events)}; {_OF_SB3}")
    taken, called = [*inspect.signature(getattr(Callback, name)).parameters], getattr(callback, name)
    if not callable(called):
        raise ConfigError(f"{what} = {called!r:.80}: expected a method; fix: def {name}({', '.join(taken)})")
    if inspect.isgeneratorfunction(called) or inspect.iscoroutinefunction(called) or inspect.isasyncgenfunction(called):
        raise ConfigError(f"{what} has yield or async, and would not run; fix: def {name}({', '.join(taken)})")
    method = inspect.signature(called)
    try:
        method.bind(*taken[1:])
    except TypeError as error:
        raise ConfigError(f"{what}{method}: {error}; fix: def {name}({', '.join(taken)})") from error


class Callback:
    """Receives training events; override what you need. Values added to ``metrics`` are logged."""

    def on_training_start(self, trainer: "Trainer") -> None:
        """Called before the first iteration, also of a resumed run."""

    def on_step(self, trainer: "Trainer", action: Tensor, step: "EnvStep") -> None:
        """Called after each step of all environments, if you override it. Language models have no steps: an error.

        Args:
            action: [N, ...] as the environments got it; for environments in torch, as the policy gave it.
            step: the environments' outcome; copy what you keep. Rows that wait for others of their group have reward 0.
        """

    def on_rollout_end(self, trainer: "Trainer", rollout: TensorDict) -> None:
        """Called after collection, before the update. Do not change the rollout."""

    def on_iteration_end(self, trainer: "Trainer", rollout: TensorDict, metrics: dict[str, float]) -> None:
        """Called after the update."""

    def on_evaluation_end(self, trainer: "Trainer", evaluation: "EvaluationResult") -> None:
        """Called after an evaluation, before its iteration ends."""

    def on_checkpoint(self, trainer: "Trainer", path: Path) -> None:
        """Called after a checkpoint was written to ``path``. Meanwhile ``trainer`` may have gone further."""

    def on_training_end(self, trainer: "Trainer") -> None:
        """Called after the last iteration, unless an error or the user's interrupt ended the run."""

    def on_interrupt(self, trainer: "Trainer") -> None:
        """Called after an interrupt or an error, except during the update, or for ``DataError`` and ``DivergedError``.

        The trainer is as its last complete iteration left it. ``on_iteration_end`` may not have been called for it.
        """

    def close(self) -> None:
        """The last call, also after an error: free files and displays."""

    def state_dict(self) -> dict[str, Any]:
        """Plain data that a resumed run needs; saved in every checkpoint."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a saved ``state_dict``."""


log = logging.getLogger(__name__)

MAX_BAD_UPDATES = 10
"""Updates in a row with skipped steps, or of which nothing is left, after which training stops."""
PAUSED, INTERRUPTED, FAILED = "paused", "interrupted", "failed"
"""Reasons that end a run besides its budget and ``Trainer.stop``. A paused run is resumed later; it is not filmed."""


class Trainer:
    """Collects, updates and calls the callbacks, until the budget is used up or ``stop``.

    Args:
        num_steps: steps per row that the collector aims for in one iteration.
        total_steps, total_iterations, total_epochs: the budget, one of them: environment steps over all ranks, iterations,
            or passes over the collector's data. The iteration that reaches it is finished.
        seed: of the global generators of ``random``, NumPy and torch. They are seeded in every iteration, so that
            third-party code resumes exactly too, and not restored afterwards.
        callbacks: called in this order at each event.
    """

    def __init__(
        self,
        algorithm: BaseAlgorithm,
        collector: Collector,
        buffer: RolloutBuffer,
        *,
        num_steps: int,
        total_steps: int | None = None,
        total_iterations: int | None = None,
        total_epochs: int | float | None = None,
        seed: int = 0,
        callbacks: Sequence[Callback] = (),
        engine: Engine | None = None,
        run_dir: Path | None = None,
    ) -> None:
        self.algorithm = algorithm
        self.collector = collector
        self.buffer = buffer
        self.num_steps = num_steps
        self.budget = Budget.only(total_steps=total_steps, total_iterations=total_iterations, total_epochs=total_epochs)
        self.seed = seed
        self.callbacks = check_callbacks(callbacks)
        self.engine = engine or Engine()
        self.run_dir = run_dir
        """The run folder; None for parts that were put together by hand."""
        self.iteration = 0
        """Finished iterations."""
        self.env_steps = 0
        """Environment steps taken, over all ranks."""
        self.epochs = 0.0
        """Passes over the data of the collector, over all ranks."""
        self.seconds = 0.0
        """Duration of finished iterations, also those before a resume."""
        self.stop_reason: str | None = None
        """Reason of the end: the one given to ``stop``, ``interrupted``, ``failed``, or the budget's name. None: not ended."""
        self.metrics: dict[str, float] = {}
        """Metrics of the last finished iteration."""
        self.doing: Literal["collecting", "updating", "callbacks", "stopping"] = "callbacks"
        """The current phase, or the one in which an error came; ``stopping`` when all ranks end together for an interrupt."""
        self.ending = False
        """Whether iterations are over, and callbacks save the last one."""
        self._counts_before = self.counts
        self._bad_updates = 0

    def train(self) -> None:
        """Run the loop.

        Raises:
            DivergedError: a metric of the update is NaN or infinite.
            KeyboardInterrupt: ``interrupt`` was called.
        """
        try:
            with ExitStack() as stack:
                for callback in reversed(self.callbacks):
                    stack.callback(callback.close)
                for callback in self.callbacks:
                    callback.on_training_start(self)
                if hears := [c for c in self.callbacks if type(c).on_step is not Callback.on_step]:

                    def call(action: Tensor, step: "EnvStep") -> None:
                        for callback in hears:
                            callback.on_step(self, action, step)

                    stack.enter_context(self.collector.calling(call))
                self._train()
        except BaseException as error:
            self._end_with(error)
            raise

    def _train(self) -> None:
        try:
            while True:
                # a stop or an interrupt on one rank holds for all
                reasons = self.engine.gather_objects(self.stop_reason)
                if stops := [reason for reason in reasons if reason not in (None, INTERRUPTED)]:
                    self.stop_reason = stops[0]  # else a signal that came meanwhile is kept
                if self.is_done():
                    break
                if INTERRUPTED in reasons:
                    self.doing = "stopping"
                    raise KeyboardInterrupt
                self._iterate()
            if self.stop_reason in (None, INTERRUPTED):
                self.stop_reason = self.budget.name
            self.ending = True
            for callback in self.callbacks:
                callback.on_training_end(self)
        except BaseException as error:
            self._end_with(error)
            suspect = isinstance(error, DataError | DivergedError) or self.doing == "updating"
            for callback in () if suspect else self.callbacks:  # otherwise the last iteration is complete and sound
                callback.on_interrupt(self)
            raise

    def _end_with(self, error: BaseException) -> None:
        """Note how the run ends. After an interrupt, which reaches the environments' processes too, so does their error."""
        asked = self.stop_reason == INTERRUPTED and self.doing == "collecting"
        interrupted = isinstance(error, KeyboardInterrupt) or (
            asked and not isinstance(error, DataError | DivergedError)
        )
        self.stop_reason = INTERRUPTED if interrupted else FAILED
        self.ending = True

    def _iterate(self) -> None:
        """One iteration: collect, update, count, call the callbacks."""
        start = time.perf_counter()
        seed = derive_seed(self.seed, "global", self.engine.rank, self.iteration)
        random.seed(seed)
        np.random.seed(seed)
        with TORCH_GENERATOR:
            torch.manual_seed(seed)

        self.doing = "collecting"
        rollout = self.collector.collect(self.num_steps, rollout=self.buffer.start_rollout())

        self.doing = "updating"
        self.buffer.add(rollout)
        before, size, total = self.counts, self.collector.data_size, self.budget.total
        steps = sum(self.engine.gather_objects(self.collector.last_steps))
        epochs = sum(self.engine.gather_objects(self.collector.position)) / size if size else 0.0
        after = self.iteration + 1, self.env_steps + steps, epochs
        done = dict(zip(before, after, strict=True))[self.budget.unit]
        self.algorithm.set_progress(self.done / total, total, (done - self.done) / total)
        collected = time.perf_counter()
        for callback in self.callbacks:
            callback.on_rollout_end(self, rollout)
        update_start = time.perf_counter()
        metrics = {name: float(value) for name, value in self.algorithm.update(self.buffer.get()).items()}
        updated = time.perf_counter()

        self._bad_updates = self._bad_updates + 1 if "train/skipped_steps" in metrics or self.buffer.all_dropped else 0
        if self._bad_updates == MAX_BAD_UPDATES:
            raise DivergedError.because(f"numbers of {MAX_BAD_UPDATES} updates in a row were not finite (see warnings)")
        self._counts_before, (self.iteration, self.env_steps, self.epochs) = before, after
        if not all(map(math.isfinite, metrics.values())):
            self._leave_out_nonfinite(metrics)
        self.seconds += updated - start
        collected_by = self.engine.gather_objects((self.collector.recent_episodes(), self.collector.metrics()))
        self.metrics = metrics | pool_metrics(collected_by) | {
            "time/total_seconds": self.seconds,
            "time/collect_seconds": collected - start,
            "time/update_seconds": updated - update_start,
            "time/advantage_seconds": max(self.algorithm.optimize_start - update_start, 0.0),
            "time/steps_per_second": steps / (updated - start),
        }  # fmt: skip

        self.doing = "callbacks"
        for callback in self.callbacks:
            callback.on_iteration_end(self, rollout, self.metrics)

    def _leave_out_nonfinite(self, metrics: dict[str, float]) -> None:
        for name in [name for name, value in metrics.items() if not math.isfinite(value)]:
            what = f"{name} is {metrics.pop(name)} in iteration {self.iteration}"
            if self.algorithm.cfg.on_nonfinite == "stop":
                raise DivergedError.because(what)
            log.warning("%s, and left out", what)

    def stop(self, reason: str) -> None:
        """End training on all ranks after this iteration. Only a stop on rank 0 evaluates the last iteration."""
        if self.stop_reason in (None, INTERRUPTED):
            self.stop_reason = reason

    def interrupt(self) -> None:
        """End training after this iteration and save a checkpoint, without a last evaluation."""
        self.stop_reason = self.stop_reason or INTERRUPTED

    def is_done(self) -> bool:
        """Whether the current iteration is the last one."""
        return self.done >= self.budget.total or self.stop_reason not in (None, INTERRUPTED)

    @property
    def counts(self) -> dict[str, int | float]:
        """Progress by unit of a budget."""
        return {"iterations": self.iteration, "steps": self.env_steps, "epochs": self.epochs}

    @property
    def done(self) -> int | float:
        """The part of the budget that is used up, in its unit."""
        return self.counts[self.budget.unit]

    def passed(self, interval: int | None) -> bool:
        """Whether the last iteration passed a multiple of ``interval`` environment steps. None: of a tenth of the budget."""
        unit, size = (self.budget.unit, self.budget.tenth) if interval is None else ("steps", interval)
        before, now = (int(counts[unit] / size + 1e-9) for counts in (self._counts_before, self.counts))
        return now > before  # 1e-9: of epochs, 0.3 / 0.1 is less than 3

    def state_dict(self) -> dict[str, Any]:
        """The state that the next iteration depends on, without the policy: plain data and tensors."""
        return {
            "iteration": self.iteration,
            "env_steps": self.env_steps,
            "epochs": self.epochs,
            "seconds": self.seconds,
            "num_slots": self.buffer.num_steps,
            "collector": self.collector.state_dict(),
            "callbacks": {name: callback.state_dict() for name, callback in self._named_callbacks()},
            "algorithm": self.algorithm.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a saved ``state_dict``; the collector must be fresh. New callbacks start afresh."""
        self.go_on_from(state)
        self.buffer.num_steps = state["num_slots"]
        self.collector.load_state_dict(state["collector"])
        if self.engine.rank != 0:
            self.collector.recent.clear()  # a checkpoint holds the episodes of rank 0
        self.algorithm.load_state_dict(state["algorithm"])
        for name, callback in self._named_callbacks():
            callback.load_state_dict(state["callbacks"].get(name, callback.state_dict()))

    def go_on_from(self, counters: Mapping[str, Any]) -> None:
        """Restore the progress from the entries of a ``state_dict``."""
        self.iteration = self.collector.iteration = counters["iteration"]
        self.env_steps, self.epochs = counters["env_steps"], counters.get("epochs", 0.0)
        self.seconds = counters.get("seconds", 0.0)

    def _named_callbacks(self) -> list[tuple[str, Callback]]:
        """Callbacks by class name, numbered where a name comes twice; those of a run keep theirs."""
        seen: Counter[str] = Counter()
        named = []
        for callback in sorted(self.callbacks, key=lambda one: not type(one).__module__.startswith("groupwise.")):
            seen[name := type(callback).__name__] += 1
            named.append((f"{name}-{seen[name]}" if seen[name] > 1 else name, callback))
        return named
