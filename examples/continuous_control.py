"""Continuous actions: Pendulum-v1 with PPO and with GRPO.

Observations and rewards are normalised, actions are squashed into their bounds. A good policy scores about -200.

    python examples/continuous_control.py
    python examples/continuous_control.py --algorithm ppo
"""

import argparse
from pathlib import Path

import gymnasium

import groupwise as gw


def policy_for(algorithm: str) -> gw.PolicyCfg:
    return gw.PolicyCfg(
        # Angle and speed differ in scale. The statistics belong to the policy, so checkpoints hold them and predict()
        # applies them.
        normalize_obs=True,
        # PPO's critic must predict returns of -1500, far from the initial output of a network. GRPO has no critic.
        normalize_reward=algorithm == "ppo",
        # tanh maps the Gaussian into the bounds of the torque, and the log-probability accounts for it.
        squash_output=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithm", choices=("ppo", "grpo"), help="both unless given")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--total-steps", type=int, default=100_000)
    parser.add_argument("--run-dir", type=Path, help="folder for the run folders")
    args = parser.parse_args()

    for algorithm in [args.algorithm] if args.algorithm else ["ppo", "grpo"]:
        run_dir = args.run_dir and args.run_dir / algorithm
        policy = policy_for(algorithm)
        # All other settings come from the preset of Pendulum for the algorithm.
        run = gw.train(
            "Pendulum-v1", algorithm, policy=policy, seed=args.seed, total_steps=args.total_steps, run_dir=run_dir
        )
        low, high = run.summary["ci95"]
        print(f"{algorithm}: {run.summary['return_mean']:.0f} [{low:.0f}, {high:.0f}]")

        env = gymnasium.make("Pendulum-v1")
        obs, _ = env.reset(seed=0)
        action = run.policy.predict(obs)
        assert env.action_space.contains(action)
        print(f"{algorithm}: first torque {action[0]:.2f}, of {env.action_space}")
        env.close()


if __name__ == "__main__":
    main()
