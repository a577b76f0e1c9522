"""A damaged checkpoint: the newest one before it that is whole is used, and why is said."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from run_folders import logged

import groupwise as gw
from groupwise.training.checkpoint import (
    Checkpoint,
    Identity,
    load_checkpoint,
    saved_counts,
    serialize,
    write_checkpoint,
)

HERE = Identity("CartPole-v1", "Box(4,)", "Discrete(2)")
PPO = gw.PPOCfg(num_steps=16, num_epochs=1, minibatch_size=64)


def saved(folder: Path, number: int, keep: int = 3) -> None:
    checkpoint = Checkpoint({"weight": torch.full((2,), float(number))}, {"env_steps": number})
    write_checkpoint(folder, serialize(checkpoint), HERE, keep)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> gw.Run:
    """A checkpoint after each of its five iterations; the last three stay."""
    return gw.train(
        "CartPole-v1", PPO, num_envs=4, total_steps=320, checkpoint_interval=64, speed="off", seed=3,
        evaluation={"interval": 128, "episodes": 1}, logging={"progress": "none"},
        run_dir=tmp_path_factory.mktemp("runs") / "trained",
    )  # fmt: skip


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_the_last_ones_stay(keep: int, tmp_path: Path):
    for number in range(1, 6):
        saved(tmp_path / "latest", number, keep)
    assert names(tmp_path) == {"latest", "latest.1", "latest.2"} - {f"latest.{n}" for n in range(keep, 3)}
    for age, name in enumerate(sorted(names(tmp_path))):
        assert load_checkpoint(tmp_path / name, HERE).state == {"env_steps": 5 - age}
    saved(tmp_path / "latest", 6, keep=1)  # a lower setting holds at once
    assert names(tmp_path) == {"latest"}


def flip(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "flipped": (lambda folder: flip(folder / "policy.safetensors"), "policy.safetensors is damaged: its SHA-256"),
    "cut": (lambda folder: os.truncate(folder / "state.json", 5), "state.json is"),
    "no tensors": (lambda folder: (folder / "algorithm.safetensors").unlink(), "algorithm.safetensors is missing"),
    "no manifest": (lambda folder: (folder / "manifest.json").unlink(), "manifest.json is missing"),
    "swapped": (lambda folder: shutil.copy(f"{folder}.1/policy.safetensors", folder), "policy.safetensors is damaged"),
    "missing": (shutil.rmtree, "latest is missing"),
}


@pytest.mark.parametrize("damage", list(DAMAGES))
def test_the_one_before_is_loaded_and_why_is_said(
    damage: str, trained: gw.Run, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    folder = Path(shutil.copytree(trained.path / "checkpoints", tmp_path / "checkpoints")) / "latest"
    change, why = DAMAGES[damage]
    change(folder)
    assert load_checkpoint(folder).state["env_steps"] == 256
    [warning] = caplog.messages
    assert why in warning
    assert warning.endswith(f"using {folder}.1 instead")


@pytest.mark.parametrize("damage", ["cut", "missing"])
def test_a_run_resumes_from_the_one_before_and_ends_the_same(
    damage: str, trained: gw.Run, tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
):
    path = Path(shutil.copytree(trained.path, tmp_path / "run"))
    DAMAGES[damage][0](path / "checkpoints" / "latest")
    run = gw.resume(path)
    assert len(caplog.messages) == 1
    assert "resuming from step 256 of 320" in capsys.readouterr().err
    assert logged(path) == logged(trained.path)
    for name, weight in trained.policy.state_dict().items():
        assert torch.equal(run.policy.state_dict()[name], weight)


def test_the_one_before_may_be_damaged_too(trained: gw.Run, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    path = Path(shutil.copytree(trained.path, tmp_path / "run"))
    for name in ("latest", "latest.1"):
        flip(path / "checkpoints" / name / "state.json")
    assert gw.evaluate(path, 1).episodes == 1
    assert "latest/state.json is" in caplog.text
    assert "latest.1/state.json is" in caplog.text
    assert saved_counts(path / "checkpoints" / "latest")["steps"] == 192
    flip(path / "checkpoints" / "latest.2" / "policy.safetensors")
    before = logged(path)
    with pytest.raises(gw.errors.CheckpointError, match=r"latest/state.*latest\.1/state.*latest\.2/policy.*fix: "):
        gw.resume(path)
    assert logged(path) == before


@pytest.mark.parametrize("stopped", ["total_steps", "killed"])
def test_a_run_whose_checkpoints_are_gone_does_not_begin_again(stopped: str, trained: gw.Run, tmp_path: Path):
    path = Path(shutil.copytree(trained.path, tmp_path / "run"))
    shutil.rmtree(path / "checkpoints")
    if stopped == "killed":
        (path / "summary.json").unlink()
    before = (path / "metrics.jsonl").read_bytes()
    with pytest.raises(
        gw.errors.RunFolderError, match=r"trained until step 320, but there is no checkpoint in .*fix: "
    ):
        gw.resume(path)
    assert (path / "metrics.jsonl").read_bytes() == before


def test_settings_that_were_changed_by_hand_are_noticed(trained, tmp_path, caplog):
    path = Path(shutil.copytree(trained.path, tmp_path / "run"))
    tree = json.loads((path / "config.json").read_text())
    was = tree["algorithm"]["learning_rate"]
    tree["seed"], tree["algorithm"]["learning_rate"], tree["env"]["kwargs"] = 4, 0.5, {"sutton_barto_reward": True}
    (path / "config.json").write_text(json.dumps(tree))
    gw.resume(path, total_steps=384)
    [warning] = caplog.messages
    assert f"algorithm.learning_rate from {was!r} to 0.5" in warning
    assert "seed from 3 to 4" in warning
    assert "env.kwargs.sutton_barto_reward from None to True" in warning
    caplog.clear()
    gw.resume(path, total_steps=448)
    assert caplog.messages == []
