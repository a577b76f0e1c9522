"""Tasks of a Ray cluster that train members. Needs the extra ``ray``."""

from collections.abc import Iterator
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from groupwise import plugins
from groupwise.config.evolution import LaunchCfg
from groupwise.errors import ConfigError
from groupwise.evolution.member import Round
from groupwise.evolution.workers import Answer, Workers, answered
from groupwise.system.ray_cluster import connected
from groupwise.training.components import UserObjects


class RayWorkers(Workers[Any]):
    """Ray starts a task for each member, where the cluster has room for it."""

    def __init__(self, cfg: LaunchCfg, given: UserObjects, output: Path) -> None:
        super().__init__(cfg.workers, given, output.absolute())
        with ExitStack() as stack:
            stack.enter_context(connected())
            _check_room(cfg)
            self._connection = stack.pop_all()
        self._play = ray.remote(_play).options(num_cpus=cfg.cpus, num_gpus=cfg.gpus, max_retries=0)
        self._stored = ray.put(self._payload)

    def close(self) -> None:
        """End all tasks, and the connection if it was made here."""
        for task in self._busy:
            ray.cancel(task, force=True)
        self._connection.close()

    def _begin(self, task: Round) -> Any:
        task = replace(task, folder=task.folder.absolute())
        return self._play.remote(task, self._stored, tuple(plugins.loaded()), str(self.output))

    def _answers(self) -> Iterator[tuple[Any, Answer]]:
        ready, _ = ray.wait(list(self._busy))
        for task in ready:
            try:
                yield task, ray.get(task)
            except RayError as error:
                yield task, Answer(None, f"{type(error).__name__}: {error}")


def _check_room(cfg: LaunchCfg) -> None:
    """Refuse members that no node has room for; Ray would wait without a word."""
    rooms = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    if not any(room.get("CPU", 0) >= cfg.cpus and room.get("GPU", 0) >= cfg.gpus for room in rooms):
        raise ConfigError(
            f"cpus = {cfg.cpus:g}, gpus = {cfg.gpus:g}: no node of the Ray cluster has as many; fix: ask for less"
        )


def _play(task: Round, payload: bytes, plugin_files: tuple[str, ...], output: str) -> Answer:
    with open(output, "a", encoding="utf-8") as file, redirect_stdout(file), redirect_stderr(file):
        return answered(task, payload, plugin_files)
