"""Clip: what an optimizer's `grad_clip` says, and how it is done. The formulas are those of `paddle.nn.clip`.

A clip by value is part of the specs and is done where a gradient is applied. One by norm needs the whole gradient of a
step first: it is done where that is, or in two rounds. Whoever holds a part of the step's gradient tells
`squared_norms` of it; the parts' are added in one order; and `scaled` takes the factors that they give.

In all of these the parameters stand in one order: the tables, then the segments of each dense array.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .bounds import UNBOUNDED, Bounds
from .dense_spec import DenseSpec
from .kernels_clip import sums_of_squares

BY_VALUE = "value"
BY_NORM = "norm"
BY_GLOBAL_NORM = "global norm"


class Clip(NamedTuple):
    """What an optimizer's `grad_clip` says.

    Attributes:
        kind: `BY_VALUE`; `BY_NORM`, each parameter by its own norm, a table being one parameter; or `BY_GLOBAL_NORM`,
            all of them by their common one.
        bounds: Of every value, in a clip by value.
        norm: The largest L2 norm in the other two, above 0.
    """

    kind: str
    bounds: Bounds = UNBOUNDED
    norm: float = 0.0

    @property
    def needs_norm(self) -> bool:
        """Whether the norms of a step must be known before its gradients can be applied."""
        return self.kind != BY_VALUE

    def factors(self, squared_norms: NDArray[np.float64], needs_clip: Sequence[bool]) -> NDArray[np.float32]:
        """What the gradient of each parameter is multiplied with, for a clip that needs norms.

        That is `c / max(norm, c)`, computed in float64: exactly 1 up to the largest norm c. NaN if the norm is not
        finite: the gradients turn NaN, and every shard refuses them.

        Args:
            squared_norms: `(n,)`, of the whole step.
            needs_clip: `(n,)`; the others' factor is 1, and the global norm leaves them out.
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
        """Where segments begin and end among `grads`, `(num_segments + 1,)`; one that is elsewhere has no length."""
        offsets = [*(segment.offset for segment in self.spec.segments), self.spec.num_values]
        return np.clip(np.array(offsets, np.int64) - self.begin, 0, len(self.grads))


def clipped(
    clip: Clip, needs_clip: Sequence[bool], tables: Sequence[NDArray[np.float32]], dense: Sequence[DensePart]
) -> tuple[list[NDArray[np.float32]], list[NDArray[np.float32]]]:
    """The whole gradient of a step, clipped by norm.

    Args:
        clip: One that needs norms.
        needs_clip: Of each parameter.
        tables: Of each table the gradients of its distinct rows, of any shape.
        dense: Whole dense arrays.

    Returns:
        As `scaled`.
    """
    return scaled(tables, dense, clip.factors(squared_norms(tables, dense), needs_clip))


def squared_norms(tables: Sequence[NDArray[np.float32]], dense: Sequence[DensePart]) -> NDArray[np.float64]:
    """The sum of squares of each parameter's gradient, as far as it is here; NaN or infinite if the gradient is.

    Args:
        tables: Of each table the gradients of distinct rows, of any shape; empty if none is here.
        dense: Dense arrays, or ranges of them.
    """
    of_tables = [_sums(grads, np.array([0, grads.size])) for grads in tables]
    return np.concatenate([np.empty(0), *of_tables, *(_sums(part.grads, part.cuts) for part in dense)])


def scaled(
    tables: Sequence[NDArray[np.float32]], dense: Sequence[DensePart], factors: NDArray[np.float32]
) -> tuple[list[NDArray[np.float32]], list[NDArray[np.float32]]]:
    """The gradients of tables and of dense parts, multiplied with the factors of their parameters.

    Arrays of the shapes they had; one with nothing but factors 1 is the same array as before.
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


def _product(grads: NDArray[np.float32], factors: NDArray[np.float32] | np.float32) -> NDArray[np.float32]:
    return grads if np.all(factors == 1) else grads * factors
