"""Runs and populations on a Ray cluster: workers of Ray Train, and members as tasks. Needs the extra ``ray``."""

import math
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, chdir, contextmanager, nullcontext, redirect_stderr, redirect_stdout, suppress
from dataclasses import replace
from io import TextIOWrapper
from pathlib import Path
from typing import Any, NamedTuple

import cloudpickle
import torch.distributed as dist

from groupwise import plugins
from groupwise import system as files
from groupwise.config.evolution import LaunchCfg
from groupwise.config.run import CommonCfg, TextRunCfg
from groupwise.engines import backend_of
from groupwise.errors import ConfigError, GroupwiseError, require_extra
from groupwise.evolution.population import Result, Round, answered
from groupwise.report.folder import RunFolder
from groupwise.run import Run, read_settings, reopen, resume, train_from_config
from groupwise.system import NUM_CPUS
from groupwise.training.build import UserObjects
from groupwise.training.trainer import Callback, check_callbacks

require_extra("ray", "ray")

import ray
from ray.exceptions import RayError
from ray.train import FailureConfig, LoggingConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

_SECONDS_TO_AGREE = 5.0


class Workers(NamedTuple):
    """Processes of a run on a Ray cluster, in one placement group."""

    number: int = 2
    cpus: float = 1.0
    """Cores that Ray keeps for each."""
    gpus: int = 0
    """GPUs that Ray keeps for each."""
    max_failures: int = 3
    """How often they are started again."""


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
    env: Any,
    algorithm: Any = None,
    *,
    workers: Workers = WORKERS,
    callbacks: Sequence[Callback] = (),
    **fields: Any,
) -> Run:
    """Train in several processes, as under ``torchrun``, each a worker of the Ray cluster.

    If a worker or a node is lost, all workers are started again and continue from the run's latest checkpoint.

    Args:
        env, algorithm, fields: as of ``gw.train``. ``run_dir`` is on a disk that all nodes share.
        callbacks: as of ``gw.train``; each worker has a copy.

    Raises:
        ConfigError: a setting is impossible, or the cluster has no room.
        RunFolderError: ``run_dir`` is taken.
        ray.train.TrainingFailedError: workers were lost too often.
    """
    in_env = {name: fields.pop(name, None) for name in ("num_envs", "max_episode_steps")}
    policy, preset = fields.pop("policy", None), fields.pop("preset", None)
    cfg, given = read_settings(env, algorithm, policy, preset, in_env, fields)
    return train_from_config_on_ray(cfg, given, workers, callbacks)


def train_from_config_on_ray(
    cfg: CommonCfg,
    given: UserObjects | None = None,
    workers: Workers = WORKERS,
    callbacks: Sequence[Callback] = (),
) -> Run:
    """Train with the settings of ``cfg``; see ``train_on_ray``."""
    if cfg.run_dir is None:
        raise ConfigError("several processes need one run folder, got run_dir=None; fix: set run_dir, on a shared disk")
    path = Path(cfg.run_dir).absolute()
    RunFolder.check_free(path)
    check_callbacks(callbacks)
    return _fit(path, cfg.model_copy(update={"run_dir": path}), given or UserObjects(), workers, callbacks)


def resume_on_ray(
    path: Path | str,
    workers: Workers = WORKERS,
    *,
    callbacks: Sequence[Callback] = (),
    allow_programs: bool = False,
    **given: Any,
) -> Run:
    """Continue a run from its latest checkpoint in workers of the Ray cluster.

    Args:
        callbacks: those that the run was trained with.
        allow_programs: as of ``gw.resume``.
        given: the Python objects that the run was trained with.
    """
    folder, objects, cfg = reopen(path, given, to_train=True, allow_programs=allow_programs)
    check_callbacks(callbacks)
    return _fit(folder.path.absolute(), cfg, objects, workers, callbacks)


def _fit(path: Path, cfg: CommonCfg, given: UserObjects, workers: Workers, callbacks: Sequence[Callback]) -> Run:
    if workers.gpus and cfg.device == "cpu":
        raise ConfigError(f"gpus = {workers.gpus} and device = 'cpu': they would be idle; fix: device='cuda'")
    backend = backend_of("cuda" if workers.gpus else "cpu", isinstance(cfg, TextRunCfg) and cfg.cpu_offload)
    payload = plugins.pickled((cfg, given, callbacks))
    job = {"folder": os.getcwd(), "path": path, "payload": payload, "plugins": plugins.loaded()}
    job["cpus"] = str(math.ceil(workers.cpus))
    each = {"CPU": workers.cpus} | ({"GPU": workers.gpus} if workers.gpus else {})
    # reports are of Ray; the run's own are in its folder
    with connected(), tempfile.TemporaryDirectory() as reports:
        cpus, gpus = (ray.cluster_resources().get(kind, 0) for kind in ("CPU", "GPU"))
        if cpus < workers.number * workers.cpus or gpus < workers.number * workers.gpus:
            raise ConfigError(
                f"{workers.number} workers with cpus = {workers.cpus:g}, gpus = {workers.gpus}: the Ray cluster has {cpus:g} "
                f"cores and {gpus:g} GPUs; fix: ask for less"
            )  # otherwise Ray would wait without a word
        job["errors"] = ray.remote(_Errors).options(num_cpus=0).remote()
        result = TorchTrainer(
            _work,
            train_loop_config=job,
            torch_config=TorchConfig(backend=backend, timeout_s=int(cfg.ddp_timeout)),
            scaling_config=ScalingConfig(
                num_workers=workers.number, use_gpu=workers.gpus > 0, resources_per_worker=each
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
        plugins.load([*map(Path, job["plugins"])])
        cfg, given, callbacks = cloudpickle.loads(job["payload"])
        begun = [RunFolder(job["path"]).config.exists()]
        dist.broadcast_object_list(begun)  # rank 0 may have made the folder before others look
        if begun[0]:
            more = given.as_arguments()  # those of the call on Ray
            resume(job["path"], callbacks=callbacks, allow_programs=True, **more)
        else:
            train_from_config(cfg, given, callbacks)
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
        return self._play.remote(
            plugins.pickled(task), self._stored, tuple(plugins.loaded()), self._output, self._folder
        )

    def answers(self) -> Iterator[tuple[Any, Result | str]]:
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


def _play(task: bytes, payload: bytes, plugin_files: tuple[str, ...], output: str, folder: str) -> Result | str:
    with suppress(FileNotFoundError):  # another machine may not have it
        os.chdir(folder)  # for relative paths
    with TextIOWrapper(files.appending(Path(output)), "utf-8") as file, redirect_stdout(file), redirect_stderr(file):
        return answered(task, payload, plugin_files)
