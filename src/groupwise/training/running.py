"""A run from its first or next iteration to its end, with its run folder."""

import logging
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from groupwise import plugins
from groupwise.config.algorithm import GRPOCfg
from groupwise.config.run import RunCfg, TextRunCfg
from groupwise.engines.base import Engine
from groupwise.errors import CheckpointError, DataError, DivergedError, GroupwiseError, ServerError
from groupwise.policies.base import Policy
from groupwise.report.curve import plot_curve
from groupwise.report.folder import RunFolder
from groupwise.report.scores import SCORES, scores_of
from groupwise.seeding import derive_seed
from groupwise.system import files
from groupwise.system.terminal import show
from groupwise.training.base import Callback
from groupwise.training.callbacks import Evaluate, build_callbacks
from groupwise.training.checkpoint import has_checkpoint, load_checkpoint, load_policy, load_state, saved_counts
from groupwise.training.components import Components, UserObjects, threads
from groupwise.training.saving import MetricsLog
from groupwise.training.signals import ALARM, STOP, alarm, handling
from groupwise.training.trainer import PAUSED, Trainer

log = logging.getLogger(__name__)

SMALL_TENSOR = 2**17
"""Elements; networks without larger matrices run fastest on one thread."""
SECONDS_TO_FINISH = 20
"""Time that an iteration has after a signal. A cluster often kills 30 s after it."""
MAX_ERROR = 300
"""Characters of an error in the summary."""


def run(
    parts: Components, folder: RunFolder, users: Sequence[Callback], engine: Engine, *, resume: bool
) -> dict[str, Any]:
    """Train to the end; the summary. The caller closes the parts."""
    with threads_for(parts.policy), closing(engine), ExitStack() as stack:
        evaluator = parts.evaluator() if engine.rank == 0 else None
        if evaluator is not None:
            stack.enter_context(closing_after(evaluator.close))
        trainer = Trainer(
            parts.algorithm,
            parts.collector,
            parts.buffer,
            num_steps=parts.cfg.algorithm.num_steps,
            total_steps=parts.cfg.total_steps,
            total_iterations=parts.cfg.total_iterations,
            total_epochs=parts.cfg.total_epochs if isinstance(parts.cfg, TextRunCfg) else None,
            seed=parts.cfg.seed,
            callbacks=build_callbacks(parts, folder, users, evaluator, engine.rank),
            engine=engine,
            run_dir=folder.path,
        )
        if resume:
            _load(trainer, parts, folder, engine)
        begun = trainer.iteration
        summary = _train_and_report(trainer, parts, folder, engine)
        if resume and trainer.iteration == begun and engine.rank == 0 and trainer.stop_reason != PAUSED:
            _print(f"nothing was left to train ({summary['stopped']}); fix: a larger {parts.cfg.budget.name}")
        if engine.rank == 0 and trainer.stop_reason != PAUSED:
            with files.warning_if_unwritable(folder.video):
                parts.render(folder.video, derive_seed(parts.cfg.seed, "evaluation"))
            with files.warning_if_unwritable(folder.frames):
                parts.render_groups(folder)
    return summary


def _load(trainer: Trainer, parts: Components, folder: RunFolder, engine: Engine) -> None:
    """Load the latest checkpoint, and cut the logs back to it. A run without a checkpoint begins again."""
    where = "; no checkpoint was saved, so training begins again"
    if has_checkpoint(folder.latest):
        checkpoint = load_checkpoint(folder.latest, parts.identity, parts.policy)
        load_policy(parts.policy, checkpoint.policy, folder.latest)
        engine.load_learner(parts.algorithm.learner, parts.policy)
        if "algorithm" in checkpoint.state:
            load_state(trainer, checkpoint.state, folder.latest)
        else:  # a fork of the best one
            _begin_with_weights(trainer, parts, checkpoint.state)
        where = ""
    else:
        interval, budget = parts.cfg.checkpoint_interval, parts.cfg.budget
        folder.check_never_saved(*(("env_steps", interval) if interval else (budget.metric, budget.tenth)))
    if engine.rank == 0:
        folder.remove_leftovers()
        folder.truncate_metrics(trainer.iteration)
        budget, saved = trainer.budget, folder.read_config()
        if saved.get(budget.name) != budget.total:
            folder.rewrite_config(parts.cfg.model_dump(mode="json"))
        _print(f"resuming from {budget.unit.removesuffix('s')} {trainer.done:,} of {budget.total:,}{where}")


def _begin_with_weights(trainer: Trainer, parts: Components, state: dict[str, Any]) -> None:
    """Begin where the best evaluation was, also in the data, with a new optimiser."""
    trainer.go_on_from(state)
    trainer.collector.position = state.get("position", 0)
    for callback in trainer.callbacks:
        if isinstance(callback, Evaluate):
            callback.best_score = state.get(SCORES[parts.metric])


def _train_and_report(trainer: Trainer, parts: Components, folder: RunFolder, engine: Engine) -> dict[str, Any]:
    """Train; write summary and curve, also after an error."""
    cfg, stopped, failure = parts.cfg, "failed", {}
    try:
        with finishing_on_signal(trainer):
            trainer.train()
        stopped = trainer.stop_reason or trainer.budget.name
    except (KeyboardInterrupt, Exception) as error:
        if _is_interruption(error, trainer):
            stopped = "interrupted"
            besides = "" if isinstance(error, KeyboardInterrupt) else f" (the rollout ended with {error!r})"
            raise KeyboardInterrupt(f"interrupted{besides}; {_how_to_continue(folder, parts.given)}") from error
        error.add_note(_failure(error, trainer, parts, folder))
        failure = {"error": " ".join(f"{type(error).__name__}: {error}".split())[:MAX_ERROR]}
        raise
    finally:
        summary = {parts.kind: cfg.subject, "algorithm": cfg.algorithm.name, "seed": cfg.seed, "stopped": stopped}
        summary |= failure
        if engine.rank == 0:
            try:
                _report(summary, trainer, parts, folder)
            except GroupwiseError as error:
                if stopped not in ("failed", "interrupted"):
                    raise
                log.warning("no summary: %s", error)  # it must not take the place of what ended training
    return summary


def _report(summary: dict[str, Any], trainer: Trainer, parts: Components, folder: RunFolder) -> None:
    """Complete the summary; write it, and the curve."""
    metrics = folder.read_metrics()
    summary |= scores_of(metrics, parts.metric) | peak_memory(parts.policy.device) | parts.summary_fields()
    summary["disk_mib"] = round(files.size(folder.path) / files.MIB, 1)
    unsaved = {
        "unsaved_env_steps": trainer.env_steps - saved_counts(folder.latest)["steps"],
        "unlogged_iterations": sum(len(c.waiting) for c in trainer.callbacks if isinstance(c, MetricsLog)),
    }
    summary |= {name: count for name, count in unsaved.items() if count}
    with files.warning_if_unwritable(folder.summary):
        folder.write_summary(summary)
    if trainer.stop_reason == PAUSED:
        return  # it goes on, and may do so many times
    with files.warning_if_unwritable(folder.curve):
        title = f"{summary[parts.kind]}, {summary['algorithm']}, seed {summary['seed']}"
        plot_curve(metrics, folder.curve, title, *parts.axes)


@contextmanager
def finishing_on_signal(trainer: Trainer) -> Iterator[None]:
    """Let the first signal of ``STOP`` end training after the running iteration, and the second at once.

    A rollout that can be collected again is left at the first. The second may be an alarm after ``SECONDS_TO_FINISH``. It waits for an update, which would be lost, and for what saves.
    """

    def handle(number: int, frame: FrameType | None) -> None:
        if not trainer.interrupted:
            trainer.interrupt()
            alarm(SECONDS_TO_FINISH, handle)
            if trainer.doing == "collecting" and trainer.collector.repeatable and trainer.engine.world_size == 1:
                raise KeyboardInterrupt
            with suppress(Exception):  # the terminal may be gone, or in the middle of another line
                log.warning("interrupted: finishing and saving this iteration; interrupt again to stop at once")
        elif number in ALARM and (trainer.doing == "updating" or trainer.ending):
            alarm(1, handle)
        else:
            raise KeyboardInterrupt

    with handling(handle, *STOP, *ALARM):
        try:
            yield
        finally:
            alarm(0, handle)


@contextmanager
def closing_after(close: Callable[[], None]) -> Iterator[None]:
    """Close in the end. After an error, that error is raised, also if closing fails."""
    try:
        yield
    except BaseException:
        with suppress(Exception):
            close()
        raise
    close()


def _is_interruption(error: BaseException, trainer: Trainer) -> bool:
    """Whether an interrupt ended training: itself, or an error it caused in environments, whose processes it reaches, too."""
    of_rollout = trainer.doing == "collecting" and not isinstance(error, DataError | DivergedError)
    return isinstance(error, KeyboardInterrupt) or (trainer.interrupted and of_rollout)


def _failure(error: BaseException, trainer: Trainer, parts: Components, folder: RunFolder) -> str:
    """The note on an error that ended training: where it was, what is saved, how to continue."""
    collecting = trainer.doing == "collecting"
    where = f"in iteration {trainer.iteration + 1}" if collecting else f"after iteration {trainer.iteration}"
    algorithm = parts.cfg.algorithm
    lines = [
        f"groupwise: {type(error).__name__} ended training on {parts.identity.env_id} {where} (step {trainer.env_steps:,})",
        _how_to_continue(folder, parts.given),
    ]
    groups = isinstance(algorithm, GRPOCfg) and algorithm.collection.on_env_error == "raise"
    # gloo raises a RuntimeError that begins with the place in its sources
    lost_rank = isinstance(error, dist.DistError) or "/gloo/transport/" in str(error)
    if lost_rank:
        lines.append(
            f"another process has ended, or gave no answer in ddp_timeout={parts.cfg.ddp_timeout:g} s: its own error says why; "
            "without one, look at the network between the machines"
        )
    elif (collecting and not isinstance(error, ServerError)) or isinstance(error, DataError):
        lines.append(
            f"a resumed run takes the same steps and meets the same error: first change its cause, or {folder.config}"
        )
    if collecting and groups and isinstance(parts.cfg, RunCfg) and not (lost_rank or isinstance(error, DataError)):
        lines.append("if the environment fails now and then: algorithm.collection.on_env_error='retry' or 'drop'")
    return "; ".join(lines)


def _how_to_continue(folder: RunFolder, given: UserObjects) -> str:
    """What is saved, and the command that continues from there."""
    try:
        steps = saved_counts(folder.latest)["steps"]
        saved = f"saved after step {steps:,}" if steps else "nothing was saved yet"
    except CheckpointError as error:  # it must not take the place of what ended training
        saved = str(error)
    return f"{saved}; continue with: {plugins.resume_command(folder.path, given.names(), plugins.loaded())}"


def threads_for(policy: Policy) -> AbstractContextManager[None]:
    """One thread for small networks on the CPU, where more only add overhead."""
    small = all(p.dim() <= 2 and p.numel() <= SMALL_TENSOR for p in policy.parameters())
    return threads(1 if small else torch.get_num_threads())


def peak_memory(device: torch.device) -> dict[str, float]:
    """Peak memory in MiB: resident, of this process without its workers (on Linux), and of torch's tensors on a GPU."""
    found = {}
    status = Path("/proc/self/status")  # ru_maxrss would count the parent process, too
    if status.is_file() and (resident := re.search(r"VmHWM:\s*(\d+) kB", status.read_text())):
        found["peak_memory_mib"] = round(int(resident[1]) / 1024, 1)
    if device.type == "cuda":
        found["peak_gpu_memory_mib"] = round(torch.cuda.max_memory_allocated(device) / 2**20, 1)
    return found


def _print(line: str) -> None:
    show(line, to="stderr")
