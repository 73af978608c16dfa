"""`fleet.save_inference_model` and `fleet.load_inference_model`: a model that runs outside of its job."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Container, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import paddle
from numpy.typing import NDArray
from paddle.base.libpaddle import pir

import fleet_sparse
from fleet_sparse.errors import FleetSparseError, PlanError, SnapshotError
from fleet_sparse.serving import model as files
from fleet_sparse.serving.model import (
    EXAMPLES,
    FORWARD,
    IDS,
    NETWORK,
    NETWORKS,
    ROWS,
    DenseArray,
    DenseParameter,
    File,
    Lengths,
    ModelLookup,
    ServedModel,
    Table,
    Tensor,
    read_model,
)
from fleet_sparse.serving.paddle_network import save_network
from fleet_sparse.serving.self_check import Expected, check_networks
from fleet_sparse.snapshot.directory import Directory, directory_at, is_url
from fleet_sparse.snapshot.dirname import check_dirname
from fleet_sparse.snapshot.store import SnapshotStore
from fleet_sparse.transpiler import inference
from fleet_sparse.transpiler.inference import ForwardProgram, Network
from fleet_sparse.transpiler.rewrite import TRAIN_ONLY
from fleet_sparse.worker.control.save import DELTA, FULL

from .datasets.slots import lengths_name
from .online import left_out_of
from .session import Session
from .static import programs
from .static.value_name import result_named

logger = logging.getLogger(__name__)

_CALLER = "save_inference_model"
_KINDS = {0: FULL, 1: DELTA, 2: FULL}
_NUM_EXAMPLES = 64
_OTHER_SIZE = 3  # of dimensions that are unknown and not the batch, in drawn examples
_BATCH = 8


class ModelRequest(NamedTuple):
    """Arguments of `fleet.save_inference_model`, without the executor."""

    dirname: str | os.PathLike[str]
    feeds: Any
    targets: Any
    main_program: Any = None
    export_for_deployment: Any = True
    mode: Any = 0


class _PlannedModel(NamedTuple):
    """The model of a request, before anything is written."""

    evaluation: pir.Program
    """Runs in the job; has the lookups."""
    targets: tuple[pir.Value, ...]
    """Values of it."""
    looked_up: tuple[inference.Lookup, ...]
    """Lookups of it that the targets need."""
    forward: ForwardProgram
    feeds: dict[str, pir.Value]
    """Inputs of the forward program, in the order of the request."""
    target_names: tuple[str, ...]


def save_inference_model(session: Session, request: ModelRequest, executor: paddle.static.Executor | None) -> None:
    """Saves the rows on all pservers, and on worker 0 the networks, their check and `SERVING.json`.

    Args:
        session: The session.
        request: Arguments of the user.
        executor: Runs the examples of the check; None for an executor on the CPU.

    Raises:
        PlanError: The request, or the program, asks for something that is not supported.
        SnapshotError: A pserver or worker 0 cannot write, or worker 0 does not see what pservers wrote.
        FleetSparseError: The saved networks do not predict as the job.
    """
    dirname = os.fspath(request.dirname)
    check_dirname(dirname)
    kind = _check_request(request)
    connection = session.connection(_CALLER)
    planned = _plan(session, request)
    rows = f"{dirname.rstrip('/')}/{ROWS}"
    directory = _directory_of(session.settings.root, dirname)
    before = _newest(directory) if connection.role.is_first else 0
    keep_last = session.snapshots.keep_last_of(rows)
    session.snapshots.save(
        connection,
        rows,
        kind,
        keep_last=keep_last,
        left_out=left_out_of(session, request.mode),
        caller=_CALLER,
    )
    if not connection.role.is_first:
        return
    number = _newest(directory)
    if number == before:
        raise SnapshotError(
            f"{directory}/{ROWS}: worker 0 sees no new snapshot, but the pservers saved one under {rows!r}. Give "
            "worker 0 and all pservers one root: a shared directory, in FLEET_SPARSE_ROOT"
        )
    with tempfile.TemporaryDirectory(prefix="fleet_sparse") as local:
        model = _write_networks(session, planned, Path(local), number, executor)
        _publish(directory, model, Path(local))
    worst = max(finding.difference for finding in model.check)
    logger.info(
        "%s: %s has snapshot %d; predictions of its networks differ from the job's by %.2g at most",
        _CALLER,
        directory,
        number,
        worst,
    )


def load_inference_model(session: Session, path: str | os.PathLike[str], mode: Any) -> None:
    """Loads rows, states and dense values of a served model into the running job. All workers call it.

    Raises:
        PlanError: The mode is not 0, 1 or 2.
        SnapshotError: There is no such model, or its rows cannot be read.
    """
    if mode not in _KINDS:
        raise PlanError(
            f"load_inference_model: mode {mode!r} is not supported. Write mode=0: all rows of the newest snapshot"
        )
    where = os.fspath(path)
    check_dirname(where)
    directory = _directory_of(session.settings.root, where)
    session.snapshots.load(
        session.connection("load_inference_model"),
        f"{where.rstrip('/')}/{ROWS}",
        paddle.static.global_scope(),
        check=lambda: read_model(directory),
        caller="load_inference_model",
    )


def _check_request(request: ModelRequest) -> str:
    if request.mode not in _KINDS:
        raise PlanError(
            f"{_CALLER}: mode {request.mode!r} is not supported. Write mode=0 for all rows, 1 for the rows that "
            "changed since the last save, 2 for a base model without rare rows"
        )
    if request.export_for_deployment is not True:
        raise PlanError(
            f"{_CALLER}: export_for_deployment is {request.export_for_deployment!r}, should be True. To save the "
            "program that trains, keep its script and call fleet.save_persistables(exe, dirname)"
        )
    return _KINDS[request.mode]


def _plan(session: Session, request: ModelRequest) -> _PlannedModel:
    targets = request.targets if isinstance(request.targets, (list, tuple)) else [request.targets]
    if not targets or not all(isinstance(each, (str, pir.Value)) for each in targets):
        kinds = ", ".join(type(each).__name__ for each in targets) or "nothing"
        raise PlanError(f"{_CALLER}: target_vars is {kinds}, should be one or several values of a program")
    program = request.main_program
    if program is None:
        of_targets = (each.block.program for each in targets if isinstance(each, pir.Value))
        program = next(of_targets, paddle.static.default_main_program())
    if not isinstance(program, pir.Program):
        raise PlanError(f"{_CALLER}: main_program is a {type(program).__name__}, should be a Program")
    layers = {} if programs.is_outside_fleet(program) else session.catalog.layers
    evaluation = programs.clone_for_test(program)
    own = tuple(_target_of(program, evaluation, each) for each in targets)
    inputs = inference.inputs_of(evaluation)
    given = request.feeds if isinstance(request.feeds, (list, tuple)) else [request.feeds]
    names = [each if isinstance(each, str) else each.name for each in given]
    cut_at = {
        name: programs.own(evaluation, value) for name in names if (value := _result_named(program, name)) is not None
    }
    if not any(target.get_defining_op().has_attr(TRAIN_ONLY) for target in own):
        own = inference.read_written(evaluation, own)
        inference.prune(evaluation, own)
    lookups = inference.lookups_of(evaluation, layers)
    forward = inference.forward_part(evaluation, own, layers)
    return _PlannedModel(
        evaluation,
        own,
        tuple(lookups[index] for index in forward.lookups),
        forward,
        _feeds_of(forward, list(inputs), _without_rows(names, cut_at, lookups, inputs)),
        tuple(each if isinstance(each, str) else each.name for each in targets),
    )


def _target_of(program: pir.Program, evaluation: pir.Program, target: Any) -> pir.Value:
    value = programs.own(program, target)
    if not isinstance(value, pir.Value):
        raise PlanError(f"{_CALLER}: target_vars has {target!r}, which is no value of the program")
    if value.block.program != program:
        raise PlanError(
            f"{_CALLER}: a target is a value of another program than main_program. Give the one that has it"
        )
    return programs.own(evaluation, value)


def _result_named(program: pir.Program, name: str) -> pir.Value | None:
    """The value of a program that has this name and is no input, or that replaced it; None without one."""
    value = result_named(name)
    return None if value is None else programs.own(program, value)


def _without_rows(
    names: Sequence[str], cut_at: Mapping[str, pir.Value], lookups: Sequence[inference.Lookup], known: Container[str]
) -> list[str]:
    """The names of inputs, with those of ids and lengths in the place of looked up rows, where Paddle 2 cut a model."""
    inputs: list[str] = []
    for name in names:
        found = [each for each in lookups if name in cut_at and each.rows.is_same(cut_at[name])]
        ids = inference.feed_of(found[0].ids) if found else ""
        wanted = [each for each in (ids, lengths_name(ids)) if each in known] if ids else [name]
        inputs += [each for each in wanted if each not in inputs]
    return inputs


def _feeds_of(forward: ForwardProgram, known: Sequence[str], names: Sequence[str]) -> dict[str, pir.Value]:
    holes = {inference.feed_of(hole.value) for hole in forward.holes}
    for name in names:
        if name not in known:
            raise PlanError(
                f"{_CALLER}: feeded_var_names has {name!r}, and the program has no such input; it has "
                f"{', '.join(map(repr, known)) or 'none'}"
            )
    needed = {name: value for name, value in inference.inputs_of(forward.program).items() if name not in holes}
    if missing := [name for name in needed if name not in names]:
        raise PlanError(
            f"{_CALLER}: feeded_var_names is {names}, and the targets are also computed from {missing[0]!r}. Add it"
        )
    if left_out := [name for name in names if name not in needed]:
        logger.info("%s: the targets do not need %s, which the model leaves out", _CALLER, ", ".join(left_out))
    return {name: needed[name] for name in names if name in needed}


def _write_networks(
    session: Session, planned: _PlannedModel, local: Path, number: int, executor: paddle.static.Executor | None
) -> ServedModel:
    """Writes the networks and examples into a local directory, checks them, and returns the model."""
    forward, scope = planned.forward, paddle.static.global_scope()
    inputs = {**inference.inputs_of(planned.evaluation), **planned.feeds}
    given = _examples(inputs, forward, session.last_feed)
    feed = {name: given[name] for name in planned.feeds}
    expected = _expected(planned, given, executor or paddle.static.Executor(paddle.CPUPlace()))
    networks: dict[str, Network] = {FORWARD: inference.with_holes(forward)}
    is_split = inference.is_split(forward)
    if is_split:
        networks[NETWORK] = inference.split(forward)
        if (ids := inference.ids_network(forward)) is not None:
            networks[IDS] = ids
    for name, network in networks.items():
        savable, ones = inference.savable(network)
        ones += inference.guard(savable.program, savable.targets)
        values = {}
        for parameter in savable.program.global_block().all_parameters():
            if parameter.name in ones:
                dtype = str(parameter.dtype).removeprefix("paddle.").lower()
                values[parameter.name] = np.ones(list(parameter.shape), dtype)
            else:
                values[parameter.name] = _value_of(scope, parameter.name)
        network_inputs = inference.inputs_of(savable.program)
        ordered = [network_inputs[each] for each in planned.feeds if each in network_inputs]
        ordered += [value for each, value in network_inputs.items() if each not in planned.feeds]
        save_network(local / name, savable.program, ordered, savable.targets, values)
    examples: dict[str, Any] = {f"feed.{name}": value for name, value in feed.items()}
    np.savez(local / EXAMPLES, **examples)
    written = [path for path in sorted(local.iterdir()) if path.is_file()]
    described = tuple(File.of(path.name, path.read_bytes()) for path in written)
    findings = check_networks(local, expected, os.pathsep.join(_package_path()))
    return ServedModel(
        number=number,
        saved_at=datetime.now(UTC).isoformat(timespec="seconds"),
        fleet_sparse=fleet_sparse.__version__,
        paddle=paddle.__version__,
        networks=f"{number:06}",
        files=described,
        feeds=tuple(_tensor(name, value) for name, value in planned.feeds.items()),
        targets=tuple(_tensor(*pair) for pair in zip(planned.target_names, planned.targets, strict=True)),
        tables=tuple(
            Table.of(session.catalog.tables[name])
            for name in dict.fromkeys(hole.spec.embedding.name for hole in forward.holes)
        ),
        lookups=tuple(_lookup(hole) for hole in forward.holes),
        dense=_dense_arrays(session, forward.program),
        is_split=is_split,
        ragged=tuple(name for name in planned.feeds if name in forward.ragged),
        lengths=tuple(Lengths(*names) for names in forward.lengths),
        check=tuple(findings),
    )


def _expected(planned: _PlannedModel, given: Mapping[str, NDArray[Any]], executor: paddle.static.Executor) -> Expected:
    """Runs the examples in the job, which may need more inputs than the model."""
    holes = planned.forward.holes
    computed = [each.ids for hole, each in zip(holes, planned.looked_up, strict=True) if not hole.feed]
    fetched = [*planned.targets, *(each.rows for each in planned.looked_up), *computed]
    results = [np.asarray(each) for each in executor.run(planned.evaluation, feed=dict(given), fetch_list=fetched)]
    first_ids = len(planned.targets) + len(holes)
    return Expected(
        feed={name: given[name] for name in planned.feeds},
        targets=results[: len(planned.targets)],
        rows=results[len(planned.targets) : first_ids],
        computed_ids=results[first_ids:],
        tables=[hole.spec.embedding.name for hole in holes],
        target_names=planned.target_names,
    )


def _examples(inputs: Mapping[str, pir.Value], forward: ForwardProgram, last_feed: Any) -> dict[str, NDArray[Any]]:
    """The first examples of the last batch if it has all inputs, otherwise drawn ones."""
    if isinstance(last_feed, Mapping) and all(name in last_feed for name in inputs):
        fed = {name: np.array(last_feed[name]).astype(_dtype(value)) for name, value in inputs.items()}
        sizes = {len(fed[name]) for name, value in inputs.items() if value.shape and value.shape[0] == -1}
        if (
            len(sizes) == 1 and not forward.ragged and 0 not in sizes
        ):  # otherwise the first dimension is not that of the examples
            return {n: fed[n][:_NUM_EXAMPLES] if v.shape and v.shape[0] == -1 else fed[n] for n, v in inputs.items()}
        if 0 not in sizes:
            return fed
    rng = np.random.default_rng(0)
    of_ids = {hole.feed: hole.spec.embedding for hole in forward.holes}
    lengths = {name for name, _ in forward.lengths}
    drawn: dict[str, NDArray[Any]] = {}
    for name, value in inputs.items():
        sizes_of = enumerate(value.shape)
        shape = [(_OTHER_SIZE if axis else _BATCH) if size == -1 else size for axis, size in sizes_of]
        if name in of_ids:
            size = of_ids[name].size if of_ids[name].is_bounded else None
            drawn[name] = rng.integers(0, size or 2**31 - 1, shape).astype(_dtype(value))
        elif name in lengths:
            drawn[name] = np.ones(shape, _dtype(value))  # as many ids of a ragged field as examples
        else:
            drawn[name] = rng.random(shape).astype(_dtype(value))  # integers become 0
    return drawn


def _publish(directory: Directory, model: ServedModel, local: Path) -> None:
    """Copies the files of the networks, then replaces `SERVING.json`, then removes older networks."""
    networks = directory.child(NETWORKS)
    target = networks.child(model.networks)
    networks.remove_child(model.networks)  # of a save that did not finish
    target.make()
    for file in model.files:
        target.put(file.name, (local / file.name).read_bytes())
    target.sync()
    directory.replace(files.NAME, model.to_json())
    for name in networks.names():
        if name != model.networks:
            try:
                networks.remove_child(name)
            except SnapshotError as error:
                logger.warning("%s: older networks stay: %s", _CALLER, error)


def _newest(directory: Directory) -> int:
    """Number of the newest snapshot of all tables among the rows; 0 if there is none."""
    store = SnapshotStore(directory.child(ROWS))
    return max((store.manifest(name).number for name in store.snapshots()), default=0)


def _directory_of(root: str, dirname: str) -> Directory:
    """The directory as this worker sees it."""
    if is_url(dirname) or Path(dirname).is_absolute():
        return directory_at(dirname)
    return directory_at(f"{root.rstrip('/')}/{dirname}" if is_url(root) else str(Path(root) / dirname))


def _lookup(hole: inference.Hole) -> ModelLookup:
    embedding = hole.spec.embedding
    return ModelLookup(
        table=embedding.name,
        dim=embedding.dim,
        feed=hole.feed or None,
        shape=tuple(hole.ids.shape),
        dtype=_dtype(hole.ids),
        padding_idx=hole.spec.padding_idx,
        size=embedding.size if embedding.is_bounded else None,
    )


def _dense_arrays(session: Session, program: pir.Program) -> tuple[DenseArray, ...]:
    names = {parameter.name for parameter in program.global_block().all_parameters()}
    arrays = []
    for dense in session.catalog.dense:
        parts = zip(dense.spec.segments, dense.shapes, strict=True)
        parameters = [DenseParameter(part.name, part.offset, tuple(s)) for part, s in parts if part.name in names]
        if parameters:
            arrays.append(DenseArray(dense.spec.name, tuple(parameters)))
    return tuple(arrays)


def _value_of(scope: Any, name: str) -> NDArray[Any]:
    found = scope.find_var(name)
    if found is None or not found.get_tensor()._is_initialized():
        raise FleetSparseError(f"{_CALLER}: {name!r} has no value in the scope. Run the startup program first")
    return np.array(found.get_tensor())


def _tensor(name: str, value: pir.Value) -> Tensor:
    return Tensor(name, _dtype(value), tuple(value.shape))


def _dtype(value: pir.Value) -> str:
    return str(value.dtype).removeprefix("paddle.").removeprefix("DataType.").lower()


def _package_path() -> Sequence[str]:
    here = str(Path(fleet_sparse.__file__).resolve().parent.parent)
    return [here, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
