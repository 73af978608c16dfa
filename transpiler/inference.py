"""Makes programs for inference of a forward program: stock Paddle can save, load and run them.

`forward_part` copies what targets are computed from and replaces each lookup by a hole, an input that receives the
looked up rows. `split` and `ids_network` are made of it, by replacing or leaving out holes. `fill` replaces holes by
searches in ids and rows that are parameters; `guard` protects values from oneDNN. These two know no ops of
fleet_sparse: they work on programs that stock Paddle has loaded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import paddle
from paddle import _C_ops
from paddle.base.libpaddle import pir

from fleet_sparse.core.embedding_spec import EmbeddingSpec
from fleet_sparse.errors import PlanError

from .op_names import PREFETCH, SEGMENTS
from .placeholder import SITES, SiteSpec, parse_sites
from .raw_op import name_of
from .rewrite import TRAIN_ONLY
from .scan import producers_of, scan
from .segments import fields_with_lengths, replace_segments

_ASSIGN = "pd_op.assign_out_"
_DATA = "pd_op.data"
_PARAMETER = "builtin.parameter"
_NOT_COMPUTED = ("stop_gradient", "persistable", "op_role", "op_role_var", "op_callstack", "struct_name")
_NO_TABLES: Mapping[str, EmbeddingSpec] = {}


class Lookup(NamedTuple):
    """A lookup of a program, rewritten or not."""

    spec: SiteSpec
    ids: pir.Value
    rows: pir.Value
    """Rows that it looks up: the shape of the ids and one more dimension, dim."""
    control_flow: str
    """Names of the ops that enclose it; empty in the main block."""


class Hole(NamedTuple):
    """An input in place of a lookup."""

    spec: SiteSpec
    ids: pir.Value
    value: pir.Value
    """The input, of the shape of the looked up rows."""
    feed: str
    """Name of the input that is the ids; empty if they are computed."""


class ForwardProgram(NamedTuple):
    """A program without lookups and without anything that its targets do not need."""

    program: pir.Program
    targets: tuple[pir.Value, ...]
    holes: tuple[Hole, ...]
    lookups: tuple[int, ...]
    """Index of the lookup of each hole in `lookups_of` the original."""
    ragged: tuple[str, ...] = ()
    """Names of the inputs whose first dimension is not the number of examples: ids and weights of ragged fields."""
    lengths: tuple[tuple[str, str], ...] = ()
    """Names of the input that has the number of ids of each example of a field, and of the ids or their weights."""


class Network(NamedTuple):
    """A program with its results."""

    program: pir.Program
    targets: tuple[pir.Value, ...]


class TableParameters(NamedTuple):
    """Names and shapes of the parameters that `fill` creates for a table."""

    ids: str
    """Name of the sorted ids, `(num_ids,)` int64; tables with the same name share them, and their searches."""
    num_ids: int
    rows: str
    """Name of the rows, `(num_ids + 2, dim)`: after those of the ids the row of unseen ids and a row of zeros."""
    dim: int
    dtype: str = "float32"
    """Type of the rows: float32, float16 or int8."""
    scales: str = ""
    """Name of the factors of int8 rows, `(num_ids + 2, 1)` float32; empty for other dtypes."""


class FilledHole(NamedTuple):
    """A hole of a loaded program, as `fill` needs it."""

    value: pir.Value
    ids: pir.Value
    table: str
    padding_idx: int | None


def lookups_of(program: pir.Program, tables: Mapping[str, EmbeddingSpec] = _NO_TABLES) -> list[Lookup]:
    """The lookups of a program: placeholder ops, lookups in sparse parameters, and those that a prefetch op joins.

    Args:
        program: Is not changed.
        tables: Sparse parameters by name, as in `scan`.
    """
    found = [
        Lookup(s.spec, s.op.operand_source(0), s.op.result(0), s.control_flow) for s in scan(program, tables).sites
    ]
    for op in program.global_block().ops:
        if name_of(op) == PREFETCH:
            specs = parse_sites(op.str_attr(SITES))
            num_tables = len({spec.embedding.name for spec in specs})
            for number, spec in enumerate(specs):
                local = op.result(num_tables + number).all_used_ops()
                if local:  # otherwise nothing needs it any more
                    found.append(Lookup(spec, op.operand_source(number), local[0].result(0), ""))
    return found


def forward_part(
    program: pir.Program, targets: Sequence[pir.Value], tables: Mapping[str, EmbeddingSpec] = _NO_TABLES
) -> ForwardProgram:
    """A copy of what `targets` are computed from, with a hole in place of each lookup.

    Args:
        program: In test mode. Is not changed.
        targets: Values of its main block.
        tables: Sparse parameters by name, as in `scan`.

    Raises:
        PlanError: A target belongs to training, a lookup is inside control flow, or an op is one that stock Paddle
            cannot save.
    """
    for target in targets:
        if target.get_defining_op().has_attr(TRAIN_ONLY):
            raise PlanError(
                f"save_inference_model: a target is computed by the training part ({target.get_defining_op().name()}). "
                "Give a value of the forward part, such as the prediction"
            )
    mapping = pir.IrMapping()
    copy = program.clone(mapping)
    copied = [mapping.look_up(target) for target in targets]
    lookups = lookups_of(copy, tables)
    block = copy.global_block()
    needed = {op.id() for op in producers_of(copied)}
    used = []
    for number, lookup in enumerate(lookups):
        inside = lookup.control_flow.partition("/")[0]
        producer = lookup.rows.get_defining_op()
        if inside and any(op.id() in needed and _contains(op, producer) for op in block.ops):
            raise PlanError(
                f"save_inference_model: a lookup in table {lookup.spec.embedding.name!r} is inside "
                f"{lookup.control_flow}, which cannot be saved. Look the rows up before the control flow and use them "
                "inside"
            )
        if producer.id() in needed:
            used.append(number)
    holes = []
    with _at_start(copy):
        for number, index in enumerate(used):
            lookup = lookups[index]
            name = f"{lookup.spec.embedding.name}@lookup.{number}"
            value = paddle.static.data(name, list(lookup.rows.shape), "float32")
            holes.append(Hole(lookup.spec, lookup.ids, value, feed_of(lookup.ids)))
    for hole, index in zip(holes, used, strict=True):
        lookups[index].rows.replace_all_uses_with(hole.value)
    copied = [
        next((h.value for h, i in zip(holes, used, strict=True) if lookups[i].rows.is_same(target)), target)
        for target in copied
    ]
    ids = [hole.ids for hole in holes]
    prune(copy, [*copied, *ids, *(hole.value for hole in holes)])
    segments = [op for op in block.ops if name_of(op) == SEGMENTS]
    fields = [field for op in segments for field in fields_with_lengths(op)]
    ragged = tuple(filter(None, (feed_of(value) for field in fields if field.is_ragged for value in field.per_id)))
    pairs = ((feed_of(field.lengths), feed_of(value)) for field in fields for value in field.per_id)
    lengths = tuple(dict.fromkeys(pair for pair in pairs if all(pair)))
    with _at_start(copy):
        for op in segments:
            replace_segments(op)
    for op in block.ops:
        if name_of(op) is not None:
            raise PlanError(
                f"save_inference_model: {name_of(op)} is computed in Python, which stock Paddle cannot save. Give a "
                "target that is computed without it"
            )
    return ForwardProgram(copy, tuple(copied), tuple(holes), tuple(used), ragged, lengths)


def read_written(program: pir.Program, targets: Sequence[pir.Value]) -> tuple[pir.Value, ...]:
    """Makes what is read of a variable, after the program has written into it, the value that was written, in place.

    `paddle.static.auc` writes its results into variables. `prune` would remove these ops, which nothing reads.

    Returns:
        The targets, likewise.
    """
    writes: list[tuple[pir.Value, pir.Value]] = []

    def newest(value: pir.Value) -> pir.Value:
        return next((result for variable, result in reversed(writes) if value.is_same(variable)), value)

    for op in program.global_block().ops:
        variable = op.operand_source(1) if str(op.name()) == _ASSIGN else None
        if writes:
            for operand in op.operands():
                source = operand.source()
                if not (read := newest(source)).is_same(source):
                    operand.set_source(read)
        if variable is not None:
            op.result(0).set_type(variable.type())  # Paddle declares the op's result as that of the AUC, as int64
            writes.append((variable, op.result(0)))
    return tuple(map(newest, targets))


def prune(program: pir.Program, targets: Sequence[pir.Value]) -> None:
    """Removes all ops of the main block that `targets` do not need, in place."""
    block = program.global_block()
    needed = {op.id() for op in producers_of(targets)}
    for op in reversed(list(block.ops)):
        if op.id() not in needed:
            block.remove_op(op)


def feed_of(value: pir.Value) -> str:
    """Name of the input that `value` is; empty if it is computed."""
    op = value.get_defining_op()
    return str(op.str_attr("name")) if op is not None and str(op.name()) == _DATA else ""


def inputs_of(program: pir.Program) -> dict[str, pir.Value]:
    """Inputs of a program by name, in the order of their declaration."""
    return {feed_of(op.result(0)): op.result(0) for op in program.global_block().ops if str(op.name()) == _DATA}


def add_inputs(program: pir.Program, inputs: Mapping[str, tuple[Sequence[int], str]]) -> dict[str, pir.Value]:
    """Adds the inputs that a program does not have, in place; returns all its inputs by name.

    Args:
        program: The program.
        inputs: Shape and dtype by name.
    """
    known = inputs_of(program)
    with _at_start(program):
        for name, (shape, dtype) in inputs.items():
            if name not in known:
                known[name] = paddle.static.data(name, list(shape), dtype)
    return known


def with_holes(forward: ForwardProgram) -> Network:
    """A copy of `forward` whose results are its targets, then the ids of each hole that computes them.

    Inputs that are ids and nothing else are left out: Paddle saves no inputs that results do not need.
    """
    copy, mapping = _cloned(forward.program)
    computed = [hole.ids for hole in forward.holes if not hole.feed]
    return _pruned(copy, [mapping.look_up(value) for value in (*forward.targets, *computed)])


def is_split(forward: ForwardProgram) -> bool:
    """Returns whether all ids are known before the first row: `split` is possible."""
    computed = {op.id() for op in producers_of([hole.ids for hole in forward.holes])}
    return not any(hole.value.get_defining_op().id() in computed for hole in forward.holes)


def split(forward: ForwardProgram) -> Network:
    """A copy of `forward` whose inputs are, for each table, `<table>@rows` float32 `(rows, dim)`, and for each hole
    `<table>@index.<number>`, the position of each id in the rows, int64 of the shape of the ids.
    """
    copy, mapping = _cloned(forward.program)
    of_holes = []
    names = dict.fromkeys((hole.spec.embedding.name, hole.spec.embedding.dim) for hole in forward.holes)
    with _at_start(copy):
        rows = {name: paddle.static.data(f"{name}@rows", [-1, dim], "float32") for name, dim in names}
        indices = [
            paddle.static.data(f"{hole.spec.embedding.name}@index.{number}", list(hole.ids.shape), "int64")
            for number, hole in enumerate(forward.holes)
        ]
        inputs = [op for op in copy.global_block().ops if str(op.name()) == _DATA]
        pir.set_insertion_point_after(inputs[-1])
        for hole, index in zip(forward.holes, indices, strict=True):
            looked_up = _C_ops.embedding(index, rows[hole.spec.embedding.name], -1, False)
            mapping.look_up(hole.value).replace_all_uses_with(looked_up)
            of_holes.append(looked_up)
    targets = []
    for target in forward.targets:
        own = (value for hole, value in zip(forward.holes, of_holes, strict=True) if hole.value.is_same(target))
        targets.append(next(own, mapping.look_up(target)))
    return _pruned(copy, targets)


def ids_network(forward: ForwardProgram) -> Network | None:
    """A copy of `forward` whose results are the ids of each hole that computes them; None if there is no such hole."""
    computed = [hole.ids for hole in forward.holes if not hole.feed]
    if not computed:
        return None
    copy, mapping = _cloned(forward.program)
    return _pruned(copy, [mapping.look_up(ids) for ids in computed])


def fill(program: pir.Program, holes: Sequence[FilledHole], tables: Mapping[str, TableParameters]) -> None:
    """Replaces each hole of a loaded program by a search in ids that are a parameter, in place.

    Args:
        program: As stock Paddle loads what `with_holes` returned.
        holes: Its holes.
        tables: Parameters of each table.
    """
    block = program.global_block()
    parameters: dict[str, pir.Value] = {}
    with _at_start(program):
        for table in {each.table: tables[each.table] for each in holes}.values():
            wanted = {table.ids: ([table.num_ids], "int64"), table.rows: ([table.num_ids + 2, table.dim], table.dtype)}
            if table.scales:
                wanted[table.scales] = ([table.num_ids + 2, 1], "float32")
            for name, (shape, dtype) in wanted.items():
                if name not in parameters:
                    parameters[name] = _parameter(name, shape, dtype)
    positions: list[tuple[str, int | None, pir.Value, pir.Value]] = []  # of each search
    with paddle.static.program_guard(program, paddle.static.Program()):
        for hole in holes:
            table = tables[hole.table]
            same = (
                position
                for ids_name, padding_idx, ids, position in positions
                if (ids_name, padding_idx) == (table.ids, hole.padding_idx) and ids.is_same(hole.ids)
            )
            position = next(same, None)
            if position is None:
                pir.set_insertion_point_after(hole.ids.get_defining_op())
                position = _search(hole, parameters[table.ids], table.num_ids)
                positions.append((table.ids, hole.padding_idx, hole.ids, position))
            pir.set_insertion_point_after(position.get_defining_op())
            hole.value.replace_all_uses_with(_rows_at(position, table, parameters))
        pir.set_insertion_point_to_block_end(block)
    for hole in holes:
        block.remove_op(hole.value.get_defining_op())


def guard(program: pir.Program, targets: Sequence[pir.Value]) -> list[str]:
    """Protects values that are read more than once, in place; returns names of new parameters, each `(1,)`, of value 1.

    Paddle 3.3 computes by oneDNN unless a flag forbids it, and then may write the result of an op over its first
    input, although another op reads that input later. Each op that could do so reads a copy: the value times a
    parameter of its own that is 1, which changes no bit. Paddle removes an `assign`, and merges equal scales by 1.0.
    It also merges equal ops, so the readers of a value are those of all equal values.

    Args:
        program: A forward program.
        targets: Its results, which are read once more than by its ops.
    """
    block = program.global_block()
    names: list[str] = []
    classes = _classes(block)
    num_readers = Counter(classes.get(_key(value)) for op in _all_ops(block) for value in _values_of(op))
    num_readers.update(classes[_key(target)] for target in targets)
    num_readers.update(classes[_key(op.result(0))] for op in block.ops if str(op.name()) == _PARAMETER)
    with paddle.static.program_guard(program, paddle.static.Program()):
        for op in list(block.ops):
            value = _overwritten(op)
            if value is None or num_readers[classes[_key(value)]] < 2:
                continue
            name = f"fs_guard.{len(names)}"
            names.append(name)
            pir.set_insertion_point(block.ops[0])
            one = _parameter(name, [1], "float32")
            pir.set_insertion_point(op)
            op.operand(0).set_source(paddle.multiply(value, one))
        pir.set_insertion_point_to_block_end(block)
    return names


def savable(network: Network) -> tuple[Network, list[str]]:
    """Makes a network one that Paddle can save, in place: with a parameter, and with results that are no inputs.

    Returns:
        The network with its results, and the names of new parameters, whose values are 1.
    """
    program = network.program
    names: list[str] = []
    has_parameters = bool(program.global_block().all_parameters())
    targets: list[pir.Value] = []
    for target in network.targets:
        is_computed = str(target.get_defining_op().name()) not in (_DATA, _PARAMETER)
        is_first_use = not any(target.is_same(each) for each in targets)
        if is_computed and is_first_use and has_parameters:
            targets.append(target)
            continue
        name = f"fs_one.{len(names)}"
        names.append(name)
        dtype = str(target.dtype).removeprefix("paddle.").removeprefix("DataType.").lower()
        with _at_start(program):
            one = _parameter(name, [1] if target.shape else [], dtype)
            pir.set_insertion_point_to_block_end(program.global_block())
            targets.append(paddle.multiply(target, one))
        has_parameters = True
    return Network(program, tuple(targets)), names


def with_onnx_ops(program: pir.Program) -> None:
    """Replaces, in place, ops that paddle2onnx does not know or computes otherwise."""
    _with_exact_integers(program)
    _with_comparisons(program)


def _with_comparisons(program: pir.Program) -> None:
    """Replaces each `searchsorted`, which paddle2onnx does not know, by a count of the smaller values, in place."""
    block = program.global_block()
    with paddle.static.program_guard(program, paddle.static.Program()):
        for op in list(block.ops):
            if str(op.name()) != "pd_op.searchsorted" or len(op.operand_source(0).shape) != 1:
                continue
            pir.set_insertion_point(op)
            ends, value = (op.operand_source(number) for number in (0, 1))
            each, ends = paddle.reshape(value, [-1, 1]), paddle.reshape(ends, [1, -1])
            is_before = ends <= each if op.attrs()["right"] else ends < each
            count = paddle.sum(paddle.cast(is_before, "int64"), axis=1)
            op.result(0).replace_all_uses_with(
                count if len(value.shape) == 1 else paddle.reshape(count, paddle.shape(value))
            )
            block.remove_op(op)
        pir.set_insertion_point_to_block_end(block)


def _with_exact_integers(program: pir.Program) -> None:
    """Replaces each scale of integers by a multiplication and an addition of integers, in place.

    Paddle's scale is exact for int64; the one that paddle2onnx writes computes in float32.
    """
    block = program.global_block()
    with paddle.static.program_guard(program, paddle.static.Program()):
        for op in list(block.ops):
            if str(op.name()) != "pd_op.scale" or op.operand_source(0).dtype not in (paddle.int64, paddle.int32):
                continue
            factor, attributes = op.operand_source(1).get_defining_op().attrs().get("value"), op.attrs()
            bias = attributes["bias"]
            if factor is None or factor != int(factor) or bias != int(bias):
                continue
            pir.set_insertion_point(op)
            value, dtype = op.operand_source(0), "int64" if op.operand_source(0).dtype == paddle.int64 else "int32"
            times, plus = (paddle.full([1], int(number), dtype) for number in (factor, bias))
            if attributes["bias_after_scale"]:
                new = paddle.add(paddle.multiply(value, times), plus)
            else:
                new = paddle.multiply(paddle.add(value, plus), times)
            op.result(0).replace_all_uses_with(new)
            block.remove_op(op)
        pir.set_insertion_point_to_block_end(block)


def _classes(block: pir.Block) -> dict[tuple[int, int], int]:
    """A number for each value of a block, the same for values that equal ops compute from equal values."""
    classes: dict[tuple[int, int], int] = {}
    known: dict[tuple[Any, ...], int] = {}
    for op in block.ops:
        inputs = tuple(classes.get(_key(value), -1) for value in _values_of(op))
        attributes = {name: str(value) for name, value in op.attrs().items() if name not in _NOT_COMPUTED}
        for index in range(op.num_results()):
            of_op = (str(op.name()), inputs, tuple(sorted(attributes.items())), index)
            classes[op.id(), index] = known.setdefault(of_op, len(known))
    return classes


def _all_ops(block: pir.Block) -> Iterator[pir.Operation]:
    for op in block.ops:
        yield op
        for inner in op.blocks():
            yield from _all_ops(inner)


def _values_of(op: pir.Operation) -> list[pir.Value]:
    """Returns the values that an op reads."""
    return [v for v in op.operands_source() if v.initialized() and v.get_defining_op() is not None]


def _key(value: pir.Value) -> tuple[int, int]:
    return value.get_defining_op().id(), value.index()


def _overwritten(op: pir.Operation) -> pir.Value | None:
    """The first input of an op if its result could take its place; None if it could not."""
    if not str(op.name()).startswith("pd_op.") or str(op.name()) == _DATA:
        return None
    if op.num_operands() < 1 or op.num_results() < 1:
        return None
    value, result = op.operand_source(0), op.result(0)
    if not value.initialized() or not value.is_dense_tensor_type() or value.dtype != paddle.float32:
        return None
    if not result.initialized() or not result.is_dense_tensor_type() or not value.shape:
        return None
    return value if list(result.shape) == list(value.shape) else None


def _search(hole: FilledHole, keys: pir.Value, num_ids: int) -> pir.Value:
    """The position of each id among `keys`, of the shape of the ids; behind them that of unseen ids, then padding."""
    flat = paddle.reshape(hole.ids, [-1])
    flat = flat if flat.dtype == paddle.int64 else paddle.cast(flat, "int64")
    # Constants are int64 tensors: clip and full_like would round numbers above 2^24 to float32.
    nearest = paddle.minimum(paddle.searchsorted(keys, flat), _number(num_ids - 1))
    is_found = paddle.equal(paddle.gather(keys, nearest), flat)
    position = paddle.where(is_found, nearest, _number(num_ids))
    if hole.padding_idx is not None:
        is_padding = paddle.equal(flat, _number(hole.padding_idx))
        position = paddle.where(is_padding, _number(num_ids + 1), position)
    shape = list(hole.ids.shape)
    return paddle.reshape(position, shape if shape.count(-1) <= 1 else paddle.shape(hole.ids))


def _number(value: int) -> pir.Value:
    return paddle.full([1], value, "int64")


def _rows_at(position: pir.Value, table: TableParameters, parameters: Mapping[str, pir.Value]) -> pir.Value:
    rows = parameters[table.rows]
    if not table.scales:
        looked_up = _C_ops.embedding(position, rows, -1, False)
        return looked_up if table.dtype == "float32" else paddle.cast(looked_up, "float32")
    flat = paddle.reshape(position, [-1])
    scaled = paddle.cast(paddle.gather(rows, flat), "float32") * paddle.gather(parameters[table.scales], flat)
    shape = [*position.shape, table.dim]
    if shape.count(-1) <= 1:
        return paddle.reshape(scaled, shape)
    return paddle.reshape(scaled, paddle.concat([paddle.shape(position), paddle.full([1], table.dim, "int64")]))


def _pruned(program: pir.Program, targets: Sequence[pir.Value]) -> Network:
    prune(program, targets)
    return Network(program, tuple(targets))


def _cloned(program: pir.Program) -> tuple[pir.Program, Any]:
    mapping = pir.IrMapping()
    return program.clone(mapping), mapping


def _contains(op: pir.Operation, inner: pir.Operation) -> bool:
    return any(each.id() == inner.id() or _contains(each, inner) for block in op.blocks() for each in block.ops)


def _parameter(name: str, shape: Sequence[int], dtype: str) -> pir.Value:
    zero = paddle.nn.initializer.Constant(0)
    return paddle.static.create_parameter(list(shape), dtype, name=name, default_initializer=zero)


class _at_start:
    """Inserts at the beginning of a program, for a `with` block; afterwards at its end."""

    def __init__(self, program: pir.Program) -> None:
        self._program = program
        self._guard = paddle.static.program_guard(program, paddle.static.Program())

    def __enter__(self) -> None:
        self._guard.__enter__()
        pir.set_insertion_point(self._program.global_block().ops[0])

    def __exit__(self, *error: object) -> None:
        pir.set_insertion_point_to_block_end(self._program.global_block())
        self._guard.__exit__(*error)
