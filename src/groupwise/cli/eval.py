"""``groupwise eval``: evaluate the policy of a run."""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from groupwise.cli.parser import Parser, count
from groupwise.system import show

HELP = """Evaluate the policy of a run; print the mean return and its 95 % interval on one line.
A language model completes the held-out prompts: mean reward and pass@k.

Examples:
  groupwise eval runs/<run>
  groupwise eval runs/<run> --episodes 1000 --sampled
  groupwise eval runs/<run> --checkpoint best --video
  groupwise eval runs/<run> --json | jq .return_mean
  groupwise eval runs/<text run> --completions-per-prompt 8
"""


def run(parser: Parser, argv: Sequence[str]) -> int:
    """Evaluate the run in ``argv``; print its score."""
    parser.add_argument("run", type=Path, help="folder of the run")
    parser.add_argument("--episodes", type=count, help="episodes (default: 100) or prompts (default: all)")
    parser.add_argument("--completions-per-prompt", type=count, default=1, help="sampled if more than 1 (default: 1)")
    sampled = "sample actions (default: take the most likely one)"
    parser.add_argument("--sampled", dest="deterministic", action="store_const", const=False, help=sampled)
    parser.add_argument("--seed", type=int, help="of the episodes (default: not used in training)")
    parser.add_argument("--video", action="store_true", help="also record an episode")
    parser.add_choice("--checkpoint", ("latest", "best"), default="latest", help="whose policy (default: latest)")
    parser.add_argument("--json", action="store_true", help="print everything as JSON, with each return")
    options = vars(parser.read(argv))
    as_json = options.pop("json")

    from groupwise.report.folder import RunFolder
    from groupwise.run import evaluate

    run = options.pop("run")
    found = evaluate(run, options.pop("episodes"), **options)
    video = {"video": str(RunFolder(run).video)} if options["video"] else {}
    if as_json:
        print(json.dumps(found.report() | video))
        return 0
    show(found.line())
    _print_tasks(found.report().get("success_by_task", {}))
    if found.episodes == 1:
        print("one episode gives no interval; fix: --episodes 2 or more", file=sys.stderr)
    if video:
        show(f"video: {video['video']}")
    return 0


def _print_tasks(found: Mapping[str, Mapping[str, Any]]) -> None:
    """Print the success of each task, where there are several."""
    width = max(map(len, found), default=0)
    for task, scores in found.items():
        low, high = (100 * end for end in scores["success_ci95"])
        rate = f"success {100 * scores['success_rate']:3.0f} % (95 % interval {low:.0f} to {high:.0f})"
        show(f"{task:<{width}}  {rate} of {scores['episodes']} episodes")
