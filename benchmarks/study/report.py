"""Rebuilds the study's tables and plots from the committed result files.

python benchmarks/study/report.py            # docs/generated/study.md, docs/images/study.png
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from plan import CANDIDATE, REFERENCES, REMEDIES, TASKS, Task, task_of
from run import HERE, RESULTS

from groupwise.comparison.plot import plot_comparison
from groupwise.comparison.results import (
    ENOUGH_RUNS,
    Comparison,
    EnvironmentResult,
    MethodResult,
    RunRecord,
    compare_records,
    figure,
    shown,
)

DOCS = HERE.parent.parent / "docs"
TABLES = DOCS / "generated" / "study.md"
PLOT = DOCS / "images" / "study.png"
WITH_CRITIC = ("ppo", "sb3_ppo")
NAMES = {
    "outcome": "outcome",
    "leave_one_out": "leave-one-out",
    "group_return_to_go": "return-to-go over the group",
    "step_mask": "per time step, the running only",
    "step_absorb": "per time step, ended ones absorbed",
    "step_trajectory": "per time step, else the trajectory's",
    "branching": "branching",
    "near_states": "near states",
    "ppo": "PPO",
    "sb3_ppo": "PPO of SB3",
}


def results(task: Task) -> list[dict[str, Any]]:
    """The cells of the methods that have all their seeds, in the plan's order."""
    found = []
    for method in complete(task):
        cells = [json.loads(path.read_text()) for path in sorted((RESULTS / task.env / method).glob("*.json"))]
        if len({cell.get("settings") for cell in cells}) > 1:
            raise SystemExit(f"{task.env}, {method}: cells of several settings; fix: remove those of the older ones")
        found += cells
    return found


def record(result: dict[str, Any]) -> RunRecord:
    """The curve of a run, whose last point is that of the 100 fresh episodes."""
    way = [
        (at, value) for at, value in zip(result["steps"], result["returns"], strict=True) if at < result["env_steps"]
    ]
    steps, returns = zip(*way, (result["env_steps"], result["final"]), strict=True)
    return RunRecord(
        result["env"],
        NAMES[result["method"]],
        result["seed"],
        steps,
        returns,
        seconds=result["cpu_seconds"],
        memory_mib=result["memory_mib"],
    )


def complete(task: Task) -> list[str]:
    """The methods that have all their seeds."""
    found = {method: len(list((RESULTS / task.env / method).glob("*.json"))) for method in task.methods}
    return [method for method, seeds in found.items() if seeds == task.seeds]


def compared() -> Comparison:
    """All environments where our PPO and a method without a critic have all their seeds."""
    tasks = [task for task in TASKS if "ppo" in complete(task) and {*complete(task)} - {*WITH_CRITIC}]
    records = [record(result) for task in tasks for result in results(task)]
    whole = len(tasks) == len(TASKS) and all(len(complete(task)) == len(task.methods) for task in tasks)
    found = compare_records(records, REFERENCES if whole else None)
    return replace(found, environments=tuple(map(reliable, found.environments)))


def reliable(found: EnvironmentResult) -> EnvironmentResult:
    """Without the intervals of methods of few runs."""
    few = {m.method for m in found.methods if len(m.seeds) < ENOUGH_RUNS}

    def plain(m: MethodResult) -> MethodResult:
        iqm, height = (replace(estimate, interval=None) for estimate in (m.iqm, m.mean_height))
        return replace(m, iqm=iqm, mean_height=height, curve=replace(m.curve, low=None, high=None))

    pairs = tuple(
        replace(pair, probability=replace(pair.probability, interval=None)) if {pair.method, pair.other} & few else pair
        for pair in found.improvements
    )
    return replace(found, methods=tuple(plain(m) if m.method in few else m for m in found.methods), improvements=pairs)


def table(lines: Sequence[Sequence[str]]) -> str:
    """Markdown, the first line its head."""
    head, *rows = [f"| {' | '.join(cells)} |" for cells in lines]
    return "\n".join([head, "|" + "---|" * len(lines[0]), *rows])


def against(found: EnvironmentResult, method: str, other: str) -> str:
    """How likely a run of ``method`` ends above one of ``other``; nothing where one was not run."""
    for pair in found.improvements:
        value, ends = pair.probability.value, list(pair.probability.interval or ())
        if (pair.other, pair.method) == (method, other):
            value, ends = 1 - value, [1 - end for end in reversed(ends)]
        elif (pair.method, pair.other) != (method, other):
            continue
        return f"{value:.2f}" + (f" [{ends[0]:.2f}, {ends[1]:.2f}]" if ends else "")
    return ""


def of_environment(found: EnvironmentResult) -> str:
    """A row for each method."""

    def row(m: MethodResult) -> list[str]:
        return [
            m.method,
            shown(m.iqm),
            figure(m.least),
            shown(m.mean_height),
            against(found, m.method, NAMES["ppo"]),
            f"{m.seconds:.0f}",
            f"{m.memory_mib:.0f}",
        ]

    head = ["", "final return, IQM", "least", "mean of the curve, IQM", "ends above our PPO", "CPU seconds", "MiB"]
    seeds, steps = ([kind(m) for m in found.methods] for kind in (lambda m: len(m.seeds), lambda m: m.env_steps))
    title = f"**{found.environment}.** Steps: {between(steps)}; runs: {between(seeds)}."
    return f"{title}\n\n{table([head, *(row(m) for m in found.methods)])}"


def between(numbers: Sequence[float]) -> str:
    """Least and most."""
    low, high = f"{min(numbers):,.0f}", f"{max(numbers):,.0f}"
    return low if low == high else f"{low} to {high}"


def summary(comparison: Comparison) -> str:
    """A row for each environment: the methods without a critic that stand for all beside both PPOs."""
    shown_methods = (CANDIDATE, *REMEDIES, *WITH_CRITIC)
    free = {NAMES[name] for name in NAMES if name not in WITH_CRITIC}
    ours = [f"{NAMES[name]} ends above our PPO" for name in (CANDIDATE, *REMEDIES)]
    lines = [["", *(NAMES[name] for name in shown_methods), *ours, "best without a critic afterwards"]]
    for found in comparison.environments:
        by_name = {m.method: m for m in found.methods}
        best = max((m for m in found.methods if m.method in free), key=lambda m: m.iqm.value)
        missing = {name: "not complete" if name in task_of(found.environment).methods else "not run" for name in NAMES}
        ends = [shown(by_name[NAMES[name]].iqm) if NAMES[name] in by_name else missing[name] for name in shown_methods]
        pairs = [against(found, NAMES[name], NAMES["ppo"]) for name in (CANDIDATE, *REMEDIES)]
        lines.append([found.environment, *ends, *pairs, f"{best.method}: {figure(best.iqm.value)}"])
    return table(lines)


def main() -> None:
    comparison = compared()
    parts = [summary(comparison)]
    if comparison.overall is not None:
        scale = [["", "IQM over environments", "mean"]]
        parts.append(table(scale + [[m.method, shown(m.iqm), figure(m.mean)] for m in comparison.overall.methods]))
    if comparison.notes:
        parts.append("\n".join(f"- {note}" for note in comparison.notes))
    parts += [of_environment(found) for found in comparison.environments]
    TABLES.write_text("\n\n".join(parts) + "\n")
    plot_comparison(comparison, PLOT)
    print(TABLES.read_text())


if __name__ == "__main__":
    main()
