"""The lock of a run folder, so that one process trains in it: ``flock``, which ends with its process, also a killed one."""

import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader, BufferedWriter
from pathlib import Path

from groupwise.errors import RunFolderError
from groupwise.system import files
from groupwise.system.terminal import printable

_TRIES = 25
_SECONDS_BETWEEN = 0.02
_MAX_BYTES = 4096


def is_held(path: Path) -> bool:
    """Whether a process holds the lock."""
    try:
        with files.reading(path, _MAX_BYTES) as file:
            return not _lock(file, exclusive=False)
    except (OSError, ValueError):
        return False


@contextmanager
def held(path: Path) -> Iterator[None]:
    """Keep other processes out; the file says which process trains.

    Raises:
        RunFolderError: another process holds the lock (names it).
        OSError: it cannot be written.
    """
    with files.appending(path) as file:
        for _ in range(_TRIES):  # ``is_held`` keeps the lock for a moment
            if _lock(file, exclusive=True):
                break
            time.sleep(_SECONDS_BETWEEN)
        else:
            holder = printable(files.read(path, _MAX_BYTES).decode(errors="replace")) or "another process"
            raise RunFolderError(f"{path.parent} is in use: {holder} trains in it; fix: wait until it ends, or stop it")
        if sys.platform != "win32":
            os.register_at_fork(after_in_child=file.close)  # else a child that outlives this process keeps the lock
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()!r}".encode())
        file.flush()
        try:
            yield
        finally:
            with suppress(OSError):
                file.truncate(0)


def _lock(file: BufferedReader | BufferedWriter, *, exclusive: bool) -> bool:
    """Lock an open file; False if another process holds it. A system or a disk without ``flock`` keeps nobody out."""
    if sys.platform == "win32":
        return True
    import fcntl

    try:
        fcntl.flock(file, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True
