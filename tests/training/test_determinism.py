"""The same seed gives the same run, again, and by one or two processes."""

import hashlib
from pathlib import Path
from typing import Any

import pytest

import groupwise as gw

pytestmark = pytest.mark.slow
QUIET: Any = {"logging": {"progress": "none"}, "evaluation": {"episodes": 2}}


def digest(run: gw.Run) -> str:
    """Digest of parameters and metrics."""
    found = hashlib.sha256()
    for value in run.policy.state_dict().values():
        found.update(value.numpy().tobytes())
    metrics = [{name: v for name, v in entry.items() if not name.startswith("time/")} for entry in run.metrics()]
    return found.update(repr(metrics).encode()) or found.hexdigest()


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_processes_of_environments(algorithm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    found = set()
    for number, workers in enumerate((1, 2, 2)):
        monkeypatch.setattr("groupwise.envs.make.num_cpus", lambda count=workers: count)
        env = gw.EnvCfg(id="Acrobot-v1", num_envs=8, vectorization="async")
        found.add(digest(gw.train(env, algorithm, total_steps=800, run_dir=tmp_path / str(number), **QUIET)))
    assert len(found) == 1


@pytest.mark.text
def test_texts(tmp_path: Path):
    from text_runs import copying, save_model, train

    model = save_model(tmp_path / "model")
    runs = [train(copying(), model, tmp_path / str(repeat), total_steps=400) for repeat in range(2)]
    assert len(set(map(digest, runs))) == 1
