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
from typing import Any, NamedTuple

from settings import GOALS, SETTINGS
from step_clock import StepClock

STARTED = "PEERS_STARTED"
"""Environment variable: ``time.time()`` just before this process started; without it the import of this module."""
EPISODES = 100
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
        if args.settings != "own" or args.task == "training_pass" or (args.task != "rate" and args.env not in GOALS):
            parser.error(f"{args.env} has no task {args.task!r} at settings {args.settings!r}")
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


class Clocks(NamedTuple):
    """Since the process was started."""

    seconds: float
    cpu_seconds: float
    """Of the processor, all threads together: other processes, and pauses that they force on this one, do not count."""

    @classmethod
    def now(cls) -> "Clocks":
        return cls(time.time() - float(os.environ.get(STARTED, _IMPORTED)), time.process_time())

    def since(self, before: "Clocks") -> "Clocks":
        return Clocks(self.seconds - before.seconds, self.cpu_seconds - before.cpu_seconds)

    def plus(self, more: "Clocks") -> "Clocks":
        return Clocks(self.seconds + more.seconds, self.cpu_seconds + more.cpu_seconds)


class Watch:
    """Is told of each iteration, says when the run is over, and prints what it came to.

    The time that it spends on evaluating counts nowhere: it is the same episodes for all, and not training.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.reached = False
        self._goal = GOALS.get(args.env)
        self._passes: dict[float, dict[str, float]] = {}
        self._steps = self._checked = self._counted_from = 0
        self._score: float | None = None
        self._evaluating = Clocks(0.0, 0.0)
        self._warm: Clocks | None = None
        self._env: Any = None
        self._step_clock = StepClock(args.env) if args.env == "HalfCheetah-v5" else None

    def iteration(self, steps: int, latest: Sequence[float], act: Callable[[Any], Any]) -> bool:
        """Whether training is over.

        Args:
            steps: taken so far.
            latest: returns of the latest 100 training episodes, or of fewer.
            act: greedy actions for observations ``[B, ...]``, NumPy in and out.
        """
        self._steps = steps
        if self._warm is None:  # the first iteration warms up, and compiles; a rate is of the others
            self._warm, self._counted_from = self._spent(), steps
            if self._step_clock:
                self._step_clock.seconds = 0.0
        over = steps >= self.args.steps
        if self._goal is None or self.args.task == "rate":
            return over
        if self.args.task == "first_pass" and (over or steps - self._checked >= self._goal.check_every):
            self._checked, self._score = steps, self._greedy_return(act)
            return self._passed(self._score) or over
        if self.args.task == "training_pass" and len(latest) >= EPISODES:
            self._score = float(sum(latest)) / len(latest)  # may be NumPy's
            return self._passed(self._score) or over
        return over

    def _passed(self, score: float) -> bool:
        """Note what has been reached; whether that is all."""
        assert self._goal is not None
        goals = [goal for goal in (self._goal.score, self._goal.further) if goal is not None]
        for goal in goals:
            if score >= goal:
                self._passes.setdefault(goal, {**self._spent()._asdict(), "env_steps": self._steps})
        self.reached = self._goal.score in self._passes
        return len(self._passes) == len(goals)

    def finish(self, **facts: Any) -> None:
        """Print the JSON line."""
        assert self._warm is not None, "no iteration was finished"
        spent = self._spent().since(self._warm)
        counted = self._steps - self._counted_from
        result = {
            "task": self.args.task,
            "settings": self.args.settings,
            "env": self.args.env,
            "threads": self.args.threads,
            "seed": self.args.seed,
            **self._spent()._asdict(),
            "evaluating": self._evaluating.seconds,
            "env_steps": self._steps,
            "steps_per_second": counted / spent.seconds if counted else None,
            "steps_per_cpu_second": counted / spent.cpu_seconds if counted else None,
            "memory_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / _MAXRSS_UNITS,
        }
        if self.args.task != "rate":
            assert self._goal is not None
            result |= {"reached": self.reached, "return": self._score, **self._passes.get(self._goal.score, {})}
            if self._goal.further is not None:
                result["further"] = {"score": self._goal.further, **self._passes.get(self._goal.further, {})}
        if self._step_clock:
            result["env_share"] = self._step_clock.seconds / spent.seconds
        print(json.dumps(result | facts), flush=True)

    def _spent(self) -> Clocks:
        """Since the process was started, without evaluations."""
        return Clocks.now().since(self._evaluating)

    def _greedy_return(self, act: Callable[[Any], Any]) -> float:
        """Mean return of 100 episodes; the same ones each time."""
        import gymnasium
        import numpy as np

        start = Clocks.now()
        if self._env is None:
            mode = "vector_entry_point" if self.args.env == "CartPole-v1" else "sync"
            self._env = gymnasium.make_vec(self.args.env, EPISODES, vectorization_mode=mode)
        obs, _ = self._env.reset(seed=10_000 + self.args.seed)
        returns, running = np.zeros(EPISODES), np.ones(EPISODES, dtype=bool)
        while running.any():
            obs, reward, terminated, truncated, _ = self._env.step(act(obs))
            returns += np.where(running, reward, 0.0)
            running &= ~(terminated | truncated)
        self._evaluating = self._evaluating.plus(Clocks.now().since(start))
        return float(returns.mean())
