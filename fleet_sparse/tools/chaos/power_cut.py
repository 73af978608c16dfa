"""Logs as the power cut of a machine leaves them: records that were written and not synced are gone."""

from __future__ import annotations

import os
from pathlib import Path

from fleet_sparse.pserver.log.log_directory import read_header
from fleet_sparse.pserver.log.log_format import HEADER_BYTES, is_segment, record_ends

_TORN_BYTES = 100


def last_segment(directory: Path, shard: int) -> Path:
    """Returns the newest segment of the log of a shard, somewhere below a directory.

    Raises:
        FileNotFoundError: There is none.
    """
    segments = [path for path in sorted(directory.rglob("*.fsl")) if is_segment(path.name)]
    of_shard = [path for path in segments if read_header(path).identity.shard == shard]
    if not of_shard:
        raise FileNotFoundError(f"{directory}: it has no log of shard {shard}")
    return of_shard[-1]


def unsynced_records(segment: Path, num_synced_bytes: int) -> list[int]:
    """Returns the offsets of the records of a segment that are not wholly within its first bytes, which are synced.

    A segment is synced before the next one begins, so that a power cut loses records of the newest one only.
    """
    records = record_ends(memoryview(segment.read_bytes()))
    return [end - head.end for head, end in records if end > num_synced_bytes]


def cut(segment: Path, num_synced_bytes: int, share: float) -> int:
    """Cuts the newer part of the records that were not synced off a segment that nobody writes to.

    Args:
        segment: The newest segment of a log.
        num_synced_bytes: Bytes of it that a sync has covered.
        share: Share of the other records to cut, rounded up.

    Returns:
        Number of records that it lost.
    """
    unsynced = unsynced_records(segment, num_synced_bytes)
    lost = unsynced[int(len(unsynced) * (1 - share)) :]
    if lost:
        os.truncate(segment, lost[0])
    return len(lost)


def tear(segment: Path) -> None:
    """Makes the record behind the last one of a segment that nobody writes to a torn one."""
    offset = max((end for _, end in record_ends(memoryview(segment.read_bytes()))), default=HEADER_BYTES)
    with segment.open("r+b") as file:
        file.seek(offset)
        file.write(b"FSLR" + b"\x5a" * _TORN_BYTES)
