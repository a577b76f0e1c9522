"""The same seed gives the same run, again, and by one or two processes."""

from pathlib import Path

import pytest
import torch
from run_folders import logged

import groupwise as gw


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_processes_of_environments(algorithm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    runs, quiet = [], {"logging": {"progress": "none"}, "evaluation": {"episodes": 2}}
    for number, workers in enumerate((1, 2, 2)):
        monkeypatch.setattr("groupwise.envs.make.num_cpus", lambda count=workers: count)
        env = gw.EnvCfg(id="Acrobot-v1", num_envs=8, vectorization="async")
        runs.append(gw.train(env, algorithm, total_steps=800, run_dir=tmp_path / str(number), **quiet))
    for other in runs[1:]:
        assert logged(other) == logged(runs[0])
        weights = other.policy.state_dict()
        assert all(torch.equal(weights[name], value) for name, value in runs[0].policy.state_dict().items())
