"""PserverReader: reads rows and dense values of one version of a model from its read-only pservers."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import count
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from fleet_sparse.core.dense_spec import DenseSpec
from fleet_sparse.core.placement import Placement
from fleet_sparse.core.spec_json import parse_spec
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.core.version import Version
from fleet_sparse.credentials import Credentials
from fleet_sparse.errors import ErrorCode, SettingError, ShardUnavailable
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
from fleet_sparse.worker.control.rpc import GrpcTransport, Rpc
from fleet_sparse.worker.net.channel import Channel
from fleet_sparse.worker.net.channel_choice import open_channel
from fleet_sparse.worker.net.link_errors import LinkErrors
from fleet_sparse.worker.net.shard_link import Registration

_AWAIT_TIMEOUT_S = 30.0  # longer than a pserver waits
_PAUSE_S = 0.02
_ID_BYTES = 8


class Reading(NamedTuple):
    """Rows and dense values of one version."""

    version: Version
    rows: dict[str, NDArray[np.float32]]
    """By name of the table, `(n, dim)`, in the order of the ids that were asked for."""
    values: dict[str, NDArray[np.float32]]
    """By name of the dense array, all of its values."""


class _Piece(NamedTuple):
    """A PULL block, and where its rows belong."""

    block: Block
    name: str
    places: NDArray[np.int64] | slice


class _BeginAgain(Exception):
    """A version is gone, or a pserver does not answer: the request begins again."""


class PserverReader:
    """Reads from one read-only pserver for each shard. Safe to use from several threads, which take turns.

    Args:
        endpoints: `host:port` of the control plane of each pserver, in the order of the shards.
        settings: Timeouts and limits; None for those of the environment.

    Attributes:
        tables: Specs of the tables that the pservers have, by name.
        arrays: Specs of their dense arrays, by name.

    Raises:
        ShardUnavailable: A pserver is not there.
        PlanError: A pserver trains.
        SettingError: The endpoints are not those of all shards, in their order.
    """

    def __init__(self, endpoints: Sequence[str], settings: Settings | None = None) -> None:
        self._settings = Settings.from_environment() if settings is None else settings
        self._credentials = Credentials()
        self._rpc = Rpc(GrpcTransport(endpoints, self._credentials), self._settings)
        self._client_id = os.urandom(16)
        self._request_ids = count(1)
        self._lock = threading.Lock()
        self._channel: Channel | None = None
        self.tables: dict[str, TableSpec] = {}
        self.arrays: dict[str, DenseSpec] = {}
        try:
            self._attach(self._settings.connect_s)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the connections."""
        if self._channel is not None:
            self._channel.close()
        self._rpc.close()

    def newest(self) -> Version | None:
        """Returns the newest version that all pservers have; None while they have none in common."""
        return self._common(messages.AwaitVersionRequest())

    def await_version(self, known: Version) -> Version | None:
        """Returns the newest version that all pservers have, once it is another one than `known`, or some 20 s have
        passed; None while they have none in common.
        """
        found = self._common(messages.AwaitVersionRequest(checksum=known.checksum))
        return self.newest() if found is None else found

    def read(
        self, ids: Mapping[str, NDArray[np.int64]], arrays: Collection[str] = (), *, version: Version | None = None
    ) -> Reading:
        """Returns rows and dense values, all of one version.

        Args:
            ids: By name of the table, `(n,)`, repeats allowed.
            arrays: Names of dense arrays.
            version: The version; None for the newest one that all pservers have.

        Raises:
            ValueError: There is no such table or array, or ids are not int64 of one dimension.
            ShardUnavailable: Pservers do not answer, or have no version in common, within `settings.deadline_s`.
            ProtocolError: With code VERSION_GONE: a pserver does not have `version`.
        """
        deadline = time.monotonic() + self._settings.deadline_s
        self._check(ids, arrays)
        while True:
            wanted = version or self.newest()
            try:
                if wanted is None:
                    raise _BeginAgain("the pservers have no version in common")
                with self._lock:
                    return self._read(wanted, ids, arrays, is_fixed=version is not None)
            except _BeginAgain as error:
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    raise ShardUnavailable(
                        f"read: {error} in {self._settings.deadline_s:g} s", shard=0, endpoint=self._rpc.endpoint(0)
                    ) from None
                time.sleep(_PAUSE_S)
                with self._lock:
                    self._attach(left_s)

    def changed(self, version: Version) -> dict[str, NDArray[np.int64]] | None:
        """Returns the ids whose rows differ between the newest version and the one before it, by name of the table.

        Args:
            version: The newest version.

        Returns:
            None if a pserver does not know them any more: then count all rows as changed.
        """
        found: dict[str, list[NDArray[np.int64]]] = {}
        names = {spec.table_id: name for name, spec in self.tables.items()}
        with self._lock:
            try:
                replies = self._ask({shard: [[]] for shard in range(self._rpc.num_shards)}, Op.CHANGED, version)
            except _BeginAgain:
                return None
        for reply, _ in replies:
            if reply.error is not None:
                return None
            for block in reply.blocks:
                assert block.ids is not None, "the answer to CHANGED has ids"
                found.setdefault(names[block.table_id], []).append(block.ids)
        return {name: np.concatenate(parts) for name, parts in found.items()}

    def _attach(self, patience_s: float) -> None:
        """Attaches to all pservers and opens connections, in place of those that there were."""
        request = messages.AttachRequest(protocol_version=CONTROL_VERSION, client_id=self._client_id)
        replies = self._rpc.call_all("Attach", request, self._settings.deadline_s, patience_s=patience_s)
        for shard, reply in enumerate(replies):
            if (reply.shard, reply.num_shards) != (shard, len(replies)):
                raise SettingError(
                    f"{self._rpc.where(shard)}: it is shard {reply.shard} of {reply.num_shards}, should be shard "
                    f"{shard} of {len(replies)}. List the pservers of all shards, in their order"
                )
        self._registrations = [
            Registration(
                reply.cluster_id,
                reply.shard,
                reply.num_shards,
                reply.incarnation,
                reply.placement_version,
                reply.data_endpoint,
                stream_endpoint=reply.stream_endpoint,
            )
            for reply in replies
        ]
        self._placement = Placement.even(len(replies), replies[0].placement_version)
        specs = [parse_spec(table.spec) for table in replies[0].tables]
        self.tables = {spec.name: spec for spec in specs if isinstance(spec, TableSpec)}
        self.arrays = {spec.name: spec for spec in specs if isinstance(spec, DenseSpec)}
        if self._channel is not None:
            self._channel.close()
        self._channel = open_channel(self._registrations, self._settings, self._credentials)

    def _common(self, request: messages.AwaitVersionRequest) -> Version | None:
        replies = self._rpc.call_all("AwaitVersion", request, _AWAIT_TIMEOUT_S)
        versions = [[Version(each.number, each.checksum) for each in reply.versions] for reply in replies]
        return next((each for each in versions[0] if all(each in others for others in versions)), None)

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
        self, version: Version, ids: Mapping[str, NDArray[np.int64]], arrays: Collection[str], *, is_fixed: bool
    ) -> Reading:
        rows = {name: np.empty((len(each), self.tables[name].dim), np.float32) for name, each in ids.items()}
        values = {name: np.empty((self.arrays[name].num_values, 1), np.float32) for name in arrays}
        frames: dict[int, list[list[_Piece]]] = {}
        for shard in range(self._rpc.num_shards):
            frames[shard] = [*self._in_frames([*self._pieces(shard, ids, arrays)])]
        for reply, pieces in self._ask(frames, Op.READ, version):
            error, shard = reply.error, reply.header.shard
            if error is not None:
                if error.code is ErrorCode.WRONG_INCARNATION or (error.code is ErrorCode.VERSION_GONE and not is_fixed):
                    raise _BeginAgain(error.message)
                raise LinkErrors(shard, self._rpc.endpoint(shard)).refused(error.code, error.message)
            for piece, block in zip(pieces, reply.blocks, strict=True):
                target = values[piece.name] if block.table_id in self._array_ids else rows[piece.name]
                target[piece.places] = block.rows
        return Reading(version, rows, {name: each.reshape(-1) for name, each in values.items()})

    @property
    def _array_ids(self) -> set[int]:
        return {spec.table_id for spec in self.arrays.values()}

    def _pieces(self, shard: int, ids: Mapping[str, NDArray[np.int64]], arrays: Collection[str]) -> Iterator[_Piece]:
        """Yields blocks of what one shard has, each with at most half of a frame of rows."""
        limit = self._settings.max_frame_bytes // 2
        for name, its_ids in ids.items():
            spec = self.tables[name]
            places = np.flatnonzero(self._placement.shard_of(its_ids, spec.salt) == shard)
            length = max(limit // (4 * spec.dim + _ID_BYTES), 1)
            for begin in range(0, len(places), length):
                part = places[begin : begin + length]
                block = Block(Action.PULL, spec.table_id, spec.schema_hash, spec.dim, len(part), its_ids[part])
                yield _Piece(block, name, part)
        for name in arrays:
            array = self.arrays[name]
            first, last = array.range_of(shard, self._rpc.num_shards)
            for begin in range(first, last, limit // 4):
                end = min(begin + limit // 4, last)
                block = Block(
                    Action.PULL, array.table_id, array.schema_hash, 1, end - begin, None, offset=begin - first
                )
                yield _Piece(block, name, slice(begin, end))

    def _in_frames(self, pieces: Sequence[_Piece]) -> Iterator[list[_Piece]]:
        """Yields the blocks of each frame; both the frame and its reply are within the limit."""
        frame: list[_Piece] = []
        num_bytes = HEADER_BYTES
        for piece in pieces:
            block = piece.block
            its_bytes = BLOCK_BYTES + block.count * (4 * block.dim + _ID_BYTES)
            if frame and (num_bytes + its_bytes > self._settings.max_frame_bytes or len(frame) == MAX_BLOCKS):
                yield frame
                frame, num_bytes = [], HEADER_BYTES
            frame.append(piece)
            num_bytes += its_bytes
        if frame:
            yield frame

    def _ask(
        self, frames: Mapping[int, Sequence[list[_Piece]]], op: Op, version: Version
    ) -> list[tuple[Frame, list[_Piece]]]:
        """Sends frames and returns the replies, in any order.

        Raises:
            _BeginAgain: Some were not answered in time.
        """
        channel = self._channel
        assert channel is not None, "it is attached"
        waiting: dict[int, list[_Piece]] = {}
        for shard, each in frames.items():
            registration = self._registrations[shard]
            for pieces in each:
                header = Header(
                    op,
                    UNCHECKED_COLUMNS if channel.stays_on_machine(shard) else 0,
                    cluster_id=registration.cluster_id,
                    shard=shard,
                    incarnation=registration.incarnation,
                    placement_version=registration.placement_version,
                    client_id=self._client_id,
                    request_id=next(self._request_ids),
                    step=version.checksum,
                )
                waiting[header.request_id] = pieces
                channel.send(shard, encode(Frame(header, [piece.block for piece in pieces])))
        replies: list[tuple[Frame, list[_Piece]]] = []
        deadline = time.monotonic() + self._settings.retry_s
        while waiting:
            received = channel.receive(max(deadline - time.monotonic(), 0.0))
            if received is None:
                if time.monotonic() >= deadline:
                    raise _BeginAgain(f"no answer in {self._settings.retry_s:g} s")
                continue
            reply = decode(received[1], max_bytes=2 * self._settings.max_frame_bytes)
            asked = waiting.pop(reply.header.request_id, None)
            if asked is not None:
                replies.append((reply, asked))
                deadline = time.monotonic() + self._settings.retry_s
        return replies
