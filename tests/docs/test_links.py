"""Links between pages lead to files and headings that exist, and the pages stay as short as they are."""

import re
from pathlib import Path

import pytest
from scripts import ROOT

DOCS = ROOT / "docs"
GENERATED, ARCHIVE = DOCS / "generated", DOCS / "internals" / "experiments"
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "benchmarks/README.md")),
    *(page for page in sorted(DOCS.rglob("*.md")) if "_build" not in page.parts),
]
WRITTEN = [page for page in PAGES if DOCS in page.parents and GENERATED not in page.parents]
MOST_PAGES, MOST_WORDS, MOST_LINES = 32, 40_000, 250


def without_blocks(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub and MyST make them."""
    headings = re.findall(r"^#{1,3} (.*)$", without_blocks(page.read_text("utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower().strip()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", without_blocks(page.read_text("utf-8"))):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or (anchor and file.suffix == ".md" and anchor not in anchors(file)):
            broken.append(target)
    assert not broken


def test_docs_are_short():
    """Experiments, which are an archive, count by their lines only."""
    read = [page for page in WRITTEN if ARCHIVE not in page.parents]
    assert len(read) <= MOST_PAGES
    assert sum(len(page.read_text("utf-8").split()) for page in read) <= MOST_WORDS
    lines = {page.name: page.read_text("utf-8").count("\n") for page in WRITTEN}
    assert {name: count for name, count in lines.items() if count > MOST_LINES} == {}
