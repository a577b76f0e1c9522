"""Text environments: games that a language model plays in turns, and the check that members of a group begin alike."""

import copy
import pickle
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from numbers import Real
from typing import Any, Literal, NamedTuple

import numpy as np

from groupwise.config.base import GIVEN
from groupwise.config.run import TextStartMode, TextTaskCfg
from groupwise.errors import ConfigError, EnvError
from groupwise.plugins import TEXT_ENVS
from groupwise.seeding import derive_seed
from groupwise.text.rewards import Prompt, make_registered
from groupwise.text.task import Start, read_prompt
from groupwise.text.tools import encodable

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
    def step(self, text: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Answer a turn of the model: observation, reward, terminated, truncated, info.

        ``info["success"]``, at the end of an episode: whether it was won.
        """

    def sample_action(self, rng: np.random.Generator) -> str:
        """A turn that the check of shared starts plays. By default it plays turns of the policy."""
        raise NotImplementedError

    def close(self) -> None:  # noqa: B027  an environment may have nothing to close
        """Free what the environment holds."""


MakeTextEnv = Callable[[], TextEnv]


def make_text_env(cfg: TextTaskCfg, given: MakeTextEnv | None = None) -> MakeTextEnv | None:
    """Makes an instance of the environment that the settings name, or that was ``given`` in Python; None if there is none.

    Raises:
        ConfigError: there is no such environment, it does not take its settings, or it was given in Python and now is missing.
    """
    if cfg.env is None:
        return None
    if cfg.env != GIVEN:
        return partial(make_registered, "text env", TEXT_ENVS, cfg.env, cfg.env_kwargs)
    if given is None:
        raise ConfigError("the environment was given in Python; fix: give it again as env=...")
    return given


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
Ending = Literal["terminated", "truncated", "max_turns", "max_tokens"]


@dataclass
class TextEpisode:
    """An episode of one member of a group.

    Args:
        env: plays it. None: released, since it is over.
        kept: names of the process-wide generators that the environment draws from. The episode has states of its own, seeded by
            its start, so that it is the same whatever is played or trained meanwhile.
    """

    env: TextEnv | None
    kept: Sequence[str] = ()
    rewards: list[float] = field(default_factory=list)
    """Reward of each turn."""
    observations: list[str] = field(default_factory=list)
    """The answer to each turn."""
    success: bool | None = None
    """Whether it was won; None if the environment does not say."""
    ending: Ending | None = None
    """Reason of its end; None before it."""
    states: dict[str, Any] = field(default_factory=dict)
    """States of the kept generators."""

    def reset(self, start: Start) -> Prompt:
        """Begin; the first observation."""
        self.states = {name: GENERATORS[name].seeded(start.seed) for name in self.kept}
        made = self._call("reset", seed=start.seed, options=start.options)
        if not isinstance(made, tuple) or len(made) != 2 or not isinstance(made[1], Mapping):
            raise EnvError(
                f"{self._name}.reset() returned {made!r:.80}; expected an observation and an info; fix: return observation, {{}}"
            )
        return read_prompt(f"{self._name}.reset()", made[0])

    def step(self, text: str) -> str:
        """Play a turn; the observation."""
        made = self._call("step", text)
        if not isinstance(made, tuple) or len(made) != 5 or not isinstance(made[4], Mapping):
            raise EnvError(
                f"{self._name}.step() returned {made!r:.80}; expected observation, reward, terminated, truncated and an info; fix: "
                "return observation, reward, terminated, False, {}"
            )
        observation, reward, terminated, truncated, info = made
        if not isinstance(observation, str):
            raise EnvError(
                f"{self._name}.step() returned the observation {observation!r:.80}; expected a text; fix: str(...)"
            )
        if not isinstance(reward, Real) or not np.isfinite(float(reward)):
            raise EnvError(
                f"{self._name}.step() returned the reward {reward!r:.80}; expected a finite number; fix: a float"
            )
        self.rewards.append(float(reward))
        self.observations.append(encodable(observation))
        if terminated or truncated:
            self.ending = "terminated" if terminated else "truncated"
            success = info.get("success")
            self.success = None if success is None else bool(success)
        return self.observations[-1]

    @property
    def last(self) -> tuple[str, float, Ending | None, bool | None]:
        """Outcome of the last turn, for comparison."""
        return self.observations[-1], self.rewards[-1], self.ending, self.success

    @property
    def _name(self) -> str:
        return type(self.env).__name__

    def _call(self, method: str, *args: Any, **options: Any) -> Any:
        """Call the environment with the episode's own generators."""
        with _holding(self.states):
            try:
                return getattr(self.env, method)(*args, **options)
            except Exception as error:
                turn = f"\n  the turn: {args[0]!r:.80}" if args else ""
                raise EnvError(
                    f"{self._name}.{method}() raised {type(error).__name__}: {error}{turn}\nfix: the environment; tell the model "
                    "by the observation what it did wrong"
                ) from error


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
        make: returns a new instance.
        mode: ``seed``: each is reset with the seed; ``fresh``: each is new, too; ``snapshot``: one is reset, and the others are deep
            copies of it; ``none``: each is reset with a seed of its own.
        kept: see ``TextEpisode``.
        report: of the check that chose the mode.
    """

    def __init__(
        self, make: MakeTextEnv, mode: TextStartMode, kept: Sequence[str] = (), report: "TextStartReport | None" = None
    ) -> None:
        self.make, self.mode, self.kept, self.report = make, mode, kept, report
        self._free: list[TextEnv] = []
        self._playing: list[TextEnv] = []

    def open(self, start: Start, count: int) -> tuple[list[TextEpisode], list[Prompt]]:
        """The episodes of a group and their first observations; an ``ApartError`` if these differ but should not."""
        episodes: list[TextEpisode] = []
        prompts: list[Prompt] = []
        for number in range(count):
            if self.mode == "snapshot" and episodes:
                try:
                    copied = copy.deepcopy(episodes[0])
                except Exception as error:
                    raise ApartError(f"it cannot be copied ({type(error).__name__}: {error})") from error
                assert copied.env is not None
                self._playing.append(copied.env)
                episodes.append(copied)
                prompts.append(prompts[0])
                continue
            env = self._free.pop() if self._free and self.mode in ("seed", "none") else self.make()
            self._playing.append(env)
            episodes.append(TextEpisode(env, self.kept))
            own = derive_seed(start.seed, "member", number) if self.mode == "none" else start.seed
            prompts.append(episodes[-1].reset(start._replace(seed=own)))
            if prompts[-1] != prompts[0] and self.mode != "none":
                raise ApartError(f"members begin with {prompts[0]!r:.200} and {prompts[-1]!r:.200}")
        return episodes, prompts

    def release(self, episode: TextEpisode) -> None:
        """Take back the environment of an episode that is over."""
        env, episode.env = episode.env, None
        if env is None:
            return
        self._playing = [other for other in self._playing if other is not env]
        if self.mode in ("seed", "none"):
            self._free.append(env)
        else:
            env.close()

    def close(self) -> None:
        """Close all instances, also those of episodes that an error ended."""
        for instances in (self._free, self._playing):
            while instances:
                instances.pop().close()


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
        return f"shared ({self.mode}), verified over {self.turns} turns{kept}"


def check_text_starts(
    make: MakeTextEnv, mode: TextStartMode | Literal["auto"], starts: Sequence[Start], play: Play
) -> TextStartReport:
    """Find out how members share a start: three of them, stepped in turns, must answer the same turns alike.

    One of the three has played another episode before. Members of many games agree when one is played after the other, as a single
    environment is tested, and part as soon as they are stepped in turns.

    Args:
        mode: the one to check. ``auto``: the first that passes of ``seed``, ``fresh`` and ``snapshot``.
        starts: at least two.

    Raises:
        EnvError: members differ, with the first difference and the likely reasons.
    """
    kept, rejected = _drawn_from(make, starts[0], play), list[str]()
    if mode == "none":
        return TextStartReport("none", kept, 0, start_varies=True)
    candidates: tuple[TextStartMode, ...] = ("seed", "fresh", "snapshot") if mode == "auto" else (mode,)
    for candidate in candidates:
        with closing(TextEnvs(make, candidate, kept)) as envs:
            try:
                turns, varies = _compared(envs, starts, play)
            except ApartError as error:
                rejected.append(f"start_mode={candidate!r}: {error}")
            else:
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
    with closing(make()) as env:
        if type(env).sample_action is TextEnv.sample_action:
            raise EnvError(
                f"{type(env).__name__} has no sample_action(rng), whose turns are played; fix: write it, or train, which plays turns "
                "of the policy"
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


def _drawn_from(make: MakeTextEnv, start: Start, play: Play) -> tuple[str, ...]:
    """The process-wide generators that an episode draws from, or seeds."""
    with closing(make()) as env:
        episode = TextEpisode(env, tuple(GENERATORS))
        play(episode, start, episode.reset(start))
    return tuple(
        name
        for name, generator in GENERATORS.items()
        if pickle.dumps(episode.states[name]) != pickle.dumps(generator.seeded(start.seed))
    )


def _compared(envs: TextEnvs, starts: Sequence[Start], play: Play) -> tuple[int, bool]:
    """How many turns of members were equal, and whether starts vary; an ``ApartError`` where members differ."""
    compared, varies = 0, False
    for start, other in zip(starts, (*starts[1:], starts[0]), strict=True):
        [episode], [prompt] = envs.open(start, 1)
        turns = play(episode, start, prompt)
        envs.release(episode)
        [episode], [prompt_of_other] = envs.open(other, 1)
        play(episode, other, prompt_of_other)
        envs.release(episode)  # the first of the members takes this instance
        members, _ = envs.open(start, 3)
        [apart], _ = envs.open(other, 1)
        varies |= prompt_of_other != prompt
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
