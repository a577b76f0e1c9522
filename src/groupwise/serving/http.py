"""JSON over HTTP, with time limits and repetition."""

import json
import logging
import selectors
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from socket import SHUT_RDWR, socket
from typing import Any
from urllib.parse import urlsplit

from groupwise.errors import ServerError

log = logging.getLogger(__name__)

HEALTH = "/health"
"""Where a server says at once that it lives, also when it is busy."""
MAX_ANSWER = 2**30
"""Most bytes of an answer."""
SECONDS_TO_CONNECT = 10.0
"""A server that is busy accepts connections; one that is cut off or stopped does not, and nobody says so."""
_FIRST_WAIT, _LONGEST_WAIT = 0.25, 10.0
"""Seconds between two tries; they double each time."""
_HEALTH_INTERVAL = 5.0
"""Seconds without an answer after which a server is asked whether it is healthy."""
_QUIET = 5.0
"""Seconds without another warning."""


class NoAnswerError(Exception):
    """A call that may be repeated."""


class RestartedError(ServerError):
    """The server was started again at another address, so it has nothing of what it was given."""


class RefusedError(ServerError):
    """The server understood a call and refused it.

    Args:
        status: HTTP's.
    """

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class HttpClient:
    """Calls of one server. Each uses a connection of its own, so that threads may share the client.

    Args:
        url: scheme, host and port.
        timeout: seconds of one try of a call, of which a connection gets ``SECONDS_TO_CONNECT``.
        retries: how often a call is repeated that got no answer or an error of the server (5xx).
        last_lines: what the server printed, to explain why it gives no answer.
        locate: where the server was last ready, if something restarts it. Calls wait for that.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout: float,
        retries: int,
        last_lines: Callable[[], str] = str,
        locate: Callable[[], str | None] | None = None,
    ) -> None:
        self.url, self.timeout, self.retries, self._last_lines = url, timeout, retries, last_lines
        self._locate = locate
        self._warned = -_QUIET
        self._running: dict[HTTPConnection, socket] = {}
        self._closed = threading.Event()
        self._of_thread = threading.local()

    @property
    def failures(self) -> int:
        """Tries of calls of this thread that got no answer."""
        return getattr(self._of_thread, "failures", 0)

    def get(self, path: str) -> Any:
        """The JSON of an answer."""
        return self._call("GET", path, None)

    def post(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """The JSON of an answer; None if it is empty or plain text."""
        return self._call("POST", path, body or {})

    def close(self) -> None:
        """End the calls that run, and all later ones, by a ``ServerError``."""
        self._closed.set()
        for connection in tuple(self._running.values()):
            with suppress(OSError):  # it has just ended
                connection.shutdown(SHUT_RDWR)

    def is_healthy(self) -> bool:
        """Whether the server answers at ``/health``, asked once."""
        try:
            self._try("GET", HEALTH, None)
        except (NoAnswerError, RefusedError):
            return False
        return True

    def _call(self, method: str, path: str, body: Mapping[str, Any] | None) -> Any:
        wait = _FIRST_WAIT
        for number in range(self.retries + 1):
            try:
                return self._try(method, path, body)
            except NoAnswerError as error:
                last = error
                self._of_thread.failures = self.failures + 1
            if number < self.retries and self._locate is not None:
                self._follow(self._locate)
            if self._closed.is_set():
                raise ServerError(f"{self.url}{path}: the client was closed")
            if number < self.retries:
                self._warn(f"{self.url}{path}: {last}; trying again")
                self._closed.wait(wait)
                wait = min(2 * wait, _LONGEST_WAIT)
        raise ServerError(
            f"{self.url}{path}: no answer in {self.retries + 1} tries: {last}; fix: look at the server's log, start it "
            f"again, and resume the run{self._last_lines()}"
        )

    def _follow(self, locate: Callable[[], str | None]) -> None:
        """Wait until the server is healthy; a ``RestartedError`` if its address has changed."""
        seconds = 2 * self.timeout  # for another start, and before for others to notice
        until = time.monotonic() + seconds
        while not self._closed.is_set():
            url = locate() or self.url
            if self._probe(url).is_healthy():
                if url == self.url:
                    return
                before, self.url = self.url, url
                raise RestartedError(f"{before} was started again at {url}")
            if time.monotonic() > until:
                raise ServerError(f"{self.url} was lost, and not started again in {seconds:g} s{self._last_lines()}")
            self._closed.wait(_FIRST_WAIT)

    def _warn(self, message: str) -> None:
        """Log it, unless there was one a moment ago: calls fail together."""
        now = time.monotonic()
        if now > self._warned + _QUIET:
            self._warned = now
            log.warning("%s", message)

    def _try(self, method: str, path: str, body: Mapping[str, Any] | None) -> Any:
        parts = urlsplit(self.url)
        kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
        connection = kind(parts.hostname or "", parts.port, timeout=min(self.timeout, SECONDS_TO_CONNECT))
        data = None if body is None else json.dumps(body).encode()
        until = time.monotonic() + self.timeout
        try:
            try:
                connection.connect()
            except TimeoutError:
                raise NoAnswerError(f"no connection in {connection.timeout:g} s") from None
            connection.sock.settimeout(self.timeout)
            self._running[connection] = connection.sock
            if self._closed.is_set():  # asked for last: ``close`` may not have seen this call
                raise NoAnswerError("the client was closed")
            connection.request(method, path, data, {"Content-Type": "application/json"})
            self._wait(connection.sock, until)
            response = connection.getresponse()
            text = bytearray()
            while part := response.read1(2**16):
                text += part
                if time.monotonic() > until:
                    raise TimeoutError("the answer took too long")
                if len(text) > MAX_ANSWER:
                    raise ServerError(f"{self.url}{path}: an answer of more than {MAX_ANSWER:,} bytes")
            if response.length:  # read1 does not say that the connection was cut
                raise NoAnswerError(f"the connection was cut, {response.length} bytes before the end of the answer")
        except TimeoutError:
            raise NoAnswerError(f"it took longer than {self.timeout:g} s") from None
        except (OSError, HTTPException) as error:
            raise NoAnswerError(f"{type(error).__name__}: {error}") from None
        finally:
            self._running.pop(connection, None)
            connection.close()
        return self._read(path, response.status, response.getheader("Content-Type") or "", bytes(text))

    def _wait(self, connection: socket, until: float) -> None:
        """Return when an answer begins. A server that dies may hold a call open: meanwhile its health is asked for."""
        with selectors.DefaultSelector() as selector:
            selector.register(connection, selectors.EVENT_READ)
            while not selector.select(min(_HEALTH_INTERVAL, max(0.0, until - time.monotonic()))):
                if time.monotonic() >= until:
                    raise TimeoutError
                # a shorter time limit is that of such a question itself
                if self.timeout > _HEALTH_INTERVAL and not self._probe(self.url).is_healthy():
                    raise NoAnswerError("it gives no answer, and is not healthy")

    def _probe(self, url: str) -> "HttpClient":
        return HttpClient(url, timeout=_HEALTH_INTERVAL, retries=0)

    def _read(self, path: str, status: int, kind: str, text: bytes) -> Any:
        if status >= 300:
            said = f"status {status}: {text[:2000].decode(errors='replace')}"
            if status >= 500 or status == 429:
                raise NoAnswerError(said)
            raise RefusedError(f"{self.url}{path} was refused: {said}", status)
        if "json" not in kind or not text:
            return None
        try:
            return json.loads(text)
        except ValueError:
            raise ServerError(f"{self.url}{path} answered no JSON: {text[:200]!r}") from None
