"""Client: the worker's side of the data plane. It pulls and pushes over all shards at once.

Calls build requests, start them on the `IoLoop`, and copy the replies into the caller's arrays in the caller's thread.
A `KeyboardInterrupt` in a caller ends that caller's wait and nothing else.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

from fleet_sparse.core.dense_spec import DenseSpec
from fleet_sparse.core.placement import Placement
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.errors import ErrorCode, FleetSparseError, ProtocolError
from fleet_sparse.settings import Settings
from fleet_sparse.wire.frame_format import Op
from fleet_sparse.wire.row_dtype import RowDtype

from ..rows.deduplicator import UniqueIds
from ..rows.row_batch import RowBatch, check_distinct
from .call import Call
from .channel import Channel
from .io_loop import IoLoop
from .lane import MAX_TABLES
from .plain_rows import PlainRows
from .request import Request
from .requests import DenseUpdate, Requests, fill
from .shard_link import ClientIdentity, Outcome, Registration
from .table_client import ExtraBlock, called_in_child

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


class Client:
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

    Attributes:
        rows_dtype: Dtype of rows of tables on the wire; arrays of callers are always float32.
        num_shards: Number of shards of the job.
        max_frame_bytes: Largest frame that is sent.
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
        self.rows_dtype = RowDtype[settings.rows_dtype.upper()]  # constant after construction, down to `_num_forks`
        self.num_shards = placement.num_shards
        self.max_frame_bytes = settings.max_frame_bytes
        self._close_s = 2 * settings.deadline_s + _GRACE_S
        self._pid = os.getpid()
        self._num_forks = _Forks.num

        self._closing = threading.Lock()  # held by the thread that closes
        self._closed = False
        self._io = IoLoop(channel, identity, registrations, settings)
        self._has_lane = self._io.has_lane and self.rows_dtype is RowDtype.FLOAT32

    @property
    def bytes_sent(self) -> int:
        """Bytes of all frames sent, retries included."""
        return self._io.bytes_sent

    @property
    def bytes_received(self) -> int:
        """Bytes of all frames received."""
        return self._io.bytes_received

    @property
    def num_failed_pushes(self) -> int:
        """Number of mutating requests that failed, refused or without an answer, and of calls not accepted."""
        return self._io.num_failed_pushes

    @property
    def num_pulled_rows(self) -> int:
        """Number of rows of tables that pulls asked for."""
        return self._io.num_pulled_rows

    @property
    def num_pushed_rows(self) -> int:
        """Number of rows of tables in pushes."""
        return self._io.num_pushed_rows

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Rows

    def pull(self, batches: Sequence[RowBatch], *, step: int = 0) -> None:
        """Fills the values of each batch with its rows, as they are after all pushes of this client so far.

        The rows are received into the values where possible: their contents are undefined until the call returns, and
        after an error or an interrupt, from which on nothing is written to them.

        Args:
            batches: Rows to pull. One frame to each shard carries all of them.
            step: In a job that counts steps, the step that this worker pushes next: the shards answer when the steps
                before it are complete.

        Raises:
            ValueError: An array has another shape or dtype than the table.
            ShardUnavailable: A pserver did not answer in time, or was restarted. The call may be repeated.
            TableMismatch: A pserver knows the table with another schema.
            FleetSparseError: An earlier push failed.
        """
        requests = self._plain_requests(Op.PULL, batches, step, 1.0)
        if requests is None:
            requests = self._pull_requests(batches, Op.PULL, step)
        if requests:
            call = Call(requests)
            self._io.exchange(call)
            _fill(call.outcomes, [])
            if self._io.failures:  # of a push, received just now
                self._raise_failure()

    def count_missing(self, spec: TableSpec, unique: UniqueIds) -> int:
        """Returns how many of the ids have no row after all pushes of this client so far.

        Raises:
            ShardUnavailable, TableMismatch, FleetSparseError: As `pull`.
        """
        self._check_usable()
        requests = self._requests(Op.PULL)
        presence = RowBatch.empty(spec, unique)
        requests.add_pull(presence, presence=True)
        self._start(requests.build(self.max_frame_bytes)).wait()
        return int(np.count_nonzero(presence.values[:, 0] == 0))

    def start_pull(
        self, batches: Sequence[RowBatch], *, step: int = 0, early: bool = False, owns_memory: bool = False
    ) -> Pending:
        """Starts a `pull` without waiting for it.

        Args:
            batches: As of `pull`.
            step: As of `pull`.
            early: For the step after that one, and to be answered at once (op PULL_EARLY).
            owns_memory: The values of the batches are used for nothing else until a wait has returned, and for nothing
                at all if it raised: rows may be received into them at any time.
        """
        requests = self._pull_requests(batches, Op.PULL_EARLY if early else Op.PULL, step)
        return self._start(requests, owns_memory=owns_memory)

    def push(self, batches: Sequence[RowBatch], *, step: int = 0) -> None:
        """Sends gradients; returns when they are accepted into the window.

        The arrays must not be written to before the push is acked: it is sent from them, and perhaps again. `flush`
        waits for that; memory that is not written to any more needs no care.

        Args:
            batches: Gradients of distinct tables. One frame to each shard carries all of them, and is applied as a
                whole or not at all.
            step: Step of this worker.

        Raises:
            ValueError: An array has another shape or dtype than the table, or a table occurs twice.
            ShardUnavailable: The window was full until the deadline, or a shard was given up before.
            FleetSparseError: An earlier push failed.
        """
        self.start_push(batches, step=step).wait()

    def start_push(self, batches: Sequence[RowBatch], *, step: int = 0) -> Pending:
        """Starts a `push`; it will be sent even if the wait for its acceptance is interrupted."""
        check_distinct("push", [batch.spec.name for batch in batches])
        return self.start_update(batches, [], step=step)

    def start_update(
        self,
        batches: Sequence[RowBatch],
        dense: Sequence[DenseUpdate],
        pulls: Sequence[RowBatch] | None = None,
        *,
        weight: float = 1.0,
        step: int = 0,
    ) -> Pending:
        """Sends all gradients of a step in one frame to each shard; its pulls are read after they are applied.

        Args:
            batches: Gradients of tables.
            dense: Gradients of dense arrays; new values of those with `outs` are pulled.
            pulls: Rows to pull; None if nothing was pulled early either, whose changes the answers contain.
            weight: Weight of this worker's contribution where those of several workers are averaged.
            step: In a job that counts steps, its number: every shard gets a frame then.

        Returns:
            The call; if it pulls nothing, its `wait` only waits until it is accepted into the window.

        Raises:
            As `push`.
        """
        if self._closed or self._num_forks != _Forks.num or self._io.failures:
            self._check_usable()
        wants_answers = pulls is not None
        for update in dense:
            wants_answers |= update.outs is not None
        if not wants_answers and not dense:
            plain = self._plain_requests(Op.PUSH, batches, step, weight)
            if plain is not None:
                return self._start(plain, wants_answers)
        op = Op.PUSH_PULL if wants_answers else Op.PUSH
        requests = self._requests(op, step=step, weight=weight, to_all=step > 0)
        for batch in batches:
            requests.add_push(batch)
        for update in dense:
            requests.add_dense_push(update)
        if wants_answers:
            _add_pulls(requests, dense, pulls or ())
        return self._start(requests.build(self.max_frame_bytes), wants_answers)

    def start_prepare(
        self, batches: Sequence[RowBatch], dense: Sequence[DenseUpdate], *, weight: float, step: int
    ) -> Pending:
        """Sends the first phase of a clipped step: the shards merge its gradients and measure their norms.

        Args:
            batches: As of `start_update`.
            dense: As of `start_update`; `outs` are ignored.
            weight: As of `start_update`.
            step: Number of the step.

        Returns:
            The call; its `wait` returns the sums of squares of each table, and of each segment of each dense array,
            on each shard that has a part of it.
        """
        self._check_usable()
        requests = self._requests(Op.PREPARE, step=step, weight=weight, to_all=True)
        for batch in batches:
            requests.add_push(batch)
        for update in dense:
            requests.add_dense_push(update)
        return self._start(requests.build(self.max_frame_bytes))

    def start_commit(
        self,
        factors: Sequence[tuple[TableSpec | DenseSpec, NDArray[np.float32]]],
        dense: Sequence[DenseUpdate],
        pulls: Sequence[RowBatch] = (),
        *,
        step: int,
    ) -> Pending:
        """Sends the second phase: the gradients are multiplied and applied; then as `start_update`.

        Args:
            factors: For each table `(1,)`, for each dense array one per segment; the same on all workers.
            dense: Dense arrays whose new values are pulled.
            pulls: Rows to pull.
            step: Number of the step.
        """
        self._check_usable()
        requests = self._requests(Op.COMMIT, step=step, to_all=True)
        for spec, values in factors:
            requests.add_factors(spec, values)
        _add_pulls(requests, dense, pulls)
        return self._start(requests.build(self.max_frame_bytes))

    def leave(self) -> int:
        """Leaves the step group, in a job that counts steps, and waits until all workers have left it.

        Returns:
            The newest step of the job; this worker continues with the next one.

        Raises:
            WorkerLost: A worker is gone.
            ShardUnavailable: A pserver is gone, or it took longer than `settings.barrier_s`.
            FleetSparseError: An earlier push failed.
        """
        self._check_usable()
        self._start(self._requests(Op.LEAVE, to_all=True).build(self.max_frame_bytes)).wait()
        return max(link.step for link in self._io.links)

    # Dense values

    def exchange_dense(
        self,
        spec: DenseSpec,
        grads: NDArray[np.float32],
        out: NDArray[np.float32],
        *,
        learning_rate: float,
        optimizer_step: int,
    ) -> None:
        """Pushes gradients `(n,)` of dense values and fills `out` `(n,)` with the values after them.

        Raises:
            ValueError: An array has another shape or dtype.
            ShardUnavailable, TableMismatch, PushRefused: As `pull` and `push`; it is unknown on which shards the
                gradients were applied.
        """
        self.start_update([], [DenseUpdate(spec, grads, [out], learning_rate, optimizer_step)]).wait()

    def pull_dense(
        self,
        spec: DenseSpec,
        out: NDArray[np.float32],
        *,
        states: Sequence[NDArray[np.float32]] = (),
        step: int = 0,
    ) -> None:
        """Fills `out` `(n,)` with the dense values, and each of `states` `(n,)` with one state of their rule, in order.

        Raises:
            ProtocolError: With code NOT_READY: the values were never assigned.
            ValueError, ShardUnavailable, TableMismatch: As `pull`.
        """
        self._check_usable()
        requests = Requests(Op.PULL, self.num_shards, step=step)
        for number, array in enumerate([out, *states]):
            requests.add_dense_pull(spec, [array], state=number)
        self._start(requests.build(self.max_frame_bytes)).wait()

    def assign_dense(self, spec: DenseSpec, values: NDArray[np.float32], *, step: int = 0) -> None:
        """Sets the dense values to `values` `(n,)` and waits until they are set.

        Raises:
            ValueError, ShardUnavailable, TableMismatch: As `exchange_dense`.
        """
        self._check_usable()
        requests = Requests(Op.ASSIGN, self.num_shards, step=step)
        requests.add_dense_assign(spec, values)
        self._start(requests.build(self.max_frame_bytes)).wait()

    def replace_dense(
        self, spec: DenseSpec, values: NDArray[np.float32], states: Sequence[NDArray[np.float32]], optimizer_step: int
    ) -> None:
        """Replaces dense values `(n,)`, each state `(n,)` of their rule and its t; returns when all are replaced.

        Raises:
            PushRefused: A value is not finite.
            ValueError, ShardUnavailable, TableMismatch: As `exchange_dense`.
        """
        self._check_usable()
        requests = Requests(Op.ASSIGN, self.num_shards)
        requests.add_dense_replacement(spec, values, states, optimizer_step)
        self._start(requests.build(self.max_frame_bytes)).wait()

    # The whole client

    def flush(self) -> None:
        """Waits until every push so far is applied.

        Raises:
            FleetSparseError: A push failed, or a shard was given up.
        """
        self._check_usable()
        self._io.flush()
        self._raise_failure()
        for link in self._io.links:
            if link.failure is not None:
                raise link.failure

    def reach(self, timeout_s: float) -> None:
        """Waits until every push so far is applied, even if the answer to one of them waits for other workers.

        Unlike `flush`, it leaves earlier errors for the next call to raise; a push that was refused counts as done.

        Raises:
            ShardUnavailable: A pserver did not answer, or a shard was given up before.
            FleetSparseError: It took longer than `timeout_s`.
        """
        self._check_open()
        # One frame to each shard, which is answered when everything sent before it is applied.
        call = Call(self._requests(Op.PULL, to_all=True).build(self.max_frame_bytes))
        self._io.start(call)
        self._io.wait(call, timeout_s)

    def observe_incarnation(self, shard: int, incarnation: int) -> None:
        """Processes the incarnation of a pserver in a heartbeat: another one than before fails the shard."""
        self._io.observe_incarnation(shard, incarnation)

    def close(self) -> None:
        """Waits for the acks of all pushes, then ends the connections. A second call does nothing.

        Raises:
            FleetSparseError: A push failed, and no call raised that yet. All is closed nevertheless.
        """
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

    def _check_usable(self) -> None:
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

    def _requests(self, op: Op, *, step: int = 0, weight: float = 1.0, to_all: bool = False) -> Requests:
        return Requests(op, self.num_shards, step=step, rows_dtype=self.rows_dtype, weight=weight, to_all=to_all)

    def _pull_requests(self, batches: Sequence[RowBatch], op: Op, step: int) -> list[Request]:
        if self._closed or self._num_forks != _Forks.num or self._io.failures:
            self._check_usable()
        # All shards are asked: this worker's next push goes to all, and one that lags behind could not accept it yet.
        to_all = step > 0 and op is Op.PULL
        requests = Requests(op, self.num_shards, step=step, rows_dtype=self.rows_dtype, to_all=to_all)
        for batch in batches:
            requests.add_pull(batch)
        return requests.build(self.max_frame_bytes)

    def _plain_requests(self, op: Op, batches: Sequence[RowBatch], step: int, weight: float) -> list[Request] | None:
        """Requests for a lane; None if there is no lane, or these rows are not plain."""
        if self._closed or self._num_forks != _Forks.num or self._io.failures:
            self._check_usable()
        if not self._has_lane or len(batches) > MAX_TABLES:
            return None
        return PlainRows(op, batches, self.num_shards, step, weight, step > 0).requests(self.max_frame_bytes)

    def _start(self, requests: list[Request], wants_answers: bool = True, *, owns_memory: bool = False) -> Pending:
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


def _add_pulls(requests: Requests, dense: Sequence[DenseUpdate], pulls: Sequence[RowBatch]) -> None:
    for update in dense:
        if update.outs is not None:
            requests.add_dense_pull(update.spec, update.outs)
    for batch in pulls:
        requests.add_pull(batch)


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
        fault = fill(outcome)
        if fault is not None:
            raise ProtocolError(f"shard {request.shard}: {fault}", code=ErrorCode.MALFORMED)
        if reply is not None and len(reply.blocks) > len(request.outs):
            extra += [ExtraBlock(request.shard, block) for block in reply.blocks[len(request.outs) :]]
