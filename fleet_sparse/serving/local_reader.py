"""LocalReader: holds one version of a model inside the process, and answers as a `PserverReader` of it."""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from fleet_sparse.core.dense_spec import DenseSpec
from fleet_sparse.core.ids import hash_ids
from fleet_sparse.core.initializer import initial_rows
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.core.version import Version
from fleet_sparse.errors import ErrorCode, ProtocolError, SnapshotError
from fleet_sparse.snapshot.manifest import version_of
from fleet_sparse.snapshot.reader import SnapshotReader

from .exported_rows import user_tables
from .row_reader import Reading

_AWAIT_S = 20.0
_NUM_HASH_BITS = 64
_MANY_ROWS = 1 << 32


class LocalReader:
    """Reads rows and dense values of one version, which it holds in memory. Safe to use from several threads.

    It takes 8 bytes a row more than the rows, and 4 to 8 for their index. Optimizer states are not held.

    Args:
        content: The snapshot that the version is. It is read at once, and not needed afterwards.
        tables: Names of the tables whose rows are held; None for all.

    Attributes:
        version: The version.
        tables: Specs of these tables, by name.
        arrays: Specs of the dense arrays, by name.
        leading: The version.
        num_failovers: 0.
        problems: None.

    Raises:
        SnapshotCorrupt: Bytes of the snapshot are wrong.
        SnapshotError: It cannot be read, has no such table, or does not have all tables of its job.
    """

    num_failovers = 0
    problems: tuple[str, ...] = ()

    def __init__(self, content: SnapshotReader, tables: Collection[str] | None = None) -> None:
        if not content.is_complete:
            raise SnapshotError(f"{content.origin}: it has only some tables of its job. Serve a snapshot of all")
        self.version = self.leading = version_of(content.manifest)
        names = user_tables(content) if tables is None else tables
        self.tables: dict[str, TableSpec] = {name: content.table(name).spec for name in names}
        self.arrays: dict[str, DenseSpec] = {name: each.spec for name, each in content.dense.items()}
        self._rows = {name: _rows_of(content, name) for name in self.tables}
        self._values = {name: content.dense_values(name)[0] for name, each in content.dense.items() if each.assigned}
        self._closed = threading.Event()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the calls that wait for another version."""
        self._closed.set()

    def newest(self) -> Version:
        """Returns the version."""
        return self.version

    def await_version(self, known: Version, timeout_s: float = _AWAIT_S) -> Version:
        """Returns the version, after `timeout_s` if it is `known`: there is no other one."""
        if known == self.version:
            self._closed.wait(timeout_s)
        return self.version

    def await_usable(self, known: Version, deadline: float) -> Version:
        """Returns the version."""
        return self.version

    def changed(self, version: Version, before: Version) -> None:
        """Returns None: there is no version before this one, so all rows count as changed."""

    def read(
        self,
        ids: Mapping[str, NDArray[np.int64]],
        arrays: Collection[str] = (),
        *,
        version: Version | None = None,
        deadline: float | None = None,
    ) -> Reading:
        """Returns rows and dense values, all of the version.

        Args:
            ids: By name of the table, `(n,)`, repeats allowed.
            arrays: Names of dense arrays.
            version: The version; None for the one that there is.
            deadline: Ignored.

        Raises:
            ValueError: There is no such table or array.
            ProtocolError: With code VERSION_GONE: `version` is another one; with NOT_READY: the snapshot has no values
                of an array.
        """
        if version not in (None, self.version):
            raise ProtocolError(
                f"version {version.checksum:016x}: only {self.version.checksum:016x} of snapshot "
                f"{self.version.number} is held",
                code=ErrorCode.VERSION_GONE,
            )
        for name in ids:
            if name not in self.tables:
                raise ValueError(f"table {name!r}: there is none; the model has {', '.join(self.tables) or 'none'}")
        for name in arrays:
            if name not in self.arrays:
                raise ValueError(f"dense {name!r}: there is none; the model has {', '.join(self.arrays) or 'none'}")
            if name not in self._values:
                raise ProtocolError(f"dense {name!r}: the snapshot has no values of it", code=ErrorCode.NOT_READY)
        rows = {name: self._rows[name].read(self.tables[name], its_ids) for name, its_ids in ids.items()}
        return Reading(self.version, rows, {name: self._values[name] for name in arrays})


class _Rows(NamedTuple):
    """The rows of a table in the order of the hashes of their ids, which are different for different ids."""

    hashes: NDArray[np.uint64]
    """`(n,)`, ascending."""
    rows: NDArray[np.float32]
    """`(n, dim)`."""
    begins: NDArray[Any]
    """Index of the first row of each range of hashes, and n, uint32 or uint64: one to two ranges for each row."""
    shift: int
    """The range of a hash is `hash >> shift`."""

    def read(self, spec: TableSpec, ids: NDArray[np.int64]) -> NDArray[np.float32]:
        """Returns the rows of ids, `(len(ids), dim)`; an id without one has its initial value."""
        places = self._places(hash_ids(ids, spec.salt))
        if (places >= 0).all():
            return self.rows[places]
        rows = _initial(spec, ids)
        known = np.flatnonzero(places >= 0)
        rows[known] = self.rows[places[known]]
        return rows

    def _places(self, hashes: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Returns the index of the row of each hash, -1 for one without a row."""
        ranges = (hashes >> np.uint64(self.shift)).view(np.int64)
        at, ends = self.begins[ranges].astype(np.int64), self.begins[ranges + 1].astype(np.int64)
        places = np.full(len(hashes), -1, np.int64)
        pending = np.flatnonzero(at < ends)
        while pending.size:
            is_found = self.hashes[at[pending]] == hashes[pending]
            places[pending[is_found]] = at[pending[is_found]]
            pending = pending[~is_found]
            at[pending] += 1
            pending = pending[at[pending] < ends[pending]]
        return places


def _initial(spec: TableSpec, ids: NDArray[np.int64]) -> NDArray[np.float32]:
    return initial_rows(spec.read_initializer, ids, dim=spec.dim, seed=spec.seed, salt=spec.salt)


def _rows_of(content: SnapshotReader, table: str) -> _Rows:
    """Reads all rows of a table."""
    spec = content.table(table).spec
    _initial(spec, np.empty(0, np.int64))  # compiles, which a request should not wait for
    # Untouched memory costs nothing, and the rows of a chain are at most those of all its files.
    capacity_rows = sum(
        section.num_rows
        for member in content.members
        for file in member.files
        for section in file.tables
        if section.spec.name == table
    )
    hashes, rows = np.empty(capacity_rows, np.uint64), np.empty((capacity_rows, spec.dim), np.float32)
    num_rows = 0
    for block in content.rows(table):
        end = num_rows + len(block.ids)
        hashes[num_rows:end], rows[num_rows:end] = hash_ids(block.ids, spec.salt), block.rows
        num_rows = end
    hashes, rows = hashes[:num_rows], rows[:num_rows]
    num_bits = max(num_rows.bit_length(), 1)
    shift = _NUM_HASH_BITS - num_bits
    begins = np.zeros((1 << num_bits) + 1, np.uint32 if num_rows < _MANY_ROWS else np.uint64)
    np.cumsum(np.bincount((hashes >> np.uint64(shift)).view(np.int64), minlength=1 << num_bits), out=begins[1:])
    return _Rows(hashes, rows, begins, shift)
