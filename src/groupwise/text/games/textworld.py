"""Games that TextWorld makes: ``textworld:rooms=1,objects=4,quest=2``."""

import atexit
import re
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from groupwise.errors import ConfigError, require_extra
from groupwise.text.envs import TextEnv

_SIZES = {"rooms": "nb_rooms", "objects": "nb_objects", "quest": "quest_length"}
_COMMAND = re.compile(r"[A-Za-z0-9 '-]{1,100}")
"""One command; a full stop begins another one."""


class TextWorld(TextEnv):
    """A game of TextWorld, made from the seed: another house and quest for each. The reward is what a turn adds to the score.

    Args:
        game: its sizes, such as ``rooms=1,objects=4,quest=2``: the quest takes two commands.
        commands: whether observations end with the commands that are possible.
    """

    def __init__(self, game: str, commands: bool = False) -> None:
        require_extra("textworld", "textworld")
        sizes = dict(size.partition("=")[::2] for size in game.split(","))
        if not sizes.keys() <= _SIZES.keys() or not all(re.fullmatch("[1-9][0-9]?", n) for n in sizes.values()):
            raise ConfigError(f"textworld:{game}: expected sizes of 1 to 99; fix: textworld:rooms=1,objects=4,quest=2")
        self._sizes = tuple((_SIZES[name], int(number)) for name, number in sizes.items())
        self._commands = commands
        self._env: Any = None
        self._path = ""

    def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Begin an episode: the quest, and the room."""
        import textworld

        path = _made(self._sizes, 0 if seed is None else seed)
        if path != self._path:
            self.close()  # load() of another game would keep 0.4 MB of each
            wanted = ("admissible_commands", "description", "objective", "verbs", "won", "lost", "score")
            self._env = textworld.start(path, textworld.EnvInfos(**dict.fromkeys(wanted, True)))
            self._path = path
        self._state, self._score = self._env.reset(), 0.0
        return self._read(f"{self._state.objective}\n{self._state.description}"), {}

    def step(self, text: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Play a command. Those to the interpreter, such as one that writes a file, are none of the game, and are not played."""
        words = text.split()
        command = " ".join(words)
        if not _COMMAND.fullmatch(command) or words[0] not in self._state.verbs or "then" in words:
            return self._read("That's not a verb I recognise."), 0.0, False, False, {}
        self._state, score, done = self._env.step(command)
        reward, self._score = score - self._score, float(score)
        end = {"success": bool(self._state.won)} if done else {}
        return self._read(self._state.feedback), float(reward), bool(done), False, end

    def walkthrough(self) -> list[str]:
        """The commands that win the game, from its beginning."""
        return [*self._state["extra.walkthrough"]]

    def sample_action(self, rng: np.random.Generator) -> str:
        """One of the possible commands."""
        return str(rng.choice(self._state.admissible_commands))

    def close(self) -> None:
        """End the interpreter."""
        if self._env is not None:
            self._env.close()
        self._env, self._path = None, ""

    def _read(self, text: str) -> str:
        """The game's text without the interpreter's prompt and empty lines, and with the commands."""
        said = re.split(r"\n>|\*\*\* The End", text)[0]
        lines = [" ".join(line.split()) for line in said.splitlines()]
        if self._commands:
            lines.append("Commands: " + "; ".join(self._state.admissible_commands))
        return "\n".join(filter(None, lines))


@cache
def _folder() -> Path:
    """The folder of this process's games; removed at its end."""
    folder = tempfile.TemporaryDirectory(prefix="groupwise-textworld-")
    atexit.register(folder.cleanup)
    return Path(folder.name)


@cache
def _made(sizes: tuple[tuple[str, int], ...], seed: int) -> str:
    """The file of a game; to make it takes seconds."""
    import textworld

    options = textworld.GameOptions()
    options.seeds = seed
    for name, number in sizes:
        setattr(options, name, number)
    name = "-".join(map(str, (*dict(sizes).values(), *dict(sizes), seed)))
    options.path = str(_folder() / f"{name}.z8")
    return str(textworld.make(options)[0])
