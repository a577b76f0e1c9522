"""Temporary handlers for signals. Imports no torch."""

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

STOP = (signal.SIGINT, signal.SIGTERM, *((signal.SIGHUP,) if sys.platform != "win32" else ()))
"""Signals that end a run: Ctrl-C, a request of the system, and the end of the terminal."""

ALARM = (signal.SIGALRM,) if sys.platform != "win32" else ()
"""What ``alarm`` sends."""


@contextmanager
def handling(handle: Callable[[int, FrameType | None], None], *numbers: int) -> Iterator[None]:
    """Let ``handle`` take these signals. Outside of the main thread, or with other handlers set, nothing changes."""
    in_main = threading.current_thread() is threading.main_thread()
    before: dict[int, Any] = {number: signal.getsignal(number) for number in numbers if in_main}
    ours = {n: was for n, was in before.items() if was in (signal.default_int_handler, signal.SIG_DFL)}
    for number in ours:
        signal.signal(number, handle)
    try:
        yield
    finally:
        for number, was in ours.items():
            signal.signal(number, was)


def alarm(seconds: int, handle: Callable[[int, FrameType | None], None]) -> None:
    """Send ``ALARM`` to this process in that time (0: no more), if ``handle`` takes it."""
    if sys.platform != "win32" and signal.getsignal(signal.SIGALRM) is handle:
        signal.alarm(seconds)
