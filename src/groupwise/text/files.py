"""Reading examples from files."""

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from groupwise.errors import DataError, require_extra


def read(path: Path) -> list[Any]:
    """The rows of a ``.jsonl``, ``.json``, ``.csv`` or ``.parquet`` file.

    Raises:
        DataError: there is no such file, or it cannot be read (names the line).
        MissingExtraError: a Parquet file without the extra ``text``.
    """
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        raise DataError(f"data = {str(path)!r}: expected a file that ends in {', '.join(_READERS)}; fix: convert it")
    if not path.is_file():
        raise DataError(f"{str(path)!r}: there is no such file of prompts; fix: its path, seen from {Path.cwd()}")
    try:
        return reader(path)
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8: {error}; fix: save it as UTF-8") from error


def _read_jsonl(path: Path) -> list[Any]:
    lines = path.read_text(encoding="utf-8-sig").split("\n")
    return [_parse(line, f"{path}, line {number}") for number, line in enumerate(lines, 1) if line.strip()]


def _read_json(path: Path) -> list[Any]:
    rows = _parse(path.read_text(encoding="utf-8-sig"), str(path))
    if not isinstance(rows, list):
        raise DataError(f"{path}: expected a list of examples; got {short(rows)}; fix: [{{'prompt': ...}}, ...]")
    return rows


def _read_csv(path: Path) -> list[Any]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file, strict=True)
        try:
            rows: list[dict[Any, Any]] = []
            for row in reader:
                if None in row or None in row.values():
                    raise DataError(
                        f"{path}, line {reader.line_num}: not as many fields as columns; fix: quote fields that hold commas"
                    )
                rows.append(row)
        except csv.Error as error:
            raise DataError(f"{path}, after line {reader.line_num}: {error}; fix: quote it as CSV") from error
    return rows


def _read_parquet(path: Path) -> list[Any]:
    require_extra("pyarrow", "text")
    from pyarrow import ArrowInvalid
    from pyarrow.parquet import read_table

    try:
        rows: list[Any] = read_table(path).to_pylist()
    except ArrowInvalid as error:
        raise DataError(f"{path} is no Parquet file: {error}; fix: write it again") from error
    return rows


_READERS: dict[str, Callable[[Path], list[Any]]] = {
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
}


def _parse(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(
            f"{where}: not JSON: {error}; fix: one object a line (.jsonl), or a list of them (.json)"
        ) from error


def short(value: object) -> str:
    """The beginning of its representation, for messages."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
