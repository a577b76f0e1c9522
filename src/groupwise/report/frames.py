"""Frames of a group's members, as a run keeps them. ``replay`` draws them."""

from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, Field, ValidationError

from groupwise.errors import RunFolderError
from groupwise.system import files

MAX_SIZE = 160
"""Pixels; larger frames are scaled down."""
_MAX_FILE = files.MIB


class Frames(BaseModel, strict=True):
    """Frames of the members of a group as one picture: a row for each member, a column for each frame."""

    iteration: int
    group: int
    members: dict[str, list[int]] = {}
    """Steps of the frames of each member."""
    width: Annotated[int, Field(ge=0, le=MAX_SIZE)] = 0
    """Of a frame."""
    height: Annotated[int, Field(ge=0, le=MAX_SIZE)] = 0
    picture: Annotated[str, Field(pattern=r"^[A-Za-z0-9+/=]*$")] = ""
    """WebP in base64."""
    problem: str = ""
    """Why there are none."""


def read_frames(path: Path) -> Frames | None:
    """Frames that were written; None if there are none.

    Raises:
        RunFolderError: the file is damaged.
    """
    if not path.is_file():
        return None
    try:
        return Frames.model_validate(files.parse_json(files.read(path, _MAX_FILE)))
    except (OSError, ValueError, ValidationError) as error:
        raise RunFolderError(f"{path} is damaged: {error!s:.200}; fix: delete it") from error
