"""PserverReader: reads rows and dense values of one version of a model from its read-only pservers."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import Any, NamedTuple, Self

import numpy as np
from google.protobuf.message import Message
from numpy.typing import NDArray

from fleet_sparse.core.dense_spec import DenseSpec
from fleet_sparse.core.placement import Placement
from fleet_sparse.core.rules import read_only
from fleet_sparse.core.spec import Spec
from fleet_sparse.core.spec_json import parse_spec
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.core.version import Version
from fleet_sparse.credentials import Credentials
from fleet_sparse.errors import (
    ErrorCode,
    ProtocolError,
    SettingError,
    ShardUnavailable,
    TableMismatch,
)
from fleet_sparse.settings import Settings
from fleet_sparse.wire import control_pb2 as messages
from fleet_sparse.wire.control import CONTROL_VERSION
from fleet_sparse.wire.decode import decode
from fleet_sparse.wire.encode import encode
from fleet_sparse.wire.frame_format import (
    BLOCK_BYTES,
    HEADER_BYTES,
    MAX_BLOCKS,
    UNCHECKED_COLUMNS,
    Action,
    Block,
    Frame,
    Header,
    Op,
)
from fleet_sparse.worker.control.rpc import GrpcTransport, OutOfTime, Transport, Unreachable
from fleet_sparse.worker.net.channel import Channel
from fleet_sparse.worker.net.channel_choice import open_channel
from fleet_sparse.worker.net.link_errors import LinkErrors
from fleet_sparse.worker.net.shard_link import Registration

from .fair_lock import FairLock
from .replicas import Replicas, Tries

_log = logging.getLogger(__name__)

_AWAIT_TIMEOUT_S = 30.0  # longer than a pserver waits
_AWAIT_S = 20.0
_ATTACH_TIMEOUT_S, _ATTACH_PAUSE_S = 2.0, 0.1
_REFUSED_PAUSE_S = 1.0
_ID_BYTES = 8

OpenChannel = Callable[..., Channel]
"""`open_channel`, or a function with its arguments."""


class Reading(NamedTuple):
    """Rows and dense values of one version."""

    version: Version
    rows: dict[str, NDArray[np.float32]]
    """By name of the table, `(n, dim)`, in the order of the ids that were asked for."""
    values: dict[str, NDArray[np.float32]]
    """By name of the dense array, all of its values."""


class _Piece(NamedTuple):
    """What a PULL block asks for, and where its rows belong."""

    spec: TableSpec | DenseSpec
    num_values: int
    ids: NDArray[np.int64] | None
    offset: int
    places: NDArray[np.int64] | slice

    @property
    def dim(self) -> int:
        return self.spec.dim if isinstance(self.spec, TableSpec) else 1


class _ShardFrame(NamedTuple):
    """The blocks of one request."""

    shard: int
    pieces: Sequence[_Piece]


class _Attached(NamedTuple):
    """A replica as its reply to Attach describes it."""

    registration: Registration
    schema_hashes: dict[int, int]
    """By number of the table or array on the wire."""


class PserverReader:
    """Reads from read-only pservers, any number for each shard. Safe to use from several threads, which take turns.

    A read is tried at one replica of each shard. A lost connection, a try that takes longer than
    `settings.read_try_s`, and a replica that lacks the version send it to the next one at once. A thread for each
    replica attaches to it, again whenever it was lost, and waits for its versions.

    Args:
        pservers: For each shard in order `host:port` of the control plane of its pserver, or of several with `|`
            between them; or one string with commas between shards.
        settings: Timeouts and limits; None for those of the environment.
        transport: Carries the calls to all replicas, shard by shard; None for gRPC.
        open_channel: Opens the connections to the data planes.

    Attributes:
        num_shards: Number of shards.
        tables: Specs of the tables that the pservers have, by name.
        arrays: Specs of their dense arrays, by name.

    Raises:
        ShardUnavailable: No pserver of a shard is reached within `settings.connect_s`.
        PlanError: A pserver trains.
        SettingError: The pservers are not those of all shards, in their order.
        TableMismatch: They serve different models.
    """

    def __init__(
        self,
        pservers: str | Sequence[str],
        settings: Settings | None = None,
        *,
        transport: Transport | None = None,
        open_channel: OpenChannel = open_channel,
    ) -> None:
        self._settings = Settings.from_environment() if settings is None else settings
        self._of_shard = endpoints_of(pservers)
        self.num_shards = len(self._of_shard)
        shards = [shard for shard, endpoints in enumerate(self._of_shard) for _ in endpoints]
        self._credentials = Credentials.of(self._settings)
        self._endpoints = [each for some in self._of_shard for each in some]
        self._transport = transport or GrpcTransport(self._endpoints, self._credentials)
        self._open_channel = open_channel
        self._client_id = os.urandom(16)
        self._placement = Placement.even(self.num_shards)
        self._closed = threading.Event()

        self._io = FairLock()  # guards the channel and what follows
        self._channel: Channel | None = None
        self._on_channel: list[int] = []  # replica of each connection
        self._request_ids = count(1)

        self._state = threading.Condition()  # guards what follows; taken after `_io`
        self._replicas = Replicas(shards)
        self._attached: dict[int, _Attached] = {}
        self._is_stale = False  # a replica was attached that is not on the channel
        self._errors: dict[int, Exception] = {}
        self._failures: dict[int, str] = {}  # why an attached replica keeps its version
        self._current: Version | None = None
        self.tables: dict[str, TableSpec] = {}
        self.arrays: dict[str, DenseSpec] = {}

        self._lost: deque[int] = deque()  # replicas whose connection was lost
        self._watchers = [
            threading.Thread(target=self._watch, args=(index, shard), name=f"replica {index}", daemon=True)
            for index, shard in enumerate(shards)
        ]
        for watcher in self._watchers:
            watcher.start()
        try:
            self._await_attached()
            with self._io:
                self._refresh_channel()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the connections, and the calls that wait. A second call does nothing."""
        self._closed.set()
        self._transport.close()
        with self._state:
            self._state.notify_all()
        if self._channel is not None:
            self._channel.wake()
        for watcher in self._watchers:
            watcher.join()
        with self._io:
            if self._channel is not None:
                self._channel.close()

    @property
    def num_failovers(self) -> int:
        """Number of tries that went to another replica because one was lost, late, or lacked the version."""
        return self._replicas.num_failovers

    @property
    def leading(self) -> Version | None:
        """The newest version that any replica has adopted."""
        with self._state:
            return self._replicas.leading()

    @property
    def problems(self) -> list[str]:
        """Why replicas are not used, or cannot adopt the snapshot that should be served, one text for each of them."""
        with self._state:
            return [*map(str, self._errors.values()), *self._failures.values()]

    def newest(self) -> Version | None:
        """Returns the newest version that all shards have; None while they have none in common."""
        with self._state:
            return self._replicas.newest()

    def await_version(self, known: Version, timeout_s: float = _AWAIT_S) -> Version:
        """Returns the version that follows `known` as soon as all shards have it; `known` after `timeout_s`.

        It is a newer one, but for a rollback (see `Replicas.successor`).
        """
        until = time.monotonic() + timeout_s
        with self._state:
            while not self._closed.is_set():
                now = time.monotonic()
                version, again_at = self._replicas.successor(known, now)
                if version is not None:
                    return version
                if now >= until:
                    break
                self._state.wait(min(again_at, until) - now)
        return known

    def await_usable(self, known: Version, deadline: float) -> Version:
        """Returns `known` if all shards have it, or else, once it is there, the version that follows.

        Args:
            known: The version.
            deadline: Monotonic time at which to give up.

        Raises:
            ShardUnavailable: A shard has had no pserver with either until then.
        """
        with self._state:
            while True:
                now = time.monotonic()
                version, again_at = self._replicas.successor(known, now)
                missing = self._replicas.missing_shard(known)
                if version is not None or missing is None:
                    return known if version is None else version
                if now >= deadline or self._closed.is_set():
                    raise self._unavailable(missing, f"no pserver with snapshot {known.number} or a newer one")
                self._state.wait(min(again_at, deadline) - now)

    def read(
        self,
        ids: Mapping[str, NDArray[np.int64]],
        arrays: Collection[str] = (),
        *,
        version: Version | None = None,
        deadline: float | None = None,
    ) -> Reading:
        """Returns rows and dense values, all of one version.

        Args:
            ids: By name of the table, `(n,)`, repeats allowed.
            arrays: Names of dense arrays.
            version: The version; None for the newest one that all shards have. Without it versions never go back
                from one call to the next, but for a rollback.
            deadline: Monotonic time at which to give up; None for `settings.deadline_s` from now on.

        Raises:
            ValueError: There is no such table or array, or ids are not int64 of one dimension.
            ShardUnavailable: No pserver of a shard answers, or has a common version, until the deadline.
            ProtocolError: With code VERSION_GONE: no reachable pserver of a shard has `version`.
        """
        deadline = time.monotonic() + self._settings.deadline_s if deadline is None else deadline
        self._check(ids, arrays)
        while True:
            wanted = version or self._wanted(deadline)
            try:
                return self._read(wanted, ids, arrays, deadline)
            except ProtocolError as error:
                if version is not None or error.code is not ErrorCode.VERSION_GONE:
                    raise
            usable = self.await_usable(wanted, deadline)
            with self._state:
                if self._current == wanted:  # another thread may have gone on
                    self._current = usable

    def changed(self, version: Version, before: Version) -> dict[str, NDArray[np.int64]] | None:
        """Returns the ids whose rows may differ between two versions, by name of the table.

        Args:
            version: The newest version.
            before: The other version.

        Returns:
            None if the pservers do not know: then count all rows as changed.
        """
        found: dict[str, list[NDArray[np.int64]]] = {name: [] for name in self.tables}
        names = {spec.table_id: name for name, spec in self.tables.items()}
        frames = [_ShardFrame(shard, ()) for shard in range(self.num_shards)]
        deadline = time.monotonic() + self._settings.deadline_s
        try:
            replies = self._ask(frames, Op.CHANGED, version, deadline, before=before)
        except ProtocolError:
            return None
        for reply in replies:
            for block in reply.blocks:
                assert block.ids is not None, "the answer to CHANGED has ids"
                found[names[block.table_id]].append(block.ids)
        return {name: np.concatenate(parts) for name, parts in found.items() if parts}

    # Attaching, in a thread for each replica

    def _watch(self, index: int, shard: int) -> None:
        """Attaches to a replica and waits for its versions, until the reader is closed."""
        request = messages.AttachRequest(protocol_version=CONTROL_VERSION, client_id=self._client_id)
        while not self._closed.is_set():
            pause_s = _ATTACH_PAUSE_S
            try:
                reply = self._call(index, shard, "Attach", request, _ATTACH_TIMEOUT_S)
                self._attach(index, shard, reply)
                last_failure = ""
                while self._replicas[index].is_attached:  # until a read finds that it was started again
                    known = messages.AwaitVersionRequest(
                        checksum=_versions_of(reply)[0].checksum, last_failure=last_failure
                    )
                    reply = self._call(index, shard, "AwaitVersion", known, _AWAIT_TIMEOUT_S)
                    last_failure = reply.last_failure
                    with self._state:
                        self._replicas.set_versions(index, _versions_of(reply))
                        self._note_failure(index, last_failure)
                        self._state.notify_all()
            except ShardUnavailable as error:
                self._detach(index, error)
            except Exception as error:
                self._detach(index, error)
                pause_s = _REFUSED_PAUSE_S
            self._closed.wait(pause_s)

    def _note_failure(self, index: int, text: str) -> None:
        """Notes why a replica keeps its version; empty if it serves what it should."""
        before = self._failures.pop(index, "")
        if text:
            endpoint = self._endpoints[index]
            self._failures[index] = f"{endpoint}: the snapshot that should be served is not: {text}"
            if self._failures[index] != before:
                _log.warning("replica %s", self._failures[index])

    def _call(self, index: int, shard: int, method: str, request: Message, timeout_s: float) -> Any:
        """Returns the reply of a replica to a call of the control plane.

        Raises:
            ShardUnavailable: It was not reached, or did not answer in time.
            FleetSparseError: It refused the call.
        """
        try:
            return self._transport.start(index, method, request, timeout_s).result()
        except (Unreachable, OutOfTime) as error:
            endpoint = self._endpoints[index]
            raise ShardUnavailable(f"{endpoint}: {method}: {error}", shard=shard, endpoint=endpoint) from error

    def _attach(self, index: int, shard: int, reply: Any) -> None:
        num_shards = self.num_shards
        if (reply.shard, reply.num_shards) != (shard, num_shards):
            raise SettingError(
                f"{self._endpoints[index]}: it is shard {reply.shard} of {reply.num_shards}, should be shard "
                f"{shard} of {num_shards}. List the pservers of all shards, in their order"
            )
        specs = [parse_spec(table.spec) for table in reply.tables]
        registration = Registration(
            reply.cluster_id,
            reply.shard,
            reply.num_shards,
            reply.incarnation,
            reply.placement_version,
            reply.data_endpoint,
            stream_endpoint=reply.stream_endpoint,
        )
        with self._state:
            if not self.tables and not self.arrays:
                self.tables = {spec.name: spec for spec in specs if isinstance(spec, TableSpec)}
                self.arrays = {spec.name: spec for spec in specs if isinstance(spec, DenseSpec)}
            self._check_specs(self._endpoints[index], specs)
            hashes = {spec.table_id: spec.schema_hash for spec in specs}
            self._attached[index] = _Attached(registration, hashes)
            self._replicas.attach(index, _versions_of(reply))
            self._errors.pop(index, None)
            self._failures.pop(index, None)
            self._is_stale = True
            self._state.notify_all()
        self._wake()

    def _check_specs(self, endpoint: str, specs: Sequence[Spec]) -> None:
        """Checks that a replica serves the model of the others."""
        theirs = {spec.name: spec for spec in specs}
        for name, ours in {**self.tables, **self.arrays}.items():
            differences = ["it is missing"] if name not in theirs else differences_of_reads(ours, theirs[name])
            if differences:
                raise TableMismatch(
                    f"{endpoint}: {ours.where}: the pservers describe it differently: {', '.join(differences)}. List "
                    "pservers of one model"
                )

    def _detach(self, index: int, error: Exception) -> None:
        if self._closed.is_set():
            return
        with self._state:
            was_attached = self._replicas[index].is_attached
            is_new = str(error) != str(self._errors.get(index))
            self._replicas.detach(index)
            self._errors[index] = error
            self._failures.pop(index, None)
            if was_attached:
                self._lost.append(index)
            self._state.notify_all()
        self._wake()
        if was_attached or (is_new and not isinstance(error, ShardUnavailable)):
            _log.warning("replica %s is not used: %s", self._endpoints[index], error)

    def _wake(self) -> None:
        channel = self._channel
        if channel is not None:
            channel.wake()

    def _await_attached(self) -> None:
        """Waits until every shard has a replica.

        Raises:
            FleetSparseError: One refused, or none of a shard was reached in time.
        """
        deadline = time.monotonic() + self._settings.connect_s
        with self._state:
            while (missing := self._replicas.missing_shard()) is not None:
                refusals = [each for each in self._errors.values() if not isinstance(each, ShardUnavailable)]
                if refusals:
                    raise refusals[0]
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    raise self._unavailable(missing, f"no pserver reached in {self._settings.connect_s:g} s")
                self._state.wait(left_s)

    def _unavailable(self, shard: int, what: str) -> ShardUnavailable:
        endpoint = "|".join(self._of_shard[shard])
        last = next((str(error) for index, error in self._errors.items() if self._replicas[index].shard == shard), "")
        return ShardUnavailable(
            f"shard {shard} at {endpoint}: {what}{f'; last error: {last}' if last else ''}",
            shard=shard,
            endpoint=endpoint,
        )

    def _wanted(self, deadline: float) -> Version:
        """Returns the version that a read without one is of."""
        with self._state:
            while True:
                now = time.monotonic()
                if self._current is not None:
                    self._current = self._replicas.successor(self._current, now)[0] or self._current
                else:
                    self._current = self._replicas.newest()
                if self._current is not None:
                    return self._current
                if now >= deadline:
                    raise self._unavailable(self._replicas.missing_shard() or 0, "no version in common with the others")
                self._state.wait(deadline - now)

    # Reading

    def _check(self, ids: Mapping[str, NDArray[np.int64]], arrays: Collection[str]) -> None:
        for name, its_ids in ids.items():
            if name not in self.tables:
                raise ValueError(f"table {name!r}: there is none; the model has {', '.join(self.tables) or 'none'}")
            if its_ids.dtype != np.int64 or its_ids.ndim != 1:
                raise ValueError(
                    f"table {name!r}: ids are {its_ids.dtype} {its_ids.shape}, should be int64 of one dimension"
                )
        for name in arrays:
            if name not in self.arrays:
                raise ValueError(f"dense {name!r}: there is none; the model has {', '.join(self.arrays) or 'none'}")

    def _read(
        self, version: Version, ids: Mapping[str, NDArray[np.int64]], arrays: Collection[str], deadline: float
    ) -> Reading:
        rows = {name: np.empty((len(each), self.tables[name].dim), np.float32) for name, each in ids.items()}
        values = {name: np.empty((self.arrays[name].num_values, 1), np.float32) for name in arrays}
        pieces = self._pieces(ids, arrays)
        frames = [_ShardFrame(shard, part) for shard, each in enumerate(pieces) for part in self._in_frames(each)]
        for frame, reply in zip(frames, self._ask(frames, Op.READ, version, deadline), strict=True):
            for piece, block in zip(frame.pieces, reply.blocks, strict=True):
                target = rows if isinstance(piece.spec, TableSpec) else values
                target[piece.spec.name][piece.places] = block.rows
        return Reading(version, rows, {name: each.reshape(-1) for name, each in values.items()})

    def _pieces(self, ids: Mapping[str, NDArray[np.int64]], arrays: Collection[str]) -> list[list[_Piece]]:
        """Returns what each shard is asked for, in pieces of at most half of a frame."""
        limit, num_shards = self._settings.max_frame_bytes // 2, self.num_shards
        pieces: list[list[_Piece]] = [[] for _ in range(num_shards)]
        for name, its_ids in ids.items():
            spec = self.tables[name]
            length = max(limit // (4 * spec.dim + _ID_BYTES), 1)
            ends, order = [len(its_ids)], None
            if num_shards > 1:
                shards = self._placement.shard_of(its_ids, spec.salt)
                if (shards[1:] < shards[:-1]).any():
                    order = np.argsort(shards, kind="stable")
                    shards = shards[order]
                ends = np.searchsorted(shards, np.arange(num_shards), side="right").tolist()
            first = 0
            for shard, last in enumerate(ends):
                for begin in range(first, last, length):
                    end = min(begin + length, last)
                    places = slice(begin, end) if order is None else order[begin:end]
                    pieces[shard].append(_Piece(spec, end - begin, its_ids[places], 0, places))
                first = last
        for name in arrays:
            array = self.arrays[name]
            for shard in range(num_shards):
                first, last = array.range_of(shard, num_shards)
                for begin in range(first, last, limit // 4):
                    end = min(begin + limit // 4, last)
                    pieces[shard].append(_Piece(array, end - begin, None, begin - first, slice(begin, end)))
        return pieces

    def _in_frames(self, pieces: Sequence[_Piece]) -> Iterator[list[_Piece]]:
        """Yields the pieces of each frame; both the frame and its reply are within the limit."""
        frame: list[_Piece] = []
        num_bytes = HEADER_BYTES
        for piece in pieces:
            its_bytes = BLOCK_BYTES + piece.num_values * (4 * piece.dim + _ID_BYTES)
            if frame and (num_bytes + its_bytes > self._settings.max_frame_bytes or len(frame) == MAX_BLOCKS):
                yield frame
                frame, num_bytes = [], HEADER_BYTES
            frame.append(piece)
            num_bytes += its_bytes
        if frame:
            yield frame

    def _ask(
        self,
        frames: Sequence[_ShardFrame],
        op: Op,
        version: Version,
        deadline: float,
        *,
        before: Version | None = None,
    ) -> list[Frame]:
        """Sends frames, each to a replica of its shard, and returns their replies.

        Raises:
            ShardUnavailable: Not all were answered until the deadline.
            ProtocolError: A replica refused one; with VERSION_GONE also if no reachable one has the version.
        """
        settings = self._settings
        replies: dict[int, Frame] = {}
        asked: dict[int, tuple[int, int, int]] = {}  # frame, replica and its incarnation by request
        with self._io:
            tries = Tries(
                self._replicas,
                version,
                [frame.shard for frame in frames],
                try_s=settings.read_try_s,
                retry_s=settings.retry_s,
            )
            while not tries.is_done:
                if self._closed.is_set():
                    raise self._unavailable(tries.pending_shard, f"the reader was closed before the {op.name}")
                if self._refresh_channel():
                    tries.begin_again()
                now = time.monotonic()
                with self._state:
                    if self._is_stale:
                        continue  # a replica was attached since, and has no connection yet
                    while self._lost:
                        tries.lose(self._lost.popleft(), now)
                    sends = tries.due(now)
                    if tries.is_gone(now):
                        raise _gone(version)
                    wait_until = min(tries.wait_until(), deadline)
                    if now >= deadline:
                        text = f"no answer to a {op.name} until the deadline"
                        raise self._unavailable(tries.pending_shard, text)
                    attached = [self._attached[replica] for _, replica in sends]
                channel = self._channel
                assert channel is not None, "every shard was attached once"
                for (frame, replica), one in zip(sends, attached, strict=True):
                    request_id = next(self._request_ids)
                    asked[request_id] = frame, replica, one.registration.incarnation
                    connection = self._on_channel.index(replica)
                    is_near = channel.stays_on_machine(connection)
                    request = self._request(op, request_id, one, frames[frame], version, before, is_near=is_near)
                    channel.send(connection, encode(request))
                received = channel.receive(max(wait_until - now, 0.0))
                if received is None:
                    continue
                try:
                    reply = decode(received[1], max_bytes=2 * settings.max_frame_bytes)
                except ProtocolError as error:
                    _log.warning("a reply of replica %d is dropped: %s", self._on_channel[received[0]], error)
                    continue
                if (place := asked.pop(reply.header.request_id, None)) is not None:
                    self._take(tries, op, version, place, reply, replies)
        return [replies[number] for number in range(len(frames))]

    def _take(
        self,
        tries: Tries,
        op: Op,
        version: Version,
        place: tuple[int, int, int],
        reply: Frame,
        replies: dict[int, Frame],
    ) -> None:
        """Handles the reply to a try."""
        frame, replica, incarnation = place
        error = reply.error
        with self._state:
            if error is None and reply.header.step == version.checksum:
                if tries.answer(frame, replica):
                    replies[frame] = reply
                return
            if error is not None and error.code is ErrorCode.VERSION_GONE and op is Op.READ:
                tries.refuse(frame, replica)
                self._state.notify_all()
                return
            if error is None or error.code is ErrorCode.WRONG_INCARNATION:
                tries.lose(replica, time.monotonic())
                if self._attached[replica].registration.incarnation == incarnation:
                    self._replicas.detach(replica)  # its watcher attaches again
                return
        shard = self._replicas[replica].shard
        raise LinkErrors(shard, self._endpoints[replica]).refused(error.code, error.message)

    def _request(
        self,
        op: Op,
        request_id: int,
        attached: _Attached,
        frame: _ShardFrame,
        version: Version,
        before: Version | None,
        *,
        is_near: bool,
    ) -> Frame:
        """Returns a frame for one replica."""
        registration, hashes = attached.registration, attached.schema_hashes
        header = Header(
            op,
            UNCHECKED_COLUMNS if is_near else 0,
            cluster_id=registration.cluster_id,
            shard=frame.shard,
            incarnation=registration.incarnation,
            placement_version=registration.placement_version,
            client_id=self._client_id,
            request_id=request_id,
            push_floor=0 if before is None else before.checksum,
            step=version.checksum,
        )
        return Frame(
            header,
            [
                Block(Action.PULL, spec.table_id, hashes[spec.table_id], piece.dim, number, ids, offset=piece.offset)
                for piece in frame.pieces
                for spec, number, ids in [piece[:3]]
            ],
        )

    def _refresh_channel(self) -> bool:
        """Opens connections to all attached replicas if one is new; returns whether it did."""
        with self._state:
            if not self._is_stale:
                return False
            self._is_stale = False
            # A replica that was lost since gets its connection when it is attached again.
            attached = {index: each for index, each in self._attached.items() if self._replicas[index].is_attached}
            self._lost.clear()
        settings = self._settings
        if self._channel is not None:
            settings = replace(settings, channel="stream" if _has_stream(attached) else "zmq")  # no second probe
            self._channel.close()
        self._on_channel = list(attached)
        registrations = [each.registration for each in attached.values()]
        try:
            self._channel = self._open_channel(registrations, settings, self._credentials, on_lost=self._note_lost)
        except BaseException:
            with self._state:
                self._is_stale = True
            raise
        return True

    def _note_lost(self, connection: int) -> None:
        self._lost.append(self._on_channel[connection])
        self._wake()


def endpoints_of(pservers: str | Sequence[str]) -> list[list[str]]:
    """Returns the endpoints of the replicas of each shard.

    Raises:
        SettingError: An endpoint is empty.
    """
    shards = pservers.split(",") if isinstance(pservers, str) else pservers
    endpoints = [[each.strip() for each in shard.split("|")] for shard in shards]
    if not endpoints or not all(map(all, endpoints)):
        raise SettingError(
            f"pservers: is {pservers!r}, should be host:port of each shard, with commas between shards and | between "
            "replicas of one"
        )
    return endpoints


def differences_of_reads(ours: Spec, theirs: Spec) -> list[str]:
    """Returns in what two specs differ for a client that only reads; rules and hyperparameters may differ."""
    if isinstance(ours, TableSpec):
        return replace(ours, rule=read_only.name, hyperparameters=()).differences(theirs)
    assert isinstance(ours, DenseSpec), "there are two kinds"
    if not isinstance(theirs, DenseSpec):
        return ours.differences(theirs)
    layouts = [[(each.name, each.offset, each.size) for each in spec.segments] for spec in (ours, theirs)]
    return [] if layouts[0] == layouts[1] else ours.differences(theirs)


def _gone(version: Version) -> ProtocolError:
    return ProtocolError(
        f"version {version.checksum:016x} of snapshot {version.number}: no pserver of a shard has it any more",
        code=ErrorCode.VERSION_GONE,
    )


def _versions_of(reply: Any) -> list[Version]:
    return [Version(each.number, each.checksum) for each in reply.versions]


def _has_stream(attached: Mapping[int, _Attached]) -> bool:
    return any(each.registration.stream_endpoint for each in attached.values())
