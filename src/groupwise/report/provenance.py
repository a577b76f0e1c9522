"""What repeating a run needs in addition to its settings."""

import os
import platform
import shlex
import shutil
import subprocess
import sys
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from uuid import uuid4

from groupwise import plugins

FORMAT = 2
"""Of the run folder."""
_PACKAGES = ("groupwise", "torch", "tensordict", "gymnasium", "numpy")


def provenance() -> dict[str, Any]:
    """Versions, git state, machine, plugins and command."""
    return {
        "format": FORMAT,
        "versions": {"python": platform.python_version()} | {name: _version(name) for name in _PACKAGES},
        "machine": {"system": platform.platform(), "processor": platform.machine(), "cores": os.cpu_count()},
        "git": _git_state(),
        "run_id": uuid4().hex,
        "plugins": plugins.loaded(),
        "command": shlex.join(sys.argv),
        "started": datetime.now().astimezone().isoformat(timespec="seconds"),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _git_state() -> dict[str, Any] | None:
    """Commit of the working folder and whether tracked files differ from it; None outside of a repository.

    The repository may be a stranger's, whose configuration can name programs to run (``core.fsmonitor``, filters). So files
    are compared by way of another, temporary git folder, which has the objects and the index, but no configuration.
    """
    program = shutil.which("git")
    if program is None:
        return None

    def git(*args: str, **env: str) -> str:
        command = [program, "-c", "core.fsmonitor=false", *args]
        done = subprocess.run(  # noqa: S603  the user's git, with the words below
            command, capture_output=True, text=True, check=True, timeout=5, env=os.environ | env
        )
        return done.stdout.strip()

    try:
        commit, tree = git("rev-parse", "HEAD", "--show-toplevel").splitlines()
        objects, index = (
            str(Path(path).absolute())
            for path in git("rev-parse", "--git-path", "objects", "--git-path", "index").splitlines()
        )
        with TemporaryDirectory() as own:
            Path(own, "refs").mkdir()
            Path(own, "HEAD").write_text(f"{commit}\n", encoding="ascii")
            env = {"GIT_DIR": own, "GIT_WORK_TREE": tree, "GIT_OBJECT_DIRECTORY": objects, "GIT_INDEX_FILE": index}
            status = ("status", "--porcelain", "--untracked-files=no", "--ignore-submodules=all")
            dirty = bool(git(*status, **env, GIT_OPTIONAL_LOCKS="0"))
        return {"commit": commit, "dirty": dirty}
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
