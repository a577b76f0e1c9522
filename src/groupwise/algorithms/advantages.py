"""Advantages of GRPO: from the rewards of a rollout's groups, as ``CreditCfg`` composes them.

The composition is ``reward x group key x return x baseline x scale x rules for steps that members do not reach x
normalisation``; each choice is a small function of ``functional``, or a recipe. ``register_credit`` adds a rule of your own.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from tensordict import TensorDict
from torch import Tensor

from groupwise.config.credit import CreditCfg, GroupStepCfg
from groupwise.engines.base import Engine
from groupwise.errors import DataError, UnknownNameError
from groupwise.functional.advantages import (
    Baseline,
    baseline_relative,
    comparable,
    finished_count,
    group_relative,
)
from groupwise.functional.reduce import gather_segments, segment_mean, segment_min_max, segment_sum, whiten
from groupwise.functional.returns import episode_return, return_to_go
from groupwise.plugins import register
from groupwise.policies.base import Evaluation, Policy


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
    parts: Float[Tensor, "row step part"] | None = None
    """Parts of the reward in the scale of ``reward`` (``cfg.reward="parts"``). None: as they are in the batch."""
    state: Tensor | None = None
    """What the baseline keeps from earlier rollouts."""
    start: Evaluation | None = None
    """The policy's scores at the update's start, where the baseline needs them."""

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

    @property
    def return_to_go(self) -> Float[Tensor, "row step"]:
        """Discounted reward from each step on; summed in float64, as outcomes are."""
        return return_to_go(self.reward.double(), self.done, self.gamma).to(self.reward)


class Scores(NamedTuple):
    """Scores of episodes or of steps, and what each is compared with: the members of its key."""

    credit: CreditInput
    score: Float[Tensor, "*batch"]
    key: Int[Tensor, "*batch"]
    num_keys: int
    member: Bool[Tensor, "*batch"]
    zeros: Float[Tensor, " key"] | None = None
    """How many further members of each key have score 0."""

    def relative(
        self, baseline: Baseline = "mean", weight: Float[Tensor, "*batch"] | None = None
    ) -> Float[Tensor, "*batch"]:
        """Each score less the baseline of its key, over the scale."""
        cfg, engine = self.credit.cfg, self.credit.engine
        return group_relative(
            self.score,
            self.key,
            self.num_keys,
            baseline=baseline,
            scale=cfg.scale,
            eps=cfg.eps,
            member=self.member,
            zeros=self.zeros,
            weight=weight,
            all_sum=engine.sum,
        )

    def above(
        self, baseline: Float[Tensor, "*#batch"], member: Bool[Tensor, "*batch"] | None = None
    ) -> Float[Tensor, "*batch"]:
        """Each score less a baseline from elsewhere, over a scale of the batch."""
        cfg, engine = self.credit.cfg, self.credit.engine
        assert cfg.scale in ("batch_std", "nonzero_share", "none")
        member = self.member if member is None else member
        return baseline_relative(self.score, baseline, scale=cfg.scale, member=member, eps=cfg.eps, all_sum=engine.sum)


def advantages(credit: CreditInput) -> Float[Tensor, "row step"]:
    """Advantages [N, T] by the rule that the config names, 0 outside ``loss_mask``.

    Raises:
        UnknownNameError: no such rule is registered.
        DataError: the rollout lacks what the rule needs, or the rule returned anything else than advantages.
    """
    mask, found = credit.batch["loss_mask"], credit_rule(credit.cfg.rule)(credit)
    if not isinstance(found, Tensor) or found.shape != mask.shape:
        raise _no_advantages(credit.cfg.rule, found, mask)
    return torch.where(mask, found, 0.0)


def _no_advantages(rule: str, found: object, mask: Tensor) -> DataError:
    what = f"shape {list(found.shape)}" if isinstance(found, Tensor) else repr(type(found))
    return DataError(
        f"credit rule {rule!r} returned {what}, expected a tensor of shape {list(mask.shape)}; fix: an advantage for each "
        "step, as gather_segments(advantage, batch['episode_id']) from one for each episode"
    )


def composed(credit: CreditInput) -> Float[Tensor, "row step"]:
    """Advantages by the independent choices of ``CreditCfg``."""
    advantage = torch.zeros_like(credit.reward)
    for weight, reward in credit.cfg.reward.compared(credit):
        part = credit._replace(reward=reward)
        advantage = advantage + weight * credit.cfg.baseline.advantage(part, compare)
    return advantage if credit.cfg.normalize == "none" else normalized(credit, advantage)


def compare(credit: CreditInput) -> Float[Tensor, "row step"]:
    """Advantage of each step within its group, by score, key, baseline and scale."""
    match credit.cfg.returns, credit.cfg.group_key.name:
        case "outcome", _:
            score = episode_return(credit.reward, credit.batch["episode_id"], credit.num_episodes)
            return whole_episodes(credit, score)
        case "process", _:
            return return_to_go(among_group(credit, credit.reward), credit.done, 1.0)
        case "turn", _:
            return per_turn(credit)
        case _, "group":
            return among_group(credit, credit.return_to_go)
        case _:
            return per_step(credit, credit.return_to_go)


def whole_episodes(credit: CreditInput, score: Float[Tensor, " episode"]) -> Float[Tensor, "row step"]:
    """Advantage of each whole episode, at each of its steps."""
    group, scored = episode_groups(credit.batch, credit.num_episodes)
    advantage = credit.cfg.baseline.of_episodes(Scores(credit, score, group, credit.num_groups, scored))
    return gather_segments(advantage, credit.batch["episode_id"])


def among_group(credit: CreditInput, score: Float[Tensor, "row step"]) -> Float[Tensor, "row step"]:
    """Advantage of each step among all steps of its group."""
    batch = credit.batch
    return credit.cfg.baseline.of_steps(Scores(credit, score, batch["group_id"], credit.num_groups, batch["loss_mask"]))


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
    score = gather_segments(episode_return(credit.reward, played, num_played), played)
    # a turn of many steps is one member, represented by its first step
    place = torch.arange(turn.numel(), device=turn.device).view_as(turn).to(torch.float64)
    first, _ = segment_min_max(place, played, num_played)
    representative = credit.live & (place == gather_segments(first, played))
    outcome = episode_return(credit.reward, batch["episode_id"], credit.num_episodes)
    advantage = _at_moment(credit, score, turn, representative, outcome)
    return gather_segments(segment_sum(advantage, played, num_played, representative), played)


def _at_moment(
    credit: CreditInput,
    score: Float[Tensor, "row step"],
    moment: Int[Tensor, "row step"],
    member: Bool[Tensor, "row step"],
    outcome: Float[Tensor, " episode"],
) -> Float[Tensor, "row step"]:
    """Advantage of each member at its moment (step or turn) of the group, or its whole episode's where rules say so."""
    batch, cfg, rules = credit.batch, credit.cfg, credit.cfg.group_key
    assert isinstance(rules, GroupStepCfg)
    moments = int(moment.max()) + 1  # more than the rollout has, where it holds the end of an episode only
    num_keys = credit.num_groups * moments
    key = torch.where(member, batch["group_id"] * moments + moment, -1)
    zeros = None
    if rules.finished_members == "zero":
        ended = batch["terminated"] & credit.live
        zeros = finished_count(batch["group_id"], moment, ended, credit.num_groups, moments)
    advantage = cfg.baseline.of_steps(Scores(credit, score, key, num_keys, batch["loss_mask"], zeros))
    if rules.finished_members == "trajectory":
        among_all = _complete(credit, key, num_keys)
    elif rules.singleton == "trajectory":
        among_all = comparable(key, num_keys, member, zeros)
    else:
        return advantage
    return torch.where(among_all, advantage, whole_episodes(credit, outcome))


def _complete(credit: CreditInput, key: Int[Tensor, "row step"], num_keys: int) -> Bool[Tensor, "row step"]:
    """True where every scorable member of the group is still there to be compared with."""
    group, scored = episode_groups(credit.batch, credit.num_episodes)
    members = segment_sum(scored.float(), group, credit.num_groups)
    here = segment_sum(torch.ones_like(credit.reward), key, num_keys)
    return (gather_segments(here, key) == gather_segments(members, credit.batch["group_id"])) & (key >= 0)


def normalized(credit: CreditInput, advantage: Float[Tensor, "row step"]) -> Float[Tensor, "row step"]:
    """The advantages with mean 0 and standard deviation 1 over the steps or the episodes of the batch."""
    cfg, counts = credit.cfg, credit.batch["loss_mask"]
    if cfg.normalize == "episodes":
        episode, number = credit.batch["episode_id"], credit.num_episodes
        _, scored = episode_groups(credit.batch, number)
        each = segment_mean(advantage, episode, number, counts)
        return gather_segments(whiten(each, scored, eps=cfg.eps, all_sum=credit.engine.sum), episode)
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


CreditRule = Callable[[CreditInput], Float[Tensor, "row step"]]

CREDIT_RULES: dict[str, CreditRule] = {"composed": composed}
"""Rules by name."""


def register_credit(name: str) -> Callable[[CreditRule], CreditRule]:
    """Decorator: make a credit rule available as ``CreditCfg(rule=name)``.

    The rule maps a ``CreditInput`` to advantages ``[N, T]``; values outside ``loss_mask`` are ignored.

    Raises:
        ConfigError: the name is taken, or missing.
    """
    return register("credit rule", CREDIT_RULES, name)


def credit_rule(name: str) -> CreditRule:
    """The rule of that name.

    Raises:
        UnknownNameError: no such rule is registered.
    """
    if name not in CREDIT_RULES:
        raise UnknownNameError("credit rule", name, CREDIT_RULES)
    return CREDIT_RULES[name]


def check_credit(cfg: CreditCfg, policy: Policy) -> None:
    """Refuse what cannot work, before the first rollout.

    Raises:
        UnknownNameError: no such rule is registered.
        ConfigError: the settings contradict each other, or the baseline cannot work with the policy.
    """
    credit_rule(cfg.rule)
    cfg.baseline.check_policy(policy)
