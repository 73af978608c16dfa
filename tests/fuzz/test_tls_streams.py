"""Garbage, cut, changed and repeated handshakes at both TLS ports of a pserver: nothing reaches its shard."""

from __future__ import annotations

import random
import re
import socket
import ssl
import struct
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import pytest

from fleet_sparse.keys import SERVER_NAME, TRAINER, read_keys
from fleet_sparse.local_pservers import PserverProcess
from fleet_sparse.net_addresses import Address
from fleet_sparse.settings import Settings
from fleet_sparse.wire.stream import GREETING
from fleet_sparse.worker.control.control import ControlClient
from support.fuzzing import SENT, Cases, flat_memory, message, mutated_bytes
from support.job_keys import make_keys
from support.shards import CLUSTER

ANSWER_S = 20.0
RECORD = struct.Struct(">BHH")
RESET = struct.pack("ii", 1, 0)
"""SO_LINGER: the connection is reset when it is closed, so that its port is free at once."""


class Recording:
    """What a client with keys and a pserver sent each other, in the order of their flights.

    Attributes:
        flights: Bytes that the client sent, flight by flight; the last one has a frame.
        context: The context of the client.
    """

    def __init__(self, address: Address, keys: Path) -> None:
        self.context = read_keys(str(keys), TRAINER).client_context()
        self.flights: list[bytes] = []
        into, out = ssl.MemoryBIO(), ssl.MemoryBIO()
        session = self.context.wrap_bio(into, out, server_hostname=SERVER_NAME)
        with socket.create_connection(address, ANSWER_S) as stream:
            while True:
                try:
                    session.do_handshake()
                    break
                except ssl.SSLWantReadError:
                    self._send(stream, out)
                    into.write(stream.recv(1 << 16))
            session.write(GREETING + message(SENT[0]))
            self._send(stream, out)
            while True:  # until it is answered, so that it counts as a request from now on
                into.write(stream.recv(1 << 16))
                with suppress(ssl.SSLWantReadError):
                    assert session.read()
                    break

    def _send(self, stream: socket.socket, out: ssl.MemoryBIO) -> None:
        data = out.read()
        if data:
            self.flights.append(data)
            stream.sendall(data)


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_keys(tmp_path_factory.mktemp("keys") / "keys")


@pytest.fixture(scope="module")
def pserver(tmp_path_factory: pytest.TempPathFactory, keys: Path) -> Iterator[PserverProcess]:
    directory = tmp_path_factory.mktemp("pserver")
    environment = {"FLEET_SPARSE_ROOT": str(directory), "FLEET_SPARSE_KEYS": str(keys)}
    process = PserverProcess(
        0,
        2,
        *("--servers", "127.0.0.1:0,203.0.113.77:0"),  # other machines may reach it
        cluster_id=CLUSTER,
        directory=directory,
        environment=environment,
        log=directory / "pserver.log",
    )
    yield process
    process.kill()


def fuzzed_flights(rng: random.Random, recorded: Sequence[bytes]) -> list[bytes]:
    """What a client without keys may send, flight by flight."""
    kind = rng.randrange(6)
    if kind == 0:
        return [rng.randbytes(rng.randrange(1, 600))]
    if kind == 1:  # a record of any length
        length = rng.choice((0, 1, 2**14, 2**14 + 257, 2**16 - 1, rng.randrange(300)))
        return [
            RECORD.pack(rng.choice((20, 21, 22, 23, 24, 0)), rng.choice((0x301, 0x303, 0x304, 0)), length)
            + rng.randbytes(rng.randrange(400))
        ]
    if kind == 2:  # cut
        data = b"".join(recorded)
        return [data[: rng.randrange(1, len(data))]]
    if kind == 3:  # replayed, perhaps in another order
        return rng.sample(recorded, len(recorded)) if rng.random() < 0.5 else list(recorded)
    return [mutated_bytes(rng, flight) if rng.random() < 0.7 else flight for flight in recorded]


@pytest.mark.cases(200, 10_000)
def test_handshakes_of_strangers_reach_no_shard(cases: Cases, pserver: PserverProcess, keys: Path) -> None:
    rng = cases.rng
    num_ended = 0
    with ExitStack() as stack:
        control = stack.enter_context(ControlClient([pserver.endpoint], Settings(keys=str(keys))))
        data = data_address(pserver)
        recorded = Recording(data, keys).flights
        assert len(recorded) == 2  # a hello, and a certificate with all that follows
        before = control.stats()[0]
        ports = [data, data, data, Address.parse(pserver.endpoint)]
        stack.enter_context(flat_memory(pserver.process.pid))
        for number in range(cases.num_cases):
            with closing(socket.create_connection(rng.choice(ports), ANSWER_S)) as stream:
                stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
                waits = rng.random() < 0.5
                send(stream, fuzzed_flights(rng, recorded), waits=waits)
                num_ended += waits
            if number % 1000 == 0:
                assert len(control.stats()) == 1
        after = control.stats()[0]
    assert after.num_requests == before.num_requests
    assert pserver.process.poll() is None
    log = log_of(pserver)
    assert [line for line in log.splitlines() if not re.match(r"\d{4}-\d\d-\d\d ", line)] == []
    assert len(log) < 1 << 20
    cases.report(ended=num_ended, log_bytes=len(log))


def send(stream: socket.socket, flights: Sequence[bytes], *, waits: bool) -> None:
    """Sends all there is, and perhaps waits until the pserver ends the connection."""
    try:
        for flight in flights:
            stream.sendall(flight)
        if waits:
            stream.shutdown(socket.SHUT_WR)
            while stream.recv(1 << 16):
                pass
    except TimeoutError:
        raise
    except OSError:  # it has ended it
        pass


def data_address(pserver: PserverProcess) -> Address:
    assert pserver.endpoint  # it is ready
    return Address.parse(re.findall(r"data plane tcp:(\S+)", log_of(pserver))[0].rstrip(","))


def log_of(pserver: PserverProcess) -> str:
    assert isinstance(pserver.log, Path)
    return pserver.log.read_text()


@pytest.mark.cases(50, 5_000)
def test_wrong_records_of_a_trainer_end_its_stream(cases: Cases, pserver: PserverProcess, keys: Path) -> None:
    """After its handshake: bytes that are no records, and records with bytes that are no messages."""
    rng = cases.rng
    context = read_keys(str(keys), TRAINER).client_context()
    with ExitStack() as stack:
        control = stack.enter_context(ControlClient([pserver.endpoint], Settings(keys=str(keys))))
        data = data_address(pserver)
        stack.enter_context(flat_memory(pserver.process.pid))
        for number in range(cases.num_cases):
            into, out = ssl.MemoryBIO(), ssl.MemoryBIO()
            session = context.wrap_bio(into, out, server_hostname=SERVER_NAME)
            with closing(socket.create_connection(data, ANSWER_S)) as stream:
                stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
                while True:
                    try:
                        session.do_handshake()
                        break
                    except ssl.SSLWantReadError:
                        stream.sendall(out.read())
                        into.write(stream.recv(1 << 16))
                session.write(GREETING + message(SENT[0]))
                sent = out.read()
                if rng.random() < 0.5:
                    session.write(rng.randbytes(100))
                    sent += out.read()
                else:
                    sent = mutated_bytes(rng, sent) + rng.randbytes(30)
                send(stream, [sent], waits=True)
            if number % 1000 == 0:
                assert len(control.stats()) == 1
    assert pserver.process.poll() is None
    assert "Traceback" not in log_of(pserver)
    cases.report(log_bytes=len(log_of(pserver)))
