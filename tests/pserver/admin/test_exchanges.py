"""Parts that workers leave for each other at a barrier."""

from __future__ import annotations

import pytest

from fleet_sparse.pserver.admin.exchanges import Exchanges


def exchanged(exchanges: Exchanges, sequence: int, parts: dict[int, list[bytes]]) -> None:
    for worker, of_worker in parts.items():
        exchanges.leave("name", worker, sequence, of_worker)
    exchanges.deliver("name")


def test_each_worker_gets_the_parts_for_it_in_worker_order() -> None:
    exchanges = Exchanges()
    exchanged(exchanges, 1, {1: [b"1-0", b"1-1"], 0: [b"0-0", b"0-1"]})
    assert exchanges.take("name", 0, 1) == (b"0-0", b"1-0")
    assert exchanges.take("name", 1, 1) == (b"0-1", b"1-1")


def test_parts_may_be_taken_again_until_the_next_delivery() -> None:
    exchanges = Exchanges()
    exchanged(exchanges, 1, {0: [b"a"]})
    exchanges.leave("name", 0, 2, [b"b"])
    assert [exchanges.take("name", 0, 1) for _ in range(2)] == [(b"a",)] * 2
    exchanges.deliver("name")
    assert exchanges.take("name", 0, 2) == (b"b",)
    with pytest.raises(KeyError):
        exchanges.take("name", 0, 1)


def test_workers_may_count_their_barriers_differently() -> None:
    """A worker that was started again counts from 1."""
    exchanges = Exchanges()
    exchanges.leave("name", 0, 7, [b"0-0", b"0-1"])
    exchanges.leave("name", 1, 1, [b"1-0", b"1-1"])
    exchanges.deliver("name")
    assert exchanges.take("name", 0, 7) == (b"0-0", b"1-0")
    assert exchanges.take("name", 1, 1) == (b"0-1", b"1-1")


def test_parts_that_are_left_again_replace_those_before() -> None:
    exchanges = Exchanges()
    exchanges.leave("name", 0, 1, [b"old"])
    exchanged(exchanges, 2, {0: [b"new"]})
    assert exchanges.take("name", 0, 2) == (b"new",)
