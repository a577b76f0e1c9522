"""How much of the returns a baseline explains: members at the same time, or near states of other episodes.

One training by near states on each environment; every iteration's returns-to-go are predicted from what other episodes earned. Told is the median over iterations of 1 - var(return - baseline) / var(return); 0 is a constant, below 0 worse
than one. Members and near states are asked about the same steps, those at which a member still runs.

    python benchmarks/study/baselines.py            # results/study_baselines.json
"""

import argparse
import json
import statistics
import tempfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from run import RESULTS

FOUND = RESULTS.parent / "study_baselines.json"
STEPS = {
    "CartPole-v1": 40_000,
    "Acrobot-v1": 100_000,
    "MountainCarContinuous-v0": 60_000,
    "Pendulum-v1": 60_000,
    "LunarLander-v3": 150_000,
    "Hopper-v5": 100_000,
    "HalfCheetah-v5": 100_000,
}
SEED = 1299


def trained(env: str) -> dict[str, float]:
    """Medians over a training's iterations."""
    from cell import settings
    from plan import task_of

    import groupwise as gw

    cfg = settings(task_of(env), "near_states", {})
    cfg = cfg.model_copy(update={"total_steps": STEPS[env], "seed": SEED})
    seen: dict[str, list[float]] = {}

    class Look(gw.Callback):
        def on_iteration_end(self, trainer: Any, rollout: Any, metrics: Any) -> None:
            for name, value in of_rollout(rollout, cfg.algorithm.gamma).items():
                seen.setdefault(name, []).append(value)

    with tempfile.TemporaryDirectory() as folder:
        gw.train(cfg.model_copy(update={"run_dir": Path(folder, "run")}), callbacks=[Look()])
    return {name: round(statistics.median(values), 3) for name, values in seen.items()}


def explained(score: Any, baseline: Any) -> float:
    """Share of the variance of returns that a baseline takes off."""
    return float(1 - (score - baseline).var() / score.var())


def of_rollout(rollout: Any, gamma: float) -> dict[str, float]:
    """Of one rollout of whole groups."""
    import torch

    from groupwise.functional.advantages import comparable, group_relative
    from groupwise.functional.neighbours import nearest
    from groupwise.functional.returns import return_to_go

    batch = rollout[:, :-1]
    live = batch["loss_mask"]
    score = return_to_go(batch["reward"], batch["terminated"] | batch["truncated"], gamma)
    moments = int(batch["step"].max()) + 1
    key = (batch["group_id"] * moments + batch["step"]).masked_fill(~live, -1)
    num_keys = (int(batch["group_id"].max()) + 1) * moments
    above = group_relative(score, key, num_keys, baseline="leave_one_out", scale="none")
    asked = comparable(key, num_keys)
    everyone = torch.arange(int(live.sum()))
    near = nearest(batch["obs"][live], batch["episode_id"][live], everyone, k=16).mean(score[live])
    return {
        "members": explained(score[asked], (score - above)[asked]),
        "near": explained(score[asked], near[asked[live]]),
        "steps with a member": float(asked.sum() / live.sum()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--envs", nargs="+", default=list(STEPS), choices=list(STEPS))
    args = parser.parse_args()
    found = json.loads(FOUND.read_text()) if FOUND.exists() else {}
    # a process each: MuJoCo ended one that had trained on several of its models
    alone = ProcessPoolExecutor(1, mp_context=get_context("spawn"), max_tasks_per_child=1)
    for env in args.envs:
        found[env] = alone.submit(trained, env).result()
        FOUND.write_text(json.dumps(found, indent=1) + "\n")
        print(env, found[env], flush=True)


if __name__ == "__main__":
    main()
