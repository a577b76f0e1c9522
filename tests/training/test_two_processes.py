"""Two processes train one policy, and one of them writes the run folder."""

import json
import time

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
import json
from pathlib import Path
import groupwise as gw

class Share(gw.Callback):
    seen = []

    def on_rollout_end(self, trainer, rollout):
        self.seen += rollout["obs"][:, :-1].flatten(0, 1).tolist()

share = Share()
cfg = gw.config.BCCfg(data="demos", holdout=0.2, num_steps=16, minibatch_size=None)
fields = {"num_envs": 4, "total_steps": 256, "policy": {"normalize_obs": True}}
fields |= {"evaluation": {"episodes": 2}, "logging": {"progress": "none"}}
run = gw.train("CartPole-v1", cfg, run_dir="run", callbacks=[share], **fields)
weights = {name: tensor.tolist() for name, tensor in run.policy.state_dict().items()}
Path(f"{run.algorithm.engine.rank}.json").write_text(json.dumps([weights, share.seen]))
"""


FAILING = """
import os
import groupwise as gw

class Failing(gw.Callback):
    def on_rollout_end(self, trainer, rollout):
        if os.environ["RANK"] == "1":
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
        while os.environ["RANK"] == "1" and not Path("error").exists():
            time.sleep(0.05)

settings = {"num_envs": 4, "total_steps": 256, "ddp_timeout": 2, "logging": {"progress": "none"}}
try:
    gw.train("CartPole-v1", gw.PPOCfg(num_steps=16), run_dir="run", callbacks=[Stalling()], **settings)
except RuntimeError as error:
    if os.environ["RANK"] == "0":
        Path("error").write_text("\\n".join([str(error), *getattr(error, "__notes__", ())]))
os._exit(0)
"""


CLI = """
import sys
from groupwise.cli import main

sys.exit(main(sys.argv[1:]))
"""


def launch(folder, command, total_steps):
    printed = run_script(SCRIPT, command, total_steps, folder=folder, ranks=2)
    return sorted(json.loads(line) for line in printed.splitlines())


def test_one_process_of_the_command_line_reports(tmp_path):
    command = ["train", "CartPole-v1", "--algorithm", "ppo", "--total-steps", "256", "--env.num-envs", "4"]
    options = ["--algorithm.num-steps", "16", "--run-dir", "run", "--logging.progress", "none"]
    printed = run_script(CLI, *command, *options, folder=tmp_path, ranks=2)
    assert printed.count("Done in") == printed.count("Next:") == 1


def test_two_processes_train_one_policy_and_go_on(tmp_path):
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


def test_a_failing_rank_ends_the_run_in_seconds_with_its_traceback(tmp_path):
    begun = time.monotonic()
    with pytest.raises(pytest.fail.Exception, match=r"exit codes \[1, 1\]") as caught:
        run_script(FAILING, folder=tmp_path, ranks=2)
    assert time.monotonic() - begun < 60
    assert "in on_rollout_end" in str(caught.value)
    assert "ValueError: the callback has no idea" in str(caught.value)


def test_a_rank_that_gives_no_answer_ends_the_run_after_ddp_timeout(tmp_path):
    begun = time.monotonic()
    run_script(STALLED, folder=tmp_path, ranks=2)
    assert time.monotonic() - begun < 60
    assert "gave no answer in ddp_timeout=2 s" in (tmp_path / "error").read_text()


@pytest.mark.contrib
def test_two_processes_clone_one_policy_from_disjoint_shares(tmp_path):
    pytest.importorskip("pyarrow")
    demos = record_demos("CartPole-v1", lambda obs: int(obs[2] + obs[3] > 0), episodes=6, out=tmp_path / "demos")
    assert 0.5 * demos.steps > 256  # less than a pass over the data
    run_script(CLONING, folder=tmp_path, ranks=2)
    (weights, first), (other, second) = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    assert weights == other
    assert len(first) == len(second) == 128
    assert set(map(tuple, first)).isdisjoint(map(tuple, second))
    entries = gw.Run.load(tmp_path / "run").metrics()
    assert [entry["env_steps"] for entry in entries] == [128, 256]
    assert "eval/demo_accuracy" in entries[-1]


TWICE = """
import groupwise as gw

fields = {"num_envs": 4, "total_steps": 256, "evaluation": {"episodes": 2}, "logging": {"progress": "none"}}
gw.train("CartPole-v1", gw.PPOCfg(num_steps=16, num_epochs=1, minibatch_size=64), run_dir="run", **fields)
gw.resume("run", 384)
fields["ddp_timeout"] = 600.0
gw.train("CartPole-v1", gw.PPOCfg(num_steps=16, num_epochs=1, minibatch_size=64), run_dir="other", **fields)
"""


def test_a_program_trains_several_times(tmp_path):
    run_script(TWICE, folder=tmp_path, ranks=2)
    steps = [gw.Run.load(tmp_path / name).metrics()[-1]["env_steps"] for name in ("run", "other")]
    assert steps == [384, 256]
