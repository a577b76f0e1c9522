"""Sharded learners, by PyTorch's FSDP2: no rank holds all of what an update trains.

Every rank keeps the policy whole, for generation, evaluation and checkpoints. Updates train a copy of it, of which each rank
holds a part: of the parameters, their gradients and the optimiser's state. After an update the policy gets its parameters.
"""

from collections.abc import Iterable, Mapping
from copy import deepcopy
from functools import partial
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._pytree import tree_map_only

from groupwise.engines import DistributedEngine
from groupwise.text.policy import CausalLM

Module = TypeVar("Module", bound=nn.Module)


class ShardedEngine(DistributedEngine):
    """Divides the parameters of language models among the ranks. The gradient is the one of ``DistributedEngine``.

    Args:
        cpu_offload: the parts, their gradients and the optimiser's state are in the host's memory, where the optimiser steps.
    """

    sharded = True

    def __init__(self, device: str, timeout: float, *, cpu_offload: bool = False) -> None:
        super().__init__(device, timeout, cpu_offload=cpu_offload)
        self._offload = CPUOffloadPolicy(pin_memory=device == "cuda") if cpu_offload else OffloadPolicy()
        self._mesh = init_device_mesh(device, (self.world_size,))

    def learner(self, policy: Module) -> Module:
        """A sharded copy."""
        if isinstance(policy, CausalLM):
            policy.shares_prefixes = False  # it takes one pass or two, and all ranks must make the same number
        return self.shard(deepcopy(policy))

    def shard(self, policy: Module) -> Module:
        """The policy, of which this rank keeps a part."""
        if not isinstance(policy, CausalLM):
            return policy
        mixed = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
        modules: list[nn.Module] = [*policy.blocks(), policy]  # the rest of the policy is one more part
        for module in modules:
            part = fully_shard(
                module, mesh=self._mesh, reshard_after_forward=True, mp_policy=mixed, offload_policy=self._offload
            )
            part.set_force_sum_reduction_for_comms(True)  # weights are global: a sum, no mean
            part.set_gradient_divide_factor(1.0)
        register_fsdp_forward_method(policy, "evaluate")
        return policy

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Nothing: the backward pass has summed them."""

    def clip_gradients(self, parameters: Iterable[nn.Parameter], limit: float | None) -> Tensor:
        """Clip the norm of all ranks' parts together; returns the norm before."""
        norm = super().clip_gradients(parameters, limit)
        return self._gathered(norm) if isinstance(norm, DTensor) else norm

    @torch.no_grad()
    def load_learner(self, learner: nn.Module, policy: nn.Module) -> None:
        """Give each rank its part of the policy's parameters."""
        for part, whole in zip(learner.parameters(), policy.parameters(), strict=True):
            part.copy_(_part(part, whole.detach()))

    @torch.no_grad()
    def publish(self, learner: nn.Module, policy: nn.Module) -> None:
        """Give the policy the trained parameters of its learner."""
        for part, whole in zip(learner.parameters(), policy.parameters(), strict=True):
            if isinstance(part, DTensor) and whole.requires_grad:
                whole.copy_(self._gathered(part))

    def whole(self, state: Any) -> Any:
        """The state with whole tensors, in the memory of rank 0's CPU; the others get their shapes, without numbers."""
        place = "cpu" if self.rank == 0 else "meta"
        return tree_map_only(DTensor, lambda part: self._gathered(part).to(place), state)

    def split(self, state: Mapping[Any, Any], like: Mapping[Any, Tensor]) -> dict[Any, Any]:
        """Part of each whole tensor on this rank, if the tensor in ``like`` is divided and has its shape."""
        return {key: tree_map_only(Tensor, partial(_part, like[key]), entry) for key, entry in state.items()}

    def _gathered(self, part: DTensor) -> Tensor:
        """The whole tensor, on the device of the exchange."""
        return cast(DTensor, part.to(self.device)).full_tensor()


def _part(like: Tensor, whole: Tensor) -> Tensor:
    """The part of a tensor on this rank; the tensor itself if it is not divided."""
    if not isinstance(like, DTensor) or like.shape != whole.shape:
        return whole
    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None).to(like.device)
