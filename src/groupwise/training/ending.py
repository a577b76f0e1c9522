"""Training that ends before its end: by Ctrl-C, a kill, or an error. What is finished first, what is kept, how to go on."""

import logging
import re
import signal
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType

from groupwise import plugins
from groupwise.config.algorithm import AlgorithmCfg, GRPOCfg
from groupwise.errors import DataError, DivergedError, GroupwiseError
from groupwise.report.folder import RunFolder
from groupwise.training.checkpoint import saved_steps
from groupwise.training.signals import handling
from groupwise.training.trainer import Trainer

log = logging.getLogger(__name__)


@contextmanager
def finishing_on_signal(trainer: Trainer) -> Iterator[None]:
    """Let the first SIGINT or SIGTERM end training after the running iteration, and the second at once.

    Where signals cannot be caught (outside of the main thread), or somebody else does, nothing changes.
    """

    def handle(number: int, frame: FrameType | None) -> None:
        if trainer.interrupted:
            raise KeyboardInterrupt
        trainer.interrupt()
        log.warning("interrupted: the running iteration is finished and saved first; a second time stops at once")

    with handling(handle, signal.SIGINT, signal.SIGTERM):
        yield


@contextmanager
def closing_after(close: Callable[[], None]) -> Iterator[None]:
    """Close in the end. After an error, that error is raised, whatever closing what it broke may raise."""
    try:
        yield
    except BaseException:
        with suppress(Exception):
            close()
        raise
    close()


@contextmanager
def preparing() -> Iterator[None]:
    """Note on errors of others that training had not begun."""
    try:
        yield
    except GroupwiseError:
        raise
    except Exception as error:
        name = type(error).__name__
        error.add_note(
            f"groupwise: {name} came while the environments were made and tried out; nothing was trained; once it is "
            "fixed, give the command again"
        )
        raise


def is_interruption(error: BaseException, trainer: Trainer) -> bool:
    """Whether somebody's interrupt ended training: itself, or what it did to environments, whose processes it reaches, too."""
    theirs = trainer.doing == "collecting" and not isinstance(error, DataError | DivergedError)
    return isinstance(error, KeyboardInterrupt) or (trainer.interrupted and theirs)


def interruption(error: BaseException, folder: RunFolder, given: Sequence[str]) -> str:
    """What to say to who interrupted.

    Args:
        error: what ended training: the interrupt, or what came while the iteration was finished for its sake.
        given: what the run was given as Python objects.
    """
    besides = "" if isinstance(error, KeyboardInterrupt) else f", and meanwhile the rollout ended with {error!r}"
    steps = saved_steps(folder.latest)
    kept = "nothing was saved yet, so that it will begin again" if steps is None else f"saved after step {steps:,}"
    return f"interrupted{besides}; {kept}; go on with: {_resume(folder, given)}"


def failure(
    error: BaseException,
    trainer: Trainer,
    algorithm: AlgorithmCfg,
    env_id: str,
    folder: RunFolder,
    given: Sequence[str],
) -> str:
    """What to say below an error that ended training: where it was, what is kept, how to go on."""
    steps = saved_steps(folder.latest)
    kept = "nothing was saved yet" if steps is None else f"what was learned until step {steps:,} is in {folder.latest}"
    collecting = trainer.doing == "collecting"
    where = f"in iteration {trainer.iteration + 1}" if collecting else f"after iteration {trainer.iteration}"
    parts = [
        f"groupwise: {type(error).__name__} ended training on {env_id} {where} (step {trainer.env_steps:,})",
        kept,
        f"when it is fixed, go on with: {_resume(folder, given)}",
    ]
    groups = isinstance(algorithm, GRPOCfg) and algorithm.collection.on_env_error == "raise"
    if collecting and groups and _is_of_a_row(error):
        parts.append("collection.on_env_error='retry' or 'drop' would do without the episode")
    return "; ".join(parts)


def _is_of_a_row(error: BaseException) -> bool:
    """Whether a step of one row raised it, here (which a note says) or in a worker (whose message it is)."""
    return bool(re.search(r"^in row \d+ of ", "".join(traceback.format_exception_only(error)), re.MULTILINE))


def _resume(folder: RunFolder, given: Sequence[str]) -> str:
    if not given:
        return f"groupwise resume {folder.path}{plugins.options(plugins.loaded())}"
    return f"gw.resume({str(folder.path)!r}, {', '.join(f'{name}=...' for name in given)})"
