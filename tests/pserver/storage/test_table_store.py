from __future__ import annotations

import mmap
import threading
import weakref
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fleet_sparse.core.criteria import Criterion
from fleet_sparse.core.initializer import constant, initial_rows, normal, uniform
from fleet_sparse.core.rules import RULES
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.errors import PushRefused
from fleet_sparse.pserver.storage import virtual_memory
from fleet_sparse.pserver.storage.table_store import MAX_BLOCK_DIM, TableStore
from fleet_sparse.pserver.storage.virtual_memory import HUGE_PAGE_BYTES
from fleet_sparse.snapshot.rows import Rows
from support.cow_views import all_rows, everything
from support.waits import wait_until

EXTREMES = [-(2**63), -(2**63) + 1, -1, 0, 1, 2**63 - 2, 2**63 - 1]
DIMS = [1, 3, MAX_BLOCK_DIM, MAX_BLOCK_DIM + 1]


def spec_of(rule="adagrad", dim=4, **changes):
    return TableSpec(**{"name": "C1", "dim": dim, "rule": rule, "initializer": uniform(-0.5, 0.5), "seed": 3} | changes)


def first_rows(spec, ids):
    return initial_rows(spec.initializer, np.asarray(ids, np.int64), dim=spec.dim, seed=spec.seed, salt=spec.salt)


def pulled(store, ids):
    out = np.full((len(ids), store.spec.dim), np.nan, np.float32)
    store.pull(np.asarray(ids, np.int64), out)
    return out


def pushed(store, ids, grads, learning_rate=0.1, step=1):
    return store.push(np.asarray(ids, np.int64), np.asarray(grads, np.float32), learning_rate, step)


def ids_in(store):
    return sorted(all_rows(store).ids.tolist())


@pytest.fixture
def open_store():
    stores = []

    def opened(spec=None, **options):
        stores.append(TableStore(spec or spec_of(), **options))
        return stores[-1]

    yield opened
    for store in stores:
        store.close()


class Model:
    """A table as a dict of float64 rows, updated lazily."""

    def __init__(self, spec):
        self.spec = spec
        self.rows = {}

    def row(self, id_):
        if id_ in self.rows:
            return self.rows[id_]
        initial = RULES[self.spec.rule].initial_state(dict(self.spec.hyperparameters))
        return first_rows(self.spec, [id_])[0].astype(np.float64), [np.full(self.spec.dim, v) for v in initial]

    def push(self, id_, grad, lr, step):
        p, s = self.rows[id_] = self.row(id_)
        h = dict(self.spec.hyperparameters)
        if self.spec.rule == "sgd":
            p -= lr * grad
        elif self.spec.rule == "adagrad":
            s[0] += grad**2
            p -= lr * grad / (np.sqrt(s[0]) + h["epsilon"])
        else:
            b1, b2 = float(np.float32(h["beta1"])), float(np.float32(h["beta2"]))
            s[0][:] = b1 * s[0] + (1 - b1) * grad
            s[1][:] = b2 * s[1] + (1 - b2) * grad**2
            corrected = np.sqrt(s[1] / (1 - b2**step)) + h["epsilon"]
            p -= lr * s[0] / (1 - b1**step) / corrected


some_ids = st.integers(-(2**63), 2**63 - 1) | st.sampled_from(EXTREMES) | st.integers(-30, 30)
batches = st.lists(some_ids, max_size=40, unique=True)


class StoreMachine(RuleBasedStateMachine):
    @initialize(rule_name=st.sampled_from(["sgd", "adagrad", "adam"]), dim=st.sampled_from(DIMS), huge=st.booleans())
    def open(self, rule_name, dim, huge):
        self.spec = spec_of(rule_name, dim)
        self.store, self.model, self.step = TableStore(self.spec, huge_pages=huge), Model(self.spec), 0

    @rule(ids=batches, seed=st.integers(0, 2**32), lr=st.sampled_from([0.0, 0.01, 0.5]))
    def push(self, ids, seed, lr):
        self.step += 1
        # Away from 0: adagrad and adam divide by the size of small gradients.
        grads = np.random.default_rng(seed).uniform(0.5, 2, (len(ids), self.spec.dim)).astype(np.float32)
        grads *= np.where(seed & 1, 1, -1)
        num_new = pushed(self.store, ids, grads, lr, self.step)
        assert num_new == len(set(ids) - set(self.model.rows))
        for id_, grad in zip(ids, grads.astype(np.float64), strict=True):
            self.model.push(id_, grad, lr, self.step)

    @rule(ids=batches)
    def pull(self, ids):
        expected = np.array([self.model.row(id_)[0] for id_ in ids]).reshape(len(ids), self.spec.dim)
        np.testing.assert_allclose(pulled(self.store, ids), expected, rtol=1e-4, atol=1e-5)

    @rule(count=st.integers(1, 3000), start=st.integers(-(2**62), 2**62))
    def push_many(self, count, start):
        self.step += 1
        ids = np.arange(start, start + count)
        pushed(self.store, ids, np.ones((count, self.spec.dim)), 0.25, self.step)
        for id_ in ids.tolist():
            self.model.push(id_, np.ones(self.spec.dim), 0.25, self.step)

    @rule(ids=batches, value=st.floats(-2, 2, width=32))
    def load(self, ids, value):
        shape = (len(ids), RULES[self.spec.rule].num_states, self.spec.dim)
        rows = np.full((len(ids), self.spec.dim), value, np.float32)
        self.store.load(Rows.of(np.array(ids, np.int64), rows, np.full(shape, abs(value), np.float32)))
        for id_ in ids:
            self.model.rows[id_] = (rows[0].astype(np.float64), list(np.full(shape[1:], abs(float(value)))))

    @rule(num_rows=st.sampled_from([0, 10, 3000, 100_000]))
    def reserve(self, num_rows):
        self.store.reserve(num_rows)

    @rule(ids=batches, value=st.floats(-2, 2, width=32))
    def set_rows(self, ids, value):
        self.store.set_rows(np.array(ids, np.int64), np.full((len(ids), self.spec.dim), value, np.float32))
        for id_ in ids:
            self.model.rows[id_] = (np.full(self.spec.dim, float(value)), self.model.row(id_)[1])

    @precondition(lambda self: self.model.rows)
    @rule()
    def move_to_another_store(self):
        other = TableStore(self.spec)
        other.load(all_rows(self.store))
        self.store.close()
        self.store = other

    @invariant()
    def has_the_ids_of_the_model(self):
        if hasattr(self, "store"):
            assert self.store.num_rows == len(self.model.rows)
            assert set(ids_in(self.store)) == set(self.model.rows)

    def teardown(self):
        if hasattr(self, "store"):
            ids = list(self.model.rows)
            if ids:
                self.pull(ids)
            self.store.close()


TestStoreAgainstItsModel = StoreMachine.TestCase
TestStoreAgainstItsModel.settings = settings(
    max_examples=25, stateful_step_count=15, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


# First values.


@settings(max_examples=20, deadline=None)
@given(batches.filter(bool), st.data())
def test_first_value_does_not_depend_on_arrival_or_shard(ids, data):
    spec = spec_of("sgd", initializer=normal(0, 1))
    shards = [TableStore(spec) for _ in range(3)]
    order = data.draw(st.permutations(ids))
    cuts = sorted(data.draw(st.tuples(*[st.integers(0, len(ids))] * 2)))
    for store, part in zip(shards, np.split(np.array(order, np.int64), cuts), strict=True):
        for batch in np.array_split(part, 2):
            pushed(store, batch, np.zeros((len(batch), 4)))
    found = {id_: row for store in shards for id_, (row, *_) in everything(store).items()}
    for store in shards:
        store.close()
    assert found == {id_: row.tobytes() for id_, row in zip(ids, first_rows(spec, ids), strict=True)}


@pytest.mark.parametrize("dim", DIMS)
def test_state_of_a_new_row_begins_as_the_rule_says(open_store, dim):
    store = open_store(spec_of("adagrad", dim, hyperparameters=(("initial_accumulator_value", 0.5),)))
    pushed(store, [1, 2, 3], np.zeros((3, dim)))
    states = all_rows(store).states
    assert (states == 0.5).all()
    assert states.shape == (3, 1, dim)


# Pulls.


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize(("l1", "l2"), [(0.25, 0.0), (0.0, 0.5)])
def test_rows_decay_when_they_are_pushed_and_only_then(open_store, dim, l1, l2):
    decay = (("l1_decay", l1), ("l2_decay", l2))
    store = open_store(spec_of("sgd", dim, initializer=constant(-2.0), hyperparameters=decay))
    grads = np.ones((2, dim), np.float32)
    grads.setflags(write=False)
    store.push(np.array([1, 2]), grads, 0.5, 1)
    once = -2.0 - 0.5 * (1 - l1 - 2.0 * l2)
    assert (pulled(store, [1, 2]) == once).all()
    store.push(np.array([2]), grads[:1], 0.5, 2)
    assert (pulled(store, [1]) == once).all()
    assert (pulled(store, [2]) == once - 0.5 * (1 - l1 + l2 * once)).all()


@pytest.mark.parametrize("dim", DIMS)
def test_gradients_are_clipped_before_they_decay(open_store, dim):
    changes = (("clip_min", -0.5), ("clip_max", 0.25), ("l2_decay", 0.5))
    store = open_store(spec_of("sgd", dim, initializer=constant(-2.0), hyperparameters=changes))
    grads = np.repeat(np.array([[-3], [3], [0.125]], np.float32), dim, axis=1)
    grads.setflags(write=False)
    store.push(np.array([1, 2, 3]), grads, 1.0, 1)
    # p - (clipped + 0.5 p), with p = -2: the decay of -1 is not clipped.
    assert pulled(store, [1, 2, 3]).tolist() == [[-0.5] * dim, [-1.25] * dim, [-1.125] * dim]


def test_loaded_rows_are_not_clipped(open_store):
    store = open_store(spec_of("sgd", 2, hyperparameters=(("clip_min", -1.0), ("clip_max", 1.0))))
    store.load(Rows.of(np.array([1]), np.full((1, 2), 8, np.float32), np.empty((1, 0, 2), np.float32)))
    assert (pulled(store, [1]) == 8).all()


def test_pull_answers_repeats_and_known_and_unknown_ids_together(open_store):
    store = open_store(spec_of("sgd"))
    pushed(store, [5, 7], np.ones((2, 4)), 1.0)
    ids = [7, 8, 7, 5, 8]
    expected = first_rows(store.spec, ids) - np.array([1, 0, 1, 1, 0], np.float32)[:, None]
    assert (pulled(store, ids) == expected).all()


def test_ids_that_were_pushed_or_set_have_rows(open_store):
    store = open_store()
    pulled(store, [4])
    pushed(store, [5, -7], np.ones((2, 4)))
    store.set_rows(np.array([6]), np.zeros((1, 4), np.float32))
    assert store.has_rows(np.array([4, 5, 6, 5, -7, 7])).tolist() == [False, True, True, True, True, False]
    assert store.has_rows(np.empty(0, np.int64)).shape == (0,)


@pytest.mark.parametrize("spec", [spec_of(dim=dim) for dim in DIMS] + [spec_of(has_show_click=True)])
def test_rows_that_were_found_are_those_of_a_pull(open_store, spec):
    store, ids = open_store(spec), np.array([4, 5, -7, 6, 5])
    pushed(store, [5, -7], np.ones((2, spec.dim)))
    row_indices = store.find(ids)
    assert (row_indices < 0).tolist() == [True, False, False, True, False]
    np.testing.assert_array_equal(store.rows_at(row_indices, ids), pulled(store, ids))


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("rule", ["sgd", "adagrad", "adam", "ftrl"])
def test_states_that_were_found_are_those_of_the_rows(open_store, rule, dim):
    store = open_store(spec_of(rule, dim))
    initial = np.array(store.spec.update_rule.initial_state(dict(store.spec.hyperparameters)), np.float32)
    pushed(store, [5, -7], np.arange(1, 1 + 2 * dim).reshape(2, dim))
    of_rows = dict(zip(all_rows(store).ids.tolist(), all_rows(store).states, strict=True))
    without = np.repeat(initial[:, None], dim, axis=1)
    found = store.states_at(store.find(np.array([4, 5, -7, 6])))
    np.testing.assert_array_equal(found, [without, of_rows[5], of_rows[-7], without])


def test_ids_and_gradients_may_be_views_of_a_received_frame(open_store):
    store, plain = open_store(spec_of("sgd")), open_store(spec_of("sgd"))
    ids, grads = np.array([3, -4]), np.arange(8, dtype=np.float32).reshape(2, 4)
    frame = memoryview(b"x" + ids.tobytes() + grads.tobytes())
    store.push(np.frombuffer(frame[1:17], np.int64), np.frombuffer(frame[17:], np.float32).reshape(2, 4), 0.5, 1)
    pushed(plain, ids, grads, 0.5)
    assert everything(store) == everything(plain)


def test_arrays_that_are_not_contiguous_are_read_right(open_store):
    store, plain = open_store(spec_of("sgd")), open_store(spec_of("sgd"))
    ids, grads = np.arange(20)[::2], np.arange(40, dtype=np.float32).reshape(4, 10).T
    pushed(plain, ids.copy(), grads.copy())
    pushed(store, ids, grads)
    assert everything(store) == everything(plain)


# Export and load.


def test_load_replaces_values_and_of_repeats_the_last_counts(open_store):
    store = open_store(spec_of("sgd"))
    pushed(store, [1, 2], np.ones((2, 4)))
    rows = np.arange(12, dtype=np.float32).reshape(3, 4)
    store.load(Rows.of(np.array([2, 9, 2]), rows, np.empty((3, 0, 4), np.float32)))
    assert (pulled(store, [2, 9]) == rows[[2, 1]]).all()
    assert store.num_rows == 3


def test_of_an_id_that_is_set_twice_the_last_row_counts(open_store):
    store = open_store(spec_of("sgd"))
    store.set_rows(np.array([2, 9, 2]), np.arange(12, dtype=np.float32).reshape(3, 4))
    assert pulled(store, [2, 9])[:, 0].tolist() == [8, 4]
    assert store.num_rows == 2


# Removal and days.


@pytest.mark.parametrize("num_left", [0, 3, 40_000])
def test_store_grows_again_after_a_removal(open_store, num_left):
    store, ids = open_store(spec_of("sgd")), np.arange(100_000) * 13
    pushed(store, ids, np.ones((len(ids), 4)), 0.5)
    store.remove(ids[num_left:])
    pushed(store, ids[50_000:], np.ones((50_000, 4)), 0.25)
    rates = np.where(np.arange(len(ids)) < num_left, 0.5, np.where(np.arange(len(ids)) < 50_000, 0, 0.25))
    assert (pulled(store, ids) == first_rows(store.spec, ids) - rates.astype(np.float32)[:, None]).all()
    assert store.num_rows == num_left + 50_000


def test_reserved_store_takes_no_more_memory_than_one_that_grew(open_store):
    ids = np.arange(300_000)
    grown, reserved, twice = open_store(), open_store(), open_store()
    for begin in range(0, len(ids), 10_000):
        pushed(grown, ids[begin : begin + 10_000], np.ones((10_000, 4)))
    reserved.reserve(len(ids))
    twice.reserve(10 * len(ids))
    twice.reserve(len(ids))
    for store in (reserved, twice):
        pushed(store, ids, np.ones((len(ids), 4)))
        assert 0.8 * grown.num_bytes <= store.num_bytes <= 1.1 * grown.num_bytes  # with what is backed ahead


def test_more_rows_than_fit_are_not_reserved(open_store):
    store = open_store()
    store.reserve(1 << 50)
    pushed(store, [1, 2], np.ones((2, 4)))
    assert ids_in(store) == [1, 2]


def test_loaded_days_go_on_being_counted(open_store):
    store = open_store(spec_of("sgd"))
    store.set_num_days(65_000)
    days = np.array([64_997, 65_000], np.uint16)
    store.load(
        Rows.of(np.array([1, 2]), np.ones((2, 4), np.float32), np.empty((2, 0, 4), np.float32), last_update_day=days)
    )
    store.end_day()
    judged = store.judge([Criterion("unseen_days", 3)])
    assert (store.num_days, store.shrink(judged).tolist()) == (65_001, [1])


# Memory.


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


@pytest.mark.parametrize("huge_pages", [False, True])
def test_row_takes_at_most_190_bytes_from_a_million_rows_on(open_store, huge_pages):
    store = open_store(spec_of("adagrad", 16, initializer=constant(0)), huge_pages=huge_pages)
    grads = np.ones((20_000, 16), np.float32)
    pushed(store, [0], grads[:1])
    before = resident_bytes()
    for begin in range(0, 1_600_000, 20_000):
        pushed(store, np.arange(begin, begin + 20_000), grads)
        if begin >= 1_000_000:
            taken = resident_bytes() - before
            assert taken <= 190 * store.num_rows
            assert taken == pytest.approx(store.num_bytes, rel=0.05)


def mappings():
    """Resident bytes of each mapping of this process, by its addresses."""
    found, addresses = {}, range(0)
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *rest = line.split()
        if not first.endswith(":"):
            addresses = range(*(int(address, 16) for address in first.split("-")))
        elif first == "Rss:":
            found[addresses] = int(rest[0]) << 10
    return found


def grown_since(old):
    """Mappings with at least `HUGE_PAGES_FROM` new bytes; the system may have merged one with an old neighbour."""

    def num_new(addresses):
        return len(addresses) - sum(len(each) for each in old if each.start in addresses)

    return [each for each in mappings() if num_new(each) >= virtual_memory.HUGE_PAGES_FROM]


def resident_in(memory):
    """Resident bytes of the mappings that have addresses of `memory`; malloc keeps what it likes elsewhere."""
    return sum(
        num_bytes
        for addresses, num_bytes in mappings().items()
        if any(addresses.start < each.stop and each.start < addresses.stop for each in memory)
    )


@pytest.mark.parametrize("huge_pages", [False, True])
@pytest.mark.parametrize("dim", [16, 17])
def test_removal_gives_memory_back(open_store, dim, huge_pages):
    old = list(mappings())
    store = open_store(spec_of("adagrad", dim, initializer=constant(0)), huge_pages=huge_pages)
    memory = grown_since(old)
    others = resident_in(memory)
    pushed(store, np.arange(100_000), np.ones((100_000, dim)))
    # Pages are backed meanwhile.
    wait_until(lambda: resident_in(memory) - others == pytest.approx(store.num_bytes, rel=0.2))
    few, grads = resident_in(memory), np.ones((20_000, dim), np.float32)
    for begin in range(100_000, 1_000_000, 20_000):
        pushed(store, np.arange(begin, begin + 20_000), grads)
    many = resident_in(memory)
    store.remove(np.arange(100_000, 1_000_000), noted=False)
    assert resident_in(memory) - few < 0.1 * (many - few)
    assert (16 + 8 * dim) * store.num_rows <= store.num_bytes <= 300 * store.num_rows


def populating():
    return [thread for thread in threading.enumerate() if thread.name == "fleet_sparse-populate"]


def test_close_ends_the_thread_of_a_grown_store():
    store = TableStore(spec_of("adagrad", 16))
    pushed(store, np.arange(200_000), np.ones((200_000, 16)))
    assert len(populating()) == 1
    store.close()
    store.close()
    assert not populating()


def test_store_that_is_forgotten_ends_its_thread():
    store = TableStore(spec_of("adagrad", 16))
    pushed(store, np.arange(200_000), np.ones((200_000, 16)))
    gone = weakref.ref(store)
    del store
    assert gone() is None
    assert not populating()


def test_small_store_has_no_thread(open_store):
    pushed(open_store(), np.arange(10_000), np.ones((10_000, 4)))
    assert not populating()


# Refusals.


def test_push_to_a_read_only_table_is_refused(open_store):
    store = open_store(spec_of("read_only"))
    with pytest.raises(PushRefused, match="'read_only'"):
        pushed(store, [1], np.ones((1, 4)))
    assert store.num_rows == 0


def test_read_only_table_can_be_loaded_and_pulled(open_store):
    store = open_store(spec_of("read_only"))
    store.load(Rows.of(np.array([4]), np.ones((1, 4), np.float32), np.empty((1, 0, 4), np.float32)))
    assert (pulled(store, [4]) == 1).all()


def floats(*shapes):
    return [np.ones(shape, np.float32) for shape in shapes]


def loaded(store, states=(1, 1, 4), **columns):
    store.load(Rows.of(np.array([1]), *floats((1, 4), states), **columns))


REFUSED = [
    (lambda s: s.push(np.array([1], np.int32), *floats((1, 4)), 0.1, 1), r"int32 \(1,\)"),
    (lambda s: s.push(np.array([[1]]), *floats((1, 4)), 0.1, 1), r"int64 \(1, 1\)"),
    (lambda s: s.push(np.array([1]), *floats((2, 4)), 0.1, 1), r"float32 \(2, 4\)"),
    (lambda s: s.push(np.array([1]), np.ones((1, 4)), 0.1, 1), "float64"),
    (lambda s: s.push(np.array([1]), *floats((1, 4)), 0.1, 0), "0"),
    (lambda s: s.pull(np.array([1]), *floats((2, 4))), r"float32 \(2, 4\)"),
    (lambda s: s.pull(np.array([1]), np.ones((1, 4))), "float64"),
    (lambda s: s.pull(np.array([1]), np.ones((1, 8), np.float32)[:, ::2]), "contiguous"),
    (lambda s: loaded(s, (1, 2, 4)), "2 x 4"),
    (lambda s: loaded(s, (1, 4)), "4"),
    (lambda s: loaded(s, show=np.ones(1)), "'show'"),
    (lambda s: loaded(s, last_update_day=np.zeros(1, np.uint16)), "'last_update_day'"),
    (lambda s: s.remove(np.array([1], np.int32)), r"int32 \(1,\)"),
    (lambda s: s.set_num_days(65_536), "65536"),
    (lambda s: s.has_rows(np.array([1], np.int32)), r"int32 \(1,\)"),
    (lambda s: s.find(np.array([1], np.int32)), r"int32 \(1,\)"),
    (lambda s: s.set_rows(np.array([1], np.int32), *floats((1, 4))), r"int32 \(1,\)"),
    (lambda s: s.set_rows(np.array([1]), *floats((2, 4))), r"float32 \(2, 4\)"),
]


@pytest.mark.parametrize(("call", "named"), REFUSED, ids=range(len(REFUSED)))
def test_array_without_meaning_is_refused_and_changes_nothing(open_store, call, named):
    store = open_store()
    with pytest.raises(ValueError, match=named):
        call(store)
    assert store.num_rows == 0


@pytest.mark.parametrize("days", [np.zeros(1, np.int64), np.zeros(2, np.uint16), np.array([3], np.uint16)])
def test_column_that_does_not_fit_is_refused_and_changes_nothing(open_store, days):
    store = open_store()
    store.set_num_days(2)
    with pytest.raises(ValueError, match="last_update_day"):
        loaded(store, last_update_day=days)
    assert store.num_rows == 0


@pytest.mark.parametrize(
    "call",
    [
        lambda s: pulled(s, [1]),
        lambda s: pushed(s, [1], np.ones((1, 4))),
        lambda s: s.set_rows(np.array([1]), np.ones((1, 4), np.float32)),
        lambda s: s.has_rows(np.array([1])),
        lambda s: s.find(np.array([1])),
        loaded,
        lambda s: s.remove(np.array([1])),
        lambda s: s.set_num_days(1),
        lambda s: s.shrink([Criterion("unseen_days", 1)]),
        TableStore.end_day,
        TableStore.capture,
    ],
)
def test_closed_store_refuses(call):
    store = TableStore(spec_of())
    store.close()
    with pytest.raises(ValueError, match="'C1'"):
        call(store)


def test_store_whose_memory_is_full_says_how_much_it_may_have(monkeypatch):
    monkeypatch.setattr(virtual_memory, "_machine_bytes", lambda: HUGE_PAGE_BYTES)
    store = TableStore(spec_of(dim=64))
    num_rows = HUGE_PAGE_BYTES // (64 * 4)
    with pytest.raises(MemoryError, match="'C1'"):
        pushed(store, range(num_rows + 1), np.ones((num_rows + 1, 64)))
    store.close()


def test_rows_that_a_refused_push_made_are_in_the_next_delta(monkeypatch):
    monkeypatch.setattr(virtual_memory, "_machine_bytes", lambda: HUGE_PAGE_BYTES)
    store = TableStore(spec_of("sgd", 1))
    with pytest.raises(MemoryError, match="'C1'"):
        pushed(store, range(100_000), np.ones((100_000, 1)))
    assert store.capture(only_changed=True).num_rows == store.num_rows > 10_000
    store.close()
