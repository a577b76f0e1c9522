"""What keeps an update on the device: constant shapes, and tensors in place of Python's numbers that change.

Steps that do not count stay in their minibatch without weight; minibatches are cut by slots, counted or not. Each is then
what the reference makes of its steps that count, so both come to the same parameters from the same order. An optimiser
step that the reference would not take (a minibatch without a step that counts, a KL beyond the limit) is taken with a
mark that leaves parameters and moments as they are.
"""

from collections.abc import Callable
from weakref import WeakMethod

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from groupwise.algorithms.loss import finest_unit
from groupwise.algorithms.optim import FlatAdam, Optimizer, Schedule
from groupwise.config.algorithm import AlgorithmCfg, CreditCfg
from groupwise.data.minibatch import Epoch, cut_evenly
from groupwise.data.rollout import leaves
from groupwise.engines.base import Engine
from groupwise.engines.replay import Recorder, Replayed
from groupwise.functional.reduce import segment_sum
from groupwise.functional.row_random import hash_pair
from groupwise.lean_tensordict import TensorDict
from groupwise.policies.base import Policy
from groupwise.seeding import derive_seed

Learn = Callable[[TensorDict], dict[str, Tensor]]


class Resident:
    """Of one algorithm: the order of its minibatches, which steps are taken, and the update as one replayed function.

    Args:
        learn: the update of a rollout, less what Python has to do in each iteration.
        recorder: of the update; None: the device's.
    """

    def __init__(
        self, learn: Learn, schedule: Schedule, device: torch.device, *, seed: int, recorder: Recorder | None = None
    ) -> None:
        # a strong reference would be a cycle, which keeps rollouts and graphs until somebody looks for it
        self._learn = WeakMethod(learn)
        self._schedule = schedule
        self._device = device
        self._run_seed = seed
        self._seed = torch.zeros((), dtype=torch.int64, device=device)
        self._numbers: dict[tuple[int, ...], Tensor] = {}
        self._rollout: TensorDict | None = None
        self._replayed = Replayed(self._update, device, name="the update", recorder=recorder)
        schedule.stay_on(device)

    def __call__(self, rollout: TensorDict, iteration: int) -> dict[str, Tensor]:
        """What ``learn`` returns; it stays good until the next call."""
        self._seed.fill_(derive_seed(self._run_seed, "minibatch", iteration))
        self._rollout = rollout
        return self._replayed(leaves(rollout))

    @property
    def is_recorded(self) -> bool:
        """Whether updates are replayed."""
        return self._replayed.is_recorded

    def forget(self) -> None:
        """Record anew: state was loaded into other tensors."""
        self._replayed.forget()

    def begin(self) -> None:
        """An update begins: it goes on until its KL ends it."""
        self._live = torch.ones((), device=self._device)

    def epoch(self, number: int, count: int, num_minibatches: int, micro_batch_size: int | None) -> Epoch:
        """A random order of ``count`` slots, drawn on the device, cut into minibatches of equal size (but for one slot)."""
        return Epoch(shuffled(self._seed, number, count), cut_evenly(count, num_minibatches, micro_batch_size))

    def numbers(self, sizes: tuple[int, ...]) -> Int[Tensor, " slot"]:
        """The minibatch of each slot, for minibatches of these sizes."""
        if sizes not in self._numbers:
            parts = [torch.full((size,), number, device=self._device) for number, size in enumerate(sizes)]
            self._numbers[sizes] = torch.cat(parts)
        return self._numbers[sizes]

    def weigh(self, mask: Bool[Tensor, " slot"], numbers: Int[Tensor, " slot"], num_minibatches: int) -> None:
        """Look which minibatches of an epoch have a step that counts."""
        self._has_steps = (segment_sum(mask.float(), numbers, num_minibatches) > 0).float().unbind()

    def take_up(self, minibatch: int) -> None:
        """The step on this minibatch of the epoch comes next."""
        self._taken = self._live * self._has_steps[minibatch]

    def follow(self, approx_kl: Float[Tensor, ""], limit: float | None) -> None:
        """Take in the KL of the step that is being taken: to the learning rate, and to whether the update goes on."""
        if self._schedule.cfg.name == "adaptive_kl":
            self._schedule.adapt_in_place(approx_kl, self._taken)
        if limit is not None:
            self._live = self._live * (1 - self._taken * (approx_kl > limit).float())
            self._taken = self._taken * self._live

    @property
    def taken(self) -> Float[Tensor, ""]:
        """1 where the step counts, 0 where the reference would not take it."""
        return self._taken

    def _update(self) -> dict[str, Tensor]:
        assert self._rollout is not None
        learn = self._learn()
        assert learn is not None
        return learn(self._rollout)


def shuffled(seed: Int[Tensor, ""], epoch: int, count: int) -> Int[Tensor, " slot"]:
    """A random order of 0..count-1: that of hashes of the seed, the epoch and each number. Equal on every device."""
    place = torch.arange(epoch * count, (epoch + 1) * count, device=seed.device)
    return hash_pair(seed, place).argsort()


class StaysOnDevice:
    """The part of an algorithm that keeps its updates on the device, where it can and somebody asks for it."""

    cfg: AlgorithmCfg
    policy: Policy
    engine: Engine
    seed: int
    iteration: int
    optimizer: Optimizer
    schedule: Schedule
    resident: Resident | None = None
    """What keeps updates on the device, after ``stay_on_device``."""

    def stay_on_device(self, recorder: Recorder | None = None) -> str | None:
        """Have updates wait for nothing, and on a GPU be recorded and replayed; why that cannot be, or None where it is so now.

        Rollouts must then come from a collector that keeps them on the device (``TorchVectorCollector``,
        ``TorchGroupCollector``).

        Args:
            recorder: of updates; None: the device's.
        """
        why = self.why_not_resident()
        if why is None:
            seed = derive_seed(self.seed, "resident", self.engine.rank)
            self.resident = Resident(self.learn, self.schedule, self.policy.device, seed=seed, recorder=recorder)
        return why

    def why_not_resident(self) -> str | None:
        """What keeps updates from staying on the device; None if nothing does."""
        cls = type(self)
        if cls.learn is StaysOnDevice.learn:
            return f"{cls.__name__} has no learn()"
        for name in ("terms", "update", "prepare"):
            if _depth(cls, name) < _depth(cls, "learn"):
                return f"{cls.__name__} has a {name}() that may read what Python changes, and no learn() of its own"
        return self._why_not()

    def learn(self, rollout: TensorDict) -> dict[str, Tensor]:
        """The part of ``update`` that is tensors only, and reads nothing else that changes between updates."""
        raise TypeError(f"{type(self).__name__} stays on the device and must define learn()")

    def learned(self, rollout: TensorDict) -> dict[str, Tensor]:
        """``learn``, replayed where updates stay on the device."""
        return self.learn(rollout) if self.resident is None else self.resident(rollout, self.iteration)

    def num_ids(self, ids: Tensor, rows: int = 1) -> int:
        """A number above all ids of a rollout ``[N, T]``: the next one, or of updates that stay on the device N * T / rows.

        Args:
            rows: that begin together, and have one id.
        """
        return int(ids.max()) + 1 if self.resident is None else ids.numel() // rows

    def _why_not(self) -> str | None:
        cfg, objective = self.cfg, self.cfg.objective
        found = {
            "several processes train together": self.engine.world_size > 1,
            "the policy is scored by whole rows": self.policy.scored_by == "row",
            f"optimizer.name={cfg.optimizer.name!r} cannot leave a step out by itself (adam can)": (
                cfg.optimizer.name not in ("adam", "adamw")
            ),
            "the policy has more parameters than are kept in one vector, or of several kinds": (
                not isinstance(self.optimizer, FlatAdam)
            ),
            "objective.entropy.control='adaptive' goes by single steps": objective.entropy.control == "adaptive",
            "the objective keeps episodes whole in a minibatch": finest_unit(objective) != "transition",
            "objective.old_log_prob='recomputed' compares sampler and trainer": objective.old_log_prob != "sampled",
            f"objective.trust_region={objective.trust_region!r} looks for steps that stand out": (
                objective.trust_region in ("clip_cov", "kl_cov")
            ),
            f"objective.top_entropy={objective.top_entropy} looks for steps that stand out": objective.top_entropy < 1,
        }
        return next((reason for reason, holds in found.items() if holds), None)


def _depth(cls: type, name: str) -> int:
    """How many classes lie between this one and the one whose method it has."""
    return next(depth for depth, base in enumerate(cls.__mro__) if name in vars(base))


def needs_counts(cfg: CreditCfg) -> str | None:
    """Why credit looks at the rollout before it knows how much there is to compute; None if it does not."""
    found = {
        f"credit.rule={cfg.rule!r} is not known to stay on the device": cfg.rule != "composed",
        "credit.returns='turn' counts turns": cfg.returns == "turn",
        "credit.anchor_weight looks for equal observations": cfg.anchor_weight > 0,
        f"credit.baseline={cfg.baseline!r} looks for attempts that count": cfg.baseline in ("greedy", "ema"),
        "credit.baseline='near_states' looks for steps that count": cfg.baseline == "near_states",
        "credit.early_finisher='absorb' counts the steps of groups": (
            cfg.group_key == "group_step" and cfg.early_finisher == "absorb"
        ),
    }
    return next((reason for reason, holds in found.items() if holds), None)
