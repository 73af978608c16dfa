"""Mutations: plain values that say how a table changes. A shard commits them; nothing else changes its tables."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleet_sparse.core.criteria import Criterion
from fleet_sparse.core.mode import AVG

from .shrunk import ShrunkTable

if TYPE_CHECKING:
    from .table import Table


class Push(NamedTuple):
    """Checked gradients for one table."""

    table_id: int
    ids: NDArray[np.int64] | None
    """`(n,)`, distinct; None for a dense array."""
    grads: NDArray[np.float32]
    """`(n, dim)`, finite; of a dense array `(n,)`."""
    learning_rate: float
    step: int
    """The update rule's t."""
    weight: float = 1.0
    """Weight of the worker's contribution in an averaged sync step."""
    hashes: NDArray[np.int64] | None = None
    """`(n,)`, hashes of `ids` where the check computed them."""
    statistics: NDArray[np.float32] | None = None
    """`(n, width)`, what the push says of each id besides its gradient, if the entry policy of the table reads it."""
    begin: int = 0
    """Index of the first value in the range of the shard, for a dense array."""
    num_updates: NDArray[np.uint32] | None = None
    """`(n,)`, how many workers' pushes of a step named each id; None for one."""

    @property
    def num_bytes(self) -> int:
        """Size of ids, gradients and statistics."""
        return self.grads.nbytes + sum(each.nbytes for each in (self.ids, self.statistics) if each is not None)

    def of_ids(self, indices: NDArray[np.int64]) -> Push:
        """Returns the push of some of its ids, ascending."""
        assert self.ids is not None, "of a table"
        return self._replace(
            ids=self.ids[indices],
            grads=np.take(self.grads, indices, axis=0),
            hashes=None if self.hashes is None else self.hashes[indices],
            statistics=None if self.statistics is None else self.statistics[indices],
            num_updates=None if self.num_updates is None else self.num_updates[indices],
        )

    def apply_to(self, table: Table) -> int:
        """Applies the gradients with the table's rule; returns the number of rows updated."""
        return table.apply(self)

    def has_no_effect_after(self, error: BaseException) -> bool:
        """Returns whether nothing changed if `apply_to` raised this: a store without room for more rows."""
        return isinstance(error, MemoryError)


class Change(NamedTuple):
    """Checked changes that a worker's updates made to its copies of rows of a table."""

    table_id: int
    ids: NDArray[np.int64]
    """`(n,)`, distinct."""
    rows: NDArray[np.float32]
    """`(n, dim)`, finite: the copies less what they were before the updates."""
    amounts: NDArray[np.uint32]
    """`(n,)`, by how much the clocks of the rows advance."""
    weight: float
    """Weight of the changes of states (`kernels_changes`)."""
    step: int
    """The update rule's t of the newest update."""
    states: NDArray[np.float32] | None = None
    """`(n, num_states, dim)`, changes of the states; None leaves these as they are."""
    num_updates: NDArray[np.uint32] | None = None
    """`(n,)`, number of updates of each change of states; with `states`."""
    hashes: NDArray[np.int64] | None = None
    """`(n,)`, hashes of `ids` where the check computed them."""

    @property
    def num_bytes(self) -> int:
        """Size of ids, changes and their numbers."""
        arrays = self.ids, self.rows, self.amounts, self.states, self.num_updates
        return sum(each.nbytes for each in arrays if each is not None)

    def of_ids(self, indices: NDArray[np.int64]) -> Change:
        """Returns the changes of some of the ids, ascending."""
        return self._replace(
            ids=self.ids[indices],
            rows=np.take(self.rows, indices, axis=0),
            amounts=self.amounts[indices],
            states=None if self.states is None else self.states[indices],
            num_updates=None if self.num_updates is None else self.num_updates[indices],
            hashes=None if self.hashes is None else self.hashes[indices],
        )

    def apply_to(self, table: Table) -> int:
        """Merges the changes; returns the number of rows changed."""
        return table.apply_change(self)

    def has_no_effect_after(self, error: BaseException) -> bool:
        """As `Push.has_no_effect_after`."""
        return isinstance(error, MemoryError)


class RowAssignment(NamedTuple):
    """Checked rows and states that the only worker of a job trained; they replace those of the shard."""

    table_id: int
    ids: NDArray[np.int64]
    """`(n,)`, distinct."""
    rows: NDArray[np.float32]
    """`(n, dim)`, finite."""
    states: NDArray[np.float32]
    """`(n, num_states, dim)`."""
    step: int
    """The update rule's t of the newest update."""
    hashes: NDArray[np.int64] | None = None
    """`(n,)`, hashes of `ids` where the check computed them."""

    @property
    def num_bytes(self) -> int:
        """Size of ids, rows and states."""
        return self.ids.nbytes + self.rows.nbytes + self.states.nbytes

    def of_ids(self, indices: NDArray[np.int64]) -> RowAssignment:
        """Returns the assignment of some of the ids, ascending."""
        return self._replace(
            ids=self.ids[indices],
            rows=np.take(self.rows, indices, axis=0),
            states=np.take(self.states, indices, axis=0),
            hashes=None if self.hashes is None else self.hashes[indices],
        )

    def apply_to(self, table: Table) -> int:
        """Sets rows and states; returns the number of rows changed."""
        return table.assign_rows(self)

    def has_no_effect_after(self, error: BaseException) -> bool:
        """As `Push.has_no_effect_after`."""
        return isinstance(error, MemoryError)


class Assignment(NamedTuple):
    """First values of a dense array; ignored if it has values."""

    table_id: int
    values: NDArray[np.float32]
    """`(n,)`, finite."""
    begin: int = 0
    """Index of the first one in the range of the shard."""

    def apply_to(self, table: Table) -> int:
        """Sets the values; returns 0, the number of rows updated."""
        table.assign(self)
        return 0

    def has_no_effect_after(self, error: BaseException) -> bool:
        """As `Push.has_no_effect_after`."""
        return False


class Replacement(NamedTuple):
    """Values of a dense array that its worker trained, or one state of their rule; they replace those of the shard."""

    table_id: int
    number: int
    """0 for the values, k for the rule's k-th state."""
    values: NDArray[np.float32]
    """`(n,)`; the values are finite."""
    step: int = 0
    """The update rule's t; of the values only."""
    begin: int = 0
    """Index of the first value in the range of the shard."""

    def apply_to(self, table: Table) -> int:
        """Replaces values or state; returns 0, the number of rows updated."""
        table.replace(self)
        return 0

    def has_no_effect_after(self, error: BaseException) -> bool:
        """As `Push.has_no_effect_after`."""
        return False


class Shrink(NamedTuple):
    """Removal of the rows that criteria select, after a decay of shows and clicks."""

    table_id: int
    criteria: tuple[Criterion, ...]
    """Checked ones."""
    decay: float = 1.0
    judged: NDArray[np.int16] | None = None
    """Result of `Table.judge` for the table as it is now; None to judge it here."""
    found: ShrunkTable = ShrunkTable(0, ())
    """The rows that it removes, which the log keeps."""
    shrink_id: str = ""
    """Id of the request; empty without one. All shrinks of a commit have the same, and the same criteria and decay."""

    def apply_to(self, table: Table) -> int:
        """Removes the rows and returns their number."""
        judged = table.judge(self.criteria, self.decay) if self.judged is None else self.judged
        return table.shrink(judged, self.decay)

    def has_no_effect_after(self, error: BaseException) -> bool:
        """Returns whether the table refused."""
        return isinstance(error, ValueError)


class DayEnd(NamedTuple):
    """End of a day of a table."""

    table_id: int
    save_id: str = ""
    """Id of the save that ends the day; empty without one. All day ends of a commit have the same."""

    def apply_to(self, table: Table) -> int:
        """Returns 0, the number of rows changed."""
        table.end_day()
        return 0

    def has_no_effect_after(self, error: BaseException) -> bool:
        """Returns whether the table refused."""
        return isinstance(error, ValueError)


CopyMutation = Change | RowAssignment
"""What workers with copies of rows send besides gradients."""
Mutation = Push | CopyMutation | Assignment | Replacement | Shrink | DayEnd


def scaled(grads: NDArray[np.float32], factor: float) -> NDArray[np.float32]:
    """Returns `grads` times `factor`, the same array if that is 1. Overflow gives infinity: the caller checks."""
    if factor == 1.0:
        return grads
    with np.errstate(over="ignore", invalid="ignore"):
        return grads * np.float32(factor if math.isfinite(factor) else math.nan)


class Average(NamedTuple):
    """The average of several workers' contributions: the sum of `factor * grads`, divided by `total`."""

    parts: list[tuple[Push, np.float32]]
    """Every push with its factor, in worker order."""
    total: np.float32

    @classmethod
    def of(cls, contributions: Sequence[Sequence[Push]], scale: str) -> Average:
        """Factors for "avg" are the weights over the largest one, so that equal weights leave a plain mean.

        Args:
            contributions: Pushes of each worker to one table, in worker order. Several pushes of one worker are parts
                of a large one and count its weight once.
            scale: "avg" or "sum".
        """
        weights = [pushes[0].weight if scale == AVG else 1.0 for pushes in contributions]
        largest = max(weights)
        factors = [np.float32(weight / largest) if largest > 0 else np.float32(1.0) for weight in weights]
        total = np.float32(sum(factors)) if scale == AVG else np.float32(1.0)
        parts = [(push, factor) for pushes, factor in zip(contributions, factors, strict=True) for push in pushes]
        return cls(parts, total)

    def of_single_part(self) -> Push:
        """The result where there is one push: no copy unless the division changes it."""
        push = self.parts[0][0]
        return push if self.total == 1.0 else push._replace(grads=push.grads / self.total)
