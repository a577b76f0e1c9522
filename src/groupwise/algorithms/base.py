"""The optimisation that PPO and GRPO share: epochs, minibatches, micro-batches, one weighted loss.

An algorithm turns a rollout into a flat batch of elements with advantages; ``optimise`` then runs
``loss = sum(weight * term)``, with weights computed once for each whole optimiser step over all ranks. The gradient
therefore depends neither on the micro-batch size nor on the number of processes.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from groupwise.algorithms.agreement import Agreement
from groupwise.algorithms.compiled_gradient import GradientCompiler
from groupwise.algorithms.entropy import EntropyControl
from groupwise.algorithms.loss import Counts, check_objective, finest_unit, objective_data
from groupwise.algorithms.optim import FlatAdam, Optimizer, Schedule, Trained, build_optimizer
from groupwise.algorithms.resident import StaysOnDevice
from groupwise.algorithms.step_metrics import StepMetrics, metric_sums
from groupwise.config.algorithm import AlgorithmCfg
from groupwise.data.minibatch import Epoch, coarsest, cut, shuffle_items, shuffle_transitions, take
from groupwise.data.rollout import Nested
from groupwise.data.row_batches import RowSizes, pack, shuffle_rows
from groupwise.engines.base import Engine
from groupwise.errors import ConfigError
from groupwise.functional.reduce import loss_weights, token_mean_weights
from groupwise.lean_tensordict import TensorDict
from groupwise.policies.base import Batch, Evaluation, Policy
from groupwise.seeding import derive_seed


class Terms(NamedTuple):
    """What an algorithm says of each element of a micro-batch."""

    loss: Tensor
    """Minimised; everything that has a gradient."""
    metrics: tuple[Tensor, ...]
    """Per element, in the order of ``metric_names``; logged as means over the steps of the update."""
    ratio: Tensor | None = None
    """Of new to old probability; with it ``metric_names`` end with ``DIAGNOSTICS``."""


class BaseAlgorithm(StaysOnDevice, ABC):
    """Subclass it with ``update`` (and ``terms``, if you use ``optimise``) and register it with its own config.

    Args:
        engine: the processes that train together.
        seed: of the order of minibatches.
    """

    grouped: ClassVar[bool] = False
    """Whether rollouts must hold groups of siblings that share a start."""
    actor_only: ClassVar[bool] = False
    """Whether the policy needs no critic."""
    metric_names: ClassVar[tuple[str, ...]] = ()
    """What ``terms`` reports; ``approx_kl`` among them serves ``target_kl`` and the adaptive schedule."""
    pure_terms: ClassVar[Callable[..., Terms] | None] = None
    """The ``terms`` that depend on ``cfg``, policy and batch alone, so that they may be compiled; a subclass with other ones
    is left alone until it says so itself."""

    def __init__(self, cfg: AlgorithmCfg, policy: Policy, engine: Engine | None = None, *, seed: int = 0) -> None:
        check_objective(cfg.objective, policy)
        self.cfg = cfg
        self.policy = policy
        self.engine = engine or Engine()
        self.seed = seed
        self.iteration = 0
        self.optimizer_steps = 0
        policy.eval()  # dropout would move the ratio off 1 where nothing has changed yet
        self.engine.broadcast(policy)
        self.trained = Trained(policy.parameters())
        self.optimizer: Optimizer = build_optimizer(cfg, self.trained)
        self.schedule = Schedule(cfg.schedule, self.optimizer, cfg.learning_rate)
        self.entropy = EntropyControl(cfg, policy.device)
        if self.entropy.adaptive and EntropyControl.metric not in self.metric_names:
            raise ConfigError(
                f"objective.entropy.control='adaptive' needs the entropy, which {type(self).__name__} does not measure; "
                "fix: 'constant', or 'entropy' among its metric_names"
            )
        self.compiler = GradientCompiler(policy, self.trained, self._losses, when=self.compiles)

    @abstractmethod
    def update(self, rollout: TensorDict) -> dict[str, Tensor]:
        """Improve the policy by one rollout ``[N, T+1]``, which is not written to; returns 0-dim metrics."""

    def terms(self, batch: Batch, evaluation: Evaluation) -> Terms:
        """Loss and metrics of each element, for ``optimise``."""
        raise TypeError(f"{type(self).__name__} uses optimise() and must define terms()")

    def prepare(self, elements: dict[str, Nested], minibatch: Tensor, num_minibatches: int) -> dict[str, Nested]:
        """An epoch's elements before they are cut: the place for statistics of whole minibatches.

        Args:
            minibatch: the number of each element's minibatch, shaped like ``loss_mask``; the same on every rank.
        """
        return elements

    def training_data(self, batch: TensorDict) -> dict[str, Nested]:
        """What every optimisation reads of the transitions ``[N, T]``; add advantages and what ``terms`` needs."""
        keys = {*self.policy.batch_keys, "loss_mask", "episode_id"}
        if self.policy.scored_by == "row":
            keys |= {"valid", "group_id"}
        if self._is_watched:
            keys |= {"step", "sample_log_prob"}
        data = {key: batch[key] for key in keys}
        if "trained" in batch.keys():  # noqa: SIM118  iterating goes over rows
            data["loss_mask"] = data["loss_mask"] & batch["trained"]
        return data

    def objective_data(
        self,
        batch: TensorDict,
        data: dict[str, Nested],
        advantage: Tensor,
        num_episodes: int,
        start: Evaluation | None = None,
    ) -> dict[str, Nested]:
        """``data`` with the advantages, and with what the configured objective reads besides them.

        Args:
            start: what the policy says of every step at the update's start, if that is known already.
        """
        more = objective_data(
            self.cfg.objective,
            batch,
            advantage,
            data["loss_mask"],
            num_episodes,
            lambda: self.score(self.policy, data) if start is None else start,
            seed=derive_seed(self.seed, "objective", self.iteration),
            single_pass=self._is_single_pass(data["loss_mask"]),
            all_sum=self.engine.sum,
        )
        return data | {"advantage": advantage} | more

    def set_progress(self, progress: float) -> None:
        """Tell the schedule which share of training is done, in [0, 1]."""
        self.schedule.set_progress(progress)
        self.compiler.expect(self.optimizer_steps, progress)

    def optimise(self, data: dict[str, Nested], num_episodes: int) -> dict[str, Tensor]:
        """Minimise ``terms`` over all epochs; returns the mean of each metric.

        Where no step of the rollout counts on any rank, nothing changes: ``train/optimizer_steps`` is 0.

        Args:
            data: keys ``[N, T]``: what ``policy.evaluate`` and ``terms`` read, with ``loss_mask`` and ``episode_id``.
            num_episodes: ids in ``episode_id`` are below it.
        """
        turns = int(data["turn"].max()) + 1 if "turn" in data else 0
        self.counts = Counts(num_episodes, turns)
        elements, mask = self._elements(data, compact=self.resident is None)
        total = self._total(mask)
        said = StepMetrics(self.metric_names, self.cfg.objective, mask.device, self.engine.sum)
        watch = Agreement(mask.device) if self._is_watched else None
        scorer = self.policy.evaluating(self.trained.tensors[0]) if self.trained.is_flat else self.policy.evaluate
        compiled = self.compiler.is_on and self.compiles != "never"
        for minibatch in self._minibatches(elements, total) if total else ():
            if not (compiled and self.compiler.leave_gradient(minibatch, said)):
                self._gradient(minibatch, scorer, said, None if said.steps else watch)
            self.engine.sum_gradients(self.trained.tensors)
            means = said.of_step() if self._is_followed else {}
            if self._kl_ends_update(means):
                break
            said.end_step(self._apply_gradient(), None if self.resident is None else self.resident.taken)
            if self.entropy.adaptive:
                self.entropy.adapt(means[EntropyControl.metric])
        self.optimizer_steps += said.steps
        out = {f"train/{name}": value for name, value in said.means().items()}
        out["train/optimizer_steps"] = said.taken()
        out["train/learning_rate"] = self.schedule.measured(mask.device)
        if self.entropy.adaptive:
            out["train/ent_coef"] = self.entropy.coef.clone()
        return out if watch is None else out | watch.metrics(self.engine.sum)

    @torch.no_grad()
    def score(self, policy: Policy, data: dict[str, Nested]) -> Evaluation:
        """What ``policy`` says of every step ``[N, T]``, in micro-batches and without gradient."""
        elements, _ = self._elements(data, compact=False)
        count, size = elements["loss_mask"].shape[0], self.cfg.micro_batch_size
        slices = [slice(i, i + (size or count)) for i in range(0, count, size or count)]
        back: Tensor | slice = slice(None)
        if policy.scored_by == "row":
            order, slices = pack(_row_sizes(policy, elements), torch.arange(count, device=policy.device), size)
            elements, back = take(elements, order), order.argsort()
        scorer = policy.evaluating()
        batches = [take(elements, part) for part in slices]
        parts = [self._blanked(scorer(batch), batch) for batch in batches]
        shape, dims = data["loss_mask"].shape, elements["loss_mask"].dim()

        def join(values: tuple[Tensor | None, ...]) -> Tensor | None:
            known = [value for value in values if value is not None]
            return torch.cat(known)[back].reshape(*shape, *known[0].shape[dims:]) if known else None

        log_prob, entropy, value, dist = (join(values) for values in zip(*parts, strict=True))
        assert log_prob is not None
        assert entropy is not None
        return Evaluation(log_prob, entropy, value, dist)

    def state_dict(self) -> dict[str, object]:
        """Everything but the policy that the next update depends on."""
        return {
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "entropy": self.entropy.state_dict(),
            "iteration": self.iteration,
            "optimizer_steps": self.optimizer_steps,
            "compiler": self.compiler.state_dict(),
        }

    def load_state_dict(self, state: dict) -> None:
        """Go on from a saved ``state_dict``."""
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        self.entropy.load_state_dict(state["entropy"])
        self.iteration = state["iteration"]
        self.optimizer_steps = state["optimizer_steps"]
        self.compiler.load_state_dict(state["compiler"])
        if self.resident is not None:
            self.resident.forget()

    def _elements(self, data: dict[str, Nested], compact: bool = True) -> tuple[dict[str, Nested], Tensor]:
        """Rows as they are for sequence models, else flat transitions (``compact``: only those that count)."""
        if self.policy.scored_by == "row":
            rows = take(data, data["loss_mask"].any(dim=1)) if compact else data
            return rows, rows["loss_mask"]
        flat = {
            key: tensor.reshape(-1, *tensor.shape[2:]) if isinstance(tensor, Tensor) else tensor.reshape(-1)
            for key, tensor in data.items()
        }
        if compact:
            flat = take(flat, flat["loss_mask"].nonzero()[:, 0])
        return flat, flat["loss_mask"]

    def _minibatches(self, elements: dict[str, Nested], total: int) -> Iterator[list[dict[str, Nested]]]:
        """Micro-batches of each optimiser step, weights included, epoch after epoch."""
        num_minibatches, resident = self._num_minibatches(total), self.resident
        if resident is not None:
            resident.begin()
        if num_minibatches == 1 and self.cfg.micro_batch_size is None:
            # a single minibatch has no order: it is prepared once, and nothing is gathered
            whole = slice(0, len(elements["loss_mask"]))
            weighed = [self._weigh(elements, [[whole]])]
            for _ in range(self.cfg.num_epochs):
                if resident is not None:
                    resident.take_up(0)
                yield weighed
            return
        seed = derive_seed(self.seed, "minibatch", self.engine.rank, self.iteration)
        generator = torch.Generator().manual_seed(seed)
        for number in range(self.cfg.num_epochs):
            epoch = self._epoch(elements, num_minibatches, generator, number)
            shuffled = self._weigh(take(elements, epoch.order), epoch.minibatches)
            if resident is None:
                lengths = torch.tensor([len(slices) for slices in epoch.minibatches], device=self.policy.device)
                counts = self.engine.sum(lengths).tolist()
            parts = cut(shuffled, [part.stop - part.start for slices in epoch.minibatches for part in slices])
            for index, slices in enumerate(epoch.minibatches):
                if resident is not None:
                    resident.take_up(index)
                elif not counts[index]:
                    continue  # fewer whole items than minibatches: a step on nothing would move on by momentum alone
                yield list(islice(parts, len(slices)))

    def _epoch(
        self, elements: dict[str, Nested], num_minibatches: int, generator: torch.Generator, number: int
    ) -> Epoch:
        mask = elements["loss_mask"]
        micro = self.cfg.micro_batch_size
        if self.resident is not None:
            return self.resident.epoch(number, len(mask), num_minibatches, micro)
        match coarsest(self.policy.scored_by, finest_unit(self.cfg.objective)):
            case "transition":
                shuffle = partial(shuffle_transitions, len(mask))
            case "episode":
                shuffle = partial(shuffle_items, elements["episode_id"], mask.long())
            case "row":
                shuffle = partial(shuffle_rows, _row_sizes(self.policy, elements))
        return shuffle(num_minibatches=num_minibatches, micro_batch_size=micro, generator=generator)

    def _total(self, mask: Tensor) -> int:
        """How many steps an epoch has: those that count on all ranks, or of updates that stay on the device all slots."""
        return int(self.engine.sum(mask.sum())) if self.resident is None else mask.numel()

    def _num_minibatches(self, total: int) -> int:
        size = self.cfg.minibatch_size
        return 1 if size is None else max(1, round(total / size))

    def _weigh(self, elements: dict[str, Nested], minibatches: list[list[slice]]) -> dict[str, Nested]:
        """An epoch's elements, prepared, with weights that are global over each optimiser step's on all ranks."""
        objective, count = self.cfg.objective, len(minibatches)
        sizes = [sum(part.stop - part.start for part in slices) for slices in minibatches]
        if self.resident is None:
            minibatch = torch.arange(count).repeat_interleave(torch.tensor(sizes)).to(self.policy.device)
        else:
            minibatch = self.resident.numbers(tuple(sizes))
            self.resident.weigh(elements["loss_mask"], minibatch, count)
        minibatch = minibatch.view(-1, *[1] * (elements["loss_mask"].dim() - 1)).expand_as(elements["loss_mask"])
        elements = self.prepare(dict(elements), minibatch, count)
        mask, episode = elements["loss_mask"], elements["episode_id"]
        elements["share"] = token_mean_weights(mask & (episode >= 0), minibatch, count, all_sum=self.engine.sum)
        elements["weight"] = elements["share"]
        if objective.aggregation != "token_mean":
            weigh = partial(loss_weights, max_length=objective.max_length, all_sum=self.engine.sum)
            whole = zip(mask.split(sizes), episode.split(sizes), strict=True)
            weights = [weigh(m, e, self.counts.episodes, objective.aggregation) for m, e in whole]
            elements["weight"] = torch.cat(weights)
        return elements

    @property
    def _is_watched(self) -> bool:
        """Whether the sampler's probabilities may differ from the trainer's."""
        return self.cfg.objective.old_log_prob == "recomputed"

    def _is_single_pass(self, mask: Tensor) -> bool:
        """Whether the update is one optimiser step, on the policy that it begins with."""
        return self.cfg.num_epochs == 1 and self._num_minibatches(self._total(mask)) == 1

    @property
    def _is_followed(self) -> bool:
        """Whether anything looks at the metrics of every single step."""
        return self.cfg.target_kl is not None or self.cfg.schedule.name == "adaptive_kl" or self.entropy.adaptive

    @property
    def compiles(self) -> str:
        """When minibatches are compiled: "never", "auto" or "compiled"; what ``policy.compiles`` says, if the rest allows it."""
        may = (
            self.policy.compiles != "never"
            and self.trained.is_flat
            and all(parameter.requires_grad for parameter in self.trained.parameters)
            and type(self).terms is type(self).pure_terms
            and finest_unit(self.cfg.objective) == "transition"
            and not self.entropy.adaptive
            and not self._is_watched
        )
        return self.policy.compiles if may else "never"

    def _gradient(
        self,
        minibatch: list[dict[str, Nested]],
        scorer: Callable[[Batch], Evaluation],
        said: StepMetrics,
        watch: Agreement | None,
    ) -> None:
        """Leave the gradient of one optimiser step in the parameters; ``said`` notes the metrics."""
        self.trained.zero_grad()
        for batch in minibatch:
            evaluation, terms = self._scored(scorer, batch)
            if watch is not None:
                watch.note(batch, evaluation.log_prob)
            (batch["weight"] * terms.loss).sum().backward()
            said.note(terms.metrics, terms.ratio, evaluation.log_prob, batch)
        self.trained.gather_grad()

    def _losses(self, batch: dict[str, Nested]) -> tuple[Tensor, Tensor]:
        """The loss of a micro-batch, and the sums of its metrics."""
        evaluation, terms = self._scored(self.policy.evaluate, batch)
        sums = metric_sums(self.cfg.objective, terms.metrics, terms.ratio, evaluation.log_prob, batch)
        return (batch["weight"] * terms.loss).sum(), sums

    def _scored(self, scorer: Callable[[Batch], Evaluation], batch: dict[str, Nested]) -> tuple[Evaluation, Terms]:
        evaluation = self._blanked(scorer(batch), batch)
        batch.setdefault("old_log_prob", evaluation.log_prob.detach())  # of a single pass
        return evaluation, self.terms(batch, evaluation)

    def _blanked(self, evaluation: Evaluation, batch: Batch) -> Evaluation:
        """In rows, what the policy says of padding (it may be NaN) is replaced by 0."""
        return evaluation if self.policy.scored_by == "transition" else evaluation.blanked(~batch["loss_mask"])

    def _kl_ends_update(self, means: dict[str, Tensor]) -> bool:
        """Feed the measured KL to what asks for it; True when it exceeds the limit (SB3's 1.5 times the target)."""
        adaptive = self.cfg.schedule.name == "adaptive_kl"
        if self.cfg.target_kl is None and not adaptive:
            return False
        limit = None if self.cfg.target_kl is None else 1.5 * self.cfg.target_kl
        if self.resident is not None:
            self.resident.follow(means["approx_kl"], limit)
            return False
        approx_kl = float(means["approx_kl"])
        if adaptive:
            self.schedule.adapt(approx_kl)
        return limit is not None and approx_kl > limit

    def _apply_gradient(self) -> Tensor:
        """Clip the gradient, step the optimiser; returns the norm before clipping."""
        norm = self.trained.clip_grad(math.inf if self.cfg.max_grad_norm is None else self.cfg.max_grad_norm)
        if self.resident is None:
            self.optimizer.step()
        else:
            assert isinstance(self.optimizer, FlatAdam)
            self.optimizer.step(self.resident.taken)
        return norm


def _row_sizes(policy: Policy, rows: Batch) -> RowSizes:
    sizes = RowSizes.of(rows["valid"], rows["loss_mask"], rows["group_id"])
    return sizes if policy.shares_beginnings else sizes.apart()
