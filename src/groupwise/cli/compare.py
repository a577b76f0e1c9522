"""``groupwise compare``: what it prints of methods that were compared."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from groupwise.cli.parser import Parser
from groupwise.comparison.compare import compare
from groupwise.comparison.results import Comparison, Table, tables, write_page
from groupwise.config.load import read_json
from groupwise.config.run import EvaluationMetric
from groupwise.errors import ConfigError
from groupwise.system import printable
from groupwise.system import show as write

HELP = """Compare methods by their runs. Runs that differ only in their seed are one method. One table per environment.
Scores are interquartile means (IQM) over runs with 95 % bootstrap intervals.

Examples:
  groupwise compare runs/grpo_seeds runs/ppo_seeds             folders of train --seeds
  groupwise compare runs/*                                     or single runs
  groupwise compare new=runs/a old=runs/b                      methods with your names
  groupwise compare runs/* --out comparison                    comparison.json and comparison.png
  groupwise compare runs/* --html comparison.html              a page of one file
  groupwise compare runs/* --json | jq '.environments[].methods[].iqm'
"""


def run(parser: Parser, argv: Sequence[str]) -> None:
    """Compare the runs in ``argv``; print tables or JSON, and write files with ``--out``."""
    parser.add_argument("runs", nargs="+", metavar="[NAME=]RUNS", help="folder of a run, or one that holds several")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="write comparison.json and comparison.png there")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page with curves and tables there")
    parser.add_argument("--json", action="store_true", help="print everything as JSON, curves too")
    parser.add_argument(
        "--finished-only", action="store_true", help="leave out unfinished and damaged runs, and say so"
    )
    scores = 'scores that count as 0 and 1, as {"CartPole-v1": [20, 500]}: compares over all environments, too'
    parser.add_argument("--reference", type=Path, metavar="FILE.json", help=scores)
    parser.add_choice("--metric", get_args(EvaluationMetric), default="return", help="the score (default: return)")
    options = parser.read(argv)
    reference = None if options.reference is None else read_reference(options.reference)
    named: dict[str | None, list[Path]] = {}
    for name, path in map(parse_word, options.runs):
        named.setdefault(name, []).append(path)
    found = compare(named, reference=reference, metric=options.metric, finished_only=options.finished_only)
    if options.out is not None:
        found.save(options.out)
    if options.html is not None:
        write_page(found, options.html)
    if options.json:
        write(json.dumps(found.report(), allow_nan=False))
        return
    show(found)
    if options.out is not None:
        write(f"written: {options.out / 'comparison.json'}, {options.out / 'comparison.png'}")
    if options.html is not None:
        write(f"written: {options.html}")


def parse_word(word: str) -> tuple[str | None, Path]:
    """Name (or None) and path of ``PATH`` or ``NAME=PATH``."""
    name, equals, path = word.partition("=")
    if not equals or "/" in name or Path(word).exists():  # a pattern may have "=" in it
        return None, Path(word)
    if not name or not path:
        raise ConfigError(f"{word!r}: expected a folder of runs, or NAME=FOLDER")
    return name, Path(path)


def read_reference(path: Path) -> dict[str, tuple[float, float]]:
    """Reference scores by environment."""
    try:
        return {name: (float(low), float(high)) for name, (low, high) in read_json(path).items()}
    except (ValueError, TypeError) as error:
        expected = 'expected JSON like {"CartPole-v1": [20, 500]}, the scores that count as 0 and 1'
        raise ConfigError(f"{path}: {expected}; {error}") from error


def show(found: Comparison) -> None:
    """Print tables of each environment, of all together, and the notes."""
    for table in tables(found):
        _print(table)
    for note in found.notes:
        write(f"note: {note}")


def _print(table: Table) -> None:
    rows = [[*map(printable, row)] for row in (table.heads, *table.rows)]
    write(f"\n{table.title}" if table.title else "")
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        write("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
