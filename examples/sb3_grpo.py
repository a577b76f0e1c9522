"""GRPO as a Stable-Baselines3 algorithm: its environments, callbacks and files.

python examples/sb3_grpo.py
"""

import argparse
from pathlib import Path

from stable_baselines3.common.callbacks import EvalCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.vec_env import VecNormalize

from groupwise import CreditCfg
from groupwise.contrib.sb3 import GRPO


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--total-steps", type=int, default=40_000)
    parser.add_argument("--run-dir", type=Path, default=Path("runs/sb3_grpo"))
    args = parser.parse_args()

    # Any number of environments, in any SB3 wrapper. GRPO makes the members of a group start in the same state.
    env = VecNormalize(make_vec_env("CartPole-v1", n_envs=2), norm_reward=False)
    # A separate environment for evaluation; the callback copies the statistics of the one above.
    eval_env = VecNormalize(make_vec_env("CartPole-v1", seed=1), norm_reward=False, training=False)
    evaluation = EvalCallback(
        eval_env, eval_freq=5_000, best_model_save_path=str(args.run_dir), n_eval_episodes=10, verbose=0
    )

    model = GRPO(
        "MlpPolicy",
        env,
        n_steps=512,  # of each environment
        group_size=4,
        # or the name of a preset, such as "dr_grpo"
        credit=CreditCfg(group_key="group_step", returns="return_to_go", scale="population_std"),
        policy_kwargs={"net_arch": [64, 64]},  # the actor; there is no critic
        seed=0,
    )
    model.learn(args.total_steps, callback=evaluation)
    model.save(args.run_dir / "model")

    loaded = GRPO.load(args.run_dir / "model")
    mean, deviation = evaluate_policy(loaded, eval_env, n_eval_episodes=20)
    print(f"after {loaded.num_timesteps} steps: {mean:.1f} +- {deviation:.1f} over 20 fresh episodes")


if __name__ == "__main__":
    main()
