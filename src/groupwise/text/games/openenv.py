"""Environments on a server of OpenEnv."""

import json
import re
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any, cast

from groupwise.config.base import URL
from groupwise.errors import ConfigError, EnvError, require_extra
from groupwise.system import parse_json
from groupwise.text.envs import TextEnv


class OpenEnv(TextEnv):
    """A session on a server of OpenEnv: ``gw.TextTask(env=lambda: OpenEnv("http://localhost:8000"))``, in Python alone.

    The seed is sent at each reset. An action that the server finds invalid is answered by its error, which the model reads. A
    reward of 1 at the end is a success.

    Args:
        action: the action of a turn, ``{"message": text}`` by default.
        read: the text of an observation, its JSON by default.
        timeout: seconds that an exchange may take.
        max_bytes: size of the server's largest message.
    """

    def __init__(
        self, url: str, *, action: Callable[[str], Mapping[str, Any]] = lambda text: {"message": text},
        read: Callable[[Mapping[str, Any]], str] = json.dumps, timeout: float = 60.0, max_bytes: int = 2**20,
    ) -> None:  # fmt: skip
        require_extra("websockets", "openenv")
        if not re.fullmatch(URL, url):
            raise ConfigError(f"OpenEnv({url!r:.200}): expected http://HOST:PORT or https://HOST:PORT; fix: its URL")
        self._url, self._action, self._read, self._timeout, self._size = url, action, read, timeout, max_bytes
        self._stack, self._session = ExitStack(), cast(Any, None)

    def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Begin an episode; the row of the data goes to the server, too."""
        observation, *_ = self._exchange("reset", {**(options or {}), "seed": seed})
        return observation, {}

    def step(self, text: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Play a turn."""
        observation, reward, done = self._exchange("step", self._action(text))
        return observation, reward, done, False, {"success": reward >= 1} if done else {}

    def close(self) -> None:
        """End the session."""
        self._session = None
        self._stack.close()

    def _exchange(self, kind: str, data: Mapping[str, Any]) -> tuple[str, float, bool]:
        """Observation, reward and end that answer a message; after an error the session is closed."""
        from websockets.exceptions import WebSocketException
        from websockets.sync.client import connect

        end = time.monotonic() + self._timeout
        try:
            if self._session is None:
                self._session = self._stack.enter_context(connect(
                    f"ws{self._url.removeprefix('http')}/ws", max_size=self._size, open_timeout=self._timeout,
                    ping_timeout=self._timeout, close_timeout=1,
                ))  # fmt: skip
            self._session.send(json.dumps({"type": kind, "data": data}))
            return self._answer(
                kind, parse_json(self._session.recv(timeout=max(0.0, end - time.monotonic()), decode=False))
            )
        except BaseException as error:
            self.close()
            if isinstance(error, WebSocketException | OSError | ValueError):
                why = f"{type(error).__name__}: {error!s:.500}"
                raise EnvError(f"{self._url}, {kind}: {why}; fix: the server") from error
            raise

    def _answer(self, kind: str, message: Any) -> tuple[str, float, bool]:
        match message:
            case {"type": "observation", "data": {"observation": dict() as seen, **rest}}:
                reward = 0.0 if rest.get("reward") is None else rest["reward"]
                if not isinstance(reward, int | float):
                    raise ValueError(f"the reward is {reward!r:.80}, expected a number")
                return self._read(seen), float(reward), rest.get("done") is True
            case {"type": "error", "data": {"code": "VALIDATION_ERROR", "message": str() as error}} if kind == "step":
                return f"error: {error:.500}", 0.0, False
        raise ValueError(f"the server answered {message!r:.500}")
