"""Milliseconds of a new VLA policy on one thread: acting, and scoring with its gradient.

python benchmarks/vla.py
"""

import argparse
import time

import gymnasium as gym
import numpy as np
import torch
from tensordict import TensorDict

from groupwise.embodied.vla import VLAPolicy

PIXELS, TEXT = 64, b"push the puck to the goal"
OBS = gym.spaces.Dict(
    image=gym.spaces.Box(0, 255, (1, PIXELS, PIXELS, 3), np.uint8),
    proprio=gym.spaces.Box(-np.inf, np.inf, (4,), np.float32),
    instruction=gym.spaces.Box(0, 255, (64,), np.uint8),
)
CHUNKS = gym.spaces.Box(-1, 1, (5, 4), np.float32)


def observations(count):
    text = torch.tensor(list(TEXT.ljust(64, b"\0")), dtype=torch.uint8)
    image = torch.randint(0, 256, (count, 1, PIXELS, PIXELS, 3), dtype=torch.uint8)
    return TensorDict(
        image=image, proprio=torch.randn(count, 4), instruction=text.expand(count, -1), batch_size=[count]
    )


def milliseconds(function, repeats):
    function()
    start = time.process_time()
    for _ in range(repeats):
        function()
    return 1000 * (time.process_time() - start) / repeats


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smallest", action="store_true", help="one observation, once")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    measure(VLAPolicy(OBS, CHUNKS, actor_only=True), *((1,), 1) if args.smallest else ())


def measure(policy, counts=(1, 8, 32), repeats=5):
    print(f"{type(policy).__name__}: {sum(p.numel() for p in policy.parameters()):,} parameters")
    for count in counts:
        obs = observations(count)
        batch = {"obs": obs, "action": policy.act(obs).action}
        forward = milliseconds(lambda obs=obs: policy.act(obs), repeats)
        both = milliseconds(lambda batch=batch: policy.evaluate(batch).log_prob.sum().backward(), repeats)
        print(f"{count:2d} observations: forward {forward:.1f} ms, forward and backward {both:.1f} ms")


if __name__ == "__main__":
    main()
