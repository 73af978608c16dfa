"""Prints a Program as stable text: the same Program gives the same lines in every process."""

from __future__ import annotations

from collections.abc import Iterator

from paddle.base.libpaddle import pir

from .placeholder import is_placeholder, site_of
from .raw_op import name_of

_NAMES = {"builtin.parameter": "parameter_name", "builtin.set_parameter": "parameter_name", "pd_op.data": "name"}


def describe(program: pir.Program) -> str:
    """The ops of a Program as text, one line per op: `%3 = reshape(%1, %2) : float32[-1, 24]`.

    Values are numbered in program order. A lookup shows its table, a parameter and an input show their names, and an op
    of fleet_sparse shows its kind, as `fs_prefetch`. Inner blocks are indented.
    """
    return "\n".join(_lines(program.global_block(), {}, "")) + "\n"


def _lines(block: pir.Block, numbers: dict[tuple[int, int], int], indent: str) -> Iterator[str]:
    for op in block.ops:
        operands = ", ".join(_operand(value, numbers) for value in op.operands_source())
        results = []
        for index, value in enumerate(op.results()):
            numbers[op.id(), index] = len(numbers)
            if value.use_empty() and not value.initialized():
                continue
            results.append(f"%{numbers[op.id(), index]}")
        line = f"{_name(op)}({operands})"
        if results:
            line = f"{', '.join(results)} = {line} : {', '.join(_type(value) for value in op.results())}"
        yield indent + line
        for inner in op.blocks():
            yield from _lines(inner, numbers, indent + "    ")


def _operand(value: pir.Value | None, numbers: dict[tuple[int, int], int]) -> str:
    if value is None or not value.initialized():
        return "-"
    producer = value.get_defining_op()
    if producer is None:
        return "argument"
    return f"%{numbers.get((producer.id(), value.index()), '?')}"


def _name(op: pir.Operation) -> str:
    name = name_of(op) or str(op.name()).removeprefix("pd_op.").removeprefix("builtin.")
    if is_placeholder(op):
        site = site_of(op)
        padding = "" if site.padding_idx is None else f", padding_idx={site.padding_idx}"
        return f"{name}[{site.embedding.name!r}, dim={site.embedding.dim}{padding}]"
    attribute = _NAMES.get(str(op.name()))
    return f"{name}[{op.str_attr(attribute)!r}]" if attribute else name


def _type(value: pir.Value) -> str:
    if not value.initialized() or not value.is_dense_tensor_type():
        return "-"
    return f"{str(value.dtype).removeprefix('paddle.').removeprefix('DataType.').lower()}{list(value.shape)}"
