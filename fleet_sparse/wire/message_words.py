"""Places of the fields of frames in messages of streams, in little-endian words of 64 bits, for kernels."""

from __future__ import annotations

from .frame_format import BLOCK_BYTES, BLOCK_OFFSETS, HEADER_BYTES, HEADER_OFFSETS

WORD_BYTES = 8
HEAD_WORDS, BLOCK_WORDS, PREFIX_WORDS = HEADER_BYTES // WORD_BYTES, BLOCK_BYTES // WORD_BYTES, 2
STREAM_MAGIC = int.from_bytes(b"FSS1", "little")

# Words of a header; those of the op and of the number of blocks have other fields too.
OP_WORD, FLAGS_SHIFT = HEADER_OFFSETS["op"] // WORD_BYTES, 8 * (HEADER_OFFSETS["flags"] % WORD_BYTES)
CLUSTER_ID_WORD = HEADER_OFFSETS["cluster_id"] // WORD_BYTES
NUM_BLOCKS_WORD, NUM_BLOCKS_SHIFT = (
    HEADER_OFFSETS["num_blocks"] // WORD_BYTES,
    8 * (HEADER_OFFSETS["num_blocks"] % WORD_BYTES),
)
REQUEST_ID_WORD, PUSH_SEQ_WORD = HEADER_OFFSETS["request_id"] // WORD_BYTES, HEADER_OFFSETS["push_seq"] // WORD_BYTES
PUSH_FLOOR_WORD, STEP_WORD = HEADER_OFFSETS["push_floor"] // WORD_BYTES, HEADER_OFFSETS["step"] // WORD_BYTES
HEAD_BYTES_WORD, COLUMN_BYTES_WORD = (
    HEADER_OFFSETS["head_bytes"] // WORD_BYTES,
    HEADER_OFFSETS["column_bytes"] // WORD_BYTES,
)
RESERVED_WORD, CHECKSUM_WORD = HEADER_OFFSETS["reserved_2"] // WORD_BYTES, HEADER_OFFSETS["checksum"] // WORD_BYTES
# Words of a block.
COUNT_WORD, LEARNING_RATE_WORD = BLOCK_OFFSETS["count"] // WORD_BYTES, BLOCK_OFFSETS["learning_rate"] // WORD_BYTES
OPTIMIZER_STEP_WORD = BLOCK_OFFSETS["optimizer_step"] // WORD_BYTES
SCALE_WORD = BLOCK_OFFSETS["gradient_scale"] // WORD_BYTES
