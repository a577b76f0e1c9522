"""Checkpoints come back as they were; of damaged ones the newest that is whole is used, and why is said."""

import contextlib
import hashlib
import json
import math
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from run_folders import logged, same_weights
from safetensors.torch import load_file, save_file

import groupwise as gw
from groupwise.cli.main import main
from groupwise.errors import CheckpointError
from groupwise.training import checkpoint as module
from groupwise.training.checkpoint import (
    Checkpoint,
    Identity,
    load_checkpoint,
    load_policy,
    saved_counts,
    serialize,
    write_checkpoint,
)

HERE = Identity("CartPole-v1", "Box(4,)", "Discrete(2)")
FILES = ["policy.safetensors", "algorithm.safetensors", "state.json", "manifest.json"]

plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text(), inner)
        | st.dictionaries(st.integers() | st.text(), inner)
    ),
    max_leaves=20,
)


def saved(folder, number=1, keep=1):
    checkpoint = Checkpoint({"weight": torch.full((2,), float(number))}, {"env_steps": number})
    write_checkpoint(folder, serialize(checkpoint), HERE, keep)
    return folder


@settings(max_examples=settings().max_examples // 3)  # each writes a checkpoint
@given(state=st.dictionaries(st.text(), plain))
def test_plain_data_comes_back_as_it_was(state, tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint") / "latest"
    write_checkpoint(folder, serialize(Checkpoint({}, state)), HERE)
    assert load_checkpoint(folder).state == state


def test_keys_of_every_type_keep_their_tensors(tmp_path):
    one, two, three, four = torch.arange(4.0).unbind()
    state = {1: one, "1": {2: two}, "1/2": three, 1.5: {"$": four}, None: [], False: {"$": "tuple"}}
    state |= {np.int64(7): 1, (np.float32(0.5), 2): 2}
    write_checkpoint(tmp_path / "latest", serialize(Checkpoint({}, {"state": state})), HERE)
    assert load_checkpoint(tmp_path / "latest").state == {"state": state}


def test_arrays_come_back_with_their_layout_and_tied_and_strided_weights_are_saved(tmp_path):
    state = {
        "tensor": torch.arange(24.0).reshape(2, 3, 4).permute(1, 2, 0),
        "array": np.arange(6, dtype=np.int16).reshape(2, 3).T,
        "scalar": np.float32(0.1),
        "part": torch.arange(6.0).reshape(2, 3)[:, :2],
    }
    weight = torch.arange(6.0).reshape(2, 3)
    write_checkpoint(tmp_path / "latest", serialize(Checkpoint({"a": weight, "b": weight, "c": weight.T}, state)), HERE)
    weights, loaded, _ = load_checkpoint(tmp_path / "latest")
    assert torch.equal(weights["b"], weight)
    assert torch.equal(weights["c"], weight.T)
    assert loaded["tensor"].stride() == state["tensor"].stride()  # rounding depends on it
    assert torch.equal(loaded["tensor"], state["tensor"])
    assert (loaded["array"].strides, loaded["array"].dtype) == (state["array"].strides, np.int16)
    assert (loaded["array"] == state["array"]).all()
    assert (type(loaded["scalar"]), loaded["scalar"]) == (np.float32, state["scalar"])
    assert torch.equal(loaded["part"], state["part"])


def test_nothing_but_plain_data_is_saved(tmp_path):
    with pytest.raises(CheckpointError, match="'/callbacks/Mine' is a object"):
        write_checkpoint(tmp_path / "latest", serialize(Checkpoint({}, {"callbacks": {"Mine": object()}})), HERE)
    assert not (tmp_path / "latest").exists()


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["missing", "flipped", "short", "empty", "another shape", "swapped"])
def test_damage_is_found_and_named_and_the_one_before_is_loaded(name, damage, tmp_path, caplog):
    folder = saved(saved(tmp_path / "latest", 1), 2, keep=2)
    path = folder / name
    data, before = path.read_bytes(), (tmp_path / "latest.1" / name).read_bytes()
    if damage == "missing":
        path.unlink()
    elif name == "manifest.json" and damage in ("flipped", "swapped"):
        path.write_bytes(data.replace(b'"sha256": {', b'"sha257": {'))
    else:
        flipped = data[:-1] + bytes([data[-1] ^ 1])
        others = {"short": data[:-3], "empty": b"", "another shape": b"[]", "swapped": before + b" "}
        path.write_bytes(others.get(damage, flipped))
    assert load_checkpoint(folder).state == {"env_steps": 1}
    [warning] = caplog.messages
    assert name in warning
    assert warning.endswith(f"using {folder}.1 instead")
    shutil.rmtree(tmp_path / "latest.1")
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.") + ".*fix: "):
        load_checkpoint(folder)


@pytest.mark.parametrize(("version", "made"), [(99, "later"), (1, "earlier")])
def test_no_checkpoint_and_another_format_are_refused(version, made, tmp_path):
    with pytest.raises(CheckpointError, match=r"no checkpoint at .*latest"):
        load_checkpoint(tmp_path / "latest")
    path = saved(tmp_path / "latest") / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": version}))
    with pytest.raises(CheckpointError, match=rf"{made} version of groupwise \(format {version}, .*fix: train again"):
        load_checkpoint(tmp_path / "latest")


@pytest.mark.parametrize("field", Identity._fields)
def test_checkpoint_of_another_environment_is_refused(field, tmp_path):
    folder = saved(tmp_path / "latest")
    with pytest.raises(CheckpointError, match=f"another environment: its {field} is .* 'other'"):
        load_checkpoint(folder, HERE._replace(**{field: "other"}))
    assert load_checkpoint(folder, HERE).state == {"env_steps": 1}


@pytest.mark.parametrize("weights", [{"weight": torch.zeros(3, 3), "bias": torch.zeros(2)}, {"bias": torch.zeros(2)}])
def test_weights_of_another_architecture_are_refused(weights):
    network = torch.nn.Linear(3, 2)
    before = network.weight.clone()
    with pytest.raises(CheckpointError, match=r"'weight' has shape .* needs \(2, 3\)"):
        load_policy(network, weights, Path("latest"))
    assert torch.equal(network.weight, before)


class PowerCutError(Exception):
    """Stands for a kill in the middle of saving."""


@pytest.mark.parametrize("calls_before", range(3))
@pytest.mark.parametrize("cut", ["replace", "fsync"])
def test_a_kill_while_saving_leaves_a_complete_checkpoint(cut, calls_before, tmp_path, monkeypatch):
    folder = saved(tmp_path / "latest", 1)
    real, calls = {"replace": os.replace, "fsync": os.fsync}[cut], iter(range(100))

    def dies(*args):
        if next(calls) == calls_before:
            raise PowerCutError
        real(*args)

    with monkeypatch.context() as patch:
        patch.setattr(module.os, cut, dies)
        with contextlib.suppress(PowerCutError):
            saved(folder, 2)
    assert not list(tmp_path.glob(".*.partial"))
    loaded = load_checkpoint(folder, HERE)
    assert loaded.policy["weight"].tolist() == [loaded.state["env_steps"]] * 2  # all old or all new, never mixed
    saved(folder, 3)
    assert load_checkpoint(folder, HERE).state == {"env_steps": 3}
    assert [path.name for path in tmp_path.iterdir()] == ["latest"]  # and what the kill left behind is gone


PPO = gw.PPOCfg(num_steps=16, num_epochs=1, minibatch_size=64)


def names(folder):
    return {path.name for path in folder.iterdir()}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A checkpoint after each of its five iterations; the last three stay."""
    return gw.train(
        "CartPole-v1", PPO, num_envs=4, total_steps=320, checkpoint_interval=64, speed="off", seed=3,
        evaluation={"interval": 128, "episodes": 1}, logging={"progress": "none"},
        run_dir=tmp_path_factory.mktemp("runs") / "trained",
    )  # fmt: skip


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_the_last_ones_stay(keep, tmp_path):
    for number in range(1, 6):
        saved(tmp_path / "latest", number, keep)
    assert names(tmp_path) == {"latest", "latest.1", "latest.2"} - {f"latest.{n}" for n in range(keep, 3)}
    for age, name in enumerate(sorted(names(tmp_path))):
        assert load_checkpoint(tmp_path / name, HERE).state == {"env_steps": 5 - age}
    saved(tmp_path / "latest", 6)  # a lower setting holds at once
    assert names(tmp_path) == {"latest"}


def flip(path):
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


def test_a_run_resumes_from_the_one_before_and_ends_the_same(trained, tmp_path, caplog, capsys):
    path = Path(shutil.copytree(trained.path, tmp_path / "run"))
    shutil.rmtree(path / "checkpoints" / "latest")
    run = gw.resume(path, progress="lines")
    assert len(caplog.messages) == 1
    assert "resuming from step 256 of 320" in capsys.readouterr().err
    assert logged(path) == logged(trained.path)
    assert same_weights(run, trained)


def test_the_one_before_may_be_damaged_too(trained, tmp_path, caplog):
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
def test_a_run_whose_checkpoints_are_gone_does_not_begin_again(stopped, trained, tmp_path):
    path = Path(shutil.copytree(trained.path, tmp_path / "run"))
    shutil.rmtree(path / "checkpoints")
    if stopped == "killed":
        (path / "summary.json").unlink()
    before = (path / "metrics.jsonl").read_bytes()
    with pytest.raises(gw.errors.RunFolderError, match=r"until step 320, but there is no checkpoint in .*fix: "):
        gw.resume(path)
    assert (path / "metrics.jsonl").read_bytes() == before


def test_settings_that_were_changed_by_hand_are_noticed(trained, tmp_path, caplog):
    path = Path(shutil.copytree(trained.path, tmp_path / "run"))
    tree = json.loads((path / "config.json").read_text())
    was = tree["algorithm"]["learning_rate"]
    tree["seed"], tree["algorithm"]["learning_rate"], tree["env"]["kwargs"] = 4, 0.5, {"sutton_barto_reward": True}
    (path / "config.json").write_text(json.dumps(tree))
    gw.resume(path, total_steps=384)
    warning, of_scores = sorted(
        caplog.messages, key=lambda message: "checkpoints/best is the best from now on" in message
    )
    assert of_scores.startswith("seed, env.kwargs.sutton_barto_reward changed since the checkpoint")
    assert f"algorithm.learning_rate from {was!r} to 0.5" in warning
    assert "seed from 3 to 4" in warning
    assert "env.kwargs.sutton_barto_reward from None to True" in warning
    caplog.clear()
    gw.resume(path, total_steps=448)
    assert caplog.messages == []


def test_a_setting_that_the_checkpoint_depends_on_is_named_where_it_was_changed_by_hand(tmp_path, capsys, caplog):
    path = tmp_path / "run"
    gw.train("Pendulum-v1", gw.PPOCfg(num_steps=16), num_envs=2, total_steps=64, run_dir=path)
    tree = json.loads((path / "config.json").read_text())
    tree["env"]["kwargs"] = {"g": 3.0}
    (path / "config.json").write_text(json.dumps(tree))
    gw.resume(path, total_steps=128)
    assert "env.kwargs.g from None to 3.0" in caplog.text
    tree = json.loads((path / "config.json").read_text())
    tree["env"]["num_envs"] = 4
    (path / "config.json").write_text(json.dumps(tree))
    capsys.readouterr()
    assert main(["resume", str(path), "--total-steps", "256"]) == 2
    error = capsys.readouterr().err
    assert "env.num_envs cannot change from 2 to 4: the checkpoint" in error
    assert "damaged" not in error


@pytest.mark.parametrize("speed", ["auto", "off"])
@pytest.mark.parametrize(
    ("name", "now", "message"),
    [
        ("optimizer", {"name": "adam", "eps": 1e-2}, r"algorithm\.optimizer\.eps cannot change from 1e-05 to 0\.01"),
        ("optimizer", {"name": "sgd"}, r"algorithm\.optimizer\.name cannot change from 'adam' to 'sgd'"),
        ("kl_coef", 0.1, r"algorithm\.kl_coef cannot change from 0\.0 to 0\.1"),
    ],
)
def test_a_setting_that_would_not_be_used_is_refused(name, now, message, speed, tmp_path):
    """The optimiser's state has its settings, and a run without a KL has no reference."""
    path = tmp_path / "run"
    gw.train("CartPole-v1", "grpo", num_envs=8, total_iterations=1, run_dir=path, speed=speed)
    tree = json.loads((path / "config.json").read_text())
    tree["algorithm"][name] = now
    (path / "config.json").write_text(json.dumps(tree))
    with pytest.raises(gw.errors.ConfigError, match=message):
        gw.resume(path, total_iterations=2)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("command", [["eval"], ["eval", "--json"], ["export", "--to", "safetensors"], ["resume"]])
def test_a_parameter_that_is_not_finite_is_named(command, value, trained, tmp_path, capsys):
    path = Path(shutil.copytree(trained.path, tmp_path / "run"))
    latest = path / "checkpoints" / "latest"
    weights = load_file(latest / "policy.safetensors")
    weights["actor.head.weight"][1, 0] = value
    save_file(weights, latest / "policy.safetensors")
    manifest = json.loads((latest / "manifest.json").read_text())
    manifest["sha256"]["policy.safetensors"] = hashlib.sha256((latest / "policy.safetensors").read_bytes()).hexdigest()
    (latest / "manifest.json").write_text(json.dumps(manifest))
    assert main([command[0], str(path), *command[1:]]) == 2
    error = capsys.readouterr().err
    assert "checkpoints/latest: the parameter 'actor.head.weight' is not finite" in error
    assert "fix: take another checkpoint" in error


def test_a_live_policy_that_is_not_finite_is_not_evaluated(trained):
    run = gw.Run.load(trained.path)
    run.policy.actor.head.weight.data[0, 0] = math.nan
    with pytest.raises(
        gw.errors.DataError, match=r"'actor\.head\.weight' of the policy is not finite.*fix: gw\.Run\.load"
    ):
        gw.evaluate(run, 1)
