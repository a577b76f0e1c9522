"""What a notebook shows of a run."""

import html
import json
import re

import pytest
from run_folders import rewrite_metrics, write_run

import groupwise as gw
from groupwise.errors import RunFolderError
from groupwise.report.folder import RunFolder
from groupwise.report.page import explore, plot, to_html


@pytest.fixture
def run(tmp_path):
    return write_run(tmp_path / "run")


def shown(path):
    return to_html(RunFolder(path))


def test_a_notebook_shows_answer_curve_and_what_to_look_at(run):
    assert "Did it learn? <b>No.</b> The evaluated return rose from 1 to 4" in shown(run)
    assert shown(run).count("<svg") == 1
    assert shown(run).count("<li>") == 1  # evaluations below training
    rewrite_metrics(run, lambda entry: entry | {"rollout/return_mean": 0.0})
    assert "<li>trouble: <b>Return</b> Between 0 and 0 in training." in shown(run)
    (run / "metrics.jsonl").unlink()
    assert "<svg" not in shown(run)
    assert "Unknown" in shown(run)


def test_names_of_strangers_stay_texts_and_the_explorer_is_in_a_frame_with_links_of_its_own(run):
    frame = explore(RunFolder(run))._repr_html_()
    [page] = re.findall(r'<iframe srcdoc="([^"]+)" title="Page of the run"', frame)
    assert html.unescape(page).startswith("<!DOCTYPE html>")
    assert '<base href="about:srcdoc">' in html.unescape(page)
    assert "<script" not in frame
    config = json.loads((run / "config.json").read_text())
    config["env"]["id"] = config["algorithm"]["name"] = "<img src=x onerror=alert(1)>"
    config["provenance"]["run_id"] = '"><img src=x onerror=alert(1)>'
    (run / "config.json").write_text(json.dumps(config))
    (run / "summary.json").unlink()
    assert "<img" not in shown(run)


@pytest.mark.parametrize("show", [plot, explore, to_html])
def test_values_that_no_run_writes_are_one_error_with_the_folder(run, show):
    rewrite_metrics(run, lambda entry: entry | {"eval/success_rate": 7, "eval/episodes": 1e300})
    with pytest.raises(RunFolderError, match=r"run cannot be shown: .*; fix: "):
        show(RunFolder(run))


def test_a_trained_run_has_them(tmp_path):
    short = {"total_steps": 300, "evaluation": {"episodes": 2}, "logging": {"progress": "none"}}
    run = gw.train("CartPole-v1", run_dir=tmp_path / "run", **short)
    assert "CartPole-v1, grpo" in run._repr_html_()
    curve = run.plot()._repr_svg_()
    assert curve.startswith("<svg")
    assert "CartPole-v1, grpo, seed 0" in curve
    assert run.report() == run.path / "report.html"
    assert run.report(str(tmp_path / "page.html")).read_text().startswith("<!DOCTYPE html>")
