"""``--launcher``: what starts the processes of a run."""

import math
import os
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

from groupwise import plugins
from groupwise.cli.parser import Parser, count
from groupwise.errors import ConfigError
from groupwise.system import show

LAUNCHERS = ("local", "torchrun", "ray")
LAUNCH_FLAGS = ("launcher", "workers", "cpus", "gpus", "servers", "server-cpus", "server-gpus")


class Launch(NamedTuple):
    """Where a run trains."""

    launcher: str
    num_workers: int
    resources: dict[str, Any]
    """Of each worker of Ray."""
    servers: dict[str, Any]
    """Their number, and resources of each; empty for those of a run that names none."""

    def on_ray(self) -> dict[str, Any]:
        """The workers and servers of Ray; says how to follow them."""
        from groupwise.integrations.ray import Servers, Workers

        show("training on Ray; to follow it: groupwise view", to="stderr")
        return {
            "workers": Workers(self.num_workers, **self.resources),
            "servers": Servers(**self.servers) if self.servers else None,
        }


def parse_launch(argv: Sequence[str]) -> tuple[Launch, list[str]]:
    """The launcher, and the words that are left."""
    parser = Parser(add_help=False)
    parser.add_choice("--launcher", LAUNCHERS)
    parser.add_argument("--workers", type=count)
    parser.add_argument("--servers", type=count)
    for name in ("--cpus", "--server-cpus"):
        parser.add_argument(name, type=float)
    for name in ("--gpus", "--server-gpus"):
        parser.add_argument(name, type=int)
    options, rest = parser.parse_known_args(argv)
    launcher = options.launcher or "local"
    for_ray = {
        name: value
        for name, value in vars(options).items()
        if name not in ("launcher", "workers") and value is not None
    }
    for name, value in for_ray.items():
        flag = f"--{name.replace('_', '-')}"
        if not 0 <= value < math.inf:
            raise ConfigError(f"{flag} {value:g}: expected a number of at least 0")
        if launcher != "ray":
            raise ConfigError(f"{flag} is for --launcher ray; fix: leave it out")
    if launcher == "local" and options.workers is not None:
        raise ConfigError("--workers is for several processes; fix: --launcher torchrun, or ray")
    resources = {name: value for name, value in for_ray.items() if name in ("cpus", "gpus")}
    names = {"servers": "number", "server_cpus": "cpus", "server_gpus": "gpus"}
    servers = {ours: for_ray[name] for name, ours in names.items() if name in for_ray}
    return Launch(launcher, options.workers or 2, resources, servers), rest


def torchrun(words: Sequence[str], num_workers: int) -> NoReturn:
    """Run a command in several processes of this machine, in place of this one: signals reach them."""
    of_plugins = [word for plugin in plugins.loaded() for word in ("--plugin", plugin)]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_workers)]
    os.execv(sys.executable, [*launcher, "-m", "groupwise", *words, *of_plugins])  # noqa: S606
