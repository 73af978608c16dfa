"""ReplicaWatch: attaches to the read-only pservers of a model, and waits for their versions."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from google.protobuf.message import Message

from fleet_sparse.core.dense_spec import DenseSpec
from fleet_sparse.core.spec import Spec
from fleet_sparse.core.spec_json import parse_spec
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.core.version import Version
from fleet_sparse.errors import SettingError, ShardUnavailable, TableMismatch
from fleet_sparse.wire import control_pb2 as messages
from fleet_sparse.wire.control import CONTROL_VERSION
from fleet_sparse.worker.control.rpc import OutOfTime, Transport, Unreachable
from fleet_sparse.worker.net.shard_link import Registration

from .replicas import Replicas
from .row_reader import differences_of_reads

_log = logging.getLogger(__name__)

_AWAIT_TIMEOUT_S = 30.0  # longer than a pserver waits
_ATTACH_TIMEOUT_S, _ATTACH_PAUSE_S = 2.0, 0.1
_REFUSED_PAUSE_S = 1.0
_SILENT_S = 1.0
"""After this time of waiting for pservers the log says for which one."""


class Attached(NamedTuple):
    """A replica as its reply to Attach describes it."""

    registration: Registration
    schema_hashes: dict[int, int]
    """By number of the table or array on the wire."""


class ReplicaWatch:
    """Knows which replicas are attached, and their versions. Safe to use from several threads.

    A thread for each replica attaches to it, again whenever it was lost, and waits for its versions.

    Args:
        of_shard: Endpoints of the replicas of each shard.
        transport: Carries the calls to all replicas, shard by shard; `close` closes it.
        client_id: Id of the client, 16 bytes.
        on_change: Called in any thread when a replica was attached or lost.

    Attributes:
        state: Guards the attributes that follow. It is notified when one changes.
        replicas: Condition and versions of the replicas.
        attached: The last reply to Attach of each replica that was attached once.
        num_attached: Number of times that a replica was attached.
        lost: Replicas that were lost, in this order; the reader removes them.
        tables: Specs of the tables, by name; not empty once a replica was attached, and constant then.
        arrays: Specs of the dense arrays, likewise.
    """

    def __init__(
        self,
        of_shard: Sequence[Sequence[str]],
        transport: Transport,
        client_id: bytes,
        on_change: Callable[[], None],
    ) -> None:
        self._of_shard = of_shard
        self._endpoints = [each for some in of_shard for each in some]
        self._transport = transport
        self._client_id = client_id
        self._on_change = on_change
        self._closed = threading.Event()
        shards = [shard for shard, endpoints in enumerate(of_shard) for _ in endpoints]
        self.state = threading.Condition()
        self.replicas = Replicas(shards)
        self.attached: dict[int, Attached] = {}
        self.num_attached = 0
        self.lost: deque[int] = deque()
        self.tables: dict[str, TableSpec] = {}
        self.arrays: dict[str, DenseSpec] = {}
        self._errors: dict[int, Exception] = {}
        self._failures: dict[int, str] = {}  # why an attached replica keeps its version
        self._threads = [
            threading.Thread(target=self._run, args=(index, shard), name=f"replica {index}", daemon=True)
            for index, shard in enumerate(shards)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def is_closed(self) -> bool:
        """True after `close` was called."""
        return self._closed.is_set()

    def close(self) -> None:
        """Ends the connections, and the calls that wait. A second call does nothing."""
        self._closed.set()
        self._transport.close()
        with self.state:
            self.state.notify_all()
        self._on_change()
        for thread in self._threads:
            thread.join()

    def problems(self) -> list[str]:
        """Returns why replicas are not used, or keep their version, one text for each of them."""
        with self.state:
            return [*map(str, self._errors.values()), *self._failures.values()]

    def await_attached(self, timeout_s: float) -> None:
        """Waits until every shard has a replica.

        Raises:
            FleetSparseError: One refused, or none of a shard was reached in time.
        """
        begun_at = time.monotonic()
        deadline, is_silent = begun_at + timeout_s, True
        with self.state:
            while (missing := self.replicas.missing_shard()) is not None:
                refusals = [each for each in self._errors.values() if not isinstance(each, ShardUnavailable)]
                if refusals:
                    raise refusals[0]
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    raise self.unavailable(missing, f"no pserver reached in {timeout_s:g} s")
                if is_silent and time.monotonic() >= begun_at + _SILENT_S:
                    is_silent = False
                    where = f"shard {missing} at {'|'.join(self._of_shard[missing])}"
                    _log.info("%s is not up yet, waiting for up to %g s", where, timeout_s)
                self.state.wait(min(left_s, _SILENT_S) if is_silent else left_s)

    def await_version(self, known: Version, timeout_s: float) -> Version:
        """Returns the version that follows `known` as soon as all shards have it; `known` after `timeout_s`."""
        until = time.monotonic() + timeout_s
        with self.state:
            while not self.is_closed:
                now = time.monotonic()
                version, again_at = self.replicas.successor(known, now)
                if version is not None:
                    return version
                if now >= until:
                    break
                self.state.wait(min(again_at, until) - now)
        return known

    def await_usable(self, known: Version, deadline: float) -> Version:
        """Returns `known` if all shards have it, or else, once it is there, the version that follows.

        Raises:
            ShardUnavailable: A shard has had no pserver with either until the deadline.
        """
        with self.state:
            while True:
                now = time.monotonic()
                version, again_at = self.replicas.successor(known, now)
                missing = self.replicas.missing_shard(known)
                if version is not None or missing is None:
                    return known if version is None else version
                if now >= deadline or self.is_closed:
                    raise self.unavailable(missing, f"no pserver with snapshot {known.number} or a newer one")
                self.state.wait(min(again_at, deadline) - now)

    def await_newest(self, deadline: float) -> Version:
        """Returns the newest version that all shards have, as soon as they have one.

        Raises:
            ShardUnavailable: The shards have had no version in common until the deadline.
        """
        with self.state:
            while True:
                if (version := self.replicas.newest()) is not None:
                    return version
                left_s = deadline - time.monotonic()
                if left_s <= 0 or self.is_closed:
                    shard = self.replicas.missing_shard() or 0
                    raise self.unavailable(shard, "no version in common with the others")
                self.state.wait(left_s)

    def unavailable(self, shard: int, what: str) -> ShardUnavailable:
        """Returns the error for a shard, with the last error of one of its replicas."""
        endpoint = "|".join(self._of_shard[shard])
        with self.state:
            errors = [str(error) for index, error in self._errors.items() if self.replicas[index].shard == shard]
        return ShardUnavailable(
            f"shard {shard} at {endpoint}: {what}{f'; last error: {errors[0]}' if errors else ''}",
            shard=shard,
            endpoint=endpoint,
        )

    def _run(self, index: int, shard: int) -> None:
        """Attaches to a replica and waits for its versions, until `close`."""
        request = messages.AttachRequest(protocol_version=CONTROL_VERSION, client_id=self._client_id)
        while not self.is_closed:
            pause_s = _ATTACH_PAUSE_S
            try:
                reply = self._call(index, shard, "Attach", request, _ATTACH_TIMEOUT_S)
                self._attach(index, shard, reply)
                last_failure = ""
                while self.replicas[index].is_attached:  # until a read finds that it was started again
                    known = messages.AwaitVersionRequest(
                        checksum=_versions_of(reply)[0].checksum, last_failure=last_failure
                    )
                    reply = self._call(index, shard, "AwaitVersion", known, _AWAIT_TIMEOUT_S)
                    last_failure = reply.last_failure
                    with self.state:
                        self.replicas.set_versions(index, _versions_of(reply))
                        self._note_failure(index, last_failure)
                        self.state.notify_all()
            except ShardUnavailable as error:
                self._detach(index, error)
            except Exception as error:
                self._detach(index, error)
                pause_s = _REFUSED_PAUSE_S
            self._closed.wait(pause_s)

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
        num_shards = len(self._of_shard)
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
        with self.state:
            if not self.tables and not self.arrays:
                self.tables = {spec.name: spec for spec in specs if isinstance(spec, TableSpec)}
                self.arrays = {spec.name: spec for spec in specs if isinstance(spec, DenseSpec)}
            self._check_specs(self._endpoints[index], specs)
            self.attached[index] = Attached(registration, {spec.table_id: spec.schema_hash for spec in specs})
            self.num_attached += 1
            self.replicas.attach(index, _versions_of(reply))
            self._errors.pop(index, None)
            self._failures.pop(index, None)
            self.state.notify_all()
        self._on_change()

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
        if self.is_closed:
            return
        with self.state:
            was_attached = self.replicas[index].is_attached
            is_new = str(error) != str(self._errors.get(index))
            self.replicas.detach(index)
            self._errors[index] = error
            self._failures.pop(index, None)
            if was_attached:
                self.lost.append(index)
            self.state.notify_all()
        self._on_change()
        if was_attached or (is_new and not isinstance(error, ShardUnavailable)):
            _log.warning("replica %s is not used: %s", self._endpoints[index], error)

    def _note_failure(self, index: int, text: str) -> None:
        """Notes why a replica keeps its version; empty if it serves what it should."""
        before = self._failures.pop(index, "")
        if text:
            endpoint = self._endpoints[index]
            self._failures[index] = f"{endpoint}: the snapshot that should be served is not: {text}"
            if self._failures[index] != before:
                _log.warning("replica %s", self._failures[index])


def _versions_of(reply: Any) -> list[Version]:
    return [Version(each.number, each.checksum) for each in reply.versions]
