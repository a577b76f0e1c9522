"""Recurrent policies: what is remembered, where it begins anew, and that training sees what acting saw."""

import math

import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector.utils import concatenate, create_empty_array
from recurrent_policies import averaging

from groupwise.config.policy import RecurrentCfg
from groupwise.data.spaces import obs_to_tensor
from groupwise.errors import DataError
from groupwise.policies.base import with_state
from groupwise.policies.recurrent import RecurrentActorCritic

BOX = spaces.Box(-10, 10, (3,), np.float32)
SPACES = {
    "box": (BOX, spaces.Discrete(3)),
    "dict": (spaces.Dict({"x": BOX, "i": spaces.Box(0, 255, (8, 8, 3), np.uint8)}), spaces.Box(-1, 1, (2,))),
    "discrete": (spaces.Discrete(4), spaces.MultiDiscrete([2, 3])),
}
SETTINGS = {
    "lstm": {"cell": "lstm"},
    "gru": {"cell": "gru"},
    "shared": {"cell": "lstm", "trunk": "shared"},
    "normalised": {"cell": "gru", "normalize_obs": True},
}
EPISODES = [[4, 2, 3], [9], [1, 1, 5]]
"""Lengths in each row of 10 slots. The last row has a hole between its episodes, and padding behind them."""


def make(kind="box", actor_only=False, **settings):
    torch.manual_seed(0)
    cfg = RecurrentCfg(hidden_sizes=(8,), hidden_size=5, **settings)
    policy = RecurrentActorCritic(*SPACES[kind], cfg, actor_only=actor_only)
    if policy.obs_normalizer is not None:
        for statistics in policy.obs_normalizer.statistics:
            statistics.shift.fill_(1.0)
            statistics.scale.fill_(0.5)
    return policy


def observations(kind, count, seed=0):
    space = SPACES[kind][0]
    space.seed(seed)
    samples = [space.sample() for _ in range(count)]
    return obs_to_tensor(space, concatenate(space, samples, create_empty_array(space, count)), batched=True)


def played(policy, kind="box", before=0):
    """Rows as a collector writes them, acted out step by step; each row's first episode had so many steps before."""
    obs = torch.stack([observations(kind, 10, seed=row) for row in range(3)])
    generator = torch.Generator().manual_seed(1)
    valid, step = torch.zeros(3, 10, dtype=torch.bool), torch.zeros(3, 10, dtype=torch.int64)
    rows = []
    for row, lengths in enumerate(EPISODES):
        t = 0
        state = policy.zero_state(1)
        for _ in range(before):
            state = policy.act(with_state(obs[row, :1], state)).state
        slots = []
        for number, length in enumerate(lengths):
            if number:
                state = policy.zero_state(1)
            if row == 2 and number == 1:
                t += 1  # the hole
            age = before if number == 0 else 0
            for k in range(length):
                valid[row, t], step[row, t] = True, age + k
                acted = policy.act(with_state(obs[row, t : t + 1], state), generator=generator)
                slots.append((t, state, acted))
                state, t = acted.state, t + 1
        rows.append(slots)

    def filled(pick, like):
        out = like.new_zeros(3, 10, *like.shape[1:])
        for row, slots in enumerate(rows):
            for t, state, acted in slots:
                out[row, t] = pick(state, acted)[0]
        return out

    first = rows[0][0][2]
    batch = {"obs": obs, "valid": valid, "step": step}
    batch["action"] = filled(lambda _, a: a.action, first.action)
    batch["state"] = filled(lambda s, _: s, first.state)
    log_prob = filled(lambda _, a: a.log_prob, first.log_prob)
    value = None if first.value is None else filled(lambda _, a: a.value, first.value)
    return batch, log_prob, value


@pytest.mark.parametrize("before", [0, 3])
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("kind", SPACES)
def test_training_scores_what_acting_did(kind, setting, before):
    """Step by step and as sequences: with episodes that begin in mid-row, that go on from earlier rollouts, holes and padding."""
    policy = make(kind, **SETTINGS[setting])
    batch, log_prob, value = played(policy, kind, before)
    found = policy.evaluate(batch)
    torch.testing.assert_close(found.log_prob, log_prob, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(found.value, value, atol=1e-6, rtol=1e-6)
    assert found.dist.shape == (3, 10, policy.head.num_params)
    torch.testing.assert_close(policy.kl(found.dist, found.dist), torch.zeros(3, 10))
    (found.log_prob.sum() + found.value.sum()).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in policy.parameters())


def test_a_critic_that_sees_more_remembers_what_it_saw():
    policy = make("dict", actor_keys=("x",))
    batch, log_prob, value = played(policy, "dict")
    found = policy.evaluate(batch)
    torch.testing.assert_close(found.log_prob, log_prob, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(found.value, value, atol=1e-6, rtol=1e-6)
    other = batch["obs"].clone()
    other["i"][0, 0] += 50  # the image, which the actor does not see
    changed = policy.evaluate(batch | {"obs": other})
    assert torch.equal(changed.log_prob, found.log_prob)
    assert (changed.value[0, :4] != found.value[0, :4]).all()
    assert policy.predict({"x": np.zeros(3, np.float32)})[1].shape == (1, 10)


@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_nothing_of_an_earlier_episode_leaks(cell):
    policy = make(cell=cell)
    batch, _, _ = played(policy)
    obs = batch["obs"].clone().requires_grad_()
    value = policy.evaluate(batch | {"obs": obs}).value
    (gradient,) = torch.autograd.grad(value[0, 5], obs)  # second episode of the first row: slots 4 and 5
    touched = gradient.abs().sum(dim=-1).nonzero().tolist()
    assert touched == [[0, 4], [0, 5]]

    changed = batch["obs"].clone()
    changed[0, :4] = 7.0  # its first episode
    other = policy.evaluate(batch | {"obs": changed}).value
    assert torch.equal(other[0, 4:], value[0, 4:])
    assert (other[0, :4] != value[0, :4]).all()


def test_what_is_not_valid_may_hold_anything():
    policy = make()
    batch, log_prob, _ = played(policy)
    batch["obs"] = batch["obs"].masked_fill(~batch["valid"].unsqueeze(-1), math.nan)
    found = policy.evaluate(batch)
    torch.testing.assert_close(found.log_prob, log_prob, atol=1e-6, rtol=1e-6)
    found.value.sum().backward()
    assert all(p.grad.isfinite().all() for p in policy.parameters() if p.grad is not None)
    nothing = policy.evaluate(batch | {"valid": torch.zeros_like(batch["valid"])})
    assert torch.equal(nothing.log_prob, torch.zeros(3, 10))


def test_numbers_by_hand():
    # tanh(x) = 0.8, 0, 0.8, so h = 0.4, 0.2, 0.5; a new episode with 0.8 begins at 0.4 again
    x = math.atanh(0.8)
    obs = torch.tensor([[[x], [0.0], [x], [x]]])
    batch = {"obs": obs, "valid": torch.ones(1, 4, dtype=torch.bool), "step": torch.tensor([[0, 1, 2, 0]])}
    batch |= {"action": torch.zeros(1, 4, dtype=torch.int64), "state": torch.zeros(1, 4, 1)}
    found = averaging().evaluate(batch)
    torch.testing.assert_close(found.value, torch.tensor([[0.4, 0.2, 0.5, 0.4]]))
    torch.testing.assert_close(found.log_prob, torch.full((1, 4), math.log(0.5)))
    # the same row of an episode that goes on from a state of 1: h = 0.9, 0.45, 0.625
    on = batch | {"step": torch.tensor([[5, 6, 7, 0]]), "state": torch.tensor([[[1.0], [9.0], [9.0], [0.0]]])}
    torch.testing.assert_close(averaging().evaluate(on).value, torch.tensor([[0.9, 0.45, 0.625, 0.4]]))


@pytest.mark.parametrize(("setting", "size"), [("lstm", 20), ("gru", 10), ("shared", 10)])
def test_actor_and_critic_remember_apart_unless_they_share(setting, size):
    policy = make(**SETTINGS[setting])
    assert policy.state_size == size
    assert make(actor_only=True, **SETTINGS[setting]).state_size == (5 if setting == "gru" else 10)
    batch, _, _ = played(policy)
    policy.evaluate(batch).value.sum().backward()
    touched = policy.encoder.layer.weight_hh_l0.grad is not None
    assert touched == (setting == "shared")


@pytest.mark.parametrize("kind", SPACES)
def test_predict_gives_the_state_back(kind):
    policy = make(kind)
    obs = observations(kind, 2)
    first, state = policy.predict(obs)
    assert state.shape == (2, 10)
    again, later = policy.predict(obs, state=state)
    assert len(again) == len(first) == 2
    assert not np.array_equal(state, later)
    # a beginning forgets
    _, mixed = policy.predict(obs, state=state, episode_start=[False, True])
    np.testing.assert_allclose(mixed[0], later[0], rtol=1e-6)
    np.testing.assert_allclose(mixed[1], state[1], rtol=1e-6)
    for wrong in ({"state": state[:1]}, {"state": state[:, :3]}, {"state": state, "episode_start": [True]}):
        with pytest.raises(DataError, match=r"expected \[2, 10\] and \[2\]; fix: the state of the last call"):
            policy.predict(obs, **wrong)
    one, _ = policy.predict(SPACES[kind][0].sample())
    assert SPACES[kind][1].contains(one)


def test_a_player_remembers():
    policy = make()
    policy.requires_grad_(False)
    obs = observations("box", 4)
    player, predicting, state = policy.player(), policy.player(), None
    for row in obs.split(1):
        expected, state = policy.predict(row.numpy(), state=state)
        acted = player.act(row, deterministic=True)
        np.testing.assert_allclose(acted.state.numpy(), state, rtol=1e-6)
        assert predicting.predict(row.numpy()) == expected == acted.action


def test_a_player_has_one_memory():
    policy = make()
    policy.requires_grad_(False)
    first, second, third = observations("box", 3).split(1)
    player, predicting = policy.player(), policy.player()
    player.act(first)
    player.predict(second.numpy())
    predicting.predict(first.numpy())
    predicting.predict(second.numpy())
    torch.testing.assert_close(player.act(third).state, predicting.act(third).state)


@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_a_policy_in_float64_acts_and_scores(cell):
    policy = make(cell=cell)
    obs = observations("box", 4)
    expected = policy.player().act(obs, deterministic=True).log_prob
    policy.double()
    assert policy.player().predict(obs.numpy()).shape[0] == 4
    scored = policy.player().act(obs, deterministic=True).log_prob
    assert scored.dtype == torch.float64
    torch.testing.assert_close(scored.float(), expected, rtol=1e-5, atol=1e-5)
    assert policy.evaluate(played(policy)[0]).log_prob.dtype == torch.float64
