"""Barriers: where the workers of a job wait for each other, as one pserver knows them. No I/O, no clock of its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from fleet_sparse.errors import PlanError, WorkerLost

from ..log.control_state import BarrierOpening

LAST_BARRIER = "stop_worker"
"""The barrier of workers that have finished: they come to no other one, and may end without notice once they passed."""

Contribution = tuple[bytes, ...]
"""Bytes that a worker has at a barrier for the others: one item for all of them, an item for each by index, or none."""


class Arrival(NamedTuple):
    """A worker that has come to a barrier."""

    name: str
    """Name of the barrier."""
    sequence: int
    """Counts the barriers of this name at which the worker was."""
    worker_index: int
    once: bool = False
    """True if the barrier stays open for the rest of the job."""
    alone: bool = False
    """True if it also opens, for those that are there, once all others wait at other barriers."""
    contribution: Contribution = ()
    num_trained: int = 0
    """How many steps of the job were trained, as far as the worker knows."""


@dataclass(slots=True)
class Passages:
    """The barriers that one worker has passed, by name.

    Attributes:
        sequences: Newest sequence that it passed.
        gathered: Contributions of all workers, when it passed.
        alone: True if others waited elsewhere when it passed.
        num_trained: Largest number of trained steps of the workers that waited when it passed the last one.
        openings: Newest opening for all workers that it knows, counted in the job.
        has_resumed: True if it was at barriers of the process before, and may have missed that one opened.
    """

    sequences: dict[str, int] = field(default_factory=dict)
    gathered: dict[str, tuple[Contribution, ...]] = field(default_factory=dict)
    alone: dict[str, bool] = field(default_factory=dict)
    num_trained: int = 0
    openings: dict[str, int] = field(default_factory=dict)
    has_resumed: bool = False

    def has_passed(self, name: str, sequence: int) -> bool:
        """Returns whether the worker has passed a barrier with this sequence, or a later one."""
        return sequence <= self.sequences.get(name, 0)

    def add(self, opening: BarrierOpening, worker_index: int) -> None:
        """The worker has passed a barrier that opened."""
        self.sequences[opening.name] = opening.passed[worker_index]
        self.num_trained = opening.num_trained
        if opening.is_alone is not None:
            self.alone[opening.name] = opening.is_alone
        if opening.contributions:
            self.gathered[opening.name] = opening.contributions


@dataclass(slots=True)
class _Barrier:
    begun_at: float  # first arrival
    waiting: dict[int, int] = field(default_factory=dict)  # worker -> its sequence
    passages: dict[int, Passages] = field(default_factory=dict)  # those of the workers that wait
    contributions: dict[int, Contribution] = field(default_factory=dict)  # worker -> what it has for the others
    opens_alone: bool = False  # once all others wait at other barriers
    num_trained: int = 0  # largest one of the workers that came


class Barriers:
    """The barriers of a job at which a worker waits. `now` is any monotonic time in seconds.

    Args:
        unseen_after_s: Seconds that a barrier waits, from its first arrival on, for a worker that never registered.
        registered: Indices of the registered workers, kept up to date by the caller.
    """

    def __init__(self, unseen_after_s: float, registered: Container[int]) -> None:
        self._unseen_after_s = unseen_after_s
        self._registered = registered
        self._num_workers = 0
        self._barriers: dict[str, _Barrier] = {}  # by name
        self._num_waits: Counter[int] = Counter()  # by worker, of barriers at which it waits
        self._opened_once: set[str] = set()
        self._num_openings: Counter[str] = Counter()  # in the job, for all workers

    def begin_job(self, num_workers: int) -> None:
        """Sets the number of workers, and closes the barriers that stayed open."""
        self._num_workers = num_workers
        self._opened_once.clear()
        self._num_openings.clear()

    def fail(self) -> None:
        """Forgets all barriers at which workers wait."""
        self._barriers.clear()
        self._num_waits.clear()

    def keep_open(self, names: Iterable[str]) -> None:
        """These barriers have opened for the rest of the job."""
        self._opened_once.update(names)

    @property
    def num_openings(self) -> dict[str, int]:
        """How often each barrier has opened in the job for all workers."""
        return dict(self._num_openings)

    def resume(self, openings: Mapping[str, int], passages: Passages) -> None:
        """A worker was at these openings of barriers before this pserver was started again, and goes on.

        Other such workers whose answer got lost, and who wait for it, have passed.

        Args:
            openings: The newest opening of each barrier that the worker knows.
            passages: Those of the worker.
        """
        passages.has_resumed = True
        for name, opening in openings.items():
            passages.openings[name] = max(passages.openings.get(name, 0), opening)
            self._num_openings[name] = max(self._num_openings[name], opening)
            barrier = self._barriers.get(name)
            waiting = {} if barrier is None else dict(barrier.waiting)
            for worker_index, sequence in waiting.items():
                assert barrier is not None, "somebody waits there"
                if self.pass_missed(name, sequence, barrier.passages[worker_index]):
                    self._withdraw(name, worker_index)

    def pass_missed(self, name: str, sequence: int, passages: Passages) -> bool:
        """Lets a worker pass if the barrier has opened for it at the process before; returns whether it has.

        It was there then, as all were, so it knows every opening but that one.
        """
        is_missed = passages.has_resumed and self._num_openings[name] == passages.openings.get(name, 0) + 1
        if is_missed:
            passages.sequences[name], passages.openings[name] = sequence, self._num_openings[name]
        return is_missed

    @property
    def open_names(self) -> frozenset[str]:
        """Names of the barriers that have opened for the rest of the job."""
        return frozenset(self._opened_once)

    def stays_open(self, name: str) -> bool:
        """Returns whether a barrier has opened for the rest of the job."""
        return name in self._opened_once

    def arrive(self, arrival: Arrival, passages: Passages, now: float) -> BarrierOpening | None:
        """A worker waits at a barrier, as of `Membership.arrive`; it has not passed with this sequence yet.

        Returns:
            The barrier that opens; it may be another one that needs no more workers than those that wait there.

        Raises:
            PlanError: All workers wait, at different barriers, so that none will open.
            WorkerLost: A worker never registered in the time that it has.
        """
        name, worker_index = arrival.name, arrival.worker_index
        barrier = self._barriers.setdefault(name, _Barrier(now))
        if worker_index not in barrier.waiting:
            self._num_waits[worker_index] += 1
        barrier.waiting[worker_index] = arrival.sequence
        barrier.passages[worker_index] = passages
        barrier.opens_alone = arrival.alone
        barrier.num_trained = max(barrier.num_trained, arrival.num_trained)
        if arrival.contribution:
            barrier.contributions[worker_index] = arrival.contribution
        if len(barrier.waiting) < self._num_workers:
            opening = self._open_alone()
            if opening is None:
                self._check_can_open(name, worker_index)
                self._check_all_seen(name, worker_index, now)
            return opening
        if arrival.once:
            self._opened_once.add(name)
        return self._open(name, once=arrival.once)

    def withdraw(self, name: str, sequence: int, worker_index: int) -> None:
        """A worker does not wait at a barrier with this sequence any more."""
        barrier = self._barriers.get(name)
        if barrier is not None and barrier.waiting.get(worker_index) == sequence:
            self._withdraw(name, worker_index)

    def withdraw_worker(self, worker_index: int) -> None:
        """A worker does not wait anywhere any more."""
        for name in [name for name, barrier in self._barriers.items() if worker_index in barrier.waiting]:
            self._withdraw(name, worker_index)

    def find_unseen(self, now: float) -> list[int]:
        """Returns the workers that never registered and for which a barrier waited too long: it has failed."""
        unseen = {self._unseen_at(barrier, now) for barrier in self._barriers.values()}
        return sorted(index for index in unseen if index is not None)

    def _open(self, name: str, *, once: bool = False) -> BarrierOpening:
        num_trained = max(each.num_trained for each in self._barriers.values())
        barrier = self._barriers.pop(name)
        gathered = tuple(barrier.contributions.get(index, ()) for index in sorted(barrier.waiting))
        opening = BarrierOpening(
            name,
            barrier.waiting,
            once,
            len(barrier.waiting) < self._num_workers if barrier.opens_alone else None,
            gathered if barrier.contributions else (),
            num_trained,
        )
        is_for_all = len(opening.passed) == self._num_workers
        if is_for_all:
            self._num_openings[name] += 1
        for index in opening.passed:
            self._end_wait(index)
            barrier.passages[index].add(opening, index)
            if is_for_all:
                barrier.passages[index].openings[name] = self._num_openings[name]
        return opening

    def _open_alone(self) -> BarrierOpening | None:
        """Opens a barrier that needs no more workers than those that are there, if all workers wait."""
        if len(self._num_waits) < self._num_workers:
            return None
        name = next((name for name, barrier in self._barriers.items() if barrier.opens_alone), None)
        name = self._without_ended() if name is None else name
        return None if name is None else self._open(name)

    def _without_ended(self) -> str | None:
        """A barrier to which no worker can come any more but those that wait at the last one, if there is one."""
        last = self._barriers.get(LAST_BARRIER)
        if last is None:
            return None
        others = [(name, each) for name, each in self._barriers.items() if each is not last and not each.contributions]
        return next(
            (name for name, each in others if len(each.waiting.keys() | last.waiting.keys()) == self._num_workers), None
        )

    def _check_can_open(self, name: str, worker_index: int) -> None:
        if len(self._num_waits) < self._num_workers:
            return
        index, other = min(
            (index, other) for other, barrier in self._barriers.items() for index in barrier.waiting if other != name
        )
        self._withdraw(name, worker_index)
        raise PlanError(
            f"barrier {name!r}: worker {worker_index} came here, worker {index} waits at {other!r}, and no worker is "
            "left to arrive. All workers should make the same calls in the same order"
        )

    def _check_all_seen(self, name: str, worker_index: int, now: float) -> None:
        unseen = self._unseen_at(self._barriers[name], now)
        if unseen is not None:
            self._withdraw(name, worker_index)
            raise WorkerLost(
                f"barrier {name!r}: worker {unseen} never registered, {self._unseen_after_s:g} s after the first of "
                f"{self._num_workers} workers arrived. Look into its log, and start the workers again",
                worker_index=unseen,
            )

    def _withdraw(self, name: str, worker_index: int) -> None:
        barrier = self._barriers[name]
        del barrier.waiting[worker_index], barrier.passages[worker_index]
        barrier.contributions.pop(worker_index, None)
        self._end_wait(worker_index)
        if not barrier.waiting:
            del self._barriers[name]

    def _end_wait(self, worker_index: int) -> None:
        self._num_waits[worker_index] -= 1
        if not self._num_waits[worker_index]:
            del self._num_waits[worker_index]

    def _unseen_at(self, barrier: _Barrier, now: float) -> int | None:
        """Returns the first worker that never registered, if the barrier has waited for it long enough."""
        if now - barrier.begun_at <= self._unseen_after_s:
            return None
        return next((index for index in range(self._num_workers) if index not in self._registered), None)
