"""Stable-Baselines3's PPO at the settings of RL Baselines3 Zoo (``hyperparams/ppo.yml``; v5 of MuJoCo's tasks at those of v4)."""

import time
from typing import Any

from plan import EPISODES, EVALUATIONS, FINAL_EPISODES, OVERSHOOT, Task

from groupwise.seeding import derive_seed, row_seeds

NETWORK: dict[str, Any] = {"log_std_init": -2, "ortho_init": False, "net_arch": [256, 256]}
"""Of MuJoCo's tasks, with ReLU."""

ZOO: dict[str, dict[str, Any]] = {
    "CartPole-v1": {
        "n_envs": 8,
        "n_steps": 32,
        "batch_size": 256,
        "gae_lambda": 0.8,
        "gamma": 0.98,
        "n_epochs": 20,
        "learning_rate": ("linear", 1e-3),
        "clip_range": ("linear", 0.2),
    },
    "Acrobot-v1": {"normalize": True, "n_envs": 16, "n_steps": 256, "gae_lambda": 0.94, "n_epochs": 4},
    "MountainCarContinuous-v0": {
        "normalize": True,
        "n_envs": 1,
        "n_steps": 8,
        "batch_size": 256,
        "gamma": 0.9999,
        "learning_rate": 7.77e-5,
        "ent_coef": 0.00429,
        "clip_range": 0.1,
        "n_epochs": 10,
        "gae_lambda": 0.9,
        "max_grad_norm": 5,
        "vf_coef": 0.19,
        "use_sde": True,
        "policy_kwargs": {"log_std_init": -3.29, "ortho_init": False},
    },
    "Pendulum-v1": {
        "n_envs": 4,
        "n_steps": 1024,
        "gamma": 0.9,
        "n_epochs": 10,
        "learning_rate": 1e-3,
        "use_sde": True,
        "sde_sample_freq": 4,
    },
    "LunarLander-v3": {
        "n_envs": 16,
        "n_steps": 1024,
        "batch_size": 64,
        "gae_lambda": 0.98,
        "gamma": 0.999,
        "n_epochs": 4,
        "ent_coef": 0.01,
    },
    "HalfCheetah-v5": {
        "normalize": True,
        "n_envs": 1,
        "batch_size": 64,
        "n_steps": 512,
        "gamma": 0.98,
        "learning_rate": 2.0633e-05,
        "ent_coef": 0.000401762,
        "clip_range": 0.1,
        "n_epochs": 20,
        "gae_lambda": 0.92,
        "max_grad_norm": 0.8,
        "vf_coef": 0.58096,
        "policy_kwargs": NETWORK,
    },
    "Hopper-v5": {
        "normalize": True,
        "n_envs": 1,
        "batch_size": 32,
        "n_steps": 512,
        "gamma": 0.999,
        "learning_rate": 9.80828e-05,
        "ent_coef": 0.00229519,
        "n_epochs": 5,
        "gae_lambda": 0.99,
        "max_grad_norm": 0.7,
        "vf_coef": 0.835671,
        "policy_kwargs": NETWORK,
    },
}


def sb3_ppo(task: Task, seed: int) -> dict[str, Any]:
    """Trains on one thread, evaluated as the other methods are; evaluation is not in its seconds."""
    import torch
    from stable_baselines3 import PPO
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.vec_env import VecNormalize

    torch.set_num_threads(1)
    settings = {key: _value(key, value) for key, value in ZOO[task.env].items()}
    gamma = settings.setdefault("gamma", 0.99)
    # environments of consecutive seeds would share starts: SB3 and Gymnasium count rows up from the seed
    env: Any = make_vec_env(task.env, n_envs=settings.pop("n_envs"), seed=derive_seed(seed, "environments"))
    if settings.pop("normalize", False):
        env = VecNormalize(env, gamma=gamma)
    model = PPO("MlpPolicy", env, seed=seed, device="cpu", **settings)
    watch = _watch(task, seed)
    start = time.process_time()
    model.learn(round(task.steps * (1 - OVERSHOOT)), callback=watch)
    seconds = time.process_time() - start - watch.evaluating
    return {
        "steps": watch.steps,
        "returns": watch.returns,
        "final": round(greedy_return(model, task.env, FINAL_EPISODES, derive_seed(seed, "final")), 3),
        "env_steps": model.num_timesteps,
        "cpu_seconds": round(seconds, 2),
    }


def _value(key: str, value: Any) -> Any:
    if isinstance(value, tuple):  # the zoo's "lin_": falls to 0
        return lambda left: left * value[1]
    if key == "policy_kwargs" and "net_arch" in value:
        from torch import nn

        return value | {"activation_fn": nn.ReLU}
    return value


def greedy_return(model: Any, env_id: str, episodes: int, seed: int) -> float:
    """Mean return of so many episodes, each in an environment of its own."""
    import gymnasium as gym
    import numpy as np

    env: Any = gym.make_vec(env_id, episodes, vectorization_mode="sync")
    scaled = model.get_vec_normalize_env()
    obs, _ = env.reset(seed=row_seeds(seed, episodes))
    total, running = np.zeros(episodes), np.ones(episodes, dtype=bool)
    while running.any():
        action, _ = model.predict(obs if scaled is None else scaled.normalize_obs(obs), deterministic=True)
        obs, reward, terminated, truncated, _ = env.step(action)
        total += reward * running
        running &= ~(terminated | truncated)
    env.close()
    return float(total.mean())


def _watch(task: Task, seed: int) -> Any:
    from stable_baselines3.common.callbacks import BaseCallback

    class Watch(BaseCallback):
        def __init__(self) -> None:
            super().__init__()
            self.steps: list[int] = []
            self.returns: list[float] = []
            self.evaluating = 0.0
            self.due = task.steps // EVALUATIONS

        def _look(self, last: bool) -> None:
            if self.num_timesteps < self.due and not last:
                return
            start = time.process_time()
            self.due = self.num_timesteps + task.steps // EVALUATIONS
            self.steps.append(self.num_timesteps)
            self.returns.append(
                round(greedy_return(self.model, task.env, EPISODES, derive_seed(seed, "on the way")), 3)
            )
            self.evaluating += time.process_time() - start

        def _on_rollout_start(self) -> None:
            self._look(last=False)  # the update of the iteration before is done

        def _on_training_end(self) -> None:
            self._look(last=True)

        def _on_step(self) -> bool:
            return True

    return Watch()
