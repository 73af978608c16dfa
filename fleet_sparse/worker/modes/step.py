"""Training: how the steps of a worker reach the pservers, and what is common to all modes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from fleet_sparse.core.clip import Clip, DensePart, clipped
from fleet_sparse.core.dense_spec import DenseSpec
from fleet_sparse.core.initializer import FLOAT32_MAX
from fleet_sparse.core.kernels_batch import all_finite
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.errors import PushRefused
from fleet_sparse.wire.control import TableState

from ..net.link_errors import HOW_TO_FIND_NAN
from ..net.requests import DenseUpdate
from ..rows.row_batch import RowBatch

if TYPE_CHECKING:
    from ..rows.early_rows import EarlyRows


def check_finite(rows: Iterable[RowBatch], dense: Iterable[DenseUpdate]) -> None:
    """Refuses gradients that a pserver would refuse, before they change anything that this worker keeps.

    Raises:
        PushRefused: A gradient or learning rate is not finite.
    """
    named = [(f"table {each.spec.name!r}", each.values, each.learning_rate) for each in rows]
    for each in dense:
        largest = max(1.0, *(abs(segment.learning_rate) for segment in each.spec.segments))
        named.append((f"dense {each.spec.name!r}", each.grads, each.learning_rate * largest))
    for where, grads, learning_rate in named:
        if not abs(learning_rate) <= FLOAT32_MAX:
            raise PushRefused(f"{where}: learning rate is {learning_rate}, it should be finite")
        flat = np.ascontiguousarray(grads).reshape(-1)
        if not all_finite(flat):
            number = len(flat) - int(np.count_nonzero(np.isfinite(flat)))
            raise PushRefused(f"{where}: {number} of {len(flat)} gradients are NaN or infinite. {HOW_TO_FIND_NAN}")


class StepClip(NamedTuple):
    """Clipping of the gradients of a step by norm."""

    clip: Clip
    needs_clip: tuple[bool, ...]
    """Elements of the tables, then of the segments of each dense array."""

    def factors(self, squared_norms: NDArray[np.float64]) -> NDArray[np.float32]:
        """Returns the factors that follow from the sums of squares over the whole step, both in that order."""
        return self.clip.factors(squared_norms, self.needs_clip)

    def clipped(
        self, rows: Sequence[RowBatch], dense: Sequence[DenseUpdate]
    ) -> tuple[list[RowBatch], list[DenseUpdate]]:
        """Returns the updates with clipped gradients, if they are the whole gradient of the step."""
        parts = [DensePart(update.spec, update.grads) for update in dense]
        of_rows, of_dense = clipped(self.clip, self.needs_clip, [batch.values for batch in rows], parts)
        return (
            [batch._replace(values=grads) for batch, grads in zip(rows, of_rows, strict=True)],
            [update._replace(grads=grads) for update, grads in zip(dense, of_dense, strict=True)],
        )


class RowsClip(Protocol):
    """The part of a clip by norm that concerns rows, in a step whose dense gradients the workers merge."""

    @property
    def tables(self) -> Sequence[TableSpec]:
        """All tables that the program trains."""
        ...

    def factors(self, squared_norms: NDArray[np.float64]) -> NDArray[np.float32]:
        """Returns the factor of each table. Called once, when every worker's part of the step is on the shards.

        Args:
            squared_norms: For each table the sum of squares of its merged gradient.
        """
        ...


class Progress(NamedTuple):
    """Position of a worker between two of its steps."""

    num_steps: int
    """Number of steps: in sync training with several workers the job's, else the worker's own."""
    position: str | None
    """Position of its loader as JSON; empty if the loader has none; None before the first step."""
    pushed_step: int = 0
    """With a bounded step lag: number on the wire of the newest of these steps."""
    num_untrained: int = 0
    """In how many of the steps this worker trained nothing, to send what row caches held."""


class QuiescePoint(NamedTuple):
    """The result of `Training.quiesce`."""

    passed: Sequence[Progress]
    """Position of this worker; if nothing is held back, its positions after each of its last steps, newest last."""
    holds_back: bool
    """True if pushes are held back."""


class Training(Protocol):
    """How a worker's steps reach the pservers, in one mode. Op callbacks of several threads may call it at once."""

    def note_states(self, states: Iterable[TableState], *, are_replaced: bool = False) -> None:
        """Processes what pservers report about tables when this worker registers.

        Args:
            states: States of the tables.
            are_replaced: True if the tables were replaced, as by a load: everything known about them is forgotten.
        """
        ...

    def pull(self, batches: Sequence[RowBatch]) -> None:
        """Fills each batch with its rows, outside of a step: for evaluation."""
        ...

    def prefetch(
        self, batches: Sequence[RowBatch], early: EarlyRows | None = None, coming: EarlyRows | None = None
    ) -> None:
        """Fills each batch with its rows, for the step that begins here.

        Args:
            batches: Lookups of the step.
            early: Early-pulled rows of this step: `coming` of the step before; None if there are none.
            coming: Rows of the next step, to be pulled early; None if they are not known.
        """
        ...

    def abandon_early(self, early: EarlyRows) -> None:
        """Releases early-pulled rows of a batch that is not run."""
        ...

    def update(
        self,
        rows: Sequence[RowBatch],
        dense: Sequence[DenseUpdate],
        num_examples: float,
        clip: StepClip | None = None,
        position: str = "",
    ) -> None:
        """Ends a step: sends its gradients to where they are applied, and returns new dense values.

        Args:
            rows: Gradients of each table that was trained, with their learning rate.
            dense: Gradients of each dense array that was trained.
            num_examples: Weight of this worker's contribution in an average.
            clip: Clipping by norm: of the whole step in sync, else of this worker's gradient; None for none.
            position: Position of this worker's loader after the step, as JSON; empty if it has none.
        """
        ...

    def skip(
        self,
        rows: Sequence[RowBatch],
        dense: Sequence[DenseUpdate],
        clip: StepClip | None = None,
        position: str = "",
    ) -> None:
        """Ends a step whose gradients this worker refused. Where others wait for it, it counts without them.

        Arguments are those of `update`. In sync training with several workers `dense` returns new values: the others
        changed them.
        """
        ...

    def pull_dense(self, spec: DenseSpec, out: NDArray[np.float32]) -> None:
        """Fills `out` `(spec.num_values,)` with the values of a dense array that this worker should use."""
        ...

    def progress(self) -> Progress:
        """Returns the position of this worker after the newest step that was sent. Waits for nothing."""
        ...

    def quiesce(self, timeout_s: float, *, is_coordinator: bool = False) -> AbstractContextManager[QuiescePoint]:
        """Between two steps of this worker: no push is sent during the block, and all earlier ones are applied.

        In sync training with several workers only the coordinator holds pushes back: while it does not push the next
        step, no other worker can complete it.

        Args:
            timeout_s: Time for earlier pushes to be applied.
            is_coordinator: True for the worker that starts the save; the others are notified of it.

        Raises:
            FleetSparseError: They were not applied. Errors of earlier steps are left for the next call to raise.
        """
        ...

    @property
    def holds_back(self) -> bool:
        """True if pushes are parts of steps, and row caches hold updates that are in none of them."""
        ...

    def send_held(self) -> bool:
        """Sends what row caches hold in steps without gradients, where pushes are parts of steps.

        All workers call it after the same step; then all have sent it when these steps are complete. A worker that has
        made no step since it was sent makes none. Elsewhere `drain` and `quiesce` send it.

        Returns:
            True if this worker made steps, in which others may have trained dense values.

        Raises:
            FleetSparseError: As `update`; or the workers merge dense gradients, and others trained meanwhile.
        """
        ...

    @property
    def num_trained(self) -> int:
        """Number of steps of the job that were trained, as far as this worker knows; 0 unless it `holds_back`.

        While it waits or sends, others may train: workers tell each other at barriers.
        """
        ...

    def note_trained(self, num_trained: int) -> None:
        """Takes over the largest number of trained steps that a worker knows of, at a barrier."""
        ...

    def end_pass(self) -> None:
        """Sends what row caches of this worker hold, at the end of its pass over the data.

        Errors of pushes are left for the next step to raise, unless a pserver was given up.
        Where pushes are parts of steps it sends nothing: the others may train on, and a worker that makes steps without
        them would train its next batches beside other ones of theirs. A barrier sends it.
        """
        ...

    def drain(self, *, leaves: bool = False) -> None:
        """Returns when everything that this worker did so far is applied on the pservers.

        Args:
            leaves: True to leave the step group as well, in a job whose steps wait for each other: returns when every
                worker has left it; until then the others' steps are completed without this worker.
        """
        ...

    def close(self) -> None:
        """Releases memory; nothing may be called afterwards. A second call does nothing."""
        ...
