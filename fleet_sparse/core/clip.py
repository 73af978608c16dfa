"""Clip: an optimizer's `grad_clip` and its arithmetic. The formulas are those of `paddle.nn.clip`.

A clip by value is part of the specs and happens where a gradient is applied. A clip by norm needs the whole gradient of
a step: it happens where the whole gradient is, or in two phases. Each holder of a part computes `squared_norms` of it;
the sums of all parts are added in one order; and `scaled` applies the factors that follow from them.

All arrays have the parameters in one order: the tables, then the segments of each dense array.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .bounds import UNBOUNDED, Bounds
from .dense_spec import DenseSpec
from .kernels_clip import sum_in_order, sums_of_squares

BY_VALUE = "value"
BY_NORM = "norm"
BY_GLOBAL_NORM = "global norm"


class Clip(NamedTuple):
    """An optimizer's `grad_clip`.

    Attributes:
        kind: `BY_VALUE`; `BY_NORM`, each parameter by its own norm, where a table is one parameter; or
            `BY_GLOBAL_NORM`, all parameters by their common norm.
        bounds: Bounds of every value, in a clip by value.
        norm: Largest L2 norm in the other two kinds, above 0.
    """

    kind: str
    bounds: Bounds = UNBOUNDED
    norm: float = 0.0

    @property
    def needs_norm(self) -> bool:
        """True if the norms of a step must be known before its gradients can be applied."""
        return self.kind != BY_VALUE

    def factors(self, squared_norms: NDArray[np.float64], needs_clip: Sequence[bool]) -> NDArray[np.float32]:
        """Returns the factor of each parameter's gradient, for a clip that needs norms.

        It is `c / max(norm, c)` with the largest norm c, computed in float64: exactly 1 for norms up to c. It is NaN if
        the norm is not finite: the gradients become NaN, and every shard refuses them.

        Args:
            squared_norms: `(n,)`, sums of squares over the whole step.
            needs_clip: `(n,)`; the factor of the other parameters is 1, and the global norm leaves them out.
        """
        clips = np.asarray(needs_clip, bool)
        squares = np.where(clips, squared_norms, 0.0)
        if self.kind == BY_GLOBAL_NORM:
            squares = np.where(clips, math.fsum(squares), 0.0)
        factors = self.norm / np.maximum(np.sqrt(squares), self.norm)
        return np.where(np.isfinite(squares), factors, np.nan).astype(np.float32)


class DensePart(NamedTuple):
    """Gradients of the values `[begin, begin + len(grads))` of a dense array."""

    spec: DenseSpec
    grads: NDArray[np.float32]
    begin: int = 0

    @property
    def cuts(self) -> NDArray[np.int64]:
        """Offsets of the segments in `grads`, `(num_segments + 1,)`; a segment outside of the range has length 0."""
        offsets = [*(segment.offset for segment in self.spec.segments), self.spec.num_values]
        return np.clip(np.array(offsets, np.int64) - self.begin, 0, len(self.grads))


def clipped(
    clip: Clip, needs_clip: Sequence[bool], tables: Sequence[NDArray[np.float32]], dense: Sequence[DensePart]
) -> tuple[list[NDArray[np.float32]], list[NDArray[np.float32]]]:
    """Returns the whole gradient of a step, clipped by norm, as `scaled` does.

    Args:
        clip: Clip that needs norms.
        needs_clip: For each parameter, whether it is clipped.
        tables: Gradients of the distinct rows of each table, of any shape.
        dense: Gradients of whole dense arrays.
    """
    return scaled(tables, dense, clip.factors(squared_norms(tables, dense), needs_clip))


def squared_norms(tables: Sequence[NDArray[np.float32]], dense: Sequence[DensePart]) -> NDArray[np.float64]:
    """Returns the sum of squares over the given part of each parameter's gradient; not finite if a gradient is not.

    Sums of tables are the same bits in any order of their rows.

    Args:
        tables: Gradients of distinct rows of each table, `(num_rows, ...)`; possibly empty.
        dense: Gradients of dense arrays, or of ranges of them.
    """
    of_dense = (_sums(part.grads, part.cuts) for part in dense)
    return np.concatenate([np.empty(0), *map(_sum_of_table, tables), *of_dense])


def scaled(
    tables: Sequence[NDArray[np.float32]], dense: Sequence[DensePart], factors: NDArray[np.float32]
) -> tuple[list[NDArray[np.float32]], list[NDArray[np.float32]]]:
    """Returns the gradients of tables and of dense parts, multiplied by the factors of their parameters.

    The arrays have the same shapes; an array whose factors are all 1 is returned as it is.
    """
    of_tables = [_product(grads, factor) for grads, factor in zip(tables, factors, strict=False)]
    of_dense, begin = [], len(tables)
    for part in dense:
        of_segments = factors[begin : begin + len(part.spec.segments)]
        of_dense.append(_product(part.grads, np.repeat(of_segments, np.diff(part.cuts))))
        begin += len(of_segments)
    return of_tables, of_dense


def _sums(grads: NDArray[np.float32], cuts: NDArray[np.int64]) -> NDArray[np.float64]:
    out = np.empty(len(cuts) - 1)
    sums_of_squares(np.ascontiguousarray(grads).reshape(-1), cuts, out)
    return out


def _sum_of_table(grads: NDArray[np.float32]) -> NDArray[np.float64]:
    of_rows = _sums(grads, np.arange(len(grads) + 1) * math.prod(grads.shape[1:]))
    of_rows.sort()
    out = np.empty(1)
    sum_in_order(of_rows, out)
    return out


def _product(grads: NDArray[np.float32], factors: NDArray[np.float32] | np.float32) -> NDArray[np.float32]:
    return grads if np.all(factors == 1) else grads * factors
