"""The settings that libraries are compared at."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Settings:
    """Of PPO. All have clip 0.2, value loss 0.5, gradient norm 0.5, two 64-64 tanh networks, normalised advantages."""

    num_envs: int
    num_steps: int
    num_epochs: int
    minibatch_size: int
    learning_rate: float
    gamma: float = 0.99
    gae_lambda: float = 0.95
    ent_coef: float = 0.0
    annealed: bool = True
    """Whether the learning rate falls to 0 over the run's steps."""
    normalized: bool = False
    """Whether observations and rewards are."""
    state_dependent: bool = False
    """Whether SB3 explores by gSDE as in its zoo; never where rates are compared, since groupwise lacks it."""
    total_steps: int = 100_000
    """After which a run that has not passed ends."""
    rate_steps: int = 40_000
    """Over which a rate is measured."""

    @property
    def batch_size(self) -> int:
        """Environment steps of an iteration."""
        return self.num_envs * self.num_steps


SETTINGS = {
    "zoo": Settings(8, 32, 20, 256, 1e-3, 0.98, 0.8),
    "cleanrl": Settings(4, 128, 4, 128, 2.5e-4, ent_coef=0.01, total_steps=500_000),
    "fast": Settings(256, 32, 2, 2048, 1e-3, 0.98, 0.8, rate_steps=200_000),
    "Acrobot-v1": Settings(16, 256, 4, 64, 3e-4, 0.99, 0.94, annealed=False, normalized=True, total_steps=1_000_000),
    "HalfCheetah-v5": Settings(8, 2048, 10, 64, 3e-4, annealed=False, rate_steps=81_920),
    "LunarLander-v3": Settings(
        16, 1024, 4, 64, 3e-4, 0.999, 0.98, ent_coef=0.01, annealed=False, total_steps=1_000_000
    ),
    "Pendulum-v1": Settings(4, 1024, 10, 64, 1e-3, 0.9, annealed=False, state_dependent=True),
}
"""On CartPole: SB3's zoo's, those that CleanRL and PureJaxRL document, and many environments with few epochs, chosen
for speed alone. On the others the zoo's, or SB3's defaults (HalfCheetah).

Source: https://github.com/DLR-RM/rl-baselines3-zoo/blob/master/hyperparams/ppo.yml (LunarLander's are those of v2).
"""


@dataclass(frozen=True)
class Goal:
    """What a greedy policy has to reach."""

    score: float
    """Mean return over 100 episodes."""
    check_every: int
    """Environment steps between two evaluations."""
    further: float | None = None
    """A score that is noted, too, where the run goes on to it."""


GOALS = {
    "CartPole-v1": Goal(475, 2_000),
    "Acrobot-v1": Goal(-100, 5_000),
    "LunarLander-v3": Goal(200, 25_000),
    "Pendulum-v1": Goal(-200, 5_000, further=-160),
}
