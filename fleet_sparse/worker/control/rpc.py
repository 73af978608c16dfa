"""Calls of the control plane: one to a pserver, or one to each, repeated while a pserver cannot be reached."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import grpc
from google.protobuf.message import Message

from fleet_sparse.control_socket import has_socket
from fleet_sparse.credentials import Credentials
from fleet_sparse.errors import FleetSparseError, SettingError, ShardUnavailable
from fleet_sparse.net_addresses import Address
from fleet_sparse.settings import Settings
from fleet_sparse.wire.control import ATTRIBUTES_KEY, ERROR_KEY, MAX_MESSAGE_BYTES, METHODS, SERVICE, from_status

logger = logging.getLogger(__name__)

RETRY_S = 0.1
_CLOSED = "Socket closed"
_CONNECTED_S = 30.0
"""A call that was pending for longer had a connection: gRPC ends an attempt to connect after 20 s."""
_OPTIONS = [
    ("grpc.enable_http_proxy", 0),  # pservers are inside
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 200),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
]


class Unreachable(Exception):
    """Nobody listens at an endpoint, or the connection broke. The call may be repeated."""


class OutOfTime(Exception):
    """A call was not answered within its timeout."""


class PendingCall(Protocol):
    """A call that was started."""

    def result(self) -> Message:
        """Waits for the reply.

        Raises:
            Unreachable: The pserver was not reached, or the connection broke.
            OutOfTime: The timeout passed.
            FleetSparseError: The pserver refused the call.
        """
        ...

    def add_done_callback(self, callback: Callable[[Any], object]) -> None:
        """Calls `callback` from any thread once the call has ended."""
        ...


class Transport(Protocol):
    """Carries calls to the pservers of a job."""

    @property
    def endpoints(self) -> Sequence[str]:
        """The name of each shard in messages, in order."""
        ...

    def start(self, shard: int, method: str, request: Message, timeout_s: float | None) -> PendingCall:
        """Starts a call of `wire.control.METHODS`; without a timeout it lasts as long as the connection."""
        ...

    def close(self) -> None:
        """Ends the connections, and the calls that wait."""
        ...


class GrpcTransport:
    """Implements `Transport` over gRPC.

    Args:
        endpoints: `host:port` of each control plane, in the order of the shards.
        credentials: Credentials of this process.
    """

    def __init__(self, endpoints: Sequence[str], credentials: Credentials) -> None:
        self._endpoints = list(endpoints)
        self._credentials = credentials
        self._channels = [credentials.grpc_channel(endpoint, _OPTIONS) for endpoint in endpoints]
        self._methods = [_methods_of(channel) for channel in self._channels]

    @property
    def endpoints(self) -> Sequence[str]:
        """As `Transport`."""
        return self._endpoints

    def start(self, shard: int, method: str, request: Message, timeout_s: float | None) -> PendingCall:
        """As `Transport`."""
        call = self._methods[shard][method].future(request, timeout=timeout_s, metadata=self._credentials.metadata)
        return _GrpcCall(call, partial(self._explain, shard))

    def close(self) -> None:
        """As `Transport`."""
        for channel in self._channels:
            channel.close()

    def _explain(self, shard: int, details: str) -> str:
        """Returns why a pserver was not reached: the details of gRPC, and where its Unix socket is missing.

        Raises:
            SettingError: Keys or channels are the cause.
        """
        endpoint = self._endpoints[shard]
        is_local = has_socket(Address.parse(endpoint))
        if self._credentials.keys is None and not is_local and _CLOSED not in details:
            return details  # a pserver with keys ends plain connections
        if fault := self._credentials.fault_of(endpoint):
            raise SettingError(
                f"pserver {endpoint}: {fault}. Give all processes of the job the keys of one `fleet-sparse keys new`, "
                "and the same FLEET_SPARSE_CHANNEL"
            )
        missing = self._credentials.missing_socket(endpoint)
        return f"{details}; {missing}" if missing else details


class _GrpcCall:
    def __init__(self, future: Any, explain: Callable[[str], str]) -> None:
        self._future = future
        self._explain = explain

    def result(self) -> Message:
        try:
            reply: Message = self._future.result()
        except grpc.RpcError as error:
            # gRPC raises the call itself, which would refer to itself by its traceback. The garbage collector alone
            # frees such objects, and it does not look for old ones until they are a quarter of all. Nor may a variable
            # of this frame have what is raised.
            raise self._explained(error.with_traceback(None)) from None
        except grpc.FutureCancelledError:
            raise Unreachable("the connection was closed") from None
        except BaseException:
            self._future.cancel()
            raise
        return reply

    def add_done_callback(self, callback: Callable[[Any], object]) -> None:
        self._future.add_done_callback(callback)

    def _explained(self, error: grpc.RpcError) -> Exception:
        found = _error_of(error)
        return Unreachable(self._explain(str(found))) if isinstance(found, Unreachable) else found


def _methods_of(channel: grpc.Channel) -> Mapping[str, Any]:
    return {
        name: channel.unary_unary(
            f"/{SERVICE}/{name}",
            request_serializer=request.SerializeToString,
            response_deserializer=reply.FromString,
        )
        for name, (request, reply) in METHODS.items()
    }


def _error_of(error: Any) -> Exception:
    """Returns the pserver's error, or the reason for which the pserver was not reached."""
    metadata = dict(error.trailing_metadata() or ())
    if ERROR_KEY in metadata:
        return from_status(error.details() or "", metadata[ERROR_KEY], metadata.get(ATTRIBUTES_KEY, "{}"))
    details = f"{error.code().name}: {error.details()}"
    if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
        return Unreachable(details)
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        return OutOfTime(details)
    return FleetSparseError(f"control plane: {details}")


class Rpc:
    """Calls the pservers of a job. Safe to use from several threads.

    While nobody listens a call with a timeout is repeated for `patience_s`, by default its own `patience_s`. Those
    seconds begin again if it then waited at a pserver for longer than a connect takes: a pserver may die several times
    during a long call. A call without an answer ends after its timeout, which begins again with each attempt, but at
    the latest after timeout and patience in sum. Both raise `ShardUnavailable`. Any call may be repeated: the next
    process of a pserver with a log knows what the one before has done. One without a log lacks it, and carries it out
    again.

    Args:
        transport: Carries the calls.
        settings: Timeouts.

    Attributes:
        num_shards: Number of pservers.
        patience_s: Seconds for which a call is repeated while nobody listens; at first `settings.deadline_s`.
        closed: Set once the connections are closed.
    """

    def __init__(self, transport: Transport, settings: Settings) -> None:
        self._transport = transport
        self.patience_s = settings.deadline_s
        self.num_shards = len(transport.endpoints)  # constant after construction
        self.closed = threading.Event()

    def endpoint(self, shard: int) -> str:
        """Returns the name of a pserver."""
        return self._transport.endpoints[shard]

    def where(self, shard: int) -> str:
        """Returns a shard and its endpoint, for messages."""
        return f"shard {shard} at {self.endpoint(shard)}"

    def start(self, shard: int, method: str, request: Message, timeout_s: float | None) -> PendingCall:
        """Starts one call, which is not repeated.

        Raises:
            RuntimeError: The connections are closed.
        """
        if self.closed.is_set():
            raise RuntimeError("control client: it is closed")
        return self._transport.start(shard, method, request, timeout_s)

    def call(
        self,
        shard: int,
        method: str,
        request: Message,
        timeout_s: float,
        *,
        patience_s: float | None = None,
        what: str | None = None,
    ) -> Any:
        """Returns the reply of one shard.

        Args:
            shard: Index of the shard.
            method: Name of the call.
            request: Its request.
            timeout_s: Seconds that the pserver has to answer.
            patience_s: Seconds for which the call is repeated while nobody listens.
            what: Name of the call in messages.

        Raises:
            ShardUnavailable: The pserver is gone, or did not answer in time.
            FleetSparseError: The pserver refused the call.
        """
        pending = self.start(shard, method, request, timeout_s)
        return self._finish(pending, shard, method, request, timeout_s, patience_s, what)

    def call_all(
        self,
        method: str,
        request: Message,
        timeout_s: float,
        *,
        patience_s: float | None = None,
        shards: Iterable[int] | None = None,
    ) -> list[Any]:
        """Makes one call to several shards at once and returns their replies, in order.

        Raises:
            ShardUnavailable: A pserver is gone, or did not answer in time.
            FleetSparseError: A pserver refused the call.
        """
        asked = list(range(self.num_shards) if shards is None else shards)
        pending = [self.start(shard, method, request, timeout_s) for shard in asked]
        return [
            self._finish(call, shard, method, request, timeout_s, patience_s, None)
            for shard, call in zip(asked, pending, strict=True)
        ]

    def try_all(
        self, method: str, request: Message, timeout_s: float, *, patience_s: float
    ) -> list[Any | FleetSparseError]:
        """Makes one call to every shard at once; returns a reply or an error for each, in order."""
        pending = [self.start(shard, method, request, timeout_s) for shard in range(self.num_shards)]
        replies: list[Any | FleetSparseError] = []
        for shard, call in enumerate(pending):
            try:
                replies.append(self._finish(call, shard, method, request, timeout_s, patience_s, None))
            except FleetSparseError as error:  # its traceback has this frame, whose `replies` has it
                replies.append(error.with_traceback(None))
        return replies

    def close(self) -> None:
        """Ends the connections, and the calls that wait."""
        self.closed.set()
        self._transport.close()

    def _finish(
        self,
        pending: PendingCall,
        shard: int,
        method: str,
        request: Message,
        timeout_s: float,
        patience_s: float | None,
        what: str | None,
    ) -> Any:
        """Waits for a call; repeats it while nobody listens, for `patience_s` from the first failure on.

        A failure after a connection is a first one.
        """
        patience_s = self.patience_s if patience_s is None else patience_s
        begun_at = attempted_at = time.monotonic()
        deadline = begun_at + timeout_s + patience_s
        unreachable_since: float | None = None
        while True:
            try:
                return pending.result()
            except OutOfTime as error:
                text = f"no answer in {time.monotonic() - begun_at:.1f} s"
                raise self._unavailable(shard, what or method, text, error) from error.with_traceback(None)
            except Unreachable as error:
                now = time.monotonic()
                if unreachable_since is None or now - attempted_at > _CONNECTED_S:
                    unreachable_since = now
                    if patience_s > 0:
                        logger.info("%s is not up yet, waiting for up to %g s", self.where(shard), patience_s)
                if now >= min(unreachable_since + patience_s, deadline) or self.closed.wait(RETRY_S):
                    text = f"not reached in {now - unreachable_since:.1f} s"
                    raise self._unavailable(shard, what or method, text, error) from error.with_traceback(None)
            attempted_at = time.monotonic()
            left_s = max(deadline - attempted_at, RETRY_S)
            pending = self._transport.start(shard, method, request, min(timeout_s, left_s))

    def _unavailable(self, shard: int, what: str, text: str, error: Exception) -> ShardUnavailable:
        return ShardUnavailable(
            f"{self.where(shard)}: {what}: {text}; last error: {error}. See the log of pserver {shard}",
            shard=shard,
            endpoint=self.endpoint(shard),
        )
