import numpy as np
import pytest
import torch

from groupwise.collectors.groups import GroupCollector
from groupwise.collectors.vector import VectorCollector
from groupwise.config.algorithm import GRPOCfg
from groupwise.config.env import EnvCfg
from groupwise.config.policy import PolicyCfg
from groupwise.contrib.envpool import EnvPoolGroupEnv, EnvPoolSource, EnvPoolVectorEnv
from groupwise.data.rollout import RolloutBuffer
from groupwise.envs.make import make_env
from groupwise.envs.starts import verify_group_start
from groupwise.errors import EnvError, UnknownNameError
from groupwise.policies.actor_critic import ActorCritic
from groupwise.run import resume, train

pytest.importorskip("envpool")

N = 8
ALL = np.ones(N, np.bool_)
STARTS = np.repeat(np.array([3, 2**31 - 1], np.int64), 4)
NOISE = np.arange(N, dtype=np.int64)
TASKS = [
    "CartPole-v1",
    "Pendulum-v1",
    "Acrobot-v1",
    "LunarLander-v3",
    "FrozenLake-v1",
    "MiniGrid-Dynamic-Obstacles-6x6-v0",
]


def make(task="CartPole-v1", num_envs=N, *, block_size=1, **kwargs):
    return EnvPoolGroupEnv(EnvPoolSource(task, kwargs), num_envs, block_size=block_size)


def mask(*rows):
    return np.isin(np.arange(N), rows)


def same_actions(env, count, seed=0):
    env.action_space.seed(seed)
    return [torch.from_numpy(np.stack([np.asarray(env.action_space.sample())] * N)) for _ in range(count)]


def left_or_right(seed=0, count=500):
    return torch.randint(0, 2, (count, N), generator=torch.Generator().manual_seed(seed))


def leaves(obs):
    return [obs] if isinstance(obs, torch.Tensor) else list(obs.values(True, True))


@pytest.mark.parametrize("task", TASKS)
def test_members_share_start_and_noise(task):
    report = verify_group_start(make(task))
    assert (report.start_mode, report.noise_varies) == ("seed", False)
    assert report.start_varies == (task != "FrozenLake-v1")


@pytest.mark.parametrize("task", ["CartPole-v1", "Pendulum-v1", "MiniGrid-Dynamic-Obstacles-6x6-v0"])
def test_members_agree_bit_for_bit_in_group_after_group(task):
    env = make(task)
    for group in range(4):
        first = env.start(ALL, STARTS + [-group] * N, NOISE)
        for obs in [first, *(env.step(action).obs for action in same_actions(env, 15, group))]:
            for leaf in leaves(obs):
                assert torch.equal(leaf[:3], leaf[1:4])
                assert torch.equal(leaf[4:7], leaf[5:])
        if group == 0:
            kept = [leaf.clone() for leaf in leaves(first)]
    again = env.start(ALL, STARTS, NOISE)  # whatever was played in between
    assert all(torch.equal(one, other) for one, other in zip(kept, leaves(again), strict=True))


def test_a_start_depends_on_its_seed_and_not_on_row_company_or_time():
    env = make()
    together = env.start(ALL, STARTS, NOISE)
    for action in left_or_right(count=5):
        env.step(action)
    alone = env.start(mask(6), np.full(N, 3), NOISE)
    assert torch.equal(alone[6], together[0])
    assert torch.equal(make(num_envs=1).start(mask(0)[:1], STARTS[:1], NOISE[:1])[0], together[0])


def test_rows_started_at_different_times_are_stepped_together():
    split, whole = make(), make()
    whole.start(ALL, NOISE, NOISE)
    split.start(mask(0, 5, 6), NOISE, NOISE)
    split.start(mask(1, 2, 3, 4, 7), NOISE, NOISE)
    split.start(mask(5), NOISE, NOISE)  # a row leaves its pool
    for action in left_or_right(count=30):
        one, other = split.step(action), whole.step(action)
        for left, right in zip(one[:4], other[:4], strict=True):
            assert torch.equal(left, right)


def test_finished_rows_take_no_step_until_started_again():
    env = make()
    before = env.start(ALL, STARTS, NOISE)
    push = torch.tensor([1, 0, 1, 0, 1, 0, 1, 0])
    over = torch.zeros(N, dtype=torch.bool)
    steps = torch.zeros(N)
    for _ in range(40):
        step = env.step(push)
        steps += step.reward  # 1 a step, also for the one that ended
        assert torch.equal(step.obs[over], before[over])
        assert not (step.terminated | step.truncated)[over].any()
        over |= step.terminated
        before = step.obs
    assert over.all()
    # a cart that is pushed one way falls after 8 to 10 steps; EnvPool alone would have begun anew and taken 36 or more
    assert 8 <= float(steps.min()) <= float(steps.max()) <= 10
    assert (before[:, 2].abs() > 0.2).all()  # final observations, not first ones
    obs = env.start(mask(4, 5, 6, 7), STARTS, NOISE)
    assert env.step(push).reward.tolist() == [0.0] * 4 + [1.0] * 4
    assert (obs[4:].abs() < 0.05).all()


def test_limit_truncates_with_the_final_observation():
    env = make(max_episode_steps=3)
    assert env.max_episode_steps == 3
    first = env.start(ALL, STARTS, NOISE)
    for _ in range(3):
        step = env.step(torch.ones(N, dtype=torch.int64))
    assert step.truncated.all()
    assert not step.terminated.any()
    assert (step.obs[:, 1] > first[:, 1] + 0.5).all()  # three pushes of 0.195 each
    paused = env.step(torch.ones(N, dtype=torch.int64))
    assert torch.equal(paused.obs, step.obs)
    assert not paused.truncated.any()


def test_rows_can_be_held_from_outside():
    env = make()
    before = env.start(ALL, STARTS, NOISE).clone()
    env.pause(mask(0, 7))
    step = env.step(torch.ones(N, dtype=torch.int64))
    assert torch.equal(step.obs[[0, 7]], before[[0, 7]])
    assert step.reward.tolist() == [0.0] + [1.0] * 6 + [0.0]


def test_reset_repeats_with_its_seed_and_single_rows_go_on():
    one, other = make(), make()
    first = one.reset(seed=4)
    assert torch.equal(first, other.reset(seed=4))
    assert len({tuple(row) for row in first.tolist()}) == N
    moved = one.step(torch.ones(N, dtype=torch.int64)).obs
    again = one.reset(mask=mask(2, 3))
    untouched = ~torch.from_numpy(mask(2, 3))
    assert torch.equal(again[untouched], moved[untouched])
    assert (again[2:4] != first[2:4]).all()
    assert (again[2:4].abs() <= 0.05).all()
    other.step(torch.ones(N, dtype=torch.int64))
    assert torch.equal(other.reset(mask=mask(2, 3)), again)
    assert not torch.equal(one.reset(), first)


def test_reset_rows_run_again():
    env = make()
    env.reset(seed=4)
    env.pause(mask(2, 7))
    env.reset(mask=mask(2))
    assert env.step(torch.ones(N, dtype=torch.int64)).reward.tolist() == [1.0] * 7 + [0.0]
    env.reset()
    assert env.step(torch.ones(N, dtype=torch.int64)).reward.tolist() == [1.0] * 8


def test_observations_kept_by_the_caller_do_not_change():
    env = make()
    first = env.start(ALL, STARTS, NOISE)
    second = env.step(torch.ones(N, dtype=torch.int64)).obs
    kept = first.clone(), second.clone()
    env.start(mask(1), STARTS, NOISE)
    env.step(torch.ones(N, dtype=torch.int64))
    assert torch.equal(first, kept[0])
    assert torch.equal(second, kept[1])


def test_pools_are_closed_when_their_last_row_leaves():
    env = make(block_size=4)
    for seed in range(6):
        env.start(mask(0, 1, 2, 3) if seed % 2 else mask(4, 5, 6, 7), np.full(N, seed), NOISE)
        assert len(env._pools) <= 2
    env.close()
    assert not env._pools


def test_a_run_is_told_of_shared_noise():
    assert "share all randomness" in make().notes[0]


@pytest.mark.parametrize("task", ["CartPole-v1", "Pendulum-v1"])
def test_plain_vector_resets_in_a_step_of_its_own(task):
    env = EnvPoolVectorEnv(EnvPoolSource(task, {}, max_episode_steps=4), 3)
    assert env.autoreset == "next_step"
    action = torch.from_numpy(np.stack([env.action_space.sample()] * 3))
    first = env.reset(seed=1)
    assert torch.equal(env.reset(seed=1), first)
    for _ in range(4):
        step = env.step(action)
    assert step.truncated.all()
    assert step.reward.ne(0).all()
    final = step.obs.clone()
    dead = env.step(action)
    assert dead.reward.eq(0).all()
    assert not (dead.terminated | dead.truncated).any()
    assert not torch.isclose(dead.obs, final).all(dim=1).any()  # a first observation
    # the action of the dead step was ignored
    other = EnvPoolVectorEnv(EnvPoolSource(task, {}, max_episode_steps=4), 3)
    other.reset(seed=1)
    for _ in range(4):
        other.step(action)
    opposite = 1 - action if task == "CartPole-v1" else -action
    assert torch.equal(other.step(opposite).obs, dead.obs)
    assert not torch.equal(env.reset(), first)
    env.close()
    with pytest.raises(EnvError, match="before anything started"):
        env.step(action)


def test_impossible_requests_are_refused():
    with pytest.raises(UnknownNameError, match="CartPole-v1"):
        EnvPoolSource("CartPole-v11", {})
    with pytest.raises(EnvError, match="cannot make CartPole-v1"):
        EnvPoolSource("CartPole-v1", {"wings": 2})
    with pytest.raises(EnvError, match="batch_size, seed, which groupwise sets"):
        EnvPoolSource("CartPole-v1", {"seed": 3, "batch_size": 2})
    with pytest.raises(EnvError, match="fix: num_envs = 6"):
        make(block_size=3)
    with pytest.raises(EnvError, match="single rows cannot be reset"):
        EnvPoolVectorEnv(EnvPoolSource("CartPole-v1", {}), 3).reset(mask=np.ones(3, np.bool_))
    with pytest.raises(EnvError, match="before anything started"):
        make().step(torch.zeros(N))


def test_atari_starts_are_shared():
    env = make("Pong-v5", 2)  # the package brings its roms
    one = env.start(np.ones(2, np.bool_), np.array([5, 5]), np.array([5, 5]))
    assert one.dtype == torch.uint8
    assert torch.equal(one[0], one[1])
    other = env.start(np.ones(2, np.bool_), np.array([5, 6]), np.array([5, 6]))
    assert torch.equal(other[0], one[0])
    env.close()


# --------------------------------------------------------------------------------------------- in training


def collector_of(env, group_size=4):
    torch.manual_seed(0)
    policy = ActorCritic(env.observation_space, env.action_space, PolicyCfg(), actor_only=True, gamma=1.0)
    return GroupCollector(env, policy, group_size=group_size, seed=0)


def collect(collector, num_steps=32):
    env, policy = collector.env, collector.policy
    buffer = RolloutBuffer(env.num_envs, num_steps, obs_spec=env.obs_spec, action_spec=policy.action_spec, value=False)
    rollout = collector.collect(num_steps, rollout=buffer.start_rollout())
    buffer.add(rollout)
    return rollout


@pytest.mark.parametrize("block_size", [1, 4])
def test_whole_groups_at_shared_starts_iteration_after_iteration(block_size):
    collector = collector_of(make(block_size=block_size))
    for _ in range(2):
        rollout = collect(collector)
        first = rollout["valid"] & (rollout["step"] == 0)
        starts = {}
        for group, obs in zip(rollout["group_id"][first].tolist(), rollout["obs"][first], strict=True):
            starts.setdefault(group, []).append(tuple(obs.tolist()))
        assert len(starts) >= 3
        assert all(len(members) == 4 and len(set(members)) == 1 for members in starts.values())
        assert len({members[0] for members in starts.values()}) == len(starts)
        ends = (rollout["terminated"] | rollout["truncated"])[rollout["valid"]]
        assert int(ends.sum()) == 4 * len(starts)


def test_a_resumed_collector_goes_on_bit_for_bit():
    first = collector_of(make(block_size=4))
    collect(first)
    resumed = collector_of(make(block_size=4))
    resumed.iteration = 1
    one, other = collect(first), collect(resumed)
    assert one.shape == other.shape
    for key in ("obs", "action", "reward", "terminated", "group_id"):
        assert torch.equal(one[key], other[key]), key


def test_windows_for_ppo_mark_the_dead_steps():
    env = make_env(EnvCfg(vectorization="envpool", num_envs=4))
    torch.manual_seed(0)
    policy = ActorCritic(env.observation_space, env.action_space, PolicyCfg(), actor_only=False, gamma=0.99)
    buffer = RolloutBuffer(4, 60, obs_spec=env.obs_spec, action_spec=policy.action_spec, value=True)
    rollout = VectorCollector(env, policy, seed=0).collect(60, rollout=buffer.start_rollout())[:, :-1]
    over = rollout["terminated"] | rollout["truncated"]
    assert over.any()
    dead = ~rollout["valid"]
    assert torch.equal(dead[:, 1:], over[:, :-1])
    assert rollout["reward"][dead].eq(0).all()
    assert rollout["reward"][~dead].eq(1).all()
    env.close()


def test_settings_reach_envpool():
    cfg = EnvCfg(vectorization="envpool", num_envs=8, max_episode_steps=12)
    env = make_env(cfg, grouped=True, block_size=4)
    assert (type(env), env.block_size, env.max_episode_steps) == (EnvPoolGroupEnv, 4, 12)
    assert type(make_env(cfg)) is EnvPoolVectorEnv
    with pytest.raises(EnvError, match="cannot be vectorised by 'envpool'"):
        make_env(cfg, env=lambda: None)


def test_trains_evaluates_and_resumes(tmp_path):
    env = EnvCfg(id="CartPole-v1", vectorization="envpool", num_envs=8)
    cfg = GRPOCfg(group_size=4, num_steps=32)
    settings = {"evaluation": {"episodes": 4}, "logging": {"progress": "none"}}
    run = train(env, cfg, total_steps=300, run_dir=tmp_path / "run", **settings)
    assert run.summary["start_mode"] == "seed, verified"
    assert run.summary["return_mean"] > 0
    further = run.summary["env_steps"] + 1
    assert resume(run.path, total_steps=further).summary["env_steps"] >= further
