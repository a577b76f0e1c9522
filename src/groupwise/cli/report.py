"""Commands that look at runs: ``report``, ``view`` and ``doctor``, which looks at the installation, too."""

import os
import platform
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from secrets import token_urlsafe
from typing import Any

from groupwise.cli.options import Parser
from groupwise.errors import ConfigError, GroupwiseError, RunFolderError, require_extra
from groupwise.report.folder import RunFolder, explained
from groupwise.report.health import WORDS, Finding, diagnose
from groupwise.report.page import answer, answer_of, write_page
from groupwise.system import show

HOST = "127.0.0.1"
NICE = 10
"""Training goes first; while it uses all cores, this leaves a tenth of a core to ``view``."""
SECONDS = 10.0
"""Length of the doctor's training."""


def report_command(parser: Parser, argv: Sequence[str]) -> None:
    """Write a page about a run: did it learn, its health, its groups step by step, its settings.
    One file of HTML, without network and server; of failed and running runs, too.

    Examples:
      groupwise report runs/<run>
      groupwise report runs/<run> -o page.html
    """
    parser.add_argument("run", type=Path, help="folder of the run")
    parser.add_argument("-o", "--out", type=Path, metavar="FILE", help="default: report.html in the folder")
    options = parser.read(argv)
    show(f"written: {write_page(options.run, options.out)}")


def view_command(parser: Parser, argv: Sequence[str]) -> None:
    """Show the runs of a folder in your browser, and follow them while they train: curves, health, groups.
    Only this machine can connect, and only with the address that is printed. Nothing is written or sent anywhere.

    Examples:
      groupwise view
      groupwise view runs/<run> --port 8000
    """
    runs = {"nargs": "?", "default": Path("runs"), "help": "folder of runs, or a run (default: runs)"}
    parser.add_argument("runs", type=Path, **runs)
    parser.add_argument("--port", type=int, default=0, help="default: a free one")
    options = parser.read(argv)
    if not 0 <= options.port <= 65_535:
        raise ConfigError(f"--port {options.port}: expected 0 to 65535; fix: leave it out for a free one")
    if not options.runs.is_dir():
        raise RunFolderError(f"there is no folder {str(options.runs)!r}; fix: a folder of runs, or train one first")
    require_extra("starlette", "view")
    require_extra("uvicorn", "view")
    # what pages need is imported before the priority falls: while training uses all cores they would take a minute
    import pyarrow.parquet  # noqa: F401
    import uvicorn

    from groupwise.report.view import Viewer

    if sys.platform != "win32":
        os.nice(NICE)
    token = token_urlsafe(24)
    with socket.create_server((HOST, options.port)) as listener:
        show(f"http://{HOST}:{listener.getsockname()[1]}/{token}/", "Ctrl-C ends it.")
        # no access log: it would print the token; open pages do not delay the end
        cfg = uvicorn.Config(Viewer(options.runs, token).app(), log_level="warning", timeout_graceful_shutdown=1)
        uvicorn.Server(cfg).run(sockets=[listener])


def doctor_command(parser: Parser, argv: Sequence[str]) -> int:
    """Name likely causes of a run's trouble, and what to change. Without a run: look at torch and the GPU, and train for
    ten seconds. Exit code 1: there is trouble.

    Examples:
      groupwise doctor
      groupwise doctor runs/<run>
    """
    parser.add_argument("run", type=Path, nargs="?", help="folder of a run")
    options = parser.read(argv)
    if options.run is None:
        findings: Iterator[Finding] = (check() for check in (device, training))
    else:
        with explained(options.run):
            folder = RunFolder.open(options.run)
            learned, metrics = answer_of(folder), folder.read_metrics()
            sick = [finding for finding in diagnose(folder) if finding.verdict != "good"]
        show(f"Did it learn? {learned.word}. {learned.text}")
        if not sick:
            show("Nothing looks wrong." if metrics else "There is nothing to look at yet.")
        findings = iter(sick)
    trouble = False
    for finding in findings:  # printed as they come: training takes some seconds
        show(f"{WORDS[finding.verdict]:<8} {finding.title}: {finding.text}")
        if finding.advice:
            show(f"{'':<8} fix: {finding.advice}")
        trouble |= finding.verdict == "bad"
    return int(trouble)


# The installation


def device() -> Finding:
    """The torch build and the GPU."""
    import torch

    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU"
    text, advice = f"Python {platform.python_version()}, torch {torch.__version__} ({build})", "pytorch.org."
    if not torch.cuda.is_available():
        if shutil.which("nvidia-smi") is None:
            return Finding("Device", (), "good", f"{text}, on the CPU.")
        text += " finds no GPU, but an NVIDIA driver is installed."
        return Finding("Device", (), "look", text, f"A torch build with CUDA that fits the driver: {advice}")
    try:
        torch.ones(1, device="cuda").add(1).item()
    except RuntimeError as error:
        text += f", but the GPU does not compute: {str(error).splitlines()[0]}"
        return Finding("Device", (), "bad", text, f"A torch build for this GPU: {advice}")
    return Finding("Device", (), "good", f"{text}, on {torch.cuda.get_device_name()} with device='cuda'.")


def training() -> Finding:
    """Whether CartPole is learned, and a page is written about it."""
    from groupwise.run import train

    title = f"Training for {SECONDS:g} seconds"
    settings: dict[str, Any] = {"total_steps": 100_000, "speed": "off", "stop": {"time_limit": SECONDS}}
    with tempfile.TemporaryDirectory() as place:
        try:
            run = train(run_dir=Path(place, "run"), logging={"progress": "none"}, **settings)
            write_page(run.path)
        except (GroupwiseError, OSError, RuntimeError, ImportError) as error:
            return Finding(title, (), "bad", f"It failed: {error}.", "groupwise --debug train CartPole-v1 shows where.")
        metrics = run.metrics()
    learned = answer(metrics, "return", "episodes")
    speed = metrics[-1]["env_steps"] / metrics[-1]["time/total_seconds"]
    text = f"{speed:,.0f} steps per second on CartPole-v1. {learned.text}"
    if learned.word.startswith(("Solved", "Yes")):
        return Finding(title, (), "good", text)
    advice = f"{len(metrics)} iterations may be too few: groupwise train CartPole-v1."
    return Finding(title, (), "look", text, advice)
