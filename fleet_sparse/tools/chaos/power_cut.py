"""Logs as the power cut of a machine leaves them: pages that were written and not synced are there or not."""

from __future__ import annotations

import random
from pathlib import Path

from fleet_sparse.pserver.log.log_format import HEADER_BYTES, is_segment, record_ends

_PAGE_BYTES = 4096
_KEPT_SHARES = (0.0, 0.5)
"""Shares of the pages that reached the disk without a sync."""
_TORN_BYTES = 100


def last_segment(log: Path) -> Path:
    """Returns the newest segment of a log; the pserver may write there, and remove older ones.

    Raises:
        FileNotFoundError: There is none.
    """
    names = [path.name for path in log.iterdir() if is_segment(path.name)]
    if not names:
        raise FileNotFoundError(f"{log}: it has no segment of a log")
    return log / max(names)


def unsynced_records(segment: Path, num_synced_bytes: int) -> list[int]:
    """Returns the offsets of the records of a segment that are not wholly within its first bytes, which are synced.

    A segment is synced before the next one begins, so that a power cut loses records of the newest one only.
    """
    records = record_ends(memoryview(segment.read_bytes()))
    return [end - head.end for head, end in records if end > num_synced_bytes]


def cut_power(segment: Path, num_synced_bytes: int, chance: random.Random) -> int:
    """Makes zeros of pages that were not synced, all or any of them, in a segment that nobody writes to.

    Args:
        segment: The newest segment of a log.
        num_synced_bytes: Bytes of it that a sync has covered.
        chance: Chooses the pages.

    Returns:
        Number of records that it lost: from the first one on of which a page is gone.
    """
    ends = [end for _, end in record_ends(memoryview(segment.read_bytes()))]
    kept_share = chance.choice(_KEPT_SHARES)
    first_lost: int | None = None
    with segment.open("r+b") as file:
        begin = num_synced_bytes
        while ends and begin < ends[-1]:
            end = (begin // _PAGE_BYTES + 1) * _PAGE_BYTES
            if chance.random() >= kept_share:
                file.seek(begin)
                file.write(bytes(min(end, ends[-1]) - begin))
                first_lost = begin if first_lost is None else first_lost
            begin = end
    return 0 if first_lost is None else sum(end > first_lost for end in ends)


def tear(segment: Path) -> None:
    """Makes the record behind the last one of a segment that nobody writes to a torn one."""
    offset = max((end for _, end in record_ends(memoryview(segment.read_bytes()))), default=HEADER_BYTES)
    with segment.open("r+b") as file:
        file.seek(offset)
        file.write(b"FSLR" + b"\x5a" * _TORN_BYTES)
