"""How much memory a run took."""

import subprocess
import sys
from pathlib import Path

import pytest

import groupwise as gw
from groupwise.training import running

TAKES_AND_GIVES_BACK = """
import torch
from groupwise.training.running import peak_memory
before = peak_memory(torch.device("cpu"))["peak_memory_mib"]
filled = torch.ones(2**26)  # 256 MiB
del filled
print(before, peak_memory(torch.device("cpu"))["peak_memory_mib"])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the system does not say")
def test_peak_holds_what_was_taken_and_given_back():
    """In a process of its own: this one may have had a higher peak."""
    done = subprocess.run([sys.executable, "-c", TAKES_AND_GIVES_BACK], capture_output=True, text=True, check=True)
    before, after = map(float, done.stdout.split())
    assert 50 < before < 2_000
    assert 240 < after - before < 300


def test_summary_tells_the_peak_and_a_resume_keeps_the_greater_one(tmp_path: Path, monkeypatch):
    peaks = iter([3.0, 2.0, 5.0])
    monkeypatch.setattr(running, "peak_memory", lambda device: {"peak_memory_mib": next(peaks)})
    run = gw.train("CartPole-v1", gw.PPOCfg(num_steps=16, num_epochs=1), num_envs=4, total_steps=64, run_dir=tmp_path / "r",
                   evaluation={"episodes": 1})  # fmt: skip
    assert run.summary["peak_memory_mib"] == 3.0
    assert gw.resume(run.path, total_steps=200).summary["peak_memory_mib"] == 3.0
    assert gw.resume(run.path, total_steps=400).summary["peak_memory_mib"] == 5.0
