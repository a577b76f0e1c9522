"""Servers of a run that are placed on machines by something else, which starts them again where they end.

Run and servers meet in a folder of a shared disk: the run says what to start, each server says where it listens.
"""

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path

from groupwise.errors import ServerError
from groupwise.system import files

FOLDER = "GROUPWISE_SERVERS"
"""Environment variable with the folder, in the processes of the run."""
_POLL = 0.2


class PlacedServer:
    """A server's part of the folder.

    Args:
        folder: its own, below that of all servers.
    """

    def __init__(self, folder: Path) -> None:
        self.log = folder / "server.log"
        self._command, self._state = folder.parent / "command.json", folder / "state.json"

    def command(self) -> list[str]:
        """The command line of the server, without its address; waits until the run gives it."""
        while not self._command.exists():
            time.sleep(_POLL)
        return list(json.loads(self._command.read_bytes()))

    def is_at(self, url: str) -> None:
        """Say that it is ready."""
        files.write(self._state, json.dumps({"url": url}).encode())

    def cannot_start(self, error: str) -> None:
        """Say so: calls of it end by this error."""
        files.write(self._state, json.dumps({"error": error}).encode())

    def url(self) -> str | None:
        """Where it was last ready; None if it never was.

        Raises:
            ServerError: it cannot start.
        """
        if not self._state.exists():
            return None
        state = json.loads(self._state.read_bytes())
        if "error" in state:
            raise ServerError(state["error"])
        return str(state["url"])

    def wait(self, timeout: float) -> str:
        """Where it is, when it is ready for the first time."""
        until = time.monotonic() + timeout
        while (url := self.url()) is None:
            if time.monotonic() > until:
                raise ServerError(
                    f"a server of the run was not ready in {timeout:g} s; fix: a larger generation.timeout"
                )
            time.sleep(_POLL)
        return url


def create(folder: Path, number: int) -> list[PlacedServer]:
    """New servers in an empty folder."""
    for name in range(number):
        (folder / str(name)).mkdir()
    return in_folder(folder)


def in_folder(folder: Path) -> list[PlacedServer]:
    """All servers of a folder."""
    return [PlacedServer(path) for path in sorted(folder.glob("[0-9]*"), key=lambda path: int(path.name))]


def give_command(folder: Path, words: Sequence[str]) -> None:
    """Have the servers start."""
    files.write(folder / "command.json", json.dumps(list(words)).encode())


def folder_of_run() -> Path | None:
    """The folder, if something places the servers of this process's run."""
    return Path(os.environ[FOLDER]) if FOLDER in os.environ else None
