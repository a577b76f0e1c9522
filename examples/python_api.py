"""groupwise from Python.

Train in one call, use the policy, score it. Then train again from the parts, as you do to change how they combine.

    python examples/python_api.py
"""

import argparse

import gymnasium
import torch

import groupwise as gw
from groupwise.policies.base import Policy

EVALUATED_EPISODES = 20


def train_in_one_call(total_steps: int, run_dir: str | None) -> gw.Run:
    # Other fields come from the preset of CartPole, then from the class.
    return gw.train("CartPole-v1", gw.GRPOCfg(group_size=8), seed=0, total_steps=total_steps, run_dir=run_dir)


def play(policy: Policy) -> float:
    """The return of one greedy episode."""
    env = gymnasium.make("CartPole-v1")
    obs, _ = env.reset(seed=1)
    score, over = 0.0, False
    while not over:
        action = policy.predict(obs, deterministic=True)
        obs, reward, terminated, truncated, _ = env.step(action)
        score += float(reward)
        over = terminated or truncated
    env.close()
    return score


def ppo_from_parts(total_steps: int) -> Policy:
    cfg = gw.PPOCfg(gamma=0.98, gae_lambda=0.8, learning_rate=1e-3)  # parts apply no presets
    num_steps = 32
    env = gw.make_env(gw.EnvCfg(id="CartPole-v1", num_envs=8))
    policy = gw.ActorCritic(env.observation_space, env.action_space)
    collector = gw.VectorCollector(env, policy)
    buffer = gw.RolloutBuffer(
        env.num_envs, num_steps, obs_spec=env.obs_spec, action_spec=policy.action_spec, value=True
    )
    algo = gw.PPO(cfg, policy)
    for _ in range(0, total_steps, env.num_envs * num_steps):
        rollout = collector.collect(num_steps, rollout=buffer.start_rollout())
        buffer.add(rollout)
        metrics = algo.update(buffer.get())
    report("PPO from parts", collector, metrics)
    env.close()
    return policy


def grpo_from_parts(total_steps: int) -> Policy:
    credit = gw.CreditCfg(group_key="group_step", returns="return_to_go", scale="population_std")
    cfg = gw.GRPOCfg(group_size=4, gamma=1.0, learning_rate=1e-3, minibatch_size=128, credit=credit)
    num_steps = 250
    # grouped: rows start where they are told, so members share a start. GRPO needs no critic.
    env = gw.make_env(gw.EnvCfg(id="CartPole-v1", num_envs=4), grouped=True)
    policy = gw.ActorCritic(env.observation_space, env.action_space, actor_only=True)
    collector = gw.GroupCollector(env, policy, group_size=cfg.group_size)
    buffer = gw.RolloutBuffer(env.num_envs, num_steps, obs_spec=env.obs_spec, action_spec=policy.action_spec)
    algo = gw.GRPO(cfg, policy)
    steps = 0
    while steps < total_steps:
        rollout = collector.collect(num_steps, rollout=buffer.start_rollout())
        buffer.add(rollout)
        metrics = algo.update(buffer.get())
        steps += collector.last_steps  # groups are completed, so an iteration takes a few steps more
    report("GRPO from parts", collector, metrics)
    env.close()
    return policy


def report(name: str, collector: gw.GroupCollector | gw.VectorCollector, metrics: dict[str, torch.Tensor]) -> None:
    # Metrics are tensors; on a GPU every float() waits for the device.
    numbers = collector.metrics() | {key: float(value) for key, value in metrics.items()}
    score, entropy = numbers.get("rollout/return_mean", float("nan")), numbers["train/entropy"]
    print(f"{name}: {collector.iteration} iterations, return {score:.1f}, entropy {entropy:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--total-steps", type=int, default=50_000)
    parser.add_argument("--run-dir")
    args = parser.parse_args()

    run = train_in_one_call(args.total_steps, args.run_dir)
    print(f"one greedy episode: {play(run.policy):.0f}")
    result = gw.evaluate(run, episodes=EVALUATED_EPISODES)
    low, high = result.ci95
    print(f"over {result.episodes} fresh episodes: {result.return_mean:.1f} [{low:.1f}, {high:.1f}]")
    print(f"all of it is in {run.path}; load it again with gw.Run.load")

    torch.manual_seed(0)  # initial weights: gw.train derives them from its seed
    torch.set_num_threads(1)  # more threads are slower on small networks
    ppo_from_parts(args.total_steps)
    grpo_from_parts(args.total_steps)


if __name__ == "__main__":
    main()
