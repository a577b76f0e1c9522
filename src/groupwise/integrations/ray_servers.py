"""Inference servers of a run, on a Ray cluster. Needs the extra ``ray``."""

import logging
import os
import tempfile
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from groupwise.config.generation import ServerGenerationCfg
from groupwise.config.run import CommonCfg, TextRunCfg
from groupwise.errors import ConfigError, GroupwiseError, require_extra
from groupwise.serving import placed
from groupwise.serving.launch import LocalServer
from groupwise.serving.placed import PlacedServer
from groupwise.system import files

require_extra("ray", "ray")

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

log = logging.getLogger(__name__)

_SECONDS_TO_PLACE, _SECONDS_TO_END, _POLL = 30.0, 10.0, 0.5


class Servers(NamedTuple):
    """Inference servers of a run on a Ray cluster, in a placement group of their own."""

    number: int = 1
    cpus: float = 1.0
    """Cores that Ray keeps for each."""
    gpus: int = 0
    """GPUs of one node, likewise."""


@contextmanager
def serving(servers: Servers, how: ServerGenerationCfg) -> Iterator[Path]:
    """Keeps servers on the cluster, and starts those again that end; the folder in which the run meets them."""
    if how.weights_dir is None:
        raise ConfigError(
            "servers on Ray read weights from a disk that all nodes share, got generation.weights_dir=None; fix: a folder there"
        )
    how.weights_dir.mkdir(parents=True, exist_ok=True)
    resources = {"CPU": servers.cpus} | ({"GPU": servers.gpus} if servers.gpus else {})
    folder = Path(tempfile.mkdtemp(prefix="servers-", dir=how.weights_dir.absolute()))
    group = placement_group([resources] * servers.number)
    try:
        if not group.wait(_SECONDS_TO_PLACE):
            raise ConfigError(
                f"no nodes of the Ray cluster have cpus = {servers.cpus:g} and gpus = {servers.gpus} for each of "
                f"{servers.number} servers; fix: ask for less"
            )
        with closing(_Keeper(placed.create(folder, servers.number), group, resources, how.timeout)):
            yield folder
    finally:
        remove_placement_group(group)
        files.remove(folder)


def server_settings(cfg: CommonCfg) -> ServerGenerationCfg | None:
    """The settings of servers that a run starts; None if it starts none."""
    how = cfg.generation if isinstance(cfg, TextRunCfg) else None
    return how if isinstance(how, ServerGenerationCfg) and how.python is not None else None


class _Keeper:
    """A thread that begins the task of each server, again where it ends."""

    def __init__(self, servers: list[PlacedServer], group: Any, resources: dict[str, float], timeout: float) -> None:
        self._servers, self._timeout = servers, timeout
        self._places = [
            ray.remote(_serve).options(
                num_cpus=resources["CPU"],
                num_gpus=resources.get("GPU", 0),
                max_retries=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number),
            )
            for number in range(len(servers))
        ]
        self._tasks = {self._begin(number): number for number in range(len(servers))}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._keep, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the servers."""
        self._ended.set()
        self._thread.join()
        for task in self._tasks:
            ray.cancel(task, force=True)
        if self._tasks:
            ray.wait(list(self._tasks), num_returns=len(self._tasks), timeout=_SECONDS_TO_END)

    def _begin(self, number: int) -> Any:
        return self._places[number].remote(self._servers[number], self._timeout, os.getcwd())

    def _keep(self) -> None:
        while not self._ended.wait(_POLL) and self._tasks:
            for task in ray.wait(list(self._tasks), timeout=_POLL)[0]:
                number = self._tasks.pop(task)
                if _was_ready(task):
                    log.warning("server %d of the run ended; it is started again", number)
                    self._tasks[self._begin(number)] = number


def _was_ready(task: Any) -> bool:
    """Whether a server that ended, or was lost with its node, is to be started again: not if it cannot start."""
    try:
        return bool(ray.get(task))
    except RayTaskError as error:
        log.error("a server of the run failed: %s", error)
        return False
    except RayError:
        return True


def _serve(server: PlacedServer, timeout: float, folder: str) -> bool:
    """Run a server until it ends; whether it was ready."""
    os.chdir(folder)  # for relative paths
    ready = False
    try:
        with closing(LocalServer(server.command(), server.log, timeout, host=_address())) as running:
            running.wait()
            server.is_at(running.url)
            ready = True
            running.join()
    except Exception as error:
        if not ready:
            server.cannot_start(str(error) if isinstance(error, GroupwiseError) else repr(error))
    return ready


def _address() -> str:
    """Where this node can be reached."""
    here = ray.get_runtime_context().get_node_id()
    return next(str(node["NodeManagerAddress"]) for node in ray.nodes() if node["NodeID"] == here)
