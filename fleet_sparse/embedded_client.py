"""EmbeddedClient: a worker's client of shards in its own process.

A call executes its requests in the caller's thread, without frames. Requests are the values that a pserver decodes from
frames, so a shard checks, counts and commits them in the same way. It writes rows straight into the caller's arrays.
Only a request that waits for other workers is answered later, in the thread of the worker that completes its step.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from fleet_sparse.core.placement import Placement
from fleet_sparse.errors import ErrorCode, FleetSparseError
from fleet_sparse.pserver.engine.reply import DeferredReply, Reply
from fleet_sparse.pserver.refusal import Refusal
from fleet_sparse.pserver.shared_shard import SharedShard
from fleet_sparse.settings import Settings
from fleet_sparse.wire.frame_format import PUSHES, Action, Block, Header, Op
from fleet_sparse.wire.row_dtype import RowDtype
from fleet_sparse.worker.net.deferred_interrupt import DeferredInterrupt
from fleet_sparse.worker.net.link_errors import LinkErrors
from fleet_sparse.worker.net.requests import Outs, Requests, write_rows
from fleet_sparse.worker.net.shard_link import ClientIdentity
from fleet_sparse.worker.net.table_client import ExtraBlock, TableClient, called_in_child

_log = logging.getLogger(__name__)

ENDPOINT = "this process"
"""The address of an embedded pserver, for messages."""
_GRACE_S = 1.0
_FATAL = frozenset({ErrorCode.WORKER_LOST, ErrorCode.STEP_FAILED, ErrorCode.STALE_EPOCH})


class _Counters(msgspec.Struct):
    """Implements `Traffic`; its bytes are those of ids, gradients and rows."""

    bytes_sent: int = 0
    bytes_received: int = 0
    num_failed_pushes: int = 0
    num_pulled_rows: int = 0
    num_pushed_rows: int = 0


class LocalRequest(msgspec.Struct, eq=False):
    """Implements `ShardRequest` by values, and has its outcome.

    Attributes:
        header: Its header; the client numbers it.
        is_push: True if its op changes something on the shard.
        blocks: Its blocks.
        outs: Destination of the rows of each PULL block; None for one that asks about copies.
        places: For each PULL block the memory that the shard writes the rows to; None if they are in the reply, to be
            converted or divided.
        num_bytes_sent: Bytes of its ids and gradients.
        num_bytes_received: Bytes of its rows.
        wants_answers: False if no caller waits for the outcome.
        started_at: Monotonic time.
        reply: The reply, once there is one.
        error: Why there is none.
    """

    header: Header
    is_push: bool
    blocks: list[Block] = []
    outs: list[Outs | None] = []
    places: list[NDArray[np.float32] | None] = []
    num_bytes_sent: int = 0
    num_bytes_received: int = 0
    num_pulled_rows: int = 0
    num_pushed_rows: int = 0
    wants_answers: bool = True
    started_at: float = 0.0
    reply: Reply | None = None
    error: FleetSparseError | None = None

    @property
    def is_done(self) -> bool:
        """True if it has an outcome."""
        return self.reply is not None or self.error is not None

    @property
    def shard(self) -> int:
        """As `ShardRequest`."""
        return self.header.shard

    @property
    def is_empty(self) -> bool:
        """As `ShardRequest`."""
        return not self.blocks

    def add(self, block: Block, outs: Outs | None = None, *, num_states: int = 0) -> None:
        """As `ShardRequest`."""
        self.blocks.append(block)
        num_rows = 0
        if block.ids is not None:
            num_rows = block.count
            self.num_bytes_sent += block.ids.nbytes
        self.num_bytes_sent += sum(column.nbytes for column in block.copies.values())
        if block.action is Action.PULL and outs is None:
            self.outs.append(None)
            self.places.append(None)
            self.num_pulled_rows += num_rows
            return
        if outs is None:
            assert block.rows is not None, "only a PULL block has none"
            self.num_bytes_sent += block.rows.nbytes
            self.num_pushed_rows += num_rows
            return
        self.outs.append(outs)
        is_direct = block.dtype is RowDtype.FLOAT32 and len(outs) == 1 and outs[0].flags.carray
        self.places.append(outs[0] if is_direct else None)
        self.num_bytes_received += block.count * block.dim * block.dtype.in_frames.itemsize
        self.num_pulled_rows += num_rows

    def within(self, max_frame_bytes: int) -> Sequence[LocalRequest]:
        """As `ShardRequest`: no frame limits it."""
        return (self,)

    def fill(self) -> list[ExtraBlock]:
        """Copies the rows that are in the reply to their destinations; returns the other blocks of the reply."""
        assert self.reply is not None, "it was answered"
        blocks = self.reply.blocks
        if not blocks:
            return []
        destinations = [
            outs for outs, place in zip(self.outs, self.places, strict=True) if place is None and outs is not None
        ]
        for block, outs in zip(blocks, destinations, strict=False):
            assert block.rows is not None, "a ROWS block has rows"
            write_rows(block.rows, block.dtype, outs)
        return [ExtraBlock(self.header.shard, block) for block in blocks[len(destinations) :]]


class LocalCall:
    """Implements `TableCall`: requests that shards have executed, or have deferred.

    Args:
        client: The client that called.
        requests: Its requests.
        wants_answers: As of `TableCall`.

    Attributes:
        wants_answers: As of `TableCall`.
    """

    __slots__ = ("_client", "_error", "_extra", "_requests", "wants_answers")

    def __init__(self, client: EmbeddedClient, requests: Sequence[LocalRequest], wants_answers: bool) -> None:
        self.wants_answers = wants_answers
        self._client = client
        self._requests: Sequence[LocalRequest] = requests if wants_answers else ()
        self._extra: list[ExtraBlock] = []
        self._error: FleetSparseError | None = None

    def wait(self) -> list[ExtraBlock]:
        """As `TableCall`."""
        if self._error is not None:
            raise self._error
        requests, self._requests = self._requests, ()  # the arrays are not needed any more
        try:
            for request in requests:
                if request.reply is None:
                    self._client.await_reply(request)
            for request in requests:
                assert request.reply is not None, "every request was answered"
                if request.reply.blocks:
                    self._extra += request.fill()
        except FleetSparseError as error:
            self._error = error
            self._client.forget(requests)
            raise
        except BaseException:
            self._error = FleetSparseError(
                "client: an earlier wait for this call was interrupted, and its results were dropped. Repeat a pull; a "
                "push is applied nevertheless, flush() waits for it"
            )
            self._client.forget(requests)
            raise
        return self._extra

    def wait_accepted(self) -> None:
        """As `TableCall`: the shards have its requests."""

    def abandon(self) -> None:
        """As `TableCall`."""
        requests, self._requests = self._requests, ()
        self._client.abandon(requests)


class EmbeddedClient(TableClient):
    """Implements `TableClient` by calls of shards in this process.

    A push is executed before its call returns. As with `Client`, the next call of any kind raises why one was refused.

    Args:
        shards: All shards, in order.
        identity: Identity that no other client has.
        settings: Deadlines, and the dtype of rows: values are rounded as frames would round them.

    Attributes:
        identity: As given.
    """

    def __init__(self, shards: Sequence[SharedShard], identity: ClientIdentity, settings: Settings) -> None:
        self._counters = _Counters()  # guarded by `_lock`
        rows_dtype = RowDtype[settings.rows_dtype.upper()]
        super().__init__(Placement.even(len(shards)), rows_dtype, settings.max_frame_bytes, self._counters)
        self.identity = identity  # constant after construction, as all down to the blank line
        self._shards = shards
        self._errors = [LinkErrors(shard, ENDPOINT) for shard in range(len(shards))]
        self._wait_s = max(settings.barrier_s, settings.deadline_s)
        self._close_s = 2 * settings.deadline_s + _GRACE_S
        self._pid = os.getpid()

        self._request_ids = count(1)
        self._deferred: dict[int, LocalRequest] = {}  # those without an outcome, by request id
        self._pushing = threading.Lock()  # held while a push gets its number and is executed, on all shards
        self._last_seqs = [0] * len(shards)  # newest executed push of each shard
        self._failures: deque[FleetSparseError] = deque()  # of pushes that no caller waits for; each is raised once
        self._lock = threading.Lock()  # guards all below
        self._arrived = threading.Condition(self._lock)  # notified of outcomes of deferred requests
        self._applied_seqs = [0] * len(shards)
        self._steps = [0] * len(shards)  # newest complete step that each shard reported
        self._failure: FleetSparseError | None = None  # why no call can succeed any more
        self._is_closed = False

    # The whole client

    def flush(self) -> None:
        """As `TableClient`. Only pushes of a sync step are not applied yet."""
        self.check_usable()
        self._await_pushes(self._wait_s)
        self.check_usable()

    def reach(self, timeout_s: float) -> None:
        """As `TableClient`."""
        self._check_open()
        self._await_pushes(timeout_s)

    def track_pushes(self) -> Callable[[], bool]:
        """As `TableClient`."""
        seqs = list(self._last_seqs)

        def are_done() -> bool:
            with self._lock:  # where a push is counted with its outcome
                return self._has_ended or self._are_applied(seqs)

        return are_done

    def close(self) -> None:
        """As `TableClient`."""
        if os.getpid() != self._pid or self._is_closed:
            return
        with suppress(FleetSparseError):
            self._await_pushes(self._close_s)
        with self._lock:
            self._is_closed = True
            self._deferred.clear()
            self._arrived.notify_all()
        with suppress(IndexError):
            raise self._failures.popleft()

    # The shards' side

    def deliver(self, deferred: DeferredReply) -> None:
        """Takes the result of a deferred request. Any thread may call it, with the shard's lock held."""
        header, outcome = deferred
        with self._lock:
            request = self._deferred.pop(header.request_id, None)
            if request is None:
                return  # nothing waits for it any more
            request.places = [None] * len(request.places)  # its rows are in the reply
            if isinstance(outcome, Exception):
                self._fail(request, outcome)
            else:
                self._note(header.shard, outcome)
                request.reply = outcome
            self._arrived.notify_all()

    def end(self, error: FleetSparseError) -> None:
        """Ends all calls that wait; they and later ones raise `error`."""
        with self._lock:
            self._failure = error
            self._arrived.notify_all()

    # The caller's side

    def await_reply(self, request: LocalRequest) -> None:
        """Waits until a request is answered.

        Raises:
            ShardUnavailable: It took longer than the settings allow.
            FleetSparseError: The request failed, the job ended, or this client was closed.
        """
        header, timeout_s = request.header, request.started_at + self._wait_s - time.monotonic()
        with self._lock:
            self._arrived.wait_for(lambda: request.is_done or self._has_ended, max(timeout_s, 0.0))
            if request.reply is not None:
                return
            if request.error is None and self._failure is None and not self._is_closed:
                waited_s = time.monotonic() - request.started_at
                error = self._errors[header.shard].not_complete(header.op, self._steps[header.shard] + 1, waited_s)
                if request.is_push:
                    self._failure = error  # it is unknown whether the push will be applied
                    self._arrived.notify_all()
                raise error
        raise self._claimed(request.error or self._failure or FleetSparseError("client: it is closed"))

    def forget(self, requests: Sequence[LocalRequest]) -> None:
        """Drops the deferred pulls among some requests. A push is kept: if its step fails, so does this client."""
        for request in requests:
            if not request.is_push:
                self._deferred.pop(request.header.request_id, None)

    def abandon(self, requests: Sequence[LocalRequest]) -> None:
        """Drops the results of requests; an error of a push is raised by a later call."""
        with self._lock:
            for request in requests:
                request.wants_answers = not request.is_push
                if request.error is not None and request.is_push and request.error not in self._failures:
                    self._failures.append(request.error)
        self.forget(requests)

    def _empty_request(self, op: Op, step: int, shard: int) -> LocalRequest:
        header = Header(op, 0, 0, shard, 0, 0, *self.identity, 0, 0, 0, step)
        return LocalRequest(header, op in PUSHES)

    def _newest_step(self) -> int:
        return max(self._steps)

    def _start(self, requests: Requests[Any], wants_answers: bool = True, *, owns_memory: bool = False) -> LocalCall:
        """Executes requests on all shards."""
        return self._execute_all(requests.build(self.max_frame_bytes), wants_answers)

    def _execute_all(self, requests: Sequence[LocalRequest], wants_answers: bool) -> LocalCall:
        if requests and requests[0].is_push:
            if self._failure is not None:
                raise self._claimed(self._failure)
            with DeferredInterrupt(), self._pushing:  # Ctrl-C must not divide a commit
                for request in requests:
                    request.wants_answers = wants_answers
                    self._execute_push(request)
        else:
            for request in requests:
                request.header.push_floor = self._last_seqs[request.header.shard]
                self._execute(request)
        return LocalCall(self, requests, wants_answers)

    def _execute_push(self, request: LocalRequest) -> None:
        header = request.header
        header.push_seq = self._last_seqs[header.shard] + 1
        self._execute(request)
        if request.error is not None:
            # As over the network, a push of nothing takes its number and counts its step.
            noop = Header(Op.PUSH, 0, 0, header.shard, 0, 0, *self.identity, 0, header.push_seq, 0, header.step)
            noop.request_id = next(self._request_ids)
            try:
                reply = self._shards[header.shard].execute(noop, (), (), 0, 0)
            except Exception:
                return  # the shard accepts nothing else either
            with self._lock:
                self._note(header.shard, reply)
        self._last_seqs[header.shard] = header.push_seq

    def _execute(self, request: LocalRequest) -> None:
        header, request.started_at = request.header, time.monotonic()
        header.request_id = next(self._request_ids)
        self._deferred[header.request_id] = request  # before it is known: another thread may deliver the reply at once
        try:
            reply = self._shards[header.shard].execute(
                header, request.blocks, request.places, request.num_bytes_sent, request.num_bytes_received
            )
        except Exception as error:
            with self._lock:
                self._deferred.pop(header.request_id, None)
                self._fail(request, error)
            return
        except BaseException:
            self._deferred.pop(header.request_id, None)
            raise
        with self._lock:
            self._note(header.shard, reply)
            if reply.op is not Op.WAIT:
                self._deferred.pop(header.request_id, None)
                request.reply = reply
            counters = self._counters
            counters.bytes_sent += request.num_bytes_sent
            counters.bytes_received += request.num_bytes_received
            counters.num_pulled_rows += request.num_pulled_rows
            counters.num_pushed_rows += request.num_pushed_rows

    def _note(self, shard: int, reply: Reply) -> None:
        """Takes note of what is applied and complete on a shard, with the lock held."""
        self._applied_seqs[shard] = max(self._applied_seqs[shard], reply.push_seq)
        self._steps[shard] = max(self._steps[shard], reply.step)

    def _fail(self, request: LocalRequest, error: Exception) -> None:
        """Takes the error of a request, with the lock held."""
        errors = self._errors[request.header.shard]
        if isinstance(error, FleetSparseError):
            request.error = error
        elif isinstance(error, Refusal) and error.error.code in _FATAL:
            if self._failure is None:
                self._failure = errors.job_ended(error.error)
            request.error = self._failure
        elif isinstance(error, Refusal):
            request.error = errors.refused(error.error.code, error.error.message)
        else:
            _log.error("%s: a request failed", errors.where, exc_info=error)
            request.error = errors.refused(ErrorCode.INTERNAL, f"{type(error).__name__}: {error}")
        self._counters.num_failed_pushes += request.is_push
        if not request.wants_answers and request.error not in self._failures:
            self._failures.append(request.error)

    @property
    def _has_ended(self) -> bool:
        return self._is_closed or self._failure is not None

    def _await_pushes(self, timeout_s: float) -> None:
        """Waits until every push so far is applied."""
        seqs = list(self._last_seqs)
        with self._lock:
            self._arrived.wait_for(lambda: self._has_ended or self._are_applied(seqs), timeout_s)
            if self._failure is None and not self._are_applied(seqs):
                raise FleetSparseError(f"client: not done in {timeout_s:.1f} s")
        if self._failure is not None:
            raise self._claimed(self._failure)

    def _are_applied(self, seqs: Sequence[int]) -> bool:
        return all(applied >= seq for applied, seq in zip(self._applied_seqs, seqs, strict=True))

    def check_usable(self) -> None:
        """As `TableClient`."""
        if os.getpid() != self._pid or self._is_closed:
            self._check_open()
        if self._failures:
            with suppress(IndexError):
                raise self._failures.popleft()
        if self._failure is not None:
            raise self._failure

    def _check_open(self) -> None:
        if os.getpid() != self._pid:
            raise called_in_child(self._pid)
        if self._is_closed:
            raise RuntimeError("client: it is closed")

    def _claimed(self, error: FleetSparseError) -> FleetSparseError:
        """The error, which no later call has to raise then."""
        with suppress(ValueError):
            self._failures.remove(error)
        return error
