"""Ablation of GRPO on small control: rules for early finishers, shared starts, group sizes, branching.

Every variant changes one thing of the preset in ``study/presets``, GRPO's comparison per time step. Seeds start at 400; tuning never saw them. The
greedy policy is evaluated during training, on episodes of its own. Runs go to ``results/ablation.json``, one by one; a
run that is there already is not repeated.

    python benchmarks/ablation.py                  # run what is missing, then table and plot
    python benchmarks/ablation.py --report         # table and plot from the committed runs alone
    python benchmarks/ablation.py --only CartPole  # the tasks whose name contains it
"""

import argparse
import json
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

RESULT = Path(__file__).parent / "results" / "ablation.json"
PRESETS = Path(__file__).parent / "study" / "presets"
DOCS = Path(__file__).parents[1] / "docs"
TABLE = DOCS / "generated" / "ablation.md"
PLOT = DOCS / "images" / "ablation.png"

FIRST_SEED = 400
OVERSHOOT = 0.03
"""Iterations finish the groups they opened, so runs are told to stop this share of the budget early."""


class Task(NamedTuple):
    """An environment, its budget, and the score that counts as solved."""

    env: str
    steps: int
    seeds: int
    score: float
    interval: int
    """Steps between evaluations."""
    episodes: int
    """Of each evaluation."""
    variants: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{self.env}, {self.steps:,} steps"


class Variant(NamedTuple):
    """One change of the preset."""

    axis: str
    title: str
    algorithm: dict[str, Any] = {}
    shared: bool = True
    """Whether the members of a group start in the same state."""
    name: str = "grpo"


BRANCHES = {"points": 2, "horizon": 100, "trained_steps": 10}
VARIANTS = {
    "preset": Variant("preset", "the preset"),
    "absorb": Variant("early finisher", "absorb", {"credit": {"finished_members": "zero"}}),
    "trajectory": Variant("early finisher", "trajectory", {"credit": {"finished_members": "trajectory"}}),
    "lone_trajectory": Variant("early finisher", "mask, lone: trajectory", {"credit": {"singleton": "trajectory"}}),
    "unshared": Variant("starts", "not shared", shared=False),
    "size_2": Variant("group size", "2", {"group_size": 2}),
    "size_8": Variant("group size", "8", {"group_size": 8}),
    "branching": Variant(
        "branching", "2 points, horizon 100, 10 steps trained", {"collection": {"branching": BRANCHES}}
    ),
    "ppo": Variant("preset", "PPO's preset", name="ppo"),
}
TASKS = (
    Task("CartPole-v1", 100_000, 25, 475.0, 2_000, 100, ("preset", "ppo")),
    Task("CartPole-v1", 50_000, 25, 475.0, 2_000, 100, tuple(VARIANTS)),
    Task("Acrobot-v1", 100_000, 10, -100.0, 5_000, 20, tuple(VARIANTS)),
)

Curve = dict[str, list[float]]


def run(task: Task, variant: Variant, seed: int) -> Curve:
    """Steps and greedy returns of one training run."""
    import torch

    from groupwise import config
    from groupwise.config.run import EvaluationCfg
    from groupwise.engines.base import Engine
    from groupwise.training.build import build_components
    from groupwise.training.components import UserObjects
    from groupwise.training.env_evaluator import EnvEvaluator
    from groupwise.training.trainer import Trainer

    torch.set_num_threads(1)
    algorithm = {"name": variant.name, **variant.algorithm}
    preset = PRESETS / f"{task.env}.{variant.name}.json"
    cfg = config.load_config(preset, algorithm, seed=seed, total_steps=round(task.steps * (1 - OVERSHOOT)))
    parts = build_components(cfg, UserObjects(), Engine())
    if not variant.shared:
        parts.env.start = _apart(parts.env.start)  # type: ignore[attr-defined]
    evaluated = cfg.model_copy(update={"evaluation": EvaluationCfg(episodes=task.episodes)})
    evaluator = EnvEvaluator(evaluated, UserObjects(), parts.policy, seed=10_000 + seed)
    curve: Curve = {"steps": [], "return": []}
    Trainer(
        parts.algorithm,
        parts.collector,
        parts.buffer,
        num_steps=cfg.algorithm.num_steps,
        total_steps=cfg.total_steps,
        seed=seed,
        callbacks=[_recorder(task, evaluator, curve)],
    ).train()
    return curve


def _apart(start: Any) -> Any:
    """``GroupEnv.start`` with each member's own seed in place of the group's."""

    def started(mask: Any, start_seed: Any, noise_seed: Any) -> Any:
        return start(mask, noise_seed, noise_seed)

    return started


def _recorder(task: Task, evaluator: Any, curve: Curve) -> Any:
    from groupwise.training.base import Callback

    class Recorder(Callback):
        due = task.interval

        def on_iteration_end(self, trainer: Any, rollout: Any, metrics: Any) -> None:
            if trainer.env_steps < self.due and not trainer.is_done():
                return
            self.due = (trainer.env_steps // task.interval + 1) * task.interval
            curve["steps"].append(trainer.env_steps)
            curve["return"].append(round(evaluator().return_mean, 2))

    return Recorder()


def first_pass(curve: Curve, score: float) -> float:
    """Steps at the first evaluation that reached the score; infinite if none did."""
    return next((s for s, r in zip(curve["steps"], curve["return"], strict=True) if r >= score), float("inf"))


def interval(values: Iterable[float], statistic: Any) -> tuple[float, float]:
    """Bootstrap interval (95 %, percentile) of a statistic over seeds."""
    array = np.asarray(list(values))
    draws = array[np.random.default_rng(0).integers(len(array), size=(10_000, len(array)))]
    low, high = np.quantile(statistic(draws, axis=1), [0.025, 0.975], method="nearest")
    return float(low), float(high)


def measure(tasks: Iterable[Task], jobs: int) -> None:
    """Run what is missing, and keep every run as soon as it is there."""
    results = _read()
    with ProcessPoolExecutor(jobs) as pool:
        for task in tasks:
            for name in task.variants:
                variant = VARIANTS[name]
                known = results.setdefault(task.name, {}).setdefault(name, {})
                seeds = [s for s in range(FIRST_SEED, FIRST_SEED + task.seeds) if str(s) not in known]
                running = {seed: pool.submit(run, task, variant, seed) for seed in seeds}
                for seed, future in running.items():
                    known[str(seed)] = future.result()
                    RESULT.write_text(json.dumps(results) + "\n")
                print(_row(task, variant, list(known.values())), flush=True)


def _read() -> dict[str, dict[str, dict[str, Curve]]]:
    return json.loads(RESULT.read_text()) if RESULT.exists() else {}


HEADER = (
    "| | variant | seeds | first pass, median steps (95 %) | passed | at the end: mean (95 %) | least | solved at the end |\n"
    "|---|---|---|---|---|---|---|---|"
)


def _row(task: Task, variant: Variant, curves: list[Curve]) -> str:
    firsts, finals = [first_pass(c, task.score) for c in curves], [c["return"][-1] for c in curves]
    low, high = interval(firsts, np.median)
    worst, best = interval(finals, np.mean)
    cells = (
        variant.axis,
        variant.title,
        len(curves),
        f"{_steps(float(np.median(firsts)))} ({_steps(low)} to {_steps(high)})",
        f"{sum(np.isfinite(firsts))} of {len(curves)}",
        f"{np.mean(finals):.1f} ({worst:.1f} to {best:.1f})",
        f"{min(finals):.1f}",
        f"{sum(f >= task.score for f in finals)} of {len(curves)}",
    )
    return "| " + " | ".join(map(str, cells)) + " |"


def _steps(value: float) -> str:
    return f"{value:,.0f}" if np.isfinite(value) else "never"


def report() -> None:
    """Write table and plot from the recorded runs."""
    results = _read()
    TABLE.write_text(table(results), encoding="utf-8")
    _plot(results)


def table(results: dict[str, dict[str, dict[str, Curve]]]) -> str:
    """What each variant reached, a table for each task."""
    parts = ["<!-- Written by benchmarks/ablation.py --report from benchmarks/results/ablation.json. -->"]
    for task in TASKS:
        runs = results.get(task.name, {})
        rows = [_row(task, VARIANTS[name], list(runs[name].values())) for name in task.variants if runs.get(name)]
        if rows:
            parts.append("\n".join([f"**{task.name}**, solved at {task.score:g}", "", HEADER, *rows]))
    return "\n\n".join(parts) + "\n"


def _plot(results: dict[str, dict[str, dict[str, Curve]]]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    varied = {name for name, variant in VARIANTS.items() if variant.axis != "preset"}
    tasks = [task for task in TASKS if varied & results.get(task.name, {}).keys()]
    found = {VARIANTS[name].axis for task in tasks for name in results[task.name]}
    axes_names = [axis for axis in dict.fromkeys(v.axis for v in VARIANTS.values()) if axis in found - {"preset"}]
    figure, panels = plt.subplots(
        len(tasks),
        len(axes_names),
        figsize=(4 * len(axes_names), 3.2 * len(tasks)),
        sharex="row",
        sharey="row",
        squeeze=False,
    )
    for task, row in zip(tasks, panels, strict=True):
        runs = results.get(task.name, {})
        for axis, panel in zip(axes_names, row, strict=True):
            names = ["preset", "ppo", *(name for name, v in VARIANTS.items() if v.axis == axis)]
            for name in (n for n in names if runs.get(n)):
                _band(panel, VARIANTS[name], list(runs[name].values()), task)
            panel.set_title(f"{task.env}: {axis}", fontsize=10)
            panel.axhline(task.score, color="0.7", linewidth=0.8, linestyle=":")
            panel.set_xlabel("environment steps (thousands)", fontsize=8)
            panel.tick_params(labelsize=8)
            panel.legend(fontsize=7, frameon=False, loc="lower right")
        row[0].set_ylabel("greedy return: median, quartiles", fontsize=8)
    figure.tight_layout()
    figure.savefig(PLOT, dpi=110)
    plt.close(figure)


def _band(panel: Any, variant: Variant, curves: list[Curve], task: Task) -> None:
    grid = np.arange(task.interval, task.steps + 1, task.interval)
    values: npt.NDArray[np.float64] = np.stack([np.interp(grid, c["steps"], c["return"]) for c in curves])
    low, middle, high = np.quantile(values, [0.25, 0.5, 0.75], axis=0)
    style = {"preset": ("0.1", "-"), "ppo": ("0.5", "--")}
    color, line = style.get("ppo" if variant.name == "ppo" else variant.axis, (None, "-"))
    (drawn,) = panel.plot(grid / 1000, middle, line, color=color, label=variant.title, linewidth=1.4)
    panel.fill_between(grid / 1000, low, high, color=drawn.get_color(), alpha=0.12, linewidth=0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="tasks whose name contains this")
    parser.add_argument("--report", action="store_true", help="run nothing")
    parser.add_argument("--jobs", type=int, default=2)
    args = parser.parse_args()
    if not args.report:
        measure([task for task in TASKS if args.only in task.name], args.jobs)
    report()


if __name__ == "__main__":
    main()
