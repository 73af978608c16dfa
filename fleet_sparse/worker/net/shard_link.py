"""The connection to one shard as a state machine: what was sent, what is answered, what must be sent again.

Pure: no I/O, no threads, no clock of its own. `now` is any monotonic time in seconds.

Every push (op PUSH, PUSH_PULL, ASSIGN) has the next seq of this client on this shard and is kept until a reply says
that it was applied. The shard applies seq n + 1 after n and nothing twice, so that anything may be sent again at any
time, as long as seqs go out in order.

A request that waits on the shard for other workers is answered with WAIT: then its deadline begins anew, and it is sent
again now and then, which tells whether the pserver is still there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fleet_sparse.errors import (
    ErrorCode,
    FleetSparseError,
    ProtocolError,
    PushRefused,
    ShardUnavailable,
    TableMismatch,
    WorkerLost,
)
from fleet_sparse.settings import Settings
from fleet_sparse.wire.control import TableState
from fleet_sparse.wire.frame_format import PUSHES, Block, Frame, FrameError, Header, Op

__all__ = ["Actions", "ClientIdentity", "Outcome", "Registration", "Request", "ShardLink", "TableState"]

_NEEDS_ROWS = frozenset({Op.PULL, Op.PULL_EARLY, Op.PUSH_PULL, Op.PREPARE, Op.COMMIT})
_WAITING_PROBES = 4  # of a request that waits for other workers, before its deadline
_NOT_FINITE_ADVICE = "If values are not finite, paddle.set_flags({'FLAGS_check_nan_inf': 1}) finds the op"
_MAX_BACKOFF = 8  # times `retry_s`


class Registration(NamedTuple):
    """What a pserver answered when this worker registered."""

    cluster_id: int
    shard: int
    num_shards: int
    incarnation: int
    placement_version: int
    data_endpoint: str
    """`host:port` of its data plane."""
    tables: tuple[TableState, ...] = ()
    resumed: str = ""
    """JSON, of the snapshot that the pserver began with; empty if with none."""
    stream_endpoint: str = ""
    """Where it listens for streams; empty if nowhere."""


class ClientIdentity(NamedTuple):
    """Who pushes. A client that starts again under the same id takes a higher epoch, and its seqs start at 1 again."""

    client_id: bytes
    client_epoch: int


@dataclass(slots=True, eq=False)
class Request:
    """One frame to one shard. The link fills the fields without comment from `request_id` on."""

    op: Op
    blocks: list[Block]
    num_bytes: int = 0  # of the blocks' columns
    step: int = 0
    part: int = 0
    num_parts: int = 1
    tag: Any = None  # the owner's
    request_id: int = 0
    order: int = 0  # of submission; requests are always sent in this order
    push_seq: int = 0
    push_floor: int = 0
    submitted_at: float = 0.0
    sent_at: float = 0.0
    tries: int = 0
    waited_at: float = -math.inf  # when the shard last said that it waits for other workers
    is_filler: bool = False  # it takes the seq of a push that was refused


class Outcome(NamedTuple):
    """How a request ended: with a reply (None for a push acked by the reply to another one), or with an error."""

    request: Request
    reply: Frame | None
    error: FleetSparseError | None


@dataclass(slots=True)
class Actions:
    """What is to be done now, in this order."""

    outcomes: list[Outcome] = field(default_factory=list)
    reopen: bool = False
    frames: list[Frame] = field(default_factory=list)


class ShardLink:
    """One client's side of one shard. One thread owns it; others may read `has_room` and `failure`.

    Args:
        registration: What the pserver answered.
        identity: Goes into every frame.
        settings: Deadline, retry interval and the bounds of the window.
        condition: Says how the connection is, for messages.
        flags: Of every frame.

    Attributes:
        failure: Why nothing can be sent any more, or None. Set once: a push that was given up leaves a hole in the seqs
            that nothing may be applied behind.
        last_error: The latest thing that went wrong, for messages.
    """

    def __init__(
        self,
        registration: Registration,
        identity: ClientIdentity,
        settings: Settings,
        condition: Callable[[], str] = lambda: "",
        *,
        flags: int = 0,
    ) -> None:
        self._registration = registration  # constant after construction, as all down to the blank line
        self._identity = identity
        self._condition = condition
        self._flags = flags
        self._deadline_s = settings.deadline_s
        self._patience_s = settings.barrier_s
        self._retry_s = settings.retry_s
        self._max_pushes = settings.max_inflight_pushes
        self._max_bytes = settings.max_inflight_bytes
        self.endpoint = registration.data_endpoint
        self.where = f"shard {registration.shard} at {registration.data_endpoint}"

        self.failure: FleetSparseError | None = None
        self.last_error = ""
        self._step = 0
        self._outstanding: dict[int, Request] = {}  # by request id
        self._unacked: dict[int, Request] = {}  # pushes by seq, in order
        self._unacked_bytes = 0
        self._unsent: list[Request] = []  # ordered; part of the outstanding
        self._last_request_id = 0
        self._last_seq = 0  # of the newest push
        self._acked_seq = 0  # all up to this one are applied
        self._gap = (0, -math.inf)  # seq that was last sent again because of a gap, and when
        self._received_at = -math.inf
        self._timer = math.inf  # not later than the next timeout or deadline

    @property
    def last_seq(self) -> int:
        """Seq of the newest push submitted; 0 before the first."""
        return self._last_seq

    @property
    def acked_seq(self) -> int:
        """All pushes up to this seq are applied."""
        return self._acked_seq

    @property
    def has_unacked(self) -> bool:
        """Whether some push is not applied yet, as far as is known here."""
        return bool(self._unacked)

    @property
    def step(self) -> int:
        """The newest step that the shard said is complete."""
        return self._step

    @property
    def num_outstanding(self) -> int:
        """Requests without an outcome."""
        return len(self._outstanding)

    def has_room(self, num_pushes: int, num_bytes: int) -> bool:
        """Whether so many pushes fit into the window. One call's pushes always fit into an empty one."""
        return not self._unacked or (
            len(self._unacked) + num_pushes <= self._max_pushes and self._unacked_bytes + num_bytes <= self._max_bytes
        )

    def submit(self, request: Request, now: float) -> None:
        """Takes a request over; `send_unsent` and `poll` send it.

        A pull is answered after all pushes submitted before it are applied.

        Raises:
            FleetSparseError: `failure`.
        """
        if self.failure is not None:
            raise self.failure
        self._last_request_id += 1
        request.request_id = request.order = self._last_request_id
        request.submitted_at = now
        if request.op in PUSHES:
            self._last_seq += 1
            request.push_seq = self._last_seq
            self._unacked[request.push_seq] = request
            self._unacked_bytes += request.num_bytes
        else:
            request.push_floor = self._last_seq
        self._outstanding[request.request_id] = request
        self._unsent.append(request)

    def next_time(self) -> float:
        """When `poll` has something to do; minus infinity for at once, infinity for never."""
        return -math.inf if self._unsent else self._timer

    @property
    def has_unsent(self) -> bool:
        """Whether `send_unsent` has something to do."""
        return bool(self._unsent)

    def send_unsent(self, now: float) -> Actions:
        """Requests not sent yet, and those found to be due again; no deadline is looked at."""
        actions = Actions()
        self._send(now, actions)
        return actions

    def poll(self, now: float) -> Actions:
        """What is due: requests not sent yet, those that timed out, and those whose deadline has passed."""
        actions = Actions()
        if now >= self._timer:
            self._check_timers(now, actions)
        if self._unsent:
            self._send(now, actions)
        return actions

    def receive(self, frame: Frame, now: float) -> list[Outcome]:
        """Takes a reply in. One that came late or twice changes nothing."""
        if self.failure is not None:
            return []
        header = frame.header
        if header.incarnation != self._registration.incarnation:
            return self._fail_restarted(f"incarnation {header.incarnation:016x} answered")
        self._received_at = now
        if frame.error is not None:
            return self._receive_error(header.request_id, frame, now)
        if header.op not in (Op.ROWS, Op.ACK, Op.WAIT, Op.NORMS):
            self.last_error = f"a {header.op.name} frame came as a reply"
            return []
        if header.push_seq > self._last_seq:
            return self.fail(
                ProtocolError(
                    f"{self.where}: push {header.push_seq} of this client is applied, it sent {self._last_seq}. "
                    "Two processes use one client id",
                    code=ErrorCode.GAP,
                )
            )
        self._step = max(self._step, header.step)
        outcomes = self._acknowledge(header.push_seq, frame)
        request = self._outstanding.get(header.request_id)
        if request is not None and header.op is Op.WAIT:
            request.waited_at = now
        if request is not None and request.op in _NEEDS_ROWS and header.op in (Op.ROWS, Op.NORMS):
            self._forget(request)
            outcomes.append(Outcome(request, frame, None))
        return outcomes

    def observe_incarnation(self, incarnation: int) -> list[Outcome]:
        """Takes in what the control plane says of the pserver's incarnation."""
        if self.failure is not None or incarnation == self._registration.incarnation:
            return []
        return self._fail_restarted(f"its control plane tells of incarnation {incarnation:016x}")

    def fail(self, error: FleetSparseError) -> list[Outcome]:
        """Ends the link: every outstanding request fails with `error`, and so does every later one."""
        self.failure = error
        requests = self._in_order(self._outstanding.values())
        self._outstanding.clear()
        self._unacked.clear()
        self._unsent.clear()
        self._unacked_bytes = 0
        self._timer = math.inf
        return [Outcome(request, None, error) for request in requests]

    # Sending

    def _send(self, now: float, actions: Actions) -> None:
        for request in self._unsent:
            if request.request_id not in self._outstanding:
                continue  # it was answered since it was found to be due again
            request.sent_at = now
            request.tries += 1
            self._timer = min(self._timer, self._due_at(request))
            actions.frames.append(self._frame(request))
        self._unsent.clear()

    def _frame(self, request: Request) -> Frame:
        header = Header(
            request.op,
            self._flags,
            cluster_id=self._registration.cluster_id,
            shard=self._registration.shard,
            incarnation=self._registration.incarnation,
            placement_version=self._registration.placement_version,
            client_id=self._identity.client_id,
            client_epoch=self._identity.client_epoch,
            request_id=request.request_id,
            push_seq=request.push_seq,
            push_floor=request.push_floor,
            step=request.step,
            part=request.part,
            num_parts=request.num_parts,
        )
        return Frame(header, request.blocks)

    def _due_at(self, request: Request) -> float:
        """When to send a request again."""
        if request.waited_at >= request.sent_at:
            return min(request.waited_at + self._deadline_s / _WAITING_PROBES, self._deadline_of(request))
        backoff: int = min(2 ** (request.tries - 1), _MAX_BACKOFF)
        return min(request.sent_at + backoff * self._retry_s, self._deadline_of(request))

    def _deadline_of(self, request: Request) -> float:
        heard_at = max(request.submitted_at, request.waited_at)
        return min(heard_at + self._deadline_s, request.submitted_at + max(self._patience_s, self._deadline_s))

    def _check_timers(self, now: float, actions: Actions) -> None:
        self._timer = math.inf
        for request in self._in_order(self._outstanding.values()):
            if now >= self._deadline_of(request):
                error = self._unanswered(request, now)
                if request.push_seq > self._acked_seq:
                    actions.outcomes += self.fail(error)
                    return
                self._forget(request)
                actions.outcomes.append(Outcome(request, None, error))
        late = [request for request in self._outstanding.values() if request.tries and now >= self._due_at(request)]
        if late:
            actions.reopen = self._received_at < min(request.sent_at for request in late)
            self._resend(self._outstanding.values() if actions.reopen or any(map(self._is_lost, late)) else late)
        for request in self._outstanding.values():
            if request.tries:
                self._timer = min(self._timer, max(self._due_at(request), now))

    def _is_lost(self, request: Request) -> bool:
        """Whether a request that is late may have been lost; one that is told to wait is only asked for again."""
        return request.waited_at < request.sent_at

    def _resend(self, requests: Iterable[Request]) -> None:
        self._unsent = self._in_order({*self._unsent, *requests})

    def _resend_from(self, seq: int) -> None:
        self._resend(r for r in self._outstanding.values() if max(r.push_seq, r.push_floor) >= seq)

    @staticmethod
    def _in_order(requests: Iterable[Request]) -> list[Request]:
        return sorted(requests, key=lambda request: request.order)

    # Replies

    def _acknowledge(self, seq: int, frame: Frame) -> list[Outcome]:
        outcomes = []
        for acked in range(self._acked_seq + 1, seq + 1):
            request = self._unacked.pop(acked)
            self._unacked_bytes -= request.num_bytes
            self._acked_seq = acked
            if request.op not in _NEEDS_ROWS:
                self._forget(request)
                outcomes.append(
                    Outcome(request, frame if frame.header.request_id == request.request_id else None, None)
                )
        return outcomes

    def _forget(self, request: Request) -> None:
        del self._outstanding[request.request_id]

    def _receive_error(self, request_id: int, frame: Frame, now: float) -> list[Outcome]:
        assert frame.error is not None
        code, number, message = frame.error
        self.last_error = f"{code.name}: {message}"
        if code is ErrorCode.WRONG_INCARNATION:
            return self._fail_restarted(message)
        fatal = self._fatal(request_id, frame.error)
        if fatal is not None:
            return self.fail(fatal)
        request = self._outstanding.get(request_id)
        if request is None or code is ErrorCode.CHECKSUM:
            return []  # a late reply, or a damaged frame: that one counts as lost, the timeout sends it again
        if code is ErrorCode.GAP:
            return self._close_gap(number, now)
        return self._refuse(request, code, message, now)

    def _fatal(self, request_id: int, error: FrameError) -> FleetSparseError | None:
        """What ends the link, if an error does."""
        text = f"{self.where}: {error.message}"
        if error.code is ErrorCode.WORKER_LOST:
            return WorkerLost(text, worker_index=error.number)
        if error.code is ErrorCode.STEP_FAILED:
            return PushRefused(f"{text}. {_NOT_FINITE_ADVICE}")
        refuses_all = request_id == 0 and error.code in (ErrorCode.VERSION, ErrorCode.TOO_LARGE)
        return ProtocolError(text, code=error.code) if refuses_all or error.code is ErrorCode.STALE_EPOCH else None

    def _close_gap(self, expected_seq: int, now: float) -> list[Outcome]:
        if not self._acked_seq < expected_seq <= self._last_seq:
            return self.fail(
                ProtocolError(
                    f"{self.where}: it expects push {expected_seq}, of which {self._acked_seq} are acked and "
                    f"{self._last_seq} sent; it has forgotten some, or two processes use one client id",
                    code=ErrorCode.GAP,
                )
            )
        # Every request behind the hole is answered with the same gap; the first answer has sent them all again.
        if self._gap[0] != expected_seq or now >= self._gap[1] + self._retry_s:
            self._gap = (expected_seq, now)
            self._resend_from(expected_seq)
        return []

    def _refuse(self, request: Request, code: ErrorCode, message: str, now: float) -> list[Outcome]:
        if request.is_filler:
            return self.fail(self._refusal(code, message))  # nothing is left to send that the shard might take
        self._forget(request)
        if request.push_seq > self._acked_seq:
            # Its seq is still expected. An empty push takes it, so that those behind can be applied.
            self._unacked_bytes -= request.num_bytes
            self._last_request_id += 1
            filler = Request(Op.PUSH, [], step=request.step, part=request.part, num_parts=request.num_parts)
            filler.request_id, filler.order = self._last_request_id, request.order
            filler.push_seq, filler.submitted_at, filler.is_filler = request.push_seq, now, True
            self._unacked[request.push_seq] = filler
            self._outstanding[filler.request_id] = filler
            self._gap = (request.push_seq, now)
            self._resend_from(request.push_seq)
        return [Outcome(request, None, self._refusal(code, message))]

    # Errors

    def _refusal(self, code: ErrorCode, message: str) -> FleetSparseError:
        text = f"{self.where}: {message}"
        if code is ErrorCode.NOT_FINITE:
            return PushRefused(f"{text}. {_NOT_FINITE_ADVICE}")
        if code is ErrorCode.SCHEMA:
            return TableMismatch(text)
        return ProtocolError(text, code=code)

    def _fail_restarted(self, evidence: str) -> list[Outcome]:
        return self.fail(
            self._unavailable(
                f"the pserver was started again ({evidence}; this worker registered with "
                f"{self._registration.incarnation:016x}); the rows that it held are gone. "
                "Load the last snapshot and start the workers again"
            )
        )

    def _unanswered(self, request: Request, now: float) -> ShardUnavailable:
        if now < request.waited_at + self._deadline_s:
            what = (
                ("not all workers came to rest", "still trains")
                if request.op is Op.LEAVE
                else (f"step {self._step + 1} was not complete", "did not push it")
            )
            return self._unavailable(
                f"{what[0]} in {now - request.submitted_at:.0f} s: some worker that is alive {what[1]}. If it is only "
                "slow, set FLEET_SPARSE_BARRIER_S higher"
            )
        tries = f"sent {request.tries} times" if request.tries != 1 else "sent once"
        parts = [f"no answer to a {request.op.name} in {now - request.submitted_at:.1f} s, {tries}", self._condition()]
        parts.append(f"last error: {self.last_error}" if self.last_error else "")
        advice = f"See the log of pserver {self._registration.shard}; if it died, start again from the last save"
        return self._unavailable(f"{'; '.join(filter(None, parts))}. {advice}")

    def _unavailable(self, text: str) -> ShardUnavailable:
        return ShardUnavailable(
            f"{self.where}: {text}", shard=self._registration.shard, endpoint=self._registration.data_endpoint
        )
