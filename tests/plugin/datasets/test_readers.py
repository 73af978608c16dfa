"""Threads that read ahead of the program."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from itertools import count, repeat
from threading import Event

import pytest

from fleet_sparse.plugin.datasets.readers import MAX_WAITING, in_turns


class Counted:
    """An iterator without end that counts what was taken, and tells when it is closed."""

    def __init__(self) -> None:
        self.num_taken = 0
        self.has_taken = Event()

    def items(self) -> Iterator[int]:
        for number in count():
            self.num_taken = number + 1
            if self.num_taken == MAX_WAITING + 1:
                self.has_taken.set()
            yield number


def test_items_of_all_sources_come_in_turns() -> None:
    sources = ["abc", "", "d", "ef"]
    assert "".join(in_turns([lambda source=source: iter(source) for source in sources], 10, Event().set)) == "adebfc"


def test_a_thread_holds_a_bounded_number_of_items() -> None:
    source = Counted()
    with closing(in_turns([source.items], 10, Event().set)) as items:
        assert next(items) == 0
        assert source.has_taken.wait(10)
        assert source.num_taken <= MAX_WAITING + 2


def test_closing_wakes_what_a_source_waits_for() -> None:
    is_ended, has_returned = Event(), Event()

    def waiting() -> Iterator[int]:
        yield 1
        is_ended.wait(10)
        has_returned.set()

    with closing(in_turns([waiting], 10, is_ended.set)) as items:
        assert next(items) == 1
    assert has_returned.wait(10)


def test_an_error_comes_after_the_items_before_it() -> None:
    def failing() -> Iterator[int]:
        yield 1
        raise ValueError("item 2")

    items = in_turns([failing, lambda: repeat(0)], 10, Event().set)
    assert [next(items), next(items)] == [1, 0]
    with pytest.raises(ValueError, match="item 2"):
        next(items)
