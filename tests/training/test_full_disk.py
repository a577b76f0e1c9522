"""A disk that is full or read-only while a run saves and logs: the run goes on, and what was saved stays as it was."""

import errno
import os
import shutil
from pathlib import Path

import pytest
from at_events import on
from run_folders import logged

import groupwise as gw
from groupwise.cli.train import print_run
from groupwise.training.callbacks import SaveCheckpoints

SETTINGS = {
    "num_envs": 4, "speed": "off", "seed": 3, "total_steps": 640, "checkpoint_interval": 64,
    "evaluation": {"interval": 128, "episodes": 1}, "logging": {"progress": "none"},
}  # fmt: skip
PPO = gw.PPOCfg(num_steps=16, num_epochs=1, minibatch_size=64)


class Disk(gw.Callback):
    """Between two iterations writes into a folder fail: half of the data fit, or it is read-only."""

    def __init__(self, folder, error, patch, first=4, last=6):
        self.folder, self.error, self.first, self.last = folder, error, first, last
        self.fails = False
        self.before = {}
        write, sync, opened, replace = os.write, os.fsync, os.open, os.replace

        def checked(path):
            if self.fails and str(path).startswith(str(folder)):
                raise OSError(error, os.strerror(error))

        def writes(descriptor, data):
            path = os.readlink(f"/proc/self/fd/{descriptor}")
            if self.fails and path.startswith(str(folder)):
                if len(data) < 2:
                    checked(path)
                return write(descriptor, data[: len(data) // 2])
            return write(descriptor, data)

        def syncs(descriptor):
            checked(os.readlink(f"/proc/self/fd/{descriptor}"))
            sync(descriptor)

        def opens(path, flags, *args, **options):
            if flags & (os.O_WRONLY | os.O_CREAT):
                checked(path)
            return opened(path, flags, *args, **options)

        def replaces(source, target):
            checked(target)
            replace(source, target)

        patch.setattr(os, "write", writes)
        patch.setattr(os, "fsync", syncs)
        if error == errno.EROFS:
            patch.setattr(os, "open", opens)
            patch.setattr(os, "replace", replaces)

    def files(self):
        return {path: path.read_bytes() for path in self.folder.rglob("*") if path.is_file()}

    def on_rollout_end(self, trainer, rollout):
        await_checkpoint(trainer)
        if trainer.iteration + 1 == self.first:
            self.fails, self.before = True, self.files()
        if trainer.iteration == self.last:
            assert self.files() == self.before
            self.fails = False


def await_checkpoint(trainer):
    """Wait until no checkpoint is being written."""
    for callback in trainer.callbacks:
        if isinstance(callback, SaveCheckpoints) and callback._writing is not None:
            callback._writing[0].exception()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return gw.train("CartPole-v1", PPO, run_dir=tmp_path_factory.mktemp("runs") / "whole", **SETTINGS)


needs_linux = pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="/proc")


@needs_linux
@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EROFS])
def test_training_goes_on_and_no_line_is_missing(error, whole, tmp_path, monkeypatch, caplog):
    path = tmp_path / "run"
    run = gw.train("CartPole-v1", PPO, run_dir=path, callbacks=[Disk(path, error, monkeypatch)], **SETTINGS)
    assert logged(path) == logged(whole.path)
    assert run.summary["env_steps"] == 640
    warnings = [message.partition(" (")[0] for message in caplog.messages]
    steps = [f"NOT SAVED: the checkpoint of step {step}" for step in (256, 320, 384)]
    assert [line for line in warnings if "checkpoint of" in line] == steps
    assert [line for line in warnings if "metrics" in line] == ["NOT SAVED: metrics from iteration 4 on"]
    assert all(f"([Errno {error}] " in message and "fix: make room" in message for message in caplog.messages)
    assert not list(path.rglob(".*.partial"))
    assert "unsaved_env_steps" not in run.summary


@needs_linux
@pytest.mark.parametrize(("first", "unsaved"), [(1, 640), (4, 640 - 192)])
def test_a_last_checkpoint_that_does_not_fit_is_a_failure_and_a_resumed_run_takes_its_steps_again(
    first, unsaved, whole, tmp_path, monkeypatch, capsys
):
    path = tmp_path / "run"
    with monkeypatch.context() as patch:
        disk = Disk(path / "checkpoints", errno.ENOSPC, patch, first=first, last=99)
        run = gw.train("CartPole-v1", PPO, run_dir=path, callbacks=[disk], **SETTINGS)
    assert run.summary["unsaved_env_steps"] == unsaved
    assert print_run(run) == 1
    assert (
        f"NOT SAVED: the last {unsaved} steps; fix: make room, then groupwise resume {path}" in capsys.readouterr().err
    )
    assert gw.resume(path).summary.get("unsaved_env_steps") is None
    assert logged(path) == logged(whole.path)


@needs_linux
def test_lines_that_find_no_room_are_a_failure(whole, tmp_path, monkeypatch, capsys):
    path = tmp_path / "run"
    with monkeypatch.context() as patch:
        disk = Disk(path / "metrics.jsonl", errno.ENOSPC, patch, first=9, last=99)
        run = gw.train("CartPole-v1", PPO, run_dir=path, callbacks=[disk], **SETTINGS)
    assert run.summary["unlogged_iterations"] == 2
    assert print_run(run) == 1
    assert "NOT SAVED: metrics of 2 iterations; fix: make room\n" in capsys.readouterr().err
    assert logged(path) == logged(whole.path)[:8]


def test_metrics_that_were_cut_are_told(whole, tmp_path, caplog):
    path = Path(shutil.copytree(whole.path, tmp_path / "run"))
    lines = (path / "metrics.jsonl").read_text().splitlines(keepends=True)
    (path / "metrics.jsonl").write_text("".join(lines[:2] + lines[4:]))
    summary = gw.resume(path).summary
    assert caplog.messages == [f"{path / 'metrics.jsonl'} lacks 2 of 10 iterations: it was cut or changed"]
    assert "unlogged_iterations" not in summary


def test_metrics_that_were_damaged_in_training_are_an_error(tmp_path):
    damages = on("training_end", lambda trainer: (tmp_path / "run" / "metrics.jsonl").write_text("[\n"))
    with pytest.raises(gw.errors.RunFolderError, match="line 1 is damaged"):
        gw.train("CartPole-v1", PPO, run_dir=tmp_path / "run", callbacks=[damages], **SETTINGS)


@needs_linux
def test_a_run_that_cannot_begin_says_why(tmp_path, monkeypatch):
    disk = Disk(tmp_path / "run", errno.ENOSPC, monkeypatch)
    disk.fails = True
    with pytest.raises(
        gw.errors.RunFolderError, match=r"cannot be written \(.*No space left on device\); fix: make room"
    ):
        gw.train("CartPole-v1", PPO, run_dir=tmp_path / "run", **SETTINGS)
    disk.fails = False
    gw.train("CartPole-v1", PPO, run_dir=tmp_path / "run", **SETTINGS)
