"""Callbacks of the inserted ops: NumPy arrays in, NumPy arrays out, the session in between.

A callback keeps no state between runs; one op hands its results to the next through the graph.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import paddle
from numpy.typing import NDArray

from fleet_sparse.core.clip import scaled, squared_norms
from fleet_sparse.errors import PlanError
from fleet_sparse.transpiler.placeholder import SiteSpec
from fleet_sparse.transpiler.plan import RewritePlan, TablePlan
from fleet_sparse.transpiler.raw_op import Body, Outputs
from fleet_sparse.worker.modes.step import StepClip, check_finite
from fleet_sparse.worker.net.requests import DenseUpdate
from fleet_sparse.worker.rows.deduplicator import UniqueIds
from fleet_sparse.worker.rows.row_batch import RowBatch

from ..session import Session
from .dense_parameters import DenseParameters

_TOKEN = (1,)
_COLLECT = "FLAGS_eager_delete_tensor_gb"  # below 0: results keep their memory from step to step


def lookup(session: Session, site: SiteSpec) -> Body:
    """Callback of a placeholder op: reads ids; fills rows, `ids.shape + (dim,)`."""
    name, dim = site.embedding.name, site.embedding.dim

    def body(inputs: list[NDArray[Any]], outputs: Outputs) -> None:
        ids = inputs[0]
        flat, is_row = _flat_ids(ids, site)
        unique, (positions,) = session.unique(name, [flat])
        rows = np.empty((len(unique.ids), dim), np.float32)
        session.pull([RowBatch(session.table(site.embedding), unique, rows)])
        out = outputs.allocate(0, (*ids.shape, dim)).reshape(-1, dim)
        if is_row is None:
            np.take(rows, positions, axis=0, out=out)
        else:
            out[:] = 0
            out[is_row] = rows[positions]

    return body


def prefetch(session: Session, plan: RewritePlan, *, for_training: bool) -> Body:
    """Callback of a prefetch op: one request per shard for the ids of all tables. Inputs and outputs: see `fuse`."""

    def body(inputs: list[NDArray[Any]], outputs: Outputs) -> None:
        batch, coming = session.prefetch_queue.take(plan, inputs) if for_training else (None, None)
        known = {} if batch is None else batch.tables
        lookups = []
        for number, table in enumerate(plan.tables):
            unique, positions = known.get(number) or unique_of_table(session, plan, table, inputs)
            num_rows = len(unique.ids)
            rows = outputs.allocate(3 * number, (num_rows + table.is_padded, table.embedding.dim))
            rows[num_rows:] = 0
            outputs.allocate(3 * number + 1, (num_rows,))[:] = unique.ids
            outputs.allocate(3 * number + 2, unique.num_per_shard.shape)[:] = unique.num_per_shard
            for site, position in zip(table.sites, positions, strict=True):
                ids = inputs[site]
                outputs.allocate(3 * len(plan.tables) + site, ids.shape).reshape(-1)[:] = position
            lookups.append(RowBatch(session.table(table.embedding), unique, rows[:num_rows]))
        if for_training:
            session.prefetch(lookups, batch and batch.rows, coming and coming.rows)
        else:
            session.pull(lookups)

    return body


class UpdatePlan(NamedTuple):
    """The gradients that an update op pushes."""

    tables: tuple[TablePlan, ...]
    dense: DenseParameters | None
    """The dense parameters that the pservers train."""
    local_array: str | None
    """Name of the array of the dense parameters that Paddle's optimizer trains in the program, after the update op."""
    batch_inputs: tuple[str, ...]
    """Names of the inputs whose first dimension is the number of examples."""
    clip: StepClip | None
    """A clip by norm; a clip by value is part of the specs."""


def update(session: Session, plan: UpdatePlan) -> Body:
    """Callback of an update op. Inputs and outputs: see `insert_update`."""

    def body(inputs: list[NDArray[Any]], outputs: Outputs) -> None:
        if _paddle_reuses_memory():
            inputs = [array.copy() for array in inputs]
        learning_rate, *others = inputs
        num_inputs, num_tables = len(plan.batch_inputs), len(plan.tables)
        shapes, of_tables = others[:num_inputs], others[num_inputs : num_inputs + 3 * num_tables]
        rows = []
        for number, table in enumerate(plan.tables):
            ids, num_per_shard, grads = of_tables[3 * number : 3 * number + 3]
            rows.append(
                RowBatch(
                    session.table(table.embedding),
                    UniqueIds(ids, num_per_shard),
                    grads[: len(ids)],
                    float(learning_rate) * table.embedding.learning_rate,
                )
            )
        dense_grads = others[num_inputs + 3 * num_tables :]
        dense = []
        if plan.dense is not None:
            values = [outputs.allocate(index, shape) for index, shape in enumerate(plan.dense.shapes)]
            dense.append(DenseUpdate(plan.dense.spec, _flat(dense_grads), values, float(learning_rate)))
        # A single worker's batch is the whole step, whatever its number of examples.
        num_examples = _num_examples(plan.batch_inputs, shapes) if session.num_workers > 1 else 1.0
        if plan.local_array is not None:
            rows = _clipped(plan.clip, rows, dense_grads, outputs)
            check_finite(rows, ())  # before the dense parameters change
            session.update(rows, (), num_examples, None)
            session.dense.count_update(plan.local_array)
            outputs.allocate(0, learning_rate.shape)[...] = learning_rate
            return
        session.update(rows, dense, num_examples, plan.clip)
        if plan.dense is None:
            outputs.allocate(0, _TOKEN)[:] = 0

    return body


def _clipped(
    clip: StepClip | None, rows: list[RowBatch], dense_grads: Sequence[NDArray[np.float32]], outputs: Outputs
) -> list[RowBatch]:
    """Clips the gradients of rows by norm; outputs from 1 on are the factors on each dense gradient."""
    if clip is None:
        return rows
    grads = [batch.values for batch in rows]
    factors = clip.clip.factors(squared_norms([*grads, *dense_grads], ()), clip.needs_clip)
    for index, factor in enumerate(factors[len(rows) :], start=1):
        outputs.allocate(index, ())[...] = factor
    of_rows, _ = scaled(grads, (), factors)
    return [batch._replace(values=values) for batch, values in zip(rows, of_rows, strict=True)]


def _flat(arrays: Sequence[NDArray[np.float32]]) -> NDArray[np.float32]:
    return np.concatenate([array.reshape(-1) for array in arrays])


def _num_examples(names: Sequence[str], shapes: Sequence[NDArray[Any]]) -> float:
    """Number of examples of a batch: the first dimension of all its inputs; 1 without inputs.

    Raises:
        PlanError: The first dimensions differ.
    """
    sizes = {name: int(shape[0]) for name, shape in zip(names, shapes, strict=True)}
    if len(set(sizes.values())) > 1:
        texts = ", ".join(f"{name!r} {size}" for name, size in sizes.items())
        raise PlanError(
            f"sync training: inputs have different first dimensions ({texts}), so the number of examples is unknown. "
            "Name the input that counts the examples: fleet_sparse.PserverStrategy(examples_input=...)"
        )
    return float(next(iter(sizes.values()), 1))


def unique_of_table(
    session: Session,
    plan: RewritePlan,
    table: TablePlan,
    inputs: Sequence[NDArray[Any]] | Mapping[int, NDArray[Any]],
) -> tuple[UniqueIds, list[NDArray[np.int64]]]:
    """The distinct ids of a table's lookups and, for each lookup, the row index of each id, flat.

    The padding id has the index of the last row.

    Args:
        session: The session, which knows the shards.
        plan: The plan of the program.
        table: A table of the plan.
        inputs: Ids of each lookup, by its index in the plan.

    Raises:
        ValueError: Ids are not integers, or one is outside of a bounded table.
    """
    read = [_flat_ids(inputs[site], plan.sites[site].spec) for site in table.sites]
    unique, inverses = session.unique(table.embedding.name, [flat for flat, _ in read])
    positions = []
    for (_, is_row), inverse in zip(read, inverses, strict=True):
        if is_row is None:
            positions.append(inverse)
        else:
            position = np.full(is_row.shape, len(unique.ids), np.int64)
            position[is_row] = inverse
            positions.append(position)
    return unique, positions


def _paddle_reuses_memory() -> bool:
    """Returns whether Paddle overwrites the results of a step in the next one, while the client may still send them."""
    return bool(paddle.get_flags(_COLLECT)[_COLLECT] < 0)


def _flat_ids(ids: NDArray[Any], site: SiteSpec) -> tuple[NDArray[np.int64], NDArray[np.bool_] | None]:
    """The ids of a lookup as a flat int64 array without padding, and a mask of their positions; None without padding.

    Raises:
        ValueError: The ids are not integers, or one is outside of a bounded table.
    """
    embedding = site.embedding
    if ids.dtype not in (np.int64, np.int32):
        raise ValueError(
            f"table {embedding.name!r}: ids are {ids.dtype}, should be int64 or int32. Write .astype('int64')"
        )
    flat = ids.reshape(-1).astype(np.int64, copy=False)
    if embedding.is_bounded and embedding.size is not None and flat.size:
        low, high = int(flat.min()), int(flat.max())
        if low < 0 or high >= embedding.size:
            wrong = low if low < 0 else high
            raise ValueError(
                f"table {embedding.name!r}: id {wrong} is outside [0, {embedding.size}). "
                "Give the embedding a larger size, or is_distributed=True for ids without bounds"
            )
    if site.padding_idx is None:
        return flat, None
    is_row = flat != site.padding_idx
    return flat[is_row], is_row
