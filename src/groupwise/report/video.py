"""A policy at work as an animated picture."""

import os
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from groupwise.config.env import EnvCfg
from groupwise.errors import EnvError
from groupwise.policies.base import Policy

if TYPE_CHECKING:
    from gymnasium import Env
    from PIL.Image import Image


class NoPictureError(EnvError):
    """An environment that has no way to render to arrays, as opposed to one whose renderer failed."""


MAX_WIDTH = 400
"""Pixels; wider frames are scaled down."""
MIN_DELAY = 20
"""Milliseconds; browsers show faster GIFs slowly."""


def film(policy: Policy, cfg: EnvCfg, env: object | None, path: Path, *, seed: int) -> Path:
    """Writes an episode of the greedy policy in an environment made for it, which is closed afterwards; the picture's path.

    Args:
        env: a callable that returns the environment, used instead of ``cfg.id``; it sets its render mode itself.

    Raises:
        NoPictureError: the environment does not render to arrays.
        EnvError: its renderer failed.
    """
    with _no_display(), _explained(cfg.id):
        made = rendering_env(cfg, env)
    try:
        return record_video(policy, made, path, seed=seed)
    finally:
        with suppress(
            Exception
        ):  # a renderer that failed may fail once more; the picture is written, or the error said
            made.close()


def rendering_env(cfg: EnvCfg, env: object | None) -> "Env[Any, Any]":
    """One environment that renders to arrays.

    Args:
        env: a callable that returns the environment, used instead of ``cfg.id``; it sets its render mode itself. One
            that returns a ``GroupEnv`` has no picture.

    Raises:
        NoPictureError: it cannot render so.
    """
    import gymnasium

    from groupwise.envs.make import makes_rows

    if cfg.vectorization == "envpool" or makes_rows(env):
        raise NoPictureError(
            f"no video: {cfg.id} makes all its rows at once, and renders none; fix: leave the video out"
        )
    make = partial(gymnasium.make, cfg.id) if env is None else env
    assert callable(make)
    kwargs = {key: value for key, value in cfg.kwargs.items() if key != "render_mode"}
    made: gymnasium.Env[Any, Any] = make(**(kwargs if env is None else cfg.kwargs))
    if env is None and "rgb_array" in made.metadata.get("render_modes", ()):
        made.close()
        made = make(**kwargs, render_mode="rgb_array")
    if made.render_mode == "rgb_array":
        return made
    made.close()
    raise NoPictureError(
        f"no video: {made} does not render to arrays; fix: leave the video out, or make it with render_mode='rgb_array'"
    )


def record_video(
    policy: Policy, env: "Env[Any, Any]", path: Path, *, seed: int, max_frames: int = 150, max_steps: int = 1000
) -> Path:
    """Writes an episode of the greedy policy as GIF or WebP (by suffix); its path.

    Args:
        env: renders to arrays.
        max_frames: of an episode that is longer, evenly spaced steps are shown at the same speed.
        max_steps: cuts the episode.

    Raises:
        EnvError: the renderer failed.
    """
    fps = float(env.metadata.get("render_fps") or 30)
    name = type(env.unwrapped).__name__ if env.spec is None else env.spec.id
    with _no_display(), _explained(name):
        frames, stride = _play(policy, env, seed, max_frames, max_steps)
    frames[0].save(
        path, save_all=True, append_images=frames[1:], loop=0, duration=max(MIN_DELAY, round(1000 * stride / fps))
    )
    return path


def _play(
    policy: Policy, env: "Env[Any, Any]", seed: int, max_frames: int, max_steps: int
) -> tuple[list["Image"], int]:
    """Frames of an episode and the steps between two of them, which doubles whenever they become too many."""
    from PIL import Image

    frames: list[Image.Image] = []
    stride = 1
    obs, _ = env.reset(seed=seed)
    for step in range(max_steps):
        if step % stride == 0:
            frames.append(_shrink(Image.fromarray(env.render())))  # type: ignore[arg-type]
        if len(frames) > max_frames:
            frames, stride = frames[::2], 2 * stride
        obs, _, terminated, truncated, _ = env.step(policy.predict(obs, deterministic=True))
        if terminated or truncated:
            break
    return frames, stride


@contextmanager
def _no_display() -> Iterator[None]:
    """Let SDL (pygame) draw into memory without looking for a display, unless the user chose a driver."""
    chosen = "SDL_VIDEODRIVER" in os.environ
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
    try:
        yield
    finally:
        if not chosen:
            del os.environ["SDL_VIDEODRIVER"]


def _shrink(image: "Image") -> "Image":
    if image.width <= MAX_WIDTH:
        return image
    return image.resize((MAX_WIDTH, round(image.height * MAX_WIDTH / image.width)))


@contextmanager
def _explained(name: str) -> Iterator[None]:
    """Turn whatever a renderer raises into an error of ours: each library has exceptions of its own, mujoco's from C."""
    try:
        yield
    except EnvError:
        raise
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise EnvError(f"no video: rendering {name} failed ({reason}); fix: {_fix(error)}") from error


def _fix(error: Exception) -> str:
    modules = (frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__))
    if not any(name.startswith(("mujoco.", "gymnasium.envs.mujoco.")) for name in modules):
        return "install what it draws with, or give it a display (as xvfb-run does)"
    others = [f"MUJOCO_GL={name}" for name in ("egl", "osmesa") if name != os.environ.get("MUJOCO_GL")]
    return f"MuJoCo draws without a display if {' or '.join(others)} is set in the environment"
