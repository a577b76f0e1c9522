"""States of running episodes, kept as starts for later groups: branch points, and the pool of harder starts."""

import math
from collections import deque
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from groupwise.collectors.schedule import NEVER, Attempt, Group, Schedule
from groupwise.config.algorithm import BranchCfg
from groupwise.envs.base import GroupEnv, Snapshot
from groupwise.lean_tensordict import TensorDict
from groupwise.policies.base import Policy
from groupwise.seeding import derive_seed

CANDIDATES = 4
"""States kept for each one that is chosen by entropy or by the spread of returns."""
POOL = 64
"""Harder starts kept, the newest."""

Weights = npt.NDArray[np.float64]


class Start(NamedTuple):
    """A state that a group can begin in."""

    step: int
    """Steps that the episode had taken."""
    snapshot: Snapshot


class Reservoir:
    """At most ``size`` states of a stream, each state so far with the same chance to be among them.

    Says beforehand which state it will take next, so that the others need not be captured.

    Source: Li 1994, "Reservoir-sampling algorithms of time complexity O(n(1 + log(N/n)))", algorithm L.
    """

    def __init__(self, size: int, seed: int) -> None:
        self.size = size
        self.next = 0
        """Number of the state that it takes next."""
        self.kept: list[Start] = []
        self.generator = np.random.default_rng(seed)
        self._log_weight = 0.0

    def add(self, snapshot: Snapshot) -> None:
        """Take the state that was due."""
        start = Start(self.next, snapshot)
        if len(self.kept) < self.size:
            self.kept.append(start)
        else:
            self.kept[int(self.generator.integers(self.size))] = start
        self.next += 1
        if len(self.kept) == self.size:
            self._log_weight += math.log(1 - self.generator.random()) / self.size
            self.next += int(math.log(1 - self.generator.random()) / math.log1p(-math.exp(self._log_weight)))


class Brancher:
    """Captures states of stems and makes groups of them.

    Args:
        harder: fill a pool of states in which siblings' returns differed.
        window: ordinary attempts are cut after so many steps; branches end where their stem's window would.
    """

    def __init__(
        self, cfg: BranchCfg, env: GroupEnv, policy: Policy, *, harder: bool, window: int | None, seed: int, rank: int
    ) -> None:
        self.cfg = cfg
        self.due: int = NEVER
        """Column at which the next state is to be captured."""
        self.queue: deque[Start] = deque()
        """Where the next branch groups begin. What an iteration's steps do not suffice for, the next one takes up."""
        self.pool: deque[Start] = deque(maxlen=POOL)
        self._env = env
        self._policy = policy
        self._harder = harder
        self._window = window
        self._stream = (seed, "branch", rank)
        chosen = cfg.at != "uniform" or harder
        self._size = max(cfg.points, 1) * CANDIDATES if chosen else cfg.points
        self._stems: list[Attempt] = []

    @property
    def active(self) -> bool:
        """Whether there are any stems."""
        return self._size > 0

    def choose_stem(self, group: Group) -> None:
        """Let one member of an ordinary group be the stem, any with the same chance."""
        if self.active and group.role != "branch":
            group.stem = derive_seed(*self._stream, "stem", group.born, group.number) % group.sampled

    def follow(self, attempts: list[Attempt]) -> None:
        """Capture states of those of the attempts that are stems."""
        for attempt in attempts:
            group = attempt.group
            if attempt.member != group.stem:
                continue
            if attempt.reservoir is None:
                seed = derive_seed(*self._stream, group.born, group.number, attempt.tries)
                attempt.reservoir = Reservoir(self._size, seed)
            self._stems.append(attempt)
        self._note_due()

    def capture(self, schedule: Schedule) -> None:
        """Take the states that are due at this column."""
        due = [(a, r) for a, r in self._running() if a.began + r.next == schedule.tick]
        snapshots = self._env.snapshot([a.row for a, _ in due]) if due else []
        for (_, reservoir), snapshot in zip(due, snapshots, strict=True):
            reservoir.add(snapshot)
        self._note_due()

    def after_episode(self, stem: Attempt, rollout: TensorDict) -> None:
        """Queue branch points of a stem that just ended, where they depend on itself only."""
        if stem.reservoir is None or self.cfg.at == "return_spread":
            return
        kept = stem.reservoir.kept
        weights = np.ones(len(kept)) if self.cfg.at == "uniform" else self._entropy(stem, kept, rollout)
        self.queue.extend(self._draw(stem.reservoir, weights))

    def after_group(self, group: Group, rollout: TensorDict) -> None:
        """Queue branch points of a complete group, where they depend on how its members did; fill the pool."""
        stem = next((a for a in group.members if a.reservoir is not None), None)
        if stem is None or stem.reservoir is None:
            return
        spread = return_spread(group, stem.reservoir.kept, rollout)
        if self._harder and spread.max() > 0:
            # of equals the latest: before the first sibling ends, the spread is the same everywhere
            ranked = zip(spread.tolist(), stem.reservoir.kept, strict=True)
            self.pool.append(max(ranked, key=lambda pair: (pair[0], pair[1].step))[1])
        if self.cfg.at == "return_spread":
            self.queue.extend(self._draw(stem.reservoir, spread))
        stem.reservoir = None

    def forget(self) -> None:
        """Drop what was kept of earlier iterations."""
        self.queue.clear()
        self.pool.clear()

    def limit(self, start: Start) -> int | None:
        """Steps after which a branch from there is cut: at its horizon, or where the stem would have been."""
        limits = [self.cfg.horizon, None if self._window is None else self._window - start.step]
        return min((limit for limit in limits if limit is not None), default=None)

    def begin(self, attempts: list[Attempt]) -> None:
        """Forget stems of the last iteration but for those among ``attempts``."""
        self._stems = []
        self.follow(attempts)

    def _draw(self, reservoir: Reservoir, weights: Weights) -> list[Start]:
        """``points`` of the kept states without repetition, by chances proportional to the weights."""
        count = min(self.cfg.points, int(np.count_nonzero(weights)))
        if count == 0:
            return []
        chance = weights / weights.sum()
        return [reservoir.kept[i] for i in reservoir.generator.choice(len(chance), count, replace=False, p=chance)]

    @torch.no_grad()
    def _entropy(self, stem: Attempt, kept: list[Start], rollout: TensorDict) -> Weights:
        """The policy's entropy in each state, above the least where some are negative (densities); 1 if all are equal then."""
        columns = torch.tensor([stem.began + start.step for start in kept])
        batch = {key: rollout[key][stem.row, columns] for key in self._policy.batch_keys}
        entropy = self._policy.evaluate(batch).entropy.double().cpu().numpy()
        weights: Weights = entropy - min(0.0, float(entropy.min()))
        return weights if weights.any() else np.ones_like(weights)

    def _running(self) -> list[tuple[Attempt, Reservoir]]:
        return [(a, a.reservoir) for a in self._stems if a.state == "running" and a.reservoir is not None]

    def _note_due(self) -> None:
        self._stems = [a for a, _ in self._running()]
        self.due = min((a.began + r.next for a, r in self._running()), default=NEVER)


def return_spread(group: Group, starts: list[Start], rollout: TensorDict) -> Weights:
    """Deviation of the members' undiscounted returns from each step on; 0 for those that had ended."""
    members = [a for a in group.members if not a.greedy]
    rewards = [rollout["reward"][a.row, a.began : a.end].double().cpu().numpy() for a in members]
    return np.array([np.std([reward[start.step :].sum() for reward in rewards]) for start in starts])
