import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode

from groupwise.envs.starts import verify_group_start
from groupwise.envs.state_vector import StateVectorGroupEnv
from groupwise.errors import EnvError, GroupStartError

N = 4
ALL = np.ones(N, np.bool_)
STARTS = np.array([3, 8, 3, 8], np.int64)
NOISE = np.array([1, 2, 3, 4], np.int64)


class Walkers(gymnasium.vector.VectorEnv):
    """Walkers that end beyond 3 or after ``limit`` steps, pushed about by gusts from a stream each."""

    metadata = {"autoreset_mode": AutoresetMode.DISABLED}
    single_observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float64)
    single_action_space = spaces.Box(-1, 1, (1,), np.float32)

    def __init__(self, num_envs=N, *, limit=50, cheats=False):
        self.num_envs = num_envs
        self.limit, self.cheats = limit, cheats
        self.place = np.zeros(num_envs)
        self.steps = np.zeros(num_envs, np.int64)
        self.gusts = [np.random.default_rng(0) for _ in range(num_envs)]
        self.resets = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.resets += 1
        rows = np.flatnonzero((options or {}).pop("reset_mask", np.ones(self.num_envs, np.bool_)))
        draws = np.random if self.cheats else self.np_random
        self.place[rows] = draws.uniform(-1, 1, self.num_envs)[rows]
        self.steps[rows] = 0
        for row in rows:
            self.gusts[row] = np.random.default_rng(int(self.np_random.integers(2**31)))
        return self._obs(), {}

    def step(self, actions):
        self.place += actions[:, 0] + [0.1 * gusts.normal() for gusts in self.gusts]
        self.steps += 1
        return self._obs(), -np.abs(self.place), np.abs(self.place) > 3, self.steps >= self.limit, {}

    def clone_state(self, rows):
        return [(self.place[row], self.steps[row], self.gusts[row].bit_generator.state) for row in rows]

    def restore_state(self, states, rows):
        for row, (place, steps, stream) in zip(rows, states, strict=True):
            self.place[row], self.steps[row] = place, steps
            self.gusts[row].bit_generator.state = stream

    def _obs(self):
        return np.stack([self.place, self.steps], axis=1)


class NoisyWalkers(Walkers):
    def reseed_noise(self, seeds, rows):
        for row, seed in zip(rows, seeds, strict=True):
            self.gusts[row] = np.random.default_rng(seed)


def adapt(env=None):
    return StateVectorGroupEnv(env or NoisyWalkers(), env_id="Walkers", max_episode_steps=50)


def still():
    return torch.zeros(N, 1)


def push(*amounts):
    return torch.tensor([[amount] for amount in amounts])


def mask(*rows):
    return np.isin(np.arange(N), rows)


def test_members_share_the_start_and_then_draw_their_own_noise():
    report = verify_group_start(adapt())
    assert (report.start_mode, report.start_varies, report.noise_varies) == ("snapshot", True, True)


def test_without_noise_of_their_own_members_share_it_and_the_report_says_so():
    env = adapt(Walkers())
    report = verify_group_start(env)
    assert (report.start_varies, report.noise_varies) == (True, False)
    env.start(ALL, STARTS, NOISE)
    for _ in range(5):
        obs = env.step(still()).obs
    assert torch.equal(obs[0], obs[2])
    assert not torch.equal(obs[0], obs[1])


def test_the_start_is_row_0_of_the_seeded_reset():
    obs = adapt().start(ALL, STARTS, NOISE)
    for row in range(N):
        assert float(obs[row, 0]) == np.float32(Walkers().reset(seed=int(STARTS[row]))[0][0, 0])


def test_starting_one_row_disturbs_no_other():
    calm, busy = adapt(), adapt()
    for env in (calm, busy):
        env.start(ALL, STARTS, NOISE)
        there = env.step(still()).obs
    obs = busy.start(mask(1), np.full(N, 99), NOISE)  # a seed that nobody has used: the environment is reset for it
    assert torch.equal(obs[[0, 2, 3]], there[[0, 2, 3]])
    assert not torch.equal(obs[1], there[1])
    for _ in range(5):
        assert torch.equal(calm.step(still()).obs[[0, 2, 3]], busy.step(still()).obs[[0, 2, 3]])


def test_members_that_start_later_need_no_further_reset():
    walkers = NoisyWalkers()
    env = adapt(walkers)
    first = env.start(mask(0, 1), STARTS, NOISE)
    count = walkers.resets
    later = env.start(mask(2, 3), STARTS, NOISE)
    assert walkers.resets == count
    assert torch.equal(later[[2, 3]], first[[0, 1]])
    env.start(mask(0), np.full(N, 77), NOISE)
    count = walkers.resets
    env.start(mask(1), STARTS, NOISE)  # another start in between is no reason to forget this one
    assert walkers.resets == count


def test_finished_rows_are_held_until_started_again():
    env = adapt()
    env.start(ALL, STARTS, NOISE)
    ended = env.step(push(9.0, 0.0, 0.0, 0.0))
    assert ended.terminated.tolist() == [True, False, False, False]
    kept = ended.obs.clone()
    paused = env.step(still())
    assert torch.equal(paused.obs[0], kept[0])
    assert not torch.equal(paused.obs[1], kept[1])
    assert (float(paused.reward[0]), bool(paused.terminated[0]), bool(paused.truncated[0])) == (0.0, False, False)
    env.pause(mask(1))
    assert float(env.step(still()).reward[1]) == 0.0
    env.start(mask(0), STARTS, NOISE)
    assert env.step(still()).reward.eq(0).tolist() == [False, True, False, False]


def test_truncation_is_the_environments_own():
    env = adapt(NoisyWalkers(limit=2))
    env.start(ALL, STARTS, NOISE)
    env.step(still())
    env.start(mask(3), STARTS, NOISE)
    step = env.step(still())
    assert step.truncated.tolist() == [True, True, True, False]
    assert not step.terminated.any()
    assert env.step(still()).reward.eq(0).tolist() == [True, True, True, False]


def test_rows_that_nobody_started_are_paused():
    env = adapt()
    shown = env.start(mask(0, 1), STARTS, NOISE)
    step = env.step(still())
    assert step.reward.eq(0).tolist() == [False, False, True, True]
    assert torch.equal(step.obs[2:], shown[2:])


def test_masked_reset_is_the_environments_own():
    env = adapt()
    env.reset(seed=5)
    moved = env.step(still()).obs
    again = env.reset(mask=mask(1))
    assert torch.equal(again[[0, 2, 3]], moved[[0, 2, 3]])
    assert float(again[1, 1]) == 0.0
    assert env.step(still()).obs[:, 1].tolist() == [2.0, 1.0, 2.0, 2.0], "steps since the row's own reset"
    assert torch.equal(adapt().reset(seed=5), adapt().reset(seed=5))


def test_a_reset_row_runs_again_and_leaves_the_others_paused():
    env = adapt()
    env.start(ALL, STARTS, NOISE)
    env.pause(ALL)
    env.reset(mask=mask(1))
    assert env.step(still()).reward.eq(0).tolist() == [True, False, True, True]
    env.reset(seed=1)
    assert not env.step(still()).reward.eq(0).any()


def test_observations_outlive_an_environment_that_writes_into_one_array():
    class Reusing(NoisyWalkers):
        single_observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)  # not converted, so not copied either
        array = np.zeros((N, 2), np.float32)

        def _obs(self):
            self.array[:] = super()._obs()
            return self.array

    env = adapt(Reusing())
    for first in (env.reset(seed=5), env.start(ALL, STARTS, NOISE), env.step(still()).obs):
        copy = first.clone()
        env.step(push(0.5, 0.5, 0.5, 0.5))
        assert torch.equal(first, copy)


def test_old_starts_are_forgotten_and_found_again():
    env = adapt()
    first = env.start(ALL, STARTS, NOISE)
    for seed in range(1000, 2100, N):
        env.start(ALL, np.arange(seed, seed + N), NOISE)
    assert len(env._starts) <= 1024
    assert torch.equal(env.start(ALL, STARTS, NOISE), first)


def test_a_reset_that_ignores_its_seed_is_refused():
    with pytest.raises(GroupStartError, match="began elsewhere"):
        verify_group_start(adapt(NoisyWalkers(cheats=True)))


def test_an_environment_without_states_is_refused_with_a_fix():
    env = gymnasium.make_vec("CartPole-v1", 2, vectorization_mode="sync", vector_kwargs={"autoreset_mode": "Disabled"})
    with pytest.raises(GroupStartError, match="add clone_state"):
        StateVectorGroupEnv(env, env_id="CartPole-v1", max_episode_steps=500)


def test_an_environment_that_resets_itself_is_refused_with_a_fix():
    class Restless(NoisyWalkers):
        metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}

    with pytest.raises(GroupStartError, match="DISABLED"):
        adapt(Restless())


def test_stepping_before_a_start_is_refused():
    with pytest.raises(EnvError, match="before anything started"):
        adapt().step(still())


def test_noise_that_members_share_is_said_once(caplog):
    plain = adapt(Walkers())
    plain.start(ALL, STARTS, STARTS)
    assert not caplog.messages
    for _ in range(2):
        plain.start(ALL, STARTS, NOISE)
    (message,) = caplog.messages
    assert message.startswith("members of Walkers share all randomness")
    assert "fix: add reseed_noise" in caplog.text
    caplog.clear()
    adapt().start(ALL, STARTS, NOISE)
    assert not caplog.messages
