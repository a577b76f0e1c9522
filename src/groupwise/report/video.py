"""The video of a policy."""

import math
import os
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from groupwise.config.env import EnvCfg
from groupwise.errors import EnvError
from groupwise.policies.base import Policy
from groupwise.system import files

if TYPE_CHECKING:
    from gymnasium import Env
    from PIL.Image import Image

MAX_SIZE = 400
"""Pixels; wider or higher frames are scaled down."""
MAX_FPS = 30
"""Frames per second; faster environments show fewer of their steps, at the same speed."""
MAX_FRAMES = 150
"""Longer episodes show fewer of their steps, too."""
MAX_STEPS = 1000
"""Truncates the episode."""
LAST_DELAY = 1000
"""Milliseconds that the last frame stays before the video begins again."""


class NoPictureError(EnvError):
    """The environment cannot render to arrays."""


def film(policy: Policy, cfg: EnvCfg, env: object | None, path: Path, *, seed: int) -> None:
    """Write an episode of the greedy policy as GIF or WebP (by suffix), at the speed of the environment.

    Args:
        env: a callable that returns the environment, used instead of ``cfg.id``; it sets its render mode itself.

    Raises:
        NoPictureError: the environment does not render to arrays.
        EnvError: its renderer failed.
    """
    with no_display(), explained(cfg.id):
        made = rendering_env(cfg, env)
        try:
            fps = float(made.metadata.get("render_fps") or MAX_FPS)
            frames, stride = _play(policy, made, cfg, seed, stride=math.ceil(fps / MAX_FPS))
        finally:
            with suppress(Exception):  # a broken renderer may fail again
                made.close()
    delay = 10 * round(100 * stride / fps)  # GIF counts in hundredths of a second
    delays = [delay] * (len(frames) - 1) + [LAST_DELAY]
    video, suffix = BytesIO(), path.suffix.removeprefix(".")
    if suffix == "gif":
        frames = _with_one_palette(frames)
    frames[0].save(video, suffix, save_all=True, append_images=frames[1:], loop=0, duration=delays)
    files.write(path, video.getvalue())


def draw_one_frame(env_id: str) -> None:
    """Draw the start of an episode, and forget it.

    Raises:
        EnvError: the environment or its renderer failed.
    """
    with no_display(), explained(env_id):
        made = rendering_env(EnvCfg(id=env_id), None)
        made.reset(seed=0)
        draw(made)
        made.close()


def rendering_env(cfg: EnvCfg, env: object | None) -> "Env[Any, Any]":
    """One environment that renders to arrays, with its masks; arguments as of ``film``.

    Raises:
        NoPictureError: it cannot render so.
    """
    from groupwise.envs.masked import with_masks

    return with_masks(make_rendering(cfg, env), cfg)


def make_rendering(cfg: EnvCfg, env: object | None) -> "Env[Any, Any]":
    """What ``rendering_env`` puts masks on."""
    import gymnasium

    from groupwise.envs.make import makes_rows
    from groupwise.envs.names import import_package

    if makes_rows(env):
        raise NoPictureError(f"no video: {cfg.id} is a batched environment, which does not render")
    if env is None:
        import_package(cfg.id)
    make = partial(gymnasium.make, cfg.id) if env is None else env
    assert callable(make)
    kwargs = dict(cfg.kwargs)
    if env is None:
        kwargs.pop("render_mode", None)  # not every environment takes one
    made: gymnasium.Env[Any, Any] = make(**kwargs)
    if env is None and "rgb_array" in made.metadata.get("render_modes", ()):
        made.close()
        made = make(**kwargs | {"render_mode": "rgb_array"})
    if made.render_mode != "rgb_array":
        made.close()
        raise NoPictureError(
            f"no video: {made} does not render to arrays; fix: leave the video out, or make it with render_mode='rgb_array'"
        )
    return made


def _play(policy: Policy, env: "Env[Any, Any]", cfg: EnvCfg, seed: int, stride: int) -> tuple[list["Image"], int]:
    """Frames of an episode with its end, and the steps between two of them, which double whenever they become too many."""
    frames, actions, player = [], deque[Any](), policy.player()
    obs, _ = env.reset(seed=seed)
    for step in range(MAX_STEPS):
        if step % stride == 0:
            frames.append(draw(env))
        if len(frames) > MAX_FRAMES:
            frames, stride = frames[::2], 2 * stride
        if not actions:
            action = player.predict(obs, deterministic=True)
            actions.extend(action[: cfg.actions_executed] if cfg.action_chunk > 1 else [action])
        obs, _, terminated, truncated, _ = env.step(actions.popleft())
        if terminated or truncated:
            break
    return [*frames, draw(env)], stride


def draw(env: "Env[Any, Any]", size: int = MAX_SIZE) -> "Image":
    """What the environment renders, at most ``size`` pixels wide and high."""
    from PIL import Image

    frame = Image.fromarray(env.render())  # type: ignore[arg-type]
    frame.thumbnail((size, size), Image.Resampling.BOX)
    return frame


def _with_one_palette(frames: list["Image"]) -> list["Image"]:
    """The frames in 256 colours that they share: smaller files in a fraction of the time of a palette for each."""
    from PIL import Image

    width, height = frames[0].size
    strip = Image.new("RGB", (width, height * len(frames)))
    for index, frame in enumerate(frames):
        strip.paste(frame, (0, index * height))
    strip = strip.quantize(method=Image.Quantize.MAXCOVERAGE)  # half of median cut's time
    return [strip.crop((0, index * height, width, (index + 1) * height)) for index in range(len(frames))]


@contextmanager
def no_display() -> Iterator[None]:
    """Let SDL (pygame), and MuJoCo where there is no display, draw into memory, unless the user chose a driver."""
    drivers = {"SDL_VIDEODRIVER": "dummy"}
    if sys.platform == "linux" and not os.environ.keys() & {"DISPLAY", "WAYLAND_DISPLAY"}:
        drivers["MUJOCO_GL"] = "egl"  # a second failure of GLFW would end the process
    unset = drivers.keys() - os.environ.keys()
    os.environ.update({name: drivers[name] for name in unset})
    try:
        yield
    finally:
        for name in unset:
            del os.environ[name]


@contextmanager
def explained(name: str) -> Iterator[None]:
    """Turn what a renderer raises into an ``EnvError``: each library has its own exceptions."""
    try:
        yield
    except EnvError:
        raise
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise EnvError(
            f"no video: rendering {name} failed ({reason}); fix: install what it draws with, give it a display "
            "(xvfb-run), or for MuJoCo set MUJOCO_GL=egl or MUJOCO_GL=osmesa"
        ) from error
