"""Processes for the user's code: none outlives this process, and one that hangs is killed with its children."""

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from typing import Any

SECONDS_TO_IMPORT = 60.0
"""At least so long may a new process take to import packages."""
SECONDS_TO_CLOSE = 5.0


class LostChildError(Exception):
    """A process died, or gave no answer in time; says which."""


class Child:
    """A process that answers messages, one at a time.

    Args:
        target: calls ``serve`` with the connection, its first argument.
    """

    def __init__(self, target: Callable[..., None], *args: Any, name: str) -> None:
        self._connection, theirs = context().Pipe()
        self.process = start(target, theirs, *args, name=name)
        theirs.close()

    def send(self, message: Any) -> None:
        """Ask for an answer; None ends the process."""
        with suppress(OSError):  # it is dead, as its answer will show
            self._connection.send(message)

    def answer(self, seconds: float, since: float) -> Any:
        """Result and error of the last message; or those of the start, before the first message.

        Args:
            seconds: to wait, counted from ``since`` (of ``time.monotonic``).

        Raises:
            LostChildError: there is no answer. Close it then.
        """
        try:
            if self._connection.poll(max(0.0, since + seconds - time.monotonic())):
                return self._connection.recv()
        except (EOFError, OSError):
            self.process.join(1.0)
            raise LostChildError(f"ended with exit code {self.process.exitcode}") from None
        raise LostChildError(f"took longer than {seconds:g} s")

    def close(self, seconds: float = SECONDS_TO_CLOSE) -> None:
        """End the process and its children; it is killed if it does not end by itself in that time."""
        self.send(None)
        self._connection.close()
        self.process.join(max(0.0, seconds))
        kill(self.process)


def serve(connection: Connection, handler: AbstractContextManager[Callable[[Any], Any]]) -> None:
    """The work of a ``Child``: open the handler, say whether that worked, then answer messages until None.

    An answer is a result, and an error: None, or its type and message, and its traceback.
    """
    with ExitStack() as stack:
        try:
            handle = stack.enter_context(handler)
        except Exception as error:
            connection.send((None, _described(error)))
            return
        connection.send((None, None))
        with suppress(EOFError, ConnectionError):  # the parent is gone
            while (message := connection.recv()) is not None:
                try:
                    connection.send((handle(message), None))
                except Exception as error:
                    connection.send((None, _described(error)))


def _described(error: Exception) -> tuple[str, str]:
    return f"{type(error).__name__}: {error}", "".join(traceback.format_exception(error))


def context() -> ForkServerContext:
    """Makes new processes, rather than copies of this one, which may hold threads and a GPU."""
    return get_context("forkserver")


def start(target: Callable[..., None], *args: Any, name: str, daemon: bool = True) -> BaseProcess:
    """A new process that runs ``target(*args)``. Its children are killed with it; with ``daemon`` it may have none."""
    context().set_forkserver_preload([target.__module__])
    process = context().Process(target=_main, args=(target, *args), daemon=daemon, name=name)
    with _safe_path():
        process.start()
    return process


def kill(process: BaseProcess) -> None:
    """End a process and its children, also after it has ended by itself."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid or 0, signal.SIGKILL)
    process.kill()  # it may not lead its group yet
    process.join()


def _main(target: Callable[..., None], *args: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its processes
    os.setsid()  # a group of its own: its children can be killed with it
    parent = parent_process()
    if sys.platform == "linux" and parent is not None:  # elsewhere it ends when it next waits for a message
        import fcntl

        fcntl.fcntl(parent.sentinel, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(parent.sentinel, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(
            parent.sentinel, fcntl.F_SETFL, os.O_ASYNC
        )  # the kernel signals the group when the parent's end closes
    target(*args)


@contextmanager
def _safe_path() -> Iterator[None]:
    """New interpreters import nothing from the current folder before they have the path of this one."""
    before = os.environ.get("PYTHONSAFEPATH")
    os.environ["PYTHONSAFEPATH"] = "1"
    try:
        yield
    finally:
        del os.environ["PYTHONSAFEPATH"]
        if before is not None:
            os.environ["PYTHONSAFEPATH"] = before
