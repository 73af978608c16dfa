"""Liveness: the open call by which a pserver knows that this worker lives, and what this worker learns of pservers.

A worker keeps one `Attend` call open to every pserver. If the process dies, the kernel ends the connection and with it
the call. If the process or its machine stops, the heartbeats of the connection stay unanswered. gRPC answers heartbeats
from a thread of its own, which needs no GIL: a worker that computes in one long call of C code is alive.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import NamedTuple

from fleet_sparse.errors import FleetSparseError
from fleet_sparse.settings import Settings
from fleet_sparse.wire import control_pb2 as messages
from fleet_sparse.wire.control import TableState

from ..net.shard_link import is_older
from .registration import Registrar, table_states
from .rpc import RETRY_S, OutOfTime, PendingCall, Rpc, Unreachable

logger = logging.getLogger(__name__)

_JOIN_S = 10.0


IncarnationWatcher = Callable[[int, int], bool]
"""Gets shard and incarnation of a pserver that was started again. Returns True if this worker is to be registered with
it, now or at the next call, and False if it is not followed."""


class ShardTables(NamedTuple):
    """The tables of one shard, as its pserver reported them."""

    shard: int
    tables: tuple[TableState, ...]


class Liveness:
    """A thread that keeps a call open to every pserver, from `start` until the connections are closed.

    A pserver that was started again has a thread of its own while the watchers hear of it: they may wait for it.

    Args:
        rpc: Calls the pservers.
        registrar: Registers this worker.
        settings: `heartbeat_s` is the interval at which tables are watched.
        rejoin_alone: Called in place of the watchers while there are none.
    """

    def __init__(
        self, rpc: Rpc, registrar: Registrar, settings: Settings, rejoin_alone: Callable[[int], object] = lambda _: None
    ) -> None:
        self._rpc = rpc
        self._registrar = registrar
        self._rejoin_alone = rejoin_alone
        self._interval_s = settings.heartbeat_s
        self._ended: queue.SimpleQueue[tuple[int, PendingCall] | None] = queue.SimpleQueue()
        self._unnamed: set[int] = set()  # shards attended again before this worker registered; of the thread
        self._attending: dict[int, PendingCall] = {}  # newest call by shard, of the thread or the follower
        self._lock = threading.Lock()  # guards all below
        self._incarnation_watchers: list[IncarnationWatcher] = []
        self._table_watchers: list[Callable[[ShardTables], None]] = []
        self._thread: threading.Thread | None = None
        self._followers: dict[int, threading.Thread] = {}  # by shard; of the thread that is started below

    def start(self) -> None:
        """Starts the thread. A second call does nothing."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="fleet_sparse liveness", daemon=True)
                self._thread.start()

    def note_registered(self) -> None:
        """This worker has registered: other processes in the place of those that answered it are found from now on."""
        self._ended.put(None)

    @property
    def is_watched(self) -> bool:
        """True once there is a watcher of incarnations."""
        with self._lock:
            return bool(self._incarnation_watchers)

    def watch_incarnations(self, watcher: IncarnationWatcher) -> None:
        """Calls `watcher` when a pserver was started again, until it returns False or has registered the worker.

        Calls for several shards may run at the same time.
        """
        with self._lock:
            self._incarnation_watchers.append(watcher)

    def watch_tables(self, watcher: Callable[[ShardTables], None]) -> None:
        """Calls `watcher` with the tables of each shard every `heartbeat_s`."""
        with self._lock:
            self._table_watchers.append(watcher)

    def join(self) -> None:
        """Waits until the thread has ended, which it does once the connections are closed."""
        self._ended.put(None)
        _join(self._thread)  # first: it starts the others
        for follower in self._followers.values():
            _join(follower)

    def _run(self) -> None:
        try:
            for shard in range(self._rpc.num_shards):
                self._attend(shard)
            reports_at = time.monotonic() + self._interval_s
            while not self._rpc.closed.is_set():
                try:
                    ended = self._ended.get(timeout=max(reports_at - time.monotonic(), 0.0))
                except queue.Empty:
                    self._report_tables()
                    reports_at = time.monotonic() + self._interval_s
                    continue
                if ended is not None:
                    self._continue(ended)
                self._attend_by_name()
        except Exception:
            if not self._rpc.closed.is_set():
                logger.exception("this worker sends no more heartbeats")

    def _attend_by_name(self) -> None:
        """Attends pservers that may be other processes than those with which this worker registered meanwhile."""
        if self._registrar.registrations and not self._rpc.closed.is_set():
            while self._unnamed:
                self._attend(self._unnamed.pop())

    def _attend(self, shard: int) -> None:
        known = self._registrar.registrations
        request = messages.AttendRequest(
            client_id=self._registrar.identity.client_id, incarnation=known[shard].incarnation if known else 0
        )
        call = self._rpc.start(shard, "Attend", request, None)
        self._attending[shard] = call
        call.add_done_callback(partial(self._note_end, shard, call))

    def _note_end(self, shard: int, call: PendingCall, _: object) -> None:
        self._ended.put((shard, call))

    def _continue(self, ended: tuple[int, PendingCall]) -> None:
        """Attends pservers again whose calls have ended; other processes in their place, once watchers follow them."""
        calls, shards = [ended], []
        with suppress(queue.Empty):
            while (another := self._ended.get_nowait()) is not None:
                calls.append(another)
        for shard, call in calls:
            if self._attending[shard] is not call:
                continue  # another one has taken its place
            newer = self._newer_incarnation(shard, call)
            if newer is None:
                shards.append(shard)
                if not self._registrar.registrations:
                    self._unnamed.add(shard)
                continue
            thread = threading.Thread(
                target=self._follow, args=(shard, newer), name=f"fleet_sparse liveness of shard {shard}", daemon=True
            )
            self._followers[shard] = thread
            thread.start()
        if shards and not self._rpc.closed.wait(RETRY_S):
            for shard in shards:
                self._attend(shard)

    def _newer_incarnation(self, shard: int, call: PendingCall) -> int | None:
        """Returns the incarnation of a pserver that was started again; None if it was not, as far as its call says."""
        try:
            reply: messages.AttendReply = call.result()  # type: ignore[assignment]  # of this call
        except (Unreachable, OutOfTime, FleetSparseError) as error:
            # A call that needs the pserver raises it; the other pservers are attended all the same.
            logger.debug("%s: the connection ended: %s", self._rpc.where(shard), error)
            return None
        known = self._registrar.registrations
        if not known or reply.incarnation == known[shard].incarnation:
            return None
        return None if is_older(reply.incarnation, known[shard].incarnation) else reply.incarnation

    def _follow(self, shard: int, incarnation: int) -> None:
        """Tells the watchers of a pserver that was started again, and attends it unless they do not follow it.

        Without a watcher it attends the pserver again all the same: a later one hears of it.
        """
        try:
            with self._lock:
                watchers = list(self._incarnation_watchers)
            if not watchers:
                self._rejoin_alone(shard)
            follows = [watcher(shard, incarnation) for watcher in watchers]
            if (any(follows) or not watchers) and not self._rpc.closed.wait(RETRY_S):
                self._attend(shard)
        except Exception:
            if not self._rpc.closed.is_set():
                logger.exception("this worker does not follow %s", self._rpc.where(shard))

    def _report_tables(self) -> None:
        with self._lock:
            watchers = list(self._table_watchers)
        if not watchers:
            return
        replies = self._rpc.try_all("Stats", messages.StatsRequest(), self._interval_s, patience_s=0.0)
        for shard, reply in enumerate(replies):
            if not isinstance(reply, FleetSparseError):
                for watcher in watchers:
                    watcher(ShardTables(shard, table_states(reply.tables)))


def _join(thread: threading.Thread | None) -> None:
    if thread is not None and thread is not threading.current_thread():
        thread.join(_JOIN_S)
