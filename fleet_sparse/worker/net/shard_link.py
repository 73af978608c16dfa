"""ShardLink: one client's protocol with one shard as a state machine, with retries, acks and deadlines.

Pure: no I/O, no threads, no clock of its own. `now` is any monotonic time in seconds.

Every mutating request has the next seq of this client on this shard and is kept until a reply acknowledges it. The
shard applies seq n + 1 after n and nothing twice, so any request may be sent again at any time, as long as seqs are
sent in order.

A request that waits on the shard for other workers is answered with WAIT: its deadline then starts again, and it is
sent again from time to time, which shows if the pserver is still alive.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import NamedTuple

import msgspec

from fleet_sparse.errors import ErrorCode, FleetSparseError
from fleet_sparse.settings import Settings
from fleet_sparse.wire.control import TableState, WorkerProgress
from fleet_sparse.wire.frame_format import PUSHES, Frame, FrameError, Header, Op
from fleet_sparse.wire.link_header import LinkHeader

from .kept_pushes import KeptPushes, restore_pushed
from .link_errors import LinkErrors
from .request import Request

__all__ = ["Actions", "ClientIdentity", "Outcome", "Registration", "Resumption", "ShardLink", "TableState"]

_NEEDS_ROWS = frozenset({Op.PULL, Op.PULL_EARLY, Op.PUSH_PULL, Op.PREPARE, Op.COMMIT})
_LEAVE, _PREPARE = Op.LEAVE, Op.PREPARE  # a lookup of a member takes longer, at every push
_CLIENT_EPOCH = 1  # reserved in the protocol
_WAITING_PROBES = 4  # sends of a waiting request before its deadline
_MAX_BACKOFF = 8  # in units of `retry_s`
_PROBE_S = 0.1  # time between two questions which pushes are durable
_GENERATION_SHIFT = 32  # an incarnation is a generation and 32 random bits


class Registration(NamedTuple):
    """A pserver's reply to the registration of this worker."""

    cluster_id: int
    shard: int
    num_shards: int
    incarnation: int
    placement_version: int
    data_endpoint: str
    """`host:port` of its ZeroMQ socket; empty if it has none."""
    tables: tuple[TableState, ...] = ()
    resumed: str = ""
    """JSON of the snapshot that the pserver started from; empty if there was none."""
    stream_endpoint: str = ""
    """`unix:<name>` or `tcp:<host>:<port>` of its streams; empty if it has none."""
    is_supervised: bool = False
    """True if it is started again when it dies."""
    is_restart: bool = False
    """True if it was started again in this job."""
    restored_seq: int = 0
    """Of a restarted one: the newest push of this client that it has."""
    has_log: bool = False
    """True if every push that it answered survives its process."""
    open_barriers: tuple[str, ...] = ()
    """Of shard 0: the barriers that have opened for the rest of the job."""
    progress: WorkerProgress | None = None
    """Of shard 0: the steps and the position of the process whose place this worker takes; None if it takes none."""
    acks_precede_durability: bool = False
    """True if the machine of the pserver may lose pushes that it acked; `push_floor` of its replies says which not."""
    pushed_step: int = 0
    """In a job that counts steps: the newest step of this worker that the shard has."""
    max_staged_bytes: int = Settings.max_staged_bytes
    """Largest total size of the pushes that it stages for a step."""
    log_job_id: int = 0
    """The job with which the log of the pserver begins; 0 without one."""
    copies_epoch: int = 0
    """Shard 0 gives it another value once rows were loaded or removed, as at each barrier: see `Passed`."""
    num_loads_before: int = 0
    """Of shard 0: number of snapshots that were loaded into the running job before this client registered first."""


class Resumption(NamedTuple):
    """Where a client continues with a shard that was started again."""

    push_seq: int = 0
    """Seq of the newest push that it will not send again."""
    step: int = 0
    """Step of the newest of them that completes one; 0 without."""


def is_older(incarnation: int, other: int) -> bool:
    """Returns whether an incarnation of a pserver began before another one. Their generations are compared."""
    return incarnation >> _GENERATION_SHIFT < other >> _GENERATION_SHIFT


class ClientIdentity(NamedTuple):
    """Identifies a client of the data plane; its pushes are numbered from 1."""

    client_id: bytes
    client_epoch: int = _CLIENT_EPOCH
    """Reserved: always 1."""


class Outcome(msgspec.Struct, frozen=True, eq=False):
    """The end of a request: a reply, or an error."""

    request: Request
    reply: Frame | None
    """None for a push that the reply to another one acked, and for a reply that was not decoded: the request has it."""
    error: FleetSparseError | None


@dataclass(slots=True)
class Actions:
    """The work that the owner of a link must do now, in this order."""

    outcomes: list[Outcome] = field(default_factory=list)
    reopen: bool = False
    requests: list[Request] = field(default_factory=list)
    """Requests to send."""


class ShardLink:
    """One client's side of the protocol with one shard. One thread at a time uses it; others may read `failure`.

    Args:
        registration: The pserver's reply to this worker.
        identity: Sent in every frame.
        settings: Deadline, retry interval, retry budget and bounds of the window.
        condition: Describes the connection, for messages.
        flags: Header flags of every frame.

    Attributes:
        failure: Why nothing can be sent any more, or None. Set once: a push that was given up leaves a hole in the seqs
            behind which nothing may be applied.
        last_error: The latest fault, for messages.
        errors: Makes the errors of this link.
        last_seq: Seq of the newest push submitted; 0 before the first.
        acked_seq: All pushes up to this seq are applied.
        step: The newest step that the shard reported as complete.
        shard: Index of the shard.
        patience_s: Seconds after which a request without an answer fails.
        due_at: Time before which `poll` has nothing to do; minus infinity for now, infinity for never. It may be too
            early, see `is_due`.
        header: Header of its frames.
        outstanding: Requests without an outcome, by request id.
        kept: Acked pushes that may be lost; None if an acked push is never sent again.
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
        self.shard = registration.shard  # constant after construction, as all down to the blank line
        self._registration = registration
        self._deadline_s = settings.deadline_s
        self.patience_s = settings.deadline_s
        if registration.is_supervised:
            self.patience_s = max(settings.deadline_s, settings.failover_s)
        self._retry_budget_s = settings.barrier_s
        self._retry_s = settings.retry_s
        self._max_pushes = settings.max_inflight_pushes
        self._max_bytes = settings.max_inflight_bytes
        self.errors = LinkErrors(
            registration.shard, registration.stream_endpoint or registration.data_endpoint, condition
        )

        self._flags = flags
        self._client_id = identity.client_id

        self._incarnation = registration.incarnation
        self.header = self._make_header()
        self.failure: FleetSparseError | None = None
        self.last_error = ""
        self.step = 0
        self.last_seq = 0
        self.acked_seq = 0
        self._acked_step = 0  # step that the newest acked push completes of those that complete one
        self._push_floor = 0  # seq of the newest push that changes something
        self.kept: KeptPushes | None = None
        if registration.acks_precede_durability:
            self.kept = KeptPushes(settings.kept_bytes // registration.num_shards)
        self._replayed_to = 0  # pushes up to this one were acked before, and are sent again
        self._replays_steps = False  # some of them end steps, or are a LEAVE
        self._probe: Request | None = None  # asks which pushes are durable
        self._probe_at = -math.inf  # time before which it is not sent again
        self._awaits_durable = False
        self.outstanding: dict[int, Request] = {}
        self._unacked: dict[int, Request] = {}  # pushes by seq, in order
        self._unacked_bytes = 0
        self._unsent: list[Request] = []  # ordered; part of the outstanding
        self._last_request_id = 0
        self._gap = (0, -math.inf)  # seq that was last sent again because of a gap, and when
        self._received_at = -math.inf
        self._timer = math.inf  # not later than the next timeout or deadline
        self.due_at = math.inf

    def has_capacity(self, num_pushes: int, num_bytes: int) -> bool:
        """Returns whether the window has capacity for these pushes. An empty window has it for those of any call.

        If too many bytes are kept, the link asks from time to time which pushes are durable.
        """
        if self.kept is not None and not self.kept.has_capacity(self._unacked_bytes + num_bytes):
            self._awaits_durable = True
            self.due_at = min(self.due_at, self._probe_at)
            return False
        return not self._unacked or (
            len(self._unacked) + num_pushes <= self._max_pushes and self._unacked_bytes + num_bytes <= self._max_bytes
        )

    def submit(self, request: Request, submitted_at: float, sent_at: float | None = None) -> bool:
        """Adds a request. A pull is answered after all pushes submitted before it are applied.

        It does not wait for a LEAVE, which changes no row and is only done when every other worker leaves as well.

        Args:
            request: A new request.
            submitted_at: Time from which its deadline counts.
            sent_at: The time if the caller can send it now, None if not.

        Returns:
            True if the caller sends it now; otherwise `take_unsent` and `poll` return it when it is to be sent.

        Raises:
            FleetSparseError: `failure`.
        """
        if self.failure is not None:
            raise self.failure
        self._last_request_id += 1
        request.request_id = request.order = self._last_request_id
        request.submitted_at = submitted_at
        if request.op in PUSHES:
            self.last_seq += 1
            request.push_seq = self.last_seq
            self._unacked[request.push_seq] = request
            self._unacked_bytes += request.num_bytes
            if request.op is not _LEAVE:
                self._push_floor = self.last_seq
        else:
            request.push_floor = self._push_floor
        self.outstanding[request.request_id] = request
        if sent_at is None or self._unsent or self.acked_seq < self._replayed_to:
            self._unsent += [request]
            self.due_at = -math.inf
            return False
        request.sent_at, request.tries = sent_at, 1
        for at in (sent_at + self._retry_s, submitted_at + self.patience_s):
            if at < self._timer:  # noqa: PLR1730  # `min` and `max` are calls, at every request
                self._timer = at
        self.due_at = self._timer
        return True

    def take_unsent(self, now: float) -> list[Request]:
        """Returns the requests that were not sent yet or are due again, to be sent now. Checks no deadline."""
        unsent, self._unsent = self._unsent, []
        requests = []
        is_sendable = self._replay_gate()
        for request in unsent:
            if (request.tries or request.is_replay) and request.request_id not in self.outstanding:
                continue  # it was answered since it became due
            if is_sendable is not None and not is_sendable(request):
                self._unsent.append(request)
                continue
            request.sent_at = now
            request.tries += 1
            due_at = now + self._retry_s if request.tries == 1 else self._due_at(request)
            self._timer = min(self._timer, due_at, request.submitted_at + self.patience_s)
            requests.append(request)
        self.due_at = self._timer
        return requests

    def is_due(self, now: float) -> bool:
        """Returns whether `poll` has something to do, and updates `due_at` if its request is answered."""
        if self.due_at <= now and not self._unsent:
            due_times = [self._due_at(request) for request in self.outstanding.values() if request.tries]
            self._timer = self.due_at = min(due_times, default=math.inf)
            if self._awaits_durable:
                self.due_at = min(self.due_at, self._probe_at)
        return self.due_at <= now

    def poll(self, now: float) -> Actions:
        """Sends what is due, and fails the requests whose deadline has passed."""
        actions = Actions()
        if now >= self._timer:
            self._check_timers(now, actions)
        if self._awaits_durable and now >= self._probe_at and self.failure is None:
            self._ask_for_durable(now)
        actions.requests += self.take_unsent(now)
        return actions

    def receive(self, frame: Frame, now: float) -> list[Outcome]:
        """Processes a reply. A late or duplicate one changes nothing."""
        if self.failure is not None:
            return []
        header = frame.header
        if header.incarnation != self._incarnation:
            if self._registration.is_supervised:
                return []  # the control plane reports it, and knows what follows
            return self._note_other(header.incarnation, f"incarnation {header.incarnation:016x} answered")
        if frame.error is not None:
            self._received_at = now
            return self._receive_error(header.request_id, frame, now)
        if header.op not in (Op.ROWS, Op.ACK, Op.WAIT, Op.NORMS):
            self._received_at = now
            self.last_error = f"a {header.op.name} frame came as a reply"
            return []
        self.note_durable(header.push_floor)
        outcomes = self.receive_reply(
            header.request_id, header.push_seq, header.step, now, header.op in (Op.ROWS, Op.NORMS), frame
        )
        if header.op is Op.WAIT and header.request_id in self.outstanding:
            self.outstanding[header.request_id].waited_at = now
        return outcomes

    def receive_reply(
        self, request_id: int, push_seq: int, step: int, now: float, has_rows: bool, frame: Frame | None = None
    ) -> list[Outcome]:
        """Processes a reply of this incarnation that is no error.

        Args:
            request_id: As in its header.
            push_seq: As in its header.
            step: As in its header.
            now: The time.
            has_rows: False for an ACK or a WAIT.
            frame: The reply; None if it is not decoded, because the request has it.
        """
        if self.failure is not None:
            return []
        self._received_at = now
        if push_seq > self.last_seq:
            return self.fail(self.errors.foreign_push(push_seq, self.last_seq))
        if step > self.step:  # noqa: PLR1730  # `min` and `max` are calls, at every request
            self.step = step
        outcomes = self._acknowledge(push_seq, request_id, frame) if push_seq > self.acked_seq else []
        if self._probe is not None and request_id == self._probe.request_id:
            self.outstanding.pop(request_id, None)
            self._probe = None
        if has_rows:
            request = self.outstanding.get(request_id)
            if request is not None and request.op in _NEEDS_ROWS:
                del self.outstanding[request_id]
                outcomes += [Outcome(request, frame, None)]
        return outcomes

    def note_durable(self, seq: int) -> None:
        """Processes the `push_floor` of a reply: pushes up to it need not be kept."""
        if self.kept is not None:
            self.kept.drop_durable(seq)

    def observe_incarnation(self, incarnation: int) -> list[Outcome]:
        """Processes the incarnation that the control plane reports."""
        if self.failure is not None or incarnation == self._incarnation:
            return []
        return self._note_other(incarnation, f"its control plane reports incarnation {incarnation:016x}")

    def expect(self, incarnation: int) -> Resumption:
        """The pserver was started again: from now on replies of the former process are ignored.

        Returns:
            Where this client continues; it stays true until `rejoin`.
        """
        self._incarnation = incarnation
        self.header = self._make_header()
        kept = {} if self.kept is None else self.kept.by_seq
        steps = [request.step for request in (*kept.values(), *self._unacked.values()) if request.step]
        floor = next(iter(kept)) - 1 if kept else self.acked_seq
        return Resumption(floor, steps[0] - 1 if steps else max(self._acked_step, self.step))

    def rejoin(self, registration: Registration, now: float) -> None:
        """Continues with a pserver that was started again: sends all outstanding requests again, in order.

        Before them go the kept pushes that the pserver does not have. In a job that counts steps they go one step at a
        time, because a shard refuses a push that is two steps ahead.

        Args:
            registration: Its reply to this worker, which registered with the result of `expect`.
            now: The time; the deadlines of all requests begin again.
        """
        if self.failure is not None:
            return
        self._registration = registration
        self._incarnation = registration.incarnation
        self.header = self._make_header()
        endpoint = registration.stream_endpoint or registration.data_endpoint
        self.errors = self.errors._replace(endpoint=endpoint)
        self._gap = (0, -math.inf)
        if self._probe is not None:
            self.outstanding.pop(self._probe.request_id, None)
            self._probe = None
        if self.kept is not None:
            self._replay(self.kept.take_after(registration.restored_seq))
        for request in self.outstanding.values():
            request.submitted_at, request.tries, request.waited_at = now, 0, -math.inf
        self._resend(self.outstanding.values())

    def fail(self, error: FleetSparseError) -> list[Outcome]:
        """Ends the link: every outstanding and every later request fails with `error`."""
        self.failure = error
        requests = self._in_order(self.outstanding.values())
        self.outstanding.clear()
        self._unacked.clear()
        self._unsent.clear()
        self._unacked_bytes = 0
        self._awaits_durable = False
        if self.kept is not None:
            self.kept.clear()
        self._timer = self.due_at = math.inf
        return [Outcome(request, None, error) for request in requests]

    @property
    def has_unsent(self) -> bool:
        """True if there are requests to send, now or once pushes before them are acked."""
        return bool(self._unsent)

    @property
    def awaits_only_acks(self) -> bool:
        """True if no outstanding request waits for more than an ack. Any thread may read it."""
        return all(request.op is Op.PUSH for request in tuple(self.outstanding.values()))

    def lose_connection(self) -> None:
        """The connection is lost, and with it every reply that the shard deferred: sends those requests again now."""
        self._resend(request for request in self.outstanding.values() if request.waited_at >= request.sent_at)

    def _make_header(self) -> LinkHeader:
        registration = self._registration
        return LinkHeader(
            Header(
                Op.PULL,
                self._flags,
                registration.cluster_id,
                registration.shard,
                self._incarnation,
                registration.placement_version,
                self._client_id,
                _CLIENT_EPOCH,
            )
        )

    def no_capacity(self, waited_s: float) -> FleetSparseError:
        """Returns the error of a push that waited for capacity too long."""
        if self._awaits_durable and self.kept is not None:
            return self.errors.kept_full(waited_s, self.kept.num_bytes)
        return self.errors.window_full(waited_s, self.last_seq - self.acked_seq, self.last_error)

    # Sending

    def _replay(self, pushes: Sequence[Request]) -> None:
        """Pushes that were acked are outstanding again."""
        if not pushes:
            return
        self._replayed_to = max(self._replayed_to, self.acked_seq)
        self.acked_seq = pushes[0].push_seq - 1
        self._replays_steps |= any(push.step or push.op is _LEAVE for push in pushes)
        awaited = {request.push_seq: request for request in self.outstanding.values() if request.push_seq}
        unacked, self._unacked = self._unacked, {}
        for push in pushes:
            request = awaited.get(push.push_seq)  # its rows are still awaited
            if request is None:
                request = push
                self._last_request_id += 1
                request.request_id = self._last_request_id
                self.outstanding[request.request_id] = request
            else:
                restore_pushed(request, push)
            self._unacked[request.push_seq] = request
            self._unacked_bytes += request.num_bytes
        self._unacked.update(unacked)

    def _replay_gate(self) -> Callable[[Request], bool] | None:
        """Decides which requests may be sent while pushes of a job that counts steps are sent again; None: all."""
        if self.acked_seq >= self._replayed_to or not self._replays_steps:
            return None
        pushes = iter(self._unacked.values())
        first = next(pushes)
        last_seq = first.push_seq
        if first.op is not _LEAVE:  # several of one step are its parts
            alike = takewhile(lambda push: (push.step, push.op) == (first.step, first.op), pushes)
            last_seq = max((push.push_seq for push in alike), default=last_seq)
        last_seq = min(last_seq, self._replayed_to)
        return lambda request: 0 < request.push_seq <= last_seq

    def _ask_for_durable(self, now: float) -> None:
        """Sends an empty push with a seq that is applied: its ack says which pushes are durable."""
        self._awaits_durable = False  # until a push finds no capacity again
        self._probe_at = now + _PROBE_S
        if self._probe is not None and self._probe.request_id in self.outstanding:
            return
        self._last_request_id += 1
        probe = self._probe = Request(Op.PUSH, self._acked_step, self.shard)
        probe.request_id = probe.order = self._last_request_id
        probe.push_seq, probe.submitted_at, probe.is_noop = self.acked_seq, now, True
        self.outstanding[probe.request_id] = probe
        self._resend([probe])

    def _due_at(self, request: Request) -> float:
        """Time to send a request again."""
        if request.waited_at >= request.sent_at:
            return min(request.waited_at + self._deadline_s / _WAITING_PROBES, self._deadline_of(request))
        backoff: int = min(2 ** (request.tries - 1), _MAX_BACKOFF)
        return min(request.sent_at + backoff * self._retry_s, self._deadline_of(request))

    def _deadline_of(self, request: Request) -> float:
        heard_at = max(request.submitted_at, request.waited_at)
        return min(heard_at + self.patience_s, request.submitted_at + max(self._retry_budget_s, self.patience_s))

    def _check_timers(self, now: float, actions: Actions) -> None:
        self._timer = math.inf
        for request in self._in_order(self.outstanding.values()):
            if now >= self._deadline_of(request):
                error = self._expired(request, now)
                if request.push_seq > self.acked_seq:
                    actions.outcomes += self.fail(error)
                    return
                self._forget(request)
                actions.outcomes.append(Outcome(request, None, error))
        late = [request for request in self.outstanding.values() if request.tries and now >= self._due_at(request)]
        if late:
            actions.reopen = self._received_at < min(request.sent_at for request in late)
            self._resend(self.outstanding.values() if actions.reopen or any(map(self._is_lost, late)) else late)
        for request in self.outstanding.values():
            if request.tries:
                self._timer = min(self._timer, max(self._due_at(request), now))

    def _is_lost(self, request: Request) -> bool:
        """Returns whether a late request may have been lost. A waiting one is only probed."""
        return request.waited_at < request.sent_at

    def _resend(self, requests: Iterable[Request]) -> None:
        self._unsent = self._in_order({*self._unsent, *requests})
        if self._unsent:
            self.due_at = -math.inf

    def _resend_from(self, seq: int) -> None:
        self._resend(r for r in self.outstanding.values() if max(r.push_seq, r.push_floor) >= seq)

    @staticmethod
    def _in_order(requests: Iterable[Request]) -> list[Request]:
        return sorted(requests, key=lambda request: request.order)

    # Replies

    def _acknowledge(self, seq: int, request_id: int, frame: Frame | None) -> list[Outcome]:
        outcomes = []
        for acked in range(self.acked_seq + 1, seq + 1):
            request = self._unacked.pop(acked)
            self._unacked_bytes -= request.num_bytes
            self.acked_seq = acked
            if request.step and request.op is not _PREPARE:  # COMMIT follows, with the same step
                self._acked_step = request.step
            if self.kept is not None:
                self.kept.keep(request)
            if request.is_replay:
                self.outstanding.pop(request.request_id, None)
            elif request.op not in _NEEDS_ROWS:
                del self.outstanding[request.request_id]
                outcomes += [Outcome(request, frame if request_id == request.request_id else None, None)]
        if self._unsent:  # some may have waited for the step that is acked now
            self.due_at = -math.inf
        return outcomes

    def _forget(self, request: Request) -> None:
        del self.outstanding[request.request_id]

    def _receive_error(self, request_id: int, frame: Frame, now: float) -> list[Outcome]:
        assert frame.error is not None
        code, number, message = frame.error
        self.last_error = f"{code.name}: {message}"
        if code is ErrorCode.WRONG_INCARNATION:
            return [] if self._registration.is_supervised else self._fail_restarted(message)
        fatal = self._fatal(request_id, frame.error)
        if fatal is not None:
            return self.fail(fatal)
        request = self.outstanding.get(request_id)
        if request is None or code is ErrorCode.CHECKSUM:
            return []  # a late reply, or a damaged frame: that one counts as lost, the timeout sends it again
        if code is ErrorCode.GAP:
            return self._close_gap(number, now)
        return self._refuse(request, code, message, now)

    def _fatal(self, request_id: int, error: FrameError) -> FleetSparseError | None:
        """The error that ends the link; None if this one does not."""
        refuses_all = request_id == 0 and error.code in (ErrorCode.VERSION, ErrorCode.TOO_LARGE)
        ends_job = error.code in (ErrorCode.WORKER_LOST, ErrorCode.STEP_FAILED, ErrorCode.STALE_EPOCH)
        return self.errors.job_ended(error) if ends_job or refuses_all else None

    def _close_gap(self, expected_seq: int, now: float) -> list[Outcome]:
        if not self.acked_seq < expected_seq <= self.last_seq:
            return self.fail(self.errors.lost_pushes(expected_seq, self.acked_seq, self.last_seq))
        # Every request behind the hole is answered with the same gap; the first answer has sent them all again.
        if self._gap[0] != expected_seq or now >= self._gap[1] + self._retry_s:
            self._gap = (expected_seq, now)
            self._resend_from(expected_seq)
        return []

    def _refuse(self, request: Request, code: ErrorCode, message: str, now: float) -> list[Outcome]:
        if request.is_noop or request.is_replay:
            return self.fail(self.errors.refused(code, message))  # the shard accepts nothing else either
        self._forget(request)
        if request.push_seq > self.acked_seq:
            # Its seq is still expected. A no-op push takes it, so that the pushes behind it can be applied.
            self._unacked_bytes -= request.num_bytes
            self._last_request_id += 1
            noop = Request(Op.PUSH, request.step, request.shard, request.part, request.num_parts)
            noop.request_id, noop.order = self._last_request_id, request.order
            noop.push_seq, noop.submitted_at, noop.is_noop = request.push_seq, now, True
            self._unacked[request.push_seq] = noop
            self.outstanding[noop.request_id] = noop
            self._gap = (request.push_seq, now)
            self._resend_from(request.push_seq)
        return [Outcome(request, None, self.errors.refused(code, message))]

    def _note_other(self, incarnation: int, evidence: str) -> list[Outcome]:
        """Processes another incarnation: a later one ends the link, an earlier one is a process that has ended."""
        if is_older(incarnation, self._incarnation):
            return []
        return self._fail_restarted(evidence)

    def _fail_restarted(self, evidence: str) -> list[Outcome]:
        return self.fail(self.errors.restarted(evidence, self._incarnation))

    def _expired(self, request: Request, now: float) -> FleetSparseError:
        waited_s = now - request.submitted_at
        if now < request.waited_at + self.patience_s:
            return self.errors.not_complete(request.op, self.step + 1, waited_s)
        return self.errors.unanswered(request.op, waited_s, request.tries, self.last_error)
