"""The web application: a list of runs, and the page of each, which follow the files. It only reads."""

import os
from functools import lru_cache
from hashlib import sha256
from importlib.resources import files as resources
from pathlib import Path
from secrets import compare_digest
from threading import Lock
from typing import NamedTuple

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.routing import Route

from groupwise.errors import RunFolderError
from groupwise.report.curve import overlay, points
from groupwise.report.folder import RunFolder
from groupwise.report.page import Live, render, style, subject, templates

MAX_DEPTH = 3
"""Folders between the one that is shown and a run."""
MAX_CURVES = 10
"""Runs whose curves are drawn unless the reader chooses."""
HEADERS = {
    "cache-control": "no-store",
    "referrer-policy": "no-referrer",  # the address holds the token
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}
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


@lru_cache(maxsize=1000)
def read_row(name: str, path: Path, version: str) -> Row:
    """The row of a run, read again when its version has changed."""
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
        state="training" if folder.is_training else str(summary.get("stopped") or "killed"),
        env_steps=metrics[-1].get("env_steps", 0) if metrics else 0,
        training=points(metrics, "rollout/return_mean"),
        evaluations=points(metrics, "eval/return_mean"),
    )


def _stamp(path: Path) -> tuple[int, int]:
    try:
        found = path.stat()
    except OSError:
        return 0, 0
    return found.st_mtime_ns, found.st_size


class Viewer:
    """The pages of the runs in a folder.

    Args:
        token: the first part of every address; who does not know it sees nothing.
    """

    def __init__(self, root: Path, token: str) -> None:
        self.root, self.token = root, token
        self._home = f"/{token}/"
        self._one_at_a_time = Lock()  # of a processor that training may need
        self._script = resources(__package__).joinpath("live.js").read_text(encoding="utf-8")

    def app(self) -> Starlette:
        """The application; it answers GET under the token, and 404 to everything else."""
        return Starlette(
            routes=[Route("/{token}" + path, self.answer, methods=["GET"]) for path in ("/", "/runs/{name:path}")],
            # a page of a stranger could reach this server by a name of his own that leads to 127.0.0.1
            middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=["127.0.0.1", "localhost"])],
            exception_handlers={
                RunFolderError: lambda _, error: PlainTextResponse(str(error), status_code=500, headers=HEADERS)
            },
        )

    def answer(self, request: Request) -> Response:
        """The list of runs, or the page of one; 304 to a reader whose page shows the files as they are.

        A name is looked up among the runs that were found, and is never made a path.
        """
        if not compare_digest(request.path_params["token"].encode(), self.token.encode()):
            raise HTTPException(404)
        runs, name = find_runs(self.root), request.path_params.get("name")
        if name is not None and name not in runs:
            raise HTTPException(404)
        version = f'"{version_of(*(runs.values() if name is None else [runs[name]]))}"'
        headers = HEADERS | {"etag": version}
        if request.headers.get("if-none-match") == version:
            return Response(status_code=304, headers=headers)
        live = Live(self._home, version, self._script)
        with self._one_at_a_time:
            if name is not None:
                return HTMLResponse(render(RunFolder.open(runs[name]), live), headers=headers)
            return HTMLResponse(self._list(runs, set(request.query_params.getlist("run")), live), headers=headers)

    def _list(self, runs: dict[str, Path], chosen: set[str], live: Live) -> str:
        """All runs, and the curves of some, a figure for each task."""
        chosen = chosen or set(list(runs)[:MAX_CURVES])
        rows = [read_row(name, path, version_of(path)) for name, path in runs.items()]
        drawn = [row for row in rows if row.name in chosen and row.training + row.evaluations]
        curves = [
            overlay({row.name: (row.training, row.evaluations, ()) for row in drawn if row.subject == title}, title)
            for title in dict.fromkeys(row.subject for row in drawn)
        ]
        page = templates(__package__).get_template("list.html")
        return page.render(
            rows=rows, chosen=chosen, curves=curves, live=live, style=style(), home=self._home, root=self.root
        )
