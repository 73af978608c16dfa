"""Dictionaries: rows by id in mapped files that other programs read. `docs/dictionary.md` has every byte."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from fleet_sparse.core.ids import BUCKET_BITS, hash_ids
from fleet_sparse.core.placement import Placement
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.errors import SnapshotError
from fleet_sparse.snapshot.checked_json import decode_checked, encode_checked
from fleet_sparse.snapshot.checksum import Checksum
from fleet_sparse.snapshot.directory import corrupt
from fleet_sparse.snapshot.reader import SnapshotReader

from .exported_rows import DTYPES, RowChoice, RowError, chosen_rows, stored_rows, unseen_row

INDEX_FILE = "DICTIONARY.json"
FORMAT = "fleet_sparse dictionary"
VERSION = 1
MAGIC = b"FSSDICT\n"
HEADER_BYTES = 64
BLOCK_BYTES = 1 << 20

_HEADER = struct.Struct("<8sIIQQQ8xQ")  # and the checksum of these 56 bytes
_ALIGNMENT = 64
_SHIFT = 64 - BUCKET_BITS
_MANY_ROWS = 1 << 32


_FileName = Annotated[str, msgspec.Meta(pattern=r"^[0-9]+-[0-9]+-of-[0-9]+\.fsd\Z")]


class Partition(NamedTuple):
    """The part of a table that one file has."""

    spec: TableSpec
    shard: int
    num_shards: int
    first_bucket: int
    end_bucket: int


class ExportedTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A table of an export, as `DICTIONARY.json` describes it."""

    name: str
    dim: int
    dtype: str
    files: tuple[_FileName, ...]
    num_rows: int
    max_error: float
    rms_error: float


class _Index(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of `DICTIONARY.json`."""

    number: int
    """Number of the snapshot."""
    snapshot_checksum: Checksum
    """Checksum of its manifest."""
    tables: tuple[ExportedTable, ...]
    version: int = VERSION
    format: str = FORMAT


def export_dictionary(
    content: SnapshotReader, tables: Sequence[str], out: Path, choice: RowChoice
) -> list[ExportedTable]:
    """Writes one file for each table and shard of the snapshot, then `DICTIONARY.json`.

    Args:
        content: The snapshot.
        tables: Names of the tables.
        out: Directory; created if missing. The files of an earlier export are removed first.
        choice: Which rows, and how.

    Raises:
        PlanError: A row cannot be stored in the type of the export; see `stored_rows`.
        SnapshotError: The snapshot cannot be read, or `out` not written.
    """
    num_shards = content.manifest.num_shards
    placement = Placement.even(num_shards)
    exported = []
    try:
        out.mkdir(parents=True, exist_ok=True)
        outdated = _files_of(out)
        (out / INDEX_FILE).unlink(missing_ok=True)
        for file in outdated:
            (out / file).unlink(missing_ok=True)
        for number, name in enumerate(tables):
            spec, error, names = content.table(name).spec, RowError(), []
            for shard in range(num_shards):
                owned = placement.shard_of_bucket == shard
                buckets = np.flatnonzero(owned)
                partition = Partition(spec, shard, num_shards, int(buckets[0]), int(buckets[-1]) + 1)
                names.append(f"{number}-{shard}-of-{num_shards}.fsd")
                _write_partition(out / names[-1], content, partition, owned, choice, error)
            exported.append(
                ExportedTable(
                    name, spec.dim, choice.dtype, tuple(names), error.num_rows, error.max_error, error.rms_error
                )
            )
        index = _Index(content.manifest.number, content.manifest.checksum, tuple(exported))
        _replace(out / INDEX_FILE, encode_checked(index))
    except OSError as error_of_system:
        raise SnapshotError(f"{out}: cannot be written: {error_of_system}") from error_of_system
    return exported


def verify_dictionary(out: Path) -> list[ExportedTable]:
    """Reads every byte of an export and checks it.

    Raises:
        SnapshotCorrupt: Bytes are wrong.
        SnapshotError: A file is missing, cannot be read, or is of another version.
    """
    where = str(out / INDEX_FILE)
    index = _read_index(out)
    for table in index.tables:
        found = [verify_file(out / name) for name in table.files]
        num_rows = sum(each["num_rows"] for each in found)
        if num_rows != table.num_rows:
            raise corrupt(where, f"table {table.name!r} has {table.num_rows} rows, its files have {num_rows}", 0)
        for file, name in zip(found, table.files, strict=True):
            differences = [
                f"{key} is {file[key]!r}, should be {wanted!r}"
                for key, wanted in (
                    ("table", table.name),
                    ("dim", table.dim),
                    ("dtype", table.dtype),
                    ("snapshot_checksum", str(index.snapshot_checksum)),
                )
                if file[key] != wanted
            ]
            if differences:
                raise corrupt(str(out / name), differences[0], 0)
    return list(index.tables)


def verify_file(path: Path) -> dict[str, Any]:
    """Reads every byte of one file and checks it; returns its index.

    Raises:
        SnapshotCorrupt: Bytes are wrong.
        SnapshotError: It cannot be read.
    """
    content, where = _content_of(path), str(path)
    if len(content) < HEADER_BYTES or content[:8] != MAGIC:
        raise corrupt(where, f"it begins with {content[:8]!r}, should begin with {MAGIC!r}", 0)
    _, version, header_bytes, index_at, index_bytes, checksums_at, checksum = _HEADER.unpack_from(content)
    if struct.unpack_from("<Q", content, _HEADER.size)[0] != _checksum(content[: _HEADER.size]):
        raise corrupt(where, "checksum mismatch in the header", _HEADER.size)
    if (version, header_bytes) != (VERSION, HEADER_BYTES):
        raise SnapshotError(f"{where}: its version is {version}, this build reads {VERSION}")
    if index_at + index_bytes != len(content) or not HEADER_BYTES <= checksums_at <= index_at:
        raise corrupt(where, f"it has {len(content)} bytes, its header says {index_at + index_bytes}", 16)
    if checksum != _checksum(content[checksums_at:]):
        raise corrupt(where, "checksum mismatch in the index", checksums_at)
    expected = np.frombuffer(content[checksums_at:index_at], "<u8")
    starts = range(HEADER_BYTES, checksums_at, BLOCK_BYTES)
    if len(expected) != len(starts):
        raise corrupt(where, f"it has {len(expected)} checksums, should have {len(starts)}", checksums_at)
    for start, wanted in zip(starts, expected, strict=True):
        if _checksum(content[start : min(start + BLOCK_BYTES, checksums_at)]) != int(wanted):
            raise corrupt(where, "checksum mismatch in a block", start)
    index: dict[str, Any] = json.loads(content[index_at:])
    _check_order(where, content, index)
    return index


def _check_order(where: str, content: bytes, index: dict[str, Any]) -> None:
    arrays = {
        name: np.frombuffer(content, dtype, int(np.prod(shape)), offset).reshape(shape)
        for name, (offset, dtype, shape) in index["arrays"].items()
    }
    hashes = hash_ids(arrays["ids"], index["salt"])
    slots = _slots(hashes, index["first_bucket"], index["shift"])
    if (hashes[1:] <= hashes[:-1]).any() or not np.array_equal(
        arrays["begin"], _begins(slots, len(arrays["begin"]) - 1)
    ):
        raise corrupt(where, "its ids are not in the order of their hash", index["arrays"]["ids"][0])


def _write_partition(
    path: Path,
    content: SnapshotReader,
    partition: Partition,
    owned: NDArray[np.bool_],
    choice: RowChoice,
    error: RowError,
) -> None:
    spec = partition.spec
    ids: list[NDArray[Any]] = [np.empty(0, np.int64)]
    parts: list[NDArray[Any]] = [np.empty((0, spec.dim)).astype(DTYPES[choice.dtype])]
    scales: list[NDArray[Any]] = [np.empty(0, np.float32)]
    for block_ids, rows in chosen_rows(content, spec.name, choice, owned):
        stored = stored_rows(spec.name, block_ids, rows, choice.dtype)
        error.add(rows, stored)
        ids.append(block_ids)
        parts.append(stored.rows)
        if stored.scales is not None:
            scales.append(stored.scales)
    all_ids = np.concatenate(ids)
    num_rows = len(all_ids)
    span = (partition.end_bucket - partition.first_bucket) << _SHIFT
    shift = max(0, (span - 1).bit_length() - max(num_rows - 1, 1).bit_length())
    slots = _slots(hash_ids(all_ids, spec.salt), partition.first_bucket, shift)
    begin = _begins(slots, ((span - 1) >> shift) + 1)
    arrays = {"begin": begin, "ids": all_ids.astype("<i8"), "rows": np.concatenate(parts)}
    if choice.dtype == "int8":
        arrays["scales"] = np.concatenate(scales)
    arrays["unseen"] = unseen_row(spec, choice).astype("<f4")
    index = {
        "table": spec.name,
        "dim": spec.dim,
        "dtype": choice.dtype,
        "salt": int(spec.salt),
        "shard": partition.shard,
        "num_shards": partition.num_shards,
        "first_bucket": partition.first_bucket,
        "end_bucket": partition.end_bucket,
        "shift": shift,
        "num_rows": num_rows,
        "number": content.manifest.number,
        "snapshot_checksum": str(content.manifest.checksum),
    }
    _write_file(path, index, arrays)


def _write_file(path: Path, index: dict[str, Any], arrays: dict[str, NDArray[Any]]) -> None:
    draft = path.with_name(f".{path.name}.draft")
    with draft.open("wb+") as file:
        file.write(bytes(HEADER_BYTES))
        offsets = {}
        for name, array in arrays.items():
            file.write(bytes(-file.tell() % _ALIGNMENT))
            offsets[name] = [file.tell(), array.dtype.str, list(array.shape)]
            file.write(np.ascontiguousarray(array).data if array.size else b"")
        end = file.tell()
        file.seek(HEADER_BYTES)
        checksums = []
        for start in range(HEADER_BYTES, end, BLOCK_BYTES):
            checksums.append(_checksum(file.read(min(BLOCK_BYTES, end - start))))
        tail = np.array(checksums, "<u8").tobytes()
        text = json.dumps({**index, "arrays": offsets}).encode()
        file.seek(end)
        file.write(tail + text)
        header = _HEADER.pack(MAGIC, VERSION, HEADER_BYTES, end + len(tail), len(text), end, _checksum(tail + text))
        file.seek(0)
        file.write(header + struct.pack("<Q", _checksum(header)))
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)


def _slots(hashes: NDArray[np.uint64], first_bucket: int, shift: int) -> NDArray[np.int64]:
    return ((hashes - np.uint64(first_bucket << _SHIFT)) >> np.uint64(shift)).astype(np.int64)


def _begins(slots: NDArray[np.int64], num_slots: int) -> NDArray[Any]:
    begins = np.zeros(num_slots + 1, np.int64)
    np.cumsum(np.bincount(slots, minlength=num_slots), out=begins[1:])
    return begins.astype("<u4" if len(slots) < _MANY_ROWS else "<u8")


def _checksum(content: bytes) -> int:
    return xxhash.xxh3_64_intdigest(content)


def _content_of(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise SnapshotError(f"{path}: cannot be read: {error}") from error


def _read_index(out: Path) -> _Index:
    return decode_checked(_content_of(out / INDEX_FILE), _Index, str(out / INDEX_FILE))


def _files_of(out: Path) -> list[str]:
    """Returns the names of the files of an export; none if its index is missing or damaged."""
    try:
        return [name for table in _read_index(out).tables for name in table.files]
    except SnapshotError:
        return []


def _replace(path: Path, content: bytes) -> None:
    draft = path.with_name(f".{path.name}.draft")
    draft.write_bytes(content)
    draft.replace(path)
