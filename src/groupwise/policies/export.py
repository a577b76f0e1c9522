"""Trained policies as files for other programs: ONNX, safetensors, and folders of transformers or PEFT."""

import copy
import logging
import os
import warnings
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from safetensors.torch import save
from torch import Tensor, nn

from groupwise import system as files
from groupwise.data.rollout import TensorDict, TensorSpec
from groupwise.data.spaces import leaf_spaces, obs_spec
from groupwise.errors import ConfigError, require_extra
from groupwise.policies.base import Policy

ExportFormat = Literal["onnx", "safetensors", "transformers"]

_CHECKED = 64
"""Observations on which actions are compared."""
_FARTHEST = 10.0
"""Random observations are clipped to this size where their space has no bounds, or larger ones."""
_TOLERANCE = 1e-4
"""Largest difference of an action, absolute and relative."""
_OUTPUT = "action"


def export(policy: Policy, path: Path | str, to: ExportFormat) -> None:
    """Write a trained policy for other programs.

    Args:
        path: a new file; for ``transformers`` a new folder.
        to: ``onnx``: from raw observations to the environment's deterministic actions. Inputs have the names of the observation's
            entries (``outer.inner`` where they are nested; after ``obs.`` where another one or the output has that name),
            or ``obs``; the output is ``action``; the batch has any size.
            ONNX Runtime has to take the same actions on 64 random observations. ``safetensors``: all weights and the
            statistics of normalisers, by the names of ``policy.state_dict()``. ``transformers``: a language model, or with
            LoRA its PEFT adapter.

    Raises:
        ConfigError: ``path`` exists, the policy is of another kind, ONNX cannot express it, or ONNX Runtime takes other actions.
        MissingExtraError: ``onnx`` without the extra ``export``.
    """
    path, save_folder = Path(path), getattr(policy, "save_pretrained", None)
    if os.path.lexists(path):  # what is written would follow a link
        raise ConfigError(f"{str(path)!r} exists; fix: give another path, or remove it")
    if to not in get_args(ExportFormat) or (save_folder is None) == (to == "transformers"):
        fitting = "onnx or safetensors" if save_folder is None else "transformers"
        raise ConfigError(f"{type(policy).__name__} cannot be exported to {to!r}; fix: {fitting}")
    path.parent.mkdir(parents=True, exist_ok=True)
    if save_folder is not None:
        save_folder(path)
    elif to == "onnx":
        files.write(path, _onnx(policy))
    else:
        weights = {name: value.detach().cpu().clone() for name, value in policy.state_dict().items()}
        files.write(path, save(weights))


class DeterministicActor(nn.Module):
    """Maps raw observations, one argument ``[B, ...]`` per leaf of their space, to deterministic actions."""

    def __init__(self, policy: Policy, space: Any) -> None:
        super().__init__()
        self.policy = policy
        self.paths = list(leaf_spaces(space))
        self.names: list[str] = []
        for path in self.paths:
            name = ".".join(path) or "obs"
            while name in (_OUTPUT, *self.names):  # ONNX models refuse equal names
                name = f"obs.{name}"
            self.names.append(name)

    def forward(self, *leaves: Tensor) -> Tensor:
        """Actions ``[B, ...]``."""
        obs: Any = leaves[0]
        if self.paths != [()]:
            obs = TensorDict(batch_size=[])
            for path, leaf in zip(self.paths, leaves, strict=True):
                obs[path] = leaf
        return self.policy.env_action(self.policy.act(obs, deterministic=True).action)


def _onnx(policy: Policy) -> bytes:
    if policy.state_size:
        raise ConfigError(f"{type(policy).__name__} has a memory, which ONNX models lack here; fix: safetensors")
    for package in ("onnx", "onnxscript", "onnxruntime"):
        require_extra(package, "export")
    import onnxruntime

    policy = policy.without_critic().cpu()
    if (space := getattr(policy, "observation_space", None)) is None:
        raise ConfigError(f"{type(policy).__name__} has no observation_space; fix: set it to the environment's")
    actor = DeterministicActor(policy, space).eval()
    found = []
    for leaf in leaf_spaces(copy.deepcopy(space)).values():
        leaf.seed(0)
        batch = torch.from_numpy(np.stack([np.asarray(leaf.sample()) for _ in range(_CHECKED)]))
        spec = obs_spec(leaf)
        assert isinstance(spec, TensorSpec)
        found.append((batch.clamp(-_FARTHEST, _FARTHEST) if batch.is_floating_point() else batch).to(spec.dtype))
    leaves = tuple(found)
    any_size = tuple({0: torch.export.Dim("batch")} for _ in leaves)
    log = logging.getLogger("torch")
    level = log.level
    log.setLevel(logging.ERROR)  # torch's notes about its own exporter
    try:
        with warnings.catch_warnings(action="ignore"), torch.no_grad():
            program = torch.onnx.export(
                actor,
                leaves,
                input_names=actor.names,
                output_names=[_OUTPUT],
                dynamic_shapes=(any_size,),
                verbose=False,
            )
    except (torch.onnx.OnnxExporterError, RuntimeError) as error:
        name = type(policy).__name__  # torch's own text has hundreds of lines
        raise ConfigError(
            f"{name} cannot be exported to ONNX: torch cannot trace its code; fix: safetensors"
        ) from error
    finally:
        log.setLevel(level)
    assert program is not None
    for value in (value for node in program.model.graph for value in node.outputs):
        if value.name in actor.names:  # a result inside, as of clamp
            value.name = f"inner.{value.name}"
    model: bytes = program.model_proto.SerializeToString()

    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    for count in (_CHECKED, 1):  # many observations, and one
        some = [leaf[:count] for leaf in leaves]
        (found,) = session.run(None, {name: leaf.numpy() for name, leaf in zip(actor.names, some, strict=True)})
        with torch.no_grad():
            expected = actor(*some).numpy()
        if not np.allclose(found, expected, rtol=_TOLERANCE, atol=_TOLERANCE):
            raise ConfigError(
                f"ONNX Runtime takes other actions than the policy: {found.ravel()[:4]} in place of {expected.ravel()[:4]}; "
                "fix: safetensors, and please report this"
            )
    return model
