"""``groupwise resume``: continue a run, or fork a new one from it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from groupwise import system as files
from groupwise.cli import evolve
from groupwise.cli.launch import parse_launch, torchrun
from groupwise.cli.parser import Parser, count
from groupwise.cli.result import print_run
from groupwise.config.run import BUDGETS
from groupwise.errors import ConfigError, GroupwiseError

HELP = """Continue a run from its last checkpoint, as if it had never stopped.

Examples:
  groupwise resume runs/<run>
  groupwise resume runs/<run> --total-steps 200000
  groupwise resume runs/<run> --launcher torchrun --workers 2
  groupwise resume runs/<population of evolve>
  groupwise resume runs/<run> --from best --fork runs/<new> --algorithm.learning-rate 1e-4 --total-steps 200000
"""


def run(parser: Parser, argv: Sequence[str]) -> int:
    """Continue the run or population in ``argv``, and print its result."""
    if argv and (Path(argv[0]) / "population.json").is_file():
        return evolve.resume(parser, argv)
    launch, words = parse_launch(argv)
    if launch.launcher != "local" and any(word.partition("=")[0] == "--fork" for word in words):
        raise ConfigError("--fork is of one process; fix: make a copy without --launcher, then resume that")
    if launch.launcher == "torchrun":
        torchrun(["resume", *words], launch.num_workers)
    if launch.launcher == "ray":
        from groupwise.integrations.ray import resume_on_ray

        if len(words) != 1:
            raise ConfigError(
                f"--launcher ray takes the run folder alone, got {' '.join(words)!r}; fix: --launcher torchrun"
            )
        return print_run(resume_on_ray(words[0], **launch.on_ray()))
    return print_run(_resumed(parser, words))


def _resumed(parser: Parser, argv: Sequence[str]) -> Any:
    parser.add_argument("run", type=Path, help="folder of the run")
    parser.add_argument("--total-steps", type=count, help="train until then (default: as before)")
    parser.add_argument("--total-iterations", type=count, help="likewise")
    parser.add_argument("--total-epochs", type=float, help="likewise")
    parser.add_argument(
        "--fork", type=Path, metavar="NEW_DIR", help="go on in a new run folder, with settings as train's"
    )
    chosen = "with --fork: latest, best, or the environment steps of a checkpoint (default: latest)"
    parser.add_argument("--from", dest="checkpoint", type=_checkpoint, metavar="CHECKPOINT", help=chosen)
    options, settings = parser.parse_known_args(argv)
    totals = {name: total for name in BUDGETS if (total := getattr(options, name)) is not None}
    if options.fork is not None:
        settings += [f"--{name.replace('_', '-')}={total}" for name, total in totals.items()]
        return _fork(options.run, options.fork, options.checkpoint or "latest", settings)
    _refuse_changes(parser, argv, options.checkpoint, settings)

    from groupwise.run import resume

    return resume(options.run, **totals)


def _checkpoint(word: str) -> str | int:
    return word if word in ("latest", "best") else count(word)


def _refuse_changes(parser: Parser, argv: Sequence[str], checkpoint: object, settings: Sequence[str]) -> None:
    if checkpoint is not None:
        raise ConfigError("--from would overwrite what was trained since; fix: --fork NEW_DIR, too")
    if settings and settings[0].startswith("--") and "." in settings[0]:
        raise ConfigError(f"{settings[0]} makes another run of it; fix: --fork NEW_DIR, too")
    parser.read(argv)


def _fork(run: Path, run_dir: Path, checkpoint: Any, settings: Sequence[str]) -> Any:
    from groupwise.cli.options import parse_options
    from groupwise.report.folder import RunFolder
    from groupwise.run import resume
    from groupwise.training.checkpoint import fork_run

    def read(config: Path) -> Any:
        return parse_options(
            [str(config), *settings], prog="groupwise resume", description=HELP, flags=("fork", "from")
        )

    made = fork_run(run, run_dir, checkpoint, read)
    try:
        return resume(made)
    except GroupwiseError:
        if not RunFolder(made).summary.exists():  # an error before training, as of a wrong setting
            files.remove(made)
        raise
