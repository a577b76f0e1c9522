"""Fixed windows of experience from torch environments: for PPO."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from groupwise.collectors.base import EnvCollector, MakeActor
from groupwise.collectors.vector import VectorCollector
from groupwise.collectors.writer import RolloutWriter
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


Step: TypeAlias = Callable[..., StepOutput]


class TorchCollector(EnvCollector):
    """Acts and steps all rows of a ``TorchGroupEnv`` by one function.

    Args:
        stepper: makes what acts and steps in place of ``reference_stepper``. None, and where it returns None: the method.

    Raises:
        EnvError: the policy is on another device than the environment, or recurrent.
    """

    env: TorchGroupEnv
    step: Callable[..., StepOutput]

    def __init__(
        self,
        env: TorchGroupEnv,
        policy: Policy,
        *,
        seed: int = 0,
        rank: int = 0,
        actor: MakeActor | None = None,
        stepper: "MakeStepper | None" = None,
    ) -> None:
        if policy.state_size:
            raise EnvError(
                f"a recurrent policy cannot act within the steps of {env.env_id}; fix: VectorCollector for PPO, or "
                "collection.partial_groups='complete' for GRPO"
            )
        if policy.device.type != env.device.type:
            raise EnvError(
                f"{env.env_id} is on {env.device}, and the policy on {policy.device}; fix: device={str(policy.device)!r}"
            )
        super().__init__(env, policy, seed=seed, rank=rank, actor=actor)
        self.fast_stepper = None if stepper is None else stepper(self)

    def reference_stepper(self, generator: torch.Generator) -> Step:
        """Acts and steps all rows in one rollout."""
        return partial(self.step, partial(self.actor(), generator=generator))

    def stepper(self, generator: torch.Generator) -> Step:
        """Acts and steps all rows in one rollout, in the fastest way, and calls the hooks."""
        step = (self.fast_stepper or self.reference_stepper)(generator)
        if not self._hooks:
            return step

        def heard(*inputs: Any) -> StepOutput:
            output = step(*inputs)
            for hook in self._hooks:
                hook(output.action.action, output.result)
            return output

        return heard


MakeStepper: TypeAlias = Callable[[TorchCollector], Callable[[torch.Generator], Step] | None]


class TorchVectorCollector(TorchCollector, VectorCollector):
    """The rollouts of ``VectorCollector`` from a ``TorchGroupEnv``, without a host sync in any step."""

    def step(self, act: Callable[[Nested], Action], rows: TorchRows, obs: Nested) -> StepOutput:
        """An action of all rows, a step, and new starts where episodes ended. A pure function of tensors."""
        action = act(obs)
        rows, result = self.env.stepped(rows, self.policy.env_action(action.action))
        rows = self.env.renewed(rows, result.terminated | result.truncated)
        return StepOutput(action, rows, self.env.observed(rows), result)

    @torch.inference_mode()
    def _fill(self, num_steps: int, writer: RolloutWriter, obs: Nested) -> Nested:
        step, rows = self.stepper(self.action_generator()), self.env.rows
        results = []
        for t in range(num_steps):
            writer.observe(t, obs)
            action, rows, obs, result, _ = step(rows, obs)
            writer.act(t, action)
            writer.outcome(t, result)
            results.append(result)
        self.env.rows = rows
        if not self.policy.actor_only:
            cut = torch.stack([result.truncated & ~result.terminated for result in results]).cpu()  # one host sync
            for t, result in enumerate(results):
                writer.cut(t, cut[t], result.obs)
        return obs
