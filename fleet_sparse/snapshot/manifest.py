"""The manifest: which files make one snapshot, what it is on top of, and where its workers stood.

`docs/snapshot.md` says every field.
"""

from __future__ import annotations

import json
import re
from itertools import pairwise
from typing import Any, NamedTuple

import xxhash

from fleet_sparse.core.ids import NUM_BUCKETS
from fleet_sparse.core.watermark import Watermark
from fleet_sparse.errors import SnapshotError

from .directory import corrupt
from .fields import checksum_of, hex_of, number, typed

VERSION = 2
"""Of rows files and manifests. A reader refuses any other."""
FORMAT = "fleet_sparse snapshot"
MAX_BYTES = 64 << 20
FULL, DELTA = "full", "delta"

_SAVE_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")


class ShardFile(NamedTuple):
    """The rows file of one shard."""

    shard: int
    file: str
    """Its name, without directory."""
    num_bytes: int
    num_rows: int
    num_removed: int
    checksum: int
    """Of its index, which holds those of all else."""
    clients: tuple[Watermark, ...] = ()
    """The pushes that it contains."""


class WorkerPosition(NamedTuple):
    """Where a worker stood."""

    worker: int
    step: int
    """Steps that it had trained."""
    position: Any = None
    """Of its loader, whatever JSON that gave; None if it gave none."""


class Base(NamedTuple):
    """The snapshot that a delta is on top of."""

    number: int
    kind: str
    checksum: int
    """Of its manifest."""

    @property
    def name(self) -> str:
        """Of its directory."""
        return snapshot_name(self.number, self.kind)


class Manifest(NamedTuple):
    """One snapshot."""

    number: int
    kind: str
    """`FULL` or `DELTA`."""
    base: Base | None
    """None in a full one."""
    save_id: str
    saved_at: str
    """For people."""
    tables: tuple[str, ...]
    is_whole: bool
    """Whether all tables and dense arrays were saved."""
    files: tuple[ShardFile, ...]
    """One of each shard, in their order."""
    workers: tuple[WorkerPosition, ...]
    """In the order of `worker`."""

    @property
    def name(self) -> str:
        """Of its directory."""
        return snapshot_name(self.number, self.kind)

    @property
    def num_shards(self) -> int:
        """That saved together."""
        return len(self.files)

    @property
    def num_rows(self) -> int:
        """Of all files."""
        return sum(file.num_rows for file in self.files)

    @property
    def num_removed(self) -> int:
        """Of all files."""
        return sum(file.num_removed for file in self.files)

    @property
    def checksum(self) -> int:
        """Of all of the above."""
        return _checksum(self._fields_in_json())

    def to_json(self) -> bytes:
        """As it stands in its file, checksum and all.

        Raises:
            ValueError: A position is no JSON.
        """
        value = self._fields_in_json()
        return json.dumps({**value, "checksum": hex_of(_checksum(value))}, indent=2, allow_nan=False).encode() + b"\n"

    @classmethod
    def parse(cls, content: bytes, path: str) -> Manifest:
        """What `to_json` wrote.

        Args:
            content: Of the file.
            path: Of the file, for messages.

        Raises:
            SnapshotCorrupt: The bytes are wrong.
            SnapshotError: They are of another version.
        """
        try:
            return _parsed(content, path)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise corrupt(path, f"does not hold together ({error})", 0) from error

    def fault(self) -> str | None:
        """Why this is no manifest of a snapshot; None if it is."""
        faults = (
            None if _SAVE_ID.fullmatch(self.save_id) else _save_id_fault(self.save_id),
            _place_fault(self),
            _files_fault(self.files, self.kind),
            _twice_fault(self),
        )
        return next((fault for fault in faults if fault is not None), None)

    def _fields_in_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "version": VERSION,
            "number": self.number,
            "kind": self.kind,
            "base": None if self.base is None else {**self.base._asdict(), "checksum": hex_of(self.base.checksum)},
            "save_id": self.save_id,
            "saved_at": self.saved_at,
            "num_shards": self.num_shards,
            "num_rows": self.num_rows,
            "num_removed": self.num_removed,
            "tables": list(self.tables),
            "is_whole": self.is_whole,
            "files": [_file_in_json(file) for file in self.files],
            "workers": [mark._asdict() for mark in self.workers],
        }


def snapshot_name(number: int, kind: str) -> str:
    """The name of a snapshot's directory."""
    return f"{number:06d}-{kind}"


def file_name(shard: int, num_shards: int) -> str:
    """The name of a rows file."""
    return f"shard-{shard}-of-{num_shards}.fss"


def checked_save_id(save_id: str) -> str:
    """The save id, if it may stand in a directory's name.

    Raises:
        SnapshotError: It may not.
    """
    if not _SAVE_ID.fullmatch(save_id):
        raise SnapshotError(_save_id_fault(save_id))
    return save_id


def _save_id_fault(save_id: str) -> str:
    return f"save id {save_id!r}: should be 1 to 64 of A-Z a-z 0-9 _ -"


def _place_fault(manifest: Manifest) -> str | None:
    """Why it cannot stand where it says in a chain."""
    kind, base = manifest.kind, manifest.base
    if kind not in (FULL, DELTA) or (kind == FULL) != (base is None):
        return f"it is of kind {kind!r} with base {base}, should be full without or delta with one"
    if manifest.number < 1:
        return f"it has number {manifest.number}, should be at least 1"
    if base is not None and (base.kind not in (FULL, DELTA) or not 1 <= base.number < manifest.number):
        return f"its base is {base.name}, should be a full or delta one of a number from 1 to {manifest.number - 1}"
    return None


def _twice_fault(manifest: Manifest) -> str | None:
    if len(set(manifest.tables)) != len(manifest.tables):
        return "it names a table twice"
    workers = [mark.worker for mark in manifest.workers]
    if any(a >= b for a, b in pairwise(workers)):
        return f"it has workers {workers}, should be ascending"
    return None


def _files_fault(files: tuple[ShardFile, ...], kind: str) -> str | None:
    num_shards = len(files)
    if not 1 <= num_shards <= NUM_BUCKETS:
        return f"it has {num_shards} files, should have 1 to {NUM_BUCKETS}"
    if [file.shard for file in files] != list(range(num_shards)):
        shards = ", ".join(str(file.shard) for file in files)
        return f"files of shards {shards}, should be of shards 0 to {num_shards - 1}"
    for file in files:
        if file.file != file_name(file.shard, num_shards):
            return f"file {file.file!r}, should be {file_name(file.shard, num_shards)!r}"
        if kind == FULL and file.num_removed:
            return f"file {file.file!r} has {file.num_removed} removed ids, in a full snapshot there should be none"
    return None


def _file_in_json(file: ShardFile) -> dict[str, Any]:
    clients = [{**mark._asdict(), "client_id": mark.client_id.hex()} for mark in file.clients]
    return {**file._asdict(), "checksum": hex_of(file.checksum), "clients": clients}


def _parsed(content: bytes, path: str) -> Manifest:
    value = json.loads(content.decode())
    # Place and rule of the checksum are the same in all versions: what is damaged is not taken for a newer version.
    checksum = value.pop("checksum")
    if checksum != hex_of(_checksum(value)):
        raise ValueError("checksum mismatch")
    if value["format"] != FORMAT:
        raise ValueError(f"format {value['format']!r}, should be {FORMAT!r}")
    if value["version"] != VERSION:
        raise SnapshotError(f"{path}: it has format version {value['version']}, here it is {VERSION}")
    base = value["base"]
    manifest = Manifest(
        number(value["number"]),
        typed(str, value["kind"]),
        None if base is None else Base(number(base["number"]), typed(str, base["kind"]), checksum_of(base["checksum"])),
        typed(str, value["save_id"]),
        typed(str, value["saved_at"]),
        tuple(typed(str, table) for table in typed(list, value["tables"])),
        typed(bool, value["is_whole"]),
        tuple(_file(file) for file in typed(list, value["files"])),
        tuple(_worker(mark) for mark in typed(list, value["workers"])),
    )
    if (fault := manifest.fault()) is not None:
        raise ValueError(fault)
    # Fields too many, counts that do not add up, digits written in another way.
    if manifest.checksum != checksum_of(checksum):
        raise ValueError("its fields are not those of a manifest, or contradict each other")
    return manifest


def _file(value: dict[str, Any]) -> ShardFile:
    return ShardFile(
        number(value["shard"]),
        typed(str, value["file"]),
        number(value["num_bytes"]),
        number(value["num_rows"]),
        number(value["num_removed"]),
        checksum_of(value["checksum"]),
        tuple(_client(client) for client in typed(list, value["clients"])),
    )


def _client(value: dict[str, Any]) -> Watermark:
    client_id = bytes.fromhex(typed(str, value["client_id"]))
    if len(client_id) != 16:
        raise ValueError(f"a client id has {len(client_id)} bytes, should have 16")
    return Watermark(client_id, number(value["epoch"]), number(value["watermark"]))


def _worker(value: dict[str, Any]) -> WorkerPosition:
    return WorkerPosition(number(value["worker"]), number(value["step"]), value["position"])


def _checksum(value: dict[str, Any]) -> int:
    return xxhash.xxh3_64_intdigest(json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode())
