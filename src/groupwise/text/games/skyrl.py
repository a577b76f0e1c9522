"""Environments of SkyRL: ``skyrl:gsm8k_multi_turn``, and classes of your own."""

from collections.abc import Callable, Mapping
from typing import Any

from groupwise.errors import ConfigError, EnvError, require_extra
from groupwise.text.envs import TextEnv
from groupwise.text.rewards import Prompt

_NAMES = ("aime", "gsm8k", "gsm8k_multi_turn")
"""Environments that only compare answers. Others run the model's programs, or ask servers that the data name."""


class SkyRL(TextEnv):
    """A ``BaseTextEnv`` of SkyRL, made anew for each row of the data: its ``prompt``, and its other columns as ``extras``.

    A reward of 1 at the end is a success.

    Args:
        game: ``aime``, ``gsm8k`` or ``gsm8k_multi_turn``; in Python also what makes one from ``extras=row``, such as its class.
    """

    def __init__(self, game: str | Callable[..., Any]) -> None:
        require_extra("skyrl_gym", "skyrl")
        if isinstance(game, str) and game not in _NAMES:
            raise ConfigError(f"skyrl:{game}: expected {', '.join(_NAMES)}; fix: in Python, env=lambda: SkyRL(Mine)")
        self._game = game
        self._env: Any = None

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Prompt, dict[str, Any]]:
        """Begin an episode of the row."""
        if not options or "prompt" not in options:
            raise EnvError("SkyRL needs rows with a column 'prompt'; fix: data='train.parquet'")
        self.close()
        extras = {name: value for name, value in options.items() if name != "prompt"}
        if isinstance(self._game, str):
            import skyrl_gym

            self._env = skyrl_gym.make(self._game, extras=extras)
        else:
            self._env = self._game(extras=extras)
        prompt, _ = self._env.init(options["prompt"])
        return prompt if isinstance(prompt, str) else tuple(prompt), {}

    def step(self, text: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Play a turn."""
        made = self._env.step(text)
        observation = "\n".join(message["content"] for message in made["observations"])
        reward, done = float(made["reward"]), bool(made["done"])
        return observation, reward, done, False, {"success": reward >= 1} if done else {}

    def close(self) -> None:
        """Close the environment of the last row."""
        if self._env is not None:
            self._env.close()
        self._env = None
