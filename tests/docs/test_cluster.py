"""The scripts of ``docs/cluster.md``, run with stand-ins for SLURM, torchrun and groupwise."""

import json
import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from groupwise import cli
from groupwise.cli.train import evolve_command

PAGE = Path(__file__).parents[2] / "docs/cluster.md"
STANDS_IN = {
    "scontrol": 'printf "first\\nsecond\\n"',
    "srun": 'exec "$@"',
    "torchrun": 'printf "%s\\n" torchrun "$@"',
    "groupwise": 'printf "%s\\n" groupwise "$@"',
}


def fenced(language):
    [block] = re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    return block


@pytest.fixture
def words_of(tmp_path):
    """Runs a script, with a folder for /shared; returns the words of the last command."""
    programs, shared = tmp_path / "programs", tmp_path / "shared"
    programs.mkdir()
    shared.mkdir()
    for name, line in STANDS_IN.items():
        (programs / name).write_text(f"#!/bin/sh\n{line}\n")
        (programs / name).chmod(0o755)
    env = {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "SLURM_JOB_NODELIST": "n",
        "SLURM_NNODES": "2",
        "SLURM_JOB_ID": "7",
    }

    def run(script):
        script = script.replace("/shared", str(shared))
        done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, env=env, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    run.shared = shared
    return run


def commands():
    """The words of each command of groupwise in a terminal."""
    text = PAGE.read_text().replace("\\\n", " ")
    for line in re.findall(r"^\$ (.*)$", text, re.MULTILINE):
        words = shlex.split(line)
        yield words[words.index("groupwise") + 1 :]


@pytest.mark.parametrize("command", [words for words in commands() if words[0] == "train"], ids=" ".join)
def test_a_run_is_started_with_settings_that_exist(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    settings = {"task": {"data": "d", "rewards": [{"name": "exact"}]}, "model": {"path": "m"}}
    Path("text.json").write_text(json.dumps(settings))
    assert cli.main(["config", *command[1:]]) == 0
    assert json.loads(capsys.readouterr().out)["model"]["path"] in ("m", "my_tiny_model")


@pytest.mark.parametrize("command", [words for words in commands() if words[0] != "train"], ids=" ".join)
def test_options_of_other_commands_exist(command, capsys):
    assert cli.main([command[0], "--help"]) == 0
    known = capsys.readouterr().out
    assert all(word in known for word in command if word.startswith("--"))


def test_the_slurm_job_trains_and_when_submitted_again_resumes(words_of, capsys):
    words = words_of(fenced("bash"))
    assert words[:1] + words[words.index("--rdzv-endpoint") :][:4] == [
        "torchrun", "--rdzv-endpoint", "first:29500", "-m", "groupwise",
    ]  # fmt: skip
    command, *options = words[words.index("groupwise") + 1 :]
    assert command == "train"
    (words_of.shared / "text.json").write_text(
        json.dumps({"task": {"data": "d", "rewards": [{"name": "exact"}]}, "model": {"path": "m"}})
    )
    assert cli.main(["config", *options]) == 0
    cfg = json.loads(capsys.readouterr().out)
    assert cfg["engine"] == "fsdp"
    folder = Path(cfg["run_dir"])
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    assert words_of(fenced("bash"))[-2:] == ["resume", str(folder)]


def test_the_ray_job_searches_and_when_started_again_goes_on(words_of):
    job = yaml.safe_load(fenced("yaml"))
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    shell, flag, script = shlex.split(job["spec"]["entrypoint"])
    assert (shell, flag) == ("bash", "-c")
    program, command, *options = words_of(script)
    assert (program, command) == ("groupwise", "evolve")
    known = set(re.findall(r"--[a-z-]+", evolve_command.__doc__)) | {"--run-dir"}
    assert {word for word in options if word.startswith("--")} <= known
    folder = Path(options[options.index("--run-dir") + 1])
    folder.mkdir()
    (folder / "population.json").write_text("{}")
    assert words_of(script)[1:3] == ["resume", str(folder)]


def test_every_pod_has_the_disk_that_it_mounts():
    cluster = yaml.safe_load(fenced("yaml"))["spec"]["rayClusterSpec"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        pod = group["template"]["spec"]
        mounted = {mount["name"] for container in pod["containers"] for mount in container["volumeMounts"]}
        assert mounted == {volume["name"] for volume in pod["volumes"]}
