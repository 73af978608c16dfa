"""LinkErrors: what a shard link found out, as errors that a user can act on."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from fleet_sparse.errors import (
    ErrorCode,
    FleetSparseError,
    LogFull,
    ProtocolError,
    PushRefused,
    ShardUnavailable,
    TableMismatch,
    WorkerLost,
)
from fleet_sparse.keys import forbidden
from fleet_sparse.wire.frame_format import FrameError, Op

HOW_TO_FIND_NAN = "paddle.set_flags({'FLAGS_check_nan_inf': 1}) finds the op"
"""Advice of every error about values that are NaN or infinite."""
_NOT_FINITE_ADVICE = f"If values are not finite, {HOW_TO_FIND_NAN}"


class LinkErrors(NamedTuple):
    """Makes the errors of the link to one shard."""

    shard: int
    endpoint: str
    condition: Callable[[], str] = lambda: ""
    """Describes the state of the connection."""

    @property
    def where(self) -> str:
        """Names shard and endpoint; every message begins with it."""
        return f"shard {self.shard} at {self.endpoint}"

    def refused(self, code: ErrorCode, message: str) -> FleetSparseError:
        """The pserver refused a request."""
        text = f"{self.where}: {message}"
        if code is ErrorCode.NOT_FINITE:
            return PushRefused(f"{text}. {_NOT_FINITE_ADVICE}")
        if code is ErrorCode.SCHEMA:
            return TableMismatch(text)
        if code is ErrorCode.READ_ONLY:
            return PushRefused(text)
        if code is ErrorCode.FORBIDDEN:  # its message is the role and what it asked for
            role, _, what = message.partition(" ")
            return forbidden(self.where, role, what)
        if code is ErrorCode.LOG_FULL:
            return LogFull(text)
        return ProtocolError(text, code=code)

    def job_ended(self, error: FrameError) -> FleetSparseError:
        """The pserver takes no further request of this client."""
        text = f"{self.where}: {error.message}"
        if error.code is ErrorCode.WORKER_LOST:
            return WorkerLost(text, worker_index=error.number)
        if error.code is ErrorCode.STEP_FAILED:
            return PushRefused(f"{text}. {_NOT_FINITE_ADVICE}")
        return ProtocolError(text, code=error.code)

    def restarted(self, evidence: str, incarnation: int) -> ShardUnavailable:
        """The pserver is another incarnation than the one that this worker registered with."""
        return self._unavailable(
            f"the pserver was started again ({evidence}; this worker registered with {incarnation:016x}); the rows "
            "that it held are gone. Load the last snapshot and start the workers again"
        )

    def foreign_push(self, applied_seq: int, last_seq: int) -> ProtocolError:
        """The pserver applied a push that this client never sent."""
        return self._gap(
            f"push {applied_seq} of this client is applied, it sent {last_seq}. Two processes use one client id"
        )

    def lost_pushes(self, expected_seq: int, acked_seq: int, last_seq: int) -> ProtocolError:
        """The pserver expects a push that this client cannot send again."""
        return self._gap(
            f"it expects push {expected_seq}, of which {acked_seq} are acked and {last_seq} sent; it has forgotten "
            "some, or two processes use one client id"
        )

    def not_complete(self, op: Op, step: int, waited_s: float) -> ShardUnavailable:
        """The pserver waited too long for other workers."""
        what = (
            "not all workers left the step group" if op is Op.LEAVE else f"step {step} was not complete",
            "still trains" if op is Op.LEAVE else "did not push it",
        )
        return self._unavailable(
            f"{what[0]} in {waited_s:.0f} s: some worker that is alive {what[1]}. If it is only slow, set "
            "FLEET_SPARSE_BARRIER_S higher"
        )

    def unanswered(self, op: Op, waited_s: float, num_tries: int, last_error: str) -> ShardUnavailable:
        """The pserver did not answer in time."""
        tries = f"sent {num_tries} times" if num_tries != 1 else "sent once"
        parts = [f"no answer to a {op.name} in {waited_s:.1f} s, {tries}", self.condition()]
        parts.append(f"last error: {last_error}" if last_error else "")
        advice = f"See the log of pserver {self.shard}; if it died, start again from the last save"
        return self._unavailable(f"{'; '.join(filter(None, parts))}. {advice}")

    def window_full(self, waited_s: float, num_unacked: int, last_error: str) -> ShardUnavailable:
        """The window of pushes in flight stayed full."""
        last = f"; last error: {last_error}" if last_error else ""
        return self._unavailable(
            f"no capacity for a push in {waited_s:.1f} s, {num_unacked} pushes wait for their ack{last}. "
            f"See the log of pserver {self.shard}"
        )

    def kept_full(self, waited_s: float, num_bytes: int) -> ShardUnavailable:
        """The pserver did not make pushes durable that the worker keeps for it."""
        return self._unavailable(
            f"no capacity for a push in {waited_s:.1f} s, {num_bytes} bytes of acked pushes are not on the disk of the "
            "pserver yet. Its disk is slow or hangs: see its log, or set FLEET_SPARSE_KEPT_BYTES higher"
        )

    def _gap(self, text: str) -> ProtocolError:
        return ProtocolError(f"{self.where}: {text}", code=ErrorCode.GAP)

    def _unavailable(self, text: str) -> ShardUnavailable:
        return ShardUnavailable(f"{self.where}: {text}", shard=self.shard, endpoint=self.endpoint)
