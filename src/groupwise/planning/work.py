"""What an iteration of a run on texts does, in tokens and passes. Imports no torch."""

import math
from typing import NamedTuple

from groupwise.config.algorithm import GRPOCfg
from groupwise.config.run import TextRunCfg


class Work(NamedTuple):
    """The work of one rank in one iteration."""

    ranks: int
    prompts: int
    group_size: int
    prompt: int
    """Tokens of a prompt, in the mean."""
    completion: int
    """Tokens of a completion, in the mean."""
    longest: int
    """Tokens of the longest completion."""
    row: int
    """Tokens of the longest prompt with the longest completion."""
    micro_batch: int
    """Most tokens of a forward pass in training."""
    sharded: bool
    """FSDP: ranks hold parts, and no prefix is shared."""
    scorings: int
    """Passes over the rollout without gradient."""
    epochs: int
    minibatches: int
    """Optimiser steps of an epoch."""

    @property
    def rows(self) -> int:
        """Completions."""
        return self.prompts * self.group_size

    @property
    def written(self) -> int:
        """Tokens that are generated."""
        return self.rows * self.completion

    @property
    def read(self) -> int:
        """Tokens of a pass over the rollout. Members in one micro-batch share their prompt, unless the model is sharded."""
        together = min(max((self.micro_batch - self.prompt) // self.completion, 1), self.group_size)
        copies = self.group_size if self.sharded else math.ceil(self.group_size / together)
        return self.prompts * copies * self.prompt + self.written

    @property
    def micro_batches(self) -> int:
        """Passes of an epoch."""
        return max(self.minibatches, math.ceil(self.read / self.micro_batch))


def work_of(cfg: TextRunCfg, ranks: int, prompt: int, completion: int | None = None) -> Work:
    """The work that the settings describe.

    Args:
        prompt: tokens of a prompt, in the mean.
        completion: tokens of a completion, in the mean. None: as many as it may have.
    """
    algorithm = cfg.algorithm
    turns = 1 if cfg.task.tool is None else cfg.task.max_turns
    longest = turns * cfg.sampling.max_new_tokens
    completion = min(completion or longest, longest)
    row = max(cfg.task.max_prompt_tokens or 0, prompt) + longest
    group_size = algorithm.group_size if isinstance(algorithm, GRPOCfg) else 1
    rows = cfg.num_prompts * group_size
    written, size = ranks * rows * completion, algorithm.minibatch_size
    minibatches = 1 if size is None else max(1, round(written / size))
    whole = math.ceil(rows / minibatches) * row
    return Work(
        ranks=ranks,
        prompts=cfg.num_prompts,
        group_size=group_size,
        prompt=prompt,
        completion=completion,
        longest=longest,
        row=row,
        micro_batch=min(max(algorithm.micro_batch_size or whole, row), whole),
        sharded=cfg.engine == "fsdp" and ranks > 1,
        scorings=_scorings(cfg, single_pass=algorithm.num_epochs == 1 and minibatches == 1),
        epochs=algorithm.num_epochs,
        minibatches=minibatches,
    )


def _scorings(cfg: TextRunCfg, *, single_pass: bool) -> int:
    """Scores before the update: those at its start, where it is more than one step; the reference's; the critic's."""
    objective = cfg.algorithm.objective
    needs_start = objective.importance_sampling_correction.reweights or objective.trust_region.needs_old_log_prob
    recomputed = objective.old_log_prob == "recomputed" and (needs_start or not single_pass)
    has_reference = isinstance(cfg.algorithm, GRPOCfg) and cfg.algorithm.kl_coef > 0
    return recomputed + has_reference + (cfg.algorithm.name == "ppo")
