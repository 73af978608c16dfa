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
from collections.abc import Sequence
from contextlib import suppress
from itertools import count

import numpy as np
from numpy.typing import NDArray

from fleet_sparse.core.dense_spec import DenseSpec
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.embedded_requests import LocalRequest, LocalRequests
from fleet_sparse.errors import ErrorCode, FleetSparseError
from fleet_sparse.pserver.engine.reply import DeferredReply, Reply
from fleet_sparse.pserver.refusal import Refusal
from fleet_sparse.pserver.shared_shard import SharedShard
from fleet_sparse.settings import Settings
from fleet_sparse.wire.frame_format import Header, Op
from fleet_sparse.wire.row_dtype import RowDtype
from fleet_sparse.worker.net.deferred_interrupt import DeferredInterrupt
from fleet_sparse.worker.net.link_errors import LinkErrors
from fleet_sparse.worker.net.requests import DenseUpdate
from fleet_sparse.worker.net.shard_link import ClientIdentity
from fleet_sparse.worker.net.table_client import ExtraBlock, called_in_child
from fleet_sparse.worker.rows.deduplicator import UniqueIds
from fleet_sparse.worker.rows.row_batch import RowBatch, check_distinct

_log = logging.getLogger(__name__)

ENDPOINT = "this process"
"""The address of an embedded pserver, for messages."""
_GRACE_S = 1.0
_FATAL = frozenset({ErrorCode.WORKER_LOST, ErrorCode.STEP_FAILED, ErrorCode.STALE_EPOCH})


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


class EmbeddedClient:
    """Implements `TableClient` by calls of shards in this process.

    A push is executed before its call returns. As with `Client`, the next call of any kind raises why one was refused.

    Args:
        shards: All shards, in order.
        identity: Identity that no other client has.
        settings: Deadlines, and the dtype of rows: values are rounded as frames would round them.

    Attributes:
        identity: As given.
        rows_dtype: As of `TableClient`, as are the other ones.
    """

    def __init__(self, shards: Sequence[SharedShard], identity: ClientIdentity, settings: Settings) -> None:
        self.identity = identity  # constant after construction, as all down to the blank line
        self.rows_dtype = RowDtype[settings.rows_dtype.upper()]
        self.num_shards = len(shards)
        self.max_frame_bytes = settings.max_frame_bytes
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
        self.bytes_sent = 0
        self.bytes_received = 0
        self.num_failed_pushes = 0
        self.num_pulled_rows = 0
        self.num_pushed_rows = 0

    def __enter__(self) -> EmbeddedClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Rows

    def pull(self, batches: Sequence[RowBatch], *, step: int = 0) -> None:
        """As `TableClient`."""
        self.start_pull(batches, step=step).wait()

    def count_missing(self, spec: TableSpec, unique: UniqueIds) -> int:
        """As `TableClient`."""
        self._check_usable()
        requests = self._requests(Op.PULL)
        presence = RowBatch.empty(spec, unique)
        requests.add_pull(presence, presence=True)
        self._start(requests).wait()
        return int(np.count_nonzero(presence.values[:, 0] == 0))

    def start_pull(
        self, batches: Sequence[RowBatch], *, step: int = 0, early: bool = False, owns_memory: bool = False
    ) -> LocalCall:
        """As `TableClient`."""
        self._check_usable()
        # All shards are asked: this worker's next push goes to all, and one that lags behind could not accept it yet.
        requests = self._requests(Op.PULL_EARLY if early else Op.PULL, step=step, to_all=step > 0 and not early)
        for batch in batches:
            requests.add_pull(batch)
        return self._start(requests)

    def push(self, batches: Sequence[RowBatch], *, step: int = 0) -> None:
        """Pushes gradients; arguments and errors are those of `start_push`."""
        self.start_push(batches, step=step).wait()

    def start_push(self, batches: Sequence[RowBatch], *, step: int = 0) -> LocalCall:
        """As `TableClient`."""
        check_distinct("push", [batch.spec.name for batch in batches])
        return self.start_update(batches, [], step=step)

    def start_update(
        self,
        batches: Sequence[RowBatch],
        dense: Sequence[DenseUpdate],
        pulls: Sequence[RowBatch] | None = None,
        *,
        weight: float = 1.0,
        step: int = 0,
    ) -> LocalCall:
        """As `TableClient`."""
        self._check_usable()
        wants_answers = pulls is not None
        for update in dense:
            wants_answers |= update.outs is not None
        op = Op.PUSH_PULL if wants_answers else Op.PUSH
        requests = self._requests(op, step=step, weight=weight, to_all=step > 0)
        for batch in batches:
            requests.add_push(batch)
        for update in dense:
            requests.add_dense_push(update)
        if wants_answers:
            requests.add_answers(dense, pulls or ())
        return self._start(requests, wants_answers)

    def start_prepare(
        self, batches: Sequence[RowBatch], dense: Sequence[DenseUpdate], *, weight: float, step: int
    ) -> LocalCall:
        """As `TableClient`."""
        self._check_usable()
        requests = self._requests(Op.PREPARE, step=step, weight=weight, to_all=True)
        for batch in batches:
            requests.add_push(batch)
        for update in dense:
            requests.add_dense_push(update)
        return self._start(requests)

    def start_commit(
        self,
        factors: Sequence[tuple[TableSpec | DenseSpec, NDArray[np.float32]]],
        dense: Sequence[DenseUpdate],
        pulls: Sequence[RowBatch] = (),
        *,
        step: int,
    ) -> LocalCall:
        """As `TableClient`."""
        self._check_usable()
        requests = self._requests(Op.COMMIT, step=step, to_all=True)
        for spec, values in factors:
            requests.add_factors(spec, values)
        requests.add_answers(dense, pulls)
        return self._start(requests)

    def leave(self) -> int:
        """As `TableClient`."""
        self._check_usable()
        self._start(self._requests(Op.LEAVE, to_all=True)).wait()
        return max(self._steps)

    # Dense values

    def exchange_dense(
        self,
        spec: DenseSpec,
        grads: NDArray[np.float32],
        out: NDArray[np.float32],
        *,
        learning_rate: float,
        optimizer_step: int,
    ) -> None:
        """As `TableClient`."""
        self.start_update([], [DenseUpdate(spec, grads, [out], learning_rate, optimizer_step)]).wait()

    def pull_dense(
        self,
        spec: DenseSpec,
        out: NDArray[np.float32],
        *,
        states: Sequence[NDArray[np.float32]] = (),
        step: int = 0,
    ) -> None:
        """As `TableClient`."""
        self._check_usable()
        requests = self._requests(Op.PULL, step=step)
        for number, array in enumerate([out, *states]):
            requests.add_dense_pull(spec, [array], state=number)
        self._start(requests).wait()

    def assign_dense(self, spec: DenseSpec, values: NDArray[np.float32], *, step: int = 0) -> None:
        """As `TableClient`."""
        self._check_usable()
        requests = self._requests(Op.ASSIGN, step=step)
        requests.add_dense_assign(spec, values)
        self._start(requests).wait()

    def replace_dense(
        self, spec: DenseSpec, values: NDArray[np.float32], states: Sequence[NDArray[np.float32]], optimizer_step: int
    ) -> None:
        """As `TableClient`."""
        self._check_usable()
        requests = self._requests(Op.ASSIGN)
        requests.add_dense_replacement(spec, values, states, optimizer_step)
        self._start(requests).wait()

    # The whole client

    def flush(self) -> None:
        """As `TableClient`. Only pushes of a sync step are not applied yet."""
        self._check_usable()
        self._await_pushes(self._wait_s)
        self._check_usable()

    def reach(self, timeout_s: float) -> None:
        """As `TableClient`."""
        self._check_open()
        self._await_pushes(timeout_s)

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

    def _requests(self, op: Op, *, step: int = 0, weight: float = 1.0, to_all: bool = False) -> LocalRequests:
        return LocalRequests(op, self.identity, self.num_shards, step, self.rows_dtype, weight, to_all)

    def _start(self, built: LocalRequests, wants_answers: bool = True) -> LocalCall:
        """Executes requests on all shards."""
        requests = built.build()
        if requests and requests[0].is_push:
            with DeferredInterrupt(_ignore), self._pushing:  # Ctrl-C must not divide a commit
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
            self.bytes_sent += request.num_bytes_sent
            self.bytes_received += request.num_bytes_received
            self.num_pulled_rows += request.num_pulled_rows
            self.num_pushed_rows += request.num_pushed_rows

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
        self.num_failed_pushes += request.is_push
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

    def _check_usable(self) -> None:
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


def _ignore() -> None:
    """Wakes nothing: no call of a shard waits."""
