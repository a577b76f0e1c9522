"""``groupwise doctor``: what it says of runs and of installations, and its exit code."""

import pytest
import torch
from run_folders import rewrite_metrics, write_run

from groupwise import cli
from groupwise.cli import report as doctor
from groupwise.errors import EnvError
from groupwise.report.folder import RunFolder


def test_a_fault_comes_with_its_fix(tmp_path, capsys):
    run = write_run(tmp_path / "run", evaluated=False)
    assert cli.main(["doctor", str(run)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "Did it learn? Unknown. The return of training went from 11 to 14, and nothing was evaluated.",
        "Nothing looks wrong.",
    ]
    rewrite_metrics(run, lambda entry: entry | {"rollout/return_mean": 0.0, "rollout/length_mean": 9.0})
    assert cli.main(["doctor", str(run)]) == 1
    _, fault, fix = capsys.readouterr().out.splitlines()
    assert fault == "trouble  Return: Between 0 and 0 in training."
    assert fix.strip().startswith("fix: It never changes. If a goal was never reached")


def test_a_run_that_was_killed(tmp_path, capsys):
    run = write_run(tmp_path / "run", evaluated=False)
    (run / "summary.json").unlink()
    with RunFolder(run).locked():
        assert cli.main(["doctor", str(run)]) == 0
    assert "killed" not in capsys.readouterr().out  # it trains
    assert cli.main(["doctor", str(run)]) == 0
    _, fault, fix = capsys.readouterr().out.splitlines()
    assert fault.startswith("look     End of the run: It was killed")
    assert fix.endswith(f"groupwise resume {run}")
    (run / "metrics.jsonl").unlink()
    with RunFolder(run).locked():
        assert cli.main(["doctor", str(run)]) == 0
    assert capsys.readouterr().out.splitlines()[1] == "There is nothing to look at yet."


def test_what_a_full_disk_did_not_take_is_trouble(tmp_path, capsys):
    lost = {"unsaved_env_steps": 1_250, "unlogged_iterations": 2}
    run = write_run(tmp_path / "run", evaluated=False, summary=lost)
    assert cli.main(["doctor", str(run)]) == 1
    _, steps, again, metrics, room = capsys.readouterr().out.splitlines()
    assert steps == "trouble  Checkpoint: The last 1,250 steps are not saved."
    assert again.endswith(f"then: groupwise resume {run}")
    assert metrics == "trouble  Metrics: The metrics of 2 iterations are not saved."
    assert room.strip().startswith("fix: Make room")
    run = write_run(tmp_path / "failed", evaluated=False, summary={"unsaved_env_steps": 250, "stopped": "failed"})
    assert cli.main(["doctor", str(run)]) == 1
    assert "Checkpoint" not in capsys.readouterr().out


@pytest.mark.slow
def test_this_installation_is_sound(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(doctor, "SECONDS", 1.0)
    assert cli.main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    titles = [line[9:].partition(":")[0] for line in lines if not line.startswith(" ")]
    assert titles == ["Device", "Training for 1 seconds"]
    assert list(tmp_path.iterdir()) == []


def test_a_driver_without_a_build_for_it(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for program, verdict in (("/usr/bin/nvidia-smi", "look"), (None, "good")):
        monkeypatch.setattr(doctor.shutil, "which", lambda name, program=program: program)
        assert doctor.device().verdict == verdict


def test_a_training_that_fails(monkeypatch):
    def fail(*args, **settings):
        raise EnvError("no display; fix: set MUJOCO_GL=egl")

    monkeypatch.setattr("groupwise.run.train", fail)
    found = doctor.training()
    assert (found.verdict, "no display" in found.text) == ("bad", True)
