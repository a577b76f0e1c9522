"""Runs on texts whose servers Ray places, and one of which is killed."""

import os
import sys

import pytest
import torch
from ray_kills import Killer, parent, processes
from run_folders import logged
from safetensors.torch import load_file
from text_runs import copying, save_model, train
from vllm_double import python_of_double

import groupwise as gw

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.filterwarnings("default")]
SETTINGS = {"num_prompts": 4, "sampling": {"max_new_tokens": 4}, "logging": {"progress": "none"}, "total_steps": 500}
GRPO = gw.GRPOCfg(group_size=4, learning_rate=1e-3)


@pytest.fixture
def cluster(ray, monkeypatch):
    """Room for two workers and a server on this machine. They import the reward from a module of the tests."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
    ray.init(num_cpus=3, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("lm") / "model")


@pytest.fixture
def generation(tmp_path):
    return {
        "name": "server",
        "python": str(python_of_double(tmp_path)),
        "args": ["--seconds-per-token", "0.05"],  # so that most kills are in mid-rollout
        "weights_dir": str(tmp_path / "weights"),
    }


def servers(model):
    """The processes that serve the model."""
    return processes(b"vllm_double.py\0", str(model).encode(), without=b"\0-c\0")


def learned(run):
    """Metrics without times."""
    return [entry | {"rollout/sync_seconds": 0.0} for entry in logged(run)]


def weights(run):
    return load_file(run.path / "checkpoints/latest/policy.safetensors")


def test_a_killed_server_is_replaced_and_the_run_ends_as_without_ray(cluster, model, generation, tmp_path):
    from groupwise.integrations.ray import Workers, resume_on_ray, train_on_ray

    task = copying()
    here = train(task, model, tmp_path / "here", GRPO, generation=generation, **SETTINGS)
    assert len(here.metrics()) > 6
    killer = Killer(tmp_path / "ray", 3, lambda: servers(model)[0])
    killer.start()
    options = {"model": str(model), "generation": generation, "workers": Workers(1), **SETTINGS}
    run = train_on_ray(task, GRPO, run_dir=tmp_path / "ray", **options)
    killer.join()
    print(f"from the kill to two further iterations: {killer.seconds:.1f} s")
    assert 0 < killer.killed != killer.later > 0
    assert learned(run) == learned(here)  # each iteration once
    assert all(torch.equal(weights(run)[name], value) for name, value in weights(here).items())
    assert servers(model) == []
    assert list((tmp_path / "weights").glob("servers-*")) == []
    again = resume_on_ray(run.path, Workers(1), allow_programs=True, **task.given)
    assert learned(again) == learned(here)


def test_two_workers_share_a_server_and_follow_it_when_its_task_is_lost(cluster, model, generation, tmp_path):
    from groupwise.integrations.ray import Workers, train_on_ray

    task_of = lambda server: parent(parent(server))  # noqa: E731 (Ray's process that runs it)
    killer = Killer(tmp_path / "run", 3, lambda: servers(model)[0], task_of)
    killer.start()
    options = {"model": str(model), "generation": generation, "workers": Workers(2), **SETTINGS}
    run = train_on_ray(copying(), GRPO, run_dir=tmp_path / "run", **options | {"total_steps": 1000})
    killer.join()
    assert 0 < killer.killed != killer.later > 0
    entries = run.metrics()
    assert [entry["iteration"] for entry in entries] == [*range(1, len(entries) + 1)]
    assert all(entry["rollout/sampler_kl"] < 1e-8 for entry in entries)


def test_a_server_that_cannot_start_ends_the_run_with_its_error(cluster, model, generation, tmp_path):
    from groupwise.integrations.ray import Servers, Workers, train_on_ray

    options = {"model": str(model), "workers": Workers(1), "run_dir": tmp_path / "run", **SETTINGS}
    broken = generation | {"args": ["--seconds-per-token", "fast"]}
    with pytest.raises(
        gw.errors.ServerError, match=r"exit code 1; its errors:\nValueError: could not convert string to float"
    ):
        train_on_ray(copying(), GRPO, generation=broken, **options)
    for changed, message in [
        ({"generation": generation | {"weights_dir": None}}, r"got generation\.weights_dir=None; fix: a folder there"),
        ({"generation": generation, "servers": Servers(3)}, "1 workers with .* and 3 servers with .* has 3 cores"),
        ({"servers": Servers(1)}, r"1 servers, and the run starts none; fix: .* generation\.python"),
    ]:
        with pytest.raises(gw.errors.ConfigError, match=message):
            train_on_ray(copying(), GRPO, **changed, **options)


def test_an_error_of_one_worker_ends_all_of_them(cluster, model, tmp_path):
    from groupwise.integrations.ray import Workers, train_on_ray

    def reward(completions, trainer_state, **columns):
        if os.environ["RANK"] == "1" and trainer_state.global_step == 2:
            raise ValueError("no score")
        return [0.0 if text else 1.0 for text in completions]

    options = {"model": str(model), "workers": Workers(2), **SETTINGS, "total_steps": 1000}
    with pytest.raises(gw.errors.RewardError, match="no score"):
        train_on_ray(copying(reward), GRPO, run_dir=tmp_path / "run", **options)
