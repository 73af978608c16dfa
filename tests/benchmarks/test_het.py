"""The simulator of row caches against plain models, and its traces."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.het import dense_link, simulator
from benchmarks.het.network import can_make_hosts
from benchmarks.het.trace import Trace, draw
from benchmarks.het.traffic import Traffic, simulated
from benchmarks.het.training import num_rows, seconds_to
from benchmarks.het_traffic import LockstepJob
from fleet_sparse.core.row_bound import RowBound

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


def traces(num_workers: int) -> list[Trace]:
    return [draw([40, 300, 4000], exponent=1.1, batch=32, num_steps=200, seed=worker) for worker in range(num_workers)]


def simulated_job(
    own: list[Trace], lag: int, share: float | None, *, capacity: int = 400, first_counted: int = 50
) -> Traffic:
    return simulated(own, capacity=capacity, lag=lag, share=share, has_leases=True, first_counted=first_counted)


@pytest.mark.parametrize(("num_workers", "share"), [(1, None), (2, 0.25), (4, 0.25), (4, None)])
@pytest.mark.parametrize("rule", ["sgd", "adam"])
def test_the_caches_save_what_the_simulator_says(num_workers: int, share: float | None, rule: str) -> None:
    own = traces(num_workers)
    job = LockstepJob(rule, RowBound(100, share), own, 400)
    found, expected = job.run(50), simulated_job(own, 100, share)
    assert found.read == expected.read == sum(int(trace.begins[-1] - trace.begins[50]) for trace in own)
    saved, said = (each.saved(64, job.num_states, num_workers=num_workers) for each in (found, expected))
    assert saved == pytest.approx(said, abs=0.03)


def test_a_row_that_one_worker_caches_travels_once() -> None:
    (trace,) = own = traces(1)
    traffic = simulated_job(own, 100, None, capacity=5000, first_counted=0)
    assert traffic._replace(read=0) == Traffic(0, 0, len(np.unique(trace.ids)), 0, 0, 0, 0, 0, 0)


def test_every_gradient_travels_where_no_update_may_be_held() -> None:
    traffic = simulated_job(traces(4), 1, None, capacity=5000, first_counted=0)
    assert traffic.gradient == traffic.read


def test_bytes_are_those_of_the_blocks() -> None:
    assert Traffic(1, 1, 0, 0, 0, 0, 1, 0, 0).num_bytes(4, 1, num_workers=2) == 16 + 8 * 4
    assert Traffic(1, 0, 1, 0, 0, 0, 0, 0, 1).num_bytes(4, 1, num_workers=2) == 12 + (1 + 4 + 32) + (16 + 32)
    assert Traffic(1, 0, 0, 1, 1, 0, 0, 1, 0).num_bytes(4, 1, num_workers=2) == 12 + (1 + 4 + 16) + (12 + 16)


def test_time_to_an_auc_is_between_the_evaluations() -> None:
    curve = [(1.0, 0.5), (2.0, 0.6), (4.0, 0.7)]
    assert [seconds_to(curve, target) for target in (0.4, 0.6, 0.65)] == pytest.approx([1, 2, 3])
    assert seconds_to(curve, 0.8) == np.inf


def test_rows_of_a_worker_are_those_that_travelled() -> None:
    plain = {"row_cache": {}, "rows_pulled": 5, "rows_pushed": 7}
    assert num_rows(plain) == 12
    table = {"reads": 10, "hits": 6, "refreshed": 1}
    assert num_rows(plain | {"row_cache": {"a": table, "b": table}}) == 7 + 2 * 5


@pytest.mark.slow
@pytest.mark.skipif(not can_make_hosts(), reason="network namespaces need root")
@pytest.mark.parametrize("way", dense_link.WAYS)
def test_the_busiest_link_of_dense_values_has_what_a_ring_sends(way: str) -> None:
    assert 1 < dense_link.bytes_over_ring(way, 2, 200_000, 5) < 1.03
