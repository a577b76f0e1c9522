"""Training that ends early, by Ctrl-C, a signal or an error: what is saved, and the message how to continue."""

import logging
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from groupwise import plugins
from groupwise.config.algorithm import GRPOCfg
from groupwise.errors import DataError, DivergedError
from groupwise.report.folder import RunFolder
from groupwise.training.checkpoint import saved_steps
from groupwise.training.components import Components, UserObjects
from groupwise.training.signals import handling
from groupwise.training.trainer import Trainer

log = logging.getLogger(__name__)


@contextmanager
def finishing_on_signal(trainer: Trainer) -> Iterator[None]:
    """Let the first SIGINT or SIGTERM end training after the running iteration, and the second at once."""

    def handle(number: int, frame: FrameType | None) -> None:
        if trainer.interrupted:
            raise KeyboardInterrupt
        trainer.interrupt()
        log.warning("interrupted: finishing and saving this iteration; interrupt again to stop at once")

    with handling(handle, signal.SIGINT, signal.SIGTERM):
        yield


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


def is_interruption(error: BaseException, trainer: Trainer) -> bool:
    """Whether an interrupt ended training: itself, or an error it caused in environments, whose processes it reaches, too."""
    of_rollout = trainer.doing == "collecting" and not isinstance(error, DataError | DivergedError)
    return isinstance(error, KeyboardInterrupt) or (trainer.interrupted and of_rollout)


def interruption(error: BaseException, folder: RunFolder, given: UserObjects) -> str:
    """The message of an interrupted run."""
    besides = "" if isinstance(error, KeyboardInterrupt) else f" (the rollout ended with {error!r})"
    return f"interrupted{besides}; {_saved(folder)}; continue with: {_resume(folder, given)}"


def failure(error: BaseException, trainer: Trainer, parts: Components, folder: RunFolder) -> str:
    """The note on an error that ended training: where it was, what is saved, how to continue."""
    collecting = trainer.doing == "collecting"
    where = f"in iteration {trainer.iteration + 1}" if collecting else f"after iteration {trainer.iteration}"
    algorithm = parts.cfg.algorithm
    lines = [
        f"groupwise: {type(error).__name__} ended training on {parts.identity.env_id} {where} (step {trainer.env_steps:,})",
        _saved(folder),
        f"when it is fixed, continue with: {_resume(folder, parts.given)}",
    ]
    groups = isinstance(algorithm, GRPOCfg) and algorithm.collection.on_env_error == "raise"
    if collecting and groups and not isinstance(error, DataError):
        lines.append("if the environment fails now and then: collection.on_env_error='retry' or 'drop'")
    return "; ".join(lines)


def _saved(folder: RunFolder) -> str:
    steps = saved_steps(folder.latest)
    return "nothing was saved yet" if steps is None else f"saved after step {steps:,}"


def _resume(folder: RunFolder, given: UserObjects) -> str:
    if not given.names():
        return f"groupwise resume {folder.path}{plugins.options(plugins.loaded())}"
    return f"gw.resume({str(folder.path)!r}, {', '.join(f'{name}=...' for name in given.names())})"
