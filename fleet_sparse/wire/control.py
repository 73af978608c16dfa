"""The calls of the control plane, and the gRPC status that carries an error of ours.

Both sides use generic handlers over `SERVICE` and `METHODS`; this module does not need gRPC.
"""

from __future__ import annotations

import json
from enum import IntEnum
from typing import NamedTuple

from google.protobuf.message import Message

from fleet_sparse.errors import (
    DatasetError,
    ErrorCode,
    FleetSparseError,
    Forbidden,
    InstallError,
    LeaseLost,
    LogCorrupt,
    LogFailed,
    LogFull,
    PlanError,
    ProtocolError,
    PushRefused,
    SettingError,
    ShardUnavailable,
    SnapshotCorrupt,
    SnapshotError,
    TableMismatch,
    WorkerLost,
)

from . import control_pb2 as messages

SERVICE = "fleet_sparse.control.Control"
CONTROL_VERSION = 8
"""Version of the control plane, in `RegisterRequest`. It rises with new ops and actions of frames too."""
MAX_MESSAGE_BYTES = 64 << 20  # of a request or reply, on both sides

METHODS: dict[str, tuple[type[Message], type[Message]]] = {
    "Register": (messages.RegisterRequest, messages.RegisterReply),
    "Attend": (messages.AttendRequest, messages.AttendReply),
    "Barrier": (messages.BarrierRequest, messages.BarrierReply),
    "PlanSave": (messages.PlanSaveRequest, messages.SavePlan),
    "AwaitSave": (messages.AwaitSaveRequest, messages.AwaitSaveReply),
    "BeginSave": (messages.BeginSaveRequest, messages.BeginSaveReply),
    "ReportPosition": (messages.ReportPositionRequest, messages.ReportPositionReply),
    "ReportProgress": (messages.ReportProgressRequest, messages.ReportProgressReply),
    "WriteSave": (messages.WriteSaveRequest, messages.ShardFile),
    "FinishSave": (messages.FinishSaveRequest, messages.FinishSaveReply),
    "EndSave": (messages.EndSaveRequest, messages.EndSaveReply),
    "StageLoad": (messages.StageLoadRequest, messages.StageLoadReply),
    "FinishLoad": (messages.FinishLoadRequest, messages.FinishLoadReply),
    "Shrink": (messages.ShrinkRequest, messages.ShrinkReply),
    "Stats": (messages.StatsRequest, messages.StatsReply),
    "Stop": (messages.StopRequest, messages.StopReply),
    "Exchange": (messages.ExchangeRequest, messages.ExchangeReply),
    "Attach": (messages.AttachRequest, messages.AttachReply),
    "AwaitVersion": (messages.AwaitVersionRequest, messages.AwaitVersionReply),
}
"""Name of a call -> (class of its request, class of its reply)."""


class ClientRole(IntEnum):
    """The role of a client at its pservers; on the wire, the enum `Role`."""

    WORKER = messages.ROLE_WORKER
    """Trains: it has an index and joins the job."""
    READER = messages.ROLE_READER
    """Pulls rows."""
    TOOL = messages.ROLE_TOOL
    """Asks for stats and states."""


ERROR_KEY = "fleet-sparse-error"
"""Trailing metadata: the name of the error's class in `fleet_sparse.errors`."""

ATTRIBUTES_KEY = "fleet-sparse-error-attributes"
"""Trailing metadata: the error's attributes, a JSON object in ASCII."""

MAX_DETAILS_BYTES = 2048  # percent-encoding may triple it, and gRPC accepts 8 KB of metadata

_STATUS_OF: dict[type[FleetSparseError], str] = {
    FleetSparseError: "INTERNAL",
    InstallError: "FAILED_PRECONDITION",
    PlanError: "FAILED_PRECONDITION",
    SettingError: "INVALID_ARGUMENT",
    TableMismatch: "FAILED_PRECONDITION",
    ShardUnavailable: "ABORTED",  # gRPC itself reports UNAVAILABLE if nobody listens; that one is retried
    WorkerLost: "ABORTED",
    PushRefused: "INVALID_ARGUMENT",
    Forbidden: "PERMISSION_DENIED",
    DatasetError: "INVALID_ARGUMENT",
    ProtocolError: "INVALID_ARGUMENT",
    LeaseLost: "ABORTED",
    LogFull: "RESOURCE_EXHAUSTED",
    LogFailed: "ABORTED",
    LogCorrupt: "DATA_LOSS",
    SnapshotError: "FAILED_PRECONDITION",
    SnapshotCorrupt: "DATA_LOSS",
}
_CLASS_OF = {kind.__name__: kind for kind in _STATUS_OF}
_ATTRIBUTES_OF: dict[type[FleetSparseError], tuple[tuple[str, type], ...]] = {
    ShardUnavailable: (("shard", int), ("endpoint", str)),
    WorkerLost: (("worker_index", int),),
    Forbidden: (("role", str), ("what", str)),
    DatasetError: (("path", str), ("line_number", int), ("slot", str)),
    ProtocolError: (("code", ErrorCode),),
    LogCorrupt: (("path", str), ("offset", int)),
    SnapshotCorrupt: (("path", str), ("offset", int)),
}


class TableState(NamedTuple):
    """State of a table or dense array on one shard; on the wire, the message of that name."""

    name: str
    optimizer_step: int
    """Largest one that a push carried; a resumed job continues from it."""
    num_rows: int
    """0 for a dense array."""
    assigned: bool
    """True if a dense array has values."""
    spec: str = ""
    """JSON; of a dense array always, so that a job that only evaluates finds the parameters; of a table for readers
    and tools."""
    num_rejected_ids: int = 0
    """Of a table: number of ids of pushes that got no row, for want of room."""


class WorkerProgress(NamedTuple):
    """How far a worker is, as it reported last; on the wire, part of a `WorkerPosition`."""

    step: int
    """Number of steps that it has trained."""
    position: str
    """That of its loader, JSON; empty if it is not known."""
    pushed_step: int = 0
    """Number on the wire of the newest of these steps; 0 where steps have none."""


class Status(NamedTuple):
    """An error as gRPC carries it: `code` names a member of `grpc.StatusCode`, `metadata` is trailing."""

    code: str
    details: str
    metadata: tuple[tuple[str, str], ...]


def to_status(error: Exception) -> Status:
    """Returns the status that carries `error`. An error of another kind than ours is an internal fault, INTERNAL.

    The message is cut to `MAX_DETAILS_BYTES` of UTF-8.
    """
    if not isinstance(error, FleetSparseError):
        error = FleetSparseError(f"{type(error).__name__}: {error}")
    kind = next(base for base in type(error).__mro__ if base in _STATUS_OF)
    details = str(error).encode("utf-8", "replace")[:MAX_DETAILS_BYTES].decode("utf-8", "ignore")
    attributes = {name: getattr(error, name) for name, _ in _ATTRIBUTES_OF.get(kind, ())}
    metadata = ((ERROR_KEY, kind.__name__), (ATTRIBUTES_KEY, json.dumps(attributes)))
    return Status(_STATUS_OF[kind], details, metadata)


def from_status(details: str, class_name: str, attributes: str = "{}") -> FleetSparseError:
    """Returns the error that the other side passed to `to_status`.

    Args:
        details: Details text of the status.
        class_name: Value of `ERROR_KEY` in the trailing metadata; an unknown name yields a plain `FleetSparseError`.
        attributes: Value of `ATTRIBUTES_KEY`; if it does not fit the class, the error is a plain `FleetSparseError`.
    """
    kind = _CLASS_OF.get(class_name, FleetSparseError)
    try:
        values = json.loads(attributes)
        arguments = {name: convert(values[name]) for name, convert in _ATTRIBUTES_OF.get(kind, ())}
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return FleetSparseError(details)
    return kind(details, **arguments)
