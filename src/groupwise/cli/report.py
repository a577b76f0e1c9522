"""``groupwise report``: the page of a run."""

from collections.abc import Sequence
from pathlib import Path

from groupwise.cli.parser import Parser
from groupwise.report.page import write_page
from groupwise.system import show

HELP = """Write a page about a run: did it learn, its health, its groups step by step, its settings.
One file of HTML, without network and server; of failed and running runs, too.

Examples:
  groupwise report runs/<run>
  groupwise report runs/<run> -o page.html
"""


def run(parser: Parser, argv: Sequence[str]) -> None:
    """Write the page of the run in ``argv``, and print its path."""
    parser.add_argument("run", type=Path, help="folder of the run")
    parser.add_argument("-o", "--out", type=Path, metavar="FILE", help="default: report.html in the folder")
    options = parser.read(argv)
    show(f"written: {write_page(options.run, options.out)}")
