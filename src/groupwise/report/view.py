"""The web application: a list of runs, and the page of each, which follow the files. It only reads."""

import os
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from hashlib import sha256
from importlib.resources import files as resources
from pathlib import Path
from secrets import compare_digest
from threading import Lock
from typing import Any, NamedTuple

from starlette.applications import Starlette
from starlette.datastructures import QueryParams
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.routing import Route

from groupwise.config.run import BUDGETS
from groupwise.errors import RunFolderError
from groupwise.report.curve import overlay, points, thin
from groupwise.report.folder import RunFolder, explained
from groupwise.report.page import Live, progress, render, style, subject, templates, words_of
from groupwise.system import printable

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
MAX_FIGURES = 24
TRAINING, EVALUATION = "rollout/return_mean", "eval/return_mean"


class Row(NamedTuple):
    """A run in the list."""

    name: str
    subject: str = ""
    algorithm: str = ""
    seed: str = ""
    state: str = ""
    progress: str = ""
    steps: int = 0
    unit: str = ""
    """Name of its steps: runs of other units are drawn in other figures."""
    score: str = ""
    """Name of its score."""
    training: float | None = None
    """The last score of training."""
    evaluation: float | None = None
    problem: str = ""
    """Reason why the run cannot be read; empty if it can."""


def find_runs(root: Path) -> dict[str, Path]:
    """The run folders in a folder by their names in it, the newest first; it may be a run itself. Links are not followed."""
    if (root / "config.json").is_file():
        return {printable(root.resolve().name): root}
    found = []
    for place, folders, files in os.walk(root):
        path = Path(place)
        if "config.json" in files:
            found.append(path)
        if "config.json" in files or len(path.relative_to(root).parts) >= MAX_DEPTH:
            folders.clear()
    found.sort(key=lambda path: -_stamp(path / "config.json")[0])
    return {printable(path.relative_to(root).as_posix()): path for path in found}


def version_of(*paths: Path) -> str:
    """Changes whenever the display of these runs does."""
    folders = [*map(RunFolder, paths)]
    files = [
        file for one in folders for file in (one.config, one.metrics, one.summary, one.groups, one.video, one.frames)
    ]
    stamps = [(str(file), *_stamp(file)) for file in files], [one.is_training for one in folders]
    return sha256(repr(stamps).encode()).hexdigest()[:16]


@lru_cache(maxsize=2 * MAX_CURVES)
def read_entries(path: Path, version: str) -> list[dict[str, Any]]:
    """The metrics of a run, read again when its version has changed."""
    return RunFolder(path).read_metrics()


@lru_cache(maxsize=1000)
def read_row(name: str, path: Path, version: str) -> Row:
    """The row of a run, read again when its version has changed."""
    try:
        with explained(path):
            return _row(name, RunFolder.open(path), read_entries(path, version))
    except RunFolderError as error:
        return Row(name, problem=str(error))


def _row(name: str, folder: RunFolder, metrics: Sequence[Mapping[str, Any]]) -> Row:
    config, summary, trains = folder.read_config(), folder.read_summary(), folder.is_training
    end = "saved agent" if folder.is_agent else "killed"
    (unit, score, _), stopped = words_of(config), str(summary.get("stopped") or end)
    return Row(
        name,
        subject=subject(config, summary),
        algorithm=config["algorithm"]["name"],
        seed=str(config["seed"]),
        state="training" if trains else "finished" if stopped in BUDGETS else stopped,
        progress=progress(config, metrics, runs=trains),
        steps=metrics[-1].get("env_steps", 0) if metrics else 0,
        unit=unit,
        score=score,
        training=next((entry[TRAINING] for entry in reversed(metrics) if TRAINING in entry), None),
        evaluation=next((entry[EVALUATION] for entry in reversed(metrics) if EVALUATION in entry), None),
    )


def matching(names: Iterable[str], words: str) -> list[str]:
    """The names that are one of the words, or contain one that is no name itself; all without words."""
    known, asked = list(names), words.casefold().split()
    parts = [word for word in asked if word not in map(str.casefold, known)]
    return [n for n in known if not asked or n.casefold() in asked or any(part in n.casefold() for part in parts)]


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
                RunFolderError: lambda _, error: PlainTextResponse(printable(error), status_code=500, headers=HEADERS)
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
        live = Live(self._home, version, self._script, name or "")
        with self._one_at_a_time:
            if name is None:
                page = self._list(runs, request.query_params, live)
            else:
                with explained(runs[name]):
                    page = render(RunFolder.open(runs[name]), live)
        return HTMLResponse(page.encode(errors="backslashreplace"), headers=headers)

    def _list(self, runs: dict[str, Path], query: QueryParams, live: Live) -> str:
        """All runs, or those whose name is asked for, and curves of the chosen ones: a figure for each metric and task."""
        runs = {name: runs[name] for name in matching(runs, query.get("match", ""))}
        chosen = runs.keys() & query.getlist("run") if query.get("match", "") == query.get("matched", "") else ()
        chosen = set(chosen or list(runs)[:MAX_CURVES])
        versions = {name: version_of(path) for name, path in runs.items()}
        rows = [read_row(name, path, versions[name]) for name, path in runs.items()]
        entries = {r: read_entries(runs[r.name], versions[r.name]) for r in rows if r.name in chosen and not r.problem}
        names = {name for some in entries.values() for entry in some for name in entry} - {"iteration", "env_steps"}
        metric = query.get("metric", "")
        wanted = matching(sorted(names), metric) if metric.split() else [""]
        figures = [(name, task) for name in wanted for task in dict.fromkeys((r.subject, r.unit) for r in entries)]
        curves = [
            curve
            for name, task in figures[:MAX_FIGURES]
            if (curve := _figure({r: some for r, some in entries.items() if (r.subject, r.unit) == task}, name))
        ]
        page = templates(__package__).get_template("list.html")
        shown = {
            "rows": rows,
            "chosen": chosen,
            "curves": curves,
            "names": sorted(names),
            "omitted": figures[MAX_FIGURES:],
        }
        asked = {"metric": metric, "match": query.get("match", "")}
        return page.render(**shown, **asked, live=live, style=style(), home=self._home, root=self.root)


def _figure(runs: Mapping[Row, Sequence[Mapping[str, Any]]], metric: str) -> str:
    """Curves of a metric, or of the scores (""), of runs of one task; empty if none has it."""
    curves, is_evaluation = {}, not metric or metric.startswith("eval/")
    for row, entries in runs.items():
        line, dots = points(entries, metric or TRAINING), points(entries, metric or EVALUATION) if is_evaluation else []
        if line or dots:
            curves[row.name] = thin(line), thin(dots), ()
    row = next(iter(runs))
    return overlay(curves, row.subject, row.unit, metric or row.score) if curves else ""
