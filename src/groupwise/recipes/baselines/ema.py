"""RAE: a moving average of all episodes over the iterations."""

from typing import TYPE_CHECKING, ClassVar, Literal

from groupwise.config.base import Fraction
from groupwise.config.choices import register_recipe
from groupwise.config.credit import BaselineCfg

if TYPE_CHECKING:
    from groupwise.recipes.types import CreditInput, Scores, Tensor


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
        before = scores.credit.state
        return scores.above(self._average(scores.credit) if before is None else before)

    def next_state(self, credit: "CreditInput") -> "Tensor | None":
        """The average with this rollout's episodes."""
        any_counts = bool(credit.engine.sum(credit.batch["loss_mask"].sum()))
        return self._average(credit) if any_counts else credit.state

    def _average(self, credit: "CreditInput") -> "Tensor":
        from groupwise.functional.advantages import next_average
        from groupwise.functional.reduce import segment_sum
        from groupwise.functional.returns import episode_return

        episode, number = credit.batch["episode_id"], credit.num_episodes
        counts = credit.batch["loss_mask"].to(credit.reward)
        scored = segment_sum(counts, episode, number) > 0
        score = episode_return(credit.reward, episode, number)
        return next_average(credit.state, score, scored, self.decay, all_sum=credit.engine.sum)
