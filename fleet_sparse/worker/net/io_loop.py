"""Calls of a client on their way: from requests that are handed over to their answers, over all shards.

Leader and followers: everything that changes (links, channel) belongs to whoever holds the wheel. A thread that waits
for an answer takes it and sends and receives by itself, so that no other thread has to wake up for that. What nobody
waits for (acks of pushes, rows that are pulled ahead, deadlines) the I/O thread sees to, and also what somebody waits
for while another one has the wheel.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

from fleet_sparse.errors import FleetSparseError, ProtocolError, ShardUnavailable
from fleet_sparse.settings import Settings
from fleet_sparse.wire.decode import decode
from fleet_sparse.wire.encode import encode
from fleet_sparse.wire.frame_format import PULLS, UNCHECKED_COLUMNS, Action, Op

from .channel import Channel
from .deferred_interrupt import DeferredInterrupt
from .shard_link import Actions, ClientIdentity, Outcome, Registration, Request, ShardLink

logger = logging.getLogger(__name__)

_WITHOUT_WINDOW = PULLS | {Op.LEAVE}
_IDLE_S = 60.0
_GRACE_S = 1.0
# For the rest of an answer that did not fit into a socket.
_LAST_LOOK_S = 0.05
# After so long without anybody at the wheel the I/O thread looks for answers that nobody waits for.
_UNTENDED_S = 0.005


@dataclass(slots=True, eq=False)
class Call:
    """What one call of a caller asks of the shards. Once it is handed over the caller waits for it, or forgets it."""

    handed_over_at: float
    requests: dict[int, list[Request]] = field(default_factory=dict)  # by shard; until it is accepted
    acceptance: SimpleQueue[FleetSparseError | None] | None = None  # who waits for room in the window
    answers: SimpleQueue[Outcome | FleetSparseError] | None = None  # who waits for the outcome of every request
    flush_to: list[int] | None = None  # of a flush: the seq of each link that must be acked
    room_for: int | None = None  # of who only waits for room in every window: bytes
    abandoned: bool = False  # by the caller: if it is not accepted yet, it never is


class Calls:
    """All calls of one client. Safe from several threads.

    A call is accepted in the order in which it was handed over; a push without room in its window holds up all behind
    it. Each request's tag has the `call` that it belongs to, or is None.

    Args:
        channel: To the shards; `close` closes it.
        identity: That no other client has.
        registrations: Of all shards, in order.
        settings: Deadlines and bounds.

    Attributes:
        links: One a shard. Other threads may read `has_room` and `failure`.
        failures: Of calls that nobody waits for; each is taken out and raised once.
        bytes_sent: Bytes of all frames sent, retries included.
        bytes_received: Bytes of all frames received.
        num_failed_pushes: Requests to apply something that came to nothing, and calls that were not accepted.
        num_pulled_rows: Rows of tables that pulls asked for.
        num_pushed_rows: Rows of tables that pushes carried.
    """

    def __init__(
        self, channel: Channel, identity: ClientIdentity, registrations: Sequence[Registration], settings: Settings
    ) -> None:
        self.links = [
            ShardLink(
                registration,
                identity,
                settings,
                partial(channel.condition, shard),
                flags=UNCHECKED_COLUMNS if channel.stays_on_machine(shard) else 0,
            )
            for shard, registration in enumerate(registrations)
        ]
        self.failures: deque[FleetSparseError] = deque()
        self.bytes_sent = 0
        self.bytes_received = 0
        self.num_failed_pushes = 0
        self.num_pulled_rows = 0
        self.num_pushed_rows = 0

        self._settings = settings  # constant after construction
        self._channel = channel

        self._inbox: deque[Call] = deque()  # anybody appends, who has the wheel takes
        self._observations: deque[tuple[int, int]] = deque()
        self._waiting: set[SimpleQueue[Any]] = set()  # where callers without the wheel wait for something
        self._roused = threading.Event()
        self._is_idle = False  # of the I/O thread: whether it waits until it is roused
        self._is_untended = False  # whether something is unfinished that nobody looks for
        self._stop = False
        self._ended: FleetSparseError | None = None
        self._num_turns = 0

        self._wheel = threading.Lock()  # guards the links, the channel but for `wake`, and all below
        self._counts_steps = False  # as far as requests told
        self._flushes: list[Call] = []
        self._thread = threading.Thread(target=self._run, name="fleet_sparse client", daemon=True)
        self._thread.start()

    @property
    def has_ended(self) -> bool:
        """Whether nothing can be called any more."""
        return self._ended is not None

    # Callers

    def failure_for(self, shards: Iterable[int]) -> FleetSparseError | None:
        """Why these shards cannot be called; None if nothing is known against it."""
        for shard in shards:
            failure = self.links[shard].failure
            if failure is not None:
                return failure
        return self._ended

    def send(self, call: Call) -> None:
        """Hands over pushes; returns when they are accepted into the window."""
        # A guess: another thread may take the room first. Then the push waits in the inbox, and this thread does not.
        if self._inbox or self._crowded(call) is not None:
            call.acceptance = SimpleQueue()
        self.hand_over(call)
        if call.acceptance is not None:
            self.wait(call, call.acceptance)

    def wait_for_room(self, num_bytes: int) -> None:
        """Returns when every window has room for a push of so many bytes, if no other thread is the first to use it."""
        call = Call(time.monotonic(), room_for=num_bytes)
        if self._inbox or self._crowded(call) is not None:
            call.acceptance = SimpleQueue()
            self.hand_over(call)
            self.wait(call, call.acceptance)

    def flush(self, at_most_s: float = math.inf) -> None:
        """Returns when every push so far is acked, or its shard is given up."""
        call = Call(time.monotonic(), flush_to=[], acceptance=SimpleQueue())
        assert call.acceptance is not None
        self.hand_over(call)
        self.wait(call, call.acceptance, at_most_s)

    def hand_over(self, call: Call) -> None:
        """Takes a call over, and sends it if nobody else has the wheel, who would.

        Raises:
            FleetSparseError: A shard that it needs was given up.
        """
        failure = self.failure_for(call.requests)
        if failure is not None:
            raise self.raised(failure)
        try:
            self._inbox.append(call)
            if not self._drive(lambda _: self._send_new()):
                self._channel.wake()
                self._roused.set()
        except BaseException:
            call.abandoned = True
            raise
        if self._ended is not None:  # and the inbox may have been looked into for the last time
            raise self._ended

    def wait(self, call: Call, queue: SimpleQueue[Any], at_most_s: float = math.inf) -> Any:
        """What comes to `queue` next; raises it if it is an error.

        Raises:
            FleetSparseError: Also after `at_most_s` since the call was handed over.
        """
        latest = call.handed_over_at + at_most_s
        try:
            self._drive(lambda interrupt: self._turn_until(queue, latest, interrupt))
            result = self._given(call, queue, latest) if queue.empty() else queue.get()
        except BaseException:
            call.abandoned = True
            raise
        if isinstance(result, FleetSparseError):
            raise self.raised(result)
        if isinstance(result, Outcome) and result.error is not None:
            raise self.raised(result.error)
        return result

    def raised(self, error: FleetSparseError) -> FleetSparseError:
        """`error`, which now needs no raising by a later call any more."""
        with suppress(ValueError):
            self.failures.remove(error)
        return error

    def observe_incarnation(self, shard: int, incarnation: int) -> None:
        """Takes in the incarnation of a pserver: another one than before fails the shard."""
        self._observations.append((shard, incarnation))
        self._channel.wake()
        self._roused.set()

    def close(self) -> None:
        """Ends the I/O thread, whatever still waits, and the channel."""
        self._stop = True
        self._channel.wake()
        self._roused.set()
        self._thread.join(self._settings.deadline_s)

    def _drive(self, steer: Callable[[DeferredInterrupt], None]) -> bool:
        """Runs `steer` at the wheel; False if another thread has it."""
        with DeferredInterrupt(self._channel.wake) as interrupt:
            if not self._wheel.acquire(blocking=False):
                return False
            try:
                if self._ended is not None:
                    return False
                steer(interrupt)
            except BaseException as fault:
                logger.exception("the I/O of the client failed")
                error = FleetSparseError(f"client: its I/O failed: {type(fault).__name__}: {fault}")
                error.__cause__ = fault
                self._end(error)
                if not isinstance(fault, Exception):  # of a signal's handler
                    raise
            finally:
                self._wheel.release()
                if self._is_wanted() or (self._is_idle and self._is_unfinished()):
                    self._roused.set()
        return True

    def _turn_until(self, queue: SimpleQueue[Any], latest: float, interrupt: DeferredInterrupt) -> None:
        while queue.empty() and not (self._stop or interrupt.is_pending) and time.monotonic() < latest:
            self._turn(latest)

    def _given(self, call: Call, queue: SimpleQueue[Any], latest: float) -> Any:
        """What another thread puts into `queue`.

        The links end every wait by its deadline; this only guards against turns that nobody takes any more.
        """
        try:
            self._waiting.add(queue)
            self._roused.set()
            while True:
                num_turns, now = self._num_turns, time.monotonic()
                try:
                    return queue.get(timeout=max(min(latest - now, 2 * self._settings.deadline_s + _GRACE_S), 0.0))
                except Empty:
                    if self._num_turns == num_turns or time.monotonic() >= latest:
                        waited_s = time.monotonic() - call.handed_over_at
                        what = "not done" if time.monotonic() >= latest else "no answer of its I/O thread"
                        raise FleetSparseError(f"client: {what} in {waited_s:.1f} s") from None
        finally:
            self._waiting.discard(queue)

    def _crowded(self, call: Call) -> int | None:
        """The first shard whose window has no room for the pushes of a call; None if all have."""
        if call.room_for is not None:
            usable = ((shard, link) for shard, link in enumerate(self.links) if link.failure is None)
            return next((shard for shard, link in usable if not link.has_room(1, call.room_for)), None)
        for shard, requests in call.requests.items():
            num_bytes = sum(request.num_bytes for request in requests)
            if requests[0].op not in _WITHOUT_WINDOW and not self.links[shard].has_room(len(requests), num_bytes):
                return shard
        return None

    # The I/O thread

    def _run(self) -> None:
        while not self._stop and self._ended is None:
            if not self._is_wanted() or not self._drive(lambda _: self._tend()):
                self._doze()
        with self._wheel:
            if self._ended is None:
                self._end(FleetSparseError("client: it is closed"))

    def _tend(self) -> None:
        self._is_untended = False
        while not self._stop and (self._is_wanted() or self._is_unfinished()):
            self._turn()

    def _doze(self) -> None:
        """Until it is roused, or nobody looked for what is unfinished for some time."""
        num_turns = self._num_turns
        self._is_idle = True  # before the look at what is unfinished: who sends something now rouses it
        self._is_idle = not self._is_unfinished()
        is_roused = self._roused.wait(_IDLE_S if self._is_idle else _UNTENDED_S)
        self._is_idle = False
        self._roused.clear()
        # Whoever has the wheel looks for it.
        is_seen_to = is_roused or self._wheel.locked() or self._num_turns != num_turns
        self._is_untended = not is_seen_to and self._is_unfinished()

    def _is_wanted(self) -> bool:
        """Whether somebody relies on the I/O thread now."""
        return bool(
            self._inbox
            or any(queue.empty() for queue in tuple(self._waiting))
            or self._observations
            or self._is_untended
            or self._channel.has_unsent
            or (self._channel.answers_in_receive and any(link.has_unacked for link in self.links))
        )

    def _is_unfinished(self) -> bool:
        return bool(self._inbox or self._flushes or any(link.num_outstanding for link in self.links))

    # At the wheel

    def _end(self, error: FleetSparseError) -> None:
        self._ended = error  # before the inbox is emptied: who appends later sees it
        for link in self.links:
            if link.failure is None:
                self._settle(link.fail(error))
        for call in (*self._inbox, *self._flushes):
            self._report(call, error)
        self._inbox.clear()
        self._flushes.clear()
        self._channel.close()

    def _turn(self, latest: float = math.inf) -> None:
        """Sends what is new, and takes in what comes; waits for it until something is due."""
        self._send_new()
        message = self._channel.receive(self._wait_s(latest))
        self._num_turns += 1
        now = time.monotonic()
        while message is not None:
            self._take(*message, now)
            # Before something counts as late, all that has come is looked at: this process may have been suspended.
            message = self._channel.receive(_LAST_LOOK_S) if self._next_time() <= now else None
        while self._observations:
            shard, incarnation = self._observations.popleft()
            self._settle(self.links[shard].observe_incarnation(incarnation))
        self._poll(now)
        self._admit(now)  # after what has failed, which lets those that waited for room go on
        self._poll(now)
        self._end_flushes()

    def _send_new(self) -> None:
        """Looks at no deadline: what has come since the last turn was not looked at."""
        now = time.monotonic()
        self._admit(now, expires=False)
        for shard, link in enumerate(self.links):
            if link.has_unsent:
                self._perform(shard, link.send_unsent(now))
        self._end_flushes()

    def _poll(self, now: float) -> None:
        for shard, link in enumerate(self.links):
            if link.next_time() <= now:
                self._perform(shard, link.poll(now))

    def _next_time(self) -> float:
        return min(link.next_time() for link in self.links)

    def _wait_s(self, latest: float) -> float:
        due = min(self._next_time(), latest)
        if self._inbox:
            due = min(due, self._inbox[0].handed_over_at + self._settings.deadline_s)
        return min(max(due - time.monotonic(), 0.0), _IDLE_S)

    def _take(self, shard: int, parts: Sequence[bytes | memoryview], now: float) -> None:
        link = self.links[shard]
        self.bytes_received += sum(map(len, parts))
        try:
            # The answer to a push may have rows that were pulled ahead and have changed, besides what was asked for.
            frame = decode(parts, max_bytes=2 * self._settings.max_frame_bytes)
        except ProtocolError as error:
            link.last_error = f"a reply was dropped: {error}"  # counts as lost: the timeout asks again
            return
        self._settle(link.receive(frame, now))

    def _admit(self, now: float, *, expires: bool = True) -> None:
        """Gives calls to the links, in order; a push without room holds up all behind it, until it `expires`."""
        while self._inbox:
            call = self._inbox[0]
            if not call.abandoned and not self._accept(call, now, expires=expires):
                return
            self._inbox.popleft()

    def _accept(self, call: Call, now: float, *, expires: bool) -> bool:
        """Whether `call` needs to wait no longer: it was submitted, or failed."""
        if call.flush_to is not None:
            call.flush_to = [link.last_seq for link in self.links]
            self._flushes.append(call)
            return True
        failure = self.failure_for(call.requests)
        crowded = self._crowded(call)
        if failure is None and crowded is not None:
            if not expires or now < call.handed_over_at + self._settings.deadline_s:
                return False
            failure = self._no_room(crowded, now - call.handed_over_at)
        requests, call.requests = call.requests, {}  # no cycle of references keeps the arrays longer than needed
        if failure is not None:
            self._report(call, failure)
            return True
        since = now if call.answers is None else call.handed_over_at  # that somebody waits for the answers
        for shard, of_shard in requests.items():
            for request in of_shard:
                self.links[shard].submit(request, since)
                self._count(request)
        if call.acceptance is not None:
            call.acceptance.put(None)
        return True

    def _no_room(self, shard: int, waited_s: float) -> ShardUnavailable:
        link = self.links[shard]
        last = f"; last error: {link.last_error}" if link.last_error else ""
        return ShardUnavailable(
            f"{link.where}: no room for a push in {waited_s:.1f} s, "
            f"{link.last_seq - link.acked_seq} wait for their ack{last}",
            shard=shard,
            endpoint=link.endpoint,
        )

    def _count(self, request: Request) -> None:
        self._counts_steps |= request.step > 0
        for block in request.blocks:
            if block.ids is None:
                continue  # dense values, or factors
            if block.action is Action.PULL:
                self.num_pulled_rows += block.count
            else:
                self.num_pushed_rows += block.count

    def _perform(self, shard: int, actions: Actions) -> None:
        self._settle(actions.outcomes)
        if actions.reopen:
            logger.warning(
                "%s: no answer, connecting again; it has %.0f s in all (FLEET_SPARSE_DEADLINE_S)",
                self.links[shard].where,
                self._settings.deadline_s,
            )
            self._channel.reopen(shard)
        for frame in actions.frames:
            parts = encode(frame)
            self.bytes_sent += sum(map(len, parts))
            if not self._channel.send(shard, parts):
                self.links[shard].last_error = "the send queue is full"

    def _settle(self, outcomes: Iterable[Outcome]) -> None:
        for outcome in outcomes:
            if outcome.error is not None and outcome.request.push_seq:
                self.num_failed_pushes += 1
            if outcome.request.tag is None:
                continue  # the link's own
            call: Call = outcome.request.tag.call
            if call.answers is not None and not call.abandoned:
                call.answers.put(outcome)
            elif outcome.error is not None and (call.answers is None or outcome.request.push_seq):
                self._remember(outcome.error)

    def _report(self, call: Call, error: FleetSparseError) -> None:
        """Tells of a call that was not accepted."""
        self.num_failed_pushes += 1
        if call.answers is not None:
            call.answers.put(error)
        elif call.acceptance is not None:
            call.acceptance.put(error)
        else:
            self._remember(error)

    def _remember(self, error: FleetSparseError) -> None:
        if error not in self.failures:
            self.failures.append(error)

    def _end_flushes(self) -> None:
        if self._flushes:
            self._flushes = [call for call in self._flushes if not self._is_flushed(call)]

    def _is_flushed(self, call: Call) -> bool:
        assert call.flush_to is not None
        assert call.acceptance is not None
        pairs = zip(self.links, call.flush_to, strict=True)
        is_missing = [link.failure is None and link.acked_seq < seq for link, seq in pairs]
        # Where steps are counted they end with the first shard that fails: at others pushes may wait for ever.
        is_over = self._counts_steps and any(link.failure is not None for link in self.links)
        if any(is_missing) and not is_over:
            return False
        call.acceptance.put(None)
        return True
