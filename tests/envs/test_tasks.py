"""Members begin bit for bit alike, and stay so under equal actions and noise, in the environments that people use."""

import numpy as np
import pytest
import torch

from groupwise.config.run import EnvCfg
from groupwise.envs.make import make_env

CLASSIC = ["CartPole-v1", "MountainCar-v0", "MountainCarContinuous-v0", "Acrobot-v1", "Pendulum-v1"]
BOX2D = ["LunarLander-v3", "LunarLanderContinuous-v3", "BipedalWalker-v3", "BipedalWalkerHardcore-v3"]
MUJOCO = [
    f"{name}-v5"
    for name in (
        "Ant",
        "HalfCheetah",
        "Hopper",
        "Humanoid",
        "HumanoidStandup",
        "InvertedDoublePendulum",
        "InvertedPendulum",
        "Pusher",
        "Reacher",
        "Swimmer",
        "Walker2d",
    )
]
TIERS = dict.fromkeys(MUJOCO, "snapshot") | {"CartPole-v1": "native"} | dict.fromkeys(BOX2D[2:], "fresh")


@pytest.mark.slow
@pytest.mark.parametrize("env_id", CLASSIC + BOX2D + MUJOCO)
@pytest.mark.filterwarnings("ignore::groupwise.errors.GroupStartWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # importing Box2D warns, and crashes where that is an error
def test_members_share_their_start_and_groups_do_not(env_id):
    env = make_env(EnvCfg(id=env_id, num_envs=4), grouped=True)
    assert env.start_mode == TIERS.get(env_id, "seed")
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
