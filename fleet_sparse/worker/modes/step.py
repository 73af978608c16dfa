"""What one step of a worker looks up and what it changes."""

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

from ..rows.deduplicator import UniqueIds

if TYPE_CHECKING:
    from ..rows.look_ahead import EarlyRows


class Lookup(NamedTuple):
    """Rows of one table that are wanted."""

    spec: TableSpec
    unique: UniqueIds
    out: NDArray[np.float32]
    """`(k, dim)`, contiguous, written in place."""


class RowsUpdate(NamedTuple):
    """The gradients of one table in one step."""

    spec: TableSpec
    unique: UniqueIds
    grads: NDArray[np.float32]
    """`(k, dim)`."""
    learning_rate: float


class DenseUpdate(NamedTuple):
    """The gradients of one dense array in one step, and where its new values go."""

    spec: DenseSpec
    grads: NDArray[np.float32]
    """`(spec.num_values,)`."""
    outs: Sequence[NDArray[np.float32]]
    """Of any shape, contiguous, with `spec.num_values` together; values go into one after the other."""
    learning_rate: float


def check_finite(rows: Iterable[RowsUpdate], dense: Iterable[DenseUpdate]) -> None:
    """Refuses here, before anything that this worker keeps is spoilt, what a pserver would refuse.

    Raises:
        PushRefused: A gradient or learning rate is not finite.
    """
    named = [(f"table {each.spec.name!r}", each.grads, each.learning_rate) for each in rows]
    for each in dense:
        largest = max(1.0, *(abs(segment.learning_rate) for segment in each.spec.segments))
        named.append((f"dense {each.spec.name!r}", each.grads, each.learning_rate * largest))
    for where, grads, learning_rate in named:
        if not abs(learning_rate) <= FLOAT32_MAX:
            raise PushRefused(f"{where}: learning rate is {learning_rate}, it should be finite")
        flat = np.ascontiguousarray(grads).reshape(-1)
        if not all_finite(flat):
            number = len(flat) - int(np.count_nonzero(np.isfinite(flat)))
            raise PushRefused(f"{where}: {number} of {len(flat)} gradients are NaN or infinite")


class StepClip(NamedTuple):
    """How the gradients of a step are clipped by norm."""

    clip: Clip
    needs_clip: tuple[bool, ...]
    """Of each table, then of each segment of each dense array."""

    def clipped(
        self, rows: Sequence[RowsUpdate], dense: Sequence[DenseUpdate]
    ) -> tuple[list[RowsUpdate], list[DenseUpdate]]:
        """The updates with these gradients clipped, where they are the whole gradient of the step."""
        parts = [DensePart(update.spec, update.grads) for update in dense]
        of_rows, of_dense = clipped(self.clip, self.needs_clip, [update.grads for update in rows], parts)
        return (
            [update._replace(grads=grads) for update, grads in zip(rows, of_rows, strict=True)],
            [update._replace(grads=grads) for update, grads in zip(dense, of_dense, strict=True)],
        )


class Progress(NamedTuple):
    """How far a worker is, between two of its steps."""

    num_steps: int
    """In sync training with several workers the job's steps, which all of them count alike; else the worker's own."""
    position: str | None
    """JSON, where its loader stands; empty if that does not say; None if there was no step."""


class QuiescePoint(NamedTuple):
    """What `Training.hold` gives."""

    passed: Sequence[Progress]
    """How far this worker is. If nothing is held back, after each of its last steps, the newest last."""
    holds_back: bool
    """Whether pushes are."""


class Training(Protocol):
    """How a worker's steps reach the pservers, in one mode. Op bodies of several threads may call it at once."""

    def note_states(self, states: Iterable[TableState]) -> None:
        """Takes in what pservers say of tables when this worker registers."""
        ...

    def pull(self, lookups: Sequence[Lookup]) -> None:
        """Fills each `out` with the rows of its distinct ids, outside of a step: for evaluation."""
        ...

    def prefetch(
        self, lookups: Sequence[Lookup], ahead: EarlyRows | None = None, coming: EarlyRows | None = None
    ) -> None:
        """Fills each `out` with the rows of its distinct ids, for the step that begins here.

        Args:
            lookups: Of the step.
            ahead: That was `coming` at the step before; None if there was none.
            coming: Of the step after this one; None if it is not known.
        """
        ...

    def update(
        self,
        rows: Sequence[RowsUpdate],
        dense: Sequence[DenseUpdate],
        num_examples: float,
        clip: StepClip | None = None,
        position: str = "",
    ) -> None:
        """Ends a step: its gradients go where they are applied, and new dense values come back.

        Args:
            rows: Of each table that was trained.
            dense: Of each dense array that was trained.
            num_examples: Weight of this worker's share in an average.
            clip: By norm: of the whole step in sync, else of this worker's gradient; None for none.
            position: JSON, where this worker's loader stands after the step; empty if it does not say.
        """
        ...

    def pull_dense(self, spec: DenseSpec, out: NDArray[np.float32]) -> None:
        """Fills `out` `(spec.num_values,)` with the values of a dense array, as this worker is to see them."""
        ...

    def hold(self, timeout_s: float, *, asks: bool = False) -> AbstractContextManager[QuiescePoint]:
        """As long as the block lasts no push goes out, and all before are applied: between two steps of this worker.

        In sync training with several workers nothing is held back but from the one that asks: as long as it does not
        push the next step, no other can complete it.

        Args:
            timeout_s: How long pushes may take to be applied.
            asks: Whether this worker asks for the save; the others are told of it.

        Raises:
            FleetSparseError: They were not. What failed in an earlier step stays for the next call to raise.
        """
        ...

    def reload(self, states: Iterable[TableState]) -> None:
        """Tables were replaced: forgets what it knew of them, and begins with what pservers say."""
        ...

    def settle(self) -> None:
        """Returns when all that this worker did so far is applied on the pservers."""
        ...

    def rest(self) -> None:
        """Returns when every worker of the job came here, in a job whose steps wait for each other; until then the
        others' steps do without this one.
        """
        ...

    def close(self) -> None:
        """Gives memory back; nothing may be called afterwards. A second call does nothing."""
        ...
