"""Which fast paths a run gets. The core knows none of them; each replaces one of its callables."""

from functools import partial

from groupwise.algorithms.base import BaseAlgorithm
from groupwise.collectors.base import Collector
from groupwise.config.run import RunCfg
from groupwise.errors import ConfigError
from groupwise.speed import compile as compiling
from groupwise.speed import rollouts
from groupwise.speed.flat import flatten
from groupwise.speed.numpy_actor import numpy_actor


def install(cfg: RunCfg, algorithm: BaseAlgorithm, collector: Collector) -> None:
    """Speed up a run: flat parameters, acting in NumPy, compiled updates and rollouts.

    ``cfg.compile`` says whether anything is compiled.

    Raises:
        ConfigError: ``compile="on"`` where the update cannot be compiled.
    """
    flat = flatten(algorithm)
    collector.actor = partial(numpy_actor, collector.policy)  # type: ignore[method-assign]
    if cfg.compile == "off":
        return
    world_size = algorithm.engine.world_size
    why: str | None = "parameters are many or of several types, or the optimiser is not Adam"
    if flat is not None:
        why = compiling.why_not_compiled(algorithm)
        pays = optimizer_steps(cfg, world_size) >= compiling.WORTH_STEPS
        if why is None and (pays or cfg.compile == "on"):
            algorithm.backward = compiling.CompiledBackward(algorithm, flat)  # type: ignore[method-assign]
    if cfg.compile == "on" and why is not None:
        raise ConfigError(f"compile='on', but the update cannot be compiled: {why}; fix: compile='auto'")
    pays = cfg.expected_steps(world_size) // (cfg.env.num_envs * world_size) >= rollouts.WORTH_STEPS
    stops = cfg.algorithm.on_nonfinite == "stop"  # else actions are replaced on their way to the environment
    if stops and (pays or cfg.compile == "on") and rollouts.why_not_compiled(collector) is None:
        collector.stepper = rollouts.CompiledStepper(collector)  # type: ignore[attr-defined, arg-type]


def optimizer_steps(cfg: RunCfg, world_size: int = 1) -> int:
    """About how many optimiser steps a run takes, early stopping left out."""
    elements = cfg.env.num_envs * cfg.algorithm.num_steps * world_size
    minibatches = max(1, round(elements / (cfg.algorithm.minibatch_size or elements)))
    return cfg.expected_steps(world_size) // elements * cfg.algorithm.num_epochs * minibatches
