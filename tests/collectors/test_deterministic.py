"""An iteration needs no operator that torch calls not deterministic."""

import pytest
import torch
from torch_rollouts import SETTINGS

import groupwise as gw
from groupwise.config.algorithm import CollectionCfg
from groupwise.envs.torch_env import TorchCartPole


@pytest.mark.parametrize("env", [TorchCartPole, "CartPole-v1"])
@pytest.mark.parametrize("kind", SETTINGS)
def test_an_iteration_needs_no_operator_that_is_not_deterministic(kind, env, tmp_path):
    more = {"collection": CollectionCfg()} if kind == "grpo" and env is not TorchCartPole else {}
    torch.use_deterministic_algorithms(True)
    try:
        run = gw.train(
            env,
            SETTINGS[kind].model_copy(update=more),
            num_envs=16,
            total_iterations=2,
            checkpoint_interval=10**9,
            run_dir=tmp_path / "run",
            policy={"normalize_obs": True},
            logging={"progress": "none"},
            evaluation={"interval": 10**9, "episodes": 1},
        )
    finally:
        torch.use_deterministic_algorithms(False)
    assert run.metrics()[-1]["train/optimizer_steps"] > 0
