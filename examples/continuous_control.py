"""Continuous actions: Pendulum-v1 with PPO and with GRPO.

Observations and rewards are normalised, actions squashed into their bounds. A good policy scores about -200. Of the
seeds 0 to 3, each came within about 50 of that on three: one seed proves little.

    python examples/continuous_control.py
    python examples/continuous_control.py --algorithm ppo
"""

import argparse
from pathlib import Path

import gymnasium

import groupwise as gw


def policy_for(algorithm: str) -> gw.PolicyCfg:
    return gw.PolicyCfg(
        # Angle and speed differ in scale. The statistics belong to the policy: they are part of its checkpoint, and
        # predict() applies them.
        normalize_obs=True,
        # PPO's critic must predict returns, and -1500 is far from where a network starts. GRPO's advantages are
        # normalised over the batch, so it has no use for this.
        normalize_reward=algorithm == "ppo",
        # tanh maps the Gaussian into the torque's bounds, and its log-probability accounts for that. "clip" would cut
        # off the tails on their way to the environment, so that all actions beyond the bound act alike.
        bounded_action="squash",
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
        # Horizon, discount and group size come from Pendulum's preset for the algorithm; the policy is ours.
        run = gw.train(
            "Pendulum-v1", algorithm, policy=policy, seed=args.seed, total_steps=args.total_steps, run_dir=run_dir
        )
        low, high = run.summary["ci95"]
        print(f"{algorithm}: {run.summary['return_mean']:.0f} [{low:.0f}, {high:.0f}]")

        env = gymnasium.make("Pendulum-v1")
        obs, _ = env.reset(seed=0)
        action = run.policy.predict(obs)
        assert env.action_space.contains(action)  # whatever the network says
        print(f"{algorithm}: first torque {action[0]:.2f}, of {env.action_space}")
        env.close()


if __name__ == "__main__":
    main()
