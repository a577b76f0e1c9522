"""Results of long studies, cell by cell, so that a kill loses nothing."""

import json
from pathlib import Path
from typing import Any

Cells = list[dict[str, Any]]


def load(path: Path) -> Cells:
    """The cells that are done."""
    return json.loads(path.read_text()) if path.exists() else []


def save(path: Path, cells: Cells) -> None:
    """One line per cell, replaced at once."""
    part = path.with_suffix(".part")
    part.write_text("[\n" + ",\n".join(map(json.dumps, cells)) + "\n]\n")
    part.replace(path)
