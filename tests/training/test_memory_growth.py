"""Memory does not grow with the iterations."""

import os
from pathlib import Path

import pytest
from forked import run_script

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
def test_memory_does_not_grow_with_iterations(kind: str, tmp_path: Path):
    support = str(Path(__file__).parents[1] / "support")
    code = f"START, END, SUPPORT = 200, {200 + ITERATIONS}, {support!r}\n{RUN}{TEXT if kind == 'text' else CONTROL}"
    printed = run_script(code, tmp_path / "run", kind)
    start, end = (float(line.split()[1]) for line in printed.splitlines() if line.startswith("MIB"))
    assert end - start < MIB, (start, end)
