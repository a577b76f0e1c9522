"""vLLM against native generation at the same settings: SmolLM2-135M, all weights in float32, on the sums of ``text_learn.py``.

    python benchmarks/served.py --python .venv-vllm/bin/python --seeds 0-2      an hour or two; writes results/served.json
    python benchmarks/served.py --report                                        the tables for the docs

The two take turns. Adapters are left out, as vLLM's are slow on CPUs.
"""

import argparse
import json
import os
import re
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from threading import Event, Thread
from typing import Any

import cells as cells_of
import smollm2
import text_learn

import groupwise as gw
from groupwise.cli.train import parse_seeds

RESULTS = Path(__file__).parent / "results" / "served.json"
TOKENS = 4_000
ALGORITHM = text_learn.ALGORITHM | {"learning_rate": 1e-5}
SETTINGS = {name: value for name, value in text_learn.SETTINGS.items() if name != "lora"} | {"total_steps": TOKENS}
# vLLM 0.32 dies on CPUs where the prompt of a request with a seed is read in parts (CPU Generator does not use offset)
WHOLE_PROMPTS = ["--no-enable-chunked-prefill", "--max-num-batched-tokens", "8192"]
ON_CPU = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1"}


class Memory(Thread):
    """The most memory, in MiB, that the processes below this one have held at once."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.most, self.ended = 0.0, Event()

    def run(self) -> None:
        """Look once a second."""
        while not self.ended.wait(1.0):
            self.most = max(self.most, sum(map(_resident, _below(os.getpid()))))


def _below(process: int) -> set[int]:
    """Processes whose parent, or parent's parent, is this one."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
        except OSError:  # it has just ended
            continue
    found, new = set[int](), {process}
    while new:
        found |= new
        new = {child for child, parent in parents.items() if parent in new} - found
    return found - {process}


def _resident(process: int) -> float:
    try:
        status = Path(f"/proc/{process}/status").read_text()
    except OSError:
        return 0.0
    match = re.search(r"VmRSS:\s*(\d+) kB", status)
    return int(match[1]) / 1024 if match else 0.0


def learn(model: Path, seed: int, generation: str, python: str, settings: dict[str, Any]) -> dict[str, Any]:
    """What the docs say of a run."""
    train, held_out = text_learn.questions()
    server = {"name": "server", "python": python, "args": ["--enforce-eager", "--max-model-len", "256", *WHOLE_PROMPTS]}
    memory, began = Memory(), time.perf_counter()
    memory.start()
    with tempfile.TemporaryDirectory() as folder:
        run = gw.train(
            gw.TextTask(train, reward=text_learn.exact_sum, eval_data=held_out, chat="never"),
            gw.GRPOCfg(**ALGORITHM),
            model=gw.ModelCfg(path=str(model), precision="float32"),
            seed=seed,
            run_dir=Path(folder) / "run",
            generation=server if generation == "vllm" else "native",
            **settings,
        )
        metrics = run.metrics()
    memory.ended.set()
    cell = {"generation": generation, "seed": seed, "seconds": round(time.perf_counter() - began)}
    mib = {"learner": run.summary["peak_memory_mib"], "server": round(memory.most) if generation == "vllm" else 0}
    return cell | {"mib": mib} | summary(metrics)


def summary(metrics: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Curves, distances and speed; the first iteration is not timed."""
    timed = metrics[1:]
    tokens = metrics[-1]["env_steps"] - metrics[0]["env_steps"]
    seconds = {name: sum(entry[f"time/{name}_seconds"] for entry in timed) for name in ("collect", "update")}
    return {
        "curve": [[entry["env_steps"], entry["eval/return_mean"]] for entry in metrics if "eval/return_mean" in entry],
        "training": [[entry["env_steps"], round(entry["rollout/return_mean"], 4)] for entry in metrics],
        "sampler_kl_max": max(entry["rollout/sampler_kl"] for entry in metrics),
        "sync_seconds": round(fmean(entry.get("rollout/sync_seconds", 0.0) for entry in timed), 2),
        "tokens_per_second": {name: round(tokens / spent, 2) for name, spent in seconds.items()},
    }


def report(cells: list[dict[str, Any]]) -> None:
    """A line for each run."""
    for cell in sorted(cells, key=lambda cell: (cell["generation"], cell["seed"])):
        curve = ", ".join(f"{score:.1%} at {steps:,}" for steps, score in cell["curve"])
        speed = ", ".join(f"{name} {rate}" for name, rate in cell["tokens_per_second"].items())
        print(
            f"{cell['generation']:7} seed {cell['seed']}: {curve}; tokens/s: {speed}; weights {cell['sync_seconds']} s; "
            f"MiB: {cell['mib']}; sampler_kl {cell['sampler_kl_max']:.0e}; {cell['seconds']} s in all"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", help="Python of an environment with vLLM")
    parser.add_argument("--model", type=Path, default=Path("smollm2"), help="made if it is not there")
    parser.add_argument("--seeds", type=parse_seeds, default=(0,))
    parser.add_argument("--report", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--smallest", action="store_true", help="two iterations, or a few more")
    options = parser.parse_args()
    settings = SETTINGS | ({"total_steps": 400} if options.smallest else {})
    cells = cells_of.load(options.out)
    if options.report:
        report(cells)
        return
    smollm2.make(options.model)
    os.environ |= ON_CPU
    for seed in options.seeds:
        for generation in ("vllm", "native"):
            if any((cell["generation"], cell["seed"]) == (generation, seed) for cell in cells):
                continue
            cells.append(learn(options.model, seed, generation, options.python, settings))
            cells_of.save(options.out, cells)
            print(json.dumps(cells[-1]), flush=True)


if __name__ == "__main__":
    main()
