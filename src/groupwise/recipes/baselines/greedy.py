"""ReMax: each group plays a further deterministic episode, which is not trained on."""

from typing import TYPE_CHECKING, ClassVar, Literal

from groupwise.config.choices import register_recipe
from groupwise.config.credit import BaselineCfg
from groupwise.errors import DataError

if TYPE_CHECKING:
    from groupwise.recipes.types import Scores, Tensor


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
