"""Credit above the states near each step: numbers by hand, and what it refuses."""

import pytest
import torch
from credit_rollouts import credit, rollout
from tensordict import TensorDict
from two_ranks import in_two_threads

import groupwise as gw
from groupwise.algorithms import advantages as credit_rules
from groupwise.engines import Engine
from groupwise.errors import DataError

CREDIT = {"group_key": "group", "returns": "return_to_go", "scale": "none"}


def knn(k=1, gae_lambda=0.95):
    return CREDIT | {"baseline": {"name": "knn", "k": k, "gae_lambda": gae_lambda}}


def line():
    """Two episodes of three and two steps along a line, the second one cut, and a slot that does not count."""
    obs = [[[0.0], [1.0], [2.0]], [[0.1], [1.1]]]
    return rollout([(0, [1.0, 1.0, 1.0], "terminated"), (0, [2.0, 2.0], "truncated")], obs=obs)


def credit_of(batch, gamma=0.5, k=1, gae_lambda=0.95):
    return credit(batch, gamma=gamma, **knn(k, gae_lambda))


@pytest.mark.parametrize(
    ("gae_lambda", "expected"),
    [
        # returns to go 1.75, 1.5, 1 and, with half of v behind the cut, 3 + v / 4, 2 + v / 2. v is the value of the second
        # episode's last step: the 1.5 of the first one's nearest. So values are 3.375, 2.75, 2.75 and 1.75, 1.5
        (1.0, [[-1.625, -1.25, -1.75], [1.625, 1.25, 0.0]]),
        (0.0, [[-1.0, -0.375, -1.75], [1.0, 1.25, 0.0]]),
        (0.5, [[-1.203125, -0.8125, -1.75], [1.3125, 1.25, 0.0]]),
    ],
)
def test_by_hand(gae_lambda, expected):
    torch.testing.assert_close(credit_of(line(), gae_lambda=gae_lambda), torch.tensor(expected))


@pytest.mark.parametrize("gae_lambda", [0.0, 0.95, 1.0])
def test_the_clock_is_neither_praised_nor_blamed(gae_lambda):
    """Episodes that all earn 1 a step until they are cut deserve nothing, early or late."""
    obs = torch.randn(6, 40, 2, generator=torch.Generator().manual_seed(0)).tolist()
    batch = rollout([(0, [1.0] * 40, "truncated")] * 6, obs=obs)
    found = credit_of(batch, gamma=0.9, k=8, gae_lambda=gae_lambda)
    assert found.abs().max() < 0.25  # of a value of 10: what ten rounds leave


def steps_of_one(end):
    """Four episodes of a single step that earns 1."""
    return rollout([(0, [1.0], end)] * 4, obs=[[[float(row)]] for row in range(4)])


@pytest.mark.parametrize("gamma", [0.5, 0.9])
def test_values_behind_cuts_settle_in_ten_rounds(gamma):
    """From V = 1 on each round makes 1 + gamma V of it, so V is the sum of ten powers, and 1 + gamma V - V is gamma^10."""
    torch.testing.assert_close(credit_of(steps_of_one("truncated"), gamma=gamma), torch.full((4, 1), gamma**10))


@pytest.mark.parametrize(("end", "rounds"), [("terminated", 0), ("truncated", 9)])
def test_ranks_exchange_what_the_next_round_reads_and_no_more(end, rounds):
    class Counting(Engine):
        calls = 0

        def gather(self, tensor):
            self.calls += 1
            return super().gather(tensor)

    engine = Counting()
    credit(steps_of_one(end), gamma=0.9, engine=engine, **knn())
    assert engine.calls == 4 + rounds  # numbers of episodes, states, episodes, returns


@pytest.mark.parametrize("pool", [4096, 20])
def test_two_ranks_are_one_batch(monkeypatch, pool):
    """Episodes of one rank are near those of the other; some are cut, and one rank has more than the other."""
    monkeypatch.setattr(credit_rules, "POOL", pool)
    generator = torch.Generator().manual_seed(0)
    lengths, ends = [5, 9, 7, 6, 8, 9, 5], ["truncated", "terminated"] * 4
    numbers = [torch.randn(length, 3, generator=generator) for length in lengths]
    episodes = [(0, part[:, 0].tolist(), end) for part, end in zip(numbers, ends, strict=False)]
    whole = rollout(episodes, obs=[part[:, 1:].tolist() for part in numbers])
    choices = knn(3, 0.9) | {"normalize": "batch"}
    expected = credit(whole, gamma=0.9, **choices)
    parts = [whole[:4], whole[4:].clone()]
    parts[1]["episode_id"] = torch.where(parts[1]["valid"], parts[1]["episode_id"] - 4, -1)
    found = in_two_threads(lambda e: credit(parts[e.rank], gamma=0.9, engine=e, **choices))
    torch.testing.assert_close(torch.cat(found), expected, atol=1e-5, rtol=1e-4)


def test_a_rank_without_a_step_that_counts_has_the_others_values_but_no_steps():
    batch, nothing = line(), line()
    nothing["loss_mask"] = torch.zeros(2, 3, dtype=torch.bool)
    for parts in ((batch, nothing), (nothing, batch)):
        found = in_two_threads(lambda e, parts=parts: credit(parts[e.rank].clone(), gamma=0.5, engine=e, **knn()))
        torch.testing.assert_close(found[parts[0] is nothing], credit_of(batch))
        assert not found[parts[0] is batch].any()


def test_no_more_states_than_the_pool_holds_are_looked_at(monkeypatch):
    """Evenly spaced: of five, at most two are every third, the first ones of both episodes."""
    monkeypatch.setattr(credit_rules, "POOL", 2)
    found = credit_of(line(), gae_lambda=1.0)
    # behind the cut stands 1.75: the first episode's values are 3 + 1.75 / 4
    torch.testing.assert_close(found[0], torch.tensor([1.75, 1.5, 1.0]) - 3.4375)
    torch.testing.assert_close(found[1, :2], torch.tensor([3 + 1.75 / 4 - 1.75, 2 + 1.75 / 2 - 1.75]))


def test_an_episode_alone_has_nothing_to_be_measured_against():
    batch = line()
    batch["loss_mask"][1] = False
    assert not credit_of(batch).any()


def test_a_rollout_without_a_step_that_counts_has_no_values():
    batch = line()
    assert not credit_of(batch.set("loss_mask", torch.zeros(2, 3, dtype=torch.bool))).any()


@pytest.mark.parametrize(
    ("obs", "says"),
    [
        (torch.zeros(2, 3, dtype=torch.int64), r"torch.int64 of shape \[2, 3\]"),
        (torch.zeros(2, 3, 4, 4), r"torch.float32 of shape \[2, 3, 4, 4\]"),
        (TensorDict({"a": torch.zeros(2, 3, 1)}, batch_size=[2, 3]), "several tensors"),
        (None, "no observations"),
    ],
)
def test_what_has_no_distance_is_refused(obs, says):
    with pytest.raises(DataError, match=rf"got {says}; fix: .*or baseline='mean' with group_key='group_step'"):
        credit_of(line().exclude("obs") if obs is None else line().set("obs", obs))


@pytest.mark.parametrize(
    "change",
    [
        {"returns": "outcome"},
        {"group_key": "group_step"},
        {"scale": "batch_std"},
        {"scale": "std"},
        {"reward": "parts"},
    ],
)
def test_settings_that_contradict_it_are_refused(change):
    with pytest.raises(ValueError, match=r"baseline='knn' needs.*fix: .*, or baseline='mean'"):
        gw.CreditCfg(**knn() | change)
