"""Exports as npz, which `numpy.load` reads: a table is `ids`, `rows`, `states` and, if it counts days, `last_days`."""

from __future__ import annotations

import io
import shutil
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from fleet_sparse.core.dense_spec import DenseSpec
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.errors import SnapshotError
from fleet_sparse.snapshot.directory import InputFile, OutputFile
from fleet_sparse.snapshot.file_streams import InputStream, OutputStream
from fleet_sparse.snapshot.rows import Rows
from fleet_sparse.snapshot.rows_file import rows_per_block

from .export_file import DAYS, FLOATS, IDS, Description, Format, check, new_states, no_room

_DESCRIPTION = "fleet_sparse"
_BUFFER_BYTES = 1 << 20
_MAX_DESCRIPTION_BYTES = 64 << 20


class _Column(NamedTuple):
    """An array with one element a row."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    """Of one element."""


def _columns(spec: TableSpec, days: int) -> list[_Column]:
    columns = [
        _Column("ids", IDS, ()),
        _Column("rows", FLOATS, (spec.dim,)),
        _Column("states", FLOATS, (spec.update_rule.num_states, spec.dim)),
    ]
    return [*columns, _Column("last_days", DAYS, ())] if days else columns


# Writing


def _write_table(file: OutputFile, description: Description, blocks: Iterator[Rows]) -> int:
    """Arrays follow one another in the file, and begin with their length: until all rows are there they lie beside."""
    spec = description.spec
    assert isinstance(spec, TableSpec), "as the caller says"
    columns, num_rows = _columns(spec, description.days), 0
    with ExitStack() as stack:
        try:
            beside = [stack.enter_context(tempfile.TemporaryFile(prefix="fleet-sparse-")) for _ in columns]
        except OSError as error:
            raise no_room(error) from error
        for rows in blocks:
            num_rows += len(rows.ids)
            for column, array, lies in zip(columns, rows, beside, strict=False):
                assert array is not None, "a table that counts days has them of all rows"
                try:
                    lies.write(_bytes_of(array, column.dtype))
                except OSError as error:
                    raise no_room(error) from error
        with _archive(file, description) as archive:
            for column, lies in zip(columns, beside, strict=True):
                lies.seek(0)
                with _new_array(archive, column.name, column.dtype, (num_rows, *column.shape)) as entry:
                    shutil.copyfileobj(lies, entry, _BUFFER_BYTES)
    return num_rows


def _write_dense(
    file: OutputFile, description: Description, values: NDArray[np.float32], states: NDArray[np.float32]
) -> None:
    with _archive(file, description) as archive:
        for name, array in (("values", values), ("states", states)):
            with _new_array(archive, name, FLOATS, array.shape) as entry:
                entry.write(_bytes_of(array, FLOATS))


@contextmanager
def _archive(file: OutputFile, description: Description) -> Iterator[zipfile.ZipFile]:
    with zipfile.ZipFile(OutputStream(file), "w", zipfile.ZIP_STORED) as archive:
        text = description.to_json().encode()
        with _new_array(archive, _DESCRIPTION, np.dtype(np.uint8), (len(text),)) as entry:
            entry.write(text)
        yield archive


@contextmanager
def _new_array(
    archive: zipfile.ZipFile, name: str, dtype: np.dtype[Any], shape: tuple[int, ...]
) -> Iterator[IO[bytes]]:
    # A ZipInfo has no time of its own, so equal content makes equal files.
    with archive.open(zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=True) as entry:
        header = {"descr": npy.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
        npy.write_array_header_1_0(entry, header)
        yield entry


def _bytes_of(array: NDArray[Any], dtype: np.dtype[Any]) -> memoryview:
    return np.ascontiguousarray(array, dtype).reshape(-1).view(np.uint8).data


# Reading


class _Npz:
    """An npz file that is being read."""

    def __init__(self, archive: zipfile.ZipFile, path: str) -> None:
        self._archive = archive
        self._path = path
        self._names = {name.removesuffix(".npy") for name in archive.namelist()}
        self.description = self._read_description()

    def rows(self, spec: TableSpec, days: int) -> Iterator[Rows]:
        columns = {column.name: column for column in _columns(spec, days)}
        if "states" not in self._names and self.description is None:
            del columns["states"]
        with ExitStack() as stack, _explained(self._path):
            opened = {name: stack.enter_context(self._array(name)) for name in columns}
            num_rows = opened["ids"].shape[0] if opened["ids"].shape else 0
            for name, column in columns.items():
                found = (opened[name].dtype, opened[name].shape)
                check(self._path, name, found, (column.dtype, (num_rows, *column.shape)))
            step_rows = rows_per_block(spec, days)
            for begin in range(0, num_rows, step_rows):
                count = min(step_rows, num_rows - begin)
                arrays = {name: array.take(count) for name, array in opened.items()}
                states = arrays["states"] if "states" in arrays else new_states(spec, count)
                yield Rows(arrays["ids"], arrays["rows"], states, arrays.get("last_days"))
            for array in opened.values():
                array.end()

    def dense_values(self, spec: DenseSpec) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        shapes = {"values": (spec.num_values,), "states": (spec.update_rule.num_states, spec.num_values)}
        arrays = []
        for name, shape in shapes.items():
            with _explained(self._path), self._array(name) as array:
                check(self._path, name, (array.dtype, array.shape), (FLOATS, shape))
                arrays.append(array.take(shape[0]))
                array.end()
        return arrays[0], arrays[1]

    def _read_description(self) -> Description | None:
        if _DESCRIPTION not in self._names:
            return None
        with _explained(self._path), self._array(_DESCRIPTION) as array:
            size = array.shape[0] if array.shape else 0
            check(self._path, _DESCRIPTION, (array.dtype, array.shape), (np.dtype(np.uint8), (size,)))
            if size > _MAX_DESCRIPTION_BYTES:
                raise SnapshotError(f"{self._path}: its description has {size} bytes")
            text = array.take(size).tobytes()
            array.end()
        return Description.parse(text.decode(errors="replace"), self._path)

    @contextmanager
    def _array(self, name: str) -> Iterator[_Array]:
        if name not in self._names:
            raise SnapshotError(f"{self._path}: it has no array {name!r}; there are {', '.join(sorted(self._names))}")
        with self._archive.open(f"{name}.npy") as entry:
            yield _Array(entry)


class _Array:
    """An array of the file, read from its beginning to its end.

    Attributes:
        shape: Of all of it.
        dtype: Its type.

    Raises:
        ValueError: It is none, has Python objects in it, or lies in Fortran's order.
    """

    def __init__(self, entry: IO[bytes]) -> None:
        self._entry = entry
        version = npy.read_magic(entry)
        if version not in ((1, 0), (2, 0)):
            raise ValueError(f"an array of version {version}")
        read_header = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
        self.shape, is_fortran, self.dtype = read_header(entry)
        if self.dtype.hasobject or (is_fortran and len(self.shape) > 1):
            raise ValueError("an array of Python objects, or in Fortran's order; should be numbers in C order")

    def take(self, count: int) -> NDArray[Any]:
        """The next so many elements."""
        array = np.empty((count, *self.shape[1:]), self.dtype)
        buffer = array.reshape(-1).view(np.uint8)
        content = self._entry.read(len(buffer))
        if len(content) != len(buffer):
            raise ValueError("an array ends early")
        buffer[:] = np.frombuffer(content, np.uint8)
        return array

    def end(self) -> None:
        """Nothing may follow. Only now the checksum of a compressed array has been compared for sure."""
        if self._entry.read(1):
            raise ValueError("an array has more bytes than its shape says")


@contextmanager
def _open(file: InputFile, tell: Callable[[int], None]) -> Iterator[_Npz]:
    with ExitStack() as stack:
        with _explained(file.name):
            stream = io.BufferedReader(InputStream(file, tell), _BUFFER_BYTES)
            archive = stack.enter_context(zipfile.ZipFile(stream))
            opened = _Npz(archive, file.name)
        yield opened


@contextmanager
def _explained(path: str) -> Iterator[None]:
    try:
        yield
    except (ValueError, EOFError, OSError, zipfile.BadZipFile, zlib.error, NotImplementedError) as error:
        raise SnapshotError(f"{path}: is no npz file that can be read: {error}") from error


NPZ = Format(".npz", _write_table, _write_dense, _open)
