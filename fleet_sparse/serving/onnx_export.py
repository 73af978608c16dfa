"""Exports an ONNX model: LabelEncoder and Gather, which look rows up, in front of the split network.

paddle2onnx runs in a process of its own: an op that it does not know ends its process, and with its default optimizer
it installs packages.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fleet_sparse.errors import FleetSparseError, PlanError
from fleet_sparse.snapshot.directory import Directory
from fleet_sparse.snapshot.reader import SnapshotReader
from fleet_sparse.transpiler.inference import inputs_of, with_onnx_ops

from .exported_rows import RowChoice, RowError
from .model import FORWARD, IDS, NETWORK, ModelLookup, ServedModel
from .paddle_export import (
    MODEL,
    SortedTable,
    check_equal,
    check_tables,
    dense_values,
    examples_of,
    expected_of,
    loaded,
    place,
    sorted_tables,
)
from .paddle_network import load_network, save_network

if TYPE_CHECKING:
    import onnx

MAX_BYTES = 2_000_000_000
"""A little less than the 2 GiB of an ONNX file."""
OPSET = 17
TIMEOUT_S = 600.0

_ML_OPSET = 2
_EXPORT = (
    "import sys, paddle2onnx; paddle2onnx.export(sys.argv[1] + '.json', sys.argv[1] + '.pdiparams', "
    "sys.argv[1] + '.onnx', opset_version=int(sys.argv[2]), verbose=False, optimize_tool='None')"
)


def export_onnx(
    directory: Directory, model: ServedModel, content: SnapshotReader, out: Path, choice: RowChoice
) -> dict[str, RowError]:
    """Writes `OUT/model.onnx`, checked with onnxruntime; returns the error of each table.

    Args:
        directory: Directory of the model.
        model: The model.
        content: The snapshot with its rows.
        out: Directory; created if missing.
        choice: Which rows; of dtype float32.

    Raises:
        PlanError: The model has no split network, the rows are not float32, or the file would have 2 GB or more.
        SnapshotError: A file cannot be read or written.
        TableMismatch: The snapshot has another table than the model.
        ModuleNotFoundError: A package of the extra `onnx` is not installed.
        FleetSparseError: paddle2onnx failed, or the exported model does not predict as the networks of the model.
    """
    import onnx
    import onnxruntime  # noqa: F401  # so that its absence is known before anything is computed
    import paddle2onnx  # noqa: F401

    if not model.is_split:
        raise PlanError(
            "export --format onnx: ids are computed from rows, so that there is no split network. Write --format paddle"
        )
    if choice.dtype != "float32":
        raise PlanError(f"export --format onnx: --dtype is {choice.dtype}, should be float32. Write --format paddle")
    check_tables(model, content)
    tables = sorted_tables(content, [each.name for each in model.tables], choice)
    num_bytes = sum(table.rows.nbytes + 2 * table.ids.nbytes for table in tables.values())
    if num_bytes >= MAX_BYTES:
        raise PlanError(
            f"export --format onnx: ids and rows have {num_bytes / 1e9:.1f} GB, an ONNX file has less than 2 GB. Write "
            "--format paddle, or select rows by --seen-within-days"
        )
    dense = dense_values(model, content)
    with loaded(directory, model, FORWARD) as (forward, local):
        expected = expected_of(model, forward, {**forward.values, **dense}, tables, local)
        feed = examples_of(local)
    with loaded(directory, model, NETWORK) as (network, local):
        values = {**network.values, **dense}
        with_onnx_ops(network.program)
        inputs = list(inputs_of(network.program).values())
        save_network(local / NETWORK, network.program, inputs, network.results, values)
        networks = [converted(local / NETWORK)]
        if model.computed:
            ids = load_network(local / IDS)
            with_onnx_ops(ids.program)
            save_network(local / IDS, ids.program, list(inputs_of(ids.program).values()), ids.results, ids.values)
            networks.insert(0, converted(local / IDS))
        whole = _whole(model, tables, networks)
        onnx.save(whole, str(local / f"{MODEL}.onnx"))
        check_equal("onnx", "onnxruntime's", model, run_onnx(local / f"{MODEL}.onnx", feed), expected)
        place(local, out, [f"{MODEL}.onnx"])
    return {name: table.error for name, table in tables.items()}


def run_onnx(path: Path, feed: Mapping[str, NDArray[Any]]) -> list[NDArray[Any]]:
    """Runs an ONNX model once; inputs that it does not have are ignored."""
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    results = session.run(None, {each.name: feed[each.name] for each in session.get_inputs()})
    return [np.asarray(each) for each in results]


def _whole(
    model: ServedModel, tables: Mapping[str, SortedTable], networks: Sequence[onnx.ModelProto]
) -> onnx.ModelProto:
    """Returns one model of the network of ids, if there is one, the lookups, and the split network."""
    import onnx
    from onnx import compose, helper, numpy_helper

    names = [[each.name for each in network.graph.input] for network in networks]
    *of_ids, network = [compose.add_prefix(each, f"{number}.") for number, each in enumerate(networks)]
    nodes, constants = [], []
    for each in of_ids:
        nodes += [_renamed(name, f"0.{name}") for name in names[0]]
        nodes += each.graph.node
        constants += each.graph.initializer
        for number, result in zip(model.computed, each.graph.output, strict=True):
            nodes.append(_renamed(result.name, f"ids.{number}"))
    for name, table in tables.items():
        constants.append(numpy_helper.from_array(np.ascontiguousarray(table.rows), f"{name}@rows"))
    encoders: dict[tuple[Any, ...], str] = {}
    for number, lookup in enumerate(model.lookups):
        table, ids = tables[lookup.table], lookup.feed or f"ids.{number}"
        index = f"{lookup.table}@index.{number}"
        known = encoders.setdefault((ids, id(table.ids), lookup.padding_idx), index)
        if known == index:
            nodes += _encode(number, lookup, ids, index, table)
        else:
            nodes.append(_renamed(known, index))
    nodes += [_renamed(name, f"{len(of_ids)}.{name}") for name in names[-1]]
    nodes += network.graph.node
    constants += network.graph.initializer
    inputs = [
        helper.make_tensor_value_info(
            feed.name,
            helper.np_dtype_to_tensor_dtype(np.dtype(feed.dtype)),
            [None if size == -1 else size for size in feed.shape],
        )
        for feed in model.feeds
    ]
    graph = helper.make_graph(nodes, "fleet_sparse", inputs, list(network.graph.output), constants)
    opset = max(each.version for model_ in networks for each in model_.opset_import if each.domain in ("", "ai.onnx"))
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("ai.onnx.ml", _ML_OPSET)]
    whole = helper.make_model(graph, opset_imports=opsets, ir_version=network.ir_version)
    onnx.checker.check_model(whole)
    return whole


def _renamed(name: str, new: str) -> onnx.NodeProto:
    from onnx import helper

    return helper.make_node("Identity", [name], [new])


def _encode(number: int, lookup: ModelLookup, ids: str, index: str, table: SortedTable) -> list[onnx.NodeProto]:
    from onnx import TensorProto, helper

    nodes, wide = [], ids
    if lookup.dtype != "int64":
        wide = f"wide.{number}"
        nodes.append(helper.make_node("Cast", [ids], [wide], to=TensorProto.INT64))
    keys, positions = table.ids, np.arange(len(table.ids))
    if lookup.padding_idx is not None:
        is_other = keys != lookup.padding_idx
        keys = np.append(keys[is_other], lookup.padding_idx)
        positions = np.append(positions[is_other], len(table.ids) + 1)
    encoder = helper.make_node(
        "LabelEncoder",
        [wide],
        [index],
        domain="ai.onnx.ml",
        keys_int64s=keys.tolist(),
        values_int64s=positions.tolist(),
        default_int64=len(table.ids),
    )
    return [*nodes, encoder]


def converted(path: Path) -> onnx.ModelProto:
    """Returns the ONNX model of a Paddle network, made by paddle2onnx in another process.

    Raises:
        FleetSparseError: paddle2onnx failed.
    """
    import onnx

    command = [sys.executable, "-W", "ignore", "-c", _EXPORT, str(path), str(OPSET)]
    ended = subprocess.run(command, capture_output=True, timeout=TIMEOUT_S, check=False)
    if ended.returncode != 0:
        said = (ended.stdout + ended.stderr).decode(errors="replace").strip()[-1000:]
        raise FleetSparseError(f"paddle2onnx ended with {ended.returncode}: {said}")
    model = onnx.load(f"{path}.onnx")
    _add_repeats(model)
    return model


def _add_repeats(model: onnx.ModelProto) -> None:
    """Makes each `scatter_nd_add` add up the values of repeated indices, as Paddle does.

    paddle2onnx writes it as a sum with a ScatterND into zeros, which keeps one value of each index.
    """
    from onnx import helper

    zeros = {node.output[0] for node in model.graph.node if node.op_type == "ConstantOfShape"}
    zeros |= {node.output[0] for node in model.graph.node if node.op_type == "Identity" and node.input[0] in zeros}
    for node in model.graph.node:
        if node.op_type == "ScatterND" and node.input[0] in zeros and not node.attribute:
            node.attribute.append(helper.make_attribute("reduction", "add"))
