"""Every error that fleet_sparse raises on its own account, named by what the caller can do about it.

```
FleetSparseError
├─ InstallError           this Paddle, or one of its flags, is not supported; change it
├─ PlanError              the Program, its flags, optimizer or strategy; change the script
├─ SettingError           an environment variable or option has no meaning; correct it
├─ TableMismatch          two sides describe a table differently; make them the same
├─ ShardUnavailable       a pserver did not answer in time, or is another one than before   .shard .endpoint
├─ WorkerLost             a peer that this worker waits for is gone                          .worker_index
├─ PushRefused            a push with values that may not be applied; nothing was changed
├─ ProtocolError          bytes on the wire are wrong, or of a version that is not spoken    .code
└─ SnapshotError          a snapshot cannot be written or read
   └─ SnapshotCorrupt     bytes on disk are wrong                                            .path .offset
```

Argument mistakes in a direct call are `ValueError` or `TypeError`, outside this tree.
"""

from __future__ import annotations

from enum import IntEnum


class FleetSparseError(Exception):
    """The root of the tree above."""


class InstallError(FleetSparseError):
    """The installed Paddle, or a flag of it, is one that fleet_sparse does not train correctly on."""


class PlanError(FleetSparseError):
    """A Program, optimizer or strategy asks for what cannot be done; the message names the site and the way out."""


class SettingError(FleetSparseError):
    """A setting (environment variable or command-line option) has a value without meaning."""


class TableMismatch(FleetSparseError):
    """Two sides describe the same table differently; the message names both."""


class ShardUnavailable(FleetSparseError):
    """A pserver gave no answer within the deadline, or answered as another incarnation than the one that held our rows.

    Attributes:
        shard: Index of the shard, from 0.
        endpoint: Its address, `host:port`.
    """

    def __init__(self, message: str, *, shard: int, endpoint: str) -> None:
        super().__init__(message)
        self.shard = shard
        self.endpoint = endpoint


class WorkerLost(FleetSparseError):
    """A worker that others wait for stopped its heartbeat.

    Attributes:
        worker_index: Index of the lost worker, from 0.
    """

    def __init__(self, message: str, *, worker_index: int) -> None:
        super().__init__(message)
        self.worker_index = worker_index


class PushRefused(FleetSparseError):
    """A pserver refused a push because of its values (a gradient that is not finite); no row was changed."""


class ErrorCode(IntEnum):
    """Codes of an ERROR frame. Part of the wire protocol: a number is never given another meaning."""

    MALFORMED = 1  # lengths, counts or fields that contradict each other
    CHECKSUM = 2  # the bytes are not the ones that were sent
    VERSION = 3  # a protocol version that is not spoken
    TOO_LARGE = 4  # past a limit of size or count
    UNKNOWN_TABLE = 5  # no table with that id was registered
    SCHEMA = 6  # dim, dtype or schema hash differ from the registered table
    NOT_FINITE = 7  # a gradient is NaN or infinite
    WRONG_SHARD = 8  # cluster, shard or an id that another shard owns
    WRONG_INCARNATION = 9  # the pserver was started again since the worker registered
    STALE_EPOCH = 10  # an older epoch of this client than the newest seen
    GAP = 11  # a push before this one has not arrived; carries the expected seq; send again from there
    NOT_READY = 12  # values asked for that were never assigned
    INTERNAL = 13  # a fault of the pserver itself
    WORKER_LOST = 14  # a worker whose push the step needs is lost; carries its index
    STEP_FAILED = 15  # another worker's push to the step was refused


class ProtocolError(FleetSparseError):
    """A frame was refused; the receiver changed nothing.

    Attributes:
        code: Why, one of `ErrorCode`.
    """

    def __init__(self, message: str, *, code: ErrorCode) -> None:
        super().__init__(message)
        self.code = code


class SnapshotError(FleetSparseError):
    """A snapshot cannot be written or read: a missing file, a full disk, a path outside the root."""


class SnapshotCorrupt(SnapshotError):
    """A snapshot file whose bytes are wrong.

    Attributes:
        path: The file.
        offset: Byte offset of the first block that is wrong.
    """

    def __init__(self, message: str, *, path: str, offset: int) -> None:
        super().__init__(message)
        self.path = path
        self.offset = offset
