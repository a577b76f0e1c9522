import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from noisy_envs import GlobalStart

from groupwise.config.run import EnvCfg
from groupwise.envs.make import make_env
from groupwise.envs.rows import RowsGroupEnv
from groupwise.envs.torch_env import CartPoleGroupEnv
from groupwise.errors import EnvError, GroupStartError, MissingExtraError, UnknownNameError


class Plain(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, scale=1.0):
        self.scale = scale

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.full(2, self.scale, np.float32), {}

    def step(self, action):
        return np.full(2, self.scale, np.float32), 0.0, False, False, {}


@pytest.mark.parametrize("vectorization", ["auto", "sync", "async"])
def test_cartpole_by_every_vectorization(vectorization):
    env = make_env(EnvCfg(num_envs=2, vectorization=vectorization))
    assert (env.num_envs, env.autoreset, env.env_id, env.max_episode_steps) == (2, "disabled", "CartPole-v1", 500)
    assert env.reset(seed=0).shape == (2, 4)
    assert env.step(torch.tensor([0, 1])).reward.tolist() == [1.0, 1.0]
    env.close()


@pytest.mark.parametrize("grouped", [False, True])
def test_cartpole_takes_its_own_vectorised_version_by_default(grouped):
    assert type(make_env(EnvCfg(), grouped=grouped)) is CartPoleGroupEnv
    assert type(make_env(EnvCfg(id="Acrobot-v1", num_envs=2), grouped=grouped)) is RowsGroupEnv


@pytest.mark.parametrize("vectorization", ["entry_point", "sync"])
def test_kwargs_reach_the_environment(vectorization):
    kwargs = {"sutton_barto_reward": True, "max_episode_steps": 3}
    env = make_env(EnvCfg(num_envs=2, kwargs=kwargs, vectorization=vectorization))
    assert env.max_episode_steps == 3
    env.reset(seed=0)
    assert env.step(torch.tensor([0, 1])).reward.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("grouped", [False, True])
def test_a_callable_with_wrappers_and_kwargs(grouped):
    def make(scale):
        return gymnasium.wrappers.TransformReward(Plain(scale), lambda reward: reward + 0.25)

    env = make_env(EnvCfg(num_envs=8, kwargs={"scale": 0.5}), env=make, grouped=grouped, num_envs=2)
    assert (env.num_envs, env.env_id, env.max_episode_steps) == (2, "Plain", None)
    assert env.reset(seed=0).tolist() == [[0.5, 0.5]] * 2
    assert env.step(torch.tensor([0, 1])).reward.tolist() == [0.25, 0.25]


def test_a_ready_vector_environment_brings_its_rows_and_mode():
    ready = SyncVectorEnv([Plain] * 3, autoreset_mode=AutoresetMode.SAME_STEP)
    env = make_env(EnvCfg(), env=ready)
    assert (env.num_envs, env.autoreset, env.env_id) == (3, "same_step", "SyncVectorEnv")
    assert env.max_episode_steps is None
    made = gymnasium.make_vec("Acrobot-v1", num_envs=2, max_episode_steps=50, vectorization_mode="sync")
    assert make_env(EnvCfg(max_episode_steps=50), env=made).max_episode_steps == 50
    cartpole = make_env(EnvCfg(), env=CartPoleVectorEnv(2, max_episode_steps=7), grouped=True)
    assert (cartpole.autoreset, cartpole.max_episode_steps) == ("disabled", 7)
    with pytest.raises(EnvError, match="SyncVectorEnv has 3 rows, but num_envs is 4"):
        make_env(EnvCfg(), env=ready, num_envs=4)


@pytest.mark.parametrize(
    ("cfg", "settings", "error", "message"),
    [
        ({"id": "CartPol-v1"}, {}, UnknownNameError, "did you mean 'CartPole-v"),
        ({"id": "CartPole-v7"}, {}, UnknownNameError, "'CartPole-v1'"),
        ({"id": "nowhere/CartPole-v1"}, {}, UnknownNameError, "CartPole"),
        ({"id": "no such thing!"}, {}, EnvError, "cannot be made"),
        ({"id": "Acrobot-v1", "vectorization": "entry_point"}, {}, EnvError, "Acrobot-v1 cannot be made"),
        ({"id": "evil:CartPole-v1"}, {}, EnvError, "would import 'evil'"),
        ({"kwargs": {"gravty": 1.0}, "vectorization": "sync"}, {}, EnvError, "'gravty'"),
        ({"kwargs": {"gravty": 1.0}, "vectorization": "entry_point"}, {}, EnvError, "'gravty'"),
        ({}, {"env": Plain()}, EnvError, "env is a Plain"),
        ({}, {"env": lambda: 3}, EnvError, "the callable returned a int"),
        ({"vectorization": "entry_point"}, {"env": Plain}, EnvError, "vectorization='sync'"),
        ({"max_episode_steps": 7}, {"env": SyncVectorEnv([Plain] * 2)}, EnvError, "max_episode_steps is 7"),
        (
            {"max_episode_steps": 30},
            {"env": lambda: gymnasium.make("CartPole-v1", max_episode_steps=20)},
            EnvError,
            "max_episode_steps is 30, but the callable's own limit is 20; fix: set it where you make the environment",
        ),
        ({"start_mode": "seed"}, {}, EnvError, r"env\.start_mode"),
        ({"id": "Acrobot-v1", "start_mode": "native"}, {"grouped": True}, GroupStartError, "env.start_mode"),
        (
            {},
            {"grouped": True, "env": SyncVectorEnv([Plain] * 2)},
            GroupStartError,
            r"rows of SyncVectorEnv .*fix: .* a callable",
        ),
        ({"start_mode": "snapshot"}, {"grouped": True, "env": GlobalStart}, GroupStartError, "start_mode='snapshot'"),
    ],
)
def test_what_cannot_be_made_is_refused(cfg, settings, error, message):
    with pytest.raises(error, match=message):
        make_env(EnvCfg(**{"num_envs": 2} | cfg), **settings)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            gymnasium.error.DependencyNotInstalled('Box2D is missing, run `pip install "gymnasium[box2d]"`'),
            r"not installed; fix: pip install -e '.\[box2d\]'",
        ),
        (gymnasium.error.DependencyNotInstalled("run `pip install abc`"), "not installed; fix: run `pip install abc`$"),
        (ModuleNotFoundError("No module named 'ale_py'", name="ale_py"), "needs 'ale_py'.*fix: install it"),
    ],
)  # fmt: skip
def test_a_missing_package_is_named(error, message):
    def fails():
        raise error

    with pytest.raises(MissingExtraError, match=message):
        make_env(EnvCfg(id="Made-v0", vectorization="sync"), env=fails)


def test_another_entry_point_cannot_be_grouped(monkeypatch):
    spec = gymnasium.envs.registration.EnvSpec(
        "Theirs-v0", entry_point=Plain, vector_entry_point=lambda num_envs: SyncVectorEnv([Plain] * num_envs)
    )
    monkeypatch.setitem(gymnasium.registry, "Theirs-v0", spec)
    with pytest.raises(GroupStartError, match=r"rows of Theirs-v0 .*vectorization='sync'"):
        make_env(EnvCfg(id="Theirs-v0", vectorization="entry_point"), grouped=True)


def test_the_package_of_an_id_is_imported_for_its_own_vectorised_version(monkeypatch):
    def import_package(env_id):
        rows = lambda num_envs: SyncVectorEnv([Plain] * num_envs, autoreset_mode=AutoresetMode.DISABLED)  # noqa: E731
        spec = gymnasium.envs.registration.EnvSpec(env_id, entry_point=Plain, vector_entry_point=rows)
        monkeypatch.setitem(gymnasium.registry, env_id, spec)

    monkeypatch.setattr("groupwise.envs.make.import_package", import_package)
    assert make_env(EnvCfg(id="Packed-v0", num_envs=2, vectorization="entry_point")).env_id == "Packed-v0"


@pytest.mark.parametrize("grouped", [True, False])
@pytest.mark.parametrize(
    ("cfg", "env"),
    [
        (EnvCfg(num_envs=2, max_episode_steps=7), Plain),
        (EnvCfg(id="CartPole-v1", num_envs=2, max_episode_steps=7), None),
        (EnvCfg(id="CartPole-v1", num_envs=2, max_episode_steps=7, vectorization="sync"), None),
    ],
)
def test_a_step_limit_of_the_config_cuts_episodes(cfg, env, grouped):
    made = make_env(cfg, grouped=grouped, env=env)
    assert made.max_episode_steps == 7
    made.reset(seed=0)
    for step in range(1, 8):
        out = made.step(torch.tensor([step % 2, step % 2]))
        assert out.truncated.all() == (step == 7)
    made.close()


@pytest.mark.parametrize(
    ("setting", "asked"), [({"num_random_noops": 3}, {}), ({"start_mode": "seed"}, {}), ({}, {"reward_parts": ("x",)})]
)
def test_what_the_vectorised_version_cannot_do_is_done_in_single_environments_or_refused(setting, asked):
    env = make_env(EnvCfg(num_envs=2, **setting), grouped=True, verify=False, **asked)
    assert type(env) is RowsGroupEnv
    (name,) = setting or ["credit.reward.names"]
    with pytest.raises(
        EnvError,
        match=rf"CartPole-v1 vectorises itself, .* {name} = |{name} is .*CartPole-v1 vectorises itself.*'sync'",
    ):
        make_env(EnvCfg(num_envs=2, vectorization="entry_point", **setting), grouped=True, **asked)


@pytest.mark.parametrize("grouped", [True, False])
def test_random_noops_reach_the_rows(grouped):
    cfg = EnvCfg(id="Pendulum-v1", num_envs=4, num_random_noops=20, max_episode_steps=30)
    env = make_env(cfg, grouped=grouped)
    env.reset(seed=0)
    truncated = [torch.zeros(4, dtype=torch.bool)]
    while not truncated[-1].any():
        truncated.append(env.step(torch.zeros(4, 1)).truncated)
    assert len(truncated) < 30
    assert not truncated[-1].all()


def test_what_is_registered_here_is_known_in_workers(monkeypatch):
    spec = gymnasium.envs.registration.EnvSpec("Here-v0", entry_point=Plain, max_episode_steps=3)
    monkeypatch.setitem(gymnasium.registry, "Here-v0", spec)
    env = make_env(EnvCfg(id="Here-v0", num_envs=2, vectorization="async", kwargs={"scale": 0.5}), grouped=True)
    assert (env.reset(seed=0).tolist(), env.max_episode_steps) == ([[0.5, 0.5]] * 2, 3)
    env.close()
