"""A policy that denoises chunks of actions by flow matching (PI0), trained by the ratio of one stochastic step.

Noise at time 1 becomes actions at time 0 along ``dx = v(x, time) dtime``, in K steps. That is deterministic and has no
density, so for training one step, drawn at random for each decision, is a Gaussian transition. Its log-probability is that of
the decision. With ``t`` the time before the step, ``h = 1/K`` its size and ``a`` the noise level, Flow-SDE has::

    sigma^2 = a^2 t / (1 - t)
    mean    = x - h (v + sigma^2 / (2 t) (x + (1 - t) v))
    std     = sigma sqrt(h)

where ``1 - t`` in ``sigma`` is at least ``h``. For small steps the distribution of x at each time is that of the
deterministic flow. The other steps are part of the environment as far as the ratio is concerned, although they change with the
weights, too. Source: Flow-GRPO, https://arxiv.org/abs/2505.05470, equation 9; one stochastic step and a ratio per chunk:
pi_RL, https://arxiv.org/abs/2510.25889.
"""

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from groupwise.config.policy import FlowCfg
from groupwise.data.rollout import Nested, TensorSpec
from groupwise.embodied.pi0 import PI0
from groupwise.embodied.robot_policy import RobotPolicy
from groupwise.policies.base import Action, Batch, Evaluation

_LOG_2PI = math.log(2 * math.pi)
_DEFAULT = FlowCfg()


class Denoising(NamedTuple):
    """What is stored of B decisions: enough to score them again exactly."""

    before: Float[Tensor, "*batch action padded"]
    """Noisy actions before the stochastic step, with the model's padding; of demonstrations, noise."""
    after: Float[Tensor, "*batch action dim"]
    """After it; 0 of demonstrations."""
    actions: Float[Tensor, "*batch action dim"]
    """At the end: -1 is the lower bound of the action space, 1 the upper one. They may lie outside."""
    time: Float[Tensor, "*batch 1"]
    """Before the stochastic step; of demonstrations, that of their noisy actions."""

    def packed(self) -> Float[Tensor, "*batch number"]:
        """All of it in one row of each decision."""
        *actions, time = self
        return torch.cat([*(part.flatten(-2) for part in actions), time], dim=-1)


def sde_step(
    noisy: Float[Tensor, "batch action dim"],
    velocity: Float[Tensor, "batch action dim"],
    time: Float[Tensor, " batch"],
    size: float,
    noise_level: float,
) -> tuple[Float[Tensor, "batch action dim"], Float[Tensor, "batch 1 1"]]:
    """Mean and standard deviation of the actions at ``time - size``, given those at ``time``."""
    time = time[:, None, None]
    rest = (1 - time).clamp(min=size)
    noise = noisy + (1 - time) * velocity  # what the actions were at time 1, if the velocity is right
    mean = noisy - size * (velocity + noise_level**2 / (2 * rest) * noise)
    return mean, noise_level * (size * time / rest).sqrt()


class FlowPolicy(RobotPolicy):
    """Acts by denoising a chunk of actions in K steps, one of which is a Gaussian transition with a probability ratio.

    The ratio is that of the whole chunk, over all its actions and numbers, executed or not: each influences the others in
    later steps. The policy's own action, which the rollout stores, is a ``Denoising`` in one row. The entropy is that of the
    stochastic step: it depends on the drawn step, not on the weights, so an entropy bonus has no gradient.

    ``deterministic`` actions follow the flow from the noise 0, the likeliest, so they depend on the observation alone.

    The value head reads the expert's output for the proprioception, which does not depend on the noise. Arguments and errors
    are those of ``RobotPolicy``.
    """

    settings = FlowCfg
    cfg: FlowCfg

    def __init__(self, observation_space: Any, action_space: Any, cfg: FlowCfg = _DEFAULT, **arguments: Any) -> None:
        super().__init__(observation_space, action_space, cfg, **arguments)
        self.model = PI0(self.sizes, self.num_actions, self.num_dims, cfg)
        scored = self.num_actions * self.num_dims
        self.action_spec = TensorSpec((self.num_actions * self.model.num_dims + 2 * scored + 1,), torch.float32)
        self.value_head = self._make_value_head(self.model.width)
        self.eval()

    @torch.no_grad()
    def act(self, obs: Nested, deterministic: bool = False, generator: torch.Generator | None = None) -> Action:
        """Denoised chunks for B observations, without gradient."""
        seen = self.model.read(obs)
        rows, steps, device = len(seen.state), self.cfg.denoising_steps, self.device
        noisy = torch.zeros(rows, self.num_actions, self.model.num_dims, device=device)
        drawn = torch.zeros(rows, dtype=torch.int64, device=device)
        if not deterministic:
            noisy = torch.randn(noisy.shape, generator=generator, device=device)
            drawn = torch.randint(steps, (rows,), generator=generator, device=device)
        noise = torch.randn(rows, self.num_actions, self.num_dims, generator=generator, device=device)
        before, after, log_prob, summary = noisy, noise, noise[:, 0, 0], seen.state
        for step in range(steps):
            time = self._time(step).expand(rows)
            velocity, summary = self.model(seen, noisy, time)
            mean, std = self._transition(noisy, velocity, time)
            flowed, padding = self._split(noisy - velocity / steps)
            taken = flowed if deterministic else mean + std * noise
            here = (drawn == step)[:, None, None]
            before, after = torch.where(here, noisy, before), torch.where(here, taken, after)
            log_prob = torch.where(drawn == step, _log_prob(taken, mean, std), log_prob)
            noisy = torch.cat([torch.where(here, taken, flowed), padding], dim=-1)
        own = Denoising(before, after, noisy[..., : self.num_dims], self._time(drawn).unsqueeze(-1))
        return Action(own.packed(), log_prob, self._value(summary))

    def evaluate(self, batch: Batch) -> Evaluation:
        """Scores of the stochastic steps, with gradient: log_prob, entropy and value ``[B]``."""
        own = self.unpacked(batch["action"])
        time = own.time.squeeze(-1)
        velocity, summary = self.model(self.model.read(batch["obs"]), own.before, time)
        mean, std = self._transition(own.before, velocity, time)
        entropy = mean[0].numel() * (std.log() + 0.5 * (1 + _LOG_2PI)).flatten()
        return Evaluation(_log_prob(own.after, mean, std), entropy, self._value(summary))

    def imitate(self, batch: Batch) -> Evaluation:
        """Minus the mean squared error of the velocities at noisy demonstrated actions, with gradient; no entropy.

        Noise and times are those that ``label`` drew. Actions behind the end of an episode count: they are the last one.
        """
        own = self.unpacked(batch["action"])
        actions = self._padded(own.actions)
        noisy = torch.lerp(actions, own.before, own.time.unsqueeze(-1))
        seen = self.model.read(batch["obs"])
        velocity, summary = self.model(seen, noisy, own.time.squeeze(-1))
        loss = (velocity - (own.before - actions)).square().mean(dim=(1, 2))
        return Evaluation(-loss, torch.zeros_like(loss), self._value(summary))

    def label(self, action: Tensor, noise: float, generator: torch.Generator) -> Tensor:
        """Demonstrations with the noise and the times of the flow-matching loss. Actions stay as they are, whatever ``noise``.

        A flow learns the distribution of the actions, and explores by its own noise.
        """
        own, config = self.unpacked(action), self.model.config
        seed = int(torch.randint(2**62, (), generator=generator))
        share = np.random.default_rng(seed).beta(
            config.time_sampling_beta_alpha, config.time_sampling_beta_beta, tuple(own.time.shape)
        )
        time = torch.from_numpy(config.time_sampling_offset + config.time_sampling_scale * share).float()
        return own._replace(before=torch.randn(own.before.shape, generator=generator), time=time).packed()

    def env_action(self, action: Float[Tensor, "*batch number"]) -> Float[Tensor, "..."]:
        """The denoised actions in the bounds of the action space, ``[*batch, *action_space.shape]``."""
        return self._from_share((self.unpacked(action).actions.clamp(-1, 1) + 1) / 2)

    def own_action(self, action: Float[Tensor, "..."]) -> Float[Tensor, "*batch number"]:
        """Environment actions ``[*batch, *action_space.shape]`` as they are stored; ``label`` makes them ready for cloning."""
        actions = 2 * self._to_share(action) - 1
        before = torch.zeros_like(self._padded(actions))
        return Denoising(before, torch.zeros_like(actions), actions, torch.zeros_like(actions[..., 0, :1])).packed()

    def unpacked(self, action: Float[Tensor, "*batch number"]) -> Denoising:
        """What the policy's own actions hold."""
        padded, plain = (self.num_actions, self.model.num_dims), (self.num_actions, self.num_dims)
        sizes = [math.prod(padded), math.prod(plain), math.prod(plain), 1]
        before, after, actions, time = torch.split(action, sizes, dim=-1)
        batch = action.shape[:-1]
        after, actions = after.reshape(*batch, *plain), actions.reshape(*batch, *plain)
        return Denoising(before.reshape(*batch, *padded), after, actions, time)

    def _summary(self, obs: Nested) -> Float[Tensor, "batch feature"]:
        return self.model.summary(self.model.read(obs))

    def _time(self, step: int | Tensor) -> Tensor:
        """Time before a step."""
        return 1 - torch.as_tensor(step, device=self.device) / self.cfg.denoising_steps

    def _transition(self, noisy: Tensor, velocity: Tensor, time: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of the stochastic step; the model's padding is no part of it."""
        (noisy, _), (velocity, _) = self._split(noisy), self._split(velocity)
        return sde_step(noisy, velocity, time, 1 / self.cfg.denoising_steps, self.cfg.noise_level)

    def _split(self, padded: Tensor) -> tuple[Tensor, Tensor]:
        """Numbers of actions, and the model's padding."""
        return padded[..., : self.num_dims], padded[..., self.num_dims :]

    def _padded(self, actions: Tensor) -> Tensor:
        return pad(actions, (0, self.model.num_dims - self.num_dims))


def _log_prob(x: Tensor, mean: Tensor, std: Tensor) -> Float[Tensor, " batch"]:
    """Log-density of independent Gaussians, summed over each chunk."""
    return (-0.5 * ((x - mean) / std).square() - std.log() - 0.5 * _LOG_2PI).sum(dim=(1, 2))
