"""Groups that begin mid-episode, and greedy attempts."""

import gc
import weakref
from collections import Counter

import numpy as np
import pytest
import torch

from groupwise.collectors.branching import Reservoir
from groupwise.collectors.groups import GroupCollector
from groupwise.config.algorithm import BranchCfg, CollectionCfg
from groupwise.errors import EnvError
from groupwise.policies.base import Action, Evaluation

T, F = True, False


def numbers(rollout, key):
    return rollout[key][:, :-1].squeeze(-1).tolist()


def branch_points(env):
    """Steps that the captured states had taken, one for each branch group of two."""
    steps = [snapshot[0] for _, snapshots, _ in env.restore_calls for snapshot in snapshots]
    assert steps[::2] == steps[1::2]
    return steps[::2]


def test_each_state_is_equally_likely_to_be_kept():
    counts = Counter()
    for seed in range(4000):
        reservoir = Reservoir(2, seed)
        for state in range(10):
            if reservoir.next == state:
                reservoir.add(f"state {state}")
        assert all(f"state {start.step}" == start.snapshot for start in reservoir.kept)
        counts.update(start.step for start in reservoir.kept)
    # 4000 * 2 / 10 = 800 each; binomial deviation 25
    assert all(abs(counts[state] - 800) < 125 for state in range(10))


def test_few_states_are_captured():
    captured = []
    for seed in range(200):
        reservoir = Reservoir(2, seed)
        captured.append(0)
        for state in range(1000):
            if reservoir.next == state:
                reservoir.add(None)
                captured[-1] += 1
    assert np.mean(captured) == pytest.approx(2 * (1 + np.log(1000 / 2)), rel=0.1)


def test_a_branch_by_hand(collect, scripted_group):
    # Two rows, groups of two, one branch point, budget 10. The single state of episodes of one step is their start.
    # Slot 0: attempts 0 and 1 end. One branch group (2 and 3) comes before a new group (4 and 5) begins.
    env = scripted_group(2, [1])
    collector, rollout = collect(env, 3, group_size=2, collection=CollectionCfg(branching=BranchCfg(points=1)))
    assert numbers(rollout, "obs") == [[0, 20, 40], [10, 30, 50]]
    assert numbers(rollout, "group_id") == [[0, 1, 2]] * 2
    assert numbers(rollout, "loss_mask") == [[T] * 3] * 2
    assert len(env.restore_calls) == 1
    rows, snapshots, noise = env.restore_calls[0]
    assert (rows, snapshots) == ([0, 1], [(0, 0)] * 2) or snapshots == [(0, 1)] * 2
    assert len(set(noise)) == 2
    assert len(collector.finished) == 4, "branches are no whole episodes"
    assert collector.metrics()["rollout/branch_groups"] == 1.0
    assert collector.metrics()["rollout/branch_steps"] == 2 / 6
    assert collector.metrics()["rollout/wasted_steps"] == 0.0


def test_branches_go_on_where_the_stem_was_and_count_from_there(collect, scripted_group):
    env = scripted_group(4, [6])
    collector, rollout = collect(
        env, 12, slots=64, group_size=2, collection=CollectionCfg(branching=BranchCfg(points=2, horizon=3))
    )
    starts = branch_points(env)
    assert len(starts) > 3
    restored = {int(k) for rows, _, _ in env.restore_calls for k in rows}
    assert restored
    obs, step, group = (rollout[key][:, :-1].squeeze(-1) for key in ("obs", "step", "group_id"))
    first = (step == 0) & rollout["valid"][:, :-1]
    depth = (obs[first] % 10).tolist()
    by_group = {}
    for g, d in zip(group[first].tolist(), depth, strict=True):
        by_group.setdefault(g, set()).add(d)
    assert all(len(depths) == 1 for depths in by_group.values()), "siblings begin in the same state"
    assert Counter(d for (d,) in by_group.values() if d) == Counter(s for s in starts if s)
    # a branch at step s of a stem of 6 runs min(3, 6 - s) steps
    for g, (d,) in by_group.items():
        length = int((group == g).sum()) / 2
        assert length == (min(3, 6 - d) if d else 6) or d == 0
    assert collector.last_steps == env.taken
    assert set(env.restore_calls[0][2]).isdisjoint(env.start_calls[0][2])


def test_a_branch_ends_where_the_window_of_its_stem_ends(collect, scripted_group):
    env = scripted_group(2, [9])
    _, rollout = collect(
        env, 30, slots=64, group_size=2, attempt_steps=4, collection=CollectionCfg(branching=BranchCfg(points=1))
    )
    last = rollout["obs"][:, :-1, 0][(rollout["truncated"] & rollout["valid"])[:, :-1]] % 10
    assert any(branch_points(env))
    assert (last == 3).all()


def test_only_the_first_steps_of_a_branch_count(collect, scripted_group):
    env = scripted_group(2, [6])
    _, rollout = collect(
        env, 20, slots=64, group_size=2, collection=CollectionCfg(branching=BranchCfg(points=1, trained_steps=2))
    )
    valid, counts, step = (rollout[key][:, :-1] for key in ("valid", "loss_mask", "step"))
    branch = torch.zeros_like(valid)
    for g, depth in _first_depth(rollout).items():
        branch |= (rollout["group_id"][:, :-1] == g) & (depth > 0)
    assert branch.any()
    assert torch.equal(counts[branch], step[branch] < 2)
    assert (valid & ~counts).sum() > 0
    assert counts[valid & ~branch & (step < 2)].all()


def _first_depth(rollout):
    first = (rollout["step"] == 0) & rollout["valid"]
    depth = rollout["obs"][..., 0][first] % 10
    return dict(zip(rollout["group_id"][first].tolist(), depth.tolist(), strict=True))


def test_single_stems_are_wasted(collect, scripted_group):
    # Two stems of 2 steps (budget 10: 4 taken), then their branches until 10 are taken.
    env = scripted_group(2, [2])
    collector, rollout = collect(
        env, 5, group_size=2, slots=32, collection=CollectionCfg(branching=BranchCfg(points=1, stem="single"))
    )
    counts = rollout["loss_mask"][:, :-1]
    wasted = collector.metrics()["rollout/wasted_steps"] * collector.last_steps
    stems = len(collector.finished)
    assert wasted == pytest.approx(2 * stems)
    assert counts.sum() == collector.last_steps - 2 * stems > 0
    assert collector.metrics()["rollout/groups"] == collector.metrics()["rollout/branch_groups"] > 0
    assert numbers(rollout, "loss_mask")[0][:2] == [F, F]
    assert numbers(rollout, "group_id")[0][:2] == [0, 0]
    assert numbers(rollout, "group_id")[1][:2] == [1, 1]


def test_branch_points_follow_the_entropy(collect, scripted_group, fake_policy, monkeypatch):
    # the policy hesitates at step 3 only
    def evaluate(self, batch):
        hesitates = (batch["obs"][:, 0] % 10 == 3).float()
        return Evaluation(torch.zeros(len(hesitates)), hesitates)

    monkeypatch.setattr(fake_policy, "evaluate", evaluate)
    env = scripted_group(2, [6])
    collect(
        env,
        60,
        slots=128,
        group_size=2,
        actor_only=True,
        collection=CollectionCfg(branching=BranchCfg(points=2, at="entropy")),
    )
    points = branch_points(env)
    assert 3 in points
    # eight candidates hold all six states; only one has a chance, so each stem gives one branch group
    assert set(points) == {3}


def test_negative_entropies_are_weighed_above_the_least_and_equal_ones_alike(
    collect, scripted_group, fake_policy, monkeypatch
):
    def evaluate(self, batch):
        return Evaluation(torch.zeros(len(batch["obs"])), torch.full((len(batch["obs"]),), -2.0))

    monkeypatch.setattr(fake_policy, "evaluate", evaluate)
    env = scripted_group(2, [4])
    collect(
        env,
        60,
        slots=128,
        group_size=2,
        actor_only=True,
        collection=CollectionCfg(branching=BranchCfg(points=1, at="entropy")),
    )
    assert len(set(branch_points(env))) > 1


def test_branch_points_follow_the_spread_of_returns(collect, scripted_group):
    # One row. Group 0: returns to go at steps 0, 1, 2, 3 are 4, 3, 2, 1 and 2, 1, 0, 0: deviations 1, 1, 1, 0.5.
    # Equal siblings in the other groups give no branch point.
    env = scripted_group(1, [4, 2] + [3] * 60)
    collect(
        env, 30, slots=64, group_size=2, collection=CollectionCfg(branching=BranchCfg(points=1, at="return_spread"))
    )
    assert len(branch_points(env)) == 1


def test_harder_starts_take_the_place_of_the_next_group(collect, scripted_group):
    # Two rows, groups of two. Group 0 differs in its rewards: its best state goes to the pool. Groups 1 and 2 are equal: the
    # first of them is followed by a group from the pool, the pool is empty then.
    env = scripted_group(2, [3], rewards=[1, 2, 1, 1, 1, 1, 1, 1, 1, 1])
    cfg = CollectionCfg(zero_variance="harder")
    collector, rollout = collect(env, 15, slots=64, group_size=2, collection=cfg)
    assert [rows for rows, _, _ in env.restore_calls] == [[0, 1]]
    (start,) = branch_points(env)
    assert start == 0, "the returns to go differ most at the start: 3 against 6"
    groups = collector.metrics()["rollout/groups"]
    assert collector.metrics()["rollout/skipped_groups"] == groups - 1
    assert collector.metrics()["rollout/branch_groups"] == 1.0
    assert rollout["loss_mask"].sum() == 6
    assert collector.metrics()["rollout/skipped_steps"] == 1 - 6 / collector.last_steps


@pytest.mark.parametrize(
    ("branching", "taken", "trained"),
    [({}, 3, 3), ({"trained_steps": 2}, 3, 2), ({"horizon": 2}, 2, 2), ({"horizon": 2, "trained_steps": 1}, 2, 1)],
)
def test_harder_groups_are_cut_and_trained_on_like_other_branches(collect, scripted_group, branching, taken, trained):
    class Unequal(scripted_group):
        def restore(self, mask, snapshots, noise_seed):
            super().restore(mask, snapshots, noise_seed)
            self.script[mask] = [0, 1]
            return self.obs()

    # of 3 steps each, at reward 1 and 2 in group 0 and in the one that begins where it did; equal in all others
    env = Unequal(2, [3], rewards=[1, 2] + 30 * [1])
    cfg = CollectionCfg(zero_variance="harder", branching=BranchCfg(**branching))
    collector, rollout = collect(env, 15, slots=64, group_size=2, collection=cfg)
    assert len(env.restore_calls) == 1
    assert collector.metrics()["rollout/branch_steps"] == 2 * taken / collector.last_steps
    assert rollout["loss_mask"].sum() == 2 * 3 + 2 * trained


def test_of_equally_varied_states_the_latest_is_the_harder_start(collect, scripted_group):
    # Group 0 lasts 2 and 5 steps at reward 1: the returns to go differ by 3 up to step 2, then by less. A stem that is over
    # after 2 steps was never at step 2.
    env = scripted_group(2, [2, 5, 3, 3, 3, 3, 3, 3, 3, 3])
    collect(env, 12, slots=64, group_size=2, collection=CollectionCfg(zero_variance="harder"))
    (start,) = branch_points(env)
    assert start in (1, 2)


@pytest.mark.parametrize(
    "collection", [CollectionCfg(branching=BranchCfg(points=1)), CollectionCfg(zero_variance="harder")]
)
def test_states_that_cannot_be_captured_are_refused(collect, scripted_group, collection):
    env = scripted_group(2, [3])
    env.can_branch = False
    with pytest.raises(EnvError, match=r"states of Scripted cannot be captured.*fix: "):
        collect(env, 3, group_size=2, collection=collection)


def test_single_stems_have_no_siblings_to_fill_a_pool(collect, scripted_group):
    collection = CollectionCfg(zero_variance="harder", branching=BranchCfg(points=1, stem="single"))
    with pytest.raises(EnvError, match=r"'harder'.*fix: collection.branching.stem='group'"):
        collect(scripted_group(2, [3]), 3, group_size=2, collection=collection)


def test_a_greedy_attempt_acts_by_the_mode_and_does_not_count(collect, scripted_group, fake_policy, monkeypatch):
    def act(self, obs, deterministic=False, generator=None):
        rows = len(obs)
        return Action(torch.full((rows,), int(deterministic)), torch.full((rows,), -0.25 * deterministic - 0.5))

    monkeypatch.setattr(fake_policy, "act", act)
    # three rows, group of two and a greedy attempt in row 2; the others are slower
    env = scripted_group(3, [3, 2, 1])
    collector, rollout = collect(env, 1, group_size=2, actor_only=True, greedy_attempts=1)
    assert numbers(rollout, "greedy") == [[F] * 3, [F] * 3, [T, F, F]]
    assert numbers(rollout, "valid") == [[T, T, T], [T, T, F], [T, F, F]]
    assert numbers(rollout, "loss_mask") == [[T, T, T], [T, T, F], [F, F, F]]
    assert numbers(rollout, "group_id") == [[0, 0, 0], [0, 0, -1], [0, -1, -1]]
    assert env.actions[0] == [0, 0, 1]
    assert rollout["sample_log_prob"][:, 0].tolist() == [-0.5, -0.5, -0.75]
    assert len(collector.finished) == 2
    assert collector.metrics()["rollout/wasted_steps"] == 0.0


def test_drawn_actions_are_the_same_with_and_without_greedy_rows(collect, scripted_group):
    with_greedy, without = scripted_group(3, [5]), scripted_group(3, [5])
    collect(with_greedy, 1, group_size=2, greedy_attempts=1)
    collect(without, 1, group_size=3)
    assert [a[:2] for a in with_greedy.actions] == [a[:2] for a in without.actions]


def test_captured_states_are_kept_no_longer_than_needed(collect, scripted_group, monkeypatch):
    alive = weakref.WeakSet()

    class Captured:
        def __init__(self, state):
            self.state = state
            alive.add(self)

    class Env(scripted_group):
        def snapshot(self, rows):
            return [Captured(state) for state in super().snapshot(rows)]

        def restore(self, mask, snapshots, noise_seed):
            return super().restore(mask, [s and s.state for s in snapshots], noise_seed)

    collector, _ = collect(
        Env(2, [6]),
        20,
        slots=64,
        group_size=2,
        collection=CollectionCfg(branching=BranchCfg(points=2, at="return_spread")),
    )
    gc.collect()
    assert collector.metrics()["rollout/branch_groups"] == 0.0
    assert len(alive) == 0
    collector, _ = collect(
        Env(2, [6]), 20, slots=64, group_size=2, collection=CollectionCfg(branching=BranchCfg(points=2))
    )
    gc.collect()
    assert collector.metrics()["rollout/branch_groups"] > 0
    assert len(alive) == 1  # a branch point that found no steps left begins in the next iteration
    collector.restart()
    gc.collect()
    assert len(alive) == 0


def test_branches_that_find_no_steps_left_begin_in_the_next_iteration(buffer_for, fake_policy, scripted_group):
    env, policy = scripted_group(2, [6]), fake_policy(True)
    branching = BranchCfg(points=1, horizon=2)
    collector = GroupCollector(
        env, policy, group_size=2, collection=CollectionCfg(branching=branching), verify_start=False
    )
    buffer = buffer_for(env, policy, 16)
    groups = []
    for _ in range(4):
        collector.collect(2, buffer.start_rollout())  # a stem group takes 12 steps, the budget is 4
        groups.append((collector.metrics()["rollout/groups"], collector.metrics()["rollout/branch_groups"]))
    # the branch group takes 2 x 2 steps or, where the stem was nearly over, fewer, and then a stem group follows
    assert groups[0] == (1.0, 0.0)
    assert groups[1][1] == 1.0
    collector.restart()
    collector.collect(2, buffer.start_rollout())
    assert collector.metrics()["rollout/branch_groups"] == 0.0


class Replaying:
    """Restores by playing the steps again, which costs environment steps."""

    def restore(self, mask, snapshots, noise_seed):
        self.extra_steps += sum(snapshots[row][0] for row in np.flatnonzero(mask))
        return super().restore(mask, snapshots, noise_seed)


def test_replayed_steps_count_and_are_wasted(collect, scripted_group):
    class Env(Replaying, scripted_group):
        extra_steps = 7  # taken before the collector came

    env = Env(2, [6])
    collector, _ = collect(env, 20, slots=64, group_size=2, collection=CollectionCfg(branching=BranchCfg(points=1)))
    replayed = env.extra_steps - 7
    assert replayed == 2 * sum(branch_points(env)) > 0
    assert collector.last_steps == env.taken + replayed
    assert collector.metrics()["rollout/wasted_steps"] == replayed / collector.last_steps
