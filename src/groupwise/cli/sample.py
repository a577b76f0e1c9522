"""``groupwise sample``: completions of prompts by a trained language model."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from groupwise.cli.parser import Parser, count
from groupwise.errors import ConfigError
from groupwise.system import show

HELP = """Complete prompts with the language model of a run.

Examples:
  groupwise sample runs/<run> "What is 12 + 7?"
  groupwise sample runs/<run> "What is 12 + 7?" "What is 3 + 4?" --count 4 --checkpoint best
  groupwise sample runs/<run> --messages '[{"role": "user", "content": "What is 12 + 7?"}]'
"""


def run(parser: Parser, argv: Sequence[str]) -> int:
    """Complete the prompts in ``argv``; print the completions."""
    parser.add_argument("run", type=Path, help="folder of the run")
    parser.add_argument("prompts", nargs="+", metavar="PROMPT", help="what to complete")
    parser.add_argument("--messages", action="store_true", help="prompts are lists of messages, in JSON")
    parser.add_argument("--count", type=count, default=1, help="completions of each prompt (default: 1)")
    parser.add_argument("--deterministic", action="store_true", help="take the most likely token each time")
    parser.add_argument("--seed", type=int, default=0, help="of the samples (default: 0)")
    parser.add_choice("--checkpoint", ("latest", "best"), default="latest", help="whose policy (default: latest)")
    options = vars(parser.read(argv))

    from groupwise.run import sample

    prompts, as_messages = options.pop("prompts"), options.pop("messages")
    read = list(map(_messages, prompts)) if as_messages else prompts
    texts = sample(options.pop("run"), read, options.pop("count"), **options)
    show(f"\n{'=' * 20}\n".join(f"\n{'-' * 20}\n".join(of_prompt) for of_prompt in texts))
    return 0


def _messages(word: str) -> Any:
    try:
        messages = json.loads(word)
    except ValueError:
        messages = None
    if isinstance(messages, list):
        return messages
    fix = """'[{"role": "user", "content": "..."}]'"""
    raise ConfigError(f"--messages: {word!r:.80} is no list of messages in JSON; fix: {fix}")
