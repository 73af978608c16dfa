"""A shard that continues from a log has forgotten the same clients as one that never crashed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet_sparse.core.mode import ASYNC, Mode
from fleet_sparse.pserver.admin.log_recovery import write_checkpoint
from fleet_sparse.pserver.admin.snapshot_writer import Save
from fleet_sparse.pserver.engine.shard import Shard
from support.logs import close, logged_shard, recovered
from support.shards import SGD, FrameClient, code_of, floats, ids_of, make_shard, push


class Twins:
    """A shard with a log that crashes, and one that never does; two workers, in whose places others come."""

    def __init__(self, directory: Path) -> None:
        self.shard = logged_shard(directory, SGD, only_registered=True)
        self.model = make_shard(SGD, only_registered=True)
        self.clients: list[bytes] = []
        self.workers: dict[bytes, int] = {}
        self.save: list[Save] = []

    @property
    def both(self) -> tuple[Shard, Shard]:
        return self.shard, self.model

    def join(self, worker: int, *, begins_job: bool = False) -> None:
        client_id = len(self.clients).to_bytes(16, "big")
        self.clients.append(client_id)
        self.workers[client_id] = worker
        for each in self.both:
            each.join(worker, 2, client_id, Mode(ASYNC), begins_job=begins_job)

    def return_(self, number: int) -> None:
        """A client takes its place back, as long as it is known."""
        client_id = self.clients[number % len(self.clients)]
        for each in self.both:
            if each.knows(client_id):
                each.join(self.workers[client_id], 2, client_id, Mode(ASYNC), begins_job=False)

    def push(self, number: int) -> None:
        client_id = self.clients[-1 - number % min(2, len(self.clients))]
        codes = []
        for each in self.both:
            client = FrameClient(each, client_id)
            client.seq = each.ledger.applied(client_id)
            codes.append(code_of(client.push(push(SGD, ids_of(7), floats([1, 1])))))
        assert codes[0] == codes[1]

    def cut(self) -> None:
        self.end(None)
        self.save = [Save(each, "a", base=None, is_logged=True) for each in self.both]
        assert all(each.cut() for each in self.save)

    def end(self, checksum: int | None) -> None:
        for each in self.save:
            each.end(checksum)
        self.save = []

    def commit(self) -> None:
        if not self.save:
            self.cut()
        self.end(5)

    def checkpoint(self) -> None:
        self.end(None)
        write_checkpoint(self.shard)

    def crash(self) -> None:
        before, self.shard = self.shard, recovered(self.shard, only_registered=True)
        self.end(None)
        close(before)

    def check(self) -> None:
        shard, model = self.both
        assert sorted(shard.ledger.watermarks()) == sorted(model.ledger.watermarks())
        assert [shard.knows(each) for each in self.clients] == [model.knows(each) for each in self.clients]


CALLS = st.one_of(
    st.tuples(st.sampled_from(["join", "return_", "push"]), st.integers(0, 1)),
    st.tuples(st.just("return_"), st.integers(0, 9)),
    st.tuples(st.sampled_from(["cut", "commit", "commit", "checkpoint", "crash"]), st.none()),
)


@settings(max_examples=60)
@given(calls=st.lists(CALLS, min_size=8, max_size=30))
def test_same_clients_are_forgotten_after_crashes(tmp_path_factory: pytest.TempPathFactory, calls: Any) -> None:
    twins = Twins(tmp_path_factory.mktemp("log") / "log")
    twins.join(0, begins_job=True)
    twins.join(1)
    for name, number in calls:
        getattr(twins, name)(*([] if number is None else [number]))
        twins.check()
    twins.end(None)
    close(twins.shard)
    twins.model.close()


@pytest.mark.parametrize("has_checkpoint", [False, True])
def test_client_replaced_before_a_crash_is_forgotten(tmp_path: Path, has_checkpoint: bool) -> None:
    twins = Twins(tmp_path / "log")
    twins.join(0, begins_job=True)
    twins.push(0)
    twins.join(0)
    twins.commit()
    if has_checkpoint:
        twins.checkpoint()
    twins.crash()
    assert (len(twins.shard.ledger.watermarks()), twins.shard.knows(twins.clients[0])) == (1, True)
    twins.commit()
    assert (twins.shard.ledger.watermarks(), twins.shard.knows(twins.clients[0])) == ([], False)
