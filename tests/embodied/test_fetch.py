import subprocess
import sys

import numpy as np
import pytest
import torch

import groupwise as gw
from groupwise.embodied.demos import record_demos
from groupwise.envs.make import make_env

pytest.importorskip("gymnasium_robotics")
pytest.importorskip("pyarrow")
pytestmark = pytest.mark.contrib

IDS = ["FetchPickAndPlace-v4", "FetchPushDense-v4"]


def rows(env_id: str, num_envs: int = 4, **settings):
    return make_env(gw.EnvCfg(id=env_id, num_envs=num_envs, **settings), grouped=True)


@pytest.mark.parametrize("env_id", IDS)
def test_members_share_captured_starts(env_id):
    env = rows(env_id)
    assert env.start_report.start_mode == "snapshot"
    assert env.start_report.start_varies
    obs = env.start(np.ones(4, bool), np.array([1, 1, 2, 2]), np.arange(4))
    for name in ("observation", "achieved_goal", "desired_goal"):
        assert torch.equal(obs[name][0], obs[name][1])
    assert not torch.equal(obs["desired_goal"][0], obs["desired_goal"][2])
    env.close()


@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_the_hand_follows_the_action(vectorization):
    """An action of 1 moves it by up to 5 cm a step."""
    env = rows("FetchReach-v4", 2, vectorization=vectorization)
    before = env.start(np.ones(2, bool), np.zeros(2, np.int64), np.arange(2))["achieved_goal"].clone()
    for _ in range(4):
        step = env.step(torch.tensor([[1.0, 0.0, 0.0, 0.0], [0.0, 0.0, -1.0, 0.0]]))
    moved = step.obs["achieved_goal"] - before
    assert 0.05 < moved[0, 0] < 0.2
    assert 0.05 < -moved[1, 2] < 0.2
    assert moved[0, 1:].abs().max() < 0.02
    env.close()


def test_the_reward_is_that_of_the_distance_to_the_goal():
    sparse, dense = rows("FetchReach-v4", 4), rows("FetchReachDense-v4", 4)
    for env in (sparse, dense):
        obs = env.start(np.ones(4, bool), np.arange(4), np.arange(4))
    seen = set()
    for _ in range(30):
        to_goal = obs["desired_goal"] - obs["achieved_goal"]
        action = torch.cat([(20 * to_goal).clamp(-1, 1), torch.zeros(4, 1)], dim=1)
        reward = sparse.step(action).reward.clone()
        obs, dense_reward = dense.step(action)[:2]
        distance = (obs["desired_goal"] - obs["achieved_goal"]).norm(dim=1)
        torch.testing.assert_close(dense_reward, -distance)
        assert torch.equal(reward, torch.where(distance > 0.05, -1.0, 0.0))
        seen |= set(reward.tolist())
    assert seen == {-1.0, 0.0}
    assert (reward == 0.0).all()


def test_videos_need_no_display():
    code = (
        "import os; os.environ.pop('DISPLAY', None); os.environ.pop('MUJOCO_GL', None)\n"
        "import groupwise.embodied.fetch, gymnasium\n"
        "env = gymnasium.make('FetchReach-v4', render_mode='rgb_array', width=64, height=64)\n"
        "env.reset(seed=0); print(env.render().std() > 10); env.close()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "most_attempts"), [("FetchReach-v4", 10), ("FetchPush-v4", 14), ("FetchPickAndPlace-v4", 12)]
)
def test_the_expert_succeeds(task, most_attempts, tmp_path):
    found = record_demos(task, episodes=10, out=tmp_path / "demos")
    assert found.attempts <= most_attempts
    assert found.steps == 500, "the tasks go on after success"
