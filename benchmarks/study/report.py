"""Rebuilds the study's tables and plots from the committed result files.

python benchmarks/study/report.py            # docs/generated/study.md, docs/images/study.png
"""

import json
from collections.abc import Sequence
from typing import Any

from plan import REFERENCES, TASKS, Task
from run import HERE, RESULTS

from groupwise.report.comparison import (
    Comparison,
    EnvironmentResult,
    MethodResult,
    RunRecord,
    compare_records,
    figure,
    shown,
)
from groupwise.report.comparison_plot import plot_comparison

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
    "ppo": "PPO",
    "sb3_ppo": "PPO of SB3",
}


def results(task: Task) -> list[dict[str, Any]]:
    """The cells that there are, methods in the plan's order."""
    paths = [path for method in task.methods for path in sorted((RESULTS / task.env / method).glob("*.json"))]
    return [json.loads(path.read_text()) for path in paths]


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


def compared() -> Comparison:
    """All environments that have cells of every method of theirs."""
    tasks = [task for task in TASKS if all((RESULTS / task.env / method).is_dir() for method in task.methods)]
    records = [record(result) for task in tasks for result in results(task)]
    return compare_records(records, REFERENCES)


def table(lines: Sequence[Sequence[str]]) -> str:
    """Markdown, the first line its head."""
    head, *rows = [f"| {' | '.join(cells)} |" for cells in lines]
    return "\n".join([head, "|" + "---|" * len(lines[0]), *rows])


def against(found: EnvironmentResult, method: str, other: str) -> str:
    """How likely a run of ``method`` ends above one of ``other``."""
    for pair in found.improvements:
        low, high = pair.probability.interval or (float("nan"),) * 2
        if (pair.method, pair.other) == (method, other):
            return f"{pair.probability.value:.2f} [{low:.2f}, {high:.2f}]"
        if (pair.other, pair.method) == (method, other):
            return f"{1 - pair.probability.value:.2f} [{1 - high:.2f}, {1 - low:.2f}]"
    return ""


def of_environment(found: EnvironmentResult) -> str:
    """A row for each method; the best of each column that is a claim in bold."""
    best_end = max(m.iqm.value for m in found.methods)
    best_area = max(m.mean_height.value for m in found.methods)

    def row(m: MethodResult) -> list[str]:
        end, area = shown(m.iqm), shown(m.mean_height)
        return [
            m.method,
            f"**{end}**" if m.iqm.value == best_end else end,
            figure(m.least),
            f"**{area}**" if m.mean_height.value == best_area else area,
            against(found, m.method, NAMES["ppo"]),
            f"{m.seconds:.0f}" if m.seconds else "",
            f"{m.memory_mib:.0f}" if m.memory_mib else "",
        ]

    head = ["", "final return, IQM", "least", "mean of the curve, IQM", "ends above our PPO", "s", "MiB"]
    seeds = sorted({len(m.seeds) for m in found.methods})
    count = f"{seeds[0]}" if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]}"
    title = f"### {found.environment}\n\n{found.methods[0].env_steps:,.0f} steps or up to 3 % more, {count} seeds."
    return f"{title}\n\n{table([head, *(row(m) for m in found.methods)])}"


def summary(comparison: Comparison) -> str:
    """A row for each environment: the best method without a critic beside both PPOs."""
    lines = [["", "best without a critic", "its final return, IQM", "our PPO", "SB3's PPO", "ends above our PPO"]]
    for found in comparison.environments:
        by_name = {m.method: m for m in found.methods}
        free = [m for m in found.methods if m.method not in {NAMES[name] for name in WITH_CRITIC}]
        best = max(free, key=lambda m: m.iqm.value)
        ours, theirs = (by_name[NAMES[name]] for name in WITH_CRITIC)
        lines.append(
            [
                found.environment,
                best.method,
                shown(best.iqm),
                shown(ours.iqm),
                shown(theirs.iqm),
                against(found, best.method, ours.method),
            ]
        )
    return table(lines)


def main() -> None:
    comparison = compared()
    overall = comparison.overall
    assert overall is not None
    scale = [["", "IQM over environments", "mean"]]
    scale += [[m.method, shown(m.iqm), figure(m.mean)] for m in overall.methods]
    parts = [summary(comparison), table(scale), *(of_environment(found) for found in comparison.environments)]
    TABLES.write_text("\n\n".join(parts) + "\n")
    plot_comparison(comparison, PLOT)
    print(TABLES.read_text())


if __name__ == "__main__":
    main()
