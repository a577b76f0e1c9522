"""Evolution: rounds of training, evaluation on common starts, selection and mutation.

Every member is a run folder. What a round decides follows from the seed and the members' scores alone, so neither the number
of processes nor a kill changes it. ``population.json`` is written when a round has ended, and each member writes down the
rounds that it finished.
"""

import logging
import math
from collections.abc import Callable, Mapping
from contextlib import closing
from datetime import datetime
from pathlib import Path
from random import Random
from typing import Any, Literal

from groupwise.config import load_config
from groupwise.config.algorithm import AlgorithmCfg
from groupwise.config.base import Cfg
from groupwise.config.budget import BUDGETS
from groupwise.config.evolution import EvolutionCfg, LaunchCfg, Value
from groupwise.config.run import CommonCfg, RunCfg
from groupwise.errors import ConfigError, DivergedError
from groupwise.evolution.member import Round
from groupwise.evolution.population import Member, Population
from groupwise.evolution.report import write_report
from groupwise.evolution.search import check_search, check_within, first_settings, with_settings
from groupwise.evolution.workers import Processes, Workers
from groupwise.report.folder import RunFolder
from groupwise.seeding import derive_seed
from groupwise.settings import read_settings
from groupwise.system import files
from groupwise.system.cpus import num_cpus
from groupwise.system.terminal import show
from groupwise.training.components import UserObjects
from groupwise.training.fork import fork_run

log = logging.getLogger(__name__)

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
