"""What every worker shares: its command line, when it began, when it is done, and the JSON line that it prints.

A worker imports this module before its library, because the number of threads must be set before either NumPy, torch
or JAX is loaded. It imports nothing heavy itself.
"""

import time

_IMPORTED = time.time()

import argparse
import json
import os
import resource
import sys
from collections.abc import Callable, Sequence
from typing import Any

from settings import SETTINGS
from step_clock import StepClock

STARTED = "PEERS_STARTED"
"""Environment variable: ``time.time()`` just before this process was started. Without it, when this module was imported."""
GOAL = 475.0
EPISODES = 100
CHECK_EVERY = 2_000
"""Environment steps between two evaluations of the greedy policy."""
_MAXRSS_UNITS = 2**20 if sys.platform == "darwin" else 2**10
"""``ru_maxrss`` in a MiB."""


def parse(own: str, envs: Sequence[str] = ("CartPole-v1",), rate_steps: int = 0) -> argparse.Namespace:
    """The command line, with the number of threads set as it says; ``cfg`` holds the settings.

    Args:
        own: the settings of CartPole that are the library's own, by name.
        envs: what it can train on.
        rate_steps: least steps that a rate is measured over.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--task", choices=["rate", "first_pass", "training_pass"], default="rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, help="most environment steps, over which the learning rate is annealed")
    parser.add_argument("--settings", choices=["own", "zoo", "fast"], default="own")
    parser.add_argument("--env", choices=envs, default="CartPole-v1")
    parser.add_argument("--threads", choices=["1", "default"], default="1")
    args = parser.parse_args()
    if args.env != "CartPole-v1":
        if (args.task, args.settings) != ("rate", "own"):
            parser.error("only CartPole-v1 has a score to pass, and a choice of settings")
        own = args.env
    args.cfg = SETTINGS[own if args.settings == "own" else args.settings]
    budget = max(args.cfg.rate_steps, rate_steps) if args.task == "rate" else args.cfg.total_steps
    args.steps = args.steps or budget
    _limit_threads(args.threads)
    return args


def _limit_threads(threads: str) -> None:
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NPROC")  # NPROC: XLA's pool
    for name in names:
        os.environ.pop(name, None)
    if threads == "1":
        os.environ |= dict.fromkeys(names, "1") | {"XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false"}


class Watch:
    """Is told of each iteration, says when the run is over, and prints what it came to.

    The time that it spends on evaluating counts nowhere: it is the same episodes for all, and not training.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.reached = False
        self._steps = self._checked = self._counted_from = 0
        self._score: float | None = None
        self._evaluating = self._before = 0.0
        self._clock: float | None = None
        self._env: Any = None
        self._step_clock = StepClock(args.env) if args.env == "HalfCheetah-v5" else None

    def iteration(self, steps: int, latest: Sequence[float], act: Callable[[Any], Any]) -> bool:
        """Whether training is over.

        Args:
            steps: taken so far.
            latest: returns of the latest 100 training episodes, or of fewer.
            act: greedy actions for observations ``[B, 4]``, NumPy in and out.
        """
        self._steps = steps
        if self._clock is None:  # the first iteration warms up, and compiles; a rate is of the others
            self._clock, self._counted_from, self._before = time.perf_counter(), steps, self._evaluating
            if self._step_clock:
                self._step_clock.seconds = 0.0
        if self.args.task == "first_pass" and steps - self._checked >= CHECK_EVERY:
            self._checked, self._score = steps, self._greedy_return(act)
            self.reached = self._score >= GOAL
        elif self.args.task == "training_pass" and len(latest) >= EPISODES:
            self._score = float(sum(latest)) / len(latest)  # may be NumPy's
            self.reached = self._score >= GOAL
        return self.reached or steps >= self.args.steps

    def finish(self, **facts: Any) -> None:
        """Print the JSON line."""
        assert self._clock is not None, "no iteration was finished"
        spent = time.perf_counter() - self._clock - (self._evaluating - self._before)
        counted = self._steps - self._counted_from
        result = {
            "task": self.args.task,
            "settings": self.args.settings,
            "env": self.args.env,
            "threads": self.args.threads,
            "seed": self.args.seed,
            "seconds": time.time() - float(os.environ.get(STARTED, _IMPORTED)) - self._evaluating,
            "evaluating": self._evaluating,
            "env_steps": self._steps,
            "steps_per_second": counted / spent if counted else None,
            "memory_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / _MAXRSS_UNITS,
        }
        if self.args.task != "rate":
            result |= {"reached": self.reached, "return": self._score}
        if self._step_clock:
            result["env_share"] = self._step_clock.seconds / spent
        print(json.dumps(result | facts), flush=True)

    def _greedy_return(self, act: Callable[[Any], Any]) -> float:
        """Mean return of 100 episodes; the same ones each time."""
        import gymnasium
        import numpy as np

        start = time.perf_counter()
        if self._env is None:
            self._env = gymnasium.make_vec("CartPole-v1", EPISODES, vectorization_mode="vector_entry_point")
        obs, _ = self._env.reset(seed=10_000 + self.args.seed)
        lengths, running = np.zeros(EPISODES), np.ones(EPISODES, dtype=bool)
        while running.any():
            obs, _, terminated, truncated, _ = self._env.step(act(obs))
            lengths += running  # a step's reward is 1
            running &= ~(terminated | truncated)
        self._evaluating += time.perf_counter() - start
        return float(lengths.mean())
