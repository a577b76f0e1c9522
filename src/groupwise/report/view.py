"""The web application: a list of runs, and the page of each, which follow the files. It only reads."""

import os
import time
from asyncio import sleep
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager
from hashlib import sha256
from importlib.resources import files as resources
from pathlib import Path
from secrets import compare_digest
from threading import Lock
from typing import NamedTuple
from urllib.parse import quote

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from groupwise.errors import RunFolderError
from groupwise.report.curve import overlay, points
from groupwise.report.folder import RunFolder
from groupwise.report.page import Live, render, style, subject, templates
from groupwise.system import num_cpus

# Runs below a folder, for the viewer's list

MAX_DEPTH = 3
"""Folders between the one that is shown and a run."""
Points = list[tuple[int, float]]


class Row(NamedTuple):
    """A run in the list."""

    name: str
    subject: str = ""
    algorithm: str = ""
    seed: str = ""
    state: str = ""
    env_steps: int = 0
    training: Points = []
    evaluations: Points = []
    problem: str = ""
    """Reason why the run cannot be read; empty if it can."""


def find_runs(root: Path) -> dict[str, Path]:
    """The run folders in a folder by their names in it, the newest first; it may be a run itself. Links are not followed."""
    if (root / "config.json").is_file():
        return {root.resolve().name: root}
    found = []
    for place, folders, files in os.walk(root):
        path = Path(place)
        if "config.json" in files:
            found.append(path)
        if "config.json" in files or len(path.relative_to(root).parts) >= MAX_DEPTH:
            folders.clear()
    found.sort(key=lambda path: -_stamp(path / "config.json")[0])
    return {path.relative_to(root).as_posix(): path for path in found}


def version_of(*paths: Path) -> str:
    """Changes whenever the display of these runs does."""
    folders = [*map(RunFolder, paths)]
    files = [
        file for one in folders for file in (one.config, one.metrics, one.summary, one.groups, one.video, one.frames)
    ]
    stamps = [(str(file), *_stamp(file)) for file in files], [one.is_training for one in folders]
    return sha256(repr(stamps).encode()).hexdigest()[:16]


class Overview:
    """Rows of runs, each read again when it has changed."""

    def __init__(self) -> None:
        self._rows: dict[Path, tuple[str, Row]] = {}

    def row(self, name: str, path: Path) -> Row:
        """A run."""
        version = version_of(path)
        known = self._rows.get(path)
        if known is None or known[0] != version:
            known = self._rows[path] = version, _read(name, path)
        row = known[1]
        return row._replace(state="training") if RunFolder(path).is_training else row


def _read(name: str, path: Path) -> Row:
    try:
        folder = RunFolder.open(path)
        config, metrics, summary = folder.read_config(), folder.read_metrics(), folder.read_summary()
    except RunFolderError as error:
        return Row(name, problem=str(error))
    return Row(
        name,
        subject=subject(config, summary),
        algorithm=config["algorithm"]["name"],
        seed=str(config["seed"]),
        state=str(summary.get("stopped") or "killed"),
        env_steps=metrics[-1].get("env_steps", 0) if metrics else 0,
        training=points(metrics, "rollout/return_mean"),
        evaluations=points(metrics, "eval/return_mean"),
    )


def by_subject(rows: list[Row]) -> Mapping[str, list[Row]]:
    """Rows of each subject."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row.subject, []).append(row)
    return found


def _stamp(path: Path) -> tuple[int, int]:
    try:
        found = path.stat()
    except OSError:
        return 0, 0
    return found.st_mtime_ns, found.st_size


HEADERS = {
    "cache-control": "no-store",
    "referrer-policy": "no-referrer",  # the address holds the token
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}
MAX_CURVES = 10
"""Runs whose curves are drawn unless the reader chooses."""
PAUSE = 2.0
"""Seconds between two looks at the files."""
LONGEST_PAUSE = 60.0
SHARE = 0.02
"""Pages take about this share of the machine's processors, so that training nearby stays fast."""


class Viewer:
    """The pages of the runs in a folder.

    Args:
        token: the first part of every address; who does not know it sees nothing.
    """

    def __init__(self, root: Path, token: str) -> None:
        self.root = root
        self.token = token
        self.pause = PAUSE
        """Seconds until files are looked at again."""
        self._overview = Overview()
        self._one_at_a_time = Lock()  # matplotlib's settings are those of the process
        self._latest = ("", "", "")
        self._script = resources(__package__).joinpath("live.js").read_text(encoding="utf-8")

    def app(self) -> Starlette:
        """The application; it answers GET under the token, and 404 to everything else."""
        pages = {"/": self.index, "/runs/{name:path}": self.run, "/events": self.events}
        return Starlette(
            routes=[Route("/{token}" + path, self._guarded(page), methods=["GET"]) for path, page in pages.items()],
            # a page of a stranger could reach this server by a name of his own that leads to 127.0.0.1
            middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=["127.0.0.1", "localhost"])],
            exception_handlers={RunFolderError: _explain},
        )

    def index(self, request: Request) -> Response:
        """All runs, and the curves of some."""
        runs = find_runs(self.root)
        chosen = set(request.query_params.getlist("run")) or set(list(runs)[:MAX_CURVES])
        live = self._live("", version_of(*runs.values()))
        with self._one_at_a_time, self._working():
            rows = [self._overview.row(name, path) for name, path in runs.items()]
            drawn = by_subject([row for row in rows if row.name in chosen and row.training + row.evaluations])
            curves = [
                overlay({row.name: (row.training, row.evaluations) for row in some}, title, f"c{number}")
                for number, (title, some) in enumerate(drawn.items())
            ]
        page = templates(__package__).get_template("list.html")
        text = page.render(
            rows=rows, chosen=chosen, curves=curves, live=live, style=style(), home=self._home, root=self.root
        )
        return HTMLResponse(text, headers=HEADERS)

    def run(self, request: Request) -> Response:
        """The page of a run. Its name is looked up among those found, and is never made a path."""
        name = request.path_params["name"]
        path = find_runs(self.root).get(name)
        if path is None:
            raise HTTPException(404)
        version = version_of(path)
        with self._one_at_a_time:
            if self._latest[:2] != (name, version):
                with self._working():
                    self._latest = name, version, render(RunFolder.open(path), self._live(name, version))
            return HTMLResponse(self._latest[2], headers=HEADERS)

    def events(self, request: Request) -> Response:
        """Server-sent events: one whenever the run, or any run, has changed since the page was drawn."""
        changes = self.changes(request.query_params.get("run", ""), request.query_params.get("seen", ""))
        return StreamingResponse(changes, media_type="text/event-stream", headers=HEADERS)

    async def changes(self, name: str, seen: str) -> AsyncIterator[str]:
        """Events, until the reader leaves."""
        while True:
            version = await run_in_threadpool(self._version, name)
            yield f": {version}\n\n" if version == seen else f"data: {version}\n\n"  # a comment shows a reader who left
            seen = version
            await sleep(self.pause)

    def _version(self, name: str) -> str:
        runs = find_runs(self.root)
        return version_of(*(runs.values() if not name else [runs[name]] if name in runs else []))

    @property
    def _home(self) -> str:
        return f"/{self.token}/"

    def _live(self, name: str, version: str) -> Live:
        return Live(self._home, f"{self._home}events?run={quote(name, safe='')}&seen={version}", self._script)

    def _guarded(self, page: Callable[[Request], Response]) -> Callable[[Request], Response]:
        def answer(request: Request) -> Response:
            if not compare_digest(request.path_params["token"].encode(), self.token.encode()):
                raise HTTPException(404)
            return page(request)

        return answer

    @contextmanager
    def _working(self) -> Iterator[None]:
        """The longer a page takes, the longer the next change waits."""
        start = time.perf_counter()
        yield
        took = time.perf_counter() - start
        self.pause = min(max(PAUSE, took / (SHARE * num_cpus())), LONGEST_PAUSE)


def _explain(request: Request, error: Exception) -> Response:
    return PlainTextResponse(str(error), status_code=500, headers=HEADERS)
