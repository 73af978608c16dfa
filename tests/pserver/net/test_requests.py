from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet_sparse.errors import ErrorCode
from fleet_sparse.pserver.engine.shard import Shard
from fleet_sparse.pserver.net import requests
from fleet_sparse.pserver.net.requests import Buffer, answer, deferred_answers
from fleet_sparse.wire.decode import decode
from fleet_sparse.wire.encode import encode
from fleet_sparse.wire.frame_format import Frame, Op
from support.shards import INCARNATION, SGD, FrameClient, code_of, floats, ids_of, make_shard, pull, push
from support.steps import SYNC_MODE, Worker, make_job

MAX_BYTES = 1 << 20


@pytest.fixture
def client() -> FrameClient[Shard]:
    return FrameClient(make_shard(SGD))


def asked(client: FrameClient[Shard], parts: Sequence[bytes | memoryview], max_bytes: int = MAX_BYTES) -> Frame:
    return decode(answer(client.shard, parts, max_bytes).parts, max_bytes=MAX_BYTES)


def test_malformed_request_gets_an_error_that_names_no_request(client: FrameClient[Shard]) -> None:
    reply = asked(client, [b"nonsense"])
    assert code_of(reply) is ErrorCode.MALFORMED
    assert (reply.header.request_id, reply.header.incarnation) == (0, INCARNATION)


def test_request_past_the_limit_gets_an_error(client: FrameClient[Shard]) -> None:
    parts = encode(client.frame(Op.PULL, pull(SGD, ids_of(*range(1000)))))
    assert code_of(asked(client, parts, max_bytes=4096)) is ErrorCode.TOO_LARGE


def test_fault_of_the_reply_gets_an_error_and_a_traceback(
    client: FrameClient[Shard], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def encode_or_fail(frame: Frame) -> list[bytes | memoryview]:
        if frame.error is None:
            raise ValueError("a bug")
        return encode(frame)

    monkeypatch.setattr(requests, "encode", encode_or_fail)
    reply = asked(client, encode(client.frame(Op.PULL, pull(SGD, ids_of(7)))))
    assert reply.error is not None
    assert (reply.error.code, reply.error.message) == (ErrorCode.INTERNAL, "ValueError: a bug")
    assert reply.header.request_id == 9
    assert "Traceback" in caplog.text


# Replies that come later


def push_one(worker: Worker[Shard]) -> list[Buffer]:
    return encode(worker.frame(Op.PUSH, push(SGD, ids_of(7), floats([1, 1]))))


def test_answer_says_whether_another_one_follows_and_for_whom() -> None:
    shard, (first, second) = make_job(SYNC_MODE, 2, SGD)
    waits, done = (answer(shard, push_one(worker), MAX_BYTES) for worker in (first, second))
    assert [(each.client_id, each.is_deferred) for each in (waits, done)] == [
        (first.client_id, True),
        (second.client_id, False),
    ]
    (late,) = deferred_answers(shard)
    assert (late.client_id, late.is_deferred) == (first.client_id, False)
    assert decode(late.parts, max_bytes=MAX_BYTES).header.op is Op.ACK
    assert deferred_answers(shard) == []


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_mutated_push_is_refused_and_changes_nothing(data: st.DataObject) -> None:
    client = FrameClient(make_shard(SGD))
    try:
        parts = [bytearray(part) for part in encode(client.frame(Op.PUSH, push(SGD, ids_of(7), floats([1, 1]))))]
        for _ in range(data.draw(st.integers(1, 3))):
            part = parts[data.draw(st.integers(0, len(parts) - 1))]
            index = data.draw(st.integers(0, len(part) - 1))
            part[index] ^= data.draw(st.integers(1, 255))
        sent = [bytes(part) for part in encode(client.frame(Op.PUSH, push(SGD, ids_of(7), floats([1, 1]))))]
        reply = asked(client, [bytes(part) for part in parts])
        if [bytes(part) for part in parts] != sent:
            assert code_of(reply) is not None
            assert client.rows(SGD, 7) == [[0.5, 0.5]]
    finally:
        client.shard.close()
