"""Group relative policy optimisation (Shao et al. 2024, https://arxiv.org/abs/2402.03300): PPO's ratio, no critic.

Members of a group begin in the same state; a member's advantage is how it did against the others. Which comparison,
ratio, trust region, aggregation and KL are used is data (``CreditCfg``, ``ObjectiveCfg``), so this one update is GRPO,
Dr. GRPO, RLOO, GSPO and others. Under the preset ``grpo`` it differs from the paper in one default: ``kl_coef`` is 0
(the paper's is 0.04). The presets of control tasks compare with values of states (knn, lstd), other control tasks per time
step. The update does not know whether the rollout came from an environment or a language model.
"""

import logging
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from groupwise.algorithms.advantages import (
    CREDIT_RULES,
    CreditInput,
    advantages,
    episode_groups,
    weighted_rewards,
)
from groupwise.algorithms.base import BaseAlgorithm, LossOutput
from groupwise.algorithms.losses import DIAGNOSTICS, LOSSES, multiplied, policy_loss, reference_kl
from groupwise.config.algorithm import GRPOCfg
from groupwise.data.rollout import Nested, TensorDict, transition_view
from groupwise.engines import Engine
from groupwise.errors import ConfigError, DataError, UnknownNameError
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
        if cfg.credit.rule not in CREDIT_RULES:
            raise UnknownNameError("credit rule", cfg.credit.rule, CREDIT_RULES)
        if cfg.kl_estimator == "exact" and not policy.gives_distribution:
            raise ConfigError(
                f"kl_estimator='exact' compares whole distributions, and {type(policy).__name__} gives the probabilities of "
                "single tokens; fix: 'k3'"
            )
        self.reference = self.engine.shard(policy.make_reference()) if cfg.kl_coef > 0 else None
        self._kl_in_credit = cfg.kl_coef > 0 and cfg.credit.kl_placement != "loss"
        region, kl_in_loss = self.cfg.objective.trust_region, cfg.kl_coef > 0 and not self._kl_in_credit
        alone = LOSSES[region.name].learns_alone(**region.parameters())
        self._learns_alone = alone or kl_in_loss or bool(cfg.ent_coef)
        """Whether there is a gradient where all advantages are 0."""
        self._is_first = True
        self.memory: dict[str, Tensor] = {}
        """Tensors that the credit keeps from one update for the next."""
        baseline = cfg.credit.composed_baseline
        self._within_group = baseline.within_group
        encoder = policy.state_encoder if baseline.states else None
        self._encode: Callable[[Any], Any] = torch.no_grad()(encoder.forward) if encoder else lambda obs: obs

    def update(self, rollout: TensorDict) -> dict[str, float]:
        """Improve the policy by one rollout ``[N, T+1]`` of whole groups; returns metrics.

        Raises:
            DataError: no group has two members.
        """
        cfg, batch, all_sum = self.cfg, transition_view(rollout), self.engine.sum
        mask, episode, group = batch["loss_mask"], batch["episode_id"], batch["group_id"]
        counts = torch.stack([group.max(), episode.max(), batch["step"].max()]) + 1
        num_groups, num_episodes, num_steps = counts.tolist()  # one host sync
        if num_episodes and not 0 < num_groups < num_episodes and self._within_group:
            raise DataError(
                f"no group of the rollout has two members ({num_episodes} episodes, {num_groups} groups), so there is nothing "
                "to compare; fix: collect it with GroupCollector, which starts the members of a group in the same state"
            )

        inputs = self.policy_inputs(batch)
        # a KL in the credit is that of all members, also of those without loss
        compared = self.policy_inputs(batch.exclude("trained")) if self._kl_in_credit else inputs
        if self.reference is not None:
            inputs |= self._reference_scores(self.reference, compared)
        evaluation = self.score(self.learner, compared) if self._kl_in_credit or cfg.top_entropy_quantile < 1 else None

        reward, parts = self.policy.normalize_reward(batch["reward"]), batch.get("reward_parts", None)
        parts = None if parts is None else self.policy.normalize_reward(parts)
        more = self.engine, parts, num_steps, self.memory, self._encode(batch.get("obs", None))
        credit = CreditInput(batch, reward, cfg.credit, cfg.gamma, num_groups, num_episodes, *more)
        advantage = self._with_kl(credit, inputs, evaluation) if self._kl_in_credit else advantages(credit)
        if not self._learns_alone:
            inputs["loss_mask"] = inputs["loss_mask"] & (all_sum(advantage.count_nonzero()) > 0)
        data = self.loss_inputs(batch, inputs, advantage, num_episodes, evaluation)
        if evaluation is not None and cfg.top_entropy_quantile < 1:
            chosen = highest(evaluation.entropy, cfg.top_entropy_quantile, data["loss_mask"], all_sum)
            data = multiplied(data, chosen.to(evaluation.entropy))

        found: dict[str, Tensor] = {}
        if self._within_group:
            # groups whose members all did equally well, in every part of the reward that is compared
            raw = weighted_rewards(credit._replace(reward=batch["reward"], parts=None))
            returns = [weight * episode_return(reward, episode, num_episodes) for weight, reward in raw]
            member_of, scored = episode_groups(batch, num_episodes)
            alike = zero_variance_groups(torch.stack(returns, dim=-1), member_of, num_groups, scored, all_sum=all_sum)
            found["rollout/zero_variance_groups"] = alike
        metrics = self.optimize(data, num_episodes, found)

        if self._is_first and mask.any():  # else nothing was left of the rollout, which has its own warning
            self._warn_of_equal_returns(advantage)
        self.policy.update_normalizers(rollout, self.engine)
        self.iteration += 1
        if self.reference is not None and (sync := cfg.sync_ref_model) and self.iteration % sync.steps == 0:
            self.reference.move_towards(self.learner, sync.mixup_alpha)
        return metrics

    def _reference_scores(self, reference: Policy, inputs: dict[str, Nested]) -> dict[str, Nested]:
        """Log-probabilities of the reference, and its distributions where the KL is exact."""
        scores = self.score(reference, inputs)
        if self.cfg.kl_estimator != "exact":
            return {"ref_log_prob": scores.log_prob}
        assert scores.dist is not None
        return {"ref_log_prob": scores.log_prob, "ref_dist": scores.dist}

    def _with_kl(
        self, credit: CreditInput, inputs: dict[str, Nested], evaluation: Evaluation | None
    ) -> Float[Tensor, "row step"]:
        """Advantages with ``kl_coef`` times the KL to the reference at the update's start, where the ratio is 1."""
        assert evaluation is not None
        mask, at_start = credit.batch["loss_mask"], inputs | {"old_log_prob": evaluation.log_prob}
        distance = self.cfg.kl_coef * self.layout.per_decision(
            reference_kl(self.cfg.kl_estimator, self.policy, evaluation, at_start)
        )
        if self.cfg.credit.kl_placement == "reward":
            return advantages(credit._replace(reward=credit.reward - distance.masked_fill(~mask, 0)))
        return advantages(credit) + kl_shaping(distance, credit.batch["episode_id"], credit.num_episodes, mask)

    def _warn_of_equal_returns(self, advantage: Tensor) -> None:
        """Warn after a first update without advantages. A KL has no gradient yet; later this may be the end of learning."""
        self._is_first = False
        if not self.cfg.ent_coef and not advantage.any():
            log.warning(
                "update %d learns nothing: no group has members with different returns; "
                "fix: a denser reward, a larger group_size, easier starts (docs/troubleshooting.md)",
                self.iteration + 1,
            )

    def loss(self, batch: Batch, evaluation: Evaluation) -> LossOutput:
        """``policy_loss + kl_coef * KL(policy || reference) - ent_coef * entropy`` of each element."""
        cfg = self.cfg
        policy, measured = policy_loss(cfg.objective, evaluation.log_prob, batch, self.counts)
        loss, distance = policy, torch.zeros_like(policy)
        if cfg.kl_coef > 0:
            distance = reference_kl(cfg.kl_estimator, self.policy, evaluation, batch)
            if cfg.credit.kl_placement == "loss":
                loss = loss + cfg.kl_coef * distance
        if cfg.ent_coef:
            loss = loss - cfg.ent_coef * evaluation.entropy
        return LossOutput(loss, (loss, policy, evaluation.entropy, distance, *measured))

    def state_dict(self) -> dict[str, object]:
        """Everything but the policy that the next update depends on."""
        state = super().state_dict() | {"memory": {name: kept.cpu() for name, kept in self.memory.items()}}
        return (
            state if self.reference is None else state | {"reference": self.engine.whole(self.reference.state_dict())}
        )

    def load_state_dict(self, state: dict) -> None:
        """Restore a saved ``state_dict``."""
        super().load_state_dict(state)
        self._is_first = not self.optimizer_steps
        self.memory = dict(state["memory"])
        if self.reference is not None:
            self.reference.load_state_dict(self.engine.split(state["reference"], self.reference.state_dict()))
