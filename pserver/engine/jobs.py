"""Jobs: which job the steps of a shard belong to, and which clients are its workers."""

from __future__ import annotations

from fleet_sparse.core.mode import Mode
from fleet_sparse.errors import ErrorCode
from fleet_sparse.wire.frame_format import FrameError

from .job import Job


class Jobs:
    """The job that a shard serves now, and what it must remember of those before.

    Args:
        max_staged_bytes: As of a `Job`.

    Attributes:
        current: The job whose steps are counted; None if steps are not counted.
        ended: Why the job before the current one failed; None if it did not.
    """

    def __init__(self, max_staged_bytes: int) -> None:
        self._max_staged_bytes = max_staged_bytes
        self.current: Job | None = None
        self.ended: FrameError | None = None
        self._clients: dict[int, bytes] = {}  # client ids by worker
        self._replaced: set[bytes] = set()  # ids of clients whose worker is another client now

    def join(self, worker: int, num_workers: int, client_id: bytes, mode: Mode | None, *, begins_job: bool) -> None:
        """Makes a client a worker; in the place of one that took part in steps it fails the current job.

        Args:
            worker: Index of the worker.
            num_workers: Number of workers of the job.
            client_id: The client that pushes for it.
            mode: Mode of the job; None if this worker does not know it yet.
            begins_job: There is no other worker: the job before is forgotten.
        """
        former = {} if begins_job else self._clients
        self._replaced |= {known for index, known in self._clients.items() if begins_job or index == worker}
        self._replaced.discard(client_id)
        self._clients = {**former, worker: client_id}
        if self.current is not None and self.current.displaces(worker, client_id):
            self.current.fail(ErrorCode.WORKER_LOST, f"worker {worker} was started again", worker)
        if begins_job or (self.current is not None and self.current.is_over_for(client_id)):
            self.ended = None if self.current is None else self.current.failure
            self.current = None
        if self.current is None and mode is not None and mode.is_step_synchronized:
            self.current = Job(mode, num_workers, self._max_staged_bytes)
        if self.current is not None and mode is not None:
            self.current.join(worker, client_id)

    def evict_worker(self, worker: int, reason: str) -> None:
        """Fails the steps of the current job, which can never get this worker's pushes."""
        if self.current is not None:
            self.current.fail(ErrorCode.WORKER_LOST, f"worker {worker} is lost, {reason}", worker)

    def is_replaced(self, client_id: bytes) -> bool:
        """Returns whether another client has taken the place of this one."""
        return client_id in self._replaced
