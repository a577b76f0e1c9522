"""The optimisation that PPO and GRPO share: epochs, minibatches, micro-batches, one weighted loss.

An algorithm turns a rollout into advantages and calls ``optimize``, which minimises ``loss = sum(weight * element)``. The
weights are computed once for each optimiser step, over all micro-batches and ranks, so the gradient depends neither on the
micro-batch size nor on the number of processes.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from functools import partial
from typing import ClassVar, NamedTuple, cast

import torch
from jaxtyping import Bool, Float
from tensordict import TensorDict
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from groupwise.algorithms.controllers import EntropyController
from groupwise.algorithms.loss import Counts, check_objective, finest_unit, objective_data
from groupwise.algorithms.memory import MicroBatches
from groupwise.algorithms.metrics import SamplerMismatch, UpdateStats
from groupwise.algorithms.nonfinite import GradientCheck
from groupwise.algorithms.optim import Schedule, build_optimizer
from groupwise.config.algorithm import AlgorithmCfg, at_progress, has_range_schedule
from groupwise.data.minibatch import Epoch, Unit, coarsest, cut, shuffle_items, shuffle_transitions, take
from groupwise.data.rollout import Nested
from groupwise.data.row_batches import RowSizes, pack, shuffle_rows
from groupwise.engines.base import Engine
from groupwise.errors import ConfigError
from groupwise.functional.reduce import Aggregation, loss_weights, token_mean_weights
from groupwise.policies.base import Batch, Evaluation, Policy
from groupwise.seeding import derive_seed


class LossOutput(NamedTuple):
    """What an algorithm computes for each element of a micro-batch."""

    loss: Tensor
    """Minimised; everything that has a gradient."""
    metrics: tuple[Tensor, ...]
    """In the order of ``metric_names``."""


class BaseAlgorithm(ABC):
    """Subclass it with ``update`` (and ``loss``, if you use ``optimize``) and register it with its own config.

    Args:
        engine: the processes that train together.
        seed: of the order of minibatches.
    """

    grouped: ClassVar[bool] = False
    """Whether rollouts must hold groups of members that share a start."""
    actor_only: ClassVar[bool] = False
    """Whether the policy needs no critic."""
    metric_names: ClassVar[tuple[str, ...]] = ()
    """What ``loss`` reports. Those that end in ``loss`` are logged as they are minimised, with the weights of the aggregation,
    others as means over steps. ``target_kl`` and the adaptive schedule need ``approx_kl`` among them."""

    def __init__(self, cfg: AlgorithmCfg, policy: Policy, engine: Engine | None = None, *, seed: int = 0) -> None:
        check_objective(cfg.objective, policy)
        self.cfg = cfg
        """With the clip ranges of now, where these have schedules."""
        self.range_schedules = cfg if has_range_schedule(cfg) else None
        self.policy = policy
        self.engine = engine or Engine()
        self.seed = seed
        self.iteration = 0
        self.optimizer_steps = 0
        self.counts = Counts(0)
        """Of the rollout of the current update: ``loss`` sums over its episodes and turns."""
        policy.eval()  # dropout would move the ratio off 1 where nothing has changed yet
        self.engine.broadcast(policy)
        self.parameters = [parameter for parameter in policy.parameters() if parameter.requires_grad]
        self.optimizer = build_optimizer(cfg, self.parameters)
        self.schedule = Schedule(cfg.schedule, self.optimizer, cfg.learning_rate)
        self.micro_batches = MicroBatches(self._unit)
        self.gradient_check = GradientCheck(cfg.on_nonfinite, policy)
        self.entropy = EntropyController(cfg, policy.device)
        if self.entropy.adaptive and "entropy" not in self.metric_names:
            raise ConfigError(
                f"adaptive_entropy needs the entropy, which {type(self).__name__} does not measure; "
                "fix: None, or 'entropy' among its metric_names"
            )

    @abstractmethod
    def update(self, rollout: TensorDict) -> dict[str, Tensor]:
        """Improve the policy by one rollout ``[N, T+1]``, which is not written to; returns 0-dim metrics."""

    def loss(self, batch: Batch, evaluation: Evaluation) -> LossOutput:
        """Loss and metrics of each element of a micro-batch."""
        raise TypeError(f"{type(self).__name__} uses optimize() and must define loss()")

    def evaluate(self, policy: Policy, batch: Batch) -> Evaluation:
        """The policy's scores of a micro-batch, which ``loss`` reads."""
        return policy.evaluate(batch)

    def optimize(self, data: dict[str, Nested], num_episodes: int) -> dict[str, Tensor]:
        """Minimise ``loss`` over all epochs; returns the mean of each metric over the optimiser steps.

        Where no element counts on any rank, nothing changes: ``train/optimizer_steps`` is 0.

        Args:
            data: keys ``[N, T]``: what ``policy.evaluate`` and ``loss`` read, with ``loss_mask`` and ``episode_id``.
            num_episodes: ids in ``episode_id`` are below it.
        """
        self.counts = Counts(num_episodes, int(data["turn"].max()) + 1 if "turn" in data else 0)
        stats = UpdateStats(self.metric_names, self.policy.device, self.engine.sum)
        mismatch = SamplerMismatch(self.policy.device) if self._recomputes else None
        for minibatch in self._minibatches(self._elements(data)):
            micro_batches = self.micro_batches.run(minibatch, partial(self._accumulate, stats))
            if mismatch is not None and not stats.steps:
                for batch in micro_batches:
                    mismatch.add(batch)
            self.engine.sum_gradients(self.parameters)
            step_metrics = stats.step_means() if self._needs_step_metrics else {}
            self.schedule.adapt(step_metrics)
            if self._exceeds_target_kl(step_metrics):
                break
            grad_norm = self.clip_gradients()
            if not self.gradient_check.passes(grad_norm, f"step {stats.steps + 1} of update {self.iteration + 1}"):
                continue
            stats.end_step(grad_norm)
            self.optimizer.step()
            self.entropy.adapt(step_metrics)
        self.optimizer_steps += stats.steps
        metrics = stats.means() | self.gradient_check.end_update() | self.schedule.metrics() | self.entropy.metrics()
        return metrics if mismatch is None else metrics | mismatch.metrics(self.engine.sum)

    def _accumulate(self, stats: UpdateStats, micro_batches: list[dict[str, Nested]]) -> list[dict[str, Nested]]:
        """Compute the gradient of a minibatch; returns its micro-batches."""
        self.optimizer.zero_grad()
        stats.start_step()
        for batch in micro_batches:
            stats.add(self.backward(batch))
        return micro_batches

    def backward(self, batch: dict[str, Nested]) -> Float[Tensor, " metric"]:
        """Add the gradient of a micro-batch to that of the parameters; returns the sums of its metrics."""
        loss, metrics = self.loss_and_metrics(batch)
        loss.backward()  # type: ignore[no-untyped-call]
        return metrics

    def loss_and_metrics(self, batch: dict[str, Nested]) -> tuple[Float[Tensor, ""], Float[Tensor, " metric"]]:
        """The loss of a micro-batch, and what it adds to the metrics of the optimiser step."""
        evaluation = self._evaluate(self.policy, batch)
        batch.setdefault("old_log_prob", evaluation.log_prob.detach())  # of a single pass
        loss, metrics = self.loss(batch, evaluation)
        values = torch.stack([values.detach().flatten() for values in metrics])
        shares = [batch["weight" if name.endswith("loss") else "share"] for name in self.metric_names]
        sums = (values * torch.stack(shares).flatten(1)).sum(dim=1)
        return (batch["weight"] * loss).sum(), sums.float()

    def policy_inputs(self, batch: TensorDict) -> dict[str, Nested]:
        """What scoring the transitions ``[N, T]`` reads, and which of them count."""
        keys = {*self.policy.batch_keys, "loss_mask", "episode_id"}
        if self.policy.scored_by == "row":
            keys |= {"valid", "group_id"}
        if self._recomputes:
            keys |= {"step", "sample_log_prob"}
        inputs = {key: batch[key] for key in keys}
        if "trained" in batch.keys():  # noqa: SIM118  iterating goes over rows
            inputs["loss_mask"] = inputs["loss_mask"] & batch["trained"]
        if self.policy.scored_by == "token":
            units = self.policy.unit_mask({**batch})
            inputs = self._of_units(inputs, units)
            inputs["loss_mask"] = inputs["loss_mask"] & units
        return inputs

    def loss_inputs(
        self,
        batch: TensorDict,
        inputs: dict[str, Nested],
        advantage: Float[Tensor, "row step"],
        num_episodes: int,
        start: Evaluation | None = None,
    ) -> dict[str, Nested]:
        """``policy_inputs`` with the advantages, and with what the configured objective reads besides them.

        Of policies scored by ``token``, everything is that of units ``[N, T, K]`` but what the policy reads.

        Args:
            start: the policy's scores of every step at the update's start, if they are known already.
        """
        data: TensorDict | Batch = batch
        if self.policy.scored_by == "token":
            data = self._of_units({**batch, "advantage": advantage}, inputs["loss_mask"])
            advantage = data["advantage"]
        more = objective_data(
            self.cfg.objective,
            data,
            advantage,
            inputs["loss_mask"],
            num_episodes,
            lambda: self.score(self.policy, inputs) if start is None else start,
            seed=derive_seed(self.seed, "objective", self.iteration),
            single_pass=self._is_single_pass(inputs["loss_mask"]),
            all_sum=self.engine.sum,
        )
        return inputs | {"advantage": advantage} | more

    def prepare(self, elements: dict[str, Nested], minibatch: Tensor, num_minibatches: int) -> dict[str, Nested]:
        """An epoch's elements before they are cut: the place for statistics of whole minibatches.

        Args:
            minibatch: the number of each element's minibatch, shaped like ``loss_mask``; the same on every rank.
        """
        return elements

    @torch.no_grad()
    def score(self, policy: Policy, data: dict[str, Nested]) -> Evaluation:
        """Scores of every step ``[N, T]`` under ``policy``, in micro-batches and without gradient."""
        elements = data if self.policy.scored_by == "row" else _flat(data)
        count, size = len(elements["loss_mask"]), self.cfg.micro_batch_size
        slices = [slice(i, i + (size or count)) for i in range(0, count, size or count)]
        back: Tensor | slice = slice(None)
        if policy.scored_by == "row":
            order, slices = pack(_row_sizes(policy, elements), torch.arange(count, device=policy.device), size)
            elements, back = take(elements, order), order.argsort()
        batches = [take(elements, part) for part in slices]
        parts = self.micro_batches.run(batches, lambda parts: [self._evaluate(policy, part) for part in parts])
        shape, dims = data["loss_mask"].shape, elements["loss_mask"].dim()

        def join(values: tuple[Tensor | None, ...]) -> Tensor | None:
            known = [value for value in values if value is not None]
            return torch.cat(known)[back].reshape(*shape, *known[0].shape[dims:]) if known else None

        log_prob, entropy, value, dist = (join(values) for values in zip(*parts, strict=True))
        assert log_prob is not None
        assert entropy is not None
        return Evaluation(log_prob, entropy, value, dist)

    def set_progress(self, progress: float, budget: int | float = 1, step: float = 0.0) -> None:
        """Tell the schedules which share of training is done, in [0, 1]; ``budget`` and ``step`` as in ``schedule_factor``."""
        self.schedule.set_progress(progress, budget, step)
        if self.range_schedules is not None:
            self.cfg = at_progress(self.range_schedules, progress)

    def state_dict(self) -> dict[str, object]:
        """Everything but the policy that the next update depends on."""
        return {
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "entropy": self.entropy.state_dict(),
            "iteration": self.iteration,
            "optimizer_steps": self.optimizer_steps,
        }

    def load_state_dict(self, state: dict) -> None:
        """Restore a saved ``state_dict``."""
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        self.entropy.load_state_dict(state["entropy"])
        self.iteration = state["iteration"]
        self.optimizer_steps = state["optimizer_steps"]

    def _elements(self, data: dict[str, Nested]) -> dict[str, Nested]:
        """What is cut into minibatches: the transitions that count, or the rows (of steps, or of a decision's units) that do."""
        if self.policy.scored_by == "transition":
            flat = _flat(data)
            return take(flat, flat["loss_mask"].nonzero()[:, 0])
        rows = data if self.policy.scored_by == "row" else _flat(self._of_units(data, data["loss_mask"]))
        return take(rows, rows["loss_mask"].any(dim=1))

    def _of_units(self, data: Batch, units: Bool[Tensor, "row step unit"]) -> dict[str, Nested]:
        """``data`` with the numbers of decisions ``[N, T]`` repeated for each of their units; what the policy reads stays."""
        decisions = {key for key, value in data.items() if key not in self.policy.batch_keys and value.dim() == 2}
        return {key: value.unsqueeze(-1).expand_as(units) if key in decisions else value for key, value in data.items()}

    def of_decisions(self, score: Tensor) -> Float[Tensor, "row step"]:
        """Scores of units summed over each decision; those of other policies as they are."""
        return score.sum(dim=-1) if self.policy.scored_by == "token" else score

    def _num_steps(self, mask: Tensor) -> int:
        """Steps that count, on all ranks: a decision is one, however many units it has."""
        return int(self.engine.sum((mask.any(dim=-1) if self.policy.scored_by == "token" else mask).sum()))

    def _minibatches(self, elements: dict[str, Nested]) -> Iterator[list[dict[str, Nested]]]:
        """Micro-batches of each optimiser step, weights included, epoch after epoch."""
        total = self._num_steps(elements["loss_mask"])
        if not total:
            return
        count = self._num_minibatches(total)
        if count == 1 and self.cfg.micro_batch_size is None:
            # a single minibatch has no order: it is prepared once, and nothing is gathered
            whole = self._weighted(elements, [[slice(0, len(elements["loss_mask"]))]])
            for _ in range(self.cfg.num_epochs):
                yield [whole]
            return
        seed = derive_seed(self.seed, "minibatch", self.engine.rank, self.iteration)
        generator = torch.Generator().manual_seed(seed)
        for _ in range(self.cfg.num_epochs):
            epoch = self._shuffled(elements, count, generator)
            weighted = self._weighted(take(elements, epoch.order), epoch.minibatches)
            sizes = [part.stop - part.start for slices in epoch.minibatches for part in slices]
            parts = cut(weighted, sizes)
            lengths = torch.tensor([len(slices) for slices in epoch.minibatches], device=self.policy.device)
            for slices, on_any_rank in zip(epoch.minibatches, self.engine.sum(lengths).tolist(), strict=True):
                if on_any_rank:  # a step on nothing would move on by momentum alone
                    yield [next(parts) for _ in slices]

    def _shuffled(self, elements: dict[str, Nested], num_minibatches: int, generator: torch.Generator) -> Epoch:
        mask, episode = elements["loss_mask"], elements["episode_id"]
        if self.policy.scored_by == "token":
            mask, episode = mask.any(dim=1), episode[:, 0]
        match self._unit:
            case "transition":
                shuffle = partial(shuffle_transitions, len(mask))
            case "episode":
                shuffle = partial(shuffle_items, episode, mask.long())
            case "row":
                shuffle = partial(shuffle_rows, _row_sizes(self.policy, elements))
        micro = self.cfg.micro_batch_size
        return shuffle(num_minibatches=num_minibatches, micro_batch_size=micro, generator=generator)

    def _num_minibatches(self, total: int) -> int:
        size = self.cfg.minibatch_size
        return 1 if size is None else max(1, round(total / size))

    def _weighted(self, elements: dict[str, Nested], minibatches: list[list[slice]]) -> dict[str, Nested]:
        """An epoch's elements, prepared, with weights over each optimiser step's elements on all ranks."""
        objective, count = self.cfg.objective, len(minibatches)
        sizes = [sum(part.stop - part.start for part in slices) for slices in minibatches]
        minibatch = torch.arange(count).repeat_interleave(torch.tensor(sizes)).to(self.policy.device)
        minibatch = minibatch.view(-1, *[1] * (elements["loss_mask"].dim() - 1)).expand_as(elements["loss_mask"])
        elements = self.prepare(dict(elements), minibatch, count)
        mask, episode = elements["loss_mask"], elements["episode_id"]
        elements["share"] = token_mean_weights(mask & (episode >= 0), minibatch, count, all_sum=self.engine.sum)
        elements["weight"] = elements["share"]
        aggregation = objective.aggregation
        if aggregation.name != "token_mean":
            weigh = partial(loss_weights, max_length=aggregation.divisor, all_sum=self.engine.sum)
            whole = zip(mask.split(sizes), episode.split(sizes), strict=True)
            weights = [weigh(m, e, self.counts.episodes, cast(Aggregation, aggregation.name)) for m, e in whole]
            elements["weight"] = torch.cat(weights)
        return elements

    def _evaluate(self, policy: Policy, batch: Batch) -> Evaluation:
        """The policy's scores; in rows those of padding, which may be NaN, are replaced by 0, and values are those of each unit."""
        evaluation, mask = self.evaluate(policy, batch), batch["loss_mask"]
        if self.policy.scored_by == "transition":
            return evaluation
        if self.policy.scored_by == "token" and evaluation.value is not None:
            evaluation = evaluation._replace(value=evaluation.value.unsqueeze(-1).expand_as(mask))
        return evaluation.masked(~mask)

    def clip_gradients(self) -> Float[Tensor, ""]:
        """Clip the gradient's norm; returns the norm before."""
        limit = self.cfg.max_grad_norm
        return clip_grad_norm_(self.parameters, math.inf if limit is None else limit)

    @property
    def _unit(self) -> Unit:
        """What a micro-batch must not cut."""
        return coarsest("row" if self.policy.scored_by == "row" else "transition", finest_unit(self.cfg.objective))

    @property
    def _recomputes(self) -> bool:
        """Whether the sampler's probabilities may differ from the trainer's."""
        return self.cfg.objective.old_log_prob == "recomputed"

    @property
    def _needs_step_metrics(self) -> bool:
        return self.cfg.target_kl is not None or self.schedule.adaptive or self.entropy.adaptive

    def _exceeds_target_kl(self, step_metrics: dict[str, Tensor]) -> bool:
        """Whether the policy has moved too far for another step: Stable-Baselines3's 1.5 times ``target_kl``."""
        limit = self.cfg.target_kl
        return limit is not None and float(step_metrics["approx_kl"]) > 1.5 * limit

    def _is_single_pass(self, mask: Tensor) -> bool:
        """Whether the update is one optimiser step, on the policy that it begins with."""
        return self.cfg.num_epochs == 1 and self._num_minibatches(self._num_steps(mask)) == 1


def _flat(data: dict[str, Nested]) -> dict[str, Nested]:
    """Every key ``[N, T, ...]`` as transitions ``[N * T, ...]``."""
    return {
        key: value.reshape(-1, *value.shape[2:]) if isinstance(value, Tensor) else value.reshape(-1)
        for key, value in data.items()
    }


def _row_sizes(policy: Policy, rows: Batch) -> RowSizes:
    sizes = RowSizes.of(rows["valid"], rows["loss_mask"], rows["group_id"])
    return sizes if policy.shares_prefixes else sizes.apart()
