"""A run on disk with its policy in memory, and how one is built from settings or from its folder."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from groupwise.algorithms.base import BaseAlgorithm
from groupwise.config.run import CommonCfg, RunCfg, TextRunCfg
from groupwise.engines.base import Engine
from groupwise.errors import ConfigError, RunFolderError
from groupwise.plugins import blaming_absence
from groupwise.policies.base import Policy
from groupwise.report.folder import RunFolder
from groupwise.training.build import build_parts
from groupwise.training.checkpoint import load_checkpoint, load_policy
from groupwise.training.ending import closing_after
from groupwise.training.parts import Given, Parts


@dataclass(frozen=True)
class Run:
    """A run on disk, and its policy in memory."""

    path: Path
    """The run folder."""
    cfg: CommonCfg
    """Every setting, as ``config.json`` has it, without the folder, so that it can be trained again."""
    algorithm: BaseAlgorithm
    """What trained the policy, as it was left."""
    summary: dict[str, Any]
    """What the run reached and why it ended."""
    given: Given = field(default=Given(), repr=False)
    """Python objects that the run was given."""

    def __repr__(self) -> str:
        """Where, what and how well: the settings alone would be a page."""
        reached = {key: self.summary.get(key) for key in ("env_steps", "return_mean")}
        numbers = ", ".join(f"{key}={value:.6g}" for key, value in reached.items() if value is not None)
        return f"Run({str(self.path)!r}, {self.cfg.subject!r}, {self.cfg.algorithm.name!r}, {numbers or 'untrained'})"

    @property
    def policy(self) -> Policy:
        """The trained policy."""
        return self.algorithm.policy

    def metrics(self) -> list[dict[str, Any]]:
        """One dictionary per iteration."""
        return RunFolder(self.path).read_metrics()

    @classmethod
    def load(cls, path: Path | str, *, checkpoint: Literal["latest", "best"] = "latest", **given: Any) -> "Run":
        """An earlier run with the policy of one of its checkpoints.

        Args:
            given: what the run was given as Python objects, again: ``env``, ``policy`` (it gets the checkpoint's weights),
                ``data``, ``eval_data``, ``reward`` or ``tool``.

        Raises:
            RunFolderError: ``path`` is no run folder, or a damaged one.
            CheckpointError: the checkpoint is missing, damaged or of another environment or architecture.
        """
        folder, objects = RunFolder.open(Path(path)), Given.again(given)
        check_given(folder, objects)
        parts = build_again(read_cfg(folder), objects, folder, Engine())
        with closing_after(parts.close):
            where = folder.checkpoints / checkpoint
            load_policy(parts.policy, load_checkpoint(where, parts.identity).policy, where)
        return cls(folder.path, parts.cfg, parts.algorithm, folder.read_summary(), objects)


def build(cfg: CommonCfg, given: Given, engine: Engine) -> Parts:
    """The parts that the settings describe."""
    if isinstance(cfg, TextRunCfg):
        from groupwise.text.build import build_text_parts

        return build_text_parts(cfg, given, engine)
    assert isinstance(cfg, RunCfg)
    return build_parts(cfg, given, engine)


def build_again(cfg: CommonCfg, given: Given, folder: RunFolder, engine: Engine) -> Parts:
    """The parts of an earlier run, which may need its plugins."""
    with blaming_absence(folder.path, folder.read_plugins()):
        return build(cfg, given, engine)


def check_given(folder: RunFolder, given: Given) -> None:
    """Refuse to go on without the Python objects that an earlier run was given.

    Raises:
        ConfigError: names those that are missing.
    """
    missing = sorted(set(folder.read_given()) - set(given.names()))
    if missing:
        raise ConfigError(
            f"{folder.path} was given {' and '.join(missing)} in Python; fix: from Python, give the same again, as {missing[0]}=..."
        )


def read_cfg(folder: RunFolder) -> CommonCfg:
    """Settings of an earlier run.

    Raises:
        RunFolderError: they do not fit.
    """
    with blaming_absence(folder.path, folder.read_plugins()):
        try:
            tree = folder.read_config()
            return (TextRunCfg if "task" in tree else RunCfg).model_validate(tree)
        except ValidationError as error:
            reasons = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
            raise RunFolderError(
                f"{folder.config} does not fit: {reasons}; fix: correct it, or register the algorithm first"
            ) from error
