"""JSON files with a checksum of their own: `SERVE.json`, `SERVING.json` and `DICTIONARY.json`."""

from __future__ import annotations

import json
from typing import Any, TypeVar

import msgspec
import xxhash

from fleet_sparse.errors import SnapshotError

from .checksum import Checksum, decode_checksum, encode_checksum
from .directory import corrupt

_Struct = TypeVar("_Struct", bound=msgspec.Struct)


def encode_checked(value: msgspec.Struct) -> bytes:
    """Returns the bytes of a file: an object with the fields of `value`, and their checksum.

    Raises:
        ValueError: A number is not finite.
    """
    fields = msgspec.to_builtins(value, enc_hook=encode_checksum)
    return json.dumps({**fields, "checksum": str(_checksum(fields))}, indent=1, sort_keys=True).encode() + b"\n"


def decode_checked(content: bytes, kind: type[_Struct], where: str) -> _Struct:
    """Returns the value that `encode_checked` wrote.

    Args:
        content: Bytes of the file.
        kind: Type of the value; the defaults of its fields `format` and `version` are the ones that are read.
        where: Path or URL of the file, for messages.

    Raises:
        SnapshotCorrupt: Bytes are wrong.
        SnapshotError: The file is of another version.
    """
    try:
        fields = json.loads(content)
        checksum = fields.pop("checksum")
        expected = str(_checksum(fields))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise corrupt(where, f"it is not JSON with a checksum ({error})", 0) from error
    if checksum != expected:
        raise corrupt(where, f"its checksum is {checksum}, should be {expected}", 0)
    default = {field.name: field.default for field in msgspec.structs.fields(kind)}
    if fields.get("format") != default["format"]:
        raise corrupt(where, f"its format is {fields.get('format')!r}, should be {default['format']!r}", 0)
    if fields.get("version") != default["version"]:
        raise SnapshotError(f"{where}: its version is {fields.get('version')}, this build reads {default['version']}")
    try:
        return msgspec.convert(fields, kind, dec_hook=decode_checksum)
    except msgspec.ValidationError as error:
        raise corrupt(where, str(error), 0) from error


def _checksum(fields: dict[str, Any]) -> Checksum:
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return Checksum(xxhash.xxh3_64_intdigest(text.encode()))
