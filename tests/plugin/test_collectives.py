"""Reductions of arrays that workers exchange through the control plane."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fleet_sparse.errors import PlanError
from fleet_sparse.plugin import collectives
from fleet_sparse.plugin.collectives import all_gather, all_reduce, check_world


class Job:
    """Workers in threads, whose connections exchange contributions as pservers do."""

    def __init__(self, num_workers: int) -> None:
        self.contributions: list[bytes] = [b""] * num_workers
        self.sizes: list[int] = []  # of the contributions of worker 0
        self._barrier = Barrier(num_workers, timeout=10)
        self._role = SimpleNamespace(num_workers=num_workers)

    def run(self, call: Callable[..., Any], *values: Any, **arguments: Any) -> list[Any]:
        """The results of a collective, or the errors that it raises, by worker."""
        with ThreadPoolExecutor(len(values)) as pool:
            tasks = [
                pool.submit(call, self._connection(worker), value, **arguments) for worker, value in enumerate(values)
            ]
        return [task.exception() or task.result() for task in tasks]

    def _connection(self, worker: int) -> Any:
        def gather(contribution: bytes) -> list[bytes]:
            self.contributions[worker] = contribution
            self.sizes += [len(contribution)] * (worker == 0)
            self._barrier.wait()
            gathered = list(self.contributions)
            self._barrier.wait()
            return gathered

        return SimpleNamespace(role=self._role, gather=gather)


def refused(results: list[Any]) -> str:
    """The message of the error that all workers raise."""
    assert [type(each) for each in results] == [PlanError] * len(results)
    (message,) = {str(each) for each in results}
    return message


@pytest.mark.parametrize(("mode", "expected"), [("sum", [11, 22]), ("min", [1, 2]), ("max", [10, 20])])
def test_arrays_are_reduced_and_keep_shape_and_dtype(mode: str, expected: list[int]) -> None:
    mine = np.array([[1], [2]], np.int64)
    for reduced in Job(2).run(all_reduce, mine, 10 * mine, mode=mode):
        assert (reduced.tolist(), reduced.dtype) == ([[each] for each in expected], np.int64)


def test_array_larger_than_a_reply_goes_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives, "MAX_GATHERED_BYTES", (1 << 20) + 2 * 8 * 3)
    job = Job(2)
    for reduced in job.run(all_reduce, np.arange(8), np.arange(8), mode="sum"):
        assert reduced.tolist() == [2 * value for value in range(8)]
    _, *parts = job.sizes
    assert [size - parts[-1] for size in parts] == [8, 8, 0]


def test_single_worker_exchanges_nothing() -> None:
    job = Job(1)
    assert job.run(all_reduce, [1.5], mode="sum")[0].tolist() == [1.5]
    assert job.run(all_gather, 2) == [[2]]
    assert job.sizes == []


def test_values_are_gathered_in_worker_order() -> None:
    assert Job(2).run(all_gather, 1, 2.5) == [[1, 2.5]] * 2
    (arrays, _) = Job(2).run(all_gather, [1, 2], np.empty(0))
    assert [array.tolist() for array in arrays] == [[1, 2], []]


@pytest.mark.parametrize("other", [np.ones(3, np.float32), np.ones(2, np.int64)])
def test_reduced_arrays_that_differ_are_refused_everywhere(other: Any) -> None:
    message = refused(Job(2).run(all_reduce, np.ones(2, np.float32), other, mode="sum"))
    assert f"worker 0 has 2 values of float32, worker 1 has {other.size} of {other.dtype}" in message


def test_gathering_too_much_is_refused_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives, "MAX_GATHERED_BYTES", (1 << 20) + 80)
    assert "88 bytes, should have at most 80" in refused(Job(2).run(all_gather, 1.0, np.ones(10)))


@pytest.mark.parametrize("value", ["abc", None, {"a": 1}, [[1], [2, 3]]])
@pytest.mark.parametrize(("call", "arguments"), [(all_gather, {}), (all_reduce, {"mode": "sum"})])
def test_value_that_is_not_numeric_is_refused_everywhere(
    value: Any, call: Callable[..., Any], arguments: dict[str, str]
) -> None:
    message = refused(Job(2).run(call, 1, value, **arguments))
    assert f"fleet.util.{call.__name__}: the value of worker 1 is a {type(value).__name__}" in message


def test_unknown_reduction_is_refused() -> None:
    assert all(name in refused(Job(1).run(all_reduce, [1], mode="mean")) for name in ("'mean'", "'sum', 'min', 'max'"))


@pytest.mark.parametrize("world", ["server", "all"])
def test_collectives_with_pservers_are_refused(world: str) -> None:
    with pytest.raises(PlanError, match=f"comm_world is '{world}'"):
        check_world("fleet.util.barrier", world)
