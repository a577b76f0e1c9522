"""Settings of the trackers. Imports no torch."""

import pkgutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

from groupwise.config.choices import Choice, register_choice

if TYPE_CHECKING:
    from groupwise.training.trackers import Tracker


class TrackedRun(NamedTuple):
    """What a tracker knows of its run."""

    folder: Path
    """The run folder."""
    run_id: str
    """Unique; a resumed run keeps it."""
    settings: dict[str, Any]
    """All settings, as plain data."""


class TrackerCfg(Choice):
    """A place that metrics are sent to. Subclass it with a ``build``, and ``@register_choice`` it."""

    family: ClassVar = "tracker"
    known: ClassVar = {}
    tracker: ClassVar[str]
    """Its class as ``module:name``, which ``build`` imports; that may need torch."""

    def build(self, run: TrackedRun) -> "Tracker":
        """The tracker of a run."""
        made: Tracker = pkgutil.resolve_name(self.tracker)(self, run)
        return made


@register_choice
class TensorBoardCfg(TrackerCfg):
    """TensorBoard, in the run folder."""

    name: Literal["tensorboard"] = "tensorboard"
    tracker: ClassVar = "groupwise.training.trackers:TensorBoard"


@register_choice
class WandBCfg(TrackerCfg):
    """Weights & Biases. ``WANDB_*`` variables hold where a setting is None."""

    name: Literal["wandb"] = "wandb"
    tracker: ClassVar = "groupwise.training.trackers:WandB"
    project: str | None = None
    """Project. None: ``WANDB_PROJECT``, or ``groupwise``."""
    entity: str | None = None
    """User or team. None: ``WANDB_ENTITY``, or the account's own."""
    run_name: str | None = None
    """Name of the run. None: ``WANDB_NAME``, or that of the run folder."""
    group: str | None = None
    """Group of runs. None: ``WANDB_RUN_GROUP``."""
    tags: tuple[str, ...] | None = None
    """Tags of the run. None: ``WANDB_TAGS``."""
    mode: Literal["online", "offline", "disabled"] | None = None
    """``offline`` keeps the run on disk. None: ``WANDB_MODE``, or ``online``."""


@register_choice
class TrackioCfg(TrackerCfg):
    """Trackio, on this machine or in a Space."""

    name: Literal["trackio"] = "trackio"
    tracker: ClassVar = "groupwise.training.trackers:Trackio"
    project: str = "groupwise"
    """Project."""
    run_name: str | None = None
    """Name of the run, to which a part of its unique id is added. None: that of the run folder."""
    group: str | None = None
    """Group of runs."""
    space_id: str | None = None
    """Space on Hugging Face that gets the metrics. None: ``TRACKIO_SPACE_ID``, or this machine alone."""
