"""Collectors for simulators in torch that never wait for the device: rollouts of one shape, masks in place of selections.

A whole rollout is one function of tensors that stay where they are, which a GPU records and replays. What is told of it
(steps, finished episodes) is one vector, which crosses to Python with the metrics of the update.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from groupwise.collectors.base import Collector, Episode, steps_between_restarts
from groupwise.data.rollout import Nested, check_finite, leaves, lengthen
from groupwise.engines.replay import Recorder, Replayed
from groupwise.envs.base import EnvStep
from groupwise.envs.native import Rows, TorchGroupEnv
from groupwise.errors import EnvError
from groupwise.lean_tensordict import TensorDict
from groupwise.policies.base import Action, Policy
from groupwise.seeding import derive_seed

LATEST = 100
"""Finished episodes that are told one by one."""


class Turn(NamedTuple):
    """An action of all rows, and what follows until the next one."""

    action: Action
    rows: Rows
    obs: Nested
    """[N, ...] of the rows, for the next action."""
    step: EnvStep
    """With the observations at which attempts ended, where they did."""
    others: tuple[Tensor, ...]
    """What else the collector goes on with."""


class Ends(NamedTuple):
    """Where attempts ended in a window, and what they had come to there; rows may be fewer than the rollout's."""

    ended: Bool[Tensor, "row step"]
    terminated: Bool[Tensor, "row step"]
    episode_return: Float[Tensor, "row step"]
    length: Int[Tensor, "row step"]


class Running:
    """Return and length so far of the attempts that go on across windows.

    Args:
        num_rows: attempts that are followed.
    """

    def __init__(self, num_rows: int, device: torch.device) -> None:
        self._return = torch.zeros(num_rows, dtype=torch.float64, device=device)
        self._length = torch.zeros(num_rows, dtype=torch.int64, device=device)

    def forget(self) -> None:
        """No attempt goes on."""
        self._return.zero_()
        self._length.zero_()

    def follow(
        self,
        reward: Float[Tensor, "row step"],
        terminated: Bool[Tensor, "row step"],
        ended: Bool[Tensor, "row step"],
        began: Int[Tensor, "row step"],
        goes_on: Bool[Tensor, " row"],
    ) -> Ends:
        """What attempts came to; those that go on behind the window are kept.

        Args:
            began: slot of the window at which each slot's attempt began, 0 where an earlier window did.
            goes_on: an attempt is under way after the last slot.
        """
        total = reward.double().cumsum(dim=1)
        behind = (total - reward).gather(1, began)
        carried = began == 0
        slot = torch.arange(reward.shape[1], device=reward.device)
        returns = total - behind + torch.where(carried, self._return[:, None], 0.0)
        length = slot - began + 1 + torch.where(carried, self._length[:, None], 0)
        self._return.copy_(torch.where(goes_on, returns[:, -1], 0.0))
        self._length.copy_(torch.where(goes_on, length[:, -1], 0))
        return Ends(ended, terminated, returns, length)


def told(ends: Ends, *counts: Tensor) -> Float[Tensor, " number"]:
    """Episodes that ended, sums of their returns and lengths, ``counts``, and the latest of them one by one, newest first."""
    ended = ends.ended.T.flatten()
    columns = [part.T.flatten().double() for part in (ends.episode_return, ends.length, ends.terminated)]
    sums = [ended.sum(), *(column.masked_fill(~ended, 0).sum() for column in columns[:2])]
    after = ended.sum() - ended.cumsum(dim=0)
    place = torch.where(
        ended & (after < LATEST), after, LATEST
    )  # all others meet in one more place, which nobody reads
    latest = [column.new_zeros(LATEST + 1).scatter(0, place, column)[:LATEST] for column in columns]
    return torch.cat([torch.stack([number.double() for number in (*sums, *counts)]), *latest])


class ResidentCollector(Collector):
    """What windows and groups have in common.

    ``last_steps``, ``finished`` (here the latest 100 of those that ended) and ``metrics`` speak of the last rollout once
    its numbers have crossed: in ``receive``, or when ``metrics`` is asked.

    Args:
        rank: of this process; each draws its own streams.
        recorder: of the rollout; None: the device's, False: none.

    Raises:
        EnvError: policy and environment are on different devices, or compiling is not for this one.
    """

    def __init__(
        self,
        env: TorchGroupEnv,
        policy: Policy,
        *,
        seed: int,
        rank: int,
        recorder: Recorder | Literal[False] | None = None,
    ) -> None:
        super().__init__()
        if policy.device.type != env.device.type:
            raise EnvError(
                f"{env.env_id} is on {env.device}, and the policy on {policy.device}; fix: device={str(policy.device)!r}"
            )
        self.env = env
        self.policy = policy
        self.seed = seed
        self.rank = rank
        self.restart_gap = steps_between_restarts(env)
        self._generator = torch.Generator(policy.device)
        self._rows: Rows | None = None
        self._goes_on = False
        self._rollout: TensorDict | None = None
        self._pending: Tensor | None = None
        self._told: dict[str, float] = {}
        self._fill = Replayed(
            self._filled, env.device, name="collecting", generators=[self._generator], recorder=recorder
        )

    def collect(self, num_steps: int, rollout: TensorDict) -> TensorDict:
        """Exactly ``num_steps`` slots of every row."""
        if rollout.shape[1] <= num_steps:
            rollout = lengthen(rollout, num_steps + 1)
        rollout = rollout[:, : num_steps + 1]
        if self._pending is not None:  # nobody fetched what the last rollout told
            self.metrics()
        self._generator.manual_seed(derive_seed(self.seed, "action", self.rank, self.iteration))
        self._prepare(num_steps)
        self._goes_on = True
        self._rollout = rollout
        self._pending = self._fill(leaves(rollout))
        self.iteration += 1
        return rollout

    def restart(self) -> None:
        """Drop running attempts: the next ``collect`` begins with fresh ones."""
        self._goes_on = False

    def pending(self) -> Tensor | None:
        """The numbers of the last rollout, still on the device; None if they have crossed."""
        return self._pending

    def receive(self, numbers: Sequence[float]) -> None:
        """Take in what ``pending`` was.

        Raises:
            DataError: a number of the rollout is not finite.
        """
        self._pending = None
        assert self._rollout is not None
        episodes, returns, lengths, unfinite, steps, *more = numbers[: -3 * LATEST]
        if unfinite:
            check_finite(self._rollout)
        latest = [numbers[len(numbers) - k * LATEST :][:LATEST] for k in (3, 2, 1)]
        newest = [Episode(r, int(n), bool(end)) for r, n, end in zip(*latest, strict=True)][: int(episodes)]
        self.finished = newest[::-1]
        self.recent.extend(self.finished)
        self.last_steps = int(steps)
        self._told = {"rollout/env_steps": steps, "rollout/episodes": episodes} | self._more(more)
        if episodes >= LATEST:
            self._told |= {"rollout/return_mean": returns / episodes, "rollout/length_mean": lengths / episodes}

    def metrics(self) -> dict[str, float]:
        """``rollout/*`` numbers of the last ``collect``."""
        if self._pending is not None:
            self.receive(self._pending.tolist())
        return super().metrics() | self._told

    def state_dict(self) -> dict[str, Any]:
        """Plain data that the next rollouts depend on, besides ``iteration``."""
        self.metrics()
        return super().state_dict()

    def close(self) -> None:
        """Free the environments."""
        self.env.close()

    def _turning(self) -> Callable[..., Turn]:
        """``_turn`` for many steps in which no parameter changes."""
        return partial(self._turn, act=self.actor())

    def _turn(self, rows: Rows, obs: Nested, *others: Tensor, act: Callable[..., Action] | None = None) -> Turn:
        """An action of all rows, and what follows until the next one.

        Args:
            obs: [N, ...] of the rows.
            act: None: the policy's own, in plain torch.
        """
        action = (act or self.policy.act)(obs, generator=self._generator)
        return Turn(action, *self._next(rows, self.policy.env_action(action.action), *others))

    @abstractmethod
    def _next(self, rows: Rows, action: Tensor, *others: Tensor) -> tuple[Rows, Nested, EnvStep, tuple[Tensor, ...]]:
        """The rest of a turn: a step of all rows, and what begins where attempts ended. A pure function."""

    @abstractmethod
    def _prepare(self, num_steps: int) -> None:
        """Bring what Python knows, such as this iteration's seeds, to tensors that stay where they are."""

    @abstractmethod
    def _filled(self) -> Float[Tensor, " number"]:
        """Fill the rollout; what ``told`` says of it, with steps whose numbers are not finite and steps taken as the first counts."""

    def _more(self, numbers: list[float]) -> dict[str, float]:
        """Metrics from further counts."""
        return {}

    def _put(self, rows: Rows) -> None:
        """Go on from these rows, in the tensors of the last ones."""
        if self._rows is None:
            self._rows = rows.clone()
        else:
            self._rows.copy_(rows)
