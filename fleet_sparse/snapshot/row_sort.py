"""Rows that come in any order, in the order of their hash. They wait in a temporary file, not in memory."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from types import TracebackType
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from fleet_sparse.core.ids import BUCKET_BITS, hash_ids
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.errors import SnapshotError

from .row_merge import DuplicateId, Source, merge
from .rows import Rows

_RUN_BYTES = 64 << 20
_BLOCK_BYTES = 1 << 20


class _Run(NamedTuple):
    """Rows in the order of their hash, in the file."""

    begin: int
    """Where the first one is."""
    num_rows: int
    first: NDArray[np.uint64]
    """Of each block, the hash of its first row."""
    last: NDArray[np.uint64]
    """Of each block, the hash of its last row."""


class SortedRows:
    """A table's rows, each with the days of its last push, whether the table counts days or not.

    A context manager that gives back the space; the file is where `TMPDIR` says.

    Args:
        spec: The table.

    Raises:
        SnapshotError: The system has no room for a file. So may all methods.
    """

    def __init__(self, spec: TableSpec) -> None:
        self._spec = spec
        shape = (spec.update_rule.num_states, spec.dim)
        self._record = np.dtype([("id", "<i8"), ("row", "<f4", spec.dim), ("states", "<f4", shape), ("day", "<u2")])
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
        """Added so far."""
        return self._num_bytes // self._record.itemsize + self._num_waiting

    def add(self, rows: Rows) -> None:
        """Adds rows of ids that were not added yet.

        Raises:
            DuplicateId: Two of the rows have one id; if they are far from each other, `rows` finds it.
        """
        records = np.empty(len(rows.ids), self._record)
        records["id"], records["row"], records["states"], records["day"] = rows
        self._waiting.append(records)
        self._num_waiting += len(records)
        if self._num_waiting * self._record.itemsize >= _RUN_BYTES:
            self._write_run()

    def rows(self, owned: NDArray[np.bool_] | None = None) -> Iterator[Rows]:
        """All rows, or those of owned buckets, in the order of their hash, block by block.

        Raises:
            DuplicateId: An id was added twice.
        """
        self._write_run()
        return merge([Source(self._blocks(run, owned), 0, int(run.first[0])) for run in self._runs], self._spec.salt)

    def _write_run(self) -> None:
        if not self._num_waiting:
            return
        records = np.concatenate(self._waiting)
        hashes = hash_ids(np.ascontiguousarray(records["id"]), self._spec.salt)
        order = np.argsort(hashes)
        hashes = hashes[order]
        if (twice := np.flatnonzero(hashes[1:] == hashes[:-1])).size:
            raise DuplicateId(int(records["id"][order[twice[0]]]))
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
                hashes = hash_ids(np.ascontiguousarray(records["id"]), self._spec.salt)
                records = records[owned[(hashes >> shift).view(np.int64)]]
            if len(records):
                yield Rows(*(np.ascontiguousarray(records[name]) for name in self._record.names or ()))

    def _read(self, run: _Run, number: int) -> NDArray[Any]:
        begin = number * self._block_rows
        records = np.empty(min(self._block_rows, run.num_rows - begin), self._record)
        offset = run.begin + begin * self._record.itemsize
        try:
            num_read = os.preadv(self._file.fileno(), [records.view(np.uint8).data], offset)
        except OSError as error:
            raise self._refused(error) from error
        assert num_read == records.nbytes, "the file is ours alone"
        return records

    def _refused(self, error: OSError) -> SnapshotError:
        return SnapshotError(
            f"table {self._spec.name!r}: no temporary file for its rows in {tempfile.gettempdir()}: {error}. "
            "Set TMPDIR to a directory with room for about as many bytes as the snapshot will have"
        )
