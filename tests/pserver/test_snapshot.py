from __future__ import annotations

import json
import os
import re
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from fleet_sparse.core.ids import bucket_of
from fleet_sparse.core.initializer import constant, uniform
from fleet_sparse.core.placement import Placement
from fleet_sparse.core.table import DenseSpec, Segment, TableSpec
from fleet_sparse.errors import ErrorCode, SnapshotCorrupt, SnapshotError, TableMismatch
from fleet_sparse.pserver import rows_file, snapshot
from fleet_sparse.pserver.dense import DenseRange
from fleet_sparse.pserver.ledger import Mark
from fleet_sparse.pserver.rows_file import ShardFile
from fleet_sparse.pserver.shard import Shard
from fleet_sparse.pserver.store import Store
from fleet_sparse.wire.frames import Op
from support.shards import CLIENT, READS, SGD, FrameClient, assign, code_of, make_shard, pull, push

ADAGRAD = TableSpec(name="adagrad", dim=5, rule="adagrad", initializer=uniform(-1.0, 1.0), seed=3)
ADAM = TableSpec(name="adam", dim=17, rule="adam", initializer=constant(0.0))
EMPTY = TableSpec(name="empty", dim=3, rule="adam", initializer=constant(0.0))
DENSE = DenseSpec("dense", "adam", (), (Segment("w", 0, 70, 1.0), Segment("b", 70, 31, 2.0)))
SPECS: tuple[TableSpec | DenseSpec, ...] = (ADAGRAD, ADAM, EMPTY, DENSE)
PAGE = Path(__file__).parents[2] / "docs" / "snapshot.md"

Table = dict[int, tuple[bytes, bytes]]  # id -> row, states
Array = dict[int, tuple[bytes, bytes]]  # index of a value -> value, states


def trained(num_shards: int, *, num_ids: int = 500, assigned: bool = True) -> list[Shard]:
    """Shards that hold rows and state of several tables, trained for some steps by one client."""
    rng = np.random.default_rng(num_shards)
    placement = Placement.even(num_shards)
    shards = [make_shard(*SPECS, shard=shard, num_shards=num_shards) for shard in range(num_shards)]
    clients = [FrameClient(shard) for shard in shards]
    ids = rng.integers(-(2**63), 2**63, num_ids)
    for client in clients:
        begin, end = DENSE.range_of(client.shard.shard_index, num_shards)
        if assigned:
            assert client.ask(Op.ASSIGN, assign(DENSE, rng.random(end - begin, np.float32))).error is None
    for step in (1, 2, 3):
        for client in clients:
            shard = client.shard.shard_index
            for spec in (ADAGRAD, ADAM):
                some = rng.choice(ids, num_ids // 2, replace=False)
                mine = some[placement.shard_of(some, spec.salt) == shard]
                grads = rng.standard_normal((len(mine), spec.dim)).astype(np.float32)
                assert client.push(push(spec, mine, grads, optimizer_step=step)).error is None
            begin, end = DENSE.range_of(shard, num_shards)
            if assigned:
                assert (
                    client.push(push(DENSE, None, rng.random(end - begin, np.float32), optimizer_step=step)).error
                    is None
                )
    return shards


def save(shards: Sequence[Shard], directory: Path, save_id: str = "one") -> Path:
    files = [snapshot.write_draft(shard, directory, save_id) for shard in shards]
    for file in files:
        snapshot.publish(directory, file)
    return snapshot.finish(directory, save_id, len(shards), files)


def loaded(directory: Path, num_shards: int) -> list[Shard]:
    shards = [make_shard(shard=shard, num_shards=num_shards, incarnation=99) for shard in range(num_shards)]
    for shard in shards:
        snapshot.load(shard, directory)
    return shards


def rows_in(shards: Sequence[Shard], spec: TableSpec) -> Table:
    """Every row and state, bit by bit."""
    rows: Table = {}
    for shard in shards:
        store = shard.held[spec.table_id].values
        assert isinstance(store, Store)
        for ids, values, states in store.export():
            assert (shard.placement.shard_of(ids, spec.salt) == shard.shard_index).all()
            rows.update(
                {
                    int(id_): (row.tobytes(), state.tobytes())
                    for id_, row, state in zip(ids, values, states, strict=True)
                }
            )
    return rows


def array_in(shards: Sequence[Shard]) -> Array:
    values: Array = {}
    for shard in shards:
        dense = shard.held[DENSE.table_id].values
        assert isinstance(dense, DenseRange)
        assert dense.assigned
        states = dense.export_states()
        values.update({dense.begin + i: (dense.values[i].tobytes(), states[:, i].tobytes()) for i in range(dense.size)})
    return values


# Round trips


@pytest.mark.parametrize(("num_before", "num_after"), [(1, 1), (2, 2), (1, 3), (3, 1), (2, 5), (5, 2)])
def test_rows_and_state_come_back_bit_by_bit_on_any_number_of_shards(
    tmp_path: Path, num_before: int, num_after: int
) -> None:
    before = trained(num_before)
    save(before, tmp_path)
    after = loaded(tmp_path, num_after)
    for spec in (ADAGRAD, ADAM, EMPTY):
        assert rows_in(after, spec) == rows_in(before, spec)
    assert len(rows_in(after, ADAM)) > 250
    assert array_in(after) == array_in(before)


@pytest.mark.parametrize(("num_before", "num_after"), [(2, 1), (2, 3)])
def test_number_of_rows_that_were_loaded_is_that_of_the_shard(tmp_path: Path, num_before: int, num_after: int) -> None:
    save(trained(num_before), tmp_path)
    for index in range(num_after):
        shard = make_shard(shard=index, num_shards=num_after, incarnation=99)
        told = snapshot.load(shard, tmp_path).num_rows
        assert told == sum(state.num_rows for state in shard.states())


@settings(max_examples=25, deadline=None)
@given(
    ids=st.sets(st.integers(-(2**63), 2**63 - 1), max_size=40),
    num_before=st.integers(1, 4),
    num_after=st.integers(1, 4),
)
def test_any_ids_come_back(
    tmp_path_factory: pytest.TempPathFactory, ids: set[int], num_before: int, num_after: int
) -> None:
    directory = tmp_path_factory.mktemp("any")
    placement = Placement.even(num_before)
    array = np.array(sorted(ids), np.int64)
    before = []
    for shard in range(num_before):
        before.append(make_shard(SGD, shard=shard, num_shards=num_before))
        mine = array[placement.shard_of(array, SGD.salt) == shard]
        FrameClient(before[-1]).push(push(SGD, mine, np.ones((len(mine), 2), np.float32)))
    save(before, directory)
    after = loaded(directory, num_after)
    assert set(rows_in(after, SGD)) == ids
    for one in before + after:
        one.close()


def test_large_table_is_written_in_several_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows_file, "BLOCK_BYTES", 1000)
    before = trained(2)
    save(before, tmp_path)
    assert len(index_of(tmp_path / "shard-0-of-2.one.fss")["tables"][0]["blocks"]) > 3
    after = loaded(tmp_path, 3)
    assert rows_in(after, ADAGRAD) == rows_in(before, ADAGRAD)


def test_optimizer_step_comes_back(tmp_path: Path) -> None:
    save(trained(2), tmp_path)
    states = {state.name: state for state in loaded(tmp_path, 3)[0].states()}
    assert (states["adam"].optimizer_step, states["dense"].optimizer_step, states["empty"].optimizer_step) == (3, 3, 0)
    assert states["dense"].assigned


def test_array_that_nobody_assigned_stays_unassigned(tmp_path: Path) -> None:
    save(trained(2, assigned=False), tmp_path)
    assert not any(state.assigned for shard in loaded(tmp_path, 3) for state in shard.states())


def test_applied_pushes_come_back_on_as_many_shards(tmp_path: Path) -> None:
    save(trained(2), tmp_path)
    assert [shard.ledger.marks() for shard in loaded(tmp_path, 2)] == [[Mark(CLIENT, 1, 10)]] * 2


def test_applied_pushes_mean_nothing_on_another_number_of_shards(tmp_path: Path) -> None:
    save(trained(2), tmp_path)
    assert [shard.ledger.marks() for shard in loaded(tmp_path, 3)] == [[]] * 3


def test_worker_that_brings_the_same_tables_goes_on(tmp_path: Path) -> None:
    save(trained(1), tmp_path)
    (shard,) = loaded(tmp_path, 1)
    for spec in SPECS:
        shard.add_table(spec, brought_by="worker 0")
    assert code_of(FrameClient(shard, epoch=2).ask(Op.PULL, pull(DENSE, count=101))) is None


def test_worker_that_brings_another_table_is_told_of_the_snapshot(tmp_path: Path) -> None:
    save(trained(1), tmp_path)
    (shard,) = loaded(tmp_path, 1)
    other = TableSpec(name="adam", dim=4, rule="adam", initializer=constant(0.0))
    with pytest.raises(TableMismatch, match=rf"the snapshot {tmp_path} and worker 0 describe .*: dim 17 and 4"):
        shard.add_table(other, brought_by="worker 0")


def test_reader_may_load_what_a_trainer_saved(tmp_path: Path) -> None:
    client = FrameClient(make_shard(SGD))
    client.push(push(SGD, np.array([7]), np.ones((1, 2), np.float32)))
    save([client.shard], tmp_path)
    (shard,) = loaded(tmp_path, 1)
    shard.add_table(READS, brought_by="worker 0")
    assert FrameClient(shard).rows(READS, 7) == [[-0.5, -0.5]]
    assert (
        code_of(FrameClient(shard, epoch=2).push(push(READS, np.array([7]), np.ones((1, 2), np.float32))))
        is ErrorCode.SCHEMA
    )


# Files


def test_new_save_replaces_the_old_one(tmp_path: Path) -> None:
    save(trained(2), tmp_path, "one")
    (tmp_path / "shard-0-of-2.crashed.fss.tmp").touch()
    (tmp_path / "notes.txt").touch()
    save(trained(1), tmp_path, "two")
    assert sorted(os.listdir(tmp_path)) == ["MANIFEST.json", "notes.txt", "shard-0-of-1.two.fss"]


def test_half_written_save_leaves_the_old_one_loadable(tmp_path: Path) -> None:
    before = trained(2)
    save(before, tmp_path, "one")
    later = trained(3)
    snapshot.write_draft(later[0], tmp_path, "two")
    snapshot.publish(tmp_path, snapshot.write_draft(later[1], tmp_path, "two"))
    (tmp_path / "MANIFEST.json.tmp").write_text("{")
    assert rows_in(loaded(tmp_path, 1), ADAM) == rows_in(before, ADAM)


def test_save_that_lacks_a_file_is_not_finished(tmp_path: Path) -> None:
    before = trained(2)
    save(before, tmp_path, "one")
    files = [snapshot.write_draft(shard, tmp_path, "two") for shard in trained(2)]
    snapshot.publish(tmp_path, files[0])
    with pytest.raises(SnapshotError, match=r"shard-1-of-2\.two\.fss: cannot be seen by the pserver that finishes"):
        snapshot.finish(tmp_path, "two", 2, files)
    assert rows_in(loaded(tmp_path, 1), ADAM) == rows_in(before, ADAM)


def test_save_whose_file_has_another_size_is_not_finished(tmp_path: Path) -> None:
    files = [snapshot.write_draft(shard, tmp_path, "one") for shard in trained(1)]
    snapshot.publish(tmp_path, files[0])
    with pytest.raises(SnapshotError, match=r"it has \d+ bytes, its pserver wrote \d+"):
        snapshot.finish(tmp_path, "one", 1, [files[0]._replace(num_bytes=files[0].num_bytes + 1)])


@pytest.mark.parametrize(
    ("files", "fault"),
    [
        ([], "files of shards none, should be of shards 0 to 1"),
        ([ShardFile(0, "shard-0-of-2.one.fss", 1, 1, 1)], "files of shards 0, should be of shards 0 to 1"),
        (
            [ShardFile(0, "shard-0-of-2.one.fss", 1, 1, 1), ShardFile(1, "../shard-1-of-2.one.fss", 1, 1, 1)],
            r"file '\.\./shard-1-of-2\.one\.fss', should be 'shard-1-of-2\.one\.fss'",
        ),
    ],
)
def test_files_that_do_not_belong_together_are_not_finished(tmp_path: Path, files: list[ShardFile], fault: str) -> None:
    with pytest.raises(SnapshotError, match=fault):
        snapshot.finish(tmp_path, "one", 2, files)


@pytest.mark.parametrize("save_id", ["", "a/b", "../a", "a.b", "a" * 65])
def test_save_id_that_is_no_name_is_refused(tmp_path: Path, save_id: str) -> None:
    with pytest.raises(SnapshotError, match="save id"):
        snapshot.write_draft(make_shard(), tmp_path, save_id)


def test_draft_does_not_follow_a_link_that_stands_in_its_place(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "shard-0-of-1.one.fss.tmp").symlink_to(tmp_path / "victim")
    save([make_shard()], tmp_path / "model")
    assert not (tmp_path / "victim").exists()


def test_disk_that_is_full_is_a_snapshot_error_and_leaves_no_draft(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: object, data: memoryview) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(rows_file._Writer, "_write", refuse)
    with pytest.raises(SnapshotError, match=r"cannot be written: .*No space left"):
        snapshot.write_draft(make_shard(SGD), tmp_path, "one")
    assert os.listdir(tmp_path) == []


def test_shard_whose_values_are_wrong_is_not_saved(tmp_path: Path) -> None:
    shard = make_shard(SGD)
    shard.fault = "a push failed half-way"
    with pytest.raises(SnapshotError, match="shard 0: not saved: a push failed half-way"):
        snapshot.write_draft(shard, tmp_path, "one")


def test_directory_without_a_manifest_is_no_snapshot(tmp_path: Path) -> None:
    with pytest.raises(SnapshotError, match=r"it has no MANIFEST\.json"):
        snapshot.load(make_shard(), tmp_path)


# The page


def index_of(path: Path) -> dict[str, Any]:
    """The index of a rows file, as the page says it is found."""
    with open(path, "rb") as file:
        file.seek(-32, 2)
        offset, num_bytes, _, _ = struct.unpack("<QQQ8s", file.read(32))
        file.seek(offset)
        index: dict[str, Any] = json.loads(file.read(num_bytes))
    return index


def test_program_of_the_page_reads_what_was_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = trained(1)
    save(before, tmp_path / "model", "x")
    program = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[-1]
    program = re.sub(r'file = ".*"', 'file = "model/shard-0-of-1.x.fss"', program)
    found: dict[str, tuple[NDArray[np.int64], NDArray[np.float32]]] = {}
    lines = "\n        found[json.loads(table['spec'])['name']] = (ids, rows)\n"
    monkeypatch.chdir(tmp_path)
    exec(compile(program.rstrip() + lines, str(PAGE), "exec"), {"found": found})
    ids, rows = found["adam"]
    expected = {id_: row for id_, (row, _) in rows_in(before, ADAM).items()}
    assert {int(id_): row.tobytes() for id_, row in zip(ids, rows, strict=True)} == expected


def test_header_and_footer_are_those_of_the_page(tmp_path: Path) -> None:
    (shard,) = trained(1)
    save([shard], tmp_path)
    content = (tmp_path / "shard-0-of-1.one.fss").read_bytes()
    assert struct.unpack("<8s4I2Q2I8sQ", content[:64]) == (
        b"FSSROWS\n", 1, 64, 0, 1, shard.cluster_id, shard.incarnation, 1, 16384, bytes(8),
        xxhash.xxh3_64_intdigest(content[:56]),
    )  # fmt: skip
    offset, num_bytes, checksum, magic = struct.unpack("<QQQ8s", content[-32:])
    assert magic == b"FSSFOOT\n"
    assert offset + num_bytes + 32 == len(content)
    assert checksum == xxhash.xxh3_64_intdigest(content[offset : offset + num_bytes])
    assert json.loads((tmp_path / "MANIFEST.json").read_text())["files"][0]["checksum"] == f"{checksum:016x}"


def test_rows_of_a_table_are_sorted_by_bucket(tmp_path: Path) -> None:
    save(trained(1), tmp_path)
    path = tmp_path / "shard-0-of-1.one.fss"
    table = index_of(path)["tables"][0]
    block = table["blocks"][0]

    def column(name: str, dtype: str) -> NDArray[Any]:
        entry = block[name]
        return np.fromfile(path, dtype, entry["num_bytes"] // np.dtype(dtype).itemsize, offset=entry["offset"])

    buckets = bucket_of(column("ids", "<i8"), ADAGRAD.salt)
    assert (np.diff(buckets) >= 0).all()
    assert np.array_equal(np.repeat(column("buckets", "<u4"), column("bucket_rows", "<u4")), buckets)


# Corruption. Every one of these files is wrong; loading it must say so, with path and offset.


class SavedFile:
    """A rows file of a snapshot, to be damaged."""

    def __init__(self, directory: Path, num_shards: int = 1) -> None:
        self.directory = directory
        save(trained(num_shards, num_ids=60), directory)
        self.path = directory / f"shard-0-of-{num_shards}.one.fss"
        self.content = bytearray(self.path.read_bytes())

    def write(self, content: bytes | bytearray) -> None:
        self.path.write_bytes(content)

    def load(self) -> None:
        shard = make_shard()
        try:
            snapshot.load(shard, self.directory)
        finally:
            shard.close()

    def change_index(self, change: Any) -> None:
        """Changes the index, and makes footer and manifest agree with it."""
        offset, num_bytes, _, _ = struct.unpack("<QQQ8s", self.content[-32:])
        index = json.loads(self.content[offset : offset + num_bytes])
        change(index)
        text = json.dumps(index, separators=(",", ":")).encode()
        checksum = xxhash.xxh3_64_intdigest(text)
        footer = struct.pack("<QQQ8s", offset, len(text), checksum, b"FSSFOOT\n")
        self.content[offset:] = text + footer
        self.write(self.content)
        self.change_manifest(
            lambda value: value["files"][0].update(num_bytes=len(self.content), checksum=f"{checksum:016x}")
        )

    def change_column(self, entry: dict[str, Any], content: bytes) -> None:
        """Replaces a column, and makes its checksum agree with it; for use in `change_index`."""
        padded = content + bytes(-len(content) % 64)
        self.content[entry["offset"] : entry["offset"] + len(padded)] = padded
        entry["checksum"] = xxhash.xxh3_64_hexdigest(padded)

    def change_manifest(self, change: Any) -> None:
        """Changes the manifest, and makes its checksum agree with it."""
        path = self.directory / "MANIFEST.json"
        value = json.loads(path.read_text())
        del value["checksum"]
        change(value)
        text = json.dumps(value, sort_keys=True, separators=(",", ":"))
        path.write_text(json.dumps({**value, "checksum": xxhash.xxh3_64_hexdigest(text.encode())}))


@pytest.fixture
def saved(tmp_path: Path) -> SavedFile:
    return SavedFile(tmp_path)


def test_every_flipped_byte_is_detected(saved: SavedFile) -> None:
    for offset in range(0, len(saved.content), 37):
        damaged = bytearray(saved.content)
        damaged[offset] ^= 1 << (offset % 8)
        saved.write(damaged)
        with pytest.raises(SnapshotCorrupt) as caught:
            saved.load()
        assert caught.value.path == str(saved.path)
        assert caught.value.offset <= offset


def test_flipped_byte_of_a_row_names_file_and_column(saved: SavedFile) -> None:
    rows = index_of(saved.path)["tables"][1]["blocks"][0]["rows"]
    saved.content[rows["offset"] + 5] ^= 1
    saved.write(saved.content)
    message = rf"shard-0-of-1\.one\.fss: checksum mismatch in {rows['num_bytes']} bytes, at byte {rows['offset']}"
    with pytest.raises(SnapshotCorrupt, match=message) as caught:
        saved.load()
    assert caught.value.offset == rows["offset"]


@pytest.mark.parametrize("keep", [0, 1, 63, 64, 500, -33, -32, -1])
def test_truncated_file_is_detected(saved: SavedFile, keep: int) -> None:
    saved.write(saved.content[:keep])
    with pytest.raises(SnapshotCorrupt, match=r"it has \d+ bytes, the manifest says \d+"):
        saved.load()


def test_longer_file_is_detected(saved: SavedFile) -> None:
    saved.write(saved.content + b"\0")
    with pytest.raises(SnapshotCorrupt, match="bytes, the manifest says"):
        saved.load()


def test_file_of_another_save_is_detected(saved: SavedFile, tmp_path_factory: pytest.TempPathFactory) -> None:
    other = SavedFile(tmp_path_factory.mktemp("other"))
    other.change_index(lambda index: index.update(save_id="eno"))
    saved.write(other.content)
    with pytest.raises(SnapshotCorrupt, match="it is another file than the manifest means"):
        saved.load()


def test_missing_file_is_detected(saved: SavedFile) -> None:
    saved.path.unlink()
    with pytest.raises(SnapshotError, match=r"shard-0-of-1\.one\.fss: cannot be opened"):
        saved.load()


def test_link_in_place_of_a_file_is_not_followed(saved: SavedFile) -> None:
    saved.path.rename(saved.directory / "elsewhere")
    saved.path.symlink_to("elsewhere")
    with pytest.raises(SnapshotError, match="cannot be opened"):
        saved.load()


def test_every_flipped_byte_of_the_manifest_is_detected_or_means_nothing(saved: SavedFile) -> None:
    path = saved.directory / "MANIFEST.json"
    content = path.read_bytes()
    meaning = json.loads(content)
    for offset in range(len(content)):
        damaged = bytearray(content)
        damaged[offset] ^= 1
        try:
            if json.loads(damaged) == meaning:
                continue
        except ValueError:
            pass
        path.write_bytes(damaged)
        with pytest.raises(SnapshotCorrupt, match="MANIFEST"):
            saved.load()


def test_newer_format_of_the_manifest_is_refused(saved: SavedFile) -> None:
    saved.change_manifest(lambda value: value.update(version=2))
    with pytest.raises(SnapshotError, match="it has format version 2, here it is 1"):
        saved.load()


def test_newer_format_of_a_file_is_refused(saved: SavedFile) -> None:
    saved.content[8:12] = (2).to_bytes(4, "little")
    saved.content[56:64] = xxhash.xxh3_64_digest(saved.content[:56])[::-1]
    saved.write(saved.content)
    with pytest.raises(SnapshotError, match="it has format version 2, here it is 1"):
        saved.load()


def test_manifest_that_names_another_path_is_refused(saved: SavedFile) -> None:
    saved.change_manifest(lambda value: value["files"][0].update(file="../shard-0-of-1.one.fss"))
    with pytest.raises(SnapshotCorrupt, match="should be 'shard-0-of-1"):
        saved.load()


def test_file_that_stands_for_another_shard_is_refused(tmp_path: Path) -> None:
    saved = SavedFile(tmp_path, num_shards=2)
    other = tmp_path / "shard-1-of-2.one.fss"
    other.write_bytes(saved.content)

    def both_the_same(value: dict[str, Any]) -> None:
        value["files"][1] = {**value["files"][0], "shard": 1, "file": other.name}

    saved.change_manifest(both_the_same)
    with pytest.raises(SnapshotCorrupt, match="it is of shard 0 of 2"):
        saved.load()


def set_offset(index: dict[str, Any]) -> None:
    index["tables"][0]["blocks"][0]["ids"]["offset"] += 64


def set_size(index: dict[str, Any]) -> None:
    index["tables"][0]["blocks"][0]["ids"]["num_bytes"] = 2**62


def set_rows(index: dict[str, Any]) -> None:
    index["tables"][0]["num_rows"] += 1


def set_negative(index: dict[str, Any]) -> None:
    index["tables"][0]["optimizer_step"] = -1


def set_spec(index: dict[str, Any]) -> None:
    index["tables"][0]["spec"] = "{}"


def set_states(index: dict[str, Any]) -> None:
    index["tables"][0]["num_states"] = 2


def set_range(index: dict[str, Any]) -> None:
    index["dense"][0]["begin"] = 200


def set_client(index: dict[str, Any]) -> None:
    index["clients"][0]["client_id"] = "00"


def drop_tables(index: dict[str, Any]) -> None:
    del index["tables"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (set_offset, "a column begins at byte"),
        (set_size, "a column has 4611686018427387904 bytes"),
        (set_rows, "its blocks have others"),
        (set_negative, "should be at least 0"),
        (set_spec, "table spec"),
        (set_states, "has 2 states, rule 'adagrad' has 1"),
        (set_range, "'dense' has 101 values, the file 200 to 101"),
        (set_client, "a client id has 1 bytes"),
        (drop_tables, "'tables'"),
    ],
)
def test_index_that_does_not_hold_together_is_refused(saved: SavedFile, change: Any, message: str) -> None:
    saved.change_index(change)
    with pytest.raises(SnapshotCorrupt, match=re.escape(message)):
        saved.load()


def test_rows_in_a_wrong_bucket_are_refused(saved: SavedFile) -> None:
    def change(index: dict[str, Any]) -> None:
        block = index["tables"][0]["blocks"][0]
        entry = block["ids"]
        ids = np.frombuffer(bytes(saved.content[entry["offset"] :][: entry["num_bytes"]]), np.int64)
        saved.change_column(entry, ids[::-1].tobytes())

    saved.change_index(change)
    with pytest.raises(SnapshotCorrupt, match="ids lie in other buckets than it says"):
        saved.load()


def test_id_that_occurs_twice_is_refused(saved: SavedFile) -> None:
    def change(index: dict[str, Any]) -> None:
        block = index["tables"][0]["blocks"][0]
        buckets, counts = block["buckets"], block["bucket_rows"]
        ids = np.frombuffer(bytes(saved.content[block["ids"]["offset"] :][: block["ids"]["num_bytes"]]), np.int64)
        twice = np.full(len(ids), ids[0])
        bucket = bucket_of(twice[:1], ADAGRAD.salt).astype(np.uint32)
        # All rows in one bucket: the columns of buckets would shrink, so let the others be empty.
        others = np.delete(np.arange(16384, dtype=np.uint32), bucket)[: block["num_buckets"] - 1]
        numbers = np.sort(np.concatenate([bucket, others]))
        saved.change_column(buckets, numbers.tobytes())
        saved.change_column(counts, np.where(numbers == bucket, len(ids), 0).astype(np.uint32).tobytes())
        saved.change_column(block["ids"], twice.tobytes())

    saved.change_index(change)
    with pytest.raises(SnapshotCorrupt, match="table 'adagrad': an id occurs twice"):
        saved.load()


def test_table_that_two_files_describe_differently_is_refused(tmp_path: Path) -> None:
    saved = SavedFile(tmp_path, num_shards=2)

    def change(index: dict[str, Any]) -> None:
        spec = json.loads(index["tables"][0]["spec"])
        index["tables"][0]["spec"] = json.dumps({**spec, "seed": 4})

    saved.change_index(change)
    with pytest.raises(SnapshotCorrupt, match="describe it differently: seed 4 and 3"):
        saved.load()
