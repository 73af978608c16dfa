"""The exchange of lines between workers, over one that passes parts between threads."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import numpy as np
import pytest

from fleet_sparse.plugin.datasets.global_shuffle import redistributed
from fleet_sparse.plugin.datasets.lines import Lines, no_lines
from support.dataset_lines import made, rows_of


class Post:
    """Passes parts between the threads of a number of workers."""

    def __init__(self, num_workers: int) -> None:
        self.largest = 0
        self._barrier = Barrier(num_workers)
        self._parts: list[Sequence[bytes]] = [()] * num_workers

    def exchange(self, worker: int, parts: Sequence[bytes]) -> list[bytes]:
        self.largest = max(self.largest, *map(len, parts))
        self._parts[worker] = parts
        self._barrier.wait(10)
        received = [of_worker[worker] for of_worker in self._parts]
        self._barrier.wait(10)
        return received


def shuffled(of_workers: list[Lines], targets: list[np.ndarray], max_part_bytes: int) -> tuple[list[Lines], int]:
    num_workers, post = len(of_workers), Post(len(of_workers))

    def run(worker: int) -> Lines:
        def exchange(parts: Sequence[bytes]) -> list[bytes]:
            return post.exchange(worker, parts)

        return redistributed(of_workers[worker], targets[worker], worker, num_workers, exchange, max_part_bytes)

    with ThreadPoolExecutor(num_workers) as pool:
        return list(pool.map(run, range(num_workers))), post.largest


@pytest.mark.parametrize("max_part_bytes", [1, 300, 1 << 20])
@pytest.mark.parametrize("sizes", [(40, 7, 0), (5, 90), (0, 0)])
def test_every_line_arrives_at_its_worker_once(sizes: tuple[int, ...], max_part_bytes: int) -> None:
    rng = np.random.default_rng(0)
    rows = [
        [([worker, line, *range(rng.integers(0, 3))], [0.5] * rng.integers(0, 4)) for line in range(size)]
        for worker, size in enumerate(sizes)
    ]
    targets = [rng.integers(0, len(sizes), size) for size in sizes]
    of_workers = [made(each) if each else no_lines(2) for each in rows]
    found, largest = shuffled(of_workers, targets, max_part_bytes)
    routed = list(zip(rows, targets, strict=True))
    for worker, lines in enumerate(found):
        expected = [row for of_worker, to in routed for row, each in zip(of_worker, to, strict=True) if each == worker]
        assert rows_of(lines) == expected
    assert largest <= max(max_part_bytes, 100) + 24
