"""Notes of what the pservers of a chaos job have synced, made inside of them and without help of their log.

`FLEET_SPARSE_RULES` names this module, so that each pserver imports it. There it replaces the functions of `os` with
which a log is written and synced: `pwrite`, `pwritev` and `fdatasync`. A sync covers what had been written when it
began, and is noted once it has returned. So a process that is killed leaves no note of a sync that may not be complete.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

RULES: list[Any] = []
"""A module that FLEET_SPARSE_RULES names has to have this; no rule is added here."""
TRACE_VARIABLE = "CHAOS_SYNC_TRACE"
"""Environment variable with the directory of the notes; a process without it makes none."""

_NOTE = struct.Struct("<Q")


def num_synced_bytes(trace: Path, file: Path) -> int:
    """Returns how many bytes of a file that is only appended to a completed sync has covered.

    Args:
        trace: Directory of the notes.
        file: A file that a process with notes has synced.

    Raises:
        FileNotFoundError: It was never synced.
    """
    (num_bytes,) = _NOTE.unpack((trace / str(file.stat().st_ino)).read_bytes())
    return int(num_bytes)


def _begin(trace: Path) -> None:
    """Makes notes in this process from now on."""
    trace.mkdir(exist_ok=True)
    ends: dict[int, int] = {}  # by descriptor, the end of its last write; a new file begins with a write at 0
    pwrite, pwritev, fdatasync = os.pwrite, os.pwritev, os.fdatasync

    def noted_pwrite(file: int, data: Any, offset: int, /) -> int:
        num_bytes = pwrite(file, data, offset)
        ends[file] = offset + num_bytes
        return num_bytes

    def noted_pwritev(file: int, parts: Sequence[Any], offset: int, flags: int = 0, /) -> int:
        num_bytes = pwritev(file, parts, offset, flags)
        ends[file] = offset + num_bytes
        return num_bytes

    def noted_fdatasync(file: int, /) -> None:
        end = ends.get(file, 0)
        fdatasync(file)
        note = os.open(trace / str(os.fstat(file).st_ino), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            pwrite(note, _NOTE.pack(end), 0)
        finally:
            os.close(note)

    os.pwrite, os.pwritev, os.fdatasync = noted_pwrite, noted_pwritev, noted_fdatasync  # type: ignore[assignment]  # for ints alone


if _directory := os.environ.get(TRACE_VARIABLE):
    _begin(Path(_directory))
