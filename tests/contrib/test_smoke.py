"""What of contrib the default run looks at: the core finds it by name, and it works."""

import pytest
import torch

import groupwise as gw
from groupwise.envs.make import make_env


def test_a_torch_task_of_contrib_is_found_by_its_id():
    env = make_env(gw.EnvCfg(id="Acrobot-v1", num_envs=4, vectorization="torch"), grouped=True)
    env.reset(seed=0)
    assert env.step(torch.ones(4, dtype=torch.int64)).reward.tolist() == [-1.0] * 4


def test_sb3_takes_an_update():
    pytest.importorskip("stable_baselines3")
    from groupwise.contrib.sb3 import GRPO

    model = GRPO("MlpPolicy", "CartPole-v1", n_steps=256, seed=0, device="cpu").learn(512)
    assert model.num_timesteps >= 512
