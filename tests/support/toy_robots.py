"""Small environments with experts written by hand, for demonstrations and what is learned from them."""

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

STEP = 0.2


class Reaching(gymnasium.Env[Any, Any]):
    """A point in the plane moves to a goal, up to 0.2 a step. Being within 0.15 of it is success, and ends the episode."""

    metadata = {"render_modes": [], "render_fps": 20}
    observation_space = spaces.Box(-3, 3, (4,), np.float32)
    action_space = spaces.Box(-1, 1, (2,), np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.point, self.goal = self.np_random.uniform(-1, 1, (2, 2))
        return self.look(), {}

    def look(self) -> Any:
        return np.concatenate([self.point, self.goal]).astype(np.float32)

    def step(self, action: Any) -> Any:
        self.point = self.point + STEP * np.clip(action, -1, 1)
        success = bool(np.abs(self.point - self.goal).max() < 0.15)
        return self.look(), -0.1, success, False, {"is_success": success}


class Seeing(Reaching):
    """The same with images: what it is told, proprioception, and two views of it."""

    observation_space = spaces.Dict(
        image=spaces.Box(0, 255, (2, 6, 5, 3), np.uint8),
        instruction=spaces.Box(0, 255, (16,), np.uint8),
        proprio=spaces.Box(-3, 3, (4,), np.float32),
    )

    def look(self) -> Any:
        image = np.zeros((2, 6, 5, 3), np.uint8)
        image[0, :, :, 0] = np.arange(30).reshape(6, 5)
        image[1] = int(100 * abs(self.point[0])) % 256
        text = b"go left" if self.goal[0] < 0 else "go right \u00e9".encode()
        instruction = np.frombuffer(text.ljust(16, b"\0"), np.uint8)
        return {"image": image, "instruction": instruction, "proprio": super().look()}


class Turning(Reaching):
    """The same with five actions: stay, and a step along each axis, numbered from 2."""

    action_space = spaces.Discrete(5, start=2)  # type: ignore[assignment]
    MOVES = np.array([[0, 0], [1, 0], [-1, 0], [0, 1], [0, -1]])

    def step(self, action: Any) -> Any:
        return super().step(self.MOVES[int(action) - 2])


def straight(obs: Any) -> Any:
    """The expert of ``Reaching`` and ``Seeing``."""
    state = obs["proprio"] if isinstance(obs, dict) else obs
    return np.clip((state[2:] - state[:2]) / STEP, -1, 1)


def along_the_longer_axis(obs: Any) -> int:
    """The expert of ``Turning``."""
    way = obs[2:] - obs[:2]
    axis = int(np.abs(way).argmax())
    return 3 + 2 * axis + int(way[axis] < 0)


def register() -> None:
    """Register all of them, with a limit of 30 steps."""
    for kind in (Reaching, Seeing, Turning):
        name = f"Toy{kind.__name__}-v0"
        if name not in gymnasium.registry:
            gymnasium.register(name, entry_point=kind, max_episode_steps=30)
