"""Threads that share the items of one iterator."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from fleet_sparse.plugin.datasets.trainers import share_out

NUM_ITEMS = 40


class Shared:
    """Runs `share_out`, and notes what was called on which thread."""

    def __init__(self, num_threads: int, *, failing: int | None = None) -> None:
        self.done: list[int] = []
        self.threads: set[int] = set()
        self.noted: list[int] = []
        self.num_ends = 0
        self.num_begun = 0
        self._all_begun = threading.Barrier(num_threads)
        self._met: set[int] = set()
        self._failing = failing
        self._num_threads = num_threads

    def run(self, items: Iterator[int]) -> None:
        share_out(items, [self.work] * self._num_threads, self.end, lambda: self.noted.append(threading.get_ident()))

    def work(self, item: int) -> None:
        thread = threading.get_ident()
        self.num_begun += 1
        if item > 0 and thread not in self._met:  # the first item is done alone
            self._met.add(thread)
            self._all_begun.wait(10)
        self.threads.add(thread)
        if item == self._failing:
            raise ValueError(item)
        self.done.append(item)

    def end(self) -> None:
        self.num_ends += 1


@pytest.mark.parametrize("num_threads", [1, 3])
def test_every_item_is_given_to_one_thread(num_threads: int) -> None:
    shared = Shared(num_threads)
    shared.run(iter(range(NUM_ITEMS)))
    assert sorted(shared.done) == list(range(NUM_ITEMS))
    assert len(shared.threads) == num_threads
    assert threading.get_ident() in shared.threads
    assert len(shared.noted) == NUM_ITEMS
    assert set(shared.noted) == shared.threads
    assert shared.num_ends == 0


def test_first_item_is_done_before_others_begin() -> None:
    shared, begun = Shared(3), []

    def items() -> Iterator[int]:
        for item in range(NUM_ITEMS):
            begun.append(list(shared.done))
            yield item

    shared.run(items())
    assert begun[1] == [0]


@pytest.mark.parametrize("num_threads", [1, 3])
def test_nothing_is_shared_without_items(num_threads: int) -> None:
    shared = Shared(num_threads)
    shared.run(iter([]))
    assert (shared.done, shared.noted) == ([], [])


def test_an_error_ends_all_threads_and_is_raised() -> None:
    shared = Shared(3, failing=10)
    with pytest.raises(ValueError, match="10"):
        shared.run(iter(range(10**6)))
    assert len(shared.done) < 10**6
    assert shared.num_ends == 1
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("fleet_sparse-train")]


def test_an_exit_on_any_thread_is_raised() -> None:
    def leave(item: int) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise SystemExit(3)
        exited.wait(10)

    exited = threading.Event()
    with pytest.raises(SystemExit):
        share_out(iter(range(NUM_ITEMS)), [lambda item: None, leave, leave], exited.set, lambda: None)


def test_an_error_of_the_items_is_raised_after_those_before_it() -> None:
    def items() -> Iterator[Any]:
        yield from range(NUM_ITEMS)
        raise OSError("end")

    shared = Shared(2)
    with pytest.raises(OSError, match="end"):
        shared.run(items())
    assert sorted(shared.done) == list(range(NUM_ITEMS))
