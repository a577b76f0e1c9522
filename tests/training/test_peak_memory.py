"""How much memory a run took."""

import subprocess
import sys
from pathlib import Path

import pytest
from forked import run_script

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
    done = subprocess.run([sys.executable, "-c", TAKES_AND_GIVES_BACK], capture_output=True, text=True, check=True)
    before, after = map(float, done.stdout.split())
    assert 50 < before < 2_000
    assert 240 < after - before < 300


DRAWN = """
import sys
import groupwise as gw
quiet = {"evaluation": {"episodes": 2}, "logging": {"progress": "none"}}
gw.train("CartPole-v1", total_steps=100, run_dir=sys.argv[1], **quiet)
print([name for name in ("matplotlib", "scipy") if name in sys.modules])
"""


def test_a_run_draws_its_end_without_matplotlib(tmp_path: Path):
    assert run_script(DRAWN, tmp_path / "run", pictures=True).splitlines()[-1] == "[]"
    assert {"curve.svg", "policy.gif"} <= {path.name for path in (tmp_path / "run").iterdir()}
