"""Pservers whose logs are of different jobs say so to the worker that registers with them."""

from __future__ import annotations

from pathlib import Path

import pytest

from fleet_sparse.pserver.admin.log_recovery import write_checkpoint
from support.controls import HeldControl, barrier, registration
from support.coordinators import train
from support.logs import close, logged_shard
from support.shards import SGD


class Pservers:
    """Two pservers with logs, to which one job after the other comes."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.num_jobs = 0
        self.num_logs = 0
        self.held = [self._started(self._new_log()) for _ in range(2)]

    def _new_log(self) -> Path:
        self.num_logs += 1
        return self.root / f"log-{self.num_logs}"

    def _started(self, log: Path) -> HeldControl:
        return HeldControl(self.root, shard=logged_shard(log))

    def restart(self, *, loses: int | None = None, has_checkpoint: bool = False) -> None:
        """Ends both pservers and starts them again, one of them without its log."""
        for index, held in enumerate(self.held):
            assert held.shard.log is not None
            if has_checkpoint:
                write_checkpoint(held.shard)
            log = self._new_log() if index == loses else held.shard.log.writer.directory
            close(held.shard)
            self.held[index] = self._started(log)

    def register(self, *shards: int) -> list[int]:
        """A worker of a new job registers once that of the one before is lost; returns the answers of the shards."""
        for held in self.held:
            held.now += 2 * held.settings.worker_lost_s
            held.service.find_lost_workers()
        self.num_jobs += 1
        request, answers = registration(SGD, client_id=self.client_id), list[int]()
        for shard in shards or (0, 1):
            reply = self.held[shard].call(request)
            request.job_id = reply.job_id
            if shard == 0:
                request.log_job_id, request.log_has_content = reply.log_job_id, reply.log_has_content
            answers.append(reply.log_job_id)
        return answers

    @property
    def client_id(self) -> bytes:
        return bytes([self.num_jobs]) * 16

    def begin(self) -> None:
        """The workers of the newest job pass the first barrier."""
        self.held[0].call(barrier(0, client_id=self.client_id))

    def push(self, *shards: int) -> None:
        for shard in shards:
            train(self.held[shard], 7, seq_of=self.client_id)

    def close(self) -> None:
        for held in self.held:
            close(held.shard)


@pytest.fixture
def pservers(tmp_path: Path) -> Pservers:
    return Pservers(tmp_path)


@pytest.mark.parametrize("has_checkpoint", [False, True])
@pytest.mark.parametrize("pushed_to", [(), (0,), (1,), (0, 1)])
def test_the_next_job_finds_the_logs_of_one_job(
    pservers: Pservers, pushed_to: tuple[int, ...], has_checkpoint: bool
) -> None:
    first = pservers.register()
    pservers.begin()
    pservers.push(*pushed_to)
    pservers.restart(has_checkpoint=has_checkpoint)
    assert first[0] != 0
    assert pservers.register() == first == [first[0]] * 2
    pservers.close()


@pytest.mark.parametrize("lost", [0, 1])
def test_a_log_that_is_gone_is_seen_each_time(pservers: Pservers, lost: int) -> None:
    pservers.register()
    pservers.begin()
    pservers.push(0, 1)
    pservers.restart(loses=lost)
    for _ in range(2):
        assert len(set(pservers.register())) == 2
    pservers.restart()
    assert len(set(pservers.register())) == 2
    pservers.close()


def test_a_job_that_reached_one_pserver_only_does_not_count(pservers: Pservers) -> None:
    pservers.register(0)
    for _ in range(2):
        assert len(set(pservers.register())) == 1
        pservers.restart()
    pservers.close()


@pytest.mark.parametrize("pushed_to", [(), (0,), (1,)])
def test_a_job_that_passed_no_barrier_counts_everywhere(pservers: Pservers, pushed_to: tuple[int, ...]) -> None:
    first = pservers.register()
    pservers.push(*pushed_to)
    for _ in range(2):
        pservers.restart()
        assert pservers.register() == first
    pservers.close()
