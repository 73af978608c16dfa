"""Job: the steps of a job's workers on one shard, and which requests are deferred. It decides; `steps` acts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleet_sparse.core.mode import SYNC, Mode
from fleet_sparse.core.watermark import Watermark
from fleet_sparse.errors import ErrorCode
from fleet_sparse.wire.frame_format import PULLS, Block, FrameError, Header, Op

from ..tables.mutations import CopyMutation, Push
from .early_pulls import EarlyPulls
from .step_clock import StepClock
from .table_map import TableEntry


class Contribution(NamedTuple):
    """The pushes of one worker in a step that is not applied yet."""

    watermark: Watermark
    """Watermark of the newest push."""
    pushes: list[Push]
    changes: list[CopyMutation]
    """Applied after the merged pushes of all workers."""

    @property
    def num_bytes(self) -> int:
        """Size of all that is staged."""
        return sum(each.num_bytes for each in [*self.pushes, *self.changes])


@dataclass(slots=True)
class PreparedStep:
    """The newest step in two-phase clipping, after all workers prepared it.

    Attributes:
        step: Its number; 0 if there is none.
        pushes: The merged step; empty once it is applied.
        norms: Reply to PREPARE.
        factors: Factors of the gradients by table id; None until the step is applied.
    """

    step: int = 0
    pushes: list[Push] = field(default_factory=list)
    norms: list[Block] = field(default_factory=list)
    factors: Mapping[int, NDArray[np.float32]] | None = None


class DeferredRequest(NamedTuple):
    """A request that is answered later, and what it pulls."""

    header: Header
    pulls: Sequence[tuple[Block, TableEntry]]


class Job:
    """A job whose steps are counted.

    Args:
        mode: Mode of the job.
        num_workers: Number of workers of the job.
        max_staged_bytes: Largest total size of the pushes that are staged for a step.

    Attributes:
        mode: As given.
        num_workers: As given.
        is_sync: True if pushes are staged until their step is complete.
        is_single_worker: True if the job has one worker.
        clock: Steps of the workers.
        failure: Why no step can be completed any more; None if all is well.
        staged_step: The step that pushes are, or were last, staged for.
        prepared: The newest step in two-phase clipping.
        early_pulls: Rows that clients pulled for the step after their next one.
    """

    def __init__(self, mode: Mode, num_workers: int, max_staged_bytes: int) -> None:
        self.mode = mode  # constant after construction, as the next five
        self.num_workers = num_workers
        self.is_sync = mode.kind == SYNC
        self.is_single_worker = num_workers == 1
        self._max_staged_bytes = max_staged_bytes
        self._lag = mode.max_step_lag or 0
        self.clock = StepClock(num_workers)
        self.failure: FrameError | None = None
        self._workers: dict[bytes, int] = {}  # by client id
        self._clients: dict[int, bytes] = {}  # by worker: the same pairs
        self._staged: dict[int, Contribution] = {}  # by worker
        self._parts: dict[int, list[Push | CopyMutation]] = {}  # by worker, of a step that is not merged with others
        self.staged_step = 0
        self._stages_prepare = False  # all that is staged came with PREPARE, or none of it
        self._has_prepared: set[int] = set()  # workers whose whole contribution is staged with PREPARE
        self.prepared = PreparedStep()
        self._left: dict[bytes, Watermark] = {}  # LEAVE of each worker that left, by client id
        self._deferred: dict[tuple[bytes, int], DeferredRequest] = {}  # by client and request id
        self.early_pulls = EarlyPulls()

    # Membership

    def join(self, worker: int, client_id: bytes) -> None:
        """Makes a client this worker, in the place of the client that was it before."""
        former = self._clients.pop(worker, None)
        if former is not None:
            del self._workers[former]
        if former is not None and former != client_id:
            self._drop_parts(former, worker)
            if self._left.pop(former, None) is not None:
                self.clock.rejoin(worker)
        index = self._workers.pop(client_id, None)
        if index is not None:
            del self._clients[index]
        self._workers[client_id] = worker
        self._clients[worker] = client_id

    def displaces(self, worker: int, client_id: bytes) -> bool:
        """Returns whether a client would take the place of one that took part in steps which then cannot go on."""
        if self.mode.can_replace_workers:
            return False
        has_begun = bool(self.clock.complete or self.num_staged or self._left or self.prepared.step)
        return has_begun and client_id not in self._workers and worker in self._clients

    def is_over_for(self, client_id: bytes) -> bool:
        """Returns whether this job failed before a client joined, which therefore belongs to the next job."""
        return self.failure is not None and client_id not in self._workers

    def members(self) -> dict[bytes, int]:
        """Returns the worker of each client that takes part in steps."""
        return dict(self._workers)

    def worker_of(self, header: Header) -> int | None:
        """Returns the index of the worker that sent a request; None if its client is not a worker."""
        return self._workers.get(header.client_id)

    def fail(self, code: ErrorCode, message: str, number: int = 0, *, step: int | None = None) -> None:
        """Makes `step`, by default the next one, and all after it impossible; the first reason is kept."""
        if self.failure is None:
            text = f"step {step or self.clock.complete + 1} cannot be completed: {message}"
            advice = ". Look into its log, and start again from the last save" if code is ErrorCode.WORKER_LOST else ""
            self.failure = FrameError(code, number, text + advice)
            self._staged.clear()
            self._parts.clear()
            self.prepared = PreparedStep()

    # Pushes

    @property
    def staged_bytes(self) -> int:
        """Size of the pushes that are staged."""
        of_parts = sum(each.num_bytes for parts in self._parts.values() for each in parts)
        return of_parts + sum(contribution.num_bytes for contribution in self._staged.values())

    @property
    def num_staged(self) -> int:
        """Number of the pushes that are staged, each of one table."""
        of_parts = sum(map(len, self._parts.values()))
        return of_parts + sum(len(each.pushes) + len(each.changes) for each in self._staged.values())

    def find_fault(self, header: Header, worker: int, num_bytes: int) -> tuple[ErrorCode, str] | None:
        """Returns why a push of a step is refused; None if it is not."""
        if self.clock.has_left(worker):
            return ErrorCode.MALFORMED, f"header: worker {worker} pushes step {header.step} after LEAVE"
        if worker in self._has_prepared and header.op is not Op.COMMIT:
            return ErrorCode.MALFORMED, f"header: worker {worker} pushes step {header.step} a second time"
        due = self.clock.next_step(worker)
        is_due = header.step == due or self._is_made_late(header, worker)
        if not is_due or (self.is_sync and due > self.clock.complete + 1 and not self._is_ahead(header)):
            complete = self.clock.complete
            return ErrorCode.MALFORMED, (
                f"header: worker {worker} pushes step {header.step}; its next one is {due}, and {complete} is complete"
            )
        if not self._accepts(header.op, header.step):
            return ErrorCode.MALFORMED, (
                f"header: worker {worker} sends {header.op.name} in step {header.step}, which does not match what "
                "other workers sent; the programs that workers run in one step should have the same grad_clip"
            )
        staged = num_bytes + self.staged_bytes
        if (self.is_sync or header.num_parts > 1) and staged > self._max_staged_bytes:
            return ErrorCode.TOO_LARGE, (
                f"step {header.step}: staged pushes have {staged} bytes, at most {self._max_staged_bytes} may be "
                "staged. Set FLEET_SPARSE_MAX_STAGED_BYTES higher, or use more pservers"
            )
        return None

    def is_applied(self, header: Header, worker: int) -> bool:
        """Returns whether a new push is of a step that is applied: of the process whose place its client has taken."""
        return self.mode.can_replace_workers and 0 < header.step <= self.clock.pushed(worker)

    def _is_made_late(self, header: Header, worker: int) -> bool:
        """Returns whether a push is of a step that its worker counts with since all rejoined, and did not make.

        A process sends it that has taken the place of one that died before it could report that all had rejoined.
        """
        pushed = self.clock.pushed(worker)
        return self.mode.can_replace_workers and header.step == pushed + 1 < self.clock.next_step(worker)

    def _is_ahead(self, header: Header) -> bool:
        """Returns whether a push prepares the step after the prepared one, which its worker has committed.

        After a failover the log may lack the COMMITs of other workers, which send them again.
        """
        return header.op is Op.PREPARE and header.step == self.prepared.step + 1

    def _accepts(self, op: Op, step: int) -> bool:
        """Returns whether the next step may get such a push: all its contributions are prepared first, or none."""
        if self.prepared.step == step:
            return op is Op.COMMIT
        return op is not Op.COMMIT and (not self._staged or self._stages_prepare is (op is Op.PREPARE))

    def merges_nothing(self, header: Header) -> bool:
        """Returns whether a push that `find_fault` accepts is applied by itself: as all of its step, and not merged."""
        if not self.is_sync:
            return header.num_parts == 1
        is_alone = self.is_single_worker and header.num_parts == 1
        return is_alone and not self._staged and not self._has_prepared and self.early_pulls.is_empty

    def stage(self, header: Header, worker: int, pushes: Sequence[Push], changes: Sequence[CopyMutation] = ()) -> None:
        """Keeps a push, or a part of one, until its step is complete."""
        self.staged_step, self._stages_prepare = header.step, header.op is Op.PREPARE
        _, earlier, earlier_changes = self._staged.get(worker, (None, (), ()))
        self._staged[worker] = Contribution(watermark_of(header), [*earlier, *pushes], [*earlier_changes, *changes])

    def keep_part(self, worker: int, mutations: Sequence[Push | CopyMutation]) -> None:
        """Keeps a part of a step that is applied with its last part, so that no worker dies in the middle of it."""
        self._parts.setdefault(worker, []).extend(mutations)

    def take_parts(self, worker: int) -> list[Push | CopyMutation]:
        """Returns the parts that are kept of a worker's step, in order."""
        return self._parts.pop(worker, [])

    def _drop_parts(self, client_id: bytes, worker: int) -> None:
        """Another client has taken the place of this one: the step that it did not complete is made again."""
        if self._parts.pop(worker, None) is not None:
            self._deferred = {key: each for key, each in self._deferred.items() if key[0] != client_id}

    def advance(self, header: Header, worker: int) -> None:
        """Counts a part of a worker's push; the last part completes the worker's step."""
        if header.part + 1 == header.num_parts:
            self.clock.push(worker, header.step)

    def prepare(self, header: Header, worker: int) -> None:
        """Counts a part of a worker's PREPARE; the last part completes its contribution."""
        if header.part + 1 == header.num_parts:
            self._has_prepared.add(worker)

    def take_prepared(self) -> list[Contribution]:
        """Returns what was staged, in worker order, once every worker has prepared the step; empty otherwise."""
        if not self._has_prepared or self.clock.behind(self.staged_step) - self._has_prepared:
            return []
        self._has_prepared.clear()
        return self._take_staged()

    def take_complete(self) -> list[Contribution]:
        """Returns what was staged, in worker order, once its step is complete; empty otherwise."""
        if not self._staged or self.clock.complete < self.staged_step:
            return []
        return self._take_staged()

    def _take_staged(self) -> list[Contribution]:
        contributions = [contribution for _, contribution in sorted(self._staged.items())]
        self._staged.clear()
        return contributions

    def leave(self, header: Header, worker: int) -> None:
        """Takes a worker out of the step group."""
        self._left[header.client_id] = watermark_of(header)
        is_whole = worker in self._has_prepared or self.clock.next_step(worker) > self.staged_step
        if not is_whole:  # the client gave up its push between two parts
            self._staged.pop(worker, None)
        self._parts.pop(worker, None)  # as above
        self.early_pulls.forget(header.client_id)
        self.clock.leave(worker)

    @property
    def left(self) -> list[Watermark]:
        """LEAVE of each worker that left the step group and waits for the others."""
        return list(self._left.values())

    @property
    def num_left(self) -> int:
        """Number of workers that left the step group and wait for the others."""
        return len(self._left)

    def restore_left(self, mark: Watermark) -> None:
        """Takes the worker of a client out of the step group, as a log says; `mark` has its LEAVE."""
        self._left[mark.client_id] = mark
        self.clock.leave(self._workers[mark.client_id])

    def restore_step(self, client_ids: Sequence[bytes], step: int) -> None:
        """Records that clients pushed all steps up to one, as a log says."""
        for client_id in client_ids:
            self.clock.push(self._workers[client_id], step)

    def rejoin_all(self) -> None:
        """All workers, which have left, rejoin: their LEAVE pushes are done."""
        self.clock.rejoin_all()
        self.prepared = PreparedStep()
        self._staged.clear()
        self._has_prepared.clear()
        self._left.clear()

    # Deferred requests

    def must_wait(self, header: Header, applied_seq: int) -> bool:
        """Returns whether a request cannot be answered yet.

        Args:
            header: Header of the request.
            applied_seq: Newest applied push of its client.
        """
        if header.op in PULLS:
            is_bound = header.op is Op.PULL and header.step > 0
            return header.push_floor > applied_seq or (is_bound and self._lags_behind(header.step - 1))
        if header.op is Op.PREPARE:
            return max(self.prepared.step, self.clock.complete) < header.step
        if header.op in (Op.PUSH_PULL, Op.COMMIT) and header.step > 0 and self._lags_behind(header.step):
            return True
        return header.push_seq > applied_seq

    def defer(self, request: DeferredRequest) -> None:
        """Keeps a request until it can be answered; a resend replaces it."""
        self._deferred[request.header.client_id, request.header.request_id] = request

    def take_ready(self, applied_seq: Callable[[bytes], int]) -> list[DeferredRequest]:
        """Returns the deferred requests that can be answered, in order of arrival; all of them after a failure."""
        ready = {
            key: request
            for key, request in self._deferred.items()
            if self.failure is not None or not self.must_wait(request.header, applied_seq(key[0]))
        }
        for key in ready:
            del self._deferred[key]
        return list(ready.values())

    def _lags_behind(self, step: int) -> bool:
        return self.clock.complete < step - self._lag


def watermark_of(header: Header) -> Watermark:
    """Returns the watermark of a client whose push with this header is its newest."""
    return Watermark(header.client_id, header.client_epoch, header.push_seq)
