"""Which fast paths a run gets. The core knows none of them; each replaces one of its callables."""

import logging
from functools import partial

from groupwise.algorithms.base import BaseAlgorithm
from groupwise.collectors.base import Collector
from groupwise.config.run import RunCfg
from groupwise.errors import ConfigError
from groupwise.speed import compile as compiling
from groupwise.speed.flat import flatten
from groupwise.speed.numpy_actor import numpy_actor

log = logging.getLogger(__name__)


def install(cfg: RunCfg, algorithm: BaseAlgorithm, collector: Collector) -> None:
    """Speed up a run: flat parameters, acting in NumPy, and compiled updates and rollouts where ``cfg.compile`` asks for them.

    Raises:
        ConfigError: ``compile="on"`` where nothing can be compiled.
    """
    flat = flatten(algorithm)
    collector.actor = partial(numpy_actor, collector.policy)  # type: ignore[method-assign]
    why = "its parameters are many, or its optimiser is not Adam" if flat is None else None
    why = why or compiling.why_not_compiled(algorithm)
    if cfg.compile == "on" and why is not None:
        raise ConfigError(f"compile='on', but the update cannot be compiled: {why}; fix: compile='auto'")
    many_steps = optimizer_steps(cfg) * algorithm.engine.world_size >= compiling.WORTH_STEPS
    if why is None and flat is not None and (cfg.compile == "on" or (cfg.compile == "auto" and many_steps)):
        algorithm.backward = compiling.CompiledBackward(algorithm, flat)  # type: ignore[method-assign]
        log.debug("updates will be compiled")


def optimizer_steps(cfg: RunCfg) -> int:
    """About how many optimiser steps a run takes, early stopping left out."""
    elements = cfg.env.num_envs * cfg.algorithm.num_steps
    minibatches = max(1, round(elements / (cfg.algorithm.minibatch_size or elements)))
    return cfg.total_steps // elements * cfg.algorithm.num_epochs * minibatches
