"""The rollout: one iteration's experience as a TensorDict of batch ``[N, T+1]``, and its buffer.

N rows are environments (or prompts x group size), T steps or tokens. The last slot holds the state after the last
transition (an observation, its value); keys of transitions are padding there. ``docs/concepts.md`` has the schema.
"""

import logging
import math
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple, TypeAlias, cast

import torch
import torch.compiler
from jaxtyping import Bool
from torch import Tensor

from groupwise.config.algorithm import OnNonFinite
from groupwise.errors import DataError, DivergedError

# On import tensordict marks a few of its functions for torch.compile, and marking imports the compiler: half of the time in
# which a training starts. They stay unmarked here: compiled code traces into them.
_MARKS = {name: getattr(torch.compiler, name) for name in ("allow_in_graph", "assume_constant_result")}
try:
    vars(torch.compiler).update(dict.fromkeys(_MARKS, lambda function: function))
    from tensordict import TensorDict as TensorDict
finally:
    vars(torch.compiler).update(_MARKS)

log = logging.getLogger(__name__)


class TensorSpec(NamedTuple):
    """Shape and dtype of one slot's tensor, without the leading ``[N, T+1]``."""

    shape: tuple[int, ...]
    dtype: torch.dtype


Spec: TypeAlias = TensorSpec | Mapping[str, Any]
"""One tensor, or a (nested) dictionary of them: Dict and Tuple observation spaces. ``Any`` is a ``Spec`` again, which
run-time type checkers cannot follow."""

Nested: TypeAlias = Tensor | TensorDict
"""Tensors that a ``Spec`` describes."""

_TRANSITION_KEYS: dict[str, torch.dtype] = {
    "reward": torch.float32,
    "terminated": torch.bool,
    "truncated": torch.bool,
    "valid": torch.bool,
    "loss_mask": torch.bool,
    "sample_log_prob": torch.float32,
    "group_id": torch.int64,
    "episode_id": torch.int64,
    "step": torch.int64,
}
_VALUE_KEYS: dict[str, torch.dtype] = {"value": torch.float32, "next_value": torch.float32}
_ID_KEYS = ("group_id", "episode_id")


def allocate(spec: Spec, *batch: int, device: torch.device | str = "cpu") -> Nested:
    """Zeros of shape ``[*batch, *spec.shape]``, a TensorDict of them for a nested spec."""
    if isinstance(spec, TensorSpec):
        return torch.zeros((*batch, *spec.shape), dtype=spec.dtype, device=device)
    leaves = {name: allocate(leaf, *batch, device=device) for name, leaf in spec.items()}
    return TensorDict(leaves, batch_size=list(batch), device=torch.device(device))


def transition_view(rollout: TensorDict) -> TensorDict:
    """The ``[N, T]`` transitions of a rollout: a view without the padded last slot.

    Raises:
        DataError: the rollout is not ``[N, T+1]``.
    """
    if rollout.batch_dims != 2:
        raise DataError(f"the batch of the rollout is {list(rollout.shape)}; expected [N, T+1]; fix: no flatten=True")
    return rollout[:, :-1]


@torch.inference_mode(False)  # others write into it, too
def lengthen(rollout: TensorDict, more: int) -> TensorDict:
    """A copy of the rollout with ``more`` slots at the end, which are empty (see ``start_rollout``)."""
    longer: TensorDict = torch.cat([rollout, torch.zeros_like(rollout[:, :1]).expand(-1, more)], dim=1)
    for key in _ID_KEYS:
        longer[key][:, -more:] = -1
    return longer


class RolloutBuffer:
    """``start_rollout`` allocates a rollout, ``add`` checks a collected one.

    Args:
        num_rows: N, the environments. 0: each rollout has a number of its own.
        num_steps: T, transitions per row; after a longer rollout, new ones are as long.
        state_size: S of a recurrent policy (adds ``state``, its state before each observation).
        num_units: K of a policy scored by ``token``, whose ``sample_log_prob`` is ``[N, T+1, K]``; None for other policies.
        value: whether the policy has a critic (adds ``value`` and ``next_value``).
        chunked: whether a decision takes several environment steps (adds ``executed``, their number).
        reward_parts: how many parts of the reward are kept (adds ``reward_parts``).
        on_nonfinite: handling of numbers that are not finite in ``add``, as ``AlgorithmCfg.on_nonfinite``.
    """

    row_name: ClassVar[str] = "environment"
    """Name of a row in messages."""

    def __init__(
        self,
        num_rows: int,
        num_steps: int,
        *,
        obs_spec: Spec,
        action_spec: Spec,
        state_size: int = 0,
        num_units: int | None = None,
        value: bool = False,
        chunked: bool = False,
        reward_parts: int = 0,
        on_nonfinite: OnNonFinite = "stop",
        device: torch.device | str = "cpu",
    ) -> None:
        scalars = _TRANSITION_KEYS | (_VALUE_KEYS if value else {})
        self.spec: dict[str, Spec] = {"obs": obs_spec, "action": action_spec}
        self.spec |= {key: TensorSpec((), dtype) for key, dtype in scalars.items()}
        if state_size:
            self.spec["state"] = TensorSpec((state_size,), torch.float32)
        if num_units is not None:
            self.spec["sample_log_prob"] = TensorSpec((num_units,), torch.float32)
        if chunked:
            self.spec["executed"] = TensorSpec((), torch.int64)
        if reward_parts:
            self.spec["reward_parts"] = TensorSpec((reward_parts,), torch.float32)
        self.num_rows = num_rows
        self.num_steps = num_steps
        self.on_nonfinite = on_nonfinite
        self.all_dropped = False
        """Whether ``drop`` left nothing of the rollout last added."""
        self.device = torch.device(device)
        self._empty = cast(TensorDict, allocate(self.spec, 0, 0))
        self._rollout: TensorDict | None = None

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot of one row."""
        leaves = self._empty.values(include_nested=True, leaves_only=True)
        return sum(math.prod(leaf.shape[2:]) * leaf.element_size() for leaf in leaves)

    def start_rollout(self) -> TensorDict:
        """A rollout ``[N, T+1]`` in which every slot is empty: masks False, ids -1, numbers 0."""
        rollout = cast(TensorDict, allocate(self.spec, self.num_rows, self.num_steps + 1, device=self.device))
        for key in _ID_KEYS:
            rollout[key].fill_(-1)
        return rollout

    def add(self, rollout: TensorDict) -> None:
        """Take a collected rollout after checking it.

        Raises:
            DataError: a missing key, a wrong shape or dtype, or a non-finite number in a valid slot (names row and step),
                unless ``on_nonfinite`` says otherwise.
        """
        if rollout.batch_dims != 2 or len(rollout) != (self.num_rows or len(rollout)) or rollout.shape[1] < 2:
            raise DataError(f"rollout has batch {list(rollout.shape)}, expected [{self.num_rows or 'rows'}, steps + 1]")
        leaves = dict(rollout.items(include_nested=True, leaves_only=True))
        for key, wanted in self._empty.items(include_nested=True, leaves_only=True):
            tensor = leaves.get(key)
            if tensor is None or tensor.shape[2:] != wanted.shape[2:] or tensor.dtype != wanted.dtype:
                got = "missing" if tensor is None else f"{tensor.dtype} of shape {list(tensor.shape)}"
                shape = ", ".join(("N", "T+1", *map(str, wanted.shape[2:])))
                raise DataError(f"rollout[{key!r}] is {got}, expected {wanted.dtype} of shape [{shape}]")
        found = find_nonfinite(rollout, rollout["valid"])
        if found:
            self._replace_nonfinite(rollout, found)
        self.all_dropped = bool(found) and not rollout["loss_mask"].any()
        self.num_steps = max(self.num_steps, rollout.shape[1] - 1)
        self._rollout = rollout

    def get(self, *, flatten: bool = False) -> TensorDict:
        """The rollout last added: ``[N, T+1]``, or flattened to its ``[N * T]`` transitions.

        Raises:
            DataError: nothing was added yet.
        """
        if self._rollout is None:
            raise DataError("the buffer is empty; fix: buffer.add(rollout) before buffer.get()")
        return transition_view(self._rollout).reshape(-1) if flatten else self._rollout

    def _replace_nonfinite(self, rollout: TensorDict, found: list["NonFinite"]) -> None:
        """Replace non-finite numbers by 0; with ``drop``, take the groups that have any out of the loss."""
        if self.on_nonfinite == "stop":
            raise found[0].error(self.row_name)
        where, done = found[0].where(self.row_name), "0 takes its place"
        if self.on_nonfinite == "drop":
            groups = rollout["group_id"]
            bad = groups[torch.stack([one.slots for one in found]).any(dim=0)].unique()
            done = f"{len(bad)} of {len(groups[rollout['valid']].unique())} groups are left out of the loss"
            for mask in ("loss_mask", "valid"):  # nor do normalisers learn from the zeros
                rollout[mask] &= ~torch.isin(groups, bad)
        for one in find_nonfinite(rollout, torch.ones_like(rollout["valid"])):
            one.tensor.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        log.warning("%s; %s (on_nonfinite=%r)", where, done, self.on_nonfinite)


class NonFinite(NamedTuple):
    """A tensor of a rollout with numbers that are NaN or infinite."""

    name: str
    tensor: Tensor
    slots: Bool[Tensor, "row step"]

    def where(self, row_name: str) -> str:
        """Key, row and step of the first one, in words."""
        row, step = self.slots.nonzero()[0].tolist()
        value = self.tensor[row, step].tolist()
        return f"{self.name} of {row_name} {row} at step {step} of the rollout is not finite: {value}"

    def error(self, row_name: str = RolloutBuffer.row_name) -> DataError | DivergedError:
        """The error that names the first one: the policy's, if its observation is finite."""
        if self.name in ("action", "sample_log_prob", "value"):  # next_value may be that of a final observation
            return DivergedError.because(f"{self.where(row_name)}, although its observation is finite")
        return DataError(
            f"{self.where(row_name)}; fix: correct the environment or the reward; or algorithm.on_nonfinite='drop'"
        )


def find_nonfinite(rollout: TensorDict, slots: Bool[Tensor, "row step"]) -> list[NonFinite]:
    """The tensors with numbers in these slots that are NaN or infinite, observations first."""
    found, leaves = [], rollout.items(include_nested=True, leaves_only=True)
    floats = [(key, tensor) for key, tensor in leaves if tensor.is_floating_point()]
    sums = torch.stack([tensor.sum(dtype=torch.float32) for _, tensor in floats]).tolist()  # one host sync
    for (key, tensor), total in zip(floats, sums, strict=True):
        if not math.isfinite(total):  # or the sum of finite numbers is too large
            bad = slots & ~tensor.isfinite().reshape(*slots.shape, -1).all(dim=-1)
            found += [NonFinite(key if isinstance(key, str) else ".".join(key), tensor, bad)] if bad.any() else []
    return found


def leaves(nested: Nested) -> list[Tensor]:
    """The tensors of an observation, of which most have one."""
    return [nested] if isinstance(nested, Tensor) else list(nested.values(include_nested=True, leaves_only=True))


def all_finite(tensor: Tensor) -> bool:
    """Whether no number is NaN or infinite. One pass; torch's own test takes four, and eight times as long on a CPU."""
    # the sum of finite numbers may overflow
    return math.isfinite(tensor.sum(dtype=torch.float32).item()) or bool(tensor.isfinite().all())
