"""Fuzzed calls and frames at a pserver that serves a snapshot: its rows stay those of the snapshot."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import grpc
import pytest

from fleet_sparse.control_socket import socket_path
from fleet_sparse.core.spec_json import parse_spec
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.errors import ErrorCode
from fleet_sparse.local_pservers import PserverProcess
from fleet_sparse.net_addresses import Address
from fleet_sparse.settings import Settings
from fleet_sparse.wire import control_pb2 as messages
from fleet_sparse.wire.control import CONTROL_VERSION, METHODS, SERVICE
from fleet_sparse.wire.decode import decode
from fleet_sparse.wire.encode import encode
from fleet_sparse.wire.frame_format import HEADER_BYTES, Action, Block, Frame, Header, Op
from support import saves
from support.frames import resized
from support.fuzzed_calls import ALLOWED, CALL_S, fuzzed_call
from support.fuzzing import Cases, edge, flat_memory, mutated
from support.shards import CLUSTER, ids_of
from support.streams import StreamSocket

READER = b"r" * 16
BATCH = 32
IDS = ids_of(*range(-20, 20))


@pytest.fixture
def pserver(tmp_path: Path) -> Iterator[PserverProcess]:
    saves.save(saves.trained(1), tmp_path)
    environment = {"FLEET_SPARSE_ROOT": str(tmp_path)}
    arguments = ("--read-only", "--load", ".")
    log = tmp_path / "pserver.log"
    process = PserverProcess(0, 1, *arguments, cluster_id=CLUSTER, directory=tmp_path, environment=environment, log=log)
    yield process
    process.kill()


class Reader:
    """A client that reads the version of a read-only pserver."""

    def __init__(self, attached: messages.AttachReply) -> None:
        self._attached = attached
        self._specs = [parse_spec(table.spec) for table in attached.tables]
        self.socket = StreamSocket(attached.stream_endpoint)

    def read(self, rng: random.Random | None = None) -> Frame:
        """Returns the request for all rows; with a generator, for some of them, and perhaps of another version."""
        specs = [spec for spec in self._specs if isinstance(spec, TableSpec)]
        ids, step = IDS, self._attached.versions[0].checksum
        op = Op.READ
        if rng is not None:
            specs = rng.sample(specs, rng.randrange(1, len(specs) + 1))
            ids = ids_of(*rng.sample(range(-20, 20), rng.randrange(6)))
            step = step if rng.random() < 0.95 else edge(rng, 64)
            op = rng.choice((Op.READ, Op.READ, Op.PULL))
        blocks = [Block(Action.PULL, spec.table_id, spec.schema_hash, spec.dim, len(ids), ids) for spec in specs]
        return Frame(
            Header(
                op,
                cluster_id=self._attached.cluster_id,
                incarnation=self._attached.incarnation,
                placement_version=self._attached.placement_version,
                client_id=READER,
                client_epoch=1,
                step=step,
            ),
            blocks,
        )

    def ask(self, *requests: list[bytes]) -> list[Frame]:
        for parts in requests:
            self.socket.send_multipart(parts)
        return [decode(self.socket.recv_multipart(), max_bytes=Settings.max_frame_bytes) for _ in requests]

    def rows(self) -> list[bytes]:
        (reply,) = self.ask([bytes(part) for part in encode(self.read())])
        assert reply.error is None
        return [b"" if block.rows is None else block.rows.tobytes() for block in reply.blocks]


def fuzzed_parts(rng: random.Random, reader: Reader) -> list[bytes]:
    parts = [bytes(part) for part in encode(reader.read(rng))]
    changed = mutated(rng, parts) if rng.random() < 0.6 else parts
    return resized(changed) if changed and len(changed[0]) >= HEADER_BYTES else parts


@pytest.mark.cases(128, 10_000)
def test_reads_are_those_of_the_snapshot(cases: Cases, pserver: PserverProcess) -> None:
    rng, num_refused = cases.rng, 0
    path = socket_path(Address.parse(pserver.endpoint).port)
    with ExitStack() as stack:
        channel = stack.enter_context(grpc.insecure_channel(f"unix:{path}"))
        calls = {name: channel.unary_unary(f"/{SERVICE}/{name}") for name in METHODS}
        request = messages.AttachRequest(protocol_version=CONTROL_VERSION, client_id=READER)
        reader = Reader(messages.AttachReply.FromString(calls["Attach"](request.SerializeToString(), timeout=20)))
        stack.enter_context(closing(reader.socket))
        before = reader.rows()
        stack.enter_context(flat_memory(pserver.process.pid))
        for _ in range(cases.num_cases // (2 * BATCH)):
            sent = [fuzzed_call(rng) for _ in range(BATCH)]
            futures = [(name, calls[name].future(data, timeout=CALL_S)) for name, data in sent]
            for reply in reader.ask(*(fuzzed_parts(rng, reader) for _ in range(BATCH))):
                assert reply.error is None or reply.error.code is not ErrorCode.INTERNAL, reply.error
                num_refused += reply.error is not None
            for name, future in futures:
                future.exception()  # waits
                assert future.code() in ALLOWED, (name, future.code(), future.details())
        assert reader.rows() == before
    assert isinstance(pserver.log, Path)
    assert "Traceback" not in pserver.log.read_text()
    cases.report(refused=num_refused)
