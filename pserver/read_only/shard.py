"""ReadOnlyShard: one pserver's part of two versions of a model, for clients that read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleet_sparse.core.dense_spec import DenseSpec
from fleet_sparse.core.initializer import initial_rows
from fleet_sparse.core.placement import Placement
from fleet_sparse.core.rules import read_only
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.core.version import NO_VERSION, Version
from fleet_sparse.errors import ErrorCode, SnapshotError
from fleet_sparse.settings import Settings
from fleet_sparse.wire.control import TableState
from fleet_sparse.wire.frame_format import (
    BLOCK_BYTES,
    HEADER_BYTES,
    PULLS,
    PUSHES,
    READS,
    Action,
    Block,
    Header,
    Op,
)
from fleet_sparse.wire.row_dtype import RowDtype, for_frame

from ..engine.reply import DeferredReply, Reply
from ..engine.shard import Counters
from ..refusal import Refusal
from ..storage.table_store import TableStore
from ..tables.reply_memory import ReplyMemory
from .versions import VersionedRows, VersionedValues

_ID_BYTES = 8


class ServedTable(NamedTuple):
    """A table that is served."""

    spec: TableSpec
    """As its snapshots have it."""
    rows: VersionedRows
    schema_hashes: set[int]
    """Of the specs that requests may name it by."""

    @property
    def where(self) -> str:
        """`table 'C1'`, for messages."""
        return f"table {self.spec.name!r}"

    def initial(self, ids: NDArray[np.int64]) -> NDArray[np.float32]:
        """Returns what ids without a row read, `(n, dim)`."""
        spec = self.rows.spec
        return initial_rows(spec.initializer, ids, dim=spec.dim, seed=spec.seed, salt=spec.salt)


class ServedArray(NamedTuple):
    """The range of a dense array that is served."""

    spec: DenseSpec
    begin: int
    end: int
    values: VersionedValues
    schema_hashes: set[int]

    @property
    def where(self) -> str:
        """`dense 'w'`, for messages."""
        return f"dense {self.spec.name!r}"


class ReadOnlyShard:
    """The rows of every table whose ids hash to this pserver, without states, and its range of every dense array.

    One thread owns it, as a `Shard`; the thread of the follower reads `versions`, `tables` and `arrays`, and only its
    posted tasks change anything. Nothing here locks, sleeps or does I/O.

    Args:
        shard_index: Index of the shard, from 0.
        num_shards: Number of shards.
        cluster_id: As of a `Shard`.
        incarnation: As of a `Shard`.
        max_reply_bytes: Size of the largest frame of a reply.
        huge_pages: As of a `TableStore`.

    Attributes:
        shard_index, num_shards, cluster_id, incarnation, placement, counters: As of a `Shard`.
        requests: Ops that it answers, be it by a refusal.
        deferred_replies: Always empty.
        tables: Tables by their number on the wire.
        arrays: Dense arrays, likewise.
        versions: Versions that can be read, the newest first.
    """

    requests = PULLS | PUSHES | READS

    def __init__(  # what a placement and a store take
        self,
        shard_index: int,
        num_shards: int,
        *,
        cluster_id: int,
        incarnation: int,
        max_reply_bytes: int = Settings.max_frame_bytes,
        huge_pages: bool = True,
    ) -> None:
        self.shard_index = shard_index
        self.num_shards = num_shards
        self.cluster_id = cluster_id
        self.incarnation = incarnation
        self.placement = Placement.even(num_shards)
        self.counters = Counters()
        self.deferred_replies: list[DeferredReply] = []
        self.tables: dict[int, ServedTable] = {}
        self.arrays: dict[int, ServedArray] = {}
        self.versions: tuple[Version, ...] = ()
        self._adopting: Version | None = None
        self._max_reply_bytes = max_reply_bytes
        self._huge_pages = huge_pages
        self._memory = ReplyMemory()

    @property
    def newest(self) -> Version:
        """The newest version; `NO_VERSION` before the first."""
        return self.versions[0] if self.versions else NO_VERSION

    @property
    def complete_step(self) -> int:
        """The newest version, as replies carry it in `step`."""
        return self.newest.checksum

    @property
    def owned(self) -> NDArray[np.bool_]:
        """Which buckets the shard owns, `(NUM_BUCKETS,)`."""
        owned: NDArray[np.bool_] = self.placement.shard_of_bucket == self.shard_index
        return owned

    def add(self, spec: TableSpec | DenseSpec) -> None:
        """Adds an empty table or a dense array without values, before the first version."""
        if isinstance(spec, TableSpec):
            rows = VersionedRows(spec_of_reads(spec), huge_pages=self._huge_pages)
            self.tables[spec.table_id] = ServedTable(spec, rows, {spec.schema_hash})
        else:
            begin, end = spec.range_of(self.shard_index, self.num_shards)
            self.arrays[spec.table_id] = ServedArray(spec, begin, end, VersionedValues(), {spec.schema_hash})

    def set_first(self, version: Version, values: Mapping[int, NDArray[np.float32] | None]) -> None:
        """Declares that the loaded rows are those of a version, which has these dense values, by number on the wire."""
        for table_id, array in self.arrays.items():
            array.values.newest = array.values.older = values[table_id]
        self.versions = (version,)

    # Adoption of a version, by tasks of the follower

    def begin(self, version: Version, rooms: Mapping[int, TableStore] | None = None) -> list[TableStore]:
        """Begins to adopt a version. From now on only the newest one can be read.

        Args:
            version: The version.
            rooms: By number of the table, as of `VersionedRows.begin`.

        Returns:
            Stores of the version that was dropped, for the caller to close.
        """
        self.versions = self.versions[:1]
        self._adopting = version
        dropped = [table.rows.begin((rooms or {}).get(table_id)) for table_id, table in self.tables.items()]
        return [store for store in dropped if store is not None]

    def apply(self, table_id: int, ids: NDArray[np.int64], rows: NDArray[np.float32]) -> int:
        """Sets rows of the version that is adopted; as `VersionedRows.apply`."""
        return self.tables[table_id].rows.apply(ids, rows)

    def commit(self, values: Mapping[int, NDArray[np.float32] | None]) -> None:
        """Makes the version that is adopted the newest one, with these dense values."""
        assert self._adopting is not None, "a version is being adopted"
        for table_id, array in self.arrays.items():
            array.values.commit(values[table_id])
        self.versions = (self._adopting, *self.versions)
        self._adopting = None

    def abandon(self) -> None:
        """Returns to the version of `begin`."""
        for table in self.tables.values():
            table.rows.abandon()
        self._adopting = None

    # Requests

    def execute(self, header: Header, blocks: Sequence[Block]) -> Reply:
        """Carries out a READ or a CHANGED.

        Raises:
            Refusal: A check failed, or it is another request.
        """
        if header.op not in READS:
            raise Refusal(
                ErrorCode.READ_ONLY,
                f"header: op {header.op.name}; this pserver serves snapshot {self.newest.number}, it answers READ and "
                "CHANGED alone and nothing can be pushed to it",
            )
        if header.op is Op.CHANGED:
            return Reply(Op.ROWS, self._changed(header.step, header.push_floor), 0, header.step)
        is_newest = self._is_newest(header.step)
        return Reply(
            Op.ROWS, [self._read(index, block, is_newest) for index, block in enumerate(blocks)], 0, header.step
        )

    def acked_push(self, request: Header) -> int:
        """Returns 0: nothing is pushed."""
        return 0

    def durable_push(self, client_id: bytes) -> int:
        """Returns 0: nothing is pushed."""
        return 0

    def take_deferred_replies(self) -> list[DeferredReply]:
        """Returns nothing: no request is deferred."""
        return []

    def states(self) -> list[TableState]:
        """Returns the state of every table and dense array, with their specs."""
        tables = [
            TableState(each.spec.name, 0, each.rows.newest.num_rows, False, each.spec.to_json())
            for each in self.tables.values()
        ]
        arrays = [
            TableState(each.spec.name, 0, 0, each.values.newest is not None, each.spec.to_json())
            for each in self.arrays.values()
        ]
        return tables + arrays

    def close(self) -> None:
        """Frees all memory. Nothing may be called afterwards."""
        for table in self.tables.values():
            table.rows.close()

    def _is_newest(self, checksum: int) -> bool:
        """Returns True for the newest version, False for the older one."""
        for index, version in enumerate(self.versions):
            if version.checksum == checksum:
                return index == 0
        raise Refusal(
            ErrorCode.VERSION_GONE,
            f"version {checksum:016x}: this pserver does not have it, its newest is {self.newest.checksum:016x} of "
            f"snapshot {self.newest.number}",
            self.newest.checksum,
        )

    def _read(self, index: int, block: Block, is_newest: bool) -> Block:
        table, array = self.tables.get(block.table_id), self.arrays.get(block.table_id)
        served = table or array
        if served is None:
            raise Refusal(ErrorCode.UNKNOWN_TABLE, f"block {index}: no table has number {block.table_id:#010x} here")
        if block.schema_hash not in served.schema_hashes:
            raise Refusal(
                ErrorCode.SCHEMA,
                f"{served.where}: schema {block.schema_hash:016x} is not the one of its snapshots, "
                f"{served.spec.schema_hash:016x}",
            )
        if block.copies:
            raise Refusal(ErrorCode.SCHEMA, f"{served.where}: copies of rows have no versions here")
        if block.optimizer_step:
            raise Refusal(ErrorCode.SCHEMA, f"{served.where}: neither states nor the presence of rows can be read here")
        if table is None:
            assert array is not None, "one of them is served"
            rows = _values_of(array, block, array.values.newest if is_newest else array.values.older)
        else:
            rows = self._rows_of(table, block, is_newest)
        sent = rows if block.dtype is RowDtype.FLOAT32 else for_frame(rows, block.dtype)
        return Block(
            Action.ROWS, block.table_id, block.schema_hash, block.dim, block.count, None, sent, dtype=block.dtype
        )

    def _rows_of(self, table: ServedTable, block: Block, is_newest: bool) -> NDArray[np.float32]:
        ids, dim = block.ids, table.spec.dim
        if ids is None or block.dim != dim:
            raise Refusal(
                ErrorCode.SCHEMA,
                f"{table.where}: the block {'lacks ids' if ids is None else f'has dim {block.dim}'}, should have ids "
                f"and dim {dim}",
            )
        rows = self._memory.lend(block.count * dim).reshape(block.count, dim)
        buckets = self.placement.shard_of_bucket if self.num_shards > 1 else None
        # While a version is adopted, the newest one is what it replaces.
        is_older = not is_newest or self._adopting is not None
        num_misrouted = table.rows.pull(ids, rows, is_older=is_older, shard_of_bucket=buckets, shard=self.shard_index)
        if num_misrouted:
            raise Refusal(
                ErrorCode.WRONG_SHARD, f"{table.where}: {num_misrouted} of {block.count} ids are of another shard"
            )
        self.counters.num_pulled_rows += block.count
        return rows

    def _changed(self, checksum: int, before: int) -> list[Block]:
        """Returns the ids of the rows in which the newest version and the older one differ, which `before` is, or 0."""
        if not self._is_newest(checksum) or len(self.versions) == 1 or before not in (0, self.versions[1].checksum):
            raise Refusal(
                ErrorCode.VERSION_GONE,
                f"version {checksum:016x}: this pserver does not have it and the version {before:016x} before it; its "
                f"newest is {self.newest.checksum:016x} of snapshot {self.newest.number}",
                self.newest.checksum,
            )
        changed = [table for table in self.tables.values() if table.rows.num_changed]
        num_bytes = HEADER_BYTES + sum(BLOCK_BYTES + _ID_BYTES * table.rows.num_changed for table in changed)
        if num_bytes > self._max_reply_bytes:
            raise Refusal(
                ErrorCode.TOO_LARGE,
                f"frame: its reply would have {num_bytes} bytes, the limit is {self._max_reply_bytes}. Count all rows "
                "as changed",
            )
        blocks = []
        for table in changed:
            ids, spec = table.rows.changed_ids(), table.spec
            blocks.append(Block(Action.ROWS, spec.table_id, spec.schema_hash, spec.dim, len(ids), ids))
        return blocks


def spec_of_reads(spec: TableSpec) -> TableSpec:
    """Returns the spec of a table as it is served: without states, and with zeros for ids that an entry keeps out."""
    return replace(spec, rule=read_only.name, hyperparameters=(), initializer=spec.read_initializer, entry=None)


def check_same(served: ServedTable | ServedArray, spec: TableSpec | DenseSpec, origin: str) -> None:
    """Checks that a snapshot describes a table or dense array as it is served.

    Raises:
        SnapshotError: It does not; the message names both sides.
    """
    if isinstance(spec, TableSpec) and isinstance(served.spec, TableSpec):
        if spec_of_reads(spec) == spec_of_reads(served.spec):
            return
        differences = served.spec.differences(spec)
    elif isinstance(spec, DenseSpec) and isinstance(served.spec, DenseSpec):
        layouts = [[(each.name, each.offset, each.size) for each in one.segments] for one in (served.spec, spec)]
        if layouts[0] == layouts[1]:
            return
        differences = served.spec.differences(spec)
    else:
        differences = [f"kind {served.spec.kind} and {spec.kind}"]
    raise SnapshotError(f"{origin}: {served.where}: what is served and the snapshot differ: {', '.join(differences)}")


def _values_of(array: ServedArray, block: Block, values: NDArray[np.float32] | None) -> NDArray[np.float32]:
    size, end = array.end - array.begin, block.offset + block.count
    if block.ids is not None or block.dim != 1 or end > size:
        raise Refusal(
            ErrorCode.SCHEMA,
            f"{array.where}: {block.count} values from {block.offset} on with dim {block.dim}, the range of this shard "
            f"has {size} and no ids",
        )
    if values is None:
        raise Refusal(ErrorCode.NOT_READY, f"{array.where}: the snapshot has no values of it")
    return values[block.offset : end].reshape(-1, 1)
