from __future__ import annotations

from functools import partial

from benchmarks.turns import by_turns


def test_each_round_another_one_begins() -> None:
    ran: list[str] = []
    contenders = {name: partial(ran.append, name) for name in "abc"}
    for number in range(4):
        by_turns(contenders, number)
    assert "".join(ran) == "abcbcacababc"


def test_what_they_found_is_in_their_own_order() -> None:
    assert list(by_turns({"a": lambda: 1, "b": lambda: 2}, 1).items()) == [("a", 1), ("b", 2)]
