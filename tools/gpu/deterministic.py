"""One iteration of each kind under ``torch.use_deterministic_algorithms(True)``, which raises where a kernel is not.

It needs ``CUBLAS_WORKSPACE_CONFIG=:4096:8`` in the environment before CUDA starts.
"""

import tempfile
from pathlib import Path

import repeats
import torch
from shared import TINY, case, chosen

CASES = repeats.CASES if not TINY else ("ppo torch", "grpo text")


def main() -> None:
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    repeats.without_pictures()
    for name in chosen(CASES):
        with case(name) as found, tempfile.TemporaryDirectory() as folder:
            run = repeats.run(name, Path(folder, "run"), iterations=1)
            found["norm"] = run.metrics()[0]["train/grad_norm"]
            found["ok"] = found["norm"] > 0


if __name__ == "__main__":
    main()
