"""Which fast paths a run gets. The core knows none of them; each replaces one of its callables."""

from functools import partial

from groupwise.algorithms.base import BaseAlgorithm
from groupwise.collectors.base import Collector
from groupwise.config.run import RunCfg
from groupwise.speed import compile as compiling
from groupwise.speed import rollouts
from groupwise.speed.flat import flatten
from groupwise.speed.numpy_actor import numpy_actor


def install(cfg: RunCfg, algorithm: BaseAlgorithm, collector: Collector) -> None:
    """Speed up a run: flat parameters, acting in NumPy, compiled updates and rollouts.

    With ``speed="off"`` the run keeps its reference path.
    """
    if cfg.speed == "off":
        return
    flat = flatten(algorithm)
    collector.actor = partial(numpy_actor, collector.policy)  # type: ignore[method-assign]
    world_size = algorithm.engine.world_size
    pays = optimizer_steps(cfg, world_size) >= compiling.WORTH_STEPS
    if pays and flat is not None and compiling.why_not_compiled(algorithm) is None:
        algorithm.backward = compiling.CompiledBackward(algorithm, flat)  # type: ignore[method-assign]
    pays = cfg.expected_steps(world_size) // (cfg.env.num_envs * world_size) >= rollouts.WORTH_STEPS
    stops = cfg.algorithm.on_nonfinite == "stop"  # else actions are replaced on their way to the environment
    if stops and pays and rollouts.why_not_compiled(collector) is None:
        collector.stepper = rollouts.CompiledStepper(collector)  # type: ignore[attr-defined, arg-type]


def optimizer_steps(cfg: RunCfg, world_size: int = 1) -> int:
    """About how many optimiser steps a run takes, early stopping left out."""
    elements = cfg.env.num_envs * cfg.algorithm.num_steps * world_size
    minibatches = max(1, round(elements / (cfg.algorithm.minibatch_size or elements)))
    return cfg.expected_steps(world_size) // elements * cfg.algorithm.num_epochs * minibatches
