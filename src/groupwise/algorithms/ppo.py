"""Proximal policy optimisation with a critic (Schulman et al. 2017, https://arxiv.org/abs/1707.06347).

The clipped variant, as practised (https://iclr-blog-track.github.io/2022/03/25/ppo-implementation-details/). It
differs from the paper in: advantages are normalised (``normalize_advantage``), the gradient is clipped, the squared
value error has no factor one half (Stable-Baselines3's convention, so ``vf_coef`` means the same), truncated episodes
bootstrap from their final observation, and the update can end at a KL limit.
"""

from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from groupwise.algorithms.base import BaseAlgorithm, LossOutput
from groupwise.algorithms.losses import DIAGNOSTICS, policy_loss, value_loss
from groupwise.config.algorithm import LinearRangeCfg, PPOCfg
from groupwise.data.rollout import Nested, TensorDict, transition_view
from groupwise.errors import DataError
from groupwise.functional.advantages import gae
from groupwise.functional.reduce import explained_variance, whiten, whiten_segments
from groupwise.policies.base import Batch, Evaluation


class PPO(BaseAlgorithm):
    """Several epochs of minibatches on the clipped ratio, a value loss and an entropy bonus."""

    metric_names: ClassVar = ("loss", "policy_loss", "value_loss", "entropy", *DIAGNOSTICS)
    cfg: PPOCfg

    def compute_gae(
        self, rollout: TensorDict, gamma: float, gae_lambda: float
    ) -> tuple[Float[Tensor, "row step"], Float[Tensor, "row step"]]:
        """Advantages and value targets ``advantage + value`` of the ``[N, T]`` transitions.

        Raises:
            DataError: the rollout has no values: it was collected with an ``actor_only`` policy.
        """
        for key in ("value", "next_value"):
            if rollout.get(key, None) is None:
                raise DataError(f"the rollout has no {key!r}; fix: collect it with a policy that has a critic")
        batch = transition_view(rollout)
        reward, ends = self.policy.normalize_reward(batch["reward"]), (batch["terminated"], batch["truncated"])
        advantage = gae(reward, batch["value"], batch["next_value"], *ends, gamma=gamma, gae_lambda=gae_lambda)
        return advantage, advantage + batch["value"]

    def update(self, rollout: TensorDict) -> dict[str, float]:
        """Improve policy and critic by one rollout ``[N, T+1]``; returns metrics."""
        batch, all_sum = transition_view(rollout), self.engine.sum
        advantage, returns = self.compute_gae(rollout, self.cfg.gamma, self.cfg.gae_lambda)
        explained = explained_variance(batch["value"], returns, batch["loss_mask"], all_sum=all_sum)
        if self.cfg.normalize_advantage == "batch":
            advantage = whiten(advantage, batch["loss_mask"], all_sum=all_sum)
        num_episodes = batch["episode_id"].numel()  # ids are below it; to count them would be to wait for the device
        data = self.loss_inputs(batch, self.policy_inputs(batch), advantage, num_episodes)
        data |= {"old_value": batch["value"], "returns": returns}
        metrics = self.optimize(data, num_episodes, {"train/explained_variance": explained})
        self.policy.update_normalizers(rollout, self.engine)
        self.iteration += 1
        return metrics

    def prepare(self, elements: dict[str, Nested], minibatch: Tensor, num_minibatches: int) -> dict[str, Nested]:
        """Normalise the advantages over each minibatch, if asked."""
        if self.cfg.normalize_advantage == "minibatch":
            mask, all_sum = elements["loss_mask"], self.engine.sum
            raw = elements["advantage"]
            elements["advantage"] = whiten_segments(raw, minibatch, num_minibatches, mask, all_sum=all_sum)
        return elements

    def loss(self, batch: Batch, evaluation: Evaluation) -> LossOutput:
        """``policy_loss + vf_coef * value_loss - ent_coef * entropy`` of each transition."""
        cfg = self.cfg
        assert evaluation.value is not None
        policy, measured = policy_loss(cfg.objective, evaluation.log_prob, batch, self.counts)
        assert not isinstance(cfg.clip_range_vf, LinearRangeCfg)  # ``at_progress`` puts a number there
        value = value_loss(evaluation.value, batch["returns"], batch["old_value"], cfg.clip_range_vf)
        loss = torch.add(policy, value, alpha=cfg.vf_coef)
        if cfg.ent_coef:
            loss = loss - cfg.ent_coef * evaluation.entropy
        return LossOutput(loss, (loss, policy, value, evaluation.entropy, *measured))
