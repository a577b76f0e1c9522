"""Defaults of the Stable-Baselines3 class, and presets as its arguments."""

import copy
import math
import warnings
from typing import Any

from stable_baselines3.common.utils import LinearSchedule
from stable_baselines3.common.vec_env import VecEnv

from groupwise.config.algorithm import CreditCfg, GroupStepCfg, ObjectiveCfg
from groupwise.config.load import env_preset, objective_preset
from groupwise.contrib.sb3.settings import ARGUMENTS, CFG_NAMES
from groupwise.errors import ConfigError

PER_STEP = CreditCfg(group_key=GroupStepCfg(), returns="return_to_go", scale="batch_std")
"""Return-to-go at each time step among the members still running, over one scale for the rollout."""
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
    "kl_coef": 0.0,
    "kl_estimator": "k3",
    "top_entropy_quantile": 1.0,
}
"""Of the arguments that a preset may set."""


def preset_arguments(preset: str, env: VecEnv | None) -> dict[str, Any]:
    """Arguments of ``GRPO``, and ``normalize_obs``.

    Args:
        preset: ``auto``, or the name of an objective preset.

    Raises:
        ConfigError: ``auto``, and the environment is not known.
        UnknownNameError: there is no preset of that name.
    """
    if preset != "auto":
        return _translated(preset, {}, objective_preset(preset).settings)
    if env is None or (spec := env.get_attr("spec", indices=0)[0]) is None:
        raise ConfigError(
            "preset='auto' needs an environment with an id; fix: give a registered environment, or leave the preset out"
        )
    tree = copy.deepcopy(env_preset(spec.id)["grpo"])
    settings, policy, envs = tree["algorithm"], tree.pop("policy", {}), tree.pop("env")
    rate, schedule = settings.pop("learning_rate"), settings.pop("schedule", {"name": "none"})
    if schedule["name"] == "linear":
        rate, schedule = LinearSchedule(rate, 0.0, 1.0), {"name": "none"}
    arguments = {
        "n_steps": math.ceil(settings.pop("num_steps") * envs.pop("num_envs") / env.num_envs),
        "learning_rate": rate,
        "normalize_obs": policy.pop("normalize_obs", False),
    }
    rest = {"schedule": schedule} if schedule != {"name": "none"} else {}
    rest |= {
        f"{part}.{name}": value for part, left in (("policy", policy), ("env", envs)) for name, value in left.items()
    }
    return _translated(spec.id, arguments, settings | rest)


def _translated(preset: str, arguments: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """The arguments, and those that settings of a preset have as counterparts; warns of settings that have none."""
    names = {cfg: sb3 for sb3, cfg in CFG_NAMES.items()}
    found = {names.get(name, name): value for name, value in settings.items()}
    if missing := found.keys() - set(ARGUMENTS):
        warnings.warn(
            f"the preset of {preset} also sets {', '.join(sorted(missing))}, which GRPO in Stable-Baselines3 does not have; "
            "fix: gw.train, which has them, or leave it",
            stacklevel=3,
        )
    return arguments | {name: value for name, value in found.items() if name not in missing}
