"""Fixed windows of experience from torch environments: for PPO."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from groupwise.collectors.base import EnvCollector
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


class TorchCollector(EnvCollector):
    """Acts and steps all rows of a ``TorchGroupEnv`` by one function.

    Raises:
        EnvError: the policy is on another device than the environment, or recurrent.
    """

    env: TorchGroupEnv
    step: Callable[..., StepOutput]

    def __init__(self, env: TorchGroupEnv, policy: Policy, *, seed: int = 0, rank: int = 0) -> None:
        if policy.state_size:
            raise EnvError(
                f"a recurrent policy cannot act within the steps of {env.env_id}; fix: VectorCollector for PPO, or "
                "collection.partial_groups='complete' for GRPO"
            )
        if policy.device.type != env.device.type:
            raise EnvError(
                f"{env.env_id} is on {env.device}, and the policy on {policy.device}; fix: device={str(policy.device)!r}"
            )
        super().__init__(env, policy, seed=seed, rank=rank)

    def stepper(self, generator: torch.Generator) -> Callable[..., StepOutput]:
        """What acts and steps all rows in one rollout. Replace it to compile ``step``."""
        return partial(self.step, partial(self.actor(), generator=generator))

    @contextmanager
    def calling(self, hook: Callable[[Tensor, EnvStep], None]) -> Iterator[None]:
        """Call ``hook`` with actions and outcome of every step, until the context ends."""
        stepper = self.stepper

        def heard(generator: torch.Generator) -> Callable[..., StepOutput]:
            step = stepper(generator)

            def stepped(*inputs: Any) -> StepOutput:
                output: StepOutput = step(*inputs)
                hook(output.action.action, output.result)
                return output

            return stepped

        self.stepper = heard  # type: ignore[method-assign]
        try:
            yield
        finally:
            self.stepper = stepper  # type: ignore[method-assign]


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
