"""From the steps of a rollout to the micro-batches of each optimiser step, with the weight of every element.

Weights are computed once for each optimiser step, over all micro-batches and ranks, so the gradient depends neither on the
micro-batch size nor on the number of processes.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import cast

import torch
from jaxtyping import Bool
from torch import Tensor

from groupwise.algorithms.losses import finest_unit
from groupwise.config.algorithm import AlgorithmCfg
from groupwise.data.minibatch import Epoch, Unit, coarsest, cut, shuffle_items, shuffle_transitions, take
from groupwise.data.rollout import Nested
from groupwise.data.row_batches import RowSizes, shuffle_rows
from groupwise.engines.base import Engine
from groupwise.functional.reduce import Aggregation, loss_weights, token_mean_weights
from groupwise.policies.base import Batch, Policy
from groupwise.seeding import derive_seed

Prepare = Callable[[dict[str, Nested], Tensor, int], dict[str, Nested]]
"""``BaseAlgorithm.prepare``."""


class Minibatches:
    """Cuts the data of an update.

    Args:
        seed: of the order of minibatches.
    """

    def __init__(self, cfg: AlgorithmCfg, policy: Policy, engine: Engine, seed: int) -> None:
        self.unit: Unit = coarsest("row" if policy.scored_by == "row" else "transition", finest_unit(cfg.objective))
        """What a micro-batch must not cut."""
        self._cfg = cfg
        self._policy = policy
        self._engine = engine
        self._seed = seed

    def epochs(
        self, data: dict[str, Nested], num_episodes: int, iteration: int, prepare: Prepare
    ) -> Iterator[list[dict[str, Nested]]]:
        """Micro-batches of each optimiser step, epoch after epoch, with keys ``weight`` and ``share``.

        A single minibatch has no order, so it is prepared once and nothing is gathered.
        """
        cfg, elements = self._cfg, self._elements(data)
        total = self._num_steps(elements["loss_mask"])
        if not total:
            return
        count = self._count(total)
        if count == 1 and cfg.micro_batch_size is None:
            everything = [[slice(0, len(elements["loss_mask"]))]]
            whole = self._weighted(elements, everything, num_episodes, prepare)
            yield from [[whole][: len(whole["loss_mask"])]] * cfg.num_epochs  # this rank may have no element
            return
        generator = torch.Generator().manual_seed(derive_seed(self._seed, "minibatch", self._engine.rank, iteration))
        for _ in range(cfg.num_epochs):
            epoch = self._shuffled(elements, count, generator)
            weighted = self._weighted(take(elements, epoch.order), epoch.minibatches, num_episodes, prepare)
            parts = cut(weighted, [part.stop - part.start for slices in epoch.minibatches for part in slices])
            lengths = torch.tensor([len(slices) for slices in epoch.minibatches], device=self._policy.device)
            for slices, on_any_rank in zip(epoch.minibatches, self._engine.sum(lengths).tolist(), strict=True):
                if on_any_rank:  # a step on nothing would move on by momentum alone
                    yield [next(parts) for _ in slices]

    def is_single_pass(self, mask: Tensor) -> bool:
        """Whether the update is one optimiser step, on the policy that it begins with."""
        return self._cfg.num_epochs == 1 and self._count(self._num_steps(mask)) == 1

    def _count(self, total: int) -> int:
        """Minibatches of an epoch of ``total`` steps."""
        size = self._cfg.minibatch_size
        return 1 if size is None else max(1, round(total / size))

    def _num_steps(self, mask: Tensor) -> int:
        """Steps that count, on all ranks: a decision is one, however many units it has."""
        return int(self._engine.sum((mask.any(dim=-1) if self._policy.scored_by == "token" else mask).sum()))

    def _elements(self, data: dict[str, Nested]) -> dict[str, Nested]:
        """What is cut into minibatches: the transitions that count, or the rows (of steps, or of a decision's units) that do."""
        if self._policy.scored_by == "transition":
            transitions = flat(data)
            return take(transitions, transitions["loss_mask"].nonzero()[:, 0])
        rows = data if self._policy.scored_by == "row" else flat(per_unit(self._policy, data, data["loss_mask"]))
        return take(rows, rows["loss_mask"].any(dim=1))

    def _shuffled(self, elements: dict[str, Nested], num_minibatches: int, generator: torch.Generator) -> Epoch:
        mask, episode = elements["loss_mask"], elements["episode_id"]
        if self._policy.scored_by == "token":
            mask, episode = mask.any(dim=1), episode[:, 0]
        match self.unit:
            case "transition":
                shuffle = partial(shuffle_transitions, len(mask))
            case "episode":
                shuffle = partial(shuffle_items, episode, mask.long())
            case "row":
                shuffle = partial(shuffle_rows, row_sizes(self._policy, elements))
        micro = self._cfg.micro_batch_size
        return shuffle(num_minibatches=num_minibatches, micro_batch_size=micro, generator=generator)

    def _weighted(
        self, elements: dict[str, Nested], minibatches: list[list[slice]], num_episodes: int, prepare: Prepare
    ) -> dict[str, Nested]:
        """An epoch's elements, prepared, with weights over each optimiser step's elements on all ranks."""
        aggregation, count = self._cfg.objective.aggregation, len(minibatches)
        sizes = [sum(part.stop - part.start for part in slices) for slices in minibatches]
        minibatch = torch.arange(count).repeat_interleave(torch.tensor(sizes)).to(self._policy.device)
        minibatch = minibatch.view(-1, *[1] * (elements["loss_mask"].dim() - 1)).expand_as(elements["loss_mask"])
        elements = prepare(dict(elements), minibatch, count)
        mask, episode = elements["loss_mask"], elements["episode_id"]
        elements["share"] = token_mean_weights(mask & (episode >= 0), minibatch, count, all_sum=self._engine.sum)
        elements["weight"] = elements["share"]
        if aggregation.name != "token_mean":
            name = cast(Aggregation, aggregation.name)
            weigh = partial(loss_weights, max_length=getattr(aggregation,'max_length',None), all_sum=self._engine.sum)
            whole = zip(mask.split(sizes), episode.split(sizes), strict=True)
            elements["weight"] = torch.cat([weigh(m, e, num_episodes, name) for m, e in whole])
        return elements


def flat(data: Batch) -> dict[str, Nested]:
    """Every key ``[N, T, ...]`` as transitions ``[N * T, ...]``."""
    return {
        key: value.reshape(-1, *value.shape[2:]) if isinstance(value, Tensor) else value.reshape(-1)
        for key, value in data.items()
    }


def per_unit(policy: Policy, data: Batch, units: Bool[Tensor, "row step unit"]) -> dict[str, Nested]:
    """``data`` with the numbers of decisions ``[N, T]`` repeated for each of their units; what the policy reads stays."""
    decisions = {key for key, value in data.items() if key not in policy.batch_keys and value.dim() == 2}
    return {key: value.unsqueeze(-1).expand_as(units) if key in decisions else value for key, value in data.items()}


def row_sizes(policy: Policy, rows: Batch) -> RowSizes:
    """What decides where a row is packed."""
    sizes = RowSizes.of(rows["valid"], rows["loss_mask"], rows["group_id"])
    return sizes if policy.shares_prefixes else sizes.apart()
