"""A vLLM server of one's own: a process of another virtual environment, which ends with this one."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from random import SystemRandom
from typing import NoReturn

from groupwise.errors import ConfigError, ServerError
from groupwise.serving.http import HttpClient
from groupwise.serving.vllm import ENVIRONMENT, FLAGS

HOST = "127.0.0.1"
_PORTS = range(20_000, 32_768)
"""Below those that a system gives to programs that ask for any, so none of these takes one before the server does."""
_LAST_LINES, _ERRORS = 10, 5
_SECONDS_TO_END = 10.0
_HEALTH_SECONDS = 4.0
_LEAD = """
import os, signal, subprocess, sys

server = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL)
if os.fork() == 0:  # not this process, which some kill with its parent
    os.read(0, 1)  # returns when the other end is gone
    os.killpg(0, signal.SIGKILL)
os._exit(server.wait() & 255)
"""
"""Leads the server's group of processes, which ends with the process that started it."""


def command(python: Path, model: str, args: Sequence[str] = (), *, lora_rank: int | None = None) -> list[str]:
    """The command line of a server of a model, without its address.

    Args:
        lora_rank: largest rank of adapters. None: there will be none.
    """
    # not `vllm serve`: builds for CPUs lack its entry point
    words = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", model, *FLAGS]
    if lora_rank is not None:
        ranks = (8, 16, 32, 64, 128, 256, 320, 512)  # those that vLLM knows
        words += [
            "--enable-lora",
            "--max-lora-rank",
            str(next((rank for rank in ranks if rank >= lora_rank), lora_rank)),
        ]
    return [*words, *args]


class LocalServer:
    """A server that runs as long as this process, or until ``close``, also if this process is killed.

    Args:
        words: the command line, without the address.
        log: file for what it prints.
        timeout: seconds that its start may take.
        host: address of this machine at which it listens.
        port: 0 for a free one.
    """

    def __init__(
        self, words: Sequence[str], log: Path, timeout: float = 600.0, *, host: str = HOST, port: int = 0
    ) -> None:
        if not Path(words[0]).is_file():
            raise ConfigError(f"python={words[0]!r} is no file; fix: the Python of an environment with vLLM")
        self._address = (host, free_port(port, host))
        self.url, self.log, self._timeout = f"http://{host}:{self._address[1]}", log, timeout
        self.words = [*words, "--host", host, "--port", str(self._address[1])]
        self._process = self._start()

    def is_healthy(self) -> bool:
        """Whether it answers."""
        return HttpClient(self.url, timeout=_HEALTH_SECONDS, retries=0).is_healthy()

    def start_again(self) -> None:
        """Start it anew, with a new log."""
        self.close()
        self._process = self._start()

    def wait(self) -> None:
        """Return when the server is ready; a ``ServerError`` with its last lines if it ends, or takes too long."""
        until = time.monotonic() + self._timeout
        while not self.is_healthy():
            if self._process.poll() is not None:
                self.join()
            if time.monotonic() > until:
                raise ServerError(f"the server was not ready in {self._timeout:g} s{last_lines(self.log)}")
            time.sleep(0.2)

    def join(self) -> NoReturn:
        """Wait until it ends by itself; then a ``ServerError`` with its last lines."""
        code = self._process.wait()
        raise ServerError(f"the server ended with exit code {code}{last_lines(self.log)}")

    def close(self) -> None:
        """End it and all its processes."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()
        until = time.monotonic() + _SECONDS_TO_END
        while time.monotonic() < until and _is_open(self._address):  # the server itself is a child of that process
            time.sleep(0.05)

    def _start(self) -> subprocess.Popen[bytes]:
        with self.log.open("wb") as file:
            return subprocess.Popen(  # noqa: S603
                [sys.executable, "-c", _LEAD, *self.words],
                stdin=subprocess.PIPE,
                stdout=file,
                stderr=file,
                env=os.environ | ENVIRONMENT,
                start_new_session=True,
            )


def last_lines(log: Path) -> str:
    """The errors that a server printed, the cause first, and the end of what it printed."""
    text = log.read_text(errors="replace")
    errors = list(dict.fromkeys(re.findall(r"\w+Error: .+", text)))[:_ERRORS]
    return "\n".join(["; its errors:", *errors, "its last lines:", *text.splitlines()[-_LAST_LINES:]])


def _is_open(address: tuple[str, int]) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(address) == 0


def free_port(port: int = 0, host: str = HOST) -> int:
    """A port of this machine that nothing listens at; a ``ConfigError`` if something listens at the one asked for."""
    for candidate in [port] if port else SystemRandom().sample(_PORTS, 100):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do
            try:
                probe.bind((host, candidate))
            except OSError as error:
                last = error
            else:
                return candidate
    raise ConfigError(f"port {candidate} cannot be used ({last}); fix: another one, or end what listens there")
