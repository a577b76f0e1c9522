"""What least squares and a critic explain of the returns, on the same rollouts of the same policy.

PPO trains as in ``study.py``, 300,000 steps, and the values of ``lstd`` look on: the same features, folds and memory as in
GRPO, on PPO's windows. Metric: the share of the variance of discounted returns that the values explain, 1 - Var(G - V) /
Var(G), of each iteration; medians over thirds of training. G follows each episode into later windows, to its end; steps
fewer than 300 before a truncation or the end of training are left out. Seeds start at 7, apart from those of the study.

    python benchmarks/lstd_explains.py                       # every run that results/lstd_explains.json lacks
    python benchmarks/lstd_explains.py --only Walker2d-v5
    python benchmarks/lstd_explains.py --table               # what is there, as Markdown
"""

import argparse
import tempfile
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import cells
import torch
from study import settings
from torch import Tensor

import groupwise as gw
from groupwise.algorithms import advantages
from groupwise.data.rollout import transition_view
from groupwise.functional.advantages import return_to_go

RESULT = Path(__file__).parent / "results" / "lstd_explains.json"
FIRST_SEED, STEPS, VIEW = 7, 300_000, 300
ENVS = ("Hopper-v5", "HalfCheetah-v5", "Walker2d-v5", "Ant-v5")
"""Swimmer is not one of them: at its discount of 0.9999, 300 steps ahead say little of a return."""


class LookOn(gw.Callback):
    """Keeps rewards, ends, and the values of both, window by window."""

    def __init__(self, gamma: float) -> None:
        self.gamma, self.memory = gamma, dict[str, Tensor]()
        self.kept: list[Tensor] = []
        """[6, row, step]: reward, ended, truncated, valid, value of the critic in the unit of rewards, value of ``lstd``."""

    def on_rollout_end(self, trainer: gw.Trainer, rollout: Any) -> None:
        batch, values = transition_view(rollout), list[Tensor]()

        def spy(reward: Tensor, value: Tensor, *others: Any, **more: Any) -> Tensor:
            values.append(value)
            return gae(reward, value, *others, **more)

        cfg = gw.CreditCfg(group_key="group", returns="return_to_go", baseline="lstd", scale="none")
        number = int(batch["episode_id"].max()) + 1
        more = {"memory": self.memory, "states": batch["obs"]}
        credit = advantages.CreditInput(batch, batch["reward"], cfg, self.gamma, number, number, **more)
        gae = advantages.gae
        with patch.object(advantages, "gae", spy):
            advantages.advantages(credit)
        scale = trainer.algorithm.policy.normalize_reward(torch.tensor(1e-6)) / 1e-6
        ended = batch["terminated"] | batch["truncated"]
        parts = batch["reward"], ended, batch["truncated"], batch["valid"], batch["value"] / scale, values[0]
        self.kept.append(torch.stack([part.double() for part in parts]))

    def explained(self) -> list[tuple[float, float]]:
        """Of the critic and of ``lstd``, for each window."""
        reward, ended, truncated, valid, *values = torch.cat(self.kept, dim=-1)
        goal = return_to_go(reward, ended.bool(), self.gamma)
        steps = reward.shape[1]
        place = torch.arange(steps).expand_as(reward)
        # the next truncation, or the end of training where nothing ends before
        cut = torch.where(truncated.bool(), place, torch.where(ended.bool(), 10 * steps, 2 * steps))
        cut[:, -1] = torch.where(ended[:, -1].bool(), cut[:, -1], steps)
        ahead = cut.clone()
        for t in reversed(range(steps - 1)):
            ahead[:, t] = torch.where(ended[:, t].bool(), cut[:, t], ahead[:, t + 1])
        known = valid.bool() & (ahead - place >= VIEW)
        found, width = [], self.kept[0].shape[-1]
        for begin in range(0, steps, width):
            here = known[:, begin : begin + width]
            if int(here.sum()) > width:
                aims, *guesses = (part[:, begin : begin + width][here] for part in (goal, *values))
                found.append(tuple(float(1 - (aims - guess).var() / aims.var()) for guess in guesses))
        return found


def run(env: str, seed: int, steps: int) -> dict[str, Any]:
    """Train, and return medians for each third of training."""
    given = settings(env, "ppo", steps)
    look = LookOn(float(given["algorithm"]["gamma"]))
    with tempfile.TemporaryDirectory() as folder:
        gw.train(
            **given,
            seed=seed,
            run_dir=f"{folder}/run",
            logging={"progress": "none"},
            evaluation={"interval": 10**9, "episodes": 1},
            callbacks=[look],
        )
    found = look.explained()
    third = -(-len(found) // 3)
    parts = [found[i : i + third] for i in range(0, len(found), third)]
    medians = {
        name: [round(median(one[k] for one in part), 3) for part in parts] for k, name in enumerate(("critic", "lstd"))
    }
    return {"env": env, "seed": seed, **medians}


def table(found: cells.Cells) -> str:
    lines = ["| environment (seed) | critic | `lstd` |", "|---|---|---|"]
    for cell in found:
        shown = (", ".join(f"{value:.2f}" for value in cell[name]) for name in ("critic", "lstd"))
        lines.append(f"| {cell['env']} ({cell['seed']}) | {' | '.join(shown)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=ENVS, default=list(ENVS))
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--table", action="store_true", help="only print what is there")
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--smallest", action="store_true", help="one run of few steps")
    args = parser.parse_args()
    found = cells.load(args.out)
    known = {(cell["env"], cell["seed"]) for cell in found}
    plan = [(env, FIRST_SEED + number) for number in range(args.seeds) for env in args.only]
    for env, seed in [] if args.table else plan[:1] if args.smallest else plan:
        if (env, seed) not in known:
            found.append(run(env, seed, 6_000 if args.smallest else STEPS))
            cells.save(args.out, found)
    print(table(found))


if __name__ == "__main__":
    main()
