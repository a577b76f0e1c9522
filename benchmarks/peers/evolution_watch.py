"""What the populations of AgileRL and groupwise share: settings, clocks, the score from outside, the JSON line of a run.

Imports nothing heavy. The settings are those of AgileRL's own PPO configuration, which is for LunarLander.
Source: https://github.com/AgileRL/AgileRL/blob/main/configs/training/ppo/ppo.yaml
"""

import time

_IMPORTED = time.time()

import argparse
import json
import os
from collections.abc import Callable
from typing import Any, NamedTuple

Act = Callable[[Any], Any]
"""Greedy actions for observations ``[B, ...]``, NumPy in and out."""
STARTED = "PEERS_STARTED"
"""Environment variable: ``time.time()`` just before this process started."""
ENV, GOAL = "CartPole-v1", 475.0
MEMBERS, NUM_ENVS, TOURNAMENT = 4, 16, 2
LEARN_STEP = 2048
"""Environment steps of an iteration, all environments together."""
ROUND_STEPS = 5 * LEARN_STEP
"""Of each member."""
MAX_ROUNDS = 12
EVALUATION_EPISODES = 16
"""That members are ranked by: one in each environment, as in AgileRL."""
EPISODES = 100
"""Of the score from outside."""
RANGES = {
    "lr": (1e-4, 1e-2),
    "batch_size": (8, 1024),
    "learn_step": (256, 8192),
    "ent_coef": (1e-3, 1e-1),
    "update_epochs": (1, 10),
}
"""What is searched, in AgileRL's names."""


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--smallest", action="store_true", help="one round of one iteration of two members")
    return parser.parse_args()


class Clocks(NamedTuple):
    """Seconds of the wall, since the process was started, and of the processor, with all processes below this one."""

    wall: float
    cpu: float

    @classmethod
    def now(cls) -> "Clocks":
        import psutil

        this = psutil.Process()
        cpu = 0.0
        for process in (this, *this.children(recursive=True)):
            times = process.cpu_times()
            cpu += times.user + times.system + times.children_user + times.children_system
        return cls(time.time() - float(os.environ.get(STARTED, _IMPORTED)), cpu)

    def since(self, before: "Clocks") -> "Clocks":
        return Clocks(self.wall - before.wall, self.cpu - before.cpu)


class Watch:
    """Made after the imports, when a search begins; told of each round when its members have been ranked.

    It plays ``EPISODES`` greedy episodes with the best member, the same ones each time. Their time counts nowhere.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.most = 1 if args.smallest else MAX_ROUNDS
        self.rounds: list[dict[str, float]] = []
        self.began = Clocks.now()
        self._outside = Clocks(0.0, 0.0)

    def round(self, look: Callable[[], tuple[int, Act]]) -> None:
        """Note a round.

        Args:
            look: gives the environment steps that all members have trained so far, and the best member's actions.

        Raises:
            SystemExit: the score is reached, or the budget used; the JSON line is printed.
        """
        before = Clocks.now()
        spent = before.since(self._outside)
        env_steps, act = look()
        score = self._greedy_return(act)
        self.rounds.append(
            {
                "seconds": round(spent.wall - self.began.wall, 3),
                "process_seconds": round(spent.wall, 3),
                "cpu_seconds": round(spent.cpu, 2),
                "env_steps": env_steps,
                "score": score,
            }
        )
        outside = Clocks.now().since(before)
        self._outside = Clocks(self._outside.wall + outside.wall, self._outside.cpu + outside.cpu)
        if score >= GOAL or len(self.rounds) == self.most:
            self._print()
            raise SystemExit

    def _print(self) -> None:
        reached = self.rounds[-1]["score"] >= GOAL
        who = {"env": ENV, "seed": self.args.seed, "reached": reached}
        print(json.dumps(who | self.rounds[-1] | {"rounds": self.rounds}), flush=True)

    def _greedy_return(self, act: Act) -> float:
        import gymnasium
        import numpy as np

        env = gymnasium.make_vec(ENV, EPISODES, vectorization_mode="vector_entry_point")
        obs, _ = env.reset(seed=10_000 + self.args.seed)
        returns, running = np.zeros(EPISODES), np.ones(EPISODES, dtype=bool)
        while running.any():
            obs, reward, terminated, truncated, _ = env.step(act(obs))
            returns += np.where(running, reward, 0.0)
            running &= ~(terminated | truncated)
        env.close()
        return float(returns.mean())
