"""The viewer: what it shows, what it refuses, and that it notices changes."""

import html
import json
import math
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from run_folders import write_run
from starlette.testclient import TestClient

from groupwise import cli, report
from groupwise.report.folder import LOCK, RunFolder
from groupwise.report.page import progress
from groupwise.report.view import Viewer, find_runs, matching

HOSTILE = "<img src=x onerror=alert(1)>"


def client(root, address="http://127.0.0.1"):
    return TestClient(Viewer(root, "secret").app(), base_url=address)


@pytest.fixture
def root(tmp_path):
    """Two runs side by side, one deeper, and what is none of theirs."""
    root = tmp_path / "runs"
    write_run(root / "first")
    write_run(root / "more/second run", env="Pendulum-v1", algorithm="ppo")
    (tmp_path / "secret.txt").write_text("secret content")
    write_run(tmp_path / "outside")
    (root / "linked").symlink_to(tmp_path / "outside")
    return root


def test_all_runs_are_listed_with_their_curves(root):
    answer = client(root).get("/secret/")
    assert answer.status_code == 200
    assert "/secret/runs/first" in answer.text
    assert "/secret/runs/more/second%20run" in answer.text
    assert "linked" not in answer.text
    assert '<link rel="icon" href="data:,">' in answer.text  # without it, browsers ask for one, and meet a 404
    assert answer.text.count("<svg") == 2  # a figure for each task
    assert "Learning curves of 1 runs on Pendulum-v1" in answer.text
    assert answer.headers["referrer-policy"] == "no-referrer"
    assert "connect-src 'self'" in client(root / "first").get("/secret/runs/first").text  # a folder that is a run
    chosen = client(root).get("/secret/", params={"run": "first"}).text
    assert chosen.count("<svg") == 1
    assert re.findall(r'value="([^"]+)" form="choose" aria-label="[^"]+" checked', chosen) == ["first"]


def test_a_run_of_one_iteration_is_a_dot_and_names_what_stopped_others(tmp_path):
    write_run(tmp_path / "one", (7.0,), steps=(250,), evaluated=False)
    write_run(tmp_path / "cut", summary={"stopped": "threshold"})
    for metric in ("", "rollout/return_mean", "time/total_seconds"):
        text = client(tmp_path).get("/secret/", params={"run": "one", "metric": metric}).text
        assert text.count("<circle") == 1, metric
    assert ("<td>finished</td>" in text, "<td>threshold</td>" in text, "<td>total_steps</td>" in text) == (
        True,
        True,
        False,
    )


PATHS = """/ /wrong/ /wrong/runs/first /secret/runs/../../outside /secret/runs/%2e%2e/%2e%2e/outside
    /secret/runs/..%2f..%2foutside /secret/runs/ /secret/runs/more /secret/runs/linked /secret/runs/first/config.json
    /secret/runs/first/../../secret.txt /secret/runs//etc/passwd /secret/runs/%2fetc%2fpasswd /secret/runs/first%00
    /secret/secret.txt"""


def test_paths_outside_and_wrong_tokens_are_not_found(root):
    visitor, outside = client(root), root.parent / "outside"
    for path in [*PATHS.split(), f"/secret/runs/{outside}", f"/secret/runs{outside}"]:
        answer = visitor.get(path, follow_redirects=False)
        if answer.status_code == 307:  # of a slash at the end
            assert answer.headers["location"].startswith("http://127.0.0.1/")
            answer = visitor.get(answer.headers["location"], follow_redirects=False)
        assert answer.status_code == 404, path
        assert "secret content" not in answer.text
        assert "root:" not in answer.text


def test_a_file_that_is_a_link_leading_out_is_refused(root):
    (root / "first/policy.gif").symlink_to(root.parent / "secret.txt")
    answer = client(root).get("/secret/runs/first")
    assert answer.status_code == 500
    assert "leads out of the run folder" in answer.text
    assert "leads out of the run folder" in client(root).get("/secret/").text


def test_nothing_can_be_written_and_other_host_names_are_refused(root):
    before = sorted((path, path.stat().st_mtime_ns) for path in root.rglob("*"))
    for method in ("POST", "PUT", "PATCH", "DELETE"):
        assert client(root).request(method, "/secret/runs/first").status_code == 405
    client(root).get("/secret/")
    client(root).get("/secret/runs/first")
    assert client(root, "http://evil.example").get("/secret/").status_code == 400
    assert sorted((path, path.stat().st_mtime_ns) for path in root.rglob("*")) == before


@pytest.mark.parametrize(
    "foreign",
    [
        {"algorithm": "adam", "env": "x", "seed": "y"},
        {"algorithm": {"name": "grpo"}, "seed": 0, "provenance": {"versions": []}},
        [],
        None,
    ],
)
def test_damaged_settings_and_those_of_other_programs_are_listed_with_their_fault(root, foreign):
    (root / "model").mkdir()
    (root / "model/config.json").write_text(json.dumps(foreign) if foreign is not None else "{")
    visitor = client(root)
    listed = visitor.get("/secret/").text
    assert "/secret/runs/model" in listed
    assert "/secret/runs/first" in listed
    page = visitor.get("/secret/runs/model")
    assert page.status_code == 500
    assert "model/config.json" in page.text


@pytest.mark.parametrize("damage", ["infinite", "large", "name", "id"])
def test_a_run_with_odd_values_leaves_the_others_listed(root, damage):
    run = write_run(root / (os.fsdecode(b"\xffrun") if damage == "name" else "odd"), env="Pendulum-v1")
    entry, settings = {"iteration": 1, "env_steps": 9}, json.loads((run / "config.json").read_text())
    entry["time/total_seconds"] = {"infinite": math.inf, "large": 1e308}.get(damage, 1.0)
    settings |= {"id": {"env": {"id": "\ud800x"}}}.get(damage, {})
    (run / "config.json").write_text(json.dumps(settings))
    (run / "metrics.jsonl").write_text(f"{json.dumps(entry)}\n")
    listed = client(root).get("/secret/")
    assert listed.status_code == 200
    assert "/secret/runs/first" in listed.text
    [address] = re.findall(r'href="(/secret/runs/(?:odd|[^"]*udcffrun))"', listed.text)
    assert ("fix: " in listed.text) == (damage in ("infinite", "large"))
    assert client(root).get(html.unescape(address)).status_code == (500 if damage == "infinite" else 200)


def figures(page):
    """Titles and labels of the axes of all figures of a list."""
    return [re.findall(r"<text[^>]*>([^<]+)</text>", one) for one in re.findall("<svg.*?</svg>", page, re.DOTALL)]


def test_every_metric_can_be_chosen(root):
    visitor = client(root)

    def listed(**query):
        return visitor.get("/secret/", params=query).text

    for name in ("rollout/return_mean", "eval/return_std", "time/total_seconds"):
        assert f"<option>{name}</option>" in listed()
        drawn = figures(listed(metric=name))
        assert sorted(words[0] for words in drawn) == ["CartPole-v1", "Pendulum-v1"]
        assert all({name, "environment steps"} < set(words) for words in drawn)
    assert all({"return", "environment steps"} < set(words) for words in figures(listed()))
    assert len(figures(listed(metric="eval/"))) == 6  # three metrics of two tasks
    assert len(figures(listed(metric="eval/return_mean seconds"))) == 4
    assert "No metric has such a name." in listed(metric="nothing")


def test_runs_are_filtered_by_parts_of_their_names(root):
    names = ["seed_1", "seed_10", "more/ppo"]
    assert matching(names, "") == names
    assert matching(names, "SEED") == ["seed_1", "seed_10"]
    assert matching(names, "seed_1") == ["seed_1"]  # a whole name is that one alone
    assert matching(names, "10 ppo") == ["seed_10", "more/ppo"]
    visitor = client(root)

    def checked(**query):
        page = visitor.get("/secret/", params=query).text
        return set(re.findall(r'value="([^"]+)" form="choose" aria-label="[^"]+" checked', page))

    assert checked(match="second") == {"more/second run"}
    assert checked(match="s", run="first", matched="s") == {"first"}
    assert checked(match="s", run="first") == {"first", "more/second run"}  # chosen before they were filtered
    assert "No run has such a name." in visitor.get("/secret/", params={"match": "<b>"}).text


def test_demonstrations_and_environment_steps_have_axes_of_their_own(root):
    path = write_run(root / "clone") / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"algorithm": {"name": "bc"}}))
    drawn = figures(client(root).get("/secret/").text)
    units = [[word for word in words if word.endswith(" steps")] for words in drawn if words[0] == "CartPole-v1"]
    assert sorted(units) == [["demonstrated steps"], ["environment steps"]]


@pytest.mark.parametrize(
    ("config", "last", "expected"),
    [
        ({"total_steps": 1_000}, {"env_steps": 250, "time/total_seconds": 30.0}, "25 %, 1:30 left"),
        ({"total_iterations": 4}, {"iteration": 1, "time/total_seconds": 3_600.0}, "25 %, 3:00:00 left"),
        ({"total_epochs": 0.5}, {"rollout/epoch": 0.25, "time/total_seconds": 10.0}, "50 %, 0:10 left"),
        (
            {"total_steps": 9},
            {"env_steps": 1, "time/total_seconds": 30.0, "time/left_seconds": 10.0},
            "11 %, 0:10 left",
        ),
        ({"total_steps": 1_000}, {"env_steps": 1_200, "time/total_seconds": 30.0}, "100 %, 0:00 left"),
        ({"total_steps": 1_000}, {"env_steps": 0}, ""),
        ({}, {"env_steps": 5}, ""),
    ],
)
def test_the_time_that_is_left_follows_from_the_budget(config, last, expected):
    assert progress(config, [last]) == expected
    assert progress(config, []) == ""
    assert progress(config, [last], runs=False) == expected.partition(",")[0]


def test_the_page_of_a_run_leads_to_its_metrics_and_long_lines_are_thinned(root):
    page = client(root).get("/secret/runs/more/second%20run").text
    [address] = re.findall(r'href="([^"]+)">All metrics', page)
    metrics = client(root).get(html.unescape(address)).text
    assert {words[0] for words in figures(metrics)} == {"Pendulum-v1"}
    assert len(figures(metrics)) == 5
    entry = {"rollout/return_mean": 1.0}
    lines = [json.dumps({"iteration": number, "env_steps": number} | entry) for number in range(1, 4_001)]
    (root / "first/metrics.jsonl").write_text("\n".join(lines) + "\n")
    [points] = re.findall(r'<polyline points="([^"]*)"', client(root).get("/secret/", params={"run": "first"}).text)
    assert 500 <= len(points.split()) <= 501


def test_names_of_strangers_stay_texts(root):
    write_run(root / HOSTILE)
    listed = client(root).get("/secret/").text
    assert HOSTILE not in listed
    assert "&lt;img src=x" in listed
    assert HOSTILE not in client(root).get("/secret/runs/<img%20src=x%20onerror=alert(1)>").text


def test_pages_follow_the_files(root):
    """The reader names the version that it has, and gets another only after a change."""
    visitor, path = client(root), root / "first"

    def seen(page, version=""):
        answer = visitor.get(page, headers={"If-None-Match": version})
        return answer.status_code, answer.headers["etag"], answer.text

    _, listed, text = seen("/secret/")
    assert "<td>finished</td>" in text
    _, shown, text = seen("/secret/runs/first")
    assert html.escape(shown, quote=True).replace("&quot;", "&#34;") in text  # the page begins with it
    assert seen("/secret/", listed) == (304, listed, "")
    assert seen("/secret/runs/first", shown) == (304, shown, "")
    entry = {"iteration": 9, "env_steps": 2_000, "rollout/return_mean": 99.5, "time/total_seconds": 3.0}
    with (path / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(entry) + "\n")
    assert "2,000 environment steps" in seen("/secret/runs/first", shown)[2]
    status, changed, text = seen("/secret/", listed)
    assert status == 200
    assert '<td data-label="training">99.5</td>' in text
    (path / "summary.json").unlink()
    assert "<td>killed</td>" in seen("/secret/", changed)[2]
    with RunFolder(path).locked():
        assert "<td>training</td>" in seen("/secret/", changed)[2]
    assert (path / LOCK).is_file()
    (path / "metrics.jsonl").unlink()
    (path / "checkpoints" / "latest").mkdir(parents=True, exist_ok=True)
    assert "<td>saved agent</td>" in seen("/secret/", changed)[2]  # as LanguageAgent.save leaves it


ANSWERED = """
const [source, status] = process.argv.slice(1), link = {textContent: ""};
global.document = {currentScript: {dataset: {version: "1"}}, getElementById: () => link, addEventListener() {}};
global.location = {href: ""};
global.fetch = async () => ({ok: false, status: Number(status), text: async () => "a/b is damaged"});
eval(require("fs").readFileSync(source, "utf8"));
setImmediate(() => { console.log(link.textContent); process.exit(); });
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="there is no node")
@pytest.mark.parametrize(
    ("status", "told"),
    [
        (304, "This page follows the files."),
        (404, "Not found: the run is gone, or groupwise view was started again."),
        (500, "a/b is damaged"),
    ],
)
def test_a_page_that_the_server_refuses_says_why(status, told):
    script = Path(report.__file__).with_name("live.js")
    done = subprocess.run(["node", "-e", ANSWERED, script, str(status)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == told


def test_the_depth_of_the_search_is_bounded_and_a_folder_that_is_missing_is_named(tmp_path, capsys):
    write_run(tmp_path / "a/b/c")
    write_run(tmp_path / "a/b/d/e/f")
    assert list(find_runs(tmp_path)) == ["a/b/c"]
    assert cli.main(["view", str(tmp_path / "none")]) == 2
    assert "there is no folder" in capsys.readouterr().err
