"""A policy of your own: it denoises actions by flow matching, is cloned from demonstrations, and goes on with GRPO.

Noise at time 1 becomes an action at time 0 along ``dx = v(x, time) dtime``, in K steps. That is deterministic and has no
density, so in each decision one step, drawn at random, is a Gaussian transition, whose log-probability is that of the
decision. With ``t`` the time before the step, ``h = 1/K`` its size and ``a`` the noise level, Flow-SDE has::

    sigma^2 = a^2 t / (1 - t)
    mean    = x - h (v + sigma^2 / (2 t) (x + (1 - t) v))
    std     = sigma sqrt(h)

where ``1 - t`` in ``sigma`` is at least ``h``. For small steps, actions have the distribution of the deterministic flow.

    python examples/flow_policy.py
    groupwise train Pendulum-v1 --plugin examples/flow_policy.py --policy flow --policy.noise-level 0.7

Sources: Flow-GRPO, https://arxiv.org/abs/2505.05470, equation 9; one stochastic step and one ratio per decision: pi_RL,
https://arxiv.org/abs/2510.25889.
"""

import argparse
import math
from pathlib import Path

import numpy as np
import torch
from torch import nn

import groupwise as gw
from groupwise.config.policy import AnyPolicyCfg
from groupwise.data.rollout import TensorSpec
from groupwise.embodied.demos import record_demos
from groupwise.policies.base import Action, Evaluation, Policy


class FlowCfg(AnyPolicyCfg):
    """Settings of ``FlowPolicy``."""

    hidden_size: int = 128
    """Width of the two hidden layers."""
    denoising_steps: int = 4
    """Steps from noise to actions, in training and in evaluation."""
    noise_level: float = 0.5
    """The standard deviation of the stochastic step is proportional to it."""


@gw.register_policy("flow", FlowCfg)
class FlowPolicy(Policy):
    """Denoises actions in a bounded Box, given observations in a Box.

    Its own action, which the rollout stores, is what its score needs: the noisy action before and after the stochastic
    step, the action in the end (-1 and 1 are the bounds) and the time, ``[B, 3 A + 1]``. The other steps count as part of the
    environment. The entropy does not depend on the weights, so an entropy bonus does nothing.
    """

    gives_distribution = False

    def __init__(self, observation_space, action_space, cfg, *, actor_only=False, gamma=0.99):
        super().__init__()
        if not actor_only:
            raise gw.errors.ConfigError("a flow policy has no critic; fix: algorithm='grpo'")
        if not action_space.is_bounded():
            raise gw.errors.UnsupportedSpaceError(
                f"a flow policy needs a bounded Box, got {action_space}; fix: RescaleAction"
            )
        self.observation_space, self.action_space = observation_space, action_space
        self.cfg, self.actor_only = cfg, actor_only
        inputs, self.size = math.prod(observation_space.shape), math.prod(action_space.shape)
        high = np.where(np.isfinite(observation_space.high), observation_space.high, 1.0).reshape(-1)
        self.register_buffer("scale", torch.tensor(high, dtype=torch.float32), persistent=False)
        self.register_buffer("low", torch.tensor(action_space.low), persistent=False)
        self.register_buffer("high", torch.tensor(action_space.high), persistent=False)
        layers = [nn.Linear(inputs + self.size + 1, cfg.hidden_size), nn.Tanh()]
        layers += [nn.Linear(cfg.hidden_size, cfg.hidden_size), nn.Tanh(), nn.Linear(cfg.hidden_size, self.size)]
        self.velocity = nn.Sequential(*layers)
        self.action_spec = TensorSpec((3 * self.size + 1,), torch.float32)

    @torch.no_grad()
    def act(self, obs, deterministic=False, generator=None):
        """Denoised actions; ``deterministic`` ones follow the flow from the noise 0, the likeliest."""
        rows, steps = len(obs), self.cfg.denoising_steps

        def draw():
            return torch.randn(rows, self.size, generator=generator, device=self.device)

        noisy = torch.zeros(rows, self.size, device=self.device) if deterministic else draw()
        drawn = torch.randint(steps, (rows, 1), generator=generator, device=self.device)
        noise, before, after, log_prob = draw(), noisy, noisy, noisy[:, 0]
        for step in range(steps):
            time = torch.full((rows, 1), 1 - step / steps, device=self.device)
            velocity = self.flow(obs, noisy, time)
            mean, std = self.transition(noisy, velocity, time)
            flowed = noisy - velocity / steps
            taken = flowed if deterministic else mean + std * noise
            here = drawn == step
            before, after = torch.where(here, noisy, before), torch.where(here, taken, after)
            log_prob = torch.where(here[:, 0], density(taken, mean, std), log_prob)
            noisy = torch.where(here, taken, flowed)
        own = torch.cat([before, after, noisy, 1 - drawn / steps], dim=1)
        return Action(own, log_prob)

    def evaluate(self, batch):
        """Log-probabilities of the stochastic steps, with gradient: the ratio is 1 until the weights change."""
        before, after, _, time = self.parts(batch["action"])
        mean, std = self.transition(before, self.flow(batch["obs"], before, time), time)
        entropy = self.size * (std[:, 0].log() + 0.5 * math.log(2 * math.pi * math.e))
        return Evaluation(density(after, mean, std), entropy)

    def label(self, action, noise, generator):
        """Demonstrations with new noise and times; flows explore by their own noise, so ``label_noise`` is not used."""
        _, after, actions, time = self.parts(action)
        start = torch.randn(actions.shape, generator=generator)
        return torch.cat([start, after, actions, torch.rand(time.shape, generator=generator)], dim=-1)

    def imitate(self, batch):
        """Minus the loss of flow matching: the squared error of the velocity between the demonstrated action and noise."""
        noise, _, actions, time = self.parts(batch["action"])
        velocity = self.flow(batch["obs"], torch.lerp(actions, noise, time), time)
        loss = (velocity - (noise - actions)).square().mean(dim=1)
        return Evaluation(-loss, torch.zeros_like(loss))

    def env_action(self, action):
        """The denoised actions, in the bounds of the space."""
        share = (self.parts(action)[2].clamp(-1, 1) + 1) / 2
        return torch.lerp(self.low, self.high, share.reshape(*action.shape[:-1], *self.low.shape))

    def own_action(self, action):
        """Demonstrated actions as they are stored; ``label`` fills in noise and time."""
        own = (2 * (action - self.low) / (self.high - self.low) - 1).flatten(-self.low.dim())
        return torch.cat([torch.zeros_like(own), torch.zeros_like(own), own, torch.zeros_like(own[..., :1])], dim=-1)

    def flow(self, obs, noisy, time):
        return self.velocity(torch.cat([obs.flatten(1) / self.scale, noisy, time], dim=1))

    def transition(self, noisy, velocity, time):
        """Mean [B, A] and standard deviation [B, 1] of the stochastic step: the equation above."""
        size, level = 1 / self.cfg.denoising_steps, self.cfg.noise_level
        rest = (1 - time).clamp(min=size)
        mean = noisy - size * (velocity + level**2 / (2 * rest) * (noisy + (1 - time) * velocity))
        return mean, level * (size * time / rest).sqrt()

    def parts(self, own):
        return torch.split(own, [self.size, self.size, self.size, 1], dim=-1)


def density(x, mean, std):
    """Log-density of independent Gaussians [B]."""
    return (-0.5 * ((x - mean) / std).square() - std.log() - 0.5 * math.log(2 * math.pi)).sum(dim=1)


def swing_up(obs):
    """An expert for the pendulum: brings its energy to that at rest on top, and holds it there."""
    cos, sin, speed = obs
    if cos > 0.9:
        return [-10 * sin - 2 * speed]
    return [(15 - speed**2 / 2 - 15 * cos) * speed / 2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--total-steps", type=int, default=40_000, help="of GRPO; cloning takes five times as many")
    parser.add_argument("--run-dir", type=Path, default=Path("runs/flow"))
    args = parser.parse_args()

    demos = record_demos("Pendulum-v1", swing_up, episodes=20, out=args.run_dir / "demos")
    cfg = gw.config.BCCfg(data=demos.path, learning_rate=1e-3)
    settings = {"policy": {"name": "flow"}, "total_steps": 5 * args.total_steps}
    clone = gw.train("Pendulum-v1", cfg, run_dir=args.run_dir / "clone", **settings)
    settings = {"policy": {"name": "flow", "init_from": clone.path}, "total_steps": args.total_steps}
    run = gw.train("Pendulum-v1", "grpo", run_dir=args.run_dir / "grpo", **settings)
    print(f"clone: {clone.summary['return_mean']:.0f}, after GRPO: {run.summary['return_mean']:.0f}")


if __name__ == "__main__":
    main()
