"""Errors of fleet_sparse: one class for each thing that the caller can do about it.

```
FleetSparseError
├─ InstallError           this Paddle, or one of its flags, is not supported: change it
├─ PlanError              the Program, optimizer or strategy cannot be run: change the script
├─ SettingError           an environment variable or option has a wrong value: correct it
├─ TableMismatch          two sides describe a table differently: make them the same
├─ ShardUnavailable       a pserver did not answer in time, or was restarted                .shard .endpoint
├─ WorkerLost             a worker that this worker waits for is gone                       .worker_index
├─ PushRefused            a push has values that must not be applied; no row was changed
├─ Forbidden              the role of this process may not ask for this: use other keys      .role .what
├─ DatasetError           a file of a data set, or its pipe_command, is wrong               .path .line_number .slot
├─ ProtocolError          bytes on the wire are wrong, or of another version                .code
├─ LeaseLost              a pserver no longer holds the lease of its shard; it answers nothing and ends
├─ LogFull                the disk of a pserver's log has no room; no row was changed
├─ LogFailed              the disk of a pserver's log refused what was written; it answers nothing and ends
├─ LogCorrupt             bytes of a pserver's log are wrong                                .path .offset
└─ SnapshotError          a snapshot cannot be written or read
   └─ SnapshotCorrupt     bytes on disk are wrong                                           .path .offset
```

A wrong argument of a direct call raises `ValueError` or `TypeError`, outside of this tree.
"""

from __future__ import annotations

from enum import IntEnum


class FleetSparseError(Exception):
    """Base class of all errors of fleet_sparse."""


class InstallError(FleetSparseError):
    """The installed Paddle, or one of its flags, would make training go wrong."""


class PlanError(FleetSparseError):
    """A Program, optimizer or strategy asks for something unsupported; the message names it and what to do."""


class SettingError(FleetSparseError):
    """An environment variable or command-line option has an unknown name or an invalid value."""


class TableMismatch(FleetSparseError):
    """Two sides describe one table differently; the message names both sides."""


class ShardUnavailable(FleetSparseError):
    """A pserver did not answer within the deadline, or was restarted and no longer has the rows of the job.

    Attributes:
        shard: Index of the shard, from 0.
        endpoint: Its address, `host:port`.
    """

    def __init__(self, message: str, *, shard: int, endpoint: str) -> None:
        super().__init__(message)
        self.shard = shard
        self.endpoint = endpoint


class WorkerLost(FleetSparseError):
    """A worker that other workers wait for will not come: it died, answers no heartbeats, or never registered.

    Attributes:
        worker_index: Index of the lost worker, from 0.
    """

    def __init__(self, message: str, *, worker_index: int) -> None:
        super().__init__(message)
        self.worker_index = worker_index


class PushRefused(FleetSparseError):
    """A push, or dense values of a save, may not be applied; what was refused changed no row.

    A value is not finite, a table would have more rows than its size, or the pserver is read-only. In sync training all
    workers raise it if the push of one is refused.
    """


class Forbidden(FleetSparseError):
    """A pserver refused a request before it looked at it, because the role of the client may not ask for it.

    Attributes:
        role: Role of the client; `unregistered` for a client that has not registered.
        what: Name of the call or op.
    """

    def __init__(self, message: str, *, role: str, what: str) -> None:
        super().__init__(message)
        self.role = role
        self.what = what


class LeaseLost(FleetSparseError):
    """A pserver no longer holds the lease of its shard, which another one may have; it answers nothing and ends."""


class LogFull(FleetSparseError):
    """The disk of a pserver's log was full: at its first start, or for `FLEET_SPARSE_FAILOVER_S` while a call waited.

    Pushes, registrations, barriers, loads, shrinks and ends of a day wait for room. A push that raises it changed no
    row.
    """


class LogFailed(FleetSparseError):
    """The disk of a pserver's log refused to write or sync what was appended; the pserver answers nothing and ends."""


class LogCorrupt(FleetSparseError):
    """The log of a pserver has wrong bytes, or belongs to another shard.

    Attributes:
        path: Path of the file.
        offset: Byte offset of the first record that is wrong.
    """

    def __init__(self, message: str, *, path: str, offset: int) -> None:
        super().__init__(message)
        self.path = path
        self.offset = offset


class DatasetError(FleetSparseError):
    """A file of a data set cannot be read, its `pipe_command` failed, or a line is malformed.

    Attributes:
        path: Path of the file; empty if it is not known.
        line_number: Number of the line, from 1, in the output of the `pipe_command`; 0 if no single line is wrong.
        slot: Name of the slot; empty if no single slot is wrong.
    """

    def __init__(self, message: str, *, path: str, line_number: int = 0, slot: str = "") -> None:
        super().__init__(message)
        self.path = path
        self.line_number = line_number
        self.slot = slot


class ErrorCode(IntEnum):
    """Codes of ERROR frames. Part of the wire protocol: a number never gets another meaning."""

    MALFORMED = 1  # lengths, counts or fields that contradict each other
    CHECKSUM = 2  # the bytes changed on their way
    VERSION = 3  # another protocol version, or a number that this version does not know
    TOO_LARGE = 4  # past a limit of size or count
    UNKNOWN_TABLE = 5  # no worker registered a table with this id
    SCHEMA = 6  # dim, dtype or schema hash differs from the registered table
    NOT_FINITE = 7  # a gradient is NaN or infinite
    WRONG_SHARD = 8  # the frame is for another cluster or shard, or names an id of another shard
    WRONG_INCARNATION = 9  # the pserver was restarted after the worker registered
    STALE_EPOCH = 10  # another client has taken the place of this worker
    GAP = 11  # an earlier push is missing; carries its number, from which to send again
    NOT_READY = 12  # the values were never assigned
    INTERNAL = 13  # a bug in the pserver
    WORKER_LOST = 14  # the step needs a push of a worker that is lost; carries its index
    STEP_FAILED = 15  # a push of another worker to the step was refused
    FORBIDDEN = 16  # the role of the client may not ask for this
    VERSION_GONE = 17  # a read-only pserver does not have the version; carries the newest one
    READ_ONLY = 18  # the pserver serves snapshots and answers reads alone
    LOG_FULL = 19  # the disk of the log has no room for the push


class ProtocolError(FleetSparseError):
    """The receiver refused a frame and changed nothing.

    Attributes:
        code: Reason, one of `ErrorCode`.
    """

    def __init__(self, message: str, *, code: ErrorCode) -> None:
        super().__init__(message)
        self.code = code


class SnapshotError(FleetSparseError):
    """A snapshot cannot be written or read: a file is missing, the disk is full, a path lies outside of the root."""


class SnapshotCorrupt(SnapshotError):
    """A file of a snapshot has wrong bytes.

    Attributes:
        path: Path of the file.
        offset: Byte offset of the first block that is wrong.
    """

    def __init__(self, message: str, *, path: str, offset: int) -> None:
        super().__init__(message)
        self.path = path
        self.offset = offset
