"""SortedRows: sorts rows by the hash of their id, in a temporary file."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from fleet_sparse.core.columns import Column
from fleet_sparse.core.ids import BUCKET_BITS, hash_ids
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.errors import SnapshotError

from .row_merge import DuplicateId, Source, merge
from .rows import Rows

_RUN_BYTES = 64 << 20
_BLOCK_BYTES = 1 << 20
_ID = "ids"


class _Run(NamedTuple):
    """Sorted rows in the file."""

    begin: int
    """Offset of the first row."""
    num_rows: int
    first: NDArray[np.uint64]
    """Hash of the first row of each block."""
    last: NDArray[np.uint64]
    """Hash of the last row of each block."""


class SortedRows:
    """Sorts rows of a table. A context manager that removes its temporary file, which is in `TMPDIR`.

    Args:
        spec: The table.
        columns: The columns of all rows.

    Raises:
        SnapshotError: The system has no room for a file. All methods may raise it.
    """

    def __init__(self, spec: TableSpec, columns: Sequence[Column]) -> None:
        self._spec = spec
        self._names = [each.name for each in columns]
        self._record = np.dtype([(_ID, "<i8"), *((each.name, each.dtype, each.shape) for each in columns)])
        self._block_rows = max(_BLOCK_BYTES // self._record.itemsize, 1)
        self._waiting: list[NDArray[Any]] = []
        self._num_waiting = 0
        self._runs: list[_Run] = []
        self._num_bytes = 0
        try:
            self._file = tempfile.TemporaryFile(prefix="fleet-sparse-rows-", buffering=0)  # noqa: SIM115  # closed by __exit__
        except OSError as error:
            raise self._refused(error) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._file.close()

    @property
    def num_rows(self) -> int:
        """Number of rows added so far."""
        return self._num_bytes // self._record.itemsize + self._num_waiting

    def add(self, rows: Rows) -> None:
        """Adds rows whose ids were not added before.

        Raises:
            DuplicateId: Two of the rows have one id; `rows` finds those that are far apart.
        """
        records = np.empty(len(rows.ids), self._record)
        records[_ID] = rows.ids
        for name in self._names:
            records[name] = rows.columns[name]
        self._waiting.append(records)
        self._num_waiting += len(records)
        if self._num_waiting * self._record.itemsize >= _RUN_BYTES:
            self._write_run()

    def rows(self, owned: NDArray[np.bool_] | None = None) -> Iterator[Rows]:
        """Yields all rows, or those of owned buckets, in the order of their hash, block by block.

        Raises:
            DuplicateId: An id was added twice.
        """
        self._write_run()
        return merge([Source(self._blocks(run, owned), 0, int(run.first[0])) for run in self._runs], self._spec.salt)

    def _write_run(self) -> None:
        if not self._num_waiting:
            return
        records = np.concatenate(self._waiting)
        hashes = hash_ids(np.ascontiguousarray(records[_ID]), self._spec.salt)
        order = np.argsort(hashes)
        hashes = hashes[order]
        if (twice := np.flatnonzero(hashes[1:] == hashes[:-1])).size:
            raise DuplicateId(int(records[_ID][order[twice[0]]]))
        begins = np.arange(0, len(order), self._block_rows)
        ends = np.append(begins[1:], len(order))
        for begin, end in zip(begins, ends, strict=True):
            self._write(records[order[begin:end]])
        self._runs.append(_Run(self._num_bytes, len(order), hashes[begins], hashes[ends - 1]))
        self._num_bytes += len(order) * self._record.itemsize
        self._waiting, self._num_waiting = [], 0

    def _write(self, records: NDArray[Any]) -> None:
        data = records.view(np.uint8).data
        try:
            while data:
                data = data[self._file.write(data) :]
        except OSError as error:
            raise self._refused(error) from error

    def _blocks(self, run: _Run, owned: NDArray[np.bool_] | None) -> Iterator[Rows]:
        shift = np.uint64(64 - BUCKET_BITS)
        for number, (first, last) in enumerate(zip(run.first >> shift, run.last >> shift, strict=True)):
            if owned is not None and not owned[int(first) : int(last) + 1].any():
                continue
            records = self._read(run, number)
            if owned is not None:
                hashes = hash_ids(np.ascontiguousarray(records[_ID]), self._spec.salt)
                records = records[owned[(hashes >> shift).view(np.int64)]]
            if len(records):
                columns = {name: np.ascontiguousarray(records[name]) for name in self._names}
                yield Rows(np.ascontiguousarray(records[_ID]), columns)

    def _read(self, run: _Run, number: int) -> NDArray[Any]:
        begin = number * self._block_rows
        records = np.empty(min(self._block_rows, run.num_rows - begin), self._record)
        offset = run.begin + begin * self._record.itemsize
        try:
            num_read = os.preadv(self._file.fileno(), [records.view(np.uint8).data], offset)
        except OSError as error:
            raise self._refused(error) from error
        assert num_read == records.nbytes, "no other process writes to the file"
        return records

    def _refused(self, error: OSError) -> SnapshotError:
        return SnapshotError(
            f"table {self._spec.name!r}: no temporary file for its rows in {tempfile.gettempdir()}: {error}. "
            "Set TMPDIR to a directory with about as much space as the snapshot will take"
        )
