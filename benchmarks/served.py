"""A vLLM server generates for training: SmolLM2-135M with LoRA on the sums of ``text_learn.py``, in float32.

python benchmarks/served.py --python .venv-vllm/bin/python      half an hour; writes results/served.json
"""

import argparse
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import smollm2
import text_learn

import groupwise as gw

RESULTS = Path(__file__).parent / "results" / "served.json"
TOKENS = 4_000
# vLLM 0.32 dies on CPUs where the prompt of a request with a seed is read in parts (CPU Generator does not use offset)
WHOLE_PROMPTS = ["--no-enable-chunked-prefill", "--max-num-batched-tokens", "8192"]
ON_CPU = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1"}


def learn(model: Path, folder: Path, seed: int, python: str) -> list[dict[str, Any]]:
    """Metrics of every iteration."""
    train, held_out = text_learn.questions()
    run = gw.train(
        gw.TextTask(train, reward=text_learn.exact_sum, eval_data=held_out, chat="never"),
        gw.GRPOCfg(**text_learn.ALGORITHM),
        model=gw.ModelCfg(path=str(model), precision="float32"),
        seed=seed,
        run_dir=folder / "run",
        generation={
            "name": "server",
            "python": python,
            "args": ["--enforce-eager", "--max-model-len", "256", *WHOLE_PROMPTS],
        },
        **text_learn.SETTINGS | {"total_steps": TOKENS},
    )
    return run.metrics()


def summary(metrics: Sequence[dict[str, Any]], seed: int) -> dict[str, Any]:
    """What the docs say of a run."""

    def mean(name: str) -> float:
        return round(fmean(entry[name] for entry in metrics), 2)

    return {
        "seed": seed,
        "curve": [[entry["env_steps"], entry["eval/return_mean"]] for entry in metrics if "eval/return_mean" in entry],
        "training": [[entry["env_steps"], round(entry["rollout/return_mean"], 4)] for entry in metrics],
        "sampler_kl_max": max(entry["rollout/sampler_kl"] for entry in metrics),
        "seconds": {name: mean(f"time/{name}_seconds") for name in ("collect", "update")}
        | {"sync": mean("rollout/sync_seconds")},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", required=True, help="Python of an environment with vLLM")
    parser.add_argument("--model", type=Path, default=Path("smollm2"), help="made if it is not there")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    smollm2.make(options.model)
    os.environ |= ON_CPU
    with tempfile.TemporaryDirectory() as folder:
        metrics = learn(options.model, Path(folder), options.seed, options.python)
    RESULTS.write_text(json.dumps(summary(metrics, options.seed), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
