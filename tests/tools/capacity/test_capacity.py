"""The capacity model against hand-computed numbers, and against the stores and clients that it describes."""

from __future__ import annotations

import dataclasses
import math
from contextlib import closing

import msgspec
import numpy as np
import pytest

from fleet_sparse.core.dense_spec import DenseSpec, Segment
from fleet_sparse.core.ids import NUM_BUCKETS, hash_ids
from fleet_sparse.core.initializer import uniform
from fleet_sparse.core.mode import ASYNC, SYNC, Mode
from fleet_sparse.core.rules import RULES
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.pserver.storage.table_store import TableStore
from fleet_sparse.tools.capacity.cached_rows import NO_CACHE
from fleet_sparse.tools.capacity.coefficients import CpuCost, shipped_coefficients
from fleet_sparse.tools.capacity.job import MAX_DIM, MAX_PSERVERS, MODES, Machines, PlannedJob
from fleet_sparse.tools.capacity.memory import least_pservers, memory_of
from fleet_sparse.tools.capacity.plan import MIN_GAIN_OF_TWICE, plan, plan_on
from fleet_sparse.tools.capacity.step_time import Limit
from fleet_sparse.tools.capacity.traffic import traffic_of
from fleet_sparse.wire import frame_format
from fleet_sparse.worker.modes.sync_async import PserverTraining
from fleet_sparse.worker.net.requests import DenseUpdate
from fleet_sparse.worker.rows.deduplicator import Deduplicator
from fleet_sparse.worker.rows.row_batch import RowBatch
from support.in_process import InProcessCluster

SHIPPED = shipped_coefficients()
ROUND = msgspec.structs.replace(
    SHIPPED,
    worker_ns=CpuCost(step=1e6, request=1e5, block=1e4, row=100, byte=0),
    data_thread_ns=CpuCost(step=0, request=2e5, block=0, row=0, byte=0),
    io_threads_ns=CpuCost(step=0, request=5e4, block=0, row=0, byte=0),
    pull_ns=(10, 1),
    push_ns={"sgd": (20, 2), "adagrad": (20, 2)},
    pserver_bytes=1e8,
)
"""Coefficients for sums that can be done by hand: 0.33 us of kernels per row of dim 100."""
ENDLESS = Machines(memory_bytes=1e15, network_bits_per_s=1e30)
JOB = PlannedJob(rows=1e9, dim=100, fields=1, batch=10_000, distinct=1.0, compute_s=0.01)
CLIENT_S, DATA_S, IO_S = 0.00222, 0.0004 + 0.0033, 0.0001
"""CPU of a step of `JOB` at one pserver: two requests, two blocks and 10 000 rows."""


def changed(**changes):
    return dataclasses.replace(JOB, **changes)


def table(dim, rule, name="planned"):
    return TableSpec(name=name, dim=dim, rule=rule, initializer=uniform(-0.1, 0.1))


# Memory


@pytest.mark.parametrize(
    ("dim", "rule", "num_rows"), [(8, "sgd", 750_000), (16, "adagrad", 10**6), (32, "adam", 10**6)]
)
def test_memory_is_a_bound_near_that_of_a_real_store(dim, rule, num_rows) -> None:
    store = TableStore(table(dim, rule))  # of 750 000 rows its index has just grown
    for begin in range(0, num_rows, 50_000):
        ids = hash_ids(np.arange(begin, begin + 50_000), 0).view(np.int64)
        store.push(ids, np.zeros((len(ids), dim), np.float32), 0.1, 1)
    memory = memory_of(PlannedJob(rows=num_rows, dim=dim, rule=rule), ROUND, 1)
    bound = memory.total - memory.process
    store_bytes = store.num_bytes
    store.close()
    assert store_bytes <= bound <= 1.3 * store_bytes


def test_memory_of_a_pserver_by_hand() -> None:
    memory = memory_of(changed(rows=2e6, rule="adagrad", dense=1000), ROUND, 2)
    assert memory.id_index == pytest.approx(46e6 * 33 / 32)
    assert memory.rows == pytest.approx(800e6 * 33 / 32)
    assert memory.metadata == 4.5e6
    assert (memory.dense, memory.staged, memory.process) == (4000, 0, 1e8 + 150e6)


def test_rows_that_several_workers_cache_have_clocks() -> None:
    cached = NO_CACHE._replace(hit=0.5)
    of = {workers: changed(rows=2e6, workers=workers, cached=cached) for workers in (1, 8)}
    assert {workers: memory_of(job, ROUND, 2).clocks for workers, job in of.items()} == {1: 0, 8: 4e6 * 33 / 32}


def test_pushes_of_a_sync_step_are_staged_in_memory() -> None:
    assert memory_of(changed(mode="sync", workers=10, dense=1000), ROUND, 4).staged == 10 * (10_000 * 408 + 4000) / 4


def test_least_pservers_have_the_memory_and_one_fewer_has_not() -> None:
    least = least_pservers(JOB, Machines(memory_bytes=16e9), ROUND)
    assert least > 1
    assert memory_of(JOB, ROUND, least).total <= 16e9 < memory_of(JOB, ROUND, least - 1).total


# Traffic


@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.parametrize("num_dense", [0, 900])
@pytest.mark.parametrize("num_pservers", [1, 3])
def test_bytes_are_what_a_client_sends_and_receives(num_pservers, num_dense, num_workers) -> None:
    specs = [table(8, "sgd", f"planned{number}") for number in range(2)]
    dense = DenseSpec("planned", "sgd", (), (Segment("values", 0, max(num_dense, 1), 1.0),))
    cluster = InProcessCluster(num_pservers, [*specs, dense])
    with closing(cluster):
        placement = cluster.placement
        with cluster.client() as client:
            if num_dense:
                client.assign_dense(dense, np.zeros(num_dense, np.float32))
            training = PserverTraining(client, Deduplicator(placement), Mode(), num_workers)
            unique = [Deduplicator(placement).unique([np.arange(500)], spec.salt)[0] for spec in specs]
            outs = [np.zeros((500, 8), np.float32) for _ in specs]
            values = np.zeros(num_dense, np.float32)
            client.flush()
            before = client.bytes_sent, client.bytes_received
            training.prefetch([RowBatch(*each) for each in zip(specs, unique, outs, strict=True)])
            rows = [RowBatch(*each, 0.1) for each in zip(specs, unique, outs, strict=True)]
            # The program of a single worker trains the dense values.
            arrays = [DenseUpdate(dense, values, [values.copy()], 0.1)] if num_dense and num_workers > 1 else []
            training.update(rows, arrays, 1.0)
            client.flush()
            spent = client.bytes_sent - before[0], client.bytes_received - before[1]
    job = PlannedJob(rows=1e4, dim=8, rule="sgd", tables=2, fields=2, batch=500, distinct=1, dense=num_dense)
    traffic = traffic_of(dataclasses.replace(job, workers=num_workers), num_pservers)
    assert spent == pytest.approx((traffic.to_pservers, traffic.from_pservers), rel=1e-9)


def test_only_sync_asks_pservers_without_ids_of_the_step() -> None:
    assert traffic_of(changed(batch=1), 1000).requests == pytest.approx(2)
    assert traffic_of(changed(batch=1, mode="sync"), 1000).requests == 2000


# Time


@pytest.mark.parametrize("mode", MODES)
def test_one_worker_waits_for_the_sum_of_all_terms(mode) -> None:
    machines = Machines(1e15, 8e9, round_trip_s=0.001)
    found = plan_on(changed(mode=mode), machines, ROUND, 1)
    network_s = found.traffic.num_bytes / 1e9
    assert found.step_s == pytest.approx(0.01 + CLIENT_S + 0.001 + network_s + DATA_S)


def test_an_async_step_is_no_shorter_than_a_pservers_work() -> None:
    assert plan_on(changed(workers=2), ENDLESS, ROUND, 1).step_s == pytest.approx(0.01 + CLIENT_S + DATA_S)
    assert plan_on(changed(workers=100), ENDLESS, ROUND, 1).step_s == pytest.approx(100 * DATA_S)


def test_a_sync_step_waits_for_a_pservers_work() -> None:
    found = plan_on(changed(workers=10, mode="sync", spread=0.1), ENDLESS, ROUND, 1)
    slowest_s = 0.001 * math.sqrt(2 * math.log(10))
    assert found.step_s == pytest.approx(0.01 + slowest_s + CLIENT_S + 10 * DATA_S)


def test_network_of_pservers_limits_a_step_from_below() -> None:
    job, machines = changed(workers=100, compute_s=0), Machines(1e15, 1e9, pservers_per_machine=2)
    found = plan_on(job, machines, ROUND, 4)
    assert found.step_s == pytest.approx(100 * 2 / 4 * found.traffic.to_pservers * 8 / 1e9)
    in_step = plan_on(dataclasses.replace(job, mode="sync"), machines, ROUND, 4)
    assert in_step.times.pserver_network == pytest.approx(100 * 2 / 4 * in_step.traffic.num_bytes * 8 / 1e9)


def test_processes_that_share_cores_add_up() -> None:
    found = plan_on(changed(workers=4), ENDLESS._replace(shared_cores=2), ROUND, 1)
    assert found.step_s == pytest.approx(4 * (0.01 + CLIENT_S + DATA_S + IO_S) / 2)


@pytest.mark.parametrize(
    ("limit", "job", "machines"),
    [
        (Limit.worker_compute, {"compute_s": 10.0}, ENDLESS),
        (Limit.worker_network, {"dense": 1e7}, Machines(1e15, 1e6)),
        (Limit.pserver_network, {"workers": 100}, Machines(1e15, 1e6)),
        (Limit.pserver_cpu, {"workers": 1000, "compute_s": 0.0}, ENDLESS),
        (Limit.pserver_cpu, {"workers": 1000, "compute_s": 0.0, "mode": "sync"}, ENDLESS),
        (Limit.latency, {}, ENDLESS._replace(round_trip_s=1.0)),
        (Limit.memory, {}, Machines(1e9)),
        (Limit.slowest_worker, {"workers": 10, "mode": "sync", "compute_s": 10.0, "spread": 1.0}, ENDLESS),
    ],
)
def test_the_largest_term_is_named_as_the_limit(limit, job, machines) -> None:
    assert plan_on(changed(**job), machines, ROUND, 4).limit is limit


def test_a_resource_that_is_hidden_by_a_workers_path_is_no_limit() -> None:
    """The network of a pserver is busy for longer than each term of a worker, and for less than all of them."""
    found = plan_on(changed(workers=3), Machines(1e15, 7e9), ROUND, 1)
    times = found.times
    longest_s = max(times.program + times.client, times.worker_network, times.pserver_cpu)
    assert longest_s < times.pserver_network < found.step_s
    assert found.limit is Limit.worker_compute


# The choice of pservers


def test_pservers_are_added_until_more_are_hardly_faster() -> None:
    job, machines = changed(workers=100, compute_s=0.001), ENDLESS
    chosen = plan(job, machines, ROUND)
    before, chosen_s, twice_s = (
        plan_on(job, machines, ROUND, count).step_s
        for count in (chosen.num_pservers - 1, chosen.num_pservers, 2 * chosen.num_pservers)
    )
    assert chosen.num_pservers > chosen.least_pservers == 1
    assert before > chosen_s
    assert chosen_s <= MIN_GAIN_OF_TWICE * twice_s


def test_the_fewest_pservers_are_chosen_if_more_are_not_faster() -> None:
    chosen = plan(changed(rows=1e10, compute_s=1.0), Machines(64e9), ROUND)
    assert chosen.num_pservers == chosen.least_pservers > 1


# What is shipped


def test_shipped_coefficients_know_every_rule_that_trains() -> None:
    trained = {name: rule.num_states for name, rule in RULES.items() if rule.kernel is not None and rule.trains}
    assert SHIPPED.num_states == trained
    assert SHIPPED.push_ns.keys() == trained.keys()
    assert min(SHIPPED.worker_ns.step, SHIPPED.worker_ns.request, SHIPPED.data_thread_ns.request) > 0


def test_limits_of_the_model_are_those_of_the_code() -> None:
    assert (MAX_PSERVERS, MAX_DIM, MODES) == (NUM_BUCKETS, frame_format.MAX_DIM, (SYNC, ASYNC))
