"""Columns of an Arrow table, built from raw buffers.

``pyarrow.array`` imports pandas if it is installed, which costs 40 MiB and a second in the middle
of a training run. The columns here are plain numbers and names.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import pyarrow as pa  # 30 MiB, imported when rows are written, not before the first step


def number_column(values: np.ndarray, absent: np.ndarray | None = None) -> "pa.Array":
    """Build a column of numbers in their own type; NaN stays NaN.

    values: one-dimensional. absent: bool of the same shape, True for null; None means no nulls.
    """
    import pyarrow as pa

    values = np.ascontiguousarray(values)
    there = None if absent is None else pa.py_buffer(np.packbits(~absent, bitorder="little"))
    kind = pa.from_numpy_dtype(values.dtype)
    return pa.Array.from_buffers(kind, len(values), [there, pa.py_buffer(values)])


def measured_column(values: np.ndarray) -> "pa.Array":
    """Build a column of numbers in which NaN, which means "not measured", becomes null."""
    return number_column(values, np.isnan(values))


def name_column(values: Sequence[str]) -> "pa.DictionaryArray":
    """Build a dictionary column of a few distinct names, in the order of their first appearance."""
    import pyarrow as pa

    place = {name: index for index, name in enumerate(dict.fromkeys(values))}
    encoded = [name.encode() for name in place]
    stops = np.cumsum([0, *map(len, encoded)], dtype=np.int32)
    names = pa.StringArray.from_buffers(
        len(place), pa.py_buffer(stops), pa.py_buffer(b"".join(encoded))
    )
    indices = number_column(np.asarray([place[name] for name in values], dtype=np.int32))
    return pa.DictionaryArray.from_arrays(indices, names)
