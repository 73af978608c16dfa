"""Snapshots: saving what a shard holds, and loading what any number of shards saved. `docs/snapshot.md`."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleet_sparse.errors import SnapshotError, TableMismatch

from . import manifest as manifests
from . import rows_file
from .changes import Held
from .dense import DenseRange
from .ledger import Ledger
from .manifest import Manifest
from .rows_file import DenseSection, RowsFile, ShardFile, TableSection
from .shard import Shard
from .store import Store

_log = logging.getLogger(__name__)
_ROWS_FILE = re.compile(rf"shard-\d+-of-\d+\.({rows_file.SAVE_ID})\.fss(\.tmp)?")


class Loaded(NamedTuple):
    """What a load brought to one shard."""

    save_id: str
    num_rows: int
    num_files: int


def write_draft(shard: Shard, directory: Path, save_id: str) -> ShardFile:
    """Writes the rows file of a shard, under a name that no reader looks at; `publish` gives it its own.

    To be called by the thread that owns the shard: it answers nothing until this returns.

    Raises:
        SnapshotError: The directory or the file cannot be written.
    """
    rows_file.checked_save_id(save_id)
    if shard.fault:
        raise SnapshotError(f"shard {shard.shard_index}: not saved: {shard.fault}")
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SnapshotError(f"{directory}: cannot be made: {error}") from error
    name = rows_file.name_of(shard.shard_index, shard.num_shards, save_id)
    return rows_file.write(shard, _draft_of(directory / name), save_id)


def publish(directory: Path, file: ShardFile) -> None:
    """Makes a draft durable and gives it its name. From any thread.

    Raises:
        SnapshotError: The system refused.
    """
    path = directory / file.file
    try:
        _move(_draft_of(path), path)
    except OSError as error:
        raise SnapshotError(f"{path}: cannot be made durable: {error}") from error


def finish(directory: Path, save_id: str, num_shards: int, files: Sequence[ShardFile]) -> Path:
    """Makes the published files of all shards one snapshot, in place of the one before, whose files it removes.

    Returns:
        The manifest.

    Raises:
        SnapshotError: Files are missing or others than those named, or the manifest cannot be written. The snapshot
            that was there before stands.
    """
    manifest = Manifest(save_id, tuple(sorted(files)))
    fault = manifests.fault_of(manifest, num_shards)
    if fault is not None:
        raise SnapshotError(f"{directory}: {fault}")
    for file in manifest.files:
        _check_there(directory / file.file, file.num_bytes)
    path = directory / manifests.NAME
    try:
        _draft_of(path).unlink(missing_ok=True)
        _draft_of(path).write_bytes(manifests.to_json(manifest))
        _move(_draft_of(path), path)
    except OSError as error:
        raise SnapshotError(f"{path}: cannot be written: {error}") from error
    _remove_others(directory, save_id)
    return path


def load(shard: Shard, directory: Path) -> Loaded:
    """Brings a snapshot, of any number of shards, into a shard that holds nothing yet.

    Raises:
        SnapshotCorrupt: Bytes of it are wrong. The shard holds a part of it and is of no use.
        SnapshotError: It is not there or cannot be read. Likewise.
    """
    manifest = manifests.read(directory)
    owned = shard.placement.shard_of_bucket == shard.shard_index
    arrays: dict[str, _DenseLoad] = {}
    num_rows = 0
    for expected in manifest.files:
        with rows_file.opened(directory / expected.file, expected) as file:
            if (file.shard, file.num_shards, file.save_id) != (expected.shard, len(manifest.files), manifest.save_id):
                raise file.corrupt(f"it is of shard {file.shard} of {file.num_shards}, save {file.save_id!r}", 0)
            for table in file.tables:
                num_rows += _load_table(shard, f"the snapshot {directory}", file, table, owned)
            for section in file.dense:
                held = _hold(shard, f"the snapshot {directory}", file, section)
                assert isinstance(held.values, DenseRange), "as its spec says"
                arrays.setdefault(section.spec.name, _DenseLoad(held.values)).add(file, section)
            if len(manifest.files) == shard.num_shards and expected.shard == shard.shard_index:
                shard.ledger = Ledger(file.marks)
    for array in arrays.values():
        array.finish(len(manifest.files))
    return Loaded(manifest.save_id, num_rows, len(manifest.files))


class _DenseLoad:
    """A shard's range of a dense array, put together from the ranges that other shards saved."""

    def __init__(self, dense: DenseRange) -> None:
        self._dense = dense
        self._values = np.empty(dense.size, np.float32)
        self._states = np.empty((dense.spec.update_rule.num_states, dense.size), np.float32)
        self._num_assigned = 0

    def add(self, file: RowsFile, section: DenseSection) -> None:
        """Takes over what one file has of the range."""
        if (section.begin, section.end) != section.spec.range_of(file.shard, file.num_shards):
            raise file.corrupt(f"dense {section.spec.name!r}: not the range of its shard", section.values.offset)
        begin, end = max(section.begin, self._dense.begin), min(section.end, self._dense.end)
        if begin < end:
            values, states = file.read_dense(section)
            here = slice(begin - self._dense.begin, end - self._dense.begin)
            there = slice(begin - section.begin, end - section.begin)
            self._values[here] = values[there]
            self._states[:, here] = states[:, there]
        self._num_assigned += section.assigned

    def finish(self, num_files: int) -> None:
        """Gives the range its values, if every shard had some."""
        if self._num_assigned == num_files:
            self._dense.load(self._values, self._states)


def _load_table(shard: Shard, origin: str, file: RowsFile, section: TableSection, owned: NDArray[np.bool_]) -> int:
    """Returns the number of rows."""
    store = _hold(shard, origin, file, section).values
    assert isinstance(store, Store), "as its spec says"
    num_before = num_rows = store.num_rows
    for block, rows in file.read_rows(section, owned):
        store.load(*rows)
        num_rows += len(rows.ids)
        if store.num_rows != num_rows:
            raise file.corrupt(f"table {section.spec.name!r}: an id occurs twice", block.ids.offset)
    return num_rows - num_before


def _hold(shard: Shard, origin: str, file: RowsFile, section: TableSection | DenseSection) -> Held:
    try:
        held = shard.add_table(section.spec, brought_by=origin)
    except TableMismatch as error:
        raise file.corrupt(str(error), file.index_offset) from error
    held.optimizer_step = max(held.optimizer_step, section.optimizer_step)
    return held


def _draft_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.tmp")


def _move(draft: Path, path: Path) -> None:
    """Durable before it has its name, and the name durable before this returns."""
    _sync(draft)
    os.replace(draft, path)
    _sync(path.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _check_there(path: Path, num_bytes: int) -> None:
    try:
        size = path.stat(follow_symlinks=False).st_size
    except OSError as error:
        raise SnapshotError(
            f"{path}: cannot be seen by the pserver that finishes the save: {error}. "
            "All pservers should save to one directory"
        ) from error
    if size != num_bytes:
        raise SnapshotError(f"{path}: it has {size} bytes, its pserver wrote {num_bytes}")


def _remove_others(directory: Path, save_id: str) -> None:
    for path in directory.iterdir():
        match = _ROWS_FILE.fullmatch(path.name)
        if match and match[1] != save_id:
            try:
                path.unlink()
            except OSError as error:
                _log.warning("cannot remove %s, which no snapshot names any more: %s", path, error)
