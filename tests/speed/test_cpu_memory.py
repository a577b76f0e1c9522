import os
import platform
import subprocess
import sys

import pytest

import groupwise as gw
from groupwise.speed import install
from groupwise.speed.cpu_memory import keep_freed_memory

HELD = """
from pathlib import Path
import torch
from groupwise.speed.cpu_memory import keep_freed_memory
if {keep}:
    assert keep_freed_memory()
blocks = [torch.ones(2**21) for _ in range(16)]  # 8 MiB each
del blocks
(line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS")]
print(line.split()[1])
"""


def held(keep):
    """KiB of a process that has freed 128 MiB."""
    done = subprocess.run([sys.executable, "-c", HELD.format(keep=keep)], capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="a setting of glibc")
def test_freed_memory_stays_with_the_process(monkeypatch):
    for name in [name for name in os.environ if name.startswith("MALLOC_") or name == "GLIBC_TUNABLES"]:
        monkeypatch.delenv(name)
    assert held(True) - held(False) > 100 * 1024


@pytest.mark.parametrize("name", ["GLIBC_TUNABLES", "MALLOC_ARENA_MAX"])
def test_settings_of_the_environment_stay(name, monkeypatch):
    monkeypatch.setenv(name, "")
    assert not keep_freed_memory()


@pytest.mark.parametrize(("width", "keeps"), [(8, False), (1024, True)])
def test_only_large_networks_keep_memory(width, keeps, monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(install, "keep_freed_memory", lambda: asked.append(True))
    algorithm = gw.PPOCfg(num_steps=8, minibatch_size=16)
    policy = {"hidden_sizes": (width, width)}
    gw.train("CartPole-v1", algorithm, policy=policy, num_envs=2, total_steps=16, run_dir=tmp_path / "run")
    assert bool(asked) == keeps
