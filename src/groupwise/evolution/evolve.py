"""Evolution: rounds of training, evaluation on common starts, selection and mutation.

Every member is a run folder. The decisions of a round follow from the seed and the members' scores alone, so
neither the number of processes nor a kill changes them. ``population.json`` is written when a round has ended.
"""

import gc
import logging
import math
import os
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from datetime import datetime
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from random import Random
from typing import Any, Protocol

import cloudpickle
import torch

from groupwise import plugins
from groupwise import system as files
from groupwise import system as processes
from groupwise.config import load_config
from groupwise.config.algorithm import AlgorithmCfg
from groupwise.config.base import Cfg
from groupwise.config.evolution import EvolutionCfg, LaunchCfg, RangeCfg
from groupwise.config.run import BUDGETS, CommonCfg, RunCfg
from groupwise.errors import ConfigError, DivergedError, MemberError, RunFolderError
from groupwise.evolution.population import (
    FILE,
    Member,
    OnMutation,
    Population,
    Result,
    Round,
    check_count,
    check_search,
    fitted,
    misfit,
    play,
    with_settings,
)
from groupwise.report.folder import RunFolder
from groupwise.run import read_settings
from groupwise.seeding import derive_seed
from groupwise.system import num_cpus, show
from groupwise.training.build import UserObjects
from groupwise.training.checkpoint import fork_run

log = logging.getLogger(__name__)

MAX_CRASHES = 3
"""Failures of a member in one round that end the search."""


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
        worker = next((worker for worker in self._processes if worker not in self.busy), None)
        if worker is None:
            worker, theirs = processes.context().Pipe()
            args = (theirs, self._payload, tuple(plugins.loaded()), self._output)
            self._processes[worker] = processes.start(_work, *args, name="groupwise member", daemon=False)
            theirs.close()
        worker.send(task)
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


def answered(task: Round, payload: bytes, plugin_files: tuple[str, ...]) -> Result | str:
    """The result of a round, or its error, which is printed, too.

    Args:
        payload: the Python objects of the runs. Each round has its own, since training changes a policy.
    """
    try:
        torch.set_num_threads(1)
        if plugins.loaded() != [*plugin_files]:
            plugins.load([*map(Path, plugin_files)])
        return play(task, cloudpickle.loads(payload))
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
    if isinstance(base, RunCfg) and (size := base.env.num_envs * base.algorithm.num_steps) > cfg.round_steps:
        raise ConfigError(_too_short(cfg.round_steps, size))
    name = f"{base.subject}-{base.algorithm.name}-population-{datetime.now():%Y%m%d-%H%M%S}".replace("/", "-")
    path = Path(run_dir or Path("runs", name)).absolute()  # an environment may change the working folder
    RunFolder.check_free(path)
    population = Population(path, cfg, base, hooked=on_mutation is not None)
    for place in range(cfg.population):
        random = Random(_seed(base, "first", place))
        values = {
            name: fitted(base, name, space.draw(random) if isinstance(space, RangeCfg) else random.choice(space))
            for name, space in cfg.search.items()
        }
        with_settings(base, values)  # possible together
        population.members[f"r0-{place}"] = Member(name=f"r0-{place}", parent=None, born=0, settings=values)
    population.goes_on = list(population.members)
    path.mkdir(parents=True, exist_ok=True)
    for leftover in path.glob(f".{FILE}.*.partial"):  # of a search that was killed here
        files.remove(leftover)
    population.save()
    return go_on(population, given or UserObjects(), launch or LaunchCfg(), on_mutation, quiet)


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
        raise RunFolderError(
            f"{output} cannot be written ({error}); fix: remove it, or give rights to write"
        ) from error
    with RunFolder(population.path).locked(), closing(start_pool(launch, cfg.population, given, output)) as pool:
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
                        own = with_settings(
                            load_config(parent / "config.json", allow_programs=True), member.settings, seed=seed
                        )
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
        population.write_best()
    return population


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
            settings = cfg.mutation.mutate(member.settings, cfg.search, Random(_seed(base, "mutation", name)))
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
