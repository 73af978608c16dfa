"""Random, structured and mutated frames, on both sides: what is accepted is what was sent."""

from __future__ import annotations

import random
import socket
from collections.abc import Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet_sparse.errors import FleetSparseError, ProtocolError
from fleet_sparse.settings import Settings
from fleet_sparse.wire.decode import decode
from fleet_sparse.wire.encode import encode
from fleet_sparse.wire.frame_format import HEADER_BYTES, Buffer, Frame
from fleet_sparse.wire.stream import FrameMemory, FrameReader
from support.client_calls import pulled, push
from support.frames import MAX_BYTES, frames, resized, values_of
from support.fuzzing import Cases, flat_memory, fuzzed_parts, fuzzed_stream, message, mutated
from support.in_process import InProcessCluster
from support.in_process_channel import InProcessChannel
from support.streams import pair


@pytest.mark.cases(20_000, 500_000)
def test_decoded_frames_encode_to_the_same_bytes(cases: Cases) -> None:
    rng, num_accepted = cases.rng, 0
    with flat_memory():
        for _ in range(cases.num_cases):
            parts = fuzzed_parts(rng)
            with suppress(ProtocolError):
                frame = decode(parts, max_bytes=MAX_BYTES)
                assert encode(frame) == parts
                num_accepted += 1
    assert 0.02 < num_accepted / cases.num_cases < 0.9
    cases.report(accepted=num_accepted)


edits = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 400), st.binary(max_size=9)), max_size=3)


@given(frames(), edits, st.booleans())
def test_edited_frames_are_refused_or_equal(
    frame: Frame, edits: list[tuple[int, int, bytes]], is_resized: bool
) -> None:
    sent = [bytes(part) for part in encode(frame)]
    parts = list(sent)
    for part, offset, data in edits:
        index = part % len(parts)
        begin = offset % (len(parts[index]) + 1)
        parts[index] = parts[index][:begin] + data + parts[index][begin + len(data) :]
    if is_resized and len(parts[0]) >= len(sent[0]):
        parts = resized(parts)
    with suppress(ProtocolError):
        found = decode(parts, max_bytes=MAX_BYTES)
        assert encode(found) == parts
        assert parts != sent or values_of(found) == values_of(frame)


# Streams


def without_padding(data: bytes, parts: Sequence[bytes]) -> bytes:
    """A message whose padding, which nobody reads, is zeros."""
    changed, end = bytearray(data), 16 + 8 * len(parts)
    for part in parts:
        end += len(part)
        changed[end : end + -len(part) % 8] = bytes(-len(part) % 8)
        end += -len(part) % 8
    return bytes(changed[:end])


def read_all(reader: FrameReader, end: socket.socket) -> list[list[bytes]]:
    """All frames that have arrived; the last one is empty if the stream was refused."""
    found: list[list[bytes]] = []
    try:
        while True:
            parts = reader.next_frame()
            if parts is not None:
                found.append([bytes(part) for part in parts])
            elif not reader.read(end):
                return found
    except BlockingIOError:
        return found
    except ProtocolError:
        return [*found, []]


@pytest.mark.cases(5_000, 300_000)
def test_frames_of_a_stream_are_its_bytes(cases: Cases) -> None:
    rng, num_refused, num_frames = cases.rng, 0, 0
    memory = FrameMemory()
    ends = pair()
    with flat_memory():
        for _ in range(cases.num_cases):
            data, sent = fuzzed_stream(rng)
            reader, found = FrameReader(MAX_BYTES, memory), []
            cut = rng.randrange(len(data) + 1)
            for piece in (data[:cut], data[cut:]):
                ends[0].sendall(piece)
                if not found or found[-1]:
                    found += read_all(reader, ends[1])
            is_refused = bool(found) and not found[-1]
            if is_refused:
                found.pop()
                with suppress(BlockingIOError):
                    ends[1].recv(1 << 20)
            num_refused += is_refused
            num_frames += len(found)
            assert not sent or (found, is_refused) == (sent, False)
            at = 0
            for parts in found:
                while data[at : at + 16] == message([]):
                    at += 16
                expected = message(parts)
                assert without_padding(data[at:], parts) == expected
                at += len(expected)
    for end in ends:
        end.close()
    assert num_refused > cases.num_cases / 10
    cases.report(refused=num_refused, frames=num_frames)


# A client, and what it is answered


IDS = range(-3, 5)
QUICK = Settings(retry_s=0.002, deadline_s=20.0)
IMPATIENT = replace(QUICK, deadline_s=0.02)


@pytest.mark.cases(30, 1_000)
def test_damaged_replies_are_asked_for_again(cases: Cases, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(InProcessChannel, "stays_on_machine", lambda *_: False)  # so all bytes have a checksum
    rng = cases.rng
    with closing(InProcessCluster(2)) as cluster, flat_memory():
        client, num_damaged = cluster.client(QUICK), 0

        def damage(shard: int, request: Sequence[Buffer], reply: Sequence[Buffer]) -> Sequence[Buffer]:
            nonlocal num_damaged
            sent = [bytes(part) for part in reply]
            parts = (mutated(rng, sent) if rng.random() < 0.4 else sent) or [b""]  # a frame has a part
            num_damaged += parts != sent
            return parts

        cluster.channel.changes_reply = damage
        value = 1.0
        for step in range(1, cases.num_cases + 1):
            push(cluster, client, cluster.table, IDS, 4.0 if step % 2 else -4.0, step)
            value += -1.0 if step % 2 else 1.0
            assert pulled(cluster, client, cluster.table, IDS) == {number: [value] * 4 for number in IDS}
    cases.report(damaged=num_damaged)


@pytest.mark.cases(10, 500)
def test_forged_replies_give_rows_or_an_error(cases: Cases) -> None:
    rng, num_errors, num_rows = cases.rng, 0, 0
    with ExitStack() as stack, flat_memory():
        for number in range(cases.num_cases):
            if number % 100 == 0:  # a cluster keeps its clients
                stack.close()
                cluster = stack.enter_context(closing(InProcessCluster(2)))
            client = cluster.client(IMPATIENT)
            cluster.channel.changes_reply = lambda shard, request, reply: forged(rng, [*map(bytes, reply)])
            try:
                push(cluster, client, cluster.table, IDS, 0.0)
                pulled(cluster, client, cluster.table, IDS)
                num_rows += 1
            except FleetSparseError:
                num_errors += 1
            client.abandon()
    assert num_rows
    cases.report(errors=num_errors, rows=num_rows)


def forged(rng: random.Random, parts: list[bytes]) -> list[bytes]:
    """A mutated frame with the right lengths and checksum."""
    changed = mutated(rng, parts)
    return resized(changed) if changed and len(changed[0]) >= HEADER_BYTES else parts
