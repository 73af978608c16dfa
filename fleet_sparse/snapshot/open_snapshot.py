"""OpenSnapshot: one snapshot of a chain, its files open and checked."""

from __future__ import annotations

from contextlib import ExitStack
from typing import NamedTuple

import numpy as np

from fleet_sparse.core.ids import BUCKET_BITS
from fleet_sparse.core.placement import Placement

from .directory import Directory
from .manifest import Manifest, ShardFile
from .rows_file import RowsFile, opened


class OpenSnapshot(NamedTuple):
    """One snapshot of a chain, with its files open."""

    directory: Directory
    manifest: Manifest
    files: tuple[RowsFile, ...]
    """By shard."""


def open_member(directory: Directory, manifest: Manifest, stack: ExitStack) -> OpenSnapshot:
    """A snapshot with its files open until the stack closes; of each all but its blocks is read and checked.

    Raises:
        SnapshotCorrupt: Bytes of one are wrong, it is another file than the manifest means, or has ids of other shards.
        SnapshotError: One is not there, or cannot be read.
    """
    files = []
    for expected in manifest.files:
        file = open_file(directory, manifest, expected)
        stack.callback(file.close)
        files.append(file)
    return OpenSnapshot(directory, manifest, tuple(files))


def open_file(directory: Directory, manifest: Manifest, expected: ShardFile) -> RowsFile:
    """One file of a snapshot, as `open_member`."""
    file = opened(directory.open(expected.file), expected)
    try:
        if file.save_id != manifest.save_id:
            raise file.corrupt(f"it is of save {file.save_id!r}, should be of {manifest.save_id!r}", file.index_offset)
        _check_placed(file)
    except BaseException:
        file.close()
        raise
    return file


def is_evenly_placed(file: RowsFile) -> bool:
    """Whether its shard owned the buckets that `Placement.even` says."""
    return bool(file.placement_version == Placement.even(1).version)


def _check_placed(file: RowsFile) -> None:
    """Each id is in the buckets of the file's shard. Blocks have the hashes that their entries say."""
    if not is_evenly_placed(file):
        return
    shard_of_bucket = Placement.even(file.num_shards).shard_of_bucket
    for section in file.tables:
        for entries in (section.rows_entries, section.removed_entries):
            for field in ("first_hash", "last_hash"):
                buckets = (entries[field] >> np.uint64(64 - BUCKET_BITS)).astype(np.int64)
                if (wrong := np.flatnonzero(shard_of_bucket[buckets] != file.shard)).size:
                    shard, offset = shard_of_bucket[buckets[wrong[0]]], int(entries["offset"][wrong[0]])
                    raise file.corrupt(f"table {section.spec.name!r}: has an id of shard {shard}", offset)
