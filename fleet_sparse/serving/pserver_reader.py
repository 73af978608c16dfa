"""PserverReader: reads rows and dense values of one version of a model from its read-only pservers."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import Self

import numpy as np
from numpy.typing import NDArray

from fleet_sparse.core.dense_spec import DenseSpec
from fleet_sparse.core.placement import Placement
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.core.version import Version
from fleet_sparse.credentials import Credentials
from fleet_sparse.errors import (
    ErrorCode,
    ProtocolError,
    SettingError,
)
from fleet_sparse.settings import Settings
from fleet_sparse.wire.decode import decode
from fleet_sparse.wire.encode import encode
from fleet_sparse.wire.frame_format import (
    UNCHECKED_COLUMNS,
    Action,
    Block,
    Frame,
    Header,
    Op,
)
from fleet_sparse.worker.control.rpc import GrpcTransport, Transport
from fleet_sparse.worker.net.channel import Channel
from fleet_sparse.worker.net.channel_choice import open_channel
from fleet_sparse.worker.net.link_errors import LinkErrors

from .fair_lock import FairLock
from .read_plan import ShardFrame, frames_of_read
from .replica_watch import Attached, ReplicaWatch
from .replicas import Tries
from .row_reader import Reading

_log = logging.getLogger(__name__)

_AWAIT_S = 20.0

OpenChannel = Callable[..., Channel]
"""`open_channel`, or a function with its arguments."""


class PserverReader:
    """Reads from read-only pservers, any number for each shard. Safe to use from several threads, which take turns.

    A read is tried at one replica of each shard. A lost connection, a try that takes longer than
    `settings.read_try_s`, and a replica that lacks the version send it to the next one at once.

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
        of_shard = endpoints_of(pservers)
        self.num_shards = len(of_shard)
        self._endpoints = [each for some in of_shard for each in some]
        self._credentials = Credentials.of(self._settings)
        self._open_channel = open_channel
        self._client_id = os.urandom(16)
        self._placement = Placement.even(self.num_shards)

        self._io = FairLock()  # guards the channel and what follows
        self._channel: Channel | None = None
        self._on_channel: list[int] = []  # replica of each connection
        self._request_ids = count(1)

        self._watch = ReplicaWatch(
            of_shard, transport or GrpcTransport(self._endpoints, self._credentials), self._client_id, self._wake
        )
        self._replicas = self._watch.replicas
        self._state = self._watch.state  # guards the watch and what follows; taken after `_io`
        self._num_connected = 0  # `num_attached` of the watch when the channel was opened
        self._current: Version | None = None
        try:
            self._watch.await_attached(self._settings.connect_s)
            self.tables: Mapping[str, TableSpec] = self._watch.tables
            self.arrays: Mapping[str, DenseSpec] = self._watch.arrays
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
        self._watch.close()
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
        return self._watch.problems()

    def newest(self) -> Version | None:
        """Returns the newest version that all shards have; None while they have none in common."""
        with self._state:
            return self._replicas.newest()

    def await_version(self, known: Version, timeout_s: float = _AWAIT_S) -> Version:
        """Returns the version that follows `known` as soon as all shards have it; `known` after `timeout_s`.

        It is a newer one, but for a rollback (see `Replicas.successor`).
        """
        return self._watch.await_version(known, timeout_s)

    def await_usable(self, known: Version, deadline: float) -> Version:
        """Returns `known` if all shards have it, or else, once it is there, the version that follows.

        Args:
            known: The version.
            deadline: Monotonic time at which to give up.

        Raises:
            ShardUnavailable: A shard has had no pserver with either until then.
        """
        return self._watch.await_usable(known, deadline)

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
        frames = [ShardFrame(shard, ()) for shard in range(self.num_shards)]
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

    def _wake(self) -> None:
        channel = self._channel
        if channel is not None:
            channel.wake()

    def _wanted(self, deadline: float) -> Version:
        """Returns the version that a read without one is of."""
        with self._state:
            if self._current is None:
                newest = self._watch.await_newest(deadline)
                self._current = self._current or newest  # another thread may have set it
            else:
                self._current = self._replicas.successor(self._current, time.monotonic())[0] or self._current
            return self._current

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
        frames = frames_of_read(
            [(self.tables[name], each) for name, each in ids.items()],
            [self.arrays[name] for name in arrays],
            self._placement,
            self._settings.max_frame_bytes,
        )
        for frame, reply in zip(frames, self._ask(frames, Op.READ, version, deadline), strict=True):
            for piece, block in zip(frame.pieces, reply.blocks, strict=True):
                target = rows if isinstance(piece.spec, TableSpec) else values
                target[piece.spec.name][piece.places] = block.rows
        return Reading(version, rows, {name: each.reshape(-1) for name, each in values.items()})

    def _ask(
        self,
        frames: Sequence[ShardFrame],
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
                if self._watch.is_closed:
                    raise self._watch.unavailable(tries.pending_shard, f"the reader was closed before the {op.name}")
                if self._refresh_channel():
                    tries.begin_again()
                now = time.monotonic()
                with self._state:
                    if self._num_connected != self._watch.num_attached:
                        continue  # a replica was attached since, and has no connection yet
                    while self._watch.lost:
                        tries.lose(self._watch.lost.popleft(), now)
                    sends = tries.due(now)
                    if tries.is_gone(now):
                        raise _gone(version)
                    wait_until = min(tries.wait_until(), deadline)
                    if now >= deadline:
                        text = f"no answer to a {op.name} until the deadline"
                        raise self._watch.unavailable(tries.pending_shard, text)
                    attached = [self._watch.attached[replica] for _, replica in sends]
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
                if self._watch.attached[replica].registration.incarnation == incarnation:
                    self._replicas.detach(replica)  # the watch attaches to it again
                return
        shard = self._replicas[replica].shard
        raise LinkErrors(shard, self._endpoints[replica]).refused(error.code, error.message)

    def _request(
        self,
        op: Op,
        request_id: int,
        attached: Attached,
        frame: ShardFrame,
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
            if self._num_connected == self._watch.num_attached:
                return False
            self._num_connected = self._watch.num_attached
            # A replica that was lost since gets its connection when it is attached again.
            attached = {
                index: each for index, each in self._watch.attached.items() if self._replicas[index].is_attached
            }
            self._watch.lost.clear()
        settings = self._settings
        if self._channel is not None:
            settings = replace(settings, channel="stream" if _has_stream(attached) else "zmq")  # no second probe
            self._channel.close()
        self._on_channel = list(attached)
        registrations = [each.registration for each in attached.values()]
        try:
            self._channel = self._open_channel(registrations, settings, self._credentials, on_lost=self._note_lost)
        except BaseException:
            self._num_connected = 0
            raise
        return True

    def _note_lost(self, connection: int) -> None:
        self._watch.lost.append(self._on_channel[connection])
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


def _gone(version: Version) -> ProtocolError:
    return ProtocolError(
        f"version {version.checksum:016x} of snapshot {version.number}: no pserver of a shard has it any more",
        code=ErrorCode.VERSION_GONE,
    )


def _has_stream(attached: Mapping[int, Attached]) -> bool:
    return any(each.registration.stream_endpoint for each in attached.values())
