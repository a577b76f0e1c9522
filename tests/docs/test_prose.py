"""Markdown prose is at most 100 columns wide. Tables, code blocks and the targets of links may be wider."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WIDTH = 100
PAGES = [
    *sorted(ROOT.glob("*.md")),
    ROOT / "benchmarks" / "README.md",
    *(page for page in sorted((ROOT / "docs").rglob("*.md")) if not {"generated", "_build"} & set(page.parts)),
]


def prose(text: str) -> Iterator[tuple[int, str]]:
    """Number and text of each line that is not a table, a comment or a part of a code block."""
    fence = ""
    for number, line in enumerate(text.splitlines(), start=1):
        mark = re.match(r" *(`{3,}|~{3,})", line)
        if mark and (not fence or line.strip() == fence):
            fence = "" if fence else mark[1]
        elif not fence and not line.startswith(("|", "<!--")):
            yield number, line


def too_wide(text: str) -> list[int]:
    return [number for number, line in prose(text) if len(re.sub(r"\]\([^)]*\)", "]", line)) > WIDTH]


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_prose_is_wrapped(page: Path) -> None:
    assert too_wide(page.read_text(encoding="utf-8")) == []


def test_wide_prose_is_found_and_nothing_else() -> None:
    wide = "x" * 101
    assert too_wide(f"short\n{wide}\n") == [2]
    assert too_wide(f"```text\n{wide}\n```\n| {wide} |\n[link](https://{wide})\n") == []
    assert too_wide(f"```text\n```\n{wide}\n") == [3]
