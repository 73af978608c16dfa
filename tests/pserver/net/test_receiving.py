"""Frames of several peers against a model: all that is admitted fits, and nobody is forgotten."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given

from fleet_sparse.pserver.net.receiving import ReceivingBytes


def ignore(_: str) -> None:
    pass


def test_peers_are_admitted_in_the_order_in_which_they_asked() -> None:
    resumed: list[str] = []
    receiving = ReceivingBytes[str](100, ignore, resumed.append)
    assert receiving.take("a", 90)
    assert not receiving.take("b", 50)
    assert not receiving.take("c", 50)
    assert not receiving.take("d", 50)
    receiving.release("a")
    assert resumed == ["b", "c"]
    assert receiving.take("b", 50)
    assert receiving.num_bytes == 100


def test_slowest_frame_is_named_only_while_others_wait() -> None:
    receiving = ReceivingBytes[str](100, ignore, ignore)
    receiving.take("a", 90)
    assert receiving.slowest(10.0) is None
    receiving.take("b", 50)
    assert receiving.slowest(0.0) is None
    assert receiving.slowest(10.0) == "a"


def test_small_frames_do_not_overtake_a_waiting_one() -> None:
    receiving = ReceivingBytes[str](100, ignore, ignore)
    receiving.take("a", 90)
    assert not receiving.take("b", 50)
    assert not receiving.take("c", 5)


actions = st.lists(st.tuples(st.sampled_from(["take", "release", "withdraw"]), st.integers(0, 5), st.integers(1, 120)))


@given(actions)
def test_admitted_bytes_stay_within_the_bound(steps: list[tuple[str, int, int]]) -> None:
    admitted: dict[int, int] = {}
    asked: dict[int, int] = {}
    paused: list[int] = []
    receiving = ReceivingBytes[int](100, paused.append, lambda peer: admitted.update({peer: asked.pop(peer)}))
    for action, peer, num_bytes in steps:
        if action == "take":
            if peer in asked or peer in admitted:
                continue
            if receiving.take(peer, num_bytes):
                admitted[peer] = num_bytes
            else:
                asked[peer] = num_bytes
                assert paused[-1] == peer
        elif action == "release":
            admitted.pop(peer, None)
            receiving.release(peer)
        else:
            admitted.pop(peer, None)
            asked.pop(peer, None)
            receiving.withdraw(peer)
        assert receiving.num_bytes == sum(admitted.values())
        assert receiving.num_bytes <= 100 or len(admitted) == 1
        assert receiving.num_waiting == len(asked)
        assert admitted or not asked
