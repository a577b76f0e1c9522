"""Groups that a run kept, step by step, as Parquet. ``docs/report.md`` has the schema."""

from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from groupwise.errors import RunFolderError
from groupwise.system import files

MAX_MIB = 64
"""All files of a run together. Beyond it the oldest go, but for the first."""
MAX_WIDTH = 64
"""Numbers of an observation or action that are kept; larger ones, such as pictures, are left out."""
Values: TypeAlias = np.ndarray | list[str] | None
"""Of a column: numbers [step] or [step, width], texts, or nothing."""
_PATTERN = "[0-9]*.parquet"


def write_groups(folder: Path, iteration: int, columns: Mapping[str, Values]) -> None:
    """Write the steps of some groups of an iteration to ``<iteration>.parquet``.

    Args:
        columns: every column of the schema but the iteration. NaN is written as null, None as a column of nulls.
    """
    import pyarrow
    import pyarrow.parquet

    count = len(columns["step"])  # type: ignore[arg-type]
    columns = {"iteration": np.full(count, iteration), **columns}
    arrays = [_array(field.type, columns[field.name], count) for field in schema()]
    data = BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_arrays(arrays, schema=schema()), data, compression="zstd")
    path = folder / f"{iteration:06d}.parquet"
    with files.warning_if_unwritable(path):
        folder.mkdir(exist_ok=True)
        files.write(path, data.getvalue())
        _make_room(folder)


def kept_iterations(folder: Path) -> dict[int, Path]:
    """The files by iteration, in order."""
    found = {int(path.stem): path for path in folder.glob(_PATTERN) if path.stem.isdigit()}
    return dict(sorted(found.items()))


def read_groups(path: Path) -> dict[str, list[Any]]:
    """The columns of a file.

    Raises:
        RunFolderError: the file is damaged, or has other columns.
    """
    import pyarrow
    import pyarrow.parquet

    fix = "fix: delete it"
    try:
        data = BytesIO(files.read(path, MAX_MIB * files.MIB))
        # `read_table` would import pandas where it is installed; a process that ends while threads begin is aborted
        table = pyarrow.parquet.ParquetFile(data, pre_buffer=False).read(use_threads=False)
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        raise RunFolderError(f"{path} is damaged: {error!s:.200}; {fix}") from error
    if not table.schema.equals(schema()):
        raise RunFolderError(f"{path} has columns {', '.join(table.column_names)}, which are no kept groups; {fix}")
    columns: dict[str, list[Any]] = table.to_pydict()
    return columns


def schema() -> Any:
    """The columns and their types."""
    import pyarrow as pa

    numbers = pa.list_(pa.float32())
    return pa.schema(
        {
            "iteration": pa.int32(),
            "env_steps": pa.int64(),
            "group": pa.int32(),
            "start": pa.string(),
            "member": pa.int32(),
            "step": pa.int32(),
            "observation": numbers,
            "action": numbers,
            "token": pa.string(),
            "reward": pa.float32(),
            "reward_parts": numbers,
            "log_prob": pa.float32(),
            "ratio": pa.float32(),
            "advantage": pa.float32(),
            "loss_mask": pa.bool_(),
            "greedy": pa.bool_(),
            "end": pa.string(),
        }
    )


def _array(kind: Any, values: Values, count: int) -> Any:
    """An Arrow array, made of buffers: ``pyarrow.array`` would import pandas where it is installed, which takes long."""
    import pyarrow as pa

    match values:
        case None:
            return pa.nulls(count, kind)
        case list():
            texts = [text.encode(errors="replace") for text in values]
            ends = np.cumsum([0, *map(len, texts)], dtype=np.int32)
            return pa.Array.from_buffers(kind, count, [None, pa.py_buffer(ends), pa.py_buffer(b"".join(texts))])
    if values.ndim == 2:
        ends = np.arange(count + 1, dtype=np.int32) * values.shape[1]
        flat = _array(kind.value_type, values.reshape(-1), values.size)
        return pa.ListArray.from_arrays(pa.Array.from_buffers(pa.int32(), count + 1, [None, pa.py_buffer(ends)]), flat)
    known = pa.py_buffer(np.packbits(~np.isnan(values), bitorder="little"))
    is_bool = kind.equals(pa.bool_())
    data = np.packbits(values, bitorder="little") if is_bool else values.astype(kind.to_pandas_dtype())
    return pa.Array.from_buffers(kind, count, [known, pa.py_buffer(np.ascontiguousarray(data))])


def _make_room(folder: Path) -> None:
    """Remove the oldest files but the first, until the rest is small enough."""
    paths = list(kept_iterations(folder).values())
    while len(paths) > 2 and sum(path.stat().st_size for path in paths) > MAX_MIB * files.MIB:
        files.remove(paths.pop(1))
