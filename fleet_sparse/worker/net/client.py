"""The worker's side of the data plane: pulls and pushes over all shards at once.

Callers build requests, hand them over to `Calls`, and copy the replies into their arrays themselves.
A `KeyboardInterrupt` in a caller ends that caller's wait and nothing else.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleet_sparse.core.dense_spec import DenseSpec
from fleet_sparse.core.placement import Placement
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.errors import ErrorCode, FleetSparseError, ProtocolError
from fleet_sparse.settings import Settings
from fleet_sparse.warm_up import warm_up
from fleet_sparse.wire.frame_format import Block, Op
from fleet_sparse.wire.row_dtype import RowDtype

from ..rows.deduplicator import UniqueIds
from .channel import Channel
from .io_loop import Call, Calls
from .requests import CallBlocks, Outs, column_bytes, fill
from .shard_link import ClientIdentity, Outcome, Registration, Request

_GRACE_S = 1.0


class RowsPush(NamedTuple):
    """Gradients `(k, dim)` of the rows of one table."""

    spec: TableSpec
    unique: UniqueIds
    grads: NDArray[np.float32]
    learning_rate: float
    optimizer_step: int
    """The update rule's t, from 1."""


class DensePush(NamedTuple):
    """Gradients `(n,)` of a dense array, and where its new values go."""

    spec: DenseSpec
    grads: NDArray[np.float32]
    outs: Sequence[NDArray[np.float32]] | None
    """Of any shape, contiguous, with n values together; they go into one after the other. None: they stay there."""
    learning_rate: float
    optimizer_step: int


class Unasked(NamedTuple):
    """A block of a reply that no array waits for."""

    shard: int
    block: Block


class _Wanted(NamedTuple):
    """What a request is tagged with: whose it is, and where its reply goes."""

    call: Call
    shard: int
    where: str
    outs: list[Outs]


class Pending:
    """A call that was handed over and whose answers are still to come."""

    def __init__(self, calls: Calls, call: Call, num_requests: int) -> None:
        self._calls = calls
        self._call = call
        self._answers: SimpleQueue[Any] = SimpleQueue()
        call.answers = self._answers
        self._num_missing = num_requests
        self._unasked: list[Unasked] = []
        self._error: FleetSparseError | None = None

    def wait(self) -> list[Unasked]:
        """Waits for all answers and fills the arrays of the call; a second call returns or raises the same.

        Returns:
            What came besides: of an update, the rows that were pulled ahead and have changed since, as blocks with ids;
            of `start_measure`, sums of squares.

        Raises:
            FleetSparseError: As the call that began it.
        """
        if self._error is not None:
            raise self._error
        try:
            while self._num_missing:
                self._unasked += _fill(self._calls.wait(self._call, self._answers))
                self._num_missing -= 1
        except FleetSparseError as error:
            self._error = error
            raise
        return self._unasked


class Client:
    """Pulls and pushes rows and dense values. Safe to call from several threads, not from a forked child.

    A push returns once it is accepted into a window of pushes that wait for their ack; if it fails later, the next
    call of any kind raises that, once. After a push whose fate is unknown (`ShardUnavailable`) every call that needs
    that shard raises; after one that was refused, training may go on without it.

    Every wait ends within `settings.deadline_s`, with `ShardUnavailable` if a pserver did not answer.

    Args:
        channel: To the shards; the client closes it.
        identity: That no other client has.
        registrations: Of all shards, in order.
        placement: Which shard owns which ids.
        settings: Deadlines and bounds.

    Raises:
        ValueError: These do not describe the same number of shards, or not the same placement.

    Attributes:
        rows_dtype: In which rows of tables travel; arrays of callers are float32 always.
    """

    def __init__(
        self,
        channel: Channel,
        identity: ClientIdentity,
        registrations: Sequence[Registration],
        placement: Placement,
        settings: Settings,
    ) -> None:
        _check_shards(channel, registrations, placement)
        self.rows_dtype = RowDtype[settings.rows_dtype.upper()]  # constant after construction, as all down to `_pid`
        if self.rows_dtype is not RowDtype.FLOAT32:
            warm_up()  # here, not in the first step
        self._settings = settings
        self._num_shards = placement.num_shards
        self._pid = os.getpid()

        self._closing = threading.Lock()  # held by the one that closes
        self._closed = False
        self._calls = Calls(channel, identity, registrations, settings)

    @property
    def num_shards(self) -> int:
        """Of the job."""
        return self._num_shards

    @property
    def max_frame_bytes(self) -> int:
        """Of the settings."""
        return self._settings.max_frame_bytes

    @property
    def bytes_sent(self) -> int:
        """Bytes of all frames sent, retries included."""
        return self._calls.bytes_sent

    @property
    def bytes_received(self) -> int:
        """Bytes of all frames received."""
        return self._calls.bytes_received

    @property
    def num_failed_pushes(self) -> int:
        """Requests to apply something that came to nothing, refused or without an answer, and calls not accepted."""
        return self._calls.num_failed_pushes

    @property
    def num_pulled_rows(self) -> int:
        """Rows of tables that pulls asked for."""
        return self._calls.num_pulled_rows

    @property
    def num_pushed_rows(self) -> int:
        """Rows of tables that pushes carried."""
        return self._calls.num_pushed_rows

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Rows

    def pull(self, pulls: Sequence[tuple[TableSpec, UniqueIds, NDArray[np.float32]]], *, step: int = 0) -> None:
        """Fills each `out` with the rows of its ids, as they are after all pushes of this client so far.

        Args:
            pulls: Table, ids `(k,)`, out `(k, dim)`, written in place. One frame a shard carries all of them.
            step: Of this worker.

        Raises:
            ValueError: An array has another shape or dtype than the table.
            ShardUnavailable: A pserver did not answer in time, or was started again. The call may be repeated.
            TableMismatch: A pserver knows the table otherwise.
            FleetSparseError: Of an earlier push that failed.
        """
        self.start_pull(pulls, step=step).wait()

    def start_pull(
        self,
        pulls: Sequence[tuple[TableSpec, UniqueIds, NDArray[np.float32]]],
        *,
        step: int = 0,
        ahead: bool = False,
    ) -> Pending:
        """As `pull`, without waiting.

        Args:
            pulls: As of `pull`.
            step: In a job that counts steps, the one that this worker pushes next: the shards answer when the steps
                before it are complete.
            ahead: Of the step after that one, and to be answered at once (op PULL_EARLY).
        """
        self._check_usable()
        blocks = CallBlocks(self._num_shards, self.rows_dtype)
        for spec, unique, out in pulls:
            blocks.add_pull(spec, unique, out)
        if ahead:
            return self._start(Op.PULL_EARLY, blocks, step)
        # Every shard is asked: this worker's next push goes to all, and one that lags behind could not take it yet.
        return self._start(Op.PULL, blocks, step, to_all=step > 0)

    def count_missing(self, spec: TableSpec, unique: UniqueIds) -> int:
        """Number of the ids that have no row after all pushes of this client so far.

        Raises:
            ShardUnavailable, TableMismatch, FleetSparseError: As `pull`.
        """
        self._check_usable()
        blocks = CallBlocks(self._num_shards, self.rows_dtype)
        present = np.empty((len(unique.ids), spec.dim), np.float32)
        blocks.add_pull(spec, unique, present, presence=True)
        self._start(Op.PULL, blocks, 0).wait()
        return int(np.count_nonzero(present[:, 0] == 0))

    def push(
        self,
        pushes: Sequence[tuple[TableSpec, UniqueIds, NDArray[np.float32]]],
        *,
        learning_rate: float | Sequence[float],
        optimizer_step: int | Sequence[int],
        step: int = 0,
    ) -> None:
        """Sends gradients; returns when they are accepted into the window.

        The arrays must not be written to before the push is acked: it is sent from them, and perhaps again. `flush`
        waits for that; memory that nobody writes to any more needs no care.

        Args:
            pushes: Table, ids `(k,)`, gradients `(k, dim)`. One frame a shard carries all of them, and is applied as a
                whole or not at all.
            learning_rate: Of the update; one, or one a table.
            optimizer_step: The update rule's t, from 1; one, or one a table.
            step: Of this worker.

        Raises:
            ValueError: An array has another shape or dtype than the table, or a table comes twice.
            ShardUnavailable: There was no room in the window until the deadline, or a shard was given up before.
            FleetSparseError: Of an earlier push that failed.
        """
        self._check_usable()
        rates = [float(rate) for rate in _one_each(learning_rate, len(pushes), "learning_rate")]
        steps = [int(number) for number in _one_each(optimizer_step, len(pushes), "optimizer_step")]
        names = [spec.name for spec, _, _ in pushes]
        if len(set(names)) < len(names):
            raise ValueError(f"push: a table is pushed twice among {names}; sum its gradients first")
        blocks = CallBlocks(self._num_shards, self.rows_dtype)
        for (spec, unique, grads), rate, number in zip(pushes, rates, steps, strict=True):
            blocks.add_push(spec, unique, grads, learning_rate=rate, optimizer_step=number)
        self._send(self._call(Op.PUSH, blocks, step))

    def wait_for_room(self, num_bytes: int) -> None:
        """Waits until a push of so many bytes fits into every window, unless another thread is faster.

        Raises:
            ShardUnavailable: There was no room until the deadline.
            FleetSparseError: Of an earlier push that failed.
        """
        self._check_usable()
        self._calls.wait_for_room(num_bytes)
        self._raise_failure()

    def start_update(
        self,
        rows: Sequence[RowsPush],
        dense: Sequence[DensePush],
        pulls: Sequence[tuple[TableSpec, UniqueIds, NDArray[np.float32]]] | None = None,
        *,
        weight: float = 1.0,
        step: int = 0,
    ) -> Pending | None:
        """Sends all gradients of a step in one frame a shard; what it pulls is read after they are applied.

        Args:
            rows: Of tables.
            dense: Of dense arrays, whose new values are pulled where somewhere is given for them to go.
            pulls: As of `pull`; None if nothing was pulled ahead either, whose changes come with the answers.
            weight: Of this worker's share where the shares of several are averaged.
            step: In a job that counts steps, its number: then every shard gets a frame.

        Returns:
            What waits for the answers; None where nothing is pulled, then it is sent as by `push`.

        Raises:
            As `push`.
        """
        self._check_usable()
        counts = step > 0
        blocks = CallBlocks(self._num_shards, self.rows_dtype)
        _add_pushes(blocks, rows, dense, weight, to_all=counts)
        _add_pulls(blocks, dense, pulls or ())
        if pulls is not None or any(push.outs is not None for push in dense):
            return self._start(Op.PUSH_PULL, blocks, step, to_all=counts)
        self._send(self._call(Op.PUSH, blocks, step, to_all=counts))
        return None

    def start_measure(
        self, rows: Sequence[RowsPush], dense: Sequence[DensePush], *, weight: float, step: int
    ) -> Pending:
        """The first round of a step in two: its gradients are merged on the shards, and measured.

        Args:
            rows: As of `start_update`.
            dense: As of `start_update`; `outs` are not used.
            weight: As of `start_update`.
            step: Its number.

        Returns:
            What waits for the sums of squares: of each table, and of each segment of each dense array, on each shard
            that has a part of it.
        """
        self._check_usable()
        blocks = CallBlocks(self._num_shards, self.rows_dtype)
        _add_pushes(blocks, rows, dense, weight, to_all=True)
        return self._start(Op.PREPARE, blocks, step, to_all=True)

    def start_scale(
        self,
        factors: Sequence[tuple[TableSpec | DenseSpec, NDArray[np.float32]]],
        dense: Sequence[DensePush],
        pulls: Sequence[tuple[TableSpec, UniqueIds, NDArray[np.float32]]] = (),
        *,
        step: int,
    ) -> Pending:
        """The second round: the gradients are multiplied and applied; then as `start_update`.

        Args:
            factors: Of each table `(1,)`, of each dense array one a segment; the same on all workers.
            dense: Whose new values are pulled.
            pulls: As of `pull`.
            step: Its number.
        """
        self._check_usable()
        blocks = CallBlocks(self._num_shards, self.rows_dtype)
        for spec, values in factors:
            blocks.add_factors(spec, values)
        _add_pulls(blocks, dense, pulls)
        return self._start(Op.COMMIT, blocks, step, to_all=True)

    def rest(self) -> int:
        """Tells all shards that this worker rests, in a job that counts steps, and waits until all workers do.

        Returns:
            The newest step of the job; this worker goes on with the next one.

        Raises:
            WorkerLost: A worker is gone.
            ShardUnavailable: A pserver is gone, or it took longer than `settings.barrier_s`.
            FleetSparseError: Of an earlier push that failed.
        """
        self._check_usable()
        self._start(Op.LEAVE, CallBlocks(self._num_shards), 0, to_all=True).wait()
        return max(link.step for link in self._calls.links)

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
            ShardUnavailable, TableMismatch, PushRefused: As `pull` and `push`; it is not known on which shards the
                gradients were applied.
        """
        pending = self.start_update([], [DensePush(spec, grads, [out], learning_rate, optimizer_step)])
        assert pending is not None, "there is a dense array"
        pending.wait()

    def pull_dense(
        self,
        spec: DenseSpec,
        out: NDArray[np.float32],
        *,
        states: Sequence[NDArray[np.float32]] = (),
        step: int = 0,
    ) -> None:
        """Fills `out` `(n,)` with the dense values, and each of `states` `(n,)` with one of their rule's, in order.

        Raises:
            ProtocolError: With code NOT_READY: they were never assigned.
            ValueError, ShardUnavailable, TableMismatch: As `pull`.
        """
        self._check_usable()
        blocks = CallBlocks(self._num_shards)
        for number, array in enumerate([out, *states]):
            blocks.add_dense_pull(spec, [array], state=number)
        self._start(Op.PULL, blocks, step).wait()

    def assign_dense(self, spec: DenseSpec, values: NDArray[np.float32], *, step: int = 0) -> None:
        """Sets the dense values to `values` `(n,)` and waits until it is done.

        Raises:
            ValueError, ShardUnavailable, TableMismatch: As `exchange_dense`.
        """
        self._check_usable()
        blocks = CallBlocks(self._num_shards)
        blocks.add_dense_assign(spec, values)
        self._start(Op.ASSIGN, blocks, step).wait()

    # The whole

    def flush(self) -> None:
        """Waits until every push so far is applied.

        Raises:
            FleetSparseError: Of a push that failed, or of a shard that was given up.
        """
        self._check_usable()
        self._calls.flush()
        self._raise_failure()
        for link in self._calls.links:
            if link.failure is not None:
                raise link.failure

    def reach(self, timeout_s: float) -> None:
        """Waits until every push so far is applied, even where its own answer waits for other workers.

        Unlike `flush`, it leaves what failed before for the next call to raise; a push that was refused counts as done.

        Raises:
            ShardUnavailable: A pserver did not answer, or a shard was given up before.
            FleetSparseError: It took longer than `timeout_s`.
        """
        self._check_open()
        call = self._call(Op.PULL, CallBlocks(self._num_shards), 0, to_all=True)
        call.answers = SimpleQueue()
        num_missing = len(call.requests)  # one frame a shard, which is answered when what was sent before it is applied
        self._calls.hand_over(call)
        for _ in range(num_missing):
            self._calls.wait(call, call.answers, timeout_s)

    def observe_incarnation(self, shard: int, incarnation: int) -> None:
        """Takes in the incarnation of a pserver, as a heartbeat saw it: another one than before fails the shard."""
        self._calls.observe_incarnation(shard, incarnation)

    def close(self) -> None:
        """Waits for the acks of all pushes, then ends the connections. A second call does nothing.

        Raises:
            FleetSparseError: Of a push that failed and that no call raised yet. All is closed nevertheless.
        """
        if os.getpid() != self._pid:
            return  # the parent's connections
        with self._closing:
            if self._closed:
                return
            self._closed = True
            try:
                if not self._calls.has_ended:
                    self._calls.flush(2 * self._settings.deadline_s + _GRACE_S)
            finally:
                self._calls.close()
        self._raise_failure()

    # The caller's side

    def _check_usable(self) -> None:
        self._check_open()
        self._raise_failure()

    def _check_open(self) -> None:
        if os.getpid() != self._pid:
            raise RuntimeError(
                f"client: made in process {self._pid}, called in its child {os.getpid()}. "
                "Call it in the parent only, or make another one after the fork"
            )
        if self._closed:
            raise RuntimeError("client: it is closed")

    def _raise_failure(self) -> None:
        with suppress(IndexError):
            raise self._calls.failures.popleft()

    def _call(self, op: Op, blocks: CallBlocks, step: int, *, to_all: bool = False) -> Call:
        """The requests of a call; with `to_all` a shard that has no block of it gets one without blocks."""
        call = Call(time.monotonic())
        for shard, link in enumerate(self._calls.links):
            frames = blocks.frames(shard, self._settings.max_frame_bytes) or ([[]] if to_all else [])
            for part, pieces in enumerate(frames):
                wanted = _Wanted(call, shard, link.where, [piece.outs for piece in pieces if piece.outs is not None])
                of_frame = [piece.block for piece in pieces]
                num_bytes = sum(map(column_bytes, of_frame))
                request = Request(op, of_frame, num_bytes, step, part, len(frames), wanted)
                call.requests.setdefault(shard, []).append(request)
        return call

    def _start(self, op: Op, blocks: CallBlocks, step: int, *, to_all: bool = False) -> Pending:
        """Hands over a call whose answers are waited for."""
        call = self._call(op, blocks, step, to_all=to_all)
        pending = Pending(self._calls, call, sum(map(len, call.requests.values())))
        if call.requests:
            self._calls.hand_over(call)
        return pending

    def _send(self, call: Call) -> None:
        """Hands over pushes; returns when they are accepted into the window."""
        if call.requests:
            self._calls.send(call)


def _add_pushes(
    blocks: CallBlocks, rows: Sequence[RowsPush], dense: Sequence[DensePush], weight: float, *, to_all: bool
) -> None:
    for spec, unique, grads, rate, number in rows:
        blocks.add_push(spec, unique, grads, learning_rate=rate, optimizer_step=number, weight=weight, to_all=to_all)
    for dense_spec, dense_grads, _, rate, number in dense:
        blocks.add_dense_push(dense_spec, dense_grads, learning_rate=rate, optimizer_step=number, weight=weight)


def _add_pulls(
    blocks: CallBlocks,
    dense: Sequence[DensePush],
    pulls: Sequence[tuple[TableSpec, UniqueIds, NDArray[np.float32]]],
) -> None:
    for push in dense:
        if push.outs is not None:
            blocks.add_dense_pull(push.spec, push.outs)
    for spec, unique, out in pulls:
        blocks.add_pull(spec, unique, out)


def _check_shards(channel: Channel, registrations: Sequence[Registration], placement: Placement) -> None:
    num_shards = {channel.num_shards, len(registrations), placement.num_shards}
    num_shards |= {registration.num_shards for registration in registrations}
    if len(num_shards) != 1:
        raise ValueError(f"client: channel, registrations and placement have {sorted(num_shards)} shards")
    if [registration.shard for registration in registrations] != list(range(len(registrations))):
        raise ValueError("client: registrations should be those of shards 0, 1, ... in order")
    versions = {registration.placement_version for registration in registrations} | {placement.version}
    if len(versions) != 1:
        raise ValueError(f"client: placement versions differ: {sorted(versions)}")


def _one_each(value: Any, count: int, what: str) -> Sequence[Any]:
    if not isinstance(value, Sequence):
        return [value] * count
    if len(value) != count:
        raise ValueError(f"push: {what} has {len(value)} values for {count} tables; give one, or one a table")
    return value


def _fill(outcome: Outcome) -> list[Unasked]:
    """Copies the rows of a reply into the arrays that wait for them; returns the blocks that nothing waits for."""
    wanted: _Wanted = outcome.request.tag
    blocks = [] if outcome.reply is None else outcome.reply.blocks
    fault = fill(outcome.request.blocks, wanted.outs, blocks)
    if fault is not None:
        raise ProtocolError(f"{wanted.where}: {fault}", code=ErrorCode.MALFORMED)
    return [Unasked(wanted.shard, block) for block in blocks[len(wanted.outs) :]]
