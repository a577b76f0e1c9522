"""Episodes that begin where they are told to, in vector environments that reset themselves."""

import ale_py
import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from stable_baselines3.common.env_checker import check_env
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.envs import BitFlippingEnv, FakeImageEnv, IdentityEnvBox, SimpleMultiObsEnv
from stable_baselines3.common.monitor import Monitor, load_results
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecFrameStack, VecNormalize

import groupwise as gw
from groupwise.contrib.sb3 import SharedStart, Start, insert_shared_start, verify_shared_start
from groupwise.errors import EnvError, GroupStartError


class Walk(gymnasium.Env):
    """Starts anywhere, then takes steps of noise; ends after four."""

    def __init__(self) -> None:
        self.observation_space = spaces.Box(-100, 100, (1,), np.float32)
        self.action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.position, self.steps = self.np_random.uniform(-1, 1), 0
        return self.look(), {}

    def look(self) -> np.ndarray:
        return np.array([self.position], np.float32)

    def noise(self) -> float:
        return float(self.np_random.normal())

    def step(self, action):
        self.position += self.noise() + action
        self.steps += 1
        return self.look(), 1.0, False, self.steps == 4, {}


class GlobalStart(Walk):
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.position = np.random.default_rng().uniform()
        return self.look(), {}


class GlobalNoise(Walk):
    def noise(self) -> float:
        return float(np.random.default_rng().normal())


class Hoarder(Walk):
    """Keeps something from one episode to the next that shows only later."""

    kept = 0.0

    def noise(self) -> float:
        self.kept += 1
        return self.kept


class OwnGenerator(Walk):
    """Draws from a generator of its own, as many environments do."""

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.generator = np.random.default_rng(seed)
        self.position = self.generator.uniform()
        return self.look(), {}

    def noise(self) -> float:
        return float(self.generator.normal())


class Gusts(gymnasium.Wrapper):
    """A wrapper that does the same."""

    def reset(self, *, seed=None, options=None):
        self.generators = {"wind": np.random.default_rng(seed)}
        return self.env.reset(seed=seed, options=options)

    def step(self, action):
        obs, *others = self.env.step(action)
        return obs + np.float32(self.generators["wind"].normal()), *others


class Still(Walk):
    def noise(self) -> float:
        return 0.0


def rest(env: gymnasium.Env) -> list[float]:
    return [float(env.step(0)[0][0]) for _ in range(4)]


@pytest.mark.parametrize(
    "make", [Walk, OwnGenerator, IdentityEnvBox, lambda: Gusts(Still()), lambda: Gusts(Monitor(OwnGenerator()))]
)
def test_members_share_the_start_and_not_the_noise(make):
    env = SharedStart(make())

    def played(member, start_seed, noise_seed):
        env.queue_start(Start(member, start_seed, noise_seed))
        return float(env.reset()[0][0]), rest(env)

    paths = [played(member, 7, 100 + member) for member in range(3)]
    assert paths[0][0] == paths[1][0] == paths[2][0]
    assert len({tuple(path) for _, path in paths}) == 3
    assert played(3, 7, 100) == paths[0], "equal seeds, equal episodes"
    assert played(4, 8, 100)[0] != paths[0][0]


def test_sticky_actions_are_every_members_own():
    gymnasium.register_envs(ale_py)
    env = SharedStart(gymnasium.make("ALE/Breakout-v5", obs_type="ram", frameskip=1))
    paths = {}
    for noise_seed in (100, 100, 101):
        env.queue_start(Start(0, 7, noise_seed))
        frames = [env.reset()[0]]
        frames += [env.step(1 + time % 3)[0] for time in range(40)]  # FIRE, RIGHT, LEFT
        paths.setdefault(noise_seed, []).append(np.array(frames))
    env.close()
    (one, again), (other,) = paths.values()
    np.testing.assert_array_equal(one, again)
    np.testing.assert_array_equal(one[0], other[0])
    assert (one != other).any()


def test_a_queued_start_is_used_once_and_goes_before_the_seed_of_reset_and_options_reach_the_environment():
    seen = []

    class Picky(Walk):
        def reset(self, *, seed=None, options=None):
            seen.append(options)
            return super().reset(seed=seed)

    env, plain = SharedStart(Picky()), Walk()
    env.queue_start(Start(0, 7, 100))
    assert env.reset(seed=3, options={"level": 3})[0] == plain.reset(seed=7)[0]
    assert env.reset(seed=3)[0] == plain.reset(seed=3)[0]
    assert seen == [{"level": 3}, None]


def test_it_knows_what_is_running():
    env = SharedStart(Walk())
    env.reset()
    assert env.queue_start(Start(5, 7, 100)) == (-1, 0)
    env.step(0)
    assert env.queue_start(Start(5, 7, 100)) == (-1, 1)
    env.reset()
    env.step(0)
    env.step(1)
    assert env.queue_start(None) == (5, 2)
    env.reset()
    assert env.queue_start(None) == (-1, 0)


@pytest.mark.parametrize("around", [lambda env: env, lambda env: VecFrameStack(VecNormalize(env), 2)])
def test_it_is_inserted_below_whatever_wraps_the_vector_environment(around):
    check_env(SharedStart(gymnasium.make("CartPole-v1").unwrapped), warn=True)
    env = around(DummyVecEnv([Walk, Walk]))
    assert env.env_is_wrapped(SharedStart) == [False, False]
    insert_shared_start(env)
    assert env.env_is_wrapped(SharedStart) == [True, True]
    before = list(env.unwrapped.envs)
    insert_shared_start(env)
    assert env.unwrapped.envs == before


def test_sub_processes_must_be_wrapped_by_the_user_and_then_share_starts():
    bare = make_vec_env("CartPole-v1", n_envs=2, vec_env_cls=SubprocVecEnv)
    env = make_vec_env("CartPole-v1", n_envs=2, vec_env_cls=SubprocVecEnv, wrapper_class=SharedStart)
    try:
        with pytest.raises(EnvError, match=r"2 of the 2 .* SubprocVecEnv .*make_vec_env.*SharedStart"):
            insert_shared_start(bare)
        insert_shared_start(env)
        verify_shared_start(env, seed=0)
        assert env.env_method("queue_start", Start(4, 7, 8)) == [(-1, 0)] * 2
        obs = env.reset()
        np.testing.assert_array_equal(obs[0], obs[1])
        env.step(np.array([0, 0]))
        assert env.env_method("queue_start", None) == [(4, 1)] * 2
    finally:
        bare.close()
        env.close()


@pytest.mark.parametrize("make", [Walk, OwnGenerator, IdentityEnvBox, FakeImageEnv, BitFlippingEnv])
def test_honest_environments_pass(make):
    env = make_vec_env(make, n_envs=3)
    insert_shared_start(env)
    verify_shared_start(env, seed=1)
    monitor = env.unwrapped.envs[0].env
    assert isinstance(monitor, Monitor)
    assert (monitor.get_total_steps(), monitor.get_episode_rewards()) == (0, []), "the trial is nobody's episode"


@pytest.mark.parametrize(
    ("make", "num_envs", "where"),
    [
        (GlobalStart, 1, "at the start, in environment 0"),
        (GlobalStart, 2, "at the start, in environment [01]"),
        (SimpleMultiObsEnv, 1, "at the start, in environment 0"),  # draws its images anew
        (GlobalNoise, 1, "at step 1 of equal actions with equal noise, in environment 0"),
        (Hoarder, 1, "at step 1 of equal actions with equal noise, in environment 0"),
    ],
)
def test_cheats_are_refused(make, num_envs, where):
    np.random.seed(0)  # SimpleMultiObsEnv begins in one of few states, now and then in the same twice
    env = make_vec_env(make, n_envs=num_envs)
    insert_shared_start(env)
    with pytest.raises(GroupStartError, match=rf"differs {where}; fix: .*self\.np_random"):
        verify_shared_start(env, seed=0)


def test_a_start_that_depends_on_the_noise_seed_is_refused():
    class NoisySensor(SharedStart):
        def try_start(self, start, actions):
            first, *others = super().try_start(start, actions)
            return [(*first, start.noise_seed), *others]

    env = DummyVecEnv([lambda: NoisySensor(Walk())])
    with pytest.raises(GroupStartError, match="at the start, in environment 0"):
        verify_shared_start(env, seed=0)


def test_vectors_of_stable_baselines3_are_answered_by_our_settings():
    vector = VecNormalize(DummyVecEnv([lambda: gymnasium.make("CartPole-v1")]))
    for call in (
        lambda: gw.train(vector, "ppo", total_steps=8),
        lambda: gw.train(lambda: vector, "ppo", total_steps=8),
        lambda: gw.check_env(vector),
    ):
        with pytest.raises(
            EnvError, match=r"VecNormalize, expected .*with num_envs=.*VecNormalize is policy="
        ) as caught:
            call()
    normalized = eval(str(caught.value).partition("policy=")[2])
    assert gw.RunCfg(policy=normalized).policy.normalize_obs


def test_a_monitor_below_other_wrappers_does_not_log_the_trial(tmp_path):
    wrapped = {"wrapper_class": gymnasium.wrappers.FlattenObservation, "monitor_dir": str(tmp_path)}
    env = make_vec_env(OwnGenerator, n_envs=2, **wrapped)
    insert_shared_start(env)
    verify_shared_start(env, seed=1)
    [monitor] = [one for one in chain_of(env.unwrapped.envs[0]) if isinstance(one, Monitor)]
    assert (monitor.get_total_steps(), monitor.get_episode_rewards(), monitor.rewards) == (0, [], [])
    assert monitor.results_writer is not None
    assert len(load_results(tmp_path)) == 0
    env.close()


def chain_of(env):
    while isinstance(env, gymnasium.Wrapper):
        yield env
        env = env.env
