"""Training that ends before its end: by Ctrl-C, a kill, or an error. What is finished first, what is kept, how to go on."""

import logging
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType

from groupwise.algorithms.configs import AlgorithmCfg, GRPOCfg
from groupwise.errors import GroupwiseError
from groupwise.report.folder import RunFolder
from groupwise.training.checkpoint import saved_steps
from groupwise.training.trainer import Trainer

log = logging.getLogger(__name__)

_DEFAULTS = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}


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

    in_main = threading.current_thread() is threading.main_thread()
    ours = {number: default for number, default in _DEFAULTS.items() if in_main and signal.getsignal(number) == default}
    for number in ours:
        signal.signal(number, handle)
    try:
        yield
    finally:
        for number, default in ours.items():
            signal.signal(number, default)


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
            "mended, give the command again"
        )
        raise


def interruption(folder: RunFolder, given: Sequence[str]) -> str:
    """What to say to who interrupted.

    Args:
        given: what the run was given as Python objects.
    """
    steps = saved_steps(folder.latest)
    kept = "nothing was saved yet, so that it will begin again" if steps is None else f"saved after step {steps:,}"
    return f"interrupted; {kept}; go on with: {_resume(folder, given)}"


def failure(
    error: Exception, trainer: Trainer, algorithm: AlgorithmCfg, env_id: str, folder: RunFolder, given: Sequence[str]
) -> str:
    """What to say below an error that ended training: where it was, what is kept, how to go on."""
    steps = saved_steps(folder.latest)
    kept = "nothing was saved yet" if steps is None else f"what was learned until step {steps:,} is in {folder.latest}"
    where = f"in iteration {trainer.iteration + 1}" if trainer.collecting else f"after iteration {trainer.iteration}"
    parts = [
        f"groupwise: {type(error).__name__} ended training on {env_id} {where} (step {trainer.env_steps:,})",
        kept,
        f"when it is mended, go on with: {_resume(folder, given)}",
    ]
    if trainer.collecting and isinstance(algorithm, GRPOCfg) and algorithm.collection.lost_member == "raise":
        parts.append("collection.lost_member='complete' or 'drop' would do without the attempt")
    return "; ".join(parts)


def _resume(folder: RunFolder, given: Sequence[str]) -> str:
    if not given:
        return f"groupwise resume {folder.path}"
    return f"gw.resume({str(folder.path)!r}, {', '.join(f'{name}=...' for name in given)})"
