from __future__ import annotations

import os
from concurrent.futures import Future
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from fleet_sparse.core.criteria import Criterion
from fleet_sparse.core.initializer import constant
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.errors import SnapshotError
from fleet_sparse.pserver.admin.snapshot_loader import load
from fleet_sparse.pserver.admin.snapshot_writer import Save
from fleet_sparse.pserver.engine.shard import Shard
from fleet_sparse.pserver.storage.table_store import TableStore
from fleet_sparse.pserver.tables import embedding_cut
from fleet_sparse.snapshot.directory import LocalDirectory, directory_at
from fleet_sparse.snapshot.store import SnapshotStore
from support.cow_views import everything
from support.saves import (
    ADAGRAD,
    ADAM,
    Trained,
    array_in,
    at_once,
    loaded,
    rows_in,
    save,
    store_of,
)
from support.shards import CLIENT, SGD, FrameClient, floats, ids_of, make_shard, push


def contents(shards: list[Shard]) -> list[Any]:
    return [rows_in(shards, ADAGRAD), rows_in(shards, ADAM), array_in(shards)]


def days_in(shards: list[Shard]) -> dict[int, int | None]:
    """The day of each row's last push."""
    return {id_: row.last_day for shard in shards for id_, row in everything(store_of(shard, ADAM)).items()}


# The moment


@pytest.mark.guarantee("V1")
def test_pushes_between_any_two_slices_are_not_in_the_save(tmp_path: Path) -> None:
    job = Trained(1, num_ids=3000)
    job.step()
    before, seq = contents(job.shards), job.clients[0].seq

    def post(task: Any) -> Future[Any]:
        job.step(20)
        return at_once(task)

    (mark,) = save(job.shards, tmp_path, post=post).files[0].clients
    assert (mark.client_id, mark.watermark) == (CLIENT, seq)
    assert contents(loaded(tmp_path, 1)) == before
    assert contents(job.shards) != before


def test_narrow_rows_are_copied_few_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedding_cut, "SLICE_ROWS", 100)
    job, posted = Trained(1, num_ids=3000), []
    job.step()
    save(job.shards, tmp_path, post=lambda task: posted.append(task) or at_once(task))
    assert len(posted) > 2 * 1500 // 100
    assert contents(loaded(tmp_path, 2)) == contents(job.shards)


def test_a_hundred_restarts_do_not_grow_the_manifest(tmp_path: Path) -> None:
    sizes = set()
    for number in range(1, 101):
        shard = make_shard(SGD)
        if number > 1:
            load(shard, directory_at(tmp_path))
        client = FrameClient(shard, number.to_bytes(16, "big"))  # a worker that is started again is another client
        assert client.push(push(SGD, ids_of(7), floats((1, 2)))).error is None
        manifest = save([shard], tmp_path, clients={client.client_id})
        sizes.add(len(msgspec.structs.replace(manifest, number=1, files=manifest.files, saved_at="").to_json()))
        assert [mark.client_id for mark in manifest.files[0].clients] == [client.client_id]
        shard.close()
    assert len(sizes) == 1


# Deltas


def test_a_delta_has_the_rows_that_changed_and_no_others(tmp_path: Path) -> None:
    job = Trained(2)
    job.step()
    save(job.shards, tmp_path)
    job.step(10)
    manifest = save(job.shards, tmp_path, kind="delta", save_id="two")
    assert (manifest.kind, manifest.num_rows) == ("delta", 20)
    assert contents(loaded(tmp_path, 3)) == contents(job.shards)


def test_a_shard_that_loaded_a_snapshot_saves_deltas_of_it(tmp_path: Path) -> None:
    job = Trained(2)
    job.step()
    save(job.shards, tmp_path)
    after = loaded(tmp_path, 3)
    assert save(after, tmp_path, kind="delta", save_id="two").num_rows == 0


def test_a_shard_that_does_not_know_the_base_saves_no_delta(tmp_path: Path) -> None:
    job = Trained(1)
    save(job.shards, tmp_path)
    other = Trained(1)
    one = Save(other.shards[0], "two", base=job.shards[0].base)
    assert not one.cut()
    store_of(other.shards[0], ADAM).capture().end(kept=False)  # none is open


def test_a_cut_that_is_refused_begins_nothing() -> None:
    (shard,) = Trained(1).shards
    with pytest.raises(SnapshotError):
        Save(shard, "x", base=None, tables=["adam", "C1"]).cut()
    store_of(shard, ADAM).capture().end(kept=False)
    shard.fault = "a push failed half-way"
    with pytest.raises(SnapshotError):
        Save(shard, "x", base=None).cut()


def test_a_cut_without_memory_leaves_no_capture(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = Trained(1)
    capture = TableStore.capture

    def refuse(store: TableStore, **options: Any) -> Any:
        if store.spec == ADAM:
            raise MemoryError("no more")
        return capture(store, **options)

    with monkeypatch.context() as patched:
        patched.setattr(TableStore, "capture", refuse)
        with pytest.raises(MemoryError):
            Save(job.shards[0], "x", base=None).cut()
    store_of(job.shards[0], ADAGRAD).capture().end(kept=False)


def test_name_of_the_file_is_durable_when_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []
    monkeypatch.setattr(LocalDirectory, "sync", lambda directory: seen.append(directory.names()))
    one = Save(Trained(1).shards[0], "one", base=None)
    assert one.cut()
    one.write(directory_at(tmp_path), at_once)
    assert seen == [["shard-0-of-1.fss"]]
    one.end(None)


# What goes wrong


def test_save_that_is_given_up_removes_its_file(tmp_path: Path) -> None:
    job = Trained(1)
    job.step()
    one = Save(job.shards[0], "one", base=None)
    assert one.cut()
    one.give_up()
    with pytest.raises(SnapshotError):
        one.write(directory_at(tmp_path), at_once)
    assert os.listdir(tmp_path) == []


def test_too_many_pre_images_fail_the_save_and_not_the_push(tmp_path: Path) -> None:
    spec = TableSpec(name="sgd", dim=2, rule="sgd", initializer=constant(0.5))
    shard = Shard(
        0, 1, cluster_id=1, incarnation=1, placement=make_shard().placement, max_pre_image_bytes=80, huge_pages=False
    )
    shard.add_table(spec)
    client = FrameClient(shard)
    ids = np.arange(100)
    frame: dict[str, Any] = {"cluster_id": 1}
    assert client.push(push(spec, ids, np.ones((100, 2), np.float32)), **frame).error is None
    one = Save(shard, "one", base=None)
    assert one.cut()
    assert client.push(push(spec, ids, np.ones((100, 2), np.float32)), **frame).error is None
    with pytest.raises(SnapshotError, match=r"table 'sgd'.*FLEET_SPARSE_MAX_PRE_IMAGE_BYTES"):
        one.write(directory_at(tmp_path), at_once)
    one.end(None)
    assert client.push(push(spec, ids_of(7), floats([1, 1])), **frame).error is None
    save([shard], tmp_path / "next")


# Any history


class History(RuleBasedStateMachine):
    """Steps, days, removals, loads, and saves of all sorts; what is saved is what was there at the cut."""

    @initialize(num_shards=st.integers(1, 3))
    def begin(self, num_shards: int) -> None:
        self._temporary = TemporaryDirectory()
        self.directory = Path(self._temporary.name)
        self.job = Trained(num_shards, num_ids=40)
        self.saved: tuple[list[Any], Any] | None = None
        self.num_saves = 0

    @rule(num_pushed=st.integers(1, 40))
    def step(self, num_pushed: int) -> None:
        self.job.step(num_pushed)

    @rule(count=st.integers(0, 40))
    def remove(self, count: int) -> None:
        for shard in self.job.shards:
            store_of(shard, ADAM).remove(self.job.ids[:count])

    @rule()
    def end_day(self) -> None:
        for shard in self.job.shards:
            store_of(shard, ADAM).end_day()

    @rule(max_unseen_days=st.integers(0, 2))
    def shrink(self, max_unseen_days: int) -> None:
        for shard in self.job.shards:
            store = store_of(shard, ADAM)
            store.shrink(store.judge([Criterion("unseen_days", max_unseen_days)]))

    @rule()
    def go_back(self) -> None:
        if self.saved is not None:
            for shard in self.job.shards:
                draft = shard.clone_empty()
                load(draft, directory_at(self.directory))
                shard.swap_in(draft)
            assert (contents(self.job.shards), days_in(self.job.shards)) == self.saved

    @rule(meanwhile=st.integers(1, 30))
    def save_one_table(self, meanwhile: int) -> None:
        for shard in self.job.shards:
            one = Save(shard, "one-table", base=None, tables=["adam"])
            assert one.cut()
            self.job.step(meanwhile)
            one.end(12345)

    @rule(kind=st.sampled_from(["full", "delta"]), meanwhile=st.integers(0, 30))
    def save(self, kind: str, meanwhile: int) -> None:
        self.num_saves += 1
        self.saved = contents(self.job.shards), days_in(self.job.shards)
        if any(shard.base is None for shard in self.job.shards):
            kind = "full"  # as whoever asks for the save does then
        self._save(kind, (lambda: self.job.step(meanwhile)) if meanwhile else lambda: None)

    def _save(self, kind: str, meanwhile: Any) -> None:
        save(
            self.job.shards,
            self.directory,
            kind=kind,
            keep_last=2,
            save_id=f"save-{self.num_saves}",
            meanwhile=meanwhile,
        )

    @rule(meanwhile=st.integers(1, 30))
    def fail(self, meanwhile: int) -> None:
        saves = [Save(shard, "failed", base=shard.base) for shard in self.job.shards]
        assert [one.cut() for one in saves] == [True] * len(saves)
        self.job.step(meanwhile)
        for one in saves:
            one.end(None)

    @rule(num_after=st.integers(1, 4))
    def load(self, num_after: int) -> None:
        if self.saved is not None:
            after = loaded(self.directory, num_after)
            assert (contents(after), days_in(after)) == self.saved
            for shard in after:
                shard.close()

    @invariant()
    def newest_is_there(self) -> None:
        if getattr(self, "saved", None) is not None:
            assert SnapshotStore(directory_at(self.directory)).snapshots()

    def teardown(self) -> None:
        if hasattr(self, "job"):
            self.load(2)
            for shard in self.job.shards:
                shard.close()
            self._temporary.cleanup()


History.TestCase.settings = settings(max_examples=25, stateful_step_count=20, deadline=None)
TestHistory = pytest.mark.guarantee("V7")(History.TestCase)
