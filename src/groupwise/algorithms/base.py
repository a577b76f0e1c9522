"""The optimisation that PPO and GRPO share: epochs, minibatches, micro-batches, one weighted loss.

An algorithm turns a rollout into advantages and calls ``optimize``, which minimises ``loss = sum(weight * element)``.
"""

import time
from abc import ABC, abstractmethod
from functools import partial
from typing import ClassVar, NamedTuple

import torch
from jaxtyping import Float
from tensordict import TensorDict
from torch import Tensor

from groupwise.algorithms.controllers import EntropyController
from groupwise.algorithms.losses import Counts, check_objective, objective_data
from groupwise.algorithms.memory import EqualMicroBatches, MicroBatches
from groupwise.algorithms.metrics import UpdateStats
from groupwise.algorithms.minibatches import Minibatches, flat, per_unit, row_sizes
from groupwise.algorithms.nonfinite import GradientCheck
from groupwise.algorithms.optim import Schedule, build_optimizer
from groupwise.config.algorithm import AlgorithmCfg, at_progress, has_range_schedule
from groupwise.config.base import SB3_FIX
from groupwise.data.minibatch import take
from groupwise.data.rollout import Nested
from groupwise.data.row_batches import pack
from groupwise.engines.base import Engine
from groupwise.errors import ConfigError
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
        if not isinstance(cfg, AlgorithmCfg) or not isinstance(policy, Policy):
            raise ConfigError(
                f"{type(self).__name__} takes its settings and a Policy, got {cfg!r:.80} and {policy!r:.80}; {SB3_FIX}"
            )
        check_objective(cfg.objective, policy)
        self.cfg = at_progress(cfg, 0.0)
        """With the clip ranges of now, where these have schedules."""
        self.range_schedules = cfg if has_range_schedule(cfg) else None
        self.policy = policy
        self.engine = engine or Engine()
        self.seed = seed
        self.iteration = 0
        self.optimizer_steps = 0
        self.counts = Counts(0)
        """Of the rollout of the current update: ``loss`` sums over its episodes and turns."""
        self.advantage: Tensor | None = None
        """``[N, T]``, of the last update, for those who look at it."""
        self.optimize_start = 0.0
        """``time.perf_counter()`` when ``optimize`` was last called: advantages are there."""
        policy.eval()  # dropout would move the ratio off 1 where nothing has changed yet
        self.engine.broadcast(policy)
        self.learner = self.engine.learner(policy)
        """What ``optimize`` trains: the policy itself, or a copy of which each rank holds a part."""
        self.parameters = [parameter for parameter in self.learner.parameters() if parameter.requires_grad]
        self.optimizer = build_optimizer(cfg, self.parameters)
        self.schedule = Schedule(cfg.schedule, self.optimizer, cfg.learning_rate)
        self.minibatches = Minibatches(cfg, policy, self.engine, seed)
        self.micro_batches = self.own_micro_batches = MicroBatches(self.minibatches.unit)
        """Those of the policy, which a rank may score alone, are ``own_micro_batches``."""
        if self.engine.sharded:
            self.micro_batches = EqualMicroBatches(self.minibatches.unit, self.engine, policy.device)
        self.gradient_check = GradientCheck(cfg.on_nonfinite, self.learner)
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
        self.optimize_start = time.perf_counter()
        self.counts = Counts(num_episodes, int(data["turn"].max()) + 1 if "turn" in data else 0)
        stats = UpdateStats(self.metric_names, self.policy.device, self.engine.sum, recomputed=self._recomputes)
        for minibatch in self.minibatches.epochs(data, num_episodes, self.iteration, self.prepare):
            self.micro_batches.run(minibatch, partial(self._accumulate, stats))
            self.engine.sum_gradients(self.parameters)
            step_metrics = stats.step_means() if self._needs_step_metrics else {}
            self.schedule.adapt(step_metrics)
            if self._exceeds_target_kl(step_metrics):
                break
            grad_norm = self.clip_gradients()
            if self.gradient_check.passes(grad_norm, f"step {stats.steps + 1} of update {self.iteration + 1}"):
                stats.end_step(grad_norm)
                self.optimizer.step()
                self.entropy.adapt(step_metrics)
        self.optimizer_steps += stats.steps
        self.engine.publish(self.learner, self.policy)
        return stats.means() | self.gradient_check.end_update() | self.schedule.metrics() | self.entropy.metrics()

    def _accumulate(self, stats: UpdateStats, micro_batches: list[dict[str, Nested]]) -> None:
        """Compute the gradient of a minibatch."""
        self.optimizer.zero_grad()
        stats.start_step()
        for batch in micro_batches:
            stats.add(self.backward(batch))
        stats.compare_sampler(micro_batches)

    def backward(self, batch: dict[str, Nested]) -> Float[Tensor, " metric"]:
        """Add the gradient of a micro-batch to that of the parameters; returns the sums of its metrics."""
        loss, metrics = self.loss_and_metrics(batch)
        loss.backward()  # type: ignore[no-untyped-call]
        return metrics

    def loss_and_metrics(self, batch: dict[str, Nested]) -> tuple[Float[Tensor, ""], Float[Tensor, " metric"]]:
        """The loss of a micro-batch, and what it adds to the metrics of the optimiser step."""
        evaluation = self._evaluate(self.learner, batch)
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
            inputs = per_unit(self.policy, inputs, units)
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
        self.advantage = advantage
        data: TensorDict | Batch = batch
        if self.policy.scored_by == "token":
            data = per_unit(self.policy, {**batch, "advantage": advantage}, inputs["loss_mask"])
            advantage = data["advantage"]
        more = objective_data(
            self.cfg.objective,
            data,
            advantage,
            inputs["loss_mask"],
            num_episodes,
            lambda: self.score(self.learner, inputs) if start is None else start,
            seed=derive_seed(self.seed, "objective", self.iteration),
            single_pass=self.minibatches.is_single_pass(inputs["loss_mask"]),
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
        elements = data if self.policy.scored_by == "row" else flat(data)
        count, size = len(elements["loss_mask"]), self.cfg.micro_batch_size
        slices = [slice(i, i + (size or count)) for i in range(0, count, size or count)]
        back: Tensor | slice = slice(None)
        if policy.scored_by == "row":
            order, slices = pack(row_sizes(policy, elements), torch.arange(count, device=self.policy.device), size)
            elements, back = take(elements, order), order.argsort()
        batches = [take(elements, part) for part in slices]
        micro_batches = self.own_micro_batches if policy is self.policy else self.micro_batches
        parts = micro_batches.run(batches, lambda parts: [self._evaluate(policy, part) for part in parts])
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
            "optimizer": self.engine.whole(self.optimizer.state_dict()),
            "schedule": self.schedule.state_dict(),
            "entropy": self.entropy.state_dict(),
            "iteration": self.iteration,
            "optimizer_steps": self.optimizer_steps,
        }

    def load_state_dict(self, state: dict) -> None:
        """Restore a saved ``state_dict``."""
        saved = state["optimizer"]
        own = self.engine.split(saved["state"], dict(enumerate(self.parameters)))
        self.optimizer.load_state_dict({**saved, "state": own})
        self.schedule.load_state_dict(state["schedule"])
        self.entropy.load_state_dict(state["entropy"])
        self.iteration = state["iteration"]
        self.optimizer_steps = state["optimizer_steps"]

    def of_decisions(self, score: Tensor) -> Float[Tensor, "row step"]:
        """Scores of units summed over each decision; those of other policies as they are."""
        return score.sum(dim=-1) if self.policy.scored_by == "token" else score

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
        return self.engine.clip_gradients(self.parameters, self.cfg.max_grad_norm)

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
