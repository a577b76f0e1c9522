"""Files, processes and the terminal. Imports no torch."""

import atexit
import errno
import io
import json
import logging
import os
import re
import shutil
import signal
import stat
import sys
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from io import BufferedReader, BufferedWriter
from multiprocessing import current_process, get_context, parent_process
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from secrets import token_hex
from typing import Any, Literal

log = logging.getLogger(__name__)

# Files in untrusted folders: written to fresh names, read within limits, no link followed

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
    """Write a new file that survives a power cut; a ``FileExistsError`` if something is there, if only a link."""
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
    """A file, open to add to it, new if there is none; an ``OSError`` if it is a link or a FIFO."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | _NO_LINK, 0o666), "ab")


def append(path: Path, data: bytes) -> None:
    """Add all of ``data`` to a file, or nothing; an ``OSError`` if it is a link or a FIFO, or the disk is full."""
    with appending(path) as file:
        if (written := os.write(file.fileno(), data)) < len(data):
            file.truncate(os.fstat(file.fileno()).st_size - written)
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


def lock(file: BufferedReader | BufferedWriter, *, exclusive: bool) -> bool:
    """Lock an open file; False if another process holds it. On a system or disk without ``flock`` nothing is locked."""
    if sys.platform != "win32":
        import fcntl

        try:
            fcntl.flock(file, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:
            return True
    return True


@contextmanager
def reading(path: Path, limit: int, *, follow: bool = False) -> Iterator[BufferedReader]:
    """A file, open for reading; an ``OSError`` if there is none, a ``ValueError`` if it is a link, not regular or too large.

    Args:
        limit: the most bytes that it may have.
        follow: whether ``path`` may be a link: for files that the user names.
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
    """The content of a file; arguments and errors of ``reading``."""
    with reading(path, limit, follow=follow) as file:
        return file.read(limit)


def check_size(size: int, limit: int) -> None:
    """Raise a ``ValueError`` if ``size`` is more than ``limit`` bytes."""
    if size > limit:
        raise ValueError(f"it has {size:,} bytes, more than the limit of {limit:,}")


def check_parquet(metadata: Any, max_values: int, max_bytes: int) -> None:
    """Raise a ``ValueError`` if a Parquet file holds more: values that repeat take hardly any room in it."""
    groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
    values = sum(group.column(i).num_values for group in groups for i in range(group.num_columns))
    if values > max_values:
        raise ValueError(f"it has {values:,} values, more than the limit of {max_values:,}")
    check_size(sum(group.total_byte_size for group in groups), max_bytes)


def parse_json(data: bytes) -> Any:
    """The value of a JSON text; a ``ValueError`` if it is broken, too large or deep, or has a key twice."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            [(twice, _)] = Counter(key for key, _ in pairs).most_common(1)
            raise ValueError(f"the key {twice!r:.100} comes twice")
        return found

    if sum(map(data.count, (b",", b"[", b"{"))) > MAX_VALUES:
        raise ValueError(f"it has more than {MAX_VALUES:,} values")
    try:
        tree = json.loads(data.decode("utf-8"), object_pairs_hook=unique)
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


def link_out_of(folder: Path, *, without: str = "", depth: int = 0) -> Path | None:
    """A link inside of a folder that leads out of it; the content of folders ``without``, down to this depth, is left out."""
    root = Path(os.path.realpath(folder))
    for place, folders, names in os.walk(root):
        for path in (Path(place, name) for name in (*folders, *names)):
            if path.is_symlink() and not Path(os.path.realpath(path)).is_relative_to(root):
                return path
        if len(Path(place).parts) <= len(root.parts) + depth and without in folders:
            folders.remove(without)
    return None


def fresh_name(path: Path) -> Path:
    """A path next to ``path`` that cannot be guessed."""
    return path.with_name(f".{path.name}.{token_hex(8)}.partial")


def remove(path: Path) -> None:
    """Remove a file, a folder, or a link but not its target. Anything that cannot be removed stays."""
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


@contextmanager
def limiting(seconds: float) -> Iterator[None]:
    """Raise a ``TimeoutError`` where Python code takes more CPU time. Only the main thread gets signals; others have no limit."""
    if sys.platform == "win32" or threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: object) -> None:
        raise TimeoutError(f"it takes more than {seconds:g} s of CPU time")

    before = signal.signal(signal.SIGVTALRM, end)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds, seconds)  # again, as Python ignores errors in a __del__
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        signal.signal(signal.SIGVTALRM, before)


# Processes for the user's code: none outlives this process; a hanging one is killed with its children

SECONDS_TO_IMPORT = 60.0
"""Least time that a new process gets to import packages."""
SECONDS_TO_CLOSE = 5.0


class LostChildError(Exception):
    """A process ended, or gave no answer in time; the message says which."""


class Child:
    """A process that answers messages, one at a time.

    Args:
        target: calls ``serve`` with the connection, its first argument.
    """

    def __init__(self, target: Callable[..., None], *args: Any, name: str) -> None:
        self._connection, theirs = context().Pipe()
        self.process = start(target, theirs, *args, name=name)
        theirs.close()

    def send(self, message: Any) -> None:
        """Ask for an answer; None ends the process."""
        with suppress(OSError):  # the process has ended, as reading its answer will show
            self._connection.send(message)

    def answer(self, seconds: float, since: float) -> Any:
        """Result and error of the last message; or those of the start, before the first message.

        A ``LostChildError`` if there is none ``seconds`` after ``since`` (of ``time.monotonic``); close it then.
        """
        try:
            if self._connection.poll(max(0.0, since + seconds - time.monotonic())):
                return self._connection.recv()
        except (EOFError, OSError):
            self.process.join(1.0)
            raise LostChildError(f"ended with exit code {self.process.exitcode}") from None
        raise LostChildError(f"took longer than {seconds:g} s")

    def close(self, seconds: float = SECONDS_TO_CLOSE) -> None:
        """End the process and its children; it is killed if it is still running after that time."""
        self.send(None)
        self._connection.close()
        self.process.join(max(0.0, seconds))
        kill(self.process)


def serve(connection: Connection, handler: AbstractContextManager[Callable[[Any], Any]]) -> None:
    """The work of a ``Child``: open the handler, say whether that worked, then answer messages until None.

    An answer is a result, and an error: None, or its type and message, and its traceback.
    """

    def fail(error: Exception | SystemExit) -> None:
        connection.send((None, (f"{type(error).__name__}: {error}", "".join(traceback.format_exception(error)))))

    with ExitStack() as stack:
        try:
            handle = stack.enter_context(handler)
        except (Exception, SystemExit) as error:
            fail(error)
            return
        connection.send((None, None))
        with suppress(EOFError, ConnectionError):  # the parent is gone
            while (message := connection.recv()) is not None:
                try:
                    connection.send((handle(message), None))
                except (Exception, SystemExit) as error:
                    fail(error)


def context() -> ForkServerContext:
    """Makes new processes, rather than copies of this one, which may hold threads and a GPU."""
    return get_context("forkserver")


_STARTING = threading.Lock()
"""Held while a thread has changed the environment's variables."""


def start(target: Callable[..., None], *args: Any, name: str, daemon: bool = True) -> BaseProcess:
    """A new process that runs ``target(*args)``. Its children are killed with it; with ``daemon`` it may have none."""
    if current_process().daemon:
        raise RuntimeError(
            f"the process {name!r} cannot start: daemonic processes, as the workers of multiprocessing.Pool, have no children; fix: "
            "concurrent.futures.ProcessPoolExecutor, or for environments vectorization='sync'"
        )
    context().set_forkserver_preload([target.__module__])
    process = context().Process(target=_main, args=(target, *args), daemon=daemon, name=name)
    with _STARTING:
        # it imports nothing from the current folder before it has the path of this one
        before = os.environ.get("PYTHONSAFEPATH")
        os.environ["PYTHONSAFEPATH"] = "1"
        try:
            process.start()
        finally:
            os.environ.pop("PYTHONSAFEPATH")
            if before is not None:
                os.environ["PYTHONSAFEPATH"] = before
    return process


def kill(process: BaseProcess) -> None:
    """End a process and its children, also after it has ended by itself."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid or 0, signal.SIGKILL)
    process.kill()  # it may not lead its group yet
    process.join()


def _main(target: Callable[..., None], *args: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its processes
    os.setsid()  # a group of its own: its children can be killed with it
    parent = parent_process()
    if sys.platform == "linux" and parent is not None:  # elsewhere it ends when it next waits for a message
        import fcntl

        fcntl.fcntl(parent.sentinel, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(parent.sentinel, fcntl.F_SETSIG, signal.SIGKILL)
        # the kernel signals the group when the parent's end closes
        fcntl.fcntl(parent.sentinel, fcntl.F_SETFL, os.O_ASYNC)
    target(*args)


# Text for the terminal

_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: object) -> str:
    r"""The text with its control characters shown, such as ``\x1b``; lines and tabs stay.

    Ids, errors and completions may be a stranger's, and a terminal obeys control characters: it moves the cursor, hides
    text or sets the title. So are marks that turn the direction of text, and halves of characters, which cannot be printed.
    """
    return _CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode(), str(text))


def find_program(name: str) -> str | None:
    """The path of a program on the PATH; None if it is not there, or in the working folder, which may be a stranger's."""
    found = shutil.which(name)
    return found if found and os.path.isabs(found) else None


def show(*lines: object, to: Literal["stdout", "stderr"] = "stdout") -> None:
    """Print lines in their printable form. A message to ``stderr`` that cannot be written is lost, and no error."""
    stream = SafeStream(sys.stderr) if to == "stderr" else sys.stdout
    print(*map(printable, lines), sep="\n", file=stream, flush=True)


class SafeStream:
    """A stream that may fail, such as stderr on a full disk or a closed terminal; its lost text is ignored."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream or io.StringIO()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write if that is possible."""
        with suppress(OSError, ValueError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Flush if that is possible."""
        with suppress(OSError, ValueError):
            self._stream.flush()


def prepare() -> None:
    """Makes all output, warnings and log messages of this process printable, also in ASCII and from libraries.

    What stderr cannot take is no error at the end of the process either, when Python writes what is left.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    atexit.register(lambda: setattr(sys, "stderr", SafeStream(sys.stderr)))
    logging.setLogRecordFactory(_PrintableRecord)
    warnings.formatwarning = _warning_line


def _warning_line(message: object, category: type[Warning], filename: str, lineno: int, line: object = None) -> str:
    """A warning without a line of source code, and without the place of one of ours."""
    where = "groupwise" if Path(filename).is_relative_to(Path(__file__).parent) else f"{filename}:{lineno}"
    return printable(f"{where}: {category.__name__}: {message}\n")


class _PrintableRecord(logging.LogRecord):
    def getMessage(self) -> str:  # noqa: N802  of the base class
        return printable(super().getMessage())


# Processors

NUM_CPUS = "PYTHON_CPU_COUNT"
"""Environment variable, also of Python from 3.13 on, with the number for a process that shares them with others."""


def num_cpus() -> int:
    """The number of processors that this process may use."""
    if os.environ.get(NUM_CPUS, "").isdecimal():
        return max(1, int(os.environ[NUM_CPUS]))
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
