"""What a push does to a shard, once it is checked; and how the shares of several workers in a step become one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleet_sparse.core import clip
from fleet_sparse.core.clip import DensePart, squared_norms
from fleet_sparse.core.dense_spec import DenseSpec
from fleet_sparse.core.mode import AVG
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.wire.control import TableState

from ..storage.table_store import TableStore
from ..tables.dense import DenseRange
from .merge import Merger


@dataclass(slots=True, eq=False)
class TableEntry:
    """A table or dense array, as this shard holds it.

    Attributes:
        spec: That decides; of several that may meet, the one that trains.
        values: A TableStore for a TableSpec, a DenseRange for a DenseSpec.
        declared_by: Who brought `spec` first, for error messages.
        optimizer_step: Largest that a push carried.
        schema_hashes: Those that requests may carry, and whether with it they may change values.
    """

    spec: TableSpec | DenseSpec
    values: TableStore | DenseRange
    declared_by: str
    optimizer_step: int = 0
    schema_hashes: dict[int, bool] = field(default_factory=dict)

    @property
    def where(self) -> str:
        """`table 'C1'`, for messages."""
        return f"{'table' if isinstance(self.spec, TableSpec) else 'dense'} {self.spec.name!r}"

    @property
    def state(self) -> TableState:
        """What other processes are told."""
        if isinstance(self.values, DenseRange):
            return TableState(self.spec.name, self.optimizer_step, 0, self.values.assigned, self.spec.to_json())
        return TableState(self.spec.name, self.optimizer_step, self.values.num_rows, False)


class TablePush(NamedTuple):
    """A push to a table, checked and merged: its ids are distinct."""

    held: TableEntry
    store: TableStore
    ids: NDArray[np.int64]
    grads: NDArray[np.float32]
    learning_rate: float
    step: int
    weight: float
    """Of the share, where shares are averaged."""

    @property
    def num_bytes(self) -> int:
        """Of ids and gradients."""
        return self.ids.nbytes + self.grads.nbytes

    def apply(self) -> int:
        """Returns the number of rows pushed."""
        self.store.push(self.ids, self.grads, self.learning_rate, self.step)
        self.held.optimizer_step = max(self.held.optimizer_step, self.step)
        return len(self.ids)


class DensePush(NamedTuple):
    """A push to a dense array, checked."""

    held: TableEntry
    dense: DenseRange
    grads: NDArray[np.float32]
    learning_rate: float
    step: int
    weight: float

    @property
    def num_bytes(self) -> int:
        """Of the gradients."""
        return self.grads.nbytes

    def apply(self) -> int:
        """Returns 0, the number of rows of tables pushed."""
        self.dense.push(self.grads, self.learning_rate, self.step)
        self.held.optimizer_step = max(self.held.optimizer_step, self.step)
        return 0


class Assignment(NamedTuple):
    """First values of a dense array, checked."""

    dense: DenseRange
    values: NDArray[np.float32]

    def apply(self) -> int:
        """Returns 0, the number of rows of tables pushed."""
        self.dense.assign(self.values)
        return 0


Push = TablePush | DensePush
Change = Push | Assignment


def times(grads: NDArray[np.float32], scale: float) -> NDArray[np.float32]:
    """`grads` times `scale`; the same array if that is 1. What overflows is infinite: the caller looks for it."""
    if scale == 1.0:
        return grads
    with np.errstate(over="ignore", invalid="ignore"):
        return grads * np.float32(scale if math.isfinite(scale) else math.nan)


def merge_shares(shares: Sequence[Sequence[Push]], merger: Merger, scale: str) -> Push:
    """One push out of those of several workers to one table or dense array.

    Gradients are added in float32 in the order of `shares`. With "avg" each is multiplied by its weight over the
    largest one before, and the sum is divided by the sum of these factors: equal weights leave a plain mean.

    Args:
        shares: Of each worker, in their order: its pushes, which have no id in common (parts of a large one).
        merger: Of the shard.
        scale: "avg" or "sum".
    """
    first = shares[0][0]
    step = first.held.optimizer_step + 1
    weights = [share[0].weight if scale == AVG else 1.0 for share in shares]
    largest = max(weights)
    factors = [np.float32(weight / largest) if largest > 0 else np.float32(1.0) for weight in weights]
    total = np.float32(sum(factors)) if scale == AVG else np.float32(1.0)
    parts = [(push, factor) for share, factor in zip(shares, factors, strict=True) for push in share]
    with np.errstate(over="ignore", invalid="ignore"):
        if len(parts) == 1:
            return first._replace(grads=first.grads if total == 1.0 else first.grads / total, step=step)
        if isinstance(first, DensePush):
            summed = first.grads * parts[0][1]
            for push, factor in parts[1:]:
                summed += times(push.grads, float(factor))
            return first._replace(grads=np.divide(summed, total, out=summed), step=step)
        ids = np.concatenate([push.ids for push, _ in parts if isinstance(push, TablePush)])
        grads, begin = np.empty((len(ids), first.grads.shape[1]), np.float32), 0
        for push, factor in parts:
            end = begin + len(push.grads)
            np.multiply(push.grads, factor, out=grads[begin:end])
            begin = end
        merged = merger.merge(ids, grads, first.held.spec.salt)
        return first._replace(ids=merged.ids, grads=np.divide(merged.grads, total, out=merged.grads), step=step)


def squares_of(push: Push) -> NDArray[np.float64]:
    """Sums of squares of the gradients: one of a table, one a segment of a dense array as far as it is here."""
    if isinstance(push, TablePush):
        return squared_norms([push.grads], [])
    return squared_norms([], [_part_of(push)])


def with_factors(push: Push, factors: NDArray[np.float32]) -> Push:
    """The push with its gradients multiplied with a factor, or with one a segment."""
    if isinstance(push, TablePush):
        return push._replace(grads=clip.scaled([push.grads], [], factors)[0][0])
    return push._replace(grads=clip.scaled([], [_part_of(push)], factors)[1][0])


def _part_of(push: DensePush) -> DensePart:
    return DensePart(push.dense.spec, push.grads, push.dense.begin)
