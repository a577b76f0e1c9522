import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.envs.classic_control.acrobot import AcrobotEnv

from groupwise.config.env import EnvCfg
from groupwise.envs.acrobot import AcrobotPhysics, AcrobotVectorEnv
from groupwise.envs.gymnasium import GymnasiumVectorEnv
from groupwise.envs.make import make_env
from groupwise.envs.rows import RowsGroupEnv


def both(num_envs, **cfg):
    """Ours, and Gymnasium's rows one by one."""
    cfgs = (EnvCfg(id="Acrobot-v1", num_envs=num_envs, **cfg, vectorization=way) for way in ("auto", "sync"))
    ours, theirs = (make_env(cfg) for cfg in cfgs)
    assert type(ours) is AcrobotVectorEnv
    assert type(theirs) is GymnasiumVectorEnv
    return ours, theirs


def pumped(obs, random):
    """Mostly pushes along the swing, so that episodes end."""
    along = np.where(obs[:, 5].numpy() > 0, 2, 0)
    return torch.from_numpy(np.where(random.uniform(size=len(along)) < 0.8, along, random.integers(0, 3, len(along))))


@pytest.mark.parametrize(("num_envs", "limit"), [(4, None), (7, 90), (16, None)])
def test_rows_are_the_single_environments_bit_for_bit(num_envs, limit):
    ours, theirs = both(num_envs, max_episode_steps=limit)
    assert ours.max_episode_steps == theirs.max_episode_steps == (limit or 500)
    assert (ours.env_id, ours.obs_spec, ours.action_space) == (theirs.env_id, theirs.obs_spec, theirs.action_space)
    random = np.random.default_rng(num_envs)
    ours.reset(seed=1)
    theirs.reset(seed=1)
    obs = ours.reset(seed=2).clone()
    assert torch.equal(obs, theirs.reset(seed=2))
    terminated = truncated = 0
    for _ in range(700):
        action = pumped(obs, random)
        found, expected = ours.step(action), theirs.step(action)
        for one, other in zip(found[:4], expected[:4], strict=True):
            assert one.dtype == other.dtype
            assert torch.equal(one, other)
        done = (found.terminated | found.truncated).numpy()
        terminated, truncated = terminated + int(found.terminated.sum()), truncated + int(found.truncated.sum())
        obs = found.obs
        if done.any():
            obs = ours.reset(mask=done)
            assert torch.equal(obs, theirs.reset(mask=done))
    assert terminated >= 4
    assert truncated > 0 or limit is None


def test_a_reset_without_a_seed_goes_on_with_the_streams():
    ours, theirs = both(4)
    assert torch.equal(ours.reset(seed=5), theirs.reset(seed=5))
    assert torch.equal(ours.reset(), theirs.reset())


def test_fresh_rows_begin_each_elsewhere():
    obs = make_env(EnvCfg(id="Acrobot-v1", num_envs=4)).reset()
    assert len(obs.unique(dim=0)) == 4


def test_observations_kept_by_the_caller_do_not_change():
    env, _ = both(4)
    first = env.reset(seed=0)
    kept = first.clone()
    step = env.step(torch.zeros(4, dtype=torch.int64))
    assert torch.equal(first, kept)
    kept = step.obs.clone()
    env.reset(mask=np.array([True, False, False, False]))
    assert torch.equal(step.obs, kept)


@pytest.mark.parametrize(
    "cfg",
    [
        {"vectorization": "sync"},
        {"num_envs": 3},
        {"autoreset": "next_step"},
        {"autoreset": "same_step"},
        {"kwargs": {"render_mode": "rgb_array"}},
        {"id": "Pendulum-v1"},
    ],
    ids=str,
)
def test_all_else_is_left_to_gymnasium(cfg):
    assert type(make_env(EnvCfg(**{"id": "Acrobot-v1", "num_envs": 4} | cfg))) is GymnasiumVectorEnv


def test_groups_and_callables_are_left_to_gymnasium():
    cfg = EnvCfg(id="Acrobot-v1", num_envs=4)
    assert type(make_env(cfg, grouped=True, verify=False)) is RowsGroupEnv
    assert type(make_env(cfg, env=lambda: gymnasium.make("Acrobot-v1"))) is GymnasiumVectorEnv


@pytest.mark.parametrize(("name", "value"), [("book_or_nips", "nips"), ("torque_noise_max", 0.5)])
def test_other_equations_are_left_to_gymnasium(monkeypatch, name, value):
    monkeypatch.setattr(AcrobotEnv, name, value)
    assert type(make_env(EnvCfg(id="Acrobot-v1", num_envs=4))) is GymnasiumVectorEnv


def test_a_subclass_and_a_wrapped_environment_are_not_known():
    class Own(AcrobotEnv):
        pass

    class Scaled(gymnasium.RewardWrapper, gymnasium.utils.RecordConstructorArgs):
        def __init__(self, env):
            gymnasium.utils.RecordConstructorArgs.__init__(self)
            super().__init__(env)

        def reward(self, reward):
            return 2 * reward

    known = gymnasium.make("Acrobot-v1")
    assert AcrobotPhysics.knows(known)
    assert not AcrobotPhysics.knows(Own())
    assert not AcrobotPhysics.knows(Scaled(known))


@pytest.mark.parametrize(
    "name",
    ["LINK_LENGTH_1", "LINK_MASS_1", "LINK_MASS_2", "LINK_COM_POS_1", "LINK_COM_POS_2", "LINK_MOI", "dt", "MAX_VEL_1"],
)
def test_constants_are_the_environments(monkeypatch, name):
    monkeypatch.setattr(AcrobotEnv, name, getattr(AcrobotEnv, name) * 0.7)
    ours, theirs = both(4)
    ours.reset(seed=0)
    theirs.reset(seed=0)
    for action in torch.randint(0, 3, (40, 4), generator=torch.Generator().manual_seed(0)):
        assert torch.equal(ours.step(action).obs, theirs.step(action).obs)


def test_the_log_says_who_steps(caplog):
    with caplog.at_level("INFO"):
        make_env(EnvCfg(id="Acrobot-v1", num_envs=4))
    assert "Acrobot-v1 is stepped by groupwise" in caplog.text
