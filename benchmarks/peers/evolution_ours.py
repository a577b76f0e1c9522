"""``gw.evolve`` with PPO at AgileRL's settings."""

import tempfile
from pathlib import Path
from random import Random
from typing import Any, ClassVar

from evolution_watch import (
    ENV,
    EVALUATION_EPISODES,
    LEARN_STEP,
    MAX_ROUNDS,
    MEMBERS,
    NUM_ENVS,
    RANGES,
    ROUND_STEPS,
    TOURNAMENT,
    Act,
    Watch,
    parse,
)

args = parse()

from groupwise import PPOCfg, Run, evolve
from groupwise.config.evolution import Place, TournamentCfg
from groupwise.evolution.population import Population

CORES = 2


class WatchedTournamentCfg(TournamentCfg, name="watched"):
    """A tournament that tells the watch of each round."""

    listener: ClassVar[Any] = None

    def select(self, ranking: list[int], alive: int, random: Random) -> list[Place]:
        self.listener.watch.round(lambda: self.listener.look(ranking[0]))
        return super().select(ranking, alive, random)


class Listener:
    """Looks at a population in its folder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.watch = Watch(args)
        self._steps = 0
        self._at: dict[str, int] = {}
        """Environment steps of members, those of their ancestors included."""

    def look(self, best: int) -> tuple[int, Act]:
        """Environment steps of all members, and the actions of the best one of the round."""
        population = Population.load(self.path)
        runs = {member.name: Run.load(population.folder(member.name)) for member in population.active()}
        at = {name: run.summary["env_steps"] for name, run in runs.items()}
        for member in population.active():
            start = self._at.get(member.name, self._at.get(member.parent or "", 0))
            self._steps += at[member.name] - start
        self._at |= at
        return self._steps, list(runs.values())[best].policy.predict


def main(path: Path) -> None:
    lr, batch, learn, ent, epochs = ({"min": low, "max": high} for low, high in RANGES.values())
    search = {
        "algorithm.learning_rate": lr | {"log": True},
        "algorithm.minibatch_size": batch,
        "algorithm.num_steps": {name: bound // NUM_ENVS for name, bound in learn.items()},
        "algorithm.ent_coef": ent | {"log": True},
        "algorithm.num_epochs": epochs,
    }
    matched = PPOCfg(
        num_steps=LEARN_STEP // NUM_ENVS,
        minibatch_size=128,
        num_epochs=4,
        learning_rate=1e-3,
        gamma=0.99,
        gae_lambda=0.95,
        ent_coef=0.01,
    )
    evolve(
        ENV,
        matched,
        search=search,
        population=2 if args.smallest else MEMBERS,
        rounds=MAX_ROUNDS + 1,  # the watch ends it
        round_steps=learn["max"] if args.smallest else ROUND_STEPS,
        episodes=EVALUATION_EPISODES,
        selection={"name": "watched", "size": TOURNAMENT},
        weight_noise=0.1,
        num_envs=NUM_ENVS,
        evaluation={"interval": 10**9, "episodes": 1},  # only those of the search count
        seed=args.seed,
        run_dir=path,
        workers=CORES,
    )


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        listener = WatchedTournamentCfg.listener = Listener(Path(folder, "population"))
        main(listener.path)
