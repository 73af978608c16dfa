"""A pserver process, as a worker sees it: gRPC calls and frames over TCP."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import grpc
import zmq
from google.protobuf.message import Message

from fleet_sparse.core.table import DenseSpec, TableSpec
from fleet_sparse.errors import FleetSparseError
from fleet_sparse.wire import control_pb2 as messages
from fleet_sparse.wire.control import ATTRIBUTES_KEY, ERROR_KEY, METHODS, SERVICE, from_status
from fleet_sparse.wire.frames import PROTOCOL_VERSION, Frame, decode, encode

from .shards import CLIENT, CLUSTER

START_S, CALL_S = 60.0, 30.0
MAX_BYTES = 64 << 20


class RemoteShard:
    """The shard of a pserver process; `answer` asks it over ZeroMQ."""

    def __init__(self, reply: messages.RegisterReply) -> None:
        self.shard_index = reply.shard
        self.num_shards = reply.num_shards
        self.incarnation = reply.incarnation
        self.tables = list(reply.tables)
        self._context = zmq.Context()
        self.socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.rcvtimeo = int(1000 * CALL_S)
        self.socket.connect(f"tcp://{reply.data_endpoint}")

    def answer(self, frame: Frame) -> Frame:
        self.socket.send_multipart(encode(frame))
        return decode(self.socket.recv_multipart(), max_bytes=MAX_BYTES)

    def close(self) -> None:
        self.socket.close()
        self._context.term()


class Pserver:
    """A running `python -m fleet_sparse.pserver`, on ports that the system chose. Ends with the `with` block."""

    def __init__(
        self, directory: Path, *arguments: str, shard: int = 0, num_shards: int = 1, environment: Sequence[str] = ()
    ) -> None:
        self.directory = directory
        self._endpoint_file = directory / f"endpoint-{shard}-{time.monotonic_ns()}"
        self.log = directory / f"{self._endpoint_file.name}.log"
        command = [sys.executable, "-m", "fleet_sparse.pserver", "--shard", str(shard), "--num-shards", str(num_shards)]
        command += ["--control", "127.0.0.1:0", "--servers", ",".join(["127.0.0.1:0"] * num_shards)]
        command += ["--cluster-id", str(CLUSTER), "--endpoint-file", str(self._endpoint_file), *arguments]
        variables = dict(setting.split("=", 1) for setting in environment)
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                command, cwd=directory, stdout=log, stderr=log, env={**_environment(), **variables}
            )
        self._shards: list[RemoteShard] = []
        self._channel: grpc.Channel | None = None

    def __enter__(self) -> Pserver:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for shard in self._shards:
            shard.close()
        if self._channel is not None:
            self._channel.close()
        self.process.kill()
        self.process.wait(START_S)

    @property
    def endpoint(self) -> str:
        """Of the control plane; waits until the pserver is ready."""
        deadline = time.monotonic() + START_S
        while not self._endpoint_file.exists():
            assert self.process.poll() is None, f"ended with {self.process.returncode}:\n{self.log.read_text()}"
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.01)
        return self._endpoint_file.read_text().strip()

    def start_call(self, request: Message) -> Any:
        """Starts the call that takes this request; its `result()` is the reply."""
        if self._channel is None:
            self._channel = grpc.insecure_channel(self.endpoint)
        name = type(request).__name__.removesuffix("Request")
        call = self._channel.unary_unary(
            f"/{SERVICE}/{name}",
            request_serializer=type(request).SerializeToString,
            response_deserializer=METHODS[name][1].FromString,
        )
        return call.future(request, timeout=CALL_S)

    def call(self, request: Message) -> Any:
        """The reply, or raises the error of ours that the pserver raised."""
        return result_of(self.start_call(request))

    def register(
        self, *specs: TableSpec | DenseSpec, worker: int = 0, num_workers: int = 1, client_id: bytes = CLIENT
    ) -> RemoteShard:
        """Registers a worker; the shard as it sees it."""
        reply = self.call(
            messages.RegisterRequest(
                protocol_version=PROTOCOL_VERSION,
                worker_index=worker,
                num_workers=num_workers,
                client_id=client_id,
                client_epoch=1,
                table_specs=[spec.to_json() for spec in specs],
            )
        )
        self._shards.append(RemoteShard(reply))
        return self._shards[-1]

    def wait(self, *, signalled: int | None = None) -> int:
        """Its exit code, once it ended; after a signal if one is given."""
        if signalled is not None:
            self.process.send_signal(signalled)
        return self.process.wait(START_S)

    def terminate(self) -> int:
        """Its exit code after SIGTERM."""
        return self.wait(signalled=signal.SIGTERM)


def result_of(future: Any) -> Any:
    """The reply of a started call, or raises the error of ours that came back."""
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


def _environment() -> dict[str, str]:
    root = Path(__file__).parents[2]
    path = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH", "")]))
    kept = {name: value for name, value in os.environ.items() if not name.startswith("FLEET_SPARSE_")}
    return {**kept, "PYTHONPATH": path}
