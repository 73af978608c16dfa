"""Exports with networks: a plain Paddle model, and the split network with the values of a snapshot."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import paddle
from numpy.typing import NDArray

from fleet_sparse.core.spec_json import parse_spec
from fleet_sparse.errors import FleetSparseError, SnapshotError, TableMismatch
from fleet_sparse.snapshot.directory import Directory
from fleet_sparse.snapshot.reader import SnapshotReader
from fleet_sparse.transpiler import inference
from fleet_sparse.transpiler.inference import FilledHole, TableParameters

from .exported_rows import RowChoice, RowError, chosen_rows, stored_rows, unseen_row
from .model import EXAMPLES, FORWARD, IDS, ServedModel, read_network_file
from .paddle_network import LoadedNetwork, load_network, predict, save_network
from .self_check import CONFIGURATIONS, TOLERANCE, difference_of

MODEL = "model"
"""Name of the files of an export, without an ending."""


class SortedTable(NamedTuple):
    """The rows of a table for a model that searches."""

    ids: NDArray[np.int64]
    """Sorted, at least one."""
    rows: NDArray[Any]
    """`(num_ids + 2, dim)`: the row of each id, the row of unseen ids, and zeros."""
    scales: NDArray[np.float32] | None
    """`(num_ids + 2, 1)`; of int8 rows only."""
    error: RowError

    def look_up(self, ids: NDArray[Any], padding_idx: int | None) -> NDArray[np.float32]:
        """Returns the rows of ids of any shape, as the model computes them."""
        position = np.minimum(np.searchsorted(self.ids, ids), len(self.ids) - 1)
        position = np.where(self.ids[position] == ids, position, len(self.ids))
        if padding_idx is not None:
            position = np.where(ids == padding_idx, len(self.ids) + 1, position)
        rows = self.rows[position].astype(np.float32)
        return rows if self.scales is None else rows * self.scales[position]


def sorted_tables(content: SnapshotReader, tables: Iterable[str], choice: RowChoice) -> dict[str, SortedTable]:
    """Returns the rows of tables, sorted by id. Tables with the same ids share their array.

    Raises:
        PlanError: A row cannot be stored in the type of the export; see `stored_rows`.
        SnapshotError: The snapshot cannot be read.
    """
    found: dict[str, SortedTable] = {}
    for name in tables:
        spec, error = content.table(name).spec, RowError()
        ids, parts = [np.empty(0, np.int64)], [np.empty((0, spec.dim), np.float32)]
        for block_ids, rows in chosen_rows(content, name, choice):
            ids.append(block_ids)
            parts.append(rows)
        all_ids, all_rows = np.concatenate(ids), np.concatenate(parts)
        del ids, parts
        unseen = unseen_row(spec, choice)
        if not len(all_ids):  # a search needs one id; it reads what it would read without a row
            all_ids, all_rows = np.zeros(1, np.int64), unseen[None]
        order = np.argsort(all_ids)
        sorted_ids = all_ids[order]
        shared = (each.ids for each in found.values() if np.array_equal(each.ids, sorted_ids))
        every = np.concatenate([all_rows[order], unseen[None], np.zeros((1, spec.dim), np.float32)])
        stored = stored_rows(name, sorted_ids, every, choice.dtype)
        error.add(every[:-2], stored._replace(rows=stored.rows[:-2], scales=_front(stored.scales)))
        scales = None if stored.scales is None else stored.scales[:, None]
        found[name] = SortedTable(next(shared, sorted_ids), stored.rows, scales, error)
    return found


def export_paddle(
    directory: Directory, model: ServedModel, content: SnapshotReader, out: Path, choice: RowChoice
) -> dict[str, RowError]:
    """Writes `OUT/model.json` and `OUT/model.pdiparams`, checked; returns the error of each table.

    Args:
        directory: Directory of the model.
        model: The model.
        content: The snapshot with its rows.
        out: Directory; created if missing.
        choice: Which rows, and how.

    Raises:
        SnapshotError: A file cannot be read or written.
        TableMismatch: The snapshot has another table than the model.
        FleetSparseError: The exported model does not predict as the networks of the model.
    """
    check_tables(model, content)
    tables = sorted_tables(content, [each.name for each in model.tables], choice)
    with loaded(directory, model, FORWARD) as (forward, local):
        dense = dense_values(model, content)
        expected = expected_of(model, forward, {**forward.values, **dense}, tables, local)
        feed = examples_of(local)
        values = {**forward.values, **dense, **_fill(model, forward, tables, choice.dtype)}
        inputs = inference.inputs_of(forward.program)
        feeds = [inputs[each.name] for each in model.feeds]
        targets = forward.results[: len(model.targets)]
        save_network(local / MODEL, forward.program, feeds, targets, values)
        check_predictions("paddle", local / MODEL, model, feed, expected)
        place(local, out, [f"{MODEL}.json", f"{MODEL}.pdiparams"])
    return {name: table.error for name, table in tables.items()}


@contextmanager
def loaded(directory: Directory, model: ServedModel, network: str) -> Iterator[tuple[LoadedNetwork, Path]]:
    """Loads a network of a model; the local directory with its files exists for a `with` block."""
    paddle.enable_static()
    with tempfile.TemporaryDirectory(prefix="fleet_sparse") as text:
        local = Path(text)
        copy_files(directory, model, network, local)
        yield load_network(local / network), local


def copy_files(directory: Directory, model: ServedModel, network: str, local: Path) -> None:
    """Copies a network, the network of ids if there is one, and the examples into a local directory."""
    wanted = {f"{each}.{ending}" for each in (network, IDS) for ending in ("json", "pdiparams")} | {EXAMPLES}
    for file in model.files:
        if file.name in wanted:
            (local / file.name).write_bytes(read_network_file(directory, model, file.name))


def examples_of(local: Path) -> dict[str, NDArray[Any]]:
    """Returns the inputs with which exports are checked."""
    with np.load(local / EXAMPLES) as file:
        return {name.removeprefix("feed."): file[name] for name in file.files}


def check_tables(model: ServedModel, content: SnapshotReader) -> None:
    """Checks that a snapshot has the tables of a model.

    Raises:
        SnapshotError: One is missing.
        TableMismatch: One is another table; the message has the differences of both specs.
    """
    for table in model.tables:
        ours, theirs = parse_spec(json.dumps(table.spec)), content.table(table.name).spec
        if differences := ours.differences(theirs):
            raise TableMismatch(
                f"table {table.name!r}: the model and {content.origin} describe it differently: "
                f"{', '.join(differences)}. Give snapshots of the job that saved the model"
            )
    for array in model.dense:
        if array.array not in content.dense:
            raise SnapshotError(f"{content.origin}: it has no dense {array.array!r}, of which the model has parameters")


def dense_values(model: ServedModel, content: SnapshotReader) -> dict[str, NDArray[Any]]:
    """Returns the dense parameters of a snapshot by name."""
    values: dict[str, NDArray[Any]] = {}
    for array in model.dense:
        if not content.dense[array.array].assigned:
            continue
        flat, _ = content.dense_values(array.array)
        for each in array.parameters:
            size = int(np.prod(each.shape, dtype=np.int64))
            values[each.name] = flat[each.offset : each.offset + size].reshape(each.shape)
    return values


def expected_of(
    model: ServedModel,
    forward: LoadedNetwork,
    values: Mapping[str, NDArray[Any]],
    tables: Mapping[str, SortedTable],
    local: Path,
) -> list[NDArray[Any]]:
    """Returns the predictions of the forward program for the examples, with rows that NumPy looks up."""
    feed = examples_of(local)
    sizes = [len(feed[each.name]) for each in model.feeds if each.shape and each.shape[0] == -1]
    computed: dict[int, NDArray[Any]] = {}
    if model.computed and model.is_split:
        computed = dict(zip(model.computed, predict(local / IDS, feed, has_onednn=False), strict=True))
    elif model.computed:  # of rows: once more for each lookup that depends on another
        guessed = [(sizes or [1])[0], *([1] * 64)]
        for number in model.computed:
            shape = [guessed[axis] if size == -1 else size for axis, size in enumerate(model.lookups[number].shape)]
            computed[number] = np.zeros(shape, model.lookups[number].dtype)
    results: list[NDArray[Any]] = []
    for _ in range(len(model.computed) + 1 if not model.is_split else 1):
        filled = {}
        for number, lookup in enumerate(model.lookups):
            ids = computed[number] if lookup.feed is None else feed[lookup.feed]
            rows = tables[lookup.table].look_up(ids.astype(np.int64), lookup.padding_idx)
            filled[f"{lookup.table}@lookup.{number}"] = rows
        results = _run(forward, values, {**feed, **filled})
        computed = dict(zip(model.computed, results[len(model.targets) :], strict=True))
    return results[: len(model.targets)]


def check_predictions(
    what: str, path: Path, model: ServedModel, feed: Mapping[str, NDArray[Any]], expected: Iterable[NDArray[Any]]
) -> None:
    """Checks that an exported Paddle model predicts `expected`, with and without oneDNN.

    Raises:
        FleetSparseError: It does not.
    """
    wanted = list(expected)
    for configuration, has_onednn in CONFIGURATIONS.items():
        check_equal(what, configuration, model, predict(path, feed, has_onednn=has_onednn), wanted)


def check_equal(
    what: str, configuration: str, model: ServedModel, found: Iterable[NDArray[Any]], expected: Iterable[NDArray[Any]]
) -> None:
    """Checks predictions of an export.

    Raises:
        FleetSparseError: They differ.
    """
    for target, ours, wanted in zip(model.targets, found, expected, strict=True):
        if not (difference := difference_of(ours, wanted)) <= TOLERANCE:
            raise FleetSparseError(
                f"export --format {what}: target {target.name!r} differs by {difference:.3g} in {configuration} "
                f"configuration, should be at most {TOLERANCE:g}. Nothing is exported; please report the network"
            )


def place(local: Path, out: Path, names: Iterable[str]) -> None:
    """Moves finished files into a directory, each in one step.

    Raises:
        SnapshotError: The system refused.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name in names:
            draft = out / f".{name}.draft"
            with (local / name).open("rb") as source, draft.open("wb") as target:
                while part := source.read(1 << 24):
                    target.write(part)
                target.flush()
                os.fsync(target.fileno())
            draft.replace(out / name)
    except OSError as error:
        raise SnapshotError(f"{out}: cannot be written: {error}") from error


def _fill(
    model: ServedModel, forward: LoadedNetwork, tables: Mapping[str, SortedTable], dtype: str
) -> dict[str, NDArray[Any]]:
    """Fills the holes of a loaded forward program, in place; returns the values of new parameters."""
    program, values = forward.program, dict[str, NDArray[Any]]()
    parameters, keys = {}, dict[int, str]()
    for name, table in tables.items():
        ids_name = keys.setdefault(id(table.ids), f"{name}@ids")
        scales = f"{name}@scales" if table.scales is not None else ""
        dim = table.rows.shape[1]
        parameters[name] = TableParameters(ids_name, len(table.ids), f"{name}@rows", dim, dtype, scales)
        values[ids_name], values[f"{name}@rows"] = table.ids, table.rows
        if table.scales is not None:
            values[scales] = table.scales
    fed = {each.feed: (each.shape, each.dtype) for each in model.lookups if each.feed is not None}
    inputs = inference.add_inputs(program, fed)
    computed = dict(zip(model.computed, forward.results[len(model.targets) :], strict=True))
    holes = [
        FilledHole(
            inputs[f"{each.table}@lookup.{number}"],
            computed[number] if each.feed is None else inputs[each.feed],
            each.table,
            each.padding_idx,
        )
        for number, each in enumerate(model.lookups)
    ]
    inference.fill(program, holes, parameters)
    return values


def _run(
    network: LoadedNetwork, values: Mapping[str, NDArray[Any]], feed: Mapping[str, NDArray[Any]]
) -> list[NDArray[Any]]:
    scope = paddle.static.Scope()
    for parameter in network.program.global_block().all_parameters():
        value = np.ascontiguousarray(values[parameter.name])
        scope.var(parameter.name).get_tensor().set(value, paddle.CPUPlace())
    inputs = {name: feed[name] for name in inference.inputs_of(network.program)}
    with paddle.static.scope_guard(scope):
        executor = paddle.static.Executor(paddle.CPUPlace())
        return [np.asarray(each) for each in executor.run(network.program, feed=inputs, fetch_list=network.results)]


def _front(scales: NDArray[np.float32] | None) -> NDArray[np.float32] | None:
    return None if scales is None else scales[:-2]
