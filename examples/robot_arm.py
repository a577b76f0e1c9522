"""A robot arm learns to push a puck: ten demonstrations, cloning, then GRPO on success alone.

    python examples/robot_arm.py                 a few minutes on two cores; no download

The policy sees the state, 39 numbers, and answers with five actions at a time. docs/robots.md explains each part.
"""

import argparse
from datetime import datetime
from pathlib import Path

import groupwise as gw
from groupwise.embodied.demos import record_demos

TASK = gw.EnvCfg(id="MetaWorld/push-v3", action_chunk=5)


def clone_expert(folder: Path, seed: int, episodes: int, total_steps: int) -> gw.Run:
    """A policy that imitates a few successful episodes of the scripted expert."""
    demos = record_demos(TASK, episodes=episodes, seed=seed, out=folder / "demos")
    return gw.train(
        TASK,
        # noise on the demonstrated actions: a clone without it would not explore afterwards
        gw.config.BCCfg(data=demos.path, holdout=0.0, label_noise=0.3),
        policy={"hidden_sizes": [128, 128], "log_std_init": -1.0},
        total_steps=total_steps,
        seed=seed,
        run_dir=folder / "clone",
    )


def learn_from_success(clone: gw.Run, folder: Path, seed: int, total_steps: int, num_envs: int) -> gw.Run:
    """The clone after more practice: the reward is 1 for success, else 0."""
    return gw.train(
        TASK,
        gw.GRPOCfg(group_size=8, num_steps=16, num_epochs=4, minibatch_size=512, learning_rate=1e-3),
        policy={"init_from": clone.path},
        num_envs=num_envs,
        total_steps=total_steps,
        seed=seed,
        run_dir=folder / "grpo",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--demos", type=int, default=10, help="demonstrations to clone")
    parser.add_argument(
        "--clone-steps", type=int, default=100_000, help="demonstrated steps to imitate, with repetition"
    )
    parser.add_argument("--total-steps", type=int, default=240_000, help="environment steps of GRPO")
    parser.add_argument("--num-envs", type=int, default=64, help="environments of GRPO")
    parser.add_argument("--episodes", type=int, default=100, help="unseen starts in each evaluation")
    parser.add_argument("--run-dir", type=Path, help="folder for everything (default: a fresh one under runs/)")
    args = parser.parse_args()
    folder = args.run_dir or Path("runs", f"robot-arm-{datetime.now():%Y%m%d-%H%M%S}")

    clone = clone_expert(folder, args.seed, args.demos, args.clone_steps)
    before = gw.evaluate(clone, args.episodes)
    run = learn_from_success(clone, folder, args.seed, args.total_steps, args.num_envs)
    after = gw.evaluate(run, args.episodes)

    print(f"\n{f'{args.episodes} unseen starts':<17}   success   95 % interval   video of one episode")
    for name, result, trained in (("clone", before, clone), ("after GRPO", after, run)):
        low, high = result.success_ci95
        video = trained.path / "policy.gif"
        shown = video if video.exists() else "none, see the warning above"
        print(f"{name:<17}  {result.success_rate:8.0%}   {low:5.0%} to {high:4.0%}   {shown}")


if __name__ == "__main__":
    main()
