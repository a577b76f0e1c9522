"""An update that runs out of memory goes on with smaller micro-batches and the same gradient."""

import sys
from pathlib import Path

import pytest
import torch
from forked import run_script
from objective_updates import EVERY, make_policy, make_rollout, parameters, same, updated
from objective_updates import build as build_grpo
from small_updates import SGD, build
from small_updates import make_rollout as small_rollout

import groupwise as gw
from groupwise.algorithms.base import BaseAlgorithm
from groupwise.speed.control import FlatAdam, flat_adam

GPU = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")
CPU = RuntimeError("[enforce fail at alloc_cpu.cpp:119] . DefaultCPUAllocator: can't allocate memory: you tried ...")


def with_little_memory(patch, limit, error=GPU):
    """Micro-batches with more than ``limit`` elements fail in the midst of their gradient, and are counted."""
    backward, sizes = BaseAlgorithm.backward, []

    def limited(self, batch):
        sizes.append(batch["loss_mask"].numel())
        if sizes[-1] <= limit:
            return backward(self, batch)
        for parameter in list(self.policy.parameters())[:2]:
            parameter.grad = torch.full_like(parameter, 99.0) if parameter.grad is None else parameter.grad.add_(99.0)
        raise error

    patch.setattr(BaseAlgorithm, "backward", limited)
    return sizes


@pytest.mark.parametrize("name", ["clip", "clip_cov", "turn", "gspo", "vespo", "constant", "off_policy", "everything"])
def test_halved_micro_batches_never_change_the_update(name, monkeypatch):
    whole = updated(EVERY[name], num_epochs=2)
    # the longest episode has 12 steps, and must not be cut by some objectives
    sizes = with_little_memory(monkeypatch, 20)
    same(updated(EVERY[name], num_epochs=2), whole)
    assert sizes[0] == 68  # of 5 + 6 + ... + 12 steps
    assert sum(size > 20 for size in sizes) <= 4  # the second epoch does not try again


@pytest.mark.parametrize("error", [GPU, CPU, MemoryError("std::bad_alloc")])
@pytest.mark.parametrize("kind", ["ppo", "grpo"])
@pytest.mark.parametrize("is_flat", [False, True])
def test_the_gradient_is_the_same_to_1e_6_and_a_warning_names_the_setting(kind, error, is_flat, monkeypatch, caplog):
    settings = {"optimizer": "adam", "learning_rate": 1e-3} if is_flat else {"optimizer": SGD, "learning_rate": 1.0}
    fast = {"optimizer": flat_adam} if is_flat else {}
    algorithms = [build(kind, fast=fast, **settings) for _ in range(2)]
    assert all(isinstance(algorithm.optimizer, FlatAdam) is is_flat for algorithm in algorithms)
    rollout = small_rollout(algorithms[0].policy)
    before = parameters(algorithms[0])
    algorithms[0].update(rollout)
    whole = parameters(algorithms[0])
    sizes = with_little_memory(monkeypatch, 10, error)
    algorithms[1].update(rollout)
    assert (whole - before).abs().max() > 1e-4
    torch.testing.assert_close(parameters(algorithms[1]), whole, atol=1e-6, rtol=0)
    total = sizes[0]
    assert sizes[:2] == [total, total // 2]
    assert f"fix: algorithm.micro_batch_size={-(-total // 2)}" in caplog.messages[0]


def test_scores_before_the_update_are_halved_too(monkeypatch):
    recomputed = {"old_log_prob": "recomputed"}
    whole = updated(recomputed)
    evaluate, sizes = BaseAlgorithm.evaluate, []

    def limited(self, policy, batch):
        sizes.append(len(batch["loss_mask"]))
        if sizes[-1] > 60:
            raise GPU
        return evaluate(self, policy, batch)

    monkeypatch.setattr(BaseAlgorithm, "evaluate", limited)
    same(updated(recomputed), whole)
    assert sizes[:3] == [96, 48, 48]


def test_what_cannot_be_halved_and_other_errors_are_raised(monkeypatch):
    algorithm = build_grpo({})
    rollout = make_rollout(make_policy())
    with monkeypatch.context() as patch:
        sizes = with_little_memory(patch, 0)
        with pytest.raises(torch.OutOfMemoryError) as caught:
            algorithm.update(rollout)
        assert sizes[-1] == 1
        assert caught.value.__notes__ == [
            "micro-batches cannot be smaller; fix: shorter episodes or texts, or a smaller network"
        ]
    with monkeypatch.context() as patch:
        sizes = with_little_memory(patch, 0, RuntimeError("shapes do not fit"))
        with pytest.raises(RuntimeError, match="do not fit"):
            build_grpo({}).update(rollout)
        assert len(sizes) == 1


RUN = """
import logging, re, resource, sys
from pathlib import Path
import gymnasium, numpy as np
import groupwise as gw

logging.basicConfig(stream=sys.stdout)

class Env(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, (8,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self.np_random.random(8, dtype=np.float32), {}

    def step(self, action):
        self.t += 1
        return self.np_random.random(8, dtype=np.float32), float(action), False, self.t == 16, {}

class Limit(gw.Callback):
    # 1,024 steps of a hidden layer are 16 MiB, and an update needs several of these
    def on_rollout_end(self, trainer, rollout):
        used = int(re.search(r"VmSize:\\s*(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024
        resource.setrlimit(resource.RLIMIT_AS, (used + 40 * 2**20, -1))

    def on_iteration_end(self, trainer, rollout, metrics):
        resource.setrlimit(resource.RLIMIT_AS, (-1, -1))

algorithm = gw.GRPOCfg(num_steps=128, num_epochs=1, minibatch_size=None, group_size=4)
settings = {"num_envs": 8, "max_episode_steps": 16, "total_steps": 1024, "evaluation": {"episodes": 1}}
gw.train(Env, algorithm, policy={"hidden_sizes": (4096, 64)}, callbacks=[Limit()], run_dir=sys.argv[1], **settings)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="limits of memory")
def test_a_run_that_runs_out_of_memory_goes_on(tmp_path: Path):
    printed = run_script(RUN, tmp_path / "run")
    assert "out of memory: micro-batches are halved from now on" in printed
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 1


@pytest.mark.parametrize("error", [GPU, CPU, RuntimeError("broken")])
def test_an_optimiser_without_room_for_its_state_says_what_to_change(error, tmp_path):
    error = type(error)(*error.args)

    class NoRoom(gw.Callback):
        def on_training_start(self, trainer):
            trainer.algorithm.optimizer.step = self.step

        def step(self):
            raise error

    cfg = gw.PPOCfg(num_steps=8, num_epochs=1)
    with pytest.raises(type(error)) as raised:
        gw.train("CartPole-v1", cfg, num_envs=2, total_steps=16, run_dir=tmp_path / "run", callbacks=[NoRoom()])
    (note,) = raised.value.__notes__
    assert ("fix: algorithm.optimizer='sgd', or for a language model adapters" in note) is ("broken" not in str(error))
