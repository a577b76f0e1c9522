"""``groupwise doctor``: what it says of runs and of installations, and its exit code."""

import pytest
import torch
from packaging.requirements import Requirement
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


@pytest.mark.slow
def test_this_installation_is_sound(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(doctor, "SECONDS", 1.0)
    assert cli.main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    titles = [line[9:].partition(":")[0] for line in lines if not line.startswith(" ")]
    assert {"Device", "Threads", "Packages", "Training for 1 seconds"} <= set(titles)
    assert list(tmp_path.iterdir()) == []


def test_requirements_that_are_not_met(monkeypatch):
    assert doctor.missing(Requirement("torch>=2")) == []
    assert doctor.missing(Requirement("no-such-package")) == ["no-such-package is not installed"]
    [wrong] = doctor.missing(Requirement("torch>=99"))
    assert wrong.startswith("torch is ")
    assert wrong.endswith("expected >=99")
    inner = ['nothing-there; extra == "toys"', 'other; extra == "more"']
    monkeypatch.setattr(doctor, "requires", {"torch": inner}.get)
    assert doctor.missing(Requirement("torch[toys]")) == ["nothing-there is not installed"]
    assert doctor.missing(Requirement("torch")) == []


OF_EXTRAS = ['torch<1; extra == "old"', 'nothing-there; extra == "new"', 'torch; extra == "fine"', "torch"]


@pytest.mark.parametrize(
    ("wanted", "verdict", "text", "advice"),
    [
        (OF_EXTRAS, "look", "extras that are there: fine; not complete: new, old", ".[old]"),
        (["nothing-there", "torch"], "bad", "nothing-there is not installed.", "pip install"),
        (["torch"], "good", "All required ones are there", ""),
    ],
)
def test_packages(monkeypatch, wanted, verdict, text, advice):
    monkeypatch.setattr(doctor, "requires", {"groupwise": wanted}.get)
    found = doctor.packages()
    assert (found.verdict, text in found.text, advice in found.advice) == (verdict, True, True)


def test_more_threads_than_processors(monkeypatch):
    monkeypatch.setattr(doctor, "num_cpus", lambda: 2)
    for number, verdict in ((2, "good"), (64, "look")):
        monkeypatch.setattr(torch, "get_num_threads", lambda number=number: number)
        assert doctor.threads().verdict == verdict


def test_a_driver_without_a_build_for_it(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for program, verdict in (("/usr/bin/nvidia-smi", "look"), (None, "good")):
        monkeypatch.setattr(doctor.shutil, "which", lambda name, program=program: program)
        assert doctor.device().verdict == verdict


def test_a_renderer_and_a_training_that_fail(monkeypatch):
    def fail(*args, **settings):
        raise EnvError("no display; fix: set MUJOCO_GL=egl")

    monkeypatch.setattr(doctor, "draw_one_frame", fail)
    found = doctor.rendering("CartPole-v1")
    assert (found.verdict, found.advice) == ("look", "set MUJOCO_GL=egl.")
    monkeypatch.setattr("groupwise.run.train", fail)
    found = doctor.training(1.0)
    assert (found.verdict, "no display" in found.text) == ("bad", True)
