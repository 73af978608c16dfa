"""Sparse parameters: weights of `paddle.nn.Embedding(sparse=True)` and of `functional.embedding` with `sparse=True`.

In Paddle 2, pservers held them as tables. Until their Program is given to fleet they are parameters like all others.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from typing import NamedTuple

from paddle.base.libpaddle import pir

from fleet_sparse.core.initializer import Initializer, constant, normal, truncated_normal, uniform

_LOOKUP = "pd_op.embedding"
_PARAMETER = "builtin.parameter"
_SET_PARAMETER = "builtin.set_parameter"


class SparseParameter(NamedTuple):
    """A parameter that sparse lookups read."""

    name: str
    weight: pir.Value
    other_users: tuple[str, ...]
    """Names of the ops that read it and are no sparse lookups of the main block."""


def parameter_of(op: pir.Operation) -> str:
    """Name of the parameter in which `op` looks rows up with `sparse=True`; empty for every other op."""
    if str(op.name()) != _LOOKUP or not op.attrs()["sparse"]:
        return ""
    weight = op.operand_source(1).get_defining_op()
    is_parameter = weight is not None and str(weight.name()) == _PARAMETER
    return str(weight.str_attr("parameter_name")) if is_parameter else ""


def padding_of(op: pir.Operation) -> int | None:
    """Id whose row reads as zeros in the lookup `op` of Paddle; None for none."""
    padding_idx = int(op.attrs()["padding_idx"])
    return None if padding_idx < 0 else padding_idx


def sparse_parameters(program: pir.Program) -> list[SparseParameter]:
    """The sparse parameters of `program`, in the order of their first lookup."""
    block = program.global_block()
    lookups = {op.id(): name for op in block.ops if (name := parameter_of(op))}
    found: dict[str, SparseParameter] = {}
    for op in _all_ops(block):
        name = parameter_of(op)
        if name and name not in found:
            weight = op.operand_source(1)
            others = [user for user in weight.all_used_ops() if user.id() not in lookups]
            found[name] = SparseParameter(name, weight, tuple(str(user.name()) for user in others))
    return list(found.values())


class FirstValue(NamedTuple):
    """The initial value that a startup program gives a parameter."""

    initializer: Initializer
    seed: int
    """0 if none was given."""


def first_value_of(startup_program: pir.Program, name: str) -> FirstValue | str | None:
    """Returns how `startup_program` initializes the parameter `name`.

    Returns:
        None if it does not initialize it, the name of the op if rows cannot be computed from their ids alone.
    """
    for op in reversed(startup_program.global_block().ops):
        if str(op.name()) == _SET_PARAMETER and op.str_attr("parameter_name") == name:
            return _read(op.operand_source(0).get_defining_op())
    return None


def initialized_by(program: pir.Program, names: Container[str]) -> list[str]:
    """Returns those of `names` that `program` initializes, as a startup program does."""
    ops = program.global_block().ops
    written = [str(op.str_attr("parameter_name")) for op in ops if str(op.name()) == _SET_PARAMETER]
    return [name for name in written if name in names]


def drop_initialization(program: pir.Program, names: Container[str]) -> None:
    """Removes the ops that initialize the parameters `names`, in place."""
    block = program.global_block()
    for op in list(block.ops):
        if str(op.name()) == _SET_PARAMETER and op.str_attr("parameter_name") in names:
            value = op.operand_source(0)
            block.remove_op(op)
            _drop_unused(block, value)


def _drop_unused(block: pir.Block, value: pir.Value) -> None:
    producer = value.get_defining_op()
    if producer is None or any(not result.use_empty() for result in producer.results()):
        return
    inputs = [operand for operand in producer.operands_source() if operand.initialized()]
    block.remove_op(producer)
    for operand in inputs:
        _drop_unused(block, operand)


def _read(op: pir.Operation) -> FirstValue | str:
    name, attributes = str(op.name()).removeprefix("pd_op."), op.attrs()
    match name:
        case "full":
            return FirstValue(constant(float(attributes["value"])), 0)
        case "uniform":
            low, high = (_number(op.operand_source(index)) for index in (1, 2))
            if low is not None and high is not None and not attributes.get("diag_num", 0):
                return FirstValue(uniform(low, high), int(attributes["seed"]))
        case "gaussian":
            return FirstValue(normal(float(attributes["mean"]), float(attributes["std"])), int(attributes["seed"]))
        case "truncated_gaussian_random":
            numbers = (float(attributes[key]) for key in ("mean", "std", "a", "b"))
            return FirstValue(truncated_normal(*numbers), int(attributes["seed"]))
    return name


def _number(value: pir.Value) -> float | None:
    producer = value.get_defining_op()
    is_number = producer is not None and str(producer.name()) == "pd_op.full"
    return float(producer.attrs()["value"]) if is_number else None


def _all_ops(block: pir.Block) -> Iterator[pir.Operation]:
    for op in block.ops:
        yield op
        for inner in op.blocks():
            yield from _all_ops(inner)
