"""Baselines other than the mean of the group. Imports torch only when advantages are computed."""

from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar, Literal

from groupwise.config.base import Fraction, NonNegative, PositiveInt
from groupwise.config.choices import register_recipe
from groupwise.config.credit import BaselineCfg
from groupwise.errors import ConfigError, DataError

if TYPE_CHECKING:
    from torch import Tensor

    from groupwise.algorithms.advantages import CreditInput, Scores
    from groupwise.policies.base import Policy


@register_recipe
class LeaveOneOutCfg(BaselineCfg):
    """The mean of the others."""

    name: Literal["leave_one_out"] = "leave_one_out"
    source: ClassVar = "https://arxiv.org/abs/2402.14740"

    def of_episodes(self, scores: "Scores") -> "Tensor":
        """``score - (sum - score) / (n - 1)``."""
        return scores.relative("leave_one_out")

    of_steps = of_episodes


@register_recipe
class SecondBestCfg(BaselineCfg):
    """The second best, for the best only (Pass@k)."""

    name: Literal["second_best"] = "second_best"
    source: ClassVar = "https://arxiv.org/abs/2503.19595"
    needs: ClassVar = {"returns": ("outcome",)}

    def of_episodes(self, scores: "Scores") -> "Tensor":
        """What the best is above the second best, 0 for all others."""
        return scores.relative("second_best")


@register_recipe
class LengthWeightedCfg(BaselineCfg):
    """The mean weighted by the episodes' lengths (OPO)."""

    name: Literal["length_weighted"] = "length_weighted"
    source: ClassVar = "https://arxiv.org/abs/2505.23585"
    needs: ClassVar = {"returns": ("outcome",)}

    def of_episodes(self, scores: "Scores") -> "Tensor":
        """``score - sum(length * score) / sum(length)``."""
        from groupwise.functional.reduce import segment_sum

        batch, reward = scores.credit.batch, scores.credit.reward
        length = segment_sum(batch["loss_mask"].to(reward), batch["episode_id"], scores.credit.num_episodes)
        return scores.relative(weight=length)


@register_recipe
class OptimalTokenCfg(BaselineCfg):
    """The mean, weighted by the accumulated variance of the actions; one discrete action."""

    name: Literal["optimal_token"] = "optimal_token"
    source: ClassVar = "https://github.com/volcengine/verl"
    needs: ClassVar = {"group_key": ("group_step",), "returns": ("return_to_go",), "finished_members": ("mask",)}
    needs_scores: ClassVar = True

    def check_policy(self, policy: "Policy") -> None:
        """Refuse policies without categorical probabilities."""
        import torch

        from groupwise.data.rollout import TensorSpec

        if not policy.gives_distribution or policy.action_spec != TensorSpec((), torch.int64):
            found = f"{type(policy).__name__} with gives_distribution={policy.gives_distribution}, {policy.action_spec}"
            raise ConfigError(
                "credit.baseline='optimal_token' needs a policy that gives the distribution of a Discrete action; got "
                f"{found}; fix: baseline='mean'"
            )

    def of_steps(self, scores: "Scores") -> "Tensor":
        """``score - sum(w * score) / sum(w)``, with w the sum of action variances in the episode up to the step."""
        from groupwise.functional.advantages import choice_variance
        from groupwise.functional.returns import running_sum

        credit = scores.credit
        if credit.start is None or credit.start.dist is None:
            raise DataError(
                "credit.baseline='optimal_token' got no distributions; fix: CreditInput(start=policy.evaluate(...))"
            )
        variance = choice_variance(credit.start.dist, credit.batch["action"]).masked_fill(~credit.live, 0)
        return scores.relative(weight=running_sum(variance, credit.batch["episode_id"]))


@register_recipe
class NoBaselineCfg(BaselineCfg):
    """Nothing; the batch is whitened instead (REINFORCE++)."""

    name: Literal["none"] = "none"
    source: ClassVar = "https://arxiv.org/abs/2501.03262"
    needs: ClassVar = {"group_key": ("group",), "scale": ("none",), "normalize": ("batch",)}
    within_group: ClassVar = False

    def of_episodes(self, scores: "Scores") -> "Tensor":
        """The scores."""
        return scores.score

    of_steps = of_episodes


@register_recipe
class GreedyCfg(BaselineCfg):
    """A deterministic episode at the same start (ReMax)."""

    name: Literal["greedy"] = "greedy"
    source: ClassVar = "https://arxiv.org/abs/2310.10505"
    needs: ClassVar = {"returns": ("outcome",), "scale": ("none", "batch_std", "nonzero_share")}
    within_group: ClassVar = False
    greedy_members: ClassVar = 1

    def of_episodes(self, scores: "Scores") -> "Tensor":
        """``score - mean of the group's greedy episodes``, 0 where it has none."""
        from groupwise.functional.reduce import gather_segments, segment_sum

        batch, score = scores.credit.batch, scores.score
        if "greedy" not in batch.keys():  # noqa: SIM118  iterating goes over rows
            raise DataError(
                "credit.baseline='greedy' needs a deterministic episode in each group, and the rollout has no 'greedy'; "
                "fix: groupwise's collectors, or baseline='leave_one_out'"
            )
        greedy = segment_sum(batch["greedy"].to(score), batch["episode_id"], scores.credit.num_episodes) > 0
        number = segment_sum(score.new_ones(score.shape), scores.key, scores.num_keys, greedy)
        mean = segment_sum(score, scores.key, scores.num_keys, greedy) / number.clamp(min=1)
        has_greedy = gather_segments(number, scores.key) > 0
        return scores.above(gather_segments(mean, scores.key), member=scores.member & has_greedy)


@register_recipe
class EmaCfg(BaselineCfg):
    """A moving average over the iterations (RAE)."""

    name: Literal["ema"] = "ema"
    decay: Fraction = 0.95
    """Decay of the moving average per episode. Default: SPIRAL's."""
    source: ClassVar = "https://arxiv.org/abs/2506.24119"
    needs: ClassVar = {
        "returns": ("outcome",),
        "scale": ("none", "batch_std", "nonzero_share"),
        "reward": ("total",),
    }
    within_group: ClassVar = False

    def of_episodes(self, scores: "Scores") -> "Tensor":
        """``score - average``; in the first rollout with its own average."""
        average = scores.credit.state
        return scores.above(self._average(scores.credit) if average is None else average)

    def next_state(self, credit: "CreditInput") -> "Tensor | None":
        """The average with this rollout's episodes."""
        any_counts = bool(credit.engine.sum(credit.batch["loss_mask"].sum()))
        return self._average(credit) if any_counts else credit.state

    def _average(self, credit: "CreditInput") -> "Tensor":
        from groupwise.functional.advantages import next_average
        from groupwise.functional.reduce import segment_sum
        from groupwise.functional.returns import episode_return

        episode, number = credit.batch["episode_id"], credit.num_episodes
        scored = segment_sum(credit.batch["loss_mask"].to(credit.reward), episode, number) > 0
        score = episode_return(credit.reward, episode, number)
        return next_average(credit.state, score, scored, self.decay, all_sum=credit.engine.sum)


@register_recipe
class GigpoCfg(BaselineCfg):
    """The mean, and a second comparison of steps with the same observation (GiGPO)."""

    name: Literal["gigpo"] = "gigpo"
    weight: NonNegative = 1.0
    """Weight of the second advantage, the paper's omega."""
    discounts: ClassVar = True
    source: ClassVar = "https://arxiv.org/abs/2505.10978"

    def advantage(self, credit: "CreditInput", compare: "Callable[[CreditInput], Tensor]") -> "Tensor":
        """The group's comparison, plus ``weight`` times that of discounted returns at the same observation.

        As in the paper (eq. 5 to 7), that includes the episode's own visits. A unique observation adds 0.
        """
        from groupwise.algorithms.advantages import Scores
        from groupwise.recipes.anchors import anchors

        key, num_keys = anchors(credit.batch["obs"], credit.batch["group_id"], credit.live)
        steps = Scores(credit, credit.return_to_go, key, num_keys, credit.live)
        return compare(credit) + self.weight * steps.relative()


@register_recipe
class KnnCfg(BaselineCfg):
    """The mean of returns from the nearest states of other episodes, with generalised advantages.

    The values are those of the paper, the advantages PPO's. The combination is not from a paper.
    """

    name: Literal["knn"] = "knn"
    k: PositiveInt = 16
    """Number of neighbours. Fewer: less bias; more: less variance."""
    gae_lambda: Fraction = 0.95
    """Lambda of the generalised advantage estimate, as in PPO. 1: returns, without bootstrapping from values."""
    source: ClassVar = "https://arxiv.org/abs/1606.04460"
    within_group: ClassVar = False
    needs: ClassVar = {"returns": ("return_to_go",), "group_key": ("group",), "scale": ("none",), "reward": ("total",)}

    def check_policy(self, policy: "Policy") -> None:
        """Refuse observations that are no vectors of floats, by a ``ConfigError``."""
        space = getattr(policy, "observation_space", None)
        if space is not None and not (space.dtype is not None and space.dtype.kind == "f" and len(space.shape) == 1):
            raise ConfigError(
                f"credit.baseline='knn' needs vectors of floats as observations, got {space}; fix: baseline='mean' with "
                "group_key='group_step'"
            )

    def advantage(self, credit: "CreditInput", compare: "Callable[[CreditInput], Tensor]") -> "Tensor":
        """Generalised advantage estimate of each step."""
        from groupwise.recipes.knn_values import knn_advantage

        return knn_advantage(credit, self.k, self.gae_lambda)
