"""Which episode each environment works on, and the steps that are not trained on yet."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from tensordict import TensorDict

from groupwise.contrib.sb3.start import Running, Start
from groupwise.data.rollout import Nested
from groupwise.errors import DataError, EnvError
from groupwise.seeding import derive_seed

Obs = npt.NDArray[Any] | dict[str, npt.NDArray[Any]]
Array = npt.NDArray[Any]


class Tick(NamedTuple):
    """One step of all E environments; every array is [E, ...]."""

    obs: Obs
    """What the policy saw, normalised as it was then."""
    action: Array
    """The policy's own action, before it was clipped."""
    log_prob: Array
    """Of the action, under the policy that drew it."""
    reward: Array
    terminated: Array
    truncated: Array


@dataclass
class Member:
    """An episode, and its steps so far."""

    number: int
    steps: list[Tick] = field(default_factory=list)
    """Those of its environment alone, without the leading dimension."""
    finished: bool = False


class GroupBuffer:
    """Hands out episodes in order, records their steps, and gives out whole groups.

    Episode ``a`` is member ``a % group_size`` of group ``a // group_size``; members may run one after another or side by
    side. Each environment holds one episode and knows the next one, for it resets itself.

    Args:
        seed: of all starts and of all noise.
        first_group: number of the first group.
        starts: whether members share theirs.
    """

    def __init__(
        self, num_envs: int, group_size: int, *, seed: int, first_group: int, starts: Literal["shared", "own"]
    ) -> None:
        self.group_size = group_size
        self.seed = seed
        self.starts = starts
        self._next = first_group * group_size
        self._queued = [self._hand_out() for _ in range(num_envs)]
        self._current: list[Member] = []
        self._groups: dict[int, list[Member]] = {}
        """Begun episodes of each group that was not given out."""

    @property
    def num_opened(self) -> int:
        """Every group below this number was begun."""
        return max(self._groups, default=-1) + 1

    @property
    def next_group(self) -> int:
        """Number of the first group that has not begun."""
        return -(-self._next // self.group_size)

    def begin(self) -> None:
        """All environments have just been reset to what they had queued."""
        self._current = [self._begin(env) for env in range(len(self._queued))]

    def queued(self, env: int) -> Start:
        """What an environment starts next."""
        number = self._queued[env]
        group, member = divmod(number, self.group_size)
        of_start = (group,) if self.starts == "shared" else (group, member)
        start_seed = derive_seed(self.seed, "start", *of_start)
        return Start(number, start_seed, derive_seed(self.seed, "noise", group, member))

    def running(self, env: int) -> Running:
        """What an environment should be doing."""
        episode = self._current[env]
        return Running(episode.number, len(episode.steps))

    def check(self, env: int, found: Running) -> None:
        """Refuse to continue if something else used the environment.

        Raises:
            EnvError: it is not where it should be.
        """
        if found != self.running(env):
            raise EnvError(
                f"environment {env} should be at {self.running(env)} and is at {found}: something else reset or stepped "
                "it during learn(); fix: evaluate on an environment of its own"
            )

    def record(self, tick: Tick) -> list[int]:
        """Take one step of all environments; returns the environments that began their next episode.

        Raises:
            DataError: a reward or a log-probability is not finite.
        """
        for name, values in (("reward", tick.reward), ("log-probability", tick.log_prob)):
            if not np.isfinite(values).all():
                env = int(np.flatnonzero(~np.isfinite(values))[0])
                raise DataError(
                    f"the {name} of environment {env} is {values[env]}, expected a finite number; fix the environment "
                    "or the policy that produced it (stable_baselines3's VecCheckNan finds which)"
                )
        for env, episode in enumerate(self._current):
            episode.steps.append(_of_env(tick, env))
        ended: list[int] = np.flatnonzero(tick.terminated | tick.truncated).tolist()
        for env in ended:
            self._current[env].finished = True
            self._current[env] = self._begin(env)
        return ended

    def all_finished(self, below: int) -> bool:
        """Whether no group with a number under ``below`` is waited for."""
        return all(self._is_whole(group) for group in self._groups if group < below)

    def take_whole_groups(self, device: torch.device) -> TensorDict | None:
        """The steps of all whole groups as a rollout of one row ``[1, T+1]``; they are then forgotten. None without any."""
        whole = [self._groups.pop(group) for group in sorted(self._groups) if self._is_whole(group)]
        return _rollout(whole, device) if whole else None

    def _hand_out(self) -> int:
        self._next += 1
        return self._next - 1

    def _begin(self, env: int) -> Member:
        episode = Member(self._queued[env])
        self._groups.setdefault(episode.number // self.group_size, []).append(episode)
        self._queued[env] = self._hand_out()
        return episode

    def _is_whole(self, group: int) -> bool:
        members = self._groups[group]
        return len(members) == self.group_size and all(member.finished for member in members)


def _of_env(tick: Tick, env: int) -> Tick:
    obs = {key: value[env] for key, value in tick.obs.items()} if isinstance(tick.obs, dict) else tick.obs[env]
    return Tick(obs, *(values[env] for values in tick[1:]))


def _rollout(groups: list[list[Member]], device: torch.device) -> TensorDict:
    """All steps of the groups, one after another, and a slot of padding."""
    episodes = [episode for group in groups for episode in group]
    lengths = [len(episode.steps) for episode in episodes]
    steps = [step for episode in episodes for step in episode.steps]
    obs, *columns = zip(*steps, steps[-1], strict=True)  # the last slot is padding

    def label(values: Array, padding: int) -> torch.Tensor:
        return torch.as_tensor(np.append(values, padding)[None], device=device)

    counts = label(np.ones(len(steps)), 0).bool()
    names = ("action", "sample_log_prob", "reward", "terminated", "truncated")
    data = {
        "obs": _stacked_obs(obs, device),
        **{name: _stacked(values, device) for name, values in zip(names, columns, strict=True)},
        "valid": counts,
        "loss_mask": counts.clone(),
        "group_id": label(np.repeat(np.repeat(np.arange(len(groups)), len(groups[0])), lengths), -1),
        "episode_id": label(np.repeat(np.arange(len(episodes)), lengths), -1),
        "step": label(np.concatenate([np.arange(length) for length in lengths]), 0),
    }
    return TensorDict(data, batch_size=[1, len(steps) + 1], device=device)


def _stacked(values: Sequence[Any], device: torch.device) -> torch.Tensor:
    return torch.as_tensor(np.stack(values)[None], device=device)


def _stacked_obs(seen: Sequence[Any], device: torch.device) -> Nested:
    if not isinstance(seen[0], dict):
        return _stacked(seen, device)
    leaves = {key: _stacked([obs[key] for obs in seen], device) for key in seen[0]}
    return TensorDict(leaves, batch_size=[1, len(seen)], device=device)


def copy_obs(obs: Obs) -> Obs:
    """A copy, as environments may reuse their arrays."""
    return {key: value.copy() for key, value in obs.items()} if isinstance(obs, dict) else obs.copy()


def on_cpu(value: object) -> object:
    """A tensor where every machine can load it; anything else as it is."""
    return value.cpu() if isinstance(value, torch.Tensor) else value
