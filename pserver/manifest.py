"""The manifest: which rows files make one snapshot. `docs/snapshot.md` says every field."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from fleet_sparse.errors import SnapshotCorrupt, SnapshotError

from .rows_file import VERSION, ShardFile, checked_save_id, name_of

NAME = "MANIFEST.json"
FORMAT = "fleet_sparse snapshot"
MAX_BYTES = 64 << 20


class Manifest(NamedTuple):
    """One snapshot: the file of every shard, by shard."""

    save_id: str
    files: tuple[ShardFile, ...]

    @property
    def num_rows(self) -> int:
        """Rows of all files."""
        return sum(file.num_rows for file in self.files)


def to_json(manifest: Manifest) -> bytes:
    """The manifest as it stands in its file, checksum and all."""
    value: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "save_id": manifest.save_id,
        "num_shards": len(manifest.files),
        "num_rows": manifest.num_rows,
        "files": [{**file._asdict(), "checksum": f"{file.checksum:016x}"} for file in manifest.files],
    }
    value["checksum"] = _checksum(value)
    return json.dumps(value, indent=2).encode() + b"\n"


def read(directory: Path) -> Manifest:
    """The manifest of the snapshot in a directory.

    Raises:
        SnapshotCorrupt: Its bytes are wrong.
        SnapshotError: There is none, it cannot be read, or it has another version.
    """
    path = directory / NAME
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            content = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise SnapshotError(
            f"{directory}: it has no {NAME}; either nothing was saved there, or the save did not come to its end"
        ) from None
    except OSError as error:
        raise SnapshotError(f"{path}: cannot be read: {error}") from error
    try:
        return _parse(content, path)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise SnapshotCorrupt(
            f"{path}: does not hold together ({error}), at byte 0", path=str(path), offset=0
        ) from error


def _parse(content: bytes, path: Path) -> Manifest:
    if len(content) > MAX_BYTES:
        raise ValueError(f"more than {MAX_BYTES} bytes")
    value = json.loads(content)
    checksum = value.pop("checksum")
    if checksum != _checksum(value):
        raise ValueError("checksum mismatch")
    if value["format"] != FORMAT:
        raise ValueError(f"format {value['format']!r}, should be {FORMAT!r}")
    if value["version"] != VERSION:
        raise SnapshotError(f"{path}: it has format version {value['version']}, here it is {VERSION}")
    files = tuple(
        ShardFile(file["shard"], file["file"], file["num_bytes"], file["num_rows"], int(file["checksum"], 16))
        for file in value["files"]
    )
    manifest = Manifest(value["save_id"], files)
    fault = fault_of(manifest, value["num_shards"])
    if fault is not None:
        raise ValueError(fault)
    return manifest


def fault_of(manifest: Manifest, num_shards: int) -> str | None:
    """Why these are not the files of one save by so many shards; None if they are."""
    try:
        checked_save_id(manifest.save_id)
    except SnapshotError as error:
        return str(error)
    if [file.shard for file in manifest.files] != list(range(num_shards)):
        shards = ", ".join(str(file.shard) for file in manifest.files)
        return f"files of shards {shards or 'none'}, should be of shards 0 to {num_shards - 1}"
    for file in manifest.files:
        name = name_of(file.shard, num_shards, manifest.save_id)
        if file.file != name:
            return f"file {file.file!r}, should be {name!r}"
    return None


def _checksum(value: dict[str, Any]) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(value, sort_keys=True, separators=(",", ":")).encode())
