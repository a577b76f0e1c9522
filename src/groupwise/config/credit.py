"""Settings of credit: how rewards of a group become advantages. Imports no torch.

Baselines other than the mean are made from the functions of ``algorithms/advantages.py``.
"""

from typing import ClassVar, Literal

from pydantic import SerializeAsAny, model_validator

from groupwise.config.base import Cfg, Choice, NonNegative, register_choice


class BaselineCfg(Choice, family="baseline", default="mean"):
    """What is subtracted from the score: settings of a function registered with ``register_baseline``."""

    known: ClassVar = dict.fromkeys(
        ("ema", "gigpo", "greedy", "knn", "leave_one_out", "length_weighted", "none", "optimal_token", "second_best"),
        "groupwise.algorithms.advantages",
    )
    needs: ClassVar[dict[str, tuple[str, ...]]] = {}
    """Required values of other settings of credit."""
    within_group: ClassVar[bool] = True
    """Whether a group of equal returns has advantages 0."""
    discounts: ClassVar[bool] = False
    """Whether it reads ``CreditInput.gamma``."""
    greedy_members: ClassVar[Literal[0, 1]] = 0
    """Further deterministic episodes of each group, not trained on."""
    needs_scores: ClassVar[bool] = False
    """Whether it reads ``CreditInput.start``."""


@register_choice
class MeanCfg(BaselineCfg):
    """The mean of those compared."""

    name: Literal["mean"] = "mean"
    source: ClassVar = "https://arxiv.org/abs/2402.03300"


class CreditRewardCfg(Choice, family="reward", default="total"):
    """Which reward is compared."""


@register_choice
class TotalCfg(CreditRewardCfg):
    """The reward as one number."""

    name: Literal["total"] = "total"
    source: ClassVar = "https://arxiv.org/abs/2402.03300"


@register_choice
class PartsCfg(CreditRewardCfg):
    """Each part of the reward on its own, advantages added up (GDPO)."""

    name: Literal["parts"] = "parts"
    names: tuple[str, ...] = ()
    """Entries of ``info`` that make up the reward, such as ``reward_forward``. Empty for texts, where each reward function is a part."""
    weights: tuple[float, ...] = ()
    """Weight of each part's advantage. Empty: 1 each."""
    source: ClassVar = "https://arxiv.org/abs/2601.05242"


class GroupKeyCfg(Choice, family="group key", default="group"):
    """What is compared."""


@register_choice
class WholeGroupCfg(GroupKeyCfg):
    """Members are compared as a whole."""

    name: Literal["group"] = "group"
    source: ClassVar = "https://arxiv.org/abs/2402.03300"


@register_choice
class GroupStepCfg(GroupKeyCfg):
    """Members are compared at the same time step (with ``returns="turn"``: at the same turn)."""

    name: Literal["group_step"] = "group_step"
    source: ClassVar = "https://github.com/DexForce/EmbodiChain"
    finished_members: Literal["zero", "mask", "trajectory"] = "mask"
    """After a member has ended: ``zero``, a terminated member counts with return 0; ``mask``, it is left out; ``trajectory``, steps take the advantage of the whole episode."""
    singleton: Literal["zero", "trajectory"] = "zero"
    """A member with nothing to compare with: advantage 0, or the advantage of the whole episode."""


class CreditCfg(Cfg):
    """How rewards become advantages: a composition of independent choices."""

    rule: str = "composed"
    """``composed``: the choices below; or the name of a registered credit rule."""
    reward: SerializeAsAny[CreditRewardCfg] = TotalCfg()
    """The whole reward, or each of its parts on its own, with the advantages added (GDPO)."""
    group_key: SerializeAsAny[GroupKeyCfg] = WholeGroupCfg()
    """What is compared: the whole group, or its members at the same step, by name or with parameters: ``{"name": "group_step", "singleton": "trajectory"}``."""
    returns: Literal["outcome", "process", "return_to_go", "turn"] = "outcome"
    """Score: ``outcome``, the sum of the episode's rewards; ``process``, normalised step rewards summed from this step; ``return_to_go``, discounted rewards from this step; ``turn``, the sum of the turn's rewards."""
    baseline: SerializeAsAny[BaselineCfg] = MeanCfg()
    """Subtracted from the score, by name or with its parameters: ``{"name": "knn", "k": 16}``."""
    scale: Literal["std", "population_std", "batch_std", "mean", "nonzero_share", "none"] = "std"
    """Divisor: standard deviation of what is compared, unbiased or of the population; unbiased standard deviation of the batch; mean of what is compared (MaxRL); share of scores that are not 0 (GPG); nothing."""
    eps: NonNegative = 1e-4
    """Added to the standard deviation, in units of the score. 1e-8 would turn rounding noise into full advantages."""
    normalize: Literal["none", "batch", "informative", "episodes"] = "none"
    """Scale advantages to mean 0 and standard deviation 1: never; over all steps of the batch; over the steps of groups with variance; over episodes, whatever their length (GDPO)."""
    kl_placement: Literal["loss", "reward", "advantage"] = "loss"
    """Where ``kl_coef`` times the KL goes: into the loss, off each reward before credit, or into the advantage."""

    @property
    def discounts(self) -> bool:
        """Whether ``gamma`` has an effect; of a registered rule it is not known."""
        return self.rule != "composed" or self.returns == "return_to_go" or self.baseline.discounts

    @model_validator(mode="after")
    def _check_together(self) -> "CreditCfg":
        by_step = isinstance(self.group_key, GroupStepCfg)
        for field, allowed in self.baseline.needs.items():
            value = (vars(self.group_key) | vars(self)).get(field)
            found = value.name if isinstance(value, Choice) else value
            if found not in allowed:
                name = field if field in vars(self) else f"group_key.{field}"
                raise ValueError(
                    f"baseline={self.baseline.name!r} needs {name}={' or '.join(map(repr, allowed))}; got {name}={found!r}, "
                    f"fix: {name}={allowed[0]!r}, or baseline='mean'"
                )
        if by_step and self.returns not in ("return_to_go", "turn"):
            raise ValueError(
                f"group_key='group_step' compares returns from a step on; got returns={self.returns!r}, fix: returns='return_to_go'"
            )
        if self.returns == "turn" and not by_step:
            raise ValueError("returns='turn' compares the same turn; fix: group_key='group_step'")
        if self.normalize == "episodes" and (self.returns != "outcome" or self.baseline.name == "gigpo"):
            raise ValueError(
                "normalize='episodes' needs one advantage for each episode; got "
                f"returns={self.returns!r}, baseline={self.baseline.name!r}, fix: returns='outcome', or normalize='batch'"
            )
        if self.kl_placement == "reward" and self.reward.name == "parts":
            raise ValueError("kl_placement='reward' needs one reward; got reward='parts', fix: kl_placement='loss'")
        return self
