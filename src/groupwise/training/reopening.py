"""What a run folder says of its run: settings, and which Python objects it needs."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from groupwise.config.base import explain
from groupwise.config.run import CommonCfg, RunCfg, TextRunCfg
from groupwise.errors import ConfigError, RunFolderError
from groupwise.plugins import blaming_absence
from groupwise.report.folder import RunFolder
from groupwise.training.components import UserObjects


def reopen(path: Path | str, given: Mapping[str, Any], *, to_train: bool) -> tuple[RunFolder, UserObjects, CommonCfg]:
    """A run's folder, Python objects and settings; a ``ConfigError`` if objects are missing.

    Args:
        to_train: False: what only training or scoring texts needs may be missing, also the GPU.
    """
    folder, objects = RunFolder.open(Path(path)), UserObjects.again(given)
    cfg = read_cfg(folder)
    optional = set() if to_train else {"data", "eval_data", "reward", "tool"}
    if missing := sorted(set(folder.read_provenance()["given_in_python"]) - optional - set(objects.names())):
        raise ConfigError(
            f"{path} was given {' and '.join(missing)} in Python; fix: from Python, give the same again, as in "
            f"gw.resume({str(path)!r}, {missing[0]}=...) or gw.Run.load"
        )
    if not to_train and cfg.device.startswith("cuda") and not torch.cuda.is_available():
        cfg = cfg.model_copy(update={"device": "cpu"})
    return folder, objects, cfg


def read_cfg(folder: RunFolder) -> CommonCfg:
    """Settings of a run in a folder; a ``RunFolderError`` if they are wrong, or of another version."""
    with blaming_absence(folder.path, folder.read_provenance()["plugins"]):
        folder.check_format()
        tree = folder.read_config()
        try:
            return (TextRunCfg if "task" in tree else RunCfg).model_validate(tree)
        except ValidationError as error:
            reasons = "; ".join(map(explain, error.errors()))
            raise RunFolderError(
                f"{folder.config} does not fit: {reasons}; fix: correct it, or register the algorithm first"
            ) from error
