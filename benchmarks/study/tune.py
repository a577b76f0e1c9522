"""Chooses each method's settings with the same budget: 12 trials on each of two environments, around the presets.

Eight settings (the preset's, and seven drawn from ``SPACE``) are tried on one seed, the best two of them on two more seeds;
the best mean score of three wins. Methods that share a setting's name draw the same values. Trials that are recorded are not repeated.

    python benchmarks/study/tune.py                    # results/study_tuning.json, then tuned.json
"""

import argparse
import json
import os
import random
import statistics
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from typing import Any

from cell import digest, settings
from plan import METHODS, task_of
from run import RESULTS, TUNED, Cell, run

TRIALS = RESULTS.parent / "study_tuning.json"
ENVS = {"CartPole-v1": (20.0, 500.0), "Pendulum-v1": (-1200.0, -150.0)}
"""Mean returns that score 0 and 1: about those of random actions and of good policies."""
SPACE: dict[str, tuple[Any, ...]] = {
    "learning_rate": (0.5, 1.0, 2.0),
    "num_epochs": (0.5, 1.0),
    "minibatch_size": (0.5, 1.0, 2.0),
    "schedule": ("none", "linear"),
    "family": (1, 2),
}
"""Factors of the preset's values (``schedule``: the value itself), all as likely. ``family`` is GRPO's group size, or what lambda leaves to 1 where there is one."""
DRAWN = 7
FINALISTS = 2
SEEDS = (1152, 1153, 1154)
"""The first is every setting's, the others the finalists'."""
TUNED_METHODS = tuple(method for method in METHODS if method != "sb3_ppo")
"""Stable-Baselines3's runs at its zoo's settings, which were tuned on each environment."""

Factors = dict[str, Any]
Trial = dict[str, Any]


def candidates(method: str) -> list[Factors]:
    """The preset's, and the drawn ones."""
    generator = random.Random(0)
    family = "one_minus_lambda" if method in ("ppo", "near_states") else "group_size"
    chosen: list[Factors] = [{}]
    configs = [_resolved(method, {})]
    while len(chosen) <= DRAWN:
        drawn = {key: generator.choice(values) for key, values in SPACE.items()}
        factors = {family if key == "family" else key: value for key, value in drawn.items()}
        if (config := _resolved(method, factors)) not in configs:
            chosen.append(factors)
            configs.append(config)
    return chosen


def _resolved(method: str, factors: Factors) -> list[str]:
    return [digest(settings(task_of(env), method, factors)) for env in ENVS]


def score(env: str, result: dict[str, Any]) -> float:
    """Half what is reached, half how soon: the final return and the mean of the curve, 0 at random and 1 at good."""
    low, high = ENVS[env]
    reached, on_the_way = float(result["final"]), statistics.mean(map(float, result["returns"]))
    return ((reached + on_the_way) / 2 - low) / (high - low)


def tried(trials: list[Trial], method: str, number: int) -> list[float]:
    """Scores of a setting so far."""
    return [trial["score"] for trial in trials if (trial["method"], trial["setting"]) == (method, number)]


def ranked(trials: list[Trial], method: str) -> list[int]:
    """The method's settings, the best first; those on more seeds before the others."""
    numbers = {trial["setting"] for trial in trials if trial["method"] == method}
    scores = {number: tried(trials, method, number) for number in numbers}
    return sorted(numbers, key=lambda number: (-len(scores[number]), -statistics.mean(scores[number])))


def run_all(wanted: list[tuple[str, int, str, int]], trials: list[Trial], jobs: int) -> None:
    """Run what is missing of (method, setting, environment, seed), and write after each."""
    writing = Lock()
    there = {(trial["method"], trial["setting"], trial["env"], trial["seed"]) for trial in trials}

    def one(method: str, number: int, env: str, seed: int) -> None:
        result = run(Cell(env, method, seed), candidates(method)[number])
        trial = {"method": method, "setting": number, "env": env, "seed": seed, "score": round(score(env, result), 4)}
        with writing:
            trials.append(trial | {"final": result["final"], "factors": candidates(method)[number]})
            TRIALS.write_text(
                json.dumps(sorted(trials, key=lambda trial: list(map(str, trial.values()))[:4]), indent=0)
            )
        print(*trial.values(), flush=True)

    with ThreadPoolExecutor(jobs) as pool:
        for job in [pool.submit(one, *case) for case in wanted if case not in there]:
            job.result()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args()
    TRIALS.parent.mkdir(parents=True, exist_ok=True)
    trials: list[Trial] = json.loads(TRIALS.read_text()) if TRIALS.exists() else []
    first = [(method, n, env, SEEDS[0]) for method in TUNED_METHODS for n in range(DRAWN + 1) for env in ENVS]
    run_all(first, trials, args.jobs)
    firsts = [trial for trial in trials if trial["seed"] == SEEDS[0]]
    finalists = {method: ranked(firsts, method)[:FINALISTS] for method in TUNED_METHODS}
    more = [
        (method, n, env, seed)
        for method in TUNED_METHODS
        for n in finalists[method]
        for seed in SEEDS[1:]
        for env in ENVS
    ]
    run_all(more, trials, args.jobs)
    chosen = {method: candidates(method)[ranked(trials, method)[0]] for method in TUNED_METHODS}
    TUNED.write_text(json.dumps(chosen, indent=2) + "\n")


if __name__ == "__main__":
    main()
