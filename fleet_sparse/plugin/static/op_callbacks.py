"""Callbacks of the inserted ops: NumPy arrays in, NumPy arrays out, the session in between.

What depends on the program alone is computed when a callback is made. A callback keeps no state between runs; the ids
of a step go from its prefetch op to its update op through `Session.step_ids`, by a ticket in the graph.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from paddle.base import core

from fleet_sparse.core.clip import scaled, squared_norms
from fleet_sparse.core.entries import CLICK, COUNTS, SHOW, STATISTICS
from fleet_sparse.core.ids import table_salt
from fleet_sparse.core.table_spec import NUM_SHOW_CLICK, TableSpec
from fleet_sparse.errors import PlanError
from fleet_sparse.transpiler.placeholder import SiteSpec
from fleet_sparse.transpiler.plan import RewritePlan, TablePlan
from fleet_sparse.transpiler.raw_op import Body, Outputs
from fleet_sparse.worker.modes.step import StepClip, check_finite
from fleet_sparse.worker.net.requests import DenseUpdate
from fleet_sparse.worker.rows.deduplicator import LookupGroup, TableLookups, UniqueIds
from fleet_sparse.worker.rows.early_rows import EarlyRows, SuccessiveBatch
from fleet_sparse.worker.rows.row_batch import RowBatch

from ..session import Session
from .dense_parameters import DenseParameters
from .prefetch_queue import ExpectedBatch

_CALLER = "exe.run"
_FLAGS = core.globals()
_COLLECT = "FLAGS_eager_delete_tensor_gb"  # below 0: Paddle overwrites the results of a step in the next one


def lookup(session: Session, site: SiteSpec) -> Body:
    """Callback of a placeholder op: reads ids; fills rows, `ids.shape + (dim,)`."""
    name, dim = site.embedding.name, site.embedding.dim
    lookups = LookupGroup((_lookups_of((site,)),))
    specs = session.catalog.tables

    def body(inputs: list[NDArray[Any]], outputs: Outputs) -> None:
        connection = session.connection(_CALLER)
        positions = np.empty(inputs[0].shape, np.int64)
        (unique,) = connection.deduplicator.place_tables(lookups, inputs, [positions])
        num_rows = len(unique.ids)
        rows = np.empty((num_rows + 1, dim), np.float32)
        rows[num_rows] = 0  # of padding
        connection.training.pull([RowBatch(specs[name], unique, rows[:num_rows])])
        np.take(rows, positions, axis=0, out=outputs.allocate(0, (*positions.shape, dim)))

    return body


class _PrefetchedTable(NamedTuple):
    """One table of a prefetch op."""

    name: str
    dim: int
    num_padding_rows: int
    """1 if the rows end with a row of zeros for padding, else 0."""
    sites: tuple[int, ...]
    """Indices of its lookups among the inputs."""
    lookups: TableLookups


def prefetch(session: Session, plan: RewritePlan, *, for_training: bool) -> Body:
    """Callback of a prefetch op: one request per shard for the ids of all tables. Inputs and outputs: see `fuse`."""
    tables = [
        _PrefetchedTable(
            table.embedding.name, table.embedding.dim, int(table.is_padded), table.sites, lookups_of(plan, table)
        )
        for table in plan.tables
    ]
    num_tables, ticket = len(plan.tables), len(plan.tables) + len(plan.sites)
    others, lookups = [*range(num_tables)], LookupGroup([table.lookups for table in tables])
    specs, queue, step_ids = session.catalog.tables, session.prefetch_queue, session.step_ids

    def body(inputs: list[NDArray[Any]], outputs: Outputs) -> None:
        connection = session.connection(_CALLER)
        batch, coming = queue.take(plan, inputs) if for_training else (None, None)
        batches, unique_of_table = [], {}
        expected = {} if batch is None else batch.tables
        of_group, group = others, lookups
        if expected:
            of_group = [number for number in others if number not in expected]
            group = LookupGroup([tables[number].lookups for number in of_group])
        ids, positions = [], []
        for number in of_group:
            for site in tables[number].sites:
                ids.append(inputs[site])
                positions.append(outputs.allocate(num_tables + site, inputs[site].shape))
        placed = iter(connection.deduplicator.place_tables(group, ids, positions) if of_group else ())
        for number, (name, dim, num_padding_rows, sites, _) in enumerate(tables):
            if number in expected:
                unique = expected[number].ids.unique
                for site, known in zip(sites, expected[number].positions, strict=True):
                    outputs.allocate(num_tables + site, inputs[site].shape).reshape(-1)[:] = known
            else:
                unique = next(placed)
            unique_of_table[name] = unique
            if batch is not None and batch.rows is not None and number in batch.memory:
                outputs.use(number, batch.memory[number])
                batches.append(batch.rows.batches[name])
                continue
            num_rows = len(unique.ids)
            rows = outputs.allocate(number, (num_rows + num_padding_rows, dim))
            if num_padding_rows:
                rows[num_rows] = 0
                rows = rows[:num_rows]
            batches.append(RowBatch(specs[name], unique, rows))
        if for_training:
            early = None if batch is None else batch.rows
            following = None
            if coming is not None:
                following = coming.rows = _reserve(coming, tables, specs, outputs)
            connection.training.prefetch(batches, early, following)
            outputs.set_number(ticket, step_ids.put(unique_of_table))
        else:
            connection.training.pull(batches)

    return body


def _reserve(
    coming: ExpectedBatch, tables: Sequence[_PrefetchedTable], specs: Mapping[str, TableSpec], outputs: Outputs
) -> EarlyRows:
    """Reserves the memory in which the rows of the next step arrive and are handed over to Paddle."""
    lookups = []
    for number, (ids, _) in coming.tables.items():
        table, num_rows = tables[number], len(ids.unique.ids)
        memory = outputs.reserve(number, (num_rows + table.num_padding_rows, table.dim))
        if table.num_padding_rows:
            memory.array[num_rows] = 0
        coming.memory[number] = memory
        lookups.append(SuccessiveBatch(RowBatch(specs[table.name], ids.unique, memory.array[:num_rows]), ids))
    return EarlyRows(lookups)


class TableStatistics(NamedTuple):
    """The inputs of an update op from which the statistics of one table's ids are computed."""

    num_lookups: int
    """Number of inputs with positions, one for each lookup."""
    has_show_click: bool
    """True if shows and clicks of each example follow them."""
    has_lengths: tuple[bool, ...] = ()
    """True for each lookup of a ragged field, whose number of ids of each example then follows; empty for none."""

    @property
    def num_inputs(self) -> int:
        """Number of inputs."""
        return self.num_lookups + 2 * self.has_show_click + sum(self.has_lengths)


class UpdatePlan(NamedTuple):
    """The gradients that an update op pushes."""

    tables: tuple[TablePlan, ...]
    dense: tuple[DenseParameters, ...]
    """The dense arrays that the pservers train or add up."""
    local: DenseParameters | None
    """The dense parameters that Paddle's optimizer trains in the program, after the update op."""
    is_reduced: bool
    """True if it trains them with the merged gradients of all workers."""
    statistics: tuple[TableStatistics | None, ...]
    """Statistics of ids that the pushes of each table carry; None for none."""
    batch_inputs: tuple[str, ...]
    """Names of the inputs whose first dimension is the number of examples."""
    clip: StepClip | None
    """A clip by norm; a clip by value is part of the specs."""


def update(session: Session, plan: UpdatePlan) -> Body:
    """Callback of an update op. Inputs and outputs: see `insert_update`."""
    names = [table.embedding.name for table in plan.tables]
    rates = [session.catalog.learning_rate_of(name) for name in names]  # None: the optimizer's
    tables = [(table.embedding.name, table.embedding.learning_rate) for table in plan.tables]
    ticket = 1 + len(plan.batch_inputs)  # index among the inputs, as the next ones
    first_grads = ticket + (1 if tables else 0)
    statistics = plan.statistics if any(plan.statistics) else ()
    first_statistics = first_grads + len(tables)
    first_dense = first_statistics + sum(each.num_inputs for each in statistics if each is not None)
    specs, step_ids = session.catalog.tables, session.step_ids

    def body(inputs: list[NDArray[Any]], outputs: Outputs) -> None:
        learning_rate = float(inputs[0])
        reuses_memory = _FLAGS[_COLLECT] < 0  # while the client may still send from it
        rows = []
        if tables:
            unique_of_table = step_ids.take(int(inputs[ticket][0]))
            for number, (name, multiplier) in enumerate(tables, first_grads):
                unique, grads = unique_of_table[name], inputs[number]
                if reuses_memory:
                    grads = grads.copy()
                if len(grads) > len(unique.ids):
                    grads = grads[: len(unique.ids)]  # without the row of padding
                own_rate = rates[number - first_grads]
                rate = learning_rate * multiplier if own_rate is None else own_rate * multiplier
                rows.append(RowBatch(specs[name], unique, grads, rate))
            if statistics:
                rows = _with_statistics(rows, statistics, inputs[first_statistics:first_dense])
        dense = []
        place = 0
        for array in plan.dense:
            values = [outputs.allocate(index, shape) for index, shape in enumerate(array.shapes, place)]
            begin, place = first_dense + place, place + len(array.shapes)
            grads_of_array = _flat(inputs[begin : first_dense + place])
            dense.append(DenseUpdate(array.spec, grads_of_array, values, learning_rate))
        if plan.local is not None and not plan.is_reduced:
            rows = _clipped(plan.clip, rows, inputs[first_dense:], outputs)
            check_finite(rows, ())  # before the dense parameters change
            session.update(rows, (), 1.0, None, local_array=plan.local.spec.name)
            outputs.allocate(0, inputs[0].shape)[...] = learning_rate
            return
        num_examples = 1.0
        if plan.batch_inputs and session.num_workers > 1:  # a single worker's batch is the whole step
            num_examples = _num_examples(plan.batch_inputs, inputs[1:ticket])
        if plan.local is not None:
            merged = [outputs.allocate(index, shape) for index, shape in enumerate(plan.local.shapes, start=1)]
            dense = [DenseUpdate(plan.local.spec, _flat(inputs[first_dense:]), merged, learning_rate)]
            session.update(rows, dense, num_examples, None, local_array=plan.local.spec.name)
            outputs.allocate(0, inputs[0].shape)[...] = learning_rate
            return
        if not plan.dense:
            outputs.set_number(0, 0)
        session.update(rows, dense, num_examples, plan.clip)

    return body


def _with_statistics(
    rows: Sequence[RowBatch], statistics: Sequence[TableStatistics | None], inputs: Sequence[NDArray[Any]]
) -> list[RowBatch]:
    """Returns the batches with what the push says of their ids."""
    counted, begin = [], 0
    for batch, each in zip(rows, statistics, strict=True):
        if each is not None:
            given = iter(inputs[begin : begin + each.num_inputs])
            positions = [next(given) for _ in range(each.num_lookups)]
            show_click = [next(given), next(given)] if each.has_show_click else []
            lengths = [next(given) if has_lengths else None for has_lengths in each.has_lengths]
            of_rows: dict[str, NDArray[Any]] = {}
            if batch.spec.has_show_click:  # continuous_value_model makes them the gradient of the values that hold them
                of_rows = {SHOW: batch.values[:, 0], CLICK: batch.values[:, 1]}
                values = batch.values.copy()
                values[:, :NUM_SHOW_CLICK] = 0
            else:
                values = batch.values
            found = statistics_of_ids(batch.spec, batch.unique, positions, show_click, lengths, of_rows)
            counted.append(batch._replace(values=values, statistics=found))
            begin += each.num_inputs
        else:
            counted.append(batch)
    return counted


def statistics_of_ids(
    spec: TableSpec,
    unique: UniqueIds,
    positions: Sequence[NDArray[np.int64]],
    show_click: Sequence[NDArray[Any]],
    lengths: Sequence[NDArray[Any] | None] = (),
    of_rows: Mapping[str, NDArray[Any]] = MappingProxyType({}),
) -> list[NDArray[Any]]:
    """Returns `spec.statistics` of the ids of a batch, `(k,)` each.

    Args:
        spec: The table.
        unique: Its distinct ids in the batch.
        positions: For each lookup the place of each id among them; an id past the last one is padding.
        show_click: Shows and clicks of each example; empty if the table does not read them.
        lengths: For each lookup of a ragged field the number of ids of each example, else None; empty if all are None.
        of_rows: Statistics that are known for each distinct id, by name.

    Raises:
        ValueError: A lookup has another number of examples than they, or lengths do not add up to its ids.
    """
    num_ids = len(unique.ids)
    found = []
    for name in spec.statistics:
        if name in of_rows:
            found.append(np.ascontiguousarray(of_rows[name], STATISTICS[name]))
            continue
        total = np.zeros(num_ids + 1)
        for of_lookup, of_each in zip(positions, lengths or [None] * len(positions), strict=True):
            if name == COUNTS:
                total += np.bincount(of_lookup.reshape(-1), minlength=num_ids + 1)
                continue
            of_example = np.asarray(show_click[0 if name == SHOW else 1], np.float64).reshape(-1)
            weights = np.repeat(of_example, _ids_of_examples(spec, name, len(of_example), of_lookup, of_each))
            total += np.bincount(of_lookup.reshape(-1), weights, minlength=num_ids + 1)
        found.append(total[:num_ids].astype(STATISTICS[name]))
    return found


def _ids_of_examples(
    spec: TableSpec, name: str, num_examples: int, of_lookup: NDArray[np.int64], lengths: NDArray[Any] | None
) -> NDArray[Any] | int:
    """Number of ids that each example has in a lookup."""
    if lengths is not None:
        counts = lengths.reshape(-1)
        if len(counts) != num_examples or int(counts.sum()) != of_lookup.size:
            raise ValueError(
                f"table {spec.name!r}: {name} has {num_examples} values, a lookup has {of_lookup.size} ids in "
                f"{len(counts)} examples whose lengths add up to {int(counts.sum())}. Feed one for each example"
            )
        return counts
    if of_lookup.size % max(num_examples, 1) or (of_lookup.size and len(of_lookup) != num_examples):
        raise ValueError(
            f"table {spec.name!r}: {name} has {num_examples} values, a lookup has {len(of_lookup)}. "
            "Feed one for each example"
        )
    return of_lookup.size // max(num_examples, 1)


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


def lookups_of(plan: RewritePlan, table: TablePlan) -> TableLookups:
    """The lookups of a program on one of its tables."""
    return _lookups_of([plan.sites[site].spec for site in table.sites])


def _lookups_of(sites: Sequence[SiteSpec]) -> TableLookups:
    embedding = sites[0].embedding
    return TableLookups(
        embedding.name,
        np.uint64(table_salt(embedding.name)),
        tuple(site.padding_idx for site in sites),
        embedding.size if embedding.is_bounded else None,
    )
