"""groupwise beside other libraries: speed of training, and time from a process's start to a trained policy.

Each run is a process of its own, in its library's environment. In each round (a seed) all libraries take turns, so that
the machine's drift hits all. Where a library has several variants (one thread or its default number; its own
settings or fast ones), all are run, until one is clearly beaten, and the one with the best median is reported. A ratio
is of a library to SB3 in the same round.

    make bench-peers                                                 # installs the peers, then all of it
    .venv-peers/bin/python benchmarks/peers/run.py --tasks first_pass --libraries sb3 groupwise-ppo --seeds 700 701
"""

import argparse
import itertools
import json
import math
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from worker import STARTED

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
RESULT = HERE.parent / "results" / "peers.json"
SEEDS = range(700, 705)
SLOWEST = math.inf
"""Seconds of a run that did not pass."""
BEATEN = 1.5
"""A variant so many times worse than its library's best one is not run in further rounds."""


class Library(NamedTuple):
    """How a library's worker is run."""

    worker: str
    environment: str = ".venv-peers"
    threads: tuple[str, ...] = ("1", "default")
    options: tuple[str, ...] = ()


OURS = Library("ours.py", threads=("default",))  # chooses one thread itself
LIBRARIES = {
    "sb3": Library("sb3_ppo.py"),
    "sbx": Library("sbx_ppo.py"),
    "cleanrl": Library("cleanrl_ppo.py"),
    "torchrl": Library("torchrl_ppo.py", ".venv-peers-torchrl"),
    "jax": Library("jax_ppo.py", ".venv-peers-jax"),
    "groupwise-ppo": OURS,
    "groupwise-grpo": OURS._replace(options=("--algorithm", "grpo")),
}
IN_PASSES = tuple(LIBRARIES)
PPO = tuple(name for name in LIBRARIES if name != "groupwise-grpo")


class Task(NamedTuple):
    """What is measured, of whom."""

    what: str
    libraries: tuple[str, ...]
    variants: tuple[str, ...]
    """Arguments of the worker; the best of them counts."""

    @property
    def is_rate(self) -> bool:
        """Env steps per second rather than seconds."""
        return "rate" in self.variants[0]


BOTH = ("sb3", "groupwise-ppo")
PRESETS = ("sb3", "groupwise-ppo", "groupwise-grpo")
TASKS = {
    "zoo_rate": Task(
        "CartPole-v1, settings of SB3's zoo: steps/s",
        ("sb3", "sbx", "groupwise-ppo"),
        ("--task rate --settings zoo",),
    ),
    "first_pass": Task(
        "CartPole-v1, process start to a greedy policy of 475: seconds", IN_PASSES, ("--task first_pass",)
    ),
    "training_pass": Task(
        "CartPole-v1, process start to 475 over the last 100 training episodes: seconds",
        IN_PASSES,
        ("--task training_pass",),
    ),
    "best_rate": Task(
        "CartPole-v1, own or fast settings: steps/s", PPO, ("--task rate", "--task rate --settings fast")
    ),
    "halfcheetah_rate": Task("HalfCheetah-v5: steps/s", BOTH, ("--task rate --env HalfCheetah-v5",)),
    "pendulum_rate": Task("Pendulum-v1: steps/s", BOTH, ("--task rate --env Pendulum-v1",)),
    "acrobot_rate": Task("Acrobot-v1: steps/s", BOTH, ("--task rate --env Acrobot-v1",)),
    "pendulum_score": Task(
        "Pendulum-v1, process start to a greedy policy of -200, own presets: seconds",
        PRESETS,
        ("--task first_pass --env Pendulum-v1",),
    ),
    "acrobot_score": Task(
        "Acrobot-v1, process start to a greedy policy of -100, own presets: seconds",
        PRESETS,
        ("--task first_pass --env Acrobot-v1",),
    ),
    "lunarlander_score": Task(
        "LunarLander-v3, process start to a greedy policy of 200, own presets: seconds",
        PRESETS,
        ("--task first_pass --env LunarLander-v3",),
    ),
}

Runs = list[dict[str, Any]]


def python(environment: str) -> str:
    return str(ROOT / environment / "bin" / "python")


def measure(library: str, variant: str, seed: int, extra: Iterable[str] = ()) -> dict[str, Any]:
    """What the worker printed."""
    known = LIBRARIES[library]
    command = [python(known.environment), "-W", "ignore", str(HERE / known.worker), *variant.split()]
    command += [*known.options, "--seed", str(seed), *extra]
    environ = os.environ | {STARTED: str(time.time())}
    done = subprocess.run(command, capture_output=True, text=True, env=environ, cwd=ROOT, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stderr[-3000:]}")
    printed: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return printed


def jobs_of(task: str, libraries: list[str], allowed: list[str]) -> list[tuple[str, str]]:
    """Library and variant of each run of a round."""
    return [
        (name, f"{variant} --threads {threads}")
        for variant, threads in itertools.product(TASKS[task].variants, ("1", "default"))
        for name in TASKS[task].libraries
        if name in libraries and threads in LIBRARIES[name].threads
        if threads in allowed or len(LIBRARIES[name].threads) == 1
    ]


def score(task: str, run: dict[str, Any]) -> float:
    """Steps per second, or seconds."""
    if TASKS[task].is_rate:
        return float(run["steps_per_second"])
    return float(run["seconds"]) if run["reached"] else SLOWEST


def by_variant(task: str, runs: Runs) -> dict[str, dict[str, Runs]]:
    """The runs of each library's variants, the best median first; those run most often before the others."""

    def rank(tried: Runs) -> tuple[int, float]:
        middle = statistics.median(score(task, run) for run in tried)
        return -len(tried), -middle if TASKS[task].is_rate else middle

    groups: dict[str, dict[str, Runs]] = {}
    for run in runs:
        groups.setdefault(run["library"], {}).setdefault(run["variant"], []).append(run)
    return {name: dict(sorted(variants.items(), key=lambda item: rank(item[1]))) for name, variants in groups.items()}


def beaten(task: str, runs: Runs) -> set[tuple[str, str]]:
    """Library and variant of those that further rounds leave out."""
    out = set()
    for name, variants in by_variant(task, runs).items():
        middles = {variant: statistics.median(score(task, run) for run in tried) for variant, tried in variants.items()}
        for variant, middle in middles.items():
            worse = max(middles.values()) / middle if TASKS[task].is_rate else middle / min(middles.values())
            if worse > BEATEN:  # false for NaN, where no variant passed
                out.add((name, variant))
    return out


def by_processor(run: dict[str, Any]) -> dict[str, Any]:
    """The run with seconds of the processor in place of the clock's."""
    replaced = {"seconds": run["cpu_seconds"], "steps_per_second": run["steps_per_cpu_second"]}
    if "cpu_seconds" in (further := run.get("further", {})):
        replaced["further"] = further | {"seconds": further["cpu_seconds"]}
    return run | replaced


def spread(values: list[float], digits: str) -> str:
    """Median, least and most."""
    return f"{statistics.median(values):{digits}} ({min(values):{digits}} to {max(values):{digits}})"


def rates(task: str, runs: Runs) -> str:
    """Markdown: a row for each library with its steps per second in a task that ends with a score."""
    groups = by_variant(task, runs)
    chosen = {name: next(iter(variants.values())) for name, variants in groups.items()}
    rate = {name: {run["seed"]: run["steps_per_second"] for run in tried} for name, tried in chosen.items()}
    lines = ["| | steps/s | to SB3 | steps to the score | further score: seconds |", "|" + "---|" * 5]
    for name, tried in chosen.items():
        peer = rate.get("sb3", {})
        pairs = [mine / peer[seed] for seed, mine in rate[name].items() if seed in peer]
        steps = [float(run["env_steps"]) for run in tried if run["reached"]]
        went = [run["further"] for run in tried if "further" in run]
        later = [float(further.get("seconds", SLOWEST)) for further in went]
        passed = sum(seconds < SLOWEST for seconds in later)
        on = f"{went[0]['score']}: {statistics.median(later):.1f}, {passed} of {len(later)}" if later else ""
        cells = [name, spread(list(rate[name].values()), ",.0f"), spread(pairs, ".2f") if pairs else ""]
        cells += [spread(steps, ",.0f") if steps else "", on]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def table(task: str, runs: Runs) -> str:
    """Markdown: a row for each library."""
    chosen = {name: next(iter(variants.values())) for name, variants in by_variant(task, runs).items()}
    peer = {run["seed"]: score(task, run) for run in chosen.get("sb3", [])}
    digits = ",.0f" if TASKS[task].is_rate else ".1f"
    lines = [
        f"{TASKS[task].what}",
        "",
        "| | median | least to most | to SB3 | passed | MiB | variant |",
        "|" + "---|" * 7,
    ]
    for name, of_library in chosen.items():
        scores = [score(task, run) for run in of_library]
        pairs = [(score(task, run), peer[run["seed"]]) for run in of_library if run["seed"] in peer]
        ratios = [ours / theirs for ours, theirs in pairs if max(ours, theirs) < SLOWEST]
        ratio = spread(ratios, ".2f") if ratios else ""
        passed = "" if TASKS[task].is_rate else f"{sum(run['reached'] for run in of_library)} of {len(of_library)}"
        memory = statistics.median(run["memory_mib"] for run in of_library)
        variant = of_library[0]["variant"]
        if shares := [run["env_share"] for run in of_library if "env_share" in run]:
            variant += f"; {statistics.median(shares):.0%} of the time in the environments' step"
        extent = f"{min(scores):{digits}} to {max(scores):{digits}}"
        middle = f"{statistics.median(scores):{digits}}"
        lines.append(f"| {name} | {middle} | {extent} | {ratio} | {passed} | {memory:.0f} | {variant} |")
    return "\n".join(lines)


def versions(environment: str) -> dict[str, str]:
    """Of the packages that make a difference."""
    names = ["groupwise", "gymnasium", "gymnax", "jax", "numpy", "sbx-rl", "stable_baselines3", "torch", "torchrl"]
    code = (
        "import importlib.metadata as m, json;"
        f"print(json.dumps({{d.name: d.version for d in m.distributions() if d.name in {names}}}))"
    )
    found: dict[str, str] = json.loads(subprocess.check_output([python(environment), "-c", code]))
    return dict(sorted(found.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--libraries", nargs="+", choices=LIBRARIES, default=list(LIBRARIES))
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS), help="a round each")
    parser.add_argument("--threads", nargs="+", choices=["1", "default"], default=["1", "default"], help="of the peers")
    parser.add_argument(
        "--clock",
        choices=["wall", "cpu"],
        default="wall",
        help="of the tables; both are recorded, cpu is of all threads",
    )
    parser.add_argument("--fresh", action="store_true", help="repeat rounds that are recorded already")
    parser.add_argument("--out", type=Path, default=RESULT)
    args = parser.parse_args()
    before: dict[str, Any] = json.loads(args.out.read_text()) if args.out.exists() else {}
    environments = sorted({LIBRARIES[name].environment for name in args.libraries})
    result: dict[str, Any] = {
        "machine": {"cpus": os.cpu_count(), "processor": platform.machine(), "python": platform.python_version()},
        "versions": before.get("versions", {}) | {name: versions(name) for name in environments},
        "runs": before.get("runs", {}),
    }
    for name in args.libraries:  # so that files are in the page cache when the first round begins
        if LIBRARIES[name].options == ():
            measure(name, "--task rate", 0, ["--steps", "1"])
    args.out.parent.mkdir(exist_ok=True)
    for seed, task in itertools.product(args.seeds, args.tasks):
        runs = result["runs"].setdefault(task, [])
        left_out = beaten(task, [run for run in runs if run["seed"] != seed])
        jobs = [job for job in jobs_of(task, args.libraries, args.threads) if job not in left_out]
        recorded = {(run["library"], run["variant"]) for run in runs if run["seed"] == seed}
        if recorded >= set(jobs) and not args.fresh:
            continue
        runs[:] = [run for run in runs if run["seed"] != seed or (run["library"], run["variant"]) not in jobs]
        for library, variant in jobs:
            run = {"library": library, "variant": variant, **measure(library, variant, seed)}
            runs.append(run)
            print(f"{seed} {library:15} {variant}: {score(task, run):,.1f}", flush=True)
            args.out.write_text(json.dumps(result, indent=1) + "\n")
    for task in args.tasks:
        runs = result["runs"][task]
        runs = [by_processor(run) for run in runs if "cpu_seconds" in run] if args.clock == "cpu" else runs
        print(f"\n{table(task, runs)}")
        if task.endswith("_score"):
            print(f"\n{rates(task, runs)}")
    print(f"\n-> {args.out}")


if __name__ == "__main__":
    main()
