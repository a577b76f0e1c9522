"""Calls of functions that may fail or never return.

Functions run in threads: they are closures over models, clients and open files, which no other process has, and a fork of
a process with a GPU is none that works. A thread cannot be stopped, but it can be left behind, and does not keep the
process from ending. One thing this cannot help against is a call that never lets another thread run, such as a regular
expression that explodes; what groupwise itself applies to completions and could do so runs in a process of its own
(``sandbox``).
"""

import asyncio
import functools
import inspect
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any

Function = Callable[..., Any]


class CallTimeoutError(Exception):
    """A call took longer than it may."""


class Calls:
    """Starts calls, sync and async; async ones share one event loop, so that they run at the same time."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self, function: Function, arguments: dict[str, Any], limit: float | None) -> Callable[[], Any]:
        """What waits for the call and returns its result.

        Sync functions begin only then, one after another; with no limit, in the caller's thread.

        Raises (what is returned):
            CallTimeoutError: it took longer than ``limit`` seconds from its beginning.
            Exception: whatever the function raises.
        """
        if is_async(function):
            future = asyncio.run_coroutine_threadsafe(_await(function, arguments), self._running_loop())
            return functools.partial(self._finish_async, future, limit, time.monotonic())
        if limit is None:
            return functools.partial(function, **arguments)
        return lambda: _result(_in_thread(functools.partial(function, **arguments)), limit)

    def close(self) -> None:
        """End the event loop."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._loop = None

    def _finish_async(self, future: Future[Any], limit: float | None, began: float) -> Any:
        try:
            return _result(future, None if limit is None else max(0.0, began + limit - time.monotonic()))
        except CallTimeoutError:
            future.cancel()
            self._leave_blocked_loop()
            raise

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=_run_loop, args=(self._loop,), daemon=True, name="rewards").start()
        return self._loop

    def _leave_blocked_loop(self) -> None:
        """Take another loop if a function holds this one; whatever else is bound to it would wait for ever."""
        if self._loop is None:
            return
        beat = asyncio.run_coroutine_threadsafe(_beat(), self._loop)
        if not wait([beat], timeout=1.0).done:
            self.close()


def is_async(function: Function) -> bool:
    """Whether a call returns a coroutine: of functions, partial functions and objects that are called."""
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def _result(future: Future[Any], limit: float | None) -> Any:
    if not wait([future], timeout=limit).done:
        raise CallTimeoutError
    return future.result()


def _in_thread(call: Callable[[], Any]) -> Future[Any]:
    future: Future[Any] = Future()
    threading.Thread(target=_settle, args=(future, call), daemon=True, name="reward").start()
    return future


def _settle(future: Future[Any], call: Callable[[], Any]) -> None:
    try:
        future.set_result(call())
    except BaseException as error:  # raised again where the result is waited for
        future.set_exception(error)


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    try:
        loop.run_forever()
    finally:
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


async def _await(function: Function, arguments: dict[str, Any]) -> Any:
    return await function(**arguments)


async def _beat() -> None: ...
