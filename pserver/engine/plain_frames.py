"""PlainFrames: pulls and pushes of rows as they lie in received messages, for all tables of a frame at once.

A frame is plain if every block names a table whose rows are pulled or pushed without an entry policy, statistics,
clipping, decay or an open copy-on-write view, in float32, and nothing in it is wrong. What is not plain is left to
`Shard.execute`, which also says what is wrong. Both use the same kernels for rows.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleet_sparse.core import table_words as words
from fleet_sparse.wire import kernels_answer as answer
from fleet_sparse.wire.frame_format import IDS, Action, Buffer
from fleet_sparse.wire.frame_format import ROWS as ROWS_COLUMN
from fleet_sparse.wire.row_dtype import RowDtype

from ..storage.table_store import TableStore
from ..tables.embedding import EmbeddingTable
from ..tables.row_limit import MAX_UNCHECKED_IDS
from ..tables.table import TableContext
from .table_map import TableEntry, TableMap

MAX_BLOCKS = 256
"""Largest number of blocks of a plain frame. `MAX_UNCHECKED_IDS` is that of ids of them all."""

MAX_REMEMBERED_CLIENTS, MAX_REMEMBERED_IDS = 64, 1 << 16
"""Largest number of clients whose last pull is remembered, and of ids of such a pull: up to 1.25 MB each."""

_FLOAT_BYTES = 4
_SIGN = 1 << 63


class PlainFrame(NamedTuple):
    """A frame whose blocks `find` found plain. It is valid until the next call of `find`.

    Attributes:
        message: The message without its prefix.
        num_parts: Number of parts of the message.
        num_blocks: Number of blocks of the frame.
        num_rows: Number of ids of all blocks.
        column_bytes: Size of all columns.
        reply_bytes: Size of the message of the reply to a pull.
        reply_column_bytes: Size of its columns.
    """

    message: NDArray[np.int64]
    num_parts: int
    num_blocks: int
    num_rows: int
    column_bytes: int
    reply_bytes: int
    reply_column_bytes: int


class _Pulled:
    """The rows that a client pulled last. It is likely to push the same ids, which need not be found again then.

    Attributes:
        stamp: The layout at the pull.
        blocks: Blocks of the pull.
        num_blocks: Their number.
        rows: `(2, n)`: ids of all blocks, and the row index of each, -1 for one without a row.
    """

    __slots__ = ("blocks", "num_blocks", "rows", "stamp")

    def __init__(self) -> None:
        self.stamp: object = None
        self.blocks = np.zeros((MAX_BLOCKS, answer.BLOCK_COLUMNS), np.int64)
        self.num_blocks = 0
        self.rows = np.empty((2, 0), np.int64)


class PlainPush(NamedTuple):
    """Mutation: the checked gradients of a plain frame, for all of its tables."""

    frames: PlainFrames
    frame: PlainFrame
    client_id: bytes

    def apply(self) -> int:
        """Applies the gradients with the rules of the tables; returns the number of rows updated.

        Raises:
            MemoryError: There is no room for more rows. No row has another value than before.
        """
        return self.frames.apply(self.frame, self.client_id)

    def num_ids(self) -> dict[int, int]:
        """Returns the number of ids by table."""
        return self.frames.num_ids(self.frame)

    def has_no_effect_after(self, error: BaseException) -> bool:
        """Returns whether nothing changed if `apply` raised this."""
        return isinstance(error, MemoryError)


class PlainFrames:
    """Finds plain frames, and carries them out, one at a time.

    Args:
        tables: Tables of the shard.
        context: What they share.
    """

    def __init__(self, tables: TableMap, context: TableContext) -> None:
        self._tables = tables
        self._context = context
        self._layout = context.layout
        self._stamp: object = None
        self._described: list[EmbeddingTable] = []  # by row of `_rows`
        self._rows = np.zeros((0, words.NUM_WORDS), np.int64)
        self._first_rows: dict[int, int] = {}  # by table
        self._has_group_each = False  # tables of one rule have had different learning rates
        self._group_keys: list[object] = []
        self._group_stores: list[TableStore] = []  # one store of each group
        self._groups = np.zeros((0, answer.GROUP_COLUMNS), np.int64)
        self._scalars: list[NDArray[np.float32]] = []
        self._blocks = np.zeros((MAX_BLOCKS, answer.BLOCK_COLUMNS), np.int64)
        self._sums = np.zeros(answer.NUM_SUMS, np.int64)
        self._counts = np.zeros(3, np.int64)
        self._row_indices = np.empty(1 << 10, np.int64)
        self._fingerprints = np.empty(1 << 10, np.uint32)
        self._scratch = np.empty(1 << 10, np.int64)
        self._pulled: dict[bytes, _Pulled] = {}  # by client
        self._any_pulled = _Pulled()  # of clients and pulls that are not remembered

    def find(
        self, data: Buffer, num_parts: int, num_blocks: int, *, is_push: bool, is_staged: bool = False
    ) -> PlainFrame | None:
        """Returns a frame if all of its blocks are plain, so far as they can be judged without its columns.

        Args:
            data: A message without its prefix, aligned; at least lengths, header and block table are there.
            num_parts: Number of parts of the message.
            num_blocks: Number of blocks of the frame.
            is_push: True for a PUSH, False for a PULL.
            is_staged: True if the scales of a push are weights of its step, and nothing else is part of the step.
        """
        if num_blocks > MAX_BLOCKS:
            return None
        if self._stamp is not self._layout.stamp:
            self._describe()
        message = np.frombuffer(data, np.int64)
        if not message.flags.behaved:
            return None
        is_plain = answer.find_blocks(
            message, num_parts, num_blocks, is_push, is_staged, self._rows, self._groups, self._blocks, self._sums
        )
        _, num_rows, largest, column_bytes, reply_bytes, reply_column_bytes, num_stale, is_mixed = self._sums.tolist()
        if not is_plain:
            if is_mixed and not self._has_group_each:
                self._has_group_each = True
                self._describe_all()
                return self.find(data, num_parts, num_blocks, is_push=is_push, is_staged=is_staged)
            return None
        if num_rows > MAX_UNCHECKED_IDS:
            return None
        if num_stale:
            self._update_scalars()
        if is_push and len(self._row_indices) < num_rows:
            self._row_indices = np.empty(2 * num_rows, np.int64)
        if is_push and len(self._fingerprints) < answer.FINGERPRINTS_PER_ID * (largest + 1):
            self._fingerprints = np.empty(2 * answer.FINGERPRINTS_PER_ID * (largest + 1), np.uint32)
            self._scratch = np.empty(6 * largest, np.int64)
        return PlainFrame(message, num_parts, num_blocks, num_rows, column_bytes, reply_bytes, reply_column_bytes)

    def pull(self, frame: PlainFrame, client_id: bytes) -> NDArray[np.float32] | None:
        """Returns the message of the reply to a pull, all but its header; None if an id is of another shard."""
        pulled = self._pulled.get(client_id) if frame.num_rows <= MAX_REMEMBERED_IDS else self._any_pulled
        if pulled is None:
            pulled = self._remember(client_id)
        if pulled.rows.shape[1] < frame.num_rows:
            pulled.rows = np.empty((2, frame.num_rows + frame.num_rows // 4), np.int64)
        reply = self._context.reply_memory.lend(frame.reply_bytes // _FLOAT_BYTES)
        placement = self._context.placement
        is_pulled = answer.pull_blocks(
            frame.message,
            frame.num_parts,
            frame.num_blocks,
            self._rows,
            self._blocks,
            placement.shard_of_bucket,
            self._context.shard,
            placement.num_shards > 1,
            pulled.rows,
            reply,
        )
        if not is_pulled:
            pulled.stamp = None
            return None
        pulled.blocks, self._blocks = self._blocks, pulled.blocks
        pulled.num_blocks, pulled.stamp = frame.num_blocks, self._stamp
        return reply

    def check_push(self, frame: PlainFrame, client_id: bytes) -> PlainPush | None:
        """Returns what the push of a client changes; None if its ids or gradients are not plain, or wrong."""
        is_plain = answer.check_blocks(
            frame.message,
            frame.num_blocks,
            self._rows,
            self._blocks,
            self._context.placement.shard_of_bucket,
            self._context.shard,
            self._row_indices,
            self._fingerprints,
            self._counts,
        )
        return PlainPush(self, frame, client_id) if is_plain else None

    def apply(self, frame: PlainFrame, client_id: bytes) -> int:
        """Applies a checked push; returns the number of rows updated.

        Raises:
            MemoryError: There is no room for more rows. No row has another value than before.
        """
        message, num_blocks = frame.message, frame.num_blocks
        pulled = self._pulled.get(client_id, self._any_pulled)
        num_new = answer.apply_or_create(
            message,
            frame.num_parts,
            num_blocks,
            self._rows,
            self._groups,
            self._blocks,
            self._row_indices,
            pulled.blocks,
            pulled.num_blocks if pulled.stamp is self._stamp else 0,
            pulled.rows,
            self._scratch,
        )
        if num_new:
            self._note_growth(num_blocks)
            if num_new < 0:
                raise MemoryError("no room for more rows")
            answer.apply_blocks(
                message, frame.num_parts, num_blocks, self._rows, self._groups, self._blocks, self._row_indices
            )
        return frame.num_rows

    def num_ids(self, frame: PlainFrame) -> dict[int, int]:
        """Returns the number of ids of a frame by table."""
        found: dict[int, int] = {}
        for row, count in self._blocks[: frame.num_blocks, [answer.TABLE, answer.COUNT]].tolist():
            table_id = self._described[row].spec.table_id
            found[table_id] = found.get(table_id, 0) + count
        return found

    def _remember(self, client_id: bytes) -> _Pulled:
        """Returns the place for what a client pulled last; another client is forgotten for it."""
        if len(self._pulled) >= MAX_REMEMBERED_CLIENTS:
            del self._pulled[next(iter(self._pulled))]
        pulled = self._pulled[client_id] = _Pulled()
        return pulled

    def _note_growth(self, num_blocks: int) -> None:
        """Adapts the stores to the rows that were created."""
        for row, _, _, _, _, num_before in self._blocks[:num_blocks].tolist():
            self._described[row].note_growth(num_before)

    def _describe(self) -> None:
        """Writes `_rows` as the tables are now: those of the tables that changed, or all rows and groups."""
        self._stamp = self._layout.stamp
        changed = self._layout.take_changed()
        if None in changed:
            self._describe_all()
            return
        for table_id in changed:
            if table_id in self._first_rows:
                self._describe_table(self._tables[table_id])

    def _describe_all(self) -> None:
        """Writes `_rows` and `_groups`."""
        self._described, self._group_stores, self._first_rows = [], [], {}
        groups: dict[object, int] = {}
        rule_groups: list[int] = []
        plain: list[TableEntry] = []
        for table_id, entry in self._tables.items():
            table = entry.table
            if not (isinstance(table, EmbeddingTable) and table.has_plain_pulls and entry.schema_hashes):
                continue
            spec = table.spec
            group = groups.setdefault(
                table_id if self._has_group_each else (spec.rule, spec.hyperparameters), len(groups)
            )
            if group == len(self._group_stores):
                self._group_stores.append(table.store)
            plain.append(entry)
            self._first_rows[table_id] = len(self._described)
            self._described += [table] * len(entry.schema_hashes)
            rule_groups += [group] * len(entry.schema_hashes)
        self._rows = np.zeros((len(self._described), words.NUM_WORDS), np.int64)
        self._rows[:, words.RULE_GROUP] = rule_groups
        for entry in plain:
            self._describe_table(entry)
        if self._group_keys != [*groups]:  # else the frame at hand may use them
            self._group_keys = [*groups]
            self._groups = np.zeros((len(groups), answer.GROUP_COLUMNS), np.int64)
            self._scalars = [np.empty(0, np.float32)] * len(groups)

    def _describe_table(self, entry: TableEntry) -> None:
        """Writes the rows of one table, all but their groups."""
        table = entry.table
        assert isinstance(table, EmbeddingTable), "no other table has rows here"
        table_id = table.spec.table_id
        first = self._first_rows[table_id]
        rows = self._rows[first : first + len(entry.schema_hashes)]
        has_plain_pushes = table.describe(rows[0])
        rows[0, words.FIRST_ROW] = first
        rows[0, words.PULL_WORD] = _first_word(table_id, Action.PULL, IDS)
        rows[0, words.ROWS_WORD] = _first_word(table_id, Action.ROWS, ROWS_COLUMN)
        rows[1:] = rows[0]
        push_word = _first_word(table_id, Action.PUSH, IDS | ROWS_COLUMN) if has_plain_pushes else 0
        for row, (schema_hash, is_trained) in zip(rows, entry.schema_hashes.items(), strict=True):
            row[words.SCHEMA] = schema_hash - 2 * (schema_hash & _SIGN)
            row[words.PUSH_WORD] = push_word if is_trained else 0

    def _update_scalars(self) -> None:
        """Computes the scalars that the last frame wants, for each group once."""
        for number, (group, store) in enumerate(zip(self._groups, self._group_stores, strict=True)):
            if group[answer.GROUP_MARK] == self._sums[answer.NUM_FRAMES]:
                wanted = group[answer.WANTED_RATE : answer.WANTED_STEP + 1]
                scalars = store.scalars(float(wanted[:1].view(np.float64)[0]), int(wanted[1]))
                scalars = np.ascontiguousarray(scalars, np.float32)
                self._scalars[number] = scalars
                group[answer.SCALARS], group[answer.NUM_SCALARS] = scalars.ctypes.data, scalars.size
                group[answer.RATE], group[answer.STEP] = wanted


def _first_word(table_id: int, action: Action, columns: int) -> int:
    """Returns the first word of a block of rows in float32."""
    return table_id | action << 32 | RowDtype.FLOAT32 << 40 | columns << 48
