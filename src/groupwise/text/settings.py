"""From what a user gives in Python to the settings of a run on texts."""

from pathlib import Path
from typing import Any

from groupwise import config
from groupwise.config.algorithm import AlgorithmCfg
from groupwise.config.base import GIVEN
from groupwise.config.policy import ModelCfg
from groupwise.config.run import TextRunCfg
from groupwise.config.text import TextTaskCfg
from groupwise.errors import ConfigError


def text_cfg(
    task: TextTaskCfg,
    algorithm: str | AlgorithmCfg | dict[str, Any] | None,
    preset: str | None,
    policy: object,
    settings: dict[str, Any],
) -> TextRunCfg:
    """The settings of a run on a task. A given policy has its own model and sampling.

    Args:
        settings: ``model`` (a folder, a hub id, a ``ModelCfg`` or its fields), ``lora`` and other fields of ``TextRunCfg``.

    Raises:
        ConfigError: a setting is unknown or impossible, or there is no model.
    """
    from groupwise.text.policy import CausalLM

    if policy is not None and not isinstance(policy, CausalLM):
        raise ConfigError(f"policy = {policy!r:.80}: expected a gw.CausalLM; fix: model='path-or-hub-id', lora=...")
    if "reward" in settings:
        raise ConfigError("the reward is the task's; fix: gw.TextTask(data, reward=...)")
    model, lora = settings.pop("model", None), settings.pop("lora", None)
    if policy is not None:
        others = {"model": model, "lora": lora, "sampling": settings.get("sampling")}
        if named := [key for key, value in others.items() if value is not None]:
            raise ConfigError(
                f"a policy has its own model and sampling, got {', '.join(named)}, too; fix: one of the two"
            )
        model, settings["sampling"] = ModelCfg(path=GIVEN), policy.sampling
        settings["adapters"] = policy.has_adapters
    elif model is None:
        raise ConfigError("no model; fix: model='path-or-hub-id', or policy=CausalLM(...)")
    if isinstance(model, str | Path):
        model = {"path": str(model)}
    elif isinstance(model, ModelCfg):
        model = model.model_dump(exclude_unset=True)
    if lora is not None:
        model = {**model, "lora": lora}
    return config.resolve_text(algorithm, preset, task=task, model=model, **settings)
