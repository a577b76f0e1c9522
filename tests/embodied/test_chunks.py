"""Decisions of several steps, by action chunks or repeated actions: until the episode ends, with the plain sum of rewards."""

from functools import partial

import gymnasium as gym
import numpy as np
import pytest
import torch

import groupwise as gw
from groupwise.collectors.groups import GroupCollector
from groupwise.collectors.vector import VectorCollector
from groupwise.config.policy import PolicyCfg
from groupwise.config.run import EnvCfg
from groupwise.data.rollout import RolloutBuffer
from groupwise.embodied.vla import ChunkActorCritic
from groupwise.envs.gymnasium import ActionChunk, RandomNoops
from groupwise.envs.make import make_env
from groupwise.errors import ConfigError, EnvError
from groupwise.policies.actor_critic import ActorCritic
from groupwise.report.video import film


class Counting(gym.Env):
    """Observes its step count; the reward of step t is t, the part ``double`` twice that; ends at ``end``."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (1,), np.float32)
    action_space = gym.spaces.Box(-1, 1, (2,), np.float32)

    def __init__(self, end=7):
        self.end = end
        self.seen = []

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count = 0
        return np.array([self.np_random.normal()], np.float32), {}

    def step(self, action):
        self.count += 1
        self.seen.append(action.copy())
        reward = float(self.count)
        return np.array([self.count], np.float32), reward, self.count >= self.end, False, {"double": 2 * reward}


class Drawing(Counting):
    """Observes an image of its step count, drawn only where it is asked for."""

    observation_space = gym.spaces.Dict(image=gym.spaces.Box(0, 255, (1, 1, 1, 3), np.uint8))
    draws = True

    def reset(self, *, seed=None, options=None):
        self.drawn = 0
        super().reset(seed=seed)
        return {"image": self.image()}, {}

    def step(self, action):
        _, *outcome = super().step(action)
        return {"image": self.image() if self.draws else None}, *outcome

    def image(self):
        self.drawn += 1
        return np.full((1, 1, 1, 3), self.count, np.uint8)


def chunk(values):
    return np.repeat(np.array(values, np.float32)[:, None], 2, axis=1)


def test_a_chunk_is_executed_in_order_up_to_the_end_and_its_rewards_are_summed():
    env = ActionChunk(Counting(end=4), 3, ["double"])
    assert env.action_space.shape == (3, 2)
    assert env.action_space.contains(chunk([-1, 0, 1]))
    env.reset(seed=0)
    obs, reward, terminated, truncated, info = env.step(chunk([0.1, 0.2, 0.3]))
    assert (obs[0], reward, terminated, truncated) == (3.0, 1 + 2 + 3, False, False)
    assert info == {"double": 12.0, "executed": 3}
    np.testing.assert_array_equal(env.unwrapped.seen, chunk([0.1, 0.2, 0.3]))
    _, reward, terminated, _, info = env.step(chunk([0.5, 0.6, 0.7]))
    assert (reward, terminated, info["executed"]) == (4.0, True, 1)
    np.testing.assert_array_equal(env.unwrapped.seen[-1], chunk([0.5])[0])


def test_a_part_that_one_step_lacks_is_missing_as_without_chunks():
    class Forgetful(Counting):
        def step(self, action):
            *outcome, info = super().step(action)
            return *outcome, {} if self.count == 2 else info

    for size in (1, 3):
        cfg = EnvCfg(id="Forgetful", num_envs=1, action_chunk=size)
        env = make_env(cfg, env=Forgetful, reward_parts=("double",))
        env.reset(seed=0)
        with pytest.raises(EnvError, match=r"has no reward part 'double': .*; fix: "):
            _ = [env.step(torch.zeros(1, *env.action_space.shape)) for _ in range(2)]
        env.close()


def test_the_first_actions_alone_are_executed_if_the_horizon_is_shorter():
    env = ActionChunk(Counting(end=5), 3, num_steps=2)
    env.reset(seed=0)
    outcomes = [env.step(chunk([0.1 * i, 0.2 * i, 9])) for i in (1, 2, 3)]
    np.testing.assert_allclose(env.unwrapped.seen, chunk([0.1, 0.2, 0.2, 0.4, 0.3]))
    assert [outcome[1] for outcome in outcomes] == [1 + 2, 3 + 4, 5]
    assert [outcome[2] for outcome in outcomes] == [False, False, True]
    assert [outcome[4]["executed"] for outcome in outcomes] == [2, 2, 1]


def test_an_action_is_repeated_up_to_the_end_and_its_rewards_are_summed():
    env = ActionChunk(Counting(end=4), reward_parts=["double"], repeat=3)
    assert env.action_space == Counting.action_space
    env.reset(seed=0)
    outcomes = [env.step(chunk([i])[0]) for i in (0.1, 0.2)]
    np.testing.assert_array_equal(env.unwrapped.seen, chunk([0.1, 0.1, 0.1, 0.2]))
    assert [float(outcome[0][0]) for outcome in outcomes] == [3.0, 4.0]
    assert [outcome[1] for outcome in outcomes] == [1 + 2 + 3, 4]
    assert [outcome[2] for outcome in outcomes] == [False, True]
    assert [outcome[4] for outcome in outcomes] == [{"double": 12.0, "executed": 3}, {"double": 8.0, "executed": 1}]


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"action_repeat": 0}, "action_repeat"),
        ({"action_repeat": 2, "action_chunk": 3}, "action_repeat=2.*action_chunk=3; fix: one of the two"),
        ({"action_repeat": 2, "action_masks": True}, "action_repeat=2.*action_masks; fix: one of the two"),
        ({"frame_skip": 2}, "env.action_repeat"),
    ],
)
def test_repeats_that_cannot_be_are_refused(settings, named):
    with pytest.raises(ConfigError, match=named):
        EnvCfg(**settings)


def test_an_action_with_a_mask_is_not_repeated():
    class Masked(Counting):
        action_space = gym.spaces.Discrete(2)
        observation_space = gym.spaces.Dict(obs=Counting.observation_space, action_mask=gym.spaces.MultiBinary(2))

    with pytest.raises(EnvError, match=r"may mask an action .*action_repeat=2 times; fix: action_repeat=1"):
        make_env(EnvCfg(action_repeat=2), env=Masked)


def test_a_chunk_of_the_environment_s_own_is_not_repeated():
    class Chunked(Counting):
        action_space = gym.spaces.Box(-1, 1, (3, 2), np.float32)

    with pytest.raises(EnvError, match=r"action_repeat=2 repeats single actions.*Box.*; fix: action_repeat=1"):
        make_env(EnvCfg(action_repeat=2), env=Chunked)


def test_an_environment_may_change_the_action_that_is_repeated():
    class Halving(Counting):
        def step(self, action):
            outcome = super().step(action)
            action *= 0.5
            return outcome

    env = ActionChunk(Halving(), repeat=3)
    env.reset(seed=0)
    env.step(chunk([1])[0])
    np.testing.assert_array_equal(env.unwrapped.seen, chunk([1, 1, 1]))


def test_simulators_that_vectorise_themselves_repeat_no_action():
    with pytest.raises(EnvError, match="without action_repeat = 3"):
        make_env(EnvCfg(action_repeat=3, vectorization="torch"), grouped=True)


@pytest.mark.parametrize(
    ("settings", "error", "named"),
    [
        ({"num_action_steps": 0}, ConfigError, "num_action_steps"),
        ({"num_action_steps": 4}, ConfigError, "num_action_steps"),
        ({"num_action_steps": 2, "action_chunk": 1}, ConfigError, "num_action_steps=2.*action_chunk=1"),
        ({"n_action_steps": 2}, ConfigError, "num_action_steps"),  # LeRobot's name
        ({}, EnvError, r"action_chunk=3 needs Box actions.*Discrete"),
        ({"vectorization": "torch"}, EnvError, "without action_chunk = 3"),
    ],
)
def test_chunks_that_cannot_be_executed_are_refused(settings, error, named):
    with pytest.raises(error, match=named):
        make_env(EnvCfg(**{"id": "CartPole-v1", "action_chunk": 3} | settings), grouped=True)


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize(("end", "last"), [(7, 3), (2, 2)])
def test_only_the_last_observation_of_a_decision_is_drawn(end, last, size):
    env = ActionChunk(Drawing(end), size, repeat=3 // size)
    action = np.zeros(env.action_space.shape, np.float32)
    env.reset(seed=0)
    obs = env.step(action)[0]
    assert env.unwrapped.drawn == 2  # the reset's and this one
    assert int(obs["image"].max()) == last
    assert env.unwrapped.draws
    env.unwrapped.draws = False  # as the check of starts does
    assert env.step(action)[0]["image"] is None
    assert env.unwrapped.drawn == 2


@pytest.mark.parametrize(("end", "last"), [(7, 3), (2, 2)])
@pytest.mark.parametrize("limit", [False, True])
def test_wrappers_see_the_last_image_of_a_decision(end, last, limit):
    def inverted(obs):
        return {"image": 255 - obs["image"]}

    def renamed(obs):
        return {"pixels": obs["image"][:, 0, 0, 0]}

    pixels = gym.spaces.Dict(pixels=gym.spaces.Box(0, 255, (1,), np.uint8))
    for change, space, key in ((inverted, Drawing.observation_space, "image"), (renamed, pixels, "pixels")):
        inner = gym.wrappers.TimeLimit(Drawing(9), end) if limit else Drawing(end)
        env = ActionChunk(gym.wrappers.TransformObservation(inner, change, space), 3)
        env.reset(seed=0)
        seen = env.step(np.zeros((3, 2), np.float32))[0]
        assert seen.keys() == {key}
        assert int(seen[key].max()) == (255 - last if change is inverted else last)


def test_wrappers_that_leave_observations_alone_draw_one_image():
    inner = gym.wrappers.TransformReward(gym.wrappers.OrderEnforcing(Drawing()), lambda reward: -reward)
    env = ActionChunk(RandomNoops(gym.wrappers.TimeLimit(inner, 50), 1), 3)
    env.reset(seed=0)
    before = env.unwrapped.drawn
    env.step(np.zeros((3, 2), np.float32))
    assert env.unwrapped.drawn == before + 1


def rollout_of(kind, cfg, num_steps=4):
    grouped = kind == "groups"
    env = make_env(cfg, grouped=grouped, env=partial(Counting, end=7), verify=grouped)
    torch.manual_seed(0)
    kind = ChunkActorCritic if cfg.action_chunk > 1 else ActorCritic
    policy = kind(env.observation_space, env.action_space, PolicyCfg(), actor_only=grouped)
    collector = GroupCollector(env, policy, group_size=2) if grouped else VectorCollector(env, policy)
    units = {"num_units": policy.num_units} if policy.scored_by == "token" else {}
    sizes = units | {"chunked": True, "value": not grouped}
    buffer = RolloutBuffer(env.num_envs, num_steps, obs_spec=env.obs_spec, action_spec=policy.action_spec, **sizes)
    try:
        rollout = collector.collect(num_steps, buffer.start_rollout())
        buffer.add(rollout)
        return rollout, collector
    finally:
        collector.close()


@pytest.mark.parametrize("kind", ["groups", "vector"])
@pytest.mark.parametrize(
    ("settings", "executed", "rewards"),
    [
        ({}, [3, 3, 1], [6.0, 15.0, 7.0]),
        pytest.param({"vectorization": "async"}, [3, 3, 1], [6.0, 15.0, 7.0], marks=pytest.mark.slow),
        ({"num_action_steps": 2}, [2, 2, 2, 1], [3.0, 7.0, 11.0, 7.0]),
        ({"action_chunk": 1, "action_repeat": 3}, [3, 3, 1], [6.0, 15.0, 7.0]),
    ],
)
def test_rollouts_say_how_many_steps_each_decision_took(kind, settings, executed, rewards):
    """Episodes of 7 steps, of three in each chunk all or two, or an action three times."""
    cfg = EnvCfg(**{"num_envs": 2, "action_chunk": 3, "max_episode_steps": 20} | settings)
    size = len(executed)
    rollout, collector = rollout_of(kind, cfg, size)
    assert rollout["executed"][:, :size].tolist() == [executed] * 2
    assert rollout["reward"][:, :size].tolist() == [rewards] * 2
    assert rollout["terminated"][:, :size].tolist() == [[False] * (size - 1) + [True]] * 2
    assert rollout["sample_log_prob"].shape == (2, size + 1, 3) if cfg.action_chunk > 1 else (2, size + 1)
    assert rollout["executed"].dtype == torch.int64
    assert collector.last_steps == 14  # environment steps
    assert [(e.episode_return, e.length) for e in collector.finished] == [(28.0, size)] * 2
    assert collector.env.max_episode_steps == (10 if "num_action_steps" in settings else 7)
    if cfg.action_chunk > 1:
        mask = collector.policy.unit_mask({**rollout[:, :size]})
        assert mask[0].int().tolist() == [[1] * count + [0] * (3 - count) for count in executed]


@pytest.mark.parametrize(
    ("settings", "longest"),
    [
        ({}, 200),
        ({"action_chunk": 8}, 200),
        ({"action_chunk": 8, "num_action_steps": 2}, 200),
        ({"action_chunk": 8, "num_action_steps": 3}, 201),  # 67 decisions
        ({"action_repeat": 4}, 50),
    ],
)
def test_dr_grpo_divides_by_the_actions_that_an_episode_can_execute(settings, longest, tmp_path):
    """Pendulum's limit is 200 steps."""
    env = gw.EnvCfg(id="Pendulum-v1", num_envs=2, **settings)
    algorithm = {"name": "grpo", "num_steps": 4, "num_epochs": 1, "group_size": 2}
    short = {"total_steps": 8, "evaluation": {"episodes": 1}, "logging": {"progress": "none"}}
    run = gw.train(env, algorithm, preset="dr_grpo", run_dir=tmp_path / "run", **short)
    assert run.algorithm.cfg.objective.aggregation.max_length == longest


def test_a_video_decides_as_often_as_a_run(tmp_path):
    class Filmed(Counting):
        metadata = {"render_modes": ["rgb_array"], "render_fps": 10}
        render_mode = "rgb_array"

        def render(self):
            return np.zeros((8, 8, 3), np.uint8)

    made = Filmed(end=5)
    policy = ChunkActorCritic(made.observation_space, ActionChunk(made, 3).action_space, PolicyCfg(), actor_only=True)
    decided = []
    policy.predict = lambda obs, deterministic: decided.append(int(obs[0])) or chunk([0, 0.5, 9])
    film(policy, EnvCfg(action_chunk=3, num_action_steps=2), lambda: made, tmp_path / "x.gif", seed=0)
    assert decided[1:] == [2, 4]
    assert max(action[0] for action in made.seen) == 0.5
    decided.clear()
    policy.predict = lambda obs, deterministic: decided.append(int(obs[0])) or chunk([0])[0]
    film(policy, EnvCfg(action_repeat=2), lambda: made, tmp_path / "y.gif", seed=0)
    assert decided[1:] == [2, 4]


@pytest.mark.parametrize("several", ["action_chunk", "action_repeat"])
def test_limits_count_environment_steps_and_the_collector_s_decisions(several):
    cfg = EnvCfg(num_envs=1, max_episode_steps=5, **{several: 3})
    env = make_env(cfg, grouped=True, env=partial(Counting, 99), reward_parts=("double",))
    action = torch.zeros(1, *env.action_space.shape)
    assert env.max_episode_steps == 2
    env.reset(seed=0)
    assert env.step(action).info["reward_parts"].tolist() == [[12.0]]
    step = env.step(action)
    assert (step.truncated.tolist(), step.info["executed"].tolist()) == ([True], [2])
    assert env.step(action).info["executed"].tolist() == [0]  # paused
    env.close()


@pytest.mark.parametrize("several", ["action_chunk", "action_repeat"])
@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_control_policies_train_on_decisions_of_several_steps(algorithm, several, tmp_path):
    settings = {"run_dir": tmp_path / "run", "logging": {"progress": "none"}, "evaluation": {"episodes": 2}}
    run = gw.train(EnvCfg(id="Pendulum-v1", num_envs=4, **{several: 5}), algorithm, total_steps=1600, **settings)
    assert type(run.policy) is (ChunkActorCritic if several == "action_chunk" else ActorCritic)
    assert run.metrics()[-1]["rollout/length_mean"] == 40  # decisions of 5 steps each
    assert run.metrics()[-1]["env_steps"] % 5 == 0
    assert torch.tensor([m["train/policy_loss"] for m in run.metrics()]).isfinite().all()
    again = gw.Run.load(run.path)
    obs = np.array([1.0, 0.0, 0.0], np.float32)
    np.testing.assert_array_equal(again.policy.predict(obs), run.policy.predict(obs))
    assert run.policy.predict(obs).shape == ((5, 1) if several == "action_chunk" else (1,))


def test_an_action_may_be_a_single_number():
    class Scalar(Counting):
        action_space = gym.spaces.Box(-1, 1, (), np.float32)

    env = make_env(EnvCfg(action_chunk=3, num_envs=5, max_episode_steps=9), env=Scalar, grouped=True)
    policy = ChunkActorCritic(env.observation_space, env.action_space, actor_only=True)
    buffer = RolloutBuffer(
        5, 9, obs_spec=env.obs_spec, action_spec=policy.action_spec, num_units=3, value=False, chunked=True
    )
    rollout = GroupCollector(env, policy, group_size=5).collect(9, buffer.start_rollout())
    buffer.add(rollout)
    assert rollout["action"].shape == (5, rollout.shape[1], 3)
    env.close()
