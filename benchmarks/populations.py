"""Populations against random search and Optuna, from deliberately bad ranges, at equal environment steps.

A cell is one search: a method, with PPO or GRPO, in an environment from a seed. All methods get the steps of whole runs of
all members. The score is the mean return of the greedy policy of the best run over fresh episodes. The curve is the best of the last
evaluations of all runs so far, over the steps of all runs together. Cells go to ``benchmarks/results/populations.json``, one by
one; one that is there already is not repeated.

    python benchmarks/populations.py                         # all cells, at the lowest priority; needs the extra optuna
    python benchmarks/populations.py --only Pendulum --seeds 3
    python benchmarks/populations.py --report                # the tables, nothing is run
"""

import argparse
import itertools
import os
import tempfile
import time
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import cells as cells_of

import groupwise as gw
from groupwise.comparison.results import RunRecord, compare_records, shown
from groupwise.config.evolution import Place

RESULT = Path(__file__).parent / "results" / "populations.json"
FIRST_SEED = 4000
EPISODES, FINAL_EPISODES = 10, 100
SEARCH = {
    "algorithm.learning_rate": {"min": 1e-6, "max": 1e-1, "log": True},
    "algorithm.gamma": [0.5, 0.8, 0.9, 0.95, 0.99, 0.999],
    "algorithm.ent_coef": {"min": 1e-5, "max": 1.0, "log": True},
    "algorithm.num_epochs": {"min": 1, "max": 20},
}
"""Most of it does not learn."""
Tree = dict[str, Any]
Point = tuple[int, float]


class Task(NamedTuple):
    """The steps of a round in an environment, the returns that count as 0 and 1, and how long a search is."""

    round_steps: int
    random: float
    good: float
    members: int = 8
    rounds: int = 10

    @property
    def steps(self) -> int:
        """Of a search."""
        return self.members * self.rounds * self.round_steps


TASKS = {"Pendulum-v1": Task(10_000, -1200, -150), "LunarLander-v3": Task(10_000, -200, 250)}


class KeepCfg(gw.config.SelectionCfg, name="keep"):
    """All members go on as they are: random search."""

    def select(self, ranking: list[int], alive: int, random: Random) -> list[Place]:
        return [Place(member, clone=False) for member in ranking[:alive]]


def evolved(
    env: str, task: Task, algorithm: str, seed: int, selection: str, folder: Path, workers: int
) -> tuple[list[Point], Path]:
    """Curve and best run of a population, or of random search."""
    population = gw.evolve(
        env,
        algorithm,
        search=SEARCH,
        population=task.members,
        rounds=task.rounds,
        round_steps=task.round_steps,
        episodes=EPISODES,
        selection=selection,
        seed=seed,
        evaluation={"interval": 10**9, "episodes": 1},  # only those of the search count
        run_dir=folder / "population",
        workers=workers,
    )
    curve, steps = [], 0
    for _, rows in itertools.groupby(population.rows(), key=lambda row: row["round"]):
        played = [row for row in rows if row["status"] == "ok"]
        steps += task.members * task.round_steps
        curve.append((steps, max(row["mean"] for row in played)))
    return curve, population.path / "best"


def tpe(env: str, task: Task, algorithm: str, seed: int, folder: Path) -> tuple[list[Point], Path]:
    """Curve and best run of Optuna's TPE with its median pruner, until the steps are used up."""
    import optuna

    class Report(gw.Callback):
        """Reports each evaluation, and stops a run that is pruned."""

        def __init__(self, trial: optuna.Trial) -> None:
            self.trial = trial

        def on_evaluation_end(self, trainer: gw.Trainer, evaluation: Any) -> None:
            self.last = evaluation.return_mean
            self.trial.report(self.last, trainer.env_steps)
            if not trainer.is_done() and self.trial.should_prune():
                trainer.stop("pruned")

    def train(trial: optuna.Trial) -> float:
        settings = {
            path.removeprefix("algorithm."): trial.suggest_categorical(path, space)
            if isinstance(space, list)
            else suggest_number(trial, path, **space)
            for path, space in SEARCH.items()
        }
        scores = Report(trial)
        run = gw.train(
            env,
            {"name": algorithm} | settings,
            run_dir=folder / f"trial-{trial.number}",
            seed=100 * seed + trial.number,
            total_steps=min(task.rounds * size, left),
            evaluation={"interval": size, "episodes": EPISODES},
            logging={"progress": "none"},
            callbacks=[scores],
        )
        if run.summary["stopped"] == "pruned":
            raise optuna.TrialPruned
        return scores.last

    def suggest_number(trial: optuna.Trial, path: str, min: float, max: float, log: bool = False) -> float:
        suggest = trial.suggest_int if isinstance(min, int) else trial.suggest_float
        return suggest(path, min, max, log=log)

    pruner = optuna.pruners.MedianPruner(n_startup_trials=4)
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=seed), pruner=pruner)
    size = task.round_steps
    left, curve, last = task.steps, [], {}
    while left >= size:
        number = len(study.trials)
        study.optimize(train, n_trials=1, catch=gw.errors.DivergedError)
        done = study.trials[number].intermediate_values
        for steps, score in done.items():
            last[number] = score
            curve.append((task.steps - left + steps, max(last.values())))
        if study.trials[number].state.name == "FAIL":  # it diverged, so it is no policy to keep
            last.pop(number, None)
        left -= max(done, default=size)  # one that diverges at once has used a part of a round
    best = max(last, key=lambda number: last[number])
    return curve, folder / f"trial-{best}"


def run(env: str, algorithm: str, method: str, seed: int, task: Task, workers: int) -> Tree:
    """A finished cell."""
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as scratch:
        if method == "tpe":
            curve, best = tpe(env, task, algorithm, seed, Path(scratch))
        else:
            curve, best = evolved(env, task, algorithm, seed, METHODS[method], Path(scratch), workers)
        score = gw.evaluate(best, FINAL_EPISODES, seed=10_000 + seed).return_mean
    seconds = round(time.perf_counter() - began, 1)
    who = {"env": env, "algorithm": algorithm, "method": method, "seed": seed}
    return who | {"score": score, "curve": curve, "seconds": seconds}


METHODS = {"tournament": "tournament", "truncation": "truncation", "random": "keep", "tpe": ""}
"""Selection of each."""


def report(cells: list[Tree]) -> None:
    """Final score and area under the curve, with intervals."""
    records = [
        RunRecord(f"{c['env']}, {c['algorithm']}", c["method"], c["seed"], *map(tuple, zip(*c["curve"], strict=True)))
        for c in cells
    ]
    finals = [
        record._replace(returns=(*record.returns[:-1], c["score"])) for record, c in zip(records, cells, strict=True)
    ]
    known = {
        f"{env}, {algorithm}": (task.random, task.good) for env, task in TASKS.items() for algorithm in ("ppo", "grpo")
    }
    found = compare_records(finals, {name: known[name] for name in {record.environment for record in finals}})
    for one in found.environments:
        print(f"{one.environment}: IQM of the score; of the area under the curve")
        for m in one.methods:
            print(
                f"  {m.method:12} {shown(m.iqm)}   {shown(m.mean_height)}   ({len(m.seeds)} seeds, best run {max(m.scores):.1f})"
            )
    if (overall := found.overall) is not None:
        for o in overall.methods:
            print(f"overall, normalised: {o.method:12} {shown(o.iqm)}")
        for i in overall.improvements:
            print(f"overall: a search by {i.method} is above one by {i.other} with probability {shown(i.probability)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", help="environments whose id contains this")
    parser.add_argument("--algorithms", nargs="+", default=["ppo", "grpo"])
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--workers", type=int, default=1, help="processes of a population")
    parser.add_argument("--report", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--smallest", action="store_true", help="two members, one round of few steps")
    args = parser.parse_args()
    cells = cells_of.load(args.out)
    smallest = {"round_steps": 2_048, "members": 2, "rounds": 1} if args.smallest else {}
    if args.report:
        report(cells)
        return
    os.nice(19)
    for seed in range(FIRST_SEED, FIRST_SEED + args.seeds):
        for env, algorithm, method in itertools.product(TASKS, args.algorithms, args.methods):
            key = (env, algorithm, method, seed)
            if args.only not in env or any((c["env"], c["algorithm"], c["method"], c["seed"]) == key for c in cells):
                continue
            cells.append(run(*key, TASKS[env]._replace(**smallest), args.workers))
            cells_of.save(args.out, cells)
            print(cells[-1], flush=True)


if __name__ == "__main__":
    main()
