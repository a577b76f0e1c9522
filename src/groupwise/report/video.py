"""Videos of policies, play in a window, and replayed frames of groups."""

import copy
import json
import math
import os
import re
import socket
import subprocess
import sys
from base64 import b64encode
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext, suppress
from functools import partial
from io import BytesIO
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import IO, TYPE_CHECKING, Any

import gymnasium
import numpy as np
import torch

from groupwise import system as files
from groupwise.config.run import EnvCfg
from groupwise.data.rollout import Nested, leaves
from groupwise.envs.base import GroupEnv, success_of_row
from groupwise.envs.gymnasium import with_masks
from groupwise.envs.make import make_env, makes_rows
from groupwise.envs.names import import_package
from groupwise.errors import EnvError
from groupwise.policies.base import Policy
from groupwise.report.folder import MAX_FRAME_SIZE, MAX_WIDTH, Frames, kept_iterations, read_groups
from groupwise.seeding import derive_seed

if TYPE_CHECKING:
    from PIL.Image import Image


MAX_SIZE = 400
"""Pixels; wider or higher frames are scaled down."""
MAX_FPS = 10
"""Frames per second; faster environments show fewer of their steps, at the same speed."""
MAX_FRAMES = 100
"""Longer episodes show fewer of their steps, too."""
MAX_STEPS = 1000
"""Truncates the episode of a run's video."""
MAX_PLAYED = 10_000
"""Truncates the episodes of ``play_episodes``. The limit of a stranger's run may be any number."""
MAX_VIDEO_SIZE = 1920
"""Pixels of mp4."""
SECONDS_OF_FFMPEG = 600.0
"""Limit of its time."""
LAST_DELAY = 1000
"""Milliseconds that the last frame stays before the video begins again."""


class NoPictureError(EnvError):
    """The environment cannot render to arrays."""


class NoWindowError(EnvError):
    """The environment cannot be shown in a window here."""


def film(policy: Policy, cfg: EnvCfg, env: object | None, path: Path, *, seed: int) -> None:
    """Write an episode of the greedy policy as GIF or WebP (by suffix), at the speed of the environment.

    A ``NoPictureError`` if the environment does not render to arrays, another ``EnvError`` if its renderer fails.

    Args:
        env: a callable that returns the environment, used instead of ``cfg.id``; it sets its render mode itself.
    """
    reel = Reel(path)
    with no_display(), explained(cfg.id):
        made = rendering_env(cfg, env)
        try:
            most = min(MAX_STEPS, cfg.max_episode_steps or MAX_STEPS)
            _play(policy, made, cfg, seed, reel, deterministic=True, max_steps=most)
        finally:
            with suppress(Exception):  # a broken renderer may fail again
                made.close()
    reel.write()


class Reel:
    """Frames of episodes, and the video of them: GIF or WebP, or mp4 by the ffmpeg of this machine, which has every step.

    Args:
        path: of the video.
        episodes: each has ``MAX_FRAMES`` on average; where there are more, fewer steps are shown.
    """

    def __init__(self, path: Path, episodes: int = 1) -> None:
        self.path, self.most = path, episodes * MAX_FRAMES
        self.frames: list[Image] = []
        self.pngs = TemporaryFile() if path.suffix == ".mp4" else None  # noqa: SIM115  in place of ``frames``
        self.steps, self.stride, self.fps = 0, 1, float(MAX_FPS)

    def add(self, env: gymnasium.Env[Any, Any], *, last: bool = False) -> None:
        """Draw the environment after a step, if this step is shown; the last one of an episode always is."""
        if not self.steps:
            self.fps = float(env.metadata.get("render_fps") or MAX_FPS)
            self.stride = math.ceil(self.fps / MAX_FPS)
        if self.pngs is not None:
            draw(env, MAX_VIDEO_SIZE).save(self.pngs, "png", compress_level=1)
        elif last or self.steps % self.stride == 0:
            self.frames.append(draw(env, colors=256 if self.path.suffix == ".gif" else None))
        self.steps += 1
        if len(self.frames) > self.most and not last:
            self.frames, self.stride = self.frames[::2], 2 * self.stride

    def write(self) -> None:
        """Write the video, at the speed of the environment; an ``EnvError`` if ffmpeg fails."""
        files.write(self.path, self._animation() if self.pngs is None else self._mp4(self.pngs))

    def _animation(self) -> bytes:
        delay = 10 * round(100 * self.stride / self.fps)  # GIF counts in hundredths of a second
        delays = [delay] * (len(self.frames) - 1) + [LAST_DELAY]
        video, suffix = BytesIO(), self.path.suffix.removeprefix(".")
        first, *rest = self.frames
        rest.reverse()
        self.frames.clear()
        others = (rest.pop() for _ in range(len(rest)))  # the picture that is written has copies
        first.save(video, suffix, save_all=True, append_images=others, loop=0, duration=delays)
        return video.getvalue()

    def _mp4(self, pngs: IO[bytes]) -> bytes:
        pngs.seek(0)
        with pngs, TemporaryDirectory() as folder:  # ffmpeg would follow a link
            video = Path(folder, "video.mp4")
            source = ["-f", "image2pipe", "-c:v", "png", "-framerate", f"{self.fps:g}", "-i", "-"]
            even = ["-vf", "pad=ceil(iw/2)*2:ceil(ih/2)*2", "-pix_fmt", "yuv420p"]  # what every player takes
            words = [files.find_program("ffmpeg") or "ffmpeg", "-v", "error", *source, *even, str(video)]
            said = f"it took longer than {SECONDS_OF_FFMPEG:g} s"
            with suppress(subprocess.TimeoutExpired):
                done = subprocess.run(words, stdin=pngs, capture_output=True, timeout=SECONDS_OF_FFMPEG, check=False)  # noqa: S603
                said = done.stderr.decode(errors="replace").strip()[:300] or "it wrote none"
                if done.returncode == 0 and video.is_file():
                    return video.read_bytes()
            raise EnvError(f"ffmpeg could not write the video: {said}; fix: one ending with .gif")


def play_episodes(
    policy: Policy, cfg: EnvCfg, env: object | None, deterministic: bool, seed: int, episodes: int, reel: Reel | None
) -> list[tuple[float, int, bool | None]]:
    """Return, steps and success (None: untold) of episodes that are added to ``reel``; None: that are shown in a window.

    A ``NoWindowError`` if there is no window; other errors, and ``env``, as of ``film``.
    """
    mode, kind = ("human", NoWindowError) if reel is None else ("rgb_array", EnvError)
    if reel is None and not has_display():
        raise NoWindowError(f"no window: no display answers (DISPLAY is {os.environ.get('DISPLAY')!r})")
    with nullcontext() if reel is None else no_display():
        with explained(cfg.id, kind):
            made = rendering_env(cfg, env, mode)
        most = min(MAX_PLAYED, cfg.max_episode_steps or (made.spec and made.spec.max_episode_steps) or MAX_STEPS)
        with closing(made), torch.random.fork_rng():
            with explained(cfg.id, kind):
                made.reset(seed=0)
                if reel is not None:
                    draw(made)
            torch.manual_seed(seed)
            starts = [derive_seed(seed, "eval", episode) for episode in range(episodes)]
            return [_play(policy, made, cfg, start, reel, deterministic, most) for start in starts]


def rendering_env(
    cfg: EnvCfg, env: object | None, mode: str = "rgb_array", *, masks: bool = True
) -> gymnasium.Env[Any, Any]:
    """One environment that renders to arrays, or ``human``: in a window; with its masks if asked. Arguments and errors as of ``film``."""
    if makes_rows(env):
        raise NoPictureError(f"no video: {cfg.id} is a batched environment, which does not render")
    if env is None:
        import_package(cfg.id)
    make = partial(gymnasium.make, cfg.id) if env is None else env
    assert callable(make)
    kwargs = dict(cfg.kwargs)
    if env is None:
        kwargs.pop("render_mode", None)  # not every environment takes one
        kwargs |= {} if cfg.max_episode_steps is None else {"max_episode_steps": cfg.max_episode_steps}
    made: gymnasium.Env[Any, Any] = make(**kwargs)
    modes = made.metadata.get("render_modes", ())
    if env is None and ("rgb_array" in modes or mode in modes):  # of arrays, Gymnasium makes a window
        made.close()
        made = make(**kwargs | {"render_mode": mode})
    if made.render_mode != mode:
        made.close()
        if mode == "human":
            raise NoWindowError(f"no window: {made} has none (its metadata['render_modes'] are {modes})")
        raise NoPictureError(
            f"no video: {made} does not render to arrays (its metadata['render_modes'] are {modes}); fix: leave the video "
            "out, or make it with render_mode='rgb_array'"
        )
    return with_masks(made, cfg) if masks else made


def _play(
    policy: Policy,
    env: gymnasium.Env[Any, Any],
    cfg: EnvCfg,
    seed: int,
    reel: Reel | None,
    deterministic: bool,
    max_steps: int,
) -> tuple[float, int, bool | None]:
    """Return, steps and success of an episode, which is added to the reel, or shown in the environment's window."""
    actions, player, earned, steps, over = deque[Any](), policy.player(), 0.0, 0, False
    obs, _ = env.reset(seed=seed)
    while not over:
        if reel is not None:
            reel.add(env)
        elif (pygame := sys.modules.get("pygame")) and pygame.display.get_init() and pygame.event.get(pygame.QUIT):
            raise KeyboardInterrupt("the window was closed")
        if not actions:
            action = player.predict(obs, deterministic=deterministic)
            chosen = action[: cfg.actions_executed] if cfg.action_chunk > 1 else [action]
            actions.extend(copy.deepcopy(one) for one in chosen for _ in range(cfg.action_repeat))
        obs, reward, terminated, truncated, info = env.step(actions.popleft())
        earned, steps = earned + float(reward), steps + 1
        over = terminated or truncated or steps == max_steps
    if reel is not None:
        reel.add(env, last=True)
    return earned, steps, success_of_row(info)


def draw(env: gymnasium.Env[Any, Any], size: int = MAX_SIZE, colors: int | None = None) -> "Image":
    """The frame that the environment renders, at most ``size`` pixels wide and high."""
    from PIL import Image

    pixels: Any = env.render()
    kind = f"{pixels.dtype} {[*pixels.shape]}" if isinstance(pixels, np.ndarray) else f"a {type(pixels).__name__}"
    if not re.fullmatch(r"uint8 \[\d+, \d+(, [34])?\]", kind):
        raise EnvError(
            f"no video: render() of {type(env.unwrapped).__name__} returned {kind}, expected a picture; fix: return uint8 [H, W, 3]"
        )
    frame = Image.fromarray(pixels)
    frame = frame.reduce(math.ceil(max(*frame.size, size) / size))
    # a byte for a pixel; the octree takes a fifth to a tenth of median cut's time, and is off by 1 of 255 on average
    return frame if colors is None else frame.quantize(colors, Image.Quantize.FASTOCTREE)


def has_display() -> bool:
    """Whether windows can be seen: on Linux, whether Wayland is there or the X server answers."""
    if sys.platform != "linux" or "WAYLAND_DISPLAY" in os.environ:
        return True
    host, _, number = os.environ.get("DISPLAY", "").rpartition(":")
    local = host in ("", "unix")
    with suppress(OSError, ValueError), socket.socket(socket.AF_UNIX if local else socket.AF_INET) as server:
        place = int(float(number))  # 10.0: screen 0 of display 10
        server.settimeout(5)
        server.connect(f"/tmp/.X11-unix/X{place}" if local else (host, 6000 + place))  # noqa: S108  of the X server
        return True
    return False


@contextmanager
def no_display() -> Iterator[None]:
    """Let SDL (pygame), and MuJoCo where there is no display, draw into memory, unless the user chose a driver."""
    drivers = {"SDL_VIDEODRIVER": "dummy", "SDL_NO_SIGNAL_HANDLERS": "1"}  # a signal ends the process, as without SDL
    if not has_display():
        drivers["MUJOCO_GL"] = "egl"  # a second failure of GLFW would end the process
    unset = drivers.keys() - os.environ.keys()
    os.environ.update({name: drivers[name] for name in unset})
    try:
        yield
    finally:
        for name in unset:
            del os.environ[name]


@contextmanager
def explained(name: str, kind: type[EnvError] = EnvError) -> Iterator[None]:
    """Turn the errors of renderers into an ``EnvError``, or ``NoWindowError``: each library has its own exceptions."""
    try:
        yield
    except EnvError:
        raise
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise kind(
            f"no {'window' if kind is NoWindowError else 'video'}: rendering {name} failed ({reason}); fix: install what it "
            "draws with, give it a display (xvfb-run), or for MuJoCo set MUJOCO_GL=egl or MUJOCO_GL=osmesa"
        ) from error


# Frames of a group's members: kept actions, replayed in an environment that renders

MAX_MEMBERS = 8
MAX_REPLAY_FRAMES = 64
"""Frames of all members together: drawing a frame of a robot arm takes 0.05 s."""
MAX_BYTES = 300_000
"""Bytes of all frames together."""
_QUALITIES = (75, 50, 25, 5)
_Columns = Mapping[str, Sequence[Any]]


class NoFramesError(EnvError):
    """Says why there are no frames."""


def film_group(policy: Policy, cfg: EnvCfg, env: object | None, groups: Path, out: Path) -> None:
    """Write the frames of the kept group whose returns differ most, of equal ones the latest.

    Args:
        cfg: its ``start_mode`` is that of training. ``env`` and errors are as of ``film``.
    """
    kept = kept_iterations(groups)
    if not kept:
        return
    spreads = {n: _widest_group(read_groups(path, "group", "member", "reward"))[0] for n, path in kept.items()}
    iteration = max(spreads, key=lambda number: (spreads[number], number))
    columns = read_groups(kept[iteration], "group", "member", "start", "step", "observation", "action", "reward")
    _, group, members = _widest_group(columns)
    if not members[0]["start"][0]:  # without groups, no start is shared
        return
    found = Frames(iteration=iteration, group=group)
    ranked = sorted(members, key=lambda member: -sum(member["reward"]))  # the best, the worst and some in between
    places = np.linspace(0, len(ranked) - 1, min(MAX_MEMBERS, len(ranked))).round().astype(int).tolist()
    chosen = sorted((ranked[place] for place in places), key=lambda member: int(member["member"][0]))
    stride = -(-max(len(member["step"]) for member in chosen) // (MAX_REPLAY_FRAMES // len(chosen) - 1))
    drawn = []
    try:
        with no_display(), explained(cfg.id):
            player = _Player(policy, cfg, env)
            with closing(player.env):
                for member in chosen:
                    number = member["member"][0]
                    drawn.append(player.play(member, number, stride))
                    found.members[str(number)] = _steps_of_frames(len(member["step"]), stride)
        found.width, found.height = drawn[0][0].size
        found.picture = b64encode(sheet(drawn)).decode()
    except NoFramesError as error:
        found = Frames(iteration=iteration, group=group, problem=str(error))
    files.write(out, json.dumps(found.model_dump()).encode())


class _Player:
    """Plays members of groups again."""

    def __init__(self, policy: Policy, cfg: EnvCfg, env: object | None) -> None:
        self.policy = policy
        made: list[Any] = []
        self.made = made
        """The environment of the row."""

        def make(**kwargs: Any) -> Any:  # it does not hold the player, which would be a reference cycle
            made[:] = [rendering_env(cfg.model_copy(update={"kwargs": kwargs}), env, masks=False)]
            return made[0]

        rows = cfg.model_copy(update={"vectorization": "sync"})
        self.env: GroupEnv = make_env(rows, grouped=True, num_envs=1, env=make, verify=False)

    def play(self, member: _Columns, number: int, stride: int) -> "list[Image]":
        """Frames of a member, and of its end; a ``NoFramesError`` if it goes elsewhere than when it was recorded."""
        if member["observation"][0] is None or member["action"][0] is None:
            raise NoFramesError(f"No frames: more than {MAX_WIDTH} numbers are not kept, and could not be compared.")
        every, start = np.ones(1, np.bool_), np.array([int(member["start"][0])])
        met, frames = [_numbers(self.env.start(every, start, start))], []
        spec: Any = self.policy.action_spec
        kept = torch.tensor(member["action"], device=self.policy.device).to(spec.dtype).reshape(-1, *spec.shape)
        for step, action in enumerate(self.policy.env_action(kept)):
            if step % stride == 0:
                frames.append(draw(self.made[0], MAX_FRAME_SIZE))
            met.append(_numbers(self.env.step(action[None]).obs))
        apart = ~np.isclose(met[:-1], member["observation"], rtol=1e-4, atol=1e-5, equal_nan=True).all(axis=1)
        if apart.any():
            raise NoFramesError(
                f"No frames: replaying member {number} of {self.env.env_id} from its seed and actions gave a different state at step "
                f"{apart.argmax()}, so this environment depends on something besides the seed."
            )
        return [*frames[: len(_steps_of_frames(len(met) - 1, stride)) - 1], draw(self.made[0], MAX_FRAME_SIZE)]


def _steps_of_frames(length: int, stride: int) -> list[int]:
    """A frame every ``stride`` steps; the last step shows where it led."""
    return [*range(0, length - 1, stride), length - 1]


def _numbers(obs: Nested) -> np.ndarray:
    """The numbers of an observation as they are kept."""
    return torch.cat([leaf[0].float().reshape(-1) for leaf in leaves(obs)]).cpu().numpy()


def _widest_group(columns: _Columns) -> tuple[float, int, list[dict[str, list[Any]]]]:
    """The group whose returns differ most: their spread, its number, and the columns of its members. Rows are in order."""
    groups: dict[int, list[slice]] = {}
    numbers = list(zip(columns["group"], columns["member"], strict=True))
    for (group, _), steps in groupby(range(len(numbers)), numbers.__getitem__):
        rows = list(steps)
        groups.setdefault(group, []).append(slice(rows[0], rows[-1] + 1))
    returns = {group: [sum(columns["reward"][own]) for own in members] for group, members in groups.items()}
    spreads = {group: max(values) - min(values) for group, values in returns.items()}
    widest = max(spreads, key=lambda group: spreads[group])
    members = [{name: list(values[own]) for name, values in columns.items()} for own in groups[widest]]
    return spreads[widest], widest, members


def sheet(rows: "Sequence[Sequence[Image]]") -> bytes:
    """All frames as one WebP picture of the best quality that is small enough; a ``NoFramesError`` if none is."""
    from PIL import Image

    width, height = rows[0][0].size
    sheet = Image.new("RGB", (width * max(map(len, rows)), height * len(rows)))
    for y, frames in enumerate(rows):
        for x, frame in enumerate(frames):
            sheet.paste(frame, (x * width, y * height))
    for quality in _QUALITIES:
        data = BytesIO()
        sheet.save(data, "webp", quality=quality)
        if data.tell() <= MAX_BYTES:
            return data.getvalue()
    raise NoFramesError(f"No frames: they would take more than {MAX_BYTES:,} bytes.")
