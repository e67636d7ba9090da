"""Columns of the run's log say what was measured and what was not, and cost no other library."""

import math
import subprocess
import sys

import numpy as np
import pyarrow as pa

from kubelora_trainer.reporting.arrow_columns import measured_column, name_column, number_column

WRITE_A_TABLE = """
import sys
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from kubelora_trainer.reporting.arrow_columns import measured_column, name_column
table = pa.table({"x": measured_column(np.ones(3)), "name": name_column(["a", "b", "a"])})
pq.write_table(table, pa.BufferOutputStream())
print("pandas" in sys.modules)
"""


def test_what_was_not_measured_is_null_and_a_gradient_that_is_no_number_stays_nan() -> None:
    """Eleven values, so that the last byte of the bitmap is not full."""
    values = np.asarray([1, math.nan, 3, 4, 5, 6, 7, 8, 9, math.nan, 11], "float32")
    measured, plain = measured_column(values), number_column(values)
    assert measured.type == plain.type == pa.float32()
    assert measured.to_pylist() == [1, None, 3, 4, 5, 6, 7, 8, 9, None, 11]
    assert measured.null_count == 2
    assert plain.null_count == 0
    assert math.isnan(plain.to_pylist()[1])
    measured.validate(full=True)


def test_whole_numbers_keep_their_type() -> None:
    column = measured_column(np.repeat(np.asarray([3, 4], "int32"), 2))
    assert column.equals(pa.array([3, 3, 4, 4], pa.int32()))


def test_a_part_of_an_array_is_written_as_it_is_seen() -> None:
    every_second = np.arange(6, dtype="float64")[::2]
    assert number_column(every_second).to_pylist() == [0.0, 2.0, 4.0]


def test_names_are_those_that_arrow_itself_would_encode() -> None:
    names = ["b", "a", "", "b", "löffel", "a"]
    column = name_column(names)
    assert column.to_pylist() == names
    assert column.equals(pa.array(names).dictionary_encode())
    column.validate(full=True)


def test_a_table_without_rows_has_columns_all_the_same() -> None:
    assert name_column([]).to_pylist() == measured_column(np.zeros(0)).to_pylist() == []


def test_writing_a_table_does_not_import_pandas() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WRITE_A_TABLE], capture_output=True, text=True, check=True
    )
    assert done.stdout == "False\n"
