"""Fuzzed frames, streams and control messages at the sockets of a pserver process: its rows stay exact."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from fleet_sparse.control_socket import socket_path
from fleet_sparse.core.placement import Placement
from fleet_sparse.errors import ErrorCode
from fleet_sparse.local_pservers import PserverProcess
from fleet_sparse.net_addresses import Address
from fleet_sparse.pserver.engine.shard import Shard
from fleet_sparse.pserver.net.requests import answer
from fleet_sparse.settings import Settings
from fleet_sparse.wire import control_pb2 as messages
from fleet_sparse.wire.control import CONTROL_VERSION, METHODS, SERVICE
from fleet_sparse.wire.decode import decode
from fleet_sparse.wire.encode import encode
from fleet_sparse.wire.frame_format import HEADER_BYTES, Block, Frame, Op
from support.cow_views import everything
from support.frames import resized, sealed
from support.fuzzed_calls import ALLOWED, CALL_S, SPECS, fuzzed_call, harmless, save_requests
from support.fuzzing import Cases, flat_memory, fuzzed_parts, fuzzed_stream, mutated
from support.pservers import RemotePserver, RemoteShard
from support.saves import store_of
from support.shards import ADAM, CLIENT, CLUSTER, DENSE, SGD, FrameClient, assign, floats, ids_of, pull, push
from support.streams import StreamSocket

MAX_FRAME_BYTES = Settings.max_frame_bytes
BATCH = 32


@pytest.fixture
def pserver(tmp_path: Path) -> Iterator[PserverProcess]:
    variables = {
        "FLEET_SPARSE_ROOT": str(tmp_path / "root"),
        "FLEET_SPARSE_ORPHANED_S": "36000",
        "FLEET_SPARSE_POSITIONS_S": "0.2",
        "FLEET_SPARSE_CONNECT_S": "1",
    }
    (tmp_path / "root").mkdir()
    log = tmp_path / "pserver.log"
    process = PserverProcess(0, 1, cluster_id=CLUSTER, directory=tmp_path, environment=variables, log=log)
    yield process
    process.kill()


def twin_of(remote: RemoteShard) -> Shard:
    """A shard in this process that answers as a pserver with one registered worker."""
    placement = Placement.even(1)
    options: Any = {"cluster_id": CLUSTER, "incarnation": remote.incarnation, "placement": placement}
    twin = Shard(0, 1, **options, huge_pages=False, only_registered=True)
    for spec in SPECS:
        twin.add_table(spec)
    twin.join(0, 1, CLIENT, None, begins_job=True)
    return twin


def request(rng: random.Random, client: FrameClient[Shard]) -> Frame:
    """A valid request."""
    ids = ids_of(*sorted(rng.sample(range(-20, 20), rng.randrange(6))))
    blocks: list[Block] = []
    if rng.random() < 0.4:
        for spec in rng.sample((SGD, ADAM), rng.randrange(1, 3)):
            blocks.append(pull(spec, ids))
        if rng.random() < 0.2:
            blocks.append(pull(DENSE, count=DENSE.num_values))
        return client.frame(Op.PULL, *blocks, request_id=rng.getrandbits(64))
    for spec in rng.sample((SGD, ADAM), rng.randrange(1, 3)):
        grads = np.frombuffer(rng.randbytes(len(ids) * spec.dim), np.int8).astype(np.float32).reshape(-1, spec.dim)
        blocks.append(push(spec, ids, grads, learning_rate=0.5, optimizer_step=1 + client.seq))
    if rng.random() < 0.2:
        blocks.append(push(DENSE, None, floats(*range(DENSE.num_values))))
    return client.frame(Op.PUSH, *blocks)


def fuzzed_request(rng: random.Random, client: FrameClient[Shard]) -> list[bytes]:
    """The parts of a request: a third of them valid."""
    draw = rng.random()
    if draw < 0.05:
        return fuzzed_parts(rng) or [b""]
    parts = [bytes(part) for part in encode(request(rng, client))]
    if draw < 0.4:
        return parts
    parts = mutated(rng, parts)
    if not parts or len(parts[0]) < HEADER_BYTES:
        return parts or [b""]
    return rng.choice((list, sealed, resized, resized))(parts)


@pytest.mark.cases(1_000, 100_000)
def test_frames_train_a_pserver_as_its_twin(cases: Cases, pserver: PserverProcess) -> None:
    rng, num_refused = cases.rng, 0
    with ExitStack() as stack:
        remote = stack.enter_context(closing(RemotePserver(pserver.endpoint)))
        shard = remote.register(*SPECS)
        twin = stack.enter_context(closing(twin_of(shard)))
        client = FrameClient(twin)
        for each in (FrameClient(shard), client):
            assert each.ask(Op.ASSIGN, assign(DENSE, floats(*range(DENSE.num_values)))).error is None
        stack.enter_context(flat_memory(pserver.process.pid))
        for _ in range(cases.num_cases // BATCH):
            requests, expected = [], []
            for _ in range(BATCH):
                requests.append(fuzzed_request(rng, client))
                expected.append([bytes(part) for part in answer(twin, requests[-1], MAX_FRAME_BYTES).parts])
                client.seq = twin.ledger.applied(CLIENT)
            for parts in requests:
                shard.socket.send_multipart(parts)
            for reply in expected:
                assert shard.socket.recv_multipart() == reply
                error = decode(reply, max_bytes=MAX_FRAME_BYTES).error
                assert error is None or error.code is not ErrorCode.INTERNAL
                num_refused += error is not None
            with closing(StreamSocket(shard.stream_endpoint, greets=False)) as stranger, suppress(OSError):
                stranger.stream.sendall(fuzzed_stream(rng)[0])
        assert_same_rows(shard, twin)
    assert "Traceback" not in log_of(pserver)
    cases.report(refused=num_refused)


def log_of(pserver: PserverProcess) -> str:
    assert isinstance(pserver.log, Path)
    return pserver.log.read_text()


def assert_same_rows(remote: RemoteShard, twin: Shard) -> None:
    """A pserver has the rows of its twin, bit by bit."""
    client = FrameClient(remote, CLIENT)
    for spec in (SGD, ADAM):
        rows = everything(store_of(twin, spec))
        ids = ids_of(*rows)
        reply = client.ask(Op.PULL, pull(spec, ids))
        assert reply.error is None
        assert reply.blocks[0].rows is not None
        assert [row.tobytes() for row in reply.blocks[0].rows] == [each.row for each in rows.values()]
    assert client.values(DENSE) == FrameClient(twin).values(DENSE)


# Control messages


@pytest.mark.cases(256, 20_000)
def test_control_messages_leave_rows_exact(cases: Cases, pserver: PserverProcess) -> None:
    rng = cases.rng
    counts: dict[str, int] = {}
    with ExitStack() as stack:
        remote = stack.enter_context(closing(RemotePserver(pserver.endpoint)))
        shard = remote.register(*SPECS)
        twin = stack.enter_context(closing(twin_of(shard)))
        client, other = FrameClient(shard), FrameClient(twin)
        for each in (client, other):
            ids = ids_of(*range(-50, 50))
            assert each.push(push(SGD, ids, np.ones((100, 2), np.float32))).error is None
            assert each.push(push(ADAM, ids, np.ones((100, 3), np.float32))).error is None
        path = socket_path(Address.parse(pserver.endpoint).port)
        channel = stack.enter_context(grpc.insecure_channel(f"unix:{path}"))
        calls = {name: channel.unary_unary(f"/{SERVICE}/{name}") for name in METHODS}
        stack.enter_context(flat_memory(pserver.process.pid))

        def finish(name: str, data: bytes, future: Any) -> Any:
            failed = future.exception()  # waits
            code = future.code()
            assert code in ALLOWED, (name, data, code, future.details(), log_of(pserver)[-3000:])
            counts[code.name] = counts.get(code.name, 0) + 1
            return None if failed else METHODS[name][1].FromString(future.result())

        def call(request: Any) -> Any:
            name = type(request).__name__.removesuffix("Request")
            data = harmless(name, request.SerializeToString()) or b""
            return finish(name, data, calls[name].future(data, timeout=20))

        for _ in range(cases.num_cases // BATCH):
            sent = [fuzzed_call(rng) for _ in range(BATCH)]
            futures = [calls[name].future(data, timeout=CALL_S) for name, data in sent]
            for (name, data), future in zip(sent, futures, strict=True):
                finish(name, data, future)
            save_requests(rng, call)
        assert_same_rows_as_visitor(remote, twin)
    assert "Traceback" not in log_of(pserver)
    cases.report(**counts)


def assert_same_rows_as_visitor(remote: RemotePserver, twin: Shard) -> None:
    """As `assert_same_rows`, by a client that is no worker: the place of the worker may be taken."""
    visitor = b"v" * 16
    request = messages.RegisterRequest(
        protocol_version=CONTROL_VERSION, role=messages.ROLE_READER, client_id=visitor, client_epoch=1
    )
    shard = RemoteShard(remote.call(request))
    client = FrameClient(shard, visitor)
    for spec in (SGD, ADAM):
        rows = everything(store_of(twin, spec))
        found = client.rows(spec, *rows)
        assert np.asarray(found, np.float32).tobytes() == b"".join(each.row for each in rows.values())
    shard.close()
