"""``groupwise evolve``: a population of runs that tunes its settings while it trains."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from groupwise import plugins
from groupwise import system as files
from groupwise.cli.parser import Parser, count
from groupwise.config.evolution import EvolutionCfg, LaunchCfg
from groupwise.config.load import read_file
from groupwise.config.run import BUDGETS
from groupwise.errors import ConfigError
from groupwise.system import show

HELP = """Train a population of runs. After each round the best go on, and mutated clones of them replace the others.

Examples:
  groupwise evolve CartPole-v1 --population 8 --rounds 5 --round-steps 5000 --search search.yaml
  groupwise evolve CartPole-v1 --algorithm ppo --search '{"algorithm.learning_rate": {"min": 1e-5, "max": 1e-2, "log": true}}'
  groupwise resume runs/<population>

search.yaml has bounds or values of settings, by path:
  algorithm.learning_rate: {min: 1e-5, max: 1e-2, log: true}
  algorithm.num_epochs: [1, 2, 4, 8]

Options, then those of train:
  --search FILE|JSON           what is searched
  --population 8               members
  --rounds 10                  rounds of training, evaluation and selection
  --round-steps 10000          environment steps (tokens for text) of each member in a round
  --episodes 20                episodes of each evaluation, the same for all members
  --fitness mean               or lower_bound: the lower end of the 95 % interval
  --selection tournament       or truncation, halving; or JSON: '{"name": "tournament", "size": 3}'
  --mutation grow_shrink       or log_normal; or JSON
  --weight-noise 0             noise on the weights of clones (AgileRL: 0.1)
  --workers N                  members at once (default: one per core, or what a cluster has room for)
  --launcher processes         or ray: a Ray cluster whose nodes share the folder
  --cpus 1, --gpus 0           what Ray keeps for each member, also a share of a GPU
  --preset NAME                credit and objective of a paper; see: groupwise list
"""


def run(parser: Parser, argv: Sequence[str]) -> None:
    """Train the population that ``argv`` describes; print each round and the best member."""
    parser.add_argument("--search")
    parser.add_argument("--population", type=count)
    parser.add_argument("--rounds", type=count)
    parser.add_argument("--round-steps", type=count)
    parser.add_argument("--episodes", type=count)
    parser.add_choice("--fitness", get_args(EvolutionCfg.model_fields["fitness"].annotation))
    parser.add_argument("--selection", type=_choice)
    parser.add_argument("--mutation", type=_choice)
    parser.add_argument("--weight-noise", type=float)
    _add_launch(parser)
    options, rest = parser.parse_known_args(argv)
    given = {name: value for name, value in vars(options).items() if value is not None}
    launch = LaunchCfg(**{name: given.pop(name) for name in LaunchCfg.model_fields if name in given})
    for name in BUDGETS:
        if any(word.partition("=")[0].replace("-", "_") == f"__{name}" for word in rest):
            raise ConfigError(f"--{name.replace('_', '-')}: the budget is --rounds times --round-steps; fix: set these")

    from groupwise.cli.options import parse_options

    flags = [flag.removeprefix("--") for flag in parser.flags]
    base = parse_options(rest, prog="groupwise evolve", description=HELP, flags=(*flags, "preset"))
    if "search" not in given:
        raise ConfigError("--search is missing: the settings that change; fix: see groupwise evolve --help")
    cfg = EvolutionCfg(**given | {"search": _read_search(given["search"])})

    from groupwise.evolution.evolve import evolve_from_config

    _print(evolve_from_config(cfg, base, run_dir=base.run_dir, launch=launch))


def resume(parser: Parser, argv: Sequence[str]) -> int:
    """Go on with the population in ``argv``."""
    parser.add_argument("population", type=Path, help="folder of the population")
    _add_launch(parser)
    options = vars(parser.read(argv))

    from groupwise.evolution.population import Population

    path = options.pop("population")
    _print(Population.resume(path, **{name: value for name, value in options.items() if value is not None}))
    return 0


def _add_launch(parser: Parser) -> None:
    parser.add_argument("--workers", type=count)
    parser.add_choice("--launcher", get_args(LaunchCfg.model_fields["launcher"].annotation))
    parser.add_argument("--cpus", type=float)
    parser.add_argument("--gpus", type=float)


def _print(found: Any) -> None:
    """Print the best member and the next commands."""
    best = found.best()
    score = found.fitness(best, found.round - 1)
    show(f"Done: the best of {len(found.members)} members is {best.name}, {found.cfg.fitness} {score:.6g}.")
    show(*(f"  {path}: {value}" for path, value in best.settings.items()))
    show(f"Next:  {plugins.command('eval', found.path / 'best')}")


def _read_search(word: str) -> Any:
    return _json("--search", word) if word.lstrip().startswith("{") else read_file(Path(word))


def _choice(word: str) -> Any:
    """A name, or an object with its parameters."""
    return _json("a choice", word) if word.startswith("{") else word


def _json(what: str, word: str) -> Any:
    try:
        return files.parse_json(word.encode())
    except ValueError as error:
        raise ConfigError(f"{what}: {word!r:.200} is broken JSON: {error}") from error
