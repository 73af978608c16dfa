"""A client of shards in this process, over each transport that a worker may have."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from fleet_sparse.core.placement import Placement
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.embedded import start_embedded
from fleet_sparse.pserver.net.data_plane import DataPlane
from fleet_sparse.pserver.net.streams import Streams
from fleet_sparse.settings import Settings
from fleet_sparse.worker.net.channel_choice import open_channel
from fleet_sparse.worker.net.client import Client
from fleet_sparse.worker.net.shard_link import ClientIdentity, Registration
from fleet_sparse.worker.net.table_client import TableClient

from .shards import CLUSTER, INCARNATION, make_shard

TRANSPORTS = ("unix", "tcp", "zmq", "embedded")
HOST = "127.0.0.1"


@contextmanager
def client_over(
    transport: str, specs: Sequence[TableSpec], settings: Settings, num_shards: int
) -> Iterator[tuple[TableClient, Placement]]:
    """Connects a client to new shards with these tables; `transport` is one of `TRANSPORTS`."""
    placement = Placement.even(num_shards)
    client: Any
    with ExitStack() as stack:
        if transport == "embedded":
            control, client = start_embedded(settings, num_shards=num_shards)
            stack.enter_context(control)
            control.register(specs, 0, 1)
        else:
            registrations = [
                _serve(transport, specs, settings, shard, num_shards, stack.callback) for shard in range(num_shards)
            ]
            identity = ClientIdentity(b"client number 3.")
            client = Client(open_channel(registrations, settings), identity, registrations, placement, settings)
        with client:
            yield client, placement


def _serve(
    transport: str,
    specs: Sequence[TableSpec],
    settings: Settings,
    shard: int,
    num_shards: int,
    at_end: Callable[..., Any],
) -> Registration:
    """Runs the data plane of a new shard in a thread until the functions given to `at_end` are called."""
    made = make_shard(*specs, shard=shard, num_shards=num_shards)
    at_end(made.close)
    host = HOST if transport == "tcp" else None
    streams = None if transport == "zmq" else Streams(max_frame_bytes=settings.max_frame_bytes, host=host)
    zmq_host = HOST if streams is None else None
    plane = DataPlane(made, max_frame_bytes=settings.max_frame_bytes, streams=streams, zmq_host=zmq_host)
    thread = threading.Thread(target=plane.run)
    thread.start()
    at_end(thread.join)
    at_end(plane.stop)
    data_endpoint, stream_endpoint = ("", streams.endpoint) if streams else (f"{HOST}:{plane.port}", "")
    return Registration(
        CLUSTER, shard, num_shards, INCARNATION, made.placement.version, data_endpoint, stream_endpoint=stream_endpoint
    )
