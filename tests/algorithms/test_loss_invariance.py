"""No split of the data changes an update, whatever the objective."""

import threading

import pytest
import torch
from objective_updates import EVERY, make_policy, make_rollout, parameters, same, updated

from groupwise.algorithms.ppo import PPO
from groupwise.config.algorithm import ObjectiveCfg, PPOCfg
from groupwise.engines.base import Engine


@pytest.mark.parametrize("name", EVERY)
def test_micro_batches_never_change_the_update(name):
    whole = updated(EVERY[name], minibatch_size=25, num_epochs=2)
    same(updated(EVERY[name], minibatch_size=25, num_epochs=2, micro_batch_size=4), whole)


@pytest.mark.parametrize("name", EVERY)
def test_the_order_of_rows_never_changes_the_update(name):
    rollout = make_rollout(make_policy())
    order = torch.tensor([5, 2, 7, 0, 3, 6, 1, 4])
    same(updated(EVERY[name], rollout[order]), updated(EVERY[name], rollout))


class TwoThreads(Engine):
    """One of two ranks that live in threads and add up what they hand over."""

    world_size = 2

    def __init__(self, rank, meeting, table):
        self.rank, self.meeting, self.table = rank, meeting, table

    def sum(self, tensor):
        self.table[self.rank] = tensor.detach().clone()
        self.meeting.wait(20)
        total = self.table[0] + self.table[1]
        self.meeting.wait(20)
        return total

    def sum_gradients(self, parameters):
        for parameter in parameters:
            parameter.grad.copy_(self.sum(parameter.grad))


def updated_on_two_ranks(objective, rollout):
    table, meeting, out = [None, None], threading.Barrier(2), [None, None]
    policies = [make_policy(), make_policy()]

    def work(rank):
        torch.set_num_threads(1)
        part = rollout[4 * rank : 4 * rank + 4].clone()
        for key in ("group_id", "episode_id"):
            part[key] -= torch.where(part[key] >= 0, rank * (1 if key == "group_id" else 4), 0)
        try:
            out[rank] = updated(objective, part, policies[rank], TwoThreads(rank, meeting, table))
        finally:
            meeting.abort() if out[rank] is None else None

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return out


@pytest.mark.parametrize("name", EVERY)
def test_two_ranks_are_one_on_the_union(name):
    rollout = make_rollout(make_policy())
    first, second = updated_on_two_ranks(EVERY[name], rollout)
    assert torch.equal(first[0], second[0])
    alone = updated(EVERY[name], rollout)
    same(first, alone)


@pytest.mark.parametrize("name", sorted(set(EVERY) - {"clip"}))
def test_every_choice_makes_a_difference(name):
    plain, _ = updated({})
    assert (updated(EVERY[name])[0] - plain).abs().max() > 1e-5


@pytest.mark.parametrize("name", ["sapo", "vespo", "clip_cov", "token_truncate", "off_policy"])
def test_ppo_has_the_same_objectives(name):
    def run(objective, **cfg):
        torch.manual_seed(0)
        objective = ObjectiveCfg(**objective)
        settings = {"num_epochs": 3, "minibatch_size": 10_000, "learning_rate": 0.03, "normalize_advantage": "batch"}
        algorithm = PPO(PPOCfg(objective=objective, **settings | cfg), make_policy(False))
        algorithm.update(make_rollout(algorithm.policy))
        return parameters(algorithm)

    whole = run(EVERY[name])
    torch.testing.assert_close(run(EVERY[name], micro_batch_size=7), whole, atol=1e-5, rtol=1e-4)
    assert (whole - run({})).abs().max() > 1e-5
