import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from groupwise.errors import RunFolderError
from groupwise.report.folder import RunFolder, provenance

CONFIG = {"seed": 3, "env": {"id": "CartPole-v1"}, "algorithm": {"name": "grpo"}}


@pytest.fixture(autouse=True)
def _in_a_fresh_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("GIT_DIR")  # of conftest.py


def line(iteration: int, **numbers: Any) -> str:
    return json.dumps({"iteration": iteration, **numbers}) + "\n"


def test_runs_of_one_moment_get_folders_of_their_own():
    with ThreadPoolExecutor(8) as pool:
        folders = list(pool.map(lambda _: RunFolder.create(CONFIG, name="ALE/Pong-v5-ppo-seed0"), range(24)))
    assert len({folder.path for folder in folders}) == 24
    assert all(folder.shown.parent == Path("runs") for folder in folders)
    assert all(folder.path.name.startswith("ALE-Pong-v5-ppo-seed0-") for folder in folders)


def test_two_runs_never_share_a_folder_that_was_asked_for():
    def claim(_: int) -> bool:
        try:
            RunFolder.create(CONFIG, Path("mine"))
        except RunFolderError:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(claim, range(24))) == 1


def test_folder_with_something_in_it_is_refused():
    Path("file").touch()
    Path("full").mkdir()
    Path("full", "notes.txt").touch()
    for name in ("file", "full"):
        with pytest.raises(RunFolderError, match=rf"'{name}' is taken; fix: another one$"):
            RunFolder.create(CONFIG, Path(name))
    for file in ("config.json", "population.json"):
        Path("full", file).touch()
        with pytest.raises(
            RunFolderError, match=r"'full' is taken; fix: another one, or .*groupwise resume full( --plugin .*)?$"
        ):
            RunFolder.create(CONFIG, Path("full"))
        Path("full", file).unlink()


def test_config_tells_what_repeats_the_run(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sys.argv", ["groupwise", "train", "CartPole-v1"])
    folder = RunFolder.create(CONFIG, Path("a", "b"), given_in_python=["policy"])
    provenance = json.loads(folder.config.read_text())["provenance"]
    assert folder.read_config() == CONFIG
    assert folder.read_provenance()["given_in_python"] == ["policy"]
    assert set(provenance["versions"]) >= {"python", "torch", "gymnasium", "numpy", "groupwise"}
    assert "train CartPole-v1" in provenance["command"]
    assert provenance["git"] is None  # this directory is in no repository
    folder.rewrite_config(CONFIG | {"seed": 4})
    assert folder.read_config()["seed"] == 4
    assert json.loads(folder.config.read_text())["provenance"] == provenance


def repository(*added: str) -> None:
    """Make the current folder one with a commit."""
    for command in ("git init -q", f"git add {' '.join(added)}", "git -c user.name=a -c user.email=b commit -qm c"):
        assert os.system(command) == 0


def test_the_git_state_is_recorded_and_is_dirty_if_a_tracked_file_changed():
    Path("tracked").write_text("a")
    repository("tracked")
    Path("inside").mkdir()
    os.chdir("inside")
    git = provenance()["git"]
    assert (len(git["commit"]), git["dirty"]) == (40, False)
    Path("..", "tracked").write_text("b")
    Path("..", "other").write_text("not tracked")
    assert provenance()["git"]["dirty"] is True


def test_the_configuration_of_a_strangers_repository_runs_nothing(tmp_path: Path):
    Path("tracked").write_text("a")
    Path(".gitattributes").write_text("tracked filter=evil diff=evil\n")
    repository(".")
    ran = tmp_path / "ran"
    run = f"touch {ran}; false"
    for name in ("core.fsmonitor", "filter.evil.clean", "filter.evil.process", "diff.external", "diff.evil.textconv"):
        assert os.system(f"git config {name} '{run}'") == 0
    Path("tracked").write_text("b")
    os.system("git status > /dev/null 2>&1")
    assert ran.exists(), "git itself runs it"
    ran.unlink()
    assert provenance()["git"]["dirty"] is True
    assert not ran.exists()


def test_what_is_no_run_folder_is_named():
    def refused(message: str) -> None:
        with pytest.raises(RunFolderError, match=f"{message}.*; fix: "):
            RunFolder.open(Path("mine")).read_config()

    refused("there is no run folder 'mine'")
    Path("mine").mkdir()
    refused(r"config\.json is missing")
    RunFolder.create(CONFIG, Path("mine/seed_0"))
    with pytest.raises(RunFolderError, match="fix: give a run in it, as mine/seed_0"):
        RunFolder.open(Path("mine"))
    for damaged in ('{"seed": ', "[1]", '{"algorithm": "adam", "seed": 1}'):
        Path("mine", "config.json").write_text(damaged)
        refused(r"config\.json is damaged: ")
    Path("mine", "model-00001-of-00002.safetensors").touch()
    refused("mine is a model's folder, not a run's")


def test_a_last_line_cut_short_by_a_kill_is_left_out():
    folder = RunFolder.create(CONFIG, Path("mine"))
    for end in ('{"iterat', '{"iteration": 3}'):  # not a whole object; not a whole line
        folder.metrics.write_text(line(1) + line(2) + end)
        assert [entry["iteration"] for entry in folder.read_metrics()] == [1, 2]


@pytest.mark.parametrize("broken", [b"broken\n", b"\xff\n", b"{}\n", b"[1]\n"])
def test_another_damaged_line_is_named(broken: bytes):
    folder = RunFolder.create(CONFIG, Path("mine"))
    folder.metrics.write_bytes(line(1).encode() + broken + line(3).encode())
    with pytest.raises(RunFolderError, match=r"metrics\.jsonl, line 2 is damaged"):
        folder.read_metrics()


def test_metrics_after_an_iteration_are_dropped_and_the_others_stay_byte_for_byte():
    folder = RunFolder.create(CONFIG, Path("mine"))
    kept = line(1, x=0.1) + line(2, x=1e-9)
    folder.metrics.write_text(kept + line(3) + '{"iter')
    folder.truncate_metrics(2)
    assert folder.metrics.read_text() == kept
    folder.truncate_metrics(0)
    assert folder.read_metrics() == []
