"""The shape of an update rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..jit import FLOAT32_IN, FLOAT32S, INT64, INT64_IN

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
`row_indices` `(n,)`, not negative; `grads` `(n * dim,)`. A row named twice is updated twice, in order.
"""

KERNEL_TYPES = (FLOAT32S, INT64, FLOAT32S, INT64, INT64, INT64_IN, FLOAT32_IN, INT64, FLOAT32_IN)
"""The declared types of every rule's kernel."""


class UpdateRule(NamedTuple):
    """What a shard does with a gradient. Lazy: only pushed rows change.

    Attributes:
        name: Stands in table specs and snapshots; it changes when the state does.
        num_states: Arrays of `dim` floats that are kept beside a row.
        defaults: Names and defaults of the hyperparameters, sorted by name.
        initial_state: From the hyperparameters, the value that fills each state of a new row.
        scalars: From hyperparameters, learning rate and step (the first push is step 1), what the kernel needs, once a
            push: computed in float64, then rounded.
        kernel: Applies the gradients; None when rows may not change.
        trains: Whether a push carries gradients; if not, values that others computed.
        follows_state: Whether a row is computed anew from its state alone at every push. Changes that several workers
            made to such a row cannot be summed.
        needs_whole_row: Whether a value's update depends on the other values of its row. A dense parameter is then one
            row and lies whole on one shard.
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
