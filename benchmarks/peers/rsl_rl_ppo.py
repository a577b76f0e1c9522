"""rsl_rl's PPO on simulators in torch, for ``benchmarks/torch_envs.py``: the same environment, network and settings.

Its policies for numbers are Gaussian: on CartPole the sign of its one number is the push, where ours choose one of two.
"""

import time
from collections.abc import Callable
from typing import Any

import torch
from rsl_rl.env import VecEnv
from rsl_rl.runners import OnPolicyRunner
from tensordict import TensorDict

import groupwise as gw


class Rows(VecEnv):  # type: ignore[misc]
    """A ``TorchGroupEnv`` behind rsl_rl's interface; finished rows are reset within the step."""

    def __init__(self, env: gw.TorchGroupEnv, action: Callable[[torch.Tensor], torch.Tensor], num_actions: int) -> None:
        self.env, self.action = env, action
        self.num_envs, self.num_actions, self.device = env.num_envs, num_actions, str(env.device)
        self.max_episode_length = env.max_episode_steps
        self.episode_length_buf = torch.zeros(env.num_envs, dtype=torch.long, device=env.device)
        self.cfg: dict[str, Any] = {}
        self.running = torch.zeros(env.num_envs, device=env.device)
        self.ended = torch.zeros(2, device=env.device)
        """Sum of the returns of episodes that ended, and how many they are."""
        rows = env.seeded(env.rows, 0)
        self.rows = env.renewed(rows, torch.ones_like(rows.paused))

    def get_observations(self) -> TensorDict:
        """What all rows see."""
        return TensorDict({"policy": self.env.observed(self.rows)}, batch_size=[self.num_envs])

    def step(self, actions: torch.Tensor) -> tuple[TensorDict, torch.Tensor, torch.Tensor, dict[str, Any]]:
        """One step of all rows."""
        self.rows, step = self.env.stepped(self.rows, self.action(actions))
        done = step.terminated | step.truncated
        self.running = self.running + step.reward
        self.ended += torch.stack([(self.running * done).sum(), done.sum()])
        self.running = self.running * ~done
        self.rows = self.env.renewed(self.rows, done)
        return self.get_observations(), step.reward, done.long(), {"time_outs": step.truncated}


def pushed_by_sign(env: gw.TorchGroupEnv) -> Rows:
    """An environment of two actions."""
    return Rows(env, lambda actions: (actions[:, 0] > 0).long(), 1)


def train(env: Rows, settings: dict[str, Any], *, warm_up: int, seconds: float) -> dict[str, Any]:
    """Env steps per second of iterations that follow ``warm_up`` of them, and the mean return of episodes in them."""
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
    device = env.device
    runner = OnPolicyRunner(env, cfg, log_dir=None, device=device)
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    runner.learn(warm_up)
    wait()
    env.ended.zero_()
    start, iterations = time.perf_counter(), 0
    while iterations < 2 or time.perf_counter() - start < seconds:
        runner.learn(2)
        wait()
        iterations += 2
    taken = time.perf_counter() - start
    steps = iterations * env.num_envs * settings["num_steps"]
    total, episodes = env.ended.tolist()
    return {
        "steps_per_second": round(steps / taken),
        "return": total / max(episodes, 1),
        "iterations": iterations,
    }
