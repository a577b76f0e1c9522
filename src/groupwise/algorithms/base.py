"""The optimisation that PPO and GRPO share: epochs, minibatches, micro-batches, one weighted loss.

An algorithm turns a rollout into advantages and calls ``optimize``, which minimises ``loss = sum(weight * element)``. Weights are
computed once for each optimiser step, over all micro-batches and ranks, so the gradient depends neither on the micro-batch size
nor on the number of processes.

    optimize      the loop                          loss_inputs, score      inputs of the loss
    _minibatches  cutting of a rollout              Schedule                the learning rate
"""

import logging
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial, reduce
from itertools import chain
from typing import Any, ClassVar, NamedTuple, TypeAlias, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from groupwise.algorithms.losses import Counts, UpdateStart, check_objective, finest_item, k3, objective_data
from groupwise.algorithms.memory import EqualMicroBatches, MicroBatches
from groupwise.config.algorithm import (
    AdaptiveKLCfg,
    AlgorithmCfg,
    CosineCfg,
    ExponentialCfg,
    FixedLengthCfg,
    LinearCfg,
    ScheduleCfg,
    StepCfg,
    at_progress,
    has_range_schedule,
)
from groupwise.data.minibatch import LAYOUTS, take
from groupwise.data.rollout import Nested, TensorDict
from groupwise.engines import Engine
from groupwise.errors import ConfigError, DivergedError
from groupwise.functional.reduce import Aggregation, loss_weights, token_mean_weights
from groupwise.policies.base import Batch, Evaluation, Policy
from groupwise.seeding import derive_seed

log = logging.getLogger(__name__)

_AUTOCAST = (
    "training inside torch.autocast: until that context ends, it goes on with copies of the first weights; fix: train outside "
    "of it (language models have model.precision='autocast')"
)


class LossOutput(NamedTuple):
    """Loss and metrics of each element of a micro-batch."""

    loss: Tensor
    """Minimised; everything that has a gradient."""
    metrics: tuple[Tensor, ...]
    """Metrics, in the order of ``metric_names``."""


MakeOptimizer: TypeAlias = Callable[[AlgorithmCfg, list[nn.Parameter]], Any]
"""Makes an optimiser like torch's, whose ``clip`` clips the gradient's norm and returns the norm before. After one that is not
finite, its ``step`` changes nothing, without waiting for the device, and ``refused`` has the gradients of that step."""
MakeGradient: TypeAlias = Callable[["BaseAlgorithm"], Callable[[dict[str, Nested]], Tensor] | None]


class BaseAlgorithm(ABC):
    """Subclass it with ``update`` (and ``loss``, if you use ``optimize``) and register it with its own config.

    Args:
        engine: the processes that train together.
        seed: of the order of minibatches.
        optimizer: makes a faster optimiser for the parameters. None, and where it returns None: torch's own.
        gradient: makes a faster ``backward``. None, and where it returns None: the method.
        unknown: any other argument; raises a ``ConfigError`` that shows how to train.
    """

    grouped: ClassVar[bool] = False
    """Whether rollouts must hold groups of members that share a start."""
    actor_only: ClassVar[bool] = False
    """Whether the policy needs no critic."""
    metric_names: ClassVar[tuple[str, ...]] = ()
    """Metrics that ``loss`` reports. The ones that end in ``loss`` are logged as they are minimised, with the weights of the aggregation,
    others as means over steps. ``target_kl`` and the adaptive schedule need ``approx_kl`` among them."""

    def __init__(
        self,
        cfg: AlgorithmCfg,
        policy: Policy,
        engine: Engine | None = None,
        *,
        seed: int = 0,
        optimizer: MakeOptimizer | None = None,
        gradient: MakeGradient | None = None,
        **unknown: object,
    ) -> None:
        if unknown or not isinstance(cfg, AlgorithmCfg) or not isinstance(policy, Policy):
            name = type(self).__name__
            got = ", ".join([f"{cfg!r:.80}", f"{policy!r:.80}", *unknown])
            raise ConfigError(
                f"{name} takes its settings and a Policy, got {got}; fix: gw.train('CartPole-v1', "
                f"{'ppo' if name == 'PPO' else 'grpo'!r}), or with the interface of Stable-Baselines3 groupwise.contrib.sb3.GRPO"
            )
        if policy.actor_only and not self.actor_only:
            name = type(self).__name__
            fix = f"fix: a policy with actor_only=False, or actor_only = True in the class {name} if it reads no values"
            raise ConfigError(f"{name} needs a critic, the policy is actor_only; {fix}")
        check_objective(cfg.objective, policy)
        self.range_schedules = cfg if has_range_schedule(cfg) else None
        self.cfg = at_progress(cfg, 0.0) if has_range_schedule(cfg) else cfg
        """Settings with the current clip ranges, if these have schedules."""
        self.policy = policy
        self.engine = engine or Engine()
        self.seed = seed
        self.iteration = 0
        self._refused_in = -1
        """The last update with a gradient that was not finite."""
        self.optimizer_steps = 0
        self.counts = Counts(0)
        """Episodes and turns in the rollout of the current update, over which ``loss`` sums."""
        self.advantage: Tensor | None = None
        """``[N, T]``, of the last update, for those who look at it."""
        self.optimize_start = 0.0
        """``time.perf_counter()`` when ``optimize`` was last called: advantages are there."""
        policy.eval()  # dropout would move the ratio off 1 where nothing has changed yet
        self.engine.broadcast(policy)
        self.learner = self.engine.learner(policy)
        """The module that ``optimize`` trains: the policy itself, or a copy of which each rank holds a part."""
        self.parameters = [parameter for parameter in self.learner.parameters() if parameter.requires_grad]
        if not self.parameters:
            raise ConfigError(
                "no parameter of the policy has requires_grad=True, so nothing can be trained; fix: policy.requires_grad_(True), "
                "or for adapters PeftModel.from_pretrained(..., is_trainable=True)"
            )
        fast = None if optimizer is None else optimizer(cfg, self.parameters)
        self.optimizer: Any = fast or build_optimizer(cfg, self.parameters)
        if fast is not None:
            self.parameters = fast.param_groups[0]["params"]
        self.clip_gradients: Callable[[float | None], Tensor]
        """Clips the gradient's norm; returns the norm before."""
        self.clip_gradients = fast.clip if fast else partial(self.engine.clip_gradients, self.parameters)
        self.waits = fast is None
        """Whether each norm is looked at before the step is taken; a fast optimiser looks itself."""
        self.schedule = Schedule(cfg.schedule, self.optimizer, cfg.learning_rate)
        self.layout = LAYOUTS[policy.scored_by](policy, finest_item(cfg.objective))
        self.own_micro_batches = MicroBatches(self.layout.item)
        """Micro-batches of computations by this rank alone; ``micro_batches`` is for those of all ranks together."""
        self.micro_batches = self.own_micro_batches
        if self.engine.sharded:
            self.micro_batches = EqualMicroBatches(self.layout.item, self.engine, policy.device)
        self.gradient = None if gradient is None else gradient(self)

    # --- for algorithms ---

    @abstractmethod
    def update(self, rollout: TensorDict) -> dict[str, float]:
        """Improve the policy by one rollout ``[N, T+1]``, which is not written to; returns metrics."""

    def loss(self, batch: Batch, evaluation: Evaluation) -> LossOutput:
        """Loss and metrics of each element of a micro-batch."""
        raise TypeError(f"{type(self).__name__} uses optimize() and must define loss()")

    def evaluate(self, policy: Policy, batch: Batch) -> Evaluation:
        """The policy's scores of a micro-batch, which ``loss`` reads."""
        return policy.evaluate(batch)

    def prepare(self, elements: dict[str, Nested], minibatch: Tensor, num_minibatches: int) -> dict[str, Nested]:
        """An epoch's elements before they are cut: the place for statistics of whole minibatches.

        Args:
            minibatch: the number of each element's minibatch, shaped like ``loss_mask``; the same on every rank.
        """
        return elements

    # --- the loop ---

    def optimize(self, data: dict[str, Nested], num_episodes: int, also: dict[str, Tensor]) -> dict[str, float]:
        """Minimise ``loss`` over all epochs; returns the mean of each metric over the optimiser steps.

        Where no element counts on any rank, nothing changes: ``train/optimizer_steps`` is 0.

        Args:
            data: keys ``[N, T]``: what ``policy.evaluate`` and ``loss`` read, with ``loss_mask`` and ``episode_id``.
            num_episodes: ids in ``episode_id`` are below it.
            also: further metrics, 0-dim, to return with these: all are read from the device together.
        """
        if torch.is_autocast_enabled(self.policy.device.type):
            raise ConfigError(_AUTOCAST)
        cfg, names, all_sum = self.cfg, self.metric_names, self.engine.sum
        self.optimize_start = time.perf_counter()
        self.counts = Counts(num_episodes, int(data["turn"].max()) + 1 if "turn" in data else 0)
        zeros = torch.zeros(len(names), device=self.policy.device)
        steps = [(zeros.new_zeros(()), zeros)]  # norm of the gradient, and sums of metrics; before the first step none
        mismatch = zeros.new_zeros(2, dtype=torch.float64)  # of the sampler, before any weight changes
        recomputed = cfg.objective.old_log_prob == "recomputed"
        watched = cfg.target_kl is not None or self.schedule.adaptive

        def add_up(micro_batches: list[dict[str, Nested]]) -> tuple[list[dict[str, Nested]], list[Tensor]]:
            self.optimizer.zero_grad()
            return micro_batches, [*map(self.gradient or self.backward, micro_batches)]

        for minibatch in self._minibatches(data, num_episodes):
            micro_batches, of_step = self.micro_batches.run(minibatch, add_up)
            if recomputed and len(steps) == 1:
                mismatch = sum(map(sampler_kl_sums, micro_batches), mismatch)
            self.engine.sum_gradients(self.parameters)
            sums = reduce(torch.add, of_step or [zeros])
            means = dict(zip(names, all_sum(sums), strict=True)) if watched else {}
            if self.schedule.adaptive:
                self.schedule.adapt(means)
            # the policy has moved too far for another step: Stable-Baselines3's rule
            if cfg.target_kl is not None and float(means["approx_kl"]) > 1.5 * cfg.target_kl:
                steps[0] = steps[0][0], zeros if steps[1:] else sums  # it was measured, if no step was taken
                break
            norm = self.clip_gradients(cfg.max_grad_norm)
            steps.append((norm.to(zeros.device, non_blocking=True), sums))  # gradients may be kept on the CPU
            if self.waits and not math.isfinite(norm):
                self._refuse(len(steps) - 1, data)
            else:
                self.optimizer.step()
        self.engine.publish(self.learner, self.policy)

        norms, of_steps = (torch.stack(column) for column in zip(*steps, strict=True))
        finite = norms.isfinite()
        total, first = all_sum(torch.stack([torch.where(finite[:, None], of_steps, 0).sum(dim=0), of_steps[:2][-1]]))
        taken = finite.sum() - 1
        found = dict(zip(names, total / taken.clamp(min=1), strict=True))
        found["grad_norm"] = torch.where(finite, norms, 0)[1:].sum() / taken.clamp(min=1)
        found = {f"train/{name}": value for name, value in found.items()} | {"train/optimizer_steps": taken} | also
        if recomputed:
            total, count = all_sum(mismatch)
            found["rollout/sampler_kl"] = total / count.clamp(min=1)
        elif "approx_kl" in names:  # no weight has changed yet in the first step
            found["rollout/sampler_kl"] = first[names.index("approx_kl")]
        values = [one.detach().to(zeros.device, torch.float64, non_blocking=True) for one in found.values()]
        metrics = dict(zip(found, torch.stack(values).tolist(), strict=True))  # one host sync
        metrics["train/learning_rate"] = float(self.optimizer.param_groups[0]["lr"])  # a callback may have set it
        self.optimizer_steps += int(metrics["train/optimizer_steps"])
        if skipped := len(steps) - 1 - int(metrics["train/optimizer_steps"]):
            metrics["train/skipped_steps"] = float(skipped)
            self._refuse(len(steps) - 1 - finite.flip(0).tolist().index(False), data)
        return metrics

    def backward(self, batch: dict[str, Nested]) -> Float[Tensor, " metric"]:
        """Add the gradient of a micro-batch to that of the parameters; returns the sums of its metrics."""
        loss, metrics = self.loss_and_metrics(batch)
        loss.backward()  # type: ignore[no-untyped-call]
        return metrics

    def loss_and_metrics(self, batch: dict[str, Nested]) -> tuple[Float[Tensor, ""], Float[Tensor, " metric"]]:
        """The loss of a micro-batch, and its part of the metrics of the optimiser step."""
        evaluation = self.layout.finish(self.evaluate(self.learner, batch), batch["loss_mask"])
        if batch["loss_mask"].device != evaluation.log_prob.device:  # rollouts of texts are on the CPU
            batch |= {key: value.to(evaluation.log_prob.device, non_blocking=True) for key, value in batch.items()}
        batch.setdefault("old_log_prob", evaluation.log_prob.detach())  # of a single pass
        loss, metrics = self.loss(batch, evaluation)
        values = torch.stack([values.detach().flatten() for values in metrics])
        shares = [batch["weight" if name.endswith("loss") else "share"] for name in self.metric_names]
        return (batch["weight"] * loss).sum(), (values * torch.stack(shares).flatten(1)).sum(dim=1).float()

    def _refuse(self, number: int, data: dict[str, Nested]) -> None:
        """Warn, once an update, of a step whose gradient is NaN or infinite, or stop the run."""
        if self._refused_in == self.iteration:
            return
        self._refused_in = self.iteration
        gradients = [parameter.grad for parameter in self.parameters] if self.waits else self.optimizer.refused
        trained = [name for name, parameter in self.learner.named_parameters() if parameter.requires_grad]
        known = [(name, grad) for name, grad in zip(trained, gradients, strict=True) if grad is not None]
        bad = [name for name, gradient in known if not gradient.isfinite().all()]
        what = f"the gradient of step {number} of update {self.iteration + 1} is {'not finite' if bad else 'too large'}"
        if 0 < len(bad) < len(known):  # otherwise clipping made all of it NaN
            what += f" (first {bad[0]})"
        if "advantage" in data and not data["advantage"][data["loss_mask"]].isfinite().all():
            what = f"advantages of update {self.iteration + 1} are not finite"
        if self.cfg.on_nonfinite == "stop":
            raise DivergedError.because(what)
        log.warning("%s: such steps are skipped", what)

    # --- minibatches ---

    def _minibatches(self, data: dict[str, Nested], num_episodes: int) -> Iterator[list[dict[str, Nested]]]:
        """Micro-batches of each optimiser step, epoch after epoch. ``weight`` of a step is by ``objective.aggregation``.

        ``share``, one over the steps that count, is for other metrics. A single minibatch has no order, so it is prepared
        once and nothing is gathered.
        """
        elements, size = self.layout.counted(data), self.cfg.micro_batch_size
        count = self._num_minibatches(self.layout.num_counted(elements["loss_mask"]))
        if not count:
            return
        if count == 1 and size is None:
            whole = self._weighted(elements, [len(elements["loss_mask"])], num_episodes)
            for _ in range(self.cfg.num_epochs):
                yield [dict(whole)] if len(whole["loss_mask"]) else []  # this rank may have no element
            return
        generator = torch.Generator().manual_seed(derive_seed(self.seed, "minibatch", self.engine.rank, self.iteration))
        for _ in range(self.cfg.num_epochs):
            order, minibatches = self.layout.shuffle(elements, count, size, generator)
            widths = [[part.stop - part.start for part in slices] for slices in minibatches]
            weighted = self._weighted(take(elements, order), [sum(parts) for parts in widths], num_episodes)
            # faster than slices
            columns = zip(*(values.split([*chain(*widths)]) for values in weighted.values()), strict=True)
            parts = (dict(zip(weighted, views, strict=True)) for views in columns)
            everyone = zip(*self.engine.gather_objects(widths), strict=True)
            for slices, on_ranks in zip(minibatches, everyone, strict=True):
                if any(on_ranks):  # a step on nothing would move on by momentum alone
                    yield [next(parts) for _ in slices]

    def _weighted(self, elements: dict[str, Nested], sizes: list[int], num_episodes: int) -> dict[str, Nested]:
        """An epoch's elements, prepared, with weights over each optimiser step's elements on all ranks."""
        like, numbers = elements["loss_mask"], torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
        minibatch = numbers.view(-1, *[1] * (like.dim() - 1)).to(like.device, non_blocking=True).expand_as(like)
        elements = self.prepare(dict(elements), minibatch, len(sizes))
        mask, episode, aggregation = elements["loss_mask"], elements["episode_id"], self.cfg.objective.aggregation
        share = token_mean_weights(mask & (episode >= 0), minibatch, len(sizes), all_sum=self.engine.sum)
        weight = share if aggregation.name == "token_mean" else self._aggregated(mask, episode, sizes, num_episodes)
        return elements | {"share": share, "weight": weight}

    def _aggregated(self, mask: Tensor, episode: Tensor, sizes: list[int], num_episodes: int) -> Tensor:
        """``loss_weights`` of each optimiser step's elements."""
        aggregation = self.cfg.objective.aggregation
        length = aggregation.max_length if isinstance(aggregation, FixedLengthCfg) else None
        name, all_sum = cast(Aggregation, aggregation.name), self.engine.sum
        steps = zip(torch.split(mask, sizes), torch.split(episode, sizes), strict=True)
        return torch.cat([loss_weights(m, e, num_episodes, name, max_length=length, all_sum=all_sum) for m, e in steps])

    def _num_minibatches(self, num_steps: int) -> int:
        """Optimiser steps in an epoch over ``num_steps`` of this rank; 0 where no step counts on any rank."""
        total: int = sum(self.engine.gather_objects(num_steps))
        return max(min(total, 1), round(total / (self.cfg.minibatch_size or math.inf)))

    def _is_single_pass(self, mask: Tensor) -> bool:
        """Whether the update is one optimiser step."""
        return self.cfg.num_epochs == 1 and self._num_minibatches(int(self.layout.num_steps(mask))) <= 1

    # --- inputs of the loss ---

    def policy_inputs(self, batch: TensorDict) -> dict[str, Nested]:
        """Inputs of the scores of the transitions ``[N, T]``, and which of them count."""
        keys = {*self.policy.batch_keys, "episode_id", *self.layout.keys}
        if self.cfg.objective.old_log_prob == "recomputed":
            keys.add("sample_log_prob")
        inputs = {key: batch[key] for key in keys} | {"loss_mask": batch["loss_mask"] & batch.get("trained", True)}
        return self.layout.inputs(batch, inputs)

    def loss_inputs(
        self,
        batch: TensorDict,
        inputs: dict[str, Nested],
        advantage: Float[Tensor, "row step"],
        num_episodes: int,
        evaluation: Evaluation | None = None,
    ) -> dict[str, Nested]:
        """``policy_inputs`` with the advantages, and with further inputs of the configured objective.

        Args:
            evaluation: the policy's scores of every step at the update's start, if they are known already.
        """
        self.advantage = advantage
        mask = inputs["loss_mask"]
        data = self.layout.per_unit({**batch, "advantage": advantage}, mask)
        seed = derive_seed(self.seed, "objective", self.iteration)
        facts = UpdateStart(data, data["advantage"], mask, data["sample_log_prob"], num_episodes, seed, self.engine.sum)

        def score() -> Evaluation:
            return self.score(self.learner, inputs) if evaluation is None else evaluation

        more = objective_data(self.cfg.objective, facts, score, partial(self._is_single_pass, mask))
        return inputs | {"advantage": data["advantage"]} | more

    @torch.no_grad()
    def score(self, policy: Policy, data: dict[str, Nested]) -> Evaluation:
        """Scores of every step ``[N, T]`` under ``policy``, in micro-batches and without gradient."""
        elements = self.layout.elements(data)
        order, slices = self.layout.in_order(elements, self.cfg.micro_batch_size, policy)
        if order is not None:
            elements = take(elements, order)
        micro_batches = self.own_micro_batches if policy is self.policy else self.micro_batches

        def scores(parts: list[dict[str, Nested]]) -> list[Evaluation]:
            return [self.layout.finish(self.evaluate(policy, part), part["loss_mask"]) for part in parts]

        parts = micro_batches.run([take(elements, part) for part in slices], scores)
        shape, dims = data["loss_mask"].shape, elements["loss_mask"].dim()

        def join(values: tuple[Tensor | None, ...]) -> Tensor | None:
            known = [value for value in values if value is not None]
            if not known:
                return None
            joined = torch.cat(known).to(data["loss_mask"].device)
            joined = joined if order is None else joined[order.argsort()]
            return joined.reshape(*shape, *known[0].shape[dims:])

        return Evaluation._make(join(values) for values in zip(*parts, strict=True))

    # --- progress and state ---

    def set_progress(self, progress: float, budget: int | float = 1, step: float = 0.0) -> None:
        """Set the schedules to the finished share of training, in [0, 1]; see ``schedule_factor`` for the others."""
        if not self.schedule.adaptive:
            self.schedule.set_factor(schedule_factor(self.cfg.schedule, progress, budget, step))
        if self.range_schedules is not None:
            self.cfg = at_progress(self.range_schedules, progress)

    def state_dict(self) -> dict[str, object]:
        """Everything but the policy that the next update depends on."""
        return {
            "optimizer": self.engine.whole(self.optimizer.state_dict()),
            "schedule": {"factor": self.schedule.factor},
            "iteration": self.iteration,
            "optimizer_steps": self.optimizer_steps,
        }

    def load_state_dict(self, state: dict) -> None:
        """Restore a saved ``state_dict``."""
        saved = state["optimizer"]
        own = self.engine.split(saved["state"], dict(enumerate(self.parameters)))
        self.optimizer.load_state_dict({**saved, "state": own})
        self.schedule.set_factor(state["schedule"]["factor"])
        self.iteration = state["iteration"]
        self.optimizer_steps = state["optimizer_steps"]


# --- optimiser and learning rate ---


def build_optimizer(cfg: AlgorithmCfg, parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimiser that ``cfg.optimizer`` describes, at ``cfg.learning_rate``."""
    settings: dict[str, Any] = {"lr": cfg.learning_rate, **cfg.optimizer.model_dump(exclude={"name"})}
    match cfg.optimizer.name:
        case "adam" | "adamw":
            decoupled = cfg.optimizer.name == "adamw"
            return torch.optim.Adam(parameters, fused=True, decoupled_weight_decay=decoupled, **settings)
        case "rmsprop":
            return torch.optim.RMSprop(parameters, **settings)
        case "sgd":
            return torch.optim.SGD(parameters, **settings)
        case name:
            raise ConfigError(
                f"optimizer={name!r} is not one of torch's; fix: give the algorithm optimizer=a function of settings and parameters"
            )


class Schedule:
    """Drives an optimiser's learning rate by the progress of training, or by the measured KL."""

    def __init__(self, cfg: ScheduleCfg, optimizer: Any, learning_rate: float) -> None:
        self.cfg = cfg
        self.optimizer = optimizer
        self.learning_rate = learning_rate
        self.factor = 1.0
        """The current rate, as a share of ``learning_rate``."""
        self.adaptive = isinstance(cfg, AdaptiveKLCfg)

    def adapt(self, step_metrics: Mapping[str, Tensor]) -> None:
        """``adaptive_kl``: lower the rate when the policy moves too fast, raise it when it hardly moves.

        Source: the rule of rsl_rl's PPO, factors 1.5 beyond [desired / 2, desired * 2].
        """
        assert isinstance(self.cfg, AdaptiveKLCfg)
        kl = float(step_metrics["approx_kl"])
        if kl > 2 * self.cfg.desired_kl:
            self.set_factor(max(self.factor / 1.5, self.cfg.min_factor))
        elif 0 < kl < self.cfg.desired_kl / 2:
            self.set_factor(min(self.factor * 1.5, self.cfg.max_factor))

    def set_factor(self, factor: float) -> None:
        """Set the rate to this share of ``learning_rate``."""
        self.factor = factor
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate * factor


def schedule_factor(cfg: ScheduleCfg, progress: float, budget: int | float = 1, step: float = 0.0) -> float:
    """Share of the learning rate for an update that begins at a share ``progress`` of training.

    Args:
        budget: all of training, in the unit of a ``warmup`` that is no share.
        step: share of training that the update takes. The warm-up counts it, so that its first update has a rate, too; with
            0 it is that of transformers.
    """
    if isinstance(cfg, LinearCfg) and cfg.warmup:
        warmup = cfg.warmup if cfg.warmup < 1 else cfg.warmup / budget
        if warmup >= 1:
            raise ConfigError(
                f"schedule.warmup={cfg.warmup} is all of a budget of {budget:g}; fix: less, or a larger budget"
            )
        if progress < warmup:
            return min((progress + step) / warmup, 1.0)
        progress = (progress - warmup) / (1 - warmup)
    match cfg:
        case CosineCfg():
            return cfg.final + (1 - cfg.final) * (1 + math.cos(math.pi * progress)) / 2
        case LinearCfg():
            return 1 - min(progress, 1) * (1 - cfg.final)
        case ExponentialCfg():
            return float(cfg.decay ** (progress / cfg.interval))
        case StepCfg():  # the tolerance keeps 0.75 / 0.25 at 3 despite rounding
            return cfg.decay ** math.floor(progress / cfg.interval + 1e-9)
        case _:
            return 1.0


@torch.no_grad()
def sampler_kl_sums(batch: Batch) -> Float[Tensor, "2"]:
    """KL of the sampler to the trainer, summed over the steps that count, and their number."""
    mask = batch["loss_mask"]
    distance = k3(batch["sample_log_prob"], batch["old_log_prob"])[mask].double()  # one host sync
    return torch.stack([distance.sum(), mask.sum().to(distance)])
