"""ParityModel: a small model with its batches, for training it twice. `CLICKS` and `DYADIC` are the two models."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import paddle
from numpy.typing import NDArray

Feed = dict[str, NDArray[Any]]
"""Values of inputs by name; the first dimension of each counts the examples."""

Lookup = Callable[[Any, str], Any]
"""`lookup(ids, table)`: the rows of ids, shape `ids.shape + [dim]`."""

Parameter = Callable[[str, NDArray[np.float32]], Any]
"""`parameter(name, first_values)`: a dense parameter."""


class ParityTable(NamedTuple):
    """A table of a parity model."""

    dim: int
    initializer: Any
    """An initializer of `paddle.nn.initializer`."""


class ParityModel(NamedTuple):
    """A model as a value. Each batch contains every id, so that lazy and dense update rules agree."""

    tables: Mapping[str, ParityTable]
    num_ids: int
    """The ids of all tables are [0, num_ids)."""
    batch_size: int
    """Number of examples of one step, over all workers."""
    batch: Callable[[np.random.Generator], Feed]
    """Draws the next batch."""
    shares: Callable[[int], list[int]]
    """Sizes of the workers' sub-batches, in any unit, by the number of workers. The workers rotate through them."""
    losses: Callable[[Mapping[str, Any], Lookup, Parameter], Any]
    """The loss of each example, `(n, 1)`, from the inputs by name."""

    def steps(self, num_steps: int, num_workers: int) -> Iterator[list[Feed]]:
        """Yields one sub-batch per worker for each step; the examples do not depend on the number of workers."""
        rng = np.random.default_rng(7)
        shares = np.array(self.shares(num_workers))
        for step in range(num_steps):
            batch = self.batch(rng)
            ends = np.cumsum(np.roll(shares, step)) * self.batch_size // shares.sum()
            yield [{name: values[begin:end] for name, values in batch.items()} for begin, end in pairwise([0, *ends])]


_CLICK_IDS, _CLICK_BATCH, _HIDDEN = 200, 256, 16
_CLICK_TABLES = {
    "item": ParityTable(8, paddle.nn.initializer.Uniform(-0.1, 0.1)),
    "user": ParityTable(5, paddle.nn.initializer.Uniform(-0.1, 0.1)),
}


def _click_batch(rng: np.random.Generator) -> Feed:
    items = rng.permutation(np.resize(np.arange(_CLICK_IDS), 2 * _CLICK_BATCH)).reshape(_CLICK_BATCH, 2)
    users = rng.permutation(np.resize(np.arange(_CLICK_IDS), _CLICK_BATCH))
    label = ((items.sum(axis=1) + users) % 3 == 0).astype(np.float32)
    return {"items": items.astype(np.int64), "users": users.astype(np.int64), "label": label[:, None]}


def _click_losses(inputs: Mapping[str, Any], lookup: Lookup, parameter: Parameter) -> Any:
    vectors = [
        paddle.reshape(lookup(inputs["items"], "item"), [-1, 2 * _CLICK_TABLES["item"].dim]),
        lookup((inputs["users"] * 7 + 3) % _CLICK_IDS, "item"),
        lookup(inputs["users"], "user"),
    ]
    features = paddle.concat(vectors, axis=1)
    hidden = paddle.nn.functional.relu(_linear(features, _HIDDEN, "hidden", parameter))
    logit = _linear(hidden, 1, "out", parameter)
    return paddle.nn.functional.binary_cross_entropy_with_logits(logit, inputs["label"], reduction="none")


def _linear(x: Any, num_outputs: int, name: str, parameter: Parameter) -> Any:
    rng = np.random.default_rng(len(name))
    weight = rng.normal(0, 0.3, (int(x.shape[-1]), num_outputs)).astype(np.float32)
    bias = np.zeros(num_outputs, np.float32)
    return paddle.nn.functional.linear(x, parameter(f"{name}.w", weight), parameter(f"{name}.b", bias))


CLICKS = ParityModel(
    tables=_CLICK_TABLES,
    num_ids=_CLICK_IDS,
    batch_size=_CLICK_BATCH,
    batch=_click_batch,
    shares=lambda num_workers: list(range(1, num_workers + 1)),
    losses=_click_losses,
)
"""Two fields on one table, the ids of one computed in the graph; a second table; an MLP. Up to 16 workers."""


_DYADIC_IDS, _DYADIC_BATCH = 16, 32
_DYADIC_TABLES = {
    "wide": ParityTable(1, paddle.nn.initializer.Constant(0.5)),
    "deep": ParityTable(4, paddle.nn.initializer.Constant(-0.25)),
}


def _dyadic_batch(rng: np.random.Generator) -> Feed:
    ids = rng.permutation(np.resize(np.arange(_DYADIC_IDS), 2 * _DYADIC_BATCH)).reshape(_DYADIC_BATCH, 2)
    factor = rng.choice(np.array([-1.0, -0.5, 0.5, 1.0], np.float32), (_DYADIC_BATCH, 1))
    return {"ids": ids.astype(np.int64), "factor": factor}


def _dyadic_losses(inputs: Mapping[str, Any], lookup: Lookup, parameter: Parameter) -> Any:
    outputs = paddle.sum(parameter("bias", np.array([0.125, 2.0], np.float32)))
    for name, table in _DYADIC_TABLES.items():
        rows = lookup(inputs["ids"], name) * paddle.arange(1, table.dim + 1, dtype="float32")
        outputs = outputs + paddle.sum(rows, axis=[1, 2]).reshape([-1, 1])
    return inputs["factor"] * outputs


def _halves(num_workers: int) -> list[int]:
    """Half of the batch, half of the rest, and so on; the last two are equal."""
    return [2 ** max(num_workers - 2 - worker, 0) for worker in range(num_workers)]


DYADIC = ParityModel(
    tables=_DYADIC_TABLES,
    num_ids=_DYADIC_IDS,
    batch_size=_DYADIC_BATCH,
    batch=_dyadic_batch,
    shares=_halves,
    losses=_dyadic_losses,
)
"""Linear in its rows and parameters; all its numbers, including the sizes of sub-batches, are multiples of a power of
two. With SGD at a rate that is a power of two nothing is rounded in 50 steps, so that training gives the same bits in
any order of summation. Up to 6 workers."""

MODELS = {"clicks": CLICKS, "dyadic": DYADIC}
