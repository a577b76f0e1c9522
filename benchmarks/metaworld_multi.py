"""One vision-language-action policy for four tasks of Meta-World: success by task, and with the instructions exchanged.

The policy (``policy="vla"``, random weights at the start) is cloned from demonstrations with images, and then trained by GRPO
on success. ``faucet-open-v3`` and ``faucet-close-v3`` begin with the same picture: only the instruction tells them apart.
Evaluation: 100 episodes with starts that no training saw, as they are, and with the instructions of two tasks exchanged each.

    python benchmarks/metaworld_multi.py              # to results/metaworld_multi.json
"""

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = os.environ["LP_NUM_THREADS"] = "1"
os.environ.setdefault("MUJOCO_GL", "egl")

import gymnasium

import groupwise as gw
from groupwise.embodied.demos import record_demos
from groupwise.embodied.metaworld import INSTRUCTIONS, MetaWorldEnv, instruction_bytes
from groupwise.training.evaluation import EvaluationResult, evaluate_policy

RESULT = Path(__file__).parent / "results" / "metaworld_multi.json"
EXCHANGED = {
    "faucet-open-v3": "faucet-close-v3",
    "faucet-close-v3": "faucet-open-v3",
    "coffee-button-v3": "handle-press-v3",
    "handle-press-v3": "coffee-button-v3",
}
ENV = gw.EnvCfg(
    id="MetaWorld/multi",
    kwargs={"tasks": list(EXCHANGED), "obs": "image", "views": ["corner2"]},
    action_chunk=5,
    num_envs=64,
)
EPISODES = 100


class Exchanged(gymnasium.Wrapper):
    """Each task with the instruction of another."""

    def reset(self, **given: Any) -> tuple[Any, dict[str, Any]]:
        obs, info = self.env.reset(**given)
        self.task = info["task"]
        return self._told(obs), info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        obs, *rest = self.env.step(action)
        return self._told(obs), *rest

    def _told(self, obs: dict[str, Any]) -> dict[str, Any]:
        return obs | {"instruction": instruction_bytes(INSTRUCTIONS[EXCHANGED[self.task]])}


def exchanged_env() -> gymnasium.Env:
    return Exchanged(gymnasium.wrappers.TimeLimit(MetaWorldEnv(**ENV.kwargs), 100))


def scores(policy: Any, *, exchanged: bool, seed: int) -> dict[str, Any]:
    """Success in all and by task."""
    cfg = ENV.model_copy(update={"id": "<given in Python>", "kwargs": {}} if exchanged else {})
    env = gw.make_env(cfg, num_envs=16, grouped=True, env=exchanged_env if exchanged else None, verify=False)
    try:
        found: EvaluationResult = evaluate_policy(policy, env, episodes=EPISODES, seed=seed)
    finally:
        env.close()
    by_task = {task: [each.success_rate, each.episodes] for task, each in found.success_by_task.items()}
    return {"success_rate": found.success_rate, "ci95": found.success_ci95, "by_task": by_task}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--demos", type=int, default=60, help="demonstrations, of all tasks together")
    parser.add_argument("--passes", type=int, default=20, help="over the demonstrations")
    parser.add_argument("--steps", type=int, default=60_000, help="environment steps of GRPO")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    result: dict[str, Any] = {"arguments": vars(args)}

    def note(name: str, policy: Any, began: float) -> None:
        result[name] = {"seconds": round(time.perf_counter() - began)} | {
            "told" if not exchanged else "exchanged": scores(policy, exchanged=exchanged, seed=10_000 + args.seed)
            for exchanged in (False, True)
        }
        print(name, result[name], flush=True)
        RESULT.write_text(json.dumps(result, indent=1) + "\n")

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        demos = record_demos(ENV, episodes=args.demos, out=folder / "demos", seed=args.seed)
        began = time.perf_counter()
        clone = gw.train(
            ENV.model_copy(update={"num_envs": 8}),
            gw.config.BCCfg(data=demos.path, holdout=0.1, num_steps=64, minibatch_size=32, num_epochs=1, learning_rate=1e-3,
                     schedule="cosine"),
            total_steps=args.passes * demos.steps,
            policy="vla",
            seed=args.seed,
            evaluation={"interval": 10**9, "episodes": 8},
            run_dir=folder / "clone",
        )  # fmt: skip
        note("clone", clone.policy, began)
        began = time.perf_counter()
        run = gw.train(
            ENV,
            {"name": "grpo", "num_steps": 16, "num_epochs": 2, "minibatch_size": 256, "micro_batch_size": 64,
             "learning_rate": 5e-5},
            preset="vla",
            total_steps=args.steps,
            policy=gw.config.VLACfg(init_from=str(clone.path)),
            seed=args.seed,
            evaluation={"interval": 10**9, "episodes": 8},
            run_dir=folder / "run",
        )  # fmt: skip
        result["episodes"] = round(sum(m.get("rollout/episodes", 0) for m in run.metrics()))
        note("grpo", run.policy, began)


if __name__ == "__main__":
    main()
