# mypy: disable-error-code="type-arg"
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RegisterRequest(_message.Message):
    __slots__ = ("protocol_version", "worker_index", "num_workers", "client_id", "client_epoch", "table_specs", "mode")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    WORKER_INDEX_FIELD_NUMBER: _ClassVar[int]
    NUM_WORKERS_FIELD_NUMBER: _ClassVar[int]
    CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    CLIENT_EPOCH_FIELD_NUMBER: _ClassVar[int]
    TABLE_SPECS_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    worker_index: int
    num_workers: int
    client_id: bytes
    client_epoch: int
    table_specs: _containers.RepeatedScalarFieldContainer[str]
    mode: str
    def __init__(self, protocol_version: _Optional[int] = ..., worker_index: _Optional[int] = ..., num_workers: _Optional[int] = ..., client_id: _Optional[bytes] = ..., client_epoch: _Optional[int] = ..., table_specs: _Optional[_Iterable[str]] = ..., mode: _Optional[str] = ...) -> None: ...

class RegisterReply(_message.Message):
    __slots__ = ("cluster_id", "shard", "num_shards", "incarnation", "placement_version", "data_endpoint", "tables")
    CLUSTER_ID_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    NUM_SHARDS_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_VERSION_FIELD_NUMBER: _ClassVar[int]
    DATA_ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    TABLES_FIELD_NUMBER: _ClassVar[int]
    cluster_id: int
    shard: int
    num_shards: int
    incarnation: int
    placement_version: int
    data_endpoint: str
    tables: _containers.RepeatedCompositeFieldContainer[TableState]
    def __init__(self, cluster_id: _Optional[int] = ..., shard: _Optional[int] = ..., num_shards: _Optional[int] = ..., incarnation: _Optional[int] = ..., placement_version: _Optional[int] = ..., data_endpoint: _Optional[str] = ..., tables: _Optional[_Iterable[_Union[TableState, _Mapping]]] = ...) -> None: ...

class TableState(_message.Message):
    __slots__ = ("name", "optimizer_step", "num_rows", "assigned", "spec")
    NAME_FIELD_NUMBER: _ClassVar[int]
    OPTIMIZER_STEP_FIELD_NUMBER: _ClassVar[int]
    NUM_ROWS_FIELD_NUMBER: _ClassVar[int]
    ASSIGNED_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    name: str
    optimizer_step: int
    num_rows: int
    assigned: bool
    spec: str
    def __init__(self, name: _Optional[str] = ..., optimizer_step: _Optional[int] = ..., num_rows: _Optional[int] = ..., assigned: bool = ..., spec: _Optional[str] = ...) -> None: ...

class HeartbeatRequest(_message.Message):
    __slots__ = ("worker_index", "client_id")
    WORKER_INDEX_FIELD_NUMBER: _ClassVar[int]
    CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    worker_index: int
    client_id: bytes
    def __init__(self, worker_index: _Optional[int] = ..., client_id: _Optional[bytes] = ...) -> None: ...

class HeartbeatReply(_message.Message):
    __slots__ = ("incarnation", "tables")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    TABLES_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    tables: _containers.RepeatedCompositeFieldContainer[TableState]
    def __init__(self, incarnation: _Optional[int] = ..., tables: _Optional[_Iterable[_Union[TableState, _Mapping]]] = ...) -> None: ...

class BarrierRequest(_message.Message):
    __slots__ = ("name", "worker_index", "num_workers", "sequence")
    NAME_FIELD_NUMBER: _ClassVar[int]
    WORKER_INDEX_FIELD_NUMBER: _ClassVar[int]
    NUM_WORKERS_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    name: str
    worker_index: int
    num_workers: int
    sequence: int
    def __init__(self, name: _Optional[str] = ..., worker_index: _Optional[int] = ..., num_workers: _Optional[int] = ..., sequence: _Optional[int] = ...) -> None: ...

class BarrierReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SaveRequest(_message.Message):
    __slots__ = ("dirname", "save_id")
    DIRNAME_FIELD_NUMBER: _ClassVar[int]
    SAVE_ID_FIELD_NUMBER: _ClassVar[int]
    dirname: str
    save_id: str
    def __init__(self, dirname: _Optional[str] = ..., save_id: _Optional[str] = ...) -> None: ...

class SaveReply(_message.Message):
    __slots__ = ("shard", "file", "num_bytes", "num_rows", "checksum")
    SHARD_FIELD_NUMBER: _ClassVar[int]
    FILE_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_ROWS_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    shard: int
    file: str
    num_bytes: int
    num_rows: int
    checksum: int
    def __init__(self, shard: _Optional[int] = ..., file: _Optional[str] = ..., num_bytes: _Optional[int] = ..., num_rows: _Optional[int] = ..., checksum: _Optional[int] = ...) -> None: ...

class FinishSaveRequest(_message.Message):
    __slots__ = ("dirname", "save_id", "shards")
    DIRNAME_FIELD_NUMBER: _ClassVar[int]
    SAVE_ID_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    dirname: str
    save_id: str
    shards: _containers.RepeatedCompositeFieldContainer[SaveReply]
    def __init__(self, dirname: _Optional[str] = ..., save_id: _Optional[str] = ..., shards: _Optional[_Iterable[_Union[SaveReply, _Mapping]]] = ...) -> None: ...

class FinishSaveReply(_message.Message):
    __slots__ = ("manifest",)
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    manifest: str
    def __init__(self, manifest: _Optional[str] = ...) -> None: ...

class StatsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatsReply(_message.Message):
    __slots__ = ("shard", "incarnation", "num_requests", "bytes_received", "bytes_sent", "resident_bytes", "tables", "num_pulled_rows", "num_pushed_rows")
    SHARD_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    NUM_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    BYTES_RECEIVED_FIELD_NUMBER: _ClassVar[int]
    BYTES_SENT_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    TABLES_FIELD_NUMBER: _ClassVar[int]
    NUM_PULLED_ROWS_FIELD_NUMBER: _ClassVar[int]
    NUM_PUSHED_ROWS_FIELD_NUMBER: _ClassVar[int]
    shard: int
    incarnation: int
    num_requests: int
    bytes_received: int
    bytes_sent: int
    resident_bytes: int
    tables: _containers.RepeatedCompositeFieldContainer[TableState]
    num_pulled_rows: int
    num_pushed_rows: int
    def __init__(self, shard: _Optional[int] = ..., incarnation: _Optional[int] = ..., num_requests: _Optional[int] = ..., bytes_received: _Optional[int] = ..., bytes_sent: _Optional[int] = ..., resident_bytes: _Optional[int] = ..., tables: _Optional[_Iterable[_Union[TableState, _Mapping]]] = ..., num_pulled_rows: _Optional[int] = ..., num_pushed_rows: _Optional[int] = ...) -> None: ...

class StopRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StopReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
