"""The embedding of a model, in its two kinds: a distributed table, or a local parameter of plain Paddle."""

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
"""The size given to Paddle: a promise on how many distinct ids there will be. Nothing is allocated for it."""


class Embedding(Protocol):
    """What a model looks its rows up with."""

    def __call__(self, ids: paddle.pir.Value, *, name: str, dim: int, bound: float) -> paddle.pir.Value:
        """The rows of `ids`.

        Args:
            ids: int64, of any shape.
            name: Of the table. The same name in two programs is the same table.
            dim: Floats in a row.
            bound: First values of a row are uniform in `[-bound, bound)`; all 0 where `bound` is 0.

        Returns:
            float32, `ids.shape + [dim]`.
        """


def distributed(ids: paddle.pir.Value, *, name: str, dim: int, bound: float) -> paddle.pir.Value:
    """Rows of a table on the pservers, made as their ids come up."""
    initializer = Uniform(-bound, bound) if bound else Constant(0.0)
    return paddle.static.nn.embedding(
        ids,
        size=[NUM_IDS, dim],
        is_sparse=True,
        is_distributed=True,
        param_attr=ParamAttr(name=name, initializer=initializer),
    )


class LocalTables:
    """Tables that are ordinary parameters of plain Paddle, with a row for every id of a known vocabulary.

    Such a table is addressed by positions, so that what feeds a program compacts its ids first, with `positions`.
    """

    def __init__(self, vocabulary: NDArray[np.int64]) -> None:
        """
        Args:
            vocabulary: `(k,)`, distinct and sorted: all ids that will be looked up.
        """
        self._vocabulary = vocabulary
        self._tables: dict[str, tuple[int, float]] = {}  # name -> dim, bound

    def __call__(self, ids: paddle.pir.Value, *, name: str, dim: int, bound: float) -> paddle.pir.Value:
        """Rows by position; otherwise as `Embedding` says."""
        # Constant, and not Uniform: Paddle's random numbers then go to the dense parameters alone, as they do where
        # the tables are distributed, and both start from the same network.
        attribute = ParamAttr(name=name, initializer=Constant(0.0))
        rows = paddle.static.create_parameter([self._vocabulary.size, dim], "float32", attr=attribute)
        self._tables[name] = (dim, bound)
        return paddle.nn.functional.embedding(ids, rows)

    def positions(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Where each id stands in the vocabulary; shaped like `ids`.

        Raises:
            KeyError: An id is not in the vocabulary.
        """
        positions = np.searchsorted(self._vocabulary, ids)
        found = self._vocabulary[np.minimum(positions, self._vocabulary.size - 1)] == ids
        if not found.all():
            raise KeyError(f"id {ids[~found][0]} is not among the {self._vocabulary.size} of the vocabulary")
        return positions

    def initialise(self, scope: paddle.static.Scope, *, seed: int) -> None:
        """Gives every row the value that it starts from on a pserver with the same seed. After the startup program."""
        for name, (dim, bound) in self._tables.items():
            initializer = uniform(-bound, bound) if bound else constant(0.0)
            rows = initial_rows(initializer, self._vocabulary, dim=dim, seed=seed, salt=table_salt(name))
            scope.find_var(name).get_tensor().set(rows, paddle.CPUPlace())
