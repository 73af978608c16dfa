"""DenseRange: one shard's range of a dense array, and the update rule over it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleet_sparse.core.bounds import Bounds
from fleet_sparse.core.decay import Decay
from fleet_sparse.core.dense_spec import DenseSpec
from fleet_sparse.core.kernels_decay import add_decay
from fleet_sparse.errors import PlanError

from ..storage import machine_memory

_FIRST_ROW = np.zeros(1, np.int64)


class _Piece(NamedTuple):
    """Values `[begin, end)` of the range that share a learning rate, a decay and bounds."""

    begin: int
    end: int
    multiplier: float
    decay: Decay
    bounds: Bounds


class DenseRange:
    """The values `[begin, end)` of a dense array, with their optimizer state.

    Values that were never assigned or loaded have no meaning; the caller looks at `assigned` first.

    Attributes:
        spec: Of the whole array.
        begin: Index of the first value in the whole array.
        end: Index after the last one.
        assigned: Whether the values are there.
        values: float32 `(end - begin,)`. Changes in place: copy what outlives the next push.
        largest_multiplier: Of the learning rate, over the segments of the range, without sign.

    Raises:
        PlanError: Values and states do not fit into the memory that this machine has left.
    """

    def __init__(self, spec: DenseSpec, shard: int, num_shards: int) -> None:
        self.spec = spec
        self.begin, self.end = spec.range_of(shard, num_shards)
        self._rule = spec.update_rule
        self._hyperparameters = dict(spec.hyperparameters)
        needed, available = 4 * self.size * (1 + self._rule.num_states), machine_memory.available_bytes()
        if needed > available:
            raise PlanError(
                f"dense {spec.name!r}: the range of shard {shard} takes {needed / 2**30:.1f} GiB with its states, this "
                f"machine has {available / 2**30:.1f} GiB left. Use more pservers, or embeddings for what is large"
            )
        self._pieces = _pieces(spec, self.begin, self.end)
        self.largest_multiplier = max((abs(piece.multiplier) for piece in self._pieces), default=0.0)
        self.assigned = False
        self.values = np.zeros(self.size, np.float32)
        # Piece after piece, so that a piece looks to the rule's kernel like a row with its states beside it.
        self._states = np.zeros(self._rule.num_states * self.size, np.float32)
        for piece in self._pieces:
            for k, value in enumerate(self._rule.initial_state(self._hyperparameters)):
                self._states_of(piece)[k] = value

    @property
    def size(self) -> int:
        """Number of values."""
        return self.end - self.begin

    @property
    def num_bytes(self) -> int:
        """Memory of values and states."""
        return self.values.nbytes + self._states.nbytes

    def assign(self, values: NDArray[np.float32]) -> None:
        """Sets the values, `(size,)`, if they are not there yet; else changes nothing."""
        if not self.assigned:
            self.values[:] = values
            self.assigned = True

    def push(self, grads: NDArray[np.float32], learning_rate: float, step: int) -> None:
        """Applies finite gradients `(size,)`; the learning rate is multiplied with each segment's own.

        Each segment is clipped to its bounds first, then its decay comes on top.
        """
        kernel, num_states = self._rule.kernel, self._rule.num_states
        if kernel is None:
            raise ValueError(f"dense {self.spec.name!r}: it is read-only, nothing can be pushed")
        for begin, end, multiplier, decay, bounds in self._pieces:
            values, piece_grads = self.values[begin:end], bounds.clipped(grads[begin:end])
            if any(decay):
                plain, piece_grads = piece_grads, np.empty_like(values)
                coefficients = np.array(decay, np.float32)
                add_decay(values, 0, _FIRST_ROW, plain, end - begin, coefficients, piece_grads)
            scalars = self._rule.scalars(self._hyperparameters, learning_rate * multiplier, step)
            states = self._states[num_states * begin : num_states * end]
            kernel(values, 0, states, 0, 0, _FIRST_ROW, piece_grads, end - begin, scalars)

    def copy_of(self, number: int) -> NDArray[np.float32]:
        """A copy of the values, or with a number from 1 on of that state of the rule; `(size,)`."""
        return self.values.copy() if number == 0 else self.export_states()[number - 1]

    @property
    def num_states(self) -> int:
        """Of the rule."""
        return self._rule.num_states

    def export_states(self) -> NDArray[np.float32]:
        """A copy of the states, `(num_states, size)`."""
        if not self._pieces:
            return np.zeros((self._rule.num_states, 0), np.float32)
        return np.concatenate([self._states_of(piece) for piece in self._pieces], axis=1)

    def load(self, values: NDArray[np.float32], states: NDArray[np.float32]) -> None:
        """Takes values `(size,)` and states `(num_states, size)` over, whatever was there."""
        self.values[:] = values
        for piece in self._pieces:
            self._states_of(piece)[:] = states[:, piece.begin : piece.end]
        self.assigned = True

    def close(self) -> None:
        """As a store's; there is nothing to stop."""

    def _states_of(self, piece: _Piece) -> NDArray[np.float32]:
        num_states = self._rule.num_states
        flat = self._states[num_states * piece.begin : num_states * piece.end]
        return flat.reshape(num_states, piece.end - piece.begin)


def _pieces(spec: DenseSpec, begin: int, end: int) -> list[_Piece]:
    """The segments inside `[begin, end)`, counted from `begin`; neighbours that are updated alike are one piece.

    With a rule that needs whole rows each segment is a piece.
    """
    joins = not spec.update_rule.needs_whole_row
    pieces: list[_Piece] = []
    for segment in spec.segments:
        first, last = max(segment.offset, begin) - begin, min(segment.offset + segment.size, end) - begin
        if first >= last:
            continue
        piece = _Piece(first, last, segment.learning_rate, segment.decay, segment.bounds)
        if joins and pieces and pieces[-1][2:] == piece[2:]:
            pieces[-1] = pieces[-1]._replace(end=last)
        else:
            pieces.append(piece)
    return pieces
