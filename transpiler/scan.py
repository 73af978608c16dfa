"""Reads a Program: where its flagged lookups are and which ops compute their ids. Changes nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import paddle
from paddle.base.libpaddle import pir

from fleet_sparse.core.embedding_spec import EmbeddingSpec

from .op_names import UPDATE
from .placeholder import SiteSpec, is_placeholder, site_of
from .raw_op import name_of
from .sparse_parameter import padding_of, parameter_of

# Ops whose output has the integers of their first operand, in the same order.
_SAME_VALUES = frozenset(
    f"pd_op.{name}" for name in ("reshape", "squeeze", "unsqueeze", "flatten", "cast", "assign", "share_data_")
)

SHOW_CLICK = "fleet_sparse_show_click"
"""Attribute of an op that reads rows whose first two values are shows and clicks."""

_INTEGERS = (paddle.int64, paddle.int32)
_NO_TABLES: Mapping[str, EmbeddingSpec] = MappingProxyType({})


class Site(NamedTuple):
    """One flagged lookup in a Program."""

    number: int
    """Index among the lookups of the Program, in program order, from 0."""
    spec: SiteSpec
    op: pir.Operation
    """A placeholder op, or Paddle's lookup in a sparse parameter."""
    control_flow: str
    """Names of the ops that enclose it, outermost first, as in `pd_op.while/pd_op.if`; empty in the main block."""
    ids_need: tuple[int, ...]
    """Numbers of the lookups whose rows its ids are computed from."""
    position: int
    """Index of its op in the main block; -1 in control flow."""
    fed_by: tuple[str, ...]
    """Names of the inputs that hold its ids, one after the other, perhaps in another shape or integer type; empty if
    ids are computed."""
    producers: tuple[tuple[int, pir.Operation], ...]
    """The ops of the main block that its ids are computed from, with their positions, in program order."""

    def __str__(self) -> str:
        return f"lookup {self.number} (table {self.spec.embedding.name!r})"


class ScannedProgram(NamedTuple):
    """The flagged lookups of a Program."""

    sites: tuple[Site, ...]
    is_trained: bool
    """True if the Program was rewritten for training before."""


def scan(program: pir.Program, tables: Mapping[str, EmbeddingSpec] = _NO_TABLES) -> ScannedProgram:
    """Finds the flagged lookups of `program`, including those in control flow.

    Args:
        program: Is not changed.
        tables: Sparse parameters by name; lookups in them count as flagged.
    """
    block = program.global_block()
    order = {op.id(): position for position, op in enumerate(block.ops)}
    lookups = list(_lookups(block, (), tables))
    counted = _with_show_click(block, order, lookups)
    lookups = [(op, _counting(spec, counted), path) for op, spec, path in lookups]
    number_of = {op.id(): number for number, (op, _, _) in enumerate(lookups)}
    sites = []
    for number, (op, spec, path) in enumerate(lookups):
        producers = _producers(op, order) if not path else []
        sites.append(
            Site(
                number=number,
                spec=spec,
                op=op,
                control_flow="/".join(path),
                ids_need=tuple(sorted({number_of[p.id()] for p in producers if p.id() in number_of})),
                position=order.get(op.id(), -1),
                fed_by=_inputs_of(op.operand_source(0)),
                producers=tuple((order[p.id()], p) for p in producers),
            )
        )
    is_trained = any(name_of(op) == UPDATE for op in block.ops)
    return ScannedProgram(tuple(sites), is_trained)


def batch_inputs(loss: pir.Value) -> dict[str, pir.Value]:
    """The inputs that `loss` is computed from and whose first dimension is -1, by name."""
    block = loss.get_defining_op().get_parent_block()
    order = {op.id(): position for position, op in enumerate(block.ops)}
    producers = _producers(loss.get_defining_op(), order)
    inputs = {op.str_attr("name"): op.result(0) for op in producers if str(op.name()) == "pd_op.data"}
    return {name: value for name, value in inputs.items() if value.shape and value.shape[0] == -1}


def parameters_of(loss: pir.Value) -> set[str]:
    """Names of the parameters that `loss` is computed from."""
    block = loss.get_defining_op().get_parent_block()
    order = {op.id(): position for position, op in enumerate(block.ops)}
    producers = _producers(loss.get_defining_op(), order)
    return {op.str_attr("parameter_name") for op in producers if str(op.name()) == "builtin.parameter"}


def producers_of(values: Sequence[pir.Value]) -> list[pir.Operation]:
    """The ops of the main block that `values` of it are computed from, in program order, their own ops included."""
    if not values:
        return []
    own = [value.get_defining_op() for value in values]
    order = {op.id(): position for position, op in enumerate(own[0].get_parent_block().ops)}
    found = {op.id(): op for op in own}
    for op in own:
        found.update({each.id(): each for each in _producers(op, order)})
    return sorted(found.values(), key=lambda op: order[op.id()])


def _lookups(
    block: pir.Block, path: tuple[str, ...], tables: Mapping[str, EmbeddingSpec]
) -> Iterator[tuple[pir.Operation, SiteSpec, tuple[str, ...]]]:
    for op in block.ops:
        if is_placeholder(op):
            yield op, site_of(op), path
        elif tables and (name := parameter_of(op)) in tables:
            yield op, SiteSpec(tables[name], padding_of(op)), path
        for inner in op.blocks():
            yield from _lookups(inner, (*path, str(op.name())), tables)


def _with_show_click(
    block: pir.Block, order: dict[int, int], lookups: Sequence[tuple[pir.Operation, SiteSpec, tuple[str, ...]]]
) -> set[str]:
    """Names of the tables whose rows an op with `SHOW_CLICK` reads, perhaps pooled."""
    marked = [op for op in block.ops if op.has_attr(SHOW_CLICK)]
    if not marked:
        return set()
    widths = {op.id(): op.operand_source(0).shape[-1] for op in marked}
    table_of = {op.id(): spec.embedding for op, spec, _ in lookups}
    names = set()
    for op in marked:
        for producer in _producers(op, order):
            embedding = table_of.get(producer.id())
            if embedding is not None and embedding.dim == widths[op.id()]:
                names.add(embedding.name)
    return names


def _counting(spec: SiteSpec, names: set[str]) -> SiteSpec:
    if spec.embedding.name not in names:
        return spec
    return spec._replace(embedding=dataclasses.replace(spec.embedding, has_show_click=True))


def _inputs_of(ids: pir.Value) -> tuple[str, ...]:
    producer = ids.get_defining_op()
    while producer is not None and str(producer.name()) in _SAME_VALUES:
        value = producer.operand_source(0)
        producer = value.get_defining_op() if value.dtype in _INTEGERS else None
    if producer is None:
        return ()
    if str(producer.name()) == "pd_op.concat" and len(producer.result(0).shape) == 1:
        parts = [_inputs_of(part) for part in producer.operand_source(0).get_defining_op().operands_source()]
        return tuple(name for part in parts for name in part) if all(parts) else ()
    return (str(producer.str_attr("name")),) if str(producer.name()) == "pd_op.data" else ()


def _producers(op: pir.Operation, order: dict[int, int]) -> list[pir.Operation]:
    """The ops of the main block that the inputs of `op` are computed from, in program order."""
    found: dict[int, pir.Operation] = {}
    todo = _inputs(op)
    while todo:
        producer = todo.pop()
        if producer.id() in order and producer.id() not in found:
            found[producer.id()] = producer
            todo += _inputs(producer)
    return sorted(found.values(), key=lambda producer: order[producer.id()])


def _inputs(op: pir.Operation) -> list[pir.Operation]:
    """The ops that define what `op` reads, in its own blocks as well."""
    values = [value for value in op.operands_source() if value.initialized()]
    producers = [producer for value in values if (producer := value.get_defining_op()) is not None]
    for block in op.blocks():
        for inner in block.ops:
            producers += _inputs(inner)
    return producers
