"""The first delta after a crash contains what it would have contained without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet_sparse.core.criteria import MIN_NORM, Criterion
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.pserver.admin.checkpoint_link import link_of
from fleet_sparse.pserver.admin.log_recovery import at_once, write_checkpoint
from fleet_sparse.pserver.admin.service import Supervised
from fleet_sparse.pserver.admin.snapshot_loader import load
from fleet_sparse.pserver.admin.snapshot_writer import Save
from fleet_sparse.pserver.engine.shard import Shard
from fleet_sparse.pserver.storage.table_store import TableStore
from fleet_sparse.pserver.tables.embedding import EmbeddingTable
from fleet_sparse.pserver.tables.mutations import DayEnd
from fleet_sparse.snapshot.directory import directory_at
from support.admissions import count_filter
from support.controls import HeldControl, registration
from support.coordinators import Coordinator, run
from support.logs import close, logged_shard, recovered, state_of
from support.saves import everything
from support.shards import ADAM, DENSE, SGD, FrameClient, ids_of, make_shard, push

COUNTED = count_filter(3)


def stores_of(shard: Shard) -> dict[str, TableStore]:
    stores = {}
    for entry in shard.tables.values():
        table = entry.table
        if isinstance(table, EmbeddingTable):
            stores[entry.spec.name] = table.store
            if table.admission is not None and table.admission.counters is not None:
                stores[f"{entry.spec.name}: counters"] = table.admission.counters.store
    return stores


def next_delta(shard: Shard) -> dict[str, Any]:
    """Returns the base of the next delta, and the ids that it contains and removes, by table."""
    delta: dict[str, Any] = {"base": shard.base}
    for name, store in stores_of(shard).items():
        view = store.capture(only_changed=True)
        ids: list[int] = []
        while view.has_more:
            while view.collect():
                pass
            view.arrange()
            ids += view.ids.tolist()
        delta[name] = sorted(ids), view.removed.tolist()
        view.end(kept=False)
    return delta


def push_ids(shard: Shard, client: FrameClient[Shard], spec: TableSpec, *ids: int) -> None:
    grads = np.ones((len(ids), spec.dim), np.float32)
    statistics = {"counts": np.ones(len(ids), np.uint32)} if spec.statistics else {}
    assert client.push(push(spec, ids_of(*ids), grads, statistics=statistics)).error is None


def begun(shard: Shard, *, ends_day: bool = False, **left_out: Any) -> Save:
    save = Save(shard, "a", base=None, ends_day=ends_day, left_out=left_out, is_logged=True)
    assert save.cut()
    return save


class Twins:
    """A shard with a log that crashes, and one that never does."""

    def __init__(self, directory: Path) -> None:
        self.shard = logged_shard(directory, SGD, COUNTED, DENSE, segment_bytes=4096)
        self.model = make_shard(SGD, COUNTED, DENSE)
        self.saves: list[Save] = []
        self.num_saves = 0
        self.directory = directory_at(directory.with_name("model"))

    def push(self, *ids: int) -> None:
        for each in (self.shard, self.model):
            client = FrameClient(each)
            client.seq = each.ledger.applied(client.client_id)
            for spec in (SGD, COUNTED):
                push_ids(each, client, spec, *ids)

    def cut(self) -> None:
        self.failed()
        self.saves = [begun(each) for each in (self.shard, self.model)]

    def kept(self) -> None:
        if not self.saves:
            self.cut()
        self.num_saves += 1
        self.end(self.num_saves)

    def kept_day(self) -> None:
        self.failed()
        self.saves = [begun(each, ends_day=True) for each in (self.shard, self.model)]
        self.kept()

    def linked(self) -> None:
        self._link(None)

    def linked_delta(self) -> None:
        self._link(self.shard.base)

    def _link(self, base: int | None) -> None:
        """Saves; the save becomes the checkpoint, if it may."""
        self.failed()
        self.num_saves += 1
        self.saves = [Save(each, "a", base=base, is_logged=True) for each in (self.shard, self.model)]
        target = self.directory.child(str(self.num_saves))
        target.make()
        link = link_of(self.shard, self.saves[0], target)
        assert all(each.cut() for each in (self.saves[0] if link is None else link, self.saves[1]))
        if link is not None:
            link.link(self.saves[0].write(target, at_once))
        self.end(self.num_saves)
        assert link is None or link.adopt(self.num_saves)

    def failed(self) -> None:
        self.end(None)

    def end(self, checksum: int | None) -> None:
        for save in self.saves:
            save.end(checksum)
            save.end_day()
        self.saves = []

    def checkpoint(self) -> None:
        self.failed()
        write_checkpoint(self.shard)

    def remove(self) -> None:
        self.failed()
        for each in (self.shard, self.model):
            each.shrink([Criterion(MIN_NORM, 1.0)], tables=["sgd"])

    def day(self) -> None:
        self.failed()
        for each in (self.shard, self.model):
            each.commit([], [DayEnd(SGD.table_id)])

    def crash(self) -> None:
        before, self.shard = self.shard, recovered(self.shard, segment_bytes=4096)
        self.failed()
        assert state_of(self.shard) == state_of(before)
        close(before)

    def check(self) -> None:
        assert self.shard.base == self.model.base
        if not self.saves and self.shard.base is not None:
            assert next_delta(self.shard) == next_delta(self.model)


PUSHES = st.tuples(st.just("push"), st.lists(st.integers(0, 30), min_size=1, max_size=6, unique=True))
LINKED = ["linked", "linked_delta", "linked_delta"]
NAMES = st.sampled_from(["remove", "cut", "kept", "kept_day", "failed", "checkpoint", "crash", "day", *LINKED])


@pytest.mark.guarantee("W9")
@settings(max_examples=60)
@given(calls=st.lists(PUSHES | st.tuples(NAMES, st.just([])), min_size=5, max_size=25))
def test_next_delta_is_the_same_after_crashes(tmp_path_factory: pytest.TempPathFactory, calls: Any) -> None:
    twins = Twins(tmp_path_factory.mktemp("log") / "log")
    twins.push(*range(10))
    twins.kept()
    for name, ids in calls:
        getattr(twins, name)(*ids)
        twins.check()
    twins.failed()
    close(twins.shard)
    twins.model.close()


def test_rows_left_out_of_the_base_are_in_no_delta_after_a_crash(tmp_path: Path) -> None:
    shard = logged_shard(tmp_path / "log", SGD, COUNTED)
    client = FrameClient(shard)
    push_ids(shard, client, COUNTED, 1)
    push_ids(shard, client, SGD, 1, 2)
    save = begun(shard, sgd=(Criterion(MIN_NORM, 100.0),), emb=(Criterion(MIN_NORM, 100.0),))
    push_ids(shard, client, SGD, 3)
    save.end(5)
    expected = next_delta(shard)
    assert expected["sgd"] == ([3], [])
    assert next_delta(recovered(shard)) == expected


def test_first_values_may_follow_a_checkpoint_with_many_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fleet_sparse.pserver.admin.log_recovery._CHANGED_IDS", 7)
    shard = logged_shard(tmp_path / "log", SGD)
    begun(shard).end(5)
    push_ids(shard, FrameClient(shard), SGD, *range(40))
    shard.shrink([Criterion(MIN_NORM, 0.0)])
    write_checkpoint(shard)
    assert next_delta(recovered(shard)) == next_delta(shard)


# Over the control plane


def control_of(root: Path, shard: Shard, *, is_restart: bool = False) -> HeldControl:
    started = Supervised(is_restart, has_recovered=False, on_job=lambda: None, on_snapshot=lambda name: None)
    return HeldControl(root, started, shard)


def train(held: HeldControl, *ids: int) -> None:
    client = FrameClient(held.shard)
    client.seq = held.shard.ledger.applied(client.client_id)
    for spec in (SGD, ADAM):
        push_ids(held.shard, client, spec, *ids)


@pytest.mark.parametrize("has_checkpoint", [False, True])
def test_first_delta_after_a_crash_is_a_delta(tmp_path: Path, has_checkpoint: bool) -> None:
    held = control_of(tmp_path, logged_shard(tmp_path / "log", SGD, ADAM))
    held.call(registration(SGD, ADAM))
    train(held, 1, 2, 3)
    run(Coordinator(held, "one").save)
    train(held, 3, 4)
    if has_checkpoint:
        write_checkpoint(held.shard)
    train(held, 5)
    again = control_of(tmp_path, recovered(held.shard), is_restart=True)
    train(again, 6)
    assert run(lambda: Coordinator(again, "two").save("delta")) == "000002-delta"
    other = make_shard()
    assert load(other, directory_at(tmp_path / "model")).manifest.num_rows == 2 * 4
    for mine, theirs in zip(again.shard.tables.values(), other.tables.values(), strict=True):
        assert isinstance(mine.table, EmbeddingTable)
        assert isinstance(theirs.table, EmbeddingTable)
        assert everything(mine.table.store) == everything(theirs.table.store)


@pytest.mark.parametrize("has_checkpoint", [False, True])
def test_keep_last_removes_a_snapshot_from_before_a_crash(tmp_path: Path, has_checkpoint: bool) -> None:
    held = control_of(tmp_path, logged_shard(tmp_path / "log", SGD))
    held.call(registration(SGD))
    run(Coordinator(held, "one").save)
    if has_checkpoint:
        write_checkpoint(held.shard)
    again = control_of(tmp_path, recovered(held.shard), is_restart=True)
    run(lambda: Coordinator(again, "two").save())
    assert sorted(path.name for path in (tmp_path / "model").iterdir()) == ["000002-full"]
