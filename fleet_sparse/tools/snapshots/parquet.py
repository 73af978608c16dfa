"""Exports as Parquet: a table is a column `id`, then `row`, `state` and the other columns of the table."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleet_sparse.core.columns import ROWS, STATES, Column, new_states
from fleet_sparse.core.dense_spec import DenseSpec
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.errors import SnapshotError
from fleet_sparse.snapshot.directory import InputFile, OutputFile
from fleet_sparse.snapshot.file_streams import InputStream, OutputStream
from fleet_sparse.snapshot.rows import Rows, joined
from fleet_sparse.snapshot.rows_format import rows_per_block

from .arrow import arrow
from .export_file import Description, Format, check

_DESCRIPTION = b"fleet_sparse"
_ID = "id"
_NAMES = {ROWS: "row", STATES: "state"}
"""Names of columns that are called otherwise in a Parquet file."""
_GROUP_BYTES = 16 << 20
"""Size of a row group, which is in memory while it is written."""
_BUFFER_BYTES = 1 << 20
"""Size of the buffer of a column that is read."""


def _arrow() -> Any:
    return arrow("parquet", ", or use npz")


def _schema(columns: dict[str, Any], description: Description) -> Any:
    arrow = _arrow()
    fields = [arrow.field(name, kind, nullable=False) for name, kind in columns.items()]
    return arrow.schema(fields, {_DESCRIPTION: description.to_json().encode()})


def _table_columns(columns: tuple[Column, ...]) -> dict[str, Any]:
    """The Arrow type of each column; a column without values, as the states of SGD, is left out."""
    arrow = _arrow()
    types = {_ID: arrow.int64()}
    for column in columns:
        value_type = arrow.from_numpy_dtype(column.dtype)
        if column.width:
            name = _NAMES.get(column.name, column.name)
            types[name] = arrow.list_(value_type, column.width) if column.shape else value_type
    return types


def _dense_columns(spec: DenseSpec) -> dict[str, Any]:
    arrow = _arrow()
    num_states = spec.update_rule.num_states
    columns = {"value": arrow.float32()}
    return {**columns, "state": arrow.list_(arrow.float32(), num_states)} if num_states else columns


# Writing


def _write_table(file: OutputFile, description: Description, blocks: Iterator[Rows]) -> int:
    num_rows = 0
    with _writer(file, _table_columns(description.columns), description) as write:
        for rows in _groups(blocks):
            num_rows += len(rows.ids)
            write({_ID: rows.ids, **{_NAMES.get(name, name): array for name, array in rows.columns.items()}})
    return num_rows


def _write_dense(
    file: OutputFile, description: Description, values: NDArray[np.float32], states: NDArray[np.float32]
) -> None:
    spec = description.spec
    assert isinstance(spec, DenseSpec), "as the caller says"
    with _writer(file, _dense_columns(spec), description) as write:
        write({"value": values, "state": np.ascontiguousarray(states.T)})


@contextmanager
def _writer(
    file: OutputFile, columns: dict[str, Any], description: Description
) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Yields a function that writes a row group."""
    arrow, schema = _arrow(), _schema(columns, description)
    writer = arrow.parquet.ParquetWriter(
        OutputStream(file),
        schema,
        # Trained floats do not compress.
        compression="none",
        use_dictionary=False,
        write_statistics=[_ID] if _ID in columns else False,
        write_page_checksum=True,
    )

    def write(arrays: dict[str, Any]) -> None:
        found = [_arrow_array(arrays[field.name], field.type) for field in schema]
        writer.write_table(arrow.Table.from_arrays(found, schema=schema))

    with writer:
        yield write


def _arrow_array(array: NDArray[Any], kind: Any) -> Any:
    arrow = _arrow()
    if not arrow.types.is_fixed_size_list(kind):
        return arrow.array(array, kind)
    flat = arrow.array(np.ascontiguousarray(array).reshape(-1), kind.value_type)
    return arrow.FixedSizeListArray.from_arrays(flat, kind.list_size)


def _groups(blocks: Iterator[Rows]) -> Iterator[Rows]:
    """Yields the same rows in longer blocks."""
    waiting: list[Rows] = []
    num_bytes = 0
    for rows in blocks:
        waiting.append(rows)
        num_bytes += rows.num_bytes
        if num_bytes >= _GROUP_BYTES:
            yield joined(waiting)
            waiting, num_bytes = [], 0
    if waiting:
        yield joined(waiting)


# Reading


class _Parquet:
    """A Parquet file that is being read."""

    def __init__(self, file: Any, path: str) -> None:
        self._file = file
        self._path = path
        metadata = file.schema_arrow.metadata or {}
        text = metadata.get(_DESCRIPTION)
        self.description = None if text is None else Description.parse(text.decode(errors="replace"), path)

    def rows(self, spec: TableSpec, columns: tuple[Column, ...]) -> Iterator[Rows]:
        names = {column.name: _NAMES.get(column.name, column.name) for column in columns}
        types = _table_columns(columns)
        if self.description is None:
            has_default = [column.name for column in columns if column.initial is not None or column.name == STATES]
            missing = [names[name] for name in has_default if names[name] not in self._file.schema_arrow.names]
            types = {name: kind for name, kind in types.items() if name not in missing}
        self._check(types)
        for arrays in self._batches(types, rows_per_block(columns)):
            ids = arrays[_ID]
            found = {
                column.name: arrays[names[column.name]].reshape(len(ids), *column.shape)
                if names[column.name] in arrays
                else _new(spec, column, len(ids))
                for column in columns
            }
            yield Rows(ids, found)

    def dense_values(self, spec: DenseSpec) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        columns = _dense_columns(spec)
        self._check(columns)
        check(self._path, "value", ("float", self._file.metadata.num_rows), ("float", spec.num_values))
        batches = list(self._batches(columns, spec.num_values))
        values = np.concatenate([batch["value"] for batch in batches])
        num_states = spec.update_rule.num_states
        if not num_states:
            return values, np.empty((0, spec.num_values), np.float32)
        states = np.concatenate([batch["state"] for batch in batches]).reshape(-1, num_states)
        return values, np.ascontiguousarray(states.T)

    def _check(self, columns: dict[str, Any]) -> None:
        schema = self._file.schema_arrow
        for name, kind in columns.items():
            if name not in schema.names:
                raise SnapshotError(f"{self._path}: it has no column {name!r}; it has {', '.join(schema.names)}")
            check(self._path, name, (schema.field(name).type, ""), (kind, ""))

    def _batches(self, columns: dict[str, Any], batch_rows: int) -> Iterator[dict[str, NDArray[Any]]]:
        if not self._file.num_row_groups:  # older versions of pyarrow read the last group of none
            return
        with _explained(self._path):
            for batch in self._file.iter_batches(batch_rows, columns=list(columns)):
                yield {name: self._numpy(name, batch.column(name)) for name in columns}

    def _numpy(self, name: str, array: Any) -> NDArray[Any]:
        flat = array.flatten() if _arrow().types.is_fixed_size_list(array.type) else array
        if array.null_count or flat.null_count:
            raise SnapshotError(f"{self._path}: {name!r} has nulls, should have none")
        return np.array(flat.to_numpy(zero_copy_only=True))


def _new(spec: TableSpec, column: Column, num_rows: int) -> NDArray[Any]:
    return new_states(spec, num_rows) if column.name == STATES else column.new(num_rows)


@contextmanager
def _open(file: InputFile, on_read: Callable[[int], None]) -> Iterator[_Parquet]:
    arrow = _arrow()
    with _explained(file.name):
        opened = arrow.parquet.ParquetFile(
            InputStream(file, on_read),
            buffer_size=_BUFFER_BYTES,
            pre_buffer=False,  # which holds all row groups until the end
            page_checksum_verification=True,
        )
    with opened:
        yield _Parquet(opened, file.name)


@contextmanager
def _explained(path: str) -> Iterator[None]:
    arrow = _arrow()
    try:
        yield
    except (arrow.ArrowException, OSError) as error:
        raise SnapshotError(f"{path}: cannot be read as Parquet: {error}") from error


PARQUET = Format(".parquet", _write_table, _write_dense, _open)
