"""SBX's PPO: Stable-Baselines3's interface, with JAX for the networks."""

from sb3_ppo import build, train
from worker import parse

if __name__ == "__main__":
    args = parse("zoo")

    from sbx import PPO

    train(args, build(args, PPO))
