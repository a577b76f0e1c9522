"""How much memory a run took."""

import sys
from pathlib import Path

import pytest
import torch

import groupwise as gw
from groupwise.training import memory


@pytest.mark.skipif(sys.platform == "win32", reason="the system does not say")
def test_peak_holds_what_was_taken_and_given_back():
    before = memory.peak_memory(torch.device("cpu"))
    assert 50 < before["peak_memory_mib"] < 100_000
    more = int(before["peak_memory_mib"] * 2**20 / 4) + 2**26  # elements of 4 bytes: 256 MiB above the peak
    del before
    filled = torch.ones(more)
    del filled
    assert memory.peak_memory(torch.device("cpu"))["peak_memory_mib"] > more * 4 / 2**20


def test_a_system_that_does_not_say_is_left_out(monkeypatch):
    monkeypatch.setattr(memory, "_peak_resident", lambda: None)
    assert memory.peak_memory(torch.device("cpu")) == {}


def test_summary_tells_the_peak_and_a_resume_keeps_the_greater_one(tmp_path: Path, monkeypatch):
    peaks = iter([3 * 2**20, 2 * 2**20, 5 * 2**20])
    monkeypatch.setattr(memory, "_peak_resident", lambda: next(peaks))
    run = gw.train("CartPole-v1", gw.PPOCfg(num_steps=16, num_epochs=1), total_steps=64, run_dir=tmp_path / "r",
                   evaluation={"episodes": 1})  # fmt: skip
    assert run.summary["peak_memory_mib"] == 3.0
    assert gw.resume(run.path, total_steps=200).summary["peak_memory_mib"] == 3.0
    assert gw.resume(run.path, total_steps=400).summary["peak_memory_mib"] == 5.0
