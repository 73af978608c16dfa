"""Client: the worker's side of the data plane. It pulls and pushes over all shards at once.

Calls build requests, start them on the `IoLoop`, and copy the replies into the caller's arrays in the caller's thread.
A `KeyboardInterrupt` in a caller ends that caller's wait and nothing else.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from fleet_sparse.core.placement import Placement
from fleet_sparse.errors import ErrorCode, FleetSparseError, ProtocolError
from fleet_sparse.settings import Settings
from fleet_sparse.wire.frame_format import Op
from fleet_sparse.wire.row_dtype import RowDtype

from ..rows.row_batch import RowBatch
from ..rows.row_exchange import RowAsk, RowChange
from .call import Call
from .channel import Channel
from .io_loop import IoLoop
from .lane import MAX_TABLES
from .plain_rows import PlainRows
from .request import Request
from .requests import DenseUpdate, Requests
from .shard_link import ClientIdentity, Outcome, Registration, Resumption
from .table_client import ExtraBlock, TableCall, TableClient, called_in_child

_GRACE_S = 1.0


class Pending:
    """Implements `TableCall`: a call that was started and whose results are outstanding.

    Args:
        io: The I/O loop that it was started on.
        call: The call; None if there is nothing to wait for.
        wants_answers: As `Call`.

    Attributes:
        wants_answers: False for a push, for which `wait` only waits until it is accepted into the window.
    """

    def __init__(self, io: IoLoop, call: Call | None, wants_answers: bool) -> None:
        self._io = io
        self._call = call
        self.wants_answers = wants_answers
        self._extra: list[ExtraBlock] = []
        self._error: FleetSparseError | None = None

    def wait(self) -> list[ExtraBlock]:
        """As `TableCall`."""
        if self._error is not None:
            raise self._error
        call = self._call
        if call is not None:
            try:
                if call.num_missing or call.error is not None:
                    self._io.wait(call)
                if call.outcomes:
                    _fill(call.outcomes, self._extra)
            except FleetSparseError as error:
                self._error = error
                raise
            except BaseException:
                self._error = FleetSparseError(
                    "client: an earlier wait for this call was interrupted, and its results were dropped. Repeat a "
                    "pull; a push is sent nevertheless, flush() waits for it"
                )
                raise
            finally:
                self._call = None  # the arrays are not needed any more
        return self._extra

    def wait_accepted(self) -> None:
        """As `TableCall`."""
        if self._call is not None and not self._call.is_accepted:
            self._io.wait_accepted(self._call)

    def abandon(self) -> None:
        """As `TableCall`."""
        call, self._call = self._call, None
        if call is not None:
            self._io.abandon(call)


class Client(TableClient):
    """Implements `TableClient` by frames to pservers.

    A push returns once it is accepted into a window of pushes that wait for their ack; if it fails later, the next
    call of any kind raises its error, once. After a push whose fate is unknown (`ShardUnavailable`) every call that
    needs its shard fails.

    Args:
        channel: Channel to the shards; `close` closes it.
        identity: Identity that no other client has.
        registrations: Registrations of all shards, in order.
        placement: Placement of ids on shards.
        settings: Deadlines and bounds.

    Raises:
        ValueError: These do not describe the same number of shards, or not the same placement.
    """

    def __init__(
        self,
        channel: Channel,
        identity: ClientIdentity,
        registrations: Sequence[Registration],
        placement: Placement,
        settings: Settings,
    ) -> None:
        _check_shards(registrations, placement)
        self._io = IoLoop(channel, identity, registrations, settings)  # constant after construction, to `_num_forks`
        rows_dtype = RowDtype[settings.rows_dtype.upper()]
        super().__init__(placement, rows_dtype, settings.max_frame_bytes, self._io)
        self._has_lane = self._io.has_lane and rows_dtype is RowDtype.FLOAT32
        self._close_s = max(2 * settings.deadline_s, self._io.patience_s) + _GRACE_S
        self._pid = os.getpid()
        self._num_forks = _Forks.num

        self._closing = threading.Lock()  # held by the thread that closes
        self._closed = False

    # Rows

    def pull(self, batches: Sequence[RowBatch], *, step: int = 0) -> None:
        """As `TableClient`: one frame to each shard carries all batches.

        The rows are received into the values where possible: their contents are undefined until the call returns, and
        after an error or an interrupt, from which on nothing is written to them.
        """
        if self._closed or self._num_forks != _Forks.num or self._io.failures:
            self.check_usable()
        requests = self._plain_requests(Op.PULL, (), batches, step, is_deferred=False)
        if requests is None:
            of_blocks = self._requests(Op.PULL, step=step, to_all=step > 0)
            for batch in batches:
                of_blocks.add_pull(batch)
            requests = of_blocks.build(self.max_frame_bytes)
        if requests:
            call = Call(requests)
            self._io.exchange(call)
            for outcome in call.outcomes:
                if not outcome.request.is_filled:
                    _fill((outcome,), [])
            if self._io.failures:  # of a push, received just now
                self._raise_failure()

    def start_pull(
        self,
        batches: Sequence[RowBatch],
        *,
        step: int = 0,
        early: bool = False,
        owns_memory: bool = False,
        asks: Sequence[RowAsk] = (),
    ) -> TableCall:
        """As `TableClient`."""
        self.check_usable()
        op = Op.PULL_EARLY if early else Op.PULL
        plain = None if asks else self._plain_requests(op, (), batches, step)
        if plain is not None:
            return self._start_call(plain, True, owns_memory)
        return super().start_pull(batches, step=step, early=early, owns_memory=owns_memory, asks=asks)

    def start_update(
        self,
        batches: Sequence[RowBatch],
        dense: Sequence[DenseUpdate],
        pulls: Sequence[RowBatch] | None = None,
        *,
        weight: float = 1.0,
        step: int = 0,
        changes: Sequence[RowChange] = (),
        asks: Sequence[RowAsk] = (),
        raises_earlier: bool = True,
    ) -> TableCall:
        """As `TableClient`: one frame to each shard carries all gradients, which are sent from the arrays themselves.

        Memory that is not written to any more needs no care: until the acks, the client refers to it.
        """
        if self._closed or self._num_forks != _Forks.num or (raises_earlier and self._io.failures):
            self._check(raises_earlier=raises_earlier)
        if not (dense or changes or asks):
            op = Op.PUSH if pulls is None else Op.PUSH_PULL
            plain = self._plain_requests(op, batches, pulls or (), step, weight)
            if plain is not None:
                return self._start_call(plain, pulls is not None)
        return super().start_update(
            *(batches, dense, pulls), weight=weight, step=step, changes=changes, asks=asks, raises_earlier=False
        )

    # The whole client

    def flush(self) -> None:
        """As `TableClient`."""
        self.check_usable()
        self._io.flush()
        self._raise_failure()
        for link in self._io.links:
            if link.failure is not None:
                raise link.failure

    def reach(self, timeout_s: float) -> None:
        """As `TableClient`."""
        self._check_open()
        # One frame to each shard, which is answered when everything sent before it is applied.
        call = Call(self._requests(Op.PULL, to_all=True).build(self.max_frame_bytes))
        self._io.start(call)
        self._io.wait(call, timeout_s)

    def track_pushes(self) -> Callable[[], bool]:
        """As `TableClient`."""
        call = Call([], wants_answers=False, is_flush=True)
        self._io.start(call)
        return lambda: not call.num_missing

    def observe_incarnation(self, shard: int, incarnation: int) -> None:
        """Processes the incarnation of a pserver in a heartbeat: another one than before fails the shard."""
        self._io.observe_incarnation(shard, incarnation)

    @property
    def num_rejoins(self) -> int:
        """As `TableClient`."""
        return self._io.num_rejoins

    def expect(self, shard: int, incarnation: int) -> Resumption:
        """As `IoLoop`."""
        return self._io.expect(shard, incarnation)

    def rejoin(self, shard: int, registration: Registration, num_lost: int) -> None:
        """As `IoLoop`."""
        self._io.rejoin(shard, registration, num_lost)

    def fail(self, shard: int, error: FleetSparseError) -> None:
        """As `IoLoop`."""
        self._io.fail(shard, error)

    def close(self) -> None:
        """As `TableClient`: waits for the acks of all pushes, then ends the connections."""
        if self._num_forks != _Forks.num:
            return  # the parent's connections
        with self._closing:
            if self._closed:
                return
            self._closed = True
            try:
                if not self._io.has_ended:
                    self._io.flush(self._close_s)
            finally:
                self._io.close()
        self._raise_failure()

    def abandon(self) -> None:
        """Ends the connections at once; calls that wait fail."""
        self._closed = True
        self._io.close()

    # The caller's side

    def check_usable(self) -> None:
        """As `TableClient`."""
        if self._closed or self._num_forks != _Forks.num:
            self._check_open()
        if self._io.failures:
            self._raise_failure()

    def _check_open(self) -> None:
        if self._num_forks != _Forks.num:
            raise called_in_child(self._pid)
        if self._closed:
            raise RuntimeError("client: it is closed")

    def _raise_failure(self) -> None:
        with suppress(IndexError):
            raise self._io.failures.popleft()

    def _empty_request(self, op: Op, step: int, shard: int) -> Request:
        return Request(op, step, shard)

    def _newest_step(self) -> int:
        return max(link.step for link in self._io.links)

    def _plain_requests(
        self,
        op: Op,
        pushes: Sequence[RowBatch],
        pulls: Sequence[RowBatch],
        step: int,
        weight: float = 1.0,
        *,
        is_deferred: bool = True,
    ) -> list[Request] | None:
        """Requests for a lane; None if there is no lane, or these rows are not plain."""
        num_tables = len(pushes) + len(pulls)
        if not self._has_lane or num_tables > MAX_TABLES:
            return None
        to_all = step > 0 and op is not Op.PULL_EARLY
        rows = PlainRows(
            op, num_tables, pushes, pulls, self.num_shards, step, weight, to_all, is_deferred and op is not Op.PUSH
        )
        return rows.requests(self.max_frame_bytes)

    def _start(self, requests: Requests[Any], wants_answers: bool = True, *, owns_memory: bool = False) -> TableCall:
        return self._start_call(requests.build(self.max_frame_bytes), wants_answers, owns_memory)

    def _start_call(self, requests: list[Request], wants_answers: bool, owns_memory: bool = False) -> Pending:
        if not requests:
            return Pending(self._io, None, wants_answers)
        call = Call(requests, wants_answers, owns_memory=owns_memory)
        self._io.start(call)
        return Pending(self._io, call, wants_answers)


class _Forks:
    """Counts the forks between the first process and this one."""

    num = 0

    @classmethod
    def count(cls) -> None:
        """Called in every child."""
        cls.num += 1


os.register_at_fork(after_in_child=_Forks.count)


def _check_shards(registrations: Sequence[Registration], placement: Placement) -> None:
    num_shards = {len(registrations), placement.num_shards}
    num_shards |= {registration.num_shards for registration in registrations}
    if len(num_shards) != 1:
        raise ValueError(f"client: registrations and placement have {sorted(num_shards)} shards")
    if [registration.shard for registration in registrations] != list(range(len(registrations))):
        raise ValueError("client: registrations should be those of shards 0, 1, ... in order")
    versions = {registration.placement_version for registration in registrations} | {placement.version}
    if len(versions) != 1:
        raise ValueError(f"client: placement versions differ: {sorted(versions)}")


def _fill(outcomes: Sequence[Outcome], extra: list[ExtraBlock]) -> None:
    """Copies the rows of replies into the arrays that wait for them; their other blocks are added to `extra`."""
    for outcome in outcomes:
        request, reply = outcome.request, outcome.reply
        if request.is_filled:
            continue
        fault = request.fill(reply)
        if fault is not None:
            raise ProtocolError(f"shard {request.shard}: {fault}", code=ErrorCode.MALFORMED)
        if reply is not None and len(reply.blocks) > len(request.outs):
            extra += [ExtraBlock(request.shard, block, request.part) for block in reply.blocks[len(request.outs) :]]
