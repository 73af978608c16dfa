"""Job: the steps of a job's workers on one shard, and who waits there for whom. Decides; the shard acts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleet_sparse.core.mode import SYNC, Mode
from fleet_sparse.errors import ErrorCode
from fleet_sparse.wire.frame_format import PULLS, Block, FrameError, Header, Op

from .changes import Push, TableEntry
from .early_pulls import EarlyPulls
from .step_clock import StepClock


class Client(NamedTuple):
    """Who pushes under a worker's index."""

    client_id: bytes
    epoch: int


class Contribution(NamedTuple):
    """What one worker pushed in a step that is not applied yet."""

    client: Client
    last_seq: int
    pushes: list[Push]

    @property
    def num_bytes(self) -> int:
        """Of all pushes."""
        return sum(push.num_bytes for push in self.pushes)


@dataclass(slots=True)
class Measured:
    """A step in two rounds, once it is merged and measured.

    Attributes:
        step: Its number; 0 for none.
        pushes: What it came to; none any more when it is applied.
        norms: The answer to who measured it.
        factors: By table id, what its gradients were multiplied with; None until it is applied.
    """

    step: int = 0
    pushes: list[Push] = field(default_factory=list)
    norms: list[Block] = field(default_factory=list)
    factors: Mapping[int, NDArray[np.float32]] | None = None


class DeferredRequest(NamedTuple):
    """A request that is answered later, and what it asks for."""

    header: Header
    pulls: Sequence[tuple[Block, TableEntry]]


class Job:
    """The workers of a job that counts steps.

    Args:
        mode: Of the job; it counts steps.
        num_workers: Of the job.
        max_staged_bytes: Largest sum of the pushes that wait for their step to be complete.

    Attributes:
        mode: As given.
        is_of_one: Whether it has one worker.
        clock: Of the steps.
        failure: Why no step can be completed any more; None while all is well.
        staged_step: Of all that is staged, or was last.
        measured: The newest step in two rounds.
        ahead: What clients pulled for the step after their next one.
    """

    def __init__(self, mode: Mode, num_workers: int, max_staged_bytes: int) -> None:
        self.mode = mode  # constant after construction
        self._max_staged_bytes = max_staged_bytes
        self._lag = mode.max_step_lag or 0
        self.is_of_one = num_workers == 1
        self.clock = StepClock(num_workers)
        self.failure: FrameError | None = None
        self._workers: dict[Client, int] = {}
        self._staged: dict[int, Contribution] = {}  # by worker
        self.staged_step = 0
        self._stages_measures = False  # all that is staged, or nothing of it
        self._measuring: set[int] = set()  # workers whose share is here and is to be measured
        self.measured = Measured()
        self._rest_seqs: dict[Client, int] = {}  # of those that rest
        self._parked: dict[tuple[Client, int], DeferredRequest] = {}  # by client and request id
        self.ahead = EarlyPulls()

    @property
    def is_sync(self) -> bool:
        """Whether pushes are staged until their step is complete."""
        return self.mode.kind == SYNC

    # Who is who

    def join(self, worker: int, client: Client) -> None:
        """A client is this worker from now on; that of a process before it, which `displaces` nothing, is forgotten."""
        self._workers = {known: index for known, index in self._workers.items() if index != worker}
        self._workers[client] = worker

    def displaces(self, worker: int, client: Client) -> bool:
        """Whether a client comes in the place of one that took part in steps: nobody knows what that pushed where."""
        has_begun = bool(self.clock.complete or self._staged or self._rest_seqs or self.measured.step)
        return has_begun and client not in self._workers and worker in self._workers.values()

    def is_over_for(self, client: Client) -> bool:
        """Whether a client is of the next job: this one failed without it."""
        return self.failure is not None and client not in self._workers

    def worker_of(self, header: Header) -> int | None:
        """Which worker sent a request; None if no worker registered with its client id."""
        return self._workers.get(client_of(header))

    def fail(self, code: ErrorCode, message: str, number: int = 0, *, step: int | None = None) -> None:
        """No step can be completed any more, from `step` on or from the next one; the first reason counts."""
        if self.failure is None:
            text = f"step {step or self.clock.complete + 1} cannot be completed: {message}"
            advice = ". Look into its log, and start again from the last save" if code is ErrorCode.WORKER_LOST else ""
            self.failure = FrameError(code, number, text + advice)
            self._staged.clear()
            self.measured = Measured()

    # Pushes

    def fault_of(self, header: Header, worker: int, num_bytes: int) -> tuple[ErrorCode, str] | None:
        """Why a push of a step cannot be taken; None if nothing is wrong with it."""
        if self.clock.rests(worker):
            return ErrorCode.MALFORMED, f"header: worker {worker} pushes step {header.step} while it rests at a barrier"
        if worker in self._measuring and header.op is not Op.COMMIT:
            return ErrorCode.MALFORMED, f"header: worker {worker} pushes step {header.step} a second time"
        due = self.clock.next_step(worker)
        if header.step != due or (self.is_sync and due > self.clock.complete + 1):
            complete = self.clock.complete
            return ErrorCode.MALFORMED, (
                f"header: worker {worker} pushes step {header.step}; its next one is {due}, and {complete} is complete"
            )
        if not self._is_due(header.op, header.step):
            return ErrorCode.MALFORMED, (
                f"header: worker {worker} sends {header.op.name} in step {header.step}, which does not go with what "
                "others sent; the programs that workers run in one step should have the same grad_clip"
            )
        staged = num_bytes + sum(share.num_bytes for share in self._staged.values())
        if self.is_sync and staged > self._max_staged_bytes:
            return ErrorCode.TOO_LARGE, (
                f"step {header.step}: pushes of {staged} bytes wait for it, at most {self._max_staged_bytes} may. "
                "Set FLEET_SPARSE_MAX_STAGED_BYTES higher, or use more pservers"
            )
        return None

    def _is_due(self, op: Op, step: int) -> bool:
        """Whether the next step waits for such a push: all its shares are measured first, or none."""
        if self.measured.step == step:
            return op is Op.COMMIT
        return op is not Op.COMMIT and (not self._staged or self._stages_measures is (op is Op.PREPARE))

    def stage(self, header: Header, worker: int, pushes: list[Push]) -> None:
        """Keeps a push, or a part of one, until its step is complete."""
        self.staged_step, self._stages_measures = header.step, header.op is Op.PREPARE
        earlier = self._staged[worker].pushes if worker in self._staged else []
        self._staged[worker] = Contribution(client_of(header), header.push_seq, [*earlier, *pushes])

    def advance(self, header: Header, worker: int) -> None:
        """A part of a worker's push is here; the last one ends its step."""
        if header.part + 1 == header.num_parts:
            self.clock.push(worker)

    def measure(self, header: Header, worker: int) -> None:
        """A part of a worker's push is here, which is to be measured with all others before it is applied."""
        if header.part + 1 == header.num_parts:
            self._measuring.add(worker)

    def take_measured(self) -> list[Contribution]:
        """What was staged, in the order of the workers, once all is here that is to be measured; else nothing."""
        if not self._measuring or self.clock.behind(self.staged_step) - self._measuring:
            return []
        self._measuring.clear()
        return self._take_staged()

    def rest(self, header: Header, worker: int) -> None:
        """A worker rests."""
        client = client_of(header)
        self._rest_seqs[client] = header.push_seq
        self.ahead.forget(client)
        self.clock.rest(worker)

    def take_complete(self) -> list[Contribution]:
        """What was staged, in the order of the workers, if its step is complete; else nothing."""
        if not self._staged or self.clock.complete < self.staged_step:
            return []
        return self._take_staged()

    def _take_staged(self) -> list[Contribution]:
        shares = [share for _, share in sorted(self._staged.items())]
        self._staged.clear()
        return shares

    def take_rested(self) -> dict[Client, int]:
        """If all workers rest: the seqs with which they said so, and they work again; else nothing."""
        if not self.clock.wake_all():
            return {}
        self.measured = Measured()
        seqs, self._rest_seqs = self._rest_seqs, {}
        return seqs

    # Waiting

    def must_wait(self, header: Header, applied_seq: int) -> bool:
        """Whether a request cannot be answered yet.

        Args:
            header: Of the request.
            applied_seq: Newest push of its client that is applied.
        """
        if header.op in PULLS:
            is_bound = header.op is Op.PULL and header.step > 0
            return header.push_floor > applied_seq or (is_bound and self._lags_behind(header.step - 1))
        if header.op is Op.PREPARE:
            return max(self.measured.step, self.clock.complete) < header.step
        if header.op in (Op.PUSH_PULL, Op.COMMIT) and header.step > 0 and self._lags_behind(header.step):
            return True
        return header.push_seq > applied_seq

    def park(self, parked: DeferredRequest) -> None:
        """Keeps a request until it can be answered; one that was sent again takes the place of the first."""
        self._parked[client_of(parked.header), parked.header.request_id] = parked

    def take_ready(self, applied_seq: Callable[[Client], int]) -> list[DeferredRequest]:
        """The parked requests that need not wait any more, in the order in which they came; all after a failure."""
        ready = {
            key: parked
            for key, parked in self._parked.items()
            if self.failure is not None or not self.must_wait(parked.header, applied_seq(key[0]))
        }
        for key in ready:
            del self._parked[key]
        return list(ready.values())

    def _lags_behind(self, step: int) -> bool:
        return self.clock.complete < step - self._lag


def client_of(header: Header) -> Client:
    """Who sent a request."""
    return Client(header.client_id, header.client_epoch)
