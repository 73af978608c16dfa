"""What a process on another host tries at pservers with keys; a program: `other_host.py NAME ARGUMENTS-AS-JSON`."""

from __future__ import annotations

import json
import socket
import ssl
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from fleet_sparse.core.mode import Mode
from fleet_sparse.core.placement import Placement
from fleet_sparse.credentials import Credentials
from fleet_sparse.errors import FleetSparseError
from fleet_sparse.keys import SERVER_NAME
from fleet_sparse.net_addresses import Address
from fleet_sparse.settings import Settings
from fleet_sparse.wire.control import METHODS
from fleet_sparse.wire.decode import decode
from fleet_sparse.wire.encode import encode
from fleet_sparse.wire.frame_format import PUSHES, Frame, Header, Op
from fleet_sparse.wire.stream import GREETING, FrameWriter
from fleet_sparse.worker.control.control import ControlClient
from fleet_sparse.worker.control.rpc import GrpcTransport, OutOfTime
from fleet_sparse.worker.net.channel_choice import open_channel
from fleet_sparse.worker.net.client import Client
from fleet_sparse.worker.net.stream_channel import StreamChannel
from fleet_sparse.worker.rows.deduplicator import Deduplicator
from fleet_sparse.worker.rows.row_batch import RowBatch
from support.shards import SGD

REPLIES = {Op.ROWS, Op.ACK, Op.WAIT, Op.ERROR, Op.NORMS}
WAIT_S = 5.0


def error_of(call: Callable[[], object]) -> list[str]:
    """Returns class and message of the error of a call; empty strings without one."""
    try:
        call()
    except FleetSparseError as error:
        return [type(error).__name__, str(error)]
    return ["", ""]


def train(endpoints: Sequence[str], keys: str) -> dict[str, Any]:
    """Trains a step; returns where frames go, and what their headers carry."""
    ids, _ = Deduplicator(Placement.even(2)).unique([np.arange(1000)], SGD.salt)
    rows = np.empty((1000, SGD.dim), np.float32)
    settings = Settings(keys=keys)
    with ControlClient(endpoints, settings) as control:
        registrations = control.register([SGD], 0, 1, Mode())
        first = registrations[0]
        channel = open_channel(registrations, settings, control.credentials)
        with Client(channel, control.identity, registrations, Placement.even(2), settings) as client:
            client.push([RowBatch(SGD, ids, np.ones_like(rows), 1.0, 1)])
            client.pull([RowBatch(SGD, ids, rows)])
        return {
            "rows": rows[0].tolist(),
            "stream": first.stream_endpoint,
            "cluster_id": first.cluster_id,
            "incarnation": first.incarnation,
            "client_id": control.identity.client_id.hex(),
        }


def num_requests(endpoints: Sequence[str], keys: str) -> list[int]:
    """Returns the number of frames that reached each shard."""
    with ControlClient(endpoints, Settings(keys=keys, role="watcher")) as control:
        return [each.num_requests for each in control.stats()]


def register(endpoints: Sequence[str], keys: str) -> list[str]:
    """Returns why a worker may not register."""

    def call() -> None:
        with ControlClient(endpoints, Settings(keys=keys, connect_s=WAIT_S, deadline_s=WAIT_S)) as control:
            control.register([SGD], 0, 1)

    return error_of(call)


def calls(endpoints: Sequence[str], keys: str, role: Any) -> dict[str, list[str]]:
    """Returns how the first pserver answers each call of a role."""
    transport = GrpcTransport(endpoints, Credentials.of(Settings(keys=keys, role=role)))
    answers = {}
    for method, (request, _) in METHODS.items():
        pending = transport.start(0, method, request(), 1.0)
        try:
            answers[method] = error_of(pending.result)
        except OutOfTime:
            answers[method] = ["", ""]
    transport.close()
    return answers


def ops(job: dict[str, Any], keys: str, role: Any, names: Sequence[str]) -> dict[str, list[str]]:
    """Returns how the first pserver answers ops of a role, which knows the client id of a worker."""
    credentials = Credentials.of(Settings(keys=keys, role=role))
    channel = StreamChannel([job["stream"]], Settings(), credentials=credentials)
    answers = {}
    for op in map(Op.__getitem__, names):
        header = Header(
            op,
            cluster_id=job["cluster_id"],
            incarnation=job["incarnation"],
            placement_version=1,
            client_id=bytes.fromhex(job["client_id"]),
            client_epoch=1,
            request_id=int(op),
            push_seq=2 if op in PUSHES else 0,
        )
        assert channel.send(0, encode(Frame(header, [])))
        error = decode(_received(channel), max_bytes=1 << 20).error
        answers[op.name] = ["", ""] if error is None else [error.code.name, error.message]
    channel.close()
    return answers


def _received(channel: StreamChannel) -> list[Any]:
    until = time.monotonic() + 20
    while time.monotonic() < until:
        if (reply := channel.receive(1.0)) is not None:
            return list(reply[1])
    raise AssertionError("no answer")


def connections(addresses: Sequence[str], certificates: dict[str, str]) -> dict[str, list[int]]:
    """Returns how many bytes are answered to a frame on connections that are no trainer's; -1 if one stays open."""
    contexts: dict[str, ssl.SSLContext | None] = {"plain TCP": None, "no certificate": _context("")}
    contexts |= {name: _context(file) for name, file in certificates.items()}
    return {name: [_answered(each, context) for each in addresses] for name, context in contexts.items()}


def tls_1_2(address: str, certificate: str) -> int:
    """Returns how many bytes are answered to a frame over TLS 1.2."""
    context = _context(certificate)
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    return _answered(address, context)


def replay(job: dict[str, Any], keys: str) -> int:
    """Sends what a proxy recorded of a session a second time; returns how many bytes are answered before the end."""
    far_address = Address.parse(job["stream"].removeprefix("tcp:"))
    listener, recorded = socket.create_server(("127.0.0.1", 0)), bytearray()
    credentials = Credentials.of(Settings(keys=keys))
    channel = StreamChannel([f"tcp:{Address(*listener.getsockname())}"], Settings(), credentials=credentials)
    channel.send(0, _frame())
    with listener, listener.accept()[0] as near, socket.create_connection(far_address, 20.0) as far:
        near.settimeout(0.01)
        far.settimeout(0.01)
        until = time.monotonic() + 20
        while channel.receive(0.01) is None:
            assert time.monotonic() < until
            for source, target in ((near, far), (far, near)):
                with suppress(TimeoutError):
                    data = source.recv(1 << 16)
                    target.sendall(data)
                    if source is near:
                        recorded += data
    channel.close()
    assert len(recorded) > 1000
    with socket.create_connection(far_address, 20.0) as stream:
        with suppress(OSError):
            stream.sendall(recorded)
        return _num_answered(stream)


def _frame() -> list[Any]:
    return encode(Frame(Header(Op.PULL, client_id=bytes(16), request_id=1), []))


def _context(certificate: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if certificate:
        context.load_cert_chain(certificate)
    return context


def _answered(address: str, context: ssl.SSLContext | None) -> int:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        FrameWriter().send(_frame(), ours)
        message = GREETING + theirs.recv(1 << 16)
    try:
        with socket.create_connection(Address.parse(address), 20.0) as plain:
            if context is None:
                plain.sendall(message)
                return _num_answered(plain)
            with context.wrap_socket(plain, server_hostname=SERVER_NAME) as stream:
                with suppress(OSError):
                    stream.sendall(message)
                return _num_answered(stream)
    except (ssl.SSLError, ConnectionError):
        return 0


def _num_answered(stream: socket.socket) -> int:
    """Returns the number of bytes up to the end; -1 if it does not end."""
    num_bytes = 0
    try:
        while data := stream.recv(1 << 16):
            num_bytes += len(data)
    except TimeoutError:
        return -1
    except (ssl.SSLError, ConnectionError):
        pass
    return num_bytes


TRIES: tuple[Callable[..., Any], ...] = (train, num_requests, register, calls, ops, connections, tls_1_2, replay)

if __name__ == "__main__":
    (tried,) = [each for each in TRIES if each.__name__ == sys.argv[1]]
    print(json.dumps(tried(**json.loads(sys.argv[2]))))
