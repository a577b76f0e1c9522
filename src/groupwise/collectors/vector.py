"""Interface of collectors, the writer of rollouts, and fixed windows of experience for PPO."""

import json
import logging
import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ClassVar, NamedTuple, TypeAlias

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from groupwise.data.rollout import Nested, TensorDict, all_finite, find_nonfinite, lengthen
from groupwise.data.spaces import check_dtypes
from groupwise.envs.base import EnvStep, Mask, VectorEnv, successes_by_task
from groupwise.errors import ConfigError, EnvError
from groupwise.policies.base import Action, Policy, with_state
from groupwise.seeding import derive_seed

log = logging.getLogger(__name__)

# Interface of collectors, which fill rollouts with a policy's experience


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


class Conversation(NamedTuple):
    """Texts of a row of a rollout, or of an episode; as a string, lines to read."""

    start: str
    """The prompt."""
    messages: list[dict[str, Any]]
    """The model's turns and what answered them."""
    rewards: Sequence[float] = ()
    """Reward of each turn."""
    stop_reason: str | None = None
    """Reason of the end of an environment's episode."""
    success: bool | None = None
    """Whether the episode was won; None if the environment does not say."""

    def __str__(self) -> str:
        lines, turn = [self.start], 0
        for message in self.messages:
            who = message.get("name") or {"user": "environment"}.get(message["role"], message["role"])
            if message["role"] == "assistant":
                turn += 1
                who = f"turn {turn}, reward {self.rewards[turn - 1]:g}" if turn <= len(self.rewards) else f"turn {turn}"
            lines.append(f"[{who}] {str(message['content'] or '').strip()}")
            lines += [f"[call] {json.dumps(call['function'])}" for call in message.get("tool_calls", ())]
        won = {True: ", won", False: ", not won", None: ""}[self.success]
        return "\n".join([*lines, f"[end] {self.stop_reason}{won}: reward {sum(self.rewards):g} in {turn} turns"])


MakeActor: TypeAlias = Callable[[Policy], Callable[..., Action]]
StepHook: TypeAlias = Callable[[Tensor, EnvStep], None]

COUNTS = frozenset(
    f"rollout/{name}"
    for name in ("env_steps", "episodes", "env_errors", "groups", "filtered_groups", "unscorable", "starts_apart")
)
"""Metrics that are summed over ranks."""
SHARES = frozenset(f"rollout/{name}" for name in ("idle_fraction", "wasted_steps", "filtered_steps"))
"""Metrics that are shares of steps, whose number weights their means."""


class Collector(ABC):
    """Collects rollouts; counts steps and episodes.

    All its randomness follows from ``seed`` and ``iteration``. A resumed run needs only these and ``state_dict``.
    """

    repeatable: ClassVar[bool] = False
    """Whether ``collect`` gives the same rollout again after it was broken off: nothing continues across rollouts."""
    policy: Policy
    iteration: int = 0
    """Number of rollouts that were collected; streams of the next one are derived from it."""
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
        """Call ``hook`` after every step, until the context ends; a ``ConfigError`` if there are no environments."""
        raise ConfigError("on_step is called for steps of environments, and there are none; fix: on_rollout_end")

    @abstractmethod
    def collect(self, num_steps: int, rollout: TensorDict) -> TensorDict:
        """Experience of about ``num_steps`` steps per row, written into ``rollout``; may return a longer or shorter one."""

    def recent_episodes(self) -> Sequence[Episode]:
        """The episodes that ``rollout/*_mean`` average: the latest 100, or all of this rollout if these are more.

        A single window would favour short episodes.
        """
        return self.finished if len(self.finished) >= 100 else self.recent

    def group_start(self, group: int) -> str:
        """The common start of the members of a group of the last rollout, as its seed; empty if unknown."""
        return ""

    def conversation(self, row: int) -> Conversation:
        """Texts of a row of the last rollout; a ``ConfigError`` if actions are no tokens."""
        raise ConfigError("actions of environments are no tokens; fix: a text task")

    def token_texts(self, tokens: Sequence[int]) -> list[str]:
        """Each token as text; a ``ConfigError`` if actions are no tokens."""
        raise ConfigError("actions of environments are no tokens; fix: a text task")

    def metrics(self) -> dict[str, float]:
        """``rollout/*`` numbers of the last ``collect``."""
        episodes = self.recent_episodes()
        out = {"rollout/env_steps": float(self.last_steps), "rollout/episodes": float(len(self.finished))}
        if episodes:
            out["rollout/return_mean"] = sum(e.episode_return for e in episodes) / len(episodes)
            out["rollout/length_mean"] = sum(e.length for e in episodes) / len(episodes)
        if any(e.success is not None for e in episodes):
            out["rollout/success_rate"] = sum(e.success is True for e in episodes) / len(episodes)
        infos = [e.info for e in episodes if e.info is not None]
        for name in infos[0] if infos else ():
            out[f"rollout/info/{name}"] = sum(info[name] for info in infos) / len(infos)
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
        actor: makes a function that replaces ``policy.act`` for many steps with constant parameters. None: the policy.
    """

    def __init__(self, env: VectorEnv, policy: Policy, *, seed: int, rank: int, actor: MakeActor | None = None) -> None:
        super().__init__()
        self.env = env
        self.policy = policy
        self.seed = seed
        self.rank = rank
        self._make_actor = actor
        self._hooks: list[StepHook] = []
        self.generator = torch.Generator(env.device)
        """Draws the actions."""
        self._state = torch.zeros(env.num_envs, policy.state_size, device=policy.device)
        """State of a recurrent policy in each row."""
        self._resetting = torch.zeros(env.num_envs, dtype=torch.bool, device=policy.device)
        """Rows whose next step only resets them, with ``next_step`` and a recurrent policy."""

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
        """The outcome of an action in every row; observations for a recurrent policy have its state."""
        env_action = self.policy.env_action(action.action)
        outcome = self.env.step(env_action)
        for hook in self._hooks:
            hook(env_action, outcome)
        return outcome if action.state is None else self._remember(outcome, action.state)

    def _remember(self, step: EnvStep, state: Tensor) -> EnvStep:
        """A step with the state that the actions left; 0 where an episode begins. Final observations have it for their values."""
        done = (step.terminated | step.truncated).to(state.device)
        if self.env.autoreset == "same_step":
            if step.final_obs is not None:
                step = step._replace(final_obs=with_state(step.final_obs, state))
            state = state.masked_fill(done.unsqueeze(-1), 0.0)
        elif self.env.autoreset == "next_step":
            state, self._resetting = state.masked_fill(self._resetting.unsqueeze(-1), 0.0), done
        self._state = state
        return step._replace(obs=with_state(step.obs, state))

    def _begun(self, obs: Nested, mask: Mask) -> Nested:
        """Observations for a recurrent policy after episodes began in the rows of ``mask``, where its state is 0."""
        self._state = self._state.masked_fill(torch.from_numpy(mask).to(self._state.device).unsqueeze(-1), 0.0)
        return with_state(obs, self._state)

    def action_generator(self) -> torch.Generator:
        """Draws the actions of this iteration: ``generator``, at the beginning of its stream."""
        return self.generator.manual_seed(derive_seed(self.seed, "action", self.rank, self.iteration))


def acting_on_finite(act: Callable[..., Action]) -> Callable[..., Action]:
    """``act`` with 0 for numbers that are not finite, in observations and in actions."""

    def acted(obs: Nested, *args: Any, **kwargs: Any) -> Action:
        action = act(_finite(obs), *args, **kwargs)
        return action._replace(action=_finite(action.action))

    return acted


def _finite(values: Nested) -> Any:
    if not isinstance(values, Tensor):
        return values.apply(_finite)
    return values.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0) if values.is_floating_point() else values


def env_steps(rollout: TensorDict, decisions: int) -> int:
    """Environment steps of a rollout with that many decisions: those that they executed, or one each."""
    executed = rollout.get("executed", None)
    return decisions if executed is None else int(executed[:, :-1].sum())


def pool_metrics(ranks: Sequence[tuple[Sequence[Episode], dict[str, float]]]) -> dict[str, float]:
    """Metrics over all ranks: ``COUNTS`` are summed, ``*_max`` and ``*_min`` keep their meaning, others are means.

    The success rates of tasks are those of all episodes together.

    Args:
        ranks: the episodes that each rank averages, whose number weights most of its means, and its metrics.
    """
    pooled = ranks[0][1] if len(ranks) == 1 else _pooled(ranks)
    if not any(episode.success is not None for episodes, _ in ranks for episode in episodes):
        return pooled
    tasks = successes_by_task((episode.task, episode.success) for episodes, _ in ranks for episode in episodes)
    return pooled | {f"rollout/success_rate/{task}": sum(found) / len(found) for task, found in tasks.items()}


def _pooled(ranks: Sequence[tuple[Sequence[Episode], dict[str, float]]]) -> dict[str, float]:
    pooled = {}
    for name in dict.fromkeys(name for _, metrics in ranks for name in metrics):
        values = [metrics[name] for _, metrics in ranks if name in metrics]
        sizes = [(len(e), m.get("rollout/env_steps", 0.0)) for e, m in ranks if name in m]
        weights = [max(1.0, steps if name in SHARES else episodes) for episodes, steps in sizes]
        if name in COUNTS:
            pooled[name] = sum(values)
        elif name.endswith("_max"):
            pooled[name] = max(values)
        elif name.endswith("_min"):
            pooled[name] = min(values)
        else:
            pooled[name] = sum(v * (weight / sum(weights)) for v, weight in zip(values, weights, strict=True))
    return pooled


# Writer of rollouts, step by step

Outcome: TypeAlias = tuple[bool | None, str | None, dict[str, float] | None]
"""Success, task and ``env.log_info`` of an episode; None where the environment does not report it."""


class RolloutWriter:
    """Writes through views of a rollout's tensors, which is cheaper than ``rollout[:, t] = ...``.

    A full rollout is lengthened.

    Args:
        policy: gives the values of final observations, where it has a critic.
        live: rows of the rollout that take an action in a step; None: all.
    """

    def __init__(self, rollout: TensorDict, policy: Policy, live: Callable[[TensorDict, int], Tensor] | None = None):
        self._policy, self._live = policy, live
        self._cut: list[tuple[Tensor, Tensor, Nested]] = []
        """Rows, steps and final observations of truncated episodes."""
        self.reports: dict[int, dict[str, Any]] = {}
        """``EnvStep.info`` of steps that end episodes."""
        self._open(rollout)

    def observe(self, step: int, obs: Nested) -> None:
        """Write the observations [N, ...] of a step."""
        _write(self._obs, step, obs)

    def act(self, step: int, action: Action) -> None:
        """Write the actions of a step.

        Raises:
            DataError: an observation is not finite, and so an action on the CPU is not.
            DivergedError: an action on the CPU is not finite, although its observation is.
        """
        if step == self.rollout.shape[1] - 1:
            self._open(lengthen(self.rollout, step))
        _write(self._columns["action"], step, action.action)
        _write(self._columns["sample_log_prob"], step, action.log_prob)
        if action.value is not None:
            _write(self._columns["value"], step, action.value)
        numbers = action.action
        if numbers.is_floating_point() and numbers.device.type == "cpu" and not all_finite(numbers):
            self._refuse_nonfinite(step, numbers)  # on a GPU the check would be a host sync

    def _refuse_nonfinite(self, step: int, action: Tensor) -> None:
        slots = torch.zeros_like(self.rollout["valid"])
        whole = self._live is None or self._policy.state_size  # a network with a memory reads whole rows
        slots[:, step] = True if whole else self._live(self.rollout, step)  # type: ignore[misc]
        if not all_finite(action[slots[:, step]]):
            raise find_nonfinite(self.rollout, slots)[0].error()

    def outcome(self, step: int, outcome: EnvStep) -> None:
        """Write the outcome of a step."""
        _write(self._columns["reward"], step, outcome.reward)
        _write(self._columns["terminated"], step, outcome.terminated)
        _write(self._columns["truncated"], step, outcome.truncated)
        for key in self._from_info:
            _write(self._columns[key], step, outcome.info[key])
        if not outcome.info.keys().isdisjoint(("success", "task", "log_info")):
            self.reports[step] = dict(outcome.info)
            if "success" in outcome.info:  # the next step may overwrite it
                self.reports[step]["success"] = outcome.info["success"].clone()

    def cut(self, step: int, truncated: Bool[Tensor, " row"], obs: Nested) -> None:
        """Keep the final observations, from ``obs`` [N, ...], of the rows truncated at ``step``, for their values."""
        if not self._policy.actor_only and truncated.any():
            rows = truncated.nonzero()[:, 0]
            self.cut_at(rows, torch.full_like(rows, step), obs[rows.to(obs.device)])

    def cut_at(self, rows: Int[Tensor, " cut"], steps: Int[Tensor, " cut"], obs: Nested) -> None:
        """Keep the final observations [cut, ...] of these rows at these steps, for their values."""
        self._cut.append((rows, steps, obs))

    def finish(self, num_steps: int, obs: Nested) -> TensorDict:
        """The rollout of ``num_steps`` steps, with ``obs`` [N, ...] in its last slot and all values."""
        self.observe(num_steps, obs)
        rollout = self.rollout if self.rollout.shape[1] == num_steps + 1 else self.rollout[:, : num_steps + 1]
        if self._policy.actor_only:
            return rollout
        value, next_value = rollout["value"], rollout["next_value"]
        values = self._policy.value(torch.cat([obs, *(final for *_, final in self._cut)])).to(value)  # one forward pass
        value[:, -1] = values[: len(value)]
        next_value[:, :-1] = value[:, 1:]
        next_value.masked_fill_(rollout["terminated"], 0.0)
        if self._cut:
            rows, steps = (torch.cat(parts).to(value.device) for parts in list(zip(*self._cut, strict=True))[:2])
            next_value[rows, steps] = values[len(value) :]
        return rollout

    def outcomes(self, rows: Sequence[int], steps: Sequence[int]) -> list[Outcome]:
        """Reports of the environment on the episodes that ended in these rows with these steps."""
        flags = {step: info["success"] for step, info in self.reports.items() if "success" in info}
        success = dict(zip(flags, torch.stack([*flags.values()]).tolist(), strict=True)) if flags else {}
        found: list[Outcome] = []
        for row, step in zip(rows, steps, strict=True):
            info = self.reports.get(step, {})
            task = str(info["task"][row]) or None if "task" in info else None
            numbers = {name: float(values[row]) for name, values in info.get("log_info", {}).items()}
            is_known = numbers and not any(map(math.isnan, numbers.values()))
            found.append((success[step][row] if step in success else None, task, numbers if is_known else None))
        return found

    def _open(self, rollout: TensorDict) -> None:
        self.rollout = rollout
        self._columns = columns = _columns(rollout)
        self._obs = {key: columns[key] for key in ("obs", "state")} if "state" in columns else columns["obs"]
        self._from_info = [key for key in ("executed", "reward_parts") if key in columns]


def _columns(stored: Nested) -> Any:
    """Views of all rows by step."""
    return stored.unbind(1) if isinstance(stored, Tensor) else {key: _columns(leaf) for key, leaf in stored.items()}


def _write(columns: Any, step: int, value: Any) -> None:
    if isinstance(columns, dict):
        for key, child in columns.items():
            _write(child, step, value[key])
    else:
        columns[step].copy_(value.detach())


class VectorCollector(EnvCollector):
    """Steps every row ``num_steps`` times; episodes continue across windows. Works in every autoreset mode.

    A checkpoint keeps the running episodes where ``env.state_dict`` captures them (classic control, MuJoCo, environments in
    torch, and others made of numbers and arrays, or that clone a state of these). Elsewhere, and on ranks other than the one
    that saves, resuming a run starts new episodes.
    """

    def __init__(
        self, env: VectorEnv, policy: Policy, *, seed: int = 0, rank: int = 0, actor: MakeActor | None = None
    ) -> None:
        super().__init__(env, policy, seed=seed, rank=rank, actor=actor)
        self._obs: Nested | None = None
        self._dead: Bool[np.ndarray, " row"]
        self._age: Int[np.ndarray, " row"]
        self._return: Float[np.ndarray, " row"]

    def collect(self, num_steps: int, rollout: TensorDict) -> TensorDict:
        """Exactly ``num_steps`` steps of every row.

        Raises:
            EnvError: ``num_steps`` is 1 with ``next_step`` resets, which take a step each.
        """
        if self.env.autoreset == "next_step" and num_steps < 2:
            raise EnvError(f"num_steps is {num_steps}, but {self.env.env_id} resets in an extra step; fix: at least 2")
        obs = self._begin() if self._obs is None else self._obs
        self._obs = None  # after an error, the next rollout starts new episodes
        writer = RolloutWriter(rollout, self.policy, self._live)
        obs = self._fill(num_steps, writer, obs)
        rollout = writer.finish(num_steps, obs)
        self._obs = obs
        self.last_steps = env_steps(rollout, self.env.num_envs * num_steps)
        self.iteration += 1
        self._label(rollout, writer)
        return rollout

    def _label(self, rollout: TensorDict, writer: RolloutWriter) -> None:
        """Write masks, ids and steps, which follow from the ends of episodes, and count the finished ones."""
        outcome = rollout.select("reward", "terminated", "truncated")[:, :-1].cpu()  # one host sync
        reward, terminated, truncated = (outcome[k].numpy() for k in ("reward", "terminated", "truncated"))
        done = terminated | truncated
        dead = np.zeros_like(done)
        if self.env.autoreset == "next_step":  # slots behind the ends of episodes, in which the environment only reset
            dead = np.concatenate([self._dead[:, None], done[:, :-1]], axis=1)
            self._dead = done[:, -1]
        live = ~dead
        episode_id, step = label_episodes(done, dead, self._age)
        labels = {"valid": live, "loss_mask": live, "step": step, "group_id": episode_id, "episode_id": episode_id}
        for key, label in labels.items():
            rollout[key][:, :-1].copy_(torch.from_numpy(label), non_blocking=True)

        returns = np.bincount(episode_id[live], weights=reward[live], minlength=done.size)
        goes_on = live[:, 0]
        returns[episode_id[goes_on, 0]] += self._return[goes_on]
        time, row = done.T.nonzero()
        ends = (returns[episode_id[row, time]], step[row, time] + 1, terminated[row, time])
        outcomes: Any = writer.outcomes(row.tolist(), time.tolist()) if writer.reports else [()] * len(row)
        ended = zip(*(part.tolist() for part in ends), outcomes, strict=True)
        self.record(Episode(*end, *outcome) for *end, outcome in ended)
        over = done[:, -1] | dead[:, -1]
        self._return = np.where(over, 0.0, returns[episode_id[:, -1]])
        self._age = np.where(over, 0, step[:, -1] + 1)
        self._metrics = {"rollout/idle_fraction": float(dead.mean())}  # lost to ``next_step`` resets

    def _begin(self) -> Nested:
        rows = self.env.num_envs
        self._dead = np.zeros(rows, dtype=np.bool_)
        self._age = np.zeros(rows, dtype=np.int64)
        self._return = np.zeros(rows, dtype=np.float64)
        self._resetting.zero_()
        obs = self.env.reset(seed=derive_seed(self.seed, "env", self.rank, self.iteration))
        check_dtypes(self.env.obs_spec, obs, f"the observation of {self.env.env_id}")
        return self._begun(obs, np.ones(rows, np.bool_)) if self.policy.state_size else obs

    def _fill(self, num_steps: int, writer: RolloutWriter, obs: Nested) -> Nested:
        """Act, step and write; the observations to act on next."""
        act, generator = self.actor(), self.action_generator()
        for t in range(num_steps):
            writer.observe(t, obs)
            action = act(obs, generator=generator)
            writer.act(t, action)
            step = self.step_env(action)
            writer.outcome(t, step)
            obs = step.obs
            cut = step.truncated & ~step.terminated
            if step.final_obs is not None:
                writer.cut(t, cut, step.final_obs)
            elif self.env.autoreset == "same_step" and cut.any():
                raise EnvError(
                    f"{self.env.env_id} resets rows in the step in which they end, and gave no final_obs for truncated ones; "
                    "fix: EnvStep(..., final_obs=observations before the reset)"
                )
            elif self.env.autoreset == "disabled" and (done := step.terminated | step.truncated).any():
                writer.cut(t, cut, obs)
                mask = done.cpu().numpy()
                obs = self.env.reset(mask=mask)
                obs = self._begun(obs, mask) if self.policy.state_size else obs
        return obs

    def _live(self, rollout: TensorDict, step: int) -> Tensor:
        """Rows that do not reset in the step."""
        if step == 0:
            return torch.from_numpy(~self._dead)
        ended = rollout["terminated"][:, step - 1] | rollout["truncated"][:, step - 1]
        return ~ended if self.env.autoreset == "next_step" else torch.ones_like(ended)

    def state_dict(self) -> dict[str, Any]:
        """The state, with the running episodes, where the environment's state can be captured."""
        env = None if self._obs is None else self.env.state_dict()
        if env is None or self._obs is None:
            return super().state_dict()
        obs = self._obs.clone() if isinstance(self._obs, Tensor) else self._obs.clone().to_dict()
        running = {"rank": self.rank, "env": env, "obs": obs, "dead": self._dead, "age": self._age}
        return super().state_dict() | {"running": running | {"return": self._return}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved ``state_dict``, with its running episodes if this rank saved them."""
        super().load_state_dict(state)
        running = state.get("running")
        if running is None or running["rank"] != self.rank:
            return
        for name in ("dead", "age", "return"):
            if running[name].shape != (self.env.num_envs,):
                raise ValueError(f"running.{name} has shape {running[name].shape}, expected ({self.env.num_envs},)")
        try:
            self.env.load_state_dict(running["env"])
        except EnvError as error:
            why = str(error).partition("; fix: ")[0]
            log.warning("the running episodes cannot be restored, so new ones begin: %s", why)
            return
        obs, device = running["obs"], self.policy.device
        self._obs = obs.to(device) if isinstance(obs, Tensor) else TensorDict(obs, [self.env.num_envs], device=device)
        self._dead, self._age, self._return = running["dead"], running["age"], running["return"]
        if self.policy.state_size:
            self._state, self._resetting = obs["state"].to(device), torch.from_numpy(self._dead).to(device)


def label_episodes(
    done: Bool[np.ndarray, "row step"], dead: Bool[np.ndarray, "row step"], age: Int[np.ndarray, " row"]
) -> tuple[Int[np.ndarray, "row step"], Int[np.ndarray, "row step"]]:
    """The episode that each slot belongs to, numbered densely (-1 on dead slots), and its step there (0 on dead slots).

    Args:
        dead: the environment was resetting: no transition happened.
        age: steps that the episode running at slot 0 had taken before; 0 where none runs there.
    """
    begins = np.ones_like(done)
    begins[:, 1:] = (done | dead)[:, :-1]
    begins &= ~dead
    episode_id = begins.cumsum().reshape(done.shape) - 1
    slot = np.arange(done.shape[1])
    began = np.maximum.accumulate(np.where(begins, slot, 0), axis=1)
    step = slot - began + np.where(began == 0, age[:, None], 0)
    return np.where(dead, -1, episode_id), np.where(dead, 0, step)
