"""Programs with `max_row_lag`, `max_row_drift` and `row_cache`: what is refused, and jobs of one worker."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import paddle
import paddle.distributed.fleet as fleet
import pytest

import fleet_sparse
from fleet_sparse import machine_memory
from fleet_sparse.core.cache_limits import CacheLimits
from fleet_sparse.core.mode import ASYNC, GEO, SYNC, Mode
from fleet_sparse.core.row_bound import RowBound
from fleet_sparse.errors import PlanError
from fleet_sparse.plugin.active_session import active
from fleet_sparse.plugin.row_cache import cache_job
from fleet_sparse.plugin.static.minimize import minimize
from fleet_sparse.plugin.strategy import read_strategy
from support.programs import DIM, flagged, ids_input, linear, start, weight
from support.row_bounds import max_held

LOGGER = "fleet_sparse.plugin.row_cache"


@pytest.fixture(autouse=True)
def roles(plugin):
    fleet.init()


def strategy_of(*, is_async=True, k_steps=0, **fields):
    made = fleet_sparse.PserverStrategy(**fields)
    made.a_sync = is_async
    if k_steps:
        made.a_sync_configs = {"k_steps": k_steps}
    return made


def minimize_for(num_workers, optimizer=None, **fields):
    loss = paddle.mean(linear(flagged(ids_input(), value=0.0)))
    optimizer = optimizer or paddle.optimizer.SGD(1.0)
    strategy = strategy_of(**fields)
    minimize(active(), loss, optimizer, strategy, None, None, num_pserver_processes=2, num_workers=num_workers)
    return active().catalog


def test_bound_without_options_has_the_default_cache():
    read = read_strategy(strategy_of(max_row_lag=100))
    assert read.mode == Mode(ASYNC, row_bound=RowBound(100, 0.25))
    assert read.row_cache == fleet_sparse.RowCache()
    read = read_strategy(strategy_of(is_async=False, max_row_drift=0.02))
    assert read.mode == Mode(SYNC, row_bound=RowBound(drift=0.02))


@pytest.mark.guarantee("H5")
def test_lag_of_zero_is_no_cache():
    read = read_strategy(strategy_of(max_row_lag=0, row_cache=fleet_sparse.RowCache()))
    assert (read.mode, read.row_cache) == (Mode(ASYNC), None)


@pytest.mark.guarantee("H5")
def test_lag_of_zero_goes_with_windows():
    read = read_strategy(strategy_of(max_row_lag=0, k_steps=4))
    assert (read.mode.kind, read.mode.row_bound, read.row_cache) == (GEO, None, None)


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"max_row_lag": 1, "max_row_drift": 0.1}, "max_row_lag"),
        ({"max_row_lag": -1}, "max_row_lag"),
        ({"max_row_lag": 2.5}, "max_row_lag"),
        ({"max_row_lag": True}, "max_row_lag"),
        ({"max_row_drift": 0.0}, "max_row_drift"),
        ({"max_row_drift": float("inf")}, "max_row_drift"),
        ({"max_row_drift": 1e-7}, "1e-05"),
        ({"max_row_drift": "much"}, "max_row_drift"),
        ({"max_row_lag": 5, "max_row_lag_share": 0}, "share"),
        ({"max_row_lag": 5, "max_row_lag_share": 1.5}, "share"),
        ({"max_row_lag": 5, "max_row_lag_share": "all"}, "max_row_lag_share"),
        ({"max_row_lag": 5, "k_steps": 4}, "k_steps"),
        ({"max_row_lag": 5, "refuse_ids_past_size": True}, "refuse_ids_past_size"),
        ({"max_row_drift": 0.1, "row_cache": fleet_sparse.RowCache(hold_back=3)}, "hold_back"),
        ({"row_cache": fleet_sparse.RowCache()}, "max_row_drift"),
        ({"max_row_lag": 5, "row_cache": {"max_rows": 3}}, "row_cache"),
        ({"row_cache": "x"}, "row_cache"),
        ({"max_row_lag_share": 5}, "max_row_lag_share"),
        ({"max_row_lag_share": -1, "max_row_lag": 0}, "max_row_lag_share"),
        ({"max_row_lag_share": 7, "max_row_drift": 0.1}, "max_row_lag_share"),
        ({"max_row_lag_share": 0.5, "max_row_drift": 0.1}, "max_row_lag_share"),
        ({"max_row_lag_share": 0.5}, "max_row_lag_share"),
        ({"max_row_lag_share": float("nan"), "max_row_lag": 5}, "max_row_lag_share"),
    ],
)
def test_bound_that_has_no_meaning_is_refused(fields, name):
    with pytest.raises(PlanError, match=name):
        read_strategy(strategy_of(**fields))


@pytest.mark.parametrize(
    "options",
    [
        {"max_bytes": 0},
        {"max_bytes": 1.5},
        {"max_rows": 0},
        {"min_dim": 0},
        {"min_dim": None},
        {"hold_back": -1},
        {"merge": "max"},
        {"policy": "fifo"},
        {"admit": "none"},
        {"policy": "lru"},  # counts no uses, which "estimate" compares
    ],
)
def test_option_of_a_cache_that_has_no_meaning_is_refused(options):
    with pytest.raises(PlanError, match=next(iter(options))):
        fleet_sparse.RowCache(**options)


def clipping():
    return paddle.optimizer.SGD(0.1, grad_clip=paddle.nn.ClipGradByGlobalNorm(1.0))


def ftrl():
    return fleet_sparse.PserverOptimizer("ftrl", 0.1)


def clipping_ftrl():
    return fleet_sparse.PserverOptimizer("ftrl", 0.1, grad_clip=paddle.nn.ClipGradByGlobalNorm(1.0))


@pytest.mark.parametrize(
    ("optimizer", "is_async", "hold_back"),
    [(ftrl, True, None), (clipping, False, 0), (clipping_ftrl, False, 0)],
    ids=["rule without merge", "norm of a merged step", "both"],
)
def test_updates_that_cannot_be_held_back_are_not(optimizer, is_async, hold_back):
    catalog = minimize_for(2, optimizer(), is_async=is_async, max_row_lag=100)
    assert catalog.row_cache == fleet_sparse.RowCache(hold_back=hold_back)
    with paddle.static.program_guard(paddle.static.Program(), paddle.static.Program()), pytest.raises(PlanError):
        minimize_for(2, optimizer(), is_async=is_async, max_row_lag=100, row_cache=fleet_sparse.RowCache(hold_back=3))


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("first", ["adagrad", "ftrl"])
def test_programs_may_have_rules_with_and_without_merge(is_async, first):
    for name in (first, "ftrl" if first == "adagrad" else "adagrad"):
        with paddle.static.program_guard(paddle.static.Program(), paddle.static.Program()):
            loss = paddle.mean(flagged(ids_input(), value=0.0, name=name))
            optimizer = fleet_sparse.PserverOptimizer(name, 0.1)
            strategy = strategy_of(is_async=is_async, max_row_lag=9)
            minimize(active(), loss, optimizer, strategy, None, None, num_pserver_processes=2, num_workers=2)
    assert sorted(spec.rule for spec in active().catalog.tables.values()) == ["adagrad", "ftrl"]
    assert active().catalog.row_cache == fleet_sparse.RowCache()


def test_norm_clip_beside_held_updates_is_refused():
    minimize_for(2, is_async=False, max_row_lag=100)
    another = paddle.static.program_guard(paddle.static.Program(), paddle.static.Program())
    with another, pytest.raises(PlanError, match="hold_back=0"):
        loss = paddle.mean(flagged(ids_input(), value=0.0, name="other"))
        strategy = strategy_of(is_async=False, max_row_lag=100)
        minimize(active(), loss, clipping(), strategy, None, None, num_pserver_processes=2, num_workers=2)


@pytest.mark.parametrize(
    ("num_workers", "is_async", "has_limits"), [(1, False, False), (2, True, False), (2, False, True)]
)
def test_sync_workers_agree_on_the_limits_of_their_caches(num_workers, is_async, has_limits):
    row_cache = fleet_sparse.RowCache(max_bytes=1 << 20, max_rows=30, min_dim=4, hold_back=2, merge="avg")
    catalog = minimize_for(num_workers, is_async=is_async, max_row_lag=100, row_cache=row_cache)
    limits = CacheLimits(max_bytes=1 << 20, max_rows=30, min_dim=4, hold_back=2, merge="avg")
    assert catalog.mode.cache_limits == (limits if has_limits else None)


@pytest.mark.parametrize(
    ("is_async", "merge", "of_worker", "of_merge"),
    [(False, None, 1.0, 0.25), (False, "avg", 1.0, 0.25), (True, None, 1.0, 1.0), (True, "avg", 0.25, 1.0)],
)
def test_copies_weigh_gradients_as_the_mode_does(is_async, merge, of_worker, of_merge):
    row_cache = fleet_sparse.RowCache(merge=merge)
    read = read_strategy(strategy_of(is_async=is_async, max_row_lag=100, row_cache=row_cache))
    assert cache_job(row_cache, read.mode, 4).weights == (of_worker, of_merge)


def test_sum_of_updates_is_refused_where_gradients_are_averaged():
    with pytest.raises(PlanError, match="merge"):
        minimize_for(2, is_async=False, max_row_lag=100, row_cache=fleet_sparse.RowCache(merge="sum"))


def test_one_worker_holds_updates_of_every_rule():
    catalog = minimize_for(1, fleet_sparse.PserverOptimizer("ftrl", 0.1), max_row_lag=100)
    assert catalog.row_cache == fleet_sparse.RowCache()


@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_updates_of_rows_that_travel_rounded_are_not_held_back(monkeypatch, caplog, num_workers, dtype):
    monkeypatch.setattr(active(), "settings", replace(active().settings, rows_dtype=dtype))
    with caplog.at_level("INFO", LOGGER):
        catalog = minimize_for(num_workers, max_row_lag=100)
    assert catalog.row_cache == fleet_sparse.RowCache(hold_back=0)
    assert [dtype in record.getMessage() for record in caplog.records if record.name == LOGGER] == [True]
    with paddle.static.program_guard(paddle.static.Program(), paddle.static.Program()), pytest.raises(PlanError):
        minimize_for(num_workers, max_row_lag=100, row_cache=fleet_sparse.RowCache(hold_back=3))


@pytest.mark.parametrize(("num_workers", "lag", "is_warned_of"), [(2, 1, True), (2, 2, False), (8, 19, True)])
def test_lag_that_lets_nothing_be_held_back_is_warned_of(caplog, num_workers, lag, is_warned_of):
    minimize_for(num_workers, max_row_lag=lag)
    found = [record.args for record in caplog.records if record.name == LOGGER and record.levelname == "WARNING"]
    assert found == [(lag, num_workers, 3 * num_workers - 4, 10 * num_workers)] * is_warned_of
    assert is_warned_of == (not max_held(RowBound(lag), np.array([0], np.uint32), num_workers)[0])


@pytest.mark.parametrize(
    ("num_workers", "options"),
    [(1, {"max_row_lag": 1}), (8, {"max_row_lag": 1, "row_cache": fleet_sparse.RowCache(hold_back=0)})],
    ids=["one worker", "none is held"],
)
def test_small_lag_is_not_warned_of_where_it_matters_not(caplog, num_workers, options):
    minimize_for(num_workers, **options)
    assert not [record for record in caplog.records if record.name == LOGGER and record.levelname == "WARNING"]


def test_cache_that_is_larger_than_free_memory_is_refused():
    with pytest.raises(PlanError, match="max_bytes"):
        minimize_for(2, max_row_lag=100, row_cache=fleet_sparse.RowCache(max_bytes=1 << 60))


def test_cache_of_few_rows_needs_little_memory(monkeypatch):
    monkeypatch.setattr(machine_memory, "available_bytes", lambda: 10 << 20)
    few = fleet_sparse.RowCache(max_rows=10)
    assert minimize_for(2, max_row_lag=100, row_cache=few).row_cache == few


def test_tables_that_are_not_cached_need_no_memory(monkeypatch):
    monkeypatch.setattr(machine_memory, "available_bytes", lambda: 10_000)
    wide = fleet_sparse.RowCache(min_dim=DIM + 1)
    assert minimize_for(2, max_row_lag=100, row_cache=wide).row_cache == wide


def test_memory_is_checked_for_all_tables_of_a_program(monkeypatch):
    row_bytes = 2 * 4 * DIM + 60  # a row, its base, and what a cache knows of it
    monkeypatch.setattr(machine_memory, "available_bytes", lambda: 10_000 * row_bytes)
    of_each = fleet_sparse.RowCache(max_rows=6_000)

    def minimized(num_tables):
        with paddle.static.program_guard(paddle.static.Program(), paddle.static.Program()):
            ids = ids_input()
            rows = [flagged(ids, value=0.0, name=f"t{number}") for number in range(num_tables)]
            strategy = strategy_of(max_row_lag=100, row_cache=of_each)
            loss = paddle.mean(linear(sum(rows[1:], rows[0])))
            optimizer = paddle.optimizer.SGD(1.0)
            minimize(active(), loss, optimizer, strategy, None, None, num_pserver_processes=2, num_workers=2)

    minimized(1)
    with pytest.raises(PlanError, match="max_bytes"):
        minimized(4)


@pytest.mark.guarantee("H11")
def test_first_barrier_after_steps_drops_no_copies():
    loss = paddle.mean(linear(flagged(ids_input(), value=0.0)))
    strategy = strategy_of(is_async=False, max_row_lag=100)
    fleet.distributed_optimizer(paddle.optimizer.SGD(1.0), strategy).minimize(loss)
    executor = start()
    for _ in range(4):
        executor.run(feed={"ids": np.arange(6)}, fetch_list=[loss])
    fleet.barrier_worker()
    assert fleet_sparse.stats()["row_cache"]["emb"]["rows"] == 6
    fleet.stop_worker()


@pytest.mark.parametrize("optimizer", [paddle.optimizer.SGD, paddle.optimizer.Adam], ids=["sgd", "adam"])
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize(
    ("bound", "looks_ahead"),
    [
        ({"max_row_lag": 10}, False),
        ({"max_row_lag": 10, "max_row_lag_share": None}, True),
        ({"max_row_drift": 0.1}, True),
    ],
    ids=["plain", "looking ahead", "drift, looking ahead"],
)
@pytest.mark.guarantee("H4")
def test_one_worker_trains_as_without_a_cache_bit_by_bit(
    tmp_path, monkeypatch, optimizer, is_async, bound, looks_ahead
):
    monkeypatch.setenv("FLEET_SPARSE_ROOT", str(tmp_path))
    results = []
    for fields in ({}, {**bound, "row_cache": fleet_sparse.RowCache(max_rows=8)}):
        fleet_sparse.uninstall()  # one process has one mode
        fleet_sparse.install()
        fleet.init()
        scope, guard = (
            paddle.static.Scope(),
            paddle.static.program_guard(paddle.static.Program(), paddle.static.Program()),
        )
        with guard, paddle.static.scope_guard(scope):
            rng = np.random.default_rng(0)
            loss = paddle.mean(linear(flagged(ids_input(), value=None)) ** 2)
            arguments = {"lazy_mode": True} if optimizer is paddle.optimizer.Adam else {}
            strategy = strategy_of(is_async=is_async, **fields)
            fleet.distributed_optimizer(optimizer(0.1, **arguments), strategy).minimize(loss)
            executor = start()
            losses = []
            feeds = [{"ids": rng.integers(0, 30, 6)} for _ in range(80)]
            for step, feed in enumerate(fleet_sparse.look_ahead(feeds) if looks_ahead else feeds):
                losses += executor.run(feed=feed, fetch_list=[loss])
                if step == 20:
                    fleet.save_persistables(executor, f"model{len(fields)}")
                elif step == 40:
                    fleet.load_model(f"model{len(fields)}", 0)
                elif step == 60:
                    assert fleet_sparse.shrink(min_norm=0.5)[0].num_removed > 0
            results.append(([loss.tobytes() for loss in losses], weight().tobytes()))
            stats = fleet_sparse.stats()["row_cache"]
            assert list(stats) == (["emb"] if fields else [])
            assert all(each["hits"] > 0 and each["left"] > 0 for each in stats.values())
            fleet.stop_worker()
    assert results[0] == results[1]


def test_scheduled_save_that_would_miss_updates_is_refused(monkeypatch):
    minimize_for(1, is_async=False, max_row_lag=100)
    start()
    connection = active().connection("test")
    monkeypatch.setattr(type(connection.training), "holds_back", True)  # as in a job of several workers
    with pytest.raises(PlanError, match="seconds"):
        fleet_sparse.save_every("model", seconds=1.0)
    fleet_sparse.save_every("model", steps=10)
    fleet.stop_worker()


def test_scheduled_save_is_checked_again_when_a_program_trains(monkeypatch):
    loss = paddle.mean(linear(flagged(ids_input(), value=None)))
    fleet.distributed_optimizer(paddle.optimizer.SGD(0.1), strategy_of(max_row_lag=100)).minimize(loss)
    executor = start()
    fleet_sparse.save_every("model", seconds=1.0)
    connection = active().connection("test")
    monkeypatch.setattr(type(connection.training), "holds_back", True)  # as of a program minimized after init_worker
    with pytest.raises(PlanError, match="seconds"):
        executor.run(feed={"ids": np.arange(6)}, fetch_list=[loss])
    fleet.stop_worker()
