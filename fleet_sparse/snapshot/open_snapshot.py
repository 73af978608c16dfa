"""OpenSnapshot: one snapshot of a chain with its files open."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleet_sparse.core.ids import BUCKET_BITS
from fleet_sparse.core.placement import Placement, is_known

from .directory import Directory
from .manifest import Manifest, ShardFile
from .rows_reader import RowsFile, open_rows_file


class OpenSnapshot(NamedTuple):
    """One snapshot of a chain, with its files open."""

    directory: Directory
    manifest: Manifest
    files: tuple[RowsFile, ...]
    """Ordered by shard."""


def open_snapshot(
    directory: Directory, manifest: Manifest, stack: ExitStack, shards: Iterable[int] | None = None
) -> OpenSnapshot:
    """Opens files of a snapshot until the stack closes, and checks everything but their blocks.

    Args:
        directory: The directory of the snapshot.
        manifest: Its manifest.
        stack: Closes the files.
        shards: The shards whose files are opened; None for all.

    Raises:
        SnapshotCorrupt: Bytes of a file are wrong, it is not the file that the manifest names, or it contains ids of
            other shards.
        SnapshotError: A file is missing, or cannot be read.
    """
    files = []
    for expected in manifest.files if shards is None else (manifest.files[shard] for shard in shards):
        file = open_file(directory, manifest, expected)
        stack.callback(file.close)
        files.append(file)
    return OpenSnapshot(directory, manifest, tuple(files))


def open_file(directory: Directory, manifest: Manifest, expected: ShardFile) -> RowsFile:
    """Opens one file of a snapshot.

    Raises:
        SnapshotCorrupt, SnapshotError: As `open_snapshot`.
    """
    file = open_rows_file(directory.open(expected.file), expected)
    try:
        if file.save_id != manifest.save_id:
            raise file.corrupt(f"it is of save {file.save_id!r}, should be of {manifest.save_id!r}", file.index_offset)
        if manifest.placement_version not in (None, file.placement_version):
            raise file.corrupt(
                f"it has placement version {file.placement_version}, the manifest says {manifest.placement_version}", 0
            )
        _check_placed(file)
    except BaseException:
        file.close()
        raise
    return file


def shards_with(manifest: Manifest, owned: NDArray[np.bool_]) -> list[int]:
    """Returns the shards of a snapshot whose files can contain ids of the buckets `owned`, `(NUM_BUCKETS,)`."""
    version = manifest.placement_version
    if version is None or not is_known(version):
        return list(range(manifest.num_shards))
    shards: list[int] = np.unique(Placement.even(manifest.num_shards, version).shard_of_bucket[owned]).tolist()
    return shards


def is_evenly_placed(file: RowsFile) -> bool:
    """Returns whether the shard of a file owned the buckets of `Placement.even`."""
    return is_known(file.placement_version)


def _check_placed(file: RowsFile) -> None:
    """Checks by the entries that each id is in a bucket of the file's shard."""
    if not is_evenly_placed(file):
        return
    shard_of_bucket = Placement.even(file.num_shards, file.placement_version).shard_of_bucket
    for section in file.tables:
        for entries in (section.rows_entries, section.removed_entries):
            for field in ("first_hash", "last_hash"):
                buckets = (entries[field] >> np.uint64(64 - BUCKET_BITS)).astype(np.int64)
                if (wrong := np.flatnonzero(shard_of_bucket[buckets] != file.shard)).size:
                    shard, offset = shard_of_bucket[buckets[wrong[0]]], int(entries["offset"][wrong[0]])
                    raise file.corrupt(f"table {section.spec.name!r}: it has an id of shard {shard}", offset)
