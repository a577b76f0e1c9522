"""``groupwise doctor``: what is wrong with a run, or with the installation, and how to fix it."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from groupwise.cli.parser import Parser
from groupwise.report.health import WORDS, Finding
from groupwise.system import show

HELP = """Name likely causes of a run's trouble, and what to change. Without a run: check the installation, and train for ten
seconds. Exit code 1: there is trouble.

Examples:
  groupwise doctor
  groupwise doctor runs/<run>
"""


def run(parser: Parser, argv: Sequence[str]) -> int:
    """Print what is found; returns the exit code."""
    parser.add_argument("run", type=Path, nargs="?", help="folder of a run")
    options = parser.read(argv)
    return _show_run(options.run) if options.run else _show_installation()


def _show_run(path: Path) -> int:
    from groupwise.report.folder import RunFolder
    from groupwise.report.health import diagnose
    from groupwise.report.page import answer, words_of

    folder = RunFolder.open(path)
    config, metrics = folder.read_config(), folder.read_metrics()
    _, score, sample = words_of(config)
    learned = answer(metrics, score, sample)
    show(f"Did it learn? {learned.word}. {learned.text}")
    sick = [finding for finding in diagnose(folder) if finding.verdict != "good"]
    if not sick:
        show("Nothing looks wrong." if metrics else "There is nothing to look at yet.")
    return _show(sick)


def _show_installation() -> int:
    from groupwise.cli.installation import check

    return _show(check())


def _show(found: Iterable[Finding]) -> int:
    """Print findings as they come; returns the exit code."""
    trouble = False
    for finding in found:
        show(f"{WORDS[finding.verdict]:<8} {finding.title}: {finding.text}")
        if finding.advice:
            show(f"{'':<8} fix: {finding.advice}")
        trouble |= finding.verdict == "bad"
    return int(trouble)
