"""Rows that a tiny language model writes, and updates on them."""

import torch

from groupwise.algorithms.grpo import GRPO
from groupwise.config.algorithm import GRPOCfg
from groupwise.data.rollout import transition_view
from groupwise.text.collector import TextRow, text_rollout
from groupwise.text.generation import complete

ONE_STEP = {"num_epochs": 1, "minibatch_size": 10_000, "max_grad_norm": None}
SGD = ONE_STEP | {"optimizer": {"name": "sgd"}, "learning_rate": 0.1}


def batch_of(rows):
    return dict(transition_view(text_rollout(rows)).items())


def rows_of(policy, prompts=((5, 6, 7), (9,)), seeds=None, score=lambda _, tokens: float(tokens[0] % 5)):
    """Groups of 4, if no other seeds are given."""
    seeds = torch.arange(4 * len(prompts)).view(-1, 4) if seeds is None else seeds
    return [
        TextRow(prompt, c.tokens, c.log_probs, score(prompt, c.tokens), c.stop == "eos", number, support=c.support)
        for number, (prompt, group) in enumerate(zip(prompts, complete(policy, prompts, seeds), strict=True))
        for c in group
    ]


def flat(policy):
    return torch.cat([p.detach().flatten() for p in policy.parameters()])


def updated(policy, rows, engine=None, **settings):
    """The weights after an update of GRPO, and its metrics."""
    rollout = text_rollout(rows) if isinstance(rows, list) else rows
    metrics = GRPO(GRPOCfg(**{"group_size": 4} | ONE_STEP | settings), policy, engine).update(rollout)
    return flat(policy), metrics
