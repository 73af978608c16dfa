from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import fsspec
import msgspec
import numpy as np
import pytest

from fleet_sparse.core.placement import Placement
from fleet_sparse.core.version import Version
from fleet_sparse.errors import SnapshotCorrupt, SnapshotError
from fleet_sparse.snapshot import manifest as manifest_module
from fleet_sparse.snapshot import store as store_module
from fleet_sparse.snapshot.directory import Directory, directory_at, read
from fleet_sparse.snapshot.manifest import MAX_BYTES, Base, Manifest, ShardFile, version_of
from fleet_sparse.snapshot.serve_file import read_serve_file, write_serve_file
from fleet_sparse.snapshot.store import Plan, SnapshotStore, open_chain, served_chain
from support.rows_files import (
    DENSE,
    TABLE,
    Table,
    contents_of,
    dense_of,
    in_hash_order,
    manifest_of,
    rows_of,
    write,
)

IDS_OF_SHARD_0 = [one for one in range(400) if Placement.even(2).shard_of(np.array([one]), TABLE.salt)[0] == 0]


def local(tmp_path: Path) -> Directory:
    return directory_at(tmp_path / "model")


def memory(tmp_path: Path) -> Directory:
    return directory_at(f"memory://{tmp_path}/model")


@pytest.fixture(params=[local, memory])
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Directory]:
    yield request.param(tmp_path)
    fsspec.filesystem("memory").store.clear()


@pytest.fixture
def series(directory: Directory) -> SnapshotStore:
    return SnapshotStore(directory)


def draft(series: SnapshotStore, plan: Plan, save_id: str) -> list[ShardFile]:
    """Writes the files of a plan; what they hold differs with its number."""
    target = series.target(plan, save_id)
    rows = rows_of(TABLE, IDS_OF_SHARD_0[plan.number % 100 :][:3], seed=plan.number)
    removed = in_hash_order(IDS_OF_SHARD_0[-plan.number % 100 :][:1] if plan.kind == "delta" else [], TABLE)
    files = []
    for shard in range(2):
        tables = [Table(TABLE, rows, removed=removed)] if shard == 0 else []
        dense = [dense_of(DENSE, 0, 3, seed=plan.number)] if shard == 1 else []
        file = target.create(f"shard-{shard}-of-2.fss")
        try:
            files.append(write(file, tables, dense, shard=shard, num_shards=2, save_id=save_id))
        except BaseException:
            file.abandon()
            raise
    target.sync()
    return files


def save(
    series: SnapshotStore,
    kind: str = "full",
    save_id: str = "one",
    *,
    keep_last: int | None = None,
    is_complete: bool = True,
) -> str:
    """A whole save, as the pservers of a job do it."""
    plan = series.plan(kind, save_id)
    try:
        manifest = manifest_of(plan, draft(series, plan, save_id), save_id=save_id, is_complete=is_complete)
        return series.commit(plan, manifest, keep_last)
    except SnapshotError:
        series.abandon(plan, save_id)
        raise


def names(chain: list[tuple[Directory, Manifest]]) -> list[str]:
    return [directory.name for directory, _ in chain]


# Numbers


def test_deltas_are_on_top_of_what_is_newest(series: SnapshotStore) -> None:
    save(series)
    save(series, "delta")
    save(series, "delta")
    assert series.snapshots() == ["000001-full", "000002-delta", "000003-delta"]
    assert names(series.chain()) == series.snapshots()


def test_delta_of_nothing_is_a_full_one(series: SnapshotStore) -> None:
    assert save(series, "delta") == "000001-full"


def test_plan_of_a_delta_names_its_base(series: SnapshotStore) -> None:
    save(series)
    base = series.manifest("000001-full")
    assert series.plan("delta", "two") == Plan(2, "delta", Base(1, "full", base.checksum))


def test_newest_complete_one_is_found_beneath_others(series: SnapshotStore) -> None:
    assert series.newest_with() is None
    save(series, is_complete=False)
    assert series.newest_with() is None
    save(series)
    save(series, is_complete=False)
    assert series.newest_with() == "000002-full"
    assert names(series.chain()) == ["000003-full"]


def test_chain_of_a_directory_is_of_its_newest_complete_one(series: SnapshotStore, directory: Directory) -> None:
    save(series)
    save(series, is_complete=False)
    assert names(open_chain(directory)) == ["000001-full"]
    table, *_ = series.manifest("000002-full").tables
    assert names(open_chain(directory, [table])) == ["000002-full"]


def test_a_snapshot_is_no_place_for_snapshots(series: SnapshotStore, directory: Directory) -> None:
    save(series)
    with pytest.raises(SnapshotError):
        SnapshotStore(directory.child("000001-full")).plan("full", "two")


def test_snapshots_of_others_stay_and_do_not_count(series: SnapshotStore) -> None:
    for _ in range(4):
        save(series)
    plan = series.plan("full", "one")
    manifest = manifest_of(plan, draft(series, plan, "one"), save_id="one")
    series.commit(plan, manifest, 1, lambda number: number in (2, 4))
    assert series.snapshots() == ["000001-full", "000003-full", "000005-full"]


def test_numbers_are_not_used_again_after_snapshots_were_removed(series: SnapshotStore) -> None:
    for _ in range(3):
        save(series, keep_last=1)
    assert series.snapshots() == ["000003-full"]
    assert save(series) == "000004-full"


def test_number_of_a_directory_is_not_used_again(series: SnapshotStore, directory: Directory) -> None:
    directory.child("000007-full").make()
    assert series.snapshots() == []
    assert save(series) == "000008-full"


def test_seventh_digit_comes_when_it_is_needed(series: SnapshotStore, directory: Directory) -> None:
    directory.child("999999-full").make()
    assert save(series) == "1000000-full"
    assert series.snapshots() == ["1000000-full"]


@pytest.mark.parametrize(
    "name",
    [
        "0000001-full",
        "00001-full",
        "000001-other",
        "000001",
        "\u0660\u0660\u0660\u0660\u0660\u0661-full",
        "000001-full.bak",
    ],
)
def test_other_names_are_no_snapshots(series: SnapshotStore, directory: Directory, name: str) -> None:
    save(series)
    copy(directory.child("000001-full"), directory.child(name))
    assert series.snapshots() == ["000001-full"]


def test_two_snapshots_of_one_number_are_refused(series: SnapshotStore, directory: Directory) -> None:
    save(series)
    copy(directory.child("000001-full"), directory.child("000001-delta"))
    with pytest.raises(SnapshotError):
        series.chain()


# Chains


def test_chain_of_a_name_ends_there(series: SnapshotStore) -> None:
    save(series)
    save(series, "delta")
    save(series, "delta")
    assert names(series.chain("000002-delta")) == ["000001-full", "000002-delta"]


def test_chain_begins_at_the_newest_full_one_under_it(series: SnapshotStore) -> None:
    for kind in ("full", "delta", "full", "delta"):
        save(series, kind)
    assert names(series.chain()) == ["000003-full", "000004-delta"]


@pytest.mark.parametrize("missing", ["000001-full", "000002-delta"])
def test_chain_with_a_gap_is_refused(series: SnapshotStore, directory: Directory, missing: str) -> None:
    for kind in ("full", "delta", "delta"):
        save(series, kind)
    directory.remove_child(missing)
    with pytest.raises(SnapshotError):
        series.chain()


def test_base_that_has_some_tables_only_is_refused(series: SnapshotStore) -> None:
    save(series, is_complete=False)
    base = series.manifest("000001-full")
    series.plan("full", "two")
    plan = Plan(2, "delta", Base(1, "full", base.checksum))
    series.commit(plan, manifest_of(plan, draft(series, plan, "two"), save_id="two"))
    with pytest.raises(SnapshotError):
        series.chain()


def test_base_that_was_replaced_is_refused(series: SnapshotStore, directory: Directory) -> None:
    save(series)
    save(series, "delta")
    replace_manifest(directory.child("000001-full"), saved_at="later")
    with pytest.raises(SnapshotError):
        series.chain()


def replace_manifest(directory: Directory, **changes: Any) -> None:
    series = SnapshotStore(directory.parent())
    manifest = msgspec.structs.replace(series.manifest(directory.name), **changes)
    replace_bytes(directory, manifest.to_json())


def replace_bytes(directory: Directory, content: bytes, replaced: str = "MANIFEST.json") -> None:
    files = {name: read(directory, name, MAX_BYTES) for name in directory.names()}
    directory.parent().remove_child(directory.name)
    write_all(directory, files | {replaced: content})


def write_all(directory: Directory, files: Mapping[str, bytes]) -> None:
    directory.make()
    for name, content in files.items():
        directory.put(name, content)


def copy(source: Directory, target: Directory) -> None:
    write_all(target, {name: read(source, name, MAX_BYTES) for name in source.names()})


def test_snapshot_that_is_not_there_is_refused(series: SnapshotStore) -> None:
    with pytest.raises(SnapshotError):
        series.chain()
    save(series)
    with pytest.raises(SnapshotError):
        series.chain("000002-delta")


def test_chain_is_opened_by_a_series_or_a_snapshot(series: SnapshotStore, directory: Directory) -> None:
    save(series)
    save(series, "delta")
    assert names(open_chain(directory)) == ["000001-full", "000002-delta"]
    assert names(open_chain(directory.child("000001-full"))) == ["000001-full"]


def test_snapshot_out_of_its_series_is_told_its_name(series: SnapshotStore, directory: Directory) -> None:
    save(series)
    copy(directory.child("000001-full"), directory.parent().child("copy"))
    with pytest.raises(SnapshotError):
        open_chain(directory.parent().child("copy"))


# What is committed


@pytest.mark.parametrize(
    "changes",
    [
        {"number": 2},
        {"save_id": "another"},
        {"files": lambda files: files[1:]},
        {"files": lambda files: (files[0], msgspec.structs.replace(files[1], num_bytes=1))},
    ],
    ids=["another plan", "missing files", "inconsistent", "another size"],
)
def test_manifest_that_does_not_fit_is_refused(series: SnapshotStore, changes: dict[str, Any]) -> None:
    plan = series.plan("full", "one")
    manifest = manifest_of(plan, draft(series, plan, "one"))
    if "files" in changes:
        changes = {"files": changes["files"](manifest.files)}
    with pytest.raises(SnapshotError):
        series.commit(plan, msgspec.structs.replace(manifest, **changes))
    assert series.snapshots() == []


def test_abandoned_save_leaves_nothing(series: SnapshotStore, directory: Directory) -> None:
    save(series)
    plan = series.plan("full", "two")
    draft(series, plan, "two")
    series.abandon(plan, "two")
    assert directory.names() == ["000001-full"]


def test_snapshot_that_cannot_be_read_is_not_abandoned(
    series: SnapshotStore, directory: Directory, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = series.plan("full", "one")
    series.commit(plan, manifest_of(plan, draft(series, plan, "one")))

    def refuse(*_: Any) -> bytes:
        raise SnapshotError("the store does not answer")

    with monkeypatch.context() as patched:
        patched.setattr(store_module, "read", refuse)
        series.abandon(plan, "one")
    assert names(series.chain()) == ["000001-full"]


def test_part_of_a_manifest_is_abandoned(series: SnapshotStore, directory: Directory) -> None:
    plan = series.plan("full", "one")
    draft(series, plan, "one")
    series.target(plan, "one").put("MANIFEST.json", b'{"format": "fleet')
    series.abandon(plan, "one")
    assert directory.names() == []


# What is kept


def test_newest_full_ones_are_kept_with_their_deltas(series: SnapshotStore) -> None:
    for kind in ("full", "delta", "full", "delta", "delta", "full"):
        save(series, kind, keep_last=2)
    assert series.snapshots() == ["000003-full", "000004-delta", "000005-delta", "000006-full"]
    save(series, "delta", keep_last=1)
    assert series.snapshots() == ["000006-full", "000007-delta"]


def test_snapshots_of_some_tables_do_not_count_as_kept(series: SnapshotStore) -> None:
    save(series)
    for _ in range(3):
        save(series, is_complete=False, keep_last=1)
    assert series.snapshots() == ["000001-full", "000002-full", "000003-full", "000004-full"]
    save(series, keep_last=1)
    assert series.snapshots() == ["000005-full"]


@pytest.mark.parametrize("keep_last", [0, -1])
def test_keeping_nothing_is_refused(series: SnapshotStore, keep_last: int) -> None:
    plan = series.plan("full", "one")
    with pytest.raises(ValueError, match="should be None or at least 1"):
        series.commit(plan, manifest_of(plan, draft(series, plan, "one")), keep_last)
    assert series.snapshots() == []


def test_what_a_crashed_save_left_is_removed_by_the_next(series: SnapshotStore, directory: Directory) -> None:
    draft(series, series.plan("full", "crashed"), "crashed")
    crash()
    assert save(series) in directory.names()
    assert len(directory.names()) == 1


@pytest.mark.parametrize("has_lock", [True, False], ids=["lock", "no lock"])
def test_save_of_another_process_is_left_alone(tmp_path: Path, has_lock: bool) -> None:
    directory, plan = local(tmp_path), Plan(1, "full", None)
    other = SnapshotStore(directory)
    other.target(plan, "other").make()
    lock = directory.lock(".saving-other.lock", create=True) if has_lock else None  # the system knows no difference
    files = draft(other, plan, "other")
    save(SnapshotStore(directory))
    assert (lock is not None) == (".saving-other.lock" in directory.names())
    plan = plan._replace(number=2)
    assert other.commit(plan, manifest_of(plan, files, save_id="other")) == "000002-full"


def test_save_that_this_process_gave_up_is_removed_by_the_next(tmp_path: Path) -> None:
    directory = local(tmp_path)
    SnapshotStore(directory).plan("full", "given_up")
    save(SnapshotStore(directory))
    assert directory.names() == ["000001-full"]


@pytest.mark.guarantee("F3")
def test_manifest_is_durable_after_the_files_and_before_the_name(tmp_path: Path) -> None:
    life = Life(10_000)
    save(SnapshotStore(Mortal(local(tmp_path), life)))
    finished = [life.steps.index(f"shard-{shard}-of-2.fss finish") for shard in (0, 1)]
    put, renamed = life.steps.index(".saving-one put"), life.steps.index("model rename_child")
    synced = [number for number, step in enumerate(life.steps) if step == ".saving-one sync"]
    assert max(finished) < synced[0] < put < synced[1] < renamed


@pytest.mark.guarantee("V9")
def test_commit_refuses_a_file_that_cannot_be_read_back(series: SnapshotStore, directory: Directory) -> None:
    plan = series.plan("full", "one")
    files = draft(series, plan, "one")
    replace_bytes(series.target(plan, "one"), bytes(files[1].num_bytes), files[1].file)
    with pytest.raises(SnapshotCorrupt):
        series.commit(plan, manifest_of(plan, files))
    assert series.snapshots() == []


def test_commit_refuses_a_manifest_that_no_reader_would_take(
    series: SnapshotStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = series.plan("full", "one")
    files = draft(series, plan, "one")
    monkeypatch.setattr(manifest_module, "MAX_BYTES", 100)
    with pytest.raises(SnapshotError, match="100"):
        series.commit(plan, manifest_of(plan, files))
    assert series.snapshots() == []


def test_commit_refuses_dense_values_of_some_shards_only(series: SnapshotStore) -> None:
    plan = series.plan("full", "one")
    target = series.target(plan, "one")
    halves = [dense_of(DENSE, *DENSE.range_of(shard, 2))._replace(assigned=bool(shard)) for shard in (0, 1)]
    files = []
    for shard, half in enumerate(halves):
        file = target.create(f"shard-{shard}-of-2.fss")
        files.append(write(file, [], [half], shard=shard, num_shards=2))
    with pytest.raises(SnapshotError, match="'dense'"):
        series.commit(plan, manifest_of(plan, files))


def test_what_is_no_snapshot_stays(series: SnapshotStore, directory: Directory) -> None:
    directory.make()
    directory.put("notes.txt", b"")
    directory.child("best").make()
    directory.child("best").put("MANIFEST.json", b"{}")
    for _ in range(3):
        save(series, keep_last=1)
    assert directory.names() == ["000003-full", "best", "notes.txt"]


def test_a_save_succeeds_beside_a_damaged_manifest(
    series: SnapshotStore, directory: Directory, caplog: pytest.LogCaptureFixture
) -> None:
    save(series)
    replace_bytes(directory.child("000001-full"), b"{")
    with caplog.at_level(logging.WARNING):
        assert save(series, "delta") == "000002-full"
    assert "000001-full" in caplog.text
    assert names(series.chain()) == ["000002-full"]


def test_delta_is_not_put_on_top_of_a_broken_chain(series: SnapshotStore, directory: Directory) -> None:
    save(series)
    save(series, "delta")
    directory.remove_child("000001-full")
    assert save(series, "delta") == "000003-full"


def test_nothing_is_removed_while_a_manifest_is_damaged(
    series: SnapshotStore, directory: Directory, caplog: pytest.LogCaptureFixture
) -> None:
    save(series)
    save(series)
    replace_bytes(directory.child("000002-full"), b"{")
    with caplog.at_level(logging.WARNING):
        save(series, keep_last=2)
    assert "cannot see what to remove" in caplog.text
    assert series.snapshots() == ["000001-full", "000002-full", "000003-full"]


def test_snapshot_stands_when_old_ones_cannot_be_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    series = SnapshotStore(local(tmp_path))
    save(series)

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "unlink", refuse)
    with caplog.at_level(logging.WARNING):
        assert save(series, keep_last=1) == "000002-full"
    assert "cannot remove" in caplog.text
    assert series.snapshots() == ["000001-full", "000002-full"]


# Crashes


class Killed(BaseException):
    """Nothing of the process happens after this."""


class Life:
    """A process that is killed after `num_steps` steps of its directories and files."""

    def __init__(self, num_steps: int) -> None:
        self.num_left = num_steps
        self.steps: list[str] = []

    def step(self, name: str) -> None:
        if self.num_left <= 0:
            crash()
            raise Killed
        self.num_left -= 1
        self.steps.append(name)


def crash() -> None:
    """Releases the locks of this process, as the system does when it ends."""
    store_module._locks.clear()


class Mortal:
    """A directory or file; what is done to it are steps of a life."""

    def __init__(self, inner: Any, life: Life, name: str | None = None) -> None:
        self._inner = inner
        self._life = life
        self._name = name or str(inner).rpartition("/")[2]

    def __str__(self) -> str:
        return str(self._inner)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if not callable(found):
            return found

        def step(*arguments: Any, **options: Any) -> Any:
            self._life.step(f"{self._name} {name}")
            result = found(*arguments, **options)
            if hasattr(result, "finish"):
                return Mortal(result, self._life, arguments[0])
            is_one = hasattr(result, "sync") or hasattr(result, "read_into")
            return Mortal(result, self._life) if is_one else result

        return step


def runs(work: Callable[[int], bool]) -> int:
    """Has work killed after 0, 1, 2, ... steps, until it comes to its end; returns how often it was killed."""
    for num_steps in range(10_000):
        if work(num_steps):
            return num_steps
    raise AssertionError("never came to its end")


@pytest.mark.parametrize("kinds", [("full", "full"), ("full", "delta"), ("full", "delta", "delta", "full")])
def test_a_killed_process_leaves_the_old_snapshot_or_the_new(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, kinds: tuple[str, ...]
) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    for kind_of_directory in (local, memory):
        seen: list[list[str]] = []

        def killed_after(num_steps: int, make: Any = kind_of_directory, seen: Any = seen) -> bool:
            directory = make(tmp_path_factory.mktemp("killed"))
            series = SnapshotStore(directory)
            for kind in kinds[:-1]:
                save(series, kind)
            old = contents_of(series.chain())
            try:
                save(SnapshotStore(Mortal(directory, Life(num_steps))), kinds[-1], "two", keep_last=1)
                was_killed = False
            except Killed:
                was_killed = True
            chain = series.chain()
            seen.append(names(chain))
            is_new = chain[-1][1].save_id == "two"
            assert (contents_of(chain) == old) is not is_new
            assert is_new or was_killed
            # Every snapshot that is still listed is whole, and the next save cleans up.
            for name in series.snapshots():
                contents_of(series.chain(name))
            last = save(series, "full", "three", keep_last=1)
            assert directory.names() == [last]
            return not was_killed

        assert runs(killed_after) > 30
        assert len({tuple(one) for one in seen}) == 2


@pytest.mark.parametrize(("kind", "every"), [("full", 1), ("delta", 17)])
def test_disk_that_is_full_at_any_byte_leaves_the_old_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, every: int
) -> None:
    directory = local(tmp_path)
    series = SnapshotStore(directory)
    save(series)
    old = contents_of(series.chain())
    real, free = os.write, 0

    def write_while_there_is_room(descriptor: int, data: memoryview) -> int:
        nonlocal free
        if free == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = real(descriptor, data[:free])
        free -= written
        return written

    monkeypatch.setattr(os, "write", write_while_there_is_room)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    failed = 0
    for size in range(0, 20_000, every):
        free = size
        try:
            save(series, kind, "two")
            break
        except SnapshotError as error:
            failed += 1
            assert "cannot be written: [Errno 28] No space left on device" in str(error)  # noqa: PT017
        assert directory.names() == ["000001-full"]
    assert failed > 1500 // every
    assert contents_of(series.chain("000001-full")) == old
    assert series.snapshots() == ["000001-full", f"000002-{kind}"]


# What readers serve


def version(series: SnapshotStore, name: str) -> Version:
    return version_of(series.manifest(name))


def serve(directory: Directory, pinned: Version | None, way_back: Version | None = None) -> None:
    content = read_serve_file(directory)
    write_serve_file(directory, content.changed("promote", pinned, way_back, changed_at=""))


def test_readers_serve_the_newest_unless_one_is_named(series: SnapshotStore, directory: Directory) -> None:
    assert series.served() is None
    first = save(series)
    second = save(series, "delta")
    save(series, is_complete=False)
    assert series.served() == second
    serve(directory, version(series, first))
    assert series.served() == first
    assert names(served_chain(directory)) == [first]
    assert names(served_chain(directory.child(second))) == [first, second]
    serve(directory, None)
    assert series.served() == second


def test_a_named_version_that_is_not_there_is_no_other_one(series: SnapshotStore, directory: Directory) -> None:
    name = save(series)
    for wrong in (Version(1, 5), Version(2, version(series, name).checksum)):
        serve(directory, wrong)
        assert series.find(wrong) is None
        with pytest.raises(SnapshotError, match=f"snapshot {wrong.number} "):
            series.served()


def test_a_number_that_was_removed_is_named_so(series: SnapshotStore) -> None:
    for _ in range(3):
        save(series, keep_last=2)
    assert series.with_number(2) == "000002-full"
    with pytest.raises(SnapshotError, match=r"snapshot 1 was removed.* there are 2, 3$"):
        series.with_number(1)
    with pytest.raises(SnapshotError, match=r"snapshot 4 does not exist; there are 2, 3$"):
        series.with_number(4)


def test_served_versions_and_their_bases_are_not_removed(series: SnapshotStore, directory: Directory) -> None:
    for kind in ("full", "delta", "delta", "full", "delta", "full"):
        save(series, kind)
    serve(directory, version(series, "000005-delta"), version(series, "000002-delta"))
    save(series, keep_last=1)
    assert series.snapshots() == ["000001-full", "000002-delta", "000004-full", "000005-delta", "000007-full"]
    serve(directory, version(series, "000005-delta"))
    save(series, keep_last=1)
    assert series.snapshots() == ["000004-full", "000005-delta", "000008-full"]
    serve(directory, None)
    save(series, keep_last=1)
    assert series.snapshots() == ["000009-full"]


def test_a_version_that_is_gone_holds_nothing(series: SnapshotStore, directory: Directory) -> None:
    save(series)
    serve(directory, Version(1, 5), Version(9, 5))
    save(series, keep_last=1)
    assert series.snapshots() == ["000002-full"]


def test_nothing_is_removed_while_the_serve_file_is_damaged(
    series: SnapshotStore, directory: Directory, caplog: pytest.LogCaptureFixture
) -> None:
    save(series)
    directory.replace("SERVE.json", b"{}")
    save(series, keep_last=1)
    assert series.snapshots() == ["000001-full", "000002-full"]
    assert "SERVE.json" in caplog.text
