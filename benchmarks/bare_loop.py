"""A minibatch of PPO in eager torch: ours, a bare loop of the operations that the loss takes, and Stable-Baselines3's.

The settings of SB3's zoo for CartPole-v1, as in ``speed_sb3.py``: 20 epochs of one minibatch of 256 transitions, actor and
critic 64-64 tanh. The bare loop is two ``nn.Sequential``, the loss, ``clip_grad_norm_`` and fused Adam, and nothing else: no
metrics, masks, weights or checks. It says how far from what eager torch itself takes a library is. All take turns in one
process, on one thread; a minibatch's time is a twentieth of an update's, whatever else an update does included.

    python benchmarks/bare_loop.py                 # or: --turns 20
"""

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import groupwise as gw

RESULT = Path(__file__).parent / "results" / "bare_loop.json"
NUM_ENVS, NUM_STEPS, EPOCHS = 8, 32, 20
ROWS = NUM_ENVS * NUM_STEPS
OURS = ("torch", "by_hand", "compiled")


def ours(kernel: Any) -> Callable[[], object]:
    cfg = gw.PPOCfg(
        num_steps=NUM_STEPS,
        num_epochs=EPOCHS,
        minibatch_size=ROWS,
        learning_rate=1e-3,
        gamma=0.98,
        gae_lambda=0.8,
        clip_coef=0.2,
    )
    env = gw.make_env(gw.EnvCfg(id="CartPole-v1", num_envs=NUM_ENVS), grouped=False)
    network = gw.PolicyCfg(mlp_kernel=kernel)
    policy = gw.ActorCritic(env.observation_space, env.action_space, network, gamma=cfg.gamma)
    buffer = gw.RolloutBuffer(NUM_ENVS, NUM_STEPS, obs_spec=env.obs_spec, action_spec=policy.action_spec, value=True)
    algorithm = gw.PPO(cfg, policy)
    buffer.add(gw.VectorCollector(env, policy, seed=0).collect(NUM_STEPS, rollout=buffer.start_rollout()))
    rollout = buffer.get(flatten=False)
    return lambda: algorithm.update(rollout)


def bare() -> Callable[[], object]:
    actor, critic = (
        nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs))
        for outputs in (2, 1)
    )
    parameters = [*actor.parameters(), *critic.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=1e-3, eps=1e-5, fused=True)
    obs, action = torch.randn(ROWS, 4), torch.randint(2, (ROWS, 1))
    raw_advantage, target = torch.randn(ROWS), torch.randn(ROWS)
    old_log_prob = torch.full((ROWS,), 0.5).log()

    def update() -> None:
        for _ in range(EPOCHS):
            advantage = (raw_advantage - raw_advantage.mean()) / (raw_advantage.std() + 1e-8)
            log_prob = torch.log_softmax(actor(obs), dim=-1).gather(-1, action).squeeze(-1)
            ratio = (log_prob - old_log_prob).exp()
            policy_loss = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.2)).mean()
            value_loss = (critic(obs).squeeze(-1) - target).square().mean()
            optimizer.zero_grad()
            (policy_loss + 0.5 * value_loss).backward()
            nn.utils.clip_grad_norm_(parameters, 0.5)
            optimizer.step()

    return update


def sb3() -> Callable[[], object]:
    from stable_baselines3 import PPO
    from stable_baselines3.common.env_util import make_vec_env

    model = PPO(
        "MlpPolicy",
        make_vec_env("CartPole-v1", n_envs=NUM_ENVS, seed=0),
        n_steps=NUM_STEPS,
        batch_size=ROWS,
        n_epochs=EPOCHS,
        gae_lambda=0.8,
        gamma=0.98,
        learning_rate=1e-3,
        clip_range=0.2,
        device="cpu",
        seed=0,
    )
    model.learn(ROWS)  # fills the buffer that ``train`` reads
    return model.train


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=60)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    updates = {"bare": bare(), "sb3": sb3()} | {kernel: ours(kernel) for kernel in OURS}
    for update in updates.values():
        for _ in range(5):
            update()
    times: dict[str, list[float]] = {name: [] for name in updates}
    for _ in range(args.turns):
        for name, update in updates.items():
            start = time.perf_counter()
            update()
            times[name].append((time.perf_counter() - start) / EPOCHS * 1e6)
    ratios = {
        name: [one / other for one, other in zip(found, times["bare"], strict=True)] for name, found in times.items()
    }
    result = {
        "what": "microseconds of a minibatch of 256 of PPO, CartPole-v1's networks 64-64 tanh, one thread, all in turn",
        "machine": {"cpus": os.cpu_count(), "processor": platform.machine(), "python": platform.python_version()},
        "turns": args.turns,
        "median_us": {name: round(statistics.median(found), 1) for name, found in times.items()},
        "of_bare": {name: round(statistics.median(found), 3) for name, found in ratios.items()},
    }
    RESULT.write_text(json.dumps(result, indent=2) + "\n")
    for name in updates:
        print(
            f"{name:10} {result['median_us'][name]:8,.0f} us a minibatch, {result['of_bare'][name]:.2f} of the bare loop"
        )
    print(f"-> {RESULT}")


if __name__ == "__main__":
    main()
