"""PPO of TorchRL's parts in the order that its tutorial shows: collector, GAE, replay buffer, ``ClipPPOLoss``.

The environments are Gymnasium's ``SyncVectorEnv``, the fastest here of what TorchRL can wrap; collector and loss say
what is best for them. The settings are those of SB3's zoo, which suit CartPole.
Source: https://docs.pytorch.org/rl/stable/tutorials/coding_ppo.html
"""

import os
from collections import deque
from typing import Any

from settings import Settings
from worker import Watch, parse

args = parse("zoo")
os.environ.setdefault("RL_LOGGING_LEVEL", "ERROR")

import gymnasium as gym
import numpy as np
import torch
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.collectors import Collector
from torchrl.data import LazyTensorStorage, ReplayBuffer, SamplerWithoutReplacement
from torchrl.envs import GymWrapper, RewardSum, TransformedEnv
from torchrl.modules import MLP, ProbabilisticActor, ValueOperator
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE


def network(num_outputs: int, last_gain: float) -> MLP:
    mlp = MLP(in_features=4, out_features=num_outputs, num_cells=[64, 64], activation_class=nn.Tanh)
    linear = [layer for layer in mlp if isinstance(layer, nn.Linear)]
    for layer, gain in zip(linear, (2**0.5, 2**0.5, last_gain), strict=True):
        nn.init.orthogonal_(layer.weight, gain)
        nn.init.zeros_(layer.bias)
    return mlp


def main(args: Any) -> None:
    cfg: Settings = args.cfg
    torch.manual_seed(args.seed)
    vector = gym.make_vec(
        "CartPole-v1",
        cfg.num_envs,
        vectorization_mode="sync",
        vector_kwargs={"autoreset_mode": gym.vector.AutoresetMode.SAME_STEP},
    )
    env = TransformedEnv(GymWrapper(vector, categorical_action_encoding=True), RewardSum())
    env.set_seed(args.seed)
    mlp = network(2, 0.01)
    actor = ProbabilisticActor(
        TensorDictModule(mlp, in_keys=["observation"], out_keys=["logits"]),
        in_keys=["logits"],
        spec=env.action_spec,
        distribution_class=torch.distributions.Categorical,
        return_log_prob=True,
    )
    critic = ValueOperator(network(1, 1.0), in_keys=["observation"])
    advantage = GAE(gamma=cfg.gamma, lmbda=cfg.gae_lambda, value_network=critic)
    loss = ClipPPOLoss(
        actor,
        critic,
        clip_epsilon=0.2,
        entropy_bonus=cfg.ent_coef > 0,
        entropy_coeff=cfg.ent_coef,
        critic_coeff=0.5,
        loss_critic_type="l2",
        normalize_advantage=True,
    )
    optimizer = torch.optim.Adam(loss.parameters(), lr=cfg.learning_rate, eps=1e-5)
    iterations = -(-args.steps // cfg.batch_size)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 1e-8, total_iters=iterations)
    collector = Collector(
        env,
        actor,
        frames_per_batch=cfg.batch_size,
        total_frames=iterations * cfg.batch_size,
        auto_register_policy_transforms=False,  # nothing recurrent
    )
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(cfg.batch_size),
        sampler=SamplerWithoutReplacement(),
        batch_size=cfg.minibatch_size,
    )

    def act(obs: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            return mlp(torch.as_tensor(obs)).argmax(-1).numpy()

    watch, latest, steps = Watch(args), deque(maxlen=100), 0
    for batch in collector:
        steps += batch.numel()
        with torch.no_grad():
            advantage(batch)
        after = batch["next"]
        latest.extend(after["episode_reward"][after["done"]].tolist())
        buffer.extend(batch.reshape(-1))
        for _ in range(cfg.num_epochs):
            for minibatch in buffer:
                losses = loss(minibatch)
                total = sum(
                    losses[name] for name in ("loss_objective", "loss_critic", "loss_entropy") if name in losses
                )
                optimizer.zero_grad()
                total.backward()
                nn.utils.clip_grad_norm_(loss.parameters(), 0.5)
                optimizer.step()
        if cfg.annealed:
            schedule.step()
        if watch.iteration(steps, latest, act):
            break
    watch.finish()
    collector.shutdown()


if __name__ == "__main__":
    main(args)
