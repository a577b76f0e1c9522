"""Learning from pixels: catch a falling ball.

The policy sees a small grey image. One reward at the end says whether it caught the ball.

    python examples/pixels.py
"""

import argparse

import gymnasium
import numpy as np
from gymnasium import spaces

import groupwise as gw

HEIGHT, WIDTH = 10, 5


class Catch(gymnasium.Env):
    """A ball falls from a random column, straight down; a paddle at the bottom moves left, stays, or moves right."""

    # uint8 in [0, 255] marks an observation as an image. The policy scales it to [0, 1]. Channels may be last or first.
    observation_space = spaces.Box(0, 255, (HEIGHT, WIDTH, 1), np.uint8)
    action_space = spaces.Discrete(3)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.row, self.column = 0, int(self.np_random.integers(WIDTH))
        self.paddle = WIDTH // 2
        return self._obs(), {}

    def step(self, action):
        self.paddle = min(max(self.paddle + int(action) - 1, 0), WIDTH - 1)
        self.row += 1
        landed = self.row == HEIGHT - 1
        reward = float(self.paddle == self.column) if landed else 0.0
        return self._obs(), reward, landed, False, {}

    def _obs(self):
        image = np.zeros((HEIGHT, WIDTH, 1), np.uint8)
        image[self.row, self.column] = 255
        image[-1, self.paddle] = 255
        return image


# A registered environment has an id, so its runs can be evaluated and resumed without passing it again.
gymnasium.register("Catch-v0", entry_point=Catch, max_episode_steps=HEIGHT)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--total-steps", type=int, default=15_000)
    parser.add_argument("--run-dir")
    args = parser.parse_args()

    cfg = gw.GRPOCfg(
        group_size=8,
        num_steps=72,  # 8 episodes of 9 steps in each environment
        num_epochs=4,
        minibatch_size=128,
        learning_rate=1e-3,
        # There is one reward, at the end, so whole episodes are compared.
        credit=gw.CreditCfg(group_key="group", returns="outcome"),
    )
    # The default, "nature", needs images of 36x36 and more.
    policy = gw.PolicyCfg(hidden_sizes=(64,), normalize_obs=False)
    run = gw.train("Catch-v0", cfg, policy=policy, total_steps=args.total_steps, run_dir=args.run_dir)
    print(f"catches {run.summary['return_mean']:.0%} of {run.summary['episodes']} balls")


if __name__ == "__main__":
    main()
