"""Coverage-guided cases by Atheris: `python -m support.coverage_guided frames|manifests [options] corpus`."""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import atheris
import xxhash

with atheris.instrument_imports(include=["fleet_sparse.wire", "fleet_sparse.snapshot", "fleet_sparse.core.spec_json"]):
    from fleet_sparse.errors import ProtocolError, SnapshotError
    from fleet_sparse.snapshot.manifest import Manifest
    from fleet_sparse.wire.decode import decode
    from fleet_sparse.wire.encode import encode
    from fleet_sparse.wire.frame_format import HEADER_BYTES

from support.frames import MAX_BYTES, resized
from support.fuzzing import SENT
from support.rows_files import A_FILE, DELTA_PLAN, FULL_PLAN, manifest_of
from support.rows_files import forged as forged_manifest

Target = Callable[[bytes], None]


def parts_of(data: bytes) -> list[bytes]:
    """Parts of any bytes: a word for the length of each, as long as there are bytes."""
    parts = []
    while len(data) >= 2:
        (length,) = struct.unpack_from("<H", data)
        parts.append(data[2 : 2 + length])
        data = data[2 + length :]
    return parts


def bytes_of(parts: list[bytes]) -> bytes:
    return b"".join(struct.pack("<H", len(part)) + part for part in parts)


def try_frame(data: bytes) -> None:
    """What is decoded encodes to the same bytes, with the checksum that was sent and with the right one."""
    parts = parts_of(data)
    variants = [parts]
    if parts and len(parts[0]) >= HEADER_BYTES:
        variants.append(resized(parts))
    for each in variants:
        with suppress(ProtocolError):
            assert encode(decode(each, max_bytes=MAX_BYTES)) == each


def try_manifest(data: bytes) -> None:
    """What is parsed, with the checksum that was sent and with the right one, is written as what is parsed again."""
    for each in (data, sealed(data)):
        with suppress(SnapshotError):
            manifest = Manifest.parse(each, "MANIFEST.json")
            assert Manifest.parse(manifest.to_json(), "MANIFEST.json") == manifest


def sealed(data: bytes) -> bytes:
    """A manifest with the right checksum; other bytes as they are."""
    try:
        fields = json.loads(data)
        fields.pop("checksum")
        text = json.dumps(fields, sort_keys=True, separators=(",", ":"))
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
        return data
    return json.dumps({**fields, "checksum": xxhash.xxh3_64_hexdigest(text.encode())}).encode()


MANIFESTS = [manifest_of(FULL_PLAN, [A_FILE]).to_json(), forged_manifest(manifest_of(DELTA_PLAN, [A_FILE]))]
TARGETS: dict[str, tuple[Target, list[bytes]]] = {
    "frames": (try_frame, [bytes_of(parts) for parts in SENT]),
    "manifests": (try_manifest, MANIFESTS),
}


def main() -> None:
    run, beginnings = TARGETS[sys.argv[1]]
    corpus = Path(sys.argv[-1])
    for number, beginning in enumerate(beginnings):
        (corpus / f"begin-{number}").write_bytes(beginning)
    atheris.Setup([sys.argv[0], *sys.argv[2:]], run)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
