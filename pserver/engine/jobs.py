"""Jobs: which job the steps of a shard belong to, and which clients are its workers."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable
from typing import Any

import msgspec

from fleet_sparse.core.mode import Mode, parse_mode
from fleet_sparse.core.row_bound import RowBound
from fleet_sparse.errors import ErrorCode
from fleet_sparse.keys import READER, UNREGISTERED
from fleet_sparse.wire.frame_format import PULLS, FrameError, Op

from ..refusal import Refusal
from ..tables.row_asks import CacheTerms
from .departed import DepartedClients
from .job import Job

MAX_VISITORS = 1 << 16
"""Number of readers and tools that are remembered, newest first: a job may be asked for years."""

_REPLACED = FrameError(ErrorCode.STALE_EPOCH, 0, "header: another process has taken the place of this worker")
_VISITOR = FrameError(ErrorCode.FORBIDDEN, 0, f"{READER} PUSH")


class JobsState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a log keeps of the jobs of a shard. Client ids are in hexadecimal digits.

    Attributes:
        clients: Client of each worker.
        replaced: Clients that another one has replaced and that are not forgotten.
        ended: Why the job before the current one failed: code, number and message; None if it did not.
        mode: Mode of the current job, as JSON; None if steps are not counted, as all that follows.
        num_workers: Number of workers of the current job.
        members: Worker of each client that takes part in its steps.
        steps: Newest step that each worker counts with and that is applied.
        pushed_steps: Newest step that each worker pushed itself; empty, and left out of the JSON, if they are `steps`.
        failure: Why it failed, as `ended`.
        departed: As `DepartedClients.recent`.
        departed_earlier: As `DepartedClients.earlier`.
        row_bound: What rows that workers cache may lack; None, and left out of the JSON, if workers cache no rows. Then
            `num_workers` is given also where steps are not counted.
    """

    clients: dict[int, str]
    replaced: list[str]
    ended: tuple[int, int, str] | None = None
    mode: str | None = None
    num_workers: int = 0
    members: dict[str, int] = {}
    steps: list[int] = []
    failure: tuple[int, int, str] | None = None
    departed: list[str] = []
    departed_earlier: list[str] = []
    row_bound: RowBound | None = None
    pushed_steps: list[int] = []

    def to_builtins(self) -> Any:
        """Returns the state as JSON values."""
        fields = msgspec.to_builtins(self, str_keys=True)
        if self.row_bound is None:
            del fields["row_bound"]
        if not self.pushed_steps:
            del fields["pushed_steps"]
        return fields

    @classmethod
    def parse(cls, value: Any) -> JobsState:
        """Returns what `to_builtins` returned.

        Raises:
            ValueError: It is something else.
        """
        return msgspec.convert(value, cls, str_keys=True)


class Jobs:
    """The job that a shard serves now, and what it must remember of those before.

    Args:
        max_staged_bytes: As of a `Job`.
        only_registered: True if clients that have not registered are refused, so that those that departed can be
            forgotten; otherwise they are like workers.

    Attributes:
        pushing: Clients that may push.
        reading: Clients that may pull.
        current: The job whose steps are counted; None if steps are not counted.
        ended: Why the job before the current one failed; None if it did not.
        cache_terms: What workers that cache rows agreed on; None if workers cache no rows.
    """

    def __init__(self, max_staged_bytes: int, *, only_registered: bool = False) -> None:
        self._max_staged_bytes = max_staged_bytes
        self._only_registered = only_registered
        self.pushing: set[bytes] = set()
        self.reading: set[bytes] = set()
        self.current: Job | None = None
        self.ended: FrameError | None = None
        self.cache_terms: CacheTerms | None = None
        self._clients: dict[int, bytes] = {}  # client ids by worker
        self._barred: dict[bytes, FrameError] = {}  # why a client may not push
        self._visitors: deque[bytes] = deque()
        self._departed = DepartedClients()

    def join(self, worker: int, num_workers: int, client_id: bytes, mode: Mode | None, *, begins_job: bool) -> None:
        """Makes a client a worker; in the place of one that took part in steps it fails the current job.

        Args:
            worker: Index of the worker.
            num_workers: Number of workers of the job.
            client_id: The client that pushes for it.
            mode: Mode of the job; None if this worker does not know it yet.
            begins_job: There is no other worker: the job before is forgotten.
        """
        if begins_job:
            self._bar(self._clients.values())
            self._clients.clear()
            self.cache_terms = None
        elif worker in self._clients:
            self._bar([self._clients[worker]])
        self._barred.pop(client_id, None)
        self._departed.discard(client_id)
        self.pushing.add(client_id)
        self.reading.add(client_id)
        self._clients[worker] = client_id
        if self.current is not None and self.current.displaces(worker, client_id):
            self.current.fail(ErrorCode.WORKER_LOST, f"worker {worker} was started again", worker)
        if begins_job or (self.current is not None and self.current.is_over_for(client_id)):
            self.ended = None if self.current is None else self.current.failure
            self.current = None
        if self.current is None and mode is not None and mode.is_step_synchronized:
            self.current = Job(mode, num_workers, self._max_staged_bytes)
        if self.current is not None and mode is not None:
            self.current.join(worker, client_id)
        if mode is not None:
            terms = num_workers, mode.is_step_synchronized
            self.cache_terms = None if mode.row_bound is None else CacheTerms(mode.row_bound, *terms)

    def evict_worker(self, worker: int, reason: str) -> None:
        """Fails the steps of the current job, which can never get this worker's pushes."""
        if self.current is not None:
            self.current.fail(ErrorCode.WORKER_LOST, f"worker {worker} is lost, {reason}", worker)

    def visit(self, client_id: bytes) -> None:
        """Makes a client a reader or a tool, unless it is a worker."""
        if client_id in self._barred or client_id in self._clients.values():
            return
        self._barred[client_id] = _VISITOR
        self.pushing.discard(client_id)
        self.reading.add(client_id)
        self._visitors.append(client_id)
        if len(self._visitors) > MAX_VISITORS:
            oldest = self._visitors.popleft()
            if self._barred.get(oldest) is _VISITOR:
                del self._barred[oldest]
                self.reading.discard(oldest)

    def admits(self, client_id: bytes, op: Op) -> bool:
        """Returns whether a client that is not among those that may push, or pull, is one of them from now on."""
        if self._only_registered or (op not in PULLS and client_id in self._barred):
            return False
        (self.reading if op in PULLS else self.pushing).add(client_id)
        return True

    def refusal(self, client_id: bytes, op: Op) -> Refusal:
        """Returns why a request of a client that is not admitted is refused."""
        if op not in PULLS and client_id in self._barred:
            return Refusal.because(self._barred[client_id])
        return Refusal(ErrorCode.FORBIDDEN, f"{UNREGISTERED} {op.name}")

    def _bar(self, client_ids: Collection[bytes]) -> None:
        """Other clients have taken the places of these."""
        self._barred |= dict.fromkeys(client_ids, _REPLACED)
        self._departed.add(client_ids)
        self.pushing.difference_update(client_ids)

    def knows(self, client_id: bytes) -> bool:
        """Returns whether a client has registered and is not forgotten."""
        return client_id in self.reading or client_id in self._departed

    def expect(self, client_ids: Iterable[bytes]) -> None:
        """These clients were workers before this process: those that are not now, and do not return, are forgotten."""
        self._departed.add(set(client_ids).difference(self._clients.values()))

    def forget_departed(self) -> set[bytes]:
        """A save is committed: forgets, and returns, the workers that were replaced before the save before it.

        They have no pushes that are staged: a step that has some fails, or drops them, when their client is replaced.
        """
        if not self._only_registered:  # one that was forgotten would be admitted again
            return set()
        forgotten = self._departed.pass_save()
        if forgotten:  # made again, because dicts and sets do not shrink
            self._barred = {each: why for each, why in self._barred.items() if each not in forgotten}
            self.reading = self.reading - forgotten
            self.pushing = set(self.pushing)
        return forgotten

    def state(self) -> JobsState:
        """Returns what a log keeps."""
        clients = {worker: client_id.hex() for worker, client_id in self._clients.items()}
        replaced = [client_id.hex() for client_id, why in self._barred.items() if why is _REPLACED]
        state = JobsState(
            clients,
            replaced,
            _numbers_of(self.ended),
            departed=[client_id.hex() for client_id in self._departed.recent],
            departed_earlier=[client_id.hex() for client_id in self._departed.earlier],
        )
        if (terms := self.cache_terms) is not None:
            state = msgspec.structs.replace(state, row_bound=terms.bound, num_workers=terms.num_workers)
        job = self.current
        if job is None:
            return state
        steps, pushed_steps = job.clock.steps(), job.clock.pushed_steps()
        if pushed_steps == steps or not job.mode.can_replace_workers:
            pushed_steps = []
        if job.is_sync:  # a later step is staged: it is in no record, and its workers send it again
            steps = [min(step, job.clock.complete) for step in steps]
        return msgspec.structs.replace(
            state,
            mode=job.mode.to_json(),
            num_workers=job.num_workers,
            members={client_id.hex(): worker for client_id, worker in job.members().items()},
            steps=steps,
            pushed_steps=pushed_steps,
            failure=_numbers_of(job.failure),
        )

    def restore(self, state: JobsState) -> None:
        """Continues from what a log kept.

        Raises:
            ValueError: The mode cannot be read.
        """
        self._clients = {worker: bytes.fromhex(client_id) for worker, client_id in state.clients.items()}
        self._barred = dict.fromkeys(map(bytes.fromhex, state.replaced), _REPLACED)
        self.pushing = set(self._clients.values())
        self.reading = self.pushing | self._barred.keys()
        self._departed = DepartedClients(map(bytes.fromhex, state.departed), map(bytes.fromhex, state.departed_earlier))
        self._departed.add(self._barred)
        self.ended, self.current = _error_of(state.ended), None
        terms = state.num_workers, state.mode is not None
        self.cache_terms = None if state.row_bound is None else CacheTerms(state.row_bound, *terms)
        if state.mode is not None:
            job = self.current = Job(parse_mode(state.mode), state.num_workers, self._max_staged_bytes)
            for client_id, worker in state.members.items():
                job.join(worker, bytes.fromhex(client_id))
            job.clock.restore(state.steps, state.pushed_steps or state.steps)
            job.failure = _error_of(state.failure)


def _numbers_of(error: FrameError | None) -> tuple[int, int, str] | None:
    return None if error is None else (int(error.code), error.number, error.message)


def _error_of(numbers: tuple[int, int, str] | None) -> FrameError | None:
    return None if numbers is None else FrameError(ErrorCode(numbers[0]), numbers[1], numbers[2])
