"""The interface of collectors, which fill rollouts with a policy's experience."""

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ClassVar, NamedTuple, TypeAlias

import torch
from tensordict import TensorDict
from torch import Tensor

from groupwise.collectors.recurrent import RecurrentEnv
from groupwise.data.rollout import Nested
from groupwise.envs.base import EnvStep, VectorEnv
from groupwise.envs.success import successes_by_task
from groupwise.errors import ConfigError
from groupwise.policies.base import Action, Policy
from groupwise.seeding import derive_seed


class Episode(NamedTuple):
    """A finished episode."""

    episode_return: float
    length: int
    terminated: bool
    success: bool | None = None
    """Whether the task was done at its end; None if the environment does not say."""
    task: str | None = None
    """Name of the task; None if the environment does not say."""
    info: dict[str, float] | None = None
    """Numbers at its last step, with ``env.log_info``; None if it was cut before."""


MakeActor: TypeAlias = Callable[[Policy], Callable[..., Action]]
StepHook: TypeAlias = Callable[[Tensor, EnvStep], None]

COUNTS = frozenset(
    f"rollout/{name}" for name in ("env_steps", "episodes", "env_errors", "groups", "filtered_groups", "unscorable")
)
"""Metrics that are summed over ranks."""


class Collector(ABC):
    """Collects rollouts; counts steps and episodes.

    All its randomness follows from ``seed`` and ``iteration``. A resumed run needs these, ``state_dict``, and nothing else.
    """

    repeatable: ClassVar[bool] = False
    """Whether ``collect`` gives the same rollout again after it was broken off: nothing continues across rollouts."""
    policy: Policy
    iteration: int = 0
    """How many rollouts were collected; streams of the next one are derived from it."""
    last_steps: int = 0
    """Environment steps that the last ``collect`` took, wasted ones included."""
    position: int = 0
    """Number of prompts that this process has taken from its data, over all epochs."""
    data_size: int = 0
    """Prompts in the data; 0: there is none."""

    def __init__(self) -> None:
        self.finished: list[Episode] = []
        """Episodes that ended in the last ``collect``, also those begun in an earlier one."""
        self.recent: deque[Episode] = deque(maxlen=100)
        """The latest 100 finished episodes."""
        self._metrics: dict[str, float] = {}
        """Further numbers of the last ``collect``."""

    def record(self, episodes: Iterable[Episode]) -> None:
        """Keep the episodes that ended in a rollout, but for those whose return is not finite."""
        self.finished = [episode for episode in episodes if math.isfinite(episode.episode_return)]
        self.recent.extend(self.finished)

    def calling(self, hook: StepHook) -> AbstractContextManager[None]:
        """Call ``hook`` with actions and outcome of every step, until the context ends.

        Raises:
            ConfigError: there are no environments.
        """
        raise ConfigError("on_step hears steps of environments, and there are none; fix: on_rollout_end")

    @abstractmethod
    def collect(self, num_steps: int, rollout: TensorDict) -> TensorDict:
        """Experience of about ``num_steps`` steps per row, written into ``rollout``; may return a longer or shorter one."""

    def recent_episodes(self) -> Sequence[Episode]:
        """The episodes that ``rollout/*_mean`` average: the latest 100, or all of this rollout if these are more.

        A single window would favour short episodes.
        """
        return self.finished if len(self.finished) >= 100 else self.recent

    def group_start(self, group: int) -> str:
        """What the members of a group of the last rollout share: the seed of their start, or a prompt; empty if unknown."""
        return ""

    def token_texts(self, tokens: Sequence[int]) -> list[str]:
        """Each token as text.

        Raises:
            ConfigError: actions are no tokens.
        """
        raise ConfigError("actions of environments are no tokens; fix: a text task")

    def metrics(self) -> dict[str, float]:
        """``rollout/*`` numbers of the last ``collect``."""
        episodes = self.recent_episodes()
        out = {"rollout/env_steps": float(self.last_steps), "rollout/episodes": float(len(self.finished))}
        if episodes:
            out["rollout/return_mean"] = sum(e.episode_return for e in episodes) / len(episodes)
            out["rollout/length_mean"] = sum(e.length for e in episodes) / len(episodes)
        if any(e.success is not None or e.info is not None for e in episodes):
            out |= _means_of_outcomes(episodes)
        return out | self._metrics

    def state_dict(self) -> dict[str, Any]:
        """Plain data that the next rollouts depend on, besides ``iteration``: where it can be captured, running episodes too."""
        return {"recent": [list(episode) for episode in self.recent]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved ``state_dict``; the collector must be fresh."""
        self.recent.extend(Episode(float(score), int(length), *rest) for score, length, *rest in state["recent"])

    @abstractmethod
    def close(self) -> None:
        """Free the environments."""


class EnvCollector(Collector):
    """Collects from environments.

    Args:
        env: gives observations on the policy's device.
        rank: of this process; each draws its own streams.
        actor: gives what acts in place of ``policy.act``, for many steps in which no parameter changes. None: the policy.
    """

    def __init__(self, env: VectorEnv, policy: Policy, *, seed: int, rank: int, actor: MakeActor | None = None) -> None:
        super().__init__()
        self._make_actor = actor
        self._hooks: list[StepHook] = []
        self.env = RecurrentEnv(env, policy) if policy.state_size else env
        self.policy = policy
        self.seed = seed
        self.rank = rank

    def close(self) -> None:
        """Free the environments."""
        self.env.close()

    def actor(self) -> Callable[..., Action]:
        """The policy's ``act``, for many steps in which no parameter changes."""
        return self.policy.act if self._make_actor is None else self._make_actor(self.policy)

    @contextmanager
    def calling(self, hook: StepHook) -> Iterator[None]:
        """Call ``hook`` with actions and outcome of every step, until the context ends."""
        self._hooks.append(hook)
        try:
            yield
        finally:
            self._hooks.remove(hook)

    def step_env(self, action: Action) -> EnvStep:
        """The outcome of an action in every row."""
        if isinstance(self.env, RecurrentEnv):
            self.env.remember(action)
        env_action = self.policy.env_action(action.action)
        outcome = self.env.step(env_action)
        seen = self.env.outcome if isinstance(self.env, RecurrentEnv) else outcome
        for hook in self._hooks:
            hook(env_action, seen)
        return outcome

    def action_generator(self) -> torch.Generator:
        """Draws the actions of this iteration."""
        generator = torch.Generator(self.policy.device)
        return generator.manual_seed(derive_seed(self.seed, "action", self.rank, self.iteration))


def _means_of_outcomes(episodes: Sequence[Episode]) -> dict[str, float]:
    """Success rate, and ``rollout/info/*`` as means over the episodes that have them."""
    out = {}
    if any(e.success is not None for e in episodes):
        out["rollout/success_rate"] = sum(e.success is True for e in episodes) / len(episodes)
    infos = [episode.info for episode in episodes if episode.info is not None]
    for name in infos[0] if infos else ():
        out[f"rollout/info/{name}"] = sum(info[name] for info in infos) / len(infos)
    return out


def acting_on_finite(act: Callable[..., Action]) -> Callable[..., Action]:
    """``act`` with 0 for what is not finite, in observations and in actions."""

    def acted(obs: Nested, *args: Any, **kwargs: Any) -> Action:
        action = act(_finite(obs), *args, **kwargs)
        return action._replace(action=_finite(action.action))

    return acted


def _finite(values: Nested) -> Any:
    if not isinstance(values, Tensor):
        return values.apply(_finite)
    return values.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0) if values.is_floating_point() else values


def env_steps(rollout: TensorDict, decisions: int) -> int:
    """Environment steps of a rollout with that many decisions: those that chunks executed, else one each."""
    executed = rollout.get("executed", None)
    return decisions if executed is None else int(executed[:, :-1].sum())


def pool_metrics(ranks: Sequence[tuple[Sequence[Episode], dict[str, float]]]) -> dict[str, float]:
    """Metrics over all ranks: ``COUNTS`` are summed, ``*_max`` and ``*_min`` keep their meaning, others are means.

    The success rates of tasks are those of all episodes together.

    Args:
        ranks: the episodes that each rank averages, whose number weights its means, and its metrics.
    """
    pooled = {}
    for name in dict.fromkeys(name for _, metrics in ranks for name in metrics):
        values = [metrics[name] for _, metrics in ranks if name in metrics]
        weights = [max(1, len(episodes)) for episodes, metrics in ranks if name in metrics]
        if name in COUNTS:
            pooled[name] = sum(values)
        elif name.endswith("_max"):
            pooled[name] = max(values)
        elif name.endswith("_min"):
            pooled[name] = min(values)
        else:
            pooled[name] = sum(v * (weight / sum(weights)) for v, weight in zip(values, weights, strict=True))
    tasks = successes_by_task((episode.task, episode.success) for episodes, _ in ranks for episode in episodes)
    return pooled | {f"rollout/success_rate/{task}": sum(found) / len(found) for task, found in tasks.items()}
