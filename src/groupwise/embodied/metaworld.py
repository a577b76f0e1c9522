"""The 50 tasks of Meta-World, as ``MetaWorld/push-v3`` and so on, and ``MetaWorld/multi`` for several in one run.

What differs from the package ``metaworld``, whose simulation, rewards and criteria of success these are:

- The seed of ``reset`` alone decides the start: task, positions of objects and goal. The package ignores that seed,
  and its starts depend on the episode before.
- Success ends the episode. The package plays on, and success may be lost again.
- States can be captured and restored bit for bit (``clone_state``, ``restore_state``).
- Images are small, fast and drawn only where they are asked for.

**Images on demand** (``DrawsOnDemand``). Whoever takes several steps for one decision sets ``env.unwrapped.draws =
False`` before them: ``step`` then leaves ``obs["image"]`` as the last drawn one. After the last one it puts
``env.unwrapped.image()``, which draws the present state, into the observation, unless ``draws`` was False before.

**Expert.** ``expert(task)`` acts on ``env.unwrapped.state``, which exists whatever the observation is.
"""

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium import spaces

from groupwise.embodied.metaworld_tasks import INSTRUCTIONS
from groupwise.envs.names import require_package
from groupwise.errors import EnvError, UnknownNameError

require_package("MetaWorld/")
from groupwise.embodied.metaworld_simulator import VIEWS, Episode, Simulator  # noqa: E402
from groupwise.embodied.rendering import Image  # noqa: E402

STATE_SIZE = 39
PROPRIO_SIZE = 4
"""Position of the hand and opening of the gripper."""
INSTRUCTION_BYTES = 64
MAX_EPISODE_STEPS = 100
_MAX_REWARD = 10.0
_VIDEO_SIZE = 400
"""Pixels; videos show no more (``report.video.MAX_SIZE``)."""

_simulators: WeakValueDictionary[str, Simulator] = WeakValueDictionary()
"""Those of this process, shared by all rows that use the same ones."""


class MetaWorldEnv(gymnasium.Env[Any, npt.NDArray[np.float32]]):
    """One or several tasks of Meta-World for the Sawyer arm.

    Actions [4] in [-1, 1]: movement of the hand along x, y and z (1 is 1 cm), and closing of the gripper.

    ``obs="state"``: float32 [39], Meta-World's own with the goal; with several tasks T a one-hot of the task follows.
    ``obs="image"``: ``image`` uint8 [views, pixels, pixels, 3], ``proprio`` float32 [4] (position of the hand in m,
    opening of the gripper in [0, 1]), ``instruction`` uint8 [64] (UTF-8, zero-padded).

    ``info`` has ``success`` (bool) and ``task`` (its name).

    Args:
        tasks: names such as ``push-v3``. The start seed picks one of them.
        obs: ``state`` or ``image``, as above.
        views: cameras of ``obs="image"``. ``corner2`` is closer than the package's, and upright.
        pixels: height and width of an image.
        hide_arm: draw the hand but not the links of the arm, in half the time. Report it with results.
        reward: ``success``: 1 for success, else 0. ``dense``: Meta-World's, scaled to [-1, 0] per step, so that success,
            which ends the episode, costs no reward.

    Raises:
        UnknownNameError: a task that does not exist.
        EnvError: a camera that does not exist, no tasks, no pixels, or images that cannot be drawn here.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 80}

    def __init__(
        self,
        tasks: Sequence[str] = (),
        *,
        obs: str = "state",
        views: Sequence[str] = ("corner2", "gripperPOV"),
        pixels: int = 64,
        hide_arm: bool = False,
        reward: str = "success",
        render_mode: str | None = None,
    ) -> None:
        _check(tasks, obs, views, pixels, reward)
        self.tasks = tuple(tasks)
        self.render_mode = render_mode
        self.action_space = spaces.Box(-1.0, 1.0, (4,), np.float32)
        self.observation_space = _space(obs, len(self.tasks), len(views), pixels)
        self._sees = self.draws = obs == "image"
        self._views, self._pixels, self._hide_arm = tuple(views), pixels, hide_arm
        self._reward = reward
        self._image = np.zeros((len(views), pixels, pixels, 3), np.uint8)
        self._simulators = {
            task: _simulators.get(task) or _simulators.setdefault(task, Simulator(task)) for task in tasks
        }
        self._task = self.tasks[0]
        self._episode = Episode()

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """The first observation of an episode that follows from the seed alone."""
        super().reset(seed=seed)
        self._task = self.tasks[self.np_random.integers(len(self.tasks))]
        self._episode = Episode()
        self._simulators[self._task].start(self._episode, self.np_random)
        return self._observed(draw=True), {"task": self._task, "success": False}

    def step(self, action: npt.NDArray[np.float32]) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """One step of 12.5 ms."""
        simulator = self._simulators[self._task]
        dense, success = simulator.step(self._episode, np.clip(action, -1.0, 1.0))
        reward = float(success) if self._reward == "success" else dense / _MAX_REWARD - 1.0
        return self._observed(draw=self.draws), reward, success, False, {"task": self._task, "success": success}

    @property
    def state(self) -> npt.NDArray[np.float64]:
        """[39] Meta-World's own observation of the present state, for ``expert``."""
        return self._simulators[self._task].state(self._episode)

    def image(self) -> Image:
        """[views, pixels, pixels, 3] of the present state."""
        simulator = self._simulators[self._task]
        draw = partial(simulator.draw, self._episode, size=self._pixels, hide_arm=self._hide_arm)
        return np.stack([draw(view) for view in self._views])

    def render(self) -> Image | None:
        """A larger picture for videos, with ``render_mode="rgb_array"``."""
        if self.render_mode is None:
            return None
        return self._simulators[self._task].draw(self._episode, "corner2", _VIDEO_SIZE)

    def clone_state(self) -> dict[str, Any]:
        """The complete state."""
        return {"task": self._task, "image": self._image, **self._simulators[self._task].capture(self._episode)}

    def restore_state(self, state: dict[str, Any]) -> None:
        """Go back to what ``clone_state`` returned, here or in another environment of the same tasks."""
        self._task, self._image = state["task"], state["image"]
        self._episode = Episode({name: part for name, part in state.items() if name not in ("task", "image")})

    def close(self) -> None:
        """Free the simulators that no other environment uses."""
        self._simulators = {}

    def _observed(self, draw: bool) -> Any:
        state = self.state.astype(np.float32)
        if not self._sees:
            one_hot = [task == self._task for task in self.tasks] if len(self.tasks) > 1 else []
            return np.concatenate([state, np.array(one_hot, np.float32)])
        if draw:
            self._image = self.image()
        return {
            "image": self._image,
            "proprio": state[:PROPRIO_SIZE],
            "instruction": instruction_bytes(INSTRUCTIONS[self._task]),
        }


def expert(task: str) -> Callable[[npt.NDArray[np.float64]], npt.NDArray[np.float32]]:
    """Meta-World's scripted policy of a task: from ``env.unwrapped.state`` [39] to an action [4].

    Raises:
        UnknownNameError: a task that does not exist.
    """
    _check_task(task)
    from metaworld.policies import ENV_POLICY_MAP

    policy = ENV_POLICY_MAP[task]()

    def act(state: npt.NDArray[np.float64]) -> npt.NDArray[np.float32]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it warns of actions beyond 1, which are meant
            action = policy.get_action(state)
        clipped: npt.NDArray[np.float32] = np.clip(action, -1.0, 1.0).astype(np.float32)
        return clipped

    return act


def instruction_bytes(text: str) -> npt.NDArray[np.uint8]:
    """[64] the UTF-8 bytes of a text that is not longer, zero-padded."""
    return np.frombuffer(text.encode().ljust(INSTRUCTION_BYTES, b"\0"), np.uint8).copy()


def _space(obs: str, num_tasks: int, num_views: int, pixels: int) -> spaces.Space[Any]:
    if obs == "state":
        return spaces.Box(-np.inf, np.inf, (STATE_SIZE + (num_tasks if num_tasks > 1 else 0),), np.float32)
    return spaces.Dict(
        image=spaces.Box(0, 255, (num_views, pixels, pixels, 3), np.uint8),
        proprio=spaces.Box(-np.inf, np.inf, (PROPRIO_SIZE,), np.float32),
        instruction=spaces.Box(0, 255, (INSTRUCTION_BYTES,), np.uint8),
    )


def _check(tasks: Sequence[str], obs: str, views: Sequence[str], pixels: int, reward: str) -> None:
    if isinstance(tasks, str) or not tasks or len(set(tasks)) < len(tasks):
        raise EnvError(f"tasks is {tasks!r}, expected names, none twice; fix: env.kwargs.tasks=['push-v3', ...]")
    for task in tasks:
        _check_task(task)
    for name, value, known in (("obs", obs, ("state", "image")), ("reward", reward, ("success", "dense"))):
        if value not in known:
            raise EnvError(f"{name} is {value!r}, expected one of {known}; fix: env.kwargs.{name}={known[0]!r}")
    if isinstance(views, str) or not views or not set(views) <= set(VIEWS):
        raise EnvError(f"views is {views!r}, expected some of {', '.join(VIEWS)}; fix: env.kwargs.views=['corner2']")
    if pixels < 1:
        raise EnvError(f"pixels is {pixels}, expected at least 1; fix: env.kwargs.pixels=64")


def _check_task(task: str) -> None:
    if task not in INSTRUCTIONS:
        raise UnknownNameError("task of Meta-World", task, INSTRUCTIONS)


def _register() -> None:
    entry_point = f"{__name__}:{MetaWorldEnv.__name__}"
    for task in INSTRUCTIONS:
        gymnasium.register(
            f"MetaWorld/{task}",
            entry_point,
            max_episode_steps=MAX_EPISODE_STEPS,
            disable_env_checker=True,
            kwargs={"tasks": (task,)},
        )
    gymnasium.register("MetaWorld/multi", entry_point, max_episode_steps=MAX_EPISODE_STEPS, disable_env_checker=True)


_register()
