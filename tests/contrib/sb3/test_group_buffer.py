"""Which episode each environment works on, and the rollouts made of whole groups."""

import numpy as np
import pytest
import torch

from groupwise.contrib.sb3 import GroupBuffer, Tick
from groupwise.errors import DataError

CPU = torch.device("cpu")


def opened(num_envs: int = 2, group_size: int = 2, first_group: int = 0, starts="shared", seed: int = 0) -> GroupBuffer:
    episodes = GroupBuffer(num_envs, group_size, seed=seed, first_group=first_group, starts=starts)
    episodes.begin()
    return episodes


def tick(time: int, terminated: tuple[int, ...] = (), truncated: tuple[int, ...] = (), num_envs: int = 2) -> Tick:
    """What the environments do at a time; observation, action and so on say which environment and when."""
    number = np.array([10 * time + env for env in range(num_envs)])
    return Tick(
        obs=number[:, None].astype(np.float32),
        action=number + 1000,
        log_prob=-number.astype(np.float32),
        reward=number.astype(np.float32) / 2,
        terminated=np.isin(np.arange(num_envs), terminated),
        truncated=np.isin(np.arange(num_envs), truncated),
    )


def seconds(rollout, key: str) -> list:
    assert rollout.shape[0] == 1
    return rollout[key][0, :-1].tolist()


def test_rollout_of_two_groups_whose_members_take_turns():
    # environment 0: episodes 0 (ticks 0-1), 2 (ticks 2-4); environment 1: episodes 1 (tick 0), 3 (ticks 1-3), 4 (tick 4 on)
    episodes = opened()
    assert episodes.record(tick(0, terminated=(1,))) == [1]
    assert episodes.record(tick(1, truncated=(0,))) == [0]
    assert episodes.record(tick(2)) == []
    assert not episodes.all_finished(below=2)
    assert episodes.record(tick(3, terminated=(1,))) == [1]
    assert episodes.record(tick(4, terminated=(0,))) == [0]
    assert episodes.all_finished(below=2)
    assert not episodes.all_finished(below=3)

    rollout = episodes.take_whole_groups(CPU)
    # by group; within a group, who began first (episode 3 before episode 2)
    assert rollout["obs"][0, :-1, 0].tolist() == [0, 10, 1, 11, 21, 31, 20, 30, 40]
    assert seconds(rollout, "group_id") == [0, 0, 0, 1, 1, 1, 1, 1, 1]
    assert seconds(rollout, "episode_id") == [0, 0, 1, 2, 2, 2, 3, 3, 3]
    assert seconds(rollout, "step") == [0, 1, 0, 0, 1, 2, 0, 1, 2]


def test_labels_worked_out_by_hand():
    episodes = opened()
    episodes.record(tick(0, terminated=(1,)))
    episodes.record(tick(1, truncated=(0,)))
    rollout = episodes.take_whole_groups(CPU)
    # group 0: episode 0 in environment 0 at ticks 0 and 1, episode 1 in environment 1 at tick 0
    assert rollout.shape == (1, 4)
    assert rollout["obs"][0, :-1].tolist() == [[0], [10], [1]]
    expected = {
        "action": [1000, 1010, 1001],
        "sample_log_prob": [0, -10, -1],
        "reward": [0, 5, 0.5],
        "terminated": [False, False, True],
        "truncated": [False, True, False],
        "group_id": [0, 0, 0],
        "episode_id": [0, 0, 1],
        "step": [0, 1, 0],
        "valid": [True] * 3,
        "loss_mask": [True] * 3,
    }
    assert {key: seconds(rollout, key) for key in expected} == expected
    padding = {"group_id": -1, "episode_id": -1, "valid": False, "loss_mask": False}
    assert {key: rollout[key][0, -1].item() for key in padding} == padding


def test_what_was_begun_is_carried_over_whole():
    episodes = opened()
    episodes.record(tick(0, terminated=(1,)))  # episode 3 begins at tick 1
    episodes.record(tick(1, terminated=(0,)))  # episode 2 begins at tick 2
    episodes.take_whole_groups(CPU)
    assert episodes.take_whole_groups(CPU) is None
    episodes.record(tick(2, terminated=(0,)))
    episodes.record(tick(3, terminated=(1,)))
    rollout = episodes.take_whole_groups(CPU)
    assert sorted(rollout["obs"][0, :-1, 0].tolist()) == [11, 20, 21, 31]
    steps = dict(zip(rollout["obs"][0, :-1, 0].tolist(), seconds(rollout, "step"), strict=True))
    assert steps == {20: 0, 11: 0, 21: 1, 31: 2}
    assert set(seconds(rollout, "group_id")) == {0}  # dense within the rollout, whatever its number


def test_starts_are_shared_within_a_group_only_and_noise_never():
    starts = [opened(num_envs=4).queued(env) for env in range(4)]
    assert [start.episode for start in starts] == [4, 5, 6, 7]
    assert starts[0].start_seed == starts[1].start_seed != starts[2].start_seed == starts[3].start_seed
    assert len({start.noise_seed for start in starts}) == 4
    own = opened(num_envs=4, starts="own")
    assert len({own.queued(env).start_seed for env in range(4)}) == 4
    assert opened(seed=1).queued(0) == opened(seed=1).queued(0) != opened(seed=2).queued(0)


def test_groups_are_numbered_on():
    episodes = opened(num_envs=3, group_size=2)
    assert episodes.num_opened == 2  # episodes 0, 1, 2 are running
    assert episodes.next_group == 3  # 3, 4, 5 are queued
    further = opened(num_envs=3, group_size=2, first_group=episodes.next_group)
    assert further.running(0) == (6, 0)
    assert opened(num_envs=2, group_size=3).next_group == 2  # of group 1, episode 3 was handed out


@pytest.mark.parametrize(
    ("field", "name", "value"), [("reward", "reward", np.nan), ("log_prob", "log-probability", np.inf)]
)
def test_numbers_that_are_not_finite_are_named(field: str, name: str, value: float):
    with pytest.raises(DataError, match=f"the {name} of environment 1 is {value}, expected a finite number; fix"):
        opened().record(tick(0)._replace(**{field: np.array([0.0, value], np.float32)}))


def test_observations_that_are_dictionaries():
    episodes = opened(num_envs=1, group_size=2)
    for time in range(2):
        one = tick(time, terminated=(0,), num_envs=1)
        episodes.record(one._replace(obs={"far": one.obs, "near": one.obs + 0.5}))
    obs = episodes.take_whole_groups(CPU)["obs"]
    assert obs["far"][0, :-1, 0].tolist() == [0, 10]
    assert obs["near"][0, :-1, 0].tolist() == [0.5, 10.5]
