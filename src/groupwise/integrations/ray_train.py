"""A run whose processes are workers of Ray Train. Needs the extra ``ray``."""

import os
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import cloudpickle
import torch.distributed as dist

from groupwise import plugins
from groupwise.config.run import CommonCfg
from groupwise.errors import ConfigError, GroupwiseError, require_extra
from groupwise.integrations.base import Base
from groupwise.report.folder import RunFolder
from groupwise.run import Run, reopen, resume, train_from_config
from groupwise.training.components import UserObjects

require_extra("ray", "ray")

import ray
from ray.train import FailureConfig, LoggingConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

from groupwise.system.ray_cluster import connected


class Workers(NamedTuple):
    """Processes of a run on a Ray cluster."""

    number: int = 2
    cpus: float = 1.0
    """Cores that Ray keeps for each, in one placement group."""
    gpus: int = 0
    """GPUs, likewise."""
    max_failures: int = 3
    """How often they are started again."""


DEFAULT = Workers()


def train_on_ray(env: Any, algorithm: Any = None, *, workers: Workers = DEFAULT, **fields: Any) -> Run:
    """Train in several processes, as under ``torchrun``, each a worker of the Ray cluster.

    If a worker or a node is lost, all workers are started again and continue from the run's latest checkpoint.

    Args:
        env, algorithm, fields: as of ``gw.train``. ``run_dir`` is on a disk that all nodes share.

    Raises:
        ConfigError: a setting is impossible, or the cluster has no room.
        RunFolderError: ``run_dir`` is taken.
        ray.train.TrainingFailedError: workers were lost too often.
    """
    base = Base(env, algorithm, fields)
    return train_from_config_on_ray(base.cfg, base.given(), workers)


def train_from_config_on_ray(cfg: CommonCfg, given: UserObjects | None = None, workers: Workers = DEFAULT) -> Run:
    """Train with the settings of ``cfg``; see ``train_on_ray``."""
    if cfg.run_dir is None:
        raise ConfigError("several processes need one run folder, got run_dir=None; fix: set run_dir, on a shared disk")
    path = Path(cfg.run_dir).absolute()
    RunFolder.check_free(path)
    return _fit(path, cfg.model_copy(update={"run_dir": path}), given or UserObjects(), workers)


def resume_on_ray(path: Path | str, workers: Workers = DEFAULT, **given: Any) -> Run:
    """Continue a run from its latest checkpoint in workers of the Ray cluster.

    Args:
        given: the Python objects that the run was trained with.
    """
    folder, objects, cfg = reopen(path, given, to_train=True)
    return _fit(folder.path.absolute(), cfg, objects, workers)


def _fit(path: Path, cfg: CommonCfg, given: UserObjects, workers: Workers) -> Run:
    if workers.gpus and cfg.device == "cpu":
        raise ConfigError(f"gpus = {workers.gpus} and device = 'cpu': they would be idle; fix: device='cuda'")
    resources = {"CPU": workers.cpus} | ({"GPU": workers.gpus} if workers.gpus else {})
    with connected(), tempfile.TemporaryDirectory() as reports:  # of Ray; the run's own are in its folder
        _check_room(workers)
        result = TorchTrainer(
            _work,
            train_loop_config={
                "folder": os.getcwd(),
                "path": path,
                "payload": plugins.pickled((cfg, given)),
                "plugins": plugins.loaded(),
            },
            torch_config=TorchConfig(backend="nccl" if workers.gpus else "gloo", timeout_s=int(cfg.ddp_timeout)),
            scaling_config=ScalingConfig(
                num_workers=workers.number, use_gpu=workers.gpus > 0, resources_per_worker=resources
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


def _work(job: dict[str, Any]) -> bytes | None:
    """Train in a worker, or continue; an error of the run, which would come again in a new worker."""
    try:
        os.chdir(job["folder"])  # for relative paths of data, models and plugins
        plugins.load([*map(Path, job["plugins"])])
        cfg, given = cloudpickle.loads(job["payload"])
        begun = [RunFolder(job["path"]).config.exists()]
        dist.broadcast_object_list(begun)  # rank 0 may have made the folder before others look
        if begun[0]:
            resume(job["path"], **given.as_arguments())
        else:
            train_from_config(cfg, given)
    except GroupwiseError as error:
        return bytes(cloudpickle.dumps(error))
    return None


def _check_room(workers: Workers) -> None:
    """Refuse workers that the cluster has no room for; Ray would wait without a word."""
    room = ray.cluster_resources()
    cpus, gpus = room.get("CPU", 0), room.get("GPU", 0)
    if cpus < workers.number * workers.cpus or gpus < workers.number * workers.gpus:
        raise ConfigError(
            f"{workers.number} workers with cpus = {workers.cpus:g}, gpus = {workers.gpus}: the Ray cluster has {cpus:g} "
            f"cores and {gpus:g} GPUs; fix: ask for less"
        )
