"""From the arguments of the Stable-Baselines3 class to the settings of the update, and back again in what errors say."""

from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import ValidationError

from groupwise.algorithms.configs import GRPOCfg
from groupwise.cfg import complaints, explain
from groupwise.errors import ConfigError, UnknownNameError
from groupwise.presets import objective_preset

CFG_NAMES = {"n_steps": "num_steps", "n_epochs": "num_epochs", "batch_size": "minibatch_size"}
"""Arguments that ``GRPOCfg`` has under another name."""
_SAME_NAME = ("gamma", "ent_coef", "max_grad_norm", "target_kl", "group_size", "credit", "objective", "kl_coef")
ARGUMENTS = (*CFG_NAMES, *_SAME_NAME, "kl_ref_iterations", "shared_starts")
"""What ``update_cfg`` makes settings of."""
SHARED_STARTS = ("verify", "trust", "off")
_SB3_NAMES = {(cfg,): sb3 for sb3, cfg in CFG_NAMES.items()} | {("reference", "interval"): "kl_ref_iterations"}

_NO_CRITIC = "there is no critic; mend: leave it out"
_EVERY_STEP = "actions are drawn anew at every step; mend: leave it out, ent_coef is what explores"
_OWN_STORE = "whole groups have a store of their own; mend: leave it out"
ELSEWHERE = {
    "clip_range": "the clip is part of the objective; mend: objective=ObjectiveCfg(clip_low=0.2, clip_high=0.2)",
    "clip_range_vf": _NO_CRITIC,
    "vf_coef": _NO_CRITIC,
    "gae_lambda": "advantages compare siblings, and no critic looks ahead; mend: leave it out, or choose a credit=...",
    "normalize_advantage": "credit has a scale; mend: credit=CreditCfg(scale='std'), or 'none'",
    "use_sde": _EVERY_STEP,
    "sde_sample_freq": _EVERY_STEP,
    "rollout_buffer_class": _OWN_STORE,
    "rollout_buffer_kwargs": _OWN_STORE,
}
"""Arguments of SB3's own on-policy algorithms: why they are not here, and what is instead."""


class PolicyError(ConfigError):
    """A policy that GRPO cannot train.

    Args:
        name: of its class.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        super().__init__(
            f"{name} is not a policy without a critic; mend: 'MlpPolicy', 'CnnPolicy', 'MultiInputPolicy' or a subclass of "
            "groupwise.integrations.sb3.ActorPolicy"
        )


def refuse(names: Iterable[str], known: Iterable[str]) -> None:
    """Refuse arguments that there are not.

    Raises:
        ConfigError: says what stands for SB3's argument here.
        UnknownNameError: SB3 has none of that name either; says which is nearest.
    """
    for name in names:
        if name in ELSEWHERE:
            raise ConfigError(f"GRPO takes no {name}: {ELSEWHERE[name]}")
        raise UnknownNameError("argument of GRPO", name, known)


def update_cfg(arguments: Mapping[str, Any]) -> GRPOCfg:
    """Settings of the update, from all ``ARGUMENTS``.

    Raises:
        ConfigError: an argument is impossible; names it as SB3 does.
    """
    tree = {CFG_NAMES.get(name, name): value for name, value in arguments.items()}
    starts, interval = tree.pop("shared_starts"), tree.pop("kl_ref_iterations")
    if starts not in SHARED_STARTS:
        raise ConfigError(f"shared_starts is {starts!r}, expected 'verify', 'trust' or 'off'; mend: 'verify'")
    if interval is not None:
        tree["reference"] = {"refresh": "interval", "interval": interval}
    for part in ("credit", "objective"):
        if isinstance(tree[part], str):
            tree[part] = objective_preset(tree[part]).settings[part]
    try:
        return GRPOCfg.model_validate(tree)
    except ValidationError as error:
        raise ConfigError("\n".join(_complaint(item, tree) for item in complaints(error))) from error


def _complaint(item: Mapping[str, Any], tree: Mapping[str, Any]) -> str:
    """One line on a complaint of pydantic's about the settings in ``tree``."""
    name = _SB3_NAMES.get(tuple(item["loc"]))
    return explain(item if name is None else {**item, "loc": (name,)}, GRPOCfg, tree)
