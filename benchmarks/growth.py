"""How training time grows: env steps per second over environments, episode length, group size and network width.

PPO and GRPO train on one thread, and one size changes at a time:

- environments: Gymnasium's ``CartPole-v1``; an iteration takes at least 4,096 steps, and 8 of each environment;
- episode length: 64 rows of a simulator in torch whose episodes end at their limit. GRPO's iterations are whole
  episodes, PPO's windows are as long as one (but at least 64 steps);
- group size: GRPO on ``CartPole-v1`` in 256 rows;
- width of each of the two hidden layers: ``CartPole-v1`` in 64 rows.

Training time must not grow faster than its work. With more environments, longer episodes or larger groups the time per
step must not grow. With wider networks it may grow with the square of the width. ``exponent`` in the results is this
growth from the size before: the logarithm of the ratio of times by that of sizes. Above 0 (width: 2) it is
super-linear.

Timing starts at the end of the third iteration, or of the second if that is 3 seconds behind the start. By then the
gradient is compiled and the rollout's storage is allocated. ``cpu_us`` is the CPU time per step; far below
``us_per_step`` means that the machine was busy. The learning rate is so small that the policy stays as it is, else
episodes would grow longer at some sizes than at others. Each run is a process of its own; points take turns, and the
median of the rounds counts.

    python benchmarks/growth.py                 # or: --repeats 1 --only width
    python benchmarks/growth.py --report        # table and plot from the results alone
"""

import argparse
import json
import math
import os
import platform
import resource
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal, NamedTuple

os.environ["OMP_NUM_THREADS"] = "1"  # of the processes that this one starts

RESULT = Path(__file__).parent / "results" / "growth.json"
PLOT = Path(__file__).parents[1] / "docs" / "images" / "growth.png"

ITERATION = 4096
MINIBATCH = 2048
EPOCHS = 2
LEARNING_RATE = 1e-9
WARM_UP_ITERATIONS = 3
LEAST_WARM_UP_ITERATIONS = 2
"""The second one compiles."""
WARM_UP_SECONDS = 3.0

Algorithm = Literal["ppo", "grpo"]
ALGORITHMS: tuple[Algorithm, ...] = ("ppo", "grpo")
Measured = dict[str, float]


class Axis(NamedTuple):
    """What is changed, to what, and what it may cost."""

    title: str
    sizes: tuple[int, ...]
    algorithms: tuple[Algorithm, ...] = ALGORITHMS
    allowed: int = 0
    """A step's time may grow as this power of the size."""


AXES = {
    "envs": Axis("environments (CartPole-v1)", (1, 8, 64, 512, 4096, 8192)),
    "length": Axis("episode length (64 rows of a walk in torch)", (10, 100, 1_000, 10_000)),
    "group": Axis("group size (CartPole-v1, 256 rows)", (2, 8, 32, 128, 256), ("grpo",)),
    "width": Axis("width of both hidden layers (CartPole-v1, 64 rows)", (16, 64, 256, 1024), allowed=2),
}


class Point(NamedTuple):
    """One training."""

    axis: str
    size: int
    algorithm: Algorithm


class Setup(NamedTuple):
    """What a point trains on."""

    rows: int
    num_steps: int
    group_size: int = 8
    width: int = 64
    length: int | None = None
    """Of the episodes of the simulator in torch; None: CartPole."""


def setup(axis: str, size: int) -> Setup:
    match axis:
        case "envs":
            return Setup(size, max(8, ITERATION // size))
        case "length":
            return Setup(64, max(ITERATION // 64, size), group_size=4, length=size)
        case "group":
            return Setup(256, 64, group_size=size)
        case _:
            return Setup(64, ITERATION // 64, width=size)


def run(point: Point, seconds: float, profile: bool = False) -> Measured:
    """What a training took, once it has run for that long (and a whole iteration)."""
    import torch

    torch.set_num_threads(1)
    clock = _clock(seconds, profile)
    trainer = _trainer(point, clock)
    trainer.train()
    steps, spent = clock.steps, clock.spent
    return {
        "steps_per_second": round(steps / spent, 1),
        "us_per_step": round(spent / steps * 1e6, 3),
        "cpu_us": round(clock.cpu / steps * 1e6, 3),
        "collect_us": round(clock.collecting / steps * 1e6, 3),
        "update_us": round(clock.updating / steps * 1e6, 3),
        "idle_fraction": round(trainer.metrics["rollout/idle_fraction"], 4),
        "peak_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
        "iteration_steps": round(steps / clock.iterations),
        "iterations": clock.iterations,
    }


def _trainer(point: Point, clock: Any) -> Any:
    import torch

    import groupwise as gw

    torch.manual_seed(0)  # of the policy's weights, on which the length of CartPole's episodes depends

    chosen = setup(point.axis, point.size)
    grouped = point.algorithm == "grpo"
    env = _length_env(chosen) if chosen.length else _cartpole(chosen, grouped)
    common: dict[str, Any] = {
        "num_steps": chosen.num_steps,
        "num_epochs": EPOCHS,
        "minibatch_size": min(MINIBATCH, chosen.rows * chosen.num_steps),
        "learning_rate": LEARNING_RATE,
    }
    cfg: Any = gw.GRPOCfg(group_size=chosen.group_size, credit=_credit(), **common) if grouped else gw.PPOCfg(**common)
    policy = gw.ActorCritic(
        env.observation_space,
        env.action_space,
        gw.PolicyCfg(hidden_sizes=(chosen.width, chosen.width)),
        actor_only=grouped,
        gamma=cfg.gamma,
    )
    buffer = gw.RolloutBuffer(
        chosen.rows, chosen.num_steps, obs_spec=env.obs_spec, action_spec=policy.action_spec, value=not grouped
    )
    collector: Any = (
        gw.GroupCollector(env, policy, group_size=chosen.group_size, seed=0)
        if grouped
        else gw.VectorCollector(env, policy, seed=0)
    )
    algorithm = (gw.GRPO if grouped else gw.PPO)(cfg, policy)
    return gw.Trainer(
        algorithm, collector, buffer, num_steps=chosen.num_steps, total_steps=10**12, seed=0, callbacks=[clock]
    )


def _credit() -> Any:
    """The comparison per time step that the presets for control have."""
    import groupwise as gw

    return gw.CreditCfg(group_key="group_step", returns="return_to_go", scale="batch_std")


def _cartpole(chosen: Setup, grouped: bool) -> Any:
    import groupwise as gw

    return gw.make_env(gw.EnvCfg(id="CartPole-v1", num_envs=chosen.rows), grouped=grouped)


def _length_env(chosen: Setup) -> Any:
    """A walk on a line that never terminates."""
    import numpy as np
    import torch
    from gymnasium import spaces

    import groupwise as gw

    class Walk(gw.TorchGroupEnv):
        def initial(self, random: Any) -> torch.Tensor:
            return random.uniform(4, low=-1.0, high=1.0)

        def transition(self, state: Any, action: torch.Tensor, random: Any) -> tuple[Any, torch.Tensor, torch.Tensor]:
            state = (state + 0.2 * action[:, None] - 0.1).clamp(-1.0, 1.0)
            return state, -state[:, 0].abs(), torch.zeros(len(action), dtype=torch.bool)

    return Walk(
        chosen.rows,
        env_id="Walk",
        observation_space=spaces.Box(-1.0, 1.0, (4,), np.float32),
        action_space=spaces.Discrete(2),
        max_episode_steps=chosen.length,
    )


def _clock(seconds: float, profile: bool) -> Any:
    """A callback that starts at the end of the first iteration, and stops the training when it is over."""
    import cProfile

    from groupwise.training.trainer import Callback

    class Clock(Callback):
        iterations = steps = 0
        collecting = updating = spent = cpu = 0.0
        started: tuple[float, float, int] | None = None
        """Seconds, seconds of the processor and steps at the end of the warm-up."""
        profiler = cProfile.Profile() if profile else None

        def on_iteration_end(self, trainer: Any, rollout: Any, metrics: dict[str, float]) -> None:
            now, cpu = time.perf_counter(), time.process_time()
            if self.started is None:
                enough = trainer.iteration >= LEAST_WARM_UP_ITERATIONS and trainer.seconds >= WARM_UP_SECONDS
                if enough or trainer.iteration >= WARM_UP_ITERATIONS:
                    self.started = now, cpu, trainer.env_steps
                    if self.profiler:
                        self.profiler.enable()
                return
            self.iterations += 1
            self.collecting += metrics["time/collect_seconds"]
            self.updating += metrics["time/update_seconds"]
            self.spent, self.cpu, self.steps = (
                now - self.started[0],
                cpu - self.started[1],
                trainer.env_steps - self.started[2],
            )
            if self.spent >= seconds:
                trainer.stop("measured")
                if self.profiler:
                    self.profiler.disable()
                    self.profiler.dump_stats("growth.prof")

    return Clock()


def points(only: str) -> list[Point]:
    return [
        Point(name, size, algorithm)
        for name, axis in AXES.items()
        if only in name
        for size in axis.sizes
        for algorithm in axis.algorithms
    ]


def measure(chosen: list[Point], repeats: int, seconds: float, out: Path) -> None:
    """Run the points in rounds, and keep the medians, along with what is known of other points."""
    taken: dict[Point, list[Measured]] = {point: [] for point in chosen}
    context = get_context("forkserver")  # what is imported once need not be imported by each run
    context.set_forkserver_preload(["torch", "gymnasium", "groupwise", "groupwise.training.trainer"])
    with ProcessPoolExecutor(1, mp_context=context, max_tasks_per_child=1) as pool:
        for _ in range(repeats):
            for point in chosen:
                taken[point].append(found := pool.submit(run, point, seconds).result())
                print(f"{point.axis:7} {point.size:6,} {point.algorithm:4} {found['us_per_step']:9.2f} us", flush=True)
    _write({point: _summary(rounds) for point, rounds in taken.items()}, repeats, out)


def _summary(rounds: list[Measured]) -> dict[str, Any]:
    """Medians, and each round's times of a step."""
    medians = {key: round(statistics.median(found[key] for found in rounds), 4) for key in rounds[0]}
    each = {"rounds_us": "us_per_step", "rounds_cpu_us": "cpu_us"}
    return medians | {name: [found[key] for found in rounds] for name, key in each.items()}


def _write(found: dict[Point, dict[str, Any]], repeats: int, out: Path) -> None:
    known = {Point(r["axis"], r["size"], r["algorithm"]): r for r in _read(out)}
    known |= {point: point._asdict() | {"repeats": repeats} | summary for point, summary in found.items()}
    ordered = [known[point] for point in points("") if point in known]
    result = {
        "what": "whole training on one thread, medians; microseconds per env step, exponents of their growth",
        "machine": {"cpus": os.cpu_count(), "processor": platform.machine(), "python": platform.python_version()},
        "points": ordered,
    }
    _add_exponents(ordered)
    out.write_text(json.dumps(result, indent=2) + "\n")


def _add_exponents(rows: list[dict[str, Any]]) -> None:
    before: dict[tuple[str, str], dict[str, Any]] = {}
    for row in rows:
        line = row["axis"], row["algorithm"]
        smaller = before.get(line)
        row["exponent"] = smaller and round(
            math.log(row["us_per_step"] / smaller["us_per_step"]) / math.log(row["size"] / smaller["size"]), 3
        )
        before[line] = row


def _read(out: Path) -> list[dict[str, Any]]:
    return json.loads(out.read_text())["points"] if out.exists() else []


def report(out: Path) -> None:
    """Print the table and draw the plot."""
    rows = _read(out)
    print(table(rows))
    _plot(rows, PLOT if out == RESULT else out.with_suffix(".png"))


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| | size | algorithm | steps/s | us per step | CPU us | collecting | updating | exponent | idle | peak MiB |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        exponent = "" if row["exponent"] is None else f"{row['exponent']:+.2f}"
        cells = (
            AXES[row["axis"]].title,
            f"{row['size']:,}",
            row["algorithm"].upper(),
            f"{row['steps_per_second']:,.0f}",
            f"{row['us_per_step']:,.1f}",
            f"{row['cpu_us']:,.1f}",
            f"{row['collect_us']:,.1f}",
            f"{row['update_us']:,.1f}",
            exponent,
            f"{row['idle_fraction']:.0%}",
            f"{row['peak_mib']:,.0f}",
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


COLORS = {"ppo": "#1f77b4", "grpo": "#d95f02"}


def _plot(rows: list[dict[str, Any]], path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 7), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(2, 2, sharey=True)
    for number, (name, axis) in enumerate(AXES.items()):
        panel = panels.flat[number]
        lines = {a: [row for row in rows if row["axis"] == name and row["algorithm"] == a] for a in axis.algorithms}
        _dress(panel, axis, is_left=number % 2 == 0)
        ends = sorted((line[-1]["steps_per_second"], algorithm) for algorithm, line in lines.items() if line)
        is_close = len(ends) == 2 and ends[1][0] < 1.6 * ends[0][0]
        for place, (_, algorithm) in enumerate(ends):
            _line(panel, algorithm, lines[algorithm], lift=(14 * place - 7) if is_close else 0)
        if axis.allowed and ends:
            _guide(panel, axis, ends[0][0])
    figure.suptitle(
        "Whole training on one thread. Level means linear growth; for the width, so does the dotted slope.",
        fontsize=10.5,
        color="0.3",
    )
    figure.savefig(path)


def _line(panel: Any, algorithm: str, line: list[dict[str, Any]], lift: float) -> None:
    sizes = [row["size"] for row in line]
    rates = [row["steps_per_second"] for row in line]
    panel.plot(sizes, rates, "o-", color=COLORS[algorithm], linewidth=1.8, markersize=5)
    panel.annotate(
        algorithm.upper(),
        (sizes[-1], rates[-1]),
        xytext=(8, lift),
        textcoords="offset points",
        va="center",
        fontsize=11,
        color=COLORS[algorithm],
        fontweight="bold",
    )


def _dress(panel: Any, axis: Axis, *, is_left: bool) -> None:
    from matplotlib.ticker import FuncFormatter, NullLocator

    panel.set_xscale("log")
    panel.set_yscale("log")
    crowded = [size for size, larger in pairwise(axis.sizes) if math.log(larger / size) < 0.1 * _span(axis)]
    panel.set_xticks(axis.sizes, ["" if size in crowded else f"{size:,}" for size in axis.sizes])
    panel.xaxis.set_minor_locator(NullLocator())
    room = math.exp(_span(axis))
    panel.set_xlim(axis.sizes[0] / room**0.05, axis.sizes[-1] * room**0.17)
    panel.set_xlabel(axis.title, fontsize=11)
    panel.tick_params(labelsize=10)
    panel.grid(True, which="major", color="0.9", linewidth=0.8)
    panel.set_axisbelow(True)
    panel.spines[["top", "right"]].set_visible(False)
    panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    if is_left:
        panel.set_ylabel("env steps per second", fontsize=11)
        return
    inverse = _micros, _micros
    other = panel.secondary_yaxis("right", functions=inverse)
    other.set_ylabel("microseconds per env step", fontsize=11)
    other.tick_params(labelsize=10)
    other.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    other.yaxis.set_minor_locator(NullLocator())
    other.spines["right"].set_visible(False)


def _span(axis: Axis) -> float:
    return math.log(axis.sizes[-1] / axis.sizes[0])


def _micros(rate: Any) -> Any:
    """Of a step, at so many steps per second; and the other way round."""
    import numpy as np

    return 1e6 / np.maximum(rate, 1e-9)


def _guide(panel: Any, axis: Axis, rate: float) -> None:
    """Linear growth, somewhat below the line that ends lowest."""
    sizes = axis.sizes[-2:]
    rates = [rate / 3 * (sizes[-1] / size) ** axis.allowed for size in sizes]
    panel.plot(sizes, rates, ":", color="0.4", linewidth=1.3)
    panel.annotate(
        "time as the number of weights",
        (sizes[0], rates[0]),
        xytext=(-6, 0),
        textcoords="offset points",
        ha="right",
        va="center",
        fontsize=10,
        color="0.3",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="axes whose name contains it: " + ", ".join(AXES))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3.0, help="least time that is measured of each run")
    parser.add_argument("--report", action="store_true", help="run nothing")
    parser.add_argument(
        "--profile", nargs=3, metavar=("AXIS", "SIZE", "ALGORITHM"), help="one point; writes growth.prof"
    )
    parser.add_argument("--out", type=Path, default=RESULT, help="results; the plot is then beside them")
    parser.add_argument("--smallest", action="store_true", help="only the first point of the first axis")
    args = parser.parse_args()
    if args.profile:
        axis, size, algorithm = args.profile
        print(run(Point(axis, int(size), algorithm), args.seconds, profile=True))
        return
    if not args.report:
        if args.smallest:
            measure(points(args.only)[:1], 1, 0.0, args.out)
        else:
            measure(points(args.only), args.repeats, args.seconds, args.out)
    report(args.out)


if __name__ == "__main__":
    main()
