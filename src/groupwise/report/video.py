"""A policy at work as an animated picture."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from groupwise.envs.configs import EnvCfg
from groupwise.policies.base import Policy

if TYPE_CHECKING:
    from gymnasium import Env
    from PIL.Image import Image

log = logging.getLogger(__name__)

MAX_WIDTH = 400
"""Pixels; wider frames are scaled down."""
MIN_DELAY = 20
"""Milliseconds; browsers show faster GIFs slowly."""


def rendering_env(cfg: EnvCfg, env: object | None) -> "Env[Any, Any] | None":
    """One environment that renders to arrays, if it can; None, with a log line, if it cannot.

    Args:
        env: a callable that returns the environment, used instead of ``cfg.id``; it sets its render mode itself. One
            that returns a ``GroupEnv`` has no picture.
    """
    import gymnasium

    from groupwise.envs.self_vectorised import makes_rows

    if cfg.vectorization == "envpool" or makes_rows(env):
        log.info("no video: %s makes all its rows at once", cfg.id)
        return None
    make = partial(gymnasium.make, cfg.id) if env is None else env
    assert callable(make)
    kwargs = {key: value for key, value in cfg.kwargs.items() if key != "render_mode"}
    made: gymnasium.Env[Any, Any] = make(**(kwargs if env is None else cfg.kwargs))
    if env is None and "rgb_array" in made.metadata.get("render_modes", ()):
        made.close()
        made = make(**kwargs, render_mode="rgb_array")
    if made.render_mode == "rgb_array":
        return made
    log.info("no video: %s does not render to arrays", made)
    made.close()
    return None


def record_video(
    policy: Policy, env: "Env[Any, Any]", path: Path, *, seed: int, max_frames: int = 150, max_steps: int = 1000
) -> Path | None:
    """Writes an episode of the greedy policy as GIF or WebP (by suffix); None, with a log line, if it cannot render.

    Args:
        env: renders to arrays.
        max_frames: of an episode that is longer, evenly spaced steps are shown at the same speed.
        max_steps: cuts the episode.
    """
    fps = float(env.metadata.get("render_fps") or 30)
    try:
        with _no_display():
            frames, stride = _play(policy, env, seed, max_frames, max_steps)
    except _rendering_errors() as error:
        log.info("no video: rendering failed: %s", error)
        return None
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


def _rendering_errors() -> tuple[type[Exception], ...]:
    """What simulators raise where there is no display, no GL or no renderer installed, and Pillow for what is no image."""
    from gymnasium.error import Error

    return Error, ImportError, OSError, RuntimeError, AttributeError, TypeError
