"""Exports as npz, which `numpy.load` reads: a table is `ids` and an array for each column. It has to fit in memory."""

from __future__ import annotations

import io
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleet_sparse.core.columns import FLOATS, STATES, Column, new_states
from fleet_sparse.core.dense_spec import DenseSpec
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.errors import SnapshotError
from fleet_sparse.snapshot.directory import InputFile, OutputFile
from fleet_sparse.snapshot.file_streams import InputStream, OutputStream
from fleet_sparse.snapshot.rows import Rows, joined
from fleet_sparse.snapshot.rows_format import IDS, rows_per_block

from .export_file import Description, Format, check

_DESCRIPTION, _IDS = "fleet_sparse", "ids"
_BUFFER_BYTES = 1 << 20


def _write_table(file: OutputFile, description: Description, blocks: Iterator[Rows]) -> int:
    found = list(blocks)
    if found:
        rows = joined(found)
    else:
        empty = {each.name: np.empty((0, *each.shape), each.dtype) for each in description.columns}
        rows = Rows(np.empty(0, IDS), empty)
    _write(file, description, {_IDS: rows.ids, **rows.columns})
    return len(rows.ids)


def _write_dense(
    file: OutputFile, description: Description, values: NDArray[np.float32], states: NDArray[np.float32]
) -> None:
    _write(file, description, {"values": values, "states": states})


def _write(file: OutputFile, description: Description, arrays: dict[str, NDArray[Any]]) -> None:
    text = np.frombuffer(description.to_json().encode(), np.uint8)
    np.savez(OutputStream(file), allow_pickle=False, **{_DESCRIPTION: text, **arrays})


class _Npz:
    """An npz file that is being read. numpy reads an array when it is asked for, and compares its checksum."""

    def __init__(self, arrays: Any, path: str) -> None:
        self._arrays = arrays
        self._path = path
        self.description = self._read_description()

    def rows(self, spec: TableSpec, columns: tuple[Column, ...]) -> Iterator[Rows]:
        ids = self._array(_IDS)
        num_rows = len(ids) if ids.ndim else 0
        check(self._path, _IDS, (ids.dtype, ids.shape), (IDS, (num_rows,)))
        arrays = {column.name: self._column(spec, column, num_rows) for column in columns}
        rows, step_rows = Rows(ids, arrays), rows_per_block(columns)
        for begin in range(0, num_rows, step_rows):
            yield rows.part(slice(begin, begin + step_rows))

    def dense_values(self, spec: DenseSpec) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        shapes = {"values": (spec.num_values,), "states": (spec.update_rule.num_states, spec.num_values)}
        arrays = []
        for name, shape in shapes.items():
            array = self._array(name)
            check(self._path, name, (array.dtype, array.shape), (FLOATS, shape))
            arrays.append(array)
        return arrays[0], arrays[1]

    def _column(self, spec: TableSpec, column: Column, num_rows: int) -> NDArray[Any]:
        if column.name not in self._arrays.files and self.description is None:
            if column.name == STATES:
                return new_states(spec, num_rows)
            if column.initial is not None:
                return column.new(num_rows)
        array = self._array(column.name)
        check(self._path, column.name, (array.dtype, array.shape), (column.dtype, (num_rows, *column.shape)))
        return array

    def _read_description(self) -> Description | None:
        if _DESCRIPTION not in self._arrays.files:
            return None
        text = self._array(_DESCRIPTION)
        check(self._path, _DESCRIPTION, (text.dtype, text.shape), (np.dtype(np.uint8), (text.size,)))
        return Description.parse(text.tobytes().decode(errors="replace"), self._path)

    def _array(self, name: str) -> NDArray[Any]:
        if name not in self._arrays.files:
            raise SnapshotError(
                f"{self._path}: it has no array {name!r}; it has {', '.join(sorted(self._arrays.files))}"
            )
        with _explained(self._path):
            found = self._arrays[name]
            if not isinstance(found, np.ndarray):
                raise ValueError(f"{name!r} is not an array")
        return np.ascontiguousarray(found)


@contextmanager
def _open(file: InputFile, on_read: Callable[[int], None]) -> Iterator[_Npz]:
    with _explained(file.name):
        stream = io.BufferedReader(InputStream(file, on_read), _BUFFER_BYTES)
        arrays = np.load(stream, allow_pickle=False)
        if isinstance(arrays, np.ndarray):
            raise ValueError("it has one array without a name")
    with arrays:
        yield _Npz(arrays, file.name)


@contextmanager
def _explained(path: str) -> Iterator[None]:
    try:
        yield
    except (ValueError, EOFError, OSError, zipfile.BadZipFile, zlib.error, NotImplementedError) as error:
        raise SnapshotError(f"{path}: cannot be read as npz: {error}") from error


NPZ = Format(".npz", _write_table, _write_dense, _open)
