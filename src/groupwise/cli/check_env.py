"""``groupwise check-env``: what an environment supports."""

import json
from collections.abc import Sequence

from groupwise.cli.parser import Parser
from groupwise.system import show

HELP = """Check what an environment supports: shared starts of groups and their cost, randomness, spaces, speed.
Exit code 1: GRPO cannot train on it.

Examples:
  groupwise check-env Ant-v5
  groupwise check-env Ant-v5 --env.kwargs '{"healthy_reward": 0.5}' --json
  groupwise check-env Mine-v0 --plugin my_env.py
  groupwise check-env ALE/Pong-v5 --env.num-random-noops 30

Options: --json, and settings of the environment:
"""


def run(parser: Parser, argv: Sequence[str]) -> int:
    """Check the environment in ``argv``; 1 if GRPO cannot train on it."""
    from groupwise.cli.options import read_env
    from groupwise.config.run import EnvCfg

    words = [word for word in argv if word != "--json"]
    settings = [f"env.{name}" for name in EnvCfg.model_fields if name not in ("id", "num_envs")]
    env = read_env(words, prog="groupwise check-env", description=HELP, only=settings, flags=("json",))

    from groupwise.check import check_env

    report = check_env(env)
    show(json.dumps(report.to_dict()) if "--json" in argv else report)
    return int(report.training.value is None)
