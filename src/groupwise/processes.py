"""Processes for the user's code: none outlives this process, and one that hangs is killed with its children."""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing import get_context, parent_process
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from typing import Any

import cloudpickle

from groupwise import plugins


def context() -> ForkServerContext:
    """Makes new processes, rather than copies of this one, which may hold threads and a GPU."""
    return get_context("forkserver")


def start(target: Callable[..., None], *args: Any, name: str) -> BaseProcess:
    """A new process that runs ``target(*args)``. Its children are killed with it."""
    context().set_forkserver_preload([target.__module__])
    process = context().Process(target=_main, args=(target, *args), daemon=True, name=name)
    with _safe_path():
        process.start()
    return process


def kill(process: BaseProcess) -> None:
    """End a process and its children, also after it has ended by itself."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid or 0, signal.SIGKILL)
    process.kill()  # it may not lead its group yet
    process.join()


def pickled(thing: object) -> bytes:
    """``thing`` for a new process; the code of plugin files, which could not be imported there, goes along."""
    with ExitStack() as stack:
        for module in plugins.modules():
            cloudpickle.register_pickle_by_value(module)
            stack.callback(cloudpickle.unregister_pickle_by_value, module)
        payload: bytes = cloudpickle.dumps(thing)
        return payload


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
