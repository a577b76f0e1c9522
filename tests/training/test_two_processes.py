"""Two processes train one policy, and one of them writes the run folder."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from forked import run_script

import groupwise as gw
from groupwise.embodied.demos import record_demos

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

CLONING = """
import json, sys
from pathlib import Path
import groupwise as gw

class Share(gw.Callback):
    seen = []

    def on_rollout_end(self, trainer, rollout):
        self.seen += rollout["obs"][:, :-1].flatten(0, 1).tolist()

share = Share()
cfg = gw.config.BCCfg(data="demos", holdout=0.2, num_steps=16, minibatch_size=None)
fields = {"num_envs": int(sys.argv[2]), "total_steps": 256, "policy": {"normalize_obs": True}}
fields |= {"evaluation": {"episodes": 2}, "logging": {"progress": "none"}}
run = gw.train("CartPole-v1", cfg, run_dir=sys.argv[1], callbacks=[share], **fields)
weights = {name: tensor.tolist() for name, tensor in run.policy.state_dict().items()}
rank = run.algorithm.engine.rank
Path(f"{sys.argv[1]}-{rank}.json").write_text(json.dumps([weights, share.seen]))
"""


FAILING = """
import os, time
from pathlib import Path
import groupwise as gw

class Failing(gw.Callback):
    def on_rollout_end(self, trainer, rollout):
        if os.environ["RANK"] == "1":
            Path("failed").write_text(str(time.time()))
            raise ValueError("the callback has no idea")

settings = {"num_envs": 4, "total_steps": 256, "logging": {"progress": "none"}}
gw.train("CartPole-v1", gw.PPOCfg(num_steps=16), run_dir="run", callbacks=[Failing()], **settings)
"""


STALLED = """
import os, time
from pathlib import Path
import groupwise as gw

class Stalling(gw.Callback):
    def on_rollout_end(self, trainer, rollout):
        while os.environ["RANK"] == "1" and not Path("said").exists():
            time.sleep(0.05)

settings = {"num_envs": 4, "total_steps": 256, "ddp_timeout": 2, "logging": {"progress": "none"}}
try:
    gw.train("CartPole-v1", gw.PPOCfg(num_steps=16), run_dir="run", callbacks=[Stalling()], **settings)
except RuntimeError as error:
    if os.environ["RANK"] == "0":
        Path("said").write_text("\\n".join([str(error), *getattr(error, "__notes__", ())]))
os._exit(0)
"""


def torchrun(folder: Path, processes: int, *command: str) -> str:
    """Output of the processes."""
    out = attempt(folder, processes, *command)
    assert out.returncode == 0, out.stderr
    return out.stdout


def attempt(folder: Path, processes: int, *command: str) -> subprocess.CompletedProcess[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    return subprocess.run([*launcher, *command], cwd=folder, capture_output=True, text=True, timeout=200)


def launch(folder: Path, command: str, total_steps: int) -> list[list[float]]:
    printed = run_script(SCRIPT, command, total_steps, folder=folder, ranks=2)
    return sorted(json.loads(line) for line in printed.splitlines())


def test_one_process_of_the_command_line_reports(tmp_path: Path):
    command = ["-m", "groupwise", "train", "CartPole-v1", "--algorithm", "ppo", "--total-steps", "256"]
    options = ["--env.num-envs", "4", "--algorithm.num-steps", "16", "--run-dir", "run", "--logging.progress", "none"]
    printed = torchrun(tmp_path, 2, *command, *options)
    assert printed.count("Done in") == printed.count("Next:") == 1


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


def test_a_failing_rank_ends_the_run_in_seconds_with_its_traceback(tmp_path: Path):
    (tmp_path / "script.py").write_text(FAILING)
    out = attempt(tmp_path, 2, "script.py")
    assert out.returncode != 0
    assert time.time() - float((tmp_path / "failed").read_text()) < 60  # 20 s on a quiet machine
    assert "in on_rollout_end" in out.stderr
    assert "ValueError: the callback has no idea" in out.stderr


def test_a_rank_that_gives_no_answer_ends_the_run_after_ddp_timeout(tmp_path: Path):
    begun = time.monotonic()
    run_script(STALLED, folder=tmp_path, ranks=2)
    assert time.monotonic() - begun < 60
    assert "gave no answer in ddp_timeout=2 s" in (tmp_path / "said").read_text()


@pytest.mark.contrib
def test_two_processes_clone_one_policy_from_disjoint_shares(tmp_path: Path):
    pytest.importorskip("pyarrow")
    demos = record_demos("CartPole-v1", lambda obs: int(obs[2] + obs[3] > 0), episodes=6, out=tmp_path / "demos")
    assert 0.5 * demos.steps > 256  # less than a pass over the data
    run_script(CLONING, "two", 4, folder=tmp_path, ranks=2)
    run_script(CLONING, "one", 8, folder=tmp_path)
    (weights, first), (other, second), (alone, whole) = (
        json.loads((tmp_path / name).read_text()) for name in ("two-0.json", "two-1.json", "one-0.json")
    )
    assert weights == other
    assert len(first) == len(second) == 128
    shares = [set(map(tuple, steps)) for steps in (first, second, whole)]
    assert shares[0].isdisjoint(shares[1])
    assert shares[0] | shares[1] == shares[2]
    assert near(weights, alone)  # what one process learns from both shares
    entries = gw.Run.load(tmp_path / "two").metrics()
    assert [entry["env_steps"] for entry in entries] == [128, 256]
    assert "eval/demo_accuracy" in entries[-1]


def near(one: Any, other: Any) -> bool:
    """Whether nested numbers agree up to rounding."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(near(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(near, one, other))
    return bool(one == pytest.approx(other, rel=1e-4, abs=1e-5))
