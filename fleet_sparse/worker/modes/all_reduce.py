"""AllReduceTraining: sync training in which the workers merge the gradients of dense parameters among themselves."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from itertools import count
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from fleet_sparse.core import clip
from fleet_sparse.core.clip import DensePart
from fleet_sparse.core.dense_spec import DenseSpec
from fleet_sparse.core.mode import AVG, Scale
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.errors import FleetSparseError
from fleet_sparse.wire.control import TableState

from ..net.deferred_interrupt import DeferredInterrupt
from ..net.requests import DenseUpdate
from ..rows.early_rows import EarlyRows
from ..rows.row_batch import RowBatch
from .dense_values import write_values
from .step import Progress, QuiescePoint, StepClip
from .sync_async import PserverTraining


class SharedArray(Protocol):
    """An array that every worker of a group has, of one length. All workers make the same calls in the same order."""

    @property
    def values(self) -> NDArray[np.float32]:
        """`(n,)`, this worker's values, changed in place."""
        ...

    def sum(self) -> None:
        """Replaces the values of each worker by the sum over all workers, with the same bits on all of them.

        Raises:
            FleetSparseError: A worker died or did not call it in time; the group cannot be used any more.
        """
        ...

    def broadcast(self, source: int) -> None:
        """Replaces the values of each worker by those of the worker `source`. Raises as `sum`."""
        ...


class WorkerGroup(Protocol):
    """Connects the workers of a job with each other."""

    def share(self, num_values: int) -> SharedArray:
        """Returns a new shared array of zeros."""
        ...

    def close(self) -> None:
        """Ends the connections."""
        ...


class DenseReplica(Protocol):
    """This worker's copy of what the optimizer of an array of dense parameters keeps: values, states and update count.

    No program trains during its calls.
    """

    @property
    def num_floats(self) -> int:
        """Length of what `read` returns."""
        ...

    def read(self) -> NDArray[np.float32]:
        """Returns all of it, bit by bit, as float32 `(num_floats,)`."""
        ...

    def write(self, floats: NDArray[np.float32]) -> None:
        """Replaces all of it by what another worker read."""
        ...


class ReducedProgram(NamedTuple):
    """The program whose dense gradients the workers merge; a job has one."""

    dense: DenseSpec
    tables: tuple[TableSpec, ...]
    clip: StepClip | None
    """A clip by norm, of the tables and the dense array."""


class _RowsClip(NamedTuple):
    """Implements `RowsClip`."""

    tables: tuple[TableSpec, ...]
    factors: Callable[[NDArray[np.float64]], NDArray[np.float32]]


class AllReduceTraining:
    """Implements `Training`: rows are trained on the shards; `update` returns the merged gradients of one dense array.

    A step ends on the shards before the workers add up their dense gradients. So a worker that is slow or evaluates
    delays a request, which has no deadline of a group; and one that died or was refused is found by the shards, before
    any other worker waits for it in the group.

    A worker in `drain(leaves=True)` keeps taking part in the others' steps, with no rows, zeros and weight 0, until all
    workers are there. Then a worker that trained all steps sends its replica to those that did not.

    Args:
        rows: Trains the rows, in sync mode.
        group: The workers of the job.
        worker_index: Index of this worker.
        num_workers: Number of workers.
        scale: How gradients are merged.
        program: What the program trains.
        replica: This worker's copy of the dense array.
    """

    def __init__(
        self,
        rows: PserverTraining,
        group: WorkerGroup,
        worker_index: int,
        num_workers: int,
        scale: Scale,
        program: ReducedProgram,
        replica: DenseReplica,
    ) -> None:
        self._rows = rows
        self._group = group
        self._index = worker_index
        self._num_workers = num_workers
        self._is_averaged = scale == AVG
        self._program = program
        self._num_values = program.dense.num_values
        self._replica = replica
        # Gradients, weight, numbers of workers that leave and that train, and for each 1 if its replica has all steps.
        self._shared = group.share(self._num_values + 3 + num_workers)
        self._stepping = threading.Lock()  # held for a whole step: the group's calls have one order
        self._has_all_steps = True

    def note_states(self, states: Iterable[TableState], *, are_replaced: bool = False) -> None:
        """As `Training`."""
        self._rows.note_states(states, are_replaced=are_replaced)

    def pull(self, batches: Sequence[RowBatch]) -> None:
        """As `Training`."""
        self._rows.pull(batches)

    def prefetch(
        self, batches: Sequence[RowBatch], early: EarlyRows | None = None, coming: EarlyRows | None = None
    ) -> None:
        """As `Training`."""
        self._rows.prefetch(batches, early, coming)

    def abandon_early(self, early: EarlyRows) -> None:
        """As `Training`."""
        self._rows.abandon_early(early)

    def update(
        self,
        rows: Sequence[RowBatch],
        dense: Sequence[DenseUpdate],
        num_examples: float,
        clip: StepClip | None = None,
        position: str | None = "",
    ) -> None:
        """As `Training`, but `dense`, one update, returns merged gradients: the caller's optimizer applies them.

        Raises:
            FleetSparseError: As the `update` of the rows; or the group failed; or this worker's last barrier was
                interrupted, so that it missed steps.
        """
        (update,) = dense
        with self._stepping:
            if not self._has_all_steps:
                raise FleetSparseError(
                    "exe.run: this worker missed steps of the others in a barrier or a save that did not end. Call "
                    "fleet.barrier_worker() or fleet.stop_worker() to rejoin"
                )
            self._exchange(rows, update.grads, num_examples, position)
            write_values(self._merged, 0, update.outs or ())

    def skip(
        self,
        rows: Sequence[RowBatch],
        dense: Sequence[DenseUpdate],
        clip: StepClip | None = None,
        position: str | None = "",
    ) -> None:
        """Raises an error; nothing calls it, because `read_strategy` refuses a limit on the ids of a table."""
        raise FleetSparseError("exe.run: a step cannot be skipped with dense='all_reduce'")

    def pull_dense(self, spec: DenseSpec, out: NDArray[np.float32]) -> None:
        """As `Training`."""
        self._rows.pull_dense(spec, out)

    def progress(self) -> Progress:
        """As `Training`."""
        return self._rows.progress()

    def quiesce(self, timeout_s: float, *, is_coordinator: bool = False) -> AbstractContextManager[QuiescePoint]:
        """As `Training`."""
        return self._rows.quiesce(timeout_s, is_coordinator=is_coordinator)

    def drain(self, *, leaves: bool = False) -> None:
        """As `Training`; a worker that leaves has the job's dense values afterwards.

        Ctrl-C does not divide a step of the others, which wait for this worker's part of it: it waits for its end.
        """
        self._rows.drain()
        if not leaves:
            return
        with self._stepping:
            # Without caches a worker makes one step at least.
            num_parts, num_leaving = max(self._rows.held.num_parts, 1), 0
            for number in count(1):
                with DeferredInterrupt():
                    num_leaving = self._take_part(leaves=number >= num_parts)
                if num_leaving == self._num_workers:
                    break
            self._rows.held.note_sent()

    @property
    def holds_back(self) -> bool:
        """As `Training`."""
        return self._rows.held.holds_back

    def send_held(self) -> bool:
        """As `Training`.

        Raises:
            FleetSparseError: As `update`; or another worker trained meanwhile, of whose step this one lacks the dense
                values.
        """

        def make_part() -> None:
            with DeferredInterrupt():
                self._take_part(leaves=False)

        with self._stepping:
            has_sent = self._rows.held.send(make_part)
            if has_sent and not self._has_all_steps:
                raise FleetSparseError(
                    "save: another worker trained a step while this one sent the updates that its row caches held. "
                    "Call it on all workers after the same step, or after fleet.barrier_worker(), and call that one now"
                )
        return has_sent

    @property
    def num_trained(self) -> int:
        """As `Training`."""
        return self._rows.num_trained

    def note_trained(self, num_trained: int) -> None:
        """As `Training`."""
        self._rows.note_trained(num_trained)

    def end_pass(self) -> None:
        """As `Training`."""
        self._rows.end_pass()

    def _take_part(self, *, leaves: bool) -> int:
        """One step without gradients; if all leave, replicas become equal. Returns how many workers leave."""
        self._exchange((), None, 0.0, None, leaves=leaves)
        first_flag = self._num_values + 3
        num_leaving, num_trained = self._shared.values[first_flag - 2 : first_flag]
        if num_trained:
            self._has_all_steps = False
            self._rows.held.num_trained += 1
        if num_leaving == self._num_workers:
            has_all_steps = self._shared.values[first_flag:] > 0
            if not has_all_steps.all():
                self._copy_from(int(np.argmax(has_all_steps)))
            self._has_all_steps = True
        return int(num_leaving)

    def close(self) -> None:
        """As `Training`."""
        self._rows.close()
        self._group.close()

    @property
    def _merged(self) -> NDArray[np.float32]:
        """The merged gradients of the newest step, changed in place."""
        return self._shared.values[: self._num_values]

    def _exchange(
        self,
        rows: Sequence[RowBatch],
        grads: NDArray[np.float32] | None,
        weight: float,
        position: str | None,
        *,
        leaves: bool = False,
    ) -> None:
        """One step of this worker, on the shards and then among the workers; it does not train if `grads` is None."""
        if self._program.clip is None:
            if grads is None and self._rows.held.holds_back:
                self._rows.held.send_part()
            else:
                self._rows.update(rows, (), weight, None, position)
            self._rows.pull(())  # answered when the step is complete
            self._merge(grads, weight, leaves=leaves)
            return

        def factors(squared_norms: NDArray[np.float64]) -> NDArray[np.float32]:
            self._merge(grads, weight, leaves=leaves)
            return self._clip(squared_norms)

        rows_clip = _RowsClip(self._program.tables, factors)
        self._rows.update(rows, (), weight, None, position, rows_clip=rows_clip)

    def _merge(self, grads: NDArray[np.float32] | None, weight: float, *, leaves: bool) -> None:
        """Merges the gradients of all workers, of which each has ended this step on the shards."""
        shared, end = self._shared.values, self._num_values
        if grads is None:
            shared[:end] = 0
        elif weight == 1:
            shared[:end] = grads
        else:
            np.multiply(grads, np.float32(weight), out=shared[:end])
        shared[end] = weight
        shared[end + 1] = leaves
        shared[end + 2] = grads is not None
        shared[end + 3 :] = 0
        shared[end + 3 + self._index] = self._has_all_steps
        self._shared.sum()
        if self._is_averaged and shared[end] not in (0, 1):
            self._merged[:] /= shared[end]

    def _clip(self, squared_norms: NDArray[np.float64]) -> NDArray[np.float32]:
        """Clips the merged gradients; returns the factors of the tables, whose sums of squares are given."""
        assert self._program.clip is not None, "the caller looked"
        part = DensePart(self._program.dense, self._merged)
        factors = self._program.clip.factors(np.concatenate([squared_norms, clip.squared_norms([], [part])]))
        num_tables = len(self._program.tables)
        self._merged[:] = clip.scaled([], [part], factors[num_tables:])[1][0]
        return factors[:num_tables]

    def _copy_from(self, source: int) -> None:
        """Copies the replica of a worker that has all steps to those that do not."""
        copy = self._group.share(self._replica.num_floats)
        if source == self._index:
            copy.values[:] = self._replica.read()
        copy.broadcast(source)
        if not self._has_all_steps:
            self._replica.write(copy.values)
