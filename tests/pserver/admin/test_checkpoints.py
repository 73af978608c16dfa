"""Checkpoints come when they are due; those that fail keep no room on the disk, and are not tried again at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from fleet_sparse.errors import SnapshotError
from fleet_sparse.pserver.admin import checkpoints, log_recovery
from fleet_sparse.pserver.admin.checkpoints import Checkpoints
from fleet_sparse.pserver.admin.log_recovery import at_once
from fleet_sparse.pserver.admin.snapshot_writer import Save
from fleet_sparse.pserver.engine.shard import Shard
from fleet_sparse.pserver.log.checkpoint import read_checkpoint
from support.coordinators import in_loop
from support.logs import close, logged_shard, recovered, state_of
from support.shards import SGD, FrameClient, floats, ids_of, push

SEGMENT_BYTES = 1 << 20
NUM_FAILURES = 20


class Attempts:
    """The checkpoints of a shard whose log is always large enough for the next one, unless `max_bytes` says otherwise.

    Attributes:
        now: Time of their clock.
        takes_s: Seconds that the writing of one takes.
        num_written: Rows files that were begun.
    """

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch, max_bytes: int = 1) -> None:
        self.shard = logged_shard(directory, SGD, segment_bytes=SEGMENT_BYTES)
        self.directory = directory
        self.now = self.takes_s = 0.0
        self.num_written = 0
        self.fails = True
        write = Save.write

        def write_or_fail(save: Save, *arguments: Any, **options: Any) -> Any:
            self.num_written += 1
            self.now += self.takes_s
            file = write(save, *arguments, **options)
            if self.fails:
                raise SnapshotError("the disk is full")
            return file

        monkeypatch.setattr(Save, "write", write_or_fail)
        self.checkpoints = Checkpoints(
            self.shard, post=at_once, on_data_thread=self._on_data_thread, max_bytes=max_bytes, clock=lambda: self.now
        )

    async def _on_data_thread(self, task: Callable[[], Any]) -> Any:
        return task()

    async def begin(self) -> None:
        """Pushes, and begins a checkpoint if one is due; returns when none is under way."""
        client = FrameClient(self.shard)
        client.seq = self.shard.ledger.applied(client.client_id)
        client.push(push(SGD, ids_of(1, 2), floats([1.0, 0.0], [0.0, 1.0])))
        self.checkpoints.begin_if_due()
        running = self.checkpoints._running
        if running is not None:
            await asyncio.wait({running.done})

    async def times_until(self, end: float) -> list[float]:
        """Pushes every half second; returns when rows files were written."""
        times = []
        while self.now < end:
            num_before = self.num_written
            await self.begin()
            if self.num_written > num_before:
                times.append(self.now)
            self.now += 0.5
        return times


@pytest.fixture
def attempts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Attempts:
    return Attempts(tmp_path / "log", monkeypatch)


def allocated_bytes(directory: Path) -> int:
    return sum(512 * path.stat().st_blocks for path in directory.rglob("*") if path.is_file())


@in_loop
async def test_failures_keep_a_bounded_part_of_the_disk(attempts: Attempts) -> None:
    for _ in range(NUM_FAILURES):
        await attempts.begin()
        attempts.now += 1000.0
    assert attempts.num_written == NUM_FAILURES
    assert attempts.shard.log is not None
    attempts.shard.log.writer._close_ended()  # as its thread does
    assert allocated_bytes(attempts.directory) < 4 * SEGMENT_BYTES
    assert not list(attempts.directory.glob("checkpoint-*"))
    close(attempts.shard)


@in_loop
async def test_the_log_of_failed_checkpoints_is_whole(attempts: Attempts) -> None:
    for _ in range(3):
        await attempts.begin()
        attempts.now += 1000.0
    check_continues(attempts.shard)


def check_continues(shard: Shard) -> None:
    again = recovered(shard)
    assert state_of(again) == state_of(shard)
    for each in (shard, again):
        close(each)


@in_loop
async def test_pauses_between_failures_double_up_to_a_minute(attempts: Attempts) -> None:
    pauses = [later - sooner for sooner, later in pairwise(await attempts.times_until(300.0))]
    assert pauses == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0, 60.0]
    close(attempts.shard)


@in_loop
async def test_a_checkpoint_that_a_save_ended_is_tried_again_at_once(attempts: Attempts) -> None:
    attempts.checkpoints.begin_if_due()
    await attempts.checkpoints.give_up()
    attempts.fails = False
    await attempts.begin()
    assert read_checkpoint(attempts.directory) is not None
    check_continues(attempts.shard)


@in_loop
async def test_an_adopted_checkpoint_stays_if_older_files_do(
    attempts: Attempts, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts.fails = False
    adopt = log_recovery.adopt_checkpoint

    def adopt_and_fail(*arguments: Any) -> None:
        adopt(*arguments)
        raise OSError("an older file stays")

    monkeypatch.setattr(log_recovery, "adopt_checkpoint", adopt_and_fail)
    await attempts.begin()
    assert attempts.num_written == 1
    check_continues(attempts.shard)


@in_loop
async def test_checkpoints_of_many_small_records_rest_between(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints, "_MANY_RECORDS", 10)
    monkeypatch.setattr(checkpoints, "_REPLAYED_PER_S", 1)
    attempts = Attempts(tmp_path / "log", monkeypatch, max_bytes=1 << 30)
    attempts.fails, attempts.takes_s = False, 2.0
    # The first push is record 2, behind that of the table; each checkpoint then rests for 20 times 2 s.
    assert await attempts.times_until(100.0) == [6.0, 48.0, 90.0]
    check_continues(attempts.shard)


@in_loop
async def test_a_slow_checkpoint_is_followed_by_more_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints, "_MANY_RECORDS", 10)
    monkeypatch.setattr(checkpoints, "_REPLAYED_PER_S", 100)
    attempts = Attempts(tmp_path / "log", monkeypatch, max_bytes=1 << 30)
    attempts.fails, attempts.takes_s = False, 2.0
    # Two pushes a second; a second of replaying is worth 100 of them, and half of the 2 s is allowed.
    sooner, later = await attempts.times_until(60.0)
    assert later - sooner == pytest.approx(100 / 2, abs=3.0)
    check_continues(attempts.shard)


@in_loop
async def test_a_few_small_records_make_no_checkpoint_due(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints, "_MANY_RECORDS", 10)
    attempts = Attempts(tmp_path / "log", monkeypatch, max_bytes=1 << 30)
    for _ in range(8):
        await attempts.begin()
    assert attempts.num_written == 0
    close(attempts.shard)
