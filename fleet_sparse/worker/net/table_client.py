"""TableClient: the calls of a worker's modes and row sources on the shards, wherever the shards are."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from fleet_sparse.core.dense_spec import DenseSpec
from fleet_sparse.core.placement import Placement
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.errors import FleetSparseError
from fleet_sparse.wire.frame_format import Block, Op
from fleet_sparse.wire.row_dtype import RowDtype

from ..rows.deduplicator import UniqueIds
from ..rows.row_batch import RowBatch, check_distinct
from ..rows.row_exchange import RowAsk, RowChange
from .deferred_interrupt import DeferredInterrupt
from .requests import DenseUpdate, Requests


class ExtraBlock(NamedTuple):
    """A block of a reply that no array waits for."""

    shard: int
    block: Block
    part: int = 0
    """Number of the answer, if the request to the shard had to be divided."""


class TableCall(Protocol):
    """A call that was started and whose results may be outstanding."""

    @property
    def wants_answers(self) -> bool:
        """False for a push, for which `wait` only waits until it is accepted."""
        ...

    def wait(self) -> Sequence[ExtraBlock]:
        """Waits for all answers and fills the arrays of the call; a second call returns or raises the same.

        After a wait that was interrupted the results are not kept, and a second call raises at once.

        Returns:
            Blocks of the answers that no array of the call receives: of an update, the early-pulled rows that have
            changed since, with ids; of `start_prepare`, sums of squares.

        Raises:
            FleetSparseError: As the call that started it; or an earlier wait was interrupted.
        """
        ...

    def wait_accepted(self) -> None:
        """Waits until a call is accepted, and what it pushes will be sent; its answers may still be missing.

        Ctrl-C ends the wait, also where it is deferred: what the call pushes is sent when there is room.

        Raises:
            ShardUnavailable: The window was full until the deadline, or a shard was given up: nothing of it is sent.
            FleetSparseError: The client is closed.
        """
        ...

    def abandon(self) -> None:
        """Drops the results, which the caller no longer needs. Arrays are released once the shards have answered.

        A push is applied nevertheless; if it fails, the next call of the client raises its error.
        """
        ...


class Traffic(Protocol):
    """Counters of a client."""

    bytes_sent: int
    bytes_received: int
    num_failed_pushes: int
    num_pulled_rows: int
    num_pushed_rows: int


class TableClient(ABC):
    """Pulls and pushes rows and dense values. Safe to use from several threads, but not from a forked child.

    A subclass answers requests: `Client` sends them to pservers in frames, `EmbeddedClient` calls shards in this
    process.

    Args:
        placement: Placement of rows and dense values on the shards of the job.
        rows_dtype: Dtype in which rows of tables travel; arrays of callers are always float32.
        max_frame_bytes: Largest frame that is sent, and so a bound for rows that are pulled early.
        traffic: Counters, which the subclass keeps.

    Attributes:
        num_shards: Number of shards.
        rows_dtype: As given; so is the next one.
    """

    def __init__(self, placement: Placement, rows_dtype: RowDtype, max_frame_bytes: int, traffic: Traffic) -> None:
        self.num_shards = placement.num_shards  # constant after construction, as the next four
        self._placement_version = placement.version
        self.rows_dtype = rows_dtype
        self.max_frame_bytes = max_frame_bytes
        self._traffic = traffic
        self._is_leaving = False  # it began to leave the step group, and has not heard that all others did

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def bytes_sent(self) -> int:
        """Bytes sent to the shards, retries included."""
        return self._traffic.bytes_sent

    @property
    def bytes_received(self) -> int:
        """Bytes received from the shards."""
        return self._traffic.bytes_received

    @property
    def num_failed_pushes(self) -> int:
        """Number of mutating requests that were refused, had no answer or were lost, and of calls not accepted."""
        return self._traffic.num_failed_pushes

    @property
    def num_rejoins(self) -> int:
        """Number of times that it continued with a shard that was started again."""
        return 0

    @property
    def num_pulled_rows(self) -> int:
        """Number of rows of tables that pulls asked for."""
        return self._traffic.num_pulled_rows

    @property
    def num_pushed_rows(self) -> int:
        """Number of rows of tables in pushes."""
        return self._traffic.num_pushed_rows

    # Rows

    def pull(self, batches: Sequence[RowBatch], *, step: int = 0) -> None:
        """Fills the values of each batch with its rows, as they are after all pushes of this client so far.

        The contents of the values are undefined until the call returns. After an error or an interrupt nothing is
        written to them.

        Args:
            batches: Rows to pull.
            step: In a job that counts steps, the step that this worker pushes next: the shards answer when the steps
                before it are complete.

        Raises:
            ValueError: An array has another shape or dtype than the table.
            ShardUnavailable: A shard did not answer in time, or was restarted. The call may be repeated.
            TableMismatch: A shard knows the table with another schema.
            FleetSparseError: An earlier push failed.
        """
        self.start_pull(batches, step=step).wait()

    def count_missing(self, spec: TableSpec, unique: UniqueIds) -> int:
        """Returns how many of the ids have no row after all pushes of this client so far. Raises as `pull`."""
        self.check_usable()
        presence = RowBatch.empty(spec, unique)
        requests = self._requests(Op.PULL)
        requests.add_pull(presence, presence=True)
        self._start(requests).wait()
        return int(np.count_nonzero(presence.values[:, 0] == 0))

    def start_pull(
        self,
        batches: Sequence[RowBatch],
        *,
        step: int = 0,
        early: bool = False,
        owns_memory: bool = False,
        asks: Sequence[RowAsk] = (),
    ) -> TableCall:
        """Starts a `pull`.

        Args:
            batches: As in `pull`.
            step: As in `pull`.
            early: For the step after that one, and to be answered at once (op PULL_EARLY).
            owns_memory: The values of the batches are used for nothing else until a wait has returned, and for nothing
                at all if it raised: rows may be received into them at any time.
            asks: Asks about copies of rows; the extra blocks of the call are their answers.
        """
        self.check_usable()
        # All shards are asked: this worker's next push goes to all, and one that lags behind could not accept it yet.
        requests = self._requests(Op.PULL_EARLY if early else Op.PULL, step=step, to_all=step > 0 and not early)
        for batch in batches:
            requests.add_pull(batch)
        for ask in asks:  # last: there is no memory for their answers, which follow the others
            requests.add_ask(ask)
        return self._start(requests, owns_memory=owns_memory)

    def push(self, batches: Sequence[RowBatch], *, step: int = 0) -> None:
        """Pushes gradients of distinct tables; returns when they are accepted. Raises as `start_update`."""
        self.start_push(batches, step=step).wait()

    def start_push(self, batches: Sequence[RowBatch], *, step: int = 0) -> TableCall:
        """Starts an update with the gradients of distinct tables; raises as `start_update`.

        It will be applied even if the wait for its acceptance is interrupted.
        """
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
        changes: Sequence[RowChange] = (),
        asks: Sequence[RowAsk] = (),
        raises_earlier: bool = True,
    ) -> TableCall:
        """Pushes all gradients of a step; each shard applies its part as a whole or not at all.

        The arrays must not be written to before the push is applied, for which `flush` waits.

        Args:
            batches: Gradients of distinct tables.
            dense: Gradients of dense arrays; new values of those with `outs` are pulled.
            pulls: Rows to pull after that; None if nothing was pulled early either, whose changes the answers contain.
            weight: Weight of this worker's contribution where those of several workers are averaged.
            step: In a job that counts steps, its number: every shard gets its part then, even an empty one.
            changes: Changes of rows that this worker caches.
            asks: As in `start_pull`; only with `pulls`.
            raises_earlier: False to leave the errors of earlier pushes for the next call.

        Returns:
            The call; if it pulls nothing, its `wait` only waits until it is accepted.

        Raises:
            ValueError: An array has another shape or dtype than the table, or a table occurs twice.
            ShardUnavailable: The window was full until the deadline, or a shard was given up before.
            FleetSparseError: An earlier push failed.
        """
        self._check(raises_earlier=raises_earlier)
        wants_answers = pulls is not None
        for update in dense:
            wants_answers |= update.outs is not None
        op = Op.PUSH_PULL if wants_answers else Op.PUSH
        requests = self._requests(op, step=step, weight=weight, to_all=step > 0)
        for batch in batches:
            requests.add_push(batch)
        for change in changes:
            requests.add_change(change)
        for update in dense:
            requests.add_dense_push(update)
        _add_pulls(requests, dense, pulls or ())
        for ask in asks:
            requests.add_ask(ask)
        return self._start(requests, wants_answers)

    def start_changes(self, changes: Sequence[RowChange], *, step: int = 0) -> TableCall:
        """Pushes changes of rows alone, as `start_update`. Errors of earlier pushes are left for the next call."""
        self._check_open()
        requests = self._requests(Op.PUSH, step=step, to_all=step > 0)
        for change in changes:
            requests.add_change(change)
        return self._start(requests, wants_answers=False)

    def start_prepare(
        self, batches: Sequence[RowBatch], dense: Sequence[DenseUpdate], *, weight: float, step: int
    ) -> TableCall:
        """Starts the first phase of a clipped step: the shards merge its gradients and measure their norms.

        Args:
            batches: As in `start_update`.
            dense: As in `start_update`; `outs` are ignored.
            weight: As in `start_update`.
            step: Number of the step.

        Returns:
            The call; its `wait` returns the sums of squares of each table, and of each segment of each dense array,
            on each shard that has a part of it.
        """
        self.check_usable()
        requests = self._requests(Op.PREPARE, step=step, weight=weight, to_all=True)
        for batch in batches:
            requests.add_push(batch)
        for update in dense:
            requests.add_dense_push(update)
        return self._start(requests)

    def start_commit(
        self,
        factors: Sequence[tuple[TableSpec | DenseSpec, NDArray[np.float32]]],
        dense: Sequence[DenseUpdate],
        pulls: Sequence[RowBatch] = (),
        *,
        step: int,
        raises_earlier: bool = True,
    ) -> TableCall:
        """Starts the second phase: the gradients are multiplied and applied; then as `start_update`.

        Args:
            factors: For each table `(1,)`, for each dense array one per segment; the same on all workers.
            dense: Dense arrays whose new values are pulled.
            pulls: Rows to pull.
            step: Number of the step.
            raises_earlier: As in `start_update`.
        """
        self._check(raises_earlier=raises_earlier)
        requests = self._requests(Op.COMMIT, step=step, to_all=True)
        for spec, values in factors:
            requests.add_factors(spec, values)
        _add_pulls(requests, dense, pulls)
        return self._start(requests)

    def leave(self) -> int:
        """Leaves the step group, in a job that counts steps, and waits until all workers have left it.

        After Ctrl-C it is called again, and waits for the same.

        Returns:
            The newest step of the job; this worker continues with the next one.

        Raises:
            WorkerLost: A worker is gone.
            ShardUnavailable: A shard is gone, or it took longer than `settings.barrier_s`.
            FleetSparseError: An earlier push failed.
        """
        self.check_usable()
        try:
            if self._is_leaving:  # Ctrl-C ended the wait of an earlier call
                self.flush()
            else:
                with DeferredInterrupt():
                    call = self._start(self._requests(Op.LEAVE, to_all=True))
                    self._is_leaving = True
                call.wait()
        except FleetSparseError:
            self._is_leaving = False
            raise
        self._is_leaving = False
        return self._newest_step()

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
        self.check_usable()
        requests = self._requests(Op.PULL, step=step)
        for number, array in enumerate([out, *states]):
            requests.add_dense_pull(spec, [array], state=number)
        self._start(requests).wait()

    def assign_dense(self, spec: DenseSpec, values: NDArray[np.float32], *, step: int = 0) -> None:
        """Sets the dense values to `values` `(n,)` and waits until they are set. Raises as `exchange_dense`."""
        self.check_usable()
        requests = self._requests(Op.ASSIGN, step=step)
        requests.add_dense_assign(spec, values)
        self._start(requests).wait()

    def replace_dense(
        self, spec: DenseSpec, values: NDArray[np.float32], states: Sequence[NDArray[np.float32]], optimizer_step: int
    ) -> None:
        """Replaces dense values `(n,)`, each state `(n,)` of their rule and its t; returns when all are replaced.

        Errors of earlier pushes are left for the next call to raise: this one may be called on another thread.

        Raises:
            PushRefused: A value is not finite.
            ValueError, ShardUnavailable, TableMismatch: As `exchange_dense`.
        """
        self._check_open()
        requests = self._requests(Op.ASSIGN)
        requests.add_dense_replacement(spec, values, states, optimizer_step)
        self._start(requests).wait()

    # The whole client

    def _check(self, *, raises_earlier: bool) -> None:
        if raises_earlier:
            self.check_usable()
        else:
            self._check_open()

    @abstractmethod
    def check_usable(self) -> None:
        """Raises the error of an earlier push, as the next call would before it does anything.

        Raises:
            FleetSparseError: An earlier push failed, and no call has raised its error yet.
            RuntimeError: The client is closed, or belongs to the process that forked this one.
        """

    @abstractmethod
    def flush(self) -> None:
        """Waits until every push so far is applied.

        Raises:
            FleetSparseError: A push failed, or a shard was given up.
        """

    @abstractmethod
    def reach(self, timeout_s: float) -> None:
        """Waits until every push so far is applied, even if the answer to one of them waits for other workers.

        Unlike `flush`, it leaves earlier errors for the next call to raise; a push that was refused counts as done.

        Raises:
            ShardUnavailable: A shard did not answer, or was given up before.
            FleetSparseError: It took longer than `timeout_s`.
        """

    @abstractmethod
    def track_pushes(self) -> Callable[[], bool]:
        """Returns a function that tells, at once, whether every push so far was applied, refused or lost.

        Once it returns True, `num_failed_pushes` has those that were not applied.
        """

    @abstractmethod
    def close(self) -> None:
        """Waits until all pushes are applied, then ends. A second call does nothing, nor does one in a forked child.

        Raises:
            FleetSparseError: A push failed, and no call raised that yet. All is closed nevertheless.
        """

    # How requests are answered

    @abstractmethod
    def _check_open(self) -> None:
        """Raises if the client is closed, or belongs to the process that forked this one."""

    @abstractmethod
    def _empty_request(self, op: Op, step: int, shard: int) -> Any:
        """Returns a request without blocks, of the kind that `_start` takes."""

    @abstractmethod
    def _start(self, requests: Requests[Any], wants_answers: bool = True, *, owns_memory: bool = False) -> TableCall:
        """Starts the requests of a call."""

    @abstractmethod
    def _newest_step(self) -> int:
        """Returns the newest complete step that a shard reported."""

    def _requests(self, op: Op, *, step: int = 0, weight: float = 1.0, to_all: bool = False) -> Requests[Any]:
        empty = [self._empty_request(op, step, shard) for shard in range(self.num_shards)]
        return Requests(empty, self.rows_dtype, weight, to_all=to_all, placement_version=self._placement_version)


def _add_pulls(requests: Requests[Any], dense: Sequence[DenseUpdate], pulls: Sequence[RowBatch]) -> None:
    """Asks for what an update reads after it is applied: new dense values, and rows."""
    for update in dense:
        if update.outs is not None:
            requests.add_dense_pull(update.spec, update.outs)
    for batch in pulls:
        requests.add_pull(batch)


def called_in_child(pid: int) -> RuntimeError:
    """The error of a call in a forked child of process `pid`, which made the client."""
    return RuntimeError(
        f"client: made in process {pid}, called in its child {os.getpid()}. "
        "Call it in the parent only, or make another one after the fork"
    )
