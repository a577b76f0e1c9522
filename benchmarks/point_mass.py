"""PPO and GRPO on EmbodiChain's PointMassEnv, through ``gw.from_torch_sim``.

    pip download --no-deps embodichain==0.3.2
    python -m zipfile -e embodichain-0.3.2-py3-none-any.whl FOLDER
    PYTHONPATH=FOLDER python benchmarks/point_mass.py

The package needs a simulator that PyPI does not have; this task does not, so its file is loaded by itself.
"""

import argparse
import importlib.util
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import groupwise as gw

BONUS = 50.0
"""Of success. Below about 25, staying next to the goal until the limit earns more than reaching it."""
ALGORITHMS: dict[str, gw.config.AlgorithmCfg] = {
    "ppo": gw.PPOCfg(num_steps=32, minibatch_size=512, num_epochs=6, learning_rate=1e-3),
    "grpo": gw.GRPOCfg(num_steps=64, group_size=8, minibatch_size=1024, num_epochs=4, learning_rate=1e-3),
}


def point_mass() -> type[Any]:
    """The class, from the file of the installed or unpacked wheel."""
    package = importlib.util.find_spec("embodichain")
    if package is None or package.origin is None:
        raise SystemExit("embodichain is not on the path; fix: the commands above")
    path = Path(package.origin).parents[1] / "embodichain_tasks" / "classic_control" / "point_mass.py"
    spec = importlib.util.spec_from_file_location("point_mass", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    task: type[Any] = module.PointMassEnv
    return task


def main() -> None:
    """Train with each algorithm and seed; print success and return over 100 fresh episodes."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--total-steps", type=int, default=1_000_000)
    args = parser.parse_args()
    torch.set_num_threads(1)
    task = point_mass()

    def make(num_envs: int, device: str = "cpu") -> Any:
        return gw.from_torch_sim(task(num_envs, device, success_bonus=BONUS))

    for name, algorithm in ALGORITHMS.items():
        found = []
        for seed in range(100, 100 + args.seeds):
            begun = time.perf_counter()
            with tempfile.TemporaryDirectory() as folder:
                run = gw.train(
                    make,
                    algorithm,
                    num_envs=64,
                    total_steps=args.total_steps,
                    seed=seed,
                    run_dir=Path(folder) / "run",
                    policy={"normalize_obs": True},
                    logging={"progress": "none"},
                )
                seconds = time.perf_counter() - begun
                result = gw.evaluate(run, 100)
            success = sum(length < 100 for length in result.lengths)  # only success ends an episode before its limit
            found.append(float(success))
            print(f"{name} seed {seed}: success {success} %, return {result.return_mean:.1f}, {seconds:.0f} s")
        print(f"{name}: success {statistics.mean(found):.1f} % (least {min(found):.0f} %)", flush=True)


if __name__ == "__main__":
    main()
