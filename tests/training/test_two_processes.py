"""Two processes train one policy, and one of them writes the run folder."""

import json
import subprocess
import sys
from pathlib import Path

import groupwise as gw

SCRIPT = """
import json, sys
import groupwise as gw

fields = {"num_envs": 4, "total_steps": int(sys.argv[2]), "evaluation": {"episodes": 2}, "logging": {"progress": "none"}}
cfg = gw.PPOCfg(num_steps=16, num_epochs=1, minibatch_size=64)
if sys.argv[1] == "train":
    run = gw.train("CartPole-v1", cfg, run_dir="run", checkpoint_interval=128, **fields)
else:
    run = gw.resume("run", int(sys.argv[2]))
checksum = sum(parameter.double().sum().item() for parameter in run.policy.parameters())
print(json.dumps([run.algorithm.engine.rank, checksum]), flush=True)
"""


def launch(folder: Path, command: str, total_steps: int) -> list[list[float]]:
    (folder / "script.py").write_text(SCRIPT)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    out = subprocess.run(
        [*torchrun, "script.py", command, str(total_steps)], cwd=folder, capture_output=True, text=True, timeout=200
    )
    assert out.returncode == 0, out.stderr
    return sorted(json.loads(line) for line in out.stdout.splitlines())


def test_two_processes_train_one_policy_and_go_on(tmp_path: Path):
    first = launch(tmp_path, "train", 256)
    assert [rank for rank, _ in first] == [0, 1]
    assert first[0][1] == first[1][1]  # the same parameters
    run = gw.Run.load(tmp_path / "run")
    # 2 processes x 4 environments x 16 steps = 128 an iteration
    assert [entry["env_steps"] for entry in run.metrics()] == [128, 256]
    assert run.metrics()[0]["rollout/env_steps"] == 128

    second = launch(tmp_path, "resume", 512)
    assert second[0][1] == second[1][1] != first[0][1]
    assert [entry["env_steps"] for entry in run.metrics()] == [128, 256, 384, 512]
