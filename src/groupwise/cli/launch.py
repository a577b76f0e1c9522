"""``--launcher``: what starts the processes of a run."""

import math
import os
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

from groupwise import plugins
from groupwise.cli.parser import Parser, count
from groupwise.errors import ConfigError
from groupwise.system.terminal import show

LAUNCHERS = ("local", "torchrun", "ray")


class Launch(NamedTuple):
    """Where a run trains."""

    launcher: str
    num_workers: int
    resources: dict[str, Any]
    """Of each worker of Ray."""

    def ray_workers(self) -> Any:
        """The workers of Ray; says how to follow them."""
        from groupwise.integrations.ray_train import Workers

        show("training on Ray; to follow it: groupwise view", to="stderr")
        return Workers(self.num_workers, **self.resources)


def parse_launch(argv: Sequence[str]) -> tuple[Launch, list[str]]:
    """The launcher, and the words that are left."""
    parser = Parser(add_help=False)
    parser.add_choice("--launcher", LAUNCHERS)
    parser.add_argument("--workers", type=count)
    parser.add_argument("--cpus", type=float)
    parser.add_argument("--gpus", type=int)
    options, rest = parser.parse_known_args(argv)
    launcher = options.launcher or "local"
    resources = {name: value for name in ("cpus", "gpus") if (value := getattr(options, name)) is not None}
    for name, value in resources.items():
        if not 0 <= value < math.inf:
            raise ConfigError(f"--{name} {value:g}: expected a number of at least 0")
    if launcher != "ray" and resources:
        raise ConfigError(f"--{next(iter(resources))} is for --launcher ray; fix: leave it out")
    if launcher == "local" and options.workers is not None:
        raise ConfigError("--workers is for several processes; fix: --launcher torchrun, or ray")
    return Launch(launcher, options.workers or 2, resources), rest


def torchrun(words: Sequence[str], num_workers: int) -> NoReturn:
    """Run a command in several processes of this machine, in place of this one: signals reach them."""
    of_plugins = [word for plugin in plugins.loaded() for word in ("--plugin", plugin)]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_workers)]
    os.execv(sys.executable, [*launcher, "-m", "groupwise", *words, *of_plugins])  # noqa: S606
