from __future__ import annotations

import mmap
import threading
import weakref

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fleet_sparse.core.criteria import Criterion
from fleet_sparse.core.ids import hash_ids
from fleet_sparse.core.initializer import uniform
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.errors import SnapshotError
from fleet_sparse.pserver.storage import cow_view as capture_module
from fleet_sparse.pserver.storage.table_store import TableStore
from fleet_sparse.snapshot.rows import Rows
from support.cow_views import Row, arranged, by_id, everything

# Without state, with one and two; row and state in one block, and apart.
KINDS = [("sgd", 3), ("adagrad", 3), ("adam", 3), ("sgd", 17), ("adagrad", 17), ("adam", 17)]


def spec_of(rule_name="adagrad", dim=3):
    return TableSpec(name="C1", dim=dim, rule=rule_name, initializer=uniform(-0.5, 0.5), seed=3)


def push(store, ids, value=1.0, step=1):
    return store.push(np.array(ids, np.int64), np.full((len(ids), store.spec.dim), value, np.float32), 0.1, step)


@pytest.fixture
def open_store():
    stores = []

    def opened(*kind, **options):
        stores.append(TableStore(spec_of(*kind), **options))
        return stores[-1]

    yield opened
    for store in stores:
        store.close()


@pytest.fixture
def store(open_store):
    store = open_store()
    push(store, range(100))
    return store


def captured(capture):
    rows = capture.copy(0, capture.num_rows)
    capture.end(kept=True)
    return by_id(rows)


# Against a model.

some_ids = st.integers(-40, 40) | st.sampled_from([-(2**63), 2**63 - 1]) | st.integers(-(2**63), 2**63 - 1)
batches = st.lists(some_ids, max_size=30, unique=True)


class CaptureMachine(RuleBasedStateMachine):
    """A store beside a dict of its rows; what they are after a push is asked of another store, of these rows alone."""

    @initialize(kind=st.sampled_from(KINDS), huge_pages=st.booleans())
    def open(self, kind, huge_pages):
        self.spec = spec_of(*kind)
        self.store = TableStore(self.spec, huge_pages=huge_pages)
        self.rows, self.changed, self.removed, self.days, self.step = {}, set(), set(), 0, 0
        self.capture = None

    @property
    def today(self):
        return self.days or None

    def bytes_of(self, ids):
        """Rows and states of the model, of ids that have one."""
        rows = np.frombuffer(b"".join(self.rows[id_].row for id_ in ids), np.float32)
        states = np.frombuffer(b"".join(self.rows[id_].state for id_ in ids), np.float32)
        num_states = self.spec.update_rule.num_states
        return rows.reshape(len(ids), self.spec.dim), states.reshape(len(ids), num_states, self.spec.dim)

    def pushed(self, ids, change):
        """Does `change` to the store, and finds out what it is to do."""
        other = TableStore(self.spec)
        known = [id_ for id_ in ids if id_ in self.rows]
        other.load(Rows.of(np.array(known, np.int64), *self.bytes_of(known)))
        change(other)
        after = everything(other)
        other.close()
        change(self.store)
        self.rows |= {id_: row._replace(last_day=self.today) for id_, row in after.items()}
        self.changed |= set(ids)

    @rule(ids=batches, seed=st.integers(0, 2**32))
    def push(self, ids, seed):
        self.step += 1
        grads = np.random.default_rng(seed).standard_normal((len(ids), self.spec.dim)).astype(np.float32)
        self.pushed(ids, lambda store: store.push(np.array(ids, np.int64), grads, 0.1, self.step))

    @rule(start=st.integers(-3000, 3000), count=st.integers(1, 4000))
    def push_many(self, start, count):
        self.step += 1
        ids, grads = np.arange(start, start + count), np.ones((count, self.spec.dim), np.float32)
        self.pushed(ids.tolist(), lambda store: store.push(ids, grads, 0.1, self.step))

    @rule(ids=batches, value=st.floats(-2, 2, width=32))
    def set_rows(self, ids, value):
        rows = np.full((len(ids), self.spec.dim), value, np.float32)
        self.pushed(ids, lambda store: store.set_rows(np.array(ids, np.int64), rows))

    @rule(ids=batches, value=st.floats(-2, 2, width=32), day=st.integers(0, 9))
    def load(self, ids, value, day):
        rows = np.full((len(ids), self.spec.dim), value, np.float32)
        states = np.full((len(ids), self.spec.update_rule.num_states, self.spec.dim), value, np.float32)
        day = min(day, self.days)
        columns = {"last_update_day": np.full(len(ids), day, np.uint16)} if self.days else {}
        self.store.load(Rows.of(np.array(ids, np.int64), rows, states, **columns))
        last_day = day if self.days else None
        for id_, row, state in zip(ids, rows, states, strict=True):
            self.rows[id_] = Row(row.tobytes(), state.tobytes(), last_day)
        self.changed |= self.removed & set(ids)

    @precondition(lambda self: self.capture is None)
    @rule(ids=batches, part=st.sampled_from([0, 2, 3]))
    def remove(self, ids, part):
        ids = ids + [id_ for id_ in self.rows if part and id_ % part]
        gone = set(ids) & set(self.rows)
        assert self.store.remove(np.array(ids, np.int64)) == len(gone)
        self.forget(gone)

    @precondition(lambda self: self.capture is None)
    @rule(max_unseen_days=st.integers(0, 3))
    def shrink(self, max_unseen_days):
        gone = {id_ for id_, row in self.rows.items() if self.days - (row.last_day or 0) > max_unseen_days}
        judged = self.store.judge([Criterion("unseen_days", max_unseen_days)])
        assert sorted(self.store.shrink(judged).tolist()) == sorted(gone)
        self.forget(gone)

    def forget(self, gone):
        for id_ in gone:
            del self.rows[id_]
        self.changed -= gone
        self.removed |= gone

    @precondition(lambda self: self.capture is None)
    @rule()
    def end_day(self):
        self.store.end_day()
        if self.days == 0:
            self.rows = {id_: row._replace(last_day=0) for id_, row in self.rows.items()}
        self.days += 1

    @precondition(lambda self: self.capture is None)
    @rule(only_changed=st.booleans())
    def begin_capture(self, only_changed):
        self.capture = self.store.capture(only_changed=only_changed)
        self.expected = {id_: row for id_, row in self.rows.items() if id_ in self.changed or not only_changed}
        self.to_save, self.changed, self.removed_then, self.removed = self.changed, set(), self.removed, set()
        self.more, self.is_arranged, self.num_copied = True, False, 0
        assert self.capture.num_rows == len(self.expected)
        assert self.capture.num_days == self.days
        assert sorted(self.capture.removed.tolist()) == sorted(self.removed_then)

    @precondition(lambda self: self.capture and self.more)
    @rule(max_segments=st.integers(1, 1024))
    def collect(self, max_segments):
        self.more = self.capture.collect(max_segments)

    @precondition(lambda self: self.capture and not self.more and not self.is_arranged)
    @rule()
    def arrange(self):
        self.capture.arrange()
        self.is_arranged = True
        assert sorted(self.capture.ids.tolist()) == sorted(self.expected)
        assert (np.diff(hash_ids(self.capture.ids, self.spec.salt)) > 0).all() or len(self.expected) < 2

    @precondition(lambda self: self.capture and self.is_arranged)
    @rule(count=st.integers(0, 2000))
    def copy(self, count):
        end = min(self.num_copied + count, self.capture.num_rows)
        found = by_id(self.capture.copy(self.num_copied, end))
        assert list(found) == self.capture.ids[self.num_copied : end].tolist()
        assert found == {id_: self.expected[id_] for id_ in found}
        self.num_copied = end

    @precondition(lambda self: self.capture)
    @rule(kept=st.booleans(), early=st.sampled_from([False, False, True]))
    def end(self, kept, early):
        if not early:
            self.finish()
        self.capture.end(kept=kept)
        if not kept:
            self.changed |= self.to_save
            self.removed |= self.removed_then
        self.capture = None

    @invariant()
    def is_the_model(self):
        if not hasattr(self, "store"):
            return
        assert self.store.num_rows == len(self.rows)
        if self.capture is None:
            assert everything(self.store) == self.rows
        elif self.rows:
            ids = list(self.rows)
            rows = np.empty((len(ids), self.spec.dim), np.float32)
            self.store.pull(np.array(ids, np.int64), rows)
            assert rows.tobytes() == self.bytes_of(ids)[0].tobytes()

    def finish(self):
        while self.more:
            self.collect(1000)
        if not self.is_arranged:
            self.arrange()
        self.copy(len(self.expected))

    def teardown(self):
        if not hasattr(self, "store"):
            return
        if self.capture is not None:
            self.end(kept=True, early=False)
        self.begin_capture(True)
        self.finish()
        self.store.close()


TestCaptureAgainstItsModel = CaptureMachine.TestCase
TestCaptureAgainstItsModel.settings = settings(
    max_examples=40, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


# One fact each.


def test_released_view_keeps_no_pre_images() -> None:
    store = TableStore(spec_of("sgd", 3))
    ids = np.arange(100)
    store.push(ids, np.ones((100, 3), np.float32), 0.1, 1)
    capture = arranged(store.capture())
    store.push(ids[:50], np.ones((50, 3), np.float32), 0.1, 2)
    assert capture.num_bytes > 0
    capture.copy(0, 100)
    capture.release()
    assert capture.num_bytes == 0
    store.push(ids[:70], np.ones((70, 3), np.float32), 0.1, 3)
    assert capture.num_bytes == 0
    with pytest.raises(ValueError, match="'C1'"):
        capture.copy(0, 1)
    capture.end(kept=True)
    assert store.capture(only_changed=True).num_rows == 70
    store.close()


def test_capture_of_an_empty_store_has_no_rows(open_store):
    store = open_store("adam", 17)
    capture = arranged(store.capture())
    rows = capture.copy(0, 0)
    assert [rows.ids.shape, rows.rows.shape, rows.states.shape] == [(0,), (0, 17), (0, 2, 17)]


def test_ids_of_so_many_rows_at_most_are_collected_at_once(open_store, monkeypatch):
    monkeypatch.setattr(capture_module, "COLLECT_ROWS", 1000)
    store = open_store()
    push(store, range(20_000))
    capture, num_calls = store.capture(), 1
    while capture.collect():
        num_calls += 1
    assert num_calls >= 20
    capture.arrange()
    assert sorted(captured(capture)) == list(range(20_000))


def test_copied_arrays_are_the_callers(store):
    capture = arranged(store.capture())
    rows = capture.copy(0, 100)
    rows.ids[:], rows.rows[:], rows.states[:] = 7, 7, 7
    assert sorted(capture.ids.tolist()) == list(range(100))
    capture.end(kept=True)
    assert 7 not in store.capture().removed


def test_another_thread_arranges_ids_while_rows_are_pushed(open_store):
    store = open_store("adam", 17)
    push(store, range(50_000))
    before = everything(store)
    capture = store.capture()
    while capture.collect():
        pass
    arranging = threading.Thread(target=capture.arrange)
    arranging.start()
    for step in range(2, 7):
        push(store, range(step * 100, 60_000, step), step, step)
    arranging.join()
    assert captured(capture) == before


def test_large_view_has_two_parts_in_the_order_of_hashes(open_store, monkeypatch):
    monkeypatch.setattr(capture_module, "SPLIT_FROM_ROWS", 1000)
    store = open_store()
    push(store, range(20_000))
    before, capture, parts, ids = everything_in_parts(store), store.capture(), [], []
    while capture.has_more:
        push(store, range(10_000 * len(parts), 30_000), 2.0, 2)
        arranged(capture)
        parts.append(by_id(capture.copy(capture.part.start, capture.part.stop)))
        ids.extend(capture.ids.tolist())
    assert len(parts) == 2
    assert parts[0] | parts[1] == before
    assert ids == [*parts[0], *parts[1]]
    assert (np.diff(hash_ids(np.array(ids), store.spec.salt)) > 0).all()


def everything_in_parts(store):
    capture, found = store.capture(), {}
    while capture.has_more:
        arranged(capture)
        found |= by_id(capture.copy(capture.part.start, capture.part.stop))
    capture.end(kept=False)
    return found


@pytest.mark.parametrize(("num_changed", "max_bytes_per_row"), [(200_000, 10.2), (150_000, 10.2), (100_000, 10)])
def test_ids_of_a_view_take_few_bytes_a_row(open_store, monkeypatch, num_changed, max_bytes_per_row):
    monkeypatch.setattr(capture_module, "SPLIT_FROM_ROWS", 1000)
    store = open_store("sgd", 1)
    push(store, range(200_000))
    store.capture().end(kept=True)
    push(store, range(num_changed))
    capture = store.capture(only_changed=True)
    while capture.has_more:
        arranged(capture)
    assert capture.num_id_bytes <= max_bytes_per_row * 200_000


# What changed.


def test_what_is_removed_while_a_snapshot_is_loaded_is_not_told(store):
    store.capture().end(kept=True)
    store.remove(np.array([7]), noted=False)
    assert store.capture().removed.tolist() == []


# Memory.


@pytest.fixture
def mapped(monkeypatch):
    """Weak references to the arrays that captures take."""
    taken, take = [], capture_module.mapped_zeros

    def remembered(*args, **options):
        array = take(*args, **options)
        taken.append(weakref.ref(array))
        return array

    monkeypatch.setattr(capture_module, "mapped_zeros", remembered)
    return taken


ROW_BYTES = 4 * (3 + 3)


def test_rows_that_are_pushed_take_memory_until_it_ends(store):
    capture = store.capture()
    assert capture.num_bytes == 0
    push(store, [1, 2, 300])
    push(store, [2, 3])
    assert capture.num_bytes == 3 * ROW_BYTES
    capture.end(kept=True)
    assert capture.num_bytes == 0


def test_rows_that_did_not_change_take_none_in_a_delta(store):
    store.capture().end(kept=True)
    push(store, [1])
    capture = store.capture(only_changed=True)
    push(store, range(100))
    assert capture.num_bytes == ROW_BYTES


@pytest.mark.parametrize("kept", [False, True])
def test_memory_is_given_back_at_the_end(store, mapped, kept):
    capture = arranged(store.capture())
    assert any(array() is not None for array in mapped)
    capture.end(kept=kept)
    assert not any(array() is not None for array in mapped)


def test_closed_store_ends_its_capture(mapped):
    store = TableStore(spec_of())
    push(store, [1])
    capture = store.capture()
    store.close()
    assert not any(array() is not None for array in mapped)
    with pytest.raises(ValueError, match="'C1'"):
        capture.collect()
    capture.end(kept=False)


def test_system_that_grants_no_memory_leaves_no_capture_behind(store, monkeypatch):
    def refuse(*_, **__):
        raise OSError(12, "Cannot allocate memory")

    store.capture().end(kept=True)
    push(store, [1])
    with monkeypatch.context() as patched:
        patched.setattr(mmap, "mmap", refuse)
        with pytest.raises(MemoryError, match="400 bytes"):
            store.capture()
    assert store.capture(only_changed=True).num_rows == 1


# Too much is pushed.

FAILED = "FLEET_SPARSE_MAX_PRE_IMAGE_BYTES=240"


@pytest.fixture
def small_store(open_store):
    store = open_store(max_pre_image_bytes=10 * ROW_BYTES)
    push(store, range(100))
    return store


def test_as_many_rows_as_there_is_room_for_may_be_pushed(small_store):
    before = everything(small_store)
    capture = small_store.capture()
    push(small_store, range(10))
    push(small_store, range(10))
    assert captured(arranged(capture)) == before


@pytest.mark.parametrize(
    "call", [lambda c: c.collect(), lambda c: c.copy(0, 1), lambda c: c.arrange(), lambda c: c.end(kept=True)]
)
def test_view_fails_when_pre_images_do_not_fit(small_store, call):
    capture = arranged(small_store.capture())
    push(small_store, range(11))
    with pytest.raises(SnapshotError, match=FAILED):
        call(capture)


def test_push_that_fails_a_capture_is_done_as_any(small_store, open_store):
    plain = open_store()
    push(plain, range(100))
    small_store.capture()
    for store in (small_store, plain):
        push(store, range(50, 150), 2.0, 2)
    assert everything(small_store) == everything(plain)


def test_failed_view_frees_its_memory_and_saved_nothing(small_store, mapped):
    small_store.capture().end(kept=True)
    push(small_store, [1])
    capture = small_store.capture()
    push(small_store, range(20))
    assert not any(array() is not None for array in mapped)
    assert capture.num_bytes == 0
    capture.end(kept=False)
    assert small_store.capture(only_changed=True).num_rows == 20


# Refusals.


def test_second_capture_is_refused(store):
    store.capture()
    with pytest.raises(ValueError, match="'C1'"):
        store.capture()


@pytest.mark.parametrize(
    "call",
    [
        lambda s: s.remove(np.array([1])),
        lambda s: s.judge([Criterion("unseen_days", 1)]),
        lambda s: s.shrink(np.zeros(s.num_rows, np.int16)),
        TableStore.end_day,
        lambda s: s.set_num_days(3),
    ],
)
def test_store_refuses_to_move_rows_while_a_view_is_open(store, call):
    capture = store.capture()
    with pytest.raises(ValueError, match="'C1'"):
        call(store)
    assert (store.num_rows, store.num_days) == (100, 0)
    capture.end(kept=True)
    call(store)


@pytest.mark.parametrize(
    "call",
    [
        lambda c: c.arrange(),
        lambda c: c.ids,
        lambda c: c.copy(0, 1),
        lambda c: arranged(c).copy(-1, 5),
        lambda c: arranged(c).copy(0, 101),
        lambda c: arranged(c).copy(5, 4),
        lambda c: (arranged(c).copy(0, 50), c.copy(40, 60)),
        lambda c: (c.end(kept=True), c.collect()),
        lambda c: (arranged(c).end(kept=True), c.copy(0, 1)),
    ],
    ids=range(9),
)
def test_call_out_of_turn_is_refused(store, call):
    with pytest.raises(ValueError, match="'C1'"):
        call(store.capture())


def test_end_after_the_end_does_nothing(store):
    store.capture().end(kept=True)
    push(store, [3])
    capture = store.capture()
    capture.end(kept=False)
    capture.end(kept=True)
    assert store.capture(only_changed=True).num_rows == 1
