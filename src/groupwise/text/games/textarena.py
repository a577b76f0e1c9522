"""Single-player games of TextArena: ``textarena:2048-v0``."""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from groupwise.errors import ConfigError, EnvError, UnknownNameError, require_extra
from groupwise.text.envs import TextEnv
from groupwise.text.games import making, sample_form

_SERVED = ("GuessWho", "TwentyQuestions")
"""Games that ask a model of OpenRouter."""
_FORM = re.compile(r"\[([^\[\]\n]{1,40})\]")
"""An action, as games show it."""
_LIST = re.compile(r"[a-z]+(?:, [a-z]+){2,}")
"""Words that a game lists."""


class TextArena(TextEnv):
    """A game of TextArena for one player.

    Its wrappers, which repeat the whole history at each turn, are left out: an observation is what is new. A turn without brackets
    is put into brackets, as they do. The reward is the game's, at its end, and 1 is a success.

    Args:
        game: its id, such as ``2048-v0``.
        settings: of the game, such as ``target_tile``.

    Raises:
        ConfigError: there is no such game, it takes no such settings, or it needs what is not installed.
    """

    def __init__(self, game: str, **settings: Any) -> None:
        require_extra("textarena", "textarena")
        import textarena
        from textarena.envs.registration import ENV_REGISTRY

        if game not in ENV_REGISTRY:
            raise UnknownNameError("game of TextArena", game, ENV_REGISTRY)
        if game.startswith(_SERVED):
            raise ConfigError(f"textarena:{game} asks a model on a server; fix: another game")
        with making(f"textarena:{game}", settings):
            self._env = textarena.make(game, **settings)
        while isinstance(self._env, textarena.Wrapper):
            self._env = self._env.env
        self._game = game

    def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Begin an episode."""
        try:
            self._env.reset(num_players=1, seed=seed)
        except AssertionError as error:
            raise EnvError(f"textarena:{self._game} is no game for one player: {error}; fix: another game") from error
        self._seen = ""
        return self._new(), {}

    def step(self, text: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Play a turn; the observation at the end is the reason of it."""
        done, _ = self._env.step(text if "[" in text or "]" in text else f"[{text}]")
        observation = self._new()
        if not done:
            return observation, 0.0, False, False, {}
        rewards, infos = self._env.close()
        observation = "\n".join(filter(None, (observation, infos[0].get("reason"))))
        return observation, float(rewards[0]), True, False, {"success": bool(rewards[0] >= 1)}

    def sample_action(self, rng: np.random.Generator) -> str:
        """One of the actions that the game has shown in brackets, with digits drawn anew; else a word that it lists."""
        forms = list(dict.fromkeys(_FORM.findall(self._seen)))
        if not forms:
            return f"[{rng.choice(re.findall('[a-z]+', ' '.join(_LIST.findall(self._seen))) or [''])}]"
        return f"[{sample_form(forms, rng)}]"

    def _new(self) -> str:
        """The game's messages since the last turn."""
        _, messages = self._env.get_observation()
        new = "\n".join(
            message.strip("\n") for sender, message, _ in messages if sender != 0 and isinstance(message, str)
        )
        self._seen += f"\n{new}"
        return new
