"""Request: one frame of a call to one shard, as bytes, and where its reply goes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from fleet_sparse.wire.frame_format import BLOCK, BLOCK_BYTES, IDS, ROWS, STATISTICS_COLUMNS, Action, Buffer, Op
from fleet_sparse.wire.row_dtype import RowDtype

if TYPE_CHECKING:
    from .plain_rows import PlainRows

NO_STATISTICS: Mapping[str, Buffer] = MappingProxyType({})

Outs = Sequence[NDArray[np.float32]]
"""Arrays `(n, dim)` each: the rows of a reply are written to one after the other."""


class Request(msgspec.Struct, eq=False):
    """One frame to one shard. The link sets the fields from `request_id` on.

    Attributes:
        table: Block table.
        columns: Columns of the blocks, in order.
        num_bytes: Bytes of the columns.
        cost: Bytes of block table and columns of the frame, or of its reply, whichever is larger.
        outs: Destination of the rows of each PULL block.
        reply_table: Block table of the reply to the PULL blocks.
        reply_lengths: Bytes of each column of that reply.
        source: Rows from which `encode` fills in table, columns and destinations; None if they are filled in.
        received: Columns of the reply, if it has that block table and they are not in `outs` yet.
        is_filled: True if the columns of the reply were received into `outs`.
    """

    op: Op
    step: int = 0
    shard: int = 0
    part: int = 0
    num_parts: int = 1
    table: bytearray = msgspec.field(default_factory=bytearray)
    columns: list[Buffer] = msgspec.field(default_factory=list)
    num_bytes: int = 0
    cost: int = 0
    outs: list[Outs] = msgspec.field(default_factory=list)
    reply_table: bytes = b""
    reply_lengths: list[int] = msgspec.field(default_factory=list)
    num_pulled_rows: int = 0
    num_pushed_rows: int = 0
    source: PlainRows | None = None
    tag: Any = None  # set by the owner
    received: Sequence[Buffer] | None = None
    is_filled: bool = False
    request_id: int = 0
    order: int = 0  # order of submission; requests are always sent in this order
    push_seq: int = 0
    push_floor: int = 0
    submitted_at: float = 0.0
    sent_at: float = 0.0
    tries: int = 0
    waited_at: float = -math.inf  # time of the last WAIT reply
    is_noop: bool = False  # a no-op push: it takes the seq of a push that was refused

    def add(
        self,
        action: Action,
        fields: tuple[int, RowDtype, int, int, int],
        columns: tuple[Buffer | None, Buffer | None],
        numbers: tuple[float, int, float] = (0.0, 0, 1.0),
        statistics: Mapping[str, Buffer] = NO_STATISTICS,
        offset: int = 0,
    ) -> None:
        """Adds a block.

        Args:
            action: Its action.
            fields: table_id, dtype, schema_hash, count and dim.
            columns: Its ids and its rows; None for one that it does not have.
            numbers: learning_rate, optimizer_step and gradient_scale.
            statistics: Its columns with statistics, by name, in the order of their bits.
            offset: Of dense values, index of the first one in the shard's range.
        """
        table_id, dtype, schema_hash, count, dim = fields
        ids, rows = columns
        mask = num_bytes = 0
        if ids is not None:
            mask = IDS
            num_bytes = len(ids)
            self.columns.append(ids)
        if rows is not None:
            mask |= ROWS
            num_bytes += len(rows)
            self.columns.append(rows)
        for name, column in statistics.items():
            mask |= STATISTICS_COLUMNS[name].bit
            num_bytes += len(column)
            self.columns.append(column)
        self.table += BLOCK.pack(table_id, action, dtype, mask, schema_hash, count, dim, 0, *numbers, offset)
        self.num_bytes += num_bytes
        self.cost += BLOCK_BYTES + num_bytes

    def add_pull(
        self,
        fields: tuple[int, RowDtype, int, int, int],
        ids: Buffer | None,
        outs: Outs,
        reply_bytes: int,
        optimizer_step: int = 0,
        offset: int = 0,
    ) -> None:
        """Adds a PULL block, whose reply has `reply_bytes` bytes of rows that are written to `outs`."""
        table_id, dtype, schema_hash, count, dim = fields
        num_bytes = 0
        if ids is not None:
            num_bytes = len(ids)
            self.columns.append(ids)
        mask = IDS if ids is not None else 0
        self.table += BLOCK.pack(
            table_id, Action.PULL, dtype, mask, schema_hash, count, dim, 0, 0.0, optimizer_step, 1.0, offset
        )
        self.reply_table += BLOCK.pack(table_id, Action.ROWS, dtype, ROWS, schema_hash, count, dim, 0, 0.0, 0, 1.0, 0)
        self.reply_lengths.append(reply_bytes)
        self.outs.append(outs)
        self.num_bytes += num_bytes
        self.cost += BLOCK_BYTES + max(num_bytes, reply_bytes)

    def encode(self) -> None:
        """Fills in what a lane does not need."""
        if self.source is not None:
            source, self.source = self.source, None
            source.encode(self)

    def destinations(self) -> list[memoryview] | None:
        """The memory that the columns of the reply go to as they are; None if they must be converted or divided."""
        places: list[memoryview] = []
        for outs, length in zip(self.outs, self.reply_lengths, strict=True):
            out = outs[0]
            if len(outs) != 1 or out.nbytes != length or not out.flags.carray:
                return None
            places.append(out.data.cast("B"))
        return places
