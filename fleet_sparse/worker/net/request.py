"""Request: one frame of a call to one shard, as bytes, and where its reply goes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from fleet_sparse.wire.frame_format import (
    BLOCK,
    BLOCK_BYTES,
    COPY_COLUMNS,
    DIVISIBLE,
    HEADER_BYTES,
    IDS,
    MAX_BLOCKS,
    MAX_PARTS,
    ROWS,
    STATISTICS_BYTES,
    STATISTICS_COLUMNS,
    Action,
    Block,
    Buffer,
    Frame,
    Op,
)
from fleet_sparse.wire.row_dtype import RowDtype

from .requests import FLOAT_BYTES, ID_BYTES, Outs, rows_between, write_rows

if TYPE_CHECKING:
    from .plain_rows import PlainRows

_SLACK_BYTES, _VERSION_BYTES = 1, 4  # of an id in the answer to an ask

# With this many columns another block fits into a frame, whatever it has.
_MAX_COLUMNS = MAX_PARTS - 1 - 2 - len(STATISTICS_COLUMNS)


class Request(msgspec.Struct, eq=False):
    """Implements `ShardRequest` by one frame. The link sets the fields from `request_id` on.

    Attributes:
        blocks: Its blocks; empty if a lane encodes them.
        table: Block table.
        columns: Columns of the blocks, in order.
        num_bytes: Bytes of the columns.
        cost: Bytes of block table and columns of the frame, or of its reply, whichever is larger.
        outs: Destination of the rows of each PULL block that does not ask about copies.
        reply_table: Block table of the reply to these PULL blocks.
        reply_lengths: Bytes of each column of that reply.
        num_states: For each PULL block that asks about copies, number of states of a row in the answer.
        source: Rows from which `encode` fills in table, columns and destinations; None if they are filled in.
        received: Columns of the reply, if it has that block table and they are not in `outs` yet.
        is_filled: True if the columns of the reply were received into `outs`.
    """

    op: Op
    step: int = 0
    shard: int = 0
    part: int = 0
    num_parts: int = 1
    blocks: list[Block] = msgspec.field(default_factory=list)
    table: bytearray = msgspec.field(default_factory=bytearray)
    columns: list[Buffer] = msgspec.field(default_factory=list)
    num_bytes: int = 0
    cost: int = 0
    outs: list[Outs] = msgspec.field(default_factory=list)
    reply_table: bytes = b""
    reply_lengths: list[int] = msgspec.field(default_factory=list)
    num_states: list[int] = msgspec.field(default_factory=list)
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
    is_replay: bool = False  # an acked push, kept in memory of its own: no call waits for it

    @property
    def is_empty(self) -> bool:
        """True if it has no blocks."""
        return not self.blocks

    def add(self, block: Block, outs: Outs | None = None, *, num_states: int = 0) -> None:
        """As `ShardRequest`."""
        mask, count, num_bytes, dtype = 0, block.count, 0, block.dtype
        if block.ids is not None:
            mask = IDS
            num_bytes = ID_BYTES * count
            self.columns.append(_bytes_of(block.ids))
        if block.rows is not None:
            mask |= ROWS
            num_bytes += block.rows.nbytes
            self.columns.append(_bytes_of(block.rows))
        for name, column in block.statistics.items():
            mask |= STATISTICS_COLUMNS[name].bit
            num_bytes += column.nbytes
            self.columns.append(_bytes_of(column))
        for name, column in block.copies.items():
            mask |= COPY_COLUMNS[name].bit
            num_bytes += column.nbytes
            self.columns.append(_bytes_of(column))
        table_id, schema_hash, dim = block.table_id, block.schema_hash, block.dim
        numbers = block.learning_rate, block.optimizer_step, block.gradient_scale
        self.table += BLOCK.pack(
            table_id, block.action, dtype, mask, schema_hash, count, dim, 0, *numbers, block.offset
        )
        self.blocks.append(block)
        self.num_bytes += num_bytes
        num_rows = 0 if block.ids is None else count
        if outs is None and block.action is Action.PULL:
            self.num_states.append(num_states)
            self.num_pulled_rows += num_rows
            self.cost += BLOCK_BYTES + _cost_of(block, num_states)
            return
        if outs is None:
            self.num_pushed_rows += num_rows
            self.cost += BLOCK_BYTES + num_bytes
            return
        length = count * dim * dtype.in_frames.itemsize
        self.reply_table += BLOCK.pack(table_id, Action.ROWS, dtype, ROWS, schema_hash, count, dim, 0, 0.0, 0, 1.0, 0)
        self.reply_lengths.append(length)
        self.outs.append(outs)
        self.num_pulled_rows += num_rows
        self.cost += BLOCK_BYTES + max(num_bytes, length)

    def within(self, max_frame_bytes: int) -> Sequence[Request]:
        """As `ShardRequest`: itself, or several if its frame or its reply would be too large."""
        budget = max_frame_bytes - HEADER_BYTES
        if self.cost > budget or len(self.blocks) > MAX_BLOCKS or len(self.columns) > _MAX_COLUMNS:
            return _split(self, budget)
        return (self,)

    def encode(self) -> None:
        """Fills in what a lane does not need."""
        if self.source is not None:
            source, self.source = self.source, None
            source.encode(self)

    def fill(self, reply: Frame | None) -> str | None:
        """Copies the rows of a reply into the arrays that wait for them, unless they were received there.

        Args:
            reply: The reply; None if it was not decoded, because `received` or `outs` has its columns.

        Returns:
            What is wrong with the reply; None if it is right, and only then is anything copied.
        """
        if not self.outs or self.is_filled:
            return None
        described = [
            (id, code, count, dim) for id, _, code, _, _, count, dim, *_ in BLOCK.iter_unpack(self.reply_table)
        ]
        if self.received is not None:
            for (_, code, _, _), column, outs in zip(described, self.received, self.outs, strict=True):
                dtype = RowDtype(code)
                rows: NDArray[Any] = np.frombuffer(column, dtype.in_frames)
                write_rows(rows.reshape(-1, outs[0].shape[1]), dtype, outs)
            return None
        answers = [] if reply is None else reply.blocks[: len(self.outs)]
        if [(each.table_id, each.dtype, each.count, each.dim) for each in answers] != described:
            return _ANOTHER
        for answer, outs in zip(answers, self.outs, strict=True):
            assert answer.rows is not None, "a ROWS block has rows"
            write_rows(answer.rows, answer.dtype, outs)
        return None

    def destinations(self) -> list[memoryview] | None:
        """The memory that the columns of the reply go to as they are; None if they must be converted or divided."""
        places: list[memoryview] = []
        for outs, length in zip(self.outs, self.reply_lengths, strict=True):
            out = outs[0]
            if len(outs) != 1 or out.nbytes != length or not out.flags.carray:
                return None
            places.append(out.data.cast("B"))
        return places


def _bytes_of(array: NDArray[Any]) -> memoryview:
    """The bytes of a contiguous array."""
    return array.data.cast("B") if array.size else _NOTHING


_NOTHING = memoryview(b"")
_ANOTHER = "the reply has other tables, counts, dims or dtypes than the request"


def _split(whole: Request, budget: int) -> list[Request]:
    """Divides a request whose frame, or whose reply, would be too large, between two blocks, ids or dense values."""
    requests, all_outs = [Request(whole.op, whole.step, whole.shard)], iter(whole.outs)
    of_asks = iter(whole.num_states)
    for block in whole.blocks:
        is_ask = block.action is Action.PULL and bool(block.copies)
        outs = next(all_outs) if block.action is Action.PULL and not is_ask else None
        num_states = next(of_asks) if is_ask else 0
        count, bytes_per_row = block.count, max(-(-_cost_of(block, num_states) // max(block.count, 1)), 1)
        is_divisible = block.ids is not None or block.action in DIVISIBLE
        begin = 0
        while begin < max(count, 1):
            request = requests[-1]
            has_block = len(request.blocks) < MAX_BLOCKS and len(request.columns) <= _MAX_COLUMNS
            num_rows = (budget - request.cost - BLOCK_BYTES) // bytes_per_row if has_block else -1
            if num_rows >= count - begin:
                request.add(*(_part_of(block, outs, begin, count) if begin else (block, outs)), num_states=num_states)
                break
            if is_divisible and num_rows > 0:
                request.add(*_part_of(block, outs, begin, begin + num_rows), num_states=num_states)
                begin += num_rows
            elif request.is_empty:
                what = "a row" if is_divisible else f"{count} factors"
                raise ValueError(
                    f"request: {what} of dim {block.dim} cannot go into a frame of {budget + HEADER_BYTES} bytes. "
                    "Set FLEET_SPARSE_MAX_FRAME_BYTES higher, for workers and pservers"
                )
            requests.append(Request(whole.op, whole.step, whole.shard))
    for part, request in enumerate(requests):
        request.part, request.num_parts = part, len(requests)
    return requests


def _cost_of(block: Block, num_states: int = 0) -> int:
    """Bytes of the columns of a block, or of those of its reply, whichever is larger."""
    of_ids = 0 if block.ids is None else ID_BYTES * block.count
    of_rows = block.count * block.dim * block.dtype.in_frames.itemsize
    if block.action is Action.PULL and block.copies:
        of_ids += _VERSION_BYTES * block.count
        of_rows += (_SLACK_BYTES + _VERSION_BYTES + FLOAT_BYTES * block.dim * num_states) * block.count
        return max(of_ids, of_rows) + 2 * BLOCK_BYTES  # the rows that follow may be in two blocks of their own
    of_rows += STATISTICS_BYTES * block.count * len(block.statistics)
    of_rows += sum(column.nbytes for column in block.copies.values())
    return max(of_ids, of_rows) if block.action is Action.PULL else of_ids + of_rows


def _part_of(block: Block, outs: Outs | None, begin: int, end: int) -> tuple[Block, Outs | None]:
    """The rows `[begin, end)` of a block, and where they go."""
    part = Block(
        *(block.action, block.table_id, block.schema_hash, block.dim, end - begin),
        None if block.ids is None else block.ids[begin:end],
        None if block.rows is None else block.rows[begin:end],
        *(block.learning_rate, block.optimizer_step, block.gradient_scale, block.dtype),
        {name: column[begin:end] for name, column in block.statistics.items()},
        block.offset + begin if block.ids is None else 0,
        {name: column[begin:end] for name, column in block.copies.items()},
    )
    return part, None if outs is None else rows_between(outs, begin, end)
