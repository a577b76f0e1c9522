"""Groups that stay on the device: what their rows did, told again by a simple loop."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch_rollouts import ENVS, goes_on_bit_for_bit, named, never_waits

import groupwise as gw
from groupwise.collectors.torch import TorchGroupCollector
from groupwise.config.algorithm import CollectionCfg
from groupwise.envs.torch_env import TorchCartPole


def made(env, groups, size, num_steps, *, seed=0, horizon=None, noise="independent", device="cpu", **cfg):
    env = ENVS[env](groups * size, device=device)
    torch.manual_seed(seed)
    policy = gw.ActorCritic(
        env.observation_space, env.action_space, gw.PolicyCfg(hidden_sizes=(8,), **cfg), actor_only=True
    ).to(device)
    specs = {"obs_spec": env.obs_spec, "action_spec": policy.action_spec}
    buffer = gw.RolloutBuffer(groups * size, num_steps, **specs, device=device)
    collector = TorchGroupCollector(
        env,
        policy,
        group_size=size,
        seed=seed,
        collection=CollectionCfg(partial_groups="truncate", noise=noise, horizon=horizon),
    )
    return collector, buffer


def told_again(collector, rollout, before):
    """Every label of every slot by a plain loop over what happened; also the episodes of first members.

    ``before``: of each group, return and length so far of the first member's episode if it goes on, else None.
    """
    size, limit = collector.group_size, collector.horizon
    rows, slots = rollout.shape
    num_steps = slots - 1
    finished, goes_on, number = [], [], -1
    labels = {key: torch.full((rows, num_steps), -1) for key in ("group_id", "episode_id", "step")}
    done = rollout["terminated"] | rollout["truncated"]
    for group in range(rows // size):
        members = range(group * size, (group + 1) * size)
        running, began, number = set(members), 0, number + 1
        so_far = before[group] or (0.0, 0)
        for t in range(num_steps):
            if not running:
                running, began, so_far, number = set(members), t, (0.0, 0), number + 1
            for row in members:
                assert bool(rollout["valid"][row, t]) == (row in running)
                if row not in running:
                    assert not bool(done[row, t])
                    assert rollout["reward"][row, t] == 0
                    continue
                labels["group_id"][row, t] = number
                labels["episode_id"][row, t] = number * size + row - members[0]
                labels["step"][row, t] = t - began
            if members[0] in running:
                so_far = so_far[0] + float(rollout["reward"][members[0], t]), so_far[1] + 1
            for row in list(running):
                if limit is not None and t - began + 1 >= limit:
                    assert bool(done[row, t])
                if t == num_steps - 1:
                    assert bool(done[row, t])  # the window cuts
                elif bool(done[row, t]):
                    running.discard(row)
                    if row == members[0]:
                        finished.append((t, group, *so_far, bool(rollout["terminated"][row, t])))
        goes_on.append((members[0], so_far) if members[0] in running else None)
    return labels, finished, goes_on


def test_a_horizon_that_the_rollout_never_reaches_is_refused():
    collector, buffer = made("cartpole", 2, 2, 8, horizon=9)
    collector.collect(8, buffer.start_rollout())  # episodes have a limit
    collector.env.max_episode_steps = None
    with pytest.raises(gw.errors.EnvError, match=r"horizon=9 is never reached: .* num_steps=8, .*fix: leave it out"):
        collector.collect(8, buffer.start_rollout())
    collector, buffer = made("cartpole", 2, 2, 8, horizon=8)
    collector.env.max_episode_steps = None
    for _ in range(2):
        collector.collect(8, buffer.start_rollout())
        assert not collector._goes_on.any()


@pytest.mark.slow
@settings(max_examples=12)
@given(
    env=st.sampled_from(["cartpole", "cut often", "named", "pendulum"]),
    groups=st.integers(1, 4),
    size=st.integers(2, 5),
    num_steps=st.integers(2, 20),
    seed=st.integers(0, 1000),
    horizon=st.sampled_from([None, None, 4]),
)
def test_labels_follow_from_what_happened(device, env, groups, size, num_steps, seed, horizon):
    collector, buffer = made(env, groups, size, num_steps, seed=seed, horizon=horizon, device=device)
    before, last = [None] * groups, None
    for _ in range(3):
        rollout = collector.collect(num_steps, buffer.start_rollout())
        buffer.add(rollout)
        rollout = rollout.cpu()
        labels, finished, goes_on = told_again(collector, rollout, before)
        valid = rollout["valid"][:, :-1]
        assert torch.equal(valid, rollout["loss_mask"][:, :-1])
        for key in ("group_id", "episode_id"):
            assert torch.equal(rollout[key][:, :-1], labels[key])
        assert torch.equal(rollout["step"][:, :-1], labels["step"].clamp(min=0))
        metrics = collector.metrics()
        assert collector.last_steps == int(valid.sum())
        assert metrics["rollout/groups"] == len(set(labels["group_id"][valid].tolist()))
        assert metrics["rollout/idle_fraction"] == pytest.approx(1 - float(valid.double().mean()))
        starts_agree(rollout, size, last)
        # an episode that ends with the window's last step did not go on, though a cut would look the same
        ends_last = [bool(rollout["terminated"][g * size, -2]) for g in range(groups)]
        before = [
            so_far[1] if so_far is not None and not over and not limited(collector, rollout, g * size) else None
            for g, (so_far, over) in enumerate(zip(goes_on, ends_last, strict=True))
        ]
        for episode, (_, _, total, length, terminated) in zip(collector.finished, sorted(finished), strict=False):
            assert episode[:3] == (pytest.approx(total, abs=1e-4), length, terminated)
        first = [{key: leaf[g * size, -1].clone() for key, leaf in named(rollout["obs"])} for g in range(groups)]
        last = [state if before[g] else None for g, state in enumerate(first)]


def test_the_limit_of_the_environment_counts_on_in_groups_that_branch():
    collector, buffer = made("cut often", 4, 3, 5)  # episodes of 7 steps, windows of 5
    for _ in range(6):
        collector.collect(5, buffer.start_rollout())
        collector.metrics()
    assert {episode.length for episode in collector.recent} == {7}


def limited(collector, rollout, row):
    """Whether the environment's limit or the collector's, and not the window, cut the episode at the last step."""
    if collector.horizon is not None and int(rollout["step"][row, -2]) + 1 >= collector.horizon:
        return True
    return bool(collector.env.rows.paused[row])


def starts_agree(rollout, size, last):
    """Members begin alike; groups of other numbers do not, and those that branch begin where the last window ended."""
    obs = dict(named(rollout["obs"]))
    begins = rollout["valid"][:, :-1] & (rollout["step"][:, :-1] == 0)
    for leaf in obs.values():
        for group in range(rollout.shape[0] // size):
            block = slice(group * size, (group + 1) * size)
            for t in begins[block].all(dim=0).nonzero()[:, 0].tolist():
                assert (leaf[block, t] == leaf[block, t][:1]).all()
    if last is None:
        return
    for group, state in enumerate(last):
        for key, leaf in obs.items():
            if state is not None:
                assert torch.equal(leaf[group * size, 0], state[key])
            elif leaf.is_floating_point() and leaf.numel() > 1:
                others = leaf[::size, 0]
                assert len({tuple(o.flatten().tolist()) for o in others}) == len(others)


def test_members_draw_their_own_noise_unless_told_otherwise():
    for noise, equal in (("independent", False), ("shared", True)):
        collector, buffer = made("named", 3, 4, 3, noise=noise)
        with torch.no_grad():  # all act alike
            collector.policy.log_std.fill_(-20)
        rollout = collector.collect(3, buffer.start_rollout())
        alike = all(
            torch.allclose(leaf[g * 4 : g * 4 + 4, 1], leaf[g * 4 : g * 4 + 1, 1], atol=1e-5)
            for _, leaf in named(rollout["obs"])
            for g in range(3)
        )
        assert alike == equal


@pytest.mark.slow
@pytest.mark.parametrize("env", ["cut often", "named"])
def test_no_step_waits_for_the_device(env):
    collector, buffer = made(env, 30, 4, 12, horizon=9)
    never_waits(collector, buffer)
    assert collector.metrics()["rollout/episodes"] > 0


def test_a_resumed_collector_goes_on_bit_for_bit(device):
    goes_on_bit_for_bit(lambda: made("pendulum", 3, 3, 6, device=device))


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"group_size": 3}, "8 rows of TorchCartPole do not make whole groups of 3"),
        ({"collection": CollectionCfg()}, "partial_groups='complete' needs GroupCollector"),
        (
            {"collection": CollectionCfg(partial_groups="truncate", dynamic_sampling=0.0)},
            "keeps all groups, and collection.dynamic_sampling leaves some out",
        ),
        ({"actor_only": False}, "keeps no values, and the policy has a critic"),
    ],
)
def test_what_it_cannot_do_is_refused(how, message):
    env = TorchCartPole(8)
    how = {"group_size": 4, "actor_only": True} | how
    policy = gw.ActorCritic(env.observation_space, env.action_space, actor_only=how.pop("actor_only"))
    with pytest.raises(gw.errors.EnvError, match=message):
        TorchGroupCollector(env, policy, **how)
    with pytest.raises(gw.errors.EnvError, match="needs a TorchGroupCollector"):
        gw.GroupCollector(env, policy, group_size=4, collection=CollectionCfg(partial_groups="truncate"))
