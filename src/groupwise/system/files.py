"""Files in folders that a stranger may have made: written to fresh names, read within limits, and no link followed.

Imports no torch.
"""

import errno
import json
import logging
import os
import shutil
import stat
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader, BufferedWriter
from pathlib import Path
from secrets import token_hex
from typing import Any

log = logging.getLogger(__name__)

MIB = 2**20
MAX_SETTINGS = MIB
"""Bytes of a file of settings."""
MAX_DEPTH = 200
"""Levels of nested lists and objects in JSON."""
MAX_VALUES = 2_000_000
"""Values in a JSON text."""

if sys.platform == "win32":
    _FOLLOW = _NO_LINK = os.O_BINARY
else:
    _FOLLOW = os.O_NONBLOCK
    _NO_LINK = _FOLLOW | os.O_NOFOLLOW
"""Flags of ``open``. None waits for the other end of a FIFO."""


def create(path: Path, data: bytes) -> None:
    """Write a new file that survives a power cut.

    Raises:
        FileExistsError: something is there, if only a link.
    """
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NO_LINK, 0o666), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def write(path: Path, data: bytes) -> None:
    """Write or replace a file at once. A link at ``path`` is replaced, too."""
    fresh = fresh_name(path)
    try:
        create(fresh, data)
        os.replace(fresh, path)
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def appending(path: Path) -> BufferedWriter:
    """A file, open to add to it; new if there is none.

    Raises:
        OSError: it is a link, or a FIFO.
    """
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | _NO_LINK, 0o666), "ab")


def append(path: Path, data: bytes) -> None:
    """Add all of ``data`` to a file, or nothing.

    Raises:
        OSError: as of ``appending``, or the disk is full.
    """
    with appending(path) as file:
        size = os.fstat(file.fileno()).st_size
        if os.write(file.fileno(), data) < len(data):
            file.truncate(size)
            raise OSError(errno.ENOSPC, "there is room for a part only")


def warn_unsaved(what: object, error: OSError) -> None:
    """Say that something could not be written."""
    log.warning("NOT SAVED: %s (%s); fix: make room, or give rights to write", what, error)


@contextmanager
def warning_if_unwritable(what: object) -> Iterator[None]:
    """Log a warning in place of an ``OSError``: a full disk ends no training."""
    try:
        yield
    except OSError as error:
        warn_unsaved(what, error)


@contextmanager
def reading(path: Path, limit: int, *, follow: bool = False) -> Iterator[BufferedReader]:
    """A file, open for reading.

    Args:
        limit: the most bytes that it may have.
        follow: whether ``path`` may be a link, as of files that the user names.

    Raises:
        OSError: there is none.
        ValueError: it is a link, no regular file, or too large.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | (_FOLLOW if follow else _NO_LINK))
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise ValueError("it is a link, and links are not followed") from error
        raise
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("it is no regular file")
        check_size(status.st_size, limit)
        yield file


def read(path: Path, limit: int, *, follow: bool = False) -> bytes:
    """The content of a file; arguments and errors as of ``reading``."""
    with reading(path, limit, follow=follow) as file:
        return file.read(limit)


def check_size(size: int, limit: int) -> None:
    """Raise a ``ValueError`` if ``size`` is more than ``limit`` bytes."""
    if size > limit:
        raise ValueError(f"it has {size:,} bytes, more than the limit of {limit:,}")


def parse_json(data: bytes) -> Any:
    """The value of a JSON text.

    Raises:
        ValueError: it is broken, has a key twice in one object, or more than ``MAX_VALUES`` values, ``MAX_DEPTH`` levels or 4,300 digits of a number.
    """
    if sum(map(data.count, (b",", b"[", b"{"))) > MAX_VALUES:
        raise ValueError(f"it has more than {MAX_VALUES:,} values")
    try:
        tree = json.loads(data.decode("utf-8"), object_pairs_hook=_without_duplicates)
        _check_depth(tree, MAX_DEPTH)
    except RecursionError:
        raise ValueError(f"it is nested deeper than {MAX_DEPTH} levels") from None
    return tree


def _check_depth(tree: Any, levels: int) -> None:
    if isinstance(tree, dict | list):
        if levels == 0:
            raise RecursionError
        for child in tree.values() if isinstance(tree, dict) else tree:
            _check_depth(child, levels - 1)


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        [(twice, _)] = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"the key {twice!r:.100} comes twice")
    return found


def link_out_of(folder: Path, *, without: str = "") -> Path | None:
    """A link inside of a folder that leads out of it; None if there is none.

    Args:
        without: a folder in it whose content is left out.
    """

    def leads_out(path: Path) -> bool:
        return path.is_symlink() and not Path(os.path.realpath(path)).is_relative_to(root)

    root = Path(os.path.realpath(folder))
    for place, folders, names in os.walk(root):
        for path in (Path(place, name) for name in (*folders, *names)):
            if leads_out(path):
                return path
        if Path(place) == root and without in folders:
            folders.remove(without)
    return None


def fresh_name(path: Path) -> Path:
    """A path next to ``path`` that cannot be guessed."""
    return path.with_name(f".{path.name}.{token_hex(8)}.partial")


def size(folder: Path) -> int:
    """Bytes of the files in a folder, without what links lead to. Those that vanish meanwhile do not count."""
    found = 0
    for root, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                found += os.lstat(os.path.join(root, name)).st_size
    return found


def remove(path: Path) -> None:
    """Remove a file, a folder, or a link but not what it leads to. What cannot be removed stays."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()


def sync_folder(folder: Path) -> None:
    """Make renames and new files survive a power cut; Windows needs no such call."""
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
