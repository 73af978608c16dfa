from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from fleet_sparse.core.watermark import Watermark
from fleet_sparse.errors import SnapshotCorrupt, SnapshotError
from fleet_sparse.snapshot.checksum import Checksum
from fleet_sparse.snapshot.manifest import Base, Manifest, ShardFile, WorkerPosition, checked_save_id
from support.rows_files import A_FILE, DELTA_PLAN, FULL_PLAN, MARK, forged, manifest_of

FULL = manifest_of(FULL_PLAN, [A_FILE])
DELTA = manifest_of(
    DELTA_PLAN,
    [
        msgspec.structs.replace(A_FILE, file="shard-0-of-2.fss", num_removed=2),
        ShardFile(1, "shard-1-of-2.fss", 900, 4, 1, Checksum(6), (MARK, Watermark(bytes(16), 2, 5))),
    ],
)
count = st.integers(0, 2**63 - 1)
checksum = st.integers(0, 2**64 - 1).map(Checksum)
anything_in_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def parsed(content: bytes) -> Manifest:
    return Manifest.parse(content, "model/MANIFEST.json")


def refused(content: bytes) -> None:
    with pytest.raises(SnapshotCorrupt) as caught:
        parsed(content)
    assert (caught.value.path, caught.value.offset) == ("model/MANIFEST.json", 0)
    assert str(caught.value).startswith("model/MANIFEST.json: ")
    assert str(caught.value).endswith(", at byte 0")


def test_at_most_65536_workers_and_clients_of_a_file() -> None:
    workers = tuple(WorkerPosition(worker, 1) for worker in range(65_537))
    clients = tuple(Watermark(number.to_bytes(16, "little"), 1, 1) for number in range(65_537))
    assert msgspec.structs.replace(FULL, workers=workers[:-1]).fault() is None
    refused(msgspec.structs.replace(FULL, workers=workers).to_json())
    refused(msgspec.structs.replace(FULL, files=(msgspec.structs.replace(A_FILE, clients=clients),)).to_json())


# Round trips


@given(
    number=st.integers(2, 10**9),
    is_complete=st.booleans(),
    saved_at=st.text(max_size=30),
    counts=st.tuples(count, count, count, checksum),
    mark=st.builds(Watermark, st.binary(min_size=16, max_size=16), count, count),
    step=count,
    position=anything_in_json,
    base=st.builds(Base, st.just(1), st.sampled_from(["full", "delta"]), checksum),
)
def test_any_manifest_comes_back(
    number: int,
    is_complete: bool,
    saved_at: str,
    counts: tuple[int, int, int, int],
    mark: Watermark,
    step: int,
    position: Any,
    base: Base,
) -> None:
    file = ShardFile(0, "shard-0-of-1.fss", *counts, (mark,))
    workers = (WorkerPosition(3, step, position),)
    manifest = Manifest(number, "delta", base, "one", saved_at, ("C1",), is_complete, (file,), workers)
    assert parsed(manifest.to_json()) == manifest


def test_counts_are_those_of_all_files() -> None:
    assert (DELTA.num_shards, DELTA.num_rows, DELTA.num_removed) == (2, 7, 3)


def test_manifest_has_the_name_of_its_directory() -> None:
    assert (FULL.name, DELTA.name) == ("000001-full", "000002-delta")
    assert msgspec.structs.replace(FULL, number=1_234_567).name == "1234567-full"
    assert Base(12, "delta", Checksum(0)).name == "000012-delta"


def test_checksum_is_that_of_the_page() -> None:
    value = json.loads(DELTA.to_json())
    told = value.pop("checksum")
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    assert told == xxhash.xxh3_64_hexdigest(text.encode()) == str(DELTA.checksum)


def test_position_that_is_no_json_cannot_be_written() -> None:
    with pytest.raises(ValueError, match="JSON"):
        msgspec.structs.replace(FULL, workers=(WorkerPosition(0, 1, float("nan")),)).to_json()


# Damaged


def test_every_cut_is_detected() -> None:
    content = DELTA.to_json()
    for size in range(len(content) - 1):  # the last byte ends a line
        refused(content[:size])
    assert parsed(content[:-1]) == DELTA


def test_every_flipped_bit_is_detected() -> None:
    content = DELTA.to_json()
    for position in range(len(content) - 1):
        for bit in range(8):
            damaged = bytearray(content)
            damaged[position] ^= 1 << bit
            refused(bytes(damaged))


@pytest.mark.parametrize(
    "content",
    [b"", b"[]", b"null", b"{}", b"\xff\xfe{\x00}\x00", b"[" * 100_000, b"9" * 10_000, b'{"checksum": 0}'],
    ids=["empty", "list", "null", "no fields", "other text", "deep", "long number", "checksum only"],
)
def test_what_is_no_manifest_is_refused(content: bytes) -> None:
    refused(content)


# What does not hold together, with a checksum that fits


@pytest.mark.parametrize(
    "changes",
    [
        {"format": "another"},
        {"number": 0},
        {"number": "2"},
        {"number": True},
        {"number": 2.0},
        {"kind": "other"},
        {"kind": "full"},
        {"base": None},
        {"base": {"number": 2, "kind": "full", "checksum": "0" * 16}},
        {"base": {"number": 0, "kind": "full", "checksum": "0" * 16}},
        {"base": {"number": 1, "kind": "other", "checksum": "0" * 16}},
        {"base": {"number": 1, "kind": "full", "checksum": "0" * 15}},
        {"base": {"number": 1, "kind": "full", "checksum": "A" * 16}},
        {"save_id": "../a"},
        {"saved_at": None},
        {"num_shards": 3},
        {"num_rows": 8},
        {"num_removed": 4},
        {"more": 1},
        {"tables": ["C1", "C1"]},
        {"tables": "C1"},
        {"is_whole": 1},
        {"files": []},
        {"files": [1]},
        {"workers": [{"worker": 1, "step": 1, "position": None}] * 2},
        {"workers": [{"worker": 1, "step": -1, "position": None}]},
        {"workers": [{"worker": 1}]},
    ],
)
def test_fields_that_contradict_each_other_are_refused(changes: dict[str, Any]) -> None:
    refused(forged(DELTA, **changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"shard": 1},
        {"file": "../shard-0-of-1.fss"},
        {"file": "shard-0-of-2.fss"},
        {"num_bytes": 2**64},
        {"num_removed": 1},
        {"checksum": ""},
        {"clients": [{"client_id": "00", "epoch": 1, "watermark": 1}]},
        {"clients": [{"client_id": "xy" * 16, "epoch": 1, "watermark": 1}]},
        {"clients": [{"client_id": "AB" * 16, "epoch": 1, "watermark": 1}]},
        {"clients": None},
    ],
)
def test_file_that_contradicts_the_rest_is_refused(changes: dict[str, Any]) -> None:
    value = json.loads(FULL.to_json())
    refused(forged(FULL, files=[{**value["files"][0], **changes}]))


@pytest.mark.parametrize("version", [1, 5])
def test_other_version_is_refused_and_both_are_named(version: int) -> None:
    with pytest.raises(SnapshotError, match=f"model/MANIFEST.json: .*{version}"):
        parsed(forged(FULL, version=version))


@pytest.mark.parametrize("save_id", ["", "a/b", "../a", "a.b", "a" * 65, "ä", "a\n"])
def test_save_id_that_is_no_name_is_refused(save_id: str) -> None:
    with pytest.raises(SnapshotError, match="save id"):
        checked_save_id(save_id)
