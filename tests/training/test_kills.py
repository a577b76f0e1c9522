"""A run that is killed at any change of a file, or at any moment, goes on by itself and ends as the whole run does."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from groupwise.report import folder as module
from groupwise.report.folder import RunFolder

SCRIPT = Path(__file__).parents[1] / "support" / "killed_runs.py"


@pytest.mark.torture
@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
@pytest.mark.parametrize(("kind", "at_changes", "at_moments"), [("control", 4, 1), ("text", 2, 1)])
def test_a_killed_run_ends_as_the_whole_one(kind: str, at_changes: int, at_moments: int, tmp_path: Path):
    command = [sys.executable, str(SCRIPT), kind, str(tmp_path / "runs"), str(at_changes), str(at_moments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.splitlines()[-1]) == []


@pytest.mark.skipif(sys.platform == "win32", reason="fork")
def test_a_kill_while_a_run_folder_is_made_leaves_one_that_training_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(module, "provenance", lambda: {"format": module.FORMAT})
    settings = {"algorithm": {"name": "ppo"}, "seed": 0, "policy": {"a": "b" * 1000}}
    for point in range(100):
        path = tmp_path / str(point)
        process = os.fork()
        if process == 0:
            dies_before_call(point)
            RunFolder.create(settings, path)
            os._exit(0)
        status = os.waitpid(process, 0)[1]
        if not RunFolder(path).config.exists():
            RunFolder.create(settings, path)
        assert RunFolder.open(path).read_config() == settings
        if status == 0:
            break
    assert point > 6
    assert {file.name for file in path.iterdir()} == {"config.json", module.LOCK}


def dies_before_call(number: int) -> None:
    """End this process, as a kill would, before that call which changes files; a write is half done."""
    calls = iter(range(100))

    def dying(name: str) -> None:
        real = getattr(os, name)

        def call(*args, **options):
            if next(calls) == number:
                if name == "write":
                    real(args[0], args[1][: len(args[1]) // 2])
                os._exit(9)
            return real(*args, **options)

        setattr(os, name, call)

    for name in ("open", "write", "fsync", "replace", "unlink", "mkdir"):
        dying(name)
