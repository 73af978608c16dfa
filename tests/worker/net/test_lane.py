"""The lane against the readable path: the same frames, rows and tables, and what it leaves to that path."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest

from fleet_sparse.core.initializer import constant
from fleet_sparse.core.mode import ASYNC, SYNC, Mode
from fleet_sparse.core.placement import Placement
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.errors import PushRefused, ShardUnavailable
from fleet_sparse.pserver.net.streams import Streams
from fleet_sparse.settings import Settings
from fleet_sparse.wire.frame_format import Buffer, Op
from fleet_sparse.wire.stream import socket_to
from fleet_sparse.worker.control.control import ControlClient
from fleet_sparse.worker.net.client import Client
from fleet_sparse.worker.net.lane import MAX_TABLES, Lane
from fleet_sparse.worker.net.shard_link import ClientIdentity, Registration
from fleet_sparse.worker.net.stream_channel import StreamChannel
from fleet_sparse.worker.rows.deduplicator import UniqueIds
from fleet_sparse.worker.rows.row_batch import RowBatch
from support.client_calls import unique_of
from support.in_process import QUICK, InProcessCluster
from support.pserver_job import PserverJob
from support.streams import StreamServer

PATIENT = replace(QUICK, retry_s=20.0)


class Job:
    """Shards behind real streams, and a client of them.

    Attributes:
        frames: By shard, requests and replies so far, in order.
    """

    def __init__(
        self, stack: ExitStack, num_shards: int, settings: Settings, specs: Sequence[TableSpec] = (), **host: Any
    ) -> None:
        self.cluster = InProcessCluster(num_shards, specs)
        stack.callback(self.cluster.close)
        self.frames: list[list[list[bytes]]] = [[] for _ in range(num_shards)]
        servers = [StreamServer(partial(self._answer, shard), **host) for shard in range(num_shards)]
        for server in servers:
            stack.callback(server.close)
        self.channel = StreamChannel([server.endpoint for server in servers], settings)
        self.identity = ClientIdentity(b"a client by lane", 1)
        registrations = self.cluster.registrations()
        self.client = Client(self.channel, self.identity, registrations, self.cluster.placement, settings)
        stack.callback(self.client.abandon)
        self.client.reach(20.0)  # the streams are connected

    def _answer(self, shard: int, parts: Sequence[Buffer]) -> Sequence[Buffer]:
        reply = self.cluster.answer(shard, parts)
        self.frames[shard] += [[bytes(part) for part in parts], [bytes(part) for part in reply]]
        return reply

    def join(self, mode: Mode) -> None:
        """Makes the client the worker of a job of one."""
        for shard, each in enumerate(self.cluster.shards):
            self.cluster.run(shard, partial(each.join, 0, 1, self.identity.client_id, mode, begins_job=True))

    def rows(self, specs: Sequence[TableSpec], ids: Sequence[Sequence[int]]) -> list[RowBatch]:
        return [
            RowBatch.empty(spec, unique_of(self.cluster, spec, of_table))
            for spec, of_table in zip(specs, ids, strict=True)
        ]

    def tables(self) -> list[Any]:
        """All rows of the cluster's two tables, read without the client."""
        ids = np.arange(200)
        return [
            shard.tables[spec.table_id].table.store.has_rows(ids).tolist()  # type: ignore[attr-defined]
            for shard in self.cluster.shards
            for spec in (self.cluster.table, self.cluster.other)
        ]


def parts_of(batch: RowBatch) -> tuple[RowBatch, RowBatch]:
    """The rows that are pulled early, the first half of each shard, and the others."""
    ids, counts, _ = batch.unique
    begins, num_early = np.cumsum(counts) - counts, counts // 2
    return (
        batch._replace(unique=UniqueIds(ids, num_early, begins)),
        batch._replace(unique=UniqueIds(ids, counts - num_early, begins + num_early)),
    )


def train(job: Job, mode: Mode) -> list[list[float]]:
    """Steps of all shapes, the last ones with rows pulled early; returns the rows that they pulled."""
    counts_steps = mode.is_step_synchronized
    job.join(mode)
    specs = job.cluster.table, job.cluster.other
    rng, found = np.random.default_rng(7), []
    shapes = [((100, 100)), ((1, 50)), ((50, 1)), ((0, 3)), ((3, 0)), ((0, 0)), ((7, 5)), ((20_000, 9))]
    for step, sizes in enumerate(shapes, start=1):
        batches = job.rows(specs, [range(size) for size in sizes])
        job.client.pull(batches, step=step if counts_steps else 0)
        found += [batch.values.reshape(-1).tolist() for batch in batches]
        pushes = []
        for number, batch in enumerate(batches):
            grads = rng.normal(size=batch.values.shape).astype(np.float32)
            pushes.append(batch._replace(values=grads, learning_rate=0.1 + number, optimizer_step=step))
        job.client.push(pushes, step=step if counts_steps else 0)
    for step, sizes in enumerate([(60, 9), (20_000, 30), (1, 0), (0, 0)], start=len(shapes) + 1):
        numbered = {"step": step if counts_steps else 0}
        batches = job.rows(specs, [range(size) for size in sizes])
        job.client.pull(batches, **numbered)
        pushes = [
            batch._replace(values=np.cos(batch.values), learning_rate=0.2, optimizer_step=step) for batch in batches
        ]
        coming = job.rows(specs, [range(size // 2, size + 8) for size in sizes])
        early = job.client.start_pull([parts_of(batch)[0] for batch in coming], **numbered, owns_memory=True)
        pushed = job.client.start_update(pushes, [], [parts_of(batch)[1] for batch in coming], **numbered)
        assert [*pushed.wait(), *early.wait()] == []
        found += [batch.values.reshape(-1).tolist() for batch in coming]
    batches = job.rows(specs, [range(200), range(200)])
    job.client.pull(batches, step=step + 1 if counts_steps else 0)
    job.client.flush()
    return [*found, *(batch.values.reshape(-1).tolist() for batch in batches)]


class Trained(NamedTuple):
    """What a job sent, received and changed."""

    rows: list[list[float]]
    frames: list[list[list[bytes]]]
    tables: list[Any]
    num_bytes: tuple[int, int, int, int]


def trained(settings: Settings, num_shards: int, mode: Mode, **host: Any) -> Trained:
    with ExitStack() as stack:
        job = Job(stack, num_shards, settings, **host)
        rows, client = train(job, mode), job.client
        numbers = client.bytes_sent, client.bytes_received, client.num_pulled_rows, client.num_pushed_rows
        return Trained(rows, job.frames, job.tables(), numbers)


@pytest.fixture
def lane_calls(monkeypatch: pytest.MonkeyPatch) -> list[Op]:
    """The op of each call that a lane sent."""
    calls: list[Op] = []
    send = Lane.send

    def noted(lane: Lane, rows: Any, *arguments: Any) -> int:
        calls.append(rows.op)
        return send(lane, rows, *arguments)

    monkeypatch.setattr(Lane, "send", noted)
    return calls


@pytest.mark.parametrize("num_shards", [1, 2, 3])
@pytest.mark.parametrize("mode", [Mode(ASYNC), Mode(SYNC)], ids=["async", "sync"])
@pytest.mark.parametrize("host", [{}, {"host": "127.0.0.1"}], ids=["unix", "tcp"])
@pytest.mark.parametrize("stays", [True, False], ids=["near", "far"])
def test_both_paths_send_and_receive_the_same_frames(
    lane_calls: list[Op],
    monkeypatch: pytest.MonkeyPatch,
    num_shards: int,
    mode: Mode,
    host: dict[str, Any],
    stays: bool,
) -> None:
    monkeypatch.setattr(StreamChannel, "stays_on_machine", lambda *_: stays)
    ours = trained(PATIENT, num_shards, mode, **host)
    assert {Op.PULL, Op.PUSH, Op.PUSH_PULL} == set(lane_calls)
    num_calls = len(lane_calls)
    assert num_calls >= 16 - 2 * (mode.kind == ASYNC)
    theirs = trained(replace(PATIENT, straight_path=False), num_shards, mode, **host)
    assert len(lane_calls) == num_calls
    for one, two in zip(ours, theirs, strict=True):
        assert one == two


def test_many_tables_go_by_lane_and_more_do_not(lane_calls: list[Op]) -> None:
    specs = [
        TableSpec(name=f"t{number}", dim=1 + number % 5, rule="sgd", initializer=constant(number))
        for number in range(MAX_TABLES + 1)
    ]
    with ExitStack() as stack:
        job = Job(stack, 2, PATIENT, specs)
        for num_tables in (MAX_TABLES, MAX_TABLES + 1):
            batches = job.rows(specs[:num_tables], [range(number % 4, 9) for number in range(num_tables)])
            job.client.pull(batches)
            assert [set(batch.values.flat) for batch in batches] == [{float(number)} for number in range(num_tables)]
            assert lane_calls == [Op.PULL]


def unaligned(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """A copy of a float32 array at an odd address."""
    memory = np.empty(array.nbytes + 1, np.uint8)
    copy = memory[1:].view(np.float32).reshape(array.shape)
    copy[:] = array
    return copy


def test_unaligned_rows_do_not_go_by_lane(lane_calls: list[Op]) -> None:
    with ExitStack() as stack:
        job = Job(stack, 2, PATIENT)
        (batch,) = job.rows([job.cluster.table], [range(100)])
        batch = batch._replace(values=unaligned(batch.values))
        job.client.pull([batch])
        assert set(batch.values.flat) == {1.0}
        grads = unaligned(np.ones_like(batch.values))
        job.client.push([batch._replace(values=grads, learning_rate=0.5, optimizer_step=1)])
        job.client.pull([batch])
        assert set(batch.values.flat) == {0.5}
        assert lane_calls == []


@pytest.mark.parametrize("changed", [{"rows_dtype": "bfloat16"}, {"max_frame_bytes": 1 << 20}])
def test_rows_that_need_more_do_not_go_by_lane(lane_calls: list[Op], changed: dict[str, Any]) -> None:
    with ExitStack() as stack:
        job = Job(stack, 2, replace(PATIENT, **changed))
        (batch,) = job.rows([job.cluster.table], [range(100_000)])
        job.client.pull([batch])
        assert set(batch.values.flat) == {1.0}
        assert lane_calls == []


def test_a_refused_push_by_lane_raises_and_the_next_counts(lane_calls: list[Op]) -> None:
    with ExitStack() as stack:
        job = Job(stack, 1, PATIENT)
        (batch,) = job.rows([job.cluster.table], [range(100)])
        wrong = batch._replace(values=np.full_like(batch.values, np.nan), learning_rate=0.5, optimizer_step=1)
        job.client.push([wrong])
        with pytest.raises(PushRefused):
            job.client.flush()
        job.client.push([wrong._replace(values=np.ones_like(batch.values))])
        job.client.pull([batch])
        assert set(batch.values.flat) == {0.5}
        assert lane_calls[0] is Op.PUSH


def test_a_large_push_to_a_slow_shard_is_sent_in_parts(lane_calls: list[Op]) -> None:
    with ExitStack() as stack:
        job = Job(stack, 1, PATIENT, host="127.0.0.1")
        (batch,) = job.rows([job.cluster.table], [range(400_000)])  # more than sockets keep
        job.client.push([batch._replace(values=np.ones_like(batch.values), learning_rate=0.5, optimizer_step=1)])
        job.client.pull([batch])
        assert set(batch.values.flat) == {0.5}
        assert lane_calls[0] is Op.PUSH


class RepeatingPeer:
    """Sends each third reply twice, in one piece."""

    num_replies = 0

    def __init__(self, peer: Any) -> None:
        self._peer = peer

    def send(self, parts: list[Buffer]) -> None:
        RepeatingPeer.num_replies += 1
        data = b"".join(message_of(parts))
        with suppress(OSError):
            self._peer.connection.socket.sendall(data if RepeatingPeer.num_replies % 3 else data + data)


def message_of(parts: Sequence[Buffer]) -> list[bytes]:
    """The bytes of a stream message (docs/protocol.md)."""
    body = b"".join(bytes(part) + bytes(-len(part) % 8) for part in parts)
    lengths = struct.pack(f"<{len(parts)}Q", *map(len, parts))
    return [struct.pack("<4sIQ", b"FSS1", len(parts), len(lengths + body)), lengths, body]


@pytest.mark.parametrize("num_ids", [1, 300, 700, 5000])
def test_replies_that_arrive_twice_count_once(
    lane_calls: list[Op], monkeypatch: pytest.MonkeyPatch, num_ids: int
) -> None:
    receive = Streams.receive

    def repeating(streams: Streams) -> Any:
        request = receive(streams)
        return request and (RepeatingPeer(request[0]), request[1])

    monkeypatch.setattr(Streams, "receive", repeating)
    with ExitStack() as stack:
        job = Job(stack, 1, PATIENT)
        for step in range(1, 20):
            (batch,) = job.rows([job.cluster.table], [range(num_ids)])
            job.client.pull([batch])
            assert set(batch.values.flat) == {1.0 - (step - 1) / 64}
            grads = np.ones_like(batch.values)
            job.client.push([batch._replace(values=grads, learning_rate=1 / 64, optimizer_step=step)])
        assert Op.PULL in lane_calls


def test_calls_of_several_threads_get_their_own_rows() -> None:
    with ExitStack() as stack:
        job = Job(stack, 2, PATIENT)
        specs = job.cluster.table, job.cluster.other

        def work(number: int) -> set[float]:
            found = set()
            for _ in range(50):
                (batch,) = job.rows([specs[number % 2]], [range(number, 400)])
                job.client.pull([batch])
                found |= set(batch.values.flat)
            return found

        with ThreadPoolExecutor(4) as threads:
            assert [*threads.map(work, range(4))] == [{1.0}, {2.0}, {1.0}, {2.0}]


# A pserver that dies


class BadLink:
    """Between one client and a pserver: it passes on the reply to `reach`, and then passes later replies on badly.

    Args:
        endpoint: Stream of the pserver.
        num_bytes: Bytes of later replies after which it ends and is not there; None for never.
        pause_s: Time before each of these bytes, which are then sent one by one.

    Attributes:
        endpoint: Stream to connect to.
    """

    def __init__(self, endpoint: str, *, num_bytes: int | None = None, pause_s: float = 0.0) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"tcp:127.0.0.1:{self._listener.getsockname()[1]}"
        self._far, self._address = socket_to(endpoint)
        self._num_bytes = num_bytes
        self._pause_s = pause_s
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        near = self._listener.accept()[0]
        near.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._listener.close()
        self._far.connect(self._address)
        requests = threading.Thread(target=self._pass_requests, args=(near,))
        requests.start()
        with suppress(OSError):  # the client has given up
            near.sendall(self._far.recv(REACHED_BYTES, socket.MSG_WAITALL))
            missing = self._num_bytes
            while missing is None or missing:
                data = self._far.recv(1 if self._pause_s else (missing or 1 << 16))
                if not data or self._ended.wait(self._pause_s):
                    break
                near.sendall(data)
                missing = None if missing is None else missing - len(data)
        for end in (near, self._far):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        requests.join()
        near.close()
        self._far.close()

    def _pass_requests(self, near: socket.socket) -> None:
        with suppress(OSError):
            while data := near.recv(1 << 16):
                self._far.sendall(data)
        with suppress(OSError):  # a client that gave up before it sent a request gets no reply to wait for
            self._far.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._ended.set()
        self._thread.join()


REACHED_BYTES = 16 + 8 + 128
"""Message head, length and header of the reply to `reach`."""
REPLY_BYTES = 16 + 2 * 8 + 128 + 64 + 2 * 16
"""Message head, lengths, header, block, and two rows of dim 4."""


SPEC = TableSpec(name="table", dim=4, rule="sgd", initializer=constant(1.0))


def time_over(
    make_link: Callable[[], BadLink],
    control: ControlClient,
    registration: Registration,
    settings: Settings,
    num_ids: int,
) -> float:
    """Returns the time until a pull raises that the pserver is unavailable."""
    for _ in range(20):  # on a busy machine a client may not even connect within its deadline
        with closing(make_link()) as link:
            reached = registration._replace(stream_endpoint=link.endpoint)
            channel = StreamChannel([link.endpoint], settings)
            client = Client(channel, control.identity, [reached], Placement.even(1), settings)
            with ExitStack() as stack:
                stack.callback(client.abandon)
                try:
                    client.reach(20.0)
                except ShardUnavailable:
                    continue
                batch = RowBatch.empty(SPEC, UniqueIds(np.arange(num_ids), np.array([num_ids])))
                begun_at = time.monotonic()
                with pytest.raises(ShardUnavailable) as raised:
                    client.pull([batch])
                took_s = time.monotonic() - begun_at
                assert raised.value.shard == 0
                return took_s
    pytest.fail("no client connected within its deadline")


@pytest.mark.parametrize("straight_path", [True, False])
def test_pserver_that_dies_at_any_byte_of_a_reply_is_unavailable(
    pserver_job: PserverJob, lane_calls: list[Op], straight_path: bool
) -> None:
    settings = Settings(deadline_s=0.4, retry_s=0.1, straight_path=straight_path)
    pservers = pserver_job(1)
    with ControlClient(pservers.endpoints, Settings()) as control:
        (registration,) = control.register([SPEC], 0, 1)

        def time_until_unavailable(num_bytes: int) -> float:
            make_link = partial(BadLink, registration.stream_endpoint, num_bytes=num_bytes)
            return time_over(make_link, control, registration, settings, 2)

        with ThreadPoolExecutor(32) as threads:
            times = [*threads.map(time_until_unavailable, range(REPLY_BYTES))]
    assert (Op.PULL in lane_calls) == straight_path
    assert max(times) < 10


def test_reply_that_trickles_ends_at_the_deadline(pserver_job: PserverJob, lane_calls: list[Op]) -> None:
    settings = Settings(deadline_s=0.3, retry_s=0.3)
    pservers = pserver_job(1)
    with ControlClient(pservers.endpoints, Settings()) as control:
        (registration,) = control.register([SPEC], 0, 1)
        # The lane waits up to 20 ms for each byte.
        make_link = partial(BadLink, registration.stream_endpoint, pause_s=0.01)
        assert time_over(make_link, control, registration, settings, 1000) < 1.5
    assert lane_calls == [Op.PULL]
