"""Reductions of arrays that workers exchange through the control plane."""

from __future__ import annotations

import io
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fleet_sparse.errors import PlanError
from fleet_sparse.plugin import collectives
from fleet_sparse.plugin.collectives import all_gather, all_reduce, check_world


def connection(*others: Callable[[Any], Any]) -> Any:
    """A connection of worker 0; each function makes the array of another worker of this one's."""

    def gather(contribution: bytes) -> list[bytes]:
        mine = np.load(io.BytesIO(contribution))
        files = [io.BytesIO() for _ in others]
        for file, other in zip(files, others, strict=True):
            np.save(file, other(mine))
        return [contribution, *(file.getvalue() for file in files)]

    return SimpleNamespace(role=SimpleNamespace(num_workers=1 + len(others)), gather=gather)


@pytest.mark.parametrize(("mode", "expected"), [("sum", [11, 22]), ("min", [1, 2]), ("max", [10, 20])])
def test_arrays_are_reduced_and_keep_shape_and_dtype(mode: str, expected: list[int]) -> None:
    reduced = all_reduce(connection(lambda mine: 10 * mine), np.array([[1], [2]], np.int64), mode)
    assert (reduced.tolist(), reduced.dtype) == ([[each] for each in expected], np.int64)


def test_array_larger_than_a_reply_goes_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives, "MAX_GATHERED_BYTES", (1 << 20) + 2 * 8 * 3)
    job = connection(lambda mine: mine)
    sizes = []
    gather = job.gather
    job.gather = lambda contribution: sizes.append(np.load(io.BytesIO(contribution)).size) or gather(contribution)
    assert all_reduce(job, np.arange(8), "sum").tolist() == [2 * value for value in range(8)]
    assert sizes == [3, 3, 2]


def test_single_worker_exchanges_nothing() -> None:
    assert all_reduce(connection(), [1.5], "sum").tolist() == [1.5]
    assert all_gather(connection(), 2) == [2]


def test_arrays_of_different_shapes_are_refused() -> None:
    with pytest.raises(PlanError, match="worker 0 has 2 values, worker 1 has 3"):
        all_reduce(connection(lambda mine: np.ones(3)), np.ones(2), "sum")


def test_unknown_reduction_is_refused() -> None:
    with pytest.raises(PlanError, match=r"'mean'.*'sum', 'min', 'max'"):
        all_reduce(connection(), [1], "mean")


@pytest.mark.parametrize("world", ["server", "all"])
def test_collectives_with_pservers_are_refused(world: str) -> None:
    with pytest.raises(PlanError, match=f"comm_world is '{world}'"):
        check_world("fleet.util.barrier", world)
