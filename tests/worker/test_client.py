from __future__ import annotations

import gc
import itertools
import os
import random
import re
import signal
import threading
import time
import weakref
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from fleet_sparse.core.placement import Placement
from fleet_sparse.core.table import TableSpec
from fleet_sparse.errors import ErrorCode, FleetSparseError, ProtocolError, PushRefused, ShardUnavailable, TableMismatch
from fleet_sparse.settings import Settings
from fleet_sparse.worker.batch import Deduplicator, UniqueIds
from fleet_sparse.worker.channel import Buffer
from fleet_sparse.worker.client import Client
from fleet_sparse.worker.shard_link import ClientIdentity
from support.in_process import InProcessCluster

Quick = Callable[..., Settings]


def unique_of(cluster: InProcessCluster, spec: TableSpec, ids: Sequence[int]) -> UniqueIds:
    unique, _ = Deduplicator(cluster.placement).unique([np.array(ids, np.int64)], spec.salt)
    return unique


def pulled(cluster: InProcessCluster, client: Client, spec: TableSpec, ids: Sequence[int]) -> dict[int, list[float]]:
    unique = unique_of(cluster, spec, ids)
    out = np.full((len(unique.ids), spec.dim), np.nan, np.float32)
    client.pull([(spec, unique, out)])
    return dict(zip(unique.ids.tolist(), out.tolist(), strict=True))


def push(
    cluster: InProcessCluster, client: Client, spec: TableSpec, ids: Sequence[int], gradient: float = 1.0, step: int = 1
) -> None:
    unique = unique_of(cluster, spec, ids)
    grads = np.full((len(unique.ids), spec.dim), gradient, np.float32)
    client.push([(spec, unique, grads)], learning_rate=0.25, optimizer_step=step)


def shard_with(cluster: InProcessCluster, spec: TableSpec, shard: int) -> int:
    """An id that a shard owns."""
    ids = np.arange(1000, dtype=np.int64)
    return int(ids[cluster.placement.shard_of(ids, spec.salt) == shard][0])


# Rows


def test_rows_begin_at_their_initial_value(cluster: InProcessCluster) -> None:
    rows = pulled(cluster, cluster.client(), cluster.table, [5, -1, 2**63 - 1])
    assert rows == {5: [1.0] * 4, -1: [1.0] * 4, 2**63 - 1: [1.0] * 4}


def test_a_pull_sees_the_pushes_before_it(cluster: InProcessCluster) -> None:
    client = cluster.client()
    for _ in range(3):
        push(cluster, client, cluster.table, range(50))
    assert set(map(tuple, pulled(cluster, client, cluster.table, range(50)).values())) == {(0.25,) * 4}


def test_only_pushed_rows_change(cluster: InProcessCluster) -> None:
    client = cluster.client()
    push(cluster, client, cluster.table, [1, 2])
    assert pulled(cluster, client, cluster.table, [2, 3]) == {2: [0.75] * 4, 3: [1.0] * 4}


def test_rows_are_written_in_place(cluster: InProcessCluster) -> None:
    unique = unique_of(cluster, cluster.table, range(10))
    whole = np.zeros((12, 4), np.float32)
    cluster.client().pull([(cluster.table, unique, whole[1:11])])
    assert whole[:, 0].tolist() == [0] + [1] * 10 + [0]


def test_one_frame_a_shard_carries_all_tables(cluster: InProcessCluster) -> None:
    client = cluster.client()
    tables = [(cluster.table, unique_of(cluster, cluster.table, range(20)), np.empty((20, 4), np.float32))]
    tables.append((cluster.other, unique_of(cluster, cluster.other, range(30)), np.empty((30, 3), np.float32)))
    client.pull(tables)
    assert cluster.channel.num_sent == [1, 1]
    assert (set(tables[0][2].flat), set(tables[1][2].flat)) == ({1.0}, {2.0})


def test_a_shard_without_ids_gets_no_frame(cluster: InProcessCluster) -> None:
    client = cluster.client()
    pulled(cluster, client, cluster.table, [shard_with(cluster, cluster.table, 1)])
    assert cluster.channel.num_sent == [0, 1]


def test_no_ids_need_no_frame(cluster: InProcessCluster) -> None:
    client = cluster.client()
    assert pulled(cluster, client, cluster.table, []) == {}
    push(cluster, client, cluster.table, [])
    client.flush()
    assert cluster.channel.num_sent == [0, 0]


def test_one_learning_rate_and_step_a_table(cluster: InProcessCluster) -> None:
    client = cluster.client()
    pushes = [
        (spec, unique_of(cluster, spec, [9]), np.ones((1, spec.dim), np.float32))
        for spec in (cluster.table, cluster.other)
    ]
    client.push(pushes, learning_rate=[0.5, 0.25], optimizer_step=[3, 4])
    assert pulled(cluster, client, cluster.table, [9]) == {9: [0.5] * 4}
    assert pulled(cluster, client, cluster.other, [9]) == {9: [1.75] * 3}
    steps = {state.name: state.optimizer_step for shard in cluster.shards for state in shard.states() if state.num_rows}
    assert steps == {"table": 3, "other": 4}


def test_large_requests_are_split(cluster: InProcessCluster, quick: Quick) -> None:
    client = cluster.client(quick(max_frame_bytes=1000))
    for _ in range(2):
        push(cluster, client, cluster.table, range(500))
    rows = pulled(cluster, client, cluster.table, range(500))
    assert set(map(tuple, rows.values())) == {(0.5,) * 4}
    assert sum(cluster.channel.num_sent) > 20


def test_a_split_push_larger_than_the_window_goes_through(cluster: InProcessCluster, quick: Quick) -> None:
    client = cluster.client(quick(max_frame_bytes=1000, max_inflight_pushes=2, max_inflight_bytes=1500))
    push(cluster, client, cluster.table, range(500))
    assert set(map(tuple, pulled(cluster, client, cluster.table, range(500)).values())) == {(0.75,) * 4}


def test_counters_count(cluster: InProcessCluster) -> None:
    client = cluster.client()
    push(cluster, client, cluster.table, range(10))
    pulled(cluster, client, cluster.table, range(30))
    client.flush()
    assert (client.num_pushed_rows, client.num_pulled_rows) == (10, 30)
    assert client.bytes_sent > 10 * (8 + 16) + 30 * 8
    assert client.bytes_received > 30 * 16


def test_flush_waits_for_the_acks(cluster: InProcessCluster) -> None:
    client = cluster.client()
    push(cluster, client, cluster.table, range(100))
    client.flush()
    assert sum(state.num_rows for shard in cluster.shards for state in shard.states()) == 100


def test_close_waits_for_the_acks(cluster: InProcessCluster) -> None:
    with cluster.client() as client:
        push(cluster, client, cluster.table, range(100))
    assert sum(state.num_rows for shard in cluster.shards for state in shard.states()) == 100


def test_arrays_are_let_go_after_the_call(cluster: InProcessCluster) -> None:
    client = cluster.client()
    gc.disable()  # cycles would keep Paddle's memory until some later collection
    try:
        unique = unique_of(cluster, cluster.table, range(10))
        array = np.ones((10, 4), np.float32)
        client.pull([(cluster.table, unique, array)])
        client.push([(cluster.table, unique, array)], learning_rate=0.1, optimizer_step=1)
        client.flush()
        pulled(cluster, client, cluster.table, [1])  # the I/O thread has gone on
        gone = weakref.ref(array)
        del array
        assert gone() is None
    finally:
        gc.enable()


# Dense values


def test_dense_values_are_what_was_assigned(cluster: InProcessCluster) -> None:
    client = cluster.client()
    client.assign_dense(cluster.dense, np.arange(10, dtype=np.float32))
    out = np.empty(10, np.float32)
    client.pull_dense(cluster.dense, out)
    assert out.tolist() == list(range(10))


def test_an_exchange_returns_the_values_after_it(cluster: InProcessCluster) -> None:
    client = cluster.client()
    client.assign_dense(cluster.dense, np.zeros(10, np.float32))
    out = np.empty(10, np.float32)
    client.exchange_dense(cluster.dense, np.ones(10, np.float32), out, learning_rate=0.5, optimizer_step=1)
    assert out.tolist() == [-0.5] * 7 + [-1.0] * 3


def test_a_lost_reply_to_an_exchange_applies_it_once(cluster: InProcessCluster) -> None:
    client = cluster.client()
    client.assign_dense(cluster.dense, np.zeros(10, np.float32))
    lost = iter([True, True, False])
    cluster.channel.loses_reply = lambda shard: next(lost, False)
    out = np.empty(10, np.float32)
    client.exchange_dense(cluster.dense, np.ones(10, np.float32), out, learning_rate=0.5, optimizer_step=1)
    assert out.tolist() == [-0.5] * 7 + [-1.0] * 3


def test_dense_values_never_assigned_are_not_ready(cluster: InProcessCluster) -> None:
    with pytest.raises(ProtocolError, match="no worker assigned its first values yet") as caught:
        cluster.client().pull_dense(cluster.dense, np.empty(10, np.float32))
    assert caught.value.code is ErrorCode.NOT_READY


# A push that fails after it was accepted


def refused(cluster: InProcessCluster, client: Client, number: int) -> None:
    """Pushes a NaN to one shard and waits until it is refused."""
    push(cluster, client, cluster.table, [number], gradient=float("nan"))
    until = time.monotonic() + 10
    while not client._failures and time.monotonic() < until:
        time.sleep(0.001)


def test_a_refused_push_is_raised_by_the_next_call(cluster: InProcessCluster) -> None:
    client = cluster.client()
    refused(cluster, client, 5)
    with pytest.raises(PushRefused, match=r"shard \d at pserver:\d: table 'table': 4 of 4 gradients are NaN"):
        pulled(cluster, client, cluster.table, [5])


def test_a_refused_push_is_raised_once(cluster: InProcessCluster) -> None:
    client = cluster.client()
    refused(cluster, client, 5)
    with pytest.raises(PushRefused):
        client.flush()
    assert pulled(cluster, client, cluster.table, [5]) == {5: [1.0] * 4}


def insisted(call: Callable[[], dict[int, list[float]] | None]) -> dict[int, list[float]]:
    """Calls again after each refusal of an earlier push."""
    while True:
        try:
            return call() or {}
        except PushRefused:
            continue


def test_pushes_around_a_refused_one_are_applied_once(cluster: InProcessCluster) -> None:
    client = cluster.client()
    for gradient in (1.0, float("nan"), 1.0, float("nan"), 1.0):
        insisted(lambda gradient=gradient: push(cluster, client, cluster.table, range(10), gradient))  # type: ignore[misc]
    insisted(client.flush)
    rows = insisted(lambda: pulled(cluster, client, cluster.table, range(10)))
    assert set(map(tuple, rows.values())) == {(0.25,) * 4}


def test_flush_raises_what_failed(cluster: InProcessCluster) -> None:
    client = cluster.client()
    push(cluster, client, cluster.table, [5], gradient=float("inf"))
    with pytest.raises(PushRefused):
        client.flush()


def test_close_raises_what_failed_and_closes(cluster: InProcessCluster) -> None:
    client = cluster.client()
    push(cluster, client, cluster.table, [5], gradient=float("inf"))
    with pytest.raises(PushRefused):
        client.close()
    client.close()
    assert not client._thread.is_alive()


# Lost, late and silent


@pytest.mark.parametrize("seed", range(3))
def test_with_any_loss_every_push_is_applied_once(cluster: InProcessCluster, quick: Quick, seed: int) -> None:
    client = cluster.client(quick(retry_s=0.01))
    chance = random.Random(seed)
    cluster.channel.loses_request = lambda shard: chance.random() < 0.2
    cluster.channel.loses_reply = lambda shard: chance.random() < 0.2
    expected: dict[int, float] = dict.fromkeys(range(40), 1.0)
    for step in range(1, 60):
        ids = chance.sample(range(40), 15)
        push(cluster, client, cluster.table, ids, gradient=float(step % 5), step=step)
        for number in ids:
            expected[number] -= 0.25 * (step % 5)
        if step % 10 == 0:
            assert pulled(cluster, client, cluster.table, range(40)) == {n: [v] * 4 for n, v in expected.items()}
    client.flush()
    cluster.channel.loses_request = cluster.channel.loses_reply = lambda shard: False
    assert pulled(cluster, client, cluster.table, range(40)) == {n: [v] * 4 for n, v in expected.items()}


def test_a_lost_ack_applies_the_push_once(cluster: InProcessCluster) -> None:
    client = cluster.client()
    lost = iter([True])
    cluster.channel.loses_reply = lambda shard: next(lost, False)
    push(cluster, client, cluster.table, [3])
    client.flush()
    assert pulled(cluster, client, cluster.table, [3]) == {3: [0.75] * 4}
    assert sum(cluster.channel.num_sent) == 3


def test_a_silent_shard_is_named_within_the_deadline(cluster: InProcessCluster, quick: Quick) -> None:
    client = cluster.client(quick(deadline_s=0.4))
    cluster.channel.loses_request = lambda shard: shard == 1
    begun = time.monotonic()
    with pytest.raises(ShardUnavailable, match=r"shard 1 at pserver:1: no answer to a PULL in 0\.\d s, sent \d times"):
        pulled(cluster, client, cluster.table, range(50))
    assert time.monotonic() - begun < 5


def test_replies_that_came_while_the_worker_was_suspended_count(cluster: InProcessCluster, quick: Quick) -> None:
    client = cluster.client(quick(deadline_s=0.3))
    suspended = threading.Event()
    receive = cluster.channel.receive

    def after_a_pause(timeout_s: float) -> tuple[int, list[Buffer]] | None:
        message = receive(timeout_s)
        if message is not None and not suspended.is_set():
            suspended.set()
            time.sleep(0.5)
        return message

    cluster.channel.receive = after_a_pause  # type: ignore[method-assign]
    assert len(pulled(cluster, client, cluster.table, range(50))) == 50
    assert suspended.is_set()


def test_a_pull_may_be_repeated_after_its_deadline(cluster: InProcessCluster, quick: Quick) -> None:
    client = cluster.client(quick(deadline_s=0.2))
    cluster.channel.loses_request = lambda shard: True
    with pytest.raises(ShardUnavailable):
        pulled(cluster, client, cluster.table, [1])
    cluster.channel.loses_request = lambda shard: False
    assert pulled(cluster, client, cluster.table, [1]) == {1: [1.0] * 4}


def test_a_push_past_its_deadline_fails_the_shard_for_good(cluster: InProcessCluster, quick: Quick) -> None:
    client = cluster.client(quick(deadline_s=0.2))
    cluster.channel.loses_request = lambda shard: True
    push(cluster, client, cluster.table, [1])
    with pytest.raises(ShardUnavailable, match="no answer to a PUSH"):
        client.flush()
    cluster.channel.loses_request = lambda shard: False
    for _ in range(2):
        with pytest.raises(ShardUnavailable, match="no answer to a PUSH"):
            pulled(cluster, client, cluster.table, [1])
    with pytest.raises(ShardUnavailable, match="no answer to a PUSH"):
        client.flush()


def test_other_shards_go_on(cluster: InProcessCluster, quick: Quick) -> None:
    client = cluster.client(quick(deadline_s=0.2))
    cluster.channel.loses_request = lambda shard: shard == 0
    push(cluster, client, cluster.table, [shard_with(cluster, cluster.table, 0)])
    with pytest.raises(ShardUnavailable):
        client.flush()
    mine = shard_with(cluster, cluster.table, 1)
    assert pulled(cluster, client, cluster.table, [mine]) == {mine: [1.0] * 4}


def test_a_full_window_holds_pushes_back(cluster: InProcessCluster, quick: Quick) -> None:
    client = cluster.client(quick(max_inflight_pushes=2))
    cluster.channel.loses_reply = lambda shard: True
    number = shard_with(cluster, cluster.table, 0)
    done: list[int] = []

    def work() -> None:
        for step in range(1, 6):
            push(cluster, client, cluster.table, [number], step=step)
            done.append(step)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(0.5)
    assert (thread.is_alive(), len(done)) == (True, 2)
    cluster.channel.loses_reply = lambda shard: False
    thread.join()
    assert pulled(cluster, client, cluster.table, [number]) == {number: [1.0 - 5 * 0.25] * 4}


def test_a_window_that_stays_full_ends_at_the_deadline(cluster: InProcessCluster, quick: Quick) -> None:
    client = cluster.client(quick(max_inflight_pushes=1, deadline_s=0.3))
    cluster.channel.loses_request = lambda shard: True
    push(cluster, client, cluster.table, [1])
    begun = time.monotonic()
    with pytest.raises(ShardUnavailable):
        push(cluster, client, cluster.table, [1], step=2)
    assert time.monotonic() - begun < 5


def test_a_push_that_finds_no_room_until_its_deadline_is_told_so(cluster: InProcessCluster, quick: Quick) -> None:
    client = cluster.client(quick(max_inflight_pushes=1, deadline_s=0.3, retry_s=0.2))
    lost = itertools.cycle([True, False])  # every push takes 0.2 s, and is sent twice
    cluster.channel.loses_request = lambda shard: next(lost)
    errors: list[str] = []

    def work() -> None:
        try:
            push(cluster, client, cluster.table, [1])
        except ShardUnavailable as error:
            errors.append(str(error))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (error,) = errors
    assert re.fullmatch(r"shard \d at pserver:\d: no room for a push in 0\.3 s, 1 wait for their ack", error)
    client.flush()
    assert pulled(cluster, client, cluster.table, [1]) == {1: [0.5] * 4}


def test_a_new_incarnation_fails_the_shard(cluster: InProcessCluster) -> None:
    client = cluster.client()
    client.observe_incarnation(1, 1001)
    assert len(pulled(cluster, client, cluster.table, range(50))) == 50
    client.observe_incarnation(1, 5)
    with pytest.raises(ShardUnavailable, match=r"shard 1 at pserver:1: .*started again.*rows that it held are gone"):
        pulled(cluster, client, cluster.table, range(50))


def test_a_restarted_shard_is_noticed_by_its_answer(cluster: InProcessCluster) -> None:
    client = cluster.client()
    cluster.shards[0].incarnation = 12
    with pytest.raises(ShardUnavailable, match=r"shard 0 at pserver:0: .*started again.*rows that it held are gone"):
        pulled(cluster, client, cluster.table, range(50))


def test_a_damaged_reply_is_asked_for_again(cluster: InProcessCluster) -> None:
    client = cluster.client()
    damaged = iter([True])
    answered = cluster.channel._answer

    def answer(shard: int, parts: Sequence[Buffer]) -> Sequence[Buffer]:
        head, *columns = answered(shard, parts)
        return [head[:100] + b"\xff" * 4 + head[104:], *columns] if next(damaged, False) else [head, *columns]

    cluster.channel._answer = answer
    assert pulled(cluster, client, cluster.table, [1]) == {1: [1.0] * 4}


# Tables that do not fit


def test_an_unregistered_schema_is_a_table_mismatch(cluster: InProcessCluster) -> None:
    spec = TableSpec(name="table", dim=4, rule="adagrad", initializer=cluster.table.initializer)
    with pytest.raises(TableMismatch, match=r"shard \d at pserver:\d: table 'table'"):
        pulled(cluster, cluster.client(), spec, [1])


def test_a_table_pushed_twice_in_one_call_is_refused(cluster: InProcessCluster) -> None:
    one = (cluster.table, unique_of(cluster, cluster.table, [1]), np.ones((1, 4), np.float32))
    with pytest.raises(ValueError, match="a table is pushed twice"):
        cluster.client().push([one, one], learning_rate=0.1, optimizer_step=1)


def test_learning_rates_must_be_one_or_one_a_table(cluster: InProcessCluster) -> None:
    one = (cluster.table, unique_of(cluster, cluster.table, [1]), np.ones((1, 4), np.float32))
    with pytest.raises(ValueError, match="learning_rate has 2 values for 1 tables"):
        cluster.client().push([one], learning_rate=[0.1, 0.2], optimizer_step=1)


@pytest.mark.parametrize(("shards", "version"), [(3, 1), (2, 9)])
def test_a_placement_of_something_else_is_refused(cluster: InProcessCluster, shards: int, version: int) -> None:
    cluster.client()
    with pytest.raises(ValueError, match=r"client: .*(shards|versions differ)"):
        Client(
            cluster.channel,
            ClientIdentity(bytes(16), 1),
            cluster.registrations(),
            Placement.even(shards, version),
            Settings(),
        )


# Threads, signals, forks


def test_threads_may_call_at_once(cluster: InProcessCluster) -> None:
    client = cluster.client()
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for step in range(1, 41):
                push(cluster, client, cluster.table, [number, 1000], step=step)
                own = pulled(cluster, client, cluster.table, [number])[number]
                assert own == [1.0 - 0.25 * step] * 4
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert pulled(cluster, client, cluster.table, [1000]) == {1000: [1.0 - 0.25 * 240] * 4}


def interrupt() -> None:
    """Ctrl-C: to the main thread, as the kernel does when it can."""
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


def interrupted(client: Client, unique: UniqueIds, out: NDArray[np.float32], spec: TableSpec) -> None:
    """A pull that nobody answers, ended by a KeyboardInterrupt."""
    timer = threading.Timer(0.2, interrupt)
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        client.pull([(spec, unique, out)])
    timer.join()


def test_after_a_keyboard_interrupt_the_client_works(cluster: InProcessCluster) -> None:
    client = cluster.client()
    cluster.channel.loses_request = lambda shard: True
    unique = unique_of(cluster, cluster.table, [1])
    interrupted(client, unique, np.empty((1, 4), np.float32), cluster.table)
    cluster.channel.loses_request = lambda shard: False
    push(cluster, client, cluster.table, [1])
    assert pulled(cluster, client, cluster.table, [1]) == {1: [0.75] * 4}


def test_an_interrupted_pull_writes_nothing_later(cluster: InProcessCluster) -> None:
    client = cluster.client()
    cluster.channel.loses_request = lambda shard: True
    out = np.zeros((1, 4), np.float32)
    interrupted(client, unique_of(cluster, cluster.table, [1]), out, cluster.table)
    cluster.channel.loses_request = lambda shard: False
    time.sleep(0.2)  # retries go out every 0.05 s
    pulled(cluster, client, cluster.table, [1])
    assert not out.any()


def test_a_push_interrupted_before_it_was_accepted_is_never_sent(cluster: InProcessCluster, quick: Quick) -> None:
    client = cluster.client(quick(max_inflight_pushes=1))
    number = shard_with(cluster, cluster.table, 0)
    cluster.channel.loses_request = lambda shard: True
    push(cluster, client, cluster.table, [number])
    timer = threading.Timer(0.2, interrupt)
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        push(cluster, client, cluster.table, [number], step=2)
    timer.join()
    cluster.channel.loses_request = lambda shard: False
    assert pulled(cluster, client, cluster.table, [number]) == {number: [0.75] * 4}


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_is_told_so(cluster: InProcessCluster) -> None:
    client = cluster.client()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            client.flush()
        except RuntimeError as error:
            os.write(write, str(error).encode())
        finally:
            client.close()
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        assert f"client: made in process {os.getpid()}, called in its child {child}" in pipe.read()
    os.waitpid(child, 0)
    assert pulled(cluster, client, cluster.table, [1]) == {1: [1.0] * 4}


def test_a_closed_client_says_so(cluster: InProcessCluster) -> None:
    client = cluster.client()
    client.close()
    with pytest.raises(RuntimeError, match="client: it is closed"):
        client.flush()


def test_a_fault_of_the_io_thread_reaches_the_caller(cluster: InProcessCluster) -> None:
    client = cluster.client()

    def broken(shard: int, parts: Sequence[Buffer]) -> Sequence[Buffer]:
        raise OSError("a broken cable")

    cluster.channel._answer = broken
    for _ in range(2):
        with pytest.raises(FleetSparseError, match="its I/O thread failed: OSError: a broken cable"):
            pulled(cluster, client, cluster.table, [1])
    client.close()


def test_signals_of_other_kinds_do_not_end_a_pull(cluster: InProcessCluster) -> None:
    client = cluster.client()
    cluster.channel.loses_request = lambda shard: True
    seen: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: seen.append(number))
    threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGUSR1)).start()
    threading.Timer(0.3, lambda: setattr(cluster.channel, "loses_request", lambda shard: False)).start()
    try:
        assert pulled(cluster, client, cluster.table, [1]) == {1: [1.0] * 4}
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert seen == [signal.SIGUSR1]
