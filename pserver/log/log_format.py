"""Format of the log: header of a segment, head and marks of a record. `docs/log.md` has every byte."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Iterator, Sequence
from enum import IntEnum
from typing import Final, NamedTuple

from xxhash import xxh3_64, xxh3_64_intdigest

from fleet_sparse.core.watermark import Watermark
from fleet_sparse.errors import LogCorrupt
from fleet_sparse.wire.frame_format import (
    BLOCK,
    BLOCK_BYTES,
    COPY_COLUMNS,
    IDS,
    ROWS,
    STATISTICS_BYTES,
    STATISTICS_COLUMNS,
    Block,
    Buffer,
    Column,
)
from fleet_sparse.wire.row_dtype import RowDtype

VERSION: Final = 4
SEGMENT_MAGIC: Final = b"FSLS"
RECORD_MAGIC: Final = b"FSLR"
HEADER = struct.Struct("<4s2HI2H6Q")
HEAD = struct.Struct("<4s2H5Q4IQ")
MARK = struct.Struct("<16s2IQ")
HEADER_BYTES, HEAD_BYTES, MARK_BYTES = HEADER.size, HEAD.size, MARK.size
_CHECKSUM_BYTES = 8
_NO_CHECKSUM = bytes(_CHECKSUM_BYTES)
_ID_BYTES, _FLOAT_BYTES = 8, 4
_MAX_STATES = 1 << 16
_SEGMENT_NAME = re.compile(r"\d{20}\.fsl")


class Kind(IntEnum):
    """Kind of a record."""

    STATE = 1
    TABLE = 2
    JOIN = 3
    APPLY = 4
    PREPARE = 5
    COMMIT = 6
    REJOIN = 7
    SHRINK = 8
    END_DAY = 9
    LOAD = 10
    VOID = 11
    REGISTER = 12
    BARRIER = 13
    PROGRESS = 14
    LINEAGE = 15
    CUT = 16
    END_SAVE = 17
    CHANGED = 18
    ROOM = 19


_KINDS = {int(kind): kind for kind in Kind}


class LogIdentity(NamedTuple):
    """Whose log it is."""

    shard: int
    num_shards: int
    num_row_shards: int
    """Number of shards with rows if others have the dense values, else 0."""
    cluster_id: int
    job: int
    """Checksum of the job id."""


class SegmentHeader(NamedTuple):
    """Header of a segment."""

    identity: LogIdentity
    generation: int
    """Number of the start of the pserver that wrote it."""
    first_lsn: int
    previous: int
    """Checksum of the record before; 0 if there is none."""

    def to_bytes(self) -> bytes:
        """Returns the header as it is written."""
        fields = (*self.identity, self.generation, self.first_lsn, self.previous)
        head = HEADER.pack(SEGMENT_MAGIC, VERSION, HEADER_BYTES, *fields, 0)
        return head[:-_CHECKSUM_BYTES] + struct.pack("<Q", xxh3_64_intdigest(head))

    @classmethod
    def parse(cls, data: Buffer, path: str) -> SegmentHeader:
        """Returns the header at the beginning of a segment.

        Raises:
            LogCorrupt: Bytes are wrong.
        """
        if len(data) < HEADER_BYTES:
            raise corrupt(path, f"a segment of {len(data)} bytes, should have at least {HEADER_BYTES}", 0)
        head = bytes(data[:HEADER_BYTES])
        magic, version, header_bytes, *numbers, checksum = HEADER.unpack(head)
        if xxh3_64_intdigest(head[:-_CHECKSUM_BYTES] + _NO_CHECKSUM) != checksum or magic != SEGMENT_MAGIC:
            raise corrupt(path, "wrong header of a segment", 0)
        if version != VERSION or header_bytes != HEADER_BYTES:
            raise corrupt(path, f"version {version} of the log, should be {VERSION}", 0)
        *identity, generation, first_lsn, previous = numbers
        return cls(LogIdentity(*identity), generation, first_lsn, previous)


class RecordHead(NamedTuple):
    """Head of a record."""

    kind: Kind
    lsn: int
    previous: int
    durable_lsn: int
    """Lsn of the newest record that was known to be durable when this one was appended."""
    num_bytes: int
    step: int
    num_marks: int
    num_left: int
    num_blocks: int
    body_bytes: int
    checksum: int

    @property
    def end(self) -> int:
        """Length of the record."""
        return HEAD_BYTES + self.num_bytes


def pack_head(
    kind: Kind,
    lsn: int,
    previous: int,
    durable_lsn: int,
    step: int,
    counts: tuple[int, int, int, int],
    parts: Sequence[Buffer],
) -> tuple[bytes, int]:
    """Returns the head of a record and its checksum.

    Args:
        kind: Kind of the record.
        lsn: Its number.
        previous: Checksum of the record before.
        durable_lsn: Lsn of the newest record that is known to be durable.
        step: Step of the marks.
        counts: Number of marks, marks of workers that left, blocks, and bytes of the body.
        parts: All that follows the head.
    """
    num_bytes = sum(map(len, parts))
    head = HEAD.pack(RECORD_MAGIC, kind, 0, lsn, previous, durable_lsn, num_bytes, step, *counts, 0)
    digest = xxh3_64(head)
    for part in parts:
        digest.update(part)
    checksum = digest.intdigest()
    return head[:-_CHECKSUM_BYTES] + struct.pack("<Q", checksum), checksum


def find_record(data: memoryview, offset: int) -> RecordHead | str:  # noqa: PLR0911  # a line for each fault
    """Returns the head of the record at an offset, or why there is none; its chain is not checked."""
    left = len(data) - offset
    if left < HEAD_BYTES:
        return f"{left} bytes, a record has at least {HEAD_BYTES}"
    head = bytes(data[offset : offset + HEAD_BYTES])
    magic, kind, reserved, lsn, previous, durable_lsn, num_bytes, step, *counts, checksum = HEAD.unpack(head)
    if magic != RECORD_MAGIC:
        return f"{magic.hex()} in the place of a record"
    if num_bytes > left - HEAD_BYTES or num_bytes % 8:
        return f"a record of {num_bytes} bytes, {left - HEAD_BYTES} are there"
    digest = xxh3_64(head[:-_CHECKSUM_BYTES] + _NO_CHECKSUM)
    digest.update(data[offset + HEAD_BYTES : offset + HEAD_BYTES + num_bytes])
    if digest.intdigest() != checksum:
        return "a record with a wrong checksum"
    if kind not in _KINDS or reserved:
        return f"a record of kind {kind}, which is unknown"
    num_marks, num_left, num_blocks, body_bytes = counts
    if MARK_BYTES * (num_marks + num_left) + BLOCK_BYTES * num_blocks + body_bytes > num_bytes:
        return "a record whose counts do not fit into it"
    numbers = lsn, previous, durable_lsn, num_bytes, step
    return RecordHead(_KINDS[kind], *numbers, num_marks, num_left, num_blocks, body_bytes, checksum)


def record_ends(data: memoryview, offset: int = HEADER_BYTES) -> Iterator[tuple[RecordHead, int]]:
    """Yields the heads of the whole records that follow one another from an offset on, and where each of them ends.

    Their chain is not checked.
    """
    while not isinstance(head := find_record(data, offset), str):
        offset += head.end
        yield head, offset


def pack_marks(watermarks: Iterable[Watermark]) -> bytes:
    """Returns marks as they are written."""
    return b"".join(MARK.pack(mark.client_id, mark.epoch, 0, mark.watermark) for mark in watermarks)


def unpack_marks(data: memoryview) -> list[Watermark]:
    """Returns the marks in `data`."""
    return [Watermark(client_id, epoch, seq) for client_id, epoch, _, seq in MARK.iter_unpack(data)]


def padded(part: Buffer) -> list[Buffer]:
    """Returns a part and, if it is needed, its padding."""
    num_zeros = -len(part) % 8
    return [part, bytes(num_zeros)] if num_zeros else [part]


def column_sizes(table: memoryview) -> list[int]:
    """Returns the length of each column of a block table, in order, without padding."""
    sizes = []
    for _, _, dtype, mask, _, count, dim, _, _, _, gradient_scale, _ in BLOCK.iter_unpack(table):
        if mask & IDS:
            sizes.append(_ID_BYTES * count)
        if mask & ROWS:
            sizes.append(count * dim * (_FLOAT_BYTES if dtype == RowDtype.FLOAT32 else 0))
        sizes += [STATISTICS_BYTES * count for column in STATISTICS_COLUMNS.values() if mask & column.bit]
        if mask & Column.VERSIONS:
            sizes.append(COPY_COLUMNS["versions"].dtype.itemsize * count)
        if mask & Column.STATES:
            num_states = int(gradient_scale) if 0 <= gradient_scale <= _MAX_STATES else 0
            sizes.append(_FLOAT_BYTES * count * num_states * dim)
    return sizes


def segment_name(first_lsn: int) -> str:
    """Returns the name of the file of a segment."""
    return f"{first_lsn:020d}.fsl"


def next_segment_name(generation: int) -> str:
    """Returns the file name of the segment that the pserver of a generation has allocated ahead."""
    return f"next-{generation}.fsl"


def is_next_segment(name: str) -> bool:
    """Returns whether a file is a segment that was allocated ahead, by its name."""
    return name.startswith("next-")


def is_segment(name: str) -> bool:
    """Returns whether a file is a segment that has begun, by its name."""
    return _SEGMENT_NAME.fullmatch(name) is not None


def corrupt(path: str, what: str, offset: int) -> LogCorrupt:
    """Returns the error for wrong bytes of a log."""
    return LogCorrupt(
        f"{path}: {what}, at byte {offset}. Start the job from its newest snapshot, without this log",
        path=path,
        offset=offset,
    )


class Record(NamedTuple):
    """A record that was read. Its arrays are read-only views of the segment."""

    head: RecordHead
    marks: list[Watermark]
    left: list[Watermark]
    blocks: list[Block]
    body: bytes
    path: str
    """Its segment."""
    offset: int
    """Where it begins there."""
