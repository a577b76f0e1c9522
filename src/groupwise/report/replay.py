"""Frames of a group's members: the actions that a run kept, played again in an environment that draws.

Training does not draw. The replay begins at the group's start seed and must meet the observations that were kept; else
there are no frames, and the page says why.
"""

import json
from base64 import b64encode
from collections.abc import Mapping, Sequence
from contextlib import closing
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from groupwise.config.env import EnvCfg
from groupwise.data.rollout import Nested
from groupwise.envs.base import GroupEnv
from groupwise.envs.make import make_env
from groupwise.errors import EnvError
from groupwise.policies.base import Policy
from groupwise.report.frames import MAX_SIZE, Frames
from groupwise.report.groups import MAX_WIDTH, kept_iterations, read_groups
from groupwise.report.video import draw, explained, make_rendering, no_display
from groupwise.system import files

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_MEMBERS = 8
MAX_FRAMES = 96
"""Of all members together: drawing a frame of a robot arm takes 0.05 s."""
MAX_BYTES = 300_000
"""Of all frames together."""
_QUALITIES = (75, 50, 25, 5)
_Columns = Mapping[str, Sequence[Any]]


class NoFramesError(EnvError):
    """Says why there are no frames."""


def film_group(policy: Policy, cfg: EnvCfg, env: object | None, groups: Path, out: Path) -> None:
    """Write the frames of the group of the latest kept iteration whose returns differ most.

    Args:
        cfg: its ``start_mode`` is that of training.
        env: as of ``film``.

    Raises:
        NoPictureError: the environment does not render to arrays.
        EnvError: its renderer failed.
    """
    kept = kept_iterations(groups)
    if not kept:
        return
    iteration, path = list(kept.items())[-1]
    group, members = _widest_group(read_groups(path))
    if not members[0]["start"][0]:  # without groups, nobody shares a start
        return
    found = Frames(iteration=iteration, group=group)
    try:
        found = _film(found, policy, cfg, env, _some(members))
    except NoFramesError as error:
        found.problem = str(error)
    files.write(out, json.dumps(found.model_dump()).encode())


def _film(found: Frames, policy: Policy, cfg: EnvCfg, env: object | None, members: Sequence[_Columns]) -> Frames:
    drawn = []
    with no_display(), explained(cfg.id):
        player = _Player(policy, cfg, env)
        with closing(player):
            stride = -(-max(len(member["step"]) for member in members) // (MAX_FRAMES // len(members) - 1))
            for member in members:
                number = member["member"][0]
                drawn.append(player.play(member, number, stride))
                found.members[str(number)] = _steps_of_frames(len(member["step"]), stride)
    found.width, found.height = drawn[0][0].size
    found.picture = b64encode(sheet(drawn)).decode()
    return found


class _Player:
    """Plays members of groups again."""

    def __init__(self, policy: Policy, cfg: EnvCfg, env: object | None) -> None:
        self.policy = policy
        self.drawing: Any = None
        """The environment of the row."""

        def make(**kwargs: Any) -> Any:
            if env is None and cfg.max_episode_steps is not None:
                kwargs["max_episode_steps"] = cfg.max_episode_steps
            self.drawing = make_rendering(cfg.model_copy(update={"kwargs": kwargs}), env)
            return self.drawing

        rows = cfg.model_copy(update={"vectorization": "sync"})
        self.env: GroupEnv = make_env(rows, grouped=True, num_envs=1, env=make, verify=False)

    def play(self, member: _Columns, number: int, stride: int) -> "list[Image]":
        """Frames of a member, and of its end.

        Raises:
            NoFramesError: it goes elsewhere than when it was recorded.
        """
        if member["observation"][0] is None or member["action"][0] is None:
            raise NoFramesError(f"No frames: more than {MAX_WIDTH} numbers are not kept, and could not be compared.")
        every, start = np.ones(1, np.bool_), np.array([int(member["start"][0])])
        met, frames = [_numbers(self.env.start(every, start, start))], []
        for step, action in enumerate(self._env_actions(member["action"])):
            if step % stride == 0:
                frames.append(draw(self.drawing, MAX_SIZE))
            met.append(_numbers(self.env.step(action[None]).obs))
        apart = ~np.isclose(met[:-1], member["observation"], rtol=1e-4, atol=1e-5, equal_nan=True).all(axis=1)
        if apart.any():
            raise NoFramesError(
                f"No frames: played again from its start seed and with its actions, member {number} of {self.env.env_id} is "
                f"elsewhere at step {apart.argmax()} than it was in training. More than these decides its start or its steps."
            )
        return [*frames[: len(_steps_of_frames(len(met) - 1, stride)) - 1], draw(self.drawing, MAX_SIZE)]

    def close(self) -> None:
        self.env.close()

    def _env_actions(self, actions: Sequence[Sequence[float]]) -> Tensor:
        spec: Any = self.policy.action_spec
        kept = torch.tensor(actions, device=self.policy.device).to(spec.dtype).reshape(-1, *spec.shape)
        return self.policy.env_action(kept)


def _steps_of_frames(length: int, stride: int) -> list[int]:
    """A frame every ``stride`` steps; the last step shows where it led."""
    return [*range(0, length - 1, stride), length - 1]


def _numbers(obs: Nested) -> np.ndarray:
    """The numbers of an observation as they are kept."""
    leaves = [obs] if isinstance(obs, Tensor) else list(obs.values(True, True))
    return torch.cat([leaf[0].float().reshape(-1) for leaf in leaves]).cpu().numpy()


def _widest_group(columns: _Columns) -> tuple[int, list[dict[str, list[Any]]]]:
    """The group whose returns differ most, and the columns of each of its members."""
    groups: dict[int, dict[int, dict[str, list[Any]]]] = {}
    for values in zip(*columns.values(), strict=True):
        step = dict(zip(columns, values, strict=True))
        member = groups.setdefault(step["group"], {}).setdefault(step["member"], {name: [] for name in columns})
        for name, value in step.items():
            member[name].append(value)
    returns = {group: [sum(member["reward"]) for member in members.values()] for group, members in groups.items()}
    widest = max(returns, key=lambda group: max(returns[group]) - min(returns[group]))
    return widest, list(groups[widest].values())


def _some(members: Sequence[dict[str, list[Any]]]) -> list[dict[str, list[Any]]]:
    """The best, the worst and some in between, by number."""
    ranked = sorted(members, key=lambda member: -sum(member["reward"]))
    count = min(MAX_MEMBERS, len(ranked))
    chosen = [ranked[place] for place in np.linspace(0, len(ranked) - 1, count).round().astype(int).tolist()]
    return sorted(chosen, key=lambda member: int(member["member"][0]))


def sheet(rows: "Sequence[Sequence[Image]]") -> bytes:
    """All frames in one picture, as WebP of the best quality that is small enough.

    Raises:
        NoFramesError: none is.
    """
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
