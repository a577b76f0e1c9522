"""Text environments: games that a language model plays in turns, and the check that members of a group begin alike."""

import copy
import logging
import math
import pickle
import random
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from numbers import Real
from threading import Lock, Semaphore
from typing import Any, Literal, NamedTuple, TypeVar, cast

import numpy as np

from groupwise.config.run import TextStartMode
from groupwise.errors import DataError, EnvError, GroupwiseError
from groupwise.seeding import derive_seed
from groupwise.text.rewards import Message, Prompt
from groupwise.text.task import Start, read_prompt

log = logging.getLogger(__name__)
Item = TypeVar("Item")
Made = TypeVar("Made")

Observation = str | Sequence[Message]

# What a user writes


class TextEnv(ABC):
    """A game of texts, in Gymnasium's manner: the first observation is the model's prompt, each of its turns an action.

    An instance plays one episode after another. All that an episode draws follows from its seed.
    """

    @abstractmethod
    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Prompt, dict[str, Any]]:
        """Begin an episode; returns the first observation, a text or messages, and an info.

        Args:
            options: the row of the data that the episode is about; None without data.
        """

    @abstractmethod
    def step(self, text: str) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Answer a turn of the model: observation, reward, terminated, truncated, info.

        The observation is a text, or several messages, such as results of tools. ``info["success"]``, at the end of an
        episode: whether it was won.
        """

    tools: Sequence[Mapping[str, Any]] = ()
    """Tools that the model may call, by OpenAI's schema, as the prompt shows them. Calls in a turn's text are
    ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, however the model's template writes them.
    """
    stop: Sequence[str] = ()
    """Strings that end a turn of the model, besides those of ``sampling.stop``."""

    @property
    def unwrapped(self) -> Any:
        """The environment as reward functions get it, in ``environments``."""
        return self

    def final_reward(self) -> float:
        """Reward at the end of an episode, whatever ended it, in addition to those of its turns."""
        return 0.0

    def state_key(self) -> str | None:
        """The state that the next turn answers, for the baseline ``gigpo``: equal states have equal keys. None: its observation."""
        return None

    def sample_action(self, rng: np.random.Generator) -> str:
        """A turn that the check of shared starts plays. By default it plays turns of the policy."""
        raise NotImplementedError

    @property
    def samples_turns(self) -> bool:
        """Whether there is a ``sample_action``."""
        return type(self).sample_action is not TextEnv.sample_action

    def close(self) -> None:  # noqa: B027  an environment may have nothing to close
        """Free what the environment holds."""


MakeTextEnv = Callable[[], TextEnv]
Makes = MakeTextEnv | Mapping[str, MakeTextEnv]
"""Makers of instances: one, or several by the name that a start has."""


def make_for(make: Makes, start: Start) -> TextEnv:
    """An instance of the environment that the episode is of; an ``EnvError`` if making it fails."""
    try:
        return make[start.environment]() if isinstance(make, Mapping) else make()
    except GroupwiseError:
        raise
    except Exception as error:
        raise EnvError(
            f"making the environment raised {type(error).__name__}: {error}\nfix: its constructor; if it fails now and then, "
            "collection.on_env_error='retry' or 'drop'"
        ) from error


def read_observation(where: str, observation: object) -> Prompt:
    """``read_prompt`` of what an environment returned: an ``EnvError`` if it is neither a text nor messages."""
    try:
        return read_prompt(where, observation)
    except DataError as error:
        raise EnvError(str(error)) from None


# Episodes, whose process-wide generators are their own


class Generator(NamedTuple):
    """A process-wide random number generator, by its states."""

    seeded: Callable[[int], Any]
    get: Callable[[], Any]
    set: Callable[[Any], None]


GENERATORS = {
    "random": Generator(lambda seed: random.Random(seed).getstate(), random.getstate, random.setstate),
    "numpy.random": Generator(
        lambda seed: np.random.RandomState(seed).get_state(), np.random.get_state, np.random.set_state
    ),
}
"""Generators that environments draw from, although the episodes of a group are played in turns."""
Ending = Literal[
    "terminated", "truncated", "no_call", "max_turns", "max_tokens", "max_tool_calls", "parse_errors", "timeout", "env_error"
]  # fmt: skip
_OWN_ENDINGS = ("no_call", "max_tool_calls", "parse_errors")
"""Reasons that an environment gives as ``info["ending"]``."""


class EnvTimeoutError(EnvError):
    """An environment that took too long."""


@dataclass
class TextEpisode:
    """An episode of one member of a group.

    Args:
        env: plays it. None: released, since it is over.
        kept: names of the process-wide generators that the environment draws from. The episode has states of its own, seeded by
            its start, so that it is the same whatever is played or trained meanwhile.
        seconds: that a call of the environment may take.
    """

    env: TextEnv | None
    kept: Sequence[str] = ()
    seconds: float | None = None
    start: Start | None = None
    prompt: Prompt = ""
    """The first observation."""
    tools: Sequence[Mapping[str, Any]] = ()
    """Tools that the model may call."""
    turns: list[str] = field(default_factory=list)
    """The turns that were played, as the environment read them."""
    rewards: list[float] = field(default_factory=list)
    """Reward of each turn."""
    final_reward: float = 0.0
    """Reward at the end."""
    observations: list[str] = field(default_factory=list)
    """The answer to each turn."""
    answer: Sequence[Message] = ()
    """The last one as messages."""
    success: bool | None = None
    """Whether it was won; None if the environment does not say."""
    ending: Ending | None = None
    """Reason of its end; None before it."""
    broken: bool = False
    """Whether an error ended it, so that nothing is known of it."""
    counts: Counter[str] = field(default_factory=Counter)
    """Calls of tools, and errors, by name."""
    anchors: list[str] = field(default_factory=list)
    """The state that each turn answers, as a text."""
    states: dict[str, Any] = field(default_factory=dict)
    """States of the kept generators."""
    began: float = field(default_factory=time.monotonic)
    busy: float = 0.0
    """Seconds that the environment took."""
    slowest: float = 0.0
    """Seconds of its longest call."""

    def reset(self, start: Start) -> Prompt:
        """Begin; the first observation."""
        self.start = start
        # by other seeds than the environment may use, so that its seeding is seen, too
        self.states = {name: GENERATORS[name].seeded(derive_seed(start.seed, name)) for name in self.kept}
        made = self._call("reset", seed=start.seed, options=copy.deepcopy(start.options))
        if not isinstance(made, tuple) or len(made) != 2 or not isinstance(made[1], Mapping):
            raise EnvError(
                f"{self._name}.reset() returned {made!r:.80}; expected an observation and an info; fix: return observation, {{}}"
            )
        self.prompt = read_observation(f"{self._name}.reset()", made[0])
        self.tools = [*self.env.tools] if self.env is not None else ()
        self._note_state(self.prompt)
        return self.prompt

    def step(self, text: str) -> Sequence[Message]:
        """Play a turn; the messages that the model reads next."""
        self.turns.append(text)
        made = self._call("step", text)
        if not isinstance(made, tuple) or len(made) != 5 or not isinstance(made[4], Mapping):
            raise EnvError(
                f"{self._name}.step() returned {made!r:.80}; expected observation, reward, terminated, truncated and an info; fix: "
                "return observation, reward, terminated, False, {}"
            )
        observation, reward, terminated, truncated, info = made
        self._check_flag("terminated", terminated)
        self._check_flag("truncated", truncated)
        if not isinstance(observation, str | list | tuple):
            raise EnvError(f"{self._name}.step() returned {observation!r:.80}, not text or messages; fix: str(...)")
        found = [{"role": "user", "content": observation}] if isinstance(observation, str) else observation
        messages = read_observation(f"{self._name}.step()", found) if found else ()
        assert not isinstance(messages, str)
        if not (messages or terminated or truncated):
            raise EnvError(
                f"{self._name}.step() returned no message, and the episode goes on; fix: a text, or terminated=True"
            )
        self.rewards.append(self._number("step", reward))
        self.answer = messages
        self.observations.append("\n".join(message["content"] for message in messages))
        counts = info.get("counts", {})
        if not isinstance(counts, Mapping) or not all(isinstance(number, Real) for number in counts.values()):
            raise EnvError(
                f"{self._name}.step(): info['counts'] = {counts!r:.80}; expected numbers by name; fix: {{'tool_calls': 1}}"
            )
        self.counts.update(counts)
        if terminated or truncated:
            own = info.get("ending")
            success = info.get("success")
            if success is not None:
                self._check_flag("info['success']", success)
            self.success = None if success is None else bool(success)
            self.finish(own if own in _OWN_ENDINGS else "terminated" if terminated else "truncated")
        else:
            self._note_state(self.observations[-1])
        return messages

    def finish(self, ending: Ending) -> None:
        """End it, unless it has ended."""
        if self.ending is None:
            self.final_reward = self._number("final_reward", self._call("final_reward"))
            self.ending = ending

    def play_again(self, env: TextEnv, count: int) -> None:
        """Play the first turns again in another instance, which must answer as the first one did."""
        turns, seen, rewards = self.turns[:count], self.observations[:count], self.rewards[:count]
        self.env, self.turns, self.observations, self.rewards, self.anchors = env, [], [], [], []
        before, self.counts = self.prompt, Counter(env_errors=self.counts["env_errors"])
        assert self.start is not None
        same = self.reset(self.start) == before
        for turn in turns:
            self.step(turn)
        if not same or (self.observations, self.rewards) != (seen, rewards):
            raise EnvError(f"{self._name} does not answer as before when an episode is played again")

    def _note_state(self, observation: Prompt) -> None:
        key = self._call("state_key")
        if not isinstance(key, str | None):
            raise EnvError(f"{self._name}.state_key() returned {key!r:.80}; expected a text or None; fix: str(...)")
        self.anchors.append(f"observation {observation!r}" if key is None else f"key {key}")

    @property
    def ends(self) -> tuple[str, ...]:
        """Texts that end a turn of the model."""
        return () if self.env is None else tuple(self.env.stop)

    @property
    def total(self) -> float:
        """Sum of all rewards."""
        return sum(self.rewards, 0.0) + self.final_reward

    @property
    def last(self) -> tuple[str, float, Ending | None, bool | None, float, str]:
        """Outcome of the last turn, for comparison."""
        rest = self.success, self.final_reward, self.anchors[-1]
        return self.observations[-1], self.rewards[-1], self.ending, *rest

    @property
    def _name(self) -> str:
        return type(self.env).__name__

    def _check_flag(self, what: str, flag: object) -> None:
        flag = cast(Any, flag).item() if getattr(flag, "shape", None) == () else flag  # of NumPy or torch
        if not (isinstance(flag, Real) and flag in (0, 1)):
            raise EnvError(f"{self._name}.step(): {what} = {flag!r:.80}; expected True or False; fix: bool(...)")

    def _number(self, method: str, reward: object) -> float:
        number = math.nan
        if not isinstance(reward, str | bytes):
            with suppress(TypeError, ValueError):  # of what is no number, also of an array of several
                number = float(cast(Any, reward))
        if not math.isfinite(number):
            raise EnvError(f"{self._name}.{method}() returned {reward!r:.80}; expected a finite number; fix: a float")
        return number

    def _call(self, method: str, *args: Any, **options: Any) -> Any:
        """Call the environment with the episode's own generators."""
        began, call = time.monotonic(), partial(getattr(self.env, method), *args, **options)
        with _holding(self.states):
            try:
                return call() if self.seconds is None else _within(self.seconds, call)
            except (Exception, SystemExit) as error:
                turn = f"\n  the turn: {args[0]!r:.80}" if args else ""
                if isinstance(error, EnvTimeoutError):
                    raise EnvTimeoutError(f"{self._name}.{method}() {error}{turn}") from None
                if isinstance(error, GroupwiseError):
                    raise  # with its own fix
                raise EnvError(
                    f"{self._name}.{method}() raised {type(error).__name__}: {error}{turn}\nfix: the environment; tell the model "
                    "by the observation what it did wrong; if it fails now and then, collection.on_env_error='retry' or 'drop'"
                ) from error
            finally:
                took = time.monotonic() - began
                self.busy, self.slowest = self.busy + took, max(self.slowest, took)


def _in_thread(call: Callable[[], Made]) -> Future[Made]:
    """The result of a call in a thread, for which a program that ends does not wait."""
    done: Future[Made] = Future()

    def run() -> None:
        try:
            done.set_result(call())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, daemon=True, name="environment").start()
    return done


def _within(seconds: float, call: Callable[[], Made]) -> Made:
    """The result of a call, which is left to itself where it takes longer; then an ``EnvTimeoutError``."""
    done = _in_thread(call)
    if not wait([done], seconds).done:
        raise EnvTimeoutError(f"took longer than env_timeout={seconds:g} seconds")
    return done.result()


@contextmanager
def _holding(states: dict[str, Any]) -> Iterator[None]:
    """Give the process's generators these states, and note what becomes of them."""
    before = {name: GENERATORS[name].get() for name in states}
    for name, state in states.items():
        GENERATORS[name].set(state)
    try:
        yield
    finally:
        for name, state in before.items():
            states[name] = GENERATORS[name].get()
            GENERATORS[name].set(state)


class ApartError(EnvError):
    """Members of a group do not share a start."""


class TextEnvs:
    """Instances of a text environment, with which members of a group share a start.

    Args:
        make: returns a new instance; several by name.
        mode: ``seed``: each is reset with the seed; ``fresh``: each is new, too; ``snapshot``: one is reset, and the others are deep
            copies of it; ``none``: each is reset with a seed of its own.
        kept: see ``TextEpisode``.
        report: of the check that chose the mode.
        threads: environments that play at the same time.
        seconds: that a call may take.
        on_error: ``raise`` errors; ``retry``: play the episode again in another instance; ``drop``: leave the episode out.
    """

    def __init__(
        self,
        make: Makes,
        mode: TextStartMode,
        kept: Sequence[str] = (),
        report: "TextStartReport | None" = None,
        *,
        threads: int = 1,
        seconds: float | None = None,
        on_error: Literal["raise", "retry", "drop"] = "raise",
    ) -> None:
        self.make, self.mode, self.kept, self.report = make, mode, kept, report
        self.threads, self.seconds, self.on_error = 1 if kept else threads, seconds, on_error
        self._free: dict[str, list[TextEnv]] = defaultdict(list)
        """Instances that wait for an episode, by the name of the environment."""
        self._playing: list[TextEnv] = []
        self._changing = Lock()  # several rollouts may be written at the same time
        self._room = Semaphore(self.threads)

    def others(self) -> "TextEnvs":
        """The same with other instances."""
        how = {"threads": self.threads, "seconds": self.seconds, "on_error": self.on_error}
        return TextEnvs(self.make, self.mode, self.kept, self.report, **how)  # type: ignore[arg-type]

    def each(self, function: Callable[[Item], Made], items: Sequence[Item], at_once: int | None = None) -> list[Made]:
        """Results of the function for each item, in ``at_once`` threads, or as many as environments have."""
        count = min(at_once or self.threads, len(items))
        if count < 2:
            return [*map(function, items)]
        places, made = iter(range(len(items))), dict[int, Made]()

        def work() -> None:
            for place in places:
                made[place] = function(items[place])

        workers = [_in_thread(work) for _ in range(count)]
        for one in wait(workers, return_when=FIRST_EXCEPTION).done:
            one.result()
        return [made[place] for place in range(len(items))]

    def open(self, start: Start, count: int) -> tuple[list[TextEpisode], list[Prompt]]:
        """The episodes of a group and their first observations; an ``ApartError`` if these differ but should not."""
        own = [derive_seed(start.seed, "member", n) if self.mode == "none" else start.seed for n in range(count)]
        if self.mode == "snapshot":
            own = own[:1]
        episodes = self.each(lambda seed: self._begin(start._replace(seed=seed)), own)
        while len(episodes) < count:
            try:
                with self._room:
                    copied = copy.deepcopy(episodes[0])
            except Exception as error:
                raise ApartError(f"it cannot be copied ({type(error).__name__}: {error})") from error
            assert copied.env is not None
            with self._changing:
                self._playing.append(copied.env)
            episodes.append(copied)
        prompts = [episode.prompt for episode in episodes]
        for prompt in prompts:
            if prompt != prompts[0] and self.mode != "none":
                raise ApartError(f"members begin with {prompts[0]!r:.200} and {prompt!r:.200}")
        return episodes, prompts

    def _begin(self, start: Start) -> TextEpisode:
        episode = None
        try:
            episode = TextEpisode(self._take(start), self.kept, self.seconds)
            with self._room:
                episode.reset(start)
        except EnvError as error:
            if episode is not None:
                self.release(episode, failed=True)
            if self.on_error == "raise":
                raise
            log.warning("%s; it is tried again in another instance", error)
            episode = TextEpisode(self._take(start, new=True), self.kept, self.seconds, counts=Counter(env_errors=1))
            with self._room:
                episode.reset(start)
        return episode

    def play(self, episode: TextEpisode, text: str) -> Sequence[Message]:
        """Play a turn; the messages that the model reads next, none where the environment failed."""
        messages: Sequence[Message] = self._guarded(episode, partial(episode.step, text))
        return messages

    def finish(self, episode: TextEpisode, ending: Ending) -> None:
        """End an episode, unless it has ended."""
        self._guarded(episode, partial(episode.finish, ending))

    def _guarded(self, episode: TextEpisode, action: Callable[[], Any]) -> Any:
        count = len(episode.turns)
        try:
            with self._room:
                return action()
        except EnvError as error:
            if self.on_error == "raise" and not isinstance(error, EnvTimeoutError):
                raise
            episode.counts["env_errors"] += 1
            self.release(episode, failed=True)
            log.warning("%s (on_env_error=%r)", error, self.on_error)
            try:
                if self.on_error == "retry":
                    assert episode.start is not None
                    with self._room:
                        episode.play_again(self._take(episode.start, new=True), count)
                        return action()
            except EnvError as another:
                self.release(episode, failed=True)
                error = another
            episode.broken = True
            episode.ending = "timeout" if isinstance(error, EnvTimeoutError) else "env_error"
            return ()

    def release(self, episode: TextEpisode, *, failed: bool = False) -> None:
        """Take back the environment of an episode that is over; no other one plays in an instance that failed."""
        env, episode.env = episode.env, None
        if env is None:
            return
        with self._changing:
            self._playing = [other for other in self._playing if other is not env]
            if self.mode in ("seed", "none") and episode.start is not None and not failed:
                self._free[episode.start.environment].append(env)
                return
        _close(env, self.seconds)

    def close(self) -> None:
        """Close all instances, also those of episodes that an error ended."""
        for instances in (*self._free.values(), self._playing):
            while instances:
                _close(instances.pop(), self.seconds)

    def _take(self, start: Start, *, new: bool = False) -> TextEnv:
        with self._changing:
            free = self._free[start.environment]
            env = free.pop() if free and not new else None
        env = make_for(self.make, start) if env is None else env
        with self._changing:
            self._playing.append(env)
        return env


def _close(env: TextEnv, seconds: float | None) -> None:
    """Close it, unless that fails or takes longer."""
    try:
        env.close() if seconds is None else _within(seconds, env.close)
    except (Exception, SystemExit) as error:
        log.warning("%s.close() failed: %s", type(env).__name__, repr(error))


# The check that members share a start

Play = Callable[[TextEpisode, Start, Prompt], Sequence[str]]
"""Plays an episode that was reset, to its end; returns the turns."""


@dataclass(frozen=True)
class TextStartReport:
    """How members of groups share a start.

    ``mode``: as ``TextEnvs`` has it. ``kept``: the process-wide generators that the environment draws from. ``turns``: how many were
    compared. ``start_varies``: whether the same turns lead elsewhere from another start. ``rejected``: why better modes were not
    chosen.
    """

    mode: TextStartMode
    kept: tuple[str, ...]
    turns: int
    start_varies: bool
    rejected: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.mode == "none":
            return "not shared (start_mode='none')"
        kept = f"; each member has its own {' and '.join(self.kept)}" if self.kept else ""
        compared = f"verified over {self.turns} turns" if self.turns else "not verified, as no turn was played"
        return f"shared ({self.mode}), {compared}{kept}"


_STARTS_TRIED = 3
"""Starts of each environment in the check that members share one."""


def check_text_starts(
    make: Makes,
    mode: TextStartMode | Literal["auto"],
    starts: Sequence[Start],
    play: Play,
    seconds: float | None = None,
    tries: int = 1,
) -> TextStartReport:
    """Find out how members share a start: three of them, stepped in turns, must answer the same turns alike.

    One of the three has played another episode before. Members of many games agree when one is played after the other, as a single
    environment is tested, and part as soon as they are stepped in turns.

    Args:
        mode: the one to check. ``auto``: the first that passes of ``seed``, ``fresh`` and ``snapshot``.
        starts: at least two. The first three of every environment are tried.
        seconds: that a call may take.
        tries: how often a start is checked whose environment fails.

    Raises:
        EnvError: members differ, with the first difference and the likely reasons; or the environment fails.
    """
    of_each: dict[str, list[Start]] = defaultdict(list)
    for start in starts:
        if len(of_each[start.environment]) < _STARTS_TRIED:
            of_each[start.environment].append(start)
    drawn = {name for some in of_each.values() for name in _patiently(tries, _drawn_from, make, some[0], play, seconds)}
    kept, rejected = tuple(name for name in GENERATORS if name in drawn), list[str]()
    if mode == "none":
        return TextStartReport("none", kept, 0, start_varies=True)
    candidates: tuple[TextStartMode, ...] = ("seed", "fresh", "snapshot") if mode == "auto" else (mode,)
    for candidate in candidates:
        with closing(TextEnvs(make, candidate, kept, seconds=seconds)) as envs:
            try:
                found = [
                    _patiently(tries, _compared, envs, start, other, play)
                    for some in of_each.values()
                    for start, other in zip(some, (*some[1:], some[0]), strict=True)
                ]
            except ApartError as error:
                rejected.append(f"start_mode={candidate!r}: {error}")
            else:
                turns, varies = sum(turns for turns, _ in found), any(varies for _, varies in found)
                return TextStartReport(candidate, kept, turns, varies, tuple(rejected))
    raise EnvError(
        "members of a group do not share a start, so their rewards cannot be compared:\n  " + "\n  ".join(rejected) + "\nlikely "
        "reasons: a generator that reset() does not seed, the clock, an id or a path that is new each time, what an episode leaves "
        "to the next, a server that all share; fix: draw all from the seed of reset(), or start_mode='none'"
    )  # fmt: skip


def check_text_env(
    make: MakeTextEnv, mode: TextStartMode | Literal["auto"] = "auto", max_turns: int = 20
) -> TextStartReport:
    """Check by sampled turns how members of a group would share a start; needs ``sample_action``.

    Raises:
        EnvError: they cannot, or the environment samples no turns.
    """
    env = make()
    samples, name = env.samples_turns, type(env).__name__
    _close(env, None)
    if not samples:
        raise EnvError(
            f"{name} has no sample_action(rng), whose turns are played; fix: write it, or train, which plays turns of the policy"
        )
    starts = [Start(derive_seed(0, "check", number)) for number in range(3)]
    return check_text_starts(make, mode, starts, partial(play_samples, max_turns=max_turns))


def play_samples(episode: TextEpisode, start: Start, prompt: Prompt, *, max_turns: int) -> list[str]:
    """Play an episode by turns that the environment samples; returns them."""
    assert episode.env is not None
    rng, turns = np.random.default_rng(derive_seed(start.seed, "turns")), list[str]()
    while episode.ending is None and len(turns) < max_turns:
        turns.append(episode.env.sample_action(rng))
        episode.step(turns[-1])
    return turns


def _drawn_from(make: Makes, start: Start, play: Play, seconds: float | None) -> tuple[str, ...]:
    """The process-wide generators that an episode draws from, or seeds."""
    episode = TextEpisode(env := make_for(make, start), tuple(GENERATORS), seconds)
    try:
        play(episode, start, episode.reset(start))
    finally:
        _close(env, seconds)
    return tuple(
        name
        for name, generator in GENERATORS.items()
        if pickle.dumps(episode.states[name]) != pickle.dumps(generator.seeded(derive_seed(start.seed, name)))
    )


def _patiently(tries: int, check: Callable[..., Made], *args: Any) -> Made:
    """Result of the check of a start, which is made again where the environment fails."""
    for number in range(1, tries + 1):
        try:
            return check(*args)
        except ApartError:
            raise
        except EnvError as error:
            if tries == 1:
                raise
            if number == tries:
                raise EnvError(
                    f"the check of shared starts failed {tries} times in a row, at last by: {error}"
                ) from error
            log.warning("%s; the start is checked again", error)
    raise AssertionError


def _compared(envs: TextEnvs, start: Start, other: Start, play: Play) -> tuple[int, bool]:
    """How many turns of members were equal, and whether starts vary; an ``ApartError`` where members differ."""
    compared = 0
    [episode], [prompt] = envs.open(start, 1)
    turns = play(episode, start, prompt)
    envs.release(episode)
    [episode], [prompt_of_other] = envs.open(other, 1)
    play(episode, other, prompt_of_other)
    envs.release(episode)  # the first of the members takes this instance
    members, _ = envs.open(start, 3)
    [apart], _ = envs.open(other, 1)
    varies = prompt_of_other != prompt
    for number, turn in enumerate(turns, 1):
        for member in members:
            member.step(turn)
        for member in members[1:]:
            if member.last != members[0].last:
                raise ApartError(
                    f"after turn {number}, {turn!r:.80}, members have {members[0].last!r:.200} and {member.last!r:.200}"
                )
        compared += 1
        if apart.ending is None:
            apart.step(turn)
            varies |= apart.last != members[0].last
        if members[0].ending is not None:
            break
    for episode in (*members, apart):
        envs.release(episode)
    return compared, varies
