"""The channel of a chaos job that delays, doubles and reorders frames."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from typing import cast

from fleet_sparse.tools.chaos.disordered_channel import DisorderedChannel
from fleet_sparse.wire.frame_format import Buffer, Op
from fleet_sparse.worker.net.channel import Channel

NUM_FRAMES = 500


class Recorded:
    """A channel that keeps what is sent, has given replies, and whose clock a wait advances."""

    needs_receive = False

    def __init__(self, replies: Sequence[bytes] = ()) -> None:
        self.now_s = 0.0
        self.sent: list[int] = []
        self.replies = deque(replies)

    def clock(self) -> float:
        return self.now_s

    def send(self, shard: int, parts: Sequence[Buffer]) -> bool:
        assert shard == 1
        self.sent.append(number_of(parts))
        return True

    def receive(self, timeout_s: float) -> tuple[int, list[Buffer]] | None:
        if self.replies:
            return 1, [self.replies.popleft()]
        self.now_s += timeout_s
        return None

    def close(self) -> None:
        self.replies.clear()


def frame(number: int, op: int = Op.PULL) -> bytes:
    return number.to_bytes(8, "little") + op.to_bytes(2, "little")


def number_of(parts: Sequence[Buffer]) -> int:
    return int.from_bytes(bytes(parts[0][:8]), "little")


def disordered(channel: Recorded, *, is_active: bool = True, seed: int = 3) -> DisorderedChannel:
    return DisorderedChannel(cast(Channel, channel), seed=seed, is_active=lambda: is_active, clock=channel.clock)


def received(channel: DisorderedChannel, recorded: Recorded) -> list[int]:
    numbers: list[int] = []
    while channel.needs_receive or recorded.replies:
        message = channel.receive(0.01)
        if message is not None:
            assert message[0] == 1
            numbers.append(number_of(message[1]))
    return numbers


def assert_disordered(numbers: list[int], channel: DisorderedChannel) -> None:
    """Each arrives once or twice, and late ones are overtaken."""
    counts = Counter(numbers)
    assert set(counts) == set(range(NUM_FRAMES))
    assert sum(count - 1 for count in counts.values()) == channel.num_doubled > 0
    assert set(counts.values()) == {1, 2}
    first_arrivals = list(dict.fromkeys(numbers))
    assert first_arrivals != sorted(first_arrivals)
    assert channel.num_delayed > 0


def test_requests_arrive_once_or_twice_and_in_another_order() -> None:
    recorded = Recorded()
    channel = disordered(recorded)
    for number in range(NUM_FRAMES):
        assert channel.send(1, [frame(number)])
        channel.receive(0.001)
    assert received(channel, recorded) == []
    assert_disordered(recorded.sent, channel)


def test_replies_arrive_once_or_twice_and_in_another_order() -> None:
    recorded = Recorded([frame(number) for number in range(NUM_FRAMES)])
    channel = disordered(recorded)
    assert_disordered(received(channel, recorded), channel)


def test_errors_keep_their_order() -> None:
    recorded = Recorded([frame(number, Op.ERROR) for number in range(NUM_FRAMES)])
    channel = disordered(recorded)
    assert received(channel, recorded) == list(range(NUM_FRAMES))


def test_a_channel_that_is_not_active_leaves_frames_as_they_are() -> None:
    recorded = Recorded([frame(number) for number in range(NUM_FRAMES)])
    channel = disordered(recorded, is_active=False)
    for number in range(NUM_FRAMES):
        channel.send(1, [frame(number)])
    assert recorded.sent == received(channel, recorded) == list(range(NUM_FRAMES))
    assert channel.num_delayed == channel.num_doubled == 0


def test_a_request_that_is_late_is_what_it_was_when_it_was_sent() -> None:
    recorded = Recorded()
    channel = disordered(recorded)
    for number in range(NUM_FRAMES):
        memory = bytearray(frame(number))
        channel.send(1, [memory])
        memory[:8] = bytes(8)
    received(channel, recorded)
    assert set(recorded.sent) == set(range(NUM_FRAMES))


def test_frames_that_are_late_are_dropped_at_the_end() -> None:
    recorded = Recorded()
    channel = disordered(recorded)
    for number in range(NUM_FRAMES):
        channel.send(1, [frame(number)])
    assert channel.needs_receive
    channel.close()
    assert not channel.needs_receive


def test_equal_seeds_do_the_same_to_frames() -> None:
    orders = []
    for seed in (3, 3, 4):
        recorded = Recorded([frame(number) for number in range(NUM_FRAMES)])
        orders.append(received(disordered(recorded, seed=seed), recorded))
    assert orders[0] == orders[1] != orders[2]
