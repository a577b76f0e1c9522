"""``groupwise export``: a trained policy as a file for other programs."""

from collections.abc import Sequence
from pathlib import Path

from groupwise.cli.parser import Parser
from groupwise.system import show

HELP = """Write a trained policy for other programs.

  groupwise export runs/<run> --to onnx             a policy of an environment, from observation to action
  groupwise export runs/<run> --to safetensors      its weights
  groupwise export runs/<run> --to transformers     a language model, or its PEFT adapter
"""
FILES = {"onnx": "policy.onnx", "safetensors": "policy.safetensors", "transformers": "transformers"}
"""Formats, and where in the run folder they go by default."""


def run(parser: Parser, argv: Sequence[str]) -> None:
    """Export the policy of the run in ``argv``."""
    parser.add_argument("run", type=Path, help="folder of the run")
    parser.add_choice("--to", tuple(FILES), required=True)
    parser.add_argument("--out", type=Path, metavar="PATH", help="new file or folder (default: in the run's folder)")
    parser.add_choice("--checkpoint", ("latest", "best"), default="latest", help="whose policy (default: latest)")
    options = parser.read(argv)

    from groupwise.policies.export import export
    from groupwise.run import Run

    out = options.out or options.run / FILES[options.to]
    export(Run.load(options.run, checkpoint=options.checkpoint).policy, out, options.to)
    show(f"written: {out}")
