"""Optimal token baseline: the mean, weighted by the accumulated variance of each episode's actions."""

from typing import TYPE_CHECKING, ClassVar, Literal

from groupwise.config.choices import register_recipe
from groupwise.config.credit import BaselineCfg
from groupwise.errors import ConfigError, DataError

if TYPE_CHECKING:
    from groupwise.recipes.types import CreditInput, Policy, Scores, Tensor


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

        action = policy.action_spec
        if not policy.gives_distribution:
            found = f"{type(policy).__name__} returns those of single tokens"
        elif action != TensorSpec((), torch.int64):
            kind = f"{action.dtype} of shape {list(action.shape)}" if isinstance(action, TensorSpec) else "a dictionary"
            found = f"the policy's action is {kind}"
        else:
            return
        raise ConfigError(
            f"credit.baseline='optimal_token' needs the probabilities of a Discrete action, and {found}; fix: baseline='mean'"
        )

    def of_steps(self, scores: "Scores") -> "Tensor":
        """``score - sum(w * score) / sum(w)``, with w the accumulated variance."""
        return scores.relative(weight=accumulated_variance(scores.credit))


def accumulated_variance(credit: "CreditInput") -> "Tensor":
    """Sum of the action variances in an episode up to each step."""
    from groupwise.functional.advantages import choice_variance
    from groupwise.functional.returns import running_sum

    if credit.start is None or credit.start.dist is None:
        raise DataError(
            "credit.baseline='optimal_token' got no distributions; fix: CreditInput(start=policy.evaluate(...))"
        )
    variance = choice_variance(credit.start.dist, credit.batch["action"]).masked_fill(~credit.live, 0)
    return running_sum(variance, credit.batch["episode_id"])
