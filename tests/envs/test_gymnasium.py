import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

from groupwise.data.rollout import TensorSpec
from groupwise.envs.gymnasium import GymnasiumVectorEnv
from groupwise.errors import DataError, EnvError, UnsupportedSpaceError


class Countdown(gymnasium.Env):
    """Observes the steps left and a random number; row ``k`` ends after ``k + 1`` steps, by termination if ``k`` is even."""

    observation_space = gymnasium.spaces.Dict(
        {"left": gymnasium.spaces.Discrete(10), "draw": gymnasium.spaces.Box(0, 1, (1,), np.float64)}
    )
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, row):
        self.row = row

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        assert options in (None, {}), "reset_mask is Gymnasium's own affair"
        self.left = self.row + 1
        return self.obs(), {}

    def step(self, action):
        self.left -= 1
        over = self.left == 0
        return self.obs(), 0.5, over and self.row % 2 == 0, over and self.row % 2 == 1, {"left": self.left}

    def obs(self):
        return {"left": self.left, "draw": self.np_random.random(1)}


def make(autoreset="disabled", num_envs=3, vectorizer=SyncVectorEnv):
    makers = [lambda row=row: Countdown(row) for row in range(num_envs)]
    env = vectorizer(makers, copy=False, autoreset_mode=AutoresetMode[autoreset.upper()])
    return GymnasiumVectorEnv(env, env_id="Countdown", max_episode_steps=None)


ACTION = torch.zeros(3, dtype=torch.int64)


def test_tensors_have_the_spaces_structure_and_the_rollouts_types():
    env = make()
    assert env.obs_spec == {"draw": TensorSpec((1,), torch.float32), "left": TensorSpec((), torch.int64)}
    obs = env.reset(seed=0)
    step = env.step(ACTION)
    assert obs["left"].dtype == torch.int64
    assert obs["draw"].shape == (3, 1)
    assert step.reward.tolist() == [0.5, 0.5, 0.5]
    assert step.reward.dtype == torch.float32
    assert step.terminated.tolist() == [True, False, False]
    assert step.obs["left"].tolist() == [0, 1, 2]
    assert step.final_obs is None


def test_rows_draw_from_streams_of_their_own_that_neighbouring_seeds_do_not_share():
    draws = [make().reset(seed=seed)["draw"].flatten().tolist() for seed in (0, 1, 0)]
    assert draws[0] == draws[2]
    assert len({*draws[0], *draws[1]}) == 6


def test_only_the_rows_of_the_mask_are_reset_again_and_again():
    env = make()
    env.reset(seed=0)
    step = env.step(ACTION)
    mask = np.array([True, False, False])
    for left in ([1, 1, 2], [1, 2, 1], [1, 1, 3]):
        obs = env.reset(mask=mask)
        assert obs["left"].tolist() == left
        step = env.step(ACTION)
        mask = (step.terminated | step.truncated).numpy()
    assert mask.tolist() == [True, True, False]


@pytest.mark.parametrize("vectorizer", [SyncVectorEnv, AsyncVectorEnv])
def test_final_observations_under_same_step(vectorizer):
    env = make("same_step", vectorizer=vectorizer)
    env.reset(seed=0)
    first = env.step(ACTION)
    assert first.final_obs["left"][0] == 0
    assert first.obs["left"].tolist() == [1, 1, 2]
    second = env.step(ACTION)
    assert second.final_obs["left"][:2].tolist() == [0, 0]
    assert second.final_obs["draw"].shape == (3, 1)
    assert second.obs["left"].tolist() == [1, 2, 1]
    env.close()


class VectorOnly(gymnasium.vector.VectorEnv):
    """A vector environment of somebody else's."""

    single_observation_space = gymnasium.spaces.Discrete(3)
    single_action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, **metadata):
        self.num_envs, self.metadata, self.seeds = 2, metadata, []

    def reset(self, *, seed=None, options=None):
        self.seeds.append(seed)
        return np.zeros(2, np.int64), {}

    def step(self, actions):
        ones = np.ones(2, np.bool_)
        return np.zeros(2, np.int64), np.ones(2), ones, ~ones, {}


def wrap(env):
    return GymnasiumVectorEnv(env, env_id="Theirs", max_episode_steps=None)


def test_a_foreign_vector_environment_gets_one_seed_and_may_batch_its_final_observations():
    class Batched(VectorOnly):
        def step(self, actions):
            *rest, _ = super().step(actions)
            return *rest, {"final_obs": np.array([2, 1]), "success": np.array([0, 1])}

    theirs = Batched(autoreset_mode=AutoresetMode.SAME_STEP)
    env = wrap(theirs)
    env.reset(seed=12)
    assert theirs.seeds == [12]
    step = env.step(torch.zeros(2, dtype=torch.int64))
    assert step.info["success"].tolist() == [False, True], "without the masks that Gymnasium's have"
    assert step.final_obs.tolist() == [2, 1]


class Speaks(VectorOnly):
    single_observation_space = gymnasium.spaces.Text(5)


def test_vector_environments_that_cannot_be_used_are_refused():
    with pytest.raises(EnvError, match="autoreset_mode"):
        wrap(VectorOnly())
    with pytest.raises(UnsupportedSpaceError, match="Text"):
        wrap(Speaks(autoreset_mode=AutoresetMode.NEXT_STEP))
    with pytest.raises(EnvError, match="next_step"):
        make("next_step").reset(mask=np.array([True, False, False]))
    env = wrap(VectorOnly(autoreset_mode=AutoresetMode.SAME_STEP))
    with pytest.raises(EnvError, match="final_obs"):
        env.step(torch.zeros(2, dtype=torch.int64))


class Rounds(Countdown):
    """Says that it shows a byte, and shows a number between 0 and 1."""

    observation_space = gymnasium.spaces.Dict(
        {"left": gymnasium.spaces.Discrete(10), "draw": gymnasium.spaces.Box(0, 255, (1,), np.uint8)}
    )


class Overflows(Countdown):
    observation_space = gymnasium.spaces.Dict(
        {"left": gymnasium.spaces.Discrete(3), "draw": gymnasium.spaces.Box(0, 1, (1,))}
    )


@pytest.mark.parametrize(
    ("env", "message"),
    [
        (Rounds, r"reset\(\) of Rounds returned what .*'float64'.*'uint8'.*fix: return the space's dtype"),
        (Overflows, r"obs\.left holds 3, expected 0 to 2"),
    ],
)
def test_numbers_are_not_changed_to_fit_the_space(env, message):
    made = GymnasiumVectorEnv(SyncVectorEnv([lambda: env(2)]), env_id=env.__name__, max_episode_steps=None)
    with pytest.raises(DataError, match=message):
        made.reset(seed=0)


def test_an_error_of_the_users_own_step_stays_as_it_is():
    class Fails(Countdown):
        def step(self, action):
            np.bincount(np.array([0.5]))

    made = GymnasiumVectorEnv(SyncVectorEnv([lambda: Fails(2)]), env_id="Fails", max_episode_steps=None)
    made.reset(seed=0)
    with pytest.raises(TypeError, match=r"^Cannot cast array data"):
        made.step(ACTION[:1])


def test_a_step_says_what_its_space_does_not_allow():
    class Changes(Countdown):
        observation_space = gymnasium.spaces.Box(0, 9, (1,), np.int64)

        def obs(self):
            return np.array([1 if self.left == 3 else 0.5])

        def reset(self, **options):
            super().reset(**options)
            return np.array([1]), {}

    made = GymnasiumVectorEnv(SyncVectorEnv([lambda: Changes(2)]), env_id="Changes", max_episode_steps=None)
    made.reset(seed=0)
    with pytest.raises(
        DataError, match=r"step\(\) of Changes returned what .*'float64'.*'int64'.*fix: return the space's"
    ):
        made.step(ACTION[:1])
