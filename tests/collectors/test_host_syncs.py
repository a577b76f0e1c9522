"""How often one iteration on torch environments waits for the device, whatever the number of its steps; and with which operators."""

import pytest
import torch
from at_events import on
from host_syncs import HostSyncs

import groupwise as gw
from groupwise.config.algorithm import CollectionCfg
from groupwise.envs.torch_env import TorchCartPole

SETTINGS = {
    "ppo": gw.PPOCfg(num_steps=12, minibatch_size=24, num_epochs=3),
    "grpo": gw.GRPOCfg(
        num_steps=12,
        minibatch_size=24,
        num_epochs=3,
        group_size=4,
        credit={"baseline": "mean", "group_key": "group_step", "returns": "return_to_go", "scale": "batch_std"},
        collection={"partial_groups": "truncate"},
    ),
}
LIMITS = {"ppo": 5, "grpo": 6}
"""Waits on a CPU."""


def train(folder, kind, env=TorchCartPole, *callbacks, iterations=3, settings=None):
    return gw.train(
        env,
        SETTINGS[kind].model_copy(update=settings or {}),
        num_envs=16,
        total_iterations=iterations,
        checkpoint_interval=10**9,
        run_dir=folder,
        policy={"normalize_obs": True},
        callbacks=callbacks,
        logging={"progress": "none"},
        evaluation={"interval": 10**9, "episodes": 1},
    )


@pytest.mark.parametrize("kind", SETTINGS)
def test_an_iteration_waits_a_few_times(kind, tmp_path):
    syncs = HostSyncs()

    def begin(trainer, *_):
        if trainer.iteration == 2:
            syncs.__enter__()

    def end(trainer, rollout, metrics):
        if trainer.iteration == 3:
            syncs.__exit__(None, None, None)

    train(tmp_path / "run", kind, TorchCartPole, on("iteration_end", end), on("iteration_end", begin))
    assert 0 < syncs.total <= LIMITS[kind], "\n".join(f"{n} {line}" for line, n in syncs.found.items())


@pytest.mark.parametrize("env", [TorchCartPole, "CartPole-v1"])
@pytest.mark.parametrize("kind", SETTINGS)
def test_an_iteration_needs_no_operator_that_is_not_deterministic(kind, env, tmp_path):
    settings = {"collection": CollectionCfg()} if kind == "grpo" and env is not TorchCartPole else {}
    torch.use_deterministic_algorithms(True)
    try:
        run = train(tmp_path / "run", kind, env, iterations=2, settings=settings)
    finally:
        torch.use_deterministic_algorithms(False)
    assert run.metrics()[-1]["train/optimizer_steps"] > 0
