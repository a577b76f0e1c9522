"""Advantages of GRPO: from the rewards of a rollout's groups, as ``CreditCfg`` composes them.

An advantage is ``(return - baseline) / scale``, normalised. Settings choose the reward, what is compared, the return, the
baseline, the scale, and rules for steps that members do not reach. A baseline is one function of ``Scores``, or of the whole
``CreditInput``, and its signature is its settings: ``{"name": "knn", "k": 8}`` calls ``knn(credit, k=8)``.
``register_baseline`` adds one of your own, ``register_credit`` a rule that takes the place of the composition.
"""

from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, get_args

import numpy as np
import torch
from annotated_types import Ge
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray
from torch import Tensor

from groupwise.config.algorithm import BaselineCfg, CreditCfg, GroupStepCfg, PartsCfg
from groupwise.config.base import Fraction, NonNegative, Positive, PositiveInt, settings_of
from groupwise.data.rollout import Nested, TensorDict
from groupwise.engines import Engine
from groupwise.errors import ConfigError, DataError, require_name
from groupwise.functional.advantages import (
    Baseline,
    BatchScale,
    batch_scale,
    episode_return,
    finished_count,
    gae,
    group_relative,
    return_to_go,
)
from groupwise.functional.reduce import gather_segments, segment_mean, segment_min_max, segment_sum, whiten
from groupwise.plugins import register


class CreditInput(NamedTuple):
    """Inputs of a credit rule."""

    batch: TensorDict
    """Transitions [N, T] of the rollout."""
    reward: Float[Tensor, "row step"]
    """Rewards, normalised if the policy does that."""
    cfg: CreditCfg
    gamma: float
    num_groups: int
    num_episodes: int
    engine: Engine = Engine()
    """Sums over all ranks, for statistics of the whole batch."""
    parts: Float[Tensor, "row step part"] | None = None
    """Parts of the reward in the scale of ``reward`` (``cfg.reward="parts"``). None: as they are in the batch."""
    num_steps: int | None = None
    """Steps are numbered below it. None: it is looked up, for which Python waits for the device."""
    memory: dict[str, Tensor] | None = None
    """Tensors that the rule keeps for the next update, in checkpoints too; the same on every rank. None: nothing is kept."""
    states: Any = None
    """Output of ``Policy.state_encoder``, [N, T, D], if the baseline reads it; the raw observations otherwise, or where it is None."""

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


_SCALES_OF_BATCH = get_args(BatchScale)
"""Scales that do not come from the group."""


class Scores(NamedTuple):
    """Scores of episodes or of steps; those of a key are compared, as far as ``member`` says that they take part.

    All but ``credit`` are the first arguments of ``group_relative``, in their order.
    """

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
        cfg, all_sum = self.credit.cfg, self.credit.engine.sum
        return group_relative(
            *self[1:], baseline=baseline, scale=cfg.scale, eps=cfg.eps, weight=weight, all_sum=all_sum
        )

    def above(
        self, baseline: Float[Tensor, "*#batch"], member: Bool[Tensor, "*batch"] | None = None
    ) -> Float[Tensor, "*batch"]:
        """Each score less a baseline from elsewhere, over a scale of the batch."""
        cfg, member = self.credit.cfg, self.member if member is None else member
        if cfg.scale not in ("batch_std", "nonzero_share", "none"):  # as type checkers read it
            raise ConfigError(f"this baseline takes no credit.scale={cfg.scale!r}; fix: {', '.join(_SCALES_OF_BATCH)}")
        exact = self.score.double()
        scale = batch_scale(cfg.scale, exact, member, exact.new_zeros(1), cfg.eps, self.credit.engine.sum)
        return ((exact - baseline) / scale).masked_fill(~member, 0).to(self.score)


def advantages(credit: CreditInput) -> Float[Tensor, "row step"]:
    """Advantages [N, T] by the rule that the config names, 0 outside ``loss_mask``.

    Raises:
        DataError: the rollout lacks data that the rule needs, or the rule did not return advantages.
    """
    mask, rule = credit.batch["loss_mask"], credit.cfg.rule
    found: object = CREDIT_RULES[rule](credit)
    if not isinstance(found, Tensor) or found.shape != mask.shape:
        raise _wrong_shape(f"credit rule {rule!r}", found, mask, _FOR_EACH_STEP)
    return torch.where(mask, found, 0.0)


_FOR_EACH_STEP = (
    "an advantage for each step, as gather_segments(advantage, batch['episode_id']) from one for each episode"
)


def _wrong_shape(what: str, found: object, like: Tensor, fix: str) -> DataError:
    """The error of a function of the user's that did not return a tensor like this one, before it is broadcast."""
    returned = f"shape {list(found.shape)}" if isinstance(found, Tensor) else repr(type(found))
    return DataError(f"{what} returned {returned}, expected a tensor of shape {list(like.shape)}; fix: {fix}")


def composed(credit: CreditInput) -> Float[Tensor, "row step"]:
    """Advantages by the independent choices of ``CreditCfg``, with mean 0 and standard deviation 1 if it says so.

    Raises:
        DataError: the baseline needs states as vectors of numbers, and there are none.
    """
    advantage = torch.zeros_like(credit.reward)
    baseline, states = credit.cfg.baseline, credit.states
    if baseline.states and not (isinstance(states, Tensor) and states.dim() == 3):
        raise no_vectors(baseline.name, states)
    function = partial(BASELINES[baseline.name], **baseline.parameters()) if baseline.whole else group_advantage
    for weight, reward in weighted_rewards(credit):
        found: object = function(credit._replace(reward=reward))
        if not isinstance(found, Tensor) or found.shape != advantage.shape:
            raise _wrong_shape(f"baseline {baseline.name!r}", found, advantage, _FOR_EACH_STEP)
        advantage = advantage + weight * found
    return advantage if credit.cfg.normalize == "none" else normalized(credit, advantage)


def no_vectors(baseline: str, states: Nested | None) -> DataError:
    """The error of a baseline that needs states as vectors of numbers."""
    got = "no observations" if states is None else "several tensors"
    if isinstance(states, Tensor):
        got = f"{states.dtype} of shape {list(states.shape)}"
    return DataError(
        f"credit.baseline={baseline!r} needs vectors of numbers [N, T, D] as observations, got {got}; fix: "
        "policy.critic_keys without images, or baseline='mean' with group_key='group_step'"
    )


def normalized(credit: CreditInput, advantage: Float[Tensor, "row step"]) -> Float[Tensor, "row step"]:
    """Advantages with mean 0 and standard deviation 1 over the steps or episodes that ``credit.normalize`` names, of all ranks."""
    cfg, counts, all_sum = credit.cfg, credit.batch["loss_mask"], credit.engine.sum
    match cfg.normalize:
        case "episodes":
            episode, number = credit.batch["episode_id"], credit.num_episodes
            each = segment_mean(advantage, episode, number, counts)
            _, scored = episode_groups(credit.batch, number)
            return gather_segments(whiten(each, scored, eps=cfg.eps, all_sum=all_sum), episode)
        case "informative":
            group = credit.batch["group_id"]
            differs = segment_sum((advantage != 0).to(advantage), group, credit.num_groups)
            counts = counts & (gather_segments(differs, group) > 0)
    return whiten(advantage, counts, eps=cfg.eps, all_sum=all_sum)


def weighted_rewards(credit: CreditInput) -> list[tuple[float, Tensor]]:
    """Rewards that are compared, one after another, with the weights of their advantages.

    Raises:
        DataError: parts are compared, and there are none, or not as many as weights.
    """
    return _parts(credit, credit.cfg.reward) if isinstance(credit.cfg.reward, PartsCfg) else [(1.0, credit.reward)]


def _parts(credit: CreditInput, cfg: PartsCfg) -> list[tuple[float, Tensor]]:
    found = credit.batch.get("reward_parts", None) if credit.parts is None else credit.parts
    if found is None:
        raise DataError("credit.reward='parts', but the rollout has no 'reward_parts'; fix: credit.reward.names")
    parts = found.unbind(dim=-1)
    weights = cfg.weights or (1.0,) * len(parts)
    if len(weights) != len(parts):
        raise DataError(
            f"credit.reward.weights: {len(weights)} for {len(parts)} parts of the reward; fix: one for each"
        )
    return list(zip(weights, parts, strict=True))


def group_advantage(credit: CreditInput) -> Float[Tensor, "row step"]:
    """Advantage of each step within its group, by score, key, baseline and scale."""
    match credit.cfg.returns, credit.cfg.group_key.name:
        case "outcome", _:
            score = episode_return(credit.reward, credit.batch["episode_id"], credit.num_episodes)
            return whole_episodes(credit, score)
        case "process", _:
            return return_to_go(among_group(credit, credit.reward), credit.done, 1.0)
        case "turn" | "turn_to_go", _:
            return per_turn(credit)
        case _, "group":
            return among_group(credit, credit.return_to_go)
        case _:
            return per_step(credit, credit.return_to_go)


def minus_baseline(scores: Scores) -> Float[Tensor, "*batch"]:
    """Advantages by the configured baseline; by the mean, where it is one of whole rollouts that compares groups, too."""
    cfg = scores.credit.cfg.baseline
    found: object = scores.relative() if cfg.whole else BASELINES[cfg.name](scores, **cfg.parameters())
    if not isinstance(found, Tensor) or found.shape != scores.score.shape:
        raise _wrong_shape(f"baseline {cfg.name!r}", found, scores.score, "an advantage for each of scores.score")
    return found


def whole_episodes(credit: CreditInput, score: Float[Tensor, " episode"]) -> Float[Tensor, "row step"]:
    """Advantage of each whole episode, at each of its steps."""
    group, scored = episode_groups(credit.batch, credit.num_episodes)
    scores = Scores(credit, score, group, credit.num_groups, scored)
    return gather_segments(minus_baseline(scores), credit.batch["episode_id"])


def among_group(credit: CreditInput, score: Float[Tensor, "row step"]) -> Float[Tensor, "row step"]:
    """Advantage of each step among all steps of its group."""
    batch = credit.batch
    return minus_baseline(Scores(credit, score, batch["group_id"], credit.num_groups, batch["loss_mask"]))


def per_step(credit: CreditInput, score: Float[Tensor, "row step"]) -> Float[Tensor, "row step"]:
    """Advantage of each step among the group's members at the same step, with the rules for who ended early."""
    batch = credit.batch
    first = torch.where(batch["step"] == 0, score, 0.0)
    outcome = segment_sum(first, batch["episode_id"], credit.num_episodes)
    num_steps = int(batch["step"].max()) + 1 if credit.num_steps is None else credit.num_steps
    return _at_moment(credit, score, batch["step"], num_steps, credit.live, outcome)


class Turns(NamedTuple):
    """Turns of a rollout, ``turn_id`` or steps, with the score of each. Many steps are one member, represented by the first."""

    number: Int[Tensor, "row step"]
    """Turn of each step within its episode."""
    played: Int[Tensor, "row step"]
    """Id of each step's turn, over all episodes; -1 where the step is not compared."""
    score: Float[Tensor, "row step"]
    first: Bool[Tensor, "row step"]
    """Representatives."""
    num_turns: int
    """Turns are numbered below it."""
    num_played: int

    def spread(self, advantage: Float[Tensor, "row step"]) -> Float[Tensor, "row step"]:
        """Values of representatives at each step of their turns."""
        return gather_segments(segment_sum(advantage, self.played, self.num_played, self.first), self.played)


def scored_turns(credit: CreditInput, *, to_go: bool) -> Turns:
    """The turns with what each earned, or with the discounted sum of that and of what later turns earned."""
    batch = credit.batch
    turn = batch["turn_id"] if "turn_id" in batch.keys() else batch["step"]  # noqa: SIM118  iterating goes over rows
    num_turns = int(turn.max()) + 1
    played = torch.where(credit.live, batch["episode_id"] * num_turns + turn, -1)
    num_played = credit.num_episodes * num_turns
    earned = episode_return(credit.reward, played, num_played).view(credit.num_episodes, num_turns)
    if to_go:
        last = torch.arange(num_turns, device=turn.device).expand_as(earned) == num_turns - 1
        earned = return_to_go(earned.double(), last, credit.gamma).to(earned)
    place = torch.arange(turn.numel(), device=turn.device).view_as(turn).to(torch.float64)
    first, _ = segment_min_max(place, played, num_played)
    representative = credit.live & (place == gather_segments(first, played))
    return Turns(turn, played, gather_segments(earned.flatten(), played), representative, num_turns, num_played)


def per_turn(credit: CreditInput) -> Float[Tensor, "row step"]:
    """Advantage of each turn among the members that played it, at each of its steps.

    Rewards of later turns are summed before members are compared. Sums of turns that were compared one by one would depend on how
    many there are, and a policy decides that: https://github.com/volcengine/verl/issues/7244.
    """
    turns = scored_turns(credit, to_go=credit.cfg.returns == "turn_to_go")
    outcome = episode_return(credit.reward, credit.batch["episode_id"], credit.num_episodes)
    return turns.spread(_at_moment(credit, turns.score, turns.number, turns.num_turns, turns.first, outcome))


def _at_moment(
    credit: CreditInput,
    score: Float[Tensor, "row step"],
    moment: Int[Tensor, "row step"],
    moments: int,
    member: Bool[Tensor, "row step"],
    outcome: Float[Tensor, " episode"],
) -> Float[Tensor, "row step"]:
    """Advantage of each member at its moment (step or turn) of the group, or its whole episode's where rules say so."""
    batch, rules = credit.batch, credit.cfg.group_key
    assert isinstance(rules, GroupStepCfg)
    num_keys = credit.num_groups * moments
    key = torch.where(member, batch["group_id"] * moments + moment, -1)
    zeros = None
    if rules.finished_members == "zero":
        ended = batch["terminated"] & credit.live
        zeros = finished_count(batch["group_id"], moment, ended, credit.num_groups, moments)
    advantage = minus_baseline(Scores(credit, score, key, num_keys, batch["loss_mask"], zeros))
    if rules.finished_members == "trajectory":
        # every scorable member of the group is still there to be compared with
        group, scored = episode_groups(batch, credit.num_episodes)
        members = segment_sum(scored.float(), group, credit.num_groups)
        here = segment_sum(torch.ones_like(credit.reward), key, num_keys)
        among_all = (gather_segments(here, key) == gather_segments(members, batch["group_id"])) & (key >= 0)
    elif rules.singleton == "trajectory":
        company = segment_sum(torch.ones_like(credit.reward), key, num_keys) + (0 if zeros is None else zeros)
        among_all = (gather_segments(company, key) > 1) & (key >= 0)
    else:
        return advantage
    return torch.where(among_all, advantage, whole_episodes(credit, outcome))


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
    return register("credit", CREDIT_RULES, name)


# --- baselines ---


BASELINES: dict[str, Callable[..., Tensor]] = {}
"""Functions of the baselines by name."""

F = TypeVar("F", bound=Callable[..., Any])


def register_baseline(
    name: str,
    *,
    whole: bool = False,
    needs: dict[str, tuple[str, ...]] | None = None,
    within_group: bool = True,
    discounts: bool = False,
    states: bool = False,
    greedy_members: Literal[0, 1] = 0,
) -> Callable[[F], F]:
    """Decorator: make a function available as ``credit.baseline=name``. Its parameters after the first are its settings.

    The function maps ``Scores`` to advantages, shaped like ``score``: the score less the baseline, over the scale.

    Args:
        whole: it maps a ``CreditInput`` to the advantage of every step instead.
        needs: required values of other settings of credit.
        within_group: a group of equal returns has advantages 0.
        discounts: it reads ``CreditInput.gamma``.
        states: it reads ``CreditInput.states``, which must be vectors of numbers.
        greedy_members: further deterministic episodes of each group, not trained on.

    Raises:
        ConfigError: the name is taken, or missing.
    """
    require_name("baseline", name)

    def register(function: F) -> F:
        if name in BASELINES or name != BaselineCfg.default:  # the default's settings are in ``config``
            settings_of(
                function,
                name,
                BaselineCfg,
                whole=whole,
                needs=needs or {},
                within_group=within_group,
                discounts=discounts,
                states=states,
                greedy_members=greedy_members,
            )
        BASELINES[name] = function
        return function

    return register


@register_baseline("mean")
def mean(scores: Scores) -> Tensor:
    """The mean of those compared.

    Source: GRPO, https://arxiv.org/abs/2402.03300.
    """
    return scores.relative()


@register_baseline("leave_one_out")
def leave_one_out(scores: Scores) -> Tensor:
    """The mean of the others.

    ``score - (sum - score) / (n - 1)``.

    Source: RLOO, https://arxiv.org/abs/2402.14740.
    """
    return scores.relative("leave_one_out")


@register_baseline("length_weighted", needs={"returns": ("outcome",)})
def length_weighted(scores: Scores) -> Tensor:
    """The mean weighted by the episodes' lengths (OPO).

    ``score - sum(length * score) / sum(length)``.

    Source: https://arxiv.org/abs/2505.23585.
    """
    batch, reward = scores.credit.batch, scores.credit.reward
    length = segment_sum(batch["loss_mask"].to(reward), batch["episode_id"], scores.credit.num_episodes)
    return scores.relative(weight=length)


@register_baseline(
    "none", needs={"group_key": ("group",), "scale": ("none",), "normalize": ("batch",)}, within_group=False
)
def no_baseline(scores: Scores) -> Tensor:
    """Nothing; the batch is whitened instead (REINFORCE++).

    Source: https://arxiv.org/abs/2501.03262.
    """
    return scores.score


@register_baseline(
    "greedy", needs={"returns": ("outcome",), "scale": _SCALES_OF_BATCH}, within_group=False, greedy_members=1
)
def greedy(scores: Scores) -> Tensor:
    """A deterministic episode at the same start (ReMax).

    ``score - mean of the group's greedy episodes``, 0 where it has none.

    Source: https://arxiv.org/abs/2310.10505.
    """
    batch, score = scores.credit.batch, scores.score
    if "greedy" not in batch.keys():  # noqa: SIM118  iterating goes over rows
        raise DataError(
            "credit.baseline='greedy' needs a deterministic episode in each group, and the rollout has no 'greedy'; "
            "fix: groupwise's collectors, or baseline='leave_one_out'"
        )
    is_greedy = segment_sum(batch["greedy"].to(score), batch["episode_id"], scores.credit.num_episodes) > 0
    number = segment_sum(score.new_ones(score.shape), scores.key, scores.num_keys, is_greedy)
    average = segment_sum(score, scores.key, scores.num_keys, is_greedy) / number.clamp(min=1)
    has_greedy = gather_segments(number, scores.key) > 0
    return scores.above(gather_segments(average, scores.key), member=scores.member & has_greedy)


@register_baseline("gigpo", whole=True, discounts=True)
def gigpo(credit: CreditInput, weight: NonNegative = 1.0) -> Tensor:
    """The mean, and a second comparison of steps with the same observation (GiGPO), or of a text environment's turns in the same state.

    The group's comparison, plus ``weight`` times that of discounted returns at the same observation. Following the
    paper (eq. 5 to 7), that includes the episode's own visits. A unique observation adds 0. ``gamma`` discounts by step or turn.

    Args:
        weight: Weight of the second advantage, the paper's omega.

    Source: https://arxiv.org/abs/2505.10978.
    """
    batch = credit.batch
    if "anchor" in batch.keys():  # noqa: SIM118  iterating goes over rows
        turns = scored_turns(credit, to_go=True)
        key, num_keys = anchors(batch["anchor"], batch["group_id"], turns.first)
        again = turns.spread(Scores(credit, turns.score, key, num_keys, turns.first).relative())
    else:
        key, num_keys = anchors(batch["obs"], batch["group_id"], credit.live)
        again = Scores(credit, credit.return_to_go, key, num_keys, credit.live).relative()
    return group_advantage(credit) + weight * again


_VALUES: dict[str, tuple[str, ...]] = {
    "returns": ("return_to_go",),
    "group_key": ("group",),
    "scale": ("none",),
    "reward": ("total",),
}
"""Settings of credit beside a baseline that gives each state a value."""


@register_baseline("knn", whole=True, needs=_VALUES, within_group=False, states=True)
def knn(credit: CreditInput, k: PositiveInt = 16, gae_lambda: Fraction = 0.95) -> Float[Tensor, "row step"]:
    """The mean of returns from the nearest states of other episodes, with generalised advantages.

    The values are those of the paper, the advantages PPO's. The combination is not from a paper. 0 for a single episode.

    Args:
        k: Number of neighbours. Fewer: less bias; more: less variance.
        gae_lambda: Lambda of the generalised advantage estimate, as in PPO. 1: returns, without bootstrapping from values.

    Source: https://arxiv.org/abs/1606.04460.
    """
    batch, reward, gamma, engine, obs = credit.batch, credit.reward, credit.gamma, credit.engine, credit.states

    # the steps of all ranks, with: discounted return to the episode's end in the rollout; gamma to the number of steps until
    # a truncation, the weight of the value there; whether it is the last one of a truncated episode
    member, terminated, truncated, done = batch["loss_mask"], batch["terminated"], batch["truncated"], credit.done
    cut = truncated & ~terminated
    tail = return_to_go(gamma * (cut & member).to(reward), done, gamma)
    numbers = torch.stack([return_to_go(reward, done, gamma), tail, cut.to(reward)], dim=-1)
    counts, rank = engine.gather((batch["episode_id"].max() + 1).clamp(min=0)[None])
    state, own = engine.gather(obs[member].to(reward.dtype))
    episode, _ = engine.gather(batch["episode_id"][member] + counts[: rank.start].sum())  # unique over all ranks
    score, tail, ended = engine.gather(numbers[member])[0].unbind(dim=-1)
    cut = ended.bool()
    if bool((episode == episode[:1]).all()):  # the same on every rank
        return torch.zeros_like(reward)

    # V = mean(score + tail V_last) over the neighbours: values of truncated episodes depend on other values
    pool = torch.arange(0, len(state), -(-len(state) // POOL), device=reward.device)
    mean_of_nearest = nearest(state, episode, pool, k=k, asked=own)
    last, found = score.new_zeros(int(counts.sum())), mean_of_nearest(score[pool])
    for _ in range(ROUNDS - 1 if bool(cut.any()) else 0):
        last[episode[cut]] = engine.gather(found[cut[own]])[0]
        found = mean_of_nearest((score + tail * last[episode])[pool])
    value = torch.zeros_like(reward)
    value[member] = found
    # at truncations the value is the step's own: the final observation has no return
    next_value = torch.where(truncated, value, torch.cat([value[:, 1:], value[:, -1:]], dim=1))
    return gae(reward, value, next_value, terminated, truncated, gamma=gamma, gae_lambda=gae_lambda)


@register_baseline("lstd", whole=True, needs=_VALUES, within_group=False, states=True)
def lstd(
    credit: CreditInput,
    features: PositiveInt = 512,
    ridge: Positive = 1e-3,
    decay: Fraction = 0.6,
    gae_lambda: Fraction = 0.95,
    value_lambda: Fraction = 0.99,
    folds: Annotated[int, Ge(2)] = 4,
) -> Float[Tensor, "row step"]:
    """Values that are linear in fixed random features, by least squares over other episodes, with generalised advantages.

    The weights ``w`` of a fold are those for which the generalised advantages of all other folds, ``sum_k (gamma
    lambda)^k (r + gamma V' - V)`` with ``value_lambda``, do not correlate with the features: LSTD(lambda), one linear
    system for each fold. The combination is not from a paper. A lambda for each is from decoupled GAE. 0 for the only episode of a first update. Discounts above 0.9999 are treated as 0.9999.

    Args:
        features: Number of random Fourier features, beside the observation itself (of at most 1,024 numbers) and a constant.
        ridge: Weight of ``|w|^2`` for each step. More: less variance; less: less bias.
        decay: Share of the earlier updates' sums that each update keeps. 0: none.
        gae_lambda: Lambda of the advantages, as in PPO. Less: less variance; more: less bias from the values.
        value_lambda: Lambda of the least squares. 1: regression on returns, without bootstrapping from values.
        folds: Parts of the episodes. The values of a part come from the others.

    Source: https://doi.org/10.1023/A:1017936530646 (LSTD), https://arxiv.org/abs/2503.01491 (two lambdas),
    https://papers.nips.cc/paper/3182-random-features-for-large-scale-kernel-machines.
    """
    batch, engine, gamma = credit.batch, credit.engine, min(credit.gamma, _LSTD_GAMMA)
    memory = {} if credit.memory is None else credit.memory
    member, terminated, truncated, done = batch["loss_mask"], batch["terminated"], batch["truncated"], credit.done
    gap = ~batch["valid"]  # anything may stand there
    reward = credit.reward.masked_fill(gap, 0)
    number = (batch["episode_id"].max() + 1).clamp(min=0)[None]
    counts, rank = engine.gather(number)
    fold = (batch["episode_id"] + counts[: rank.start].sum()) % folds

    def remembered(name: str, like: Tensor) -> Tensor:
        kept = memory.get(name)
        # another number of features after a resume begins anew
        return torch.zeros_like(like) if kept is None or kept.shape != like.shape else kept.to(like)

    # features of states over their standard deviation so far
    obs: Any = credit.states.masked_fill(gap[..., None], 0).double()
    own = obs[member]
    seen = engine.sum(torch.stack([own.new_full(own.shape[1:], len(own)), own.sum(dim=0), own.square().sum(dim=0)]))
    seen = memory["seen"] = seen + remembered("seen", seen)
    mean, mean_square = (seen[1:] / seen[0].clamp(min=1)).unbind()
    blocks = obs.split(-(-_LSTD_BLOCK // len(obs)), dim=1)
    phis = [random_features(block, mean, mean_square, features) for block in blocks]

    # generalised advantages are linear in the weights: sums of rewards less w times sums of phi - gamma phi'
    width, stop = phis[0].shape[-1], obs.shape[1]
    parts = obs.new_zeros(folds, width, width + 2)
    after, later = phis[-1][:, -1:], obs.new_zeros(len(obs), width + 1)
    for phi in reversed(phis):
        now = slice(stop - phi.shape[1], stop)
        # at truncations the value is the step's own: the final observation is not kept
        after = torch.where(truncated[:, now, None], phi, torch.cat([phi[:, 1:], after], dim=1))
        # a constant with the products, so that the ridge counts their steps
        sums = torch.cat([phi, reward[:, now, None].double(), torch.ones_like(phi[..., :1])], dim=-1)
        sums[..., :width] -= gamma * ~terminated[:, now, None] * after
        for t in reversed(range(phi.shape[1])):
            sums[:, t, :-1] += gamma * value_lambda * ~done[:, now.start + t, None] * later
            later = sums[:, t, :-1]
        for part in range(folds):
            chosen = member[:, now] & (fold[:, now] == part)
            parts[part] += phi[chosen].T @ sums[chosen]
        after, stop = phi[:, :1], now.start

    parts = engine.sum(parts)
    whole = parts.sum(dim=0)
    whole += remembered("products", whole)
    memory["products"] = decay * whole
    others, steps = whole - parts, (whole - parts)[:, -1, -1]  # the last feature is 1
    penalty = torch.ones_like(whole[:, 0])
    penalty[-1] = 1e-3  # the constant is hardly held back
    held = others[..., :-2] + torch.diag(ridge * penalty) * steps.clamp(min=1)[:, None, None]
    weights = torch.linalg.solve(held, others[..., -2])

    values = torch.cat([phi @ weights.T for phi in phis], dim=1)
    value = values.gather(-1, fold[..., None])[..., 0]
    next_value = torch.where(truncated, value, torch.cat([value[:, 1:], value[:, -1:]], dim=1))
    ends = terminated, truncated
    advantage = gae(reward.double(), value, next_value, *ends, gamma=gamma, gae_lambda=gae_lambda)
    return torch.where(member & (steps > 0)[fold], advantage, 0).to(reward)


def random_features(
    obs: Float[Tensor, "row step feature"],
    mean: Float[Tensor, " feature"],
    mean_square: Float[Tensor, " feature"],
    number: int,
) -> Float[Tensor, "row step output"]:
    """Random Fourier features of standardised observations, these themselves if they are no more than 1,024 numbers, and 1.

    The kernel is a mixture of Gaussian ones, of widths between a third and three times the typical distance of two states.
    They are the same in every update.
    """
    scale = (mean_square - mean.square()).clamp(min=0).sqrt()
    state = ((obs - mean) / torch.where(scale > _FLAT * mean.abs(), scale, torch.inf)).clamp(-5, 5)
    size, generator = obs.shape[-1], torch.Generator().manual_seed(0)
    width = size**0.5 * 3 ** (2 * torch.rand(number, generator=generator, dtype=torch.float64) - 1)
    frequency = torch.randn(size, number, generator=generator, dtype=torch.float64) / width
    phase = 2 * torch.pi * torch.rand(number, generator=generator, dtype=torch.float64)
    waves = (state @ frequency.to(obs.device) + phase.to(obs.device)).cos() * 2**0.5
    parts = [waves, state][: 1 + (size <= _LSTD_WIDE)]
    return torch.cat([*parts, torch.ones_like(waves[..., :1])], dim=-1)


# --- knn: values from the nearest states of other episodes ---

POOL = 4096
"""Most states that are candidates for neighbours, evenly spaced over the rollouts of all ranks."""
ROUNDS = 10
"""Iterations of the values at truncations; each leaves at most gamma of the error."""
_BLOCK = 256
"""States that are compared with the pool at once: distances of all of them together would need gigabytes."""
_LSTD_GAMMA = 0.9999
"""Greatest discount of values: with 1, and a step's own value in place of the one after a truncation, any level is a solution."""
_LSTD_BLOCK = 512
"""Steps whose sums over features are held at once: each has hundreds."""
_LSTD_WIDE = 1024
"""Most numbers of a state that are features themselves: the linear system has as many equations as there are features."""
_FLAT = 1e-6
"""A feature whose standard deviation is a smaller share of its size than this is left out: only rounding changes it."""


def nearest(
    state: Float[Tensor, "element feature"],
    episode: Int[Tensor, " element"],
    pool: Int[Tensor, " pooled"],
    *,
    k: int,
    asked: slice = slice(None),
) -> Callable[[Float[Tensor, " pooled"]], Float[Tensor, " element"]]:
    """For each state a mean over the ``k`` states of the pool of other episodes nearest to it; all if there are fewer.

    It is a function of the pool's numbers, 0 where there are no other episodes.

    Distances are Euclidean, of features divided by their standard deviation. An episode's own states are left out: what
    was earned there holds the very noise that a baseline is to take off.

    Args:
        pool: indices of elements.
        asked: slice of the elements to look up.

    Source: values from nearest neighbours: Blundell et al. 2016, https://arxiv.org/abs/1606.04460, eq. 2; as a baseline that
        episodes give each other, after GiGPO, https://arxiv.org/abs/2505.10978, which compares equal states.
    """
    mean, scale = state.mean(dim=0), state.std(dim=0, correction=0)
    state = (state - mean) / torch.where(scale > _FLAT * mean.abs(), scale, torch.inf)
    pooled, found = state[pool], []
    for part, own in zip(torch.split(state[asked], _BLOCK), torch.split(episode[asked], _BLOCK), strict=True):
        # by products, one state far from all others costs the distances between these their digits
        distance = torch.cdist(part, pooled, compute_mode="donot_use_mm_for_euclid_dist")
        distance.masked_fill_(own[:, None] == episode[pool], torch.inf)
        distance, index = distance.topk(min(k, len(pool)), largest=False)
        found.append((index, distance.isfinite()))
    place, counts = (torch.cat(parts) for parts in zip(*found, strict=True))
    return lambda score: (score[place] * counts).sum(dim=1) / counts.sum(dim=1).clamp(min=1)


# --- gigpo: steps with the same observation ---


def anchors(
    obs: Nested, group_id: Int[Tensor, "row step"], member: Bool[Tensor, "row step"]
) -> tuple[Int[Tensor, "row step"], int]:
    """Id 0..n-1 of each step's group and observation, -1 outside ``member``; and n.

    Observations are compared bit for bit, except that 0 equals -0. Runs on the host, once per update.
    """
    seen = _bytes(obs, member)
    ids: dict[tuple[int, bytes], int] = {}
    groups = group_id[member].tolist()
    dense = [ids.setdefault((group, row.tobytes()), len(ids)) for group, row in zip(groups, seen, strict=True)]
    out = group_id.new_full(group_id.shape, -1)
    out[member] = group_id.new_tensor(dense, dtype=group_id.dtype)
    return out, len(ids)


def _bytes(obs: Nested, member: Bool[Tensor, "row step"]) -> NDArray[np.uint8]:
    """Each observation as a row of bytes."""
    if not isinstance(obs, Tensor):
        return np.concatenate([_bytes(leaf, member) for _, leaf in sorted(obs.items())], axis=1)
    rows = obs[member].cpu().numpy()
    if rows.dtype.kind == "f":
        rows = rows + 0.0  # -0.0 becomes 0.0
    return np.frombuffer(rows.tobytes(), np.uint8).reshape(len(rows), -1 if len(rows) else 0)
