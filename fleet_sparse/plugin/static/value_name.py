"""`Value.name` for results of ops, and the values that such names stand for in a fetch list.

Paddle 3.3 gives names to inputs and parameters only, and fetches no value by its name; Paddle 2 did both.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from paddle.base.libpaddle import pir

_values: WeakKeyDictionary[pir.Program, dict[str, pir.Value]] = WeakKeyDictionary()  # that were asked for their names


def with_names(stock: Any) -> property:
    """Wraps the property `pir.Value.name`."""

    def name(value: pir.Value) -> str:
        producer = value.get_defining_op()
        if value.has_name or producer is None:
            return str(stock.fget(value))
        text = f"{str(producer.name()).rpartition('.')[2]}_{producer.id()}.tmp_{value.index()}"
        _values.setdefault(value.block.program, {})[text] = value
        return text

    return property(name, stock.fset)


def value_named(program: pir.Program, name: str) -> pir.Value | None:
    """The input, parameter or result of `program` with this name; None if there is none."""
    known = _values.get(program, {}).get(name)
    if known is not None:
        return known
    for op in program.global_block().ops:
        kind = str(op.name())
        attribute = {"builtin.parameter": "parameter_name", "pd_op.data": "name"}.get(kind)
        if attribute is not None and op.str_attr(attribute) == name:
            return op.result(0)
    return None


def result_named(name: str) -> pir.Value | None:
    """The result of an op that was asked for its name and has this one; None if there is none.

    It may be that of a lookup which was replaced.
    """
    return next((values[name] for values in _values.values() if name in values), None)


def copy_names(program: pir.Program, copy: pir.Program) -> None:
    """Makes the names that are asked for in `program` names in a copy of it."""
    _values[copy] = _values.setdefault(program, {})
