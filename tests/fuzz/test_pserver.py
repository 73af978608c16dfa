"""Fuzzed frames, streams and control messages at the sockets of a pserver process: its rows stay exact."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message

from fleet_sparse.control_socket import socket_path
from fleet_sparse.core.initializer import constant
from fleet_sparse.core.mode import ASYNC, SYNC, Mode
from fleet_sparse.core.placement import Placement
from fleet_sparse.core.table_spec import TableSpec
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
from support.fuzzing import EDGES, Cases, flat_memory, fuzzed_parts, fuzzed_stream, mutated, mutated_bytes
from support.pservers import RemotePserver, RemoteShard
from support.saves import store_of
from support.shards import ADAM, CLIENT, CLUSTER, DENSE, READS, SGD, FrameClient, assign, floats, ids_of, pull, push
from support.streams import StreamSocket

MAX_FRAME_BYTES = Settings.max_frame_bytes
BATCH = 32
SPECS = (SGD, ADAM, DENSE)


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


ALLOWED = {
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.ABORTED,
    grpc.StatusCode.DATA_LOSS,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.DEADLINE_EXCEEDED,  # this client waits no longer
}
CALL_S = 0.1
TEXTS = (
    *("", "a", "b", "model", "model/b", ".", "..", "../a", "/etc", "a/../b", "x" * 300, "\0", "a\nb", "ü", "\ud7ff"),
    *("full", "delta", "sgd", "adam", "dense", "other", "min_norm", "unseen_days", "min_score", "hottest"),
    *("{}", "[]", "null", "1e999", "NaN", "[" * 2000, '{"epoch": 1}', '{"a": 1', "shard-0-of-1.fss", "../x.fss"),
    *(Mode(SYNC).to_json(), Mode(ASYNC).to_json(), *(spec.to_json() for spec in (*SPECS, READS))),
    TableSpec(name="other", dim=4, rule="adagrad", initializer=constant(0.0)).to_json(),
    SGD.to_json().replace("2", "3"),
    ADAM.to_json().replace("adam", "adamw"),
)
USUAL: dict[str, Sequence[Any]] = {
    "protocol_version": [CONTROL_VERSION],
    "role": [1],
    "worker_index": [0],
    "num_workers": [1],
    "client_id": [CLIENT],
    "mode": ["", Mode(SYNC).to_json(), Mode(ASYNC).to_json()],
    "table_specs": [spec.to_json() for spec in SPECS],
    "kind": ["full", "delta"],
    "dirname": ["model"],
    "save_id": ["a", "b"],
    "load_id": ["a", "b"],
    "tables": ["sgd", "adam", "dense"],
    "decay": [1.0],
}
CLIENTS = (CLIENT, b"b" * 16, b"c" * 16, b"", b"short")


def fuzzed_message(rng: random.Random, kind: type[Message]) -> Any:
    """A message whose fields are often right, or nearly."""
    made: Any = kind()
    for field in kind.DESCRIPTOR.fields:
        if rng.random() > 0.1:
            fill(rng, made, field)
    return made


def blurred(rng: random.Random, made: Any) -> Any:
    """A message after a change of some of its fields, or of none."""
    for field in made.DESCRIPTOR.fields:
        if rng.random() < 0.07:
            made.ClearField(field.name)
            fill(rng, made, field)
    return made


def fill(rng: random.Random, made: Any, field: FieldDescriptor) -> None:
    count = rng.randrange(3) if field.is_repeated else 1
    values = getattr(made, field.name)
    if field.message_type is not None:
        kind: Any = getattr(messages, field.message_type.name)
        for _ in range(count):
            child = fuzzed_message(rng, kind)
            if field.is_repeated:
                values.append(child)
            else:
                values.CopyFrom(child)
    elif field.is_repeated:
        values.extend(value_of(rng, field) for _ in range(count))
    else:
        setattr(made, field.name, value_of(rng, field))


def value_of(rng: random.Random, field: FieldDescriptor) -> Any:  # noqa: PLR0911  # one for each type
    if field.name == "name" and field.containing_type.name == "ShrinkCriterion" and rng.random() < 0.9:
        return rng.choice(("unseen_days", "min_norm", "min_score", "hottest"))
    if field.name in USUAL and rng.random() < 0.8:
        return rng.choice(USUAL[field.name])
    if field.type == FieldDescriptor.TYPE_FIXED64 and rng.random() < 0.8:
        return 0  # an id that the client does not know yet
    if field.type == FieldDescriptor.TYPE_STRING:
        return rng.choice(TEXTS)
    if field.type == FieldDescriptor.TYPE_BYTES:
        return rng.choice(CLIENTS)
    if field.type == FieldDescriptor.TYPE_BOOL:
        return rng.random() < 0.5
    if field.type == FieldDescriptor.TYPE_DOUBLE:
        return rng.choice((0.0, 1.0, 0.5, -1.0, 1e300, float("inf"), float("nan")))
    if field.type == FieldDescriptor.TYPE_ENUM:
        return rng.choice((0, 1, 2, 3, 4, 99, -1))
    number = rng.choice((0, 0, 1, 1, 2, 3, *EDGES))
    if field.type == FieldDescriptor.TYPE_UINT32:
        return number & 0xFFFFFFFF
    return number - 2**63 if field.type == FieldDescriptor.TYPE_SFIXED64 else number


def save_requests(rng: random.Random, call: Callable[[Any], Any]) -> None:
    """A save or a load, whose requests are changed on the way."""
    name = f"s{rng.randrange(10**9)}"

    def ask(request: Any) -> Any:
        return call(blurred(rng, request))

    if rng.random() < 0.2:
        tables = rng.sample(["sgd", "adam", "dense"], rng.randrange(3))
        ask(messages.StageLoadRequest(dirname="model", load_id=name, tables=tables, missing_ok=rng.random() < 0.5))
        ask(messages.FinishLoadRequest(load_id=name, keep=rng.random() < 0.7, resumes=rng.random() < 0.3))
        return
    kind = rng.choice(("full", "delta"))
    plan = ask(messages.PlanSaveRequest(dirname="model", save_id=name, kind=kind)) or messages.SavePlan()
    position = messages.WorkerPosition(worker_index=0, step=1, position='{"a": 1}')
    ask(messages.BeginSaveRequest(plan=plan, position=position, client_id=CLIENT, ends_day=rng.random() < 0.3))
    file = ask(messages.WriteSaveRequest(save_id=name)) or messages.ShardFile()
    finished = ask(messages.FinishSaveRequest(plan=plan, files=[blurred(rng, file)], keep_last=2))
    checksum = finished.checksum if finished else 0
    ask(messages.EndSaveRequest(save_id=name, committed=bool(finished), checksum=checksum))


def harmless(name: str, data: bytes) -> bytes | None:
    """A request that a trainer may send without a change of rows; None if there is none."""
    try:
        parsed: Any = METHODS[name][0].FromString(data)
    except DecodeError:
        return data
    if name == "Stop":
        return None
    if name == "Shrink":
        parsed.dry_run = True
    elif name == "BeginSave":
        for left_out in parsed.left_out:
            for criterion in left_out.criteria:
                criterion.name, criterion.value = "min_norm", min(criterion.value, 0.0)
    else:
        return data
    return bytes(parsed.SerializeToString())


def fuzzed_call(rng: random.Random) -> tuple[str, bytes]:
    while True:
        name = rng.choice(list(METHODS))
        data = fuzzed_message(rng, METHODS[name][0]).SerializeToString()
        if rng.random() < 0.3:
            data = mutated_bytes(rng, data)
        data = harmless(name, data)
        if data is not None:
            return name, data


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
