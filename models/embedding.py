"""Two implementations of a model's embedding: a distributed table, and a local parameter of plain Paddle."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import paddle
from numpy.typing import NDArray
from paddle import ParamAttr
from paddle.nn.initializer import Constant, Uniform

from fleet_sparse.core.ids import table_salt
from fleet_sparse.core.initializer import constant, initial_rows, uniform

NUM_IDS = 10**11
"""The size given to Paddle: an upper bound of the number of distinct ids. Nothing is allocated for it."""


class Embedding(Protocol):
    """Looks up the rows of a model."""

    def __call__(
        self, ids: paddle.pir.Value, *, name: str, dim: int, bound: float, padding_id: int | None = None
    ) -> paddle.pir.Value:
        """Returns the rows of `ids`.

        Args:
            ids: int64, of any shape.
            name: Name of the table; programs that use one name share one table.
            dim: Number of floats of a row.
            bound: First values of a row are uniform in `[-bound, bound)`; 0 if `bound` is 0.
            padding_id: An id whose row is zeros and is never trained; None if there is none.

        Returns:
            float32, `ids.shape + [dim]`.
        """


def distributed(
    ids: paddle.pir.Value, *, name: str, dim: int, bound: float, padding_id: int | None = None
) -> paddle.pir.Value:
    """Looks up rows of a table on the pservers, which creates a row when its id is first trained."""
    initializer = Uniform(-bound, bound) if bound else Constant(0.0)
    return paddle.static.nn.embedding(
        ids,
        size=[NUM_IDS, dim],
        is_sparse=True,
        is_distributed=True,
        padding_idx=padding_id,
        param_attr=ParamAttr(name=name, initializer=initializer),
    )


class LocalTables:
    """Tables that are ordinary parameters of plain Paddle, with a row for each id of a known vocabulary.

    Rows are addressed by their position in the vocabulary: ids are converted by `positions` before they are fed.
    """

    def __init__(self, vocabulary: NDArray[np.int64]) -> None:
        """
        Args:
            vocabulary: `(k,)`, sorted: all distinct ids that will be looked up.
        """
        self._vocabulary = vocabulary
        self._tables: dict[str, tuple[int, float]] = {}  # name -> dim, bound

    def __call__(
        self, ids: paddle.pir.Value, *, name: str, dim: int, bound: float, padding_id: int | None = None
    ) -> paddle.pir.Value:
        """Returns the rows of positions; otherwise as of `Embedding`."""
        # Constant, not Uniform, so that Paddle draws random numbers for the dense parameters only, as it does with
        # distributed tables, and both start from the same network.
        attribute = ParamAttr(name=name, initializer=Constant(0.0))
        rows = paddle.static.create_parameter([self._vocabulary.size, dim], "float32", attr=attribute)
        self._tables[name] = (dim, bound)
        padding = None
        if padding_id is not None and padding_id in self._vocabulary:
            padding = int(np.searchsorted(self._vocabulary, padding_id))
        return paddle.nn.functional.embedding(ids, rows, padding_idx=padding)

    def positions(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the index of each id in the vocabulary; shaped like `ids`.

        Raises:
            KeyError: An id is not in the vocabulary.
        """
        positions = np.searchsorted(self._vocabulary, ids)
        found = self._vocabulary[np.minimum(positions, self._vocabulary.size - 1)] == ids
        if not found.all():
            raise KeyError(f"id {ids[~found][0]} is not one of the {self._vocabulary.size} ids of the vocabulary")
        return positions

    def initialise(self, scope: paddle.static.Scope, *, seed: int) -> None:
        """Sets each row to its first value on a pserver with the same seed. Call it after the startup program."""
        for name, (dim, bound) in self._tables.items():
            initializer = uniform(-bound, bound) if bound else constant(0.0)
            rows = initial_rows(initializer, self._vocabulary, dim=dim, seed=seed, salt=table_salt(name))
            scope.find_var(name).get_tensor().set(rows, paddle.CPUPlace())
