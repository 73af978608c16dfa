"""The calls of the control plane at which workers meet."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

import msgspec

from fleet_sparse.errors import ErrorCode, ProtocolError, ShardUnavailable
from fleet_sparse.wire import control_pb2 as messages

from ..engine.shard import Shard
from ..log.control_state import BarrierOpening, encoded_change
from .background import Signal, task_of
from .barriers import Arrival, Contribution
from .load_rpcs import LoadService
from .log_appends import LogAppends
from .membership import ClientEpoch, Membership
from .predecessor import Predecessor
from .shrink_rpcs import ShrinkService

# Of what workers have for each other at a barrier: a global shuffle exchanges its examples there, too many for a log.
MAX_RECORDED_BYTES: Final = 1 << 20
_EPOCHS: Final = 1 << 64


class BarrierService:
    """Answers the calls for one pserver, in the event loop of its control plane.

    Args:
        shard: Used only by tasks on the data thread.
        membership: Workers of the job, and the state of its barriers.
        predecessor: What the pserver continues; its workers may be at a barrier before they have registered again.
        registered: Sent when a worker has registered.
        appends: Appends to the log of the shard.
        loads: Loads, whose number barriers tell.
        shrinks: Shrinks; likewise.
        failover_s: As `Settings.failover_s`.
        endpoint: Address of the pserver, for messages.
        clock: Returns monotonic time in seconds.
    """

    def __init__(  # noqa: PLR0913  # the parts of a pserver that a barrier needs
        self,
        shard: Shard,
        *,
        membership: Membership,
        predecessor: Predecessor,
        registered: Signal,
        appends: LogAppends,
        loads: LoadService,
        shrinks: ShrinkService,
        failover_s: float,
        endpoint: str,
        clock: Callable[[], float],
    ) -> None:
        self._shard = shard
        self._membership = membership
        self._predecessor = predecessor
        self._registered = registered
        self._appends = appends
        self._loads = loads
        self._shrinks = shrinks
        self._failover_s = failover_s
        self._endpoint = endpoint
        self._clock = clock
        self._opened: dict[str, Signal] = {}  # by barrier: sent when it opens or fails
        self._recorded: dict[str, asyncio.Task[None]] = {}  # by barrier: ends when its newest opening is durable

    async def barrier(self, request: messages.BarrierRequest) -> messages.BarrierReply:
        """Answers Barrier once the worker has passed it."""
        name, sequence, worker_index = request.name, request.sequence, request.worker_index
        await self._pass(request, (request.contribution,) if request.contribution else ())
        contributions = self._membership.contributions(name, worker_index, sequence)
        if request.contribution and not contributions:
            raise ProtocolError(
                f"barrier {name!r}: worker {worker_index} asks for round {sequence}, whose contributions are dropped. "
                "Pserver 0 was started again, and only a log keeps them, up to 1 MiB. Start the job again from its "
                "last snapshot",
                code=ErrorCode.MALFORMED,
            )
        return messages.BarrierReply(
            contributions=[b"".join(each) for each in contributions],
            num_loads=self._loads.num_kept - self._loads.num_before[worker_index],
            others_wait=self._membership.passed_alone(name, worker_index),
            copies_epoch=self.copies_epoch,
            num_trained=self._membership.num_trained(worker_index),
            opening=self._membership.opening(name, worker_index),
        )

    @property
    def copies_epoch(self) -> int:
        """Another number once rows were loaded or removed, or by another process."""
        return (self._shard.incarnation + self._loads.num_kept + self._shrinks.num_done) % _EPOCHS

    async def exchange(self, request: messages.ExchangeRequest) -> messages.ExchangeReply:
        """Answers Exchange: a barrier at which every worker has a part for each worker."""
        name, sequence, worker_index = request.name, request.sequence, request.worker_index
        if len(request.parts) != self._membership.num_workers:
            raise ProtocolError(
                f"exchange {name!r}: worker {worker_index} has {len(request.parts)} parts, should have "
                f"{self._membership.num_workers}, one for each worker",
                code=ErrorCode.MALFORMED,
            )
        barrier = messages.BarrierRequest(
            name=name, sequence=sequence, worker_index=worker_index, client_id=request.client_id
        )
        await self._pass(barrier, tuple(request.parts))
        contributions = self._membership.contributions(name, worker_index, sequence)
        parts = [each[worker_index] for each in contributions if worker_index < len(each)]
        if len(parts) != self._membership.num_workers:
            raise ProtocolError(
                f"exchange {name!r}: worker {worker_index} asks for round {sequence}, whose parts are dropped",
                code=ErrorCode.MALFORMED,
            )
        opening = self._membership.opening(name, worker_index)
        return messages.ExchangeReply(parts=parts, opening=opening, copies_epoch=self.copies_epoch)

    def wake_all(self) -> None:
        """Wakes the workers that wait at any barrier, for what they wait for has changed."""
        for name in list(self._opened):
            self._wake(name)

    async def _pass(self, request: messages.BarrierRequest, contribution: Contribution) -> None:
        """Returns when a worker has passed a barrier."""
        name = request.name
        await self._wait_until_registered(request)
        try:
            while not self._arrive(request, contribution):
                await self._opened.setdefault(name, Signal()).wait()
        except asyncio.CancelledError:
            self._membership.withdraw(name, request.sequence, request.worker_index)
            self._wake(name)  # another call of this worker for the same barrier, if there is one, arrives again
            raise
        if name in self._recorded:
            await asyncio.shield(self._recorded[name])
            self._membership.check_not_ended(f"barrier {name!r}", request.client_id)  # the next job may have begun

    async def _wait_until_registered(self, request: messages.BarrierRequest) -> None:
        """Returns when the worker of a barrier has registered, or another process has its place.

        A worker of a restarted pserver may be at a barrier before it has registered again.
        """
        name, worker_index = request.name, request.worker_index
        deadline = time.monotonic() + self._failover_s
        while self._predecessor.may_have_workers and not self._membership.is_worker(worker_index, request.client_id):
            self._membership.check_not_ended(f"barrier {name!r}", request.client_id)
            if worker_index in self._membership.present():
                return
            if not await self._registered.wait(deadline):
                raise ShardUnavailable(
                    f"barrier {name!r}: shard {self._shard.shard_index} was started again, and worker {worker_index} "
                    f"has not registered again in {self._failover_s:g} s (FLEET_SPARSE_FAILOVER_S). Start the job "
                    "again from its last snapshot",
                    shard=self._shard.shard_index,
                    endpoint=self._endpoint,
                )

    def _arrive(self, request: messages.BarrierRequest, contribution: Contribution) -> bool:
        """Returns whether a worker has passed a barrier; wakes the others if it opened the barrier."""
        arrival = Arrival(
            request.name,
            request.sequence,
            request.worker_index,
            request.once,
            request.alone,
            contribution,
            request.num_trained,
        )
        has_passed = self._membership.arrive(arrival, request.client_id, self._clock())
        opening = self._membership.take_opening()
        if opening is not None:
            if self._shard.log is not None:
                clients = self._membership.clients_of(opening.passed)
                self._recorded[opening.name] = task_of(self._record(opening, self._membership.job_id, clients))
            self._wake(request.name)
            if not has_passed:  # it opened another barrier
                self.wake_all()
        return has_passed

    async def _record(self, opening: BarrierOpening, job_id: int, clients: Mapping[int, ClientEpoch]) -> None:
        """Returns when the log has the opening of a barrier durably: no worker is answered before.

        Args:
            opening: The opening.
            job_id: The job in which it opened.
            clients: The workers that passed.

        Raises:
            LogFull: The log has had no room for `FLEET_SPARSE_FAILOVER_S`, for which pushes wait as well.
        """
        if opening.num_bytes > MAX_RECORDED_BYTES:
            opening = msgspec.structs.replace(opening, contributions=())
        await self._appends.append(partial(self._note, opening, encoded_change(opening), job_id, clients))
        await self._appends.sync()

    def _note(self, opening: BarrierOpening, body: bytes, job_id: int, clients: Mapping[int, ClientEpoch]) -> None:
        """Appends the opening of a barrier, in the data thread.

        A registration may have found room in the log before it. An opening of the job before is not appended, nor that
        a worker has passed whose place another process took.
        """
        log = self._shard.log
        assert log is not None, "checked by the caller"
        if log.control.job_id != job_id:
            return
        newest = {index: ClientEpoch(each.client_id, each.client_epoch) for index, each in log.control.workers.items()}
        replaced = {index for index, client in clients.items() if newest.get(index) != client}
        if replaced:
            opening = opening.without(replaced)
            body = encoded_change(opening)
        log.note(opening, body)

    def _wake(self, name: str) -> None:
        opened = self._opened.pop(name, None)
        if opened is not None:
            opened.send()
