"""Columns of an Arrow table, made of their buffers.

``pyarrow.array`` imports pandas wherever that is installed: 40 MiB and a second, in the middle of a
training run, for columns that are plain numbers and names.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import pyarrow as pa  # 30 MiB, loaded when rows are written and not before the first step


def number_column(values: np.ndarray, absent: np.ndarray | None = None) -> "pa.Array":
    """Numbers in their own type. absent: bool of their shape, where a row is null; None: nowhere.

    values: of one dimension. NaN stays NaN.
    """
    import pyarrow as pa

    values = np.ascontiguousarray(values)
    there = None if absent is None else pa.py_buffer(np.packbits(~absent, bitorder="little"))
    kind = pa.from_numpy_dtype(values.dtype)
    return pa.Array.from_buffers(kind, len(values), [there, pa.py_buffer(values)])


def measured_column(values: np.ndarray) -> "pa.Array":
    """Numbers of which NaN, which stands for what was not measured, is null."""
    return number_column(values, np.isnan(values))


def name_column(values: Sequence[str]) -> "pa.DictionaryArray":
    """Names of which there are few, each stored once in the order of their first appearance."""
    import pyarrow as pa

    place = {name: index for index, name in enumerate(dict.fromkeys(values))}
    encoded = [name.encode() for name in place]
    stops = np.cumsum([0, *map(len, encoded)], dtype=np.int32)
    names = pa.StringArray.from_buffers(
        len(place), pa.py_buffer(stops), pa.py_buffer(b"".join(encoded))
    )
    indices = number_column(np.asarray([place[name] for name in values], dtype=np.int32))
    return pa.DictionaryArray.from_arrays(indices, names)
