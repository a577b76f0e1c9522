"""Settings of evolution: search ranges, selection, mutation. Imports no torch."""

import math
from collections.abc import Mapping
from random import Random
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BeforeValidator, Field, SerializeAsAny, ValidationError, field_validator, model_validator

from groupwise.config.base import Cfg, Choice, Fraction, NonNegative, Positive, PositiveInt, explain

Value: TypeAlias = bool | int | float | str | None


class RangeCfg(Cfg):
    """Numbers between two bounds."""

    min: float
    """Lower bound."""
    max: float
    """Upper bound."""
    log: bool = False
    """Draw on a logarithmic scale."""

    @model_validator(mode="after")
    def _check(self) -> "RangeCfg":
        if not self.min < self.max or (self.log and self.min <= 0):
            raise ValueError(f"min={self.min:g}, max={self.max:g}: expected min < max, and min > 0 with log=True")
        return self

    def draw(self, random: Random) -> float:
        """A first value."""
        if self.log:
            return self.clip(math.exp(random.uniform(math.log(self.min), math.log(self.max))))
        return random.uniform(self.min, self.max)

    def clip(self, value: float) -> float:
        """The nearest value within the bounds."""
        return min(max(value, self.min), self.max)


Choices: TypeAlias = Annotated[tuple[Value, ...], Field(min_length=2)]
"""Values to choose from, ordered so that neighbours are similar."""


def _one_kind(space: object) -> object:
    """Bounds or a list of values, refused in one line; pydantic would speak of both kinds."""
    if isinstance(space, RangeCfg):
        return space
    if isinstance(space, Mapping):
        try:
            return RangeCfg.model_validate(space)
        except ValidationError as error:
            raise ValueError("; ".join(explain(error.errors()))) from error
    values = space if isinstance(space, list | tuple) else ()
    odd = [v for v in values if not isinstance(v, Value) or v in (math.inf, -math.inf) or v != v]
    if odd or len(values) < 2:
        raise ValueError(
            f"got {odd[0] if odd else space!r:.200}; expected bounds, as {{'min': 1e-5, 'max': 1e-2}}, or a list of at least two "
            "numbers, texts, true, false or null; fix: one of these"
        )
    return space


Space: TypeAlias = Annotated[RangeCfg | Choices, BeforeValidator(_one_kind)]


class MutationCfg(Choice, family="mutation", default="grow_shrink"):
    """How a setting changes. Subclass it with a name and a ``scale``."""

    probability: Fraction = 0.5
    """Chance of each setting to change; at least one changes."""

    def scale(self, random: Random) -> float:
        """Factor of a number."""
        raise NotImplementedError(f"{type(self).__name__} has no scale()")

    def mutate(
        self, settings: dict[str, Value], search: "dict[str, RangeCfg | Choices]", random: Random
    ) -> dict[str, Value]:
        """The settings with some of them changed. A choice moves to a neighbour."""
        chosen = [path for path in settings if random.random() < self.probability] or [random.choice(sorted(settings))]
        changed: dict[str, Value] = {}
        for path in chosen:
            value: Any = settings[path]
            space, scale = search[path], self.scale(random)
            if isinstance(space, RangeCfg) and value == 0:  # no factor moves it
                drawn = space.draw(random)
                changed[path] = round(drawn) if isinstance(value, int) else drawn
            elif isinstance(space, RangeCfg):
                scale = 1 / scale if space.clip(value * scale) == value else scale  # from a bound back
                away = value * scale
                if isinstance(value, int):  # small numbers move, too
                    away = max(round(away), value + 1) if away > value else min(round(away), value - 1)
                changed[path] = type(value)(space.clip(away))
            else:
                step = 1 if scale > 1 else -1
                place = space.index(value) + step
                changed[path] = space[place if 0 <= place < len(space) else place - 2 * step]
        return settings | changed


class GrowShrinkCfg(MutationCfg, name="grow_shrink", source="https://github.com/AgileRL/AgileRL"):
    """Numbers grow or shrink by a factor, with equal chance (AgileRL)."""

    grow: Annotated[float, Gt(1)] = 1.2
    """Factor of growth."""
    shrink: Annotated[float, Gt(0), Lt(1)] = 0.8
    """Factor of shrinking."""

    def scale(self, random: Random) -> float:
        """One of the two factors."""
        return random.choice((self.grow, self.shrink))


class Place(NamedTuple):
    """A place in the next round."""

    member: int
    """Index of the member that fills it, or that a new one is cloned from."""
    clone: bool
    """Whether a new member begins with the parent's weights and mutated settings; otherwise the member continues as it is."""


class SelectionCfg(Choice, family="selection", default="tournament"):
    """Which members survive a round. Subclass it with a name and a ``select``."""

    def select(self, ranking: list[int], alive: int, random: Random) -> list[Place]:
        """Places of the next round.

        Args:
            ranking: indices of all members, the best first; equal ones in an order that the seed decides.
            alive: how many of them may continue or be cloned: the first ones. The others diverged.
        """
        raise NotImplementedError(f"{type(self).__name__} has no select()")


class TournamentCfg(SelectionCfg, name="tournament", source="https://github.com/AgileRL/AgileRL"):
    """Each place goes to the best of ``size`` members drawn at random, as a mutated clone (AgileRL)."""

    size: PositiveInt = 2
    """Members that compete for a place."""
    elitism: bool = True
    """The best member keeps a place, unchanged."""

    def select(self, ranking: list[int], alive: int, random: Random) -> list[Place]:
        """The best first, then a winner for each other place."""
        places = [Place(ranking[0], clone=False)] if self.elitism else []
        while len(places) < len(ranking):
            winner = min(random.randrange(alive) for _ in range(self.size))
            places.append(Place(ranking[winner], clone=True))
        return places


class TruncationCfg(SelectionCfg, name="truncation", source="https://arxiv.org/abs/1711.09846"):
    """The worst members are replaced by mutated clones of the best; the others continue (PBT)."""

    share: Annotated[float, Gt(0), Le(0.5)] = 0.25
    """Share of the members that is replaced, and of those that are cloned."""

    def select(self, ranking: list[int], alive: int, random: Random) -> list[Place]:
        """The members in their order, those at the end replaced."""
        count = max(1, round(self.share * len(ranking)))
        kept = min(len(ranking) - count, alive)
        clones = [Place(ranking[random.randrange(min(count, alive))], clone=True) for _ in range(len(ranking) - kept)]
        return [Place(member, clone=False) for member in ranking[:kept]] + clones


class HalvingCfg(SelectionCfg, name="halving", source="https://arxiv.org/abs/1502.07943"):
    """The worst members end; nothing is cloned (successive halving)."""

    factor: Annotated[int, Ge(2)] = 2
    """Members for each one that survives."""

    def select(self, ranking: list[int], alive: int, random: Random) -> list[Place]:
        """The best members."""
        kept = min(max(1, len(ranking) // self.factor), alive)
        return [Place(member, clone=False) for member in ranking[:kept]]


class EvolutionCfg(Cfg):
    """A population of runs that tunes its settings while it trains."""

    search: dict[str, Space]
    """Settings to search, by their paths: bounds, or a list of values."""
    population: Annotated[int, Ge(2)] = 8
    """Members."""
    rounds: PositiveInt = 10
    """Rounds of training, evaluation and selection."""
    round_steps: PositiveInt = 10_000
    """Environment steps (tokens for text) that each member trains in a round, and more to the end of an iteration."""
    episodes: PositiveInt = 20
    """Episodes (held-out prompts for text) of each evaluation, the same for all members."""
    fitness: Literal["mean", "lower_bound"] = "mean"
    """The score by which members are ranked: mean of the evaluation, or the lower end of its 95 % interval."""
    selection: SerializeAsAny[SelectionCfg] = TournamentCfg()
    """Which members survive a round."""
    mutation: SerializeAsAny[MutationCfg] = GrowShrinkCfg()
    """How the settings of clones change."""
    weight_noise: NonNegative = 0.0
    """Standard deviation of Gaussian noise on a tenth of a clone's weights, in units of each tensor's standard deviation (AgileRL: 0.1). 0: none."""

    @field_validator("search", mode="before")
    @classmethod
    def _by_path(cls, search: object) -> object:
        if not search or not isinstance(search, Mapping) or not all(isinstance(path, str) for path in search):
            raise ValueError(
                f"got {search!r:.200}; expected settings by path, with bounds or values; fix: "
                "{'algorithm.learning_rate': {'min': 1e-5, 'max': 1e-2}}"
            )
        return search


class LaunchCfg(Cfg):
    """Where members train. The result does not depend on it."""

    launcher: Literal["processes", "ray"] = "processes"
    """``processes`` of this machine, or a Ray cluster (extra ``ray``) whose nodes share the population's folder."""
    workers: PositiveInt | None = None
    """Members at once. None: one per core, or as many as the cluster has room for."""
    cpus: Positive = 1.0
    """Cores that Ray keeps for a member."""
    gpus: NonNegative = 0.0
    """GPUs that Ray keeps for a member: 0.25 for a quarter of one."""

    @model_validator(mode="after")
    def _check(self) -> "LaunchCfg":
        if self.launcher != "ray" and (names := list(self.changed("cpus", "gpus"))):
            raise ValueError(f"{names[0]} is for launcher='ray'; fix: leave it out")
        return self
