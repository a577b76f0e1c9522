"""``train --seeds``: a process and a folder per seed."""

import logging
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import Any

from groupwise import plugins
from groupwise import system as files
from groupwise.config import to_json
from groupwise.config.run import CommonCfg
from groupwise.errors import ConfigError, RunFolderError
from groupwise.report.folder import RunFolder
from groupwise.system import num_cpus, show
from groupwise.training.trainer import STOP, handling

log = logging.getLogger(__name__)

_ENDS = {0: "done", 130: "interrupted"}
"""Meaning of a seed's exit codes; any other is a failure."""


def parse_seeds(text: str) -> list[int]:
    """Seeds of ``0-9``, ``0,3,5`` or a mixture.

    Raises:
        ConfigError: ``text`` has another form, or a seed twice.
    """
    seeds: list[int] = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        last = last if dash else first
        if not first.isdecimal() or not last.isdecimal():
            raise ConfigError(f"--seeds {text}: expected numbers; fix: a range like 0-9 or a list like 0,3,5")
        seeds.extend(range(int(first), int(last) + 1))
    if not seeds or len(set(seeds)) < len(seeds):
        raise ConfigError(f"--seeds {text}: expected different seeds and increasing ranges; fix: 0-9 or 0,3,5")
    return seeds


def train_seeds(cfg: CommonCfg, seeds: list[int]) -> int:
    """Train each seed in a process of its own, one per core at a time; prints a table and returns the exit code.

    Raises:
        RunFolderError: the folder is taken.
        KeyboardInterrupt: after a signal; says how to continue each unfinished seed.
    """
    folder = _create_folder(cfg)
    say = show if cfg.logging.progress != "none" else lambda line: None
    say(f"{len(seeds)} seed{'s' if len(seeds) > 1 else ''} under {folder}")
    # A process group of its own: signals reach it from here only.
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    options: dict[str, Any] = {"env": os.environ | threads, "start_new_session": True}
    waiting, signals, passed_on = list(seeds), list[int](), 0
    running: dict[int, subprocess.Popen[bytes]] = {}
    exit_codes: dict[int, int] = {}

    def interrupt(number: int, frame: FrameType | None) -> None:
        log.warning("interrupted: running seeds finish and save their iteration first; a second time stops at once")
        signals.append(number)

    with handling(interrupt, *STOP), _terminating(running):
        while running or (waiting and not signals):
            while waiting and not signals and len(running) < num_cpus():
                seed = waiting.pop(0)
                with (folder / f"seed_{seed}.log").open("w", encoding="utf-8") as file:
                    command = _command(folder, seed)
                    running[seed] = subprocess.Popen(command, stdout=file, stderr=file, **options)  # noqa: S603  ours
            # On Windows Ctrl-C reaches them anyway, and terminate() would kill them.
            if len(signals) > passed_on and sys.platform != "win32":
                passed_on = len(signals)
                for process in running.values():
                    process.terminate()
            for seed, process in list(running.items()):
                if (code := process.poll()) is not None:
                    exit_codes[seed] = code
                    del running[seed]
                    say(f"seed {seed}: {_ENDS.get(code, 'failed')}")
            time.sleep(0.1)
    unfinished = [seed for seed in seeds if exit_codes.get(seed) != 0]
    if signals and unfinished:
        raise KeyboardInterrupt(_interruption(folder, unfinished))
    _print_seeds(folder, {seed: exit_codes[seed] == 0 for seed in seeds})
    return int(any(exit_codes.values()))


@contextmanager
def _terminating(running: dict[int, subprocess.Popen[bytes]]) -> Iterator[None]:
    """After an error, such as a closed pipe, let the processes that still run finish their iteration and end."""
    try:
        yield
    finally:
        for process in running.values():
            process.terminate()


def _create_folder(cfg: CommonCfg) -> Path:
    """The folder of the seeds, with their settings."""
    name = f"{cfg.subject}-{cfg.algorithm.name}-seeds-{datetime.now():%Y%m%d-%H%M%S}".replace("/", "-")
    folder = cfg.run_dir or Path("runs", name)
    try:
        folder.mkdir(parents=True)
    except FileExistsError as error:
        raise RunFolderError(f"run folder {str(folder)!r} is taken; fix: give another --run-dir") from error
    progress = "lines" if cfg.logging.progress in ("auto", "bar") else cfg.logging.progress
    logging = cfg.logging.model_copy(update={"progress": progress})
    settings = to_json(cfg.model_copy(update={"run_dir": None, "logging": logging}))
    files.write(folder / "settings.json", f"{settings}\n".encode())
    return folder


def _command(folder: Path, seed: int) -> list[str]:
    # -P: without it, a groupwise.py in the working folder would run
    command = [sys.executable, "-P", "-m", "groupwise", *_train_args(folder, seed)]
    return command + shlex.split(plugins.options(plugins.loaded()))


def _train_args(folder: Path, seed: int) -> list[str]:
    return ["train", str(folder / "settings.json"), "--seed", str(seed), "--run-dir", str(folder / f"seed_{seed}")]


def _interruption(folder: Path, unfinished: list[int]) -> str:
    """A command for each unfinished seed."""
    lines = ["interrupted; continue with:"]
    for seed in unfinished:
        run = folder / f"seed_{seed}"
        args = ["resume", str(run)] if RunFolder(run).config.exists() else _train_args(folder, seed)
        lines.append(f"  {plugins.command(*args)}")
    return "\n".join(lines)


def _print_seeds(folder: Path, succeeded: dict[int, bool]) -> None:
    row = "{:<6}{:<13}{:<11}{}".format
    show(row("seed", "return_mean", "env_steps", "see"))
    for seed, good in succeeded.items():
        path = folder / f"seed_{seed}"
        summary = RunFolder(path).read_summary()
        score = "-" if (mean := summary.get("return_mean")) is None else f"{mean:.6g}"
        show(row(seed, score, summary.get("env_steps", "-"), path) if good else row(seed, "failed", "", f"{path}.log"))
