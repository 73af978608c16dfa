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

from .loaded_rows import is_loaded_before
from .log_format import corrupt, is_segment, segment_name

CHECKPOINT: Final = "CHECKPOINT.json"
VERSION: Final = 2
_PREFIX: Final = "checkpoint-"
_DRAFT: Final = f".{CHECKPOINT}."


class BaseFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A rows file below that of a checkpoint.

    Attributes:
        first_lsn: As of the checkpoint that it was.
        file: The rows file.
    """

    first_lsn: int
    file: ShardFile


class Checkpoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of a shard at a cut.

    Attributes:
        first_lsn: First lsn of the segment that begins at the cut.
        file: The rows file.
        bases: If that is the file of a delta, those below it: of a full snapshot, then of deltas.
        snapshot: Checksum of the manifest that names the file, too; None if it was written for the checkpoint.
        version: Version of the format.
    """

    first_lsn: int
    file: ShardFile
    bases: tuple[BaseFile, ...] = ()
    snapshot: Checksum | None = None
    version: int = VERSION

    @property
    def files(self) -> tuple[BaseFile, ...]:
        """All rows files, in the order in which they are loaded."""
        return (*self.bases, BaseFile(self.first_lsn, self.file))

    def to_json(self) -> bytes:
        """Returns the content of its file, with checksum."""
        fields = msgspec.to_builtins(self, enc_hook=encode_checksum)
        return json.dumps({**fields, "checksum": str(_checksum(fields))}, indent=2).encode() + b"\n"


def checkpoint_name(first_lsn: int) -> str:
    """Returns the name of the directory of a rows file."""
    return f"{_PREFIX}{first_lsn}"


def may_be_checkpoint(
    newest: Checkpoint | None, *, base: int | None, is_complete: bool, ends_day: bool, lacks_rows: bool
) -> bool:
    """Returns whether the rows file of a save has what a checkpoint needs: all of the shard as it is at the cut.

    Args:
        newest: The newest checkpoint; None before the first.
        base: Checksum of the manifest of the delta's base; None for a full snapshot.
        is_complete: True if all tables and dense arrays are saved.
        ends_day: True if the saved tables are a day older than those of the shard.
        lacks_rows: True if rows may be left out.
    """
    if not is_complete or ends_day or lacks_rows:
        return False
    return base is None or (newest is not None and newest.snapshot == base)


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
    """Makes a checkpoint, whose rows files are durable, the one that the log begins with; removes what was before it.

    Raises:
        SnapshotError: The system refuses.
        OSError: An older file cannot be removed.
    """
    LocalDirectory(directory.resolve()).replace(CHECKPOINT, checkpoint.to_json())
    remove_superfluous(directory, checkpoint)


def remove_superfluous(directory: Path, checkpoint: Checkpoint | None) -> None:
    """Removes segments and loads before a checkpoint, the rows files of all others, and what a crash left of them.

    Raises:
        OSError: The system refuses.
    """
    names = set() if checkpoint is None else {checkpoint_name(each.first_lsn) for each in checkpoint.files}
    first_segment = "" if checkpoint is None else segment_name(checkpoint.first_lsn)
    for path in list(directory.iterdir()):
        is_superfluous = path.name.startswith(_PREFIX) and path.name not in names
        if is_superfluous or (checkpoint is not None and is_loaded_before(path.name, checkpoint.first_lsn)):
            shutil.rmtree(path)
        elif path.name.startswith(_DRAFT) or (is_segment(path.name) and path.name < first_segment):
            path.unlink()


def remove_abandoned(directory: Path, first_lsn: int) -> None:
    """Removes the rows file of a checkpoint that failed, as far as the system allows, unless it was adopted.

    The caller keeps others from changing the files.

    Raises:
        LogCorrupt: As `read_checkpoint`.
    """
    adopted = read_checkpoint(directory)
    if adopted is None or adopted.first_lsn != first_lsn:
        shutil.rmtree(directory / checkpoint_name(first_lsn), ignore_errors=True)


def _checksum(fields: dict[str, Any]) -> Checksum:
    return Checksum(xxh3_64_intdigest(json.dumps(fields, sort_keys=True).encode()))
