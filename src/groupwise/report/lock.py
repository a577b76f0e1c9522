"""The lock of a run folder, so that one process trains in it.

``flock`` keeps others out on one machine, and ends with the process. Some network disks do not pass it on to other
machines. For them the process renews the time of the file every ``BEAT`` seconds, and one elsewhere watches it.
"""

import json
import logging
import os
import socket
import sys
import time
from contextlib import ExitStack, suppress
from io import BufferedWriter
from pathlib import Path
from threading import Event, Thread
from typing import Any

from groupwise.errors import RunFolderError
from groupwise.system import files

if sys.platform != "win32":
    import fcntl

log = logging.getLogger(__name__)

BEAT = 5.0
"""Seconds between two signs of life."""
PATIENCE = 30.0
"""Seconds without a sign of life after which a process on another machine counts as dead."""
_MAX_BYTES = 4096


def is_held(path: Path) -> bool:
    """Whether a process seems to hold the lock: it gave a sign of life lately and, on this machine, is still there.

    The lock is not touched: whoever looks at it would keep others out for a moment.
    """
    try:
        found = path.stat()
    except OSError:
        return False
    if found.st_size == 0 or time.time() - found.st_mtime >= PATIENCE:
        return False
    holder = _holder(path)
    return bool(holder) and (holder.get("host") != socket.gethostname() or _exists(holder.get("pid")))


def _exists(pid: object) -> bool:
    """Whether there is a process of this number; True where that cannot be asked."""
    if sys.platform == "win32" or not isinstance(pid, int):
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True


class Lock:
    """A lock that this process holds; ``acquire`` gives it."""

    def __init__(self, path: Path, file: BufferedWriter) -> None:
        self.path = path
        self.holder = {"pid": os.getpid(), "host": socket.gethostname()}
        self._file = file
        self._released = Event()
        self._thread = Thread(target=self._renew, name="groupwise lock", daemon=True)
        file.truncate(0)
        file.write(json.dumps(self.holder).encode())
        file.flush()
        self._thread.start()
        if sys.platform != "win32":
            os.register_at_fork(after_in_child=file.close)  # else a child that outlives this process keeps the lock

    def release(self) -> None:
        """Let others in."""
        self._released.set()
        self._thread.join()
        with self._file, suppress(OSError):
            if _holder(self.path) == self.holder:
                self._file.truncate(0)

    def _renew(self) -> None:
        while not self._released.wait(BEAT):
            with suppress(OSError):
                os.utime(self.path)


def acquire(path: Path) -> Lock:
    """The lock at ``path``.

    Raises:
        RunFolderError: another process holds it (names it).
        OSError: it cannot be written.
    """
    with ExitStack() as stack:
        file = stack.enter_context(files.appending(path))
        if _is_held(path, file):
            raise RunFolderError(
                f"{path.parent} is in use: {_name(_holder(path))} trains in it; fix: wait until it ends, or stop it"
            )
        stack.pop_all()
        return Lock(path, file)


def _is_held(path: Path, file: BufferedWriter) -> bool:
    """Whether another process holds the lock; if not, it is locked on this machine now."""
    try:
        local = _flock(file)
    except BlockingIOError:
        return True
    holder = _holder(path)
    return bool(holder) and not (local and holder.get("host") == socket.gethostname()) and _is_alive(path)


def _flock(file: BufferedWriter) -> bool:
    """Lock a file on this machine; False where that is not supported."""
    if sys.platform == "win32":
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:
        return False
    return True


def _is_alive(path: Path) -> bool:
    """Whether the process that wrote it, on a machine that cannot be asked, gives a sign of life."""
    log.warning("%s is of %s; waiting up to %g s for a sign of life", path, _name(_holder(path)), PATIENCE)
    before, end = _renewed(path), time.monotonic() + PATIENCE
    while time.monotonic() < end:
        time.sleep(min(1.0, BEAT))
        if _renewed(path) != before:
            return True
    return False


def _renewed(path: Path) -> int:
    with files.reading(path, _MAX_BYTES) as file:  # opening asks a network disk for the present time of the file
        return os.fstat(file.fileno()).st_mtime_ns


def _holder(path: Path) -> dict[str, Any]:
    """What the process that holds the lock says of itself; empty if nothing."""
    try:
        holder = files.parse_json(files.read(path, _MAX_BYTES))
    except (OSError, ValueError):
        return {}
    return holder if isinstance(holder, dict) else {}


def _name(holder: dict[str, Any]) -> str:
    return f"process {holder.get('pid')!r:.20} on {holder.get('host')!r:.80}"
