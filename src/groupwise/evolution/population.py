"""Populations of runs: rounds of training, evaluation on common starts, selection and mutation.

Every member is a run folder. The decisions of a round follow from the seed and the members' scores alone, so
neither the number of processes nor a kill changes them. ``population.json`` is written when a round has ended.
"""

import gc
import json
import logging
import math
import os
import shutil
import signal
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from random import Random
from typing import Annotated, Any, Literal, Protocol

import cloudpickle
import torch
from pydantic import BaseModel, Field, ValidationError, model_validator

from groupwise import plugins
from groupwise import system as files
from groupwise import system as processes
from groupwise.config import load_config
from groupwise.config.algorithm import AlgorithmCfg
from groupwise.config.base import OTHER_NAMES, Cfg, check_programs, explain, flat, meant
from groupwise.config.evolution import Choices, EvolutionCfg, LaunchCfg, RangeCfg, Value
from groupwise.config.run import BUDGETS, CommonCfg, RunCfg, TextRunCfg
from groupwise.data.rollout import TensorDict
from groupwise.errors import ConfigError, DivergedError, MemberError, RunFolderError, nearest
from groupwise.report.folder import LOCK, WANDB, Count, RunFolder
from groupwise.run import MAX_ERROR, STOP, evaluate, handling, read_settings, resume, train_from_config
from groupwise.seeding import derive_seed
from groupwise.system import num_cpus, show
from groupwise.training.build import UserObjects
from groupwise.training.checkpoint import FIXED, changes_scores, fork_run, is_fixed
from groupwise.training.trainer import PAUSED, Callback, Trainer

log = logging.getLogger(__name__)

FILE = "population.json"
MAX_CRASHES = 3
"""Failures of a member in one round that end the search."""
MAX_POPULATION = 64 * files.MIB
"""Bytes of ``population.json``."""
_VALUES_OF_ROUND = 20
"""Most values, besides settings, that a round of a member adds to it."""
OnMutation = Callable[[str, Mapping[str, Value], Mapping[str, Value]], Mapping[str, Value] | None]
"""Called with a clone's name, its parent's settings and its own; may return others."""


class Result(BaseModel, strict=True, extra="allow", allow_inf_nan=False):
    """Result of a member in a round."""

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
        launch = LaunchCfg(**_taken(fields, LaunchCfg))
        population = cls.load(path)
        if not allow_programs:
            check_programs(population.base, population.path / FILE)
        given = UserObjects.again(fields, population.base)
        missing = sorted(population._given_in_python() - given.as_arguments().keys())
        if missing and population.round < population.cfg.rounds:
            raise ConfigError(  # a member's own error names gw.resume, which would train it beyond its round
                f"{path} was given {' and '.join(missing)} in Python; fix: from Python, give the same again, as in "
                + _resume_call(path, missing)
            )
        return go_on(population, given, launch, on_mutation, progress == "none")

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
            why = explain(error.errors())[0] if isinstance(error, ValidationError) else str(error)
            why = why.partition("; fix: ")[0]  # of a file that the user did not write
            fix = "fix: give the folder of a population, or restore it"
            raise RunFolderError(f"{path} is no population, or {FILE} is damaged: {why}; {fix}") from error
        return found

    def _given_in_python(self) -> set[str]:
        """Names of the Python objects that the members were given; empty before one began."""
        folders = (RunFolder(self.folder(name)) for name in self.members)
        begun = next((folder for folder in folders if folder.config.exists()), None)
        return set() if begun is None else {*begun.read_provenance()["given_in_python"]}

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
                f"{self.path / FILE} cannot be read again: {error}; fix: fewer members or rounds"
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

    def has_best(self) -> bool:
        """Whether ``best/`` is there, and was not being replaced when the process ended."""
        return RunFolder(self.path / "best").config.is_file() and not (self.path / ".best").exists()

    def write_best(self) -> None:
        """Copy the run of the best member of the last round to ``best/``; a ``RunFolderError`` while a process trains there."""
        copied, unfinished = self.path / "best", self.path / ".best"
        if RunFolder(copied).is_training:
            raise RunFolderError(f"a process trains in {copied}; fix: wait, or stop it, then resume the population")
        files.remove(unfinished)
        own = self.folder(self.best().name)
        try:
            shutil.copytree(own, unfinished, ignore=shutil.ignore_patterns(LOCK), symlinks=True)  # none is followed
        except OSError as error:
            raise RunFolderError(f"{own} cannot be copied: {error!s:.300}; fix: restore it, or make room") from error
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
        if (
            is_fixed(path)
            or any(one.startswith(f"{path}.") for one in FIXED)
            or path.split(".")[0] in _OF_ALL
            or no_reference
        ):
            what = f"{path} = 0" if no_reference else path
            raise ConfigError(f"search: {what} cannot change in the middle of a run; fix: leave it out")
        if inside := [other for other in search if other.startswith(f"{path}.")]:
            raise ConfigError(f"search: {inside[0]} is a part of {path}; fix: one of the two")
        for value in values:
            if (whole := fitted(base, path, value)) != value:
                raise ConfigError(f"search: {path} = {value!r:.80} is no whole number; fix: {whole}")
            found = with_settings(base, {path: fitted(base, path, value)})
            if found.named_programs() != base.named_programs():  # it may come from a stranger's population
                raise ConfigError(f"search: {path} = {value!r:.80} names a program; fix: set it for all members")


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
    """``value``, rounded where the setting at ``path`` is a whole number. Arguments of an environment may be of any kind."""
    if not isinstance(value, float) or "kwargs" in path:
        return value
    now = setting_at(base, path)
    if now is not None:
        return round(value) if isinstance(now, int) else value
    for one in (value, round(value)):  # its kind is known by what it takes
        with suppress(ConfigError):
            with_settings(base, {path: one})
            return one
    return value


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
        raise ConfigError(f"search: {shown} is not possible: {'; '.join(explain(error.errors()))}") from error


def possible(base: CommonCfg, draw: Callable[[], dict[str, Value]]) -> dict[str, Value]:
    """The first draw whose values are possible together; a ``ConfigError`` if 100 are not."""
    for _ in range(99):
        values = draw()
        with suppress(ConfigError):
            with_settings(base, values)
            return values
    values = draw()
    with_settings(base, values)
    return values


def setting_at(base: CommonCfg, path: str) -> Any:
    """The setting at a path; a ``ConfigError`` if there is none."""
    found: Any = base.model_dump(mode="json")
    for key in path.split("."):
        names = found if isinstance(found, dict) else {}
        if key not in names:
            last = OTHER_NAMES.get(path.rpartition(".")[2], path.rpartition(".")[2])
            own = ("clip_low", "clip_high") if last == "clip_coef" else (last,)  # one setting for both
            alike = [known for known in flat(base.model_dump(mode="json")) if known.rpartition(".")[2] in own]
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


# Workers that play rounds


class Pool(Protocol):
    """Workers that play rounds and may die."""

    size: float
    """Rounds at once."""
    busy: dict[Any, Round]
    """Busy workers and their rounds."""

    def begin(self, task: Round) -> Any:
        """Start a round; returns its worker."""

    def answers(self) -> Iterable[tuple[Any, Result | str]]:
        """Results of busy workers, or why there is none; waits for at least one."""

    def close(self) -> None:
        """End all workers."""


def play_all(pool: Pool, rounds: Sequence[Round], output: Path) -> Iterator[tuple[Round, Result]]:
    """Results as they come. A member whose worker was lost continues from its last checkpoint.

    Raises:
        MemberError: a member failed, or its worker died, ``MAX_CRASHES`` times; the others finish their rounds first.
    """
    waiting, lost = list(rounds), ""
    failures = dict.fromkeys((task.folder for task in rounds), 0)
    while waiting or pool.busy:
        while waiting and len(pool.busy) < pool.size:
            task = waiting.pop(0)
            pool.busy[pool.begin(task)] = task
        for worker, answer in pool.answers():
            task = pool.busy.pop(worker)
            if not isinstance(answer, str):
                yield task, answer
                continue
            failures[task.folder] += 1
            log.warning("%s failed (time %d): %s", task.folder.name, failures[task.folder], answer)
            if failures[task.folder] < MAX_CRASHES:
                waiting.insert(0, task)
            else:
                lost = f"{task.folder} failed {MAX_CRASHES} times in round {task.number + 1}: {answer}"
    if lost:
        raise MemberError(f"{lost}; {output} has more; fix: remove the cause, then resume the population")


class Processes:
    """A pool of processes of this machine, which are known by their connections."""

    def __init__(self, size: int, given: UserObjects, output: Path) -> None:
        self.size: float = size
        self._output, self._payload = str(output), plugins.pickled(given)
        self.busy: dict[Any, Round] = {}
        self._processes: dict[Any, BaseProcess] = {}

    def begin(self, task: Round) -> Any:
        """Send a round to an idle process or a new one."""
        for idle in [worker for worker in self._processes if worker not in self.busy]:
            with suppress(OSError):
                idle.send(plugins.pickled(task))
                return idle
            processes.kill(self._processes.pop(idle))  # it died while idle
            idle.close()
        worker, theirs = processes.context().Pipe()
        args = (theirs, self._payload, tuple(plugins.loaded()), self._output)
        self._processes[worker] = processes.start(_work, *args, name="groupwise member", daemon=False)
        theirs.close()
        worker.send(plugins.pickled(task))
        return worker

    def answers(self) -> Iterator[tuple[Any, Result | str]]:
        """Answers of processes, which are idle again unless they died."""
        ready: list[Any] = connection.wait(list(self.busy))
        for worker in ready:
            try:
                answer = worker.recv()
            except (EOFError, OSError):
                process = self._processes.pop(worker)
                process.join(1.0)
                processes.kill(process)
                answer = f"its process ended with exit code {process.exitcode}"
            yield worker, answer

    def close(self) -> None:
        """End all processes."""
        for process in self._processes.values():
            processes.kill(process)


def answered(task: bytes, payload: bytes, plugin_files: tuple[str, ...]) -> Result | str:
    """The result of a round, or its error, which is printed, too.

    Args:
        task: the round, pickled like the payload: classes of its settings may be those of plugins.
        payload: the Python objects of the runs. Each round has its own, since training changes a policy.
    """
    try:
        torch.set_num_threads(1)
        if plugins.loaded() != [*plugin_files]:
            plugins.load([*map(Path, plugin_files)])
        return play(cloudpickle.loads(task), cloudpickle.loads(payload))
    except (Exception, SystemExit) as error:  # the parent decides about every kind of error
        traceback.print_exc()
        return f"{type(error).__name__}: {error}"
    finally:
        gc.collect()  # parts of a run refer to each other: its model would stay until the next one is loaded


def _work(requests: Any, payload: bytes, plugin_files: tuple[str, ...], output: str) -> None:
    """The main function of a worker: answer each round."""
    with files.appending(Path(output)) as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    with suppress(EOFError, ConnectionError):  # the parent is gone
        while True:
            requests.send(answered(requests.recv(), payload, plugin_files))


# The search


def evolve(
    env: Any = "CartPole-v1",
    algorithm: str | AlgorithmCfg | dict[str, Any] | None = None,
    *,
    search: Mapping[str, Any],
    policy: Any = None,
    preset: str | None = None,
    num_envs: int | None = None,
    max_episode_steps: int | None = None,
    run_dir: Path | str | None = None,
    on_mutation: OnMutation | None = None,
    **fields: Any,
) -> Population:
    """Train a population of runs whose settings change between rounds; returns it.

    Args:
        env, algorithm, policy, preset, num_envs, max_episode_steps: as of ``gw.train``.
        search: bounds or values of settings, by path: ``{"algorithm.learning_rate": {"min": 1e-5, "max": 1e-2, "log": True}}``.
        run_dir: a folder that does not exist or is empty. None: a new one under ``runs/``.
        on_mutation: called with a clone's name, its parent's settings and its own; may return others.
        fields: other settings of the search (``population``, ``rounds``, ``round_steps`` and so on, see ``EvolutionCfg``), and
            of the runs as in ``gw.train``; ``workers`` (members at once), ``launcher`` (``processes`` of this machine, or
            ``ray``), and with Ray ``cpus`` and ``gpus`` of each member, on none of which the result depends.

    Raises:
        ConfigError: a setting is unknown or impossible, or cannot be searched.
        RunFolderError: ``run_dir`` is taken.
        MemberError: a member failed three times; the others are saved.
        DivergedError: all members diverged.
    """
    launch = LaunchCfg(**_taken(fields, LaunchCfg))
    cfg = EvolutionCfg(**_taken(fields, EvolutionCfg) | {"search": search})
    if named := [name for name in BUDGETS if fields.get(name) is not None]:
        raise ConfigError(f"{named[0]}: the budget is rounds times round_steps; fix: set these")
    in_env = {"num_envs": num_envs, "max_episode_steps": max_episode_steps}
    base, given = read_settings(env, algorithm, policy, preset, in_env, fields)
    return evolve_from_config(cfg, base, given, run_dir=run_dir, launch=launch, on_mutation=on_mutation)


def evolve_from_config(
    cfg: EvolutionCfg,
    base: CommonCfg,
    given: UserObjects | None = None,
    *,
    run_dir: Path | str | None = None,
    launch: LaunchCfg | None = None,
    on_mutation: OnMutation | None = None,
) -> Population:
    """See ``evolve``.

    Args:
        base: settings of the runs; budget and progress are the search's.
        given: Python objects that replace names in ``base``.
    """
    if base.stop.changed("threshold", "time_limit"):
        raise ConfigError("stop: a population ends after its rounds; fix: leave it out")
    budget = {name: None for name in BUDGETS if name in type(base).model_fields}
    budget |= {"total_steps": cfg.rounds * cfg.round_steps}  # type: ignore[dict-item]
    quiet = base.logging.progress == "none"
    logging = base.logging.model_dump(mode="json") | {"progress": "none"}
    base = with_settings(base, {}, **budget, run_dir=None, logging=logging)
    check_search(cfg.search, base)
    check_count(cfg)
    if isinstance(base, RunCfg):
        steps: Any = cfg.search.get("algorithm.num_steps", [base.algorithm.num_steps])
        size = base.env.num_envs * round(steps.max if isinstance(steps, RangeCfg) else max(steps))
        if size > cfg.round_steps:
            raise ConfigError(_too_short(cfg.round_steps, size))
    if apart := ", ".join(filter(changes_scores, cfg.search)):
        log.warning("search: %s may change what a score means, and each member is scored with its own settings", apart)
    name = f"{base.subject}-{base.algorithm.name}-population-{datetime.now():%Y%m%d-%H%M%S}".replace("/", "-")
    path = Path(run_dir or Path("runs", name)).absolute()  # an environment may change the working folder
    RunFolder.check_free(path)
    population = Population(path, cfg, base, hooked=on_mutation is not None)
    for place in range(cfg.population):
        values = possible(base, partial(_first, cfg, base, Random(_seed(base, "first", place))))
        population.members[f"r0-{place}"] = Member(name=f"r0-{place}", parent=None, born=0, settings=values)
    population.goes_on = list(population.members)
    path.mkdir(parents=True, exist_ok=True)
    for leftover in path.glob(f".{FILE}.*.partial"):  # of a search that was killed here
        files.remove(leftover)
    population.save()
    return go_on(population, given or UserObjects(), launch or LaunchCfg(), on_mutation, quiet)


def _first(cfg: EvolutionCfg, base: CommonCfg, random: Random) -> dict[str, Value]:
    """Values of a first member."""
    return {
        name: fitted(base, name, space.draw(random) if isinstance(space, RangeCfg) else random.choice(space))
        for name, space in cfg.search.items()
    }


def go_on(
    population: Population, given: UserObjects, launch: LaunchCfg, on_mutation: OnMutation | None, quiet: bool
) -> Population:
    """All remaining rounds; work that a kill interrupted is repeated or continued."""
    cfg, base, output = population.cfg, population.base, population.path / "members.log"
    if population.hooked != (on_mutation is not None):
        had = "with" if population.hooked else "without"
        raise ConfigError(f"{population.path} was started {had} on_mutation; fix: resume it {had} it")
    try:
        files.appending(output).close()
    except OSError as error:  # a link, or no rights
        raise RunFolderError(f"{output} cannot be written ({error}); fix: another name, or the rights") from error
    was_finished = population.round == cfg.rounds
    with (
        _telling_how_to_continue(population, given),
        handling(signal.default_int_handler, *STOP),
        RunFolder(population.path).locked(),
        closing(start_pool(launch, cfg.population, given, output)) as pool,
    ):
        while population.round < cfg.rounds:
            number, active, tasks = population.round, population.active(), []
            for member in active:
                folder, seed = population.folder(member.name), _seed(base, "member", member.name)
                noise = None
                if member.parent is not None:
                    noise = (cfg.weight_noise, _seed(base, "noise", member.name)) if cfg.weight_noise > 0 else None
                    if not folder.exists():  # cloned whole or not at all
                        parent, unfinished = population.folder(member.parent), folder.with_name(f".{folder.name}")
                        files.remove(unfinished)
                        saved = load_config(parent / "config.json", allow_programs=True)
                        own = with_settings(saved, member.settings, seed=seed)
                        fork_run(parent, unfinished, "latest", lambda _: own, finished=True)  # noqa: B023
                        unfinished.rename(folder)
                settings, until = with_settings(base, member.settings, seed=seed), (number + 1) * cfg.round_steps
                common = _seed(base, "evaluation of members")
                tasks.append(Round(number, folder, settings, until, cfg.episodes, common, noise))
            for task, result in play_all(pool, tasks, output):
                population.members[task.folder.name].results[number] = result
            population.round += 1
            if not quiet:
                show(population.line(number))
            _select(population, active, number, on_mutation)
            population.save()
        if not was_finished or not population.has_best():  # otherwise its user may have trained it further
            population.write_best()
    return population


@contextmanager
def _telling_how_to_continue(population: Population, given: UserObjects) -> Iterator[None]:
    """Say in a ``KeyboardInterrupt`` how far the search came, and what continues it."""
    try:
        yield
    except KeyboardInterrupt as error:
        path, allow = population.path, len(population.base.named_programs()) > 0
        names = [*given.as_arguments(), *["on_mutation"] * population.hooked]
        again = plugins.command("resume", path, *["--allow-programs"] * allow)
        if names:
            again = _resume_call(path, names, allow_programs=allow)
        done = f"{population.round} of {population.cfg.rounds} rounds"
        raise KeyboardInterrupt(f"interrupted after {done}; continue with: {again}") from error


def _resume_call(path: Path | str, names: Sequence[str], *, allow_programs: bool = False) -> str:
    """The call that continues a population with the Python objects of these names."""
    words = [f"{name}=..." for name in names] + ["allow_programs=True"] * allow_programs
    return f"groupwise.evolution.population.Population.resume({str(path)!r}, {', '.join(words)})"


def start_pool(launch: LaunchCfg, count: int, given: UserObjects, output: Path) -> Pool:
    """Workers for ``count`` members."""
    if launch.launcher == "processes":
        return Processes(min(launch.workers or num_cpus(), count), given, output)
    from groupwise.integrations.ray import RayMembers

    return RayMembers(launch, given, output)


def _select(population: Population, active: list[Member], number: int, on_mutation: OnMutation | None) -> None:
    """Decide on the members of the next round, if there is one."""
    cfg, base, random = population.cfg, population.base, Random(_seed(population.base, "selection", number))
    order = random.sample(range(len(active)), len(active))  # decides ties
    ranking = sorted(order, key=lambda place: -population.fitness(active[place], number))
    lost = [member for member in active if member.results[number].status != "ok"]
    if len(lost) == len(active):
        raise DivergedError.because(f"all members in round {number + 1} ({lost[0].results[number].reason})")
    for member in lost:
        log.warning("%s diverged in round %d: %s", member.name, number + 1, member.results[number].reason)
    if number + 1 == cfg.rounds:
        return
    steps = min(member.results[number].env_steps or math.inf for member in active)
    if number == 0 and steps >= 2 * cfg.round_steps:  # the last iteration of each is longer than a round
        raise ConfigError(_too_short(cfg.round_steps, int(steps)))
    if all(population.waited(member, number) for member in active):
        return  # nothing new is known of any of them
    population.goes_on = []
    for place, (index, clone) in enumerate(cfg.selection.select(ranking, len(active) - len(lost), random)):
        member = active[index]
        if clone:
            name = f"r{number + 1}-{place}"
            mutation = partial(cfg.mutation.mutate, member.settings, cfg.search, Random(_seed(base, "mutation", name)))
            try:
                settings = possible(base, mutation)
            except ConfigError:
                settings = dict(member.settings)
            if on_mutation is not None:
                settings = dict(on_mutation(name, member.settings, settings) or settings)
                if wrong := misfit(cfg.search, settings):
                    raise ConfigError(f"on_mutation gave {wrong}; expected a value of the search space")
                with_settings(base, settings)  # possible together
            member = Member(name=name, parent=member.name, born=number + 1, settings=settings)
        population.members[member.name] = member
        population.goes_on.append(member.name)


def _taken(fields: dict[str, Any], cfg: type[Cfg]) -> dict[str, Any]:
    """Take the settings of ``cfg`` out of ``fields``."""
    return {name: fields.pop(name) for name in list(fields) if name in cfg.model_fields}


def _too_short(round_steps: int, size: int) -> str:
    return f"round_steps = {round_steps:,}: an iteration takes about {size:,} steps; fix: more of them in a round"


def _seed(base: CommonCfg, *path: int | str) -> int:
    return derive_seed(base.seed, "evolution", *path)
