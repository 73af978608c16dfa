"""The straight path against the readable one: the same bytes of replies, and the same tables, bit by bit."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet_sparse.core.initializer import constant, uniform
from fleet_sparse.core.mode import ASYNC, SYNC, Mode
from fleet_sparse.core.rules import RULES
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.errors import ErrorCode
from fleet_sparse.pserver.engine.plain_frames import MAX_REMEMBERED_CLIENTS
from fleet_sparse.pserver.engine.shard import Shard
from fleet_sparse.pserver.net.requests import deferred_answers
from fleet_sparse.pserver.storage.table_store import TableStore
from fleet_sparse.pserver.tables.row_limit import MAX_UNCHECKED_IDS, NO_LIMITS, MemoryUse, RowLimit, RowLimits
from fleet_sparse.wire.decode import decode
from fleet_sparse.wire.encode import encode
from fleet_sparse.wire.frame_format import UNCHECKED_COLUMNS, Block, Frame, Op
from fleet_sparse.wire.row_dtype import RowDtype, for_frame
from support.cow_views import everything
from support.frames import sealed
from support.saves import store_of
from support.shards import DENSE, READS, SGD, FrameClient, ids_of, make_shard, pull, push
from support.steps import Worker, join
from support.straight import ReadableAnswers, StraightAnswers

MAX_BYTES = 1 << 20
ADAGRAD = TableSpec(name="adagrad", dim=16, rule="adagrad", initializer=uniform(-1.0, 1.0), seed=3)
ADAM = TableSpec(name="adam", dim=17, rule="adam", initializer=constant(0.25))
ODD = TableSpec(name="odd", dim=3, rule="adam", initializer=uniform(-0.5, 0.5), seed=9)
SPECS = (SGD, ADAGRAD, ADAM, ODD)


class Twins:
    """Two shards that get the same requests, one of them by its straight path."""

    def __init__(self, *specs: TableSpec, num_shards: int = 1, row_limits: RowLimits = NO_LIMITS) -> None:
        self.specs = specs
        self.shards = [make_shard(*specs, num_shards=num_shards, row_limits=row_limits) for _ in range(2)]
        self.client = FrameClient(self.shards[0])
        self.straight = StraightAnswers(self.shards[0], MAX_BYTES)
        self._readable = ReadableAnswers(self.shards[1], MAX_BYTES)

    def ask(self, parts: Sequence[Any]) -> Frame:
        """Sends both a request; returns their reply, which is the same."""
        replies = [each.answer(parts) for each in (self.straight, self._readable)]
        assert replies[0] == replies[1]
        late = [[[*map(bytes, each.parts)] for each in deferred_answers(shard)] for shard in self.shards]
        assert late[0] == late[1]
        return decode(replies[0], max_bytes=MAX_BYTES)

    def send(self, op: Op, *blocks: Block, **header: Any) -> Frame:
        """Sends both the next request of a client."""
        reply = self.ask(encode(self.client.frame(op, *blocks, **header)))
        if op is not Op.PULL and reply.error is None:
            self.client.seq = max(self.client.seq, reply.header.push_seq)
        return reply

    def each(self, task: Callable[[Shard], Any]) -> list[Any]:
        """Returns what a task returns for each shard."""
        return [task(shard) for shard in self.shards]

    def check(self) -> None:
        """Checks that both shards have the same content."""
        one, other = self.each(content_of)
        assert one == other

    def close(self) -> None:
        for shard in self.shards:
            shard.close()


def content_of(shard: Shard) -> object:
    """Returns rows, states, days, dirty rows, optimizer steps, watermarks and counters of a shard."""
    tables = []
    for entry in shard.tables.values():
        if not isinstance(entry.spec, TableSpec):
            continue
        store = store_of(shard, entry.spec)
        view = store.capture(only_changed=True)
        num_changed = view.num_rows
        view.end(kept=False)
        tables.append((entry.spec.name, num_changed, store.num_days, everything(store)))
    counters = shard.counters
    numbers = counters.num_requests, counters.num_pulled_rows, counters.num_pushed_rows
    return tables, shard.states(), shard.ledger.watermarks(), shard.complete_step, numbers


@pytest.fixture
def twins() -> Iterator[Twins]:
    with closing(Twins(*SPECS)) as made:
        yield made


def gradients(spec: TableSpec, num_rows: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).normal(size=(num_rows, spec.dim)).astype(np.float32)


def steps_of(twins: Twins, num_steps: int, num_ids: int, **header: Any) -> None:
    """Pulls and pushes some ids of all tables."""
    rng = np.random.default_rng(num_ids)
    for step in range(1, num_steps + 1):
        ids = [rng.choice(3 * num_ids + 1, num_ids, replace=False) for _ in twins.specs]
        for op, make in ((Op.PULL, pull), (Op.PUSH, None)):
            blocks = []
            for number, (spec, of_table) in enumerate(zip(twins.specs, ids, strict=True)):
                if make is not None:
                    blocks.append(make(spec, of_table))
                else:
                    grads = gradients(spec, num_ids, step)
                    rate = 0.5 / (1 + number)  # tables of one rule have different ones
                    blocks.append(push(spec, of_table, grads, learning_rate=rate, optimizer_step=step))
            reply = twins.send(op, *blocks, **header)
            assert reply.error is None


# What is plain


@pytest.mark.parametrize("flags", [0, UNCHECKED_COLUMNS], ids=["all-checked", "columns-unchecked"])
@pytest.mark.parametrize("num_ids", [0, 1, 7, 900])
def test_plain_steps_are_straight_and_the_same(twins: Twins, num_ids: int, flags: int) -> None:
    steps_of(twins, 4, num_ids, flags=flags)
    assert all(twins.straight.is_straight)
    twins.check()


@pytest.mark.parametrize("rule", [name for name, rule in RULES.items() if rule.kernel is not None])
def test_every_rule_trains_the_same_rows(rule: str) -> None:
    with closing(Twins(TableSpec(name="of-a-rule", dim=5, rule=rule, initializer=uniform(-1.0, 1.0)))) as twins:
        steps_of(twins, 4, 50)
        assert all(twins.straight.is_straight)
        twins.check()


def test_thirty_tables_in_one_frame_are_straight() -> None:
    specs = [replace(ADAGRAD, name=f"table-{number}", dim=1 + number % 9) for number in range(30)]
    with closing(Twins(*specs)) as twins:
        steps_of(twins, 3, 20)
        assert all(twins.straight.is_straight)
        twins.check()


def test_tables_that_grow_in_a_frame_keep_their_dirty_rows(twins: Twins) -> None:
    steps_of(twins, 6, 3000)  # bitmaps move, and segments of the index grow
    assert all(twins.straight.is_straight)
    twins.check()


def test_nearly_full_tables_are_left_to_the_readable_path() -> None:
    max_rows, num_ids = MAX_UNCHECKED_IDS + 20_000, 10_000
    with closing(Twins(SGD, row_limits=RowLimits(max_rows, 0))) as twins:
        for begin in range(0, max_rows + num_ids, num_ids):
            ids = np.arange(begin, begin + num_ids)
            assert twins.send(Op.PUSH, push(SGD, ids, gradients(SGD, num_ids))).error is None
        were_straight = twins.straight.is_straight
        twins.check()
        assert twins.shards[0].states()[0].num_rows == max_rows
        assert were_straight[0]
        assert not were_straight[-1]


def test_tables_are_straight_again_once_memory_is_free() -> None:
    used, now = [0.95], [0.0]
    with closing(Twins(SGD)) as twins:
        for shard in twins.shards:
            table = shard.tables[SGD.table_id].table
            memory = MemoryUse(lambda: used[0], lambda: now[0], lambda: 1 << 40)
            table.limit = RowLimit(NO_LIMITS, 4, "table", memory, lambda: now[0])  # type: ignore[attr-defined]
            table.store.end_day()  # type: ignore[attr-defined]  # its limit is read again
        steps_of(twins, 2, 40)
        used[0], now[0] = 0.5, 10.0
        steps_of(twins, 3, 40)
        were_straight = twins.straight.is_straight
        twins.check()
    assert not were_straight[1]
    assert were_straight[-2:] == [True, True]


def test_pushes_count_for_the_day_and_the_next_delta(twins: Twins) -> None:
    steps_of(twins, 2, 40)
    for shard in twins.shards:
        for spec in SPECS:
            store = store_of(shard, spec)
            store.end_day()
            store.capture().end(kept=True)
    steps_of(twins, 2, 30)
    assert all(twins.straight.is_straight)
    twins.check()


def test_a_push_sent_again_is_applied_once(twins: Twins) -> None:
    frame = encode(twins.client.frame(Op.PUSH, push(SGD, ids_of(1, 2), np.ones((2, 2), np.float32))))
    for _ in range(3):
        assert twins.ask(frame).header.push_seq == 1
    assert twins.straight.is_straight == [True, False, False]
    twins.check()


@pytest.mark.parametrize("mode", [Mode(SYNC), Mode(ASYNC, max_step_lag=1)], ids=["sync", "lag"])
def test_steps_of_a_single_worker_are_straight(twins: Twins, mode: Mode) -> None:
    worker = Worker(twins.shards[0], 0)
    for shard in twins.shards:
        join(Worker(shard, 0), 1, mode, begins_job=True)
    for step in range(1, 6):
        twins.ask(encode(worker.frame(Op.PULL, pull(ADAGRAD, ids_of(step, 7)))))
        block = push(ADAGRAD, ids_of(step, 7), gradients(ADAGRAD, 2, step), optimizer_step=step)
        if mode.kind == SYNC:
            block.gradient_scale = 512.0  # the weight of a contribution
        reply = twins.ask(encode(worker.frame(Op.PUSH, block)))
        assert (reply.header.push_seq, reply.header.step) == (step, step)
    assert all(twins.straight.is_straight)
    twins.check()


def test_pushes_of_two_sync_workers_are_staged_and_merged(twins: Twins) -> None:
    workers = [Worker(twins.shards[0], index) for index in range(2)]
    for shard in twins.shards:
        for index in range(2):
            join(Worker(shard, index), 2, Mode(SYNC), begins_job=index == 0)
    for step in range(1, 4):
        for worker in workers:
            twins.ask(encode(worker.frame(Op.PULL, pull(ODD, ids_of(1, 2)))))
        for worker in workers:
            twins.ask(encode(worker.frame(Op.PUSH, push(ODD, ids_of(1, 2), gradients(ODD, 2, step)))))
    assert twins.shards[0].complete_step == 3
    twins.check()


# Rows that were just pulled


@pytest.mark.parametrize("num_new", [0, 3])
def test_a_push_of_pulled_ids_changes_their_rows(twins: Twins, num_new: int) -> None:
    twins.send(Op.PUSH, push(ADAM, np.arange(20), gradients(ADAM, 20)))
    ids = np.arange(20 - 5, 20 + num_new)[::-1].copy()
    for step in (2, 3):
        twins.send(Op.PULL, pull(ADAM, ids), pull(SGD, ids))
        grads = gradients(ADAM, len(ids), step)
        twins.send(
            Op.PUSH, push(ADAM, ids, grads, optimizer_step=step), push(SGD, ids, np.ones((len(ids), 2), np.float32))
        )
    assert all(twins.straight.is_straight)
    twins.check()


def test_rows_that_another_client_creates_meanwhile_stay(twins: Twins) -> None:
    ids, other = ids_of(1, 2, 3), FrameClient(twins.shards[0], b"another client .")
    twins.send(Op.PULL, pull(ODD, ids))
    twins.ask(encode(other.frame(Op.PUSH, push(ODD, ids_of(2), gradients(ODD, 1)))))
    twins.send(Op.PUSH, push(ODD, ids, gradients(ODD, 3)))
    assert all(twins.straight.is_straight)
    twins.check()


def test_rows_that_moved_after_a_pull_are_found_again(twins: Twins) -> None:
    twins.send(Op.PUSH, push(ADAGRAD, np.arange(50), gradients(ADAGRAD, 50)))
    ids = np.arange(30, 50)
    twins.send(Op.PULL, pull(ADAGRAD, ids))
    twins.each(lambda shard: store_of(shard, ADAGRAD).remove(np.arange(35)))
    twins.send(Op.PUSH, push(ADAGRAD, ids, gradients(ADAGRAD, 20)))
    assert all(twins.straight.is_straight)
    twins.check()


@pytest.mark.parametrize("num_clients", [12, MAX_REMEMBERED_CLIENTS + 5])
def test_many_clients_push_the_rows_that_they_pulled(twins: Twins, num_clients: int) -> None:
    clients = [FrameClient(twins.shards[0], bytes([1 + number]) * 16) for number in range(num_clients)]
    for _ in range(2):
        for number, client in enumerate(clients):
            twins.ask(encode(client.frame(Op.PULL, pull(SGD, ids_of(100 + number, 1)))))
        for number, client in enumerate(clients):
            twins.ask(encode(client.frame(Op.PUSH, push(SGD, ids_of(100 + number, 1), ONES))))
            client.seq += 1
    assert all(twins.straight.is_straight)
    assert store_of(twins.shards[0], SGD).num_rows == num_clients + 1
    twins.check()


# What is not


@pytest.mark.parametrize(
    "block",
    [
        pull(SGD, ids_of(1), dtype=RowDtype.BFLOAT16),
        pull(SGD, ids_of(1), optimizer_step=1),
        pull(replace(SGD, name="unknown"), ids_of(1)),
        pull(SGD, ids_of(1), schema_hash=5),
        pull(replace(SGD, dim=3), ids_of(1)),
        pull(DENSE, count=8),
    ],
    ids=["bfloat16", "presence", "table", "schema", "dim", "dense"],
)
def test_other_pulls_are_left_to_the_readable_path(twins: Twins, block: Block) -> None:
    for shard in twins.shards:
        shard.add_table(DENSE)
    twins.send(Op.PULL, pull(ADAM, ids_of(1)), block)
    assert twins.straight.is_straight == [False]
    twins.check()


ONES = np.ones((2, 2), np.float32)


@pytest.mark.parametrize(
    ("block", "code"),
    [
        (push(SGD, ids_of(5, 5), ONES), None),
        (push(SGD, ids_of(5, 6), ONES, gradient_scale=0.5), None),
        (push(SGD, ids_of(5, 6), for_frame(ONES, RowDtype.BFLOAT16), dtype=RowDtype.BFLOAT16), None),
        (push(SGD, ids_of(5, 6), ONES * np.float32(np.nan)), ErrorCode.NOT_FINITE),
        (push(SGD, ids_of(5, 6), ONES, learning_rate=1e300), ErrorCode.NOT_FINITE),
        (push(SGD, ids_of(5, 6), ONES, optimizer_step=0), ErrorCode.MALFORMED),
        (push(READS, ids_of(5, 6), ONES), ErrorCode.SCHEMA),
        (push(ADAM, ids_of(5), gradients(ADAM, 1)), ErrorCode.MALFORMED),
    ],
    ids=["repeated", "scaled", "bfloat16", "nan", "rate", "no-step", "read-only", "table-twice"],
)
def test_other_pushes_are_left_to_the_readable_path(twins: Twins, block: Block, code: ErrorCode | None) -> None:
    for shard in twins.shards:
        shard.add_table(READS)
    reply = twins.send(Op.PUSH, push(ADAM, ids_of(1), gradients(ADAM, 1)), block)
    assert (None if reply.error is None else reply.error.code) is code
    assert twins.straight.is_straight == [False]
    steps_of(twins, 2, 20)
    twins.check()


def test_ids_of_another_shard_are_refused() -> None:
    with closing(Twins(*SPECS, num_shards=2)) as twins:
        ids = np.arange(20)
        codes = {
            twins.send(Op.PULL, pull(SGD, ids)).error.code,  # type: ignore[union-attr]
            twins.send(Op.PUSH, push(SGD, ids, np.ones((20, 2), np.float32))).error.code,  # type: ignore[union-attr]
        }
        assert codes == {ErrorCode.WRONG_SHARD}
        placement = twins.shards[0].placement
        own = ids[placement.shard_of(ids, SGD.salt) == 0]
        twins.send(Op.PUSH, push(SGD, own, np.ones((len(own), 2), np.float32)))
        twins.send(Op.PULL, pull(SGD, own))
        assert twins.straight.is_straight == [False, False, True, True]
        twins.check()


def test_clipped_tables_are_left_to_the_readable_path() -> None:
    for name, value in (("clip_max", 0.5), ("l2_decay", 0.5)):
        with closing(Twins(SGD, replace(SGD, name="other", hyperparameters=((name, value),)))) as twins:
            steps_of(twins, 2, 10)
            assert twins.straight.is_straight == [True, False, True, False]
            twins.check()


# Addresses


def test_pushes_while_a_view_is_open_keep_its_rows(twins: Twins) -> None:
    steps_of(twins, 1, 50)
    before = everything(store_of(twins.shards[0], SGD))
    views = twins.each(lambda shard: store_of(shard, SGD).capture())
    steps_of(twins, 1, 60)
    for view in views:
        while view.collect():
            pass
        view.arrange()
        rows = view.copy(0, view.num_rows)
        assert {id_: row.tobytes() for id_, row in zip(rows.ids.tolist(), rows.rows, strict=True)} == {
            id_: row.row for id_, row in before.items()
        }
        view.end(kept=True)
    steps_of(twins, 1, 60)
    assert twins.straight.is_straight == [True, True, True, False, True, True]
    twins.check()


def test_tables_that_were_replaced_are_found_at_once(twins: Twins) -> None:
    steps_of(twins, 2, 50)
    for shard in twins.shards:
        other = shard.clone_empty()
        for spec in SPECS:
            other.add_table(spec, is_loaded=True)
        store_of(other, SGD).push(ids_of(1, 2), np.ones((2, 2), np.float32), 1.0, 1)
        other_store = store_of(other, SGD)
        shard.swap_in(other)
        assert store_of(shard, SGD) is other_store
    steps_of(twins, 3, 2000)
    assert all(twins.straight.is_straight)
    twins.check()


def test_a_change_of_one_table_finds_the_others_where_they_were(twins: Twins, monkeypatch: pytest.MonkeyPatch) -> None:
    steps_of(twins, 2, 50)
    described: list[str] = []
    stock = TableStore.describe

    def describe(store: TableStore, row: Any) -> bool:
        described.append(store.spec.name)
        return stock(store, row)

    monkeypatch.setattr(TableStore, "describe", describe)
    twins.each(lambda shard: store_of(shard, SGD).end_day())
    steps_of(twins, 2, 50)
    assert described == [SGD.name]
    assert all(twins.straight.is_straight)
    twins.check()


def test_a_table_that_begins_to_train_is_found_at_once() -> None:
    with closing(Twins(READS)) as twins:
        twins.send(Op.PULL, pull(READS, ids_of(1)))
        for shard in twins.shards:
            shard.add_table(SGD)
        twins.send(Op.PUSH, push(SGD, ids_of(1, 2), ONES))
        twins.send(Op.PULL, pull(READS, ids_of(1, 2, 3)), pull(SGD, ids_of(1)))
        assert all(twins.straight.is_straight)
        twins.check()


# Any bytes


@st.composite
def damaged(draw: st.DrawFn) -> tuple[Op, int, int, int, bool]:
    """Op of a request, the part of it that is changed, where, to which byte, and whether it is sealed again."""
    op = draw(st.sampled_from([Op.PULL, Op.PUSH]))
    return op, draw(st.integers(0, 6)), draw(st.integers(0, 400)), draw(st.integers(0, 255)), draw(st.booleans())


@settings(max_examples=400, deadline=None)
@given(st.lists(damaged(), min_size=1, max_size=6))
def test_damaged_frames_get_the_same_replies(sent: list[tuple[Op, int, int, int, bool]]) -> None:
    with closing(Twins(SGD, ODD)) as twins:
        steps_of(twins, 1, 5)
        for op, part, offset, value, is_sealed in sent:
            blocks = (
                [pull(SGD, ids_of(1, 2)), pull(ODD, ids_of(3))]
                if op is Op.PULL
                else [push(SGD, ids_of(1, 2), ONES), push(ODD, ids_of(3), gradients(ODD, 1))]
            )
            parts = [bytearray(each) for each in encode(twins.client.frame(op, *blocks))]
            if part < len(parts) and parts[part]:
                parts[part][offset % len(parts[part])] = value
            reply = twins.ask(sealed(parts) if is_sealed else [bytes(each) for each in parts])
            twins.client.seq = twins.shards[0].ledger.applied(twins.client.client_id)
            assert reply.header.op in (Op.ROWS, Op.ACK, Op.ERROR)
        twins.check()


@pytest.mark.parametrize("op", [Op.PULL, Op.PUSH])
def test_every_number_of_a_head_is_checked_alike(op: Op) -> None:
    with closing(Twins(SGD, ODD)) as twins:
        steps_of(twins, 1, 5)
        make: Any = pull if op is Op.PULL else lambda spec, ids: push(spec, ids, gradients(spec, len(ids)))
        for offset in range(0, 256, 2):
            for value in (0, 1, 0xFFFF):
                twins.client.seq = twins.shards[0].ledger.applied(twins.client.client_id)
                parts = encode(twins.client.frame(op, make(SGD, ids_of(1, 2)), make(ODD, ids_of(3))))
                head = bytearray(parts[0])
                struct.pack_into("<H", head, offset, value)
                twins.ask(sealed([bytes(head), *parts[1:]]))
        twins.check()


def test_setting_switches_the_straight_path_off(monkeypatch: pytest.MonkeyPatch) -> None:
    from fleet_sparse.pserver.net import data_plane
    from fleet_sparse.pserver.net.data_plane import DataPlane

    made: list[Shard] = []
    monkeypatch.setattr(data_plane, "StraightPath", lambda shard, max_bytes: made.append(shard))
    with closing(make_shard(SGD)) as shard:
        DataPlane(shard, max_frame_bytes=MAX_BYTES, straight_path=False).close()
        assert made == []
        DataPlane(shard, max_frame_bytes=MAX_BYTES, straight_path=True).close()
        assert made == [shard]
