"""TableClient: what a worker's modes and row sources need of the shards, wherever the shards are."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from fleet_sparse.core.dense_spec import DenseSpec
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.wire.frame_format import Block
from fleet_sparse.wire.row_dtype import RowDtype

from ..rows.deduplicator import UniqueIds
from ..rows.row_batch import RowBatch

if TYPE_CHECKING:
    from .requests import DenseUpdate


class ExtraBlock(NamedTuple):
    """A block of a reply that no array waits for."""

    shard: int
    block: Block


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


class TableClient(Protocol):
    """Pulls and pushes rows and dense values. Safe to use from several threads, but not from a forked child.

    `Client` sends frames to pservers; `EmbeddedClient` calls shards in this process.
    """

    @property
    def rows_dtype(self) -> RowDtype:
        """Dtype in which rows of tables travel; arrays of callers are always float32."""
        ...

    @property
    def max_frame_bytes(self) -> int:
        """Largest frame that is sent, and so a bound for rows that are pulled early."""
        ...

    @property
    def bytes_sent(self) -> int:
        """Bytes sent to the shards."""
        ...

    @property
    def bytes_received(self) -> int:
        """Bytes received from the shards."""
        ...

    @property
    def num_failed_pushes(self) -> int:
        """Number of mutating requests that failed."""
        ...

    @property
    def num_pulled_rows(self) -> int:
        """Number of rows of tables that pulls asked for."""
        ...

    @property
    def num_pushed_rows(self) -> int:
        """Number of rows of tables in pushes."""
        ...

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
            ShardUnavailable: A shard did not answer in time.
            TableMismatch: A shard knows the table with another schema.
            FleetSparseError: An earlier push failed.
        """
        ...

    def count_missing(self, spec: TableSpec, unique: UniqueIds) -> int:
        """Returns how many of the ids have no row after all pushes of this client so far. Raises as `pull`."""
        ...

    def start_pull(
        self, batches: Sequence[RowBatch], *, step: int = 0, early: bool = False, owns_memory: bool = False
    ) -> TableCall:
        """Starts a `pull`.

        Args:
            batches: As of `pull`.
            step: As of `pull`.
            early: For the step after that one, and to be answered at once (op PULL_EARLY).
            owns_memory: The values of the batches are used for nothing else until a wait has returned, and for nothing
                at all if it raised: rows may be received into them at any time.
        """
        ...

    def start_push(self, batches: Sequence[RowBatch], *, step: int = 0) -> TableCall:
        """Starts an update with the gradients of distinct tables; raises as `start_update`."""
        ...

    def start_update(
        self,
        batches: Sequence[RowBatch],
        dense: Sequence[DenseUpdate],
        pulls: Sequence[RowBatch] | None = None,
        *,
        weight: float = 1.0,
        step: int = 0,
    ) -> TableCall:
        """Pushes all gradients of a step; each shard applies its part as a whole or not at all.

        The arrays must not be written to before the push is applied, for which `flush` waits.

        Args:
            batches: Gradients of tables.
            dense: Gradients of dense arrays; new values of those with `outs` are pulled.
            pulls: Rows to pull after that; None if nothing was pulled early either, whose changes the answers contain.
            weight: Weight of this worker's contribution where those of several workers are averaged.
            step: In a job that counts steps, its number: every shard gets its part then, even an empty one.

        Returns:
            The call; if it pulls nothing, its `wait` only waits until it is accepted.

        Raises:
            ValueError: An array has another shape or dtype than the table, or a table occurs twice.
            FleetSparseError: An earlier push failed.
        """
        ...

    def start_prepare(
        self, batches: Sequence[RowBatch], dense: Sequence[DenseUpdate], *, weight: float, step: int
    ) -> TableCall:
        """Starts the first phase of a clipped step: the shards merge its gradients and measure their norms.

        Args:
            batches: As of `start_update`.
            dense: As of `start_update`; `outs` are ignored.
            weight: As of `start_update`.
            step: Number of the step.

        Returns:
            The call; its `wait` returns the sums of squares of each table, and of each segment of each dense array,
            on each shard that has a part of it.
        """
        ...

    def start_commit(
        self,
        factors: Sequence[tuple[TableSpec | DenseSpec, NDArray[np.float32]]],
        dense: Sequence[DenseUpdate],
        pulls: Sequence[RowBatch] = (),
        *,
        step: int,
    ) -> TableCall:
        """Starts the second phase: the gradients are multiplied and applied; then as `start_update`.

        Args:
            factors: For each table `(1,)`, for each dense array one per segment; the same on all workers.
            dense: Dense arrays whose new values are pulled.
            pulls: Rows to pull.
            step: Number of the step.
        """
        ...

    def leave(self) -> int:
        """Leaves the step group, in a job that counts steps, and waits until all workers have left it.

        Returns:
            The newest step of the job; this worker continues with the next one.

        Raises:
            WorkerLost: A worker is gone.
            ShardUnavailable: It took longer than `settings.barrier_s`.
            FleetSparseError: An earlier push failed.
        """
        ...

    def exchange_dense(
        self,
        spec: DenseSpec,
        grads: NDArray[np.float32],
        out: NDArray[np.float32],
        *,
        learning_rate: float,
        optimizer_step: int,
    ) -> None:
        """Pushes gradients `(n,)` of dense values and fills `out` `(n,)` with the values after them."""
        ...

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
        ...

    def assign_dense(self, spec: DenseSpec, values: NDArray[np.float32], *, step: int = 0) -> None:
        """Sets the dense values to `values` `(n,)` and waits until they are set."""
        ...

    def replace_dense(
        self, spec: DenseSpec, values: NDArray[np.float32], states: Sequence[NDArray[np.float32]], optimizer_step: int
    ) -> None:
        """Replaces dense values `(n,)`, each state `(n,)` of their rule and its t; returns when all are replaced."""
        ...

    def flush(self) -> None:
        """Waits until every push so far is applied.

        Raises:
            FleetSparseError: A push failed.
        """
        ...

    def reach(self, timeout_s: float) -> None:
        """Waits until every push so far is applied, even if the answer to one of them waits for other workers.

        Unlike `flush`, it leaves earlier errors for the next call to raise; a push that was refused counts as done.

        Raises:
            ShardUnavailable: A shard did not answer, or was given up before.
            FleetSparseError: It took longer than `timeout_s`.
        """
        ...

    def close(self) -> None:
        """Waits until all pushes are applied, then ends. A second call does nothing, nor does one in a forked child.

        Raises:
            FleetSparseError: A push failed, and no call raised that yet. All is closed nevertheless.
        """
        ...


def called_in_child(pid: int) -> RuntimeError:
    """The error of a call in a forked child of process `pid`, which made the client."""
    return RuntimeError(
        f"client: made in process {pid}, called in its child {os.getpid()}. "
        "Call it in the parent only, or make another one after the fork"
    )
