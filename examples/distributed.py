"""Several processes train one policy, each with its own environments.

    torchrun --nproc-per-node 2 examples/distributed.py --run-dir runs/two_processes

The program is the same as for one process: ``gw.train`` reads what torchrun sets. Loss weights are global and gradients
are summed, so the result is that of one process with twice the environments.
"""

import argparse

import groupwise as gw


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--total-steps", type=int, default=100_000, help="of all processes together")
    parser.add_argument("--run-dir", required=True, help="all processes must know it")
    args = parser.parse_args()

    run = gw.train("CartPole-v1", "ppo", seed=0, total_steps=args.total_steps, run_dir=args.run_dir)
    engine = run.algorithm.engine
    if engine.rank == 0:  # evaluates and writes the run folder
        score, steps = run.summary["return_mean"], run.summary["env_steps"]
        print(f"{engine.world_size} process(es), {steps:,} steps in all: {score:.1f}")


if __name__ == "__main__":
    main()
