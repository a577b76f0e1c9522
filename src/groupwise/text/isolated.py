"""A function in a process of its own, which is killed with its children where a call takes too long."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle

from groupwise import plugins
from groupwise.errors import ConfigError
from groupwise.system import processes


class RemoteError(Exception):
    """The function raised an error: its type and message, with its traceback as a note."""


def described(error: Exception) -> str:
    """Type and message of an error, also of one in another process."""
    return str(error) if isinstance(error, RemoteError) else f"{type(error).__name__}: {error}"


class LostCallError(Exception):
    """The call took too long, or its process died."""


class Isolated:
    """Calls ``function`` in another process, whose limit holds also where a call sleeps, forks or holds the interpreter.

    The process starts with the first call, and again with the next one after it was killed.

    Args:
        name: for messages.
        seconds: limit of each call.

    Raises:
        ConfigError: the function cannot be sent to another process.
    """

    def __init__(self, function: Callable[..., Any], name: str, seconds: float) -> None:
        self._name, self._seconds = name, seconds
        try:
            self._payload = plugins.pickled(function)
        except Exception as error:
            raise ConfigError(
                f"{name} cannot be sent to another process: {error!r}; fix: make locks, files and models inside the "
                "function, or no timeout"
            ) from error
        self._child: processes.Child | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the function returns.

        Raises:
            RemoteError: what it raises.
            LostCallError: it took longer than ``seconds``, or its process died.
            ConfigError: its process does not start.
        """
        if self._child is not None and not self._child.process.is_alive():
            self.close()
        child = self._child or self._start()
        result, error = self._answer(child, self._seconds, (args, kwargs))
        if error is None:
            return result
        message, trace = error
        raised = RemoteError(message)
        raised.add_note(trace)
        raise raised

    def close(self, seconds: float = processes.SECONDS_TO_CLOSE) -> None:
        """End the process and its children."""
        child, self._child = self._child, None
        if child is not None:
            child.close(seconds)

    def _start(self) -> processes.Child:
        self._child = child = processes.Child(_serve, self._payload, name=self._name)
        try:
            _, error = self._answer(child, processes.SECONDS_TO_IMPORT)
            failure = None if error is None else error[1]
        except LostCallError as error:
            failure = str(error)
        if failure is not None:
            self.close()
            raise ConfigError(
                f"the process of {self._name} does not start: {failure}\nfix: a script needs `if __name__ == '__main__':` around "
                "what it runs"
            )
        return child

    def _answer(self, child: processes.Child, seconds: float, message: Any = None) -> Any:
        """The answer to a message; without one, that to the start."""
        try:
            if message is not None:
                child.send(message)
            return child.answer(seconds, time.monotonic())
        except processes.LostChildError as error:
            self.close(0.0)
            raise LostCallError(f"{self._name} {error}") from None
        except BaseException:  # interrupted: an unread answer would be taken for that to the next message
            self.close(0.0)
            raise


def _serve(connection: Connection, payload: bytes) -> None:
    processes.serve(connection, _function(payload))


@contextmanager
def _function(payload: bytes) -> Iterator[Callable[[Any], Any]]:
    function = cloudpickle.loads(payload)
    yield lambda call: function(*call[0], **call[1])
