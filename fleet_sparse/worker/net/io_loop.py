"""IoLoop: sends the calls of one client to all shards, and distributes their answers.

The thread that holds the I/O lock owns the links and the channel. A caller that waits for an answer takes the lock and
does the I/O itself, so no other thread has to be woken. The I/O thread serves what no caller waits for (acks of pushes,
rows that are pulled early, deadlines), and callers that wait while another one holds the lock.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue

from fleet_sparse.errors import FleetSparseError, ProtocolError, ShardUnavailable
from fleet_sparse.settings import Settings
from fleet_sparse.wire.decode import decode
from fleet_sparse.wire.frame_format import PULLS, UNCHECKED_COLUMNS, Buffer, Op
from fleet_sparse.wire.link_header import PlainReply, durable_push_of

from .call import Call
from .channel import Channel
from .deferred_interrupt import DeferredInterrupt
from .lane_calls import LaneCalls
from .reply_placement import ReplyPlacement
from .request import Request
from .shard_link import Actions, ClientIdentity, Outcome, Registration, Resumption, ShardLink

logger = logging.getLogger(__name__)

_WITHOUT_WINDOW = PULLS | {Op.LEAVE}
_IDLE_S = 60.0
_GRACE_S = 1.0
# Time for the rest of an answer that did not fit into a socket.
_LAST_RECEIVE_S = 0.05
# The I/O thread looks for answers that no caller waits for after nobody has done any I/O for this time: for rows, which
# must not hold up their pserver, and for acks, which the next pull drops or replaces.
_UNATTENDED_S, _ACKS_UNATTENDED_S = 0.005, 0.05


class IoLoop:
    """All calls of one client. Safe to use from several threads.

    Calls are accepted in the order in which they were started; a push for which the window is full holds up all calls
    behind it. Once started, a push is sent even if its caller is interrupted; a pull is not.

    Args:
        channel: Channel to the shards; `close` closes it.
        identity: Identity that no other client has.
        registrations: Registrations of all shards, in order.
        settings: Deadlines and bounds.

    Attributes:
        links: One link for each shard. Other threads may read `failure`, `last_seq`, `acked_seq` and `step`.
        patience_s: Seconds after which a request without an answer fails.
        failures: Errors of calls that nobody waits for; each is removed and raised once.
        bytes_sent: Bytes of all frames sent, retries included.
        bytes_received: Bytes of all frames received.
        num_failed_pushes: Number of mutating requests that failed or that a pserver lost, and of calls that were not
            accepted.
        num_rejoins: Number of times that it continued with a pserver that was started again.
        num_pulled_rows: Number of rows of tables that pulls asked for.
        num_pushed_rows: Number of rows of tables in pushes.
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
        self.num_rejoins = 0
        self.num_pulled_rows = 0
        self.num_pushed_rows = 0

        self.patience_s = max(link.patience_s for link in self.links)
        self._settings = settings  # constant after construction, as the next three
        self._channel = channel
        self._placement = ReplyPlacement(channel, self.links)
        self._lane_calls = None if channel.lane is None else LaneCalls(channel.lane, self.links, self._placement)

        self._inbox: deque[Call] = deque()  # any thread appends, the holder of the I/O lock removes
        self._observations: deque[Callable[[], object]] = deque()  # the holder of the I/O lock calls them
        self._waiting: set[Call] = set()  # calls whose callers wait without the I/O lock
        self._roused: SimpleQueue[None] = SimpleQueue()  # gets an item when the I/O thread is to look around
        self._is_idle = False  # true while the I/O thread waits until it is roused
        self._is_unattended = False  # true if something is unfinished and nobody does I/O
        self._stop = False
        self._ended: FleetSparseError | None = None
        self._num_polls = 0

        self._io_lock = threading.Lock()  # guards the links, the channel but for `wake`, and all below
        self._counts_steps = False  # true once a request had a step number
        self._flushes: list[Call] = []
        channel.watch_losses(self._note_lost)
        self._thread = threading.Thread(target=self._run, name="fleet_sparse client", daemon=True)
        self._thread.start()

    @property
    def has_lane(self) -> bool:
        """True if requests of plain rows need not be encoded before they are started."""
        return self._lane_calls is not None

    @property
    def has_ended(self) -> bool:
        """True if nothing can be called any more."""
        return self._ended is not None

    # Callers

    def start(self, call: Call) -> None:
        """Enqueues a call; sends it now if the I/O lock is free, otherwise its holder will.

        Raises:
            FleetSparseError: A shard that it needs was given up.
        """
        for request in call.requests:
            failure = self.links[request.shard].failure
            if failure is not None:
                raise self._claim(failure)
        if self._ended is not None:
            raise self._ended
        try:
            self._inbox.append(call)
            if not self._run_io():
                self._channel.wake()
                self._roused.put(None)
        except BaseException:
            call.is_abandoned = True
            raise
        if self._ended is not None:  # and the inbox may have been emptied for the last time
            raise self._ended

    def exchange(self, call: Call) -> None:
        """Starts a call and waits until it is done: `start` and `wait` with one hold of the I/O lock."""
        for request in call.requests:
            failure = self.links[request.shard].failure
            if failure is not None:
                raise self._claim(failure)
        self._inbox.append(call)
        if self._ended is not None:  # and the inbox may have been emptied for the last time
            raise self._ended
        self.wait(call)

    def wait(self, call: Call, timeout_s: float = math.inf) -> None:
        """Returns when a call is done.

        While its caller does the I/O, replies are received into the arrays of the call, and only then.

        Raises:
            FleetSparseError: An outcome is an error, or the call is not done `timeout_s` after its start.
        """
        until = call.started_at + timeout_s
        try:
            if call.num_missing and not self._run_io(call, until) and self._inbox:
                self._channel.wake()
            if call.num_missing:
                self._wait_for_others(call, until)
        except BaseException:
            call.is_abandoned = True
            raise
        if call.error is not None:
            raise self._claim(call.error)

    def wait_accepted(self, call: Call) -> None:
        """Returns when a call was accepted into the window, or at Ctrl-C: then it is sent when there is room.

        Raises:
            FleetSparseError: It was not accepted: nothing of it is sent.
        """
        if call.is_accepted:
            return
        behind = Call([], wants_answers=False)
        with DeferredInterrupt(partial(behind.done.put, None)) as interrupt:
            self.start(behind)
            if behind.num_missing and not self._run_io(behind) and self._inbox:
                self._channel.wake()
            if behind.num_missing and not interrupt.is_pending:
                self._wait_for_others(behind, math.inf)
            if behind.num_missing:  # Ctrl-C: nobody waits for an error, which a later call is to raise
                call.is_abandoned |= not call.wants_answers
        if not call.is_accepted and call.error is not None:
            raise self._claim(call.error)

    def abandon(self, call: Call) -> None:
        """Drops the outcomes of a call that was started, also those that are still missing."""
        call.is_abandoned = True
        call.outcomes.clear()
        if call.error is not None and call.is_push:  # it ended before; a later error is remembered like a push's
            self._remember(call.error)

    def flush(self, timeout_s: float = math.inf) -> None:
        """Returns when every push so far is acked, or its shard is given up."""
        call = Call([], wants_answers=False, is_flush=True)
        self.start(call)
        self.wait(call, timeout_s)

    def observe_incarnation(self, shard: int, incarnation: int) -> None:
        """Processes the incarnation of a pserver: another one than before fails the shard."""
        self._observe(partial(self._note_incarnation, shard, incarnation))

    def expect(self, shard: int, incarnation: int) -> Resumption:
        """The pserver of a shard was started again: ignores the former process; returns where this client continues.

        Raises:
            ShardUnavailable: Nobody could note it within `deadline_s`, as while other code holds the GIL: try again.
            FleetSparseError: The I/O ended.
        """
        if self._ended is not None:
            raise self._ended
        answers: SimpleQueue[Resumption] = SimpleQueue()

        def note() -> None:
            resumption = self.links[shard].expect(incarnation)
            self._address(shard)
            answers.put(resumption)

        self._observe(note)
        try:
            return answers.get(timeout=self._settings.deadline_s)
        except Empty:
            raise ShardUnavailable(
                f"shard {shard}: the I/O thread of this worker has not noted in {self._settings.deadline_s:g} s that "
                "the pserver was started again",
                shard=shard,
                endpoint=self.links[shard].errors.endpoint,
            ) from None

    def rejoin(self, shard: int, registration: Registration, num_lost: int) -> None:
        """Continues with a pserver that was started again, and with which this worker has registered after `expect`.

        Args:
            shard: Its shard.
            registration: Its answer.
            num_lost: Number of pushes that it lost.
        """

        def note() -> None:
            self.num_rejoins += 1
            self.num_failed_pushes += num_lost
            self._channel.move(shard, registration.stream_endpoint, registration.data_endpoint)
            self.links[shard].rejoin(registration, time.monotonic())
            self._address(shard)

        self._observe(note)

    def fail(self, shard: int, error: FleetSparseError) -> None:
        """Gives up a shard, unless it was given up before."""

        def note() -> None:
            if self.links[shard].failure is None:
                self._distribute(self.links[shard].fail(error))

        self._observe(note)

    def _observe(self, observation: Callable[[], object]) -> None:
        self._observations.append(observation)
        self.wake()
        self._roused.put(None)

    def _note_lost(self, shard: int) -> None:
        self._observe(self.links[shard].lose_connection)

    def wake(self) -> None:
        """Ends a running wait for messages early. Safe from any thread and from a signal handler."""
        self._channel.wake()

    def close(self) -> None:
        """Ends the I/O thread, all calls that still wait, and the channel."""
        self._stop = True
        self.wake()
        self._roused.put(None)
        self._thread.join(self._settings.deadline_s)

    def _claim(self, error: FleetSparseError) -> FleetSparseError:
        """`error`, which no later call has to raise then."""
        with suppress(ValueError):
            self.failures.remove(error)
        return error

    def _run_io(self, call: Call | None = None, until: float = math.inf) -> bool:
        """Takes the I/O lock and sends new calls; then does I/O until `call` is done, if one is given.

        Ctrl-C ends it after the current poll. Returns False if another thread holds the lock.
        """
        with DeferredInterrupt(self._channel.wake) as interrupt:
            if not self._io_lock.acquire(blocking=False):
                return False
            try:
                if self._ended is not None:
                    return False
                if call is None:
                    if self._inbox:
                        self._admit(time.monotonic(), expires=False)  # messages that have arrived were not read yet
                    if self._flushes:
                        self._end_flushes()
                else:
                    self._placement.served = call
                    while call.num_missing and not (self._stop or interrupt.is_pending):
                        if self._poll_once(until) >= until:
                            break
            except BaseException as fault:
                self._end_by(fault)
                if not isinstance(fault, Exception):  # raised by a signal handler
                    raise
            finally:
                self._placement.served = None
                if self._placement.placed:
                    self._placement.withdraw()
                self._release()
        return True

    def _release(self) -> None:
        self._io_lock.release()
        if self._is_wanted() or (self._is_idle and self._is_unfinished()):
            self._roused.put(None)

    def _end_by(self, fault: BaseException) -> None:
        logger.exception("the I/O of the client failed")
        error = FleetSparseError(f"client: its I/O failed: {type(fault).__name__}: {fault}")
        error.__cause__ = fault
        self._end(error)

    def _wait_for_others(self, call: Call, until: float) -> None:
        """Waits for a call whose I/O another thread does.

        The links end every wait by its deadline; this only guards against an I/O loop that stopped.
        """
        try:
            self._waiting.add(call)
            self._roused.put(None)
            while True:
                num_polls, now = self._num_polls, time.monotonic()
                try:
                    return call.done.get(timeout=max(min(until - now, 2 * self.patience_s + _GRACE_S), 0))
                except Empty:
                    now = time.monotonic()
                    if self._num_polls == num_polls or now >= until:
                        what = "not done" if now >= until else "no answer of its I/O thread"
                        raise FleetSparseError(f"client: {what} in {now - call.started_at:.1f} s") from None
        finally:
            self._waiting.discard(call)

    # The I/O thread

    def _run(self) -> None:
        while not self._stop and self._ended is None:
            if not self._is_wanted() or not self._attend():
                self._doze()
        with self._io_lock:
            if self._ended is None:
                self._end(FleetSparseError("client: it is closed"))

    def _attend(self) -> bool:
        """Does I/O as long as anything is unfinished. Returns False if another thread holds the I/O lock."""
        if not self._io_lock.acquire(blocking=False):
            return False
        try:
            self._is_unattended = False
            while not self._stop and self._ended is None and (self._is_wanted() or self._is_unfinished()):
                self._poll_once()
        except Exception as fault:
            self._end_by(fault)
        finally:
            self._release()
        return True

    def _doze(self) -> None:
        """Waits until it is roused, or nobody did I/O for some time although something is unfinished."""
        num_polls = self._num_polls
        self._is_idle = True  # before checking what is unfinished: a thread that sends something now rouses this one
        self._is_idle = not self._is_unfinished()
        is_roused = False
        with suppress(Empty):
            self._roused.get(timeout=_IDLE_S if self._is_idle else self._unattended_s())
            is_roused = True
            while True:
                self._roused.get_nowait()
        self._is_idle = False
        # The holder of the I/O lock attends to it.
        is_attended = is_roused or self._io_lock.locked() or self._num_polls != num_polls
        self._is_unattended = not is_attended and self._is_unfinished()

    def _is_wanted(self) -> bool:
        """Returns whether something relies on the I/O thread now."""
        if self._inbox or self._observations or self._is_unattended or self._channel.needs_receive:
            return True
        if self._waiting:
            return any(call.num_missing for call in tuple(self._waiting))
        return False

    def _is_unfinished(self) -> bool:
        if self._inbox or self._flushes:
            return True
        for link in self.links:  # noqa: SIM110  # `any` makes a generator, at every push
            if link.outstanding:
                return True
        return False

    def _unattended_s(self) -> float:
        """Longest time without I/O while something is unfinished."""
        if self._inbox or self._flushes:
            return _UNATTENDED_S
        awaits_only_acks = all(link.awaits_only_acks for link in self.links)
        return _ACKS_UNATTENDED_S if awaits_only_acks else _UNATTENDED_S

    # With the I/O lock held

    def _end(self, error: FleetSparseError) -> None:
        self._ended = error  # before the inbox is emptied: a thread that appends later sees it
        for link in self.links:
            if link.failure is None:
                self._distribute(link.fail(error))
        for call in (*self._inbox, *self._flushes):
            self._reject(call, error)
        self._inbox.clear()
        self._flushes.clear()
        self._channel.close()

    def _poll_once(self, until: float = math.inf) -> float:
        """Sends new calls and receives a message; waits for it until something is due. Returns the time."""
        if self._inbox:
            now = time.monotonic()
            self._admit(now, expires=False)
            served = self._placement.served
            if served is not None and not served.num_missing:
                return now
        if self._flushes:
            self._end_flushes()
        due_at = min(until, self._inbox[0].started_at + self.patience_s) if self._inbox else until
        for link in self.links:
            due_at = min(due_at, link.due_at)
        message = self._channel.receive(min(max(due_at - time.monotonic(), 0.0), _IDLE_S))
        self._num_polls += 1
        now = time.monotonic()
        while True:
            if message is not None:
                self._take(message[0], message[1], now)
            while self._observations:
                self._observations.popleft()()
            is_due = False
            for link in self.links:
                is_due |= link.due_at <= now and self._is_late(link, now)
            if message is None or not is_due:
                break
            # Before anything counts as late, all messages that have arrived are read: this process may have been
            # suspended.
            message = self._channel.receive(_LAST_RECEIVE_S)
        if is_due:
            self._serve_links(now)
        if self._inbox:
            self._admit(now)  # after links have failed, which lets calls continue that waited for capacity
        if self._flushes:
            self._end_flushes()
        return now

    def _is_late(self, link: ShardLink, now: float) -> bool:
        """Sends what waited for the message that came last; returns whether the link has more to do."""
        if link.has_unsent:
            self._send(link, link.take_unsent(now))
        return link.is_due(now)

    def _note_incarnation(self, shard: int, incarnation: int) -> None:
        self._distribute(self.links[shard].observe_incarnation(incarnation))

    def _address(self, shard: int) -> None:
        """Takes over the header of a link, which has changed."""
        if self._lane_calls is not None:
            self._lane_calls.address(shard)

    def _serve_links(self, now: float) -> None:
        for link in self.links:
            if link.due_at <= now:
                self._perform(link, link.poll(now))

    def _take(self, shard: int, parts: Sequence[Buffer], now: float) -> None:
        link, head, columns = self.links[shard], parts[0], parts[1:]
        placement = self._placement
        placed = placement.placed.pop(shard, None) if placement.placed else None
        reply: PlainReply | None
        request: Request | None
        if placed is not None and columns and columns[0] is placed[2][0]:
            request, reply, _ = placed
        else:  # if one was placed, it was lost with its connection
            placed, request = None, None
            reply = link.header.read_reply(head)
            if reply is not None and reply[0]:
                request = placement.awaited(shard, reply, head, [*map(len, columns)])
        if reply is None or (columns and request is None) or (reply[0] and request is None):
            self._take_frame(link, parts, now)
            return
        has_rows, request_id, push_seq, step, column_bytes, checksum = reply
        self.bytes_received += len(head) + column_bytes
        if not link.header.is_intact(head, columns, checksum):
            link.last_error = "a reply was dropped: its checksum is wrong"  # it counts as lost
            return
        if request is not None:
            request.is_filled = placed is not None
            request.received = None if request.is_filled else columns
        if link.kept is not None:
            link.note_durable(durable_push_of(head))
        self._distribute(link.receive_reply(request_id, push_seq, step, now, has_rows))

    def _take_frame(self, link: ShardLink, parts: Sequence[Buffer], now: float) -> None:
        """Takes a reply that is not plain rows or an ack."""
        self.bytes_received += sum(map(len, parts))
        try:
            # The answer to a push may contain early-pulled rows that changed, besides the rows asked for.
            frame = decode(parts, max_bytes=2 * self._settings.max_frame_bytes)
        except ProtocolError as error:
            link.last_error = f"a reply was dropped: {error}"  # counts as lost: the timeout sends the request again
            return
        self._distribute(link.receive(frame, now))

    def _admit(self, now: float, *, expires: bool = True) -> None:
        """Submits calls in order; a push for which the window is full holds up all behind it until it `expires`."""
        while self._inbox:
            call = self._inbox[0]
            if not (call.is_abandoned and _only_reads(call)) and not self._accept(call, now, expires=expires):
                return
            self._inbox.popleft()

    def _accept(self, call: Call, now: float, *, expires: bool) -> bool:
        """Returns True if the call leaves the inbox: it was submitted, or failed."""
        if call.is_flush:
            call.flush_to = [link.last_seq for link in self.links]
            self._flushes.append(call)
            return True
        if not call.requests:
            call.end()
            return True
        failure, full = self._ended, None
        for request in call.requests:
            failure = self.links[request.shard].failure or failure
        if failure is None and call.requests[0].op not in _WITHOUT_WINDOW:
            full = self._full_link(call)
        if full is not None:
            if not expires or now < call.started_at + self.patience_s:
                return False
            failure = full.no_capacity(now - call.started_at)
        requests, call.requests = call.requests, []  # no cycle of references keeps the arrays longer than needed
        if failure is not None:
            self._reject(call, failure)
            return True
        call.is_accepted = True
        self._submit(call, requests, now)
        self._counts_steps |= requests[0].step > 0
        if not call.wants_answers:
            call.end()
        return True

    def _submit(self, call: Call, requests: Sequence[Request], now: float) -> None:
        """Sends the requests of a call; by the lane if they are plain and nothing is to be sent before them."""
        since = call.started_at if call.wants_answers else now
        lane_calls, rows = self._lane_calls, requests[0].source
        receives = rows is not None and call.wants_answers and not rows.is_deferred
        if rows is None or (receives and call is not self._placement.served):
            lane_calls = None
        unsent: list[Request] = []
        for request in requests:
            link = self.links[request.shard]
            if link.due_at <= now:
                lane_calls = None
            request.tag = call
            if link.submit(request, since, now):
                unsent += [request]
            else:
                unsent += link.take_unsent(now)
                lane_calls = None
            self.num_pulled_rows += request.num_pulled_rows
            self.num_pushed_rows += request.num_pushed_rows
        if lane_calls is None or rows is None or not lane_calls.lane.is_clear(receives=receives):
            for request in unsent:
                self._send(self.links[request.shard], [request])
        elif receives:
            num_sent, num_received, outcomes = lane_calls.pull(rows, requests)
            self._num_polls += 1
            self.bytes_sent += num_sent
            self.bytes_received += num_received
            self._distribute(outcomes)
        else:
            num_sent, _ = lane_calls.lane.send(rows, requests, lane_calls.headers)
            self.bytes_sent += num_sent

    def _full_link(self, call: Call) -> ShardLink | None:
        """The first link whose window has no capacity for the pushes of a call; None if all have."""
        for request in call.requests:
            if request.part:
                continue  # counted with the first part
            num_bytes = request.num_bytes
            if request.num_parts > 1:
                num_bytes = sum(each.num_bytes for each in call.requests if each.shard == request.shard)
            if not self.links[request.shard].has_capacity(request.num_parts, num_bytes):
                return self.links[request.shard]
        return None

    def _perform(self, link: ShardLink, actions: Actions) -> None:
        if actions.outcomes:
            self._distribute(actions.outcomes)
        if actions.reopen:
            logger.warning(
                "%s: no answer, reconnecting; it fails after %.0f s without one",
                link.errors.where,
                link.patience_s,
            )
            self._channel.reopen(link.shard)
        self._send(link, actions.requests)

    def _send(self, link: ShardLink, requests: Sequence[Request]) -> None:
        for request in requests:
            if request.source is not None:
                request.encode()
            head = link.header.head_of(
                request.op,
                request.table,
                request.columns,
                request.num_bytes,
                (request.request_id, request.push_seq, request.push_floor, request.step),
                request.part,
                request.num_parts,
            )
            self.bytes_sent += len(head) + request.num_bytes
            if not self._channel.send(link.shard, [head, *request.columns]):
                link.last_error = "the send queue is full"

    def _distribute(self, outcomes: Iterable[Outcome]) -> None:
        for outcome in outcomes:
            request, error = outcome.request, outcome.error
            call: Call | None = request.tag  # None: the link's own no-op push
            request.tag = None  # no cycle of references keeps the arrays longer than needed
            if error is not None and request.push_seq:
                self.num_failed_pushes += 1
            if call is None:
                continue
            if call.wants_answers and not call.is_abandoned:
                if not call.num_missing:
                    continue  # it failed before
                if error is not None:
                    call.end(error)
                    continue
                call.outcomes += [outcome]
                call.num_missing -= 1
                if not call.num_missing:
                    call.done.put(None)
            elif error is not None and request.op not in PULLS:
                self._remember(error)

    def _reject(self, call: Call, error: FleetSparseError) -> None:
        """Fails a call that was not accepted."""
        self.num_failed_pushes += 1
        if call.is_abandoned:
            self._remember(error)
        else:
            call.end(error)

    def _remember(self, error: FleetSparseError) -> None:
        if error not in self.failures:
            self.failures.append(error)

    def _end_flushes(self) -> None:
        self._flushes = [call for call in self._flushes if not self._is_flushed(call)]

    def _is_flushed(self, call: Call) -> bool:
        pairs = zip(self.links, call.flush_to, strict=True)
        is_missing = [link.failure is None and link.acked_seq < seq for link, seq in pairs]
        # A job that counts steps ends with the first shard that fails: pushes to others may wait for ever.
        is_over = self._counts_steps and any(link.failure is not None for link in self.links)
        if any(is_missing) and not is_over:
            return False
        call.end()
        return True


def _only_reads(call: Call) -> bool:
    return all(request.op in PULLS for request in call.requests)
