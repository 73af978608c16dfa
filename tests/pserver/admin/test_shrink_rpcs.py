"""A shrink is carried out once and as a whole, although its call is repeated and pservers die."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fleet_sparse.core.criteria import MIN_NORM, Criterion
from fleet_sparse.errors import LogFull
from fleet_sparse.pserver.admin.log_recovery import write_checkpoint
from fleet_sparse.pserver.log.log_format import Kind
from fleet_sparse.pserver.log.log_reader import LogReader
from fleet_sparse.wire import control_pb2 as messages
from support.controls import HeldControl, barrier, num_removed, registration
from support.coordinators import in_loop
from support.logs import close, logged_shard, recovered, state_of
from support.shards import ADAM, INCARNATION, SGD, FrameClient, floats, ids_of, push


def request(shrink_id: str, min_norm: float = 1.0, *, decay: float = 0.5, dry_run: bool = False) -> Any:
    criteria = [messages.ShrinkCriterion(name=MIN_NORM, value=min_norm)]
    return messages.ShrinkRequest(criteria=criteria, decay=decay, shrink_id=shrink_id, dry_run=dry_run)


def decays(held: HeldControl, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Returns the decays of the shrinks of a shard from now on."""
    found, shrink = list[float](), held.shard.shrink

    def shrink_and_note(*arguments: Any, **options: Any) -> Any:
        if not options["dry_run"]:
            found.append(options["decay"])
        return shrink(*arguments, **options)

    monkeypatch.setattr(held.shard, "shrink", shrink_and_note)
    return found


@in_loop
async def test_a_shrink_that_is_sent_again_is_carried_out_once(
    held: HeldControl, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = decays(held, monkeypatch)
    for shrink_id in ("a", "a", "b"):
        await held.start(request(shrink_id))
    assert found == [0.5, 0.5]


@in_loop
async def test_a_dry_run_between_two_calls_repeats_no_shrink(
    held: HeldControl, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = decays(held, monkeypatch)
    await held.start(request("a"))
    await held.start(request("b", dry_run=True))
    await held.start(request("a"))
    assert found == [0.5]


@in_loop
async def test_a_shrink_begins_an_epoch_of_copies(held: HeldControl) -> None:
    await held.start(registration(SGD))
    epochs = []
    for sequence, dry_run in enumerate((True, True, False), 1):
        await held.start(request(f"{sequence}", dry_run=dry_run))
        epochs.append((await held.start(barrier(0, sequence=sequence))).copies_epoch)
    assert epochs == [INCARNATION, INCARNATION, INCARNATION + 1]


@in_loop
async def test_a_worker_at_an_exchange_hears_of_another_epoch(held: HeldControl) -> None:
    await held.start(registration(SGD))
    await held.start(request("a"))
    at = barrier(0)
    reply = await held.start(
        messages.ExchangeRequest(name="b", sequence=1, worker_index=0, client_id=at.client_id, parts=[b"part"])
    )
    assert reply.copies_epoch == INCARNATION + 1


# The log


@pytest.fixture
def logged(tmp_path: Path) -> Iterator[HeldControl]:
    """A control plane with a log, whose tables have rows that `request` removes, and one more."""
    held = HeldControl(tmp_path, shard=logged_shard(tmp_path / "log", SGD, ADAM))
    client = FrameClient(held.shard)
    client.push(push(SGD, ids_of(1, 2, 3), floats([0.5, 0.5], [0.4, 0.4], [9.0, 9.0])))
    client.push(push(ADAM, ids_of(1, 2), floats([0.0, 0.0, 0.0], [0.0, 0.0, 0.0]), optimizer_step=1))
    yield held
    close(held.shard)


def next_process(held: HeldControl, root: Path) -> HeldControl:
    return HeldControl(root, shard=recovered(held.shard))


@pytest.mark.guarantee("W15")
@pytest.mark.parametrize("has_checkpoint", [False, True])
def test_the_next_process_answers_a_shrink_as_the_first_one(
    logged: HeldControl, tmp_path: Path, has_checkpoint: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    reply = logged.call(request("a"))
    assert num_removed(reply) >= 2
    if has_checkpoint:
        write_checkpoint(logged.shard)
    again = next_process(logged, tmp_path)
    found = decays(again, monkeypatch)
    assert again.call(request("a")) == reply
    assert found == []
    assert state_of(again.shard) == state_of(logged.shard)
    close(again.shard)


@pytest.mark.guarantee("W15")
def test_the_next_process_carries_out_another_shrink(
    logged: HeldControl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logged.call(request("a"))
    again = next_process(logged, tmp_path)
    found = decays(again, monkeypatch)
    again.call(request("b"))
    assert found == [0.5]
    close(again.shard)


@pytest.mark.guarantee("W15")
def test_a_shrink_is_durable_before_it_is_answered(logged: HeldControl) -> None:
    logged.call(request("a"))
    assert logged.shard.log is not None
    writer = logged.shard.log.writer
    assert writer.durable_lsn == writer.newest_lsn
    assert [each.head.kind for each in LogReader(writer.directory).records()].count(Kind.SHRINK) == 1


@pytest.mark.guarantee("W6")
def test_a_shrink_waits_for_room_and_changes_nothing_before(
    logged: HeldControl, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fleet_sparse.pserver.admin.log_appends.RETRY_S", 0.001)
    assert logged.shard.log is not None
    append, before, seen = logged.shard.log.writer.append, state_of(logged.shard), list[bool]()

    def refuse_first(*arguments: Any, **options: Any) -> int:
        seen.append(state_of(logged.shard) == before)
        if len(seen) < 3:
            raise LogFull("no room")
        return append(*arguments, **options)

    monkeypatch.setattr(logged.shard.log.writer, "append", refuse_first)
    reply = logged.call(request("a"))
    assert seen == [True, True, True]
    assert {each.table for each in reply.removals if each.num_removed} == {"sgd", "adam"}


@pytest.mark.guarantee("W6")
def test_a_shrink_fails_with_log_full_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = HeldControl(tmp_path, shard=logged_shard(tmp_path / "log", SGD, ADAM), failover_s=0.0)
    FrameClient(held.shard).push(push(SGD, ids_of(1), floats([0.5, 0.5])))
    before = state_of(held.shard)

    def refuse(*_: Any, **__: Any) -> int:
        raise LogFull("no room")

    assert held.shard.log is not None
    with monkeypatch.context() as patch:
        patch.setattr("fleet_sparse.pserver.admin.log_appends.RETRY_S", 0.001)
        patch.setattr(held.shard.log.writer, "append", refuse)
        with pytest.raises(LogFull):
            held.call(request("a"))
    assert state_of(held.shard) == before
    close(held.shard)


def test_a_shrink_is_refused_as_a_whole_while_a_table_is_written(logged: HeldControl) -> None:
    before = {each.name: each.num_rows for each in logged.shard.states()}
    (_, adam) = [entry.table for entry in logged.shard.tables.values()]
    cut = adam.capture(only_changed=False, ends_day=False)
    with pytest.raises(ValueError, match="view"):
        logged.shard.shrink([Criterion(MIN_NORM, 1.0)])
    cut.end(kept=False)
    assert {each.name: each.num_rows for each in logged.shard.states()} == before
    assert not logged.shard.fault
