"""The calls of the control plane of a read-only pserver, without gRPC."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from google.protobuf.message import Message

from fleet_sparse.core.spec_json import parse_spec
from fleet_sparse.core.version import Version
from fleet_sparse.errors import ErrorCode, PlanError, ProtocolError, TableMismatch
from fleet_sparse.wire import control_pb2 as messages

from ..admin.background import Signal
from ..admin.registration_rpcs import check_client, table_messages
from ..admin.service import resident_bytes
from ..endpoints import DataEndpoints
from ..net.requests import Traffic
from .follower import FollowerStats
from .shard import ReadOnlyShard

AWAIT_VERSION_S = 20.0
"""Seconds after which AwaitVersion is answered although nothing changed."""


class ReadOnlyService:
    """Answers the calls of the control plane for one read-only pserver, in one event loop.

    Args:
        shard: What it serves; this class changes nothing of it but the schema hashes that requests may carry.
        follower: What its follower did; None if it serves one snapshot for good.
        traffic: Bytes of the data plane.
        data_endpoints: Addresses of the data plane.
        stop: Ends the pserver.
    """

    def __init__(
        self,
        shard: ReadOnlyShard,
        *,
        follower: FollowerStats | None,
        traffic: Traffic,
        data_endpoints: DataEndpoints,
        stop: Callable[[], None],
    ) -> None:
        self._shard = shard
        self._follower = FollowerStats() if follower is None else follower
        self._traffic = traffic
        self._data_endpoints = data_endpoints
        self._stop = stop
        self._loop: asyncio.AbstractEventLoop | None = None
        self._changed = Signal()
        self._is_closing = False
        self._calls: dict[str, Callable[[Any], Coroutine[Any, Any, Message]]] = {
            "Attach": self._attach,
            "AwaitVersion": self._await_version,
            "Stats": self._stats,
            "Stop": self._stop_call,
        }

    async def call(self, method: str, request: Message) -> Message:
        """Returns the reply to a call of `wire.control.METHODS`.

        Raises:
            FleetSparseError: An error of ours, for the caller.
        """
        answer = self._calls.get(method)
        if answer is None:
            raise PlanError(
                f"{method}: this pserver serves snapshot {self._shard.newest.number} and trains nothing. Give workers "
                "the addresses of pservers that were started without --read-only"
            )
        return await answer(request)

    async def watch_workers(self) -> None:
        """Waits until it is cancelled: no worker registers."""
        self._loop = asyncio.get_running_loop()
        await self._loop.create_future()

    def note_change(self) -> None:
        """Answers the calls that wait for a version or a failure. Any thread may call it."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._changed.send)

    def close(self) -> None:
        """Nothing of it works in other threads."""

    def release_waiting(self) -> None:
        """Answers the calls that wait for a version, so that the server can stop at once."""
        self._is_closing = True
        self._changed.send()

    async def _attach(self, request: messages.AttachRequest) -> messages.AttachReply:
        check_client("client", request.protocol_version, request.client_id)
        for text in request.specs:
            self._accept(text)
        shard = self._shard
        return messages.AttachReply(
            cluster_id=shard.cluster_id,
            shard=shard.shard_index,
            num_shards=shard.num_shards,
            incarnation=shard.incarnation,
            placement_version=shard.placement.version,
            data_endpoint=self._data_endpoints.zmq,
            stream_endpoint=self._data_endpoints.stream,
            versions=_messages_of(shard.versions),
            tables=table_messages(shard.states()),
        )

    def _accept(self, text: str) -> None:
        """Checks a spec that a client declares."""
        try:
            spec = parse_spec(text)
        except ValueError as error:
            raise ProtocolError(f"client: {error}", code=ErrorCode.MALFORMED) from error
        shard = self._shard
        served = shard.tables.get(spec.table_id) or shard.arrays.get(spec.table_id)
        if served is None:
            names = ", ".join(each.name for each in shard.states())
            raise TableMismatch(f"{spec.where}: the served snapshots do not have it; they have {names}")
        if differences := served.spec.differences(spec):
            raise TableMismatch(
                f"{spec.where}: the served snapshots and the client describe it differently: {', '.join(differences)}. "
                "Give the client the pservers of its model"
            )
        served.schema_hashes.add(spec.schema_hash)

    async def _await_version(self, request: messages.AwaitVersionRequest) -> messages.AwaitVersionReply:
        deadline = time.monotonic() + AWAIT_VERSION_S
        known = request.checksum, request.last_failure
        while (self._shard.newest.checksum, self._follower.last_failure) == known and not self._is_closing:
            if not await self._changed.wait(deadline):
                break
        return messages.AwaitVersionReply(
            versions=_messages_of(self._shard.versions), last_failure=self._follower.last_failure
        )

    async def _stats(self, request: messages.StatsRequest) -> messages.StatsReply:
        shard, counters, follower = self._shard, self._shard.counters, self._follower
        return messages.StatsReply(
            shard=shard.shard_index,
            incarnation=shard.incarnation,
            num_requests=counters.num_requests,
            bytes_received=self._traffic.bytes_received,
            bytes_sent=self._traffic.bytes_sent,
            resident_bytes=resident_bytes(),
            tables=table_messages(shard.states()),
            num_pulled_rows=counters.num_pulled_rows,
            serving=messages.Serving(
                versions=_messages_of(shard.versions),
                num_adopted=follower.num_adopted,
                num_failed=follower.num_failed,
                last_failure=follower.last_failure,
            ),
        )

    async def _stop_call(self, request: messages.StopRequest) -> messages.StopReply:
        self._stop()
        return messages.StopReply()


def _messages_of(versions: Iterable[Version]) -> list[messages.Version]:
    return [messages.Version(number=each.number, checksum=each.checksum) for each in versions]
