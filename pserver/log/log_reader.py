"""LogReader: the records of a log, each checked before it is returned."""

from __future__ import annotations

import mmap
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fleet_sparse.errors import ProtocolError
from fleet_sparse.wire.decode import decode_blocks
from fleet_sparse.wire.frame_format import BLOCK_BYTES, IDS, Action, Block, Op
from fleet_sparse.wire.frame_format import BLOCK_OFFSETS as OFFSETS

from .holes import is_zero
from .log_directory import read_header
from .log_format import (
    HEAD_BYTES,
    HEADER_BYTES,
    MARK_BYTES,
    RECORD_MAGIC,
    Kind,
    LogIdentity,
    Record,
    RecordHead,
    SegmentHeader,
    column_sizes,
    corrupt,
    find_record,
    is_segment,
    segment_name,
    unpack_marks,
)


class TornEnd(NamedTuple):
    """The end of the last segment that was cut off: records that were not known to be durable."""

    path: Path
    offset: int
    num_bytes: int


class LogReader:
    """Reads the segments of a log once, in order.

    Args:
        directory: Directory of the log of one shard.
        first_lsn: First lsn of the segment to begin with; None for the first one that is there.

    Attributes:
        directory: As given.
        paths: The segments, in order.
        identity: Whose log it is; None if there is no segment.
        generation: Largest generation of a segment; 0 without one.
        newest_lsn: Lsn of the newest record read.
        newest_checksum: Its checksum.
        torn: The torn end, once all records are read; None if there is none.
        end: Length of the used part of the last segment, once all records are read.

    Raises:
        LogCorrupt: A header is wrong, a segment is missing or the segments are of several logs.
    """

    def __init__(self, directory: Path, first_lsn: int | None = None) -> None:
        names = sorted(path.name for path in directory.iterdir() if is_segment(path.name)) if directory.exists() else []
        if first_lsn is not None:
            names = [name for name in names if name >= segment_name(first_lsn)]
            if not names or names[0] != segment_name(first_lsn):
                raise corrupt(str(directory / segment_name(first_lsn)), "the segment of the checkpoint is missing", 0)
        self.directory = directory
        self.paths: Sequence[Path] = [directory / name for name in names]
        self.identity: LogIdentity | None = None
        self.generation = 0
        self.newest_lsn = 0
        self.newest_checksum = 0
        self.torn: TornEnd | None = None
        self.end = 0
        self._headers = [read_header(path) for path in self.paths]
        for path, header in zip(self.paths, self._headers, strict=True):
            if self.identity is None:
                self.identity, self.newest_lsn = header.identity, header.first_lsn - 1
                self.newest_checksum = header.previous
            elif header.identity != self.identity:
                raise corrupt(str(path), "a segment of another log", 0)
            if path.name != segment_name(header.first_lsn):
                raise corrupt(str(path), f"a segment that begins with record {header.first_lsn}", 0)
            self.generation = max(self.generation, header.generation)

    def records(self) -> Iterator[Record]:
        """Yields all records.

        Raises:
            LogCorrupt: Bytes are wrong in another place than a torn end.
        """
        for index, (path, header) in enumerate(zip(self.paths, self._headers, strict=True)):
            follower = self._headers[index + 1] if index + 1 < len(self._headers) else None
            yield from self._records_of(path, header, follower)

    def cut_off(self) -> None:
        """Cuts the unused end off the last segment, once all records are read, so that a segment may follow it.

        Raises:
            OSError: The system refuses.
        """
        if self.paths:
            segment = os.open(self.paths[-1], os.O_RDWR | os.O_CLOEXEC)
            try:
                os.ftruncate(segment, self.end)
                os.fsync(segment)
            finally:
                os.close(segment)

    def _records_of(self, path: Path, header: SegmentHeader, follower: SegmentHeader | None) -> Iterator[Record]:
        data = _mapped(path)
        # What a later generation does not continue was appended by a process that had lost its lease.
        ends_before = follower.first_lsn if follower is not None and follower.generation > header.generation else None
        if (header.first_lsn, header.previous) != (self.newest_lsn + 1, self.newest_checksum):
            raise corrupt(
                str(path), f"begins with record {header.first_lsn}, it does not follow record {self.newest_lsn}", 0
            )
        offset = HEADER_BYTES
        while self.newest_lsn + 1 != ends_before:
            head = find_record(data, offset)
            if isinstance(head, str):
                break
            if (head.lsn, head.previous) != (self.newest_lsn + 1, self.newest_checksum):
                raise corrupt(str(path), f"record {head.lsn} does not follow record {self.newest_lsn}", offset)
            record = _record_at(data, offset, head, path)
            self.newest_lsn, self.newest_checksum = head.lsn, head.checksum
            offset += head.end
            yield record
        else:
            self.end = offset
            return
        self.end = offset
        if not is_zero(path, offset):
            if follower is not None or _durable_behind(data, offset) > self.newest_lsn:
                raise corrupt(str(path), head, offset)
            self.torn = TornEnd(path, offset, len(data) - offset)


def _mapped(path: Path) -> memoryview:
    """Returns the content of a file. It stays mapped as long as something refers to it."""
    with path.open("rb") as file:
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


def _durable_behind(data: memoryview, offset: int) -> int:
    """Returns the largest durable lsn that the whole records behind `offset` tell; 0 without one."""
    words = np.frombuffer(data[: len(data) // 8 * 8], "<u4")[::2]
    found = np.flatnonzero(words[offset // 8 + 1 :] == int.from_bytes(RECORD_MAGIC, "little"))
    heads = (find_record(data, 8 * (offset // 8 + 1 + int(at))) for at in found)
    return max((head.durable_lsn for head in heads if not isinstance(head, str)), default=0)


def _record_at(data: memoryview, offset: int, head: RecordHead, path: Path) -> Record:
    """Returns a record whose checksum is right."""
    at = offset + HEAD_BYTES
    num_marks = head.num_marks
    marks = unpack_marks(data[at : at + MARK_BYTES * (num_marks + head.num_left)])
    at += MARK_BYTES * (num_marks + head.num_left)
    table = data[at : at + BLOCK_BYTES * head.num_blocks]
    at += len(table)
    end = offset + head.end
    sizes = column_sizes(table)
    if sum(size + -size % 8 for size in sizes) + head.body_bytes > end - at:
        raise corrupt(str(path), f"record {head.lsn}: its columns do not fit into it", offset)
    columns = []
    for size in sizes:
        columns.append(data[at : at + size])
        at += size + -size % 8
    try:
        blocks = _blocks_of(head.kind, table, columns)
    except ProtocolError as error:
        raise corrupt(str(path), f"record {head.lsn}: {error}", offset) from error
    body = bytes(data[at : at + head.body_bytes])
    return Record(head, marks[:num_marks], marks[num_marks:], blocks, body, str(path), offset)


_OPS = {Kind.COMMIT: Op.COMMIT, Kind.CHANGED: Op.PULL}


def _blocks_of(kind: Kind, table: memoryview, columns: list[memoryview]) -> list[Block]:
    if not len(table):
        return []
    is_push = table[OFFSETS["action"]] == Action.PUSH or bool(table[OFFSETS["columns"]] & IDS)
    op = _OPS.get(kind, Op.PUSH if is_push else Op.ASSIGN)
    sizes = [0, *map(len, columns)]
    return decode_blocks(op, table, [b"", *columns], sizes, sys.maxsize)
