"""A function in a process of its own, which is killed with its children where a call takes too long."""

import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import cloudpickle

from groupwise import processes
from groupwise.errors import ConfigError

_SECONDS_TO_IMPORT = 60.0
_SECONDS_TO_CLOSE = 5.0


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
            self._payload = processes.pickled(function)
        except Exception as error:
            raise ConfigError(
                f"{name} cannot be sent to another process: {error!r}; fix: make locks, files and models inside the "
                "function, or no timeout"
            ) from error
        self._process: BaseProcess | None = None
        self._connection: Connection | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the function returns.

        Raises:
            RemoteError: what it raises.
            LostCallError: it took longer than ``seconds``, or its process died.
            ConfigError: its process does not start.
        """
        if self._process is not None and not self._process.is_alive():
            self.close()
        if self._process is None:
            self._start()
        result, error = self._exchange((args, kwargs), self._seconds)
        if error is None:
            return result
        message, trace = error
        raised = RemoteError(message)
        raised.add_note(trace)
        raise raised

    def close(self) -> None:
        """End the process and its children."""
        process, connection = self._process, self._connection
        self._process = self._connection = None
        if process is None or connection is None:
            return
        with suppress(OSError):
            connection.send(None)
        process.join(_SECONDS_TO_CLOSE)
        processes.kill(process)
        connection.close()

    def _start(self) -> None:
        self._connection, theirs = processes.context().Pipe()
        self._process = processes.start(_serve, theirs, self._payload, name=self._name)
        theirs.close()
        try:
            failure = self._exchange(None, _SECONDS_TO_IMPORT)
        except LostCallError as error:
            failure = str(error)
        if failure is not None:
            self.close()
            raise ConfigError(
                f"the process of {self._name} does not start: {failure}\nfix: a script needs `if __name__ == '__main__':` around "
                "what it runs"
            )

    def _exchange(self, message: Any, seconds: float) -> Any:
        """The answer to a message, or the first one to None."""
        process, connection = self._process, self._connection
        assert process is not None
        assert connection is not None
        try:
            if message is not None:
                connection.send(message)
            if connection.poll(seconds):
                return connection.recv()
            why = f"took longer than {seconds:g} s"
        except (EOFError, OSError):
            process.join()
            why = f"ended its process with exit code {process.exitcode}"
        except BaseException:  # interrupted: an unread answer would be taken for that to the next message
            processes.kill(process)
            self.close()
            raise
        processes.kill(process)
        self.close()
        raise LostCallError(f"{self._name} {why}")


def _serve(connection: Connection, payload: bytes) -> None:
    """The main function of the process: says whether it could load the function, then answers calls until None."""
    try:
        function = cloudpickle.loads(payload)
    except Exception:
        connection.send(traceback.format_exc())
        return
    connection.send(None)
    with suppress(EOFError, ConnectionError):  # the parent is gone
        while (message := connection.recv()) is not None:
            args, kwargs = message
            try:
                connection.send((function(*args, **kwargs), None))
            except Exception as error:
                connection.send((None, (f"{type(error).__name__}: {error}", traceback.format_exc())))
