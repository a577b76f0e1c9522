"""Shared by the collectors of torch environments: acting and stepping as one function of tensors, without a host sync."""

from typing import NamedTuple

from torch import Tensor

from groupwise.data.rollout import Nested
from groupwise.envs.base import EnvStep
from groupwise.envs.torch_env import TorchGroupEnv, TorchRows
from groupwise.errors import EnvError
from groupwise.policies.base import Action, Policy


class StepOutput(NamedTuple):
    """An action of all rows and its outcome."""

    action: Action
    rows: TorchRows
    obs: Nested
    """[N, ...] of the rows, for the next action."""
    result: EnvStep
    """With the observations at which episodes ended, where they did."""
    others: tuple[Tensor, ...] = ()
    """Further tensors that the collector carries to the next step."""


def check_device(env: TorchGroupEnv, policy: Policy) -> None:
    """Refuse a policy and an environment on different devices.

    Raises:
        EnvError: the devices differ.
    """
    if policy.device.type != env.device.type:
        raise EnvError(
            f"{env.env_id} is on {env.device}, and the policy on {policy.device}; fix: device={str(policy.device)!r}"
        )
