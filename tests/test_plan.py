"""The model against what it models: stores, frames and clients; and its own arithmetic."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from fleet_sparse import plan as model
from fleet_sparse.core.ids import NUM_BUCKETS, hash_ids
from fleet_sparse.core.initializer import uniform
from fleet_sparse.core.mode import Mode
from fleet_sparse.core.placement import Placement
from fleet_sparse.core.rules import RULES
from fleet_sparse.core.table import DenseSpec, Segment, TableSpec
from fleet_sparse.costs import Price, Prices, Work, parse_costs, shipped_costs
from fleet_sparse.embedded import local_dense, start_embedded
from fleet_sparse.errors import SettingError
from fleet_sparse.plan import Job, Limit, Machines, Times, plan
from fleet_sparse.pserver.storage import table_store
from fleet_sparse.settings import Settings
from fleet_sparse.wire import frames
from fleet_sparse.worker.modes.step import DenseUpdate, Lookup, RowsUpdate
from fleet_sparse.worker.modes.sync_async import PserverTraining
from fleet_sparse.worker.net.client import Client
from fleet_sparse.worker.rows.deduplicator import Deduplicator

COSTS = shipped_costs()
WARM = dataclasses.replace(COSTS, cold=0.0)
"""Of which a thread that is idle costs no more."""
ROOMY = Machines(memory_bytes=1e15, network_bits_per_s=1e15)
JOB = Job(rows=1e9, workers=10, compute_s=0.01)


def changed(job=JOB, **changes):
    return dataclasses.replace(job, **changes)


# Memory


def table(dim, rule):
    return TableSpec(name="planned", dim=dim, rule=rule, initializer=uniform(-0.1, 0.1))


@pytest.fixture
def filled():
    stores = []

    def fill(spec, num_rows, step=50_000):
        stores.append(table_store.TableStore(spec))
        for begin in range(0, num_rows, step):
            ids = hash_ids(np.arange(begin, min(begin + step, num_rows)), 0).view(np.int64)
            stores[-1].push(ids, np.zeros((len(ids), spec.dim), np.float32), 0.1, 1)
        return stores[-1]

    yield fill
    for each in stores:
        each.close()


@pytest.mark.parametrize(("dim", "rule"), [(8, "sgd"), (16, "adagrad"), (32, "adam")])
def test_memory_is_that_of_a_store_of_a_million_rows(filled, dim, rule) -> None:
    found = filled(table(dim, rule), 1_000_000)
    assert sum(model.store_bytes(1e6, dim, RULES[rule].num_states)) == pytest.approx(found.num_bytes, rel=0.05)


@pytest.mark.parametrize("num_rows", [10, 3_000, 40_000, 90_000, 110_000, 140_000, 160_000])
def test_index_has_the_cells_that_the_stores_has(filled, num_rows) -> None:
    # A segment may grow before its turn, if more ids than its share come to it.
    index = filled(table(4, "sgd"), num_rows, step=1_000)._index
    num_cells = int((1 << index.classes.astype(np.int64)).sum())
    assert model.index_bytes(num_rows) == pytest.approx(num_cells * model.CELL_BYTES, rel=0.05)


def test_notes_are_those_of_the_store(filled) -> None:
    assert model.store_bytes(70_000, 4, 0)[2] == filled(table(4, "sgd"), 70_000)._metadata.num_bytes


def test_pushes_of_a_sync_step_wait_in_memory() -> None:
    memory = {mode: model.memory_of(changed(mode=mode, dense=1000), COSTS, 4) for mode in model.MODES}
    assert memory["async"].staged == 0
    assert memory["sync"].staged == 10 * (JOB.distinct_ids * (8 + 4 * 16) + 4000) / 4


def test_least_pservers_have_the_memory_and_one_fewer_has_not() -> None:
    machines = Machines(memory_bytes=16e9)
    least = model.least_pservers(JOB, machines, COSTS)
    assert least > 1
    assert model.memory_of(JOB, COSTS, least).total <= 16e9 < model.memory_of(JOB, COSTS, least - 1).total


def test_numbers_of_states_are_those_of_the_rules() -> None:
    trainable = {name: rule.num_states for name, rule in RULES.items() if rule.kernel is not None and rule.trains}
    assert dict(COSTS.num_states) == trainable
    assert set(COSTS.rules) == set(trainable)


# The wire


@pytest.mark.parametrize(("count", "dim"), [(0, 1), (7, 4), (1000, 16)])
def test_a_frame_has_the_bytes_that_encode_makes(count, dim) -> None:
    ids, rows = np.arange(count), np.zeros((count, dim), np.float32)
    blocks = [frames.Block(frames.Action.PUSH, number, 5, dim, count, ids, rows, 0.1, 1) for number in range(3)]
    parts = frames.encode(frames.Frame(frames.Header(frames.Op.PUSH, push_seq=1), blocks))
    assert sum(len(memoryview(part).cast("B")) for part in parts) == model.frame_bytes(3, 3 * count, 3 * count * dim)


@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.parametrize("num_dense", [0, 900])
@pytest.mark.parametrize("num_pservers", [1, 3])
def test_traffic_is_what_a_client_sends_and_receives(num_pservers, num_dense, num_workers) -> None:
    specs = [dataclasses.replace(table(8, "sgd"), name=f"planned{number}") for number in range(2)]
    dense = DenseSpec("dense", "sgd", (), (Segment("values", 0, max(num_dense, 1), 1.0),))
    control, channel = start_embedded(Settings(), num_shards=num_pservers)
    with control:
        registrations = control.register([*specs, *([dense] if num_dense else [])], 0, num_workers)
        placement = Placement.even(num_pservers)
        with Client(channel, control.identity, registrations, placement, Settings()) as client:
            if num_dense:
                client.assign_dense(dense, np.zeros(num_dense, np.float32))
            training = PserverTraining(client, Deduplicator(placement), Mode(), num_workers, local_dense)
            unique = [Deduplicator(placement).unique([np.arange(500)], spec.salt)[0] for spec in specs]
            outs = [np.zeros((500, 8), np.float32) for _ in specs]
            values = np.zeros(num_dense, np.float32)
            for _ in range(2):  # before the first one, a worker that is alone reads what it will compute
                client.flush()
                before = client.bytes_sent, client.bytes_received
                training.prefetch([Lookup(*each) for each in zip(specs, unique, outs, strict=True)])
                rows = [RowsUpdate(*each, 0.1) for each in zip(specs, unique, outs, strict=True)]
                arrays = [DenseUpdate(dense, values, [values.copy()], 0.1)] if num_dense else []
                training.update(rows, arrays, 1.0)
            client.flush()
            spent = client.bytes_sent - before[0], client.bytes_received - before[1]
    job = Job(rows=1e4, dim=8, rule="sgd", tables=2, fields=2, batch=500, distinct=1.0)
    job = changed(job, dense=num_dense, workers=num_workers)
    assert spent == pytest.approx(model.traffic_of(job, num_pservers), rel=1e-9)


def test_a_pserver_without_ids_of_the_step_is_not_asked() -> None:
    job = Job(rows=1e9, fields=1, batch=1, distinct=1.0)
    assert model.work_of(job, 1000).requests == pytest.approx(2)
    assert model.work_of(changed(job, mode="sync"), 1000).requests == 2000


def test_limits_of_the_model_are_those_of_the_code() -> None:
    assert model.MAX_PSERVERS == NUM_BUCKETS
    assert model.MAX_DIM == frames.MAX_DIM
    assert model.MAX_BLOCK_DIM == table_store.MAX_BLOCK_DIM
    assert Settings().max_frame_bytes == model.MAX_FRAME_BYTES


# Time


def test_twice_the_workers_are_twice_the_load_of_a_pserver() -> None:
    one, two = (plan(changed(workers=workers), ROOMY, WARM, 4).times for workers in (10, 20))
    assert two.pserver_cpu == pytest.approx(2 * one.pserver_cpu)
    assert two.pserver_network == pytest.approx(2 * one.pserver_network)
    assert two.client == one.client


def test_no_step_is_shorter_than_what_it_needs_longest() -> None:
    for workers in (1, 8, 64, 512):
        for mode in model.MODES:
            found = plan(changed(workers=workers, mode=mode), Machines(1e15, 10e9), COSTS, 4)
            assert found.step_s >= max(found.times) * (1 - 1e-12)


@pytest.mark.parametrize("away_s", [0.0, 0.5, 20.0])
def test_one_worker_waits_for_its_own_service_only(away_s) -> None:
    assert model.waiting_s(1, away_s, 3.0) == pytest.approx(3.0)


def test_many_workers_keep_a_pserver_busy_all_the_time() -> None:
    assert 5.0 + model.waiting_s(1000, 5.0, 1.0) == pytest.approx(1000, rel=0.01)


def test_sync_waits_for_the_slowest_worker() -> None:
    even, uneven = (plan(changed(mode="sync", spread=spread), ROOMY, WARM, 4).step_s for spread in (0.0, 0.1))
    assert uneven - even == pytest.approx(0.01 * 0.1 * math.sqrt(2 * math.log(10)))


def test_one_worker_waits_for_nobody() -> None:
    even, uneven = (plan(changed(workers=1, mode="sync", spread=s), ROOMY, COSTS, 4).step_s for s in (0.0, 0.5))
    assert uneven == even


@pytest.mark.parametrize("mode", model.MODES)
@pytest.mark.parametrize("bits_per_s", [1e6, 1e9, 1e15])
def test_one_worker_at_one_pserver_pays_for_the_network_once(mode, bits_per_s) -> None:
    job = changed(workers=1, mode=mode, dense=1000)
    found = plan(job, Machines(1e15, bits_per_s), WARM, 1)
    times, cpu = found.times, model.cpu_of(job, ROOMY, WARM, 1)
    expected = times.program + times.client + times.worker_network + times.pserver_cpu + cpu.waited_io
    assert found.step_s == pytest.approx(expected - min(cpu.after_push, cpu.data / 2), rel=1e-9)


def test_one_worker_takes_the_same_in_sync_as_in_async() -> None:
    prices = dict.fromkeys(model.MODES, COSTS.prices["async"])
    costs = dataclasses.replace(COSTS, prices=prices)
    job = changed(workers=1, dense=1000)
    steps_s = {plan(changed(job, mode=mode), Machines(1e15, 1e9), costs, 1).step_s for mode in model.MODES}
    assert len(steps_s) == 1


def with_more_after_the_push(job):
    """Steps of a worker, and of one with 10 us more to do after its push."""
    cpu = model.cpu_of(job, ROOMY, COSTS, 1, 0.02)
    longer = cpu._replace(client=cpu.client + 1e-5, after_push=cpu.after_push + 1e-5)
    return [model.times_of(job, ROOMY, 1, each)[1] for each in (cpu, longer)]


def test_what_a_worker_does_after_a_push_that_it_does_not_wait_for_goes_on_beside_it() -> None:
    step_s, longer_s = with_more_after_the_push(changed(workers=1, dense=1000))
    assert longer_s == pytest.approx(step_s)


def test_what_a_worker_does_after_a_push_that_it_waits_for_comes_on_top() -> None:
    step_s, longer_s = with_more_after_the_push(changed(workers=2, dense=1000))
    assert longer_s > step_s


def test_a_crowd_is_the_share_of_processes_without_a_core() -> None:
    assert [ROOMY._replace(shared_cores=cores).crowd(8) for cores in (0, 8, 2)] == [0.0, 0.0, 0.75]


def test_processes_that_share_cores_pay_more() -> None:
    costs = dataclasses.replace(WARM, crowded=0.5)
    alone, crowded = (
        model.cpu_of(changed(workers=4), ROOMY._replace(shared_cores=cores), costs, 4) for cores in (0, 2)
    )
    assert crowded == pytest.approx([(1 + 0.5 * 0.75) * each for each in alone])


@pytest.mark.parametrize("mode", model.MODES)
def test_pservers_are_done_when_the_cores_have_done_the_work_of_all(mode) -> None:
    job = changed(workers=2, mode=mode, dense=1000)
    cpu = model.cpu_of(job, ROOMY, COSTS, 4, 0.02)
    times, _ = model.times_of(job, ROOMY._replace(shared_cores=2), 4, cpu)
    assert times.pserver_cpu / 2 + cpu.waited_io == pytest.approx(4 * (cpu.data + cpu.io) / 2)


def test_on_one_core_a_worker_takes_all_cpu_however_much_could_go_on_beside() -> None:
    job = changed(workers=1)
    cpu = model.Cpu(client=0.004, after_push=0.003, data=0.008, io=0.001, waited_io=0.0)
    _, step_s = model.times_of(job, ROOMY._replace(shared_cores=1), 1, cpu)
    assert step_s == pytest.approx(job.compute_s + 0.004 + 0.008 + 0.001)


def test_several_workers_take_more_than_their_path_and_more_than_the_cores_where_both_are_near() -> None:
    job = changed(workers=2)
    cpu = model.cpu_of(job, ROOMY, COSTS, 1, 0.02)
    _, path_s = model.times_of(job, ROOMY, 1, cpu)
    cores_s = 2 * (job.compute_s + cpu.client + cpu.data + cpu.io) / 2
    _, step_s = model.times_of(job, ROOMY._replace(shared_cores=2), 1, cpu)
    assert max(path_s, cores_s) < step_s < path_s + cores_s


def test_a_larger_dim_costs_more_and_lies_on_the_line_between_those_measured() -> None:
    low, middle, high = (COSTS.kernel_s("adam", dim, 1e6) for dim in (16, 40, 64))
    assert middle == pytest.approx((low + high) / 2)
    assert COSTS.kernel_s("adam", 4096, 1e6) > COSTS.kernel_s("adam", 256, 1e6) > high


def test_a_store_that_no_cache_holds_costs_more_up_to_the_largest_measured() -> None:
    near, far, farther = (COSTS.kernel_s("adagrad", 16, rows) for rows in (COSTS.kernel_rows, COSTS.far_rows, 1e12))
    assert far == farther == pytest.approx(near + 1e-9 * (COSTS.far_pull_ns + COSTS.far_push_ns))


def test_a_thread_that_is_idle_pays_more_and_one_that_is_busy_does_not() -> None:
    costs = dataclasses.replace(COSTS, cold=0.5)
    assert costs.slowdown(1.0, 1e9) == pytest.approx(1.5)
    assert costs.slowdown(1.0, 1.0) == costs.slowdown(1.0, 10.0, workers=10) == costs.slowdown(1.0, 0.5) == 1.0
    spent_s = costs.slowdown(1.0, 4.0)
    assert spent_s == pytest.approx(1.0 + 0.5 * (1 - spent_s / 4.0))


def test_costs_of_nothing_make_a_step_of_what_the_program_computes() -> None:
    nothing = {mode: Prices(*(Price() for _ in Prices._fields)) for mode in model.MODES}
    free = dataclasses.replace(
        COSTS,
        prices=nothing,
        kernel_rows=1,
        far_pull_ns=0,
        far_push_ns=0,
        pull_ns={1: 0, 2: 0},
        push_ns={"sgd": {1: 0, 2: 0}},
    )
    job = changed(rule="sgd", workers=2)
    assert plan(job, ROOMY, free, 1).step_s == pytest.approx(job.compute_s, rel=1e-5)


def test_what_threads_spend_is_that_of_the_step_that_it_makes() -> None:
    found = plan(changed(workers=4, compute_s=0.005), ROOMY, COSTS, 2)
    cpu = model.cpu_of(found.job, ROOMY, COSTS, 2, found.step_s)
    times, step_s = model.times_of(found.job, ROOMY, 2, cpu)
    assert step_s == pytest.approx(found.step_s, rel=1e-5)
    assert times.pserver_cpu == pytest.approx(found.times.pserver_cpu, rel=1e-5)
    assert found.times.client > model.cpu_of(found.job, ROOMY, COSTS, 2).client


def test_work_has_its_price() -> None:
    work = Work(steps=1, requests=2, rows=10, row_bytes=640)
    assert Price(steps=1000, requests=100, rows=7, row_bytes=0.5).seconds(work) == pytest.approx(1590e-9)


# What limits


@pytest.mark.parametrize(
    ("limit", "job", "machines"),
    [
        (Limit.worker_compute, {"compute_s": 10.0}, ROOMY),
        (Limit.worker_network, {"workers": 1, "dense": 1e7}, Machines(1e15, 1e6)),
        (Limit.pserver_network, {"workers": 100}, Machines(1e15, 1e6)),
        (Limit.pserver_cpu, {"workers": 1000, "compute_s": 0.0}, ROOMY),
        (Limit.memory, {}, Machines(1e9)),
        (Limit.slowest_worker, {"mode": "sync", "compute_s": 10.0, "spread": 1.0}, ROOMY),
        (Limit.pserver_cpu, {"mode": "sync", "workers": 1000, "compute_s": 0.0}, ROOMY),
    ],
)
def test_limit_is_named(limit, job, machines) -> None:
    assert plan(changed(**job), machines, COSTS, 4).limit is limit


SYNC_OF_NETWORK = Job(
    rows=2e9, dim=32, rule="adam", distinct=0.63, dense=3e6, workers=64, compute_s=0.045, spread=0.1, mode="sync"
)


@pytest.mark.parametrize("bits_per_s", [1e8, 1e9, 1e10, 1e12])
@pytest.mark.parametrize("workers", [2, 64])
@pytest.mark.parametrize("count", [1, 8, 104])
def test_terms_of_a_sync_step_add_up_to_it(bits_per_s, workers, count) -> None:
    found = plan(changed(SYNC_OF_NETWORK, workers=workers), Machines(1e15, bits_per_s, 8), COSTS, count)
    beside = found.times.beside(found.job)
    terms = {name: seconds for name, seconds in found.times._asdict().items() if name not in beside}
    assert sum(terms.values()) == pytest.approx(found.step_s, rel=1e-5)


def test_limit_of_sync_counts_both_directions_of_a_pservers_network() -> None:
    machines = Machines(1e15, 1e10, 8)
    found = plan(SYNC_OF_NETWORK, machines, COSTS, 104)
    assert found.limit is Limit.pserver_network
    share = 64 * 8 / 104
    assert found.times.pserver_network == pytest.approx(share * sum(found.traffic) * 8 / 1e10)
    larger = share * max(found.traffic) * 8 / 1e10
    assert larger < found.times.program + found.times.client < found.times.pserver_network


def test_what_goes_on_beside_longer_times_is_no_limit() -> None:
    times = Times(1.0, 0.0, 0.0, worker_network=2.0, pserver_cpu=2.0, pserver_io=1.0, pserver_network=4.0)
    job = changed(mode="sync")
    assert times.limit(job) is Limit.pserver_cpu
    assert times._replace(pserver_network=6.0, pserver_cpu=3.5).limit(job) is Limit.pserver_cpu
    assert times._replace(pserver_network=6.0).limit(job) is Limit.pserver_network


def test_one_workers_wait_for_io_is_pserver_cpu() -> None:
    times = Times(3.0, 0.0, 0.0, worker_network=0.0, pserver_cpu=2.0, pserver_io=1.5, pserver_network=0.0)
    assert times.limit(changed(workers=1)) is Limit.pserver_cpu
    assert times.limit(changed(workers=10)) is Limit.worker_compute


def test_pservers_are_added_while_twice_as_many_are_worth_it() -> None:
    job = changed(workers=100)
    found = plan(job, ROOMY, COSTS)
    assert found.num_pservers > found.least_pservers == 1
    assert found.step_s <= model.WORTH_TWICE * plan(job, ROOMY, COSTS, 2 * found.num_pservers).step_s
    for fewer in range(1, found.num_pservers // 2):
        assert plan(job, ROOMY, COSTS, fewer).step_s > model.WORTH_TWICE * plan(job, ROOMY, COSTS, 2 * fewer).step_s


def test_many_more_pservers_for_a_little_speed_are_not_chosen() -> None:
    job = Job(rows=1e11, workers=4000, compute_s=0.01)
    found = plan(job, Machines(), COSTS)
    assert found.num_pservers <= 2 * found.least_pservers


def test_pservers_of_one_machine_share_its_network() -> None:
    alone, together = (plan(JOB, Machines(1e15, 1e9, number), COSTS, 8) for number in (1, 4))
    assert together.times.pserver_network == 4 * alone.times.pserver_network
    assert (alone.num_machines, together.num_machines) == (8, 2)


def test_a_machine_has_no_more_pservers_than_there_are() -> None:
    alone, roomy = (plan(JOB, Machines(1e15, 1e9, number), COSTS, 1) for number in (1, 4))
    assert roomy.step_s == alone.step_s


def test_rates_of_pservers_and_workers_add_up() -> None:
    found = plan(JOB, ROOMY, COSTS, 4)
    taken, given = found.pserver_bits_per_s
    assert (10 * found.worker_bits_per_s[1], 10 * found.worker_bits_per_s[0]) == pytest.approx((4 * taken, 4 * given))
    assert found.examples_per_s == pytest.approx(10 * 512 / found.step_s)


# Zipf


@pytest.mark.parametrize("exponent", [0.8, 1.0, 1.1, 2.0])
def test_distinct_ids_of_zipf_are_those_of_the_sum(exponent) -> None:
    ranks = np.arange(1, 200_001, dtype=np.float64)
    probabilities = ranks**-exponent / (ranks**-exponent).sum()
    exact = float(-np.expm1(-5000 * probabilities).sum())
    assert model.distinct_of_zipf(5000, 200_000, exponent) == pytest.approx(exact, rel=0.005)


# What the benchmark measured


def job_of(check):
    return Job(**check["job"])


def test_predictions_that_are_shipped_are_those_of_the_model() -> None:
    machines = Machines(1e12, 1e15, shared_cores=COSTS.measured["cores"])
    for check in COSTS.checks:
        found = model.plan_on(job_of(check), machines, COSTS, check["pservers"])
        assert 1e6 * found.step_s == pytest.approx(check["predicted_us"], rel=0.001), check["name"]


# All the error paths


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": 0}, "plan: --rows is 0, should be 1 to 1e+15"),
        ({"rows": math.nan}, "plan: --rows is nan, should be 1 to"),
        ({"dim": 65536}, "plan: --dim is 65536, should be 1 to 65535"),
        ({"workers": -1}, "plan: --workers is -1, should be 1 to"),
        ({"tables": 20, "rows": 10}, "plan: --tables is 20, should be at most --rows, which is 10"),
        ({"batch": 0}, "plan: --batch is 0, should be 1"),
        ({"fields": 0}, "plan: --fields is 0, should be 1"),
        ({"distinct": 1.5}, "plan: --distinct is 1.5, should be a share of the ids"),
        ({"dense": -1.0}, "plan: --dense is -1, should be 0 to 1e+12"),
        ({"compute_s": -0.003}, "plan: --compute-ms is -3, should be 0 to 1e+12"),
        ({"compute_s": math.inf}, "plan: --compute-ms is inf, should be 0 to 1e+12"),
        ({"spread": -0.1}, "plan: --spread is -0.1, should be 0 to 1e+12"),
        ({"rule": "adamant"}, "plan: --optimizer is 'adamant', should be one of adagrad, adam"),
        ({"mode": "geo"}, "plan: --mode is 'geo', should be one of sync, async"),
    ],
)
def test_a_number_without_meaning_is_refused(change, message) -> None:
    with pytest.raises(SettingError) as caught:
        plan(changed(**change), ROOMY, COSTS)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("machines", "message"),
    [
        (Machines(0.0), "plan: --memory-gb is 0, should be above 0"),
        (Machines(math.inf), "plan: --memory-gb is inf, should be above 0, and finite"),
        (Machines(64e9, math.nan), "plan: --network-gbit is nan, should be above 0"),
        (Machines(64e9, 1e9, 0), "plan: pservers a machine is 0, should be 1 to"),
        (Machines(64e9, 1e9, shared_cores=-1), "plan: shared cores are -1, should be 0 or more"),
    ],
)
def test_a_machine_without_meaning_is_refused(machines, message) -> None:
    with pytest.raises(SettingError) as caught:
        plan(JOB, machines, COSTS)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("count", [0, 16385])
def test_a_number_of_pservers_that_cannot_be_is_refused(count) -> None:
    with pytest.raises(SettingError, match=f"plan: --pservers is {count}, should be 1 to 16384"):
        plan(JOB, ROOMY, COSTS, count)


def test_rows_that_no_number_of_pservers_holds_are_refused() -> None:
    with pytest.raises(SettingError, match=r"plan: --memory-gb is 1, should be at least \d+ for 16384 pservers.*Give"):
        plan(changed(rows=1e14), Machines(1e9), COSTS)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"prices": {"async": {"worker": {"gold": 1}}}}',
        '{"prices": {"async": {}, "sync": {}}}',
    ],
)
def test_what_is_no_costs_is_refused(text) -> None:
    with pytest.raises(SettingError, match=r"^costs: it cannot be read as costs .* should be what .* Measure again"):
        parse_costs(text, "costs")
