import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from scripted_envs import FakePolicy, ScriptedEnv, WalkEnv, buffer_for, check, scripted

from groupwise.collectors.vector import Episode, RolloutWriter, VectorCollector, label_episodes
from groupwise.config.run import EnvCfg
from groupwise.data.rollout import RolloutBuffer, TensorSpec
from groupwise.envs.make import make_env
from groupwise.errors import EnvError
from groupwise.policies.actor_critic import ActorCritic
from groupwise.policies.base import Action

T, F = True, False
# row 0 is cut after 2 steps, then dies after 3; row 1 dies after 4; then both go on for long
SCRIPTS = ([(2, "truncated"), (3, "terminated"), (9, "terminated")], [(4, "terminated"), (9, "terminated")])


def windows(policy, autoreset, *lengths, scripts=SCRIPTS):
    env = scripted(autoreset, *scripts)
    collector = VectorCollector(env, policy)
    rollouts = []
    for length in lengths:
        buffer = buffer_for(env, policy, length)
        rollouts.append(collector.collect(length, buffer.start_rollout()))
        buffer.add(rollouts[-1])
    return collector, rollouts


@pytest.mark.parametrize("autoreset", ["disabled", "same_step"])
def test_window_by_hand_when_the_next_slot_is_the_next_start(autoreset):
    _, (first, second) = windows(FakePolicy(), autoreset, 5, 2)
    check(
        first,
        obs=[[0, 1, 10, 11, 12, 20], [100, 101, 102, 103, 110, 111]],
        reward=[[1, 2, 1, 2, 3, 0], [1, 2, 3, 4, 1, 0]],
        terminated=[[F, F, F, F, T, F], [F, F, F, T, F, F]],
        truncated=[[F, T, F, F, F, F], [F, F, F, F, F, F]],
        valid=[[T, T, T, T, T, F], [T, T, T, T, T, F]],
        loss_mask=[[T, T, T, T, T, F], [T, T, T, T, T, F]],
        episode_id=[[0, 0, 1, 1, 1, -1], [2, 2, 2, 2, 3, -1]],
        group_id=[[0, 0, 1, 1, 1, -1], [2, 2, 2, 2, 3, -1]],
        step=[[0, 1, 0, 1, 2, 0], [0, 1, 2, 3, 0, 0]],
        value=[[0, 1, 10, 11, 12, 20], [100, 101, 102, 103, 110, 111]],
        # the cut after slot 1 is worth V(2), the observation that nobody acted on; an end by death is worth 0
        next_value=[[1, 2, 11, 12, 0, 0], [101, 102, 103, 0, 111, 0]],
    )
    check(
        second,
        obs=[[20, 21, 22], [111, 112, 113]],
        episode_id=[[0, 0, -1], [1, 1, -1]],
        step=[[0, 1, 0], [1, 2, 0]],
        next_value=[[21, 22, 0], [112, 113, 0]],
    )


def test_window_by_hand_when_the_next_slot_is_dead():
    _, (first, second) = windows(FakePolicy(), "next_step", 6, 2)
    check(
        first,
        obs=[[0, 1, 2, 10, 11, 12, 13], [100, 101, 102, 103, 104, 110, 111]],
        reward=[[1, 2, 0, 1, 2, 3, 0], [1, 2, 3, 4, 0, 1, 0]],
        terminated=[[F, F, F, F, F, T, F], [F, F, F, T, F, F, F]],
        truncated=[[F, T, F, F, F, F, F], [F, F, F, F, F, F, F]],
        valid=[[T, T, F, T, T, T, F], [T, T, T, T, F, T, F]],
        loss_mask=[[T, T, F, T, T, T, F], [T, T, T, T, F, T, F]],
        episode_id=[[0, 0, -1, 1, 1, 1, -1], [2, 2, 2, 2, -1, 3, -1]],
        group_id=[[0, 0, -1, 1, 1, 1, -1], [2, 2, 2, 2, -1, 3, -1]],
        step=[[0, 1, 0, 0, 1, 2, 0], [0, 1, 2, 3, 0, 0, 0]],
        value=[[0, 1, 2, 10, 11, 12, 13], [100, 101, 102, 103, 104, 110, 111]],
        next_value=[[1, 2, 10, 11, 12, 0, 0], [101, 102, 103, 0, 110, 111, 0]],
    )
    check(  # row 0 ended on the first window's last step, so this one begins with a dead slot
        second,
        obs=[[13, 20, 21], [111, 112, 113]],
        valid=[[F, T, F], [T, T, F]],
        episode_id=[[-1, 0, -1], [1, 1, -1]],
        step=[[0, 0, 0], [1, 2, 0]],
    )


@pytest.mark.parametrize("autoreset", ["disabled", "same_step", "next_step"])
def test_episodes_are_counted_in_the_order_in_which_they_end(autoreset):
    collector, _ = windows(FakePolicy(), autoreset, 6)
    # returns: 1+2; 1+2+3+4; 1+2+3
    assert collector.finished == [Episode(3.0, 2, False), Episode(10.0, 4, True), Episode(6.0, 3, True)]
    assert collector.last_steps == 12
    dead = {"disabled": 0, "same_step": 0, "next_step": 2}[autoreset]
    assert collector.metrics() == {
        "rollout/env_steps": 12.0,
        "rollout/episodes": 3.0,
        "rollout/return_mean": pytest.approx(19 / 3),
        "rollout/length_mean": 3.0,
        "rollout/idle_fraction": pytest.approx(dead / 12),
    }


@pytest.mark.parametrize("autoreset", ["disabled", "same_step", "next_step"])
def test_an_episode_that_spans_windows_counts_whole(autoreset):
    env, policy = scripted(autoreset, [(7, "terminated")]), FakePolicy()
    collector = VectorCollector(env, policy)
    buffer = buffer_for(env, policy, 3)
    for _ in range(3):
        collector.collect(3, buffer.start_rollout())
        counted = list(collector.finished)
    # 1 + 2 + ... + 7 over three windows
    assert counted == [Episode(28.0, 7, True)]


def test_a_window_that_ends_on_a_dead_slot_is_followed_by_a_start():
    scripts = ([(2, "both")],)  # an end by death and limit at once is a death
    collector, (first, second) = windows(FakePolicy(), "next_step", 3, 2, scripts=scripts)
    check(first, next_value=[[1, 0, 10, 0]])
    check(second, obs=[[10, 11, 12]], step=[[0, 1, 0]], valid=[[T, T, F]])
    assert collector.finished == [Episode(3.0, 2, True)]


def test_all_final_observations_are_valued_in_one_call():
    policy = FakePolicy()
    windows(policy, "same_step", 8, scripts=([(1, "truncated")], [(2, "truncated")]))
    assert policy.value_calls == 1


def test_the_env_gets_its_own_action_and_the_rollout_the_policys():
    inner = ScriptedEnv(0, [(100, "terminated")])
    env = make_env(EnvCfg(num_envs=1, vectorization="sync"), env=lambda: inner, verify=False)
    policy = FakePolicy(shift=5)
    rollout = VectorCollector(env, policy).collect(20, buffer_for(env, policy, 20).start_rollout())
    chosen = rollout["action"][0, :-1].tolist()
    assert set(chosen) == {0, 1}
    assert inner.actions == [action + 5 for action in chosen]
    assert rollout["sample_log_prob"][0, :-1].eq(-0.75).all()


def collect(env, policy, buffer, *, iterations, first=0, state=None):
    collector = VectorCollector(env, policy, seed=7)
    collector.iteration = first
    if state is not None:
        collector.load_state_dict(state)
    for _ in range(iterations):
        rollout = collector.collect(6, buffer.start_rollout())
    return rollout.clone(), collector.state_dict()


@pytest.mark.parametrize("autoreset", ["disabled", "same_step", "next_step"])
def test_same_seed_same_bits_and_a_fresh_collector_goes_on_where_another_was_saved(autoreset):
    policy = FakePolicy()
    mode = AutoresetMode[autoreset.upper()]

    def run(**kwargs):
        env = make_env(EnvCfg(), env=SyncVectorEnv([WalkEnv] * 3, copy=False, autoreset_mode=mode))
        return collect(env, policy, buffer_for(env, policy, 6), **kwargs)

    whole, state = run(iterations=2)
    assert (whole == run(iterations=2)[0]).all()
    assert (run(iterations=3)[0] == run(iterations=1, first=2, state=state)[0]).all()
    (first, _), (second, _) = run(iterations=1), run(iterations=1, first=1)
    assert not torch.equal(first["action"], second["action"])
    assert not torch.equal(first["obs"][:, 0], second["obs"][:, 0])


def test_a_window_shorter_or_longer_than_the_storage():
    env, policy = scripted("disabled", *SCRIPTS), FakePolicy()
    collector = VectorCollector(env, policy)
    assert collector.collect(2, buffer_for(env, policy, 5).start_rollout()).shape == (2, 3)
    assert collector.collect(8, buffer_for(env, policy, 5).start_rollout()).shape == (2, 9)


def test_a_window_must_hold_more_than_a_reset():
    env = make_env(EnvCfg(), env=SyncVectorEnv([lambda: gymnasium.make("CartPole-v1")]))
    policy = ActorCritic(env.observation_space, env.action_space)
    buffer = RolloutBuffer(1, 1, obs_spec=env.obs_spec, action_spec=policy.action_spec, value=True)
    with pytest.raises(EnvError, match="at least 2"):
        VectorCollector(env, policy).collect(1, rollout=buffer.start_rollout())


@pytest.mark.parametrize("seed", range(10))
def test_labels_are_those_of_a_walk_from_slot_to_slot(seed):
    random = np.random.default_rng(seed)
    rows, steps = random.integers(1, 9, 2)
    done, dead = random.uniform(size=(2, rows, steps)) < 0.3
    age = np.where(dead[:, 0], 0, random.integers(0, 5, rows))
    episode_id, step = label_episodes(done, dead, age)
    number = -1
    for row in range(rows):
        running, count = False, age[row]
        for slot in range(steps):
            if dead[row, slot]:
                assert (episode_id[row, slot], step[row, slot]) == (-1, 0)
                running, count = False, 0
                continue
            if not running:
                number, count = number + 1, age[row] if slot == 0 else 0
            running = not done[row, slot]
            assert (episode_id[row, slot], step[row, slot]) == (number, count)
            count += 1


def test_numbers_of_half_precision_are_written_as_they_are():
    buffer = RolloutBuffer(2, 1, obs_spec=TensorSpec((1,), torch.float32), action_spec=TensorSpec((), torch.int64))
    rollout = buffer.start_rollout()
    writer = RolloutWriter(rollout, FakePolicy(True))
    log_prob = torch.tensor([-0.5, -1.5], dtype=torch.bfloat16, requires_grad=True)
    writer.act(0, Action(torch.tensor([1, 0]), log_prob))
    assert rollout["sample_log_prob"][:, 0].tolist() == [-0.5, -1.5]
    assert rollout["action"][:, 0].tolist() == [1, 0]


def test_truncated_rows_that_were_reset_need_their_final_observations():
    policy, env = FakePolicy(), scripted("same_step", *SCRIPTS)
    step = env.step
    env.step = lambda action: step(action)._replace(final_obs=None)
    with pytest.raises(EnvError, match="gave no final_obs"):
        VectorCollector(env, policy).collect(5, buffer_for(env, policy, 5).start_rollout())
