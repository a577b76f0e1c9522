"""PPO in one plain loop, at the settings and with the details that CleanRL documents for ``ppo.py``; written anew.

Python environments in a ``SyncVectorEnv``, orthogonal weights, Adam with eps 1e-5, a learning rate that falls linearly,
advantages normalised by minibatch, a clipped value loss, a cut episode treated like one that ended.
Source: https://docs.cleanrl.dev/rl-algorithms/ppo/
"""

from collections import deque
from typing import Any

from settings import Settings
from worker import Watch, parse

args = parse("cleanrl")

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn
from torch.distributions import Categorical


def network(num_inputs: int, num_outputs: int, last_gain: float) -> nn.Sequential:
    sizes = [(num_inputs, 64, 2**0.5), (64, 64, 2**0.5), (64, num_outputs, last_gain)]
    layers = [nn.Linear(before, after) for before, after, _ in sizes]
    for layer, (_, _, gain) in zip(layers, sizes, strict=True):
        nn.init.orthogonal_(layer.weight, gain)
        nn.init.zeros_(layer.bias)
    return nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2])


def advantages_of(rewards: Tensor, values: Tensor, dones: Tensor, cfg: Settings) -> Tensor:
    """Generalised advantages ``[T, N]``; ``dones[t]``: the episode was over before step t."""
    out, later = torch.zeros_like(rewards), torch.zeros(rewards.shape[1])
    for t in reversed(range(len(rewards))):
        goes_on = 1.0 - dones[t + 1]
        delta = rewards[t] + cfg.gamma * goes_on * values[t + 1] - values[t]
        out[t] = later = delta + cfg.gamma * cfg.gae_lambda * goes_on * later
    return out


def loss_of(actor: nn.Module, critic: nn.Module, batch: dict[str, Tensor], cfg: Settings) -> Tensor:
    policy = Categorical(logits=actor(batch["obs"]))
    ratio = (policy.log_prob(batch["action"]) - batch["log_prob"]).exp()
    advantage = batch["advantage"]
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    policy_loss = torch.max(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.2)).mean()
    value, old, target = critic(batch["obs"]).squeeze(-1), batch["value"], batch["advantage"] + batch["value"]
    clipped = old + (value - old).clamp(-0.2, 0.2)
    value_loss = 0.5 * torch.max((value - target) ** 2, (clipped - target) ** 2).mean()
    return policy_loss - cfg.ent_coef * policy.entropy().mean() + 0.5 * value_loss


def main(args: Any) -> None:
    cfg: Settings = args.cfg
    torch.manual_seed(args.seed)
    shuffle = np.random.default_rng(args.seed)
    rows, length = cfg.num_envs, cfg.num_steps
    makers = [lambda: gym.make("CartPole-v1")] * rows
    envs = gym.vector.SyncVectorEnv(makers, autoreset_mode=gym.vector.AutoresetMode.SAME_STEP)
    actor, critic = network(4, 2, 0.01), network(4, 1, 1.0)
    weights = [*actor.parameters(), *critic.parameters()]
    optimizer = torch.optim.Adam(weights, lr=cfg.learning_rate, eps=1e-5)
    watch, latest, returns = Watch(args), deque(maxlen=100), np.zeros(rows)

    def act(obs: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            return actor(torch.as_tensor(obs)).argmax(-1).numpy()

    obs, action = torch.zeros(length, rows, 4), torch.zeros(length, rows, dtype=torch.int64)
    log_prob, reward = torch.zeros(length, rows), torch.zeros(length, rows)
    value, done = torch.zeros(length + 1, rows), torch.zeros(length + 1, rows)
    seen, steps, over = torch.as_tensor(envs.reset(seed=args.seed)[0]), 0, False
    while not over:
        if cfg.annealed:
            optimizer.param_groups[0]["lr"] = cfg.learning_rate * (1 - steps / args.steps)
        done[0] = done[-1]
        for t in range(length):
            with torch.no_grad():
                policy = Categorical(logits=actor(seen))
                action[t] = policy.sample()
                log_prob[t], value[t], obs[t] = policy.log_prob(action[t]), critic(seen).squeeze(-1), seen
            next_obs, rewards, terminated, truncated, _ = envs.step(action[t].numpy())
            ended = terminated | truncated
            seen, reward[t], done[t + 1] = torch.as_tensor(next_obs), torch.as_tensor(rewards), torch.as_tensor(ended)
            returns += rewards
            latest.extend(returns[ended])
            returns[ended] = 0
        steps += rows * length
        with torch.no_grad():
            value[-1] = critic(seen).squeeze(-1)
        advantage = advantages_of(reward, value, done, cfg)
        stored = {"obs": obs, "action": action, "log_prob": log_prob, "advantage": advantage, "value": value[:-1]}
        flat = {name: tensor.flatten(0, 1) for name, tensor in stored.items()}
        order = np.arange(rows * length)
        for _ in range(cfg.num_epochs):
            shuffle.shuffle(order)
            for first in range(0, len(order), cfg.minibatch_size):
                chosen = torch.as_tensor(order[first : first + cfg.minibatch_size])
                loss = loss_of(actor, critic, {name: tensor[chosen] for name, tensor in flat.items()}, cfg)
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(weights, 0.5)
                optimizer.step()
        over = watch.iteration(steps, latest, act)
    watch.finish()


if __name__ == "__main__":
    main(args)
