"""A population on disk: its members, their settings, parents and scores."""

import json
import math
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, Field, ValidationError, model_validator

from groupwise import system as files
from groupwise.config.base import OTHER_NAMES, check_programs, explain, flat, meant
from groupwise.config.evolution import Choices, EvolutionCfg, LaunchCfg, RangeCfg, Value
from groupwise.config.run import CommonCfg, RunCfg, TextRunCfg
from groupwise.data.rollout import TensorDict
from groupwise.errors import ConfigError, DivergedError, RunFolderError, nearest
from groupwise.report.folder import LOCK, WANDB, Count, RunFolder, read_lines
from groupwise.run import MAX_ERROR, evaluate, resume, train_from_config
from groupwise.training.build import UserObjects
from groupwise.training.checkpoint import is_fixed
from groupwise.training.trainer import PAUSED, Callback, Trainer

FILE = "population.json"
MAX_POPULATION = 64 * files.MIB
"""Bytes of ``population.json``."""
_VALUES_OF_ROUND = 20
"""Most values, besides settings, that a round of a member adds to it."""
OnMutation = Callable[[str, Mapping[str, Value], Mapping[str, Value]], Mapping[str, Value] | None]
"""Called with a clone's name, its parent's settings and its own; may return others."""


class Result(BaseModel, strict=True, extra="allow", allow_inf_nan=False):
    """What a member reached in a round."""

    round: Count
    status: Literal["ok", "diverged"]
    mean: float | None = None
    """Mean of the evaluation."""
    ci95: Annotated[list[float], Field(min_length=2, max_length=2)] | None = None
    """Interval of the mean."""
    env_steps: Count | None = None
    """Environment steps that the member was trained for; None if it diverged."""
    reason: str = ""
    """How it diverged."""

    @model_validator(mode="after")
    def _check(self) -> "Result":
        if self.status == "ok" and (self.mean is None or self.env_steps is None):
            raise ValueError("status 'ok' without mean or env_steps")
        return self


class Member(BaseModel, strict=True, extra="forbid"):
    """A run of the population."""

    name: Annotated[str, Field(pattern=r"^r[0-9]{1,9}-[0-9]{1,9}$")]
    """Name of its folder in ``members/``: ``r2-0`` was born in round 2."""
    parent: str | None
    """The member that it was cloned from."""
    born: Count
    """First round of the member, from 0."""
    settings: dict[str, Value]
    """Values of the searched settings, by path."""
    results: dict[Annotated[int, Field(strict=False, ge=0)], Result] = {}
    """Results by round."""


class _State(BaseModel, strict=True, extra="forbid"):
    """``population.json``."""

    format: Literal[1] = 1
    search: dict[str, Any]
    run: dict[str, Any]
    hooked: bool
    round: Count
    active: Annotated[list[str], Field(min_length=1)]
    members: list[Member]


@dataclass(repr=False, eq=False)
class Population:
    """The runs of ``gw.evolve``, in memory and on disk."""

    path: Path
    """The folder, with the members' run folders in ``members/`` and a copy of the best one in ``best/``."""
    cfg: EvolutionCfg
    base: CommonCfg
    """Settings of the runs."""
    members: dict[str, Member] = field(default_factory=dict)
    """All members that ever were, by name."""
    goes_on: list[str] = field(default_factory=list)
    """Names of the members of the current round."""
    round: int = 0
    """Finished rounds."""
    hooked: bool = False
    """Whether ``on_mutation`` was given."""

    def __repr__(self) -> str:
        return f"Population({str(self.path)!r}, {len(self.members)} members, {self.round}/{self.cfg.rounds} rounds)"

    @classmethod
    def resume(
        cls,
        path: Path | str,
        *,
        on_mutation: OnMutation | None = None,
        allow_programs: bool = False,
        progress: str | None = None,
        **fields: Any,
    ) -> "Population":
        """Continue a population, as if it had never stopped; returns it.

        Args:
            on_mutation: as of ``gw.evolve``.
            allow_programs: as of ``gw.resume``, for all members.
            progress: ``none`` shows no lines of rounds.
            fields: ``workers``, ``launcher``, ``cpus`` and ``gpus``, as of ``gw.evolve``, and the Python objects that the
                runs were given, as in ``gw.resume``.
        """
        from groupwise.evolution.evolve import go_on  # it makes populations

        launch = LaunchCfg(**{name: fields.pop(name) for name in LaunchCfg.model_fields if name in fields})
        population = cls.load(path)
        if not allow_programs:
            check_programs(population.base, population.path / FILE)
        return go_on(population, UserObjects.again(fields), launch, on_mutation, progress == "none")

    @classmethod
    def load(cls, path: Path | str) -> "Population":
        """A population from its folder; a ``RunFolderError`` if there is none, or it is damaged."""
        path = Path(path)
        try:
            state = _State.model_validate(files.parse_json(files.read(path / FILE, MAX_POPULATION)))
            if (link := files.link_out_of(path, without=WANDB, depth=2)) is not None:
                raise ValueError(f"{link} is a link that leads out of it")
            base = (TextRunCfg if "task" in state.run else RunCfg).model_validate(state.run)
            found = cls(path.absolute(), EvolutionCfg.model_validate(state.search), base)
            found.members = {member.name: member for member in state.members}
            found.goes_on, found.round, found.hooked = state.active, state.round, state.hooked
            found._check(len(state.members))
        except (OSError, ValueError) as error:
            why = explain(error.errors()[0]) if isinstance(error, ValidationError) else str(error)
            why = why.partition("; fix: ")[0]  # of a file that the user did not write
            fix = "fix: give the folder of a population, or restore it"
            raise RunFolderError(f"{path} is no population, or {FILE} is damaged: {why}; {fix}") from error
        return found

    def _check(self, count: int) -> None:
        """Raise a ``ValueError`` if no search of these settings leaves such a state with ``count`` members on disk."""
        check_search(self.cfg.search, self.base)
        if len(self.members) < count or len({*self.goes_on}) < len(self.goes_on):
            raise ValueError("a member comes twice")
        if self.round > self.cfg.rounds:
            raise ValueError(f"round is {self.round} of {self.cfg.rounds}")
        for name in [*self.goes_on, *(member.parent for member in self.members.values() if member.parent)]:
            if name not in self.members:
                raise ValueError(f"there is no member {name!r:.80}")
        for member in self.members.values():
            parent = self.members.get(member.parent or "")
            if parent is None:
                begins = member.born == 0
            else:
                begins = parent.born < member.born <= self.round and member.born - 1 in parent.results
            goes_on = member.name not in self.goes_on or member.born == self.round or self.round - 1 in member.results
            if not begins or not goes_on or any(number >= self.round for number in member.results):
                raise ValueError(f"rounds of {member.name} are missing, or too many")
            if wrong := misfit(self.cfg.search, member.settings):
                raise ValueError(f"{member.name} has {wrong}")

    def save(self) -> None:
        """Write ``population.json``."""
        state = _State(
            search=self.cfg.model_dump(mode="json"),
            run=self.base.model_dump(mode="json"),
            hooked=self.hooked,
            round=self.round,
            active=self.goes_on,
            members=list(self.members.values()),
        )
        data = f"{json.dumps(state.model_dump(), indent=2)}\n".encode()
        try:
            files.check_size(len(data), MAX_POPULATION)
            files.parse_json(data)
        except ValueError as error:
            raise ConfigError(
                f"{self.path / FILE} could not be read again: {error}; fix: fewer members or rounds"
            ) from error
        files.write(self.path / FILE, data)

    def folder(self, name: str) -> Path:
        """The run folder of a member."""
        return self.path / "members" / name

    def active(self) -> list[Member]:
        """The members of the current round."""
        return [self.members[name] for name in self.goes_on]

    def fitness(self, member: Member, number: int) -> float:
        """Score that ranks a member after a round; minus infinity where it diverged."""
        result = member.results[number]
        if result.mean is None:
            return -math.inf
        return result.ci95[0] if self.cfg.fitness == "lower_bound" and result.ci95 else result.mean

    def best(self) -> Member:
        """The best member of the last finished round."""
        return self.ranked(self.round - 1)[0]

    def ranked(self, number: int) -> list[Member]:
        """The members of a finished round, the best first."""
        played = [member for member in self.members.values() if number in member.results]
        return sorted(played, key=lambda member: -self.fitness(member, number))

    def rows(self) -> Iterator[dict[str, Any]]:
        """A row for each round of each member: ``round``, ``member``, ``parent``, scores, settings by path."""
        for number in range(self.round):
            for member in self.ranked(number):
                result = member.results[number]
                low, high = result.ci95 or (None, None)
                score = {"status": result.status, "mean": result.mean, "ci95_low": low, "ci95_high": high}
                who = {"round": number, "member": member.name, "parent": member.parent}
                yield who | {"env_steps": result.env_steps} | score | member.settings

    def waited(self, member: Member, number: int) -> bool:
        """Whether a member did not train in a round, since an iteration before took it further."""
        if number == 0:
            return False
        before = member if member.parent is None or member.born < number else self.members[member.parent]
        steps = member.results[number].env_steps
        return steps is not None and steps == before.results[number - 1].env_steps

    def line(self, number: int) -> str:
        """A round in one line."""
        ranked = self.ranked(number)
        best, worst = (self.fitness(member, number) for member in (ranked[0], ranked[-1]))
        values = [f"{value:.3g}" if isinstance(value, float) else str(value) for value in ranked[0].settings.values()]
        names = [path.rpartition(".")[2] for path in ranked[0].settings]
        shown = ", ".join(map("=".join, zip(names, values, strict=True)))
        best_member = f"best {best:.6g} ({ranked[0].name}: {shown})"
        return f"round {number + 1}/{self.cfg.rounds}   {best_member}   worst {worst:.6g} ({ranked[-1].name})"

    def write_best(self) -> None:
        """Copy the run of the best member of the last round to ``best/``."""
        copied, unfinished = self.path / "best", self.path / ".best"
        files.remove(unfinished)
        own = self.folder(self.best().name)
        try:
            shutil.copytree(own, unfinished, ignore=shutil.ignore_patterns(LOCK), symlinks=True)  # none is followed
        except OSError as error:
            raise RunFolderError(
                f"{own} cannot be copied: {error!s:.300}; fix: restore it, or make room on the disk"
            ) from error
        files.remove(copied)
        unfinished.rename(copied)


# Settings of members: search ranges, first values, paths in a run's config

_OF_ALL = (
    "seed", "run_dir", "total_steps", "total_iterations", "total_epochs", "evaluation", "logging", "stop",
    "checkpoint_interval", "keep_checkpoints", "ddp_timeout",
)  # fmt: skip
"""Settings that all members share."""


def check_search(search: Mapping[str, RangeCfg | Choices], base: CommonCfg) -> None:
    """Refuse settings that cannot be searched, before anything starts.

    Raises:
        ConfigError: a path is no setting or cannot change in mid-run, or a bound or value is not allowed.
    """
    for path, space in search.items():
        setting_at(base, path)
        values = (space.min, space.max) if isinstance(space, RangeCfg) else space
        no_reference = path == "algorithm.kl_coef" and 0 in values
        if is_fixed(path) or path.split(".")[0] in _OF_ALL or no_reference:
            what = f"{path} = 0" if no_reference else path
            raise ConfigError(f"search: {what} cannot change in the middle of a run; fix: leave it out")
        if inside := [other for other in search if other.startswith(f"{path}.")]:
            raise ConfigError(f"search: {inside[0]} is a part of {path}; fix: one of the two")
        for value in values:
            found = with_settings(base, {path: fitted(base, path, value)})
            if found.named_programs() != base.named_programs():  # it may come from a stranger's population
                raise ConfigError(
                    f"search: {path} = {value!r:.80} names a program; fix: set it for all members instead"
                )


def misfit(search: Mapping[str, RangeCfg | Choices], settings: Mapping[str, Any]) -> str:
    """The first of a member's settings that is not in the search space, or missing, as ``path = value``; empty if all fit."""
    for path in {**search, **settings}:
        space, value = search.get(path, ()), settings.get(path)
        size = value if isinstance(value, int | float) else math.nan
        fits = space.min <= size <= space.max if isinstance(space, RangeCfg) else value in space
        if path not in settings or not fits:
            return f"{path} = {value!r:.80}"
    return ""


def check_count(cfg: EvolutionCfg) -> None:
    """Refuse a search whose ``population.json`` could not be read again in the end, by a ``ConfigError``."""
    values = cfg.population * cfg.rounds * (_VALUES_OF_ROUND + len(cfg.search))
    if values > files.MAX_VALUES:
        raise ConfigError(
            f"population={cfg.population:,} and rounds={cfg.rounds:,}: up to {values:,} values in {FILE}, which is read up to "
            f"{files.MAX_VALUES:,}; fix: fewer members or rounds"
        )


def fitted(base: CommonCfg, path: str, value: Value) -> Value:
    """``value``, rounded where the setting at ``path`` is a whole number."""
    return round(value) if isinstance(value, float) and isinstance(setting_at(base, path), int) else value


def with_settings(base: CommonCfg, settings: Mapping[str, Value], **fields: Any) -> CommonCfg:
    """``base`` with these settings, by path, and other fields; a ``ConfigError`` if they are not possible."""
    tree = base.model_dump(mode="json") | fields
    for path, value in settings.items():
        *tables, name = path.split(".")
        table = tree
        for key in tables:
            table = table[key]
        table[name] = value
    try:
        return type(base).model_validate(tree)
    except ValidationError as error:
        shown = ", ".join(f"{path} = {value!r}" for path, value in settings.items())
        raise ConfigError(f"search: {shown} is not possible: {'; '.join(map(explain, error.errors()))}") from error


def setting_at(base: CommonCfg, path: str) -> Any:
    """The setting at a path; a ``ConfigError`` if there is none."""
    found: Any = base.model_dump(mode="json")
    for key in path.split("."):
        names = found if isinstance(found, dict) else {}
        if key not in names:
            last = OTHER_NAMES.get(path.rpartition(".")[2], path.rpartition(".")[2])
            alike = [known for known in flat(base.model_dump(mode="json")) if known.rpartition(".")[2] == last]
            known = [f"{path.rpartition('.')[0]}.{name}".lstrip(".") for name in names]
            hint = f"; {meant(alike[:3])}" if alike else nearest(path, known)
            raise ConfigError(f"search: there is no setting {path!r}{hint}")
        found = names[key]
    return found


# One round of one member: train and evaluate

NOISY_SHARE = 0.1
"""Share of a clone's weights that get noise."""


@dataclass(frozen=True)
class Round:
    """Work of a member in a round."""

    number: int
    folder: Path
    """Folder of the member's run; it is made if it does not exist."""
    cfg: CommonCfg
    """Settings of a new run."""
    until: int
    """Environment steps at which the round ends."""
    episodes: int
    seed: int
    """Seed of the evaluation; the same for all members."""
    noise: tuple[float, int] | None = None
    """Noise of a clone: standard deviation of the noise on its weights, and its seed."""


class AddNoise(Callback):
    """Gaussian noise on a tenth of the weights, once, before a clone trains for the first time.

    Args:
        std: in units of each tensor's standard deviation.

    Source: the parameter mutation of AgileRL, https://github.com/AgileRL/AgileRL.
    """

    def __init__(self, std: float, seed: int) -> None:
        self.std = std
        self.seed = seed
        self._added: int | None = None
        """Seed of the noise in the weights. A clone of a clone begins with that of its parent."""

    @torch.no_grad()
    def on_training_start(self, trainer: Trainer) -> None:
        """Change the weights, unless nothing is trained: such weights would not be saved."""
        if self._added == self.seed or trainer.is_done():
            return
        generator = torch.Generator().manual_seed(self.seed)
        for parameter in trainer.algorithm.policy.parameters():
            if parameter.requires_grad and parameter.numel() > 1:
                noise = torch.randn(parameter.shape, generator=generator) * self.std * float(parameter.std())
                chosen = torch.rand(parameter.shape, generator=generator) < NOISY_SHARE
                parameter.add_((noise * chosen).to(parameter))
        self._added = self.seed

    def state_dict(self) -> dict[str, Any]:
        """Seed of the noise that was added."""
        return {"added": self._added}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore it."""
        self._added = state["added"]


class PauseAt(Callback):
    """Stops training where a round ends; at once if it was trained before a kill, or by an iteration of the round before."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def on_training_start(self, trainer: Trainer) -> None:
        """Stop if the round is over."""
        if trainer.env_steps >= self.steps:
            trainer.stop(PAUSED)

    def on_iteration_end(self, trainer: Trainer, rollout: TensorDict, metrics: dict[str, float]) -> None:
        """Stop if the round is over."""
        self.on_training_start(trainer)


def play(task: Round, given: UserObjects) -> Result:
    """The result of a round. A member that was trained before a kill is evaluated again."""
    callbacks: list[Callback] = []
    if task.until < (task.cfg.total_steps or 0):  # otherwise the budget ends it
        callbacks.append(PauseAt(task.until))
    if task.noise is not None:
        callbacks.append(AddNoise(*task.noise))
    try:
        if RunFolder(task.folder).config.exists():
            allow = len(task.cfg.named_programs()) > 0  # those of the search; a member has no others
            run = resume(task.folder, callbacks=callbacks, allow_programs=allow, **given.as_arguments())
        else:
            run = train_from_config(task.cfg.model_copy(update={"run_dir": task.folder}), given, callbacks)
        score = evaluate(run, task.episodes, seed=task.seed)
        by_success = isinstance(run.cfg, RunCfg | TextRunCfg) and run.cfg.evaluation.metric == "success_rate"
        mean = score.success_rate if by_success else score.return_mean
        if mean is None or not math.isfinite(mean):
            raise DivergedError.because(f"the score of an evaluation is {mean}")
        ci95 = score.success_ci95 if by_success else score.ci95
        bounds, steps = ci95 and list(ci95), run.summary["env_steps"]
        return Result(round=task.number, status="ok", mean=mean, ci95=bounds, env_steps=steps)
    except DivergedError as error:
        return Result(round=task.number, status="diverged", reason=str(error)[:MAX_ERROR])
