"""The optimisation that PPO and GRPO share: epochs, minibatches, micro-batches, one weighted loss.

An algorithm turns a rollout into a flat batch of elements with advantages; ``optimise`` then runs
``loss = sum(weight * term)``, with weights computed once for each whole optimiser step over all ranks. The gradient
therefore depends neither on the micro-batch size nor on the number of processes.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from functools import partial
from itertools import repeat
from typing import ClassVar, NamedTuple

import torch
from jaxtyping import Float
from tensordict import TensorDict
from torch import Tensor

from groupwise.algorithms.agreement import Agreement
from groupwise.algorithms.configs import AlgorithmCfg
from groupwise.algorithms.entropy import EntropyControl
from groupwise.algorithms.optim import Schedule, Trained, build_optimizer
from groupwise.algorithms.surrogate import Counts, check_objective, finest_unit, objective_data
from groupwise.data.minibatch import Epoch, coarsest, shuffle_items, shuffle_transitions, take
from groupwise.data.rollout import Nested, transition_view
from groupwise.data.row_batches import RowSizes, pack, shuffle_rows
from groupwise.engines.base import Engine
from groupwise.errors import ConfigError
from groupwise.functional.reduce import loss_weights
from groupwise.policies.base import Batch, Evaluation, Policy
from groupwise.seeding import derive_seed


class Terms(NamedTuple):
    """What an algorithm says of each element of a micro-batch."""

    loss: Tensor
    """Minimised; everything that has a gradient."""
    metrics: tuple[Tensor, ...]
    """Per element, in the order of ``metric_names``; logged as means over the steps of the update."""


class BaseAlgorithm(ABC):
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

    def __init__(self, cfg: AlgorithmCfg, policy: Policy, engine: Engine | None = None, *, seed: int = 0) -> None:
        check_objective(cfg.objective, policy)
        self.cfg = cfg
        self.policy = policy
        self.engine = engine or Engine()
        self.seed = seed
        self.iteration = 0
        policy.eval()  # dropout would move the ratio off 1 where nothing has changed yet
        self.engine.broadcast(policy)
        self.trained = Trained(policy.parameters())
        self.optimizer = build_optimizer(cfg, self.trained.tensors)
        self.schedule = Schedule(cfg.schedule, self.optimizer, cfg.learning_rate)
        self.entropy = EntropyControl(cfg, policy.device)
        if self.entropy.adaptive and EntropyControl.metric not in self.metric_names:
            raise ConfigError(
                f"objective.entropy.control='adaptive' needs the entropy, which {type(self).__name__} does not measure; "
                "mend: 'constant', or 'entropy' among its metric_names"
            )

    @abstractmethod
    def update(self, rollout: TensorDict) -> dict[str, Tensor]:
        """Improve the policy by one rollout ``[N, T+1]``, which is not written to; returns 0-dim metrics."""

    def terms(self, batch: Batch, evaluation: Evaluation) -> Terms:
        """Loss and metrics of each element, for ``optimise``."""
        raise TypeError(f"{type(self).__name__} uses optimise() and must define terms()")

    def prepare(self, batch: dict[str, Nested]) -> dict[str, Nested]:
        """A minibatch before it is cut into micro-batches: the place for statistics of the whole minibatch."""
        return batch

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

    def optimise(self, data: dict[str, Nested], num_episodes: int) -> dict[str, Tensor]:
        """Minimise ``terms`` over all epochs; returns the mean of each metric.

        Where no step of the rollout counts on any rank, nothing changes: ``train/optimizer_steps`` is 0.

        Args:
            data: keys ``[N, T]``: what ``policy.evaluate`` and ``terms`` read, with ``loss_mask`` and ``episode_id``.
            num_episodes: ids in ``episode_id`` are below it.
        """
        turns = int(data["turn"].max()) + 1 if "turn" in data else 0
        self.counts = Counts(num_episodes, turns)
        elements, mask = self._elements(data)
        total = int(self.engine.sum(mask.sum()))
        sums = torch.zeros(len(self.metric_names) + 1, device=mask.device)
        steps = 0
        watch = Agreement(mask.device) if self._is_watched else None
        for minibatch in self._minibatches(elements, total) if total else ():
            means = self._gradient(minibatch, None if steps else watch)
            if self._kl_ends_update(means):
                break
            sums += torch.cat([means, self._apply_gradient().reshape(1)])
            if self.entropy.adaptive:
                self.entropy.adapt(means[self.metric_names.index(EntropyControl.metric)])
            steps += 1
        names = (*self.metric_names, "grad_norm")
        out = {f"train/{name}": value for name, value in zip(names, (sums / max(steps, 1)).unbind(), strict=True)}
        out["train/optimizer_steps"] = sums.new_tensor(steps)
        out["train/learning_rate"] = sums.new_tensor(self.schedule.rate, dtype=torch.float64)
        if self.entropy.adaptive:
            out["train/ent_coef"] = self.entropy.coef.clone()
        return out if watch is None else out | watch.metrics(self.engine.sum)

    def rehearse(self, rollout: TensorDict) -> None:
        """Take the memory that the first optimiser step on a rollout ``[N, T+1]`` of rows takes, and change nothing.

        Its first micro-batch is the largest; with it, what the optimiser will keep of each parameter.
        """
        data, _ = self._elements(self.training_data(transition_view(rollout)))
        group = data["group_id"].amax(dim=1)
        siblings = torch.cat([(group == number).nonzero()[:2, 0] for number in group.unique()[:2]])
        with torch.no_grad():
            self._evaluate(self.policy, take(data, siblings))  # now it is known whether they share
        rows = torch.arange(len(data["loss_mask"]), device=self.policy.device)
        order, slices = pack(_row_sizes(self.policy, data), rows, self.cfg.micro_batch_size)
        kept = [torch.empty_like(parameter) for parameter in self.trained.tensors for _ in range(2)]
        evaluation = self._evaluate(self.policy, take(data, order[slices[0]]))
        torch.autograd.backward([evaluation.log_prob.sum(), evaluation.entropy.sum()])
        self.trained.zero_grad()
        del kept

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
        parts = [self._evaluate(policy, take(elements, part)) for part in slices]
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
        }

    def load_state_dict(self, state: dict) -> None:
        """Go on from a saved ``state_dict``."""
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        self.entropy.load_state_dict(state["entropy"])
        self.iteration = state["iteration"]

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
        num_minibatches = self._num_minibatches(total)
        if num_minibatches == 1 and self.cfg.micro_batch_size is None:
            # a single minibatch has no order: it is prepared once, and nothing is gathered
            whole = self._weigh(elements, [slice(0, len(elements["loss_mask"]))])
            yield from repeat(whole, self.cfg.num_epochs)
            return
        seed = derive_seed(self.seed, "minibatch", self.engine.rank, self.iteration)
        generator = torch.Generator().manual_seed(seed)
        for _ in range(self.cfg.num_epochs):
            epoch = self._epoch(elements, num_minibatches, generator)
            shuffled = take(elements, epoch.order)
            counts = torch.tensor([len(slices) for slices in epoch.minibatches], device=self.policy.device)
            for slices, count in zip(epoch.minibatches, self.engine.sum(counts).tolist(), strict=True):
                if count:  # fewer whole items than minibatches: a step on nothing would move on by momentum alone
                    yield self._weigh(shuffled, slices)

    def _epoch(self, elements: dict[str, Nested], num_minibatches: int, generator: torch.Generator) -> Epoch:
        mask = elements["loss_mask"]
        micro = self.cfg.micro_batch_size
        match coarsest(self.policy.scored_by, finest_unit(self.cfg.objective)):
            case "transition":
                shuffle = partial(shuffle_transitions, len(mask))
            case "episode":
                shuffle = partial(shuffle_items, elements["episode_id"], mask.long())
            case "row":
                shuffle = partial(shuffle_rows, _row_sizes(self.policy, elements))
        return shuffle(num_minibatches=num_minibatches, micro_batch_size=micro, generator=generator)

    def _num_minibatches(self, total: int) -> int:
        size = self.cfg.minibatch_size
        return 1 if size is None else max(1, round(total / size))

    def _weigh(self, shuffled: dict[str, Nested], slices: list[slice]) -> list[dict[str, Nested]]:
        """One optimiser step's micro-batches, with weights that are global over them and over all ranks."""
        whole = slice(slices[0].start, slices[-1].stop) if slices else slice(0, 0)
        batch = self.prepare(take(shuffled, whole))
        objective, mask, episode = self.cfg.objective, batch["loss_mask"], batch["episode_id"]
        weigh = partial(loss_weights, max_length=objective.max_length, all_sum=self.engine.sum)
        batch["share"] = weigh(mask, episode, self.counts.episodes, "token_mean")
        batch["weight"] = batch["share"]
        if objective.aggregation != "token_mean":
            batch["weight"] = weigh(mask, episode, self.counts.episodes, objective.aggregation)
        return [take(batch, slice(s.start - whole.start, s.stop - whole.start)) for s in slices]

    @property
    def _is_watched(self) -> bool:
        """Whether the sampler's probabilities may differ from the trainer's."""
        return self.cfg.objective.old_log_prob == "recomputed"

    def _is_single_pass(self, mask: Tensor) -> bool:
        """Whether the update is one optimiser step, on the policy that it begins with."""
        return self.cfg.num_epochs == 1 and self._num_minibatches(int(self.engine.sum(mask.sum()))) == 1

    def _gradient(self, minibatch: list[dict[str, Nested]], watch: Agreement | None) -> Float[Tensor, " metric"]:
        """Leave the gradient of one optimiser step in the parameters; returns the metrics' global means."""
        self.trained.zero_grad()
        means = torch.zeros(len(self.metric_names), device=self.policy.device)
        for batch in minibatch:
            evaluation = self._evaluate(self.policy, batch)
            batch.setdefault("old_log_prob", evaluation.log_prob.detach())  # of a single pass
            if watch is not None:
                watch.note(batch, evaluation.log_prob)
            terms = self.terms(batch, evaluation)
            (batch["weight"] * terms.loss).sum().backward()
            if terms.metrics:
                means += torch.stack(terms.metrics).detach().flatten(1) @ batch["share"].flatten()
        self.engine.sum_gradients(self.trained.tensors)
        return self.engine.sum(means)

    def _evaluate(self, policy: Policy, batch: Batch) -> Evaluation:
        """Scores of a batch; in rows, what the policy says of padding (it may be NaN) is replaced by 0."""
        evaluation = policy.evaluate(batch)
        if policy.scored_by == "transition":
            return evaluation
        padding = ~batch["loss_mask"]

        def blank(scores: Tensor) -> Tensor:
            return scores.masked_fill(padding if scores.dim() == padding.dim() else padding.unsqueeze(-1), 0.0)

        log_prob, entropy, value, dist = evaluation
        return Evaluation(
            blank(log_prob),
            blank(entropy),
            value if value is None else blank(value),
            dist if dist is None else blank(dist),
        )

    def _kl_ends_update(self, means: Float[Tensor, " metric"]) -> bool:
        """Feed the measured KL to what asks for it; True when it exceeds the limit (SB3's 1.5 times the target)."""
        adaptive = self.cfg.schedule.name == "adaptive_kl"
        if self.cfg.target_kl is None and not adaptive:
            return False
        approx_kl = float(means[self.metric_names.index("approx_kl")])
        if adaptive:
            self.schedule.adapt(approx_kl)
        return self.cfg.target_kl is not None and approx_kl > 1.5 * self.cfg.target_kl

    def _apply_gradient(self) -> Tensor:
        """Clip the gradient, step the optimiser; returns the norm before clipping."""
        limit = float("inf") if self.cfg.max_grad_norm is None else self.cfg.max_grad_norm
        norm = torch.nn.utils.clip_grad_norm_(self.trained.tensors, limit)
        self.optimizer.step()
        return norm


def _row_sizes(policy: Policy, rows: Batch) -> RowSizes:
    sizes = RowSizes.of(rows["valid"], rows["loss_mask"], rows["group_id"])
    return sizes if policy.shares_beginnings else sizes.apart()
