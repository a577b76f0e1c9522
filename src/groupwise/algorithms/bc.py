"""Behaviour cloning: maximum likelihood of demonstrated actions, in the same loop as PPO and GRPO.

The loss of a step is ``-log_prob`` of its action: cross-entropy for discrete actions and tokens, squared error over the
variance for Gaussians, or ``Policy.imitate``.
"""

from typing import ClassVar

from groupwise.algorithms.base import BaseAlgorithm, LossOutput
from groupwise.config.algorithm import BCCfg
from groupwise.data.rollout import TensorDict, transition_view
from groupwise.policies.base import Batch, Evaluation, Policy


class BehaviorCloning(BaseAlgorithm):
    """Minimises ``-log_prob - ent_coef * entropy`` of demonstrated actions, by ``policy.imitate``."""

    actor_only: ClassVar = True
    metric_names: ClassVar = ("loss", "entropy")
    cfg: BCCfg

    def update(self, rollout: TensorDict) -> dict[str, float]:
        """Improve the policy by demonstrated steps ``[N, T+1]``; returns metrics."""
        batch = transition_view(rollout)
        metrics = self.optimize(self.policy_inputs(batch), int(batch["episode_id"].max()) + 1, {})
        self.iteration += 1
        return metrics

    def evaluate(self, policy: Policy, batch: Batch) -> Evaluation:
        """The policy's scores of demonstrated actions."""
        return policy.imitate(batch)

    def loss(self, batch: Batch, evaluation: Evaluation) -> LossOutput:
        """``-log_prob - ent_coef * entropy`` of each step, or of each unit of a policy scored by ``token``."""
        loss = -evaluation.log_prob
        if self.cfg.ent_coef:
            loss = loss - self.cfg.ent_coef * evaluation.entropy
        return LossOutput(loss, (loss, evaluation.entropy))
