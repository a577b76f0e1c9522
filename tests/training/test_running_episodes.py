"""Episodes that run when a checkpoint is saved go on bit for bit after a resume."""

from enum import IntEnum

import gymnasium
import numpy as np
import pytest
import torch

from groupwise.collectors.vector import VectorCollector
from groupwise.config.run import EnvCfg
from groupwise.data.rollout import RolloutBuffer
from groupwise.envs.make import make_env
from groupwise.policies.actor_critic import ActorCritic
from groupwise.training.checkpoint import Checkpoint, Identity, load_checkpoint, serialize, write_checkpoint

STEPS = 16


class Walk(gymnasium.Env):
    """Its state is numbers, besides one thing."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, thing=None):
        self.thing = thing

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count, self.place = 0, self.np_random.normal()
        return np.array([self.place], np.float32), {}

    def step(self, action):
        self.count += 1
        self.place += 0.1 * (2 * action - 1) + 0.1 * self.np_random.normal()
        return np.array([self.place], np.float32), -abs(self.place), False, self.count == 50, {}


class Clones(Walk):
    """Says itself what its state is; the thing could not be captured."""

    def __init__(self):
        super().__init__(object())

    def clone_state(self):
        return self.count, {"place": self.place}

    def restore_state(self, state):
        self.count, self.place = state[0], state[1]["place"]


class Adds(gymnasium.Wrapper):
    """Adds to the reward how many steps it has seen."""

    seen = 0

    def step(self, action):
        self.seen += 1
        obs, reward, *ends = self.env.step(action)
        return obs, reward + self.seen, *ends


class Run:
    """A collector, whose state goes through a checkpoint on the disk."""

    def __init__(self, cfg, env=None):
        self.env = make_env(cfg, env=env)
        torch.manual_seed(0)
        self.policy = ActorCritic(self.env.observation_space, self.env.action_space)
        self.buffer = RolloutBuffer(
            self.env.num_envs, STEPS, obs_spec=self.env.obs_spec, action_spec=self.policy.action_spec, value=True
        )
        self.collector = VectorCollector(self.env, self.policy, seed=1)

    def collect(self, rollouts):
        return [self.collector.collect(STEPS, self.buffer.start_rollout()).clone() for _ in range(rollouts)]

    def save(self, folder):
        state = {"iteration": self.collector.iteration, "collector": self.collector.state_dict()}
        write_checkpoint(folder, serialize(Checkpoint({}, state)), Identity("Walk", "observations", "actions"))

    def load(self, folder):
        state = load_checkpoint(folder).state
        self.collector.iteration = state["iteration"]
        self.collector.load_state_dict(state["collector"])


RUNS = {
    "CartPole-v1": (EnvCfg(id="CartPole-v1"), None),
    "CartPole-v1, one by one": (EnvCfg(id="CartPole-v1", vectorization="sync"), None),
    "CartPole-v1, in torch": (EnvCfg(id="CartPole-v1", vectorization="torch"), None),
    "Pendulum-v1": (EnvCfg(id="Pendulum-v1", vectorization="sync", max_episode_steps=20), None),
    "Pendulum-v1, after random actions": (
        EnvCfg(id="Pendulum-v1", max_episode_steps=20, num_random_noops=9),
        None,
    ),
    "HalfCheetah-v5": (EnvCfg(id="HalfCheetah-v5", max_episode_steps=20), None),
    "MetaWorld": (
        EnvCfg(id="MetaWorld/multi", max_episode_steps=20, kwargs={"tasks": ["push-v3", "door-lock-v3"]}),
        None,
    ),
    "FetchReach-v4": (EnvCfg(id="FetchReach-v4", max_episode_steps=20), None),
    "CliffWalking-v1": (EnvCfg(id="CliffWalking-v1", max_episode_steps=20), None),
    "a class of the user's": (EnvCfg(), Walk),
    "a class that clones its state": (EnvCfg(), Clones),
    "a wrapper around it": (EnvCfg(), lambda: Adds(Clones())),
}


PACKAGES = {"HalfCheetah-v5": "mujoco", "MetaWorld": "metaworld", "FetchReach-v4": "gymnasium_robotics"}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.contrib if n in ("MetaWorld", "FetchReach-v4") else ()) for n in RUNS]
)
def test_running_episodes_go_on_bit_for_bit(name, tmp_path):
    if name in PACKAGES:
        pytest.importorskip(PACKAGES[name])
    cfg, env = RUNS[name]
    whole, first, second = (Run(cfg.model_copy(update={"num_envs": 3}), env) for _ in range(3))
    expected = whole.collect(5)
    first.collect(2)
    first.save(tmp_path / "latest")
    first.collect(1)  # what is saved does not change with what runs on
    second.load(tmp_path / "latest")
    assert all((a == b).all() for a, b in zip(expected[2:], second.collect(3), strict=True))
    assert list(second.collector.recent) == list(whole.collector.recent)
    assert (expected[2]["step"][:, 0] > 0).any()  # some episode was running


def test_episodes_in_a_model_that_resets_change_begin_anew(tmp_path, caplog):
    hopper = pytest.importorskip("gymnasium.envs.mujoco.hopper_v5")

    class Weightless(hopper.HopperEnv):
        def reset_model(self):
            self.model.opt.gravity[2] = -self.np_random.uniform(0, 1)
            return super().reset_model()

    first, second = (Run(EnvCfg(num_envs=3, max_episode_steps=50), Weightless) for _ in range(2))
    first.collect(2)
    first.save(tmp_path / "latest")
    second.load(tmp_path / "latest")
    assert (second.collect(1)[0]["step"][:, 0] == 0).all()
    assert "its MjModel is another one now" in caplog.text


def test_episodes_that_cannot_be_saved_begin_anew_on_resume_only(tmp_path):
    whole, second = (Run(EnvCfg(num_envs=3), lambda: Walk(object())) for _ in range(2))
    whole.collect(2)
    whole.save(tmp_path / "latest")
    second.load(tmp_path / "latest")
    assert (whole.collect(1)[0]["step"][:, 0] == 2 * STEPS).all()
    assert (second.collect(1)[0]["step"][:, 0] == 0).all()


def test_in_other_processes_new_episodes_begin(tmp_path, caplog):
    first, other = (Run(EnvCfg(num_envs=1, vectorization=way), Walk) for way in ("sync", "async"))
    first.collect(1)
    first.save(tmp_path / "latest")
    other.load(tmp_path / "latest")
    assert "new ones begin: rows of Walk in other processes take no state" in caplog.text
    assert (other.collect(1)[0]["step"][:, 0] == 0).all()
    other.collector.close()


def test_another_rank_and_a_rollout_that_failed_begin_anew(tmp_path):
    first, other = Run(EnvCfg(num_envs=3), Walk), Run(EnvCfg(num_envs=3), Walk)
    first.collect(1)
    first.save(tmp_path / "latest")
    other.collector.rank = 1
    other.load(tmp_path / "latest")
    assert (other.collect(1)[0]["step"][:, 0] == 0).all()

    step, first.env.step = first.env.step, lambda action: 1 / 0
    with pytest.raises(ZeroDivisionError):
        first.collect(1)
    first.env.step = step
    assert "running" not in first.collector.state_dict()
    assert (first.collect(1)[0]["step"][:, 0] == 0).all()


class Aliases(Walk):
    """Two attributes hold one array, and a list is in itself."""

    def reset(self, **options):
        super().reset(**options)
        self.place = np.array([self.place], np.float64)
        self.body, self.trail = {"place": self.place}, []
        self.trail.append(self.trail)
        return self.place.astype(np.float32), {}

    def step(self, action):
        self.count += 1
        self.body["place"] += 0.1 * (2 * action - 1) + 0.1 * self.np_random.normal()
        assert self.trail[0] is self.trail
        return self.place.astype(np.float32), -abs(float(self.place[0])), False, self.count == 50, {}


class Views(Aliases):
    """One attribute is a part of another."""

    def reset(self, **options):
        seen = super().reset(**options)
        self.body = {"place": self.place[:1]}
        return seen


def test_an_array_of_two_attributes_is_one_again_and_a_part_of_one_begins_anew(tmp_path):
    whole, second = (Run(EnvCfg(num_envs=3), Aliases) for _ in range(2))
    whole.collect(1)
    whole.save(tmp_path / "latest")
    second.load(tmp_path / "latest")
    assert all((a == b).all() for a, b in zip(whole.collect(3), second.collect(3), strict=True))
    for make in (Views, lambda: Walk(np.ma.masked_array([1.0, 2.0], [False, True]))):
        first, other = (Run(EnvCfg(num_envs=3), make) for _ in range(2))
        first.collect(1)
        first.save(tmp_path / "other")
        other.load(tmp_path / "other")
        assert (other.collect(1)[0]["step"][:, 0] == 0).all()


class Act(IntEnum):
    LEFT, RIGHT = 0, 1


class Turns(Walk):
    """Its rule changes after 5 steps."""

    def reset(self, **options):
        self.rule = self.minus
        return super().reset(**options)

    def minus(self, reward):
        return -reward

    def plus(self, reward):
        return reward

    def step(self, action):
        if self.count == 5:
            self.rule = self.plus
        obs, reward, *ends = super().step(action)
        return obs, self.rule(reward), *ends


class Remembers(Walk):
    """Keeps its last action in an attribute that a reset leaves empty."""

    last = None

    def step(self, action):
        self.last = Act(int(action))
        return super().step(action)


class Rules(Walk):
    """A function takes the place of another one."""

    def step(self, action):
        self.rule = max if self.count else np.add
        self.other = worse
        return super().step(action)

    def reset(self, **options):
        self.other = better
        return super().reset(**options)


def better():
    return 1


def worse():
    return -1


GOALS = [np.array([0.0, 9.0]), np.array([9.0, 0.0]), np.array([0.0, 0.0])]


class Goals(Walk):
    """Each episode has one of the goals that all environments know, and words of NumPy."""

    def reset(self, **options):
        found = super().reset(**options)
        self.goal, self.word = GOALS[self.np_random.integers(3)], self.np_random.choice(["near", "far"])
        return found

    def step(self, action):
        obs, _, *ends = super().step(action)
        return obs, float(self.goal[0] - 2 * self.goal[1] + (self.word == "far")), *ends


@pytest.mark.parametrize("given", [None, GOALS])
def test_an_episode_keeps_what_it_chose_among_objects_that_all_environments_know(given, tmp_path):
    first, second = (Run(EnvCfg(num_envs=6), lambda: Goals(given)) for _ in range(2))
    first.collect(1)
    first.save(tmp_path / "latest")
    second.load(tmp_path / "latest")
    found = second.collect(1)[0]
    assert torch.equal(found["reward"], first.collect(1)[0]["reward"])
    assert len(set(found["reward"][:, 0].tolist())) > 2


@pytest.mark.parametrize(
    "make",
    [
        lambda: Walk(np.datetime64("2026-01-01")),
        lambda: Walk(np.longdouble(1)),
        lambda: Walk(np.zeros(2, np.complex64)),
        lambda: Walk(np.zeros(2, ">f8")),
        lambda: Walk(np.zeros(300_000)),  # tables and long lists of numbers would make checkpoints slow
        lambda: Walk(list(np.zeros(2_000))),
        Turns,
        Remembers,
        Rules,
    ],
)
def test_what_a_checkpoint_cannot_take_begins_anew(make, tmp_path, caplog):
    first, other = (Run(EnvCfg(num_envs=3), make) for _ in range(2))
    first.collect(1)
    first.save(tmp_path / "latest")
    other.load(tmp_path / "latest")
    assert (other.collect(1)[0]["step"][:, 0] == 0).all()
    told = [
        message
        for message in caplog.messages
        if message.startswith("the running episodes cannot be restored, so new ones begin: ")
    ]
    assert len(told) == (make in (Turns, Remembers, Rules))


def test_a_method_that_did_not_change_goes_on(tmp_path):
    class Early(Turns):
        def step(self, action):
            self.place += 0.0 if self.rule == self.minus else 100.0
            return Walk.step(self, action)

    whole, second = (Run(EnvCfg(num_envs=3), Early) for _ in range(2))
    whole.collect(1)
    whole.save(tmp_path / "latest")
    second.load(tmp_path / "latest")
    assert all((a == b).all() for a, b in zip(whole.collect(2), second.collect(2), strict=True))


def test_what_environments_share_is_not_saved_and_stays_shared(tmp_path):
    class Course(Walk):
        def step(self, action):
            obs, _, *ends = super().step(action)
            return obs, self.thing["level"], *ends

    def run():
        course = {"level": 0.0, "table": np.zeros(10**6)}  # which would be too large for each row
        return Run(EnvCfg(num_envs=3), lambda: Course(course)), course

    (first, course), (second, again) = run(), run()
    course["level"] = 1.0
    first.collect(1)
    first.save(tmp_path / "latest")
    second.load(tmp_path / "latest")
    again["level"] = 2.0
    found = second.collect(1)[0]
    assert (found["step"][:, 0] == STEPS).all()
    assert (found["reward"][:, :-1] == 2.0).all()


class Columns(Aliases):
    """Parts of one array that share nothing, and keys of several numbers."""

    def reset(self, **options):
        seen = super().reset(**options)
        table = np.zeros((2, 2))
        self.left, self.right = table[:, 0], table[:, 1]
        self.visits = {(0, 1): self.body["place"]}
        return seen

    def step(self, action):
        self.left += 1
        self.visits[0, 1] += 0.1
        obs, reward, *ends = super().step(action)
        return obs, reward + float(self.left.sum() - self.right.sum()), *ends


def test_columns_and_keys_of_several_numbers_go_on(tmp_path):
    whole, second = (Run(EnvCfg(num_envs=3), Columns) for _ in range(2))
    whole.collect(1)
    whole.save(tmp_path / "latest")
    second.load(tmp_path / "latest")
    found = second.collect(3)
    assert all((a == b).all() for a, b in zip(whole.collect(3), found, strict=True))
    assert (found[0]["step"][:, 0] == STEPS).all()
