"""Runs and populations on a Ray cluster: workers of Ray Train, inference servers, members. Needs the extra ``ray``."""

import math
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import (
    ExitStack,
    chdir,
    closing,
    contextmanager,
    nullcontext,
    redirect_stderr,
    redirect_stdout,
    suppress,
)
from dataclasses import replace
from io import TextIOWrapper
from pathlib import Path
from typing import Any, NamedTuple

import cloudpickle
import torch.distributed as dist

from groupwise import plugins
from groupwise import serving as placed
from groupwise import system as files
from groupwise.config.evolution import LaunchCfg
from groupwise.config.run import CommonCfg, ServerGenerationCfg, TextRunCfg
from groupwise.engines import backend_of
from groupwise.errors import ConfigError, GroupwiseError, require_extra
from groupwise.evolution.evolve import answered
from groupwise.evolution.population import Round
from groupwise.report.folder import RunFolder
from groupwise.run import Run, read_settings, reopen, resume, train_from_config
from groupwise.serving import LocalServer, PlacedServer
from groupwise.system import NUM_CPUS
from groupwise.training.build import UserObjects

require_extra("ray", "ray")

import ray
from ray.exceptions import RayError
from ray.train import FailureConfig, LoggingConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from ray.util import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

_SECONDS_TO_PLACE, _SECONDS_TO_END, _SECONDS_TO_AGREE = 30.0, 10.0, 5.0


class Workers(NamedTuple):
    """Processes of a run on a Ray cluster, in one placement group."""

    number: int = 2
    cpus: float = 1.0
    """Cores that Ray keeps for each."""
    gpus: int = 0
    """GPUs that Ray keeps for each."""
    max_failures: int = 3
    """How often they are started again."""


class Servers(NamedTuple):
    """Inference servers of a run on a Ray cluster, in a placement group of their own."""

    number: int = 1
    cpus: float = 1.0
    """Cores that Ray keeps for each."""
    gpus: int = 0
    """GPUs of one node that Ray keeps for each."""


WORKERS = Workers()


@contextmanager
def connected() -> Iterator[None]:
    """Connects this process to the cluster of ``RAY_ADDRESS`` or of this machine, else to a new one on this machine.

    A process that is connected already stays so; a connection that is made here ends.
    """
    if ray.is_initialized():
        yield
        return
    # workers would import modules from the current folder, also where this process does not
    with nullcontext() if {"", os.getcwd()}.intersection(sys.path) else chdir(os.sep):
        ray.init(log_to_driver=False)
    try:
        yield
    finally:
        ray.shutdown()


def train_on_ray(
    env: Any, algorithm: Any = None, *, workers: Workers = WORKERS, servers: Servers | None = None, **fields: Any
) -> Run:
    """Train in several processes, as under ``torchrun``, each a worker of the Ray cluster.

    If a worker or a node is lost, all workers are started again and continue from the run's latest checkpoint. A server
    that is lost is started again, and the run waits for it.

    Args:
        env, algorithm, fields: as of ``gw.train``. ``run_dir`` is on a disk that all nodes share.
        servers: those of ``generation.python``, which Ray places. None: ``Servers()`` where it is set.

    Raises:
        ConfigError: a setting is impossible, or the cluster has no room.
        RunFolderError: ``run_dir`` is taken.
        ray.train.TrainingFailedError: workers were lost too often.
    """
    in_env = {name: fields.pop(name, None) for name in ("num_envs", "max_episode_steps")}
    policy, preset = fields.pop("policy", None), fields.pop("preset", None)
    cfg, given = read_settings(env, algorithm, policy, preset, in_env, fields)
    return train_from_config_on_ray(cfg, given, workers, servers)


def train_from_config_on_ray(
    cfg: CommonCfg, given: UserObjects | None = None, workers: Workers = WORKERS, servers: Servers | None = None
) -> Run:
    """Train with the settings of ``cfg``; see ``train_on_ray``."""
    if cfg.run_dir is None:
        raise ConfigError("several processes need one run folder, got run_dir=None; fix: set run_dir, on a shared disk")
    path = Path(cfg.run_dir).absolute()
    RunFolder.check_free(path)
    return _fit(path, cfg.model_copy(update={"run_dir": path}), given or UserObjects(), workers, servers)


def resume_on_ray(
    path: Path | str,
    workers: Workers = WORKERS,
    servers: Servers | None = None,
    *,
    allow_programs: bool = False,
    progress: str | None = None,
    **given: Any,
) -> Run:
    """Continue a run from its latest checkpoint in workers of the Ray cluster.

    Args:
        allow_programs, progress: as of ``gw.resume``.
        given: the Python objects that the run was trained with.
    """
    folder, objects, cfg = reopen(path, given, to_train=True, allow_programs=allow_programs)
    return _fit(folder.path.absolute(), cfg.with_progress(progress), objects, workers, servers)


def _fit(path: Path, cfg: CommonCfg, given: UserObjects, workers: Workers, servers: Servers | None) -> Run:
    if workers.gpus and cfg.device == "cpu":
        raise ConfigError(f"gpus = {workers.gpus} and device = 'cpu': they would be idle; fix: device='cuda'")
    settings = cfg.generation if isinstance(cfg, TextRunCfg) else None
    how = settings if isinstance(settings, ServerGenerationCfg) and settings.python is not None else None
    if how is None and servers is not None:
        raise ConfigError(
            f"{servers.number} servers, and the run starts none; fix: leave them out, or generation.python=..."
        )
    servers = servers or Servers()
    backend = backend_of("cuda" if workers.gpus else "cpu", isinstance(cfg, TextRunCfg) and cfg.cpu_offload)
    job = {"folder": os.getcwd(), "path": path, "payload": plugins.pickled((cfg, given)), "plugins": plugins.loaded()}
    job["cpus"] = str(math.ceil(workers.cpus))
    with ExitStack() as stack:
        stack.enter_context(connected())
        _check_room([workers] if how is None else [workers, servers])
        job["servers"] = None if how is None else stack.enter_context(_serving(servers, how))
        job["errors"] = ray.remote(_Errors).options(num_cpus=0).remote()
        reports = stack.enter_context(tempfile.TemporaryDirectory())  # of Ray; the run's own are in its folder
        result = TorchTrainer(
            _work,
            train_loop_config=job,
            torch_config=TorchConfig(backend=backend, timeout_s=int(cfg.ddp_timeout)),
            scaling_config=ScalingConfig(
                num_workers=workers.number, use_gpu=workers.gpus > 0, resources_per_worker=_resources(workers)
            ),
            run_config=RunConfig(
                storage_path=reports,
                failure_config=FailureConfig(max_failures=workers.max_failures),
                logging_config=LoggingConfig(log_level="ERROR"),
            ),
        ).fit()
    if result.return_value is not None:
        raise cloudpickle.loads(result.return_value)
    return Run.load(path, **given.as_arguments())


def _resources(wanted: Workers | Servers) -> dict[str, float]:
    return {"CPU": wanted.cpus} | ({"GPU": wanted.gpus} if wanted.gpus else {})


def _check_room(wanted: Sequence[Workers | Servers]) -> None:
    """Refuse processes that the cluster has no room for; Ray would wait without a word."""
    cpus, gpus = (ray.cluster_resources().get(kind, 0) for kind in ("CPU", "GPU"))
    if cpus < sum(some.number * some.cpus for some in wanted) or gpus < sum(some.number * some.gpus for some in wanted):
        asked = " and ".join(
            f"{some.number} {type(some).__name__.lower()} with cpus = {some.cpus:g}, gpus = {some.gpus}"
            for some in wanted
        )
        raise ConfigError(f"{asked}: the Ray cluster has {cpus:g} cores and {gpus:g} GPUs; fix: ask for less")


class _Errors:
    """An actor with the errors of the run, by worker."""

    def __init__(self) -> None:
        self.errors: dict[str, bytes] = {}

    def add(self, worker: str, error: bytes) -> None:
        self.errors[worker] = error

    def all(self) -> list[bytes]:
        return list(self.errors.values())


def _work(job: dict[str, Any]) -> bytes | None:
    """Train in a worker, or continue; an error of the run, which would come again in a new worker."""
    if errors := ray.get(job["errors"].all.remote()):  # of the workers before
        return bytes(errors[0])
    try:
        os.chdir(job["folder"])  # for relative paths of data, models and plugins
        os.environ[NUM_CPUS] = job["cpus"]  # the number of processes for environments
        if job["servers"] is not None:
            os.environ[placed.FOLDER] = str(job["servers"])
        plugins.load([*map(Path, job["plugins"])])
        cfg, given = cloudpickle.loads(job["payload"])
        begun = [RunFolder(job["path"]).config.exists()]
        dist.broadcast_object_list(begun)  # rank 0 may have made the folder before others look
        if begun[0]:
            resume(job["path"], allow_programs=True, **given.as_arguments())  # those of the call on Ray
        else:
            train_from_config(cfg, given)
    except GroupwiseError as error:
        ended = bytes(cloudpickle.dumps(error))
        ray.get(job["errors"].add.remote(os.environ["RANK"], ended))
        until = time.monotonic() + _SECONDS_TO_AGREE
        while len(ray.get(job["errors"].all.remote())) < int(os.environ["WORLD_SIZE"]):
            if time.monotonic() > until:  # all ranks meet the same error within this time, or only one of them does
                raise  # the others wait for this one: all are started again, and end
            time.sleep(0.1)
        return ended
    return None


@contextmanager
def _serving(servers: Servers, how: ServerGenerationCfg) -> Iterator[Path]:
    """Keeps servers on the cluster, where Ray starts those again that end; the folder in which the run meets them."""
    if how.weights_dir is None:
        raise ConfigError(
            "servers on Ray read weights from a disk that all nodes share, got generation.weights_dir=None; fix: a folder there"
        )
    how.weights_dir.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="servers-", dir=how.weights_dir.absolute()))
    group = placement_group([_resources(servers)] * servers.number)
    try:
        if not group.wait(_SECONDS_TO_PLACE):
            raise ConfigError(
                f"no nodes of the Ray cluster have cpus = {servers.cpus:g} and gpus = {servers.gpus} for each of "
                f"{servers.number} servers; fix: ask for less"
            )
        for number in range(servers.number):
            (folder / str(number)).mkdir()
        tasks = []
        for number, place in enumerate(placed.in_folder(folder)):
            bundle = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number)
            serve = ray.remote(_serve).options(
                num_cpus=servers.cpus,
                num_gpus=servers.gpus,
                max_retries=-1,
                retry_exceptions=True,
                scheduling_strategy=bundle,
            )
            tasks.append(serve.remote(place, how.timeout, os.getcwd()))
        try:
            yield folder
        finally:
            for task in tasks:
                ray.cancel(task, force=True)
            ray.wait(tasks, num_returns=len(tasks), timeout=_SECONDS_TO_END)
    finally:
        remove_placement_group(group)
        files.remove(folder)


def _serve(server: PlacedServer, timeout: float, folder: str) -> None:
    """Run a server until it ends, which is an error, so that Ray starts it again; return if it cannot start."""
    os.chdir(folder)  # for relative paths
    here = ray.get_runtime_context().get_node_id()
    address = next(str(node["NodeManagerAddress"]) for node in ray.nodes() if node["NodeID"] == here)
    with ExitStack() as stack:
        try:
            running = stack.enter_context(closing(LocalServer(server.command(), server.log, timeout, host=address)))
            running.wait()
        except Exception as error:
            server.say(error=str(error) if isinstance(error, GroupwiseError) else repr(error))
            return
        server.say(url=running.url)
        running.join()


class RayMembers:
    """A pool of Ray tasks, one for each member, where the cluster has room."""

    def __init__(self, cfg: LaunchCfg, given: UserObjects, output: Path) -> None:
        self.busy: dict[Any, Round] = {}
        self.size, self._output = cfg.workers or math.inf, str(output.absolute())  # tasks wait for room
        self._folder = os.getcwd()
        with ExitStack() as stack:
            stack.enter_context(connected())
            rooms = [node["Resources"] for node in ray.nodes() if node["Alive"]]
            if not any(room.get("CPU", 0) >= cfg.cpus and room.get("GPU", 0) >= cfg.gpus for room in rooms):
                raise ConfigError(
                    f"cpus = {cfg.cpus:g}, gpus = {cfg.gpus:g}: no node of the Ray cluster has as many; fix: ask for less"
                )  # otherwise Ray would wait without a message
            self._connection = stack.pop_all()
        self._play = ray.remote(_play).options(num_cpus=cfg.cpus, num_gpus=cfg.gpus, max_retries=0)
        self._stored = ray.put(plugins.pickled(given))

    def begin(self, task: Round) -> Any:
        """Start a task of Ray."""
        task = replace(task, folder=task.folder.absolute())
        return self._play.remote(task, self._stored, tuple(plugins.loaded()), self._output, self._folder)

    def answers(self) -> Iterator[tuple[Any, dict[str, Any] | str]]:
        """Answers of tasks that ended."""
        for task in ray.wait(list(self.busy))[0]:
            try:
                yield task, ray.get(task)
            except RayError as error:
                yield task, f"{type(error).__name__}: {error}"

    def close(self) -> None:
        """End all tasks, and the connection if it was made here."""
        for task in self.busy:
            ray.cancel(task, force=True)
        self._connection.close()


def _play(task: Round, payload: bytes, plugin_files: tuple[str, ...], output: str, folder: str) -> dict[str, Any] | str:
    with suppress(FileNotFoundError):  # another machine may not have it
        os.chdir(folder)  # for relative paths
    with TextIOWrapper(files.appending(Path(output)), "utf-8") as file, redirect_stdout(file), redirect_stderr(file):
        return answered(task, payload, plugin_files)
