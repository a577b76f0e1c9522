"""Exported policies, read by the programs that they are for."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from safetensors.torch import load_file

import groupwise as gw
from groupwise.errors import ConfigError
from groupwise.policies.export import DeterministicActor, export

SPACES: dict[str, tuple[spaces.Space, spaces.Space]] = {
    "image": (spaces.Box(0, 255, (40, 40, 3), np.uint8), spaces.Discrete(3, start=2)),
    "nested": (
        spaces.Dict(
            {
                "arm": spaces.Dict({"joints": spaces.Box(-9, 9, (4,)), "on": spaces.MultiBinary(2)}),
                "goal": spaces.Box(-np.inf, np.inf, (2,), np.float64),
                "hidden": spaces.Box(-1, 1, (2,)),
                "tool": spaces.Discrete(5),
            }
        ),
        spaces.Box(-2, 2, (2,)),
    ),
}
SEEN = ("arm", "goal", "tool")
"""Entries that the actor of "nested" reads."""


SETTINGS = {"image": gw.PolicyCfg(normalize_obs=True), "nested": gw.PolicyCfg(normalize_obs=True, actor_keys=SEEN)}


def policy(kind: str) -> Any:
    """A policy whose actions differ between observations."""
    torch.manual_seed(3)
    made = gw.ActorCritic(*SPACES[kind], SETTINGS[kind])
    for weight in made.parameters():
        torch.nn.init.normal_(weight, std=0.5)
    for statistics in made.obs_normalizer.statistics:
        statistics.shift.fill_(2.0)
        statistics.scale.fill_(1 / 3)
    return made


@pytest.mark.slow
@pytest.mark.parametrize("kind", SPACES)
def test_onnx_takes_the_actions_of_predict(kind: str, tmp_path: Path):
    """From raw observations, single ones of the space as the environment gives them."""
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    made = policy(kind)
    export(made, tmp_path / "p.onnx", to="onnx")
    session = runtime.InferenceSession(tmp_path / "p.onnx")
    names = [put.name for put in session.get_inputs()]
    assert names == {"nested": ["arm.joints", "arm.on", "goal", "tool"]}.get(kind, ["obs"])
    space = SPACES[kind][0]
    space.seed(3)
    actions = []
    for _ in range(20):
        obs = space.sample()
        leaves = [*obs["arm"].values(), *(obs[name] for name in SEEN[1:])] if kind == "nested" else [obs]
        types = {
            "tensor(float)": np.float32,
            "tensor(int64)": np.int64,
            "tensor(uint8)": np.uint8,
            "tensor(int8)": np.int8,
        }
        given = {
            put.name: np.asarray(leaf)[None].astype(types[put.type])
            for put, leaf in zip(session.get_inputs(), leaves, strict=True)
        }
        (found,) = session.run(["action"], given)
        np.testing.assert_allclose(found[0], made.predict(obs), atol=1e-4)
        actions.append(found[0])
    assert np.std(actions, axis=0).max() > 0.1


BOX = spaces.Box(-1, 1, (2,))
CLASHING = spaces.Dict({"action": BOX, "arm": spaces.Dict({"joints": BOX}), "arm.joints": BOX, "clamp": BOX})
"""Entries with the name of the output, of another entry, and of a result inside the model."""


@pytest.mark.slow
def test_entries_may_have_names_that_a_model_has_already(tmp_path: Path):
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    made = gw.ActorCritic(CLASHING, BOX, gw.PolicyCfg(hidden_sizes=(4,), normalize_obs=True))
    export(made, tmp_path / "p.onnx", to="onnx")
    session, obs = runtime.InferenceSession(tmp_path / "p.onnx"), CLASHING.sample()
    leaves = [obs["action"], obs["arm"]["joints"], obs["arm.joints"], obs["clamp"]]
    given = dict(zip(("obs.action", "arm.joints", "obs.arm.joints", "clamp"), leaves, strict=True))
    (found,) = session.run(["action"], {name: leaf[None] for name, leaf in given.items()})
    np.testing.assert_allclose(found[0], made.predict(obs), atol=1e-4)


def test_weights_make_the_same_policy_again(tmp_path: Path):
    made = policy("nested")
    export(made, tmp_path / "new" / "p.safetensors", to="safetensors")
    again = gw.ActorCritic(*SPACES["nested"], SETTINGS["nested"])
    again.load_state_dict(load_file(tmp_path / "new" / "p.safetensors"))
    obs = SPACES["nested"][0].sample()
    np.testing.assert_array_equal(again.predict(obs), made.predict(obs))


def test_what_cannot_be_exported_is_refused_and_nothing_is_overwritten(tmp_path: Path):
    made = policy("image")
    with pytest.raises(
        ConfigError, match=r"ActorCritic cannot be exported to 'transformers'; fix: onnx or safetensors"
    ):
        export(made, tmp_path / "p", to="transformers")
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match=r"link' exists; fix: "):
        export(made, tmp_path / "link", to="safetensors")
    assert not (tmp_path / "elsewhere").exists()
    with pytest.raises(ConfigError, match=r"mine' exists; fix: "):
        export(made, tmp_path / "mine", to="safetensors")
    assert (tmp_path / "mine").read_text() == "mine"


@pytest.mark.slow
def test_a_file_with_other_actions_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("onnxscript")
    forward, calls = DeterministicActor.forward, []

    def wrong_at_first(self: Any, *leaves: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return forward(self, *leaves) + (1 if len(calls) == 1 else 0)

    monkeypatch.setattr(DeterministicActor, "forward", wrong_at_first)
    with pytest.raises(ConfigError, match="ONNX Runtime takes other actions than the policy"):
        export(policy("image"), tmp_path / "p.onnx", to="onnx")
    assert not (tmp_path / "p.onnx").exists()
