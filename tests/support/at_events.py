"""Callbacks of one event."""

from collections.abc import Callable
from typing import Any

import groupwise as gw


def on(event: str, do: Callable[..., Any]) -> gw.Callback:
    """A callback that calls ``do(trainer, ...)`` at ``on_<event>``."""
    return type("On", (gw.Callback,), {f"on_{event}": lambda self, *args: do(*args)})()


def interrupt_after(iteration: int) -> gw.Callback:
    """A callback that interrupts training after an iteration."""
    return on("iteration_end", lambda trainer, *_: trainer.interrupt() if trainer.iteration == iteration else None)


def fail(error: BaseException) -> Any:
    """A function that raises it."""

    def do(*args: Any) -> None:
        raise error

    return do
