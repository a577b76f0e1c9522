"""A simulator in torch: three functions on a batch of states make an environment with any number of rows.

Shared starts, noise and step limits come from ``gw.TorchGroupEnv``. Nothing in it loops over rows.

    python examples/torch_native.py
"""

import argparse
import time

import numpy as np
import torch
from gymnasium import spaces

import groupwise as gw


class Fleet(gw.TorchGroupEnv):
    """Keep each boat in the fairway while gusts push it about: steer to port (0), hold (1), or to starboard (2)."""

    def __init__(self, num_envs, device="cpu"):
        super().__init__(
            num_envs,
            env_id="Fleet",
            observation_space=spaces.Box(-np.inf, np.inf, (2,), np.float32),
            action_space=spaces.Discrete(3),
            max_episode_steps=100,
            device=device,
        )

    def initial(self, random):
        offset = random.uniform(low=-0.5, high=0.5)  # [N]; torch.rand would be refused
        return {"offset": offset, "drift": torch.zeros_like(offset)}

    def transition(self, state, action, random):
        drift = state["drift"] + 0.05 * (action - 1) + random.normal(std=0.05)
        offset = state["offset"] + 0.1 * drift
        # next state, reward, and whether the episode is over, each [N]
        return {"offset": offset, "drift": drift}, 1.0 - offset.abs(), offset.abs() > 1.0

    def observe(self, state):
        return torch.stack([state["offset"], state["drift"]], dim=1)


def show_group() -> None:
    """Four boats at one start with the same actions: only the gusts differ."""
    env = Fleet(4)
    everyone = np.ones(4, dtype=bool)
    obs = env.start(everyone, start_seed=np.full(4, 7), noise_seed=np.arange(4))
    print("offsets at the start:", obs[:, 0].numpy().round(3))
    for _ in range(10):
        obs = env.step(torch.ones(4, dtype=torch.int64)).obs
    print("offsets after 10 equal actions:", obs[:, 0].numpy().round(3))


def show_speed(num_envs: int = 8192, num_steps: int = 50) -> None:
    env = Fleet(num_envs)
    env.reset(seed=0)
    action = torch.ones(num_envs, dtype=torch.int64)
    begin = time.perf_counter()
    for _ in range(num_steps):
        env.step(action)
    print(f"{num_envs * num_steps / (time.perf_counter() - begin) / 1e6:.1f} million steps a second")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--total-steps", type=int, default=100_000)
    parser.add_argument("--run-dir")
    args = parser.parse_args()

    show_group()
    show_speed()

    cfg = gw.GRPOCfg(group_size=8, num_steps=64)
    # The class, not an instance: evaluation makes its own.
    run = gw.train(Fleet, cfg, num_envs=64, total_steps=args.total_steps, run_dir=args.run_dir)
    print(f"trained: {run.summary['return_mean']:.1f} of at most 100")

    result = gw.evaluate(run.path, episodes=10, env=Fleet)
    print(f"loaded again: {result.return_mean:.1f} over {result.episodes} fresh episodes")


if __name__ == "__main__":
    main()
