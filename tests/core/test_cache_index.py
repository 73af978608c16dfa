"""CacheIndex and its policies, against a dict of counters."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from fleet_sparse.core.cache_index import CacheIndex, Entries
from fleet_sparse.core.cache_policies import (
    ADMISSIONS,
    AGED_LFU,
    ALL,
    ESTIMATE,
    LFU,
    LRU,
    POLICIES,
    SECOND,
    Admission,
    CachePolicy,
    chosen,
)

SALT = 0x5EED
BATCHES = st.lists(st.lists(st.integers(-30, 30), max_size=12, unique=True), max_size=60)


def array(ids: list[int]) -> NDArray[np.int64]:
    return np.array(ids, np.int64)


class Step(NamedTuple):
    """What a batch did to a cache."""

    slots: list[int]
    missing: list[int]
    entered: list[int]
    left: list[int]


class Cache:
    """A cache of which each batch is used, chosen for, entered and aged.

    Attributes:
        slot_of: The slot of each cached id, as a model.
    """

    def __init__(self, capacity: int, policy: CachePolicy = AGED_LFU, admission: Admission = ALL) -> None:
        self.index = CacheIndex(capacity, SALT, policy, admission)
        self.slot_of: dict[int, int] = {}
        self.num_steps = 0

    def run(self, ids: list[int]) -> Step:
        uses = self.index.use(array(ids), self.num_steps)
        missing = [ids[i] for i in uses.missing]
        entries = self.index.choose(array(missing))
        entered = [missing[i] for i in entries.indices]
        id_of = {slot: id_ for id_, slot in self.slot_of.items()}
        left = [id_of[slot] for slot in entries.slots.tolist() if slot in id_of]
        in_use = [slot for slot in entries.slots.tolist() if slot in id_of]
        assert self.index.ids_of(array(in_use)).tolist() == left
        self.index.replace(array(entered), entries, self.num_steps)
        self.index.age(len(ids), self.num_steps)
        self.num_steps += 1
        for id_ in left:
            del self.slot_of[id_]
        self.slot_of.update(zip(entered, entries.slots.tolist(), strict=True))
        return Step(uses.slots.tolist(), missing, entered, left)


@settings(max_examples=150)
@given(BATCHES, st.integers(1, 40), st.sampled_from(list(POLICIES)), st.sampled_from(list(ADMISSIONS)))
def test_an_index_is_a_dict_of_at_most_so_many_ids(
    batches: list[list[int]], capacity: int, policy: str, admit: str
) -> None:
    if (policy, admit) == ("lru", "estimate"):
        return
    cache = Cache(capacity, *chosen(policy, admit))
    everything = array(list(range(-30, 31)))
    for ids in batches:
        before = dict(cache.slot_of)
        step = cache.run(ids)
        assert step.slots == [before.get(id_, -1) for id_ in ids]
        assert step.missing == [id_ for id_ in ids if id_ not in before]
        assert not set(step.left) & set(ids), "a row of this batch left"
        assert len(set(cache.slot_of.values())) == len(cache.slot_of) == cache.index.num_used <= capacity
        assert cache.index.find(everything).tolist() == [cache.slot_of.get(int(id_), -1) for id_ in everything]


class Model:
    """What is known of the rows of a cache of at most 8, all of which are candidates; one id is read in a batch."""

    def __init__(self) -> None:
        self.uses, self.last_use, self.time = dict[int, int](), dict[int, int](), 0

    def candidates(self) -> list[int]:
        """The rows that may make room: a cell has the number of the batch of its last use modulo 16."""
        return [id_ for id_, time in self.last_use.items() if (self.time - time) % 16 != 0]

    def use(self, id_: int) -> None:
        self.uses[id_] = self.uses.get(id_, 0) + 1
        self.last_use[id_] = self.time

    def drop(self, id_: int) -> None:
        del self.uses[id_], self.last_use[id_]


READS = st.lists(st.integers(0, 12), max_size=120)


@settings(max_examples=150)
@given(READS, st.integers(1, 8))
def test_lfu_evicts_a_row_that_was_used_least(reads: list[int], capacity: int) -> None:
    cache, model = Cache(capacity, LFU, ALL), Model()
    for id_ in reads:
        for left in cache.run([id_]).left:
            assert model.uses[left] == min(model.uses[other] for other in model.candidates())
            model.drop(left)
        if id_ in cache.slot_of:
            model.use(id_)
        model.time += 1
        assert model.uses.keys() == cache.slot_of.keys()


@settings(max_examples=150)
@given(READS)
@example([0, 8, 0, 1, 2, 3, 4, 5, 6, 7])  # a row enters, and in the next batch another one is used
def test_lru_evicts_the_row_whose_last_use_is_oldest(reads: list[int]) -> None:
    cache, model = Cache(8, LRU, ALL), Model()
    for id_ in reads:
        for left in cache.run([id_]).left:
            # Times are known to a sixteenth of 8 reads, so exactly.
            assert model.last_use[left] == min(model.last_use[other] for other in model.candidates())
            model.drop(left)
        if id_ in cache.slot_of:
            model.use(id_)
        model.time += 1


@given(READS, st.integers(1, 8))
def test_a_row_enters_in_place_of_one_that_was_used_less(reads: list[int], capacity: int) -> None:
    cache, model, misses = Cache(capacity, LFU, ESTIMATE), Model(), dict[int, int]()
    cache.index.age = lambda num_reads, step: array([])  # type: ignore[method-assign]  # misses are not halved
    for id_ in reads:
        is_full, is_missing = len(cache.slot_of) == capacity, id_ not in cache.slot_of
        fewest = min((model.uses[other] for other in model.candidates()), default=10**9)
        step = cache.run([id_])
        if is_missing:
            misses[id_] = misses.get(id_, 0) + 1
            if not is_full or misses[id_] > fewest:  # the sketch never says less
                assert step.entered == [id_]
        for left in step.left:
            assert model.uses[left] == fewest
            model.drop(left)
        if id_ in cache.slot_of:
            model.use(id_)
        model.time += 1


def test_rows_that_are_read_once_displace_few_that_are_used() -> None:
    cache = Cache(1000, AGED_LFU, ESTIMATE)
    for _ in range(3):
        cache.run(list(range(1000)))
    left = [len(cache.run(list(range(begin, begin + 100))).left) for begin in range(1000, 2000, 100)]
    assert sum(left) < 50


@pytest.mark.parametrize("capacity", [1, 7, 100])
def test_a_row_enters_at_its_second_miss(capacity: int) -> None:
    cache = Cache(capacity, LRU, SECOND)
    assert cache.run([5]).entered == []
    assert cache.run([5]).entered == [5]
    assert cache.run([5]).missing == []


def test_more_rows_than_the_cache_has_do_not_displace_each_other() -> None:
    cache = Cache(4)
    assert cache.run(list(range(100))).entered == [0, 1, 2, 3]
    assert cache.run(list(range(100, 200))).left != []
    assert len(cache.slot_of) == 4


def test_aged_rows_make_room_for_a_new_hot_set() -> None:
    rng, hits = np.random.default_rng(0), dict[str, float]()
    for policy in (LFU, AGED_LFU):
        cache, num_hits = Cache(100, policy, ESTIMATE), 0
        for step in range(3000):
            hot = rng.integers(0, 100, 20) + (1000 if step >= 1500 else 0)
            ids = list(dict.fromkeys([*hot.tolist(), *rng.integers(10_000, 100_000, 20).tolist()]))
            num_missed = len([id_ for id_ in cache.run(ids).missing if id_ < 10_000])
            num_hits += (len(set(hot.tolist())) - num_missed) * (step >= 2500)
        hits[policy.name] = num_hits / (500 * 18.2)
    assert hits["aged_lfu"] > hits["lfu"] + 0.3


@settings(max_examples=100)
@given(st.lists(st.tuples(st.integers(0, 8), st.integers(-1, 20), st.integers(1, 40)), max_size=60))
def test_a_lease_ends_after_its_last_step(leases: list[tuple[int, int, int]]) -> None:
    index, ids, step = CacheIndex(9, SALT, LFU, ALL), array(list(range(9))), 2**24 - 200  # steps wrap
    index.use(ids, step)
    index.replace(ids, index.choose(ids), step - 1)
    end_of = dict.fromkeys(range(9), step - 1)
    for id_, num_steps, pause in leases:
        slot = index.find(array([id_]))
        index.lease(slot, array([step + num_steps]))
        end_of[id_] = step + num_steps
        step += pause
        index.age(1, step)
        assert index.use(ids, step).unleased.tolist() == [i for i in range(9) if end_of[i] < step]


def test_a_lease_that_is_over_does_not_begin_again() -> None:
    index, ids = CacheIndex(4, SALT, AGED_LFU, ALL), array([3])
    index.use(ids, 0)
    index.replace(ids, index.choose(ids), 0)
    for step in range(1, 2**24, 2**21):
        for _ in range(16):  # every cell in each of the steps
            index.age(0, step)
        assert index.use(ids, step).unleased.tolist() == [0]


@pytest.mark.parametrize("policy", POLICIES.values(), ids=str)
def test_rows_that_are_not_used_are_found_while_the_cache_ages(policy: CachePolicy) -> None:
    cache = Cache(16, policy, ALL)
    cache.run(list(range(16)))
    idle = set[int]()
    for _ in range(2000):
        cache.index.use(array([0, 1, 2]), 0)
        idle.update(cache.index.age(3, 0).tolist())
    kept = {cache.slot_of[id_] for id_ in (0, 1, 2)}
    assert idle - kept == set(range(16)) - kept
    assert policy is LFU or not idle & kept


def test_entries_keep_their_slots_until_the_next_batch() -> None:
    cache = Cache(3)
    cache.run([1, 2, 3])
    ids = array([4, 1, 5, 2])
    uses = cache.index.use(ids, 0)
    entries: Entries = cache.index.choose(ids[uses.missing])
    assert entries.slots.tolist() == [cache.slot_of[3]]


@given(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=300, unique=True))
def test_every_int64_is_an_id(ids: list[int]) -> None:
    cache = Cache(max(len(ids), 1))
    cache.run(ids)
    assert cache.index.find(array(ids)).tolist() == list(range(len(ids)))
    cache.index.clear()
    assert (cache.index.find(array(ids)) == -1).all()


@pytest.mark.parametrize("names", [("lru", "estimate"), ("fifo", "all"), ("lfu", "never")])
def test_policies_that_do_not_fit_are_refused(names: tuple[str, str]) -> None:
    with pytest.raises(ValueError, match=repr(names[1] if names[0] != "fifo" else names[0])):
        chosen(*names)


@pytest.mark.parametrize("capacity", [0, -1, 1 << 28])
def test_a_capacity_out_of_range_is_refused(capacity: Any) -> None:
    with pytest.raises(ValueError, match=str(capacity)):
        CacheIndex(capacity, SALT, LRU, ALL)


@pytest.mark.parametrize("pause", [2**22 + 1, 2**23, 2**23 + 2**22, 2**24 - 1])
def test_no_row_is_leased_after_a_long_pause(pause: int) -> None:
    index, ids = CacheIndex(4, SALT, AGED_LFU, ALL), array([3])
    index.use(ids, 0)
    index.replace(ids, index.choose(ids), 20)
    index.age(1, 0)
    assert index.use(ids, pause).unleased.tolist() == [0]
    index.age(1, pause)
    index.lease(index.find(ids), array([pause + 3]))
    assert index.use(ids, pause + 3).unleased.tolist() == []


def test_no_lease_begins_again_between_rare_batches() -> None:
    index, num_rows, pause = CacheIndex(2000, SALT, AGED_LFU, ALL), 2000, 2**17
    ids = array(list(range(num_rows)))
    index.use(ids, 0)
    index.replace(ids, index.choose(ids), 0)
    for step in range(pause, 2**24, pause):
        index.age(1, step)  # far fewer cells by reads than a round of steps has
        assert len(index.use(ids, step).unleased) == num_rows
