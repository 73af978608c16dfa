"""A control plane without gRPC, and the calls of workers to it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from fleet_sparse.core.mode import Mode
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.pserver.admin.service import ControlService, Supervised
from fleet_sparse.pserver.admin.snapshot_loader import Loaded
from fleet_sparse.pserver.endpoints import DataEndpoints
from fleet_sparse.pserver.engine.shard import Shard
from fleet_sparse.pserver.net.requests import Traffic
from fleet_sparse.settings import Settings
from fleet_sparse.wire import control_pb2 as messages
from fleet_sparse.wire.control import CONTROL_VERSION

from .shards import make_shard


class HeldControl:
    """A ControlService with a manual clock; its tasks run at once unless a test holds them back.

    `changed` are settings that differ from those of most tests.
    """

    def __init__(
        self,
        root: Path | str,
        supervised: Supervised | None = None,
        shard: Shard | None = None,
        loaded: Loaded | None = None,
        **changed: Any,
    ) -> None:
        self.now = 0.0
        self.num_stops = 0
        self.holds_back = False
        self._held_back: list[tuple[Callable[[], Any], Future[Any]]] = []
        self.cancels = False
        self.shard = make_shard() if shard is None else shard
        times_s: dict[str, Any] = {"worker_lost_s": 30.0, "connect_s": 60.0, "positions_s": 0.2}
        self.settings = Settings(root=str(root), **{**times_s, **changed})
        self.service = ControlService(
            self.shard,
            post=self._post,
            traffic=Traffic(5, 6),
            data_endpoints=DataEndpoints("127.0.0.1:6001", "unix:a"),
            settings=self.settings,
            stop=self._stop,
            loaded=loaded,
            supervised=supervised,
            clock=lambda: self.now,
        )

    def _post(self, task: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        if self.cancels:
            future.cancel()
        elif self.holds_back:
            self._held_back.append((task, future))
        else:
            _run(task, future)
        return future

    def let_go(self) -> None:
        """Runs the tasks that were held back; later tasks run at once again."""
        self.holds_back = False
        held_back, self._held_back = self._held_back, []
        for task, future in held_back:
            _run(task, future)

    def _stop(self) -> None:
        self.num_stops += 1

    def start(self, request: Any) -> Any:
        return self.service.call(type(request).__name__.removesuffix("Request"), request)

    def call(self, request: Any) -> Any:
        return asyncio.run(self.start(request))


def _run(task: Callable[[], Any], future: Future[Any]) -> None:
    try:
        future.set_result(task())
    except Exception as error:
        future.set_exception(error)


def registration(
    *specs: TableSpec,
    worker: int = 0,
    num_workers: int = 1,
    version: int = CONTROL_VERSION,
    client_id: bytes = b"",
    mode: Mode | None = None,
) -> messages.RegisterRequest:
    return messages.RegisterRequest(
        protocol_version=version,
        worker_index=worker,
        num_workers=num_workers,
        client_id=client_id or bytes([worker]) * 16,
        client_epoch=1,
        table_specs=[spec.to_json() for spec in specs],
        mode="" if mode is None else mode.to_json(),
        role=messages.ROLE_WORKER,
    )


def visit(role: messages.Role) -> messages.RegisterRequest:
    """Returns the registration of a reader or tool."""
    return messages.RegisterRequest(
        protocol_version=CONTROL_VERSION, client_id=b"v" * 16, client_epoch=1, role=messages.Role.Name(role)
    )


def barrier(worker: int, name: str = "b", sequence: int = 1, *, client_id: bytes = b"") -> messages.BarrierRequest:
    return messages.BarrierRequest(
        name=name, worker_index=worker, client_id=client_id or bytes([worker]) * 16, sequence=sequence
    )


def attendance(worker: int, *, incarnation: int = 0, client_id: bytes = b"") -> messages.AttendRequest:
    """Returns the call that a worker keeps open while it lives."""
    return messages.AttendRequest(client_id=client_id or bytes([worker]) * 16, incarnation=incarnation)


def shrink_request(max_unseen_days: int) -> messages.ShrinkRequest:
    """Returns the request to remove the rows that no push touched in the last days."""
    criterion = messages.ShrinkCriterion(name="unseen_days", value=max_unseen_days)
    return messages.ShrinkRequest(criteria=[criterion], decay=1.0)


def num_removed(reply: messages.ShrinkReply) -> int:
    """Returns the number of rows of all tables that a shrink removed."""
    return sum(each.num_removed for each in reply.removals)
