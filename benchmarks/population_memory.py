"""Memory of a population of language models with adapters that train in one process, against one model.

Members train LoRA adapters on the model of ``benchmarks/smollm2.py``; learning rate and group size are searched. Peaks are of
the process that trains.

    python benchmarks/smollm2.py smollm2
    python benchmarks/population_memory.py smollm2
"""

import argparse
import json
import multiprocessing
import tempfile
import time
from pathlib import Path
from typing import Any

import groupwise as gw

SEARCH = {"algorithm.learning_rate": {"min": 1e-5, "max": 1e-3, "log": True}, "algorithm.group_size": [2, 4]}
PROMPTS = ["Count to five:", "Name a colour:", "Say hello:", "Spell cat:"]
HELD_OUT = ["Count to ten:", "Name a city:"]
TOKENS = 40


def digits(completions: list[str], **columns: object) -> list[float]:
    return [sum(map(str.isdigit, text)) / max(1, len(text)) for text in completions]


def common(model: str) -> dict[str, Any]:
    return {"model": model, "lora": {"r": 16}, "num_prompts": 2, "sampling": {"max_new_tokens": 8}, "device": "cpu"}


def task() -> gw.TextTask:
    return gw.TextTask(PROMPTS, reward=digits, eval_data=HELD_OUT)


def single(model: str, folder: Path) -> None:
    gw.train(task(), {"group_size": 4}, total_steps=TOKENS, run_dir=folder, **common(model))


def peak(folder: Path) -> float:
    return float(json.loads((folder / "summary.json").read_text())["peak_memory_mib"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        alone = multiprocessing.get_context("spawn").Process(target=single, args=(args.model, Path(scratch, "single")))
        alone.start()
        alone.join()
        start = time.perf_counter()
        population = gw.evolve(
            task(),
            {"group_size": 4},
            search=SEARCH,
            population=4,
            rounds=args.rounds,
            round_steps=TOKENS,
            episodes=2,
            workers=1,
            run_dir=Path(scratch, "population"),
            **common(args.model),
        )
        seconds = time.perf_counter() - start
        one, four = peak(Path(scratch, "single")), max(map(peak, population.path.glob("members/*")))
    print(json.dumps({"one_mib": one, "four_mib": four, "ratio": four / one, "seconds": round(seconds, 1)}))


if __name__ == "__main__":
    main()
