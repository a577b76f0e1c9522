"""How much memory a run took."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import groupwise as gw
from groupwise.training import memory

TAKES_AND_GIVES_BACK = """
import torch
from groupwise.training.memory import peak_memory
before = peak_memory(torch.device("cpu"))["peak_memory_mib"]
filled = torch.ones(2**26)  # 256 MiB
del filled
print(before, peak_memory(torch.device("cpu"))["peak_memory_mib"])
"""


@pytest.mark.skipif(sys.platform == "win32", reason="the system does not say")
def test_peak_holds_what_was_taken_and_given_back():
    """In a process of its own: this one may have had a higher peak."""
    done = subprocess.run([sys.executable, "-c", TAKES_AND_GIVES_BACK], capture_output=True, text=True, check=True)
    before, after = map(float, done.stdout.split())
    assert 50 < before < 2_000
    assert 240 < after - before < 300


def test_a_system_that_does_not_say_is_left_out(monkeypatch):
    monkeypatch.setattr(memory, "_peak_resident", lambda: None)
    assert memory.peak_memory(torch.device("cpu")) == {}


def test_summary_tells_the_peak_and_a_resume_keeps_the_greater_one(tmp_path: Path, monkeypatch):
    peaks = iter([3 * 2**20, 2 * 2**20, 5 * 2**20])
    monkeypatch.setattr(memory, "_peak_resident", lambda: next(peaks))
    run = gw.train("CartPole-v1", gw.PPOCfg(num_steps=16, num_epochs=1), num_envs=4, total_steps=64, run_dir=tmp_path / "r",
                   evaluation={"episodes": 1})  # fmt: skip
    assert run.summary["peak_memory_mib"] == 3.0
    assert gw.resume(run.path, total_steps=200).summary["peak_memory_mib"] == 3.0
    assert gw.resume(run.path, total_steps=400).summary["peak_memory_mib"] == 5.0
