"""Logs as the power cut of a machine leaves them: changes that were written and not synced are gone."""

from __future__ import annotations

import os
from pathlib import Path

from fleet_sparse.pserver.log.log_format import HEADER_BYTES, Kind, find_record, is_segment
from fleet_sparse.pserver.log.log_reader import read_header

_COMMITS = (Kind.APPLY, Kind.PREPARE, Kind.COMMIT, Kind.REJOIN)
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


def trailing_commits(segment: Path) -> list[int]:
    """Returns the offsets of the commits behind the newest record of another kind in a segment.

    A pserver waits for the disk before it answers what the others are for, so that a power cut loses none of them.
    """
    data, offset = memoryview(segment.read_bytes()), HEADER_BYTES
    commits: list[int] = []
    while not isinstance(head := find_record(data, offset), str):
        commits = [*commits, offset] if head.kind in _COMMITS else []
        offset += head.end
    return commits


def cut(segment: Path) -> int:
    """Cuts half of the trailing commits off a segment that nobody writes to; returns their number."""
    commits = trailing_commits(segment)
    lost = commits[len(commits) // 2 :]
    if lost:
        os.truncate(segment, lost[0])
    return len(lost)


def tear(segment: Path) -> None:
    """Makes the record behind the last one of a segment that nobody writes to a torn one."""
    data, offset = memoryview(segment.read_bytes()), HEADER_BYTES
    while not isinstance(head := find_record(data, offset), str):
        offset += head.end
    with segment.open("r+b") as file:
        file.seek(offset)
        file.write(b"FSLR" + b"\x5a" * _TORN_BYTES)
