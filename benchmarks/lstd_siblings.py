"""What the comparison with siblings would still add to the values of ``lstd``.

GRPO trains as ``lstd_long`` of ``study.py``. At each iteration, the error of the values at a group's start is guessed from
the siblings: the mean of the advantages at their first steps, without the episode itself. Metric: the share of the squared
advantages, over all steps and over first steps, that a line through this guess and 0 explains, one line for each third of
training; below 0 where it falls. Beside it the same with the siblings of another group, which is chance, over the
iterations that have one. Seeds start at 7, apart from those of the study.

    python benchmarks/lstd_siblings.py                     # every run that results/lstd_siblings.json lacks
    python benchmarks/lstd_siblings.py --only Hopper-v5 --seeds 1
    python benchmarks/lstd_siblings.py --table             # what is there, as Markdown
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import cells
import torch
from study import TASKS, settings
from torch import Tensor

import groupwise as gw
from groupwise.data.rollout import transition_view
from groupwise.functional.reduce import gather_segments, segment_sum

RESULT = Path(__file__).parent / "results" / "lstd_siblings.json"
FIRST_SEED = 7
ENVS = ("CartPole-v1", "Pendulum-v1", "Acrobot-v1", "MountainCarContinuous-v0", "Hopper-v5")
"""In the order in which they are run; one seed of Hopper takes a quarter of an hour."""
MEASURES = ("all steps", "all steps, chance", "first steps", "first steps, chance")


def products(values: Tensor, guess: Tensor) -> list[float]:
    """Sums of products of values and guesses: of both, and of each with itself."""
    return [float(values @ guess), float(values @ values), float(guess @ guess)]


def explained(sums: Tensor) -> float:
    """Share of the squares that one line explains in all iterations, from their ``products``, with the slope's sign."""
    both, values, guesses = sums.sum(dim=0).tolist()
    return both * abs(both) / max(values * guesses, 1e-12)


def siblings(score: Tensor, group: Tensor) -> Tensor:
    """Mean score of the other members of each episode's group."""
    num_groups = int(group.max()) + 1
    total, number = (segment_sum(one, group, num_groups) for one in (score, torch.ones_like(score)))
    return (gather_segments(total, group) - score) / (gather_segments(number, group) - 1).clamp(min=1)


class Measure(gw.Callback):
    """Keeps the measures of each iteration."""

    def __init__(self) -> None:
        self.found: list[list[list[float]]] = []

    def on_iteration_end(self, trainer: gw.Trainer, rollout: Any, metrics: dict[str, float]) -> None:
        batch = transition_view(rollout)
        advantage, mask = trainer.algorithm.advantage, batch["loss_mask"]
        assert advantage is not None
        first = mask & (batch["step"] == 0)
        order = batch["episode_id"][first].argsort()
        group = batch["group_id"][first][order]
        start = advantage[first][order].double()
        guess = siblings(start, group)
        several = group.max() > 0
        chance = several * guess.roll(int((group == 0).sum()))  # of the group before
        episode = batch["episode_id"][mask]
        every = advantage[mask].double()
        self.found.append(
            [
                products(every, guess[episode]),
                products(several * every, chance[episode]),
                products(start, guess),
                products(several * start, chance),
            ]
        )


def run(env: str, seed: int, steps: int) -> dict[str, Any]:
    """Train, and return the measures of each third of training."""
    measure = Measure()
    with tempfile.TemporaryDirectory() as folder:
        trained = gw.train(
            **settings(env, "lstd_long", steps),
            seed=seed,
            run_dir=f"{folder}/run",
            logging={"progress": "none"},
            evaluation={"interval": None, "episodes": 20},
            callbacks=[measure],
        )
        final = trained.summary["return_mean"]
    thirds = torch.tensor(measure.found).tensor_split(3)
    shares = {name: [round(explained(third[:, i]), 4) for third in thirds] for i, name in enumerate(MEASURES)}
    return {"env": env, "seed": seed, "final": round(final, 1), "iterations": len(measure.found), "explained": shares}


def table(found: cells.Cells) -> str:
    """Means over seeds in percent, by thirds of training."""
    lines = ["| environment (seeds) | " + " | ".join(MEASURES) + " |", "|" + "---|" * (1 + len(MEASURES))]
    for env in ENVS:
        runs = [cell["explained"] for cell in found if cell["env"] == env]
        if runs:
            means = {name: torch.tensor([one[name] for one in runs]).mean(dim=0).tolist() for name in MEASURES}
            columns = [", ".join(f"{100 * share:.1f}" for share in means[name]) for name in MEASURES]
            lines.append(f"| {env} ({len(runs)}) | " + " | ".join(columns) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=ENVS, default=ENVS, help="environments")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--smallest", action="store_true", help="a few steps of one seed of one environment")
    parser.add_argument("--table", action="store_true", help="only print what is there")
    args = parser.parse_args()
    found = cells.load(args.out)
    if args.table:
        print(table(found))
        return
    if args.smallest:
        print(table([run("CartPole-v1", FIRST_SEED, 4_000)]))
        return
    done = {(cell["env"], cell["seed"]) for cell in found}
    for env in args.only:
        for seed in range(FIRST_SEED, FIRST_SEED + args.seeds):
            if (env, seed) not in done:
                found.append(run(env, seed, TASKS[env].steps))
                cells.save(args.out, found)
                print(found[-1], flush=True)
    print(table(found))


if __name__ == "__main__":
    main()
