"""Lane: requests of plain rows, sent to all shards in compiled code, and replies to pulls, received in it.

The bytes are those of `Requests` and `LinkHeader`. What is not plain is left to them: the lane says how far it came.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.wire.frame_format import (
    BLOCK,
    BLOCK_BYTES,
    HEADER_BYTES,
    IDS,
    ROWS,
    UNCHECKED_COLUMNS,
    Action,
    checksum_of,
)
from fleet_sparse.wire.kernels_lane import (
    AT_COLUMNS,
    BEGIN,
    BUFFER_BYTES,
    CHECKSUM,
    COMPLETE,
    END,
    FILL_COLUMNS,
    MESSAGE_BYTES,
    MSGHDR_WORDS,
    NUM_ACKS,
    NUM_BLOCKS,
    NUM_REPLY_BLOCKS,
    PUSH_SEQ,
    RECEIVED,
    REPLY_BYTES,
    SENT,
    STAGE,
    STEP,
    add_rows,
    finish_heads,
    receive_replies,
    send_frames,
)
from fleet_sparse.wire.link_header import LinkHeader, PlainReply
from fleet_sparse.wire.message_words import (
    BLOCK_WORDS,
    CHECKSUM_WORD,
    HEAD_WORDS,
    LEARNING_RATE_WORD,
    OPTIMIZER_STEP_WORD,
    PREFIX_WORDS,
    SCALE_WORD,
)
from fleet_sparse.wire.row_dtype import RowDtype
from fleet_sparse.wire.stream import Connection, FrameWriter

from .plain_rows import PlainRows
from .request import Request

MAX_TABLES = 64
"""Largest number of tables of a call: the head of its reply fits into the buffer of a stream."""
_TIMEOUT_MS, _MAX_POLLS = 20, 256


class LaneStream(Protocol):
    """The stream to one shard.

    Attributes:
        connection: None until it is connected. Its reader reads into a buffer that the lane uses, too.
        writer: Messages that wait to be sent.
        pause_s: Seconds between its end and the next attempt to connect; 0 once a frame was received.
        buffer: Memory that the reader of each connection reads into, and the lane between two frames.
    """

    connection: Connection | None
    writer: FrameWriter
    pause_s: float
    buffer: NDArray[np.int64] | None


class LaneReply(msgspec.Struct, frozen=True, eq=False):
    """How far the reply of a shard was received.

    Attributes:
        is_complete: True if head and columns were received. Their checksum is not verified.
        reply: Fields of the head; None if it was not received.
        head: The head; empty if it was not received.
        begin, end: Range of the bytes in the buffer that were received and not used.
        num_received: Bytes of columns and padding that were received in place.
        num_acks: Number of acks that were dropped.
    """

    is_complete: bool
    reply: PlainReply | None
    head: bytes
    begin: int
    end: int
    num_received: int
    num_acks: int


class Lane:
    """The frames of one call at a time. The thread that holds the I/O lock uses it.

    Args:
        streams: The stream to each shard, not connected yet.
        ready: Streams that may have a frame although they are not readable; `resume` appends to it.
        wake_fd: Ends a wait when it is readable.
    """

    def __init__(self, streams: Sequence[LaneStream], ready: deque[Any], wake_fd: int) -> None:
        num_shards = len(streams)
        self._streams = streams  # constant after construction, as the next three
        self._buffers = np.empty((num_shards, BUFFER_BYTES // 8), np.int64)
        for stream, buffer in zip(streams, self._buffers, strict=True):
            stream.buffer = buffer
        self._ready = ready
        self._wake_fd = wake_fd
        self._fds = np.full(num_shards, -1, np.int64)
        self._templates = np.zeros((num_shards, HEAD_WORDS), np.int64)
        self._fills = np.zeros((num_shards, FILL_COLUMNS), np.int64)
        self._positions = np.zeros((num_shards, 4), np.int64)
        self._message = np.zeros(MSGHDR_WORDS, np.int64)
        self._polled = np.zeros(2 * num_shards + 2, np.int32)
        self._spare = np.zeros(2, np.int64)
        self._all_shards = self._shards = np.arange(num_shards)
        self._pull_blocks, self._push_blocks = _Blocks(is_push=False), _Blocks(is_push=True)
        self._num_tables = 0
        self._allocate(1)

    def address(self, shard: int, header: LinkHeader) -> None:
        """Sets what the headers to a shard have in common."""
        self._templates[shard] = np.frombuffer(header.template, np.int64)

    def is_clear(self, *, receives: bool) -> bool:
        """Returns whether all streams are connected and no frame is sent in part; nor received, if it `receives`."""
        for shard, stream in enumerate(self._streams):
            connection = stream.connection
            if connection is None or stream.writer.num_waiting:
                return False
            reader = connection.reader
            if receives and (reader.missing or reader.begin < reader.end):
                return False
            self._fds[shard] = connection.number
        return True

    def send(self, rows: PlainRows, requests: Sequence[Request], headers: Sequence[LinkHeader]) -> tuple[int, bool]:
        """Sends the requests of a call; what a socket does not accept waits in its stream.

        Args:
            rows: The rows of the call.
            requests: Its requests, in the order of the shards.
            headers: Header of each link.

        Returns:
            The number of bytes of the frames, and True if all of their messages were sent completely.
        """
        if rows.num_tables > self._num_tables:
            self._allocate(rows.num_tables)
        fills, heads, lengths = self._fills, self._heads, self._lengths
        fills[:] = 0
        self._add_blocks(rows)
        positions = self._positions
        for request in requests:
            shard = request.shard
            positions[shard, 0] = request.request_id
            positions[shard, 1] = request.push_seq
            positions[shard, 2] = request.push_floor
            positions[shard, 3] = request.step
        finish_heads(fills, heads, lengths, self._templates, positions, int(rows.op))
        self._shards = self._all_shards
        if len(requests) < len(self._streams):
            self._shards = np.array([request.shard for request in requests], np.int64)
        for request in requests:
            shard = request.shard
            head = self._head_views[shard][: HEADER_BYTES + BLOCK_BYTES * int(fills[shard, NUM_BLOCKS])]
            if headers[shard].flags & UNCHECKED_COLUMNS:
                self._checksums[shard] = xxh3_64_intdigest(head)
            else:
                request.encode()
                self._checksums[shard] = checksum_of(head, request.columns, headers[shard].flags)
        send_frames(fills, heads, lengths, self._sends, self._message, self._shards, self._fds)
        num_bytes, is_sent = 0, True
        numbers = fills.tolist()
        for request in requests:
            fill = numbers[request.shard]
            head_bytes = HEADER_BYTES + BLOCK_BYTES * fill[NUM_BLOCKS]
            num_bytes += head_bytes + request.num_bytes
            if rows.is_deferred and request.outs:
                request.reply_table = bytes(self._expected_views[request.shard][: BLOCK_BYTES * fill[NUM_REPLY_BLOCKS]])
            if fill[SENT] < fill[MESSAGE_BYTES]:
                is_sent = False
                self._keep_rest(request, bytes(self._head_views[request.shard][:head_bytes]), fill[SENT])
        return num_bytes, is_sent

    def _add_blocks(self, rows: PlainRows) -> None:
        for is_push, batches, blocks in (
            (True, rows.pushes, self._push_blocks),
            (False, rows.pulls, self._pull_blocks),
        ):
            for number, (spec, unique, values, learning_rate, optimizer_step, _) in enumerate(batches):
                if blocks.specs[number] is not spec:
                    blocks.set(number, spec)
                if is_push:
                    blocks.numbers[number, 0, LEARNING_RATE_WORD] = learning_rate
                    blocks.words[number, 0, OPTIMIZER_STEP_WORD] = optimizer_step
                    blocks.numbers[number, 0, SCALE_WORD] = rows.weight
                ids, num_per_shard, begins = unique
                add_rows(
                    self._fills,
                    self._heads,
                    self._lengths,
                    self._sends,
                    self._expected,
                    self._places,
                    blocks.words[number],
                    self._spare,
                    ids,
                    values,
                    num_per_shard,
                    num_per_shard if begins is None else begins,
                    begins is not None,
                    is_push,
                    is_push and rows.to_all,
                )

    def _keep_rest(self, request: Request, head: bytes, num_sent: int) -> None:
        request.encode()
        stream = self._streams[request.shard]
        assert stream.connection is not None, "the lane is clear"
        stream.writer.put_rest([head, *request.columns], num_sent)
        stream.connection.update_events()

    def receive(self, requests: Sequence[Request], until_s: float) -> list[LaneReply]:
        """Receives the replies to pulls that were just sent, as far as they are plain and arrive without a long wait.

        Args:
            requests: As in `send`.
            until_s: Time, as of `time.monotonic`, at which something else is due.
        """
        receive_replies(
            self._fills,
            self._heads,
            self._expected,
            self._places,
            self._buffers,
            self._replies,
            self._message,
            self._polled,
            self._shards,
            self._fds,
            self._wake_fd,
            _TIMEOUT_MS,
            _MAX_POLLS,
            until_s,
        )
        fills, replies = self._fills.tolist(), []
        for request in requests:
            fill = fills[request.shard]
            is_complete, reply, head = fill[STAGE] == COMPLETE, None, b""
            if fill[STAGE] >= AT_COLUMNS:
                checksum = fill[CHECKSUM] & 0xFFFF_FFFF_FFFF_FFFF
                head = bytes(self._reply_views[request.shard][: HEADER_BYTES + BLOCK_BYTES * fill[NUM_REPLY_BLOCKS]])
                reply = True, request.request_id, fill[PUSH_SEQ], fill[STEP], fill[REPLY_BYTES], checksum
            if is_complete:
                self._streams[request.shard].pause_s = 0.0
            replies += [LaneReply(is_complete, reply, head, fill[BEGIN], fill[END], fill[RECEIVED], fill[NUM_ACKS])]
        return replies

    def resume(self, shard: int, reply: LaneReply, columns: Sequence[memoryview]) -> None:
        """Leaves the rest of a reply, or what follows it, to the reader of its stream.

        Args:
            shard: Shard of the reply.
            reply: How far it was received.
            columns: Where its columns belong, if its head was received and they are not complete.
        """
        stream = self._streams[shard]
        assert stream.connection is not None, "the lane is clear"
        placed: list[bytes | memoryview] = [] if reply.reply is None or reply.is_complete else [reply.head, *columns]
        stream.connection.reader.resume(reply.begin, reply.end, placed, reply.num_received)
        self._ready.append(stream)

    def _allocate(self, num_tables: int) -> None:
        """Allocates the arrays for calls of this many tables; what they had is lost."""
        self._num_tables = num_tables
        num_shards, num_columns = len(self._fds), 2 * num_tables
        head_words = HEAD_WORDS + BLOCK_WORDS * num_tables
        self._heads = np.zeros((num_shards, head_words), np.int64)
        self._head_views = [head.data.cast("B") for head in self._heads]
        self._checksums = self._heads.view(np.uint64)[:, CHECKSUM_WORD]
        self._lengths = np.zeros((num_shards, PREFIX_WORDS + 1 + num_columns), np.int64)
        self._sends = np.zeros((num_shards, 2 * (2 + 2 * num_columns)), np.int64)
        self._expected = np.zeros((num_shards, BLOCK_WORDS * num_tables), np.int64)
        self._places = np.zeros((num_shards, 2 * num_columns), np.int64)
        self._replies = np.zeros((num_shards, head_words), np.int64)
        self._reply_views = [head.data.cast("B") for head in self._replies]
        self._expected_views = [blocks.data.cast("B") for blocks in self._expected]
        self._pull_blocks.allocate(num_tables)
        self._push_blocks.allocate(num_tables)


class _Blocks:
    """Blocks of requests and replies, but for what differs from step to step.

    Attributes:
        specs: Table of each block; None if there is none yet.
        words: `(num_tables, 2, BLOCK_WORDS)`: block of a request, and block of its reply.
        numbers: The same as float64.
    """

    def __init__(self, *, is_push: bool) -> None:
        self._is_push = is_push
        self.allocate(0)

    def allocate(self, num_tables: int) -> None:
        """Allocates empty blocks for this many tables; the former ones are lost."""
        self.specs: list[TableSpec | None] = [None] * num_tables
        self.words = np.zeros((num_tables, 2, BLOCK_WORDS), np.int64)
        self.numbers = self.words.view(np.float64)

    def set(self, number: int, spec: TableSpec) -> None:
        """Sets a block to those of a table."""
        self.specs[number] = spec
        request = (Action.PUSH, IDS | ROWS) if self._is_push else (Action.PULL, IDS)
        for row, (action, columns) in zip(self.words[number], (request, (Action.ROWS, ROWS)), strict=True):
            block = BLOCK.pack(
                *(spec.table_id, action, RowDtype.FLOAT32, columns),
                *(spec.schema_hash, 0, spec.dim, 0, 0.0, 0, 1.0, 0),
            )
            row[:] = np.frombuffer(block, np.int64)
