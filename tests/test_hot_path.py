"""Cost of a step in reproducible counts: Python calls, frames, and bytes on the wire."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import paddle
import paddle.distributed.fleet as fleet
import pytest

from fleet_sparse.core.cache_policies import ALL
from fleet_sparse.core.initializer import uniform
from fleet_sparse.core.mode import ASYNC, SYNC, Mode
from fleet_sparse.core.placement import Placement
from fleet_sparse.core.row_bound import RowBound
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.local_pservers import local_pservers
from fleet_sparse.plugin.row_cache import RowCache, cache_job
from fleet_sparse.plugin.static import op_callbacks
from fleet_sparse.pserver.net.data_plane import DataPlane
from fleet_sparse.pserver.net.streams import Streams
from fleet_sparse.settings import Settings
from fleet_sparse.wire.decode import decode
from fleet_sparse.wire.encode import encode
from fleet_sparse.wire.frame_format import Frame, Op
from fleet_sparse.wire.stream import socket_to
from fleet_sparse.worker.modes.sync_async import PserverTraining
from fleet_sparse.worker.net.channel import Buffer
from fleet_sparse.worker.net.client import Client
from fleet_sparse.worker.net.requests import DenseUpdate
from fleet_sparse.worker.net.shard_link import ClientIdentity, Registration
from fleet_sparse.worker.net.stream_channel import StreamChannel
from fleet_sparse.worker.net.zmq_channel import ZmqChannel
from fleet_sparse.worker.rows.deduplicator import Deduplicator
from fleet_sparse.worker.rows.early_rows import EarlyRows
from fleet_sparse.worker.rows.row_batch import RowBatch
from fleet_sparse.worker.rows.row_caches import RowCaches
from support.caching_workers import KINDS, mode_of
from support.in_process import InProcessCluster
from support.paddle_plugin import plugin
from support.shards import CLUSTER, INCARNATION, FrameClient, make_shard, pull, push
from support.streams import StreamSocket
from support.successive import Batch, SuccessiveLookups

__all__ = ["plugin"]

DIM, NUM_IDS = 16, 13_000
TABLE = TableSpec(name="hot", dim=DIM, rule="adagrad", initializer=uniform(-1.0, 1.0), seed=1)
PATIENT = Settings(deadline_s=100.0, retry_s=100.0)
"""Nothing is sent twice, however slow the machine is."""


# Python calls

# Of the op callbacks of a step with one table. Those of `worker/net` and `wire` depend on whether an answer is late, so
# that the median of many steps counts.
MOST_ABOVE_CLIENT = {"prefetch": 19, "update": 12}
MOST_IN_ALL = {1: {"prefetch": 50, "update": 45}, 2: {"prefetch": 53, "update": 47}}
BELOW_CLIENT = ("/worker/net/", "/wire/")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[list[bool]]]:
    """By op, for each run of its callback and each Python function that it called: True if a client called it."""
    runs: dict[str, list[list[bool]]] = defaultdict(list)

    def counted(name: str, make: Callable[..., Any]) -> Callable[..., Any]:
        def made(*arguments: Any, **options: Any) -> Callable[..., None]:
            body = make(*arguments, **options)

            def run(*arguments: Any) -> None:
                runs[name].append([])
                sys.setprofile(lambda frame, event, _: event == "call" and runs[name][-1].append(is_below(frame)))
                try:
                    body(*arguments)
                finally:
                    sys.setprofile(None)

            return run

        return made

    for name in MOST_ABOVE_CLIENT:
        monkeypatch.setattr(op_callbacks, name, counted(name, getattr(op_callbacks, name)))
    return runs


def is_below(frame: Any) -> bool:
    while frame is not None:
        if any(room in frame.f_code.co_filename for room in BELOW_CLIENT):
            return True
        frame = frame.f_back
    return False


def train(num_shards: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs 20 steps of a program with one lookup on one table."""
    with local_pservers(num_shards, root=tmp_path, log=subprocess.DEVNULL) as pservers:
        for name, value in pservers.environment().items():
            monkeypatch.setenv(name, value)
        fleet.init()
        ids = paddle.static.data("ids", [-1, 10], "int64")
        rows = paddle.static.nn.embedding(ids, [10**9, DIM], is_sparse=True, is_distributed=True)
        loss = paddle.mean(rows * rows)
        strategy = fleet.DistributedStrategy()
        strategy.a_sync = True
        fleet.distributed_optimizer(paddle.optimizer.Adagrad(0.1), strategy).minimize(loss)
        executor = paddle.static.Executor(paddle.CPUPlace())
        executor.run(paddle.static.default_startup_program())
        fleet.init_worker()
        for step in range(20):
            executor.run(feed={"ids": np.arange(1000).reshape(-1, 10) + step}, fetch_list=[loss])
        fleet.stop_worker()


@pytest.mark.usefixtures("plugin")
@pytest.mark.parametrize("num_shards", [1, 2])
def test_a_step_of_one_table_calls_few_python_functions(
    calls: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_shards: int
) -> None:
    train(num_shards, tmp_path, monkeypatch)
    for name, most in MOST_ABOVE_CLIENT.items():
        assert median(run.count(False) for run in calls[name]) <= most, name
        assert median(map(len, calls[name])) <= MOST_IN_ALL[num_shards][name], (name, [*map(len, calls[name])])


# Of the answer to a frame on a stream, Python and C functions, whatever the number of tables is.
MOST_TO_ANSWER = {Op.PULL: 66, Op.PUSH: 98}
NUM_IDS_OF_TABLE, NUM_REQUESTS = 8, 20


class CountedPlane:
    """A data plane whose thread counts the functions that it calls.

    Attributes:
        num_calls: Number of those calls so far.
    """

    def __init__(self, specs: Sequence[TableSpec]) -> None:
        self.shard = make_shard(*specs)
        streams = Streams(max_frame_bytes=PATIENT.max_frame_bytes)
        self._plane = DataPlane(self.shard, max_frame_bytes=PATIENT.max_frame_bytes, streams=streams)
        self.num_calls = 0
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        self.end = StreamSocket(streams.endpoint)

    def _run(self) -> None:
        sys.setprofile(self._note)
        self._plane.run()

    def _note(self, frame: Any, event: str, argument: Any) -> None:
        self.num_calls += event in {"call", "c_call"}

    def ask(self, frame: Frame) -> None:
        """Sends a request and receives the reply, which is no error."""
        self.end.send_multipart(encode(frame))
        assert decode(self.end.recv_multipart(), max_bytes=PATIENT.max_frame_bytes).error is None

    def close(self) -> None:
        self._plane.stop()
        self._thread.join()
        self.end.close()
        self.shard.close()


@pytest.mark.parametrize("num_tables", [1, 30])
def test_a_pserver_answers_with_few_calls_for_any_tables(num_tables: int) -> None:
    specs = [replace(TABLE, name=f"hot-{number}") for number in range(num_tables)]
    ids, grads = np.arange(NUM_IDS_OF_TABLE), np.ones((NUM_IDS_OF_TABLE, DIM), np.float32)
    with closing(CountedPlane(specs)) as plane:
        client = FrameClient(plane.shard)
        for op, most in MOST_TO_ANSWER.items():
            begun = 0
            for number in range(NUM_REQUESTS + 1):
                blocks = [pull(spec, ids) if op is Op.PULL else push(spec, ids, grads) for spec in specs]
                plane.ask(client.frame(op, *blocks))
                client.seq += op is Op.PUSH
                begun = plane.num_calls if number == 0 else begun
            assert (plane.num_calls - begun) / NUM_REQUESTS <= most, op


# Frames


class Step:
    """A worker whose batches look up two tables and train dense parameters too.

    Attributes:
        sent: By shard, the op of each frame that it sent.
    """

    def __init__(self, cluster: InProcessCluster, mode: Mode, num_workers: int) -> None:
        self._cluster = cluster
        self._client = cluster.worker(0, num_workers, mode, PATIENT)
        self._client.assign_dense(cluster.dense, np.zeros(10, np.float32))
        deduplicator = Deduplicator(cluster.placement)
        self._lookups = SuccessiveLookups(deduplicator, (cluster.table, cluster.other))
        self._training = PserverTraining(self._client, deduplicator, mode, num_workers)
        self.sent: list[list[Op]] = [[] for _ in cluster.shards]
        self._ahead: EarlyRows | None = None
        send = cluster.channel.send

        def noted(shard: int, parts: Sequence[Buffer]) -> bool:
            self.sent[shard].append(decode(parts, max_bytes=PATIENT.max_frame_bytes).header.op)
            return send(shard, parts)

        cluster.channel.send = noted  # type: ignore[method-assign]

    def run(self, ids: range, coming: range | None = None) -> None:
        """One step; with `coming`, the rows of the step after it are looked ahead."""
        ahead, self._ahead = self._ahead, None
        if coming is not None:
            self._ahead = self._lookups.announce(self._batch(coming), self._batch(ids))
        lookups = [lookup.rows for lookup in self._lookups.of(self._batch(ids), ahead).values()]
        self._training.prefetch(lookups, ahead, self._ahead)
        updates = [RowBatch(each.spec, each.unique, np.ones_like(each.values), 0.5) for each in lookups]
        self._training.update(
            updates, [DenseUpdate(self._cluster.dense, np.ones(10, np.float32), [np.empty(10, np.float32)], 0.5)], 1.0
        )

    def _batch(self, ids: range) -> Batch:
        return {self._cluster.table.name: ids, self._cluster.other.name: ids}


@pytest.fixture
def make_step() -> Iterator[Callable[[Mode, int], Step]]:
    """Makes one in a job of a mode and number of workers."""
    cluster = InProcessCluster(3)
    yield partial(Step, cluster)
    cluster.close()


MakeStep = Callable[[Mode, int], Step]


def test_step_sends_each_shard_one_pull_and_one_push(make_step: MakeStep) -> None:
    step = make_step(Mode(ASYNC), 2)
    for first in (0, 50, 100):
        step.run(range(first, first + 100))
    assert step.sent == [[Op.PULL, Op.PUSH_PULL] * 3] * 3


def test_step_with_look_ahead_sends_one_pull_and_one_push(make_step: MakeStep) -> None:
    step = make_step(Mode(ASYNC), 2)
    step.run(range(100), coming=range(50, 150))
    begun = [len(ops) for ops in step.sent]
    for first in (50, 100, 150):
        step.run(range(first, first + 100), coming=range(first + 50, first + 150))
    assert begun == [3] * 3  # nobody looked ahead to the first batch
    assert [ops[3:] for ops in step.sent] == [[Op.PULL, Op.PUSH_PULL] * 3] * 3


@pytest.mark.parametrize("mode", [Mode(ASYNC), Mode(SYNC)], ids=["async", "sync"])
def test_a_single_worker_sends_each_shard_two_frames_a_step(make_step: MakeStep, mode: Mode) -> None:
    step = make_step(mode, 1)
    for first in (0, 50, 100):
        step.run(range(first, first + 100))
    assert step.sent == [[Op.PULL, Op.PUSH_PULL] * 3] * 3


class CachingJob:
    """Workers that cache rows of one table.

    Attributes:
        sent: By shard, the op of each frame that the last worker sent in this step.
    """

    def __init__(self, cluster: InProcessCluster, kind: str, bound: RowBound, num_workers: int = 2) -> None:
        mode = mode_of(kind, bound)
        self._rng, self._deduplicator = np.random.default_rng(0), Deduplicator(cluster.placement)
        job = cache_job(RowCache(), mode, num_workers)._replace(admission=ALL)
        clients = [cluster.worker(index, num_workers, mode, PATIENT) for index in range(num_workers)]
        caches = [
            RowCaches(client, self._deduplicator, job, {"table": cluster.table}, max_bytes=1 << 20, max_rows=60)
            for client in clients
        ]
        self._trainings = [
            PserverTraining(client, self._deduplicator, mode, num_workers, caches=cache)
            for client, cache in zip(clients, caches, strict=True)
        ]
        self._lookups = [SuccessiveLookups(self._deduplicator, [cluster.table]) for _ in clients]
        self._coming: list[tuple[Batch, EarlyRows | None]] = [(self.batch(), None) for _ in clients]
        self.sent: list[list[Op]] = [[] for _ in cluster.shards]
        send = cluster.channel.send

        def noted(shard: int, parts: Sequence[Buffer]) -> bool:
            self.sent[shard].append(decode(parts, max_bytes=PATIENT.max_frame_bytes).header.op)
            return send(shard, parts)

        cluster.channel.send = noted  # type: ignore[method-assign]

    def step(self, *, looks_ahead: bool = False) -> None:
        """All workers read, then all update."""
        for ops in self.sent:
            ops.clear()
        batches = []
        for worker, training in enumerate(self._trainings):
            (ids, early), coming = self._coming[worker], self.batch()
            announced = self._lookups[worker].announce(coming, ids) if looks_ahead else None
            self._coming[worker] = coming, announced
            batches.append(self._lookups[worker].of(ids, early)["table"].rows)
            training.prefetch(batches[-1:], early, announced)
        for training, batch in zip(self._trainings, batches, strict=True):
            training.update([batch._replace(values=np.ones_like(batch.values), learning_rate=0.5)], [], 1.0)

    def batch(self) -> Batch:
        return {"table": self._rng.integers(0, 100, 40).tolist()}


@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.parametrize("bound", [RowBound(lag=40), RowBound(drift=8)], ids=["in updates", "in distance"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("looks_ahead", [False, True], ids=["plain", "looking ahead"])
def test_a_step_with_a_row_cache_sends_one_pull_and_one_push(
    kind: str, looks_ahead: bool, bound: RowBound, num_workers: int
) -> None:
    with closing(InProcessCluster(3)) as cluster:
        job = CachingJob(cluster, kind, bound, num_workers)
        for number in range(30):
            job.step(looks_ahead=looks_ahead)
            for ops in job.sent:
                pulls = [op for op in ops if op is Op.PULL]
                assert len(pulls) <= 1
                assert len(ops) - len(pulls) <= 1
                if looks_ahead and kind == "sync" and number > 0:
                    assert not pulls  # all was asked for with the push before


@pytest.mark.parametrize("looks_ahead", [False, True], ids=["plain", "looking ahead"])
def test_the_only_worker_pulls_nothing_while_rows_have_copies(
    monkeypatch: pytest.MonkeyPatch, looks_ahead: bool
) -> None:
    with closing(InProcessCluster(3)) as cluster:
        monkeypatch.setattr(CachingJob, "batch", lambda job: {"table": range(40)})
        job = CachingJob(cluster, "async", RowBound(lag=40), num_workers=1)
        job.step(looks_ahead=looks_ahead)
        for _ in range(10):
            job.step(looks_ahead=looks_ahead)
            assert Op.PULL not in {op for ops in job.sent for op in ops}


# Bytes


class CountingRelay:
    """Between a TCP client and a TCP server; counts what goes through it.

    Attributes:
        endpoint: Stream to connect to.
        num_bytes: To the server, and from it.
    """

    def __init__(self, endpoint: str) -> None:
        self.num_bytes = [0, 0]
        self._listener = self._front = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"tcp:127.0.0.1:{self._listener.getsockname()[1]}"
        self._back, self._address = socket_to(endpoint)
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        self._front, _ = self._listener.accept()
        self._back.setblocking(True)
        self._back.connect(self._address)
        for direction, (source, target) in enumerate([(self._front, self._back), (self._back, self._front)]):
            self._threads.append(threading.Thread(target=self._pass, args=(direction, source, target)))
            self._threads[-1].start()

    def _pass(self, direction: int, source: socket.socket, target: socket.socket) -> None:
        while read := source.recv(1 << 16):
            self.num_bytes[direction] += len(read)
            target.sendall(read)
        target.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        for thread in self._threads:
            thread.join()
        for each in (self._listener, self._front, self._back):
            each.close()


@pytest.fixture
def connect() -> Iterator[Callable[[str], tuple[Client, CountingRelay | None]]]:
    """Connects a client by ZeroMQ, or by a stream with a relay in between, to a pserver's data plane."""
    stack = ExitStack()

    def connected(kind: str) -> tuple[Client, CountingRelay | None]:
        shard = make_shard(TABLE)
        stack.callback(shard.close)
        streams = Streams(max_frame_bytes=PATIENT.max_frame_bytes, host="127.0.0.1")
        plane = DataPlane(shard, max_frame_bytes=PATIENT.max_frame_bytes, streams=streams, zmq_host="127.0.0.1")
        thread = threading.Thread(target=plane.run)
        thread.start()
        stack.callback(thread.join)
        stack.callback(plane.stop)
        relay = None
        if kind == "stream":
            relay = CountingRelay(streams.endpoint)
            stack.callback(relay.close)
            channel: Any = StreamChannel([relay.endpoint], PATIENT)
        else:
            channel = ZmqChannel([f"127.0.0.1:{plane.port}"], PATIENT)
        registration = Registration(CLUSTER, 0, 1, INCARNATION, 1, "pserver:0")
        identity = ClientIdentity(b"client number 2.", 1)
        client = Client(channel, identity, [registration], Placement.even(1), PATIENT)
        stack.callback(client.close)
        return client, relay

    yield connected
    stack.close()


def pull_and_push(client: Client) -> None:
    unique, _ = Deduplicator(Placement.even(1)).unique([np.arange(NUM_IDS)], TABLE.salt)
    rows = np.empty((NUM_IDS, DIM), np.float32)
    client.pull([RowBatch(TABLE, unique, rows)])
    client.push([RowBatch(TABLE, unique, rows, 0.5, 1)])
    client.flush()


# docs/protocol.md
HEADER, BLOCK, IDS, ROWS = 128, 64, 8 * NUM_IDS, 4 * DIM * NUM_IDS
SENT = (HEADER + BLOCK + IDS) + (HEADER + BLOCK + IDS + ROWS)  # PULL, PUSH
RECEIVED = (HEADER + BLOCK + ROWS) + HEADER  # ROWS, ACK


@pytest.mark.parametrize("kind", ["zmq", "stream"])
def test_frames_are_headers_ids_and_rows_and_nothing_else(connect: Any, kind: str) -> None:
    client, _ = connect(kind)
    pull_and_push(client)
    assert (client.bytes_sent, client.bytes_received) == (SENT, RECEIVED)


def test_a_stream_adds_16_bytes_a_message_and_8_a_part(connect: Any) -> None:
    client, relay = connect("stream")
    pull_and_push(client)
    assert relay.num_bytes == [SENT + 3 * 16 + 8 * (2 + 3), RECEIVED + 2 * 16 + 8 * (2 + 1)]  # with the greeting
