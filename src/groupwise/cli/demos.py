"""``groupwise demos``: episodes of a scripted expert, for behaviour cloning."""

from collections.abc import Sequence
from pathlib import Path

from groupwise import plugins
from groupwise.cli.parser import Parser, count
from groupwise.system import show

HELP = """Record successful episodes of a scripted expert, for --algorithm bc. Layout: LeRobot's dataset format.

Examples:
  groupwise demos FetchPush-v4
  groupwise demos FetchPush-v4 --episodes 20 --noise 0.2 --out demos/push
  groupwise train FetchPush-v4 --algorithm bc --algorithm.data demos/push

Options:
  --episodes 50       how many to keep
  --out FOLDER        new or empty (default: demos/<environment>)
  --noise 0.1         standard deviation of noise on the executed actions, as a share of half their range; the
                      stored actions are without it
  --seed 0            of starts and noise
  --keep-failures     keep episodes without success, too

Settings of the environment:
"""


def run(parser: Parser, argv: Sequence[str]) -> int:
    """Record episodes of the environment in ``argv``."""
    parser.add_argument("--episodes", type=count, default=50)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--noise", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep-failures", action="store_true")
    options, rest = parser.parse_known_args(argv)

    only, flags = ("env.kwargs", "env.max_episode_steps"), [flag.removeprefix("--") for flag in parser.flags]
    from groupwise.cli.options import read_env

    env = read_env(rest, prog="groupwise demos", description=HELP, only=only, flags=flags)

    from groupwise.embodied.demos import record_demos

    found = record_demos(env, **vars(options))
    show(f"Recorded {found.episodes} episodes ({found.steps:,} steps) of {found.attempts} attempts in {found.path}.")
    again = plugins.command("train", rest[0], "--algorithm", "bc", "--algorithm.data", found.path)
    show(f"Next:  {again}")
    return 0
