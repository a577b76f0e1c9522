"""Defaults of the Stable-Baselines3 class, and presets as its arguments."""

import math
from typing import Any

from stable_baselines3.common.utils import LinearSchedule
from stable_baselines3.common.vec_env import VecEnv

from groupwise.config.algorithm import CreditCfg, ObjectiveCfg
from groupwise.config.presets import env_preset, objective_preset
from groupwise.contrib.sb3.settings import CFG_NAMES
from groupwise.errors import ConfigError

PER_STEP = CreditCfg(group_key="group_step", returns="return_to_go", scale="batch_std")
"""Return-to-go at each time step among the members still running, over one scale for the rollout: CartPole's preset."""
CLIPPED = ObjectiveCfg()
"""PPO's clipped ratio, all steps alike."""
DECAYING = LinearSchedule(1e-3, 0.0, 1.0)
"""From 1e-3 towards 0 over the training; an update takes the rate of its rollout's start."""
DEFAULTS: dict[str, Any] = {
    "learning_rate": DECAYING,
    "n_steps": 1024,
    "batch_size": 128,
    "n_epochs": 10,
    "gamma": 0.99,
    "group_size": 4,
    "credit": PER_STEP,
    "objective": CLIPPED,
    "ent_coef": 0.0,
}
"""Of the arguments that a preset may set."""
_SB3_NAMES = {cfg: sb3 for sb3, cfg in CFG_NAMES.items()}


def preset_arguments(preset: str, env: VecEnv | None) -> dict[str, Any]:
    """Arguments of ``GRPO``, and ``normalize_obs``.

    Args:
        preset: ``auto``, or the name of an objective preset.

    Raises:
        ConfigError: ``auto``, and the environment is not known.
        UnknownNameError: there is no preset of that name.
    """
    if preset != "auto":
        objective_preset(preset)
        return {"credit": preset, "objective": preset}
    if env is None or (spec := env.get_attr("spec", indices=0)[0]) is None:
        raise ConfigError(
            "preset='auto' needs an environment with an id; fix: give a registered environment, or leave the preset out"
        )
    tree = env_preset(spec.id)["grpo"]
    settings = dict(tree["algorithm"])
    rate, schedule = settings.pop("learning_rate"), settings.pop("schedule", {"name": "none"})
    steps = settings.pop("num_steps") * tree["env"]["num_envs"]
    return {
        **{_SB3_NAMES.get(name, name): value for name, value in settings.items()},
        "n_steps": math.ceil(steps / env.num_envs),
        "learning_rate": LinearSchedule(rate, 0.0, 1.0) if schedule == {"name": "linear"} else rate,
        "normalize_obs": tree.get("policy", {}).get("normalize_obs", False),
    }
