"""The collectives of `fleet.util` and `fleet.metrics` over the control plane, for jobs without Gloo.

Every worker contributes an array at a barrier and reads those of all others; shard 0 passes them on.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleet_sparse.errors import PlanError
from fleet_sparse.worker.control.control import MAX_GATHERED_BYTES

from .connection import JobConnection

_WORKERS = "worker"
_HEADERS_BYTES = 1 << 20
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


def all_gather(connection: JobConnection, value: Any) -> list[Any]:
    """Returns the values of all workers, in their order; numbers for a number, else arrays."""
    array = np.asarray(value)
    arrays = _gather(connection, array)
    return [each.item() for each in arrays] if array.ndim == 0 and np.isscalar(value) else arrays


def all_reduce(connection: JobConnection, value: Any, mode: str) -> NDArray[Any]:
    """Returns the sum, minimum or maximum of the arrays of all workers, added in their order.

    Raises:
        PlanError: `mode` is unknown, or the workers' arrays have different shapes.
    """
    if mode not in _REDUCTIONS:
        known = ", ".join(map(repr, _REDUCTIONS))
        raise PlanError(f"fleet.util.all_reduce: mode is {mode!r}, should be one of {known}")
    array = np.asarray(value)
    # A reply has the parts of all workers.
    num_values = max(1, (MAX_GATHERED_BYTES - _HEADERS_BYTES) // connection.role.num_workers // max(1, array.itemsize))
    flat, reduced = array.reshape(-1), np.empty(array.size, array.dtype)
    for begin in range(0, max(array.size, 1), num_values):
        parts = _gather(connection, flat[begin : begin + num_values])
        if other := next((index for index, part in enumerate(parts) if part.shape != parts[0].shape), 0):
            raise PlanError(
                f"fleet.util.all_reduce: worker 0 has {parts[0].size} values, worker {other} has {parts[other].size}; "
                "all workers should give arrays of one shape"
            )
        total = parts[0]
        for part in parts[1:]:
            total = _REDUCTIONS[mode](total, part)
        reduced[begin : begin + num_values] = total
    return reduced.reshape(array.shape)


def _gather(connection: JobConnection, array: NDArray[Any]) -> list[NDArray[Any]]:
    if connection.role.num_workers == 1:
        return [array]
    file = io.BytesIO()
    np.save(file, array, allow_pickle=False)
    return [np.load(io.BytesIO(part), allow_pickle=False) for part in connection.gather(file.getvalue())]
