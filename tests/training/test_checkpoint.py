import contextlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from groupwise.errors import CheckpointError
from groupwise.training import checkpoint as module
from groupwise.training.checkpoint import Checkpoint, Identity, load_checkpoint, load_policy, save_checkpoint

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


def saved(folder: Path, number: float = 1.0) -> Path:
    save_checkpoint(folder, Checkpoint({"weight": torch.full((2,), number)}, {"iteration": int(number)}), HERE)
    return folder


@given(state=st.dictionaries(st.text(), plain))
def test_plain_data_comes_back_as_it_was(state: dict[str, Any], tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("checkpoint") / "latest"
    save_checkpoint(folder, Checkpoint({}, state), HERE)
    assert load_checkpoint(folder).state == state


def test_keys_of_every_type_keep_their_tensors(tmp_path: Path):
    one, two, three, four = torch.arange(4.0).unbind()
    state = {1: one, "1": {2: two}, "1/2": three, 1.5: {"$": four}, None: [], False: {"$": "tuple"}}
    save_checkpoint(tmp_path / "latest", Checkpoint({}, {"state": state}), HERE)
    assert load_checkpoint(tmp_path / "latest").state == {"state": state}


def test_optimizer_state_comes_back_bit_for_bit(tmp_path: Path):
    network = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(network.parameters(), lr=0.1, betas=(0.8, 0.99))
    network(torch.rand(4, 3)).sum().backward()
    optimizer.step()
    save_checkpoint(tmp_path / "latest", Checkpoint(network.state_dict(), {"optimizer": optimizer.state_dict()}), HERE)
    loaded = load_checkpoint(tmp_path / "latest", HERE)

    want, have = optimizer.state_dict(), loaded.state["optimizer"]
    assert have["param_groups"] == want["param_groups"]  # betas is a tuple again
    assert list(have["state"]) == [0, 1]  # and parameters are numbers again
    for index, moments in want["state"].items():
        for name, tensor in moments.items():
            assert torch.equal(have["state"][index][name], tensor)
    assert all(torch.equal(loaded.policy[name], tensor) for name, tensor in network.state_dict().items())


def test_tied_and_strided_weights_are_saved(tmp_path: Path):
    weight = torch.arange(6.0).reshape(2, 3)
    save_checkpoint(tmp_path / "latest", Checkpoint({"a": weight, "b": weight, "c": weight.T}, {}), HERE)
    loaded = load_checkpoint(tmp_path / "latest").policy
    assert torch.equal(loaded["b"], weight)
    assert torch.equal(loaded["c"], weight.T)


def test_arrays_come_back_with_their_layout_since_arithmetic_depends_on_it(tmp_path: Path):
    state = {
        "tensor": torch.arange(24.0).reshape(2, 3, 4).permute(1, 2, 0),
        "array": np.arange(6, dtype=np.int16).reshape(2, 3).T,
        "scalar": np.float32(0.1),
        "part": torch.arange(6.0).reshape(2, 3)[:, :2],
    }
    save_checkpoint(tmp_path / "latest", Checkpoint({}, state), HERE)
    loaded = load_checkpoint(tmp_path / "latest").state
    assert loaded["tensor"].stride() == state["tensor"].stride()
    assert torch.equal(loaded["tensor"], state["tensor"])
    assert loaded["array"].strides == state["array"].strides
    assert loaded["array"].dtype == np.int16
    assert (loaded["array"] == state["array"]).all()
    assert type(loaded["scalar"]) is np.float32
    assert loaded["scalar"] == state["scalar"]
    assert torch.equal(loaded["part"], state["part"])


def test_nothing_but_plain_data_is_saved(tmp_path: Path):
    with pytest.raises(CheckpointError, match="'/callbacks/Mine' is a object"):
        save_checkpoint(tmp_path / "latest", Checkpoint({}, {"callbacks": {"Mine": object()}}), HERE)
    assert not (tmp_path / "latest").exists()


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["missing", "flipped", "short", "empty", "another shape"])
def test_damage_is_found_and_named(name: str, damage: str, tmp_path: Path):
    path = saved(tmp_path / "latest") / name
    data = path.read_bytes()
    if damage == "missing":
        path.unlink()
    elif name == "manifest.json" and damage == "flipped":
        path.write_bytes(data.replace(b'"sha256": {', b'"sha257": {'))
    else:
        middle = len(data) // 2
        flipped = data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
        path.write_bytes({"flipped": flipped, "short": data[:-3], "empty": b"", "another shape": b"[]"}[damage])
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")) as caught:
        load_checkpoint(tmp_path / "latest")
    assert "fix" in str(caught.value)


@pytest.mark.parametrize(("version", "made"), [(99, "later"), (1, "earlier")])
def test_no_checkpoint_and_another_format_are_refused(version: int, made: str, tmp_path: Path):
    with pytest.raises(CheckpointError, match=r"no checkpoint at .*latest"):
        load_checkpoint(tmp_path / "latest")
    path = saved(tmp_path / "latest") / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": version}))
    with pytest.raises(CheckpointError, match=rf"{made} version of groupwise \(format {version}, .*fix: train again"):
        load_checkpoint(tmp_path / "latest")


@pytest.mark.parametrize("field", Identity._fields)
def test_checkpoint_of_another_environment_is_refused(field: str, tmp_path: Path):
    folder = saved(tmp_path / "latest")
    with pytest.raises(CheckpointError, match=f"another environment: its {field} is .* 'other'"):
        load_checkpoint(folder, HERE._replace(**{field: "other"}))
    assert load_checkpoint(folder, HERE).state == {"iteration": 1}


@pytest.mark.parametrize("weights", [{"weight": torch.zeros(3, 3), "bias": torch.zeros(2)}, {"bias": torch.zeros(2)}])
def test_weights_of_another_architecture_are_refused(weights: dict[str, torch.Tensor]):
    network = torch.nn.Linear(3, 2)
    before = network.weight.clone()
    with pytest.raises(CheckpointError, match=r"'weight' has shape .* needs \(2, 3\)"):
        load_policy(network, weights, Path("latest"))
    assert torch.equal(network.weight, before)


class PowerCutError(Exception):
    """Stands for a kill in the middle of saving."""


@pytest.mark.parametrize("calls_before", range(3))
@pytest.mark.parametrize("cut", ["replace", "fsync"])
def test_a_kill_while_saving_leaves_a_complete_checkpoint(
    cut: str, calls_before: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder = saved(tmp_path / "latest", 1.0)
    real, calls = {"replace": os.replace, "fsync": os.fsync}[cut], iter(range(100))

    def dies(*args: Any) -> None:
        if next(calls) == calls_before:
            raise PowerCutError
        real(*args)

    with monkeypatch.context() as patch:
        patch.setattr(module.os, cut, dies)
        with contextlib.suppress(PowerCutError):
            saved(folder, 2.0)
    loaded = load_checkpoint(folder, HERE)
    assert loaded.policy["weight"].tolist() == [loaded.state["iteration"]] * 2  # all old or all new, never mixed
    saved(folder, 3.0)
    assert load_checkpoint(folder, HERE).state == {"iteration": 3}
    assert [path.name for path in tmp_path.iterdir()] == ["latest"]  # and what the kill left behind is gone
