"""LoadedRows: the rows file by which a log knows what a load put in the place of the shard's tables."""

from __future__ import annotations

import re
import secrets
import shutil
from collections.abc import Container
from pathlib import Path
from typing import Final

import msgspec

from fleet_sparse.snapshot.checksum import decode_checksum, encode_checksum
from fleet_sparse.snapshot.manifest import ShardFile

_STAGED: Final = "staged-"
_LOAD: Final = "load-"
_LOADED_NAME: Final = re.compile(rf"{_LOAD}(\d+)-[0-9a-f]+")


class LoadedRows(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of a LOAD.

    Attributes:
        load_id: Id of the load.
        directory: Name of the directory of the file, in that of the log.
        file: The rows file of the tables that were loaded.
    """

    load_id: str
    directory: str
    file: ShardFile

    def to_json(self) -> bytes:
        """Returns the body."""
        return msgspec.json.encode(self, enc_hook=encode_checksum)

    @classmethod
    def parse(cls, body: bytes) -> LoadedRows:
        """Returns what is in a body.

        Raises:
            ValueError: It is something else.
        """
        return msgspec.json.decode(body, type=cls, dec_hook=decode_checksum)


def staged_name() -> str:
    """Returns a new name for the directory of the rows file of a load that is not done yet."""
    return f"{_STAGED}{secrets.token_hex(8)}"


def loaded_name(lsn: int) -> str:
    """Returns a new name for the directory of the rows file of a LOAD.

    Args:
        lsn: That of a record before the LOAD. No checkpoint begins between the two.
    """
    return f"{_LOAD}{lsn}-{secrets.token_hex(8)}"


def remove_unnamed(directory: Path, named: Container[str]) -> None:
    """Removes the files of loads that no LOAD names, as far as the system allows; no load is under way."""
    for path in list(directory.iterdir()):
        if path.name.startswith((_STAGED, _LOAD)) and path.name not in named:
            shutil.rmtree(path, ignore_errors=True)


def is_loaded_before(name: str, first_lsn: int) -> bool:
    """Returns whether a directory has the rows of a load that a checkpoint contains, by its name.

    Args:
        name: Name of the directory.
        first_lsn: First lsn of the checkpoint.
    """
    found = _LOADED_NAME.fullmatch(name)
    return found is not None and int(found[1]) < first_lsn
