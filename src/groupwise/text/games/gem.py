"""Games of GEM: ``gem:game:Game2048-v0-easy``."""

import random
import re
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

import numpy as np

from groupwise.errors import MissingExtraError, UnknownNameError
from groupwise.text.envs import TextEnv
from groupwise.text.games import making, sample_form

_FORM = re.compile(r"\\boxed\{([^{}\n]{1,40})\}")
"""An action, as games show it."""


class Gem(TextEnv):
    """A game of GEM. What it says before and after each observation is part of it, and a reward of 1 at the end a success.

    Args:
        game: its id, such as ``game:Game2048-v0-easy``. Other tasks of GEM load data from networks, or run the model's programs.
        settings: of the game, such as ``target_tile``.
    """

    def __init__(self, game: str, **settings: Any) -> None:
        if find_spec("gem") is None:
            raise MissingExtraError(
                "'gem' is not installed; fix: pip install --no-deps --ignore-requires-python gem-llm==0.1.0 msgspec"
            )
        import gem
        from gem.envs.registration import ENV_REGISTRY

        games = [name for name in ENV_REGISTRY if name.startswith("game:")]
        if game not in games:
            raise UnknownNameError("game of GEM", game, games)
        with making(f"gem:{game}", settings):
            self._env = gem.make(game, **settings)

    def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Begin an episode."""
        observation, info = self._env.reset(seed)
        self._seen = ""
        return self._whole(observation, info), {}

    def step(self, text: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Play a turn."""
        observation, reward, terminated, truncated, info = self._env.step(text)
        end = {"success": bool(reward >= 1)} if terminated or truncated else {}
        return self._whole(observation, info), float(reward), terminated, truncated, end

    def sample_action(self, rng: np.random.Generator) -> str:
        """The game's own, else an action that it has shown with digits drawn anew."""
        state = random.getstate()
        random.seed(int(rng.integers(2**32)))
        try:
            action = str(self._env.sample_random_action())
        except NotImplementedError:
            action = sample_form(_FORM.findall(self._seen), rng)
        finally:
            random.setstate(state)
        return action if action.startswith("\\boxed") else f"\\boxed{{{action}}}"

    def _whole(self, observation: str, info: Mapping[str, Any]) -> str:
        """An observation with what GEM says around it."""
        whole = "\n".join(filter(None, (info.get("prefix"), observation, info.get("suffix"))))
        self._seen += whole
        return whole
