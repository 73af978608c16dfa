"""Rows that are pulled ahead, by real workers over real shards in this process, against those of the plain loop."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from fleet_sparse.core.clip import BY_GLOBAL_NORM, Clip
from fleet_sparse.core.dense_spec import DenseSpec, Segment
from fleet_sparse.core.initializer import uniform
from fleet_sparse.core.mode import ASYNC, SYNC, Mode
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.errors import PushRefused
from fleet_sparse.settings import Settings
from fleet_sparse.wire.decode import decode
from fleet_sparse.wire.frame_format import Frame, Header, Op
from fleet_sparse.worker.modes.step import StepClip
from fleet_sparse.worker.modes.sync_async import PserverTraining
from fleet_sparse.worker.net.channel import Buffer
from fleet_sparse.worker.net.requests import DenseUpdate
from fleet_sparse.worker.rows.deduplicator import Deduplicator
from fleet_sparse.worker.rows.early_rows import EarlyRows
from fleet_sparse.worker.rows.row_batch import RowBatch
from support.connections import client_over
from support.in_process import QUICK, InProcessCluster
from support.successive import Batch, SuccessiveLookups
from support.threads import in_threads
from support.waits import wait_until

DIM = 3
ONE = TableSpec(name="ahead.one", dim=DIM, rule="adagrad", initializer=uniform(-1.0, 1.0), seed=3)
TWO = TableSpec(name="ahead.two", dim=DIM, rule="sgd", initializer=uniform(-1.0, 1.0), seed=4)
DENSE = DenseSpec("ahead.dense", "sgd", (), (Segment("w", 0, 5, 1.0),))
SPECS = {spec.name: spec for spec in (ONE, TWO)}

SYNC_MODE, ASYNC_MODE, LAG = Mode(SYNC), Mode(), Mode(ASYNC, max_step_lag=1)
ALONE = [SYNC_MODE, ASYNC_MODE, LAG]
HALVES = replace(QUICK, rows_dtype="bfloat16")
CLIP = StepClip(Clip(BY_GLOBAL_NORM, norm=0.5), (True, True))

Rows = Mapping[str, NDArray[np.float32]]  # by name of a table, in the order of the batch's ids


def one(*ids: int) -> Batch:
    return {ONE.name: ids}


class Worker:
    """A worker whose gradients are computed from the rows that it sees; it notes the frames that it sent and got."""

    def __init__(
        self,
        cluster: InProcessCluster,
        index: int = 0,
        num_workers: int = 1,
        mode: Mode = ASYNC_MODE,
        settings: Settings = QUICK,
    ) -> None:
        self.index = index
        self.client = cluster.worker(index, num_workers, mode, settings)
        self.channel = cluster.channel
        self.sent: list[Header] = []
        self.received: list[Frame] = []
        deduplicator = Deduplicator(cluster.placement)
        self._lookups = SuccessiveLookups(deduplicator, SPECS.values())
        self.training = PserverTraining(self.client, deduplicator, mode, num_workers)
        self._watch()

    def expect(self, batch: Batch, *tables: TableSpec, before: Batch) -> EarlyRows:
        """A batch that is to come after another one, as far as its ids of these tables are known."""
        return self._lookups.announce(batch, before, [spec.name for spec in tables if spec.name in batch] or None)

    def prefetch(self, batch: Batch, ahead: EarlyRows | None = None, coming: EarlyRows | None = None) -> Rows:
        return self._filled(batch, lambda lookups: self.training.prefetch(lookups, ahead, coming), ahead)

    def pull(self, batch: Batch) -> Rows:
        return self._filled(batch, self.training.pull)

    def _filled(self, batch: Batch, pull: Callable[[list[RowBatch]], None], ahead: EarlyRows | None = None) -> Rows:
        lookups = self._lookups.of(batch, ahead)
        pull([lookup.rows for lookup in lookups.values()])
        return {name: lookup.rows.values[lookup.inverse] for name, lookup in lookups.items()}

    def update(
        self, batch: Batch, rows: Rows, *, clip: StepClip | None = None, dense: NDArray[np.float32] | None = None
    ) -> list[NDArray[np.float32]]:
        updates = []
        for name, (lookup, inverse) in self._lookups.of(batch).items():
            grads = np.empty_like(lookup.values)
            grads[inverse] = np.sin(5 * rows[name] + self.index + np.array(batch[name]).reshape(-1, 1))
            updates.append(RowBatch(lookup.spec, lookup.unique, grads, 0.25))
        values = [] if dense is None else [np.empty_like(dense)]
        of_dense = [] if dense is None else [DenseUpdate(DENSE, dense, values, 0.25)]
        self.training.update(updates, of_dense, 1.0 + self.index, clip)
        return values

    def step(self, batch: Batch, ahead: EarlyRows | None = None, coming: EarlyRows | None = None) -> Rows:
        rows = self.prefetch(batch, ahead, coming)
        self.update(batch, rows)
        return rows

    def ops_sent(self) -> list[Op]:
        return [header.op for header in self.sent]

    def _watch(self) -> None:
        send, receive = self.channel.send, self.channel.receive

        def watched_send(shard: int, parts: Sequence[Buffer]) -> bool:
            self.sent.append(decode(parts, max_bytes=QUICK.max_frame_bytes).header)
            return send(shard, parts)

        def watched_receive(timeout_s: float) -> tuple[int, list[Buffer]] | None:
            message = receive(timeout_s)
            if message is not None:
                self.received.append(decode(message[1], max_bytes=QUICK.max_frame_bytes))
            return message

        self.channel.send, self.channel.receive = watched_send, watched_receive


@contextmanager
def cluster_of(num_shards: int = 2) -> Iterator[InProcessCluster]:
    cluster = InProcessCluster(num_shards, [ONE, TWO, DENSE])
    try:
        yield cluster
    finally:
        cluster.close()


# The property


class Action(NamedTuple):
    """What a worker does in one turn of its loop."""

    one: frozenset[int]  # ids of the batch in table ONE
    two: frozenset[int]
    is_announced: bool  # the batch is known one turn before
    is_known: bool  # its ids in table TWO are then known too
    kind: str
    """"step"; "fails": the run ends after its lookups; "fails first": so, and then it is run again; "changed": with
    other ids than were announced; "evaluates": rows are pulled in between; "evaluated": a copy of the program is run
    before it, and fails; "rests": all workers meet before it."""
    delay_ms: float  # between lookups and update

    @property
    def batch(self) -> Batch:
        return {ONE.name: sorted(self.one), TWO.name: sorted(self.two)}


KINDS = ["step"] * 6 + ["fails", "fails first", "changed", "evaluates", "evaluated", "rests"]
ACTIONS = st.builds(
    Action,
    st.frozensets(st.integers(0, 11), max_size=8),
    st.frozensets(st.integers(0, 5), max_size=4),
    st.sampled_from([True, True, True, False]),
    st.booleans(),
    st.sampled_from(KINDS),
    st.sampled_from([0.0, 0.0, 0.5, 2.0]),
)
ALL = {ONE.name: range(12), TWO.name: range(6)}


def loop(
    worker: Worker, actions: Sequence[Action], num_rests: int, clip: StepClip | None, *, looks: bool
) -> list[Rows]:
    """The rows that a worker sees."""
    seen: list[Rows] = []
    ahead: EarlyRows | None = None
    for action, following in zip_longest(actions, actions[1:]):
        if action.kind == "rests":
            worker.training.drain(leaves=True)
            num_rests -= 1
        coming = None
        if looks and following is not None and following.is_announced:
            known = (ONE, TWO) if following.is_known else (ONE,)
            coming = worker.expect(following.batch, *known, before=action.batch)
        batch = action.batch
        if action.kind == "evaluates":
            seen.append(worker.pull(ALL))
        if action.kind == "evaluated":
            seen.append(worker.prefetch(ALL))
        if action.kind == "changed":
            batch, ahead, coming = {name: [100 - id for id in ids] for name, ids in batch.items()}, None, None
        seen.append(worker.prefetch(batch, ahead, coming))
        ahead = coming
        if action.kind == "fails first":
            seen.append(worker.prefetch(batch))
        if action.delay_ms:
            time.sleep(action.delay_ms / 1000)
        if action.kind != "fails":
            worker.update(batch, seen[-1], clip=clip)
    for _ in range(num_rests):
        worker.training.drain(leaves=True)
    seen.append(worker.pull(ALL))
    return seen


def run(
    num_shards: int,
    mode: Mode,
    workers: Sequence[Sequence[Action]],
    clip: StepClip | None = None,
    *,
    looks: bool,
    begin: Callable[[Worker], None] = lambda worker: None,
    settings: Settings = QUICK,
) -> list[list[dict[str, bytes]]]:
    num_rests = 1 + max(sum(action.kind == "rests" for action in actions) for actions in workers)
    with cluster_of(num_shards) as cluster:
        made = [Worker(cluster, index, len(workers), mode, settings) for index in range(len(workers))]
        for worker in made:
            begin(worker)

        def of_worker(worker: Worker) -> list[Rows]:
            try:
                return loop(worker, workers[worker.index], num_rests, clip, looks=looks)
            except BaseException:
                for shard in cluster.shards:  # or the others wait for it
                    cluster.run(shard.shard_index, partial(shard.evict_worker, worker.index, "its thread failed"))
                raise

        seen = in_threads(*(partial(of_worker, worker) for worker in made))
    return [[{name: rows.tobytes() for name, rows in each.items()} for each in of_one] for of_one in seen]


@settings(max_examples=80)
@given(
    st.sampled_from([SYNC_MODE, SYNC_MODE, SYNC_MODE, ASYNC_MODE, Mode(ASYNC, max_step_lag=0), LAG]),
    st.integers(1, 2),
    st.lists(st.lists(ACTIONS, max_size=7), min_size=1, max_size=3),
    st.sampled_from([None, None, CLIP]),
    st.sampled_from([QUICK, QUICK, HALVES]),
)
@pytest.mark.guarantee("R3")
def test_rows_are_those_of_the_plain_loop_bit_by_bit(
    mode: Mode, num_shards: int, workers: list[list[Action]], clip: StepClip | None, of_client: Settings
) -> None:
    """In sync with several workers, in other modes with one."""
    some = workers if mode is SYNC_MODE else workers[:1]
    ahead, plain = (run(num_shards, mode, some, clip, looks=looks, settings=of_client) for looks in (True, False))
    assert ahead == plain


# What is sent, and when


@pytest.mark.parametrize("mode", ALONE)
def test_untouched_rows_arrive_before_the_push(mode: Mode) -> None:
    with cluster_of(1) as cluster:
        worker = Worker(cluster, mode=mode)
        worker.prefetch(one(1, 2), coming=worker.expect(one(2, 3), before=one(1, 2)))
        wait_until(lambda: len(worker.received) == 2)
        assert [frame.header.op for frame in worker.received] == [Op.ROWS, Op.ROWS]


def test_only_rows_that_others_changed_are_sent_again() -> None:
    with cluster_of(2) as cluster:
        first, second = (Worker(cluster, index, 2, SYNC_MODE) for index in range(2))
        coming = first.expect(one(*range(40)), before=one(0, 1, 2))
        rows = first.prefetch(one(0, 1, 2), coming=coming)
        second.step(one(2, 3, 5, 7, 50))
        first.update(one(0, 1, 2), rows)
        first.prefetch(one(*range(40)), coming)
        changed = [block.ids for frame in first.received for block in frame.blocks if block.ids is not None]
        assert sorted(np.concatenate(changed).tolist()) == [3, 5, 7]


def test_each_row_is_pulled_once_if_unknown_at_its_lookup() -> None:
    with cluster_of(1) as cluster:
        worker = Worker(cluster)
        batch = {ONE.name: [1, 2], TWO.name: [3, 4, 5]}
        following = {**batch, ONE.name: [1, 2, 8, 9]}
        coming = worker.expect(following, ONE, before=batch)
        worker.step(batch, coming=coming)
        worker.step(following, coming)
        worker.training.drain()
        assert worker.client.num_pulled_rows == 5 + 4 + 3
        assert worker.ops_sent() == [Op.PULL, Op.PULL, Op.PUSH_PULL, Op.PULL, Op.PUSH]


def test_early_pulled_rows_are_no_older_than_the_step_lag() -> None:
    with cluster_of(1) as cluster:
        fast, slow = (Worker(cluster, index, 2, Mode(ASYNC, max_step_lag=1)) for index in range(2))
        second = fast.expect(one(2), before=one(1))
        fast.step(one(1), coming=second)
        third = fast.expect(one(9), before=one(2))
        fast.step(one(2), second, third)  # asks for row 9, of step 3, which is to see step 1 of all
        slow.step(one(9))
        (row,) = fast.prefetch(one(9), third)[ONE.name]
        assert row.tobytes() == slow.pull(one(9))[ONE.name].tobytes()


@pytest.mark.parametrize(
    ("rows_dtype", "num_ids", "is_early"),
    [
        ("float32", 30, True),
        ("float32", 31, False),
        ("float32", 200, False),
        ("float16", 42, True),
        ("float16", 43, False),
    ],
)
def test_rows_whose_changes_exceed_a_frame_are_pulled_late(rows_dtype: str, num_ids: int, is_early: bool) -> None:
    """An id and its row have 20 bytes, 14 in float16; those of all ids are to take no more than half a frame."""
    with cluster_of(1) as cluster:
        settings = replace(QUICK, max_frame_bytes=1200, rows_dtype=rows_dtype)
        first = Worker(cluster, 0, 2, SYNC_MODE, settings)
        second = Worker(cluster, 1, 2, SYNC_MODE, replace(QUICK, rows_dtype=rows_dtype))
        batch = one(*range(num_ids))
        coming = first.expect(batch, before=one(0, 500))
        rows = first.prefetch(one(0, 500), coming=coming)
        second.step(batch)
        first.update(one(0, 500), rows)
        seen = first.prefetch(batch, coming)
        assert seen[ONE.name].tobytes() == second.pull(batch)[ONE.name].tobytes()
        assert (Op.PULL_EARLY in first.ops_sent()) is is_early
        assert first.ops_sent().count(Op.PULL) == 1


def test_early_rows_arrive_in_place_before_anybody_waits() -> None:
    with client_over("unix", [ONE], QUICK, 2) as (client, placement):
        deduplicator = Deduplicator(placement)
        lookups = SuccessiveLookups(deduplicator, [ONE])
        coming = lookups.announce(one(*range(30)), one(*range(5)))
        (rows,) = coming.batches.values()
        rows.values[:] = np.nan
        present = lookups.of(one(*range(5)))[ONE.name].rows
        coming.begin(client, deduplicator, [present], step=0, merges=False)
        wait_until(lambda: np.count_nonzero(np.isnan(rows.values[:, 0])) == 5)
        (late,) = coming.late
        assert sorted(ids_of_part(late)) == [*range(5)]
        coming.drain()


def ids_of_part(batch: RowBatch) -> list[int]:
    begins = batch.unique.begins
    assert begins is not None
    parts = zip(begins, batch.unique.num_per_shard, strict=True)
    return [id for begin, num in parts for id in batch.unique.ids[begin : begin + num].tolist()]


# What is not used


def test_a_late_request_of_an_earlier_step_forgets_no_change() -> None:
    """What was begun for step 2 is lost on the way, not used, and sent again when step 3 has been announced."""
    with cluster_of(1) as cluster:
        first, second = (Worker(cluster, index, 2, SYNC_MODE) for index in range(2))

        def num_sent(step: int) -> int:
            return [(header.op, header.step) for header in first.sent].count((Op.PULL_EARLY, step))

        first.channel.loses_request = lambda shard: first.sent[-1].op is Op.PULL_EARLY and first.sent[-1].step == 2
        first.step(one(1), coming=first.expect(one(5), before=one(1)))
        second.step(one(2))
        coming = first.expect(one(7), before=one(3))
        rows = first.prefetch(one(3), coming=coming)
        wait_until(lambda: num_sent(3) > 0)
        first.channel.loses_request = lambda shard: False
        before = num_sent(2)
        wait_until(lambda: num_sent(2) > before)
        second.step(one(7))
        first.update(one(3), rows)
        assert first.prefetch(one(7), coming)[ONE.name].tobytes() == second.pull(one(7))[ONE.name].tobytes()


# Errors


NAN = {ONE.name: np.full((1, DIM), np.nan, np.float32)}


def test_a_refused_push_is_raised_by_the_next_step() -> None:
    with cluster_of(1) as cluster:
        worker = Worker(cluster)
        coming = worker.expect(one(1, 2), before=one(1))
        before = worker.prefetch(one(1), coming=coming)
        worker.update(one(1), NAN)
        with pytest.raises(PushRefused, match=r"'ahead\.one'"):
            worker.prefetch(one(1, 2), coming)
        assert worker.step(one(1, 2))[ONE.name][0].tobytes() == before[ONE.name].tobytes()


@pytest.mark.parametrize("call", ["prefetch", "drain", "update"])
def test_a_refused_push_is_raised_without_need_of_its_rows(call: str) -> None:
    with cluster_of(1) as cluster:
        worker = Worker(cluster)
        worker.prefetch(one(1), coming=worker.expect(one(2), before=one(1)))
        worker.update(one(1), NAN)
        with pytest.raises(PushRefused, match=r"'ahead\.one'"):
            if call == "prefetch":
                worker.prefetch(one(3), coming=worker.expect(one(4), before=one(3)))
            elif call == "update":
                worker.update(one(3), {ONE.name: np.zeros((1, DIM), np.float32)})
            else:
                getattr(worker.training, call)()


@pytest.mark.parametrize("transport", ["unix", "embedded"])
def test_abandoned_early_rows_hide_no_refused_push(transport: str) -> None:
    with client_over(transport, (ONE,), QUICK, 2) as (client, placement):
        deduplicator = Deduplicator(placement)
        lookups = SuccessiveLookups(deduplicator, (ONE,))
        training = PserverTraining(client, deduplicator, ASYNC_MODE, 1)
        coming = lookups.announce(one(2, 3), one(1, 2))
        (present,) = lookups.of(one(1, 2)).values()
        training.prefetch([present.rows], None, coming)
        training.update([present.rows._replace(values=np.full((2, DIM), np.nan, np.float32))], [], 1.0)
        training.abandon_early(coming)
        assert coming.batches == {}
        with pytest.raises(PushRefused, match=r"'ahead\.one'"):
            training.drain()
        training.drain()


def test_after_a_step_that_was_refused_rows_are_pulled() -> None:
    """With dense values the update itself waits for the answer, and raises: the rows with it never came."""
    with cluster_of(2) as cluster:
        worker = Worker(cluster)
        worker.client.assign_dense(DENSE, np.zeros(5, np.float32))
        batch = one(*range(20))
        coming = worker.expect(batch, before=batch)
        before = worker.prefetch(batch, coming=coming)
        with pytest.raises(PushRefused):
            worker.update(batch, before, dense=np.full(5, np.nan, np.float32))
        after = worker.prefetch(batch, coming)
        assert after[ONE.name].tobytes() == worker.pull(batch)[ONE.name].tobytes()


def test_rows_whose_early_pull_failed_are_pulled_at_their_step(monkeypatch: pytest.MonkeyPatch) -> None:
    with cluster_of(1) as cluster:
        worker = Worker(cluster)
        coming = worker.expect(one(7), before=one(1))
        with monkeypatch.context() as failing, pytest.raises(PushRefused):
            failing.setattr(worker.client, "start_pull", refuse)
            worker.prefetch(one(1), coming=coming)
        worker.update(one(1), worker.pull(one(1)))
        assert worker.prefetch(one(7), coming)[ONE.name].tobytes() == worker.pull(one(7))[ONE.name].tobytes()


def refuse(*_: object, **__: object) -> None:
    raise PushRefused("of an earlier step")


@pytest.mark.guarantee("A8")
@pytest.mark.parametrize("mode", ALONE)
def test_rows_of_a_restarted_pserver_are_pulled_plainly(mode: Mode, monkeypatch: pytest.MonkeyPatch) -> None:
    with cluster_of(2) as cluster:
        worker = Worker(cluster, mode=mode)
        coming = worker.expect(one(2, 3), before=one(1, 2))
        worker.step(one(1, 2), coming=coming)
        worker.client.flush()
        monkeypatch.setattr(type(worker.client), "num_rejoins", 1)
        num_before = worker.client.num_pulled_rows
        rows = worker.prefetch(one(2, 3), coming)
        assert worker.client.num_pulled_rows == num_before + 2
        assert rows[ONE.name].tobytes() == worker.pull(one(2, 3))[ONE.name].tobytes()
