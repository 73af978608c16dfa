"""The manifest: which files make up a snapshot, its base, and the positions of its workers.

`docs/snapshot.md` defines every field.
"""

from __future__ import annotations

import json
import re
from itertools import pairwise
from typing import Annotated, Any

import msgspec
import xxhash

from fleet_sparse.core.ids import NUM_BUCKETS
from fleet_sparse.core.version import Version
from fleet_sparse.core.watermark import Watermark
from fleet_sparse.errors import SnapshotError

from .checksum import Checksum, decode_checksum, encode_checksum
from .directory import corrupt

VERSION = 4
"""Version of the rows files and manifests that are written."""
VERSIONS = (2, 3, 4)
"""Versions that are read."""
FORMAT = "fleet_sparse snapshot"
MAX_BYTES = 64 << 20
"""Largest size of a manifest, written or read."""
MAX_WORKERS = 65_536
"""Largest number of workers of a snapshot, and of clients of a file: that of the workers of a job."""
FULL, DELTA = "full", "delta"

_SAVE_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
_CLIENT_ID_BYTES = 16

Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class ShardFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, order=True):
    """The rows file of one shard."""

    shard: Count
    file: str
    """Name of the file, without directory."""
    num_bytes: Count
    num_rows: Count
    num_removed: Count
    checksum: Checksum
    """Checksum of its index, which contains the checksums of the rest."""
    clients: tuple[Watermark, ...] = ()
    """The newest push that the file contains, of each worker of the job that pushed."""


class WorkerPosition(msgspec.Struct, frozen=True, forbid_unknown_fields=True, order=True):
    """Step and position of a worker when the snapshot was cut."""

    worker: Count
    step: Count
    """Number of steps that it had trained."""
    position: Any = None
    """Position of its loader as any JSON value; None if it reported none."""


class Base(msgspec.Struct, frozen=True, forbid_unknown_fields=True, order=True):
    """The snapshot that a delta is based on."""

    number: Count
    kind: str
    checksum: Checksum
    """Checksum of its manifest."""

    @property
    def name(self) -> str:
        """Name of its directory."""
        return snapshot_name(self.number, self.kind)


class Manifest(msgspec.Struct, frozen=True, order=True):
    """One snapshot."""

    number: int
    kind: str
    """`FULL` or `DELTA`."""
    base: Base | None
    """None in a full one."""
    save_id: str
    saved_at: str
    """The time in a form for people to read."""
    tables: tuple[str, ...]
    is_complete: bool
    """True if all tables and dense arrays were saved."""
    files: tuple[ShardFile, ...]
    """One for each shard, in their order."""
    workers: tuple[WorkerPosition, ...]
    """One for each worker, in the order of `worker`."""
    placement_version: int | None = 1
    """Version of the placement of all pservers; None in version 2, which does not have it."""
    version: int = VERSION

    @property
    def name(self) -> str:
        """Name of its directory."""
        return snapshot_name(self.number, self.kind)

    @property
    def num_shards(self) -> int:
        """Number of shards that saved together."""
        return len(self.files)

    @property
    def num_rows(self) -> int:
        """Number of rows in all files."""
        return sum(file.num_rows for file in self.files)

    @property
    def num_removed(self) -> int:
        """Number of removed ids in all files."""
        return sum(file.num_removed for file in self.files)

    @property
    def checksum(self) -> Checksum:
        """Checksum of all fields."""
        return _checksum(self._fields())

    def to_json(self) -> bytes:
        """The content of its file, with checksum.

        Raises:
            ValueError: A position is not JSON.
            SnapshotError: It would be too large to be read.
        """
        value = self._fields()
        content = json.dumps({**value, "checksum": str(_checksum(value))}, indent=2, allow_nan=False).encode() + b"\n"
        if len(content) > MAX_BYTES:
            raise SnapshotError(
                f"manifest of {self.name}: it has {len(content)} bytes, should have at most {MAX_BYTES}: it has "
                f"{sum(len(file.clients) for file in self.files)} watermarks and {len(self.workers)} positions"
            )
        return content

    @classmethod
    def parse(cls, content: bytes, path: str) -> Manifest:
        """Parses what `to_json` wrote.

        Args:
            content: Content of the file.
            path: Path of the file, for messages.

        Raises:
            SnapshotCorrupt: Bytes are wrong.
            SnapshotError: It has an unknown version.
        """
        try:
            return _parsed(content, path)
        except (msgspec.MsgspecError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise corrupt(path, f"inconsistent manifest: {error}", 0) from error

    def fault(self) -> str | None:
        """Returns why this is not the manifest of a snapshot; None if it is."""
        faults = (
            None if _SAVE_ID.fullmatch(self.save_id) else _save_id_fault(self.save_id),
            _base_fault(self),
            _files_fault(self.files, self.kind),
            _repeats_fault(self),
            None if (self.placement_version is None) == (self.version == 2) else "version 3 has a placement version",
        )
        return next((fault for fault in faults if fault is not None), None)

    def _fields(self) -> dict[str, Any]:
        """All fields as JSON values, without the checksum."""
        fields = _Fields(
            format=FORMAT,
            version=self.version,
            number=self.number,
            kind=self.kind,
            base=self.base,
            save_id=self.save_id,
            saved_at=self.saved_at,
            num_shards=self.num_shards,
            num_rows=self.num_rows,
            num_removed=self.num_removed,
            tables=self.tables,
            is_complete=self.is_complete,
            files=tuple(_FileFields.of(file) for file in self.files),
            workers=self.workers,
            placement_version=msgspec.UNSET if self.placement_version is None else self.placement_version,
        )
        value: dict[str, Any] = msgspec.to_builtins(fields, enc_hook=encode_checksum)
        return value


class _Client(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A watermark in JSON."""

    client_id: Annotated[str, msgspec.Meta(pattern=f"^[0-9a-f]{{{2 * _CLIENT_ID_BYTES}}}$")]
    epoch: Count
    watermark: Count


class _FileFields(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A `ShardFile` in JSON."""

    shard: Count
    file: str
    num_bytes: Count
    num_rows: Count
    num_removed: Count
    checksum: Checksum
    clients: tuple[_Client, ...]

    @classmethod
    def of(cls, file: ShardFile) -> _FileFields:
        clients = tuple(_Client(mark.client_id.hex(), mark.epoch, mark.watermark) for mark in file.clients)
        return cls(file.shard, file.file, file.num_bytes, file.num_rows, file.num_removed, file.checksum, clients)

    def shard_file(self) -> ShardFile:
        clients = tuple(Watermark(bytes.fromhex(each.client_id), each.epoch, each.watermark) for each in self.clients)
        return ShardFile(self.shard, self.file, self.num_bytes, self.num_rows, self.num_removed, self.checksum, clients)


class _Fields(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A manifest in JSON, without the checksum."""

    format: str
    version: int
    number: Count
    kind: str
    base: Base | None
    save_id: str
    saved_at: str
    num_shards: Count
    num_rows: Count
    num_removed: Count
    tables: tuple[str, ...]
    is_complete: bool = msgspec.field(name="is_whole")
    placement_version: Count | msgspec.UnsetType = msgspec.UNSET
    files: tuple[_FileFields, ...]
    workers: tuple[WorkerPosition, ...]


def snapshot_name(number: int, kind: str) -> str:
    """Returns the name of a snapshot's directory."""
    return f"{number:06d}-{kind}"


def version_of(manifest: Manifest) -> Version:
    """Returns the version that a snapshot is."""
    return Version(manifest.number, int(manifest.checksum))


def file_name(shard: int, num_shards: int) -> str:
    """Returns the name of a rows file."""
    return f"shard-{shard}-of-{num_shards}.fss"


def checked_save_id(save_id: str) -> str:
    """Returns the save id if it is allowed in the name of a directory.

    Raises:
        SnapshotError: It is not.
    """
    if not _SAVE_ID.fullmatch(save_id):
        raise SnapshotError(_save_id_fault(save_id))
    return save_id


def _save_id_fault(save_id: str) -> str:
    return f"save id {save_id!r}: should be 1 to 64 of A-Z a-z 0-9 _ -"


def _base_fault(manifest: Manifest) -> str | None:
    kind, base = manifest.kind, manifest.base
    if kind not in (FULL, DELTA) or (kind == FULL) != (base is None):
        return f"it has kind {kind!r} and base {base}, should be full without or delta with a base"
    if manifest.number < 1:
        return f"it has number {manifest.number}, should be at least 1"
    if base is not None and (base.kind not in (FULL, DELTA) or not 1 <= base.number < manifest.number):
        return f"its base is {base.name}, should be full or delta with a number from 1 to {manifest.number - 1}"
    return None


def _repeats_fault(manifest: Manifest) -> str | None:
    if len(set(manifest.tables)) != len(manifest.tables):
        return "a table is named twice"
    num_clients = max((len(file.clients) for file in manifest.files), default=0)
    if max(num_clients, len(manifest.workers)) > MAX_WORKERS:
        return f"it has {len(manifest.workers)} workers and {num_clients} clients of a file, at most {MAX_WORKERS} each"
    workers = [position.worker for position in manifest.workers]
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
            return f"file {file.file!r} has {file.num_removed} removed ids, a full snapshot should have none"
    return None


def _parsed(content: bytes, path: str) -> Manifest:
    value = json.loads(content.decode())
    # All versions have this checksum at this place, so a damaged manifest is not reported as one of another version.
    checksum = value.pop("checksum")
    if checksum != str(_checksum(value)):
        raise ValueError("checksum mismatch")
    if value["format"] != FORMAT:
        raise ValueError(f"format {value['format']!r}, should be {FORMAT!r}")
    if value["version"] not in VERSIONS:
        raise SnapshotError(f"{path}: it has format version {value['version']}, this fleet_sparse reads {VERSIONS}")
    fields = msgspec.convert(value, _Fields, dec_hook=decode_checksum)
    manifest = Manifest(
        fields.number,
        fields.kind,
        fields.base,
        fields.save_id,
        fields.saved_at,
        fields.tables,
        fields.is_complete,
        tuple(file.shard_file() for file in fields.files),
        fields.workers,
        None if fields.placement_version is msgspec.UNSET else fields.placement_version,
        fields.version,
    )
    if (fault := manifest.fault()) is not None:
        raise ValueError(fault)
    found, stated = (
        (manifest.num_shards, manifest.num_rows, manifest.num_removed),
        (
            fields.num_shards,
            fields.num_rows,
            fields.num_removed,
        ),
    )
    if found != stated:
        raise ValueError(f"shards, rows and removed ids are {stated}, those of the files are {found}")
    return manifest


def _checksum(value: dict[str, Any]) -> Checksum:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return Checksum(xxhash.xxh3_64_intdigest(text.encode()))
