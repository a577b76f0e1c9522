"""Whether bfloat16 pays for a VLA policy: an episode of ``robot_images.py``, two ranks, in float32 and under autocast in turns.

``torch.autocast`` rounds the factors of matrix products; weights, gradients and logits stay in float32. Attention is eager
then, since torch's fused attention for CPUs takes longer backwards in bfloat16 than in float32.

    python benchmarks/robot_images_autocast.py
"""

import argparse
import json
import os
import statistics
from pathlib import Path
from typing import Any

import robot_images
import torch

from groupwise.embodied.vla import NewModel

RESULT = Path(__file__).parent / "results" / "robot_images_autocast.json"
SIDES = ("ranks", "ranks, autocast")
SETTINGS = ("two views", "one view")


def use_autocast() -> None:
    """Compute the forward passes of new models under autocast, and with it the backward ones."""
    original = NewModel.forward

    def forward(self: NewModel, obs: Any, queries: torch.Tensor) -> torch.Tensor:
        self.vision.set_attn_implementation("eager")
        self.language.set_attn_implementation("eager")
        with torch.autocast("cpu", torch.bfloat16):
            return original(self, obs, queries).float()

    NewModel.forward = forward  # type: ignore[method-assign]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--side", choices=SIDES)
    parser.add_argument("--setting", choices=SETTINGS)
    args = parser.parse_args()
    if args.side:
        if args.side == "ranks, autocast":
            use_autocast()
        found = robot_images.train(args.side, robot_images.SETTINGS[args.setting])
        if os.environ["RANK"] == "0":
            print("RESULT", json.dumps(found), flush=True)
        return
    rounds: list[Any] = []
    for number in range(args.rounds):
        sides = SIDES if number % 2 == 0 else SIDES[::-1]
        rounds.append({name: {side: robot_images.measure(side, name, __file__) for side in sides} for name in SETTINGS})
        print(json.dumps(rounds[-1]), flush=True)
    result = {"float32 / autocast": {name: ratios(rounds, name) for name in SETTINGS}, "rounds": rounds}
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result["float32 / autocast"], indent=1))


def ratios(rounds: list[Any], name: str) -> dict[str, float]:
    """Medians over the rounds of how much longer an episode takes in float32."""
    pairs = [[each[name][side] for side in SIDES] for each in rounds]
    keys = ("cpu_seconds", "seconds")
    return {key: round(statistics.median(slow[key] / fast[key] for slow, fast in pairs), 2) for key in keys}


if __name__ == "__main__":
    main()
