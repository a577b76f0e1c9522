"""Which episode each environment works on, and the steps that are not trained on yet."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, cast

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
    """Steps ``begin..end-1`` (ticks) of one environment."""

    number: int
    env: int
    begin: int
    end: int | None = None
    """None while it runs."""

    @property
    def length(self) -> int:
        """Steps of a finished episode."""
        assert self.end is not None
        return self.end - self.begin


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
        self._ticks: list[Tick] = []
        self._trimmed = 0
        """Ticks that were recorded and are no longer held."""

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
        return Running(episode.number, self._now - episode.begin)

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
        self._ticks.append(tick)
        ended = np.flatnonzero(tick.terminated | tick.truncated).tolist()
        for env in ended:
            self._current[env].end = self._now
            self._current[env] = self._begin(env)
        return ended

    def all_finished(self, below: int) -> bool:
        """Whether no group with a number under ``below`` is waited for."""
        return all(self._is_whole(group) for group in self._groups if group < below)

    def take_whole_groups(self, device: torch.device) -> TensorDict | None:
        """The steps of all whole groups as a rollout of one row ``[1, T+1]``; they are then forgotten. None without any."""
        whole = [group for group in sorted(self._groups) if self._is_whole(group)]
        episodes = [(index, episode) for index, group in enumerate(whole) for episode in self._groups.pop(group)]
        rollout = self._rollout(episodes, device) if episodes else None
        needed = min((a.begin for members in self._groups.values() for a in members), default=self._now)
        del self._ticks[: needed - self._trimmed]
        self._trimmed = needed
        return rollout

    @property
    def _now(self) -> int:
        return self._trimmed + len(self._ticks)

    def _hand_out(self) -> int:
        self._next += 1
        return self._next - 1

    def _begin(self, env: int) -> Member:
        episode = Member(self._queued[env], env, self._now)
        self._groups.setdefault(episode.number // self.group_size, []).append(episode)
        self._queued[env] = self._hand_out()
        return episode

    def _is_whole(self, group: int) -> bool:
        members = self._groups[group]
        return len(members) == self.group_size and all(member.end is not None for member in members)

    def _rollout(self, episodes: list[tuple[int, Member]], device: torch.device) -> TensorDict:
        lengths = [episode.length for _, episode in episodes]
        total = sum(lengths)
        group = np.repeat([index for index, _ in episodes], lengths)
        env = np.repeat([a.env for _, a in episodes], lengths)
        step = np.concatenate([np.arange(length) for length in lengths])
        tick = np.repeat([a.begin - self._trimmed for _, a in episodes], lengths) + step
        # the rollout's last slot is padding
        slot = np.append(np.arange(total), total - 1)

        def gather(parts: list[Array]) -> torch.Tensor:
            return torch.as_tensor(np.stack(parts)[tick[slot], env[slot]][None], device=device)

        def label(values: Array, padding: int) -> torch.Tensor:
            return torch.as_tensor(np.append(values, padding)[None], device=device)

        counts = label(np.ones(total, dtype=np.bool_), 0).bool()
        ticks = self._ticks
        data = {
            "obs": self._obs(gather),
            "action": gather([t.action for t in ticks]),
            "reward": gather([t.reward for t in ticks]),
            "sample_log_prob": gather([t.log_prob for t in ticks]),
            "terminated": gather([t.terminated for t in ticks]),
            "truncated": gather([t.truncated for t in ticks]),
            "valid": counts,
            "loss_mask": counts.clone(),
            "group_id": label(group, -1),
            "episode_id": label(np.repeat(np.arange(len(episodes)), lengths), -1),
            "step": label(step, 0),
        }
        return TensorDict(data, batch_size=[1, total + 1], device=device)

    def _obs(self, gather: Callable[[list[Array]], torch.Tensor]) -> Nested:
        if not isinstance(self._ticks[0].obs, dict):
            return gather([cast(Array, tick.obs) for tick in self._ticks])
        seen = [cast(dict[str, Array], tick.obs) for tick in self._ticks]
        leaves = {key: gather([obs[key] for obs in seen]) for key in seen[0]}
        some = next(iter(leaves.values()))
        return TensorDict(leaves, batch_size=list(some.shape[:2]), device=some.device)


def copy_obs(obs: Obs) -> Obs:
    """A copy, as environments may reuse their arrays."""
    return {key: value.copy() for key, value in obs.items()} if isinstance(obs, dict) else obs.copy()


def on_cpu(value: object) -> object:
    """A tensor where every machine can load it; anything else as it is."""
    return value.cpu() if isinstance(value, torch.Tensor) else value
