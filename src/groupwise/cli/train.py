"""Commands that train: ``train``, ``resume`` and ``evolve``."""

import logging
import math
import os
import shlex
import subprocess
import sys
import time
import warnings
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import Any

from groupwise import plugins
from groupwise import system as files
from groupwise.cli.options import Option, Parser, count, parse_json, parse_options, value_of, words_of
from groupwise.comparison.results import figure
from groupwise.config import to_json
from groupwise.config.base import Cfg
from groupwise.config.evolution import EvolutionCfg, LaunchCfg
from groupwise.config.load import SUFFIXES, read_file
from groupwise.config.policy import PolicyCfg
from groupwise.config.run import BUDGETS, CommonCfg, RunCfg, TextRunCfg
from groupwise.errors import ConfigError, GroupwiseError
from groupwise.report.folder import RunFolder
from groupwise.system import num_cpus, printable, show

log = logging.getLogger(__name__)


def _add_output(parser: Parser) -> None:
    """Add ``-q`` and ``-v``, which set ``progress``, and ``--allow-programs``."""
    programs = "start programs that the settings of a file or run folder name, such as generation.python"
    parser.add_argument("--allow-programs", action="store_true", help=programs)
    output = parser.add_mutually_exclusive_group()
    for word, progress, text in (
        ("--quiet", "none", "print errors and the result only"),
        ("--verbose", "iterations", "print every iteration, and what the library logs"),
    ):
        output.add_argument(word[1:3], word, dest="progress", action="store_const", const=progress, help=text)
        parser.flags.append(word)


def _set_output(progress: str | None) -> None:
    """Hide or show what this process logs."""
    if progress == "none":
        logging.getLogger("groupwise").setLevel(logging.ERROR)
        warnings.simplefilter("ignore")
        os.environ["TQDM_DISABLE"] = "1"  # progress bars of libraries that are not yet imported
    elif progress == "iterations":
        logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
        logging.getLogger("groupwise").setLevel(logging.DEBUG)


def train_command(parser: Parser, argv: Sequence[str]) -> int:
    """Train a policy on a Gymnasium environment, or with the settings of a JSON or YAML file.

      groupwise train CartPole-v1
      groupwise train CartPole-v1 --algorithm ppo --seed 3
      groupwise train CartPole-v1 --preset dr_grpo --seeds 0-9
      groupwise train my_run.json --algorithm.learning-rate 3e-4

    Options, with the defaults of this environment:
      --seeds 0-9                         or 0,3,5: one run per seed, in parallel
      --launcher ray                      several processes (--workers 2 --cpus 1 --gpus 0)
      --plugin FILE.py                    import your file first
      --allow-programs                    the file of settings may name programs to run (generation.python)
      --preset NAME                       credit and objective of a paper; see: groupwise list
      -q, --quiet                         print errors and the result only
      -v, --verbose                       print every iteration, and what the library logs
      --profile [3]                       record that many iterations with torch.profiler, into profile/ of the run folder
    """
    launch, words = parse_launch(parser, argv)
    if launch is not None and any(word.partition("=")[0] == "--seeds" for word in words):
        raise ConfigError("--seeds has processes of its own; fix: leave --launcher out")
    parser.add_argument("--seeds")
    parser.add_argument("--profile", type=count, nargs="?", const=3)
    _add_output(parser)
    options, rest = parser.parse_known_args(words)
    cfg = parse_options(rest, parser, allow_programs=options.allow_programs).with_progress(options.progress)
    _set_output(options.progress)
    _warn_of_fork(rest[0], cfg)
    if options.seeds is not None:
        if options.profile is not None:
            raise ConfigError("--profile is of a single run, got --seeds too; fix: one of them")
        return train_seeds(cfg, parse_seeds(options.seeds))

    if launch is not None:
        if cfg.run_dir is None:
            raise ConfigError("several processes need one run folder; fix: --run-dir")
        if options.profile is not None:
            raise ConfigError("--profile is not for --launcher ray; fix: leave it out")
        RunFolder.check_free(cfg.run_dir)
        from groupwise.integrations.ray import train_from_config_on_ray

        return print_run(train_from_config_on_ray(cfg, workers=on_ray(launch)), quiet=options.progress == "none")

    from groupwise.run import train_from_config

    callbacks: list[Any] = []
    if options.profile is not None:
        from groupwise.training.trackers import Profiler

        callbacks.append(Profiler(options.profile))
    return print_run(train_from_config(cfg, callbacks=callbacks), quiet=options.progress == "none")


def _warn_of_fork(target: str, cfg: RunCfg | TextRunCfg) -> None:
    """Warn if the file of settings is that of a fork: they do not have the weights that it began with."""
    known = read_file(Path(target)).get("provenance") if target.lower().endswith((".json", *SUFFIXES)) else None
    source = known.get("forked_from") if isinstance(known, dict) else None
    if source and isinstance(source, list) and (cfg.policy if isinstance(cfg, RunCfg) else cfg.model).init_from is None:
        again = plugins.command("resume", source[0], "--fork", "NEW_DIR")
        fork = (
            "the run of %s began with weights of the run that it was forked from, this one does not; to repeat it: %s"
        )
        log.warning(fork, printable(target), printable(again))


def resume_command(parser: Parser, argv: Sequence[str]) -> int:
    """Continue a run from its last checkpoint, as if it had never stopped.

    Examples:
      groupwise resume runs/<run>
      groupwise resume runs/<run> --total-steps 200000
      groupwise resume runs/<population of evolve>
      groupwise resume runs/<run> --from best --fork runs/<new> --algorithm.learning-rate 1e-4 --total-steps 200000
    """
    _add_output(parser)
    if any(word and os.path.isfile(os.path.join(word, "population.json")) for word in argv):
        parser.add_argument("population", type=Path, help="folder of the population")
        own = _add_fields(parser, LaunchCfg)
        found = vars(parser.read(argv))
        _set_output(found["progress"])
        given = {name: value_of(own[name], [found[name]]) for name in own if found[name] is not None}

        from groupwise.evolution.population import Population

        how = {name: found[name] for name in ("allow_programs", "progress")}
        population = Population.resume(found["population"], **how, **given)
        return _print_population(population, quiet=found["progress"] == "none")

    launch, words = parse_launch(parser, argv)
    parser.add_argument("run", type=Path, help="folder of the run")
    if launch is not None:
        options, more = parser.parse_known_args(words)
        if more:
            got = " ".join(more)
            raise ConfigError(f"--launcher ray takes the run folder alone, got {got!r}; fix: leave it out")
        from groupwise.integrations.ray import resume_on_ray

        _set_output(options.progress)
        run = resume_on_ray(options.run, on_ray(launch), allow_programs=options.allow_programs)
        return print_run(run, quiet=options.progress == "none")

    for name, kind in {"steps": count, "iterations": count, "epochs": float}.items():
        parser.add_argument(f"--total-{name}", type=kind, help=f"new total budget in {name} (default: unchanged)")
    fork = "continue in a new run folder; takes train's settings"
    parser.add_argument("--fork", type=Path, metavar="NEW_DIR", help=fork)
    chosen = "with --fork: latest, best, or the environment steps of a checkpoint (default: latest)"
    checkpoint = lambda word: word if word in ("latest", "best") else count(word)  # noqa: E731
    parser.add_argument("--from", dest="checkpoint", type=checkpoint, metavar="CHECKPOINT", help=chosen)
    options, changed = parser.parse_known_args(words)
    totals = {name: total for name in BUDGETS if (total := getattr(options, name)) is not None}
    if options.fork is None:
        if options.checkpoint is not None:
            raise ConfigError("--from would overwrite what was trained since; fix: --fork NEW_DIR, too")
        if changed and changed[0].startswith("--") and "." in changed[0]:
            raise ConfigError(f"{changed[0]} makes another run of it; fix: --fork NEW_DIR, too")
        parser.read(words)
    progress, quiet = options.progress, options.progress == "none"
    _set_output(progress)

    from groupwise.run import resume
    from groupwise.training.checkpoint import fork_run, saved_counts

    if options.fork is None:
        saved = saved_counts(RunFolder(options.run).latest)["iterations"]
        run = resume(options.run, allow_programs=options.allow_programs, progress=progress, **totals)
        return 0 if quiet and run.summary.get("iterations") == saved else print_run(run, quiet)

    changed += [f"--{name.replace('_', '-')}={total}" for name, total in totals.items()]
    allow = options.allow_programs
    read = lambda config: parse_options([str(config), *changed], parser, allow_programs=allow)  # noqa: E731
    made = fork_run(options.run, options.fork, options.checkpoint or "latest", read)
    try:
        # programs are allowed, or of this command
        return print_run(resume(made, allow_programs=True, progress=progress), quiet)
    except GroupwiseError:
        if not RunFolder(made).summary.exists():  # an error before training, such as a wrong setting
            files.remove(made)
        raise


def print_run(run: Any, quiet: bool = False) -> int:
    """Print the result of a run and the next command; returns the exit code.

    Args:
        quiet: name the run folder in place of commands.
    """
    found = run.summary
    if "seconds" not in found:  # of several processes, the first one reports
        return 0
    reached, unit = "", run.cfg.unit
    if (score := found.get("return_mean")) is not None:
        kind = f"greedy {run.cfg.score}" if run.cfg.evaluation.deterministic else run.cfg.score
        ends = " to ".join(map(figure, found.get("ci95") or ()))
        interval = f"95 % interval {ends}" if ends else "no interval"
        cut = f", {count} cut at the step limit" if (count := found.get("cut_episodes")) else ""
        reached = f": {kind} {figure(score)} ({found['episodes']} episodes{cut}, {interval})"
        best = figure(found["best_return_mean"])
        if (rate := found.get("success_rate")) is not None:
            low, high = (100 * end for end in found["success_ci95"])
            reached += f", success {100 * rate:.0f} % (95 % interval {low:.0f} to {high:.0f})"
            best += f", success {100 * found['best_success_rate']:.0f} %,"
        reached += f". Best {best} at {unit} {found['best_env_steps']:,}"
    show(f"Done in {found['seconds']:.1f} s{reached}.{f' Run folder: {run.path}' if quiet else ''}")
    if found["stopped"] not in BUDGETS:
        show(f"Stopped at {unit} {found['env_steps']:,}: {found['stopped']}.")
    if 0 < found.get("updates_without_gradient", 0) == found["iterations"]:
        show("Nothing was learned: the gradient of every update was 0 (docs/troubleshooting.md).")
    if steps := found.get("unsaved_env_steps"):
        again = plugins.command("resume", run.path)
        show(f"NOT SAVED: the last {steps:,} {unit}s; fix: make room, then {again}", to="stderr")
        return 1
    if iterations := found.get("unlogged_iterations"):
        show(f"NOT SAVED: metrics of {iterations:,} iterations; fix: make room", to="stderr")
        return 1
    if not quiet:
        words = ["eval", run.path]
        if run.cfg.algorithm.name == "bc" and isinstance(run.cfg, RunCfg):  # a clone is where training begins
            policy = ["--policy", run.cfg.policy.name] if run.cfg.policy.name != PolicyCfg.own_name() else []
            words = ["train", *words_of(run.cfg.env), *policy, "--policy.init-from", run.path]
        elif run.cfg.algorithm.name == "bc" and score is None:  # there are no rewards, or no held-out prompts
            words = ["sample", run.path, "PROMPT"]
        show(f"Look:  {plugins.command('report', run.path)}", f"Next:  {plugins.command(*words)}")
    return 0


# --launcher ray: the processes of a run on a cluster


def parse_launch(parser: Parser, argv: Sequence[str]) -> tuple[dict[str, Any] | None, list[str]]:
    """Options of ``--launcher ray``, None without it; and the other words."""
    own = Parser(prog=parser.prog, add_help=False)
    own.add_argument("--launcher", choices=("local", "ray"), default="local")
    own.add_argument("--workers", type=count)
    own.add_argument("--cpus", type=float)
    own.add_argument("--gpus", type=int)
    parser.flags += own.flags
    options, rest = own.parse_known_args(argv)
    launch = {name: value for name, value in vars(options).items() if value is not None}
    on_cluster = launch.pop("launcher") == "ray"
    for name, value in launch.items():
        if not on_cluster:
            raise ConfigError(f"--{name} is for --launcher ray; fix: leave it out")
        if not 0 <= value < math.inf:
            raise ConfigError(f"--{name} {value:g}: expected a number of at least 0")
    return launch if on_cluster else None, rest


def on_ray(launch: dict[str, Any]) -> Any:
    """The ``Workers`` of Ray; says how to follow them."""
    from groupwise.integrations.ray import Workers

    show("training on Ray; to follow it: groupwise view", to="stderr")
    names = {"number": "workers", "cpus": "cpus", "gpus": "gpus"}
    return Workers(**{ours: launch[name] for ours, name in names.items() if name in launch})


# --seeds: a process and a folder for each seed


def parse_seeds(text: str) -> list[int]:
    """Seeds of ``0-9``, ``0,3,5`` or a mixture; a ``ConfigError`` if the text has another form, or a seed twice."""
    seeds: list[int] = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        last = last if dash else first
        if not first.isdecimal() or not last.isdecimal():
            raise ConfigError(f"--seeds {text}: expected numbers; fix: a range like 0-9 or a list like 0,3,5")
        if int(first) > int(last):
            raise ConfigError(f"--seeds {text}: expected increasing ranges, got {part}; fix: 0-9 or 0,3,5")
        seeds.extend(range(int(first), int(last) + 1))
    if len(set(seeds)) < len(seeds):
        raise ConfigError(f"--seeds {text}: expected different seeds; fix: 0-9 or 0,3,5")
    return seeds


def train_seeds(cfg: CommonCfg, seeds: list[int]) -> int:
    """Train each seed in a process of its own, one per core at a time; prints a table and returns the exit code.

    After a signal it raises a ``KeyboardInterrupt`` that says how to continue each unfinished seed.
    """
    from groupwise.run import STOP, handling

    name = f"{cfg.subject}-{cfg.algorithm.name}-seeds-{datetime.now():%Y%m%d-%H%M%S}".replace("/", "-")
    folder = cfg.run_dir or Path("runs", name)
    RunFolder.check_free(folder)
    folder.mkdir(parents=True, exist_ok=True)
    progress = cfg.logging.progress
    own = cfg.logging.model_copy(update={"progress": "lines" if progress in ("auto", "bar") else progress})
    settings = to_json(cfg.model_copy(update={"run_dir": None, "logging": own}))
    files.write(folder / "settings.json", f"{settings}\n".encode())

    say = show if progress != "none" else lambda line: None
    say(f"{len(seeds)} seed{'s' if len(seeds) > 1 else ''} under {folder}")
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    # a process group of its own: signals reach it from here only
    options: dict[str, Any] = {"env": os.environ | threads, "start_new_session": True}
    # -P: without it, a groupwise.py in the working folder would run
    program = [sys.executable, "-P", "-m", "groupwise"]
    given = shlex.split(plugins.options(plugins.loaded()))
    allow = ["--allow-programs"] if cfg.named_programs() else []
    waiting, signals, passed_on = list(seeds), list[int](), 0
    running: dict[int, subprocess.Popen[bytes]] = {}
    exit_codes: dict[int, int] = {}

    def train_words(seed: int) -> list[str]:
        own = ["--seed", f"{seed}", "--run-dir", f"{folder / f'seed_{seed}'}"]
        return ["train", f"{folder / 'settings.json'}", *own, *allow]

    def interrupt(number: int, frame: FrameType | None) -> None:
        log.warning("interrupted: running seeds finish and save their iteration first; a second time stops at once")
        signals.append(number)

    with handling(interrupt, *STOP):
        try:
            while running or (waiting and not signals):
                while waiting and not signals and len(running) < num_cpus():
                    seed = waiting.pop(0)
                    with (folder / f"seed_{seed}.log").open("w", encoding="utf-8") as file:
                        command = [*program, *train_words(seed), *given]
                        running[seed] = subprocess.Popen(command, stdout=file, stderr=file, **options)  # noqa: S603
                # on Windows Ctrl-C reaches them anyway, and terminate() would kill them
                if len(signals) > passed_on and sys.platform != "win32":
                    passed_on = len(signals)
                    for process in running.values():
                        process.terminate()
                for seed, process in list(running.items()):
                    if (code := process.poll()) is not None:
                        exit_codes[seed] = code
                        del running[seed]
                        stopped = code == 130 or (signals and -code in STOP)  # by itself, or before it could
                        say(f"seed {seed}: {'done' if code == 0 else 'interrupted' if stopped else 'failed'}")
                time.sleep(0.1)
        finally:  # after an error, such as a closed pipe, the others finish their iteration and end
            for process in running.values():
                process.terminate()

    unfinished = [seed for seed in seeds if exit_codes.get(seed) != 0]
    if signals and unfinished:
        runs = {seed: RunFolder(folder / f"seed_{seed}") for seed in unfinished}
        again = [
            ["resume", run.path, *allow] if run.config.exists() else train_words(seed) for seed, run in runs.items()
        ]
        raise KeyboardInterrupt("\n  ".join(["interrupted; continue with:", *(plugins.command(*w) for w in again)]))
    row = "{:<6}{:<13}{:<11}{}".format
    show(row("seed", "return_mean", "env_steps", "see"))
    for seed in seeds:
        path = folder / f"seed_{seed}"
        summary = RunFolder(path).read_summary()
        score = "-" if (mean := summary.get("return_mean")) is None else f"{mean:.6g}"
        good = exit_codes[seed] == 0
        show(row(seed, score, summary.get("env_steps", "-"), path) if good else row(seed, "failed", "", f"{path}.log"))
    return int(any(exit_codes.values()))


# evolve: a population of runs


def evolve_command(parser: Parser, argv: Sequence[str]) -> int:
    """Train a population of runs. After each round the best go on, and mutated clones of them replace the others.

    Examples:
      groupwise evolve CartPole-v1 --population 8 --rounds 5 --round-steps 5000 --search search.yaml
      groupwise evolve CartPole-v1 --algorithm ppo --search '{"algorithm.learning_rate": {"min": 1e-5, "max": 1e-2, "log": true}}'
      groupwise resume runs/<population>

    search.yaml has bounds or values of settings, by path:
      algorithm.learning_rate: {min: 1e-5, max: 1e-2, log: true}
      algorithm.num_epochs: [1, 2, 4, 8]

    Further options are those of train: groupwise train ENV --help
    """
    parser.usage = "groupwise evolve ENV|FILE [options]"
    options = _add_fields(parser, EvolutionCfg) | _add_fields(parser, LaunchCfg)
    _add_output(parser)
    found, rest = parser.parse_known_args(argv)
    _set_output(found.progress)
    given = {name: word for name, word in vars(found).items() if name in options and word is not None}
    flags = {word.partition("=")[0].replace("-", "_") for word in rest}
    if named := [name for name in BUDGETS if f"__{name}" in flags]:
        raise ConfigError(f"{named[0]}: the budget is --rounds times --round-steps; fix: set these")
    base = parse_options(rest, parser, allow_programs=found.allow_programs).with_progress(found.progress)
    if "search" not in given:
        raise ConfigError("--search is missing: the settings that change; fix: see groupwise evolve --help")
    word = given.pop("search")
    search = parse_json("--search", word) if word.lstrip().startswith("{") else read_file(Path(word))
    values = {name: value_of(options[name], [word]) for name, word in given.items()}
    launch = LaunchCfg(**{name: values.pop(name) for name in LaunchCfg.model_fields if name in values})
    cfg = EvolutionCfg(search=search, **values)

    from groupwise.evolution.population import evolve_from_config

    population = evolve_from_config(cfg, base, run_dir=base.run_dir, launch=launch)
    return _print_population(population, quiet=found.progress == "none")


def _add_fields(parser: Parser, cfg: type[Cfg]) -> dict[str, Option]:
    """Add an option for each field."""
    options: dict[str, Option] = {}
    for name, field in cfg.model_fields.items():
        default = "required" if field.is_required() else f"default: {getattr(field.default, 'name', field.default)}"
        option = options[name] = Option(name, field.annotation, field.default, f"{field.description} ({default})")
        parser.add_argument(option.flag, metavar=option.values, help=option.text.replace("%", "%%").replace("``", ""))
    return options


def _print_population(found: Any, quiet: bool) -> int:
    """Print the best member and the next command, or the folder in its place."""
    best = found.best()
    score = found.fitness(best, found.round - 1)
    show(f"Done: the best of {len(found.members)} members is {best.name}, {found.cfg.fitness} {score:.6g}.")
    show(*(f"  {path}: {value}" for path, value in best.settings.items()))
    show(f"Folder: {found.path}" if quiet else f"Next:  {plugins.command('eval', found.path / 'best')}")
    return 0
