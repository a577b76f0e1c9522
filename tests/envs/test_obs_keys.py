import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete, Text, Tuple
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import groupwise as gw
from groupwise.check import check_env
from groupwise.config.run import EnvCfg
from groupwise.envs.gymnasium import GymnasiumVectorEnv
from groupwise.envs.make import make_env
from groupwise.errors import ConfigError, UnsupportedSpaceError


class Mission(gymnasium.Env):
    """Laid out like MiniGrid: a picture, a direction and a text. Ends after 3 steps."""

    observation_space = Dict({"image": Box(0, 255, (5, 5, 3), np.uint8), "direction": Discrete(4), "mission": Text(40)})
    action_space = Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count, self.place = 0, int(self.np_random.integers(4))
        return self.look(), {}

    def step(self, action):
        self.count += 1
        return self.look(), float(action), self.count == 3, False, {}

    def look(self):
        image = np.full((5, 5, 3), self.count, np.uint8)
        return {"image": image, "direction": self.place, "mission": "go to the red ball"}


class Pair(Mission):
    observation_space = Tuple([Text(40), Discrete(4)])

    def look(self):
        return ("go to the red ball", self.place)


class OnlyText(Mission):
    observation_space = Text(40)

    def look(self):
        return "go to the red ball"


@pytest.mark.parametrize("grouped", [False, True])
def test_entries_without_a_fixed_shape_are_left_out_and_named(grouped):
    env = make_env(EnvCfg(num_envs=2), env=Mission, grouped=grouped)
    assert set(env.obs_spec) == {"image", "direction"}
    assert env.notes == ("Left out of the observation, because it has no fixed shape: mission (Text).",)
    assert set(env.reset(seed=0).keys()) == {"image", "direction"}
    step = env.step(torch.zeros(2, dtype=torch.int64))
    assert step.obs["image"].unique().tolist() == [1]


@pytest.mark.parametrize("grouped", [False, True])
def test_keys_choose_the_entries(grouped):
    env = make_env(EnvCfg(num_envs=2, obs_keys=("direction",)), env=Mission, grouped=grouped)
    assert set(env.reset(seed=0).keys()) == {"direction"}
    assert env.notes == ()


def test_entries_of_a_tuple_keep_their_position():
    env = make_env(EnvCfg(num_envs=1), env=Pair, grouped=True)
    assert list(env.obs_spec) == ["1"]
    assert env.reset(seed=0)["1"].item() in range(4)


@pytest.mark.parametrize(
    ("keys", "env", "error", "message"),
    [
        (("imag",), Mission, ConfigError, "env.obs_keys.*did you mean 'image'"),
        (("image",), None, ConfigError, "env.obs_keys"),
        (("mission",), Mission, UnsupportedSpaceError, "Text"),
        (None, OnlyText, UnsupportedSpaceError, "Text"),
    ],
)
def test_entries_that_cannot_be_had_are_refused(keys, env, error, message):
    with pytest.raises(error, match=message):
        make_env(EnvCfg(obs_keys=keys), env=env)


def test_final_observations_leave_it_out_too():
    vector = SyncVectorEnv([Mission] * 2, autoreset_mode=AutoresetMode.SAME_STEP)
    env = GymnasiumVectorEnv(vector, env_id="Mission", max_episode_steps=3)
    env.reset(seed=0)
    for _ in range(3):
        step = env.step(torch.zeros(2, dtype=torch.int64))
    assert set(step.final_obs.keys()) == {"image", "direction"}
    assert step.final_obs["image"].unique().tolist() == [3]


def test_a_run_trains_and_predicts_from_whole_observations_and_the_check_shows_what_is_kept(tmp_path):
    settings = {"run_dir": tmp_path / "run", "num_envs": 2, "max_episode_steps": 5, "evaluation": {"episodes": 2}}
    run = gw.train(Mission, gw.GRPOCfg(group_size=2, num_steps=8), total_steps=16, **settings)
    assert run.policy.predict(Mission().reset(seed=0)[0]) in (0, 1)
    report = check_env(Mission)
    assert "mission" not in report.observation.value
    assert "image" in report.observation.value
