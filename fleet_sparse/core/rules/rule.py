"""UpdateRule: what a shard does with a gradient, as a value of functions; and what their kernels share."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..intrinsics import prefetch_write
from ..jit import FLOAT32_IN, FLOAT32S, INT64, INT64_IN, inlined

RuleKernel = Callable[
    [
        NDArray[np.float32],
        int,
        NDArray[np.float32],
        int,
        int,
        NDArray[np.int64],
        NDArray[np.float32],
        int,
        NDArray[np.float32],
    ],
    None,
]
"""`kernel(rows, row_stride, states, state_stride, state_offset, row_indices, grads, dim, scalars)`; all arrays flat.

Row `r` is `rows[r * row_stride : +dim]`; its state `k` is `states[r * state_stride + state_offset + k * dim : +dim]`.
`row_indices` is `(n,)`, none negative; `grads` is `(n * dim,)`. A row named twice is updated twice, in order.
"""

KERNEL_TYPES = (FLOAT32S, INT64, FLOAT32S, INT64, INT64, INT64_IN, FLOAT32_IN, INT64, FLOAT32_IN)
"""Declared argument types of the kernel of every rule."""


class UpdateRule(NamedTuple):
    """The way in which a shard applies gradients. Rules are lazy: a push changes the rows that it names and no others.

    Attributes:
        name: Name in table specs and snapshots. A rule whose states change their meaning needs another name.
        num_states: Number of optimizer states of a row, each an array of `dim` floats.
        defaults: (name, default) of each hyperparameter, sorted by name.
        initial_state: Function from the hyperparameters to the value that fills each state of a new row.
        scalars: Function from hyperparameters, learning rate and step (the first push is step 1) to the last argument
            of the kernel. It runs once per push and computes in float64; only its result is rounded.
        kernel: Applies the gradients; None if rows may not change.
        needs_whole_row: True if the update of a value depends on other values of its row. A dense parameter is then one
            row and lies on one shard as a whole.
        trains: True if a push carries gradients; False if it carries values that a worker computed.
        follows_state: True if every push computes the row from its states alone. Changes that several workers made to
            such a row cannot be summed.
        is_summed: True if the contributions of several workers to a step are added, and never averaged.
        merge: Function from the hyperparameters to the factor by which each state decays in an update, `s <- b s + ...`
            with an addend that does not depend on `s`. A change of several updates, made elsewhere, can then be merged
            into a row. None if it cannot.
        squares: Indices of the states that are sums or means of squares: what updates add to what is left of such a
            state is never negative.
        is_linear: True if an update moves the row by the learning rate times a linear function of gradient and states,
            and makes states that are linear in these. An update by the mean of gradients is the mean of updates then.
    """

    name: str
    num_states: int
    defaults: tuple[tuple[str, float], ...]
    initial_state: Callable[[dict[str, float]], tuple[float, ...]]
    scalars: Callable[[dict[str, float], float, int], NDArray[np.float32]]
    kernel: RuleKernel | None
    needs_whole_row: bool = False
    trains: bool = True
    follows_state: bool = False
    is_summed: bool = False
    merge: Callable[[dict[str, float]], tuple[float, ...]] | None = None
    squares: tuple[int, ...] = ()
    is_linear: bool = False


def zeros(num_states: int) -> Callable[[dict[str, float]], tuple[float, ...]]:
    """The `initial_state` of a rule whose states all begin with 0."""
    return lambda hyperparameters: (0.0,) * num_states


def decays(*names: str | float) -> Callable[[dict[str, float]], tuple[float, ...]]:
    """The `merge` of a rule: for each state the name of the hyperparameter by which it decays, or the factor itself."""
    # The float32 values that the kernels multiply with.
    return lambda hyperparameters: tuple(
        float(np.float32(hyperparameters[name] if isinstance(name, str) else name)) for name in names
    )


def least_addends(rule: UpdateRule) -> NDArray[np.float64]:
    """Returns for each state of a rule, `(num_states,)`, the least value that updates add to what is left of it."""
    least = np.full(rule.num_states, -np.inf)
    least[list(rule.squares)] = 0.0
    return least


def learning_rate_alone(hyperparameters: dict[str, float], learning_rate: float, step: int) -> NDArray[np.float32]:
    """The `scalars` of a rule whose kernel takes the learning rate and nothing else."""
    return np.array([learning_rate], np.float32)


AHEAD = np.uint64(16)
"""Number of rows by which a kernel prefetches ahead."""

_VALUES_PER_LINE, _ZERO, _ONE, _TWO = np.uint64(16), np.uint64(0), np.uint64(1), np.uint64(2)


@inlined
def prefetch_row(
    rows: NDArray[np.float32],
    row: np.uint64,
    states: NDArray[np.float32],
    state: np.uint64,
    dim: np.uint64,
    num_states: np.uint64,
) -> None:
    """Prefetches for writing the row that begins at `rows[row]` and its first three states, from `states[state]` on."""
    for j in range(_ZERO, dim, _VALUES_PER_LINE):
        prefetch_write(rows, row + j)
        # A loop over the states would slow Adam down by 5 %.
        if num_states > _ZERO:
            prefetch_write(states, state + j)
        if num_states > _ONE:
            prefetch_write(states, state + dim + j)
        if num_states > _TWO:
            prefetch_write(states, state + dim + dim + j)
