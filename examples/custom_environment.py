"""Your own environment for GRPO: the members of a group share a start, and draw their own noise afterwards.

This works if all randomness comes from ``self.np_random``. The start is then drawn from the seed of the group, and
everything later from the seed of the member.

    python examples/custom_environment.py
"""

import argparse

import gymnasium
import numpy as np
import torch
from gymnasium import spaces

import groupwise as gw

MAX_STEPS = 100


class Sailing(gymnasium.Env):
    """Keep a boat in the fairway while gusts push it about: steer to port (0), hold (1), or to starboard (2)."""

    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = spaces.Discrete(3)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)  # makes self.np_random
        self.offset, self.drift = self.np_random.uniform(-0.5, 0.5), 0.0
        return self._obs(), {}

    def step(self, action):
        gust = self.np_random.normal(0.0, 0.05)  # np.random.normal would be refused
        self.drift += 0.05 * (int(action) - 1) + gust
        self.offset += 0.1 * self.drift
        aground = abs(self.offset) > 1.0
        return self._obs(), 1.0 - abs(self.offset), aground, False, {}

    def _obs(self):
        return np.array([self.offset, self.drift], np.float32)


def show_group() -> None:
    """Four boats at one start with the same actions: only the gusts differ."""
    env = gw.make_env(gw.EnvCfg(num_envs=4), grouped=True, env=Sailing)
    everyone = np.ones(4, dtype=bool)
    obs = env.start(everyone, start_seed=np.full(4, 7), noise_seed=np.arange(4))
    print("offsets at the start:", obs[:, 0].numpy().round(3))
    for _ in range(10):
        obs = env.step(torch.ones(4, dtype=torch.int64)).obs
    print("offsets after 10 equal actions:", obs[:, 0].numpy().round(3))
    env.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--total-steps", type=int, default=50_000)
    parser.add_argument("--run-dir")
    args = parser.parse_args()

    show_group()

    cfg = gw.GRPOCfg(group_size=8, num_steps=128)
    # The shared start is checked before training. The boat may sail on for ever, so episodes need a step limit.
    run = gw.train(Sailing, cfg, max_episode_steps=MAX_STEPS, total_steps=args.total_steps, run_dir=args.run_dir)
    print(f"trained: {run.summary['return_mean']:.1f} of at most {MAX_STEPS}")

    # The run folder cannot hold Python code, so pass the environment again.
    result = gw.evaluate(run.path, episodes=10, env=Sailing)
    print(f"loaded again: {result.return_mean:.1f} over {result.episodes} fresh episodes")


if __name__ == "__main__":
    main()
