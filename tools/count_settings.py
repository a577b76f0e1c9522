"""How many settings a user faces: leaves of the settings of a run on control by GRPO and PPO, and on texts.

    python tools/count_settings.py [-v]

A choice with parameters of its own, such as ``schedule``, counts as the leaves of its default. A group of settings that is
absent by default, such as ``model.lora``, counts as one.
"""

import sys

from groupwise.config.algorithm import GRPOCfg, PPOCfg
from groupwise.config.base import Cfg
from groupwise.config.run import RunCfg, TextRunCfg

RUNS = {
    "control, grpo": RunCfg(algorithm=GRPOCfg()),
    "control, ppo": RunCfg(algorithm=PPOCfg()),
    "text, grpo": TextRunCfg(algorithm=GRPOCfg()),
}


def leaves(cfg: Cfg, prefix: str = "") -> list[str]:
    """Paths of all settings."""
    found = []
    for name, value in cfg:
        found += leaves(value, f"{prefix}{name}.") if isinstance(value, Cfg) else [f"{prefix}{name}"]
    return found


def main() -> None:
    """Print the counts; with ``-v`` each setting, too."""
    for title, cfg in RUNS.items():
        paths = leaves(cfg)
        print(f"{title}: {len(paths)}")
        if "-v" in sys.argv:
            print("".join(f"  {path}\n" for path in paths))


if __name__ == "__main__":
    main()
