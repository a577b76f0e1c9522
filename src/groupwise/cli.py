"""The command line: parses, calls ``groupwise.api``, prints.

Only the commands that train or play import torch, and only once their arguments are known to be right.
"""

import argparse
import functools
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from groupwise.errors import ConfigError, GroupwiseError, RunFolderError, UnknownNameError

USAGE = """usage: groupwise COMMAND ...

Trains a policy by comparing a group of attempts at the same start.

  train ENV|FILE     train on a Gymnasium environment, or as a JSON file says
  eval RUN           play episodes with a trained policy
  resume RUN         go on with a run, bit for bit
  config ENV|FILE    print the full settings as JSON; --schema: their JSON Schema
  check-env ENV      what an environment offers to training: shared starts, noise, speed
  list               presets, algorithms, choices of credit and objective

With every command:
  --help             more about it
  --plugin FILE.py   import a file of yours first: it may register algorithms, credit rules, environments
  --debug            show the traceback of an error
  --version

Start with:
  groupwise train CartPole-v1
"""

TRAIN_HELP = """Train a policy.

Examples:
  groupwise train CartPole-v1                      GRPO, settings tuned for it
  groupwise train CartPole-v1 --algorithm ppo --seed 3
  groupwise train my_run.json --algorithm.learning-rate 3e-4
  groupwise train CartPole-v1 --preset dr_grpo     a paper's credit and objective
  groupwise train CartPole-v1 --seeds 0-9          a run per seed, in parallel

Besides the options below, whose defaults are those of this environment:
  --algorithm NAME   grpo, ppo, or one that a plugin registers (default: grpo)
  --preset NAME      credit and objective of a paper; see: groupwise list
  --seeds 0-9        or 0,3,5: a folder per seed under --run-dir
  --plugin FILE.py, --debug
"""

CONFIG_HELP = """Print the full settings of a run as JSON: a file that train takes.

Examples:
  groupwise config CartPole-v1 --algorithm ppo > my_run.json
  groupwise config my_run.json --algorithm.gamma 0.98
  groupwise config --schema                        JSON Schema, for your editor

It takes the options of train:
  --algorithm NAME   grpo, ppo, or one that a plugin registers (default: grpo)
  --preset NAME      credit and objective of a paper; see: groupwise list
  --plugin FILE.py, --debug
"""


EVAL_HELP = """Play episodes with the policy of a run; print the mean return and its 95 % interval on one line.

Examples:
  groupwise eval runs/<run>
  groupwise eval runs/<run> --episodes 1000 --sampled
  groupwise eval runs/<run> --json | jq .return_mean
"""

RESUME_HELP = """Go on with a run from its last checkpoint, as if it had never stopped.

Examples:
  groupwise resume runs/<run>
  groupwise resume runs/<run> --total-steps 200000
"""

CHECK_HELP = """Try out for some seconds what an environment offers to training: how siblings of a group can share a start and
what that costs, what is random, which spaces are supported, how fast it steps. Exit code 1: GRPO cannot train on it.

Examples:
  groupwise check-env Ant-v5
  groupwise check-env Ant-v5 --env.kwargs '{"healthy_reward": 0.5}' --json
  groupwise check-env Mine-v0 --plugin my_env.py

Besides --json it takes the options of train; those of env count.
"""

LIST_HELP = "Print algorithms, presets, and the choices of credit and objective with their sources."


class Parser(argparse.ArgumentParser):
    """Raises instead of exiting, and takes no abbreviations, which would swallow fields of ``RunCfg``."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **options)

    def error(self, message: str) -> NoReturn:
        """Raise what argparse has to say."""
        raise ConfigError(f"{message}; see: {self.prog} --help")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code (0 done, 1 a seed failed, 2 a mistake of the user's)."""
    shared = Parser(prog="groupwise", add_help=False)
    shared.add_argument("--plugin", type=Path, action="append", default=[])
    shared.add_argument("--debug", action="store_true")
    debug = "--debug" in (sys.argv if argv is None else argv)
    try:
        options, rest = shared.parse_known_args(argv)
        for plugin in options.plugin:
            _import_plugin(plugin)
        return _dispatch(rest, options.plugin)
    except GroupwiseError as error:
        if debug:
            raise
        print(f"groupwise: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as error:
        print(f"groupwise: {str(error) or 'interrupted'}", file=sys.stderr)  # the API says how to go on
        return 130
    except BrokenPipeError:  # whoever read the output, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except SystemExit as stop:  # argparse and tyro leave this way after --help and after a usage error
        return stop.code if isinstance(stop.code, int) else 0


def _dispatch(argv: Sequence[str], plugins: list[Path]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(USAGE, end="")
        return 0 if argv else 2
    if argv[0] == "--version":
        from importlib.metadata import version

        print(f"groupwise {version('groupwise')}")
        return 0
    commands: dict[str, Callable[[Sequence[str], list[Path]], int]] = {
        "train": _train,
        "eval": _eval,
        "resume": _resume,
        "config": _config,
        "check-env": _check_env,
        "list": _list,
    }
    if argv[0] not in commands:
        raise UnknownNameError("command", argv[0], commands)
    return commands[argv[0]](argv[1:], plugins)


def _import_plugin(path: Path) -> None:
    """Run a user's file as a module, for what it registers."""
    spec = importlib.util.spec_from_file_location(f"groupwise_plugin_{path.stem}", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise ConfigError(f"--plugin {path}: expected an existing Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)


def _train(argv: Sequence[str], plugins: list[Path]) -> int:
    parser = Parser(prog="groupwise train", add_help=False)
    parser.add_argument("--seeds")
    options, rest = parser.parse_known_args(argv)
    seeds = _parse_seeds(options.seeds) if options.seeds is not None else []
    cfg = _parse_config(rest, "groupwise train", TRAIN_HELP)
    if seeds:
        return _train_seeds(cfg, seeds, plugins)

    from groupwise import api

    _print_run(api.train_from_config(cfg))
    return 0


def _config(argv: Sequence[str], plugins: list[Path]) -> int:
    from groupwise.config import json_schema, to_json

    if "--schema" in argv:
        print(json.dumps(json_schema(), indent=2))
    else:
        print(to_json(_parse_config(argv, "groupwise config", CONFIG_HELP)))
    return 0


def _check_env(argv: Sequence[str], plugins: list[Path]) -> int:
    cfg = _parse_config([word for word in argv if word != "--json"], "groupwise check-env", CHECK_HELP)

    from groupwise.check_table import check_and_print

    return check_and_print(cfg.env, "json" if "--json" in argv else "table")


def _parse_config(argv: Sequence[str], prog: str, description: str) -> Any:
    """The ``RunCfg`` of ``TARGET [--algorithm NAME] [--preset NAME] [--any.field VALUE ...]``."""
    if not argv or argv[0].startswith("-"):
        if {"-h", "--help"}.isdisjoint(argv):
            raise ConfigError(f"expected an environment id or a JSON file first, as in: {prog} CartPole-v1")
        argv = ["CartPole-v1", *argv]
    parser = Parser(prog=prog, add_help=False)
    parser.add_argument("--algorithm", "--algorithm.name")
    parser.add_argument("--preset")
    chosen, options = parser.parse_known_args(argv[1:])

    from groupwise.options import parse_options

    return parse_options(argv[0], chosen.algorithm, chosen.preset, options, prog=prog, description=description)


def _parse_seeds(text: str) -> list[int]:
    """Seeds of ``0-9`` or ``0,3,5`` or a mixture."""
    seeds: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        if not first.isdecimal() or not (last or first).isdecimal():
            raise ConfigError(f"--seeds {text}: expected a range like 0-9 or a list like 0,3,5")
        seeds.extend(range(int(first), int(last or first) + 1))
    if not seeds or len(set(seeds)) < len(seeds):
        raise ConfigError(f"--seeds {text}: expected each seed once, ranges upwards")
    return seeds


def _train_seeds(cfg: Any, seeds: list[int], plugins: list[Path]) -> int:
    """A process per seed, as many at once as there are cores; prints a table at the end."""
    from groupwise.config import to_json

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
        except KeyboardInterrupt:  # running seeds got it too; the others must not start
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
        numbers = [_number(summary.get(key)) for key in ("return_mean", "env_steps")]
        table.add_row(str(seed), *(numbers if good else ("failed", "")), str(path if good else f"{path}.log"))
    Console(highlight=False).print(table)


def _number(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, int | float) else "-"


def _eval(argv: Sequence[str], plugins: list[Path]) -> int:
    parser = Parser(prog="groupwise eval", description=EVAL_HELP)
    parser.add_argument("run", type=Path, help="folder of the run")
    parser.add_argument("--episodes", type=int, default=100, help="how many (default: 100)")
    parser.add_argument("--sampled", action="store_true", help="sample actions instead of taking the most likely ones")
    parser.add_argument("--seed", type=int, help="of the episodes (default: one that training never used)")
    parser.add_argument("--video", action="store_true", help="also record an episode, where the environment renders")
    parser.add_argument("--json", action="store_true", help="print everything as JSON, each return too")
    options = parser.parse_args(argv)
    if options.episodes < 1:
        raise ConfigError(f"--episodes {options.episodes}: expected at least 1")

    from groupwise import api

    found = api.evaluate(
        options.run, options.episodes, deterministic=not options.sampled, seed=options.seed, video=options.video
    )
    low, high = found.ci95
    if options.json:
        numbers = {"return_mean": found.return_mean, "ci95": [low, high], "episodes": found.episodes}
        print(json.dumps(numbers | {"length_mean": found.length_mean, "returns": list(found.returns)}))
    else:
        print(f"return_mean={found.return_mean:.6g} ci95=[{low:.6g}, {high:.6g}] episodes={found.episodes}")
    return 0


def _resume(argv: Sequence[str], plugins: list[Path]) -> int:
    parser = Parser(prog="groupwise resume", description=RESUME_HELP)
    parser.add_argument("run", type=Path, help="folder of the run")
    parser.add_argument("--total-steps", type=int, help="train until then (default: what the run was started with)")
    options = parser.parse_args(argv)

    from groupwise import api

    _print_run(api.resume(options.run, options.total_steps))
    return 0


def _print_run(run: Any) -> None:
    for key, value in run.summary.items():
        if value is not None:
            numbers = ", ".join(map(_number, value)) if isinstance(value, list) else ""
            print(f"{key}: {f'[{numbers}]' if numbers else _number(value) if isinstance(value, float) else value}")
    print(f"run folder: {run.path}\nnext: groupwise eval {run.path}")


def _list(argv: Sequence[str], plugins: list[Path]) -> int:
    parser = Parser(prog="groupwise list", description=LIST_HELP)
    parser.add_argument("text", nargs="?", default="", help="show only entries that contain this, such as dapo or kl")
    text = parser.parse_args(argv).text

    from groupwise import presets
    from groupwise.config import algorithm_entry, algorithm_names

    algorithms = [f"{n}: {(algorithm_entry(n).cfg_type.__doc__ or '').splitlines()[0]}" for n in algorithm_names()]
    tuned = [f"{env_id}: {', '.join(presets.env_preset(env_id))}" for env_id in presets.env_ids()]
    papers = {
        f"{name}: {p.title}": [p.note, *(f"{k}: {_choices_of(v)}" for k, v in p.settings.items()), p.source]
        for name, p in presets.objective_presets().items()
    }
    choices: dict[str, list[str]] = {}
    for key, choice in presets.choices().items():
        setting, value = key.rsplit(".", 1)
        heading = f"--algorithm.{setting.replace('_', '-')}"
        choices.setdefault(heading, []).append(f"{value}: {choice.note} [{choice.source}]")
    sections = {
        "Algorithms: --algorithm NAME": {"": algorithms},
        "Environments with tuned settings: groupwise train ID": {"": tuned},
        "Credit and objective of a paper or library: --preset NAME": papers,
        "Each choice of credit and objective: --algorithm.credit.scale none": choices,
    }
    found = {
        title: {
            heading: lines for heading, lines in entries.items() if _bare(text) in _bare(" ".join([heading, *lines]))
        }
        for title, entries in sections.items()
    }
    if not any(found.values()):
        raise UnknownNameError("entry", text, presets.objective_presets())
    for title, entries in found.items():
        _show_entries(title, entries)
    return 0


def _bare(text: str) -> str:
    """Text in which options and fields are spelt alike."""
    return text.lower().replace("_", "-")


def _choices_of(tree: dict[str, Any]) -> str:
    """Settings in a line: a choice by its value, a number or 'none' with its name."""
    parts = []
    for key, value in tree.items():
        if isinstance(value, dict):
            parts.append(f"{key} ({_choices_of(value)})")
        else:
            parts.append(value if isinstance(value, str) and value != "none" else f"{key} {value}")
    return ", ".join(parts)


def _show_entries(title: str, entries: dict[str, list[str]]) -> None:
    """Print a section: its headings, and below each the lines that belong to it, as wide as the terminal."""
    if not entries:
        return
    width = shutil.get_terminal_size().columns
    print(f"\n{title}\n{'-' * min(len(title), width)}")
    wrap = functools.partial(textwrap.wrap, width=width, break_long_words=False, break_on_hyphens=False)
    for heading, lines in entries.items():
        indent = "    " if heading else ""
        wrapped = wrap(heading, subsequent_indent="    ")
        for line in lines:
            wrapped += wrap(line, initial_indent=indent, subsequent_indent=indent + "    ")
        print("\n".join(wrapped))


if __name__ == "__main__":
    sys.exit(main())
