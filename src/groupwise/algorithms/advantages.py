"""Credit: from the rewards of a rollout to advantages, as ``CreditCfg`` composes it.

The composition is ``reward x group key x return x baseline x scale x rule for early finishers x rule for lone members
x anchors x normalisation``; each choice is a small function of ``functional``. ``register_credit`` adds a rule of your
own.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from tensordict import TensorDict
from torch import Tensor

from groupwise.algorithms.anchors import anchors
from groupwise.algorithms.near_states import above_near_states
from groupwise.config.algorithm import CreditCfg
from groupwise.data.rollout import TensorSpec
from groupwise.engines.base import Engine
from groupwise.errors import ConfigError, DataError, UnknownNameError
from groupwise.functional.advantages import (
    Baseline,
    absorbed_count,
    baseline_relative,
    comparable,
    group_relative,
    next_average,
)
from groupwise.functional.reduce import gather_segments, segment_min_max, segment_sum, whiten
from groupwise.functional.returns import episode_return, return_to_go, running_sum
from groupwise.policies.base import Policy


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
    engine: Engine = Engine()
    """Of all ranks, for statistics of the whole batch."""
    average: Float[Tensor, ""] | None = None
    """Moving average of the attempts' scores up to this rollout (``baseline="ema"``)."""
    choice_variance: Float[Tensor, "row step"] | None = None
    """How much chance was in each choice (``baseline="optimal_token"``)."""
    parts: Float[Tensor, "row step part"] | None = None
    """Parts of the reward in the scale of ``reward`` (``cfg.reward="parts"``). None: as they are in the batch."""
    spaced: bool = False
    """Whether ids of groups are apart by as many steps as the group has at least, so that id + step tells steps apart."""

    @property
    def done(self) -> Bool[Tensor, "row step"]:
        """Last transition of an episode."""
        done: Tensor = self.batch["terminated"] | self.batch["truncated"]
        return done

    @property
    def live(self) -> Bool[Tensor, "row step"]:
        """Steps that are compared: they count, and belong to a group."""
        live: Tensor = self.batch["loss_mask"] & (self.batch["group_id"] >= 0)
        return live


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
            raise ConfigError(f"credit rule {name!r} is registered already; fix: choose another name")
        CREDIT_RULES[name] = rule
        return rule

    return register


def advantages(credit: CreditInput) -> Float[Tensor, "row step"]:
    """Advantages [N, T] by the rule that the config names, 0 outside ``loss_mask``.

    Raises:
        UnknownNameError: nobody registered that rule.
        DataError: the rollout lacks what the rule needs.
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


def check_credit(cfg: CreditCfg, policy: Policy) -> None:
    """Refuse what cannot work, before the first rollout.

    Raises:
        UnknownNameError: nobody registered the rule.
        ConfigError: the settings contradict each other, or the baseline needs probabilities that the policy's
            distribution does not have.
    """
    credit_rule(cfg.rule)
    cfg.check_steps()
    action = policy.action_spec
    if cfg.baseline == "optimal_token" and not policy.gives_distribution:
        raise ConfigError(
            "credit.baseline='optimal_token' needs the probabilities of all choices, and "
            f"{type(policy).__name__} gives those of single tokens; fix: baseline='mean'"
        )
    if cfg.baseline == "optimal_token" and action != TensorSpec((), torch.int64):
        found = f"{action.dtype} of shape {list(action.shape)}" if isinstance(action, TensorSpec) else "a dictionary"
        raise ConfigError(
            "credit.baseline='optimal_token' needs the probabilities of one choice among some (Discrete), and the "
            f"policy's action is {found}; fix: baseline='mean'"
        )


def next_score_average(credit: CreditInput) -> Float[Tensor, ""]:
    """The moving average of ``baseline="ema"`` once this rollout's attempts have entered it."""
    _, scored = episode_groups(credit.batch, credit.num_episodes)
    score = episode_return(credit.reward, credit.batch["episode_id"], credit.num_episodes)
    return next_average(credit.average, score, scored, credit.cfg.ema_decay, all_sum=credit.engine.sum)


@register_credit("composed")
def composed(credit: CreditInput) -> Float[Tensor, "row step"]:
    """Advantages by the independent choices of ``CreditCfg``."""
    advantage = torch.zeros_like(credit.reward)
    for weight, reward in compared_rewards(credit):
        part = credit._replace(reward=reward)
        advantage = advantage + weight * compared(part)
        if credit.cfg.anchor_weight:
            advantage = advantage + weight * credit.cfg.anchor_weight * anchored(part)
    return normalized(credit, advantage)


def compared(credit: CreditInput) -> Float[Tensor, "row step"]:
    """Advantage of each step within its group, by score, key, baseline and scale; or above the states near it."""
    if credit.cfg.baseline == "near_states":
        return above_near_states(credit.batch, credit.reward, credit.gamma, credit.cfg, credit.engine)
    match credit.cfg.returns, credit.cfg.group_key:
        case "outcome", _:
            score = episode_return(credit.reward, credit.batch["episode_id"], credit.num_episodes)
            return trajectory(credit, score)
        case "process", _:
            normalised = _compare(credit, credit.reward, credit.batch["group_id"], credit.num_groups)
            return return_to_go(normalised, credit.done, 1.0)
        case "turn", _:
            return per_turn(credit)
        case _, "group":
            score = return_to_go(credit.reward, credit.done, credit.gamma)
            return _compare(credit, score, credit.batch["group_id"], credit.num_groups)
        case _:
            return per_step(credit, return_to_go(credit.reward, credit.done, credit.gamma))


def trajectory(credit: CreditInput, score: Float[Tensor, " episode"]) -> Float[Tensor, "row step"]:
    """Advantage of each whole episode, at each of its steps.

    Raises:
        DataError: ``baseline="greedy"``, and the rollout does not say which attempts were.
    """
    cfg, episode = credit.cfg, credit.batch["episode_id"]
    group, scored = episode_groups(credit.batch, credit.num_episodes)
    match cfg.baseline:
        case "none":
            advantage = score
        case "greedy" | "ema":
            baseline, member = _outside_baseline(credit, score, group, scored)
            assert cfg.scale in ("batch_std", "nonzero_share", "none")
            advantage = baseline_relative(
                score, baseline, scale=cfg.scale, member=member, eps=cfg.eps, all_sum=credit.engine.sum
            )
        case _:
            advantage = group_relative(
                score,
                group,
                credit.num_groups,
                baseline=_within_group(cfg),
                scale=cfg.scale,
                eps=cfg.eps,
                member=scored,
                weight=_lengths(credit) if cfg.baseline == "length_weighted" else None,
                all_sum=credit.engine.sum,
            )
    return gather_segments(advantage, episode)


def per_step(credit: CreditInput, score: Float[Tensor, "row step"]) -> Float[Tensor, "row step"]:
    """Advantage of each step among the group's members at the same step, with the rules for who ended early."""
    batch = credit.batch
    first = torch.where(batch["step"] == 0, score, 0.0)
    outcome = segment_sum(first, batch["episode_id"], credit.num_episodes)
    return _at_moment(credit, score, batch["step"], credit.live, outcome)


def per_turn(credit: CreditInput) -> Float[Tensor, "row step"]:
    """Advantage of each turn among the members that played it, at each of its steps; turns are ``turn_id``, or steps."""
    batch = credit.batch
    turn = batch["turn_id"] if "turn_id" in batch.keys() else batch["step"]  # noqa: SIM118  iterating goes over rows
    num_turns = int(turn.max()) + 1
    played = torch.where(credit.live, batch["episode_id"] * num_turns + turn, -1)
    num_played = credit.num_episodes * num_turns
    score = gather_segments(segment_sum(credit.reward, played, num_played), played)
    # a turn of many steps is one member: its first step stands for it
    place = torch.arange(turn.numel(), device=turn.device).view_as(turn).to(torch.float64)
    first, _ = segment_min_max(place, played, num_played)
    stands = credit.live & (place == gather_segments(first, played))
    outcome = episode_return(credit.reward, batch["episode_id"], credit.num_episodes)
    advantage = _at_moment(credit, score, turn, stands, outcome)
    return gather_segments(segment_sum(advantage, played, num_played, stands), played)


def anchored(credit: CreditInput) -> Float[Tensor, "row step"]:
    """Advantage of each step among all steps of its group that saw the same observation; 0 where none other did.

    As in the paper, these include the attempt's own earlier and later visits.

    Source: GiGPO, https://arxiv.org/abs/2505.10978, eq. 5 to 7.
    """
    key, num_keys = anchors(credit.batch["obs"], credit.batch["group_id"], credit.live)
    score = return_to_go(credit.reward, credit.done, credit.gamma)
    return group_relative(
        score,
        key,
        num_keys,
        baseline=_within_group(credit.cfg),
        scale=credit.cfg.scale,
        eps=credit.cfg.eps,
        all_sum=credit.engine.sum,
    )


def normalized(credit: CreditInput, advantage: Float[Tensor, "row step"]) -> Float[Tensor, "row step"]:
    """The advantages as ``cfg.normalize`` says: as they are, or with mean 0 and deviation 1 over the batch."""
    cfg, counts = credit.cfg, credit.batch["loss_mask"]
    if cfg.normalize == "none":
        return advantage
    if cfg.normalize == "informative":
        group = credit.batch["group_id"]
        differs = segment_sum((advantage != 0).to(advantage), group, credit.num_groups)
        counts = counts & (gather_segments(differs, group) > 0)
    return whiten(advantage, counts, eps=cfg.eps, all_sum=credit.engine.sum)


def episode_groups(batch: TensorDict, num_episodes: int) -> tuple[Int[Tensor, " episode"], Bool[Tensor, " episode"]]:
    """Group of each episode, and whether it is a scorable member (any step of it counts)."""
    episode, group = batch["episode_id"], batch["group_id"]
    steps = segment_sum(torch.ones_like(batch["reward"]), episode, num_episodes)
    total = segment_sum(group.to(torch.float64), episode, num_episodes)
    scored = segment_sum(torch.ones_like(batch["reward"]), episode, num_episodes, batch["loss_mask"]) > 0
    return (total / steps.clamp(min=1)).round().long(), scored


def compared_rewards(credit: CreditInput) -> list[tuple[float, Float[Tensor, "row step"]]]:
    """What is compared, one after another, with weights: the reward, or its parts.

    Raises:
        DataError: there are no parts, or not as many as weights.
    """
    if credit.cfg.reward == "total":
        return [(1.0, credit.reward)]
    found = credit.batch.get("reward_parts", None) if credit.parts is None else credit.parts
    if found is None:
        raise DataError(
            "credit.reward='parts', but the rollout has no 'reward_parts'; fix: name them in env.reward_parts"
        )
    parts = found.unbind(dim=-1)
    weights = credit.cfg.part_weights or (1.0,) * len(parts)
    if len(weights) != len(parts):
        raise DataError(
            f"credit.part_weights has {len(weights)} weights for {len(parts)} parts of the reward; fix: one for each"
        )
    return list(zip(weights, parts, strict=True))


def _within_group(cfg: CreditCfg) -> Baseline:
    """The baseline among siblings; those with a weight, or from elsewhere, are means."""
    return cfg.baseline if cfg.baseline in ("leave_one_out", "second_best") else "mean"


def _lengths(credit: CreditInput) -> Float[Tensor, " episode"]:
    counts = credit.batch["loss_mask"].to(credit.reward)
    return segment_sum(counts, credit.batch["episode_id"], credit.num_episodes)


def _outside_baseline(
    credit: CreditInput,
    score: Float[Tensor, " episode"],
    group: Int[Tensor, " episode"],
    scored: Bool[Tensor, " episode"],
) -> tuple[Float[Tensor, "*#episode"], Bool[Tensor, " episode"]]:
    """What each episode's score is measured against, and the members for which there is such a thing."""
    if credit.cfg.baseline == "ema":
        return next_score_average(credit) if credit.average is None else credit.average, scored
    if "greedy" not in credit.batch.keys():  # noqa: SIM118  iterating goes over rows
        raise DataError(
            "credit.baseline='greedy' needs one deterministic attempt a group, and the rollout has no 'greedy'; "
            "fix: collect with a collector that knows this baseline, or take baseline='leave_one_out'"
        )
    marked = credit.batch["greedy"].to(score)
    greedy = segment_sum(marked, credit.batch["episode_id"], credit.num_episodes) > 0
    number = segment_sum(torch.ones_like(score), group, credit.num_groups, greedy)
    mean = segment_sum(score, group, credit.num_groups, greedy) / number.clamp(min=1)
    return gather_segments(mean, group), scored & (gather_segments(number, group) > 0)


def _at_moment(
    credit: CreditInput,
    score: Float[Tensor, "row step"],
    moment: Int[Tensor, "row step"],
    member: Bool[Tensor, "row step"],
    outcome: Float[Tensor, " episode"],
) -> Float[Tensor, "row step"]:
    """Advantage of each member at its moment (step or turn) of the group, or its whole episode's where rules say so."""
    batch, cfg = credit.batch, credit.cfg
    moments = 1  # ids that are spaced have room behind them
    if not credit.spaced:
        moments = int(moment.max()) + 1  # more than the rollout has, where it holds the end of an attempt only
    num_keys = credit.num_groups * moments
    key = torch.where(member, batch["group_id"] * moments + moment, -1)
    zeros = None
    if cfg.early_finisher == "absorb":
        ended = batch["terminated"] & credit.live
        zeros = absorbed_count(batch["group_id"], moment, ended, credit.num_groups, moments)
    advantage = _compare(credit, score, key, num_keys, zeros)
    if cfg.early_finisher != "trajectory" and cfg.lone_member != "trajectory":
        return advantage
    whole = trajectory(credit, outcome)
    if cfg.early_finisher == "trajectory":
        among_all = _complete(credit, key, num_keys)
    else:
        among_all = comparable(key, num_keys, member, zeros)
    return torch.where(among_all, advantage, whole)


def _compare(
    credit: CreditInput,
    score: Float[Tensor, "row step"],
    key: Int[Tensor, "row step"],
    num_keys: int,
    zeros: Float[Tensor, " key"] | None = None,
) -> Float[Tensor, "row step"]:
    """Each step's score among the steps of its key."""
    cfg = credit.cfg
    if cfg.baseline == "none":
        return score
    return group_relative(
        score,
        key,
        num_keys,
        baseline=_within_group(cfg),
        scale=cfg.scale,
        eps=cfg.eps,
        member=credit.batch["loss_mask"],
        zeros=zeros,
        weight=_chance_seen(credit) if cfg.baseline == "optimal_token" else None,
        all_sum=credit.engine.sum,
    )


def _chance_seen(credit: CreditInput) -> Float[Tensor, "row step"]:
    """How much chance was in an episode's choices up to each step."""
    if credit.choice_variance is None:
        raise DataError("credit.baseline='optimal_token' got no choice_variance; fix: give CreditInput.choice_variance")
    variance = credit.choice_variance.masked_fill(~credit.live, 0)
    return running_sum(variance, credit.batch["episode_id"])


def _complete(credit: CreditInput, key: Int[Tensor, "row step"], num_keys: int) -> Bool[Tensor, "row step"]:
    """True where every scorable member of the group is still there to be compared with."""
    group, scored = episode_groups(credit.batch, credit.num_episodes)
    members = segment_sum(scored.float(), group, credit.num_groups)
    here = segment_sum(torch.ones_like(credit.reward), key, num_keys)
    return (gather_segments(here, key) == gather_segments(members, credit.batch["group_id"])) & (key >= 0)
