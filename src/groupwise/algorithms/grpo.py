"""Group relative policy optimisation (Shao et al. 2024, https://arxiv.org/abs/2402.03300): PPO's ratio, no critic.

Members of a group begin in the same state; a member's advantage is how it did against the others. Which comparison,
ratio, trust region, aggregation and KL are used is data (``CreditCfg``, ``ObjectiveCfg``), so this one update is GRPO,
Dr. GRPO, RLOO, GSPO and others. Under the preset ``grpo`` it differs from the paper in one default: ``kl_coef`` is 0
(the paper's is 0.04). The presets of control tasks compare per time step, or with the nearest neighbours (knn). The update
does not know whether the rollout came from an environment or a language model.
"""

import logging
from typing import Any, ClassVar

import torch
from tensordict import TensorDict
from torch import Tensor

from groupwise.algorithms.advantages import (
    CreditInput,
    advantages,
    check_credit,
    compared,
    episode_groups,
    next_state,
)
from groupwise.algorithms.base import BaseAlgorithm, LossOutput
from groupwise.algorithms.losses import DIAGNOSTICS, learns_alone, multiplied, policy_loss, reference_kl
from groupwise.config.algorithm import GRPOCfg
from groupwise.data.rollout import Nested, transition_view
from groupwise.engines import Engine
from groupwise.errors import ConfigError, DataError
from groupwise.functional.advantages import episode_return, kl_shaping
from groupwise.functional.reduce import highest, zero_variance_groups
from groupwise.policies.base import Batch, Evaluation, Policy

log = logging.getLogger(__name__)


class GRPO(BaseAlgorithm):
    """Several epochs of minibatches on the ratio times the group-relative advantage."""

    grouped: ClassVar = True
    actor_only: ClassVar = True
    metric_names: ClassVar = ("loss", "policy_loss", "entropy", "kl", *DIAGNOSTICS)
    cfg: GRPOCfg

    def __init__(
        self, cfg: GRPOCfg, policy: Policy, engine: Engine | None = None, *, seed: int = 0, **fast: Any
    ) -> None:
        super().__init__(cfg, policy, engine, seed=seed, **fast)
        check_credit(cfg.credit, policy)
        if cfg.kl_estimator == "exact" and not policy.gives_distribution:
            raise ConfigError(
                f"kl_estimator='exact' compares whole distributions, and {type(policy).__name__} gives the probabilities of "
                "single tokens; fix: 'k3'"
            )
        self.reference = self.engine.shard(policy.make_reference()) if cfg.kl_coef > 0 else None
        self.baseline_state: Tensor | None = None
        self._is_first = True

    def update(self, rollout: TensorDict) -> dict[str, Tensor]:
        """Improve the policy by one rollout ``[N, T+1]`` of whole groups; returns 0-dim metrics."""
        batch = transition_view(rollout)
        credit = self._credit_input(batch)
        inputs = self.policy_inputs(batch)
        if self.reference is not None:
            inputs |= self._reference_scores(inputs)
        start = self.score(self.learner, inputs) if self._needs_start_scores else None
        advantage = self._advantage(credit, inputs, start)
        if not self._can_learn(advantage):
            inputs["loss_mask"] = torch.zeros_like(inputs["loss_mask"])
        data = self.loss_inputs(batch, inputs, advantage, credit.num_episodes, start)
        if start is not None and self.cfg.top_entropy_quantile < 1:
            data = self._select_by_entropy(data, start.entropy)
        metrics = self.optimize(data, credit.num_episodes)
        if (
            self._is_first and batch["loss_mask"].any()
        ):  # else nothing was left of the rollout, which has its own warning
            self._is_first = False
            self._check_advantage(advantage)
        self.policy.update_normalizers(rollout, self.engine)
        self.iteration += 1
        self._sync_reference()
        return metrics | {"rollout/zero_variance_groups": self._zero_variance(credit)}

    def loss(self, batch: Batch, evaluation: Evaluation) -> LossOutput:
        """``policy_loss + kl_coef * KL(policy || reference) - ent_coef * entropy`` of each element."""
        cfg = self.cfg
        policy, measured = policy_loss(cfg.objective, evaluation.log_prob, batch, self.counts)
        loss, distance = policy, torch.zeros_like(policy)
        if cfg.kl_coef > 0:
            distance = reference_kl(cfg.kl_estimator, self.policy, evaluation, batch)
            if cfg.credit.kl_placement == "loss":
                loss = loss + cfg.kl_coef * distance
        if self.entropy.enabled:
            loss = loss + self.entropy.loss(evaluation.entropy)
        return LossOutput(loss, (loss, policy, evaluation.entropy, distance, *measured))

    def state_dict(self) -> dict[str, object]:
        """Everything but the policy that the next update depends on."""
        state = super().state_dict() | {"baseline_state": self.baseline_state}
        return (
            state if self.reference is None else state | {"reference": self.engine.whole(self.reference.state_dict())}
        )

    def load_state_dict(self, state: dict) -> None:
        """Restore a saved ``state_dict``."""
        super().load_state_dict(state)
        self._is_first = not self.optimizer_steps
        remembered = state["baseline_state"]
        self.baseline_state = None if remembered is None else remembered.to(self.policy.device)
        if self.reference is not None:
            self.reference.load_state_dict(self.engine.split(state["reference"], self.reference.state_dict()))

    def _credit_input(self, batch: TensorDict) -> CreditInput:
        """What credit reads of the transitions, rewards in the policy's scale.

        Raises:
            DataError: no group has two members.
        """
        num_groups, num_episodes = int(batch["group_id"].max()) + 1, int(batch["episode_id"].max()) + 1
        if num_episodes and not 0 < num_groups < num_episodes and self.cfg.credit.baseline.within_group:
            raise DataError(
                f"no group of the rollout has two members ({num_episodes} episodes, {num_groups} groups), so there is nothing "
                "to compare; fix: collect it with GroupCollector, which starts the members of a group in the same state"
            )
        parts = batch.get("reward_parts", None) if self.cfg.credit.reward.name == "parts" else None
        return CreditInput(
            batch=batch,
            reward=self.policy.normalize_reward(batch["reward"]),
            parts=None if parts is None else self.policy.normalize_reward(parts),
            cfg=self.cfg.credit,
            gamma=self.cfg.gamma,
            num_groups=num_groups,
            num_episodes=num_episodes,
            engine=self.engine,
            state=self.baseline_state,
        )

    def _reference_scores(self, inputs: dict[str, Nested]) -> dict[str, Nested]:
        """The reference's log-probabilities, and its distributions where the KL is exact."""
        assert self.reference is not None
        scores = self.score(self.reference, inputs)
        if self.cfg.kl_estimator != "exact":
            return {"ref_log_prob": scores.log_prob}
        assert scores.dist is not None
        return {"ref_log_prob": scores.log_prob, "ref_dist": scores.dist}

    def _can_learn(self, advantage: Tensor) -> bool:
        """Whether anything in the loss has a gradient: an advantage, a KL or an entropy bonus."""
        kl_in_loss = self.cfg.kl_coef > 0 and self.cfg.credit.kl_placement == "loss"
        if kl_in_loss or self.entropy.enabled or learns_alone(self.cfg.objective.trust_region):
            return True
        return bool(self.engine.sum(advantage.count_nonzero()))

    def _select_by_entropy(self, data: dict[str, Nested], entropy: Tensor) -> dict[str, Nested]:
        """``data`` in which the steps with the highest entropies alone have a policy loss."""
        chosen = highest(entropy, self.cfg.top_entropy_quantile, data["loss_mask"], self.engine.sum)
        return multiplied(data, chosen.to(entropy))

    def _check_advantage(self, advantage: Tensor) -> None:
        """Warn of a first update without a gradient: a KL has none yet. Later ones may be the end of learning."""
        if not self.entropy.enabled and not advantage.any():
            log.warning(
                "update %d learns nothing: no group has members with different returns; "
                "fix: a denser reward, a larger group_size, easier starts (docs/troubleshooting.md)",
                self.iteration + 1,
            )

    @property
    def _needs_start_scores(self) -> bool:
        """Whether anything reads the policy's scores at the update's start."""
        selects = self.cfg.top_entropy_quantile < 1
        return self._shapes_credit or self.cfg.credit.baseline.needs_scores or selects

    @property
    def _shapes_credit(self) -> bool:
        """Whether the KL to the reference enters the advantages."""
        return self.reference is not None and self.cfg.credit.kl_placement != "loss"

    def _advantage(self, credit: CreditInput, data: dict[str, Nested], start: Evaluation | None) -> Tensor:
        """Advantages ``[N, T]``, with the KL to the reference where ``kl_placement`` puts it."""
        cfg = self.cfg.credit
        distance = torch.zeros_like(credit.reward)
        if self._shapes_credit:
            assert start is not None
            # at the update's start the ratio is 1
            at_start = data | {"old_log_prob": start.log_prob}
            distance = self.of_decisions(reference_kl(self.cfg.kl_estimator, self.policy, start, at_start))
            distance = self.cfg.kl_coef * distance
        credit = credit._replace(start=start)
        if cfg.kl_placement == "reward":
            credit = credit._replace(reward=credit.reward - distance.masked_fill(~credit.batch["loss_mask"], 0))
        self.baseline_state = next_state(credit)
        advantage = advantages(credit)
        if cfg.kl_placement == "advantage":
            mask = credit.batch["loss_mask"]
            advantage = advantage + kl_shaping(distance, credit.batch["episode_id"], credit.num_episodes, mask)
        return advantage

    def _sync_reference(self) -> None:
        """Replace the reference by the policy, or mix it in, when its interval has passed."""
        sync = self.cfg.sync_ref_model
        if self.reference is not None and sync is not None and self.iteration % sync.steps == 0:
            self.reference.move_towards(self.learner, sync.mixup_alpha)

    def _zero_variance(self, credit: CreditInput) -> Tensor:
        """Share of groups whose members all did equally well, in every part of the reward that credit compares."""
        batch, episodes = credit.batch, credit.num_episodes
        raw = credit._replace(reward=batch["reward"], parts=None)
        scores = [weight * episode_return(reward, batch["episode_id"], episodes) for weight, reward in compared(raw)]
        group, scored = episode_groups(batch, episodes)
        return zero_variance_groups(
            torch.stack(scores, dim=-1), group, credit.num_groups, scored, all_sum=self.engine.sum
        )
