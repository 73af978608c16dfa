"""A pserver process, as a worker sees it: gRPC calls and frames over TCP."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import zmq
from google.protobuf.message import Message

from fleet_sparse.core.dense_spec import DenseSpec
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.credentials import Credentials
from fleet_sparse.errors import FleetSparseError
from fleet_sparse.local_pservers import PserverProcess
from fleet_sparse.settings import Channel, Settings
from fleet_sparse.wire import control_pb2 as messages
from fleet_sparse.wire.control import ATTRIBUTES_KEY, CONTROL_VERSION, ERROR_KEY, METHODS, SERVICE, from_status
from fleet_sparse.wire.decode import decode
from fleet_sparse.wire.encode import encode
from fleet_sparse.wire.frame_format import Frame

from .shards import CLIENT, CLUSTER
from .streams import StreamSocket

CALL_S = 30.0
MAX_BYTES = 64 << 20


class RemoteShard:
    """The shard of a pserver process, reached over a stream, or over ZeroMQ if it has no stream."""

    def __init__(self, reply: messages.RegisterReply) -> None:
        self.shard_index = reply.shard
        self.num_shards = reply.num_shards
        self.incarnation = reply.incarnation
        self.stream_endpoint = reply.stream_endpoint
        self.zmq_endpoint = reply.data_endpoint
        self.tables = list(reply.tables)
        self._context = zmq.Context()
        self.socket: Any
        if reply.stream_endpoint:
            self.socket = StreamSocket(reply.stream_endpoint, timeout_s=CALL_S)
            return
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.rcvtimeo = int(1000 * CALL_S)
        self.socket.connect(f"tcp://{reply.data_endpoint}")

    def answer(self, frame: Frame) -> Frame:
        self.socket.send_multipart(encode(frame))
        return decode(self.socket.recv_multipart(), max_bytes=MAX_BYTES)

    def close(self) -> None:
        self.socket.close()
        self._context.term()


class RemotePserver:
    """The pserver whose control plane is at an endpoint, with the channel of its settings."""

    def __init__(self, endpoint: str, channel: Channel = "auto") -> None:
        self._channel = Credentials.of(Settings(channel=channel)).grpc_channel(endpoint, ())
        self._shards: list[RemoteShard] = []

    def close(self) -> None:
        """Closes the connection and those of its shards."""
        for shard in self._shards:
            shard.close()
        self._channel.close()

    def start_call(self, request: Message) -> Any:
        """Starts the call that takes this request; its `result()` is the reply."""
        name = type(request).__name__.removesuffix("Request")
        call = self._channel.unary_unary(
            f"/{SERVICE}/{name}",
            request_serializer=type(request).SerializeToString,
            response_deserializer=METHODS[name][1].FromString,
        )
        return call.future(request, timeout=None if name == "Attend" else CALL_S)

    def call(self, request: Message) -> Any:
        """Returns the reply, or raises the pserver's error."""
        return result_of(self.start_call(request))

    def register(
        self,
        *specs: TableSpec | DenseSpec,
        worker: int = 0,
        num_workers: int = 1,
        client_id: bytes = CLIENT,
        job_id: str = "",
    ) -> RemoteShard:
        """Registers a worker; returns its view of the shard."""
        reply = self.call(
            messages.RegisterRequest(
                protocol_version=CONTROL_VERSION,
                role=messages.ROLE_WORKER,
                worker_index=worker,
                num_workers=num_workers,
                client_id=client_id,
                client_epoch=1,
                table_specs=[spec.to_json() for spec in specs],
                launch={"job_id": job_id},
            )
        )
        self._shards.append(RemoteShard(reply))
        return self._shards[-1]


def result_of(future: Any) -> Any:
    """Returns the reply of a started call, or raises the pserver's error."""
    try:
        return future.result()
    except grpc.RpcError as error:
        metadata = dict(future.trailing_metadata() or ())
        if ERROR_KEY in metadata:
            raised: FleetSparseError = from_status(
                future.details(), str(metadata[ERROR_KEY]), str(metadata[ATTRIBUTES_KEY])
            )
            raise raised from error
        raise


@contextmanager
def logged_pserver(
    directory: Path, *arguments: str, **variables: str
) -> Iterator[tuple[PserverProcess, RemotePserver]]:
    """A pserver process with a log in a directory, and a connection to it."""
    environment = {"FLEET_SPARSE_ROOT": str(directory), "FLEET_SPARSE_DURABILITY": "log", "FLEET_SPARSE_JOB_ID": "a"}
    pserver = PserverProcess(
        0, 1, *arguments, cluster_id=CLUSTER, directory=directory, environment={**environment, **variables}
    )
    try:
        remote = RemotePserver(pserver.endpoint)
        try:
            yield pserver, remote
        finally:
            remote.close()
    finally:
        pserver.kill()
