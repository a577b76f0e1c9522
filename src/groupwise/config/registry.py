"""The registry of algorithms. Imports no torch."""

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from groupwise.config.algorithm import AlgorithmCfg, GRPOCfg, PPOCfg
from groupwise.config.choices import same_definition
from groupwise.config.presets import objective_presets
from groupwise.errors import ConfigError, UnknownNameError


class AlgorithmEntry(NamedTuple):
    """A registered algorithm."""

    cfg_type: type[AlgorithmCfg]
    target: type[Any] | str
    """The ``BaseAlgorithm`` subclass, or ``module:Class``, to import torch only when needed."""

    def load(self) -> type[Any]:
        """The class."""
        if not isinstance(self.target, str):
            return self.target
        module, _, name = self.target.partition(":")
        loaded: type[Any] = vars(importlib.import_module(module))[name]
        return loaded


_ALGORITHMS = {
    "grpo": AlgorithmEntry(GRPOCfg, "groupwise.algorithms.grpo:GRPO"),
    "ppo": AlgorithmEntry(PPOCfg, "groupwise.algorithms.ppo:PPO"),
}

T = TypeVar("T", bound=type[Any])


def register_algorithm(cfg_type: type[AlgorithmCfg]) -> Callable[[T], T]:
    """Class decorator that registers a ``BaseAlgorithm`` under the default of its config's ``name``.

    Raises:
        ConfigError: ``name`` has no default, or belongs to another config class.
    """
    name = cfg_type.own_name()
    if name is None:
        raise ConfigError(f"{cfg_type.__name__} has no name; fix: name: Literal['my_name'] = 'my_name'")
    taken = _ALGORITHMS.get(name)
    if taken and not same_definition(taken.cfg_type, cfg_type):
        raise ConfigError(
            f"algorithm {name!r} is registered for {taken.cfg_type.__name__}; fix: give {cfg_type.__name__} another name"
        )

    def register(target: T) -> T:
        _ALGORITHMS[name] = AlgorithmEntry(cfg_type, target)
        return target

    return register


def algorithm_entry(name: str) -> AlgorithmEntry:
    """The entry of a name, or an ``UnknownNameError``."""
    if name not in _ALGORITHMS:
        preset = f"it is a preset of grpo; fix: preset={name!r}" if name in objective_presets() else None
        raise UnknownNameError("algorithm", name, _ALGORITHMS, hint=preset)
    return _ALGORITHMS[name]


def algorithm_names() -> list[str]:
    """Names of all registered algorithms."""
    return sorted(_ALGORITHMS)


def explain_other_algorithm(field: str, algorithm: str) -> str | None:
    """The message for a setting of other algorithms; None if no algorithm has it."""
    owners = [name for name in algorithm_names() if field in _ALGORITHMS[name].cfg_type.model_fields]
    if not owners:
        return None
    return (
        f"{field!r} is a setting of {' and '.join(owners)}, not of {algorithm}; "
        f"fix: leave it out, or choose algorithm {' or '.join(map(repr, owners))}"
    )
