"""Two ranks of a training run, in two threads."""

import threading

import torch

from groupwise.engines import Engine


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

    def gather_objects(self, thing):
        self.table[self.rank] = thing
        self.meeting.wait(20)
        things = list(self.table)
        self.meeting.wait(20)
        return things

    def sum_gradients(self, parameters):
        for parameter in parameters:
            parameter.grad = self.sum(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)


def in_two_threads(work):
    """What ``work(engine)`` returns on both ranks."""
    table, meeting, out = [None, None], threading.Barrier(2), [None, None]

    def run(rank):
        torch.set_num_threads(1)
        try:
            out[rank] = work(TwoThreads(rank, meeting, table))
        finally:
            meeting.abort() if out[rank] is None else None

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return out


def on_two_ranks(work, rollout, make_policy):
    """What ``work(part, policy, engine)`` returns on both ranks, each with half of the rows: a group of 4 episodes."""
    policies = [make_policy(), make_policy()]  # they draw from the global generator

    def run(engine):
        rank = engine.rank
        part = rollout[4 * rank : 4 * rank + 4].clone()
        for key in ("group_id", "episode_id"):
            part[key] -= torch.where(part[key] >= 0, rank * (1 if key == "group_id" else 4), 0)
        return work(part, policies[rank], engine)

    return in_two_threads(run)
