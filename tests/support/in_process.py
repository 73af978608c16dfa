"""Shards in this process, and clients over a channel whose losses a test defines."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from typing import Any

from fleet_sparse.core.dense_spec import DenseSpec, Segment
from fleet_sparse.core.initializer import constant
from fleet_sparse.core.mode import Mode
from fleet_sparse.core.placement import Placement
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.embedded_client import EmbeddedClient
from fleet_sparse.errors import FleetSparseError
from fleet_sparse.pserver.engine.reply import DeferredReply
from fleet_sparse.pserver.engine.shard import Shard
from fleet_sparse.pserver.net.requests import answer, deferred_answers
from fleet_sparse.pserver.shared_shard import SharedShard
from fleet_sparse.settings import Settings
from fleet_sparse.warm_up import warm_up
from fleet_sparse.worker.net.channel import Buffer
from fleet_sparse.worker.net.client import Client
from fleet_sparse.worker.net.shard_link import ClientIdentity, Registration

from .in_process_channel import InProcessChannel

CLUSTER_ID = 77
QUICK = Settings(deadline_s=20.0, retry_s=0.05)


class LossyChannel(InProcessChannel):
    """Loses requests and replies for which `loses_request` and `loses_reply` return True; counts messages.

    `changes_reply` gets a shard, a request and its reply, and returns the reply that is delivered.
    """

    def __init__(self, num_shards: int, answered: Callable[[int, Sequence[Buffer]], Sequence[Buffer]]) -> None:
        super().__init__(num_shards, lambda shard, parts: self.changes_reply(shard, parts, answered(shard, parts)))
        self.changes_reply: Callable[[int, Sequence[Buffer], Sequence[Buffer]], Sequence[Buffer]] = (
            lambda shard, request, reply: reply
        )
        self.loses_request: Callable[[int], bool] = lambda shard: False
        self.loses_reply: Callable[[int], bool] = lambda shard: False
        self.num_sent = [0] * num_shards

    def send(self, shard: int, parts: Sequence[Buffer]) -> bool:
        self.num_sent[shard] += 1
        return True if self.loses_request(shard) else super().send(shard, parts)

    def receive(self, timeout_s: float) -> tuple[int, list[Buffer]] | None:
        message = super().receive(timeout_s)
        return None if message is not None and self.loses_reply(message[0]) else message


class FrameShard:
    """A shard that answers frames in the threads of its clients; `deliver` sends a deferred reply to a client."""

    def __init__(self, shard: Shard, max_frame_bytes: int, deliver: Callable[[bytes, Sequence[Buffer]], None]) -> None:
        self._shard = shard
        self._max_frame_bytes = max_frame_bytes
        self._deliver = deliver
        self._lock = threading.Lock()

    def answer(self, parts: Sequence[Buffer]) -> Sequence[Buffer]:
        with self._lock:
            reply = answer(self._shard, parts, self._max_frame_bytes)
            self._deliver_deferred()
        return reply.parts

    def run(self, task: Callable[[], Any]) -> Any:
        with self._lock:
            result = task()
            self._deliver_deferred()
        return result

    def _deliver_deferred(self) -> None:
        for reply in deferred_answers(self._shard):
            self._deliver(reply.client_id, reply.parts)


class InProcessCluster:
    """Shards that real clients talk to.

    Args:
        num_shards: Number of shards.
        specs: Further tables and dense arrays.

    Attributes:
        table: dim 4, SGD, rows begin at 1.
        other: dim 3, SGD, rows begin at 2.
        dense: 10 values in two parameters, SGD; the second has learning rate 2.
    """

    def __init__(self, num_shards: int, specs: Sequence[TableSpec | DenseSpec] = ()) -> None:
        warm_up()
        self.placement = Placement.even(num_shards)
        self.table = TableSpec(name="table", dim=4, rule="sgd", initializer=constant(1.0))
        self.other = TableSpec(name="other", dim=3, rule="sgd", initializer=constant(2.0))
        self.dense = DenseSpec("dense", "sgd", (), (Segment("a", 0, 7, 1.0), Segment("b", 7, 3, 2.0)))
        self.shards = [
            Shard(index, num_shards, cluster_id=CLUSTER_ID, incarnation=1000 + index, placement=self.placement)
            for index in range(num_shards)
        ]
        for shard in self.shards:
            for spec in (self.table, self.other, self.dense, *specs):
                shard.add_table(spec)
        self._frame_shards = [
            FrameShard(shard, QUICK.max_frame_bytes, partial(self._deliver, shard.shard_index)) for shard in self.shards
        ]
        self._channels: dict[bytes, LossyChannel] = {}
        self.channel: LossyChannel
        self._numbers = count(1)
        self._clients: list[Client] = []

    def registrations(self) -> list[Registration]:
        """Returns the registration reply of each shard."""
        return [
            Registration(CLUSTER_ID, s.shard_index, s.num_shards, s.incarnation, s.placement.version, f"pserver:{i}")
            for i, s in enumerate(self.shards)
        ]

    def client(self, settings: Settings = QUICK) -> Client:
        """Returns a new client; its channel is `channel`."""
        return self._client(ClientIdentity(next(self._numbers).to_bytes(16, "little"), 1), settings)

    def worker(self, index: int, num_workers: int, mode: Mode, settings: Settings = QUICK) -> Client:
        """Returns a new client that is a worker of a job, which worker 0 begins. Its channel is `channel`."""
        identity = ClientIdentity(next(self._numbers).to_bytes(16, "little"), 1)
        for shard in range(len(self.shards)):
            self.run(shard, partial(self._join, shard, index, num_workers, identity, mode))
        return self._client(identity, settings)

    def answer(self, shard: int, parts: Sequence[Buffer]) -> Sequence[Buffer]:
        """Returns a shard's answer to a frame."""
        return self._frame_shards[shard].answer(parts)

    def run(self, shard: int, task: Callable[[], Any]) -> Any:
        """Runs a task on a shard between two requests; returns its result."""
        return self._frame_shards[shard].run(task)

    def _join(self, shard: int, index: int, num_workers: int, identity: ClientIdentity, mode: Mode) -> int:
        return self.shards[shard].join(index, num_workers, identity.client_id, mode, begins_job=index == 0)

    def _client(self, identity: ClientIdentity, settings: Settings) -> Client:
        self.channel = LossyChannel(len(self.shards), self.answer)
        self._channels[identity.client_id] = self.channel
        self._clients.append(Client(self.channel, identity, self.registrations(), self.placement, settings))
        return self._clients[-1]

    def _deliver(self, shard: int, client_id: bytes, parts: Sequence[Buffer]) -> None:
        self._channels[client_id].deliver(shard, parts)

    def close(self) -> None:
        for client in self._clients:
            client.abandon()
        for shard in self.shards:
            shard.close()


class EmbeddedCluster(InProcessCluster):
    """As `InProcessCluster`, with clients that call the shards without frames."""

    def __init__(self, num_shards: int, specs: Sequence[TableSpec | DenseSpec] = ()) -> None:
        super().__init__(num_shards, specs)
        self._shared = [SharedShard(shard, self._deliver_reply) for shard in self.shards]
        self._embedded: dict[bytes, EmbeddedClient] = {}

    def run(self, shard: int, task: Callable[[], Any]) -> Any:
        return self._shared[shard].run(task)

    def _client(self, identity: ClientIdentity, settings: Settings) -> Any:
        self.channel = LossyChannel(len(self.shards), self.answer)  # nothing is sent
        client = self._embedded[identity.client_id] = EmbeddedClient(self._shared, identity, settings)
        return client

    def _deliver_reply(self, reply: DeferredReply) -> None:
        self._embedded[reply.header.client_id].deliver(reply)

    def close(self) -> None:
        for client in self._embedded.values():
            client.end(FleetSparseError("the cluster is closed"))
        super().close()
