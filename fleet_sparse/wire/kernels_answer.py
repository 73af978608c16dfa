"""Kernels that answer the frames of plain pulls and pushes: one call for all tables of a frame, without the GIL.

docs/protocol.md has the bytes; here they are little-endian words of 64 bits. The message of a stream lies in memory as
it was received, from the lengths of its parts on. Stores are named by addresses; the caller of a kernel keeps them
alive. Nothing is read or written before `find_blocks` has found that all of it lies within the message.

Rows are found, created, copied and updated by the kernels that every other path uses.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleet_sparse.core.intrinsics import array_at, copy, kernel_at
from fleet_sparse.core.jit import (
    BOOL,
    FLOAT32_IN,
    FLOAT32S,
    FLOAT64_IN,
    INT32_IN,
    INT64,
    INT64_IN,
    INT64S,
    INT64S_2D,
    UINT8S,
    UINT32S,
    inlined,
    kernel,
)
from fleet_sparse.core.kernels_bitmap import set_bits
from fleet_sparse.core.kernels_index import NUM_SEGMENTS, find, find_or_create, find_owned
from fleet_sparse.core.kernels_ownership import hash_and_check
from fleet_sparse.core.kernels_rows import gather_or_initialize
from fleet_sparse.core.rules import KERNEL_TYPES
from fleet_sparse.core.table_words import (
    CELLS,
    CLASSES,
    DIM,
    DIRTY,
    FIRST_ROW,
    GROWTH,
    INITIAL_KIND,
    INITIAL_STATE,
    INITIAL_STREAM,
    INITIAL_VALUES,
    MARK,
    MAX_ROWS,
    NUM_BITMAP_BYTES,
    NUM_CELL_WORDS,
    NUM_INITIAL_VALUES,
    NUM_ROW_FLOATS,
    NUM_STATE_FLOATS,
    NUM_STATES,
    NUM_USED,
    OPTIMIZER_STEP,
    PULL_WORD,
    PUSH_WORD,
    PUSHED_TODAY,
    ROW_STRIDE,
    ROWS,
    ROWS_WORD,
    RULE,
    RULE_GROUP,
    SALT,
    SCHEMA,
    STATE_OFFSET,
    STATE_STRIDE,
    STATES,
)

from .frame_format import MAX_OPTIMIZER_STEP
from .message_words import (
    BLOCK_WORDS,
    COUNT_WORD,
    HEAD_WORDS,
    LEARNING_RATE_WORD,
    OPTIMIZER_STEP_WORD,
    PREFIX_WORDS,
    SCALE_WORD,
    STREAM_MAGIC,
    WORD_BYTES,
)

_int64s_in, _int64s = array_at(INT64_IN), array_at(INT64S)
_float32s_in, _float32s, _float64s_in = array_at(FLOAT32_IN), array_at(FLOAT32S), array_at(FLOAT64_IN)
_uint8s, _uint32s = array_at(UINT8S), array_at(UINT32S)
_apply_rule = kernel_at(KERNEL_TYPES)

_FLOAT = 4
_SCHEMA_WORD, _DIM_WORD, _OFFSET_WORD = 1, 3, 7
_ONE_BITS = int(np.float64(1.0).view(np.int64))
_MAX_COUNT = 1 << 40
_MAX_FLOAT32 = float(np.finfo(np.float32).max)
FINGERPRINTS_PER_ID = 8
"""Largest number of fingerprints for each id of a block, and for one more."""

# Columns of `groups`: the tables whose rule has the same scalars for the same learning rate and step.
GROUP_MARK, WANTED_RATE, WANTED_STEP, RATE, STEP, SCALARS, NUM_SCALARS = 0, 1, 2, 3, 4, 5, 6
GROUP_COLUMNS = 7

# Columns of `blocks`: the table of each block, and where its columns are.
TABLE, COUNT, IDS_AT, VALUES_AT, FIRST_ID, NUM_BEFORE = 0, 1, 2, 3, 4, 5
BLOCK_COLUMNS = 6

# Elements of `sums`. The first counts the frames.
NUM_FRAMES, NUM_IDS, LARGEST_COUNT, COLUMN_BYTES, REPLY_BYTES, REPLY_COLUMN_BYTES, NUM_STALE = 0, 1, 2, 3, 4, 5, 6
HAS_MIXED_GROUP = 7  # 1 if a push has several learning rates or steps for one group
NUM_SUMS = 8


@inlined
def _table_of(tables: Any, word_column: Any, word: Any, schema: Any, begin: Any) -> Any:
    """Returns the row of `tables` that a block names, searched from `begin` on; -1 if there is none."""
    found = -1
    num_tables = tables.shape[0]
    row = begin
    for _ in range(num_tables):
        if row >= num_tables:
            row = 0
        if tables[row, word_column] == word and tables[row, SCHEMA] == schema:
            found = row
            break
        row += 1
    return found


@kernel(INT64S, INT64, INT64, BOOL, BOOL, INT64S_2D, INT64S_2D, INT64S_2D, INT64S, result=BOOL)
def find_blocks(
    message: NDArray[np.int64],
    num_parts: int,
    num_blocks: int,
    is_push: bool,
    is_staged: bool,
    tables: NDArray[np.int64],
    groups: NDArray[np.int64],
    blocks: NDArray[np.int64],
    sums: NDArray[np.int64],
) -> bool:
    """Finds the table and columns of each block; returns False if one is not plain, or wrong.

    Args:
        message: A message without its prefix; at least lengths, header and block table are there.
        num_parts: Number of parts of the message.
        num_blocks: Number of blocks of its frame.
        is_push: True for a PUSH, False for a PULL.
        is_staged: True if the scales of the push are weights of its step, which has no other contribution.
        tables: `(n, NUM_WORDS)` of `core.table_words`.
        groups: `(m, GROUP_COLUMNS)`; what the rules of the push need is written.
        blocks: Output, at least `(num_blocks, BLOCK_COLUMNS)`.
        sums: Output, `(NUM_SUMS,)`.
    """
    sums[NUM_FRAMES] += 1
    for number in range(1, NUM_SUMS):
        sums[number] = 0
    head_words = HEAD_WORDS + BLOCK_WORDS * num_blocks
    if num_parts != 1 + (2 if is_push else 1) * num_blocks or message[0] != WORD_BYTES * head_words:
        return False
    at = WORD_BYTES * (num_parts + head_words)
    num_bytes = WORD_BYTES * message.shape[0]
    reply_at = WORD_BYTES * (PREFIX_WORDS + 1 + num_blocks + head_words)
    numbers = _float64s_in(np.int64(message.ctypes.data), message.shape[0])
    word_column = PUSH_WORD if is_push else PULL_WORD
    table, part = -1, 1
    for number in range(num_blocks):
        block = num_parts + HEAD_WORDS + BLOCK_WORDS * number
        word, count = message[block], message[block + COUNT_WORD]
        table = _table_of(tables, word_column, word, message[block + _SCHEMA_WORD], table + 1)
        if word == 0 or table < 0 or count < 0 or count > _MAX_COUNT:
            return False
        dim = tables[table, DIM]
        if message[block + _DIM_WORD] != dim or message[block + _OFFSET_WORD] != 0:
            return False
        id_bytes, row_bytes = WORD_BYTES * count, _FLOAT * dim * count
        if message[part] != id_bytes:
            return False
        blocks[number, TABLE], blocks[number, COUNT] = table, count
        blocks[number, IDS_AT], blocks[number, FIRST_ID] = at, sums[NUM_IDS]
        at += id_bytes
        part += 1
        if is_push:
            rate, step = message[block + LEARNING_RATE_WORD], message[block + OPTIMIZER_STEP_WORD]
            scale = numbers[block + SCALE_WORD]
            is_scaled = message[block + SCALE_WORD] != _ONE_BITS
            is_weight = is_staged and 0.0 <= scale < np.inf
            is_fast = abs(numbers[block + LEARNING_RATE_WORD]) <= _MAX_FLOAT32
            is_step = 0 < step <= MAX_OPTIMIZER_STEP
            if message[part] != row_bytes or not is_step or not is_fast or (is_scaled and not is_weight):
                return False
            first, group = tables[table, FIRST_ROW], tables[table, RULE_GROUP]
            if tables[first, MARK] == sums[NUM_FRAMES]:
                return False
            tables[first, MARK] = sums[NUM_FRAMES]
            if groups[group, GROUP_MARK] != sums[NUM_FRAMES]:
                groups[group, GROUP_MARK] = sums[NUM_FRAMES]
                groups[group, WANTED_RATE], groups[group, WANTED_STEP] = rate, step
                if groups[group, RATE] != rate or groups[group, STEP] != step:
                    sums[NUM_STALE] += 1
            elif groups[group, WANTED_RATE] != rate or groups[group, WANTED_STEP] != step:
                sums[HAS_MIXED_GROUP] = 1
                return False
            blocks[number, VALUES_AT] = at
            at += row_bytes + (-row_bytes & 7)
            part += 1
            sums[COLUMN_BYTES] += id_bytes + row_bytes
        else:
            if message[block + OPTIMIZER_STEP_WORD] != 0:
                return False
            blocks[number, VALUES_AT] = reply_at
            reply_at += row_bytes + (-row_bytes & 7)
            sums[COLUMN_BYTES] += id_bytes
            sums[REPLY_COLUMN_BYTES] += row_bytes
        if at > num_bytes:
            return False
        sums[NUM_IDS] += count
        sums[LARGEST_COUNT] = max(sums[LARGEST_COUNT], count)
    sums[REPLY_BYTES] = reply_at
    return bool(at == num_bytes)


@kernel(
    *(INT64S, INT64, INT64, INT64S_2D, INT64S_2D, INT32_IN, INT64, BOOL, INT64S_2D, FLOAT32S),
    result=BOOL,
)
def pull_blocks(
    message: NDArray[np.int64],
    num_parts: int,
    num_blocks: int,
    tables: NDArray[np.int64],
    blocks: NDArray[np.int64],
    shard_of_bucket: NDArray[np.int32],
    shard: int,
    has_other_shards: bool,
    pulled: NDArray[np.int64],
    reply: NDArray[np.float32],
) -> bool:
    """Writes the message of a reply, all but its header; returns False if an id is of another shard.

    Args:
        message: As in `find_blocks`.
        num_parts: As in `find_blocks`.
        num_blocks: As in `find_blocks`.
        tables: As in `find_blocks`.
        blocks: As `find_blocks` left them.
        shard_of_bucket: `(NUM_BUCKETS,)`.
        shard: The shard that should own the ids.
        has_other_shards: True if ids may belong to another shard.
        pulled: Output, `(2, num_ids)` or longer: the ids of all blocks, and the row index of each, -1 without a row.
        reply: Output.
    """
    source, target = np.int64(message.ctypes.data), np.int64(reply.ctypes.data)
    indices_at = np.int64(pulled[1].ctypes.data)
    words = _int64s(target, PREFIX_WORDS + 1 + num_blocks + HEAD_WORDS + BLOCK_WORDS * num_blocks)
    words[0] = STREAM_MAGIC | ((1 + num_blocks) << 32)
    words[PREFIX_WORDS] = WORD_BYTES * (HEAD_WORDS + BLOCK_WORDS * num_blocks)
    end = WORD_BYTES * words.shape[0]
    for number in range(num_blocks):
        table, count = blocks[number, TABLE], blocks[number, COUNT]
        dim = tables[table, DIM]
        num_floats = dim * count
        end = blocks[number, VALUES_AT] + _FLOAT * num_floats
        words[PREFIX_WORDS + 1 + number] = _FLOAT * num_floats
        block = PREFIX_WORDS + 1 + num_blocks + HEAD_WORDS + BLOCK_WORDS * number
        for word in range(BLOCK_WORDS):
            words[block + word] = 0
        words[block], words[block + _SCHEMA_WORD] = tables[table, ROWS_WORD], tables[table, SCHEMA]
        words[block + COUNT_WORD], words[block + _DIM_WORD], words[block + SCALE_WORD] = count, dim, _ONE_BITS
        ids = _int64s_in(source + blocks[number, IDS_AT], count)
        first = np.uint64(blocks[number, FIRST_ID])
        copy(pulled[0], first, _int64s(source + blocks[number, IDS_AT], count), np.uint64(0), np.uint64(count))
        cells = _int64s(tables[table, CELLS], tables[table, NUM_CELL_WORDS])
        classes = _uint8s(tables[table, CLASSES], NUM_SEGMENTS)
        salt, found_at = np.uint64(tables[table, SALT]), indices_at + WORD_BYTES * blocks[number, FIRST_ID]
        found = _int64s(found_at, count)
        if not has_other_shards:
            find(cells, classes, salt, ids, found)
        elif find_owned(cells, classes, salt, shard_of_bucket, shard, ids, found) > 0:
            return False
        gather_or_initialize(
            _float32s(tables[table, ROWS], tables[table, NUM_ROW_FLOATS]),
            tables[table, ROW_STRIDE],
            _int64s_in(found_at, count),
            ids,
            dim,
            tables[table, INITIAL_KIND],
            _float64s_in(tables[table, INITIAL_VALUES], tables[table, NUM_INITIAL_VALUES]),
            np.uint64(tables[table, INITIAL_STREAM]),
            _float32s(target + blocks[number, VALUES_AT], num_floats),
        )
        if num_floats & 1:
            _float32s(target + end, 1)[0] = np.float32(0.0)
            end += _FLOAT
    words[1] = end - WORD_BYTES * PREFIX_WORDS
    return True


@kernel(
    *(INT64S, INT64, INT64S_2D, INT64S_2D, INT32_IN, INT64, INT64S, UINT32S, INT64S),
    result=BOOL,
)
def check_blocks(
    message: NDArray[np.int64],
    num_blocks: int,
    tables: NDArray[np.int64],
    blocks: NDArray[np.int64],
    shard_of_bucket: NDArray[np.int32],
    shard: int,
    hashes: NDArray[np.int64],
    fingerprints: NDArray[np.uint32],
    counts: NDArray[np.int64],
) -> bool:
    """Hashes the ids of a push; returns False if `hash_and_check` finds a fault, or a table may have no room.

    Args:
        message: As in `find_blocks`.
        num_blocks: As in `find_blocks`.
        tables: As in `find_blocks`.
        blocks: As `find_blocks` left them.
        shard_of_bucket: `(NUM_BUCKETS,)`.
        shard: The shard that should own the ids.
        hashes: Output, `(num_ids,)` or longer.
        fingerprints: Scratch, `FINGERPRINTS_PER_ID` times one more than the largest number of ids of a block.
        counts: Scratch, `(3,)`.
    """
    source = np.int64(message.ctypes.data)
    hashes_at, fingerprints_at = np.int64(hashes.ctypes.data), np.int64(fingerprints.ctypes.data)
    for number in range(num_blocks):
        table, count = blocks[number, TABLE], blocks[number, COUNT]
        growth = _int64s(tables[table, GROWTH], 3)
        if growth[0] + count > tables[table, MAX_ROWS]:
            return False
        num_fingerprints = 4
        while num_fingerprints <= 4 * count:
            num_fingerprints *= 2
        hash_and_check(
            _int64s_in(source + blocks[number, IDS_AT], count),
            _float32s_in(source + blocks[number, VALUES_AT], count * tables[table, DIM]),
            np.uint64(tables[table, SALT]),
            shard_of_bucket,
            shard,
            _int64s(hashes_at + WORD_BYTES * blocks[number, FIRST_ID], count),
            _uint32s(fingerprints_at, num_fingerprints),
            counts,
        )
        if counts[0] > 0 or counts[1] > 0 or counts[2] > 0:
            return False
    return True


@kernel(INT64S, INT64, INT64, INT64S_2D, INT64S_2D, INT64S_2D, INT64S)
def apply_blocks(
    message: NDArray[np.int64],
    num_parts: int,
    num_blocks: int,
    tables: NDArray[np.int64],
    groups: NDArray[np.int64],
    blocks: NDArray[np.int64],
    row_indices: NDArray[np.int64],
) -> None:
    """Applies the gradients of a push with the rule of each table, and marks the rows as changed.

    Args:
        message: As in `find_blocks`.
        num_parts: As in `find_blocks`.
        num_blocks: As in `find_blocks`.
        tables: As in `find_blocks`.
        groups: As in `find_blocks`, with the scalars that are wanted.
        blocks: As `find_blocks` left them.
        row_indices: As `apply_or_create` left them.
    """
    source, indices_at = np.int64(message.ctypes.data), np.int64(row_indices.ctypes.data)
    for number in range(num_blocks):
        table, count = blocks[number, TABLE], blocks[number, COUNT]
        found = _int64s_in(indices_at + WORD_BYTES * blocks[number, FIRST_ID], count)
        set_bits(_uint8s(tables[table, DIRTY], tables[table, NUM_BITMAP_BYTES]), found)
        if tables[table, PUSHED_TODAY] != 0:
            set_bits(_uint8s(tables[table, PUSHED_TODAY], tables[table, NUM_BITMAP_BYTES]), found)
        group, dim = tables[table, RULE_GROUP], tables[table, DIM]
        _apply_rule(
            tables[table, RULE],
            (
                _float32s(tables[table, ROWS], tables[table, NUM_ROW_FLOATS]),
                tables[table, ROW_STRIDE],
                _float32s(tables[table, STATES], tables[table, NUM_STATE_FLOATS]),
                tables[table, STATE_STRIDE],
                tables[table, STATE_OFFSET],
                found,
                _float32s_in(source + blocks[number, VALUES_AT], count * dim),
                dim,
                _float32s_in(groups[group, SCALARS], groups[group, NUM_SCALARS]),
            ),
        )
        step = message[num_parts + HEAD_WORDS + BLOCK_WORDS * number + OPTIMIZER_STEP_WORD]
        newest = _int64s(tables[table, OPTIMIZER_STEP], 1)
        newest[0] = max(newest[0], step)


@inlined
def _find_or_create(tables: Any, table: Any, ids_at: Any, hashes_at: Any, indices_at: Any, count: Any) -> Any:
    """Calls the kernel of that name for a row of `tables` and arrays at addresses."""
    return find_or_create(
        _int64s(tables[table, CELLS], tables[table, NUM_CELL_WORDS]),
        _uint8s(tables[table, CLASSES], NUM_SEGMENTS),
        _int64s(tables[table, NUM_USED], NUM_SEGMENTS),
        _int64s(tables[table, GROWTH], 3),
        np.uint64(tables[table, SALT]),
        _int64s_in(ids_at, count),
        _int64s_in(hashes_at, count),
        _int64s(indices_at, count),
        _float32s(tables[table, ROWS], tables[table, NUM_ROW_FLOATS]),
        tables[table, ROW_STRIDE],
        _float32s(tables[table, STATES], tables[table, NUM_STATE_FLOATS]),
        tables[table, STATE_STRIDE],
        tables[table, STATE_OFFSET],
        tables[table, DIM],
        tables[table, INITIAL_KIND],
        _float64s_in(tables[table, INITIAL_VALUES], tables[table, NUM_INITIAL_VALUES]),
        np.uint64(tables[table, INITIAL_STREAM]),
        _float32s_in(tables[table, INITIAL_STATE], tables[table, NUM_STATES]),
    )


@kernel(
    *(INT64S, INT64, INT64, INT64S_2D, INT64S_2D, INT64S_2D, INT64S, INT64S_2D, INT64, INT64S_2D, INT64S),
    result=INT64,
)
def apply_or_create(
    message: NDArray[np.int64],
    num_parts: int,
    num_blocks: int,
    tables: NDArray[np.int64],
    groups: NDArray[np.int64],
    blocks: NDArray[np.int64],
    row_indices: NDArray[np.int64],
    known_blocks: NDArray[np.int64],
    num_known: int,
    known: NDArray[np.int64],
    scratch: NDArray[np.int64],
) -> int:
    """Applies a push as `apply_blocks`; if ids have no row, it creates their rows instead, and applies nothing.

    Args:
        message: As in `find_blocks`.
        num_parts: As in `find_blocks`.
        num_blocks: As in `find_blocks`.
        tables: As in `find_blocks`.
        groups: As in `apply_blocks`.
        blocks: As `find_blocks` left them; gets the number of rows that each table had.
        row_indices: The hashes of `check_blocks`; output: the row index of each id.
        known_blocks: Blocks of a pull whose rows have not moved since.
        num_known: Number of those blocks; 0 without such a pull.
        known: As `pull_blocks` left them.
        scratch: Three times as long as the largest number of ids of a block.

    Returns:
        The number of new rows; -1 if an index has no room for all.
    """
    source, indices_at = np.int64(message.ctypes.data), np.int64(row_indices.ctypes.data)
    scratch_at = np.int64(scratch.ctypes.data)
    num_new = 0
    for number in range(num_blocks):
        blocks[number, NUM_BEFORE] = _int64s(tables[blocks[number, TABLE], GROWTH], 3)[0]
    for number in range(num_blocks):
        table, count, first = blocks[number, TABLE], blocks[number, COUNT], blocks[number, FIRST_ID]
        ids = _int64s_in(source + blocks[number, IDS_AT], count)
        is_known = (
            number < num_known
            and known_blocks[number, TABLE] == table
            and known_blocks[number, COUNT] == count
            and known_blocks[number, FIRST_ID] == first
        )
        index = 0
        while is_known and index < count:
            is_known = known[0, first + index] == ids[index]
            index += 1
        if not is_known:
            at = indices_at + WORD_BYTES * first
            if _find_or_create(tables, table, source + blocks[number, IDS_AT], at, at, count) < count:
                return -1
        else:
            missing = 0
            for index in range(count):
                row = known[1, first + index]
                if row < 0:
                    scratch[missing] = ids[index]
                    scratch[count + missing] = row_indices[first + index]
                    scratch[2 * count + missing] = index
                    missing += 1
                row_indices[first + index] = row
            at = scratch_at + WORD_BYTES * count
            if _find_or_create(tables, table, scratch_at, at, at, missing) < missing:
                return -1
            for index in range(missing):
                row_indices[first + scratch[2 * count + index]] = scratch[count + index]
        num_new += _int64s(tables[table, GROWTH], 3)[0] - blocks[number, NUM_BEFORE]
    if num_new == 0:
        apply_blocks(message, num_parts, num_blocks, tables, groups, blocks, row_indices)
    return num_new
