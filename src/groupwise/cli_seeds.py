"""``train --seeds``: a process and a folder per seed."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from datetime import datetime
from pathlib import Path

from groupwise.config import RunCfg, to_json
from groupwise.errors import ConfigError, RunFolderError


def parse_seeds(text: str) -> list[int]:
    """Seeds of ``0-9`` or ``0,3,5`` or a mixture.

    Raises:
        ConfigError: it is neither, or names a seed twice.
    """
    seeds: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        if not first.isdecimal() or not (last or first).isdecimal():
            raise ConfigError(f"--seeds {text}: expected a range like 0-9 or a list like 0,3,5")
        seeds.extend(range(int(first), int(last or first) + 1))
    if not seeds or len(set(seeds)) < len(seeds):
        raise ConfigError(f"--seeds {text}: expected each seed once, ranges upwards")
    return seeds


def train_seeds(cfg: RunCfg, seeds: list[int], plugins: list[Path]) -> int:
    """The exit code of a process per seed, as many at once as there are cores; prints a table at the end.

    Raises:
        RunFolderError: the folder for them all is taken.
    """
    name = f"{cfg.env.id}-{cfg.algorithm.name}-seeds-{datetime.now():%Y%m%d-%H%M%S}".replace("/", "-")
    folder = cfg.run_dir or Path("runs", name)
    try:
        folder.mkdir(parents=True)
    except FileExistsError as error:
        raise RunFolderError(f"run folder {str(folder)!r} is taken; mend: give another --run-dir") from error
    settings = to_json(cfg.model_copy(update={"run_dir": None}))
    (folder / "settings.json").write_text(settings + "\n", encoding="utf-8")
    print(f"{len(seeds)} seeds under {folder}", flush=True)
    exit_codes: dict[int, int] = {}
    with ThreadPoolExecutor(_num_cores()) as pool:
        jobs = {pool.submit(_train_one, folder, seed, plugins): seed for seed in seeds}
        try:
            for job in as_completed(jobs):
                exit_codes[jobs[job]] = job.result()
                print(f"seed {jobs[job]}: {'failed' if job.result() else 'done'}", flush=True)
        except KeyboardInterrupt:  # running seeds got it too, and finish; the others must not start
            pool.shutdown(cancel_futures=True)
            raise
    _print_seeds(folder, {seed: exit_codes[seed] == 0 for seed in seeds})
    return int(any(exit_codes.values()))


def _train_one(folder: Path, seed: int, plugins: list[Path]) -> int:
    """Exit code of one seed's training; what it printed is in ``seed_<n>.log``."""
    command = [sys.executable, "-m", "groupwise", "train", str(folder / "settings.json"), "--seed", str(seed)]
    command += ["--run-dir", str(folder / f"seed_{seed}"), "--logging.progress", "lines"]
    command += [part for plugin in plugins for part in ("--plugin", str(plugin))]
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    with (folder / f"seed_{seed}.log").open("w", encoding="utf-8") as log:
        return subprocess.run(command, stdout=log, stderr=log, env=os.environ | threads, check=False).returncode


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def _print_seeds(folder: Path, succeeded: dict[int, bool]) -> None:
    from rich.console import Console
    from rich.table import Table

    from groupwise.report.folder import RunFolder

    table = Table("seed", "return_mean", "env_steps", "see", box=None)
    for seed, good in succeeded.items():
        path = folder / f"seed_{seed}"
        summary = RunFolder(path).read_summary()
        numbers = [number(summary.get(key)) for key in ("return_mean", "env_steps")]
        table.add_row(str(seed), *(numbers if good else ("failed", "")), str(path if good else f"{path}.log"))
    Console(highlight=False).print(table)


def number(value: object) -> str:
    """A number as tables and lines show it; a dash for anything else."""
    return f"{value:.6g}" if isinstance(value, int | float) else "-"
