"""The viewer: what it shows, what it refuses, and that it notices changes."""

import html
import json
import re

import pytest
from run_folders import write_run
from starlette.testclient import TestClient

from groupwise import cli
from groupwise.report.folder import LOCK, RunFolder
from groupwise.report.view import Viewer, find_runs

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
    assert re.findall(r'value="([^"]+)" aria-label="[^"]+" checked', chosen) == ["first"]


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
    assert "<td>total_steps</td>" in text
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
    assert "<td>99.5</td>" in text
    (path / "summary.json").unlink()
    assert "<td>killed</td>" in seen("/secret/", changed)[2]
    with RunFolder(path).locked():
        assert "<td>training</td>" in seen("/secret/", changed)[2]
    assert (path / LOCK).is_file()


def test_the_depth_of_the_search_is_bounded_and_a_folder_that_is_missing_is_named(tmp_path, capsys):
    write_run(tmp_path / "a/b/c")
    write_run(tmp_path / "a/b/d/e/f")
    assert list(find_runs(tmp_path)) == ["a/b/c"]
    assert cli.main(["view", str(tmp_path / "none")]) == 2
    assert "there is no folder" in capsys.readouterr().err
