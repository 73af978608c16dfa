"""The simulator of row caches against plain models, and its traces."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import combinations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.het import simulator
from benchmarks.het.trace import Trace, draw

NUM_IDS = 8
READS = st.lists(st.integers(0, NUM_IDS - 1), max_size=60)


def missed(run: Callable[..., None], reads: list[int], capacity: int) -> list[int]:
    """The misses of each read, one in a batch."""
    out, entered = np.empty(len(reads), np.int64), np.empty(len(reads), np.int64)
    run(np.array(reads, np.int32), np.arange(len(reads) + 1), NUM_IDS, capacity, out, entered)
    assert ((entered == 0) | (out == 1)).all()
    return out.tolist()


@given(READS, st.integers(1, 6))
def test_simulated_lru_is_a_list(reads: list[int], capacity: int) -> None:
    rows, expected = list[int](), list[int]()
    for id_ in reads:
        expected.append(int(id_ not in rows))
        rows = [*(row for row in rows if row != id_), id_][-capacity:]
    assert missed(simulator.run_lru, reads, capacity) == expected


@given(READS, st.integers(1, 6))
def test_simulated_lfu_is_a_dict_of_uses(reads: list[int], capacity: int) -> None:
    uses, expected = dict[int, tuple[int, int]](), list[int]()
    for time, id_ in enumerate(reads):
        expected.append(int(id_ not in uses))
        if id_ not in uses and len(uses) == capacity:
            del uses[min(uses, key=uses.__getitem__)]
        uses[id_] = uses.get(id_, (0, 0))[0] + 1, time
    assert missed(simulator.run_lfu, reads, capacity) == expected


@given(st.lists(st.integers(0, 4), max_size=12), st.integers(1, 3))
def test_no_cache_misses_less_than_the_optimal_one(reads: list[int], capacity: int) -> None:
    @cache
    def fewest(at: int, rows: frozenset[int]) -> int:
        if at == len(reads):
            return 0
        known = rows | {reads[at]}
        choices = [known] if len(known) <= capacity else map(frozenset, combinations(known, capacity))
        return (reads[at] not in rows) + min(fewest(at + 1, choice) for choice in choices)

    assert sum(missed(simulator.run_optimal, reads, capacity)) == fewest(0, frozenset())


@given(READS, st.integers(1, 6))
def test_simulated_aged_lfu_is_between_optimal_and_none(reads: list[int], capacity: int) -> None:
    of_aged = missed(simulator.run_aged_lfu, reads, capacity)
    assert sum(missed(simulator.run_optimal, reads, capacity)) <= sum(of_aged)
    if len(set(reads)) <= capacity:
        assert sum(of_aged) == len(set(reads))


def test_a_trace_has_the_distinct_ids_of_each_batch() -> None:
    trace = draw([5, 3], exponent=1.1, batch=4, num_steps=100, seed=0)
    assert (trace.num_steps, trace.num_ids) == (100, 8)
    for step in range(100):
        ids = trace.batch(step).tolist()
        assert len(set(ids)) == len(ids) <= 8
        assert any(id_ < 5 for id_ in ids)
        assert any(5 <= id_ < 8 for id_ in ids)
    assert set(trace.ids.tolist()) == set(range(8))


def test_a_hot_set_moves_at_its_step() -> None:
    def hottest(trace: Trace, steps: range) -> int:
        return int(np.bincount(np.concatenate([trace.batch(step) for step in steps])).argmax())

    trace = draw([1000], exponent=1.5, batch=8, num_steps=400, seed=3, moved_at=200)
    assert hottest(trace, range(200)) == 0
    assert hottest(trace, range(200, 400)) != 0
    still = draw([1000], exponent=1.5, batch=8, num_steps=400, seed=3)
    np.testing.assert_array_equal(trace.ids[: trace.begins[200]], still.ids[: trace.begins[200]])
