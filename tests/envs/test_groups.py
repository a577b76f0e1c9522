import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv

from groupwise.envs.configs import EnvCfg
from groupwise.envs.groups import AttemptWrapper, SeededGroupEnv, verify_group_start
from groupwise.envs.make import make_env
from groupwise.errors import GroupStartError


class Noisy(gymnasium.Env):
    """A random start and random steps, all from ``np_random``; ends after 5 steps. Subclasses cheat."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (1,), np.float64)
    action_space = gymnasium.spaces.Box(-1, 1, (1,), np.float32)

    def __init__(self):
        self.steps_taken = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count, self.state = 0, self.draw_start()
        return np.array([self.state]), {}

    def step(self, action):
        self.steps_taken += 1
        self.count += 1
        self.state += self.draw_noise() + float(action[0])
        return np.array([self.state]), 1.0, False, self.count >= 5, {}

    def draw_start(self):
        return self.np_random.normal()

    def draw_noise(self):
        return self.np_random.normal()


class GlobalStart(Noisy):
    def draw_start(self):
        return np.random.normal()


class GlobalNoise(Noisy):
    def draw_noise(self):
        return np.random.normal()


class Remembers(Noisy):
    """Starts further away after every episode."""

    episodes = 0

    def draw_start(self):
        self.episodes += 1
        return float(self.episodes)


class Calm(Noisy):
    def draw_noise(self):
        return 0.0


class AlwaysThere(Calm):
    def draw_start(self):
        return 0.5


def make(env=Noisy, num_envs=3, vectorizer=SyncVectorEnv):
    return SeededGroupEnv(env, num_envs, env_id=env.__name__, max_episode_steps=5, vectorizer=vectorizer)


def seeds(*numbers):
    return np.array(numbers, np.int64)


def mask(*flags):
    return np.array(flags, np.bool_)


ALL = mask(1, 1, 1)
ACTION = torch.zeros(3, 1)


@pytest.mark.parametrize("vectorizer", [SyncVectorEnv, AsyncVectorEnv])
def test_equal_starts_with_noise_of_their_own(vectorizer):
    env = make(vectorizer=vectorizer)
    start = env.start(ALL, seeds(7, 7, 8), seeds(1, 2, 1)).clone()
    assert start[0] == start[1] != start[2]
    moved = env.step(ACTION).obs - start
    assert moved[0] == pytest.approx(float(moved[2]), abs=1e-6)  # the same noise from another start
    assert abs(float(moved[0] - moved[1])) > 1e-3
    env.close()


def test_a_start_is_the_plain_seeded_reset():
    env = make()
    largest = 2**31 - 1
    obs = env.start(ALL, seeds(0, 5, largest), seeds(largest, 0, 1))
    expected = [Noisy().reset(seed=seed)[0] for seed in (0, 5, largest)]
    assert obs.tolist() == np.array(expected, np.float32).tolist()


@pytest.mark.parametrize("vectorizer", [SyncVectorEnv, AsyncVectorEnv])
def test_finished_rows_are_held_and_started_again_alone(vectorizer):
    env = make(vectorizer=vectorizer)
    env.start(ALL, seeds(1, 2, 3), seeds(1, 2, 3))
    env.step(ACTION)
    env.start(mask(0, 1, 0), seeds(9, 9, 9), seeds(9, 9, 9))  # row 1 is one step behind
    for _ in range(4):
        step = env.step(ACTION)
    assert step.truncated.tolist() == [True, False, True]
    ended = step.obs.clone()
    step = env.step(ACTION)
    assert step.truncated.tolist() == [False, True, False]
    assert step.reward.tolist() == [0.0, 1.0, 0.0]
    assert torch.equal(step.obs[[0, 2]], ended[[0, 2]])
    last = step.obs.clone()
    obs = env.start(mask(1, 0, 0), seeds(4, 4, 4), seeds(4, 4, 4))
    assert torch.equal(obs[1:], last[1:])
    assert env.step(ACTION).reward.tolist() == [1.0, 0.0, 0.0]
    env.close()


def test_held_rows_take_no_step_inside():
    inner = []

    def count():
        inner.append(Noisy())
        return inner[-1]

    env = SeededGroupEnv(count, 3, env_id="Noisy", max_episode_steps=5)
    env.start(ALL, seeds(1, 2, 3), seeds(1, 2, 3))
    env.hold(mask(0, 0, 1))
    for _ in range(9):
        env.step(ACTION)
    assert [env.steps_taken for env in inner] == [5, 5, 0]


def test_resets_as_any_vector_environment_with_streams_of_their_own():
    env = make()
    first = env.reset(seed=3).clone()
    assert len(first.unique()) == 3
    drift = (env.step(ACTION).obs - first).flatten()
    assert drift.sort().values.diff().min() > 1e-4
    assert torch.equal(env.reset(seed=3), first)
    again = env.reset(mask=mask(1, 0, 0))
    assert again[0] != first[0]
    assert torch.equal(again[1:], first[1:])


def test_the_wrapper_passes_options_on_and_keeps_the_stream_without_a_seed():
    class Options(Noisy):
        def reset(self, *, seed=None, options=None):
            self.options = options
            return super().reset(seed=seed)

    env = AttemptWrapper(Options())
    first, _ = env.reset(seed=4, options={"low": 1})
    assert env.unwrapped.options == {"low": 1}
    stream = np.random.default_rng(0)  # seed 4 packs start 4 and noise 0
    assert env.reset()[0] == stream.normal() != first


# --- the proof that siblings share a start -------------------------------------------------------


@pytest.mark.parametrize("num_envs", [1, 3])
@pytest.mark.parametrize(
    ("env", "start_varies", "noise_varies"),
    [(Noisy, True, True), (Calm, True, False), (AlwaysThere, False, False)],
)
def test_an_honest_environment_passes_and_is_described(env, num_envs, start_varies, noise_varies):
    report = verify_group_start(make(env, num_envs))
    assert report == (env.__name__, "seed", start_varies, noise_varies)


@pytest.mark.parametrize("num_envs", [1, 3])
@pytest.mark.parametrize(
    ("env", "where"),
    [(GlobalStart, "at the start"), (GlobalNoise, "at step 1 of equal actions"), (Remembers, "at the start")],
)
def test_a_cheating_environment_is_caught(env, where, num_envs):
    with pytest.raises(
        GroupStartError, match=rf"siblings of {env.__name__} .*{where}.*'obs' of row .*mend: .*np_random"
    ):
        verify_group_start(make(env, num_envs))


def test_the_cheating_key_is_named():
    class GlobalReward(Calm):
        def step(self, action):
            obs, _, *rest = super().step(action)
            return obs, np.random.normal(), *rest

    with pytest.raises(GroupStartError, match=r"at step 1 .*'reward' of row 1"):
        verify_group_start(make(GlobalReward))


def test_a_start_that_depends_on_the_noise_seed_is_caught():
    class Mixed(SeededGroupEnv):
        def start(self, mask, start_seed, noise_seed):
            return super().start(mask, start_seed ^ noise_seed, noise_seed)

    with pytest.raises(GroupStartError, match="at the start"):
        verify_group_start(Mixed(Noisy, 3, env_id="Noisy", max_episode_steps=5))


def test_verification_leaves_the_action_space_alone():
    env = make()
    env.action_space.seed(0)
    before = str(env.action_space.np_random.bit_generator.state)
    verify_group_start(env)
    assert str(env.action_space.np_random.bit_generator.state) == before


@pytest.mark.parametrize("vectorization", ["entry_point", "sync"])
def test_cartpole_passes_in_both_tiers(vectorization):
    env = make_env(EnvCfg(num_envs=2, vectorization=vectorization), grouped=True)
    tier = {"entry_point": "native", "sync": "seed"}[vectorization]
    assert verify_group_start(env) == ("CartPole-v1", tier, True, False)


def test_lunar_lander_passes_and_its_noise_is_independent():
    pytest.importorskip("Box2D")
    env = make_env(EnvCfg(id="LunarLander-v3", num_envs=2), grouped=True)
    assert verify_group_start(env) == ("LunarLander-v3", "seed", True, True)
    env.close()
