"""A population on disk: its members, their settings, parents and scores."""

import json
import math
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from groupwise.config.evolution import EvolutionCfg, Value
from groupwise.config.run import CommonCfg, RunCfg, TextRunCfg
from groupwise.errors import RunFolderError
from groupwise.report.folder import LOCK
from groupwise.system import files

if TYPE_CHECKING:
    from groupwise.evolution.evolve import OnMutation

FILE = "population.json"
FORMAT = 1


@dataclass
class Member:
    """A run of the population."""

    name: str
    """Of its folder in ``members/``: ``r2-0`` was born in round 2."""
    parent: str | None
    """The member that it was cloned from."""
    born: int
    """Its first round, from 0."""
    settings: dict[str, Value]
    """Its values of what is searched, by path."""
    results: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Of its rounds: ``mean`` and ``ci95`` of the evaluation, ``env_steps``, and ``status`` (``ok`` or ``diverged``)."""


class Population:
    """The runs of ``gw.evolve``, in memory and on disk.

    Args:
        path: the folder, with the members' run folders in ``members/`` and a copy of the best one in ``best/``.
        cfg: settings of the search.
        base: settings of the runs.
    """

    def __init__(self, path: Path, cfg: EvolutionCfg, base: CommonCfg) -> None:
        self.path = path
        self.cfg = cfg
        self.base = base
        self.members: dict[str, Member] = {}
        """All members that ever were, by name."""
        self.goes_on: list[str] = []
        """Names of the members of the current round."""
        self.round = 0
        """Finished rounds."""
        self.hooked = False
        """Whether ``on_mutation`` was given."""

    def __repr__(self) -> str:
        return f"Population({str(self.path)!r}, {len(self.members)} members, {self.round}/{self.cfg.rounds} rounds)"

    @classmethod
    def resume(cls, path: Path | str, *, on_mutation: "OnMutation | None" = None, **fields: Any) -> "Population":
        """Go on with a population, as if it had never stopped; returns it.

        Args:
            on_mutation: as of ``gw.evolve``.
            fields: ``workers``, ``launcher``, ``cpus`` and ``gpus``, as of ``gw.evolve``, and the Python objects that the
                runs were given, as in ``gw.resume``.
        """
        from groupwise.evolution.evolve import go_on  # it makes populations

        return go_on(cls.load(path), on_mutation, fields)

    @classmethod
    def load(cls, path: Path | str) -> "Population":
        """A population from its folder.

        Raises:
            RunFolderError: there is none, or it is damaged.
        """
        path = Path(path)
        try:
            tree = files.parse_json(files.read(path / FILE, files.MAX_VALUES))
            base = (TextRunCfg if "task" in tree["run"] else RunCfg).model_validate(tree["run"])
            found = cls(path, EvolutionCfg.model_validate(tree["search"]), base)
            for member in tree["members"]:
                results = {int(number): result for number, result in member.pop("results").items()}
                found.members[member["name"]] = Member(**member, results=results)
            found.goes_on, found.round, found.hooked = list(tree["active"]), int(tree["round"]), bool(tree["hooked"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            fix = "fix: give the folder of a population, or restore it"
            raise RunFolderError(f"{path} is no population, or {FILE} is damaged: {error}; {fix}") from error
        return found

    def save(self) -> None:
        """Write ``population.json``."""
        tree = {
            "format": FORMAT,
            "search": self.cfg.model_dump(mode="json"),
            "run": self.base.model_dump(mode="json"),
            "hooked": self.hooked,
            "round": self.round,
            "active": self.goes_on,
            "members": [asdict(member) for member in self.members.values()],
        }
        files.write(self.path / FILE, f"{json.dumps(tree, indent=2)}\n".encode())

    def folder(self, name: str) -> Path:
        """The run folder of a member."""
        return self.path / "members" / name

    def active(self) -> list[Member]:
        """The members of the current round."""
        return [self.members[name] for name in self.goes_on]

    def fitness(self, member: Member, number: int) -> float:
        """What a member is ranked by after a round; minus infinity where it diverged."""
        result = member.results[number]
        if result["status"] != "ok":
            return -math.inf
        by_bound = self.cfg.fitness == "lower_bound" and result["ci95"] is not None
        return float(result["ci95"][0] if by_bound else result["mean"])

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
                low, high = result.get("ci95") or (None, None)
                score = {"status": result["status"], "mean": result.get("mean"), "ci95_low": low, "ci95_high": high}
                who = {"round": number, "member": member.name, "parent": member.parent}
                yield who | {"env_steps": result.get("env_steps")} | score | member.settings

    def line(self, number: int) -> str:
        """A round in one line."""
        ranked = self.ranked(number)
        best, worst = (self.fitness(member, number) for member in (ranked[0], ranked[-1]))
        shown = (f"{path.rpartition('.')[2]}={_short(value)}" for path, value in ranked[0].settings.items())
        return (
            f"round {number + 1}/{self.cfg.rounds}   best {best:.6g} ({ranked[0].name}: {', '.join(shown)})   "
            f"worst {worst:.6g} ({ranked[-1].name})"
        )

    def write_best(self) -> None:
        """Copy the run of the best member of the last round to ``best/``."""
        copied, unfinished = self.path / "best", self.path / ".best"
        files.remove(unfinished)
        shutil.copytree(self.folder(self.best().name), unfinished, ignore=shutil.ignore_patterns(LOCK))
        files.remove(copied)
        unfinished.rename(copied)


def _short(value: Value) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
