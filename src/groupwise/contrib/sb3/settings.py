"""From the arguments of the Stable-Baselines3 class to the settings of the update, and back again in what errors say."""

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import ValidationError

from groupwise.config.algorithm import GRPOCfg
from groupwise.config.base import Choice, explain
from groupwise.config.load import objective_preset
from groupwise.errors import ConfigError, UnknownNameError

CFG_NAMES = {
    "n_steps": "num_steps",
    "n_epochs": "num_epochs",
    "batch_size": "minibatch_size",
    "clip_range": "clip_coef",
}
"""Arguments that ``GRPOCfg`` has under another name."""
_SAME_NAME = (
    "gamma",
    "ent_coef",
    "max_grad_norm",
    "target_kl",
    "group_size",
    "credit",
    "objective",
    "kl_coef",
    "kl_estimator",
    "top_entropy_quantile",
    "adaptive_entropy",
)
ARGUMENTS = (*CFG_NAMES, *_SAME_NAME, "kl_ref_iterations", "shared_starts")
"""What ``update_cfg`` makes settings of."""
OF_OBJECTIVE = {"kl_estimator", "top_entropy_quantile", "adaptive_entropy"}
"""Arguments that a preset which is named as ``objective`` sets, too."""
SHARED_STARTS = ("verify", "trust", "off")
_SB3_NAMES = {(cfg,): sb3 for sb3, cfg in CFG_NAMES.items()} | {("sync_ref_model", "steps"): "kl_ref_iterations"}

_NO_CRITIC = "there is no critic; fix: leave it out"
_EVERY_STEP = "actions are drawn independently at every step; fix: leave it out, ent_coef is what explores"
_OWN_STORE = "whole groups have a store of their own; fix: leave it out"
ELSEWHERE = {
    "clip_range_vf": _NO_CRITIC,
    "vf_coef": _NO_CRITIC,
    "gae_lambda": "advantages compare members, and no critic looks ahead; fix: leave it out, or choose a credit=...",
    "normalize_advantage": "credit has a scale; fix: credit=CreditCfg(scale='std'), or 'none'",
    "use_sde": _EVERY_STEP,
    "sde_sample_freq": _EVERY_STEP,
    "rollout_buffer_class": _OWN_STORE,
    "rollout_buffer_kwargs": _OWN_STORE,
    "scale_rewards": "credit has a scale; fix: credit=CreditCfg(scale='std'), or 'none'",
    "batch_group_updates": "minibatches are drawn from all groups of a rollout; fix: leave it out, or a larger batch_size=...",
    "group_rollout_buffer_class": (
        "how members are compared is the credit; fix: credit='sb3_outcome', 'sb3_process' or 'sb3_process_deepseek'"
    ),
    "group_rollout_buffer_kwargs": "how members are compared is the credit; fix: credit=CreditCfg(...)",
    "kl_beta": "it has another name here; fix: kl_coef=...",
}
"""Arguments of SB3's own on-policy algorithms, and of the GRPO proposed for sb3-contrib: why they are not here, and what is instead."""
_ABSENT = {
    ("credit", "reward", "parts"): "no reward here has parts; fix: credit.reward='total', or another preset",
    ("credit", "baseline", "greedy"): (
        "no episode here is deterministic; fix: credit.baseline='leave_one_out', or another preset"
    ),
    ("objective", "ratio", "turn"): "no step here belongs to a turn; fix: objective.ratio='token', or another preset",
}
"""Choices that read what the rollouts of SB3's environments do not hold."""


def refuse(names: Iterable[str], algorithm: type) -> None:
    """Refuse names that are no arguments of the algorithm.

    Raises:
        ConfigError: names the counterpart of SB3's argument.
        UnknownNameError: SB3 does not have it either; names the nearest.
    """
    parameters = inspect.signature(algorithm).parameters.values()
    known = {p.name for p in parameters if p.kind is not p.VAR_KEYWORD and not p.name.startswith("_")}
    for name in names:
        if name in ELSEWHERE:
            raise ConfigError(f"GRPO takes no {name}: {ELSEWHERE[name]}")
        if name not in known:
            raise UnknownNameError("argument of GRPO", name, known)


def update_cfg(arguments: Mapping[str, Any]) -> GRPOCfg:
    """Settings of the update, from all ``ARGUMENTS``.

    Raises:
        ConfigError: an argument is impossible; names it as SB3 does.
    """
    tree = {CFG_NAMES.get(name, name): value for name, value in arguments.items()}
    if callable(tree["clip_coef"]):
        tree["clip_coef"] = float(tree["clip_coef"](1.0))
    starts, interval = tree.pop("shared_starts"), tree.pop("kl_ref_iterations")
    if starts not in SHARED_STARTS:
        raise ConfigError(f"shared_starts is {starts!r}, expected 'verify', 'trust' or 'off'; fix: 'verify'")
    if interval is not None:
        tree["sync_ref_model"] = {"steps": interval}
    for part in ("credit", "objective"):
        if isinstance(tree[part], str):
            settings = objective_preset(tree[part]).settings
            own = OF_OBJECTIVE & settings.keys() if part == "objective" else ()
            tree |= {name: settings[name] for name in (part, *own)}
    try:
        cfg = GRPOCfg.model_validate(tree)
    except ValidationError as error:
        raise ConfigError("\n".join(_complaint(item) for item in error.errors())) from error
    _check_present(cfg)
    return cfg


def with_clip_range(cfg: GRPOCfg, clip_range: float) -> GRPOCfg:
    """The settings with another clip range."""
    region = cfg.objective.trust_region.model_copy(update={"clip_low": clip_range, "clip_high": clip_range})
    return cfg.model_copy(update={"objective": cfg.objective.model_copy(update={"trust_region": region})})


def _check_present(cfg: GRPOCfg) -> None:
    for (part, name, value), why in _ABSENT.items():
        found = vars(vars(cfg)[part])[name]
        if (found.name if isinstance(found, Choice) else found) == value:
            raise ConfigError(f"GRPO cannot take {part}.{name}={value!r} in Stable-Baselines3: {why}")


def _complaint(item: Mapping[str, Any]) -> str:
    """One line on one of pydantic's errors, with SB3's name of the setting."""
    name = _SB3_NAMES.get(tuple(item["loc"]))
    return explain(item if name is None else {**item, "loc": (name,)}).replace("clip_coef", "clip_range")
