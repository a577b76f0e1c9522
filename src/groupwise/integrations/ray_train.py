"""A run whose processes are workers of Ray Train. Needs the extra ``ray``."""

import math
import os
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import cloudpickle
import torch.distributed as dist

from groupwise import plugins
from groupwise.config.run import CommonCfg, TextRunCfg
from groupwise.engines.distributed import backend_of
from groupwise.errors import ConfigError, GroupwiseError, require_extra
from groupwise.integrations.base import Base
from groupwise.integrations.ray_servers import Servers, server_settings, serving
from groupwise.report.folder import RunFolder
from groupwise.run import Run, resume, train_from_config
from groupwise.serving import placed
from groupwise.system.cpus import NUM_CPUS
from groupwise.system.ray_cluster import connected
from groupwise.training.components import UserObjects
from groupwise.training.reopening import reopen

require_extra("ray", "ray")

import ray
from ray.train import FailureConfig, LoggingConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer


class Workers(NamedTuple):
    """Processes of a run on a Ray cluster."""

    number: int = 2
    cpus: float = 1.0
    """Cores that Ray keeps for each, in one placement group."""
    gpus: int = 0
    """GPUs, likewise."""
    max_failures: int = 3
    """How often they are started again."""


WORKERS = Workers()
_SECONDS_TO_AGREE = 5.0
"""So long may workers meet the same error one after another."""


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
    base = Base(env, algorithm, fields)
    return train_from_config_on_ray(base.cfg, base.given(), workers, servers)


def train_from_config_on_ray(
    cfg: CommonCfg, given: UserObjects | None = None, workers: Workers = WORKERS, servers: Servers | None = None
) -> Run:
    """Train with the settings of ``cfg``; see ``train_on_ray``."""
    if cfg.run_dir is None:
        raise ConfigError("several processes need one run folder, got run_dir=None; fix: set run_dir, on a shared disk")
    path = Path(cfg.run_dir).absolute()
    RunFolder.check_free(path)
    return _fit(path, cfg.model_copy(update={"run_dir": path}), given or UserObjects(), workers, servers)


def resume_on_ray(path: Path | str, workers: Workers = WORKERS, servers: Servers | None = None, **given: Any) -> Run:
    """Continue a run from its latest checkpoint in workers of the Ray cluster.

    Args:
        given: the Python objects that the run was trained with.
    """
    folder, objects, cfg = reopen(path, given, to_train=True)
    return _fit(folder.path.absolute(), cfg, objects, workers, servers)


def _fit(path: Path, cfg: CommonCfg, given: UserObjects, workers: Workers, servers: Servers | None) -> Run:
    if workers.gpus and cfg.device == "cpu":
        raise ConfigError(f"gpus = {workers.gpus} and device = 'cpu': they would be idle; fix: device='cuda'")
    how = server_settings(cfg)
    if how is None and servers is not None:
        raise ConfigError(
            f"{servers.number} servers, and the run starts none; fix: leave them out, or generation.python=..."
        )
    servers = servers or Servers()
    job = {"folder": os.getcwd(), "path": path, "payload": plugins.pickled((cfg, given)), "plugins": plugins.loaded()}
    with ExitStack() as stack:
        stack.enter_context(connected())
        _check_room([workers] if how is None else [workers, servers])
        job["servers"] = None if how is None else stack.enter_context(serving(servers, how))
        error = _train(job, workers, TorchConfig(backend=_backend(cfg, workers), timeout_s=int(cfg.ddp_timeout)))
    if error is not None:
        raise error
    return Run.load(path, **given.as_arguments())


def _backend(cfg: CommonCfg, workers: Workers) -> str:
    offloads = isinstance(cfg, TextRunCfg) and cfg.cpu_offload
    return backend_of("cuda" if workers.gpus else "cpu", cpu_offload=offloads)


def _train(job: dict[str, Any], workers: Workers, torch_config: TorchConfig) -> GroupwiseError | None:
    """Do the job in workers; what it ended by."""
    resources = {"CPU": workers.cpus} | ({"GPU": workers.gpus} if workers.gpus else {})
    job |= {"cpus": str(math.ceil(workers.cpus)), "errors": ray.remote(_Errors).options(num_cpus=0).remote()}
    with tempfile.TemporaryDirectory() as reports:  # of Ray; the run's own are in its folder
        result = TorchTrainer(
            _work,
            train_loop_config=job,
            torch_config=torch_config,
            scaling_config=ScalingConfig(
                num_workers=workers.number, use_gpu=workers.gpus > 0, resources_per_worker=resources
            ),
            run_config=RunConfig(
                storage_path=reports,
                failure_config=FailureConfig(max_failures=workers.max_failures),
                logging_config=LoggingConfig(log_level="ERROR"),
            ),
        ).fit()
    return None if result.return_value is None else cloudpickle.loads(result.return_value)


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
        os.environ[NUM_CPUS] = job["cpus"]  # so many processes has the run for environments
        if job["servers"] is not None:
            os.environ[placed.FOLDER] = str(job["servers"])
        plugins.load([*map(Path, job["plugins"])])
        cfg, given = cloudpickle.loads(job["payload"])
        begun = [RunFolder(job["path"]).config.exists()]
        dist.broadcast_object_list(begun)  # rank 0 may have made the folder before others look
        if begun[0]:
            resume(job["path"], **given.as_arguments())
        else:
            train_from_config(cfg, given)
    except GroupwiseError as error:
        ended = bytes(cloudpickle.dumps(error))
        ray.get(job["errors"].add.remote(os.environ["RANK"], ended))
        until = time.monotonic() + _SECONDS_TO_AGREE
        while len(ray.get(job["errors"].all.remote())) < int(os.environ["WORLD_SIZE"]):
            if time.monotonic() > until:
                raise  # the others wait for this one: all are started again, and end
            time.sleep(0.1)
        return ended
    return None


def _check_room(wanted: Sequence[Workers | Servers]) -> None:
    """Refuse processes that the cluster has no room for; Ray would wait without a word."""
    room = ray.cluster_resources()
    cpus, gpus = room.get("CPU", 0), room.get("GPU", 0)
    if cpus < sum(some.number * some.cpus for some in wanted) or gpus < sum(some.number * some.gpus for some in wanted):
        asked = " and ".join(
            f"{some.number} {type(some).__name__.lower()} with cpus = {some.cpus:g}, gpus = {some.gpus}"
            for some in wanted
        )
        raise ConfigError(f"{asked}: the Ray cluster has {cpus:g} cores and {gpus:g} GPUs; fix: ask for less")
