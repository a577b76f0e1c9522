"""Memory: rollouts that cannot fit are refused, the peak is reported, and nothing grows with the iterations."""

import os
import sys
from pathlib import Path

import gymnasium
import numpy as np
import pytest
from forked import run_script
from plain_envs import Plain

import groupwise as gw
from groupwise.training import build as memory_check

QUIET = {"evaluation": {"episodes": 1}, "logging": {"progress": "none"}, "total_steps": 32}


@pytest.mark.parametrize(
    ("algorithm", "env", "message"),
    [
        # 10 ** 12 x (40 + 250) bytes = 290 * 10 ** 12 / 2 ** 30 GiB
        ({"group_size": 10**12}, {}, r"270,083\.5 GiB: algorithm\.group_size=1,000,000,000,000 x at least 290 bytes"),
        # 10 ** 11 * 100 * 40 bytes
        (
            {"name": "ppo", "num_steps": 99},
            {"num_envs": 10**11},
            r"372,529\.0 GiB: env\.num_envs=100,000,000,000 x \(algorithm\.num_steps=99 \+ 1\) x 40",
        ),
    ],
)
def test_impossible_numbers_are_refused_before_anything_is_made(tmp_path, algorithm, env, message):
    with pytest.raises(gw.errors.ConfigError, match=message):
        gw.train(gw.EnvCfg(id="CartPole-v1", **env), algorithm, run_dir=tmp_path / "run", **QUIET)
    assert not (tmp_path / "run").exists()


class Picture(Plain):
    """Shows 30,000 bytes."""

    observation_space = gymnasium.spaces.Box(-1, 1, (7500,), np.float32)


def test_the_size_of_an_observation_counts(tmp_path, monkeypatch):
    # 2 x 17 slots of 30,000 bytes, 8 of the action, 4 each of reward and log-probability, 4 masks and 3 ids, value and
    # next_value: 2 x 17 x 30,052 = 1,021,768 bytes
    settings = {"num_envs": 2, **QUIET}
    monkeypatch.setattr(memory_check, "total_memory", lambda device=None: 1_021_768)
    gw.train(Picture, {"name": "ppo", "num_steps": 16}, run_dir=tmp_path / "run", **settings)
    monkeypatch.setattr(memory_check, "total_memory", lambda device=None: 1_021_767)
    with pytest.raises(gw.errors.ConfigError, match=r"num_envs=2 x \(algorithm\.num_steps=16 \+ 1\) x 30052 bytes"):
        gw.train(Picture, {"name": "ppo", "num_steps": 16}, run_dir=tmp_path / "other", **settings)


def test_the_limit_of_a_container_counts(tmp_path, monkeypatch):
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(memory_check, "_CGROUP_LIMIT", limit)
    physical = memory_check.total_memory()
    limit.write_text("1048576\n")
    assert memory_check.total_memory() == 1048576
    limit.write_text("max\n")
    assert memory_check.total_memory() == physical


def test_groups_of_completions_count_too(tmp_path):
    # 8 x 10 ** 11 x 290 bytes
    match = r"216,066\.8 GiB: num_prompts=8 x algorithm\.group_size=100,000,000,000 x at least 290 bytes"
    task = gw.TextTask(["a"], reward=lambda prompts, completions: [0.0])
    with pytest.raises(gw.errors.ConfigError, match=match):
        gw.train(task, {"group_size": 10**11}, model="absent", run_dir=tmp_path / "run")


ITERATIONS, MIB = (1000, 5) if "TORTURE_ROUNDS" in os.environ else (300, 3)

RUN = """
import os, sys
import groupwise as gw

class Memory(gw.Callback):
    def on_iteration_end(self, trainer, rollout, metrics):
        if trainer.iteration in (START, END):
            pages = int(open("/proc/self/statm").read().split()[1])
            print("MIB", pages * os.sysconf("SC_PAGESIZE") / 2**20, flush=True)
        if trainer.iteration == END:
            trainer.stop("measured")

settings = {"run_dir": sys.argv[1], "callbacks": [Memory()], "logging": {"progress": "none"}, "total_steps": 10**7, "speed": "off"}
"""
CONTROL = """
algorithm = {"grpo": gw.GRPOCfg, "ppo": gw.PPOCfg}[sys.argv[2]](num_steps=16, num_epochs=1, minibatch_size=64)
gw.train("CartPole-v1", algorithm, num_envs=8, max_episode_steps=30, evaluation={"interval": 10**7, "episodes": 1}, **settings)
"""
TEXT = """
sys.path.insert(0, SUPPORT)
from text_runs import save_model
task = gw.TextTask([{"prompt": str(i)} for i in range(60)], reward=lambda completions, **_: [float(len(c)) for c in completions])
gw.train(
    task, gw.GRPOCfg(group_size=2), model=str(save_model(sys.argv[1] + "-model", hidden_size=16, num_hidden_layers=1)),
    num_prompts=1, sampling={"max_new_tokens": 3}, **settings
)
"""


@pytest.mark.torture
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads memory from /proc")
@pytest.mark.parametrize("kind", ["grpo", "ppo", "text"])
def test_memory_does_not_grow_with_iterations(kind, tmp_path):
    support = str(Path(__file__).parents[1] / "support")
    code = f"START, END, SUPPORT = 200, {200 + ITERATIONS}, {support!r}\n{RUN}{TEXT if kind == 'text' else CONTROL}"
    printed = run_script(code, tmp_path / "run", kind)
    start, end = (float(line.split()[1]) for line in printed.splitlines() if line.startswith("MIB"))
    assert end - start < MIB, (start, end)


TAKES_AND_GIVES_BACK = """
import torch
from groupwise.run import peak_memory
before = peak_memory(torch.device("cpu"))["peak_memory_mib"]
filled = torch.ones(2**26)  # 256 MiB
del filled
print(before, peak_memory(torch.device("cpu"))["peak_memory_mib"])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the system does not say")
def test_peak_holds_what_was_taken_and_given_back():
    """In a process of its own: this one may have had a higher peak."""
    before, after = map(float, run_script(TAKES_AND_GIVES_BACK).split())
    assert 50 < before < 2_000
    assert 240 < after - before < 300


DRAWN = """
import sys
import groupwise as gw
quiet = {"evaluation": {"episodes": 2}, "logging": {"progress": "none"}}
gw.train("CartPole-v1", total_steps=100, run_dir=sys.argv[1], **quiet)
print("matplotlib" in sys.modules)
"""


@pytest.mark.slow
def test_a_run_draws_its_end_without_matplotlib(tmp_path):
    assert run_script(DRAWN, tmp_path / "run", pictures=True).splitlines()[-1] == "False"
    assert {"curve.svg", "policy.gif"} <= {path.name for path in (tmp_path / "run").iterdir()}
