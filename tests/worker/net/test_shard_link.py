from __future__ import annotations

import math
import shlex
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fleet_sparse.errors import ErrorCode, FleetSparseError, ProtocolError, ShardUnavailable, WorkerLost
from fleet_sparse.settings import Settings
from fleet_sparse.wire.frame_format import PULLS, Action, Block, Frame, FrameError, Header, Op
from fleet_sparse.worker.net.request import Request
from fleet_sparse.worker.net.shard_link import Actions, ClientIdentity, Outcome, Registration, ShardLink

TRANSCRIPTS = sorted((Path(__file__).parent / "transcripts").glob("*.txt"))
INCARNATION = 0xABC
REGISTRATION = Registration(
    cluster_id=7, shard=1, num_shards=2, incarnation=INCARNATION, placement_version=3, data_endpoint="10.0.0.2:5000"
)
IDENTITY = ClientIdentity(b"0123456789abcdef")


def link_of(registration: Registration = REGISTRATION, **changed: Any) -> ShardLink:
    values = {"deadline_s": 30.0, "retry_s": 2.0, "max_inflight_pushes": 3, "max_inflight_bytes": 1000}
    return ShardLink(registration, IDENTITY, Settings(**{**values, **changed}), lambda: "not connected")


def reply(op: Op, request_id: int, seq: int, error: FrameError | None = None, incarnation: int = INCARNATION) -> Frame:
    return Frame(Header(op, incarnation=incarnation, request_id=request_id, push_seq=seq), [], error)


# Transcripts


class Transcript:
    """Runs the commands of a transcript and says what the link does.

    pull | push [bytes [step]] | push_pull | assign | leave | prepare | commit    submits a request, sends what is due
    rows | ack | wait | norms REQUEST SEQ [INCARNATION [DURABLE_SEQ]]  a reply arrives
    error REQUEST CODE [EXPECTED_SEQ]            an ERROR frame arrives
    at SECONDS                                   the time is now so many seconds
    heartbeat INCARNATION                        the control plane tells of an incarnation
    supervised                                   from here on the link is one to a pserver that is started again
    keeps                                        as supervised, with a log: keeps pushes that are not durable
    expect INCARNATION                           the control plane tells that it was; where does the client continue
    rejoin INCARNATION [RESTORED_SEQ]            the client has registered with it, which has pushes up to this one
    lost                                         the connection is lost
    capacity PUSHES BYTES                        does the window have capacity for them
    """

    def __init__(self) -> None:
        self.link = link_of()
        self.now = 0.0

    def run(self, line: str) -> str:  # noqa: PLR0912  # a branch for each command
        command, *arguments = shlex.split(line)
        outcomes: list[Outcome] = []
        if command in ("pull", "push", "push_pull", "assign", "leave", "prepare", "commit"):
            num_bytes, step, *_ = [*map(int, arguments), *(10, 0)[len(arguments) :]]
            request = Request(Op[command.upper()], step, num_bytes=num_bytes)
            try:
                self.link.submit(request, self.now)
            except FleetSparseError as error:
                return f"raised {type(error).__name__}: {error}"
        elif command in ("rows", "ack", "wait", "norms"):
            incarnation = int(arguments[2], 16) if len(arguments) > 2 else INCARNATION
            frame = reply(Op[command.upper()], int(arguments[0]), int(arguments[1]), incarnation=incarnation)
            if len(arguments) > 3:
                frame.header.push_floor = int(arguments[3])
            outcomes = self.link.receive(frame, self.now)
        elif command == "error":
            expected = int(arguments[2]) if len(arguments) > 2 else 0
            error = FrameError(ErrorCode[arguments[1]], expected, "the reason")
            outcomes = self.link.receive(reply(Op.ERROR, int(arguments[0]), 0, error), self.now)
        elif command == "at":
            self.now = float(arguments[0])
        elif command == "heartbeat":
            outcomes = self.link.observe_incarnation(int(arguments[0], 16))
        elif command in ("supervised", "keeps"):
            registration = REGISTRATION._replace(is_supervised=True, acks_precede_durability=command == "keeps")
            self.link = link_of(registration)
        elif command == "expect":
            resumption = self.link.expect(int(arguments[0], 16))
            return f"seq {resumption.push_seq} step {resumption.step}"
        elif command == "rejoin":
            again = REGISTRATION._replace(incarnation=int(arguments[0], 16), is_supervised=True, data_endpoint="new:1")
            self.link.rejoin(again._replace(restored_seq=int(arguments[1]) if len(arguments) > 1 else 0), self.now)
        elif command == "lost":
            self.link.lose_connection()
        elif command == "capacity":
            return "yes" if self.link.has_capacity(int(arguments[0]), int(arguments[1])) else "no"
        else:
            raise AssertionError(f"no such command: {line}")
        actions = self.link.poll(self.now) if self.link.due_at <= self.now else Actions()
        actions.outcomes[:0] = outcomes
        return "\n".join(self._said(actions)) or "nothing"

    @staticmethod
    def _said(actions: Actions) -> Iterator[str]:
        for request, error in ((each.request, each.error) for each in actions.outcomes):
            name = f"{request.op.name} {request.request_id}"
            yield f"done {name}" if error is None else f"failed {name}: {type(error).__name__}: {error}"
        if actions.reopen:
            yield "reopen"
        for request in actions.requests:
            place = f"seq {request.push_seq}" if request.push_seq else f"floor {request.push_floor}"
            yield f"send {request.op.name} {request.request_id} {place}"


def cases_of(path: Path) -> Iterator[tuple[str, str]]:
    """Pairs of command and what is expected of it."""
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    for paragraph in "\n".join(lines).split("\n\n"):
        if paragraph.strip():
            command, expected = paragraph.strip().split("\n----\n")
            yield command, expected


@pytest.mark.parametrize("path", TRANSCRIPTS, ids=lambda path: path.stem)
def test_link_does_what_its_transcript_says(path: Path) -> None:
    transcript = Transcript()
    for command, expected in cases_of(path):
        assert (command, transcript.run(command)) == (command, expected)


def numbers_of(request: Request) -> tuple[int, ...]:
    return request.request_id, request.push_seq, request.push_floor, request.step, request.part, request.num_parts


def test_a_retry_has_the_numbers_of_the_first_try() -> None:
    link = link_of()
    link.submit(Request(Op.PUSH, 9, part=1, num_parts=2), 0.0)
    sent = [numbers_of(request) for now in (0.0, 5.0) for request in link.poll(now).requests]
    assert sent == [(1, 1, 0, 9, 1, 2)] * 2


def test_nothing_is_due_without_requests() -> None:
    assert link_of().due_at == math.inf


def test_the_timeout_of_an_answered_request_is_not_due() -> None:
    link = link_of()
    link.submit(Request(Op.PUSH), 0.0)
    link.poll(0.0)
    link.receive(reply(Op.ACK, 1, 1), 0.1)
    link.submit(Request(Op.PUSH), 1.0)
    link.poll(1.0)
    assert not link.is_due(2.5)
    assert link.due_at == 3.0
    assert link.is_due(3.0)


def test_a_request_that_was_never_sent_is_due() -> None:
    link = link_of()
    link.submit(Request(Op.PUSH), 0.0)
    assert link.is_due(0.0)


def test_a_request_answered_before_its_retry_is_sent_once() -> None:
    link = link_of()
    link.submit(Request(Op.PUSH), 0.0)
    link.submit(Request(Op.PULL), 0.0)
    link.poll(0.0)
    link.receive(reply(Op.ERROR, 2, 0, FrameError(ErrorCode.GAP, 1, "a gap")), 0.1)
    link.receive(reply(Op.ACK, 1, 1), 0.1)
    assert [request.op for request in link.poll(0.1).requests] == [Op.PULL]


def test_failure_names_shard_seconds_tries_and_last_error() -> None:
    link = link_of()
    link.submit(Request(Op.PULL), 0.0)
    for now in (0.0, 2.0, 6.0):
        link.poll(now)
    link.last_error = "CHECKSUM: the bytes differ"
    (outcome,) = link.poll(30.0).outcomes
    assert isinstance(outcome.error, ShardUnavailable)
    assert (outcome.error.shard, outcome.error.endpoint) == (1, "10.0.0.2:5000")
    for part in ("30.0 s", "sent 3 times", "not connected", "CHECKSUM: the bytes differ"):
        assert part in str(outcome.error)


def test_protocol_errors_keep_their_code() -> None:
    link = link_of()
    link.submit(Request(Op.PULL), 0.0)
    link.poll(0.0)
    (outcome,) = link.receive(reply(Op.ERROR, 1, 0, FrameError(ErrorCode.NOT_READY, 0, "not yet")), 0.1)
    assert isinstance(outcome.error, ProtocolError)
    assert outcome.error.code is ErrorCode.NOT_READY


# Waiting for other workers


def waited(op: Op, *, until: float, seconds: float = 5.0, **changed: Any) -> FleetSparseError | None:
    """What ends a request to a pserver that says WAIT every so many seconds; None if nothing has by then."""
    link, now = link_of(**changed), 0.0
    link.submit(Request(op, step=3), now)
    while now <= until:
        ended = link.poll(now).outcomes
        if ended:
            return ended[0].error
        assert link.receive(reply(Op.WAIT, 1, 0), now) == []
        now += seconds
    return None


@pytest.mark.parametrize("op", [Op.PULL, Op.PUSH, Op.PUSH_PULL, Op.LEAVE])
def test_request_that_waits_outlives_its_deadline_many_times(op: Op) -> None:
    assert waited(op, until=1795.0) is None


@pytest.mark.parametrize("op", [Op.PULL, Op.LEAVE])
def test_wait_for_a_slow_worker_ends_after_barrier_s(op: Op) -> None:
    error = waited(op, until=1000.0, barrier_s=100.0)
    assert isinstance(error, ShardUnavailable)
    assert "100 s" in str(error)
    assert "FLEET_SPARSE_BARRIER_S" in str(error)


def test_barrier_s_below_the_deadline_shortens_no_wait() -> None:
    assert waited(Op.PULL, until=25.0, barrier_s=1.0) is None
    assert waited(Op.PULL, until=35.0, barrier_s=1.0) is not None


def test_push_that_waited_too_long_fails_all_behind_it() -> None:
    link = link_of(barrier_s=100.0)
    for op in (Op.PUSH, Op.PULL):
        link.submit(Request(op, step=1), 0.0)
    link.poll(0.0)
    for now in range(0, 100, 5):
        for request_id in (1, 2):
            link.receive(reply(Op.WAIT, request_id, 0), float(now))
    outcomes = link.poll(100.0).outcomes
    assert [outcome.request.op for outcome in outcomes] == [Op.PUSH, Op.PULL]
    assert isinstance(link.failure, ShardUnavailable)
    assert "step 1 was not complete in 100 s" in str(link.failure)


def test_pull_that_waited_too_long_leaves_the_link_as_it_is() -> None:
    assert isinstance(waited(Op.PULL, until=100.0, barrier_s=50.0), ShardUnavailable)
    link = link_of(barrier_s=50.0)
    link.submit(Request(Op.PULL), 0.0)
    link.poll(0.0)
    for now in range(0, 50, 5):
        link.receive(reply(Op.WAIT, 1, 0), float(now))
    assert len(link.poll(50.0).outcomes) == 1
    link.submit(Request(Op.PULL), 50.0)


def test_newest_complete_step_is_the_largest_that_an_answer_told() -> None:
    link = link_of()
    for _ in range(3):
        link.submit(Request(Op.PULL), 0.0)
    link.poll(0.0)
    steps = []
    for request_id, op, step in ((1, Op.WAIT, 4), (2, Op.ROWS, 6), (3, Op.ROWS, 5)):
        header = Header(op, incarnation=INCARNATION, request_id=request_id, step=step)
        link.receive(Frame(header, []), 0.0)
        steps.append(link.step)
    assert steps == [4, 6, 6]


def test_lost_worker_is_named_by_its_index() -> None:
    link = link_of()
    link.submit(Request(Op.PULL), 0.0)
    link.poll(0.0)
    error = FrameError(ErrorCode.WORKER_LOST, 3, "step 9 cannot be completed: worker 3 is lost")
    (outcome,) = link.receive(reply(Op.ERROR, 1, 0, error), 0.1)
    assert isinstance(outcome.error, WorkerLost)
    assert outcome.error.worker_index == 3
    assert str(outcome.error) == "shard 1 at 10.0.0.2:5000: step 9 cannot be completed: worker 3 is lost"


def test_wait_for_a_request_that_was_answered_changes_nothing() -> None:
    link = link_of()
    link.submit(Request(Op.PULL), 0.0)
    link.poll(0.0)
    link.receive(reply(Op.ROWS, 1, 0), 0.1)
    assert link.receive(reply(Op.WAIT, 1, 0), 0.2) == []
    assert link.outstanding == {}


# Any network that loses, repeats and delays, but does not reorder what one connection carries


REFUSED = 1 << 20
DEADLINE_S = 1e9


def payload_of(request: Request) -> list[int]:
    """What a push changes; a no-op changes nothing."""
    return [] if request.op in PULLS or request.tag is None else [request.tag]


@dataclass
class FakeShard:
    """A ledger for one client: what `docs/protocol.md` says a shard does, and nothing else.

    While `is_waiting` pushes are held, as those of a step that another worker has not pushed.
    """

    applied: list[int] = field(default_factory=list)
    watermark: int = 0
    is_waiting: bool = False
    held: list[list[int]] = field(default_factory=list)  # payloads of pushes that are here and not applied
    parked: dict[int, Request] = field(default_factory=dict)  # by request id

    def answer(self, header: Request) -> Frame:
        wanted = header.push_floor if header.op is Op.PULL else header.push_seq
        expected = self.watermark + len(self.held) + 1
        if wanted > (expected if header.push_seq else expected - 1):
            return self._error(header, FrameError(ErrorCode.GAP, expected, "a gap"))
        if header.push_seq == expected:
            payload = payload_of(header)
            if any(value >= REFUSED for value in payload):
                return self._error(header, FrameError(ErrorCode.NOT_FINITE, 0, "a NaN"))
            self.held.append(payload)
            if not self.is_waiting:
                self._apply()
        if wanted > self.watermark:
            self.parked[header.request_id] = header
            return reply(Op.WAIT, header.request_id, self.watermark)
        op = Op.ROWS if header.op in (Op.PULL, Op.PUSH_PULL) else Op.ACK
        return Frame(Header(op, incarnation=INCARNATION, request_id=header.request_id, push_seq=self.watermark), [])

    def go_on(self) -> list[Frame]:
        """The other workers have pushed; returns the replies that waited for it."""
        self.is_waiting = False
        self._apply()
        parked, self.parked = self.parked, {}
        return [self.answer(request) for request in parked.values()]

    def _apply(self) -> None:
        for payload in self.held:
            self.applied += payload
            self.watermark += 1
        self.held.clear()

    def _error(self, header: Request, error: FrameError) -> Frame:
        return reply(Op.ERROR, header.request_id, self.watermark, error)


class World:
    """A link, a shard, and the connections between them; the newest one is the link's."""

    def __init__(self) -> None:
        self.link = link_of(deadline_s=DEADLINE_S, max_inflight_pushes=10**6, max_inflight_bytes=10**9)
        self.shard = FakeShard()
        self.now = 0.0
        self.requests: deque[tuple[int, Request]] = deque()  # connection, request
        self.replies: deque[tuple[int, Frame]] = deque()
        self.connection = 0
        self.submitted: list[Request] = []
        self.outcomes: list[Outcome] = []

    def submit(self, op: Op, *, refused: bool = False) -> None:
        payload = len(self.submitted) + (REFUSED if refused else 0)
        self.submitted.append(Request(op, tag=payload))
        self.link.submit(self.submitted[-1], self.now)
        self.poll()

    def poll(self) -> None:
        actions = self.link.poll(self.now)
        self.outcomes += actions.outcomes
        self.connection += actions.reopen
        self.requests.extend((self.connection, request) for request in actions.requests)

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.poll()

    def hold_up(self) -> None:
        self.shard.is_waiting = True

    def go_on(self) -> None:
        self.replies.extend((self.connection, frame) for frame in self.shard.go_on())

    def serve(self, older_first: bool) -> None:
        """The shard answers the first request of the oldest or of the newest connection that has one."""
        if self.requests:
            connections = [connection for connection, _ in self.requests]
            wanted = min(connections) if older_first else max(connections)
            connection, request = self.requests[connections.index(wanted)]
            del self.requests[connections.index(wanted)]
            self.replies.append((connection, self.shard.answer(request)))

    def hear(self) -> None:
        if self.replies:
            connection, frame = self.replies.popleft()
            if connection == self.connection:
                self.outcomes += self.link.receive(frame, self.now)
                self.poll()

    def lose(self, queue: deque[Any]) -> None:
        if queue:
            queue.popleft()

    def repeat(self, queue: deque[Any]) -> None:
        if queue:
            queue.appendleft(queue[0])

    def settle(self) -> None:
        """From now on nothing is lost, and nobody held up."""
        self.go_on()
        seconds = [
            *[1.0] * 1000,
            *[DEADLINE_S / 10] * 5,
        ]  # one that was told to wait is asked for again after a quarter
        for each in seconds:
            while self.requests or self.replies:
                self.serve(True)
                self.hear()
            if not self.link.outstanding:
                return
            self.wait(each)
        raise AssertionError("the link does not come to an end")


EVENT = st.sampled_from(
    [
        *("push", "push", "pull", "push_pull", "assign", "refused"),
        *("serve", "serve", "serve newest", "hear", "hear", "wait", "wait long"),
        *("lose request", "lose reply", "repeat request", "repeat reply", "hold up", "go on"),
    ]
)
EVENTS = st.lists(EVENT, max_size=80)


def played(events: list[str]) -> World:
    world = World()
    for event in events:
        match event.split():
            case ["refused"]:
                world.submit(Op.PUSH, refused=True)
            case ["serve", *newest]:
                world.serve(not newest)
            case ["hear"]:
                world.hear()
            case ["lose", what]:
                world.lose(world.requests if what == "request" else world.replies)
            case ["repeat", what]:
                world.repeat(world.requests if what == "request" else world.replies)
            case ["hold", _]:
                world.hold_up()
            case ["go", _]:
                world.go_on()
            case ["wait", *long]:
                world.wait(20.0 if long else 0.7)
            case [op]:
                world.submit(Op[op.upper()])
    world.settle()
    return world


@settings(max_examples=400, deadline=None)
@given(EVENTS)
def test_every_push_is_applied_once_and_in_order(events: list[str]) -> None:
    world = played(events)
    payloads = [payload for request in world.submitted for payload in payload_of(request)]
    assert world.shard.applied == [payload for payload in payloads if payload < REFUSED]


@settings(max_examples=400, deadline=None)
@example(["push", "hold up", "serve", "hear", "go on", "lose reply"])
@given(EVENTS)
def test_every_request_has_one_outcome(events: list[str]) -> None:
    world = played(events)
    ended = [outcome.request for outcome in world.outcomes if outcome.request.tag is not None]
    assert sorted(ended, key=id) == sorted(world.submitted, key=id)
    for outcome in world.outcomes:
        refused = any(payload >= REFUSED for payload in payload_of(outcome.request))
        assert (outcome.error is not None) == refused


@settings(max_examples=400, deadline=None)
@given(EVENTS)
def test_pulls_see_the_pushes_before_them(events: list[str]) -> None:
    world = played(events)
    for outcome in world.outcomes:
        if outcome.request.op is Op.PULL:
            assert outcome.reply is not None
            assert outcome.reply.header.push_seq >= outcome.request.push_floor


def test_without_loss_nothing_is_sent_twice() -> None:
    world = World()
    for _ in range(20):
        world.submit(Op.PUSH)
        world.submit(Op.PULL)
    num_frames = len(world.requests)
    world.settle()
    assert num_frames == 40
    assert all(request.tries == 1 for request in world.submitted)


# Kept pushes

KEEPS = REGISTRATION._replace(is_supervised=True, has_log=True, acks_precede_durability=True, num_shards=1)


def push_of(ids: np.ndarray[Any, np.dtype[np.int64]]) -> Request:
    request = Request(Op.PUSH)
    request.add(Block(Action.PUSH, 1, 2, 1, len(ids), ids, np.ones((len(ids), 1), np.float32), 0.1))
    return request


def acked_push(link: ShardLink, now: float, ids: np.ndarray[Any, np.dtype[np.int64]]) -> None:
    request = push_of(ids)
    link.submit(request, now, now)
    link.receive(reply(Op.ACK, request.request_id, request.push_seq), now)


def test_kept_push_has_columns_of_its_own() -> None:
    link, ids = link_of(KEEPS), np.arange(8)
    acked_push(link, 0.0, ids)
    ids[:] = 0
    link.rejoin(KEEPS._replace(incarnation=INCARNATION + (1 << 32)), 1.0)
    (again,) = link.poll(1.0).requests
    assert bytes(again.columns[0]) == np.arange(8).tobytes()
    assert (again.push_seq, again.num_bytes) == (1, 8 * 12)


def test_awaited_push_is_sent_again_as_it_was_acked() -> None:
    link, ids, grads = link_of(KEEPS), np.arange(8), np.ones((8, 1), np.float32)
    request = Request(Op.PUSH_PULL, 1)
    request.add(Block(Action.PULL, 1, 2, 1, 8, ids), (np.empty((8, 1), np.float32),))
    request.add(Block(Action.PUSH, 1, 2, 1, 8, ids, grads, 0.1))
    link.submit(request, 0.0, 0.0)
    link.receive(reply(Op.WAIT, request.request_id, 1), 0.0)
    grads[:] = 9
    link.expect(INCARNATION + (1 << 32))
    link.rejoin(KEEPS._replace(incarnation=INCARNATION + (1 << 32), restored_seq=0), 1.0)
    (again,) = link.take_unsent(1.0)
    assert [*map(bytes, again.columns)] == [ids.tobytes(), ids.tobytes(), np.ones(8, np.float32).tobytes()]


def test_at_the_bound_a_push_waits_until_one_is_durable() -> None:
    link = link_of(KEEPS, kept_bytes=2 * 96)
    for now in (0.0, 1.0):
        assert link.has_capacity(1, 96)
        acked_push(link, now, np.arange(8))
    assert not link.has_capacity(1, 96)
    (probe,) = link.poll(1.0).requests
    assert (probe.op, probe.push_seq, probe.num_bytes) == (Op.PUSH, 2, 0)
    answer = reply(Op.ACK, probe.request_id, 2)
    assert link.receive(answer, 1.0) == []
    assert not link.has_capacity(1, 96)
    assert link.poll(1.05).requests == []
    (probe,) = link.poll(1.2).requests
    answer = reply(Op.ACK, probe.request_id, 2)
    answer.header.push_floor = 1
    assert link.receive(answer, 1.2) == []
    assert link.has_capacity(1, 96)
    assert link.outstanding == {}


def test_error_at_the_bound_names_its_setting() -> None:
    link = link_of(KEEPS, kept_bytes=96)
    acked_push(link, 0.0, np.arange(8))
    assert not link.has_capacity(1, 96)
    error = link.no_capacity(30.0)
    assert isinstance(error, ShardUnavailable)
    for part in ("30.0 s", "96 bytes", "FLEET_SPARSE_KEPT_BYTES"):
        assert part in str(error)


def test_nothing_is_kept_for_a_pserver_whose_acks_are_durable() -> None:
    link = link_of(KEEPS._replace(acks_precede_durability=False))
    acked_push(link, 0.0, np.arange(8))
    assert link.kept is None
    assert link.expect(INCARNATION + (1 << 32)).push_seq == 1


class LoggedShard:
    """Applies the pushes of one client in order; a power cut takes those that are not durable.

    Attributes:
        applied: Step and seq of each push, in order.
        num_durable: Number of those that survive a power cut.
    """

    def __init__(self) -> None:
        self.applied: list[tuple[int, int]] = []
        self.num_durable = 0
        self.incarnation = INCARNATION

    def answer(self, request: Request) -> Frame:
        newest, error = len(self.applied), None
        if max(request.push_seq - 1, request.push_floor) > newest:
            error = FrameError(ErrorCode.GAP, newest + 1, "a gap")
        elif request.push_seq > newest:
            assert request.step <= (self.applied[-1][0] if self.applied else 0) + 1
            self.applied.append((request.step, request.push_seq))
        op = Op.ERROR if error else Op.ROWS if request.op in (Op.PULL, Op.PUSH_PULL) else Op.ACK
        answer = reply(op, request.request_id, 0 if error else len(self.applied), error, self.incarnation)
        answer.header.push_floor = self.num_durable
        return answer

    def lose_power(self) -> None:
        del self.applied[self.num_durable :]
        self.incarnation += 1 << 32


@settings(deadline=None)
@given(
    st.booleans(),
    st.lists(
        st.sampled_from(["push", "push_pull", "pull", "answer", "answer", "sync", "lose power", "lose a frame"]),
        max_size=60,
    ),
)
def test_power_cuts_lose_and_double_no_push(counts_steps: bool, events: list[str]) -> None:
    link, shard = link_of(KEEPS, max_inflight_pushes=100), LoggedShard()
    frames: deque[Request] = deque()
    now, num_pushes, num_submitted, num_done = 0.0, 0, 0, 0

    def answer() -> None:
        nonlocal num_done
        if frames:
            num_done += len(link.receive(shard.answer(frames.popleft()), now))

    for event in [*events, "sync"]:
        now += 0.01
        if event in ("push", "push_pull", "pull"):
            num_pushes += event != "pull"
            while counts_steps and event != "pull" and frames:
                answer()
            link.submit(Request(Op[event.upper()], num_pushes + (event == "pull") if counts_steps else 0), now)
            num_submitted += 1
        elif event == "answer":
            answer()
        elif event == "sync":
            shard.num_durable = len(shard.applied)
        elif event == "lose a frame" and frames and not counts_steps:
            frames.popleft()
        elif event == "lose power":
            shard.lose_power()
            frames.clear()
            resumption = link.expect(shard.incarnation)
            assert resumption.push_seq <= len(shard.applied)
            link.rejoin(KEEPS._replace(incarnation=shard.incarnation, restored_seq=len(shard.applied)), now)
        frames += link.poll(now).requests
    for _ in range(200):
        now += 0.5
        while frames:
            answer()
            frames += link.poll(now).requests
        frames += link.poll(now).requests
    assert link.failure is None
    assert num_done == num_submitted
    assert [seq for _, seq in shard.applied] == [*range(1, num_pushes + 1)]


def submitted(link: ShardLink, op: Op, step: int = 0) -> Request:
    request = Request(op, step)
    link.submit(request, 1.0, 1.0)
    answers = {Op.PREPARE: Op.NORMS, Op.COMMIT: Op.ROWS}
    link.receive(reply(answers.get(op, Op.ACK), request.request_id, request.push_seq), 1.0)
    return request


def replayed(link: ShardLink, num_pushes: int) -> list[list[tuple[Op, int]]]:
    """Lets a link that has lost all pushes send them again; returns op and seq of those that it sends at once."""
    incarnation, rounds, seq = INCARNATION + (1 << 32), [], 0
    assert link.expect(incarnation).push_seq == 0
    link.rejoin(KEEPS._replace(incarnation=incarnation), 2.0)
    while seq < num_pushes:
        requests = link.poll(2.0).requests
        rounds.append([(request.op, request.push_seq) for request in requests])
        seq = requests[-1].push_seq
        assert link.receive(reply(Op.ACK, requests[-1].request_id, seq, incarnation=incarnation), 2.0) == []
    assert link.poll(2.0).requests == []
    return rounds


def test_pushes_of_two_phases_are_sent_again_by_phase() -> None:
    link = link_of(KEEPS)
    for step in (1, 2):
        submitted(link, Op.PREPARE, step)
        submitted(link, Op.COMMIT, step)
    assert replayed(link, 4) == [[(Op.PREPARE, 1)], [(Op.COMMIT, 2)], [(Op.PREPARE, 3)], [(Op.COMMIT, 4)]]


def test_replayed_steps_wait_for_values_and_for_each_leave() -> None:
    link = link_of(KEEPS)
    for op, step in [(Op.ASSIGN, 0), (Op.ASSIGN, 0), (Op.LEAVE, 0), (Op.LEAVE, 0), (Op.PUSH, 1), (Op.PUSH, 2)]:
        submitted(link, op, step)
    assert replayed(link, 6) == [
        [(Op.ASSIGN, 1), (Op.ASSIGN, 2)],
        [(Op.LEAVE, 3)],
        [(Op.LEAVE, 4)],
        [(Op.PUSH, 5)],
        [(Op.PUSH, 6)],
    ]
