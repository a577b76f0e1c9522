"""rsl_rl's PPO on CartPole simulated in torch, for ``benchmarks/torch_envs.py``: the same environment, network and settings.

Its policies for numbers are Gaussian: the sign of its one number is the push, where ours choose one of two.
"""

import time
from typing import Any

import torch
from rsl_rl.env import VecEnv
from rsl_rl.runners import OnPolicyRunner
from tensordict import TensorDict

import groupwise as gw


class CartPole(VecEnv):  # type: ignore[misc]
    """``TorchCartPole`` behind rsl_rl's interface; finished rows are reset within the step."""

    def __init__(self, num_envs: int, device: str) -> None:
        self.env = gw.TorchCartPole(num_envs, device=device)
        self.num_envs, self.num_actions, self.device = num_envs, 1, device
        self.max_episode_length = self.env.max_episode_steps
        self.episode_length_buf = torch.zeros(num_envs, dtype=torch.long, device=device)
        self.cfg: dict[str, Any] = {}
        self.lengths = torch.zeros(2, device=device)
        rows = self.env.seeded(self.env.rows, 0)
        self.rows = self.env.renewed(rows, torch.ones_like(rows.held))

    def get_observations(self) -> TensorDict:
        """What all rows see."""
        return TensorDict({"policy": self.env.observed(self.rows)}, batch_size=[self.num_envs])

    def step(self, actions: torch.Tensor) -> tuple[TensorDict, torch.Tensor, torch.Tensor, dict[str, Any]]:
        """One step of all rows."""
        elapsed = self.rows.elapsed + 1
        self.rows, step = self.env.stepped(self.rows, (actions[:, 0] > 0).long())
        done = step.terminated | step.truncated
        self.lengths += torch.stack([(elapsed * done).sum(), done.sum()])
        self.rows = self.env.renewed(self.rows, done)
        return self.get_observations(), step.reward, done.long(), {"time_outs": step.truncated}


def train(num_envs: int, device: str, settings: dict[str, Any], *, warm_up: int, seconds: float) -> dict[str, Any]:
    """Env steps per second of iterations that follow ``warm_up`` of them, and the mean length of episodes in them."""
    model = {"class_name": "MLPModel", "hidden_dims": [64, 64], "activation": "tanh"}
    cfg = {
        "num_steps_per_env": settings["num_steps"],
        "save_interval": 10**9,
        "obs_groups": {"actor": ["policy"], "critic": ["policy"]},
        "actor": model | {"distribution_cfg": {"class_name": "GaussianDistribution", "init_std": 1.0}},
        "critic": dict(model),
        "algorithm": {
            "class_name": "PPO",
            "num_learning_epochs": settings["num_epochs"],
            "num_mini_batches": settings["num_minibatches"],
            "learning_rate": settings["learning_rate"],
            "gamma": settings["gamma"],
            "lam": settings["gae_lambda"],
            "schedule": "fixed",
        },
    }
    env = CartPole(num_envs, device)
    runner = OnPolicyRunner(env, cfg, log_dir=None, device=device)
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    runner.learn(warm_up)
    wait()
    env.lengths.zero_()
    start, iterations = time.perf_counter(), 0
    while iterations < 2 or time.perf_counter() - start < seconds:
        runner.learn(2)
        wait()
        iterations += 2
    taken = time.perf_counter() - start
    steps = iterations * num_envs * settings["num_steps"]
    total, episodes = env.lengths.tolist()
    return {
        "steps_per_second": round(steps / taken),
        "return": total / max(episodes, 1),
        "iterations": iterations,
    }
