"""Evolution: rounds of training, evaluation on common starts, selection and mutation.

Every member is a run folder. What a round decides follows from the seed and the members' scores alone, so neither the number
of processes nor a kill changes it. ``population.json`` is written when a round has ended, and each member writes down the
rounds that it finished.
"""

import gc
import logging
import math
import os
import re
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from datetime import datetime
from functools import cache
from io import BytesIO
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, TypeVar

import cloudpickle
import numpy as np
import torch

from groupwise import plugins
from groupwise import system as files
from groupwise import system as processes
from groupwise.config import load_config
from groupwise.config.algorithm import AlgorithmCfg
from groupwise.config.base import Cfg
from groupwise.config.evolution import EvolutionCfg, LaunchCfg, RangeCfg, Value
from groupwise.config.run import BUDGETS, CommonCfg, RunCfg
from groupwise.errors import ConfigError, DivergedError, MemberError
from groupwise.evolution.population import (
    Member,
    Population,
    Round,
    check_search,
    check_within,
    first_settings,
    play,
    with_settings,
)
from groupwise.report.curve import save_figure
from groupwise.report.folder import RunFolder
from groupwise.run import peak_memory, read_settings
from groupwise.seeding import derive_seed
from groupwise.system import num_cpus, show
from groupwise.training.build import UserObjects
from groupwise.training.checkpoint import fork_run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.cm import ScalarMappable


# Processes that train members, each one at a time.

log = logging.getLogger(__name__)

MAX_CRASHES = 3
"""Of a member in one round; then the search ends."""


class Answer(NamedTuple):
    """What became of a round."""

    result: dict[str, Any] | None
    failure: str = ""
    """Why there is no result."""
    peak_mib: float = 0.0
    """Peak memory of the process."""


Worker = TypeVar("Worker")


class Workers(ABC, Generic[Worker]):
    """A pool whose workers may die. A member that was lost continues from its last checkpoint.

    Args:
        count: members at once. None: as many as there is room for.
        given: Python objects of all runs.
        output: file for what the runs print.
    """

    def __init__(self, count: int | None, given: UserObjects, output: Path) -> None:
        self.count = count
        self.output = output
        self._payload = plugins.pickled(given)
        self._busy: dict[Worker, Round] = {}

    def run(self, rounds: Sequence[Round]) -> Iterator[tuple[Round, dict[str, Any]]]:
        """Results as they come.

        Raises:
            MemberError: a member failed, or its process died, ``MAX_CRASHES`` times; others are waited for first.
        """
        waiting, lost = list(rounds), ""
        failures = dict.fromkeys((task.folder for task in rounds), 0)
        while waiting or self._busy:
            while waiting and (self.count is None or len(self._busy) < self.count) and self._has_room():
                task = waiting.pop(0)
                self._busy[self._begin(task)] = task
            for worker, answer in self._answers():
                task = self._busy.pop(worker)
                if answer.result is not None:
                    yield task, answer.result
                    continue
                failures[task.folder] += 1
                log.warning("%s failed (time %d): %s", task.folder.name, failures[task.folder], answer.failure)
                if failures[task.folder] < MAX_CRASHES:
                    waiting.insert(0, task)
                else:
                    lost = f"{task.folder} failed {MAX_CRASHES} times in round {task.number + 1}: {answer.failure}"
        if lost:
            raise MemberError(f"{lost}; {self.output} has more; fix: remove the cause, then resume the population")

    @abstractmethod
    def _begin(self, task: Round) -> Worker:
        """Who plays it from now on."""

    @abstractmethod
    def _answers(self) -> Iterable[tuple[Worker, Answer]]:
        """Of busy workers; waits for at least one."""

    @abstractmethod
    def close(self) -> None:
        """End all workers."""

    def _has_room(self) -> bool:
        return True


class _Process(NamedTuple):
    process: BaseProcess
    connection: Any


class Processes(Workers[_Process]):
    """Processes of this machine, fewer where memory is short."""

    def __init__(self, count: int, given: UserObjects, output: Path) -> None:
        super().__init__(count, given, output)
        self._idle: list[_Process] = []
        self._peak_mib = 0.0

    def close(self) -> None:
        """End all processes."""
        for worker in (*self._idle, *self._busy):
            processes.kill(worker.process)

    def _begin(self, task: Round) -> _Process:
        worker = self._idle.pop() if self._idle else self._start()
        worker.connection.send(task)
        return worker

    def _start(self) -> _Process:
        ours, theirs = processes.context().Pipe()
        args = (theirs, self._payload, tuple(plugins.loaded()), str(self.output))
        process = processes.start(_work, *args, name="groupwise member", daemon=False)
        theirs.close()
        return _Process(process, ours)

    def _answers(self) -> Iterator[tuple[_Process, Answer]]:
        ready = connection.wait([worker.connection for worker in self._busy])
        for worker in [worker for worker in self._busy if worker.connection in ready]:
            yield worker, self._receive(worker)

    def _receive(self, worker: _Process) -> Answer:
        """The answer of a worker, which is idle again unless it died."""
        try:
            answer: Answer = worker.connection.recv()
        except (EOFError, OSError):
            worker.process.join(1.0)
            processes.kill(worker.process)
            return Answer(None, f"its process ended with exit code {worker.process.exitcode}")
        self._idle.append(worker)
        self._peak_mib = max(self._peak_mib, answer.peak_mib)
        return answer

    def _has_room(self) -> bool:
        """Whether another process fits in memory: as much as the largest so far."""
        meminfo = Path("/proc/meminfo")
        found = re.search(r"MemAvailable:\s*(\d+) kB", meminfo.read_text()) if meminfo.is_file() else None
        return not self._busy or found is None or int(found[1]) / 1024 > 1.2 * self._peak_mib


@cache
def _prepare(plugin_files: tuple[str, ...]) -> None:
    """Make this process ready for rounds, once."""
    torch.set_num_threads(1)
    plugins.load(list(map(Path, plugin_files)))


def answered(task: Round, payload: bytes, plugin_files: tuple[str, ...]) -> Answer:
    """The result of a round, or its error, which is printed, too.

    Args:
        payload: the Python objects of the runs. Each round has its own, since training changes a policy.
    """
    try:
        _prepare(plugin_files)
        result = play(task, cloudpickle.loads(payload))
        return Answer(result, peak_mib=peak_memory(torch.device("cpu")).get("peak_memory_mib", 0.0))
    except Exception as error:  # whatever it is, the parent decides
        traceback.print_exc()
        return Answer(None, f"{type(error).__name__}: {error}")
    finally:
        gc.collect()  # parts of a run refer to each other: its model would stay until the next one is loaded


def _work(requests: Any, payload: bytes, plugin_files: tuple[str, ...], output: str) -> None:
    """The main function of a worker: answer each round."""
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    with suppress(EOFError, ConnectionError):  # the parent is gone
        while True:
            requests.send(answered(requests.recv(), payload, plugin_files))


# A population as a table and a picture.


def write_report(population: Population) -> None:
    """Write ``lineage.png`` and ``population.parquet``."""
    import pyarrow
    import pyarrow.parquet
    from matplotlib.figure import Figure

    table, picture = population.path / "population.parquet", population.path / "lineage.png"
    data = BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(population.rows())), data)
    with files.warning_if_unwritable(table):
        files.write(table, data.getvalue())

    settings = list(population.cfg.search)
    figure = Figure(figsize=(9, 3.4 + 2.2 * len(settings)), dpi=130, layout="constrained")
    first, *others = figure.subplots(
        1 + len(settings), sharex=True, squeeze=False, height_ratios=[1.5] + [1] * len(settings)
    ).flat
    colors = _colors(population)
    _draw_lineage(first, population, colors)
    for axes, path in zip(others, settings, strict=True):
        _draw_setting(axes, population, path, colors)
    others[-1].set_xlabel("round")
    figure.align_ylabels()
    figure.colorbar(
        colors, ax=[first, *others], label=f"fitness ({population.cfg.fitness.replace('_', ' ')})", shrink=0.6
    )
    with files.warning_if_unwritable(picture):
        save_figure(figure, picture)


def _colors(population: Population) -> "ScalarMappable":
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    found = [
        score
        for member in population.members.values()
        for number in member.results
        if math.isfinite(score := population.fitness(member, number))
    ]
    return ScalarMappable(Normalize(min(found), max(found)), "viridis")


def _look(colors: "ScalarMappable", fitness: float) -> dict[str, Any]:
    """Colour by fitness; a red cross where the member diverged."""
    if math.isfinite(fitness):
        return {"color": colors.to_rgba(np.array([fitness]))[0], "marker": "o"}
    return {"color": "#d55e00", "marker": "x"}


def _draw_lineage(axes: "Axes", population: Population, colors: "ScalarMappable") -> None:
    """A column for each round, the best on top; lines lead from each member to itself and its clones in the next round."""
    places = {
        (number, member.name): -rank
        for number in range(population.round)
        for rank, member in enumerate(population.ranked(number))
    }
    for (number, name), place in places.items():
        member = population.members[name]
        before = name if (number - 1, name) in places else member.parent or ""
        if (number - 1, before) in places:
            look = "-" if before == name else ":"
            axes.plot(
                (number, number + 1), (places[number - 1, before], place), look, color="#949494", linewidth=1, zorder=1
            )
        axes.scatter(number + 1, place, s=70, zorder=2, **_look(colors, population.fitness(member, number)))
    axes.set(ylabel="rank", title="Who descends from whom (dotted: a mutated clone; x: diverged)")
    axes.set_yticks([])
    axes.spines[["top", "right", "left"]].set_visible(False)


def _draw_setting(axes: "Axes", population: Population, path: str, colors: "ScalarMappable") -> None:
    """The values of a setting over the rounds, the best members in front."""
    from matplotlib.ticker import MaxNLocator

    space = population.cfg.search[path]
    for number in range(population.round):
        for member in reversed(population.ranked(number)):
            value = member.settings[path]
            height: Any = value if isinstance(space, RangeCfg) else space.index(value)
            axes.scatter(number + 1, height, s=28, **_look(colors, population.fitness(member, number)))
    if not isinstance(space, RangeCfg):
        axes.set_yticks(range(len(space)), list(map(str, space)))
    elif space.log:
        axes.set_yscale("log")
    axes.set_ylabel(path.removeprefix("algorithm."))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


OnMutation = Callable[[str, Mapping[str, Value], Mapping[str, Value]], Mapping[str, Value] | None]
"""Called with a clone's name, its parent's settings and its own; may return others."""


def evolve(
    env: Any = "CartPole-v1",
    algorithm: str | AlgorithmCfg | dict[str, Any] | None = None,
    *,
    search: Mapping[str, Any],
    population: int = 8,
    rounds: int = 10,
    round_steps: int = 10_000,
    policy: Any = None,
    preset: str | None = None,
    num_envs: int | None = None,
    max_episode_steps: int | None = None,
    run_dir: Path | str | None = None,
    workers: int | None = None,
    launcher: Literal["processes", "ray"] = "processes",
    on_mutation: OnMutation | None = None,
    **fields: Any,
) -> Population:
    """Train a population of runs whose settings change between rounds; returns it.

    Args:
        env, algorithm, policy, preset, num_envs, max_episode_steps: as of ``gw.train``.
        search: bounds or values of settings, by path: ``{"algorithm.learning_rate": {"min": 1e-5, "max": 1e-2, "log": True}}``.
        population: members.
        rounds: rounds of training, evaluation and selection.
        round_steps: environment steps (tokens for text) that each member trains in a round.
        run_dir: a folder that does not exist or is empty. None: a new one under ``runs/``.
        workers: members at once. None: one per core, or as many as a cluster has room for.
        launcher: ``processes`` of this machine, or ``ray``. The result depends neither on it nor on ``workers``.
        on_mutation: called with a clone's name, its parent's settings and its own; may return others.
        fields: other settings of the search (``episodes``, ``fitness``, ``selection``, ``mutation``, ``weight_noise``), and
            of the runs as in ``gw.train``. With Ray also ``cpus`` and ``gpus`` of each member.

    Raises:
        ConfigError: a setting is unknown or impossible, or cannot be searched.
        RunFolderError: ``run_dir`` is taken.
        MemberError: a member failed three times; the others are saved.
        DivergedError: all members diverged.
    """
    launch = LaunchCfg(workers=workers, launcher=launcher, **_taken(fields, LaunchCfg))
    own = {"search": search, "population": population, "rounds": rounds, "round_steps": round_steps}
    cfg = EvolutionCfg(**_taken(fields, EvolutionCfg) | own)
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
        given: Python objects that replace what ``base`` names.
    """
    if base.stop.changed("threshold", "time_limit"):
        raise ConfigError("stop: a population ends after its rounds; fix: leave it out")
    budget = {name: None for name in BUDGETS if name in type(base).model_fields}
    budget |= {"total_steps": cfg.rounds * cfg.round_steps}  # type: ignore[dict-item]
    logging = base.logging.model_dump(mode="json") | {"progress": "none"}
    base = with_settings(base, {}, **budget, run_dir=None, logging=logging)
    check_search(cfg.search, base)
    if isinstance(base, RunCfg) and (size := base.env.num_envs * base.algorithm.num_steps) > cfg.round_steps:
        raise ConfigError(_too_short(cfg.round_steps, size))
    name = f"{base.subject}-{base.algorithm.name}-population-{datetime.now():%Y%m%d-%H%M%S}".replace("/", "-")
    path = Path(run_dir or Path("runs", name))
    RunFolder.check_free(path)
    population = Population(path, cfg, base)
    population.hooked = on_mutation is not None
    for place in range(cfg.population):
        member = Member(f"r0-{place}", None, 0, first_settings(cfg.search, base, Random(_seed(base, "first", place))))
        with_settings(base, member.settings)  # possible together
        population.members[member.name] = member
        population.goes_on.append(member.name)
    (path / "members").mkdir(parents=True)
    population.save()
    return Evolution(population, given or UserObjects(), launch or LaunchCfg(), on_mutation).run()


def go_on(population: Population, on_mutation: OnMutation | None, fields: dict[str, Any]) -> Population:
    """See ``Population.resume``."""
    if population.hooked != (on_mutation is not None):
        had = "with" if population.hooked else "without"
        raise ConfigError(f"{population.path} was started {had} on_mutation; fix: resume it {had} it")
    launch = LaunchCfg(**_taken(fields, LaunchCfg))
    return Evolution(population, UserObjects.again(fields), launch, on_mutation).run()


class Evolution:
    """One population, from its first or next round to its end."""

    def __init__(
        self, population: Population, given: UserObjects, launch: LaunchCfg, on_mutation: OnMutation | None
    ) -> None:
        self.population = population
        self.cfg = population.cfg
        self.base = population.base
        self.given = given
        self.launch = launch
        self.on_mutation = on_mutation

    def run(self) -> Population:
        """All rounds that are left."""
        population = self.population
        with RunFolder(population.path).locked(), closing(self._workers()) as workers:
            while population.round < self.cfg.rounds:
                self._play(workers, population.round)
            population.write_best()
            write_report(population)
        return population

    def _workers(self) -> Workers:
        output = self.population.path / "members.log"
        if self.launch.launcher == "processes":
            return Processes(min(self.launch.workers or num_cpus(), self.cfg.population), self.given, output)
        from groupwise.integrations.ray import RayMembers

        return RayMembers(self.launch, self.given, output)

    def _play(self, workers: Workers, number: int) -> None:
        """One round; then who plays the next one is decided and saved."""
        population, active = self.population, self.population.active()
        for member in active:
            self._create(member)
        for task, result in workers.run([self._round(member, number) for member in active]):
            population.members[task.folder.name].results[number] = result
        population.round += 1
        show(population.line(number))
        self._select(active, number)
        population.save()

    def _round(self, member: Member, number: int) -> Round:
        cfg = self.cfg
        is_noisy = member.parent is not None and cfg.weight_noise > 0
        return Round(
            number,
            self.population.folder(member.name),
            self._settings_of(member, self.base),
            (number + 1) * cfg.round_steps,
            cfg.episodes,
            _seed(self.base, "evaluation of members"),
            (cfg.weight_noise, _seed(self.base, "noise", member.name)) if is_noisy else None,
        )

    def _settings_of(self, member: Member, base: CommonCfg) -> CommonCfg:
        return with_settings(base, member.settings, seed=_seed(self.base, "member", member.name))

    def _create(self, member: Member) -> None:
        """Fork a clone from its parent, unless it was done before a kill."""
        folder = self.population.folder(member.name)
        if member.parent is None or folder.exists():
            return
        unfinished = folder.with_name(f".{folder.name}")
        files.remove(unfinished)
        parent = self.population.folder(member.parent)
        fork_run(
            parent, unfinished, "latest", lambda config: self._settings_of(member, load_config(config)), finished=True
        )
        unfinished.rename(folder)

    def _select(self, active: list[Member], number: int) -> None:
        """Decide on the members of the next round, if there is one."""
        population, random = self.population, Random(_seed(self.base, "selection", number))
        order = random.sample(range(len(active)), len(active))  # decides ties
        ranking = sorted(order, key=lambda place: -population.fitness(active[place], number))
        lost = [member for member in active if member.results[number]["status"] != "ok"]
        if len(lost) == len(active):
            raise DivergedError.because(f"all members in round {number + 1} ({lost[0].results[number]['reason']})")
        for member in lost:
            log.warning("%s diverged in round %d: %s", member.name, number + 1, member.results[number]["reason"])
        if number + 1 == self.cfg.rounds:
            return
        steps = min(member.results[number].get("env_steps", math.inf) for member in active)
        if number == 0 and steps >= 2 * self.cfg.round_steps:  # the last iteration of each is longer than a round
            raise ConfigError(_too_short(self.cfg.round_steps, int(steps)))
        if all(self._waited(member, number) for member in active):
            return  # nothing new is known of any of them
        population.goes_on = []
        for place, (index, clone) in enumerate(self.cfg.selection.select(ranking, len(active) - len(lost), random)):
            member = self._mutated(active[index], f"r{number + 1}-{place}", number + 1) if clone else active[index]
            population.members[member.name] = member
            population.goes_on.append(member.name)

    def _waited(self, member: Member, number: int) -> bool:
        """Whether it did not train in the round: an iteration before took it further."""
        if number == 0:
            return False
        before = member if member.parent is None or member.born < number else self.population.members[member.parent]
        steps = member.results[number].get("env_steps")
        return steps is not None and steps == before.results[number - 1].get("env_steps")

    def _mutated(self, parent: Member, name: str, born: int) -> Member:
        random = Random(_seed(self.base, "mutation", name))
        settings = self.cfg.mutation.mutate(parent.settings, self.cfg.search, random)
        if self.on_mutation is not None:
            settings = dict(self.on_mutation(name, parent.settings, settings) or settings)
            check_within(self.cfg.search, settings, "on_mutation")
        with_settings(self.base, settings)  # possible together
        return Member(name, parent.name, born, settings)


def _taken(fields: dict[str, Any], cfg: type[Cfg]) -> dict[str, Any]:
    """Those of ``cfg``, which leave ``fields``."""
    return {name: fields.pop(name) for name in list(fields) if name in cfg.model_fields}


def _too_short(round_steps: int, size: int) -> str:
    return f"round_steps = {round_steps:,}: an iteration takes about {size:,} steps; fix: more of them in a round"


def _seed(base: CommonCfg, *path: int | str) -> int:
    return derive_seed(base.seed, "evolution", *path)
