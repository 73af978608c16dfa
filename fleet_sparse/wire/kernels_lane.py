"""Kernels that write, send and receive the frames of plain pulls and pushes, for all shards at once, without the GIL.

docs/protocol.md has the bytes; here they are little-endian words of 64 bits. Each array has one row for each shard. A
kernel that meets anything unusual returns at once: `fills` says how far it came, and Python continues from there.

The system calls are those of Linux on a 64-bit machine. None of them blocks but `poll`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types
from numpy.typing import NDArray

from fleet_sparse.core.jit import BOOL, FLOAT64, INT64, INT64_IN, INT64S, INT64S_2D, inlined, kernel

from .frame_format import HEADER_BYTES, Op
from .message_words import (
    BLOCK_WORDS,
    CHECKSUM_WORD,
    CLUSTER_ID_WORD,
    COLUMN_BYTES_WORD,
    COUNT_WORD,
    FLAGS_SHIFT,
    HEAD_BYTES_WORD,
    HEAD_WORDS,
    NUM_BLOCKS_SHIFT,
    NUM_BLOCKS_WORD,
    OP_WORD,
    PREFIX_WORDS,
    PUSH_FLOOR_WORD,
    PUSH_SEQ_WORD,
    REQUEST_ID_WORD,
    RESERVED_WORD,
    STEP_WORD,
    STREAM_MAGIC,
    WORD_BYTES,
)

_INT32S = types.Array(types.int32, 1, "C")
_ROWS_IN = types.Array(types.float32, 2, "C", readonly=True, aligned=False)

_sendmsg = types.ExternalFunction("sendmsg", types.int64(types.int32, types.uintp, types.int32))
_recvmsg = types.ExternalFunction("recvmsg", types.int64(types.int32, types.uintp, types.int32))
_recv = types.ExternalFunction("recv", types.int64(types.int32, types.uintp, types.uintp, types.int32))
_poll = types.ExternalFunction("poll", types.int32(types.uintp, types.uintp, types.int32))
_clock_gettime = types.ExternalFunction("clock_gettime", types.int32(types.int32, types.uintp))
_memcpy = types.ExternalFunction("memcpy", types.uintp(types.uintp, types.uintp, types.uintp))
_NOSIGNAL, _DONTWAIT = 0x4000, 0x40
_POLLIN = 1
_MONOTONIC = 1  # the clock of `time.monotonic`
MSGHDR_WORDS = 7

BUFFER_BYTES = 16 << 10
_ACK, _ROWS = int(Op.ACK), int(Op.ROWS)
# An ack: bytes of its message without the prefix, and word of the message at which its head begins.
_ACK_BYTES, _ACK_HEAD = WORD_BYTES + HEADER_BYTES, PREFIX_WORDS + 1
_LOWER, _LOWER_16 = 0xFFFF_FFFF, 0xFFFF

# Columns of `fills`.
NUM_BLOCKS, NUM_PARTS, NUM_SENDS, COLUMN_BYTES, MESSAGE_BYTES = 0, 1, 2, 3, 4
NUM_PLACES, REPLY_BYTES, REPLY_MESSAGE_BYTES = 5, 6, 7
SENT = 8
STAGE, BEGIN, END, NEXT_PLACE, RECEIVED, NUM_ACKS = 9, 10, 11, 12, 13, 14
PUSH_SEQ, STEP, CHECKSUM = 15, 16, 17
NUM_REPLY_BLOCKS = 18
FILL_COLUMNS = 19

# Stages of a reply.
IDLE, AT_HEAD, AT_COLUMNS, COMPLETE = 0, 1, 2, 3


@inlined
def _append_send(fills: Any, sends: Any, shard: Any, address: Any, num_bytes: Any, padding: Any) -> None:
    """Appends a column of a request."""
    at = 2 + fills[shard, NUM_SENDS]  # behind message head and head
    sends[shard, 2 * at] = address
    sends[shard, 2 * at + 1] = num_bytes
    padded = -num_bytes & 7
    if padded:
        at += 1
        sends[shard, 2 * at] = padding
        sends[shard, 2 * at + 1] = padded
    fills[shard, NUM_SENDS] = at - 1
    fills[shard, NUM_PARTS] += 1
    fills[shard, COLUMN_BYTES] += num_bytes
    fills[shard, MESSAGE_BYTES] += num_bytes + padded


@kernel(
    *(INT64S_2D, INT64S_2D, INT64S_2D, INT64S_2D, INT64S_2D, INT64S_2D, INT64S_2D, INT64S),
    *(INT64_IN, _ROWS_IN, INT64_IN, INT64_IN, BOOL, BOOL, BOOL),
)
def add_rows(
    fills: NDArray[np.int64],
    heads: NDArray[np.int64],
    lengths: NDArray[np.int64],
    sends: NDArray[np.int64],
    expected: NDArray[np.int64],
    places: NDArray[np.int64],
    blocks: NDArray[np.int64],
    spare: NDArray[np.int64],
    ids: NDArray[np.int64],
    values: NDArray[np.float32],
    num_per_shard: NDArray[np.int64],
    begins: NDArray[np.int64],
    has_begins: bool,
    is_push: bool,
    keeps_empty: bool,
) -> None:
    """Adds the rows of one table to the requests of all shards, or to the replies that they ask for.

    Args:
        fills: `(num_shards, FILL_COLUMNS)`, zeros before the first table.
        heads: Heads of the requests; the blocks are written.
        lengths: Head of the stream message of each request; the lengths of the columns are written.
        sends: What is sent after message head and head: address and number of bytes of each piece.
        expected: Blocks of each reply.
        places: Where the columns of each reply go: address and number of bytes of each piece.
        blocks: `(2, BLOCK_WORDS)`: block of a request for these rows, and of its reply, but for the count.
        spare: A word of zeros for padding that is sent, and a word for padding that is received.
        ids: `(n,)`, those of shard 0 first if there are no begins.
        values: `(n, dim)`: gradients of a push; memory for the rows of a pull.
        num_per_shard: `(num_shards,)`; without begins their sum is n.
        begins: `(num_shards,)`, index of the first id of each shard.
        has_begins: False to ignore `begins`: the ids are all of `ids`.
        is_push: True for a push.
        keeps_empty: True if a shard without ids gets a block, too.
    """
    padding, waste = np.int64(spare.ctypes.data), np.int64(spare[1:].ctypes.data)
    ids_at, values_at = np.int64(ids.ctypes.data), np.int64(values.ctypes.data)
    row_bytes = 4 * values.shape[1]
    for shard in range(fills.shape[0]):
        count = num_per_shard[shard]
        if count == 0 and not keeps_empty:
            continue
        if has_begins:
            ids_at = np.int64(ids.ctypes.data) + WORD_BYTES * begins[shard]
            values_at = np.int64(values.ctypes.data) + row_bytes * begins[shard]
        number = fills[shard, NUM_BLOCKS]
        block = HEAD_WORDS + BLOCK_WORDS * number
        for word in range(BLOCK_WORDS):
            heads[shard, block + word] = blocks[0, word]
        heads[shard, block + COUNT_WORD] = count
        num_bytes = row_bytes * count
        lengths[shard, PREFIX_WORDS + 1 + fills[shard, NUM_PARTS]] = WORD_BYTES * count
        _append_send(fills, sends, shard, ids_at, WORD_BYTES * count, padding)
        if is_push:
            lengths[shard, PREFIX_WORDS + 1 + fills[shard, NUM_PARTS]] = num_bytes
            _append_send(fills, sends, shard, values_at, num_bytes, padding)
        else:
            reply_block = BLOCK_WORDS * fills[shard, NUM_REPLY_BLOCKS]
            for word in range(BLOCK_WORDS):
                expected[shard, reply_block + word] = blocks[1, word]
            expected[shard, reply_block + COUNT_WORD] = count
            fills[shard, NUM_REPLY_BLOCKS] += 1
            at = fills[shard, NUM_PLACES]
            places[shard, 2 * at] = values_at
            places[shard, 2 * at + 1] = num_bytes
            padded = -num_bytes & 7
            if padded:
                at += 1
                places[shard, 2 * at] = waste
                places[shard, 2 * at + 1] = padded
            fills[shard, NUM_PLACES] = at + 1
            fills[shard, REPLY_BYTES] += num_bytes
            fills[shard, REPLY_MESSAGE_BYTES] += num_bytes + padded
        fills[shard, NUM_BLOCKS] = number + 1
        ids_at += WORD_BYTES * count
        values_at += num_bytes


@kernel(INT64S_2D, INT64S_2D, INT64S_2D, INT64S_2D, INT64S_2D, INT64)
def finish_heads(
    fills: NDArray[np.int64],
    heads: NDArray[np.int64],
    lengths: NDArray[np.int64],
    templates: NDArray[np.int64],
    positions: NDArray[np.int64],
    op: int,
) -> None:
    """Writes the headers of all requests, without their checksums, and the heads of their messages.

    Args:
        fills: As `add_rows` left them.
        heads: As in `add_rows`.
        lengths: As in `add_rows`.
        templates: `(num_shards, HEAD_WORDS)`: what all headers to a shard have in common.
        positions: `(num_shards, 4)`: request_id, push_seq, push_floor and step of each request.
        op: Op of the requests.
    """
    for shard in range(fills.shape[0]):
        for word in range(HEAD_WORDS):
            heads[shard, word] = templates[shard, word]
        num_blocks, num_parts = fills[shard, NUM_BLOCKS], 1 + fills[shard, NUM_PARTS]
        head_bytes = WORD_BYTES * (HEAD_WORDS + BLOCK_WORDS * num_blocks)
        heads[shard, OP_WORD] |= op
        heads[shard, NUM_BLOCKS_WORD] |= num_blocks << NUM_BLOCKS_SHIFT
        heads[shard, REQUEST_ID_WORD] = positions[shard, 0]
        heads[shard, PUSH_SEQ_WORD] = positions[shard, 1]
        heads[shard, PUSH_FLOOR_WORD] = positions[shard, 2]
        heads[shard, STEP_WORD] = positions[shard, 3]
        heads[shard, HEAD_BYTES_WORD] = head_bytes
        heads[shard, COLUMN_BYTES_WORD] = fills[shard, COLUMN_BYTES]
        lengths[shard, 0] = STREAM_MAGIC | (num_parts << 32)
        lengths[shard, 1] = WORD_BYTES * num_parts + head_bytes + fills[shard, MESSAGE_BYTES]
        lengths[shard, 2] = head_bytes
        fills[shard, MESSAGE_BYTES] = lengths[shard, 1] + WORD_BYTES * PREFIX_WORDS


@inlined
def _point_to(message: Any, pieces: Any, num_pieces: Any) -> None:
    """Makes a msghdr of pieces."""
    message[:] = 0
    message[2] = pieces
    message[3] = num_pieces


@kernel(INT64S_2D, INT64S_2D, INT64S_2D, INT64S_2D, INT64S, INT64_IN, INT64_IN)
def send_frames(
    fills: NDArray[np.int64],
    heads: NDArray[np.int64],
    lengths: NDArray[np.int64],
    sends: NDArray[np.int64],
    message: NDArray[np.int64],
    shards: NDArray[np.int64],
    fds: NDArray[np.int64],
) -> None:
    """Sends what the sockets accept at once; `fills[:, SENT]` is the number of bytes, 0 also after an error.

    Args:
        fills: As `finish_heads` left them.
        heads: As in `add_rows`.
        lengths: As in `add_rows`.
        sends: As in `add_rows`; the first two pieces of each are written here.
        message: Scratch, `(MSGHDR_WORDS,)`.
        shards: The shards that get a request.
        fds: Socket of each shard.
    """
    for shard in shards:
        sends[shard, 0] = np.int64(lengths[shard].ctypes.data)
        sends[shard, 1] = WORD_BYTES * (PREFIX_WORDS + 1 + fills[shard, NUM_PARTS])
        sends[shard, 2] = np.int64(heads[shard].ctypes.data)
        sends[shard, 3] = lengths[shard, 2]
        _point_to(message, np.int64(sends[shard].ctypes.data), 2 + fills[shard, NUM_SENDS])
        sent = _sendmsg(np.int32(fds[shard]), message.ctypes.data, np.int32(_NOSIGNAL | _DONTWAIT))
        fills[shard, SENT] = max(sent, 0)


@inlined
def _is_from_shard(buffer: Any, at: Any, head: Any) -> Any:
    """Returns whether a head at a word of a buffer is of the shard that the head of a request is for."""
    is_same = buffer[at] == head[0]
    for word in range(CLUSTER_ID_WORD, NUM_BLOCKS_WORD):
        is_same = is_same and buffer[at + word] == head[word]
    return is_same and (buffer[at + NUM_BLOCKS_WORD] & _LOWER) == (head[NUM_BLOCKS_WORD] & _LOWER)


@inlined
def _parse(fill: Any, head: Any, expected: Any, places: Any, buffer: Any, reply: Any) -> Any:
    """Parses what is in the buffer of a shard; returns False if it is not acks followed by the expected reply."""
    flags = (head[OP_WORD] >> FLAGS_SHIFT) & _LOWER_16
    num_blocks = fill[NUM_REPLY_BLOCKS]
    num_parts = 1 + num_blocks
    head_words = HEAD_WORDS + BLOCK_WORDS * num_blocks
    num_bytes = WORD_BYTES * (num_parts + head_words) + fill[REPLY_MESSAGE_BYTES]
    is_usual = True
    while True:
        at, num_here = fill[BEGIN] >> 3, fill[END] - fill[BEGIN]
        if num_here < WORD_BYTES * PREFIX_WORDS:
            break
        is_small = buffer[at] == (STREAM_MAGIC | (1 << 32)) and buffer[at + 1] == _ACK_BYTES
        if is_small and num_here < WORD_BYTES * PREFIX_WORDS + _ACK_BYTES:
            break
        if is_small and buffer[at + _ACK_HEAD + OP_WORD] & _LOWER == _ACK | (flags << FLAGS_SHIFT):
            # The expected reply has a push_seq that is not smaller. So acks are dropped, as if they were lost.
            if not _is_from_shard(buffer, at + _ACK_HEAD, head):
                is_usual = False
                break
            fill[BEGIN] += WORD_BYTES * PREFIX_WORDS + _ACK_BYTES
            fill[NUM_ACKS] += 1
            continue
        if buffer[at] != (STREAM_MAGIC | (num_parts << 32)) or buffer[at + 1] != num_bytes:
            is_usual = False
            break
        if num_here < WORD_BYTES * (PREFIX_WORDS + num_parts + head_words):
            break
        first = at + PREFIX_WORDS + num_parts
        is_usual = (
            _is_from_shard(buffer, first, head)
            and buffer[at + PREFIX_WORDS] == WORD_BYTES * head_words
            and buffer[first + OP_WORD] & _LOWER == _ROWS | (flags << FLAGS_SHIFT)
            and (buffer[first + NUM_BLOCKS_WORD] >> NUM_BLOCKS_SHIFT) & _LOWER == num_blocks
            and buffer[first + REQUEST_ID_WORD] == head[REQUEST_ID_WORD]
            and buffer[first + HEAD_BYTES_WORD] == WORD_BYTES * head_words
            and buffer[first + COLUMN_BYTES_WORD] == fill[REPLY_BYTES]
            and buffer[first + RESERVED_WORD] == 0
        )
        place = 0
        for block in range(num_blocks):
            num_of_column = places[2 * place + 1]
            is_usual = is_usual and buffer[at + PREFIX_WORDS + 1 + block] == num_of_column
            place += 2 if num_of_column & 7 else 1
        for word in range(BLOCK_WORDS * num_blocks):
            is_usual = is_usual and buffer[first + HEAD_WORDS + word] == expected[word]
        if not is_usual:
            break
        for word in range(head_words):
            reply[word] = buffer[first + word]
        reply[CHECKSUM_WORD] = 0
        fill[PUSH_SEQ], fill[STEP] = buffer[first + PUSH_SEQ_WORD], buffer[first + STEP_WORD]
        fill[CHECKSUM] = buffer[first + CHECKSUM_WORD]
        fill[BEGIN] += WORD_BYTES * (PREFIX_WORDS + num_parts + head_words)
        fill[STAGE] = AT_COLUMNS
        while fill[NEXT_PLACE] < fill[NUM_PLACES] and fill[BEGIN] < fill[END]:
            place = 2 * fill[NEXT_PLACE]
            num_copied = min(places[place + 1], fill[END] - fill[BEGIN])
            _memcpy(places[place], np.int64(buffer.ctypes.data) + fill[BEGIN], num_copied)
            fill[BEGIN] += num_copied
            _advance(fill, places, num_copied)
        break
    if fill[BEGIN] == fill[END]:
        fill[BEGIN] = fill[END] = 0
    if fill[STAGE] == AT_COLUMNS and fill[NEXT_PLACE] == fill[NUM_PLACES]:
        fill[STAGE] = COMPLETE
    return is_usual


@inlined
def _advance(fill: Any, places: Any, num_bytes: Any) -> None:
    """Notes bytes that were received in place."""
    fill[RECEIVED] += num_bytes
    missing = num_bytes
    while fill[NEXT_PLACE] < fill[NUM_PLACES] and missing >= places[2 * fill[NEXT_PLACE] + 1]:
        missing -= places[2 * fill[NEXT_PLACE] + 1]
        fill[NEXT_PLACE] += 1
    if missing:
        places[2 * fill[NEXT_PLACE]] += missing
        places[2 * fill[NEXT_PLACE] + 1] -= missing


@kernel(
    *(INT64S_2D, INT64S_2D, INT64S_2D, INT64S_2D, INT64S_2D, INT64S_2D, INT64S, _INT32S),
    *(INT64_IN, INT64_IN, INT64, INT64, INT64, FLOAT64),
    result=BOOL,
)
def receive_replies(
    fills: NDArray[np.int64],
    heads: NDArray[np.int64],
    expected: NDArray[np.int64],
    places: NDArray[np.int64],
    buffers: NDArray[np.int64],
    replies: NDArray[np.int64],
    message: NDArray[np.int64],
    polled: NDArray[np.int32],
    shards: NDArray[np.int64],
    fds: NDArray[np.int64],
    wake_fd: int,
    timeout_ms: int,
    max_polls: int,
    until_s: float,
) -> bool:
    """Receives the replies to pulls where `places` says, and drops acks before them.

    Args:
        fills: Rows of the requests that were sent; the columns from `STAGE` on begin with zeros.
        heads: Heads of the requests.
        expected: As in `add_rows`.
        places: As in `add_rows`; moved on as bytes arrive.
        buffers: `(num_shards, BUFFER_BYTES / 8)`, what was received and not used: bytes `fills[:, BEGIN]` to `END`.
        replies: Output: heads of the replies that are at columns or complete, with zeros for their checksums.
        message: Scratch, `(MSGHDR_WORDS,)`.
        polled: Scratch, two words for each shard and two more.
        shards: The shards that got a request.
        fds: Socket of each shard.
        wake_fd: Ends the wait when it is readable; it is not read.
        timeout_ms: Longest time without anything received.
        max_polls: Largest number of waits.
        until_s: Time of the monotonic clock at which it returns, whatever is received.

    Returns:
        True if all replies are complete; False after anything else. `fills[:, STAGE]` has the stage of each reply.
    """
    num_missing = shards.shape[0]
    polled[0], polled[1] = np.int32(wake_fd), np.int32(_POLLIN)
    for index in range(num_missing):
        polled[2 * index + 2], polled[2 * index + 3] = np.int32(fds[shards[index]]), np.int32(_POLLIN)
        fills[shards[index], STAGE] = AT_HEAD
    for _ in range(max_polls):
        if num_missing == 0:
            return True
        _clock_gettime(np.int32(_MONOTONIC), message.ctypes.data)
        left_ms = 1e3 * (until_s - message[0]) - 1e-6 * message[1]
        if left_ms <= 0.0:
            return False
        wait_ms = np.int32(min(timeout_ms, np.ceil(left_ms)))
        if _poll(polled.ctypes.data, np.uint64(shards.shape[0] + 1), wait_ms) <= 0:
            return False
        if polled[1] >> 16:
            return False
        for index in range(shards.shape[0]):
            events = polled[2 * index + 3] >> 16
            shard = shards[index]
            if events == 0 or fills[shard, STAGE] == COMPLETE:
                continue
            if events != _POLLIN:
                return False
            fill, fd = fills[shard], np.int32(fds[shard])
            if fill[STAGE] == AT_HEAD:
                room = np.uint64(BUFFER_BYTES - fill[END])
                num_bytes = _recv(fd, buffers[shard].ctypes.data + np.uint64(fill[END]), room, np.int32(_DONTWAIT))
                if num_bytes <= 0:
                    return False
                fill[END] += num_bytes
                if not _parse(fill, heads[shard], expected[shard], places[shard], buffers[shard], replies[shard]):
                    return False
                if fill[STAGE] == AT_HEAD and fill[END] == BUFFER_BYTES:
                    return False
            else:
                first = np.int64(places[shard].ctypes.data) + 16 * fill[NEXT_PLACE]
                _point_to(message, first, fill[NUM_PLACES] - fill[NEXT_PLACE])
                num_bytes = _recvmsg(fd, message.ctypes.data, np.int32(_DONTWAIT))
                if num_bytes <= 0:
                    return False
                _advance(fill, places[shard], num_bytes)
                if fill[NEXT_PLACE] == fill[NUM_PLACES]:
                    fill[STAGE] = COMPLETE
            if fill[STAGE] == COMPLETE:
                polled[2 * index + 2] = np.int32(-1)
                num_missing -= 1
    return False
