"""Membership: which workers there are, which are lost, and who waits at which barrier. No I/O, no clock of its own."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from fleet_sparse.core.mode import Mode
from fleet_sparse.errors import PlanError, SettingError, WorkerLost

LAST_BARRIER = "stop_worker"
"""The barrier that a worker comes to when it has finished; once through, it may end without notice."""


@dataclass(slots=True)
class _Worker:
    client_id: bytes
    client_epoch: int
    num_workers: int
    heard_at: float
    mode: Mode | None = None  # None while it knows none
    lost: str = ""  # why it is; empty while it is there
    passed: dict[str, int] = field(default_factory=dict)  # barrier -> newest sequence that it is through


class Joined(NamedTuple):
    """What it means that a worker registered."""

    is_new: bool
    """It is another client, or the same in another epoch."""
    begins_job: bool
    """It is new, and there is no other worker."""


@dataclass(slots=True)
class _Barrier:
    num_workers: int
    begun_at: float  # when the first worker came
    waiting: dict[int, int] = field(default_factory=dict)  # worker -> its sequence


class Membership:
    """The workers of a job, as one pserver knows them. `now` is any monotonic time in seconds.

    Args:
        lost_after_s: Seconds without a heartbeat after which a worker is lost.
        unseen_after_s: Seconds that a barrier waits, from its first arrival on, for a worker that never registered.
        taken_for_s: Seconds after a sign of life for which a worker's index is refused to another process.
    """

    def __init__(self, *, lost_after_s: float, unseen_after_s: float, taken_for_s: float = 0.0) -> None:
        self._lost_after_s = lost_after_s
        self._taken_for_s = taken_for_s
        self._unseen_after_s = unseen_after_s
        self._workers: dict[int, _Worker] = {}  # those that registered and have not finished
        self._finished: dict[int, _Worker] = {}
        self._barriers: dict[str, _Barrier] = {}  # those at which a worker waits, by name

    def check_free(self, worker_index: int, client_id: bytes, now: float) -> None:
        """Whether a process may register as a worker.

        Raises:
            SettingError: Another process is that worker and is alive.
        """
        holder = self._workers.get(worker_index)
        if holder is None or holder.lost or holder.client_id == client_id:
            return
        silent_s = now - holder.heard_at
        if silent_s < self._taken_for_s:
            raise SettingError(
                f"worker {worker_index}: another process is worker {worker_index} here and gave a sign of life "
                f"{silent_s:.1f} s ago. If it is of another job, give this job other ports; if it has just ended, "
                "start again in a moment"
            )

    def check(self, worker_index: int, num_workers: int) -> None:
        """Whether a worker may say so of itself.

        Raises:
            SettingError: The index is not below the number, or the number is not that of the workers that are there.
        """
        if worker_index >= num_workers:
            raise SettingError(
                f"worker {worker_index}: its job has {num_workers} workers, the index should be below that"
            )
        for other, worker in self._workers.items():
            if other != worker_index and not worker.lost and worker.num_workers != num_workers:
                raise SettingError(
                    f"worker {worker_index}: its job has {num_workers} workers, that of worker {other} has "
                    f"{worker.num_workers}; all workers of a job should have the same number"
                )

    def check_mode(self, worker_index: int, mode: Mode | None) -> None:
        """Whether a worker may train in a mode; None fits all.

        Raises:
            SettingError: Another worker that is there trains in another one.
        """
        for other, worker in self._workers.items():
            if other != worker_index and not worker.lost and None not in (mode, worker.mode) and worker.mode != mode:
                raise SettingError(
                    f"worker {worker_index}: its mode is {mode}, that of worker {other} is {worker.mode}; all workers "
                    "of a job should have the same DistributedStrategy"
                )

    def register(
        self,
        worker_index: int,
        num_workers: int,
        client_id: bytes,
        client_epoch: int,
        now: float,
        mode: Mode | None = None,
    ) -> Joined:
        """A worker is there; in a mode, once it knows it.

        A new one begins at no barrier. If all others are lost it begins another job, and they are forgotten.

        Raises:
            SettingError: As `check` and `check_mode`.
        """
        self.check(worker_index, num_workers)
        self.check_mode(worker_index, mode)
        worker = self._workers.get(worker_index)
        if worker is not None and (worker.client_id, worker.client_epoch) == (client_id, client_epoch):
            worker.heard_at, worker.lost, worker.mode = now, "", mode or worker.mode
            return Joined(is_new=False, begins_job=False)
        self._workers.pop(worker_index, None)
        if all(other.lost for other in self._workers.values()):
            self._workers.clear()
        begins_job = not self._workers
        self._workers[worker_index] = _Worker(client_id, client_epoch, num_workers, now, mode)
        self._finished.pop(worker_index, None)
        for name, barrier in list(self._barriers.items()):
            self._withdraw(name, barrier, worker_index)
        return Joined(is_new=True, begins_job=begins_job)

    def why_lost(self, worker_index: int) -> str:
        """Why a worker is lost; empty if it is not."""
        return self._workers[worker_index].lost if worker_index in self._workers else ""

    def client_ids(self) -> frozenset[bytes]:
        """Returns the client ids of the registered workers, those that finished included."""
        workers = (*self._workers.values(), *self._finished.values())
        return frozenset(worker.client_id for worker in workers if not worker.lost)

    def refuse(self, worker_index: int, client_id: bytes, reason: str) -> None:
        """What a worker registered with was refused, so it will come to no barrier: it is lost until it is back.

        Nobody waits at a barrier any more. The refusal of a client that another one has replaced counts for nothing.
        """
        worker = self._workers.get(worker_index)
        if worker is not None and worker.client_id == client_id:
            worker.lost = f"what it registered with was refused: {reason}"
            self._barriers.clear()

    def hear(self, worker_index: int, client_id: bytes | None, now: float) -> None:
        """A worker gave a sign of life. That of a client which another one has replaced counts for nothing.

        Args:
            worker_index: Whose.
            client_id: None if the sign does not tell.
            now: When.
        """
        worker = self._workers.get(worker_index)
        if worker is not None and client_id in (None, worker.client_id):
            worker.heard_at, worker.lost = now, ""

    def find_lost(self, now: float) -> list[int]:
        """The workers that are lost since the last call. If there are any, nobody waits at a barrier any more."""
        late = [
            index
            for index, worker in self._workers.items()
            if not worker.lost and now - worker.heard_at > self._lost_after_s
        ]
        for index in late:
            self._workers[index].lost = f"it gave no sign of life for {self._lost_after_s:g} s"
        if late:
            self._barriers.clear()
        return late

    def find_unseen(self, now: float) -> list[int]:
        """The workers that never registered, and for which a barrier waited too long: its workers should ask again."""
        unseen = {self._unseen_at(barrier, now) for barrier in self._barriers.values()}
        return sorted(index for index in unseen if index is not None)

    def arrive(self, name: str, sequence: int, worker_index: int, num_workers: int, now: float) -> bool:
        """A worker is at a barrier. Returns whether it may go on; if not, it waits, and asks again after any change.

        A barrier opens for all that are there once these are all workers; the next arrival closes it. To ask again with
        a sequence that was let through returns True at any later time.

        Raises:
            SettingError: As `check`, or the worker is not registered.
            PlanError: All workers wait, at different barriers, so that none will open. The barrier does not count this
                one any more.
            WorkerLost: One of the job's workers is lost, or never registered in the time that it has. The barrier does
                not count this one any more.
        """
        self.check(worker_index, num_workers)
        worker = self._workers.get(worker_index) or self._finished.get(worker_index)
        if worker is not None and sequence <= worker.passed.get(name, 0):
            return True
        if worker_index not in self._workers:
            raise SettingError(f"barrier {name!r}: worker {worker_index} is not registered, or has finished")
        lost = min((index for index, other in self._workers.items() if other.lost), default=None)
        if lost is not None:
            raise WorkerLost(
                f"barrier {name!r}: worker {lost} is lost, {self._workers[lost].lost}. "
                "Look into its log, and start the workers again",
                worker_index=lost,
            )
        barrier = self._barriers.setdefault(name, _Barrier(num_workers, now))
        barrier.waiting[worker_index] = sequence
        if len(barrier.waiting) < num_workers:
            self._check_can_open(name, worker_index, num_workers)
            unseen = self._unseen_at(barrier, now)
            if unseen is None:
                return False
            self._withdraw(name, barrier, worker_index)
            raise WorkerLost(
                f"barrier {name!r}: worker {unseen} never registered, {self._unseen_after_s:g} s after the first of "
                f"{num_workers} workers came. Look into its log, and start the workers again",
                worker_index=unseen,
            )
        del self._barriers[name]
        for index, through in barrier.waiting.items():
            self._workers[index].passed[name] = through
            if name == LAST_BARRIER:
                self._finished[index] = self._workers.pop(index)
        return True

    def _check_can_open(self, name: str, worker_index: int, num_workers: int) -> None:
        where = {index: other for other, barrier in self._barriers.items() for index in barrier.waiting}
        elsewhere = {index: other for index, other in where.items() if other != name}
        if len(where) == num_workers and elsewhere:
            index, other = min(elsewhere.items())
            self._withdraw(name, self._barriers[name], worker_index)
            raise PlanError(
                f"barrier {name!r}: worker {worker_index} came here, worker {index} waits at {other!r}, and nobody is "
                "left to come. All workers should make the same calls in the same order"
            )

    def present(self) -> set[int]:
        """The workers that registered, have not finished and are not lost."""
        return {index for index, worker in self._workers.items() if not worker.lost}

    def withdraw(self, name: str, sequence: int, worker_index: int) -> bool:
        """A worker gives a barrier up: it counts as not there. Returns whether it waited.

        One that is through already stays so.
        """
        barrier = self._barriers.get(name)
        if barrier is None or barrier.waiting.get(worker_index) != sequence:
            return False
        self._withdraw(name, barrier, worker_index)
        return True

    def _withdraw(self, name: str, barrier: _Barrier, worker_index: int) -> None:
        barrier.waiting.pop(worker_index, None)
        if not barrier.waiting:
            del self._barriers[name]

    def _unseen_at(self, barrier: _Barrier, now: float) -> int | None:
        """The first worker that never registered, if the barrier has waited for it long enough."""
        if now - barrier.begun_at <= self._unseen_after_s:
            return None
        return next((index for index in range(barrier.num_workers) if index not in self._workers), None)
