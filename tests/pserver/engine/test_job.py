from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet_sparse.core.mode import ASYNC, SYNC, Mode
from fleet_sparse.core.watermark import Watermark
from fleet_sparse.errors import ErrorCode
from fleet_sparse.pserver.engine.job import DeferredRequest, Job, PreparedStep
from fleet_sparse.pserver.tables.mutations import Push
from fleet_sparse.wire.frame_format import Header, Op
from support.shards import SGD, floats, ids_of

SYNC_MODE = Mode(SYNC)
MAX_STAGED = 1 << 20


def client_of(worker: int) -> bytes:
    return bytes([worker]) * 16


def job_of(num_workers: int, mode: Mode = SYNC_MODE, max_staged_bytes: int = MAX_STAGED) -> Job:
    job = Job(mode, num_workers, max_staged_bytes)
    for worker in range(num_workers):
        job.join(worker, client_of(worker))
    return job


def header(op: Op, worker: int = 0, **values: Any) -> Header:
    return Header(op, client_id=client_of(worker), client_epoch=1, request_id=1, **values)


def push_of(value: float = 1.0) -> Push:
    """A push of one row: 8 bytes of id, 8 of gradient."""
    return Push(SGD.table_id, ids_of(7), floats([value, value]), 1.0, 1)


def pushed(job: Job, worker: int, step: int, *pushes: Push, part: int = 0, num_parts: int = 1) -> None:
    of_push = header(Op.PUSH, worker, step=step, push_seq=step, part=part, num_parts=num_parts)
    if job.is_sync:
        job.stage(of_push, worker, list(pushes))
    job.advance(of_push, worker)


# Contributions to a step


def test_complete_step_is_taken_once_in_worker_order() -> None:
    job = job_of(3)
    pushes = [push_of(worker) for worker in range(3)]
    for worker in (2, 0, 1):
        assert job.take_complete() == []
        pushed(job, worker, 1, pushes[worker])
    assert [contribution.pushes for contribution in job.take_complete()] == [[push] for push in pushes]
    assert job.take_complete() == []


def test_contribution_has_the_watermark_of_its_last_part() -> None:
    job = job_of(1)
    for part in (0, 1):
        job.stage(header(Op.PUSH, step=1, push_seq=5 + part, part=part, num_parts=2), 0, [push_of()])
        job.advance(header(Op.PUSH, step=1, part=part, num_parts=2), 0)
    (contribution,) = job.take_complete()
    assert (contribution.watermark, len(contribution.pushes)) == (Watermark(client_of(0), 1, 6), 2)


# Faults


@pytest.mark.parametrize("step", [2, 4])
def test_push_of_another_step_than_the_next_is_refused(step: int) -> None:
    job = job_of(2, Mode(ASYNC, max_step_lag=9))
    for number in (1, 2):
        pushed(job, 1, number)
    assert job.find_fault(header(Op.PUSH, 1, step=step), 1, 16) == (
        ErrorCode.MALFORMED,
        f"header: worker 1 pushes step {step}; its next one is 3, and 0 is complete",
    )


def test_sync_push_before_its_step_is_due_is_refused() -> None:
    job = job_of(2)
    pushed(job, 0, 1)
    assert job.find_fault(header(Op.PUSH, 0, step=2), 0, 16) == (
        ErrorCode.MALFORMED,
        "header: worker 0 pushes step 2; its next one is 2, and 0 is complete",
    )


def test_step_after_a_committed_one_may_be_prepared() -> None:
    job = job_of(2)
    job.prepared = PreparedStep(1)
    job.restore_step([client_of(0)], 1)
    assert job.find_fault(header(Op.PREPARE, 0, step=2), 0, 16) is None
    assert job.find_fault(header(Op.PUSH, 0, step=2), 0, 16) is not None
    assert job.find_fault(header(Op.PREPARE, 1, step=2), 1, 16) is not None


def test_push_past_the_staging_limit_names_the_setting() -> None:
    job = job_of(2, max_staged_bytes=40)
    pushed(job, 0, 1, push_of())
    assert job.find_fault(header(Op.PUSH, 1, step=1), 1, 24) is None
    fault = job.find_fault(header(Op.PUSH, 1, step=1), 1, 25)
    assert fault is not None
    assert fault[0] is ErrorCode.TOO_LARGE
    assert "staged pushes have 41 bytes, at most 40 may be staged. Set FLEET_SPARSE_MAX_STAGED_BYTES higher" in fault[1]


def test_no_push_is_too_large_where_none_is_staged() -> None:
    job = job_of(1, Mode(ASYNC, max_step_lag=0), max_staged_bytes=40)
    assert job.find_fault(header(Op.PUSH, 0, step=1), 0, 1000) is None


def test_first_failure_is_kept_and_names_the_step() -> None:
    job = job_of(2)
    for worker in (0, 1):
        pushed(job, worker, 1)
    job.fail(ErrorCode.WORKER_LOST, "worker 1 is lost, it gave no sign of life for 30 s", 1)
    job.fail(ErrorCode.STEP_FAILED, "worker 0: a NaN")
    assert job.failure == (
        ErrorCode.WORKER_LOST,
        1,
        "step 2 cannot be completed: worker 1 is lost, it gave no sign of life for 30 s. Look into its log, and start "
        "again from the last save",
    )


def test_failure_drops_staged_contributions() -> None:
    job = job_of(2)
    pushed(job, 0, 1, push_of())
    job.fail(ErrorCode.STEP_FAILED, "worker 1: a NaN")
    pushed(job, 1, 1)
    assert [contribution.pushes for contribution in job.take_complete()] == [[]]


# Membership


def test_client_that_joins_again_keeps_its_contribution() -> None:
    job = job_of(2)
    pushed(job, 0, 1, push_of())
    job.join(0, client_of(0))
    pushed(job, 1, 1, push_of())
    assert len(job.take_complete()) == 2


@pytest.mark.parametrize("happened", ["complete", "staged", "left"])
def test_client_in_place_of_one_that_took_part_displaces_it(happened: str) -> None:
    job = job_of(2)
    assert not job.displaces(0, client_of(9))
    if happened == "left":
        job.leave(header(Op.LEAVE, 0, push_seq=1), 0)
    else:
        for worker in (0, 1) if happened == "complete" else (0,):
            pushed(job, worker, 1, push_of())
    assert job.displaces(0, client_of(9))
    assert not job.displaces(0, client_of(0))


# Waiting


def test_pull_waits_until_pushes_of_its_client_are_applied() -> None:
    job = job_of(1)
    pull_after = header(Op.PULL, push_floor=3)
    assert [job.must_wait(pull_after, applied) for applied in (2, 3)] == [True, False]


@pytest.mark.parametrize(
    ("mode", "first_that_waits"), [(SYNC_MODE, 2), (Mode(ASYNC, max_step_lag=0), 2), (Mode(ASYNC, max_step_lag=3), 5)]
)
def test_pull_waits_for_the_slowest_worker(mode: Mode, first_that_waits: int) -> None:
    job = job_of(2, mode)
    waits = [job.must_wait(header(Op.PULL, step=step), 0) for step in range(1, 8)]
    assert waits.index(True) + 1 == first_that_waits
    assert all(waits[first_that_waits - 1 :])


def test_early_pull_waits_for_its_own_pushes_only() -> None:
    job = job_of(2)
    assert not job.must_wait(header(Op.PULL_EARLY, step=2, push_floor=1), 1)
    assert job.must_wait(header(Op.PULL_EARLY, step=2, push_floor=1), 0)


def test_push_pull_waits_as_the_pull_of_the_next_step() -> None:
    job = job_of(2, Mode(ASYNC, max_step_lag=1))
    for step, waits in ((1, False), (2, True)):
        pushed(job, 0, step)
        assert job.must_wait(header(Op.PUSH_PULL, 0, step=step, push_seq=step), step) is waits
    pushed(job, 1, 1)
    assert not job.must_wait(header(Op.PUSH_PULL, 0, step=2, push_seq=2), 2)


def test_ready_requests_are_taken_in_order_of_arrival() -> None:
    job = job_of(3)
    for worker in (2, 0, 1):
        job.defer(DeferredRequest(header(Op.PULL, worker, step=2), []))
    assert job.take_ready(lambda client: 0) == []
    for worker in range(3):
        pushed(job, worker, 1)
    assert [job.worker_of(request.header) for request in job.take_ready(lambda client: 1)] == [2, 0, 1]
    assert job.take_ready(lambda client: 1) == []


def test_resent_request_is_deferred_once() -> None:
    job = job_of(2)
    for _ in range(3):
        job.defer(DeferredRequest(header(Op.PULL, step=2), []))
    job.fail(ErrorCode.STEP_FAILED, "a reason")
    assert len(job.take_ready(lambda client: 0)) == 1


# Any schedule


@dataclass
class World:
    """Workers that pull, push and leave one after the other, and their job.

    A worker whose request waits does nothing until it is answered.
    """

    job: Job
    num_workers: int
    seqs: dict[int, int] = field(default_factory=dict)  # of each worker's newest push
    applied: dict[bytes, int] = field(default_factory=dict)
    waiting: dict[int, Header] = field(default_factory=dict)
    left: set[int] = field(default_factory=set)
    answers: list[tuple[int, Op, int]] = field(default_factory=list)  # worker, op, step: in the order of the answers

    def next_step(self, worker: int) -> int:
        return self.job.clock.next_step(worker)

    def pull(self, worker: int) -> None:
        asked = header(Op.PULL, worker, step=self.next_step(worker), push_floor=self.seqs.get(worker, 0))
        if self.job.must_wait(asked, self.applied.get(client_of(worker), 0)):
            self.job.defer(DeferredRequest(asked, []))
            self.waiting[worker] = asked
        else:
            self.answered(asked)

    def push(self, worker: int) -> None:
        self.seqs[worker] = seq = self.seqs.get(worker, 0) + 1
        sent = header(Op.PUSH, worker, step=self.next_step(worker), push_seq=seq)
        if self.job.find_fault(sent, worker, 0) is not None:  # it pulled nothing since its last push
            self.seqs[worker] -= 1
            return
        if self.job.is_sync:
            self.job.stage(sent, worker, [])
        else:
            self.applied[client_of(worker)] = seq
        self.job.advance(sent, worker)
        self.release()

    def leave(self, worker: int) -> None:
        self.seqs[worker] = seq = self.seqs.get(worker, 0) + 1
        sent = header(Op.LEAVE, worker, push_seq=seq)
        self.left.add(worker)
        self.waiting[worker] = sent
        self.job.defer(DeferredRequest(sent, []))
        self.job.leave(sent, worker)
        self.release()

    def release(self) -> None:
        for contribution in self.job.take_complete():
            self.applied[contribution.watermark.client_id] = contribution.watermark.watermark
        if self.job.clock.have_all_left:
            self.applied.update({mark.client_id: mark.watermark for mark in self.job.left})
            self.job.rejoin_all()
        for request in self.job.take_ready(lambda client: self.applied.get(client, 0)):
            self.answered(request.header)

    def answered(self, asked: Header) -> None:
        worker = self.job.worker_of(asked)
        assert worker is not None
        self.waiting.pop(worker, None)
        if asked.op is Op.LEAVE:
            self.left.discard(worker)
        else:
            self.check_bound(worker, asked.step)
        self.answers.append((worker, asked.op, asked.step))

    def check_bound(self, worker: int, step: int) -> None:
        """What a worker sees before its step holds every step but the newest `max_step_lag` of all that work."""
        lag = self.job.mode.max_step_lag or 0
        for other in range(self.num_workers):
            if other not in self.left:
                assert self.next_step(other) - 1 >= step - 1 - lag

    def play(self, events: list[tuple[int, str]]) -> None:
        for number, event in events:
            worker = number % self.num_workers
            if worker not in self.waiting:
                getattr(self, event)(worker)

    def all_leave(self) -> None:
        """Every worker leaves as soon as nothing of it waits."""
        for _ in range(self.num_workers):
            for worker in range(self.num_workers):
                if worker not in self.waiting:
                    self.leave(worker)
                if not self.waiting:
                    return


MODES = st.sampled_from([SYNC_MODE, *(Mode(ASYNC, max_step_lag=lag) for lag in (0, 1, 3))])
SCHEDULES = st.lists(
    st.tuples(st.integers(0, 3), st.sampled_from(["pull", "pull", "push", "push", "push", "leave"])), max_size=80
)


@settings(max_examples=300)
@given(MODES, st.integers(1, 4), SCHEDULES)
def test_no_worker_is_ahead_of_the_slowest_by_more_than_the_lag(
    mode: Mode, num_workers: int, events: list[tuple[int, str]]
) -> None:
    world, has_pulled = World(job_of(num_workers, mode), num_workers), [False] * num_workers
    for number, event in events:
        worker = number % num_workers
        if worker in world.waiting or (event == "push" and not has_pulled[worker]):
            continue
        getattr(world, event)(worker)
        has_pulled[worker] = event != "push"
        working = [world.next_step(other) for other in range(num_workers) if other not in world.left]
        if working:
            assert max(working) - min(working) <= (mode.max_step_lag or 0) + 1


@settings(max_examples=300)
@given(MODES, st.integers(1, 4), SCHEDULES)
def test_nothing_waits_once_all_left(mode: Mode, num_workers: int, events: list[tuple[int, str]]) -> None:
    world = World(job_of(num_workers, mode), num_workers)
    world.play(events)
    world.all_leave()
    assert not world.waiting
    steps = {world.next_step(worker) for worker in range(num_workers)}
    assert steps == {world.job.clock.complete + 1}


@settings(max_examples=100)
@given(MODES, st.integers(1, 4), SCHEDULES)
def test_nothing_waits_after_a_failure(mode: Mode, num_workers: int, events: list[tuple[int, str]]) -> None:
    world = World(job_of(num_workers, mode), num_workers)
    world.play(events)
    world.job.fail(ErrorCode.WORKER_LOST, "worker 1 is lost", 1)
    ready = [request.header for request in world.job.take_ready(lambda client: 0)]
    assert sorted(each.client_id for each in ready) == sorted(each.client_id for each in world.waiting.values())
    assert world.job.take_ready(lambda client: 0) == []


@settings(max_examples=300)
@given(st.integers(1, 4), SCHEDULES)
@pytest.mark.guarantee("A4")
def test_lag_0_has_the_order_of_steps_of_sync(num_workers: int, events: list[tuple[int, str]]) -> None:
    """With workers that pull before they push."""
    ordered = []
    for number, event in events:
        ordered += [(number, "pull"), (number, "push")] if event != "leave" else [(number, event)]
    worlds = [World(job_of(num_workers, mode), num_workers) for mode in (SYNC_MODE, Mode(ASYNC, max_step_lag=0))]
    for world in worlds:
        world.play(ordered)
    assert worlds[0].answers == worlds[1].answers
    assert worlds[0].waiting == worlds[1].waiting
