"""Credit: from the rewards of a rollout to advantages, as ``CreditCfg`` composes it.

The composition is ``group key x return x baseline x scale x rule for early finishers x rule for lone members``; each
choice is a small function of ``functional``. ``register_credit`` adds a rule of your own.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from tensordict import TensorDict
from torch import Tensor

from groupwise.algorithms.configs import CreditCfg
from groupwise.errors import ConfigError, UnknownNameError
from groupwise.functional.advantages import absorbed_count, comparable, group_relative
from groupwise.functional.reduce import AllSum, gather_segments, local, segment_sum
from groupwise.functional.returns import episode_return, return_to_go


class CreditInput(NamedTuple):
    """What a credit rule may look at."""

    batch: TensorDict
    """Transitions [N, T] of the rollout."""
    reward: Float[Tensor, "row step"]
    """Rewards, normalised if the policy does that."""
    cfg: CreditCfg
    gamma: float
    num_groups: int
    num_episodes: int
    all_sum: AllSum = local
    """Sum over all ranks, for statistics of the whole batch."""

    @property
    def done(self) -> Bool[Tensor, "row step"]:
        """Last transition of an episode."""
        done: Tensor = self.batch["terminated"] | self.batch["truncated"]
        return done


CreditRule = Callable[[CreditInput], Float[Tensor, "row step"]]

CREDIT_RULES: dict[str, CreditRule] = {}
"""Rules by name; ``composed`` is the built-in one."""


def register_credit(name: str) -> Callable[[CreditRule], CreditRule]:
    """Decorator: make a credit rule available as ``CreditCfg(rule=name)``.

    The rule maps a ``CreditInput`` to advantages ``[N, T]``; what it says outside ``loss_mask`` does not matter.

    Raises:
        ConfigError: the name is taken.
    """

    def register(rule: CreditRule) -> CreditRule:
        if name in CREDIT_RULES:
            raise ConfigError(f"credit rule {name!r} is registered already; mend: choose another name")
        CREDIT_RULES[name] = rule
        return rule

    return register


def advantages(credit: CreditInput) -> Float[Tensor, "row step"]:
    """Advantages [N, T] by the rule that the config names, 0 outside ``loss_mask``.

    Raises:
        UnknownNameError: nobody registered that rule.
    """
    return torch.where(credit.batch["loss_mask"], credit_rule(credit.cfg.rule)(credit), 0.0)


def credit_rule(name: str) -> CreditRule:
    """The rule of that name.

    Raises:
        UnknownNameError: nobody registered it.
    """
    if name not in CREDIT_RULES:
        raise UnknownNameError("credit rule", name, CREDIT_RULES)
    return CREDIT_RULES[name]


@register_credit("composed")
def composed(credit: CreditInput) -> Float[Tensor, "row step"]:
    """Advantages by the independent choices of ``CreditCfg``."""
    match credit.cfg.returns, credit.cfg.group_key:
        case "outcome", _:
            score = episode_return(credit.reward, credit.batch["episode_id"], credit.num_episodes)
            return trajectory(credit, score)
        case "process", _:
            normalised = _compare(credit, credit.reward, credit.batch["group_id"], credit.num_groups)
            return return_to_go(normalised, credit.done, 1.0)
        case _, "group":
            score = return_to_go(credit.reward, credit.done, credit.gamma)
            return _compare(credit, score, credit.batch["group_id"], credit.num_groups)
        case _:
            return per_step(credit, return_to_go(credit.reward, credit.done, credit.gamma))


def trajectory(credit: CreditInput, score: Float[Tensor, " episode"]) -> Float[Tensor, "row step"]:
    """Advantage of each whole episode within its group, at each of its steps."""
    group, scored = episode_groups(credit.batch, credit.num_episodes)
    advantage = group_relative(
        score,
        group,
        credit.num_groups,
        baseline=credit.cfg.baseline,
        scale=credit.cfg.scale,
        eps=credit.cfg.eps,
        member=scored,
        all_sum=credit.all_sum,
    )
    return gather_segments(advantage, credit.batch["episode_id"])


def per_step(credit: CreditInput, score: Float[Tensor, "row step"]) -> Float[Tensor, "row step"]:
    """Advantage of each step among the group's members at the same step, with the rules for who ended early."""
    batch, cfg = credit.batch, credit.cfg
    steps = int(batch["step"].max()) + 1  # more than the rollout has, where it holds the end of an attempt only
    num_keys = credit.num_groups * steps
    live = batch["loss_mask"] & (batch["group_id"] >= 0)
    key = torch.where(live, batch["group_id"] * steps + batch["step"], -1)
    zeros = None
    if cfg.early_finisher == "absorb":
        ended = batch["terminated"] & live
        zeros = absorbed_count(batch["group_id"], batch["step"], ended, credit.num_groups, steps)
    advantage = _compare(credit, score, key, num_keys, zeros)
    if cfg.early_finisher != "trajectory" and cfg.lone_member != "trajectory":
        return advantage
    first = torch.where(batch["step"] == 0, score, 0.0)
    whole = trajectory(credit, segment_sum(first, batch["episode_id"], credit.num_episodes))
    if cfg.early_finisher == "trajectory":
        compared = _complete(credit, key, num_keys)
    else:
        compared = comparable(key, num_keys, live, zeros)
    return torch.where(compared, advantage, whole)


def episode_groups(batch: TensorDict, num_episodes: int) -> tuple[Int[Tensor, " episode"], Bool[Tensor, " episode"]]:
    """Group of each episode, and whether it is a scorable member (any step of it counts)."""
    episode, group = batch["episode_id"], batch["group_id"]
    steps = segment_sum(torch.ones_like(batch["reward"]), episode, num_episodes)
    total = segment_sum(group.to(torch.float64), episode, num_episodes)
    scored = segment_sum(torch.ones_like(batch["reward"]), episode, num_episodes, batch["loss_mask"]) > 0
    return (total / steps.clamp(min=1)).round().long(), scored


def _compare(
    credit: CreditInput,
    score: Float[Tensor, "row step"],
    key: Int[Tensor, "row step"],
    num_keys: int,
    zeros: Float[Tensor, " key"] | None = None,
) -> Float[Tensor, "row step"]:
    """Each step's score among the steps of its key."""
    cfg = credit.cfg
    return group_relative(
        score,
        key,
        num_keys,
        baseline=cfg.baseline,
        scale=cfg.scale,
        eps=cfg.eps,
        member=credit.batch["loss_mask"],
        zeros=zeros,
        all_sum=credit.all_sum,
    )


def _complete(credit: CreditInput, key: Int[Tensor, "row step"], num_keys: int) -> Bool[Tensor, "row step"]:
    """True where every scorable member of the group is still there to be compared with."""
    group, scored = episode_groups(credit.batch, credit.num_episodes)
    members = segment_sum(scored.float(), group, credit.num_groups)
    here = segment_sum(torch.ones_like(credit.reward), key, num_keys)
    return (gather_segments(here, key) == gather_segments(members, credit.batch["group_id"])) & (key >= 0)
