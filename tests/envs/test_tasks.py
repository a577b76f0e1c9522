"""Members begin bit for bit alike, and stay so under equal actions and noise, in the environments that people use."""

import numpy as np
import pytest
import torch

from groupwise.config.run import EnvCfg
from groupwise.envs.make import make_env

MODES = {"CartPole-v1": "native", "BipedalWalkerHardcore-v3": "fresh", "LunarLander-v3": "seed"}
MODES |= dict.fromkeys(("MountainCarContinuous-v0", "Acrobot-v1", "Pendulum-v1"), "seed")
MODES |= dict.fromkeys(("Ant-v5", "Humanoid-v5", "InvertedDoublePendulum-v5", "Pusher-v5", "Walker2d-v5"), "snapshot")


@pytest.mark.slow
@pytest.mark.parametrize(("env_id", "mode"), MODES.items())
@pytest.mark.filterwarnings("ignore::groupwise.errors.GroupStartWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # importing Box2D warns, and crashes where that is an error
def test_members_share_their_start_and_groups_do_not(env_id, mode):
    env = make_env(EnvCfg(id=env_id, num_envs=4), grouped=True)
    assert env.start_mode == mode
    start, noise = np.array([3, 3, 8, 8]), np.array([5, 5, 5, 5])
    obs = env.start(np.ones(4, np.bool_), start, noise)
    assert torch.equal(obs[0], obs[1])
    assert torch.equal(obs[2], obs[3])
    assert not torch.equal(obs[0], obs[2])
    action = np.stack([env.action_space.sample()] * 4)
    step = env.step(torch.as_tensor(action))
    for row in (0, 2):
        assert torch.equal(step.obs[row], step.obs[row + 1])
        assert step.reward[row] == step.reward[row + 1]
    env.close()
