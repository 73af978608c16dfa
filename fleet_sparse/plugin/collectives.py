"""The collectives of `fleet.util` and `fleet.metrics` over the control plane, for jobs without Gloo.

Every worker contributes an array at a barrier and reads those of all others; shard 0 passes them on.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from fleet_sparse.errors import PlanError
from fleet_sparse.worker.control.control import MAX_GATHERED_BYTES

from .connection import JobConnection

_WORKERS = "worker"
_HEADERS_BYTES = 1 << 20
_NUMERIC_KINDS = "biufc"
_REDUCTIONS: dict[str, Callable[[Any, Any], Any]] = {"sum": np.add, "min": np.minimum, "max": np.maximum}


def check_world(caller: str, comm_world: str) -> None:
    """Refuses a collective in which pservers take part.

    Raises:
        PlanError: `comm_world` is not 'worker'.
    """
    if comm_world != _WORKERS:
        raise PlanError(
            f"{caller}: comm_world is {comm_world!r}, should be 'worker': a pserver runs nothing of the script after "
            "fleet.run_server()"
        )


class _Header(NamedTuple):
    """Description of a worker's value, sent before the value, so that all workers refuse it together or none does."""

    type_name: str
    dtype: str
    size: int
    num_bytes: int

    @property
    def is_numeric(self) -> bool:
        return np.dtype(self.dtype).kind in _NUMERIC_KINDS


def all_gather(connection: JobConnection, value: Any) -> list[Any]:
    """Returns the values of all workers, in their order; numbers for a number, else arrays.

    Raises:
        PlanError: The value of a worker is not numeric, or all values together are too large. All workers raise it.
    """
    array = _as_array(value)
    headers = _announce(connection, "fleet.util.all_gather", value, array)
    num_bytes, max_bytes = sum(header.num_bytes for header in headers), MAX_GATHERED_BYTES - _HEADERS_BYTES
    if len(headers) > 1 and num_bytes > max_bytes:
        raise PlanError(
            f"fleet.util.all_gather: the values of all workers have {num_bytes} bytes, should have at most "
            f"{max_bytes}. Gather them in several calls"
        )
    arrays = _gather(connection, array)
    return [each.item() for each in arrays] if array.ndim == 0 and np.isscalar(value) else arrays


def all_reduce(connection: JobConnection, value: Any, mode: str) -> NDArray[Any]:
    """Returns the sum, minimum or maximum of the arrays of all workers, added in their order.

    Raises:
        PlanError: `mode` is unknown; or the value of a worker is not numeric, or the workers' arrays have different
            sizes or dtypes, which all workers raise.
    """
    if mode not in _REDUCTIONS:
        known = ", ".join(map(repr, _REDUCTIONS))
        raise PlanError(f"fleet.util.all_reduce: mode is {mode!r}, should be one of {known}")
    array = _as_array(value)
    first, *others = _announce(connection, "fleet.util.all_reduce", value, array)
    for worker, other in enumerate(others, 1):
        if (other.size, other.dtype) != (first.size, first.dtype):
            raise PlanError(
                f"fleet.util.all_reduce: worker 0 has {first.size} values of {np.dtype(first.dtype)}, worker {worker} "
                f"has {other.size} of {np.dtype(other.dtype)}; all workers should give arrays of one shape and dtype"
            )
    # A reply has the parts of all workers.
    num_values = max(1, (MAX_GATHERED_BYTES - _HEADERS_BYTES) // connection.role.num_workers // max(1, array.itemsize))
    flat, reduced = array.reshape(-1), np.empty(array.size, array.dtype)
    for begin in range(0, array.size, num_values):
        total, *parts = _gather(connection, flat[begin : begin + num_values])
        for part in parts:
            total = _REDUCTIONS[mode](total, part)
        reduced[begin : begin + num_values] = total
    return reduced.reshape(array.shape)


def _as_array(value: Any) -> NDArray[Any]:
    try:
        return np.asarray(value)
    except ValueError:  # lists of different lengths
        return np.empty(0, object)


def _announce(connection: JobConnection, caller: str, value: Any, array: NDArray[Any]) -> list[_Header]:
    """Returns the headers of all workers, whose values are numeric."""
    mine = _Header(type(value).__name__, array.dtype.str, array.size, array.nbytes)
    headers = [mine]
    if connection.role.num_workers > 1:
        headers = [_Header(*json.loads(text)) for text in connection.gather(json.dumps(mine).encode())]
    for worker, header in enumerate(headers):
        if not header.is_numeric:
            raise PlanError(
                f"{caller}: the value of worker {worker} is a {header.type_name} of dtype {np.dtype(header.dtype)}, "
                "should be a number or an array of numbers"
            )
    return headers


def _gather(connection: JobConnection, array: NDArray[Any]) -> list[NDArray[Any]]:
    if connection.role.num_workers == 1:
        return [array]
    # Not np.load, which parses Python: on CPython 3.11 that fails at times if two threads do it at once.
    mine = msgspec.msgpack.encode((array.dtype.str, array.shape, array.tobytes()))
    parts = [msgspec.msgpack.decode(part) for part in connection.gather(mine)]
    return [np.frombuffer(data, dtype).reshape(shape).copy() for dtype, shape, data in parts]
