"""Registrations of workers in whose place another process has registered."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from fleet_sparse.core.mode import ASYNC, Mode
from fleet_sparse.errors import ErrorCode, ProtocolError
from fleet_sparse.pserver.admin.service import Supervised
from fleet_sparse.pserver.admin.snapshot_loader import load
from fleet_sparse.pserver.admin.snapshot_writer import Save
from fleet_sparse.snapshot.directory import directory_at
from fleet_sparse.wire import control_pb2 as messages
from support.controls import HeldControl, attendance, registration
from support.coordinators import Coordinator, run, train, turns
from support.logs import logged_shard, recovered
from support.shards import SGD, FrameClient, code_of, floats, ids_of, make_shard, push

BLOCK = push(SGD, ids_of(7), floats([1, 1]))
RESTARTED = Supervised(True, has_recovered=True, on_job=lambda: None, on_snapshot=lambda name: None)


def at(held: HeldControl, client_id: bytes, *, push_seq: int | None = None) -> messages.RegisterRequest:
    """Returns a repeated registration; with a `push_seq` that of a client that registered with another incarnation."""
    request = registration(SGD, client_id=client_id)
    request.incarnations.append(held.shard.incarnation + (push_seq is not None))
    if push_seq is not None:
        request.resumption.CopyFrom(messages.Resumption(push_seq=push_seq))
    return request


async def leave(held: HeldControl, client_id: bytes) -> None:
    """Opens the connection of a worker, and ends it."""
    attending = asyncio.ensure_future(held.start(attendance(0, client_id=client_id)))
    await turns()
    attending.cancel()
    await asyncio.wait({attending})


def replace_and_save(held: HeldControl, num_saves: int) -> None:
    """Another process takes the place of worker 0, saves and leaves."""
    run(lambda: leave(held, bytes(16)))
    held.call(registration(SGD, client_id=b"n" * 16))
    run(lambda: leave(held, b"n" * 16))
    for number in range(num_saves):
        run(Coordinator(held, str(number)).save)


@pytest.fixture
def exclusive(tmp_path: Path) -> HeldControl:
    """A control plane whose shard refuses clients that have not registered."""
    return HeldControl(tmp_path, shard=make_shard(only_registered=True))


def test_replaced_worker_takes_its_place_back_before_two_saves(exclusive: HeldControl) -> None:
    exclusive.call(registration(SGD))
    train(exclusive, 7)
    replace_and_save(exclusive, 1)
    exclusive.call(at(exclusive, bytes(16)))
    client = FrameClient(exclusive.shard, client_id=bytes(16))
    assert code_of(client.push(BLOCK, push_seq=1)) is None
    assert client.rows(SGD, 7) == [[-0.5, -0.5]], "the push was applied once"


def test_forgotten_worker_does_not_register_again(exclusive: HeldControl) -> None:
    exclusive.call(registration(SGD))
    train(exclusive, 7)
    replace_and_save(exclusive, 2)
    with pytest.raises(ProtocolError) as caught:
        exclusive.call(at(exclusive, bytes(16)))
    assert caught.value.code is ErrorCode.STALE_EPOCH
    client = FrameClient(exclusive.shard, client_id=bytes(16))
    assert code_of(client.push(BLOCK, push_seq=1)) is ErrorCode.FORBIDDEN
    holder = FrameClient(exclusive.shard, client_id=b"n" * 16)
    assert code_of(holder.push(BLOCK)) is None, "the worker in its place trains on"


def test_worker_that_is_forgotten_while_it_waits_is_refused(exclusive: HeldControl) -> None:
    exclusive.call(registration(SGD))
    train(exclusive, 7)
    replace_and_save(exclusive, 1)
    exclusive.holds_back = True

    async def register_during_a_save() -> None:
        waiting = asyncio.ensure_future(exclusive.start(at(exclusive, bytes(16))))
        await turns()
        exclusive.let_go()  # it is known
        exclusive.shard.note_saved(5)
        await waiting

    with pytest.raises(ProtocolError) as caught:
        run(register_during_a_save)
    assert caught.value.code is ErrorCode.STALE_EPOCH
    assert not exclusive.shard.knows(bytes(16))


def test_pushes_of_a_snapshot_count_for_a_worker_that_is_late(tmp_path: Path, exclusive: HeldControl) -> None:
    exclusive.call(registration(SGD))
    for _ in range(3):
        train(exclusive, 7)
    run(Coordinator(exclusive, "first").save)
    shard = make_shard(only_registered=True)
    held = HeldControl(tmp_path, RESTARTED, shard, load(shard, directory_at(tmp_path / "model")))
    replace_and_save(held, 2)
    assert shard.ledger.applied(bytes(16)) == 0
    assert held.call(at(held, bytes(16), push_seq=2)).restored_seq == 3
    client = FrameClient(shard, client_id=bytes(16))
    client.push(BLOCK, push_seq=3)
    assert client.rows(SGD, 7) == [[-2.5, -2.5]], "it is in the snapshot, and was not applied again"


@pytest.mark.parametrize(("num_saves", "code"), [(1, None), (2, ErrorCode.STALE_EPOCH)])
def test_log_says_which_workers_are_forgotten(tmp_path: Path, num_saves: int, code: ErrorCode | None) -> None:
    shard = logged_shard(tmp_path / "log", only_registered=True)
    held = HeldControl(tmp_path, RESTARTED._replace(is_restart=False), shard)
    for worker in range(2):
        held.call(of_two(worker, bytes([worker]) * 16))
    train(held, 7)
    run(lambda: leave(held, bytes(16)))
    held.call(of_two(0, b"n" * 16))
    for _ in range(num_saves):
        save = Save(shard, "x", base=None, is_logged=True)
        save.cut()
        save.end(5)
    again = HeldControl(tmp_path, RESTARTED, recovered(shard, only_registered=True))
    again.call(of_two(0, b"n" * 16))
    run(lambda: leave(again, b"n" * 16))
    request = of_two(0, bytes(16))
    request.resumption.CopyFrom(messages.Resumption())
    assert refusal_of(again, request) is code
    FrameClient(again.shard, client_id=bytes(16)).push(BLOCK, push_seq=1)
    assert FrameClient(again.shard, client_id=b"n" * 16).rows(SGD, 7) == [[-0.5, -0.5]], "the push was applied once"


def of_two(worker: int, client_id: bytes) -> messages.RegisterRequest:
    return registration(SGD, worker=worker, num_workers=2, client_id=client_id, mode=Mode(ASYNC))


def refusal_of(held: HeldControl, request: messages.RegisterRequest) -> ErrorCode | None:
    try:
        held.call(request)
    except ProtocolError as error:
        return error.code
    return None
