"""Checkpoint: which rows file a log begins with, and what it makes superfluous."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, Final

import msgspec
from xxhash import xxh3_64_intdigest

from fleet_sparse.snapshot.checksum import Checksum, decode_checksum, encode_checksum
from fleet_sparse.snapshot.directory import LocalDirectory
from fleet_sparse.snapshot.manifest import ShardFile

from .log_format import corrupt, is_segment, segment_name

CHECKPOINT: Final = "CHECKPOINT.json"
VERSION: Final = 1
_PREFIX: Final = "checkpoint-"


class Checkpoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of a shard at a cut.

    Attributes:
        first_lsn: First lsn of the segment that begins at the cut.
        file: The rows file.
        version: Version of the format.
    """

    first_lsn: int
    file: ShardFile
    version: int = VERSION

    @property
    def name(self) -> str:
        """Name of the directory of the rows file."""
        return checkpoint_name(self.first_lsn)

    def to_json(self) -> bytes:
        """Returns the content of its file, with checksum."""
        fields = msgspec.to_builtins(self, enc_hook=encode_checksum)
        return json.dumps({**fields, "checksum": str(_checksum(fields))}, indent=2).encode() + b"\n"


def checkpoint_name(first_lsn: int) -> str:
    """Returns the name of the directory of a checkpoint."""
    return f"{_PREFIX}{first_lsn}"


def read_checkpoint(directory: Path) -> Checkpoint | None:
    """Returns the newest checkpoint of a log; None before the first.

    Raises:
        LogCorrupt: Bytes are wrong.
    """
    path = directory / CHECKPOINT
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    try:
        fields = json.loads(content)
        if fields.pop("checksum") != str(_checksum(fields)):
            raise corrupt(str(path), "wrong checksum of a checkpoint", 0)
        checkpoint = msgspec.convert(fields, Checkpoint, dec_hook=decode_checksum)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise corrupt(str(path), f"wrong checkpoint: {error}", 0) from error
    if checkpoint.version != VERSION:
        raise corrupt(str(path), f"version {checkpoint.version} of a checkpoint, should be {VERSION}", 0)
    return checkpoint


def adopt_checkpoint(directory: Path, checkpoint: Checkpoint) -> None:
    """Makes a checkpoint, whose rows file is durable, the one that the log begins with; removes what was before it.

    Raises:
        SnapshotError: The system refuses.
        OSError: An older file cannot be removed.
    """
    LocalDirectory(directory.resolve()).replace(CHECKPOINT, checkpoint.to_json())
    remove_superfluous(directory, checkpoint)


def remove_superfluous(directory: Path, checkpoint: Checkpoint | None) -> None:
    """Removes segments before a checkpoint, and all other checkpoints.

    Raises:
        OSError: The system refuses.
    """
    for path in list(directory.iterdir()):
        if path.name.startswith(_PREFIX) and (checkpoint is None or path.name != checkpoint.name):
            shutil.rmtree(path)
        elif checkpoint is not None and is_segment(path.name) and path.name < segment_name(checkpoint.first_lsn):
            path.unlink()


def remove_abandoned(directory: Path, first_lsn: int) -> None:
    """Removes the rows file of a checkpoint that failed, as far as the system allows, unless it was adopted."""
    adopted = read_checkpoint(directory)
    if adopted is None or adopted.first_lsn != first_lsn:
        shutil.rmtree(directory / checkpoint_name(first_lsn), ignore_errors=True)


def _checksum(fields: dict[str, Any]) -> Checksum:
    return Checksum(xxh3_64_intdigest(json.dumps(fields, sort_keys=True).encode()))
