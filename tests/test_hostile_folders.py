"""Run folders and settings of a stranger: refused by one clear error, in 2 s of CPU time and 200 MB, and nothing is written."""

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from forked import run_script

import groupwise as gw

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits of resource, and /proc")

LATEST = Path("checkpoints", "latest")
STATE, MANIFEST, WEIGHTS = (LATEST / name for name in ("state.json", "manifest.json", "policy.safetensors"))
DEEP = b"[" * 100_000 + b"]" * 100_000
DIGITS = b'{"seed": ' + b"9" * 5_000 + b"}"
Damage = Callable[[Path], object]


def zeros(file):
    """Endless, if it is read."""
    file.unlink(missing_ok=True)
    os.symlink("/dev/zero", file)


def fifo(file):
    """Nobody writes into it."""
    file.unlink(missing_ok=True)
    os.mkfifo(file)


def huge(file):
    with file.open("wb") as opened:
        opened.truncate(2**40)


def holding(data):
    return lambda file: file.write_bytes(data)


def changed(value, *path):
    """The file with another value somewhere in its JSON."""

    def change(file):
        tree = json.loads(file.read_text())
        inside = tree
        for key in path[:-1]:
            inside = inside[key]
        inside[path[-1]] = value
        file.write_text(json.dumps(tree))

    return change


def line_of(**entry):
    return holding(json.dumps({"iteration": 1, "env_steps": 10} | entry).encode() + b"\n")


CASES = [
    ("config: link", "resume", "config.json", zeros, "RunFolderError"),
    ("config: FIFO", "resume", "config.json", fifo, "RunFolderError"),
    ("config: huge", "resume", "config.json", huge, "RunFolderError"),
    ("config: deep", "resume", "config.json", holding(DEEP), "RunFolderError"),
    ("config: digits", "resume", "config.json", holding(DIGITS), "RunFolderError"),
    ("config: not UTF-8", "resume", "config.json", holding(b'{"a": "\xff"}'), "RunFolderError"),
    ("config: many values", "compare", "config.json", holding(b"[" + b"[]," * 300_000 + b"0]"), "RunFolderError"),
    ("config: link, as settings", "config", "config.json", zeros, "ConfigError"),
    ("config: huge, as settings", "config", "config.json", huge, "ConfigError"),
    ("provenance: list", "resume", "config.json", changed([1], "provenance"), "RunFolderError"),
    ("provenance: format", "resume", "config.json", changed("2", "provenance", "format"), "RunFolderError"),
    ("provenance: plugins", "resume", "config.json", changed([[]], "provenance", "plugins"), "RunFolderError"),
    ("provenance: given", "resume", "config.json", changed({"a": 1}, "provenance", "given_in_python"), "RunFolderError"),
    ("settings: type", "resume", "config.json", changed("x", "algorithm"), "RunFolderError"),
    ("settings: steps", "resume", "config.json", changed("x", "total_steps"), "RunFolderError"),
    ("summary: deep", "compare", "summary.json", holding(DEEP), "RunFolderError"),
    ("summary: huge", "compare", "summary.json", huge, "RunFolderError"),
    ("summary: list", "compare", "summary.json", holding(b"[1]"), "RunFolderError"),
    ("summary: seconds", "compare", "summary.json", changed("x", "seconds"), "RunFolderError"),
    ("summary: steps", "compare", "summary.json", changed([], "env_steps"), "RunFolderError"),
    ("metrics: link", "resume", "metrics.jsonl", zeros, "RunFolderError"),
    ("metrics: huge", "resume", "metrics.jsonl", huge, "RunFolderError"),
    ("metrics: one line", "resume", "metrics.jsonl", holding(b" " * 2**22), "RunFolderError"),
    ("metrics: deep", "resume", "metrics.jsonl", holding(DEEP + b"\n"), "RunFolderError"),
    ("metrics: digits", "resume", "metrics.jsonl", holding(DIGITS + b"\n"), "RunFolderError"),
    ("metrics: iteration", "resume", "metrics.jsonl", line_of(iteration="1"), "RunFolderError"),
    ("metrics: steps", "compare", "metrics.jsonl", line_of(env_steps=None), "RunFolderError"),
    ("metrics: score", "compare", "metrics.jsonl", line_of(**{"eval/return_mean": [1]}), "RunFolderError"),
    ("metrics: large score", "compare", "metrics.jsonl", line_of(**{"eval/return_mean": 10**400}), "RunFolderError"),
    ("manifest: link", "resume", MANIFEST, zeros, "RunFolderError"),
    ("manifest: FIFO", "resume", MANIFEST, fifo, "CheckpointError"),
    ("manifest: huge", "resume", MANIFEST, huge, "CheckpointError"),
    ("manifest: deep", "resume", MANIFEST, holding(DEEP), "CheckpointError"),
    ("manifest: list", "resume", MANIFEST, holding(b"[]"), "CheckpointError"),
    ("manifest: format", "resume", MANIFEST, changed("2", "format"), "CheckpointError"),
    ("manifest: digests", "resume", MANIFEST, changed(5, "sha256"), "CheckpointError"),
    ("manifest: digest", "resume", MANIFEST, changed(5, "sha256", "state.json"), "CheckpointError"),
    ("weights: link", "resume", WEIGHTS, zeros, "RunFolderError"),
    ("weights: FIFO", "resume", WEIGHTS, fifo, "CheckpointError"),
    ("weights: huge", "resume", WEIGHTS, huge, "CheckpointError"),
    ("weights: long header", "resume", WEIGHTS, holding((2**62).to_bytes(8, "little") * 2), "CheckpointError"),
    ("weights: empty", "resume", WEIGHTS, holding(b""), "CheckpointError"),
    ("state: FIFO", "resume", STATE, fifo, "CheckpointError"),
    ("state: huge", "resume", STATE, huge, "CheckpointError"),
    ("state: deep", "resume", STATE, holding(DEEP), "CheckpointError"),
    ("state: digits", "resume", STATE, holding(DIGITS), "CheckpointError"),
    ("state: many values", "resume", STATE, holding(b"[" + b"[]," * 10_000_000 + b"0]"), "CheckpointError"),
    ("state: list", "resume", STATE, holding(b"[]"), "CheckpointError"),
    ("state: steps", "resume", STATE, changed("x", "env_steps"), "CheckpointError"),
    ("state: iteration", "resume", STATE, changed(-1, "iteration"), "CheckpointError"),
    ("state: seconds", "resume", STATE, changed([], "seconds"), "CheckpointError"),
    ("state: algorithm", "resume", STATE, changed(None, "algorithm"), "CheckpointError"),
    ("state: no tensor", "resume", STATE, changed({"$": "tensor"}, "algorithm", "optimizer"), "CheckpointError"),
    ("state: learning rate", "resume", STATE, changed("x", "algorithm", "schedule", "factor"), "CheckpointError"),
    ("state: moments", "resume", STATE, changed([1], "algorithm", "optimizer", "state"), "CheckpointError"),
    ("state: episodes", "resume", STATE, changed([["x", 1]], "collector", "recent"), "CheckpointError"),
    ("state: running", "resume", STATE, changed("x", "collector", "running"), "CheckpointError"),
    ("state: best score", "resume", STATE, changed("x", "callbacks", "Evaluate", "best_score"), "CheckpointError"),
]  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stranger") / "run"
    algorithm = {"name": "ppo", "num_steps": 16, "num_epochs": 1, "minibatch_size": 64}
    gw.train(
        "CartPole-v1", algorithm, total_steps=256, num_envs=4, run_dir=folder, evaluation={"episodes": 2}, speed="off",
        logging={"progress": "none"}, keep_checkpoints=1,
    )  # fmt: skip
    return folder


def sign(folder):
    """Make the digests those of the files, as a stranger would."""
    manifest = json.loads((folder / MANIFEST).read_text())
    for name in manifest["sha256"]:
        file = folder / LATEST / name
        if file.is_file() and file.stat().st_size < 2**30:
            manifest["sha256"][name] = hashlib.sha256(file.read_bytes()).hexdigest()
    (folder / MANIFEST).write_text(json.dumps(manifest))


def endings(cases, where):
    """How each case ended; see ``support/under_limits.py``."""
    file = where / "cases.json"
    file.write_text(json.dumps([(name, call, str(folder)) for name, call, folder in cases]))
    printed = run_script(Path(__file__).parent / "support" / "under_limits.py", file)
    return dict(json.loads(printed.splitlines()[-1]))


@pytest.mark.slow
def test_every_hostile_file_is_refused_by_one_clear_error(trained, tmp_path):
    untouched = dict.fromkeys(("evaluate", "compare", "config"), "accepted")  # the limits refuse nothing
    calls = [(call, call, trained) for call in untouched]
    for number, (name, call, file, damage, _) in enumerate(CASES):
        folder = tmp_path / str(number)
        shutil.copytree(trained, folder)
        damage(folder / file)
        if (folder / file).parent.name == "latest" and file != MANIFEST:
            sign(folder)
        calls.append((name, call, folder))
    found = endings(calls, tmp_path)
    wrong = {name: found[name] for name, *_, error in CASES if not found[name].startswith(f"{error}: ")}
    assert wrong == {}
    assert {call: found[call] for call in untouched} == untouched
    assert all("fix: " in found[name] for name, call, *_ in CASES if call == "resume"), found


@pytest.mark.parametrize(
    "place",
    ["metrics.jsonl", "summary.json", "config.json", "curve.svg", "policy.gif", "checkpoints", "groups/x", LATEST],
)
def test_links_out_of_the_folder_are_refused_and_their_targets_stay(trained, tmp_path, place):
    folder = shutil.copytree(trained, tmp_path / "run")
    target, link = tmp_path / "mine", folder / place
    if link.is_dir():
        shutil.move(link, target)
    elif link.is_file():
        shutil.copy(link, target)
        link.unlink()
    else:
        link.parent.mkdir(exist_ok=True)
        target.write_text("mine")
    before = sorted((path.name, path.stat().st_mtime_ns) for path in (target, *target.rglob("*")))
    os.symlink(target, link)
    for call in (lambda: gw.resume(folder, 512), lambda: gw.evaluate(folder, 2), lambda: gw.compare([folder])):
        with pytest.raises(gw.errors.RunFolderError, match="is a link that leads out of the run folder; fix: "):
            call()
    assert sorted((path.name, path.stat().st_mtime_ns) for path in (target, *target.rglob("*"))) == before


@pytest.mark.slow
def test_links_at_names_for_half_written_files_are_not_followed(trained, tmp_path, pictures):
    folder = shutil.copytree(trained, tmp_path / "run")
    target = folder / "mine"  # inside, so that the folder opens
    target.write_text("mine")
    for name in ("metrics.jsonl.partial", "summary.json.partial", "curve.svg", "checkpoints/latest.partial"):
        (folder / name).unlink(missing_ok=True)
        os.symlink(target, folder / name)
    gw.resume(folder, 512)
    assert target.read_text() == "mine"
    assert not (folder / "curve.svg").is_symlink()


@pytest.mark.slow
def test_latest_may_be_a_link_inside_of_the_folder(trained, tmp_path):
    folder = shutil.copytree(trained, tmp_path / "run")
    (folder / LATEST).rename(folder / "checkpoints" / "step_256")
    os.symlink("step_256", folder / LATEST)
    assert gw.resume(folder, 512).summary["env_steps"] == 512
