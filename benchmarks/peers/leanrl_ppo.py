"""PPO as LeanRL writes it, for ``benchmarks/torch_envs.py``: a loop of compiled functions, with CUDA graphs on a GPU.

It does to torch environments what LeanRL (https://github.com/meta-pytorch/LeanRL) does to CleanRL's scripts. Acting,
advantages and the step of a minibatch are one compiled function each (on a GPU in ``tensordict.nn.CudaGraphModule``),
the learning rate is a tensor, and Adam is fused. The environment's step is not compiled.
"""

import time
from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDict
from tensordict.nn import CudaGraphModule
from torch import Tensor, nn
from torch.distributions import Categorical, Distribution, Normal

import groupwise as gw


class Agent(nn.Module):
    """Actor and critic, 64-64 tanh, with orthogonal weights."""

    def __init__(self, env: gw.TorchGroupEnv) -> None:
        super().__init__()
        (width,) = env.observation_space.shape
        self.discrete = hasattr(env.action_space, "n")
        num_outputs = int(env.action_space.n) if self.discrete else env.action_space.shape[0]
        self.actor, self.critic = _network(width, num_outputs, 0.01), _network(width, 1, 1.0)
        self.log_std = nn.Parameter(torch.zeros(num_outputs))

    def policy(self, obs: Tensor) -> Distribution:
        """Over actions."""
        outputs = self.actor(obs)
        if self.discrete:
            return Categorical(logits=outputs, validate_args=False)
        return Normal(outputs, self.log_std.exp(), validate_args=False)

    def log_prob(self, policy: Distribution, action: Tensor) -> Tensor:
        """Of whole actions."""
        found: Tensor = policy.log_prob(action)
        return found if self.discrete else found.sum(-1)

    def act(self, obs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Sampled actions, their log-probabilities, and values."""
        policy = self.policy(obs)
        action = policy.sample()
        return action, self.log_prob(policy, action), self.critic(obs)[:, 0]


def _network(width: int, num_outputs: int, gain: float) -> nn.Sequential:
    layers = [nn.Linear(width, 64), nn.Linear(64, 64), nn.Linear(64, num_outputs)]
    for layer, scale in zip(layers, (2**0.5, 2**0.5, gain), strict=True):
        nn.init.orthogonal_(layer.weight, scale)
        nn.init.zeros_(layer.bias)
    return nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2])


class Rows:
    """A ``TorchGroupEnv`` that resets finished rows within the step; truncated episodes are ended, as in CleanRL."""

    def __init__(self, env: gw.TorchGroupEnv) -> None:
        self.env = env
        self.bounds = None
        if not hasattr(env.action_space, "n"):
            self.bounds = [torch.as_tensor(b, device=env.device) for b in (env.action_space.low, env.action_space.high)]
        rows = env.seeded(env.rows, 0)
        self.rows = env.renewed(rows, torch.ones_like(rows.paused))
        self.running = torch.zeros(env.num_envs, device=env.device)
        self.ended = torch.zeros(2, device=env.device)
        """Sum of the returns of episodes that ended, and how many they are."""

    def observed(self) -> Tensor:
        """What all rows see."""
        return self.env.observed(self.rows).clone()

    def step(self, action: Tensor) -> tuple[Tensor, Tensor]:
        """Rewards, and whose episodes ended."""
        self.rows, step = self.env.stepped(self.rows, action if self.bounds is None else action.clamp(*self.bounds))
        done = step.terminated | step.truncated
        self.running = self.running + step.reward
        self.ended += torch.stack([(self.running * done).sum(), done.sum()])
        self.running = self.running * ~done
        self.rows = self.env.renewed(self.rows, done)
        return step.reward.clone(), done.float()


def advantages(
    reward: Tensor, done: Tensor, value: Tensor, last: Tensor, gamma: float, gae_lambda: float
) -> tuple[Tensor, Tensor]:
    """Generalised advantages and the critic's targets, [T, N]."""
    advantage, found = torch.zeros_like(last), []
    for t in range(len(reward) - 1, -1, -1):
        alive = 1 - done[t]
        advantage = reward[t] + gamma * last * alive - value[t] + gamma * gae_lambda * alive * advantage
        last = value[t]
        found.append(advantage)
    advantage = torch.stack(found[::-1])
    return advantage, advantage + value


def minibatch_step(agent: Agent, optimizer: torch.optim.Adam) -> Callable[..., Tensor]:
    """One step of PPO's loss as CleanRL writes it, without value clipping and entropy bonus, as in the other runs."""

    def step(obs: Tensor, action: Tensor, old: Tensor, advantage: Tensor, target: Tensor) -> Tensor:
        optimizer.zero_grad()
        policy = agent.policy(obs)
        ratio = (agent.log_prob(policy, action) - old).exp()
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        surrogate = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
        value_loss = 0.5 * (agent.critic(obs)[:, 0] - target).square().mean()
        loss = -surrogate + 0.5 * value_loss
        loss.backward()
        nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
        optimizer.step()
        return loss.detach()

    return step


def train(env: gw.TorchGroupEnv, settings: dict[str, Any], *, warm_up: int, seconds: float) -> dict[str, Any]:
    """Env steps per second of iterations that follow ``warm_up`` of them, and the mean return of episodes in them."""
    cuda = env.device.type == "cuda"
    agent, rows = Agent(env).to(env.device), Rows(env)
    rate = torch.tensor(settings["learning_rate"], device=env.device)
    optimizer = torch.optim.Adam(agent.parameters(), lr=rate, eps=1e-5, fused=True, capturable=cuda)
    act, credit, step = (
        torch.compile(function) for function in (agent.act, advantages, minibatch_step(agent, optimizer))
    )
    if cuda:
        act, credit, step = CudaGraphModule(act), CudaGraphModule(credit), CudaGraphModule(step)

    def iterate() -> None:
        steps = []
        with torch.no_grad():
            for _ in range(settings["num_steps"]):
                obs = rows.observed()
                action, log_prob, value = (found.clone() for found in act(obs))
                reward, done = rows.step(action)
                steps.append((obs, action, log_prob, value, reward, done))
            obs, action, log_prob, value, reward, done = (torch.stack(part) for part in zip(*steps, strict=True))
            last = agent.critic(rows.observed())[:, 0]
            advantage, target = credit(reward, done, value, last, settings["gamma"], settings["gae_lambda"])
        parts = {"obs": obs, "action": action, "old": log_prob, "advantage": advantage, "target": target}
        batch = TensorDict({name: part.flatten(0, 1) for name, part in parts.items()}, batch_size=[reward.numel()])
        for _ in range(settings["num_epochs"]):
            for index in torch.randperm(len(batch), device=env.device).chunk(settings["num_minibatches"]):
                step(**{name: part.contiguous() for name, part in batch[index].items()})

    wait = torch.cuda.synchronize if cuda else lambda: None
    for _ in range(warm_up):
        iterate()
    wait()
    rows.ended.zero_()
    start, iterations = time.perf_counter(), 0
    while iterations < 2 or time.perf_counter() - start < seconds:
        iterate()
        wait()
        iterations += 1
    taken = time.perf_counter() - start
    total, episodes = rows.ended.tolist()
    return {
        "steps_per_second": round(iterations * env.num_envs * settings["num_steps"] / taken),
        "return": total / max(episodes, 1),
        "iterations": iterations,
    }
