"""A disk that is full or read-only while a run saves and logs: the run goes on, and what was saved stays as it was."""

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from at_events import on
from run_folders import logged
from tensordict import TensorDict

import groupwise as gw
from groupwise.cli.train import print_run
from groupwise.training.callbacks import SaveCheckpoints
from groupwise.training.checkpoint import Checkpoint, Identity, load_checkpoint, serialize, write_checkpoint

SETTINGS: dict[str, Any] = {
    "num_envs": 4, "speed": "off", "seed": 3, "total_steps": 640, "checkpoint_interval": 64,
    "evaluation": {"interval": 128, "episodes": 1}, "logging": {"progress": "none"},
}  # fmt: skip
PPO = gw.PPOCfg(num_steps=16, num_epochs=1, minibatch_size=64)


class Disk(gw.Callback):
    """Between two iterations writes into a folder fail: half of the data fit, or it is read-only."""

    def __init__(self, folder: Path, error: int, patch: pytest.MonkeyPatch, first: int = 4, last: int = 6) -> None:
        self.folder, self.error, self.first, self.last = folder, error, first, last
        self.fails = False
        self.before: dict[Path, bytes] = {}
        write, sync, opened, replace = os.write, os.fsync, os.open, os.replace

        def checked(path: Any) -> None:
            if self.fails and str(path).startswith(str(folder)):
                raise OSError(error, os.strerror(error))

        def writes(descriptor: int, data: Any) -> int:
            path = os.readlink(f"/proc/self/fd/{descriptor}")
            if self.fails and path.startswith(str(folder)):
                if len(data) < 2:
                    checked(path)
                return write(descriptor, data[: len(data) // 2])
            return write(descriptor, data)

        def syncs(descriptor: int) -> None:
            checked(os.readlink(f"/proc/self/fd/{descriptor}"))
            sync(descriptor)

        def opens(path: Any, flags: int, *args: Any, **options: Any) -> int:
            if flags & (os.O_WRONLY | os.O_CREAT):
                checked(path)
            return opened(path, flags, *args, **options)

        def replaces(source: Any, target: Any) -> None:
            checked(target)
            replace(source, target)

        patch.setattr(os, "write", writes)
        patch.setattr(os, "fsync", syncs)
        if error == errno.EROFS:
            patch.setattr(os, "open", opens)
            patch.setattr(os, "replace", replaces)

    def files(self) -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in self.folder.rglob("*") if path.is_file()}

    def on_rollout_end(self, trainer: gw.Trainer, rollout: TensorDict) -> None:
        await_checkpoint(trainer)
        if trainer.iteration + 1 == self.first:
            self.fails, self.before = True, self.files()
        if trainer.iteration == self.last:
            assert self.files() == self.before
            self.fails = False


def await_checkpoint(trainer: gw.Trainer) -> None:
    """Wait until no checkpoint is being written."""
    for callback in trainer.callbacks:
        if isinstance(callback, SaveCheckpoints) and callback._writing is not None:
            callback._writing[0].exception()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> gw.Run:
    return gw.train("CartPole-v1", PPO, run_dir=tmp_path_factory.mktemp("runs") / "whole", **SETTINGS)


needs_linux = pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="/proc")


@needs_linux
@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EROFS])
def test_training_goes_on_and_no_line_is_missing(
    error: int, whole: gw.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    path = tmp_path / "run"
    run = gw.train("CartPole-v1", PPO, run_dir=path, callbacks=[Disk(path, error, monkeypatch)], **SETTINGS)
    assert logged(path) == logged(whole.path)
    assert run.summary["env_steps"] == 640
    said = [message.partition(" (")[0] for message in caplog.messages]
    steps = [f"NOT SAVED: the checkpoint of step {step}" for step in (256, 320, 384)]
    assert [line for line in said if "checkpoint of" in line] == steps
    assert [line for line in said if "metrics" in line] == ["NOT SAVED: metrics from iteration 4 on"]
    assert all(f"([Errno {error}] " in message and "fix: make room" in message for message in caplog.messages)
    assert not list(path.rglob(".*.partial"))
    assert "unsaved_env_steps" not in run.summary


@needs_linux
def test_a_last_checkpoint_that_does_not_fit_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    path = tmp_path / "run"
    with monkeypatch.context() as patch:
        run = gw.train(
            "CartPole-v1", PPO, run_dir=path, callbacks=[Disk(path / "checkpoints", errno.ENOSPC, patch, last=99)],
            **SETTINGS,
        )  # fmt: skip
    assert run.summary["unsaved_env_steps"] == 640 - 192
    assert print_run(run) == 1
    assert f"NOT SAVED: the last 448 steps; fix: make room, then groupwise resume {path}" in capsys.readouterr().err
    assert gw.resume(path).summary.get("unsaved_env_steps") is None


@needs_linux
def test_a_run_of_which_nothing_was_ever_saved_begins_again(
    whole: gw.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = tmp_path / "run"
    with monkeypatch.context() as patch:
        disk = Disk(path / "checkpoints", errno.ENOSPC, patch, first=1, last=99)
        run = gw.train("CartPole-v1", PPO, run_dir=path, callbacks=[disk], **SETTINGS)
    assert run.summary["unsaved_env_steps"] == 640
    gw.resume(path)
    assert logged(path) == logged(whole.path)


@needs_linux
def test_lines_that_find_no_room_are_a_failure(
    whole: gw.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    path = tmp_path / "run"
    with monkeypatch.context() as patch:
        disk = Disk(path / "metrics.jsonl", errno.ENOSPC, patch, first=9, last=99)
        run = gw.train("CartPole-v1", PPO, run_dir=path, callbacks=[disk], **SETTINGS)
    assert run.summary["unlogged_iterations"] == 2
    assert print_run(run) == 1
    assert "NOT SAVED: metrics of 2 iterations; fix: make room\n" in capsys.readouterr().err
    assert logged(path) == logged(whole.path)[:8]


@needs_linux
@pytest.mark.parametrize("number", [0, 1])
def test_a_rename_that_fails_leaves_the_checkpoints_as_they_were(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder = tmp_path / "latest"
    identity = Identity("CartPole-v1", "observations", "actions")
    for steps in (1, 2):
        write_checkpoint(folder, serialize(Checkpoint({}, {"env_steps": steps})), identity, keep=3)
    replace = os.replace

    def replaces(source: Any, target: Any) -> None:
        if Path(target) == (folder if number else tmp_path / "latest.1"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", replaces)
        with pytest.raises(OSError, match="Input/output error"):
            write_checkpoint(folder, serialize(Checkpoint({}, {"env_steps": 3})), identity, keep=3)
    assert load_checkpoint(folder).state == {"env_steps": 2}
    assert not list(tmp_path.glob(".*.partial"))


def test_metrics_that_were_cut_are_told(whole: gw.Run, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    path = Path(shutil.copytree(whole.path, tmp_path / "run"))
    lines = (path / "metrics.jsonl").read_text().splitlines(keepends=True)
    (path / "metrics.jsonl").write_text("".join(lines[:2] + lines[4:]))
    summary = gw.resume(path).summary
    assert caplog.messages == [f"{path / 'metrics.jsonl'} lacks 2 of 10 iterations: it was cut or changed"]
    assert "unlogged_iterations" not in summary


def test_metrics_that_were_damaged_in_training_are_an_error(tmp_path: Path):
    damages = on("training_end", lambda trainer: (tmp_path / "run" / "metrics.jsonl").write_text("[\n"))
    with pytest.raises(gw.errors.RunFolderError, match="line 1 is damaged"):
        gw.train("CartPole-v1", PPO, run_dir=tmp_path / "run", callbacks=[damages], **SETTINGS)


@needs_linux
def test_a_run_that_cannot_begin_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    disk = Disk(tmp_path / "run", errno.ENOSPC, monkeypatch)
    disk.fails = True
    with pytest.raises(
        gw.errors.RunFolderError, match=r"cannot be written \(.*No space left on device\); fix: make room"
    ):
        gw.train("CartPole-v1", PPO, run_dir=tmp_path / "run", **SETTINGS)
    disk.fails = False
    gw.train("CartPole-v1", PPO, run_dir=tmp_path / "run", **SETTINGS)
