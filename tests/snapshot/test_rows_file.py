from __future__ import annotations

import json
import struct
import tracemalloc
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from fleet_sparse.core.columns import columns_of
from fleet_sparse.core.dense_spec import DenseSpec, Segment
from fleet_sparse.core.ids import NUM_BUCKETS, bucket_of, hash_ids
from fleet_sparse.core.initializer import constant, uniform
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.errors import SnapshotCorrupt, SnapshotError
from fleet_sparse.snapshot.manifest import ShardFile
from fleet_sparse.snapshot.rows import joined
from fleet_sparse.snapshot.rows_format import ENTRY, MAX_BLOCK_BYTES, rows_per_block
from fleet_sparse.snapshot.rows_reader import READ_BYTES, RowsFile, open_rows_file
from support.rows_files import (
    DENSE,
    TABLE,
    BytesInput,
    BytesOutput,
    Table,
    changed_rows,
    content_of,
    dense_of,
    everything_in,
    in_hash_order,
    opened_bytes,
    rows_of,
    writer_to,
    written,
)

ADAM = TableSpec(name="adam", dim=17, rule="adam", initializer=uniform(-1.0, 1.0), seed=3)
SGD = TableSpec(name="sgd", dim=1, rule="sgd", initializer=constant(0.0))
WIDE = TableSpec(name="wide", dim=65535, rule="adam", initializer=constant(0.0))
ADAM_DENSE = DenseSpec("adam/dense", "adam", (), (Segment("w", 0, 70, 1.0), Segment("b", 70, 31, 2.0)))
EXTREMES = [-(2**63), -1, 0, 1, 2**63 - 1]
ids_of_a_table = st.sets(st.integers(-(2**63), 2**63 - 1), max_size=60)


def table(spec: TableSpec, ids: Any, *, days: int = 0, removed: Any = ()) -> Table:
    return Table(spec, rows_of(spec, ids, days=days), days, in_hash_order(removed, spec))


def index_of(content: bytes) -> dict[str, Any]:
    """The index, as the page says it is found."""
    offset, num_bytes, _, _ = struct.unpack("<QQQ8s", content[-32:])
    index: dict[str, Any] = json.loads(content[offset : offset + num_bytes])
    return index


def entries_of(content: bytes, k: int = 0) -> NDArray[np.void]:
    """The entries of a table, as the page says they are found."""
    place = index_of(content)["tables"][k]["entries"]
    return np.frombuffer(content, ENTRY, place["num_bytes"] // 48, place["offset"]).copy()


# Round trips


def test_rows_removed_ids_and_dense_values_come_back_bit_by_bit() -> None:
    tables = [
        table(TABLE, EXTREMES),
        table(ADAM, range(500), days=3, removed=range(500, 700)),
        table(WIDE, [], removed=[1]),
        table(SGD, range(-300, 300), removed=[1000]),
    ]
    dense = [dense_of(ADAM_DENSE, 20, 101)._replace(assigned=False), dense_of(DENSE, 0, 0)]
    content, told = written(tables, dense)
    assert everything_in(opened_bytes(content, told)) == content_of(tables, dense)


@settings(max_examples=60, deadline=None)
@given(ids=ids_of_a_table, removed=ids_of_a_table, days=st.sampled_from([0, 1, 65535]))
def test_any_table_comes_back(ids: set[int], removed: set[int], days: int) -> None:
    one = table(TABLE, ids, days=days, removed=removed)
    content, told = written([one])
    assert everything_in(opened_bytes(content, told)) == content_of([one])
    assert (told.num_bytes, told.num_rows, told.num_removed) == (len(content), len(ids), len(removed))


@pytest.mark.parametrize("value", [np.nan, np.inf, -0.0, 1e-45])
def test_special_values_come_back_bit_by_bit(value: float) -> None:
    rows = rows_of(TABLE, [1, 2])
    rows.rows[:] = value
    content, told = written([Table(TABLE, rows)])
    assert everything_in(opened_bytes(content, told)) == content_of([Table(TABLE, rows)])


def test_header_comes_back() -> None:
    content, told = written()
    file = opened_bytes(content, told)
    assert (file.shard, file.num_shards, file.save_id) == (0, 1, "one")
    assert (file.cluster_id, file.incarnation, file.placement_version) == (0xC0FFEE, 3, 1)


@settings(max_examples=40, deadline=None)
@given(cuts=st.lists(st.integers(0, 400), max_size=6), data=st.data())
def test_file_is_the_same_however_its_rows_were_handed_over(cuts: list[int], data: st.DataObject) -> None:
    spec = data.draw(st.sampled_from([TABLE, ADAM]))
    rows = rows_of(spec, range(400), days=2)
    file = BytesOutput()
    writer = writer_to(file)
    writer.begin_table(spec, optimizer_step=7, num_days=2)
    ends = [0, *sorted(cuts), 400]
    for begin, end in pairwise(ends):
        writer.write_rows(rows.part(slice(begin, end)))
    writer.end_table()
    writer.finish()
    assert bytes(file.content) == written([Table(spec, rows, days=2)])[0]


def test_full_blocks_are_the_same_however_they_were_handed_over() -> None:
    rows = rows_of(TABLE, range(60_000))
    contents = []
    for ends in ([0, 60_000], [0, 7, 20_000, 59_000, 60_000]):
        file = BytesOutput()
        writer = writer_to(file)
        writer.begin_table(TABLE, optimizer_step=7, num_days=0)
        for begin, end in pairwise(ends):
            writer.write_rows(rows.part(slice(begin, end)))
        writer.end_table()
        writer.finish()
        contents.append(bytes(file.content))
    assert contents[0] == contents[1]
    assert len(contents[0]) > MAX_BLOCK_BYTES


def test_arrays_that_are_not_contiguous_are_written_as_they_read() -> None:
    rows = rows_of(TABLE, range(8))
    strided = changed_rows(rows, lambda array: np.repeat(array, 2, axis=0)[::2])
    assert written([Table(TABLE, strided)]) == written([Table(TABLE, rows)])


# Blocks


def test_blocks_are_full_but_the_last() -> None:
    num_rows = 2 * rows_per_block(columns_of(ADAM, 0)) + 5
    content, _ = written([table(ADAM, range(num_rows))])
    entries = entries_of(content)
    row_bytes = 8 + 3 * 17 * 4
    assert entries["num_ids"].tolist() == [MAX_BLOCK_BYTES // row_bytes] * 2 + [5]
    assert (entries["num_bytes"] == entries["num_ids"] * np.uint64(row_bytes)).all()


def test_removed_ids_are_in_blocks_of_131072() -> None:
    content, told = written([table(TABLE, [1], removed=range(131_073))])
    assert entries_of(content)["num_ids"].tolist() == [1, 131_072, 1]
    file = opened_bytes(content, told)
    assert sum(map(len, file.removed(file.tables[0]))) == 131_073


def test_widest_row_that_there_can_be_comes_back() -> None:
    spec = TableSpec(name="widest", dim=65535, rule="rmsprop", initializer=constant(0.0))
    one = table(spec, range(2), days=1)
    content, told = written([one])
    assert entries_of(content)["num_bytes"].tolist() == [8 + 4 * 4 * 65535 + 2] * 2
    assert everything_in(opened_bytes(content, told)) == content_of([one])


def test_every_block_begins_at_a_multiple_of_64() -> None:
    content, _ = written([table(TABLE, range(5), removed=[9]), table(SGD, range(3))], [dense_of(DENSE, 0, 3)])
    index = index_of(content)
    places = [one["entries"]["offset"] for one in index["tables"]] + [index["dense"][0]["block"]["offset"]]
    offsets = [*entries_of(content)["offset"].tolist(), *entries_of(content, 1)["offset"].tolist(), *places]
    assert all(offset % 64 == 0 for offset in offsets)
    assert min(offsets) == 64


def test_rows_are_in_the_order_of_their_hash_so_by_bucket() -> None:
    content, told = written([table(TABLE, range(2000))])
    file = opened_bytes(content, told)
    ids = np.concatenate([rows.ids for rows in file.rows(file.tables[0])])
    assert (np.diff(hash_ids(ids, TABLE.salt).astype(object)) > 0).all()
    assert (np.diff(bucket_of(ids, TABLE.salt)) >= 0).all()


def test_file_that_is_refused_is_closed() -> None:
    content, told = written()
    source = BytesInput(content[:-1])
    with pytest.raises(SnapshotCorrupt):
        open_rows_file(source, told)
    assert source.is_closed


# Only what is owned


def owned_of(*buckets: int) -> NDArray[np.bool_]:
    owned = np.zeros(NUM_BUCKETS, np.bool_)
    owned[list(buckets)] = True
    return owned


def test_number_of_owned_rows_is_estimated() -> None:
    content, told = written([Table(TABLE, rows_of(TABLE, range(60_000)))])
    file = opened_bytes(content, told)
    owned = np.ones(NUM_BUCKETS, np.bool_)
    assert file.num_rows(file.tables[0], owned) == 60_000
    owned[: NUM_BUCKETS // 4] = False
    assert file.num_rows(file.tables[0], owned) == pytest.approx(45_000, rel=0.05)
    assert file.num_rows(file.tables[0], ~np.ones(NUM_BUCKETS, np.bool_)) == 0


def test_only_rows_of_owned_buckets_come() -> None:
    one = table(TABLE, range(5000), days=1, removed=range(5000, 9000))
    content, told = written([one])
    file = opened_bytes(content, told)
    owned = np.random.default_rng(1).random(NUM_BUCKETS) < 0.3
    keep = owned[bucket_of(one.rows.ids, TABLE.salt)]
    pieces = list(file.rows(file.tables[0], owned))
    found = joined(pieces)
    assert np.array_equal(found.ids, one.rows.ids[keep])
    for name, array in one.rows.columns.items():
        assert np.array_equal(found.columns[name], array[keep])
    removed = np.concatenate(list(file.removed(file.tables[0], owned)))
    assert np.array_equal(removed, one.removed[owned[bucket_of(one.removed, TABLE.salt)]])


def test_all_parts_together_read_each_block_about_once() -> None:
    content, told = written([table(ADAM, range(100_000))])
    num_parts, num_rows, num_read = 5, 0, 0
    for part in range(num_parts):
        file = opened_bytes(content, told)
        num_before = file.num_bytes_read
        owned = np.arange(NUM_BUCKETS) * num_parts // NUM_BUCKETS == part
        num_rows += sum(len(rows.ids) for rows in file.rows(file.tables[0], owned))
        num_read += file.num_bytes_read - num_before
    assert num_rows == 100_000
    assert num_read <= len(content) + num_parts * (MAX_BLOCK_BYTES + 64)


def test_nothing_is_read_for_who_owns_nothing() -> None:
    content, told = written([table(TABLE, range(5000), removed=[-1])])
    file = opened_bytes(content, told)
    num_before = file.num_bytes_read
    assert list(file.rows(file.tables[0], owned_of())) == list(file.removed(file.tables[0], owned_of())) == []
    assert file.num_bytes_read == num_before


def test_neighbouring_blocks_are_read_together() -> None:
    content, told = written([table(ADAM, range(40_000))])
    source = BytesInput(content)
    file = open_rows_file(source, told)
    sizes: list[int] = []
    real = source.read_into
    source.read_into = lambda offset, buffer: (sizes.append(len(buffer)), real(offset, buffer))[1]  # type: ignore[method-assign]
    num_blocks = len(entries_of(content))
    assert sum(len(rows.ids) for rows in file.rows(file.tables[0])) == 40_000
    assert len(sizes) == -(-num_blocks // (READ_BYTES // MAX_BLOCK_BYTES))
    assert max(sizes) <= READ_BYTES


# What the writer refuses


@pytest.mark.parametrize(
    ("refused", "name"),
    [
        (Table(TABLE, changed_rows(rows_of(TABLE, range(10)), lambda array: array[::-1])), "'C1'"),
        (Table(TABLE, changed_rows(rows_of(TABLE, [5]), lambda array: np.repeat(array, 2, axis=0))), "'C1'"),
        (Table(TABLE, rows_of(TABLE, [1], days=1), 0), "last_update_day"),
        (Table(TABLE, rows_of(TABLE, [1], days=0), 1), "last_update_day"),
        (Table(TABLE, rows_of(ADAM, [1])), "'C1'"),
        (dense_of(DENSE, 0, 3)._replace(end=2), "'dense'"),
    ],
    ids=["order", "id twice", "column too many", "column missing", "shape", "dense shape"],
)
def test_arrays_that_do_not_fit_are_refused(refused: Any, name: str) -> None:
    tables, dense = ([refused], []) if isinstance(refused, Table) else ([], [refused])
    with pytest.raises(ValueError, match=name):
        written(tables, dense)


def test_order_holds_from_one_block_to_the_next() -> None:
    full = rows_of(SGD, range(rows_per_block(columns_of(SGD, 0))))
    writer = writer_to(BytesOutput())
    writer.begin_table(SGD, optimizer_step=0, num_days=0)
    writer.write_rows(full)
    with pytest.raises(ValueError, match="'sgd'"):
        writer.write_rows(full)


def test_parts_in_another_order_are_refused() -> None:
    writer = writer_to(BytesOutput())
    with pytest.raises(ValueError, match="no table has begun"):
        writer.end_table()
    writer.begin_table(TABLE, optimizer_step=0, num_days=0)
    with pytest.raises(ValueError, match="begins inside of another"):
        writer.begin_table(SGD, optimizer_step=0, num_days=0)
    with pytest.raises(ValueError, match="inside of a table"):
        writer.write_dense(**dense_of(DENSE, 0, 3)._asdict())
    with pytest.raises(ValueError, match="has not ended"):
        writer.finish()
    writer.write_removed(np.array([1]))
    with pytest.raises(ValueError, match="rows after removed ids"):
        writer.write_rows(rows_of(TABLE, [2]))
    writer.end_table()


# Damaged files. Every one of them is wrong; reading it must say so, with path and offset.

SMALL = [table(TABLE, range(12), days=3, removed=[-1, -2]), table(SGD, []), table(ADAM, [7])]
SMALL_DENSE = [dense_of(ADAM_DENSE, 0, 5)]


def small() -> tuple[bytes, ShardFile]:
    return written(SMALL, SMALL_DENSE)


def refused(content: bytes, told: ShardFile, match: str = ".") -> SnapshotCorrupt:
    with pytest.raises(SnapshotCorrupt, match=match) as caught:
        everything_in(opened_bytes(content, told))
    error = caught.value
    assert error.path == "shard-0-of-1.fss"
    assert str(error).startswith(f"{error.path}: ")
    assert str(error).endswith(f", at byte {error.offset}")
    return error


def test_every_cut_is_detected() -> None:
    content, told = small()
    for size in range(len(content)):
        assert refused(content[:size], told, "bytes, the manifest says").offset == size
        refused(content[:size], msgspec.structs.replace(told, num_bytes=size))


def test_longer_file_is_detected() -> None:
    content, told = small()
    refused(content + b"\0", told, "bytes, the manifest says")
    refused(content + b"\0", msgspec.structs.replace(told, num_bytes=len(content) + 1), "footer")


def test_every_one_of_10000_flipped_bits_is_detected() -> None:
    content, told = small()
    rng = np.random.default_rng(4)
    for position, bit in zip(rng.integers(0, len(content), 10_000), rng.integers(0, 8, 10_000), strict=True):
        damaged = bytearray(content)
        damaged[position] ^= 1 << bit
        assert refused(bytes(damaged), told).offset <= position


def test_zeroed_page_is_detected() -> None:
    content, told = written([table(ADAM, range(300))])
    refused(content[:4096] + bytes(4096) + content[8192:], told, "checksum mismatch")


def test_file_of_another_save_is_detected() -> None:
    content, _ = small()
    _, told = written(SMALL, [dense_of(ADAM_DENSE, 0, 5, seed=1)])
    refused(content, told, "another file")


def test_file_of_another_shard_is_detected() -> None:
    content, told = small()
    other = msgspec.structs.replace(told, shard=1, file="shard-1-of-2.fss")
    refused(content, other, "it is of shard 0 of 1, its name is 'shard-1-of-2.fss'")


def test_counts_of_the_manifest_are_compared() -> None:
    content, told = small()
    refused(content, msgspec.structs.replace(told, num_rows=14), "14, 2")
    refused(content, msgspec.structs.replace(told, num_removed=1), "13, 1")


def test_other_version_is_refused_and_both_are_named() -> None:
    content, told = small()
    header = content[:8] + (5).to_bytes(4, "little") + content[12:56]
    newer = header + xxhash.xxh3_64_digest(header)[::-1] + content[64:]
    with pytest.raises(SnapshotError, match="version 5"):
        opened_bytes(newer, told)


def test_file_of_another_program_is_refused() -> None:
    content, told = small()
    refused(b"\x89HDF\r\n\x1a\n" + content[8:], told, "rows file")


# Hostile files: every checksum fits, what they say does not.


class Forged:
    """A file whose index and entries can be changed, with the checksums made to fit."""

    def __init__(self) -> None:
        content, self.told = small()
        self.content = bytearray(content)
        self.index = index_of(content)

    def change_entries(self, change: Callable[[NDArray[np.void]], None], k: int = 0) -> None:
        entries = entries_of(bytes(self.content), k)
        change(entries)
        self._put(self.index["tables"][k]["entries"], entries.tobytes())

    def change_block(self, change: Callable[[bytearray], None]) -> None:
        """Changes the first block."""
        (offset, num_bytes, *_), *_ = entries_of(bytes(self.content)).tolist()
        block = self.content[offset : offset + num_bytes]
        change(block)
        padded = bytes(block) + bytes(-len(block) % 64)
        self.content[offset : offset + len(padded)] = padded
        self.change_entries(lambda entries: entries["checksum"].put(0, xxhash.xxh3_64_intdigest(padded)))

    def refused(self, match: str, index: bytes | None = None) -> None:
        """Reading it raises, and takes no memory to speak of."""
        text = json.dumps(self.index).encode() if index is None else index
        (offset,) = struct.unpack("<Q", self.content[-32:-24])
        checksum = xxhash.xxh3_64_intdigest(text)
        self.content[offset:] = text + struct.pack("<QQQ8s", offset, len(text), checksum, b"FSSFOOT\n")
        told = msgspec.structs.replace(self.told, num_bytes=len(self.content), checksum=checksum)
        tracemalloc.start()
        try:
            refused(bytes(self.content), told, match)
            assert tracemalloc.get_traced_memory()[1] < 1 << 20
        finally:
            tracemalloc.stop()

    def _put(self, place: dict[str, Any], array: bytes) -> None:
        padded = array + bytes(-len(array) % 64)
        self.content[place["offset"] : place["offset"] + len(padded)] = padded
        place["checksum"] = xxhash.xxh3_64_hexdigest(padded)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("num_rows", 2**62, "blocks of rows and of removed ids"),
        ("num_removed", 1, "blocks have 2 ids, the index says 1"),
        ("num_rows_blocks", 2**40, "has 2 entries, 1099511627776 of them of rows"),
        ("num_rows_blocks", 2, "blocks of rows and of removed ids"),
        ("days", 65536, "days"),
        ("days", 0, "last update day after 0"),
        ("optimizer_step", -1, "optimizer_step"),
        ("optimizer_step", 2**64, "optimizer_step"),
        ("optimizer_step", 1.0, "optimizer_step"),
        ("num_states", 2, "has 2 states, rule 'adagrad' has 1"),
        ("spec", "{}", "table spec"),
        ("spec", DENSE.to_json(), "'dense'"),
        ("spec", TableSpec(name="C1", dim=65535, rule="adagrad", initializer=constant(0.0)).to_json(), "rows"),
        ("spec", SGD.to_json(), "has 1 states, rule 'sgd' has 0"),
        ("entries", None, "inconsistent"),
    ],
)
def test_table_that_does_not_hold_together_is_refused(field: str, value: Any, message: str) -> None:
    forged = Forged()
    forged.index["tables"][0][field] = value
    forged.refused(message)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("offset", 2**63 - 1, "should lie in"),
        ("offset", 0, "should lie in"),
        ("num_bytes", 48 * 2**55, "should lie in"),
        ("num_bytes", 47, "has 0 entries"),
        ("num_bytes", 48, "blocks of rows and of removed ids"),
        ("checksum", "0", "should be 16 hexadecimal digits"),
        ("checksum", "0" * 16, "checksum mismatch in 128 bytes"),
    ],
)
def test_place_of_entries_that_is_wrong_is_refused(field: str, value: Any, message: str) -> None:
    forged = Forged()
    forged.index["tables"][0]["entries"][field] = value
    forged.refused(message)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("offset", 0, "blocks do not follow one another"),
        ("offset", 128, "blocks do not follow one another"),
        ("offset", 2**64 - 64, "blocks do not follow one another"),
        ("num_bytes", 2**62, "a block has no ids, more than"),
        ("num_ids", 0, "a block has no ids, more than"),
        ("num_ids", 2**60, "a block has no ids, more than"),
        ("first_hash", 2**64 - 1, "blocks are not in the order of the hashes that they hold"),
        ("first_hash", 0, "order of their hash"),
        ("last_hash", 2**64 - 1, "order of their hash"),
        ("checksum", 0, "checksum mismatch in"),
    ],
)
def test_entry_that_is_wrong_is_refused(field: str, value: int, message: str) -> None:
    forged = Forged()
    forged.change_entries(lambda entries: entries[field].put(0, np.uint64(value)))
    forged.refused(message)


def test_counts_that_fit_each_other_but_no_block_are_refused() -> None:
    forged = Forged()
    num_ids = 2**40

    def grow(entries: NDArray[np.void]) -> None:
        entries["num_ids"][0], entries["num_bytes"][0] = num_ids, num_ids * 26

    forged.change_entries(grow)
    forged.index["tables"][0]["num_rows"] = num_ids
    forged.refused("blocks of rows and of removed ids")


def test_rows_that_are_more_than_the_file_are_refused() -> None:
    forged = Forged()
    forged.index["tables"][0]["num_rows"] = 2**20 // 26  # in one block
    forged.refused("do not fit into")


def test_index_past_64_mib_is_not_read() -> None:
    content, told = small()
    begin = len(content) - 32
    hole = bytes((64 << 20) + 1)
    footer = struct.pack("<QQQ8s", begin, len(hole), told.checksum, b"FSSFOOT\n")
    damaged = content[:begin] + hole + footer
    refused(damaged, msgspec.structs.replace(told, num_bytes=len(damaged)), "67108865")


def test_ids_in_another_order_are_refused() -> None:
    forged = Forged()

    def swap(block: bytearray) -> None:
        block[8:16], block[16:24] = block[16:24], block[8:16]

    forged.change_block(swap)
    forged.refused("order of their hash")


def test_id_twice_in_a_block_is_refused() -> None:
    forged = Forged()

    def repeat(block: bytearray) -> None:
        block[8:16] = block[16:24]

    forged.change_block(repeat)
    forged.refused("order of their hash")


def test_id_that_the_entry_does_not_name_is_refused() -> None:
    forged = Forged()

    def replace(block: bytearray) -> None:
        block[0:8] = (10**15).to_bytes(8, "little")

    forged.change_block(replace)
    forged.refused("order of their hash")


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("end", 2**40, "has 101 values, the file 0 to 1099511627776"),
        ("begin", 6, "has 101 values, the file 6 to 5"),
        ("end", 6, "has 6 values in 60 bytes"),
        ("assigned", 1, "assigned"),
        ("num_states", 0, "has 0 states"),
        ("spec", TABLE.to_json(), "'C1'"),
        ("spec", DenseSpec("C1", "adam", (), (Segment("w", 0, 101, 1.0),)).to_json(), "two tables have one name"),
        ("block", {"offset": 64, "num_bytes": 60, "checksum": "0" * 16}, "at byte 64,"),
        ("block", {"offset": 2**62, "num_bytes": 60, "checksum": "0" * 16}, "at byte 46"),
    ],
)
def test_dense_array_that_does_not_hold_together_is_refused(field: str, value: Any, message: str) -> None:
    forged = Forged()
    forged.index["dense"][0][field] = value
    forged.refused(message)


def test_dense_array_that_is_huge_is_refused() -> None:
    forged = Forged()
    num_values = 2**40
    spec = DenseSpec("huge", "adam", (), (Segment("w", 0, num_values, 1.0),))
    forged.index["dense"][0].update(spec=spec.to_json(), begin=0, end=num_values)
    forged.index["dense"][0]["block"]["num_bytes"] = 12 * num_values
    forged.refused("at byte")


@pytest.mark.parametrize(
    "index",
    [b"", b"[]", b"null", b"{}", b"\xff", b'{"save_id": 1, "tables": [], "dense": []}', b"[" * 100_000, b"9" * 10_000],
    ids=["empty", "list", "null", "no fields", "no text", "wrong type", "deep", "long number"],
)
def test_index_that_is_none_is_refused(index: bytes) -> None:
    Forged().refused("inconsistent", index)


def test_table_that_the_index_leaves_out_is_missed() -> None:
    forged = Forged()
    del forged.index["tables"][2]
    forged.refused("at byte")


def test_table_that_the_index_has_twice_is_refused() -> None:
    forged = Forged()
    forged.index["tables"].append(forged.index["tables"][0])
    forged.refused("two tables have one name")


@pytest.mark.parametrize(("offset", "num_bytes"), [(2**64 - 32, 0), (0, 2**63), (2**63, 2**63), (63, 1)])
def test_footer_that_points_elsewhere_is_refused(offset: int, num_bytes: int) -> None:
    content, told = small()
    footer = struct.pack("<QQQ8s", offset, num_bytes, told.checksum, b"FSSFOOT\n")
    refused(content[:-32] + footer, told, "its footer does not point to an index")


def test_read_that_fails_is_a_snapshot_error() -> None:
    content, told = small()

    class Broken(BytesInput):
        def read_into(self, offset: int, buffer: memoryview) -> None:
            raise SnapshotError(f"{self.name}: cannot be read at byte {offset}: Input/output error")

    with pytest.raises(SnapshotError, match="cannot be read at byte 0"):
        RowsFile(Broken(content), told)
