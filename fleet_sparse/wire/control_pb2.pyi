# mypy: disable-error-code="type-arg"
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Role(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLE_UNSPECIFIED: _ClassVar[Role]
    ROLE_WORKER: _ClassVar[Role]
    ROLE_READER: _ClassVar[Role]
    ROLE_TOOL: _ClassVar[Role]
ROLE_UNSPECIFIED: Role
ROLE_WORKER: Role
ROLE_READER: Role
ROLE_TOOL: Role

class RegisterRequest(_message.Message):
    __slots__ = ("protocol_version", "worker_index", "num_workers", "client_id", "client_epoch", "table_specs", "mode", "role", "job_id", "launch", "resumption", "incarnations", "is_supervised", "log_job_id", "log_has_content")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    WORKER_INDEX_FIELD_NUMBER: _ClassVar[int]
    NUM_WORKERS_FIELD_NUMBER: _ClassVar[int]
    CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    CLIENT_EPOCH_FIELD_NUMBER: _ClassVar[int]
    TABLE_SPECS_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    LAUNCH_FIELD_NUMBER: _ClassVar[int]
    RESUMPTION_FIELD_NUMBER: _ClassVar[int]
    INCARNATIONS_FIELD_NUMBER: _ClassVar[int]
    IS_SUPERVISED_FIELD_NUMBER: _ClassVar[int]
    LOG_JOB_ID_FIELD_NUMBER: _ClassVar[int]
    LOG_HAS_CONTENT_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    worker_index: int
    num_workers: int
    client_id: bytes
    client_epoch: int
    table_specs: _containers.RepeatedScalarFieldContainer[str]
    mode: str
    role: Role
    job_id: int
    launch: Launch
    resumption: Resumption
    incarnations: _containers.RepeatedScalarFieldContainer[int]
    is_supervised: bool
    log_job_id: int
    log_has_content: bool
    def __init__(self, protocol_version: _Optional[int] = ..., worker_index: _Optional[int] = ..., num_workers: _Optional[int] = ..., client_id: _Optional[bytes] = ..., client_epoch: _Optional[int] = ..., table_specs: _Optional[_Iterable[str]] = ..., mode: _Optional[str] = ..., role: _Optional[_Union[Role, str]] = ..., job_id: _Optional[int] = ..., launch: _Optional[_Union[Launch, _Mapping]] = ..., resumption: _Optional[_Union[Resumption, _Mapping]] = ..., incarnations: _Optional[_Iterable[int]] = ..., is_supervised: bool = ..., log_job_id: _Optional[int] = ..., log_has_content: bool = ...) -> None: ...

class Resumption(_message.Message):
    __slots__ = ("push_seq", "step", "open_barriers", "num_loads", "num_loads_before", "openings")
    PUSH_SEQ_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    OPEN_BARRIERS_FIELD_NUMBER: _ClassVar[int]
    NUM_LOADS_FIELD_NUMBER: _ClassVar[int]
    NUM_LOADS_BEFORE_FIELD_NUMBER: _ClassVar[int]
    OPENINGS_FIELD_NUMBER: _ClassVar[int]
    push_seq: int
    step: int
    open_barriers: _containers.RepeatedScalarFieldContainer[str]
    num_loads: int
    num_loads_before: int
    openings: _containers.RepeatedCompositeFieldContainer[Opening]
    def __init__(self, push_seq: _Optional[int] = ..., step: _Optional[int] = ..., open_barriers: _Optional[_Iterable[str]] = ..., num_loads: _Optional[int] = ..., num_loads_before: _Optional[int] = ..., openings: _Optional[_Iterable[_Union[Opening, _Mapping]]] = ...) -> None: ...

class Opening(_message.Message):
    __slots__ = ("barrier", "number")
    BARRIER_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    barrier: str
    number: int
    def __init__(self, barrier: _Optional[str] = ..., number: _Optional[int] = ...) -> None: ...

class Launch(_message.Message):
    __slots__ = ("job_id", "machine", "launcher")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    MACHINE_FIELD_NUMBER: _ClassVar[int]
    LAUNCHER_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    machine: str
    launcher: str
    def __init__(self, job_id: _Optional[str] = ..., machine: _Optional[str] = ..., launcher: _Optional[str] = ...) -> None: ...

class RegisterReply(_message.Message):
    __slots__ = ("cluster_id", "shard", "num_shards", "incarnation", "placement_version", "data_endpoint", "tables", "stream_endpoint", "job_id", "resumed", "is_supervised", "is_restart", "restored_seq", "has_log", "open_barriers", "progress", "acks_precede_durability", "pushed_step", "max_staged_bytes", "log_job_id", "log_has_content", "copies_epoch", "num_loads_before", "openings")
    CLUSTER_ID_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    NUM_SHARDS_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_VERSION_FIELD_NUMBER: _ClassVar[int]
    DATA_ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    TABLES_FIELD_NUMBER: _ClassVar[int]
    STREAM_ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    RESUMED_FIELD_NUMBER: _ClassVar[int]
    IS_SUPERVISED_FIELD_NUMBER: _ClassVar[int]
    IS_RESTART_FIELD_NUMBER: _ClassVar[int]
    RESTORED_SEQ_FIELD_NUMBER: _ClassVar[int]
    HAS_LOG_FIELD_NUMBER: _ClassVar[int]
    OPEN_BARRIERS_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    ACKS_PRECEDE_DURABILITY_FIELD_NUMBER: _ClassVar[int]
    PUSHED_STEP_FIELD_NUMBER: _ClassVar[int]
    MAX_STAGED_BYTES_FIELD_NUMBER: _ClassVar[int]
    LOG_JOB_ID_FIELD_NUMBER: _ClassVar[int]
    LOG_HAS_CONTENT_FIELD_NUMBER: _ClassVar[int]
    COPIES_EPOCH_FIELD_NUMBER: _ClassVar[int]
    NUM_LOADS_BEFORE_FIELD_NUMBER: _ClassVar[int]
    OPENINGS_FIELD_NUMBER: _ClassVar[int]
    cluster_id: int
    shard: int
    num_shards: int
    incarnation: int
    placement_version: int
    data_endpoint: str
    tables: _containers.RepeatedCompositeFieldContainer[TableState]
    stream_endpoint: str
    job_id: int
    resumed: str
    is_supervised: bool
    is_restart: bool
    restored_seq: int
    has_log: bool
    open_barriers: _containers.RepeatedScalarFieldContainer[str]
    progress: WorkerPosition
    acks_precede_durability: bool
    pushed_step: int
    max_staged_bytes: int
    log_job_id: int
    log_has_content: bool
    copies_epoch: int
    num_loads_before: int
    openings: _containers.RepeatedCompositeFieldContainer[Opening]
    def __init__(self, cluster_id: _Optional[int] = ..., shard: _Optional[int] = ..., num_shards: _Optional[int] = ..., incarnation: _Optional[int] = ..., placement_version: _Optional[int] = ..., data_endpoint: _Optional[str] = ..., tables: _Optional[_Iterable[_Union[TableState, _Mapping]]] = ..., stream_endpoint: _Optional[str] = ..., job_id: _Optional[int] = ..., resumed: _Optional[str] = ..., is_supervised: bool = ..., is_restart: bool = ..., restored_seq: _Optional[int] = ..., has_log: bool = ..., open_barriers: _Optional[_Iterable[str]] = ..., progress: _Optional[_Union[WorkerPosition, _Mapping]] = ..., acks_precede_durability: bool = ..., pushed_step: _Optional[int] = ..., max_staged_bytes: _Optional[int] = ..., log_job_id: _Optional[int] = ..., log_has_content: bool = ..., copies_epoch: _Optional[int] = ..., num_loads_before: _Optional[int] = ..., openings: _Optional[_Iterable[_Union[Opening, _Mapping]]] = ...) -> None: ...

class TableState(_message.Message):
    __slots__ = ("name", "optimizer_step", "num_rows", "assigned", "spec", "num_rejected_ids")
    NAME_FIELD_NUMBER: _ClassVar[int]
    OPTIMIZER_STEP_FIELD_NUMBER: _ClassVar[int]
    NUM_ROWS_FIELD_NUMBER: _ClassVar[int]
    ASSIGNED_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    NUM_REJECTED_IDS_FIELD_NUMBER: _ClassVar[int]
    name: str
    optimizer_step: int
    num_rows: int
    assigned: bool
    spec: str
    num_rejected_ids: int
    def __init__(self, name: _Optional[str] = ..., optimizer_step: _Optional[int] = ..., num_rows: _Optional[int] = ..., assigned: bool = ..., spec: _Optional[str] = ..., num_rejected_ids: _Optional[int] = ...) -> None: ...

class AttendRequest(_message.Message):
    __slots__ = ("client_id", "incarnation")
    CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    client_id: bytes
    incarnation: int
    def __init__(self, client_id: _Optional[bytes] = ..., incarnation: _Optional[int] = ...) -> None: ...

class AttendReply(_message.Message):
    __slots__ = ("incarnation",)
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    def __init__(self, incarnation: _Optional[int] = ...) -> None: ...

class BarrierRequest(_message.Message):
    __slots__ = ("name", "worker_index", "sequence", "client_id", "once", "contribution", "alone", "num_trained")
    NAME_FIELD_NUMBER: _ClassVar[int]
    WORKER_INDEX_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    ONCE_FIELD_NUMBER: _ClassVar[int]
    CONTRIBUTION_FIELD_NUMBER: _ClassVar[int]
    ALONE_FIELD_NUMBER: _ClassVar[int]
    NUM_TRAINED_FIELD_NUMBER: _ClassVar[int]
    name: str
    worker_index: int
    sequence: int
    client_id: bytes
    once: bool
    contribution: bytes
    alone: bool
    num_trained: int
    def __init__(self, name: _Optional[str] = ..., worker_index: _Optional[int] = ..., sequence: _Optional[int] = ..., client_id: _Optional[bytes] = ..., once: bool = ..., contribution: _Optional[bytes] = ..., alone: bool = ..., num_trained: _Optional[int] = ...) -> None: ...

class BarrierReply(_message.Message):
    __slots__ = ("contributions", "num_loads", "others_wait", "copies_epoch", "num_trained", "opening")
    CONTRIBUTIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_LOADS_FIELD_NUMBER: _ClassVar[int]
    OTHERS_WAIT_FIELD_NUMBER: _ClassVar[int]
    COPIES_EPOCH_FIELD_NUMBER: _ClassVar[int]
    NUM_TRAINED_FIELD_NUMBER: _ClassVar[int]
    OPENING_FIELD_NUMBER: _ClassVar[int]
    contributions: _containers.RepeatedScalarFieldContainer[bytes]
    num_loads: int
    others_wait: bool
    copies_epoch: int
    num_trained: int
    opening: int
    def __init__(self, contributions: _Optional[_Iterable[bytes]] = ..., num_loads: _Optional[int] = ..., others_wait: bool = ..., copies_epoch: _Optional[int] = ..., num_trained: _Optional[int] = ..., opening: _Optional[int] = ...) -> None: ...

class PlanSaveRequest(_message.Message):
    __slots__ = ("dirname", "save_id", "kind")
    DIRNAME_FIELD_NUMBER: _ClassVar[int]
    SAVE_ID_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    dirname: str
    save_id: str
    kind: str
    def __init__(self, dirname: _Optional[str] = ..., save_id: _Optional[str] = ..., kind: _Optional[str] = ...) -> None: ...

class SavePlan(_message.Message):
    __slots__ = ("dirname", "save_id", "number", "kind", "base")
    DIRNAME_FIELD_NUMBER: _ClassVar[int]
    SAVE_ID_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    dirname: str
    save_id: str
    number: int
    kind: str
    base: SnapshotBase
    def __init__(self, dirname: _Optional[str] = ..., save_id: _Optional[str] = ..., number: _Optional[int] = ..., kind: _Optional[str] = ..., base: _Optional[_Union[SnapshotBase, _Mapping]] = ...) -> None: ...

class SnapshotBase(_message.Message):
    __slots__ = ("number", "kind", "checksum")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    number: int
    kind: str
    checksum: int
    def __init__(self, number: _Optional[int] = ..., kind: _Optional[str] = ..., checksum: _Optional[int] = ...) -> None: ...

class AwaitSaveRequest(_message.Message):
    __slots__ = ("worker_index", "last_save_id")
    WORKER_INDEX_FIELD_NUMBER: _ClassVar[int]
    LAST_SAVE_ID_FIELD_NUMBER: _ClassVar[int]
    worker_index: int
    last_save_id: str
    def __init__(self, worker_index: _Optional[int] = ..., last_save_id: _Optional[str] = ...) -> None: ...

class AwaitSaveReply(_message.Message):
    __slots__ = ("save_id",)
    SAVE_ID_FIELD_NUMBER: _ClassVar[int]
    save_id: str
    def __init__(self, save_id: _Optional[str] = ...) -> None: ...

class BeginSaveRequest(_message.Message):
    __slots__ = ("plan", "tables", "position", "ends_day", "left_out", "client_id")
    PLAN_FIELD_NUMBER: _ClassVar[int]
    TABLES_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    ENDS_DAY_FIELD_NUMBER: _ClassVar[int]
    LEFT_OUT_FIELD_NUMBER: _ClassVar[int]
    CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    plan: SavePlan
    tables: _containers.RepeatedScalarFieldContainer[str]
    position: WorkerPosition
    ends_day: bool
    left_out: _containers.RepeatedCompositeFieldContainer[LeftOut]
    client_id: bytes
    def __init__(self, plan: _Optional[_Union[SavePlan, _Mapping]] = ..., tables: _Optional[_Iterable[str]] = ..., position: _Optional[_Union[WorkerPosition, _Mapping]] = ..., ends_day: bool = ..., left_out: _Optional[_Iterable[_Union[LeftOut, _Mapping]]] = ..., client_id: _Optional[bytes] = ...) -> None: ...

class LeftOut(_message.Message):
    __slots__ = ("table", "criteria")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    CRITERIA_FIELD_NUMBER: _ClassVar[int]
    table: str
    criteria: _containers.RepeatedCompositeFieldContainer[ShrinkCriterion]
    def __init__(self, table: _Optional[str] = ..., criteria: _Optional[_Iterable[_Union[ShrinkCriterion, _Mapping]]] = ...) -> None: ...

class BeginSaveReply(_message.Message):
    __slots__ = ("needs_full",)
    NEEDS_FULL_FIELD_NUMBER: _ClassVar[int]
    needs_full: bool
    def __init__(self, needs_full: bool = ...) -> None: ...

class WorkerPosition(_message.Message):
    __slots__ = ("worker_index", "step", "position", "pushed_step", "num_untrained")
    WORKER_INDEX_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    PUSHED_STEP_FIELD_NUMBER: _ClassVar[int]
    NUM_UNTRAINED_FIELD_NUMBER: _ClassVar[int]
    worker_index: int
    step: int
    position: str
    pushed_step: int
    num_untrained: int
    def __init__(self, worker_index: _Optional[int] = ..., step: _Optional[int] = ..., position: _Optional[str] = ..., pushed_step: _Optional[int] = ..., num_untrained: _Optional[int] = ...) -> None: ...

class ReportPositionRequest(_message.Message):
    __slots__ = ("save_id", "positions", "client_id")
    SAVE_ID_FIELD_NUMBER: _ClassVar[int]
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    save_id: str
    positions: _containers.RepeatedCompositeFieldContainer[WorkerPosition]
    client_id: bytes
    def __init__(self, save_id: _Optional[str] = ..., positions: _Optional[_Iterable[_Union[WorkerPosition, _Mapping]]] = ..., client_id: _Optional[bytes] = ...) -> None: ...

class ReportPositionReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReportProgressRequest(_message.Message):
    __slots__ = ("position", "client_id")
    POSITION_FIELD_NUMBER: _ClassVar[int]
    CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    position: WorkerPosition
    client_id: bytes
    def __init__(self, position: _Optional[_Union[WorkerPosition, _Mapping]] = ..., client_id: _Optional[bytes] = ...) -> None: ...

class ReportProgressReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WriteSaveRequest(_message.Message):
    __slots__ = ("save_id",)
    SAVE_ID_FIELD_NUMBER: _ClassVar[int]
    save_id: str
    def __init__(self, save_id: _Optional[str] = ...) -> None: ...

class ShardFile(_message.Message):
    __slots__ = ("shard", "file", "num_bytes", "num_rows", "num_removed", "checksum", "clients")
    SHARD_FIELD_NUMBER: _ClassVar[int]
    FILE_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_ROWS_FIELD_NUMBER: _ClassVar[int]
    NUM_REMOVED_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    CLIENTS_FIELD_NUMBER: _ClassVar[int]
    shard: int
    file: str
    num_bytes: int
    num_rows: int
    num_removed: int
    checksum: int
    clients: _containers.RepeatedCompositeFieldContainer[ClientWatermark]
    def __init__(self, shard: _Optional[int] = ..., file: _Optional[str] = ..., num_bytes: _Optional[int] = ..., num_rows: _Optional[int] = ..., num_removed: _Optional[int] = ..., checksum: _Optional[int] = ..., clients: _Optional[_Iterable[_Union[ClientWatermark, _Mapping]]] = ...) -> None: ...

class ClientWatermark(_message.Message):
    __slots__ = ("client_id", "epoch", "watermark")
    CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    WATERMARK_FIELD_NUMBER: _ClassVar[int]
    client_id: bytes
    epoch: int
    watermark: int
    def __init__(self, client_id: _Optional[bytes] = ..., epoch: _Optional[int] = ..., watermark: _Optional[int] = ...) -> None: ...

class FinishSaveRequest(_message.Message):
    __slots__ = ("plan", "files", "keep_last")
    PLAN_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    KEEP_LAST_FIELD_NUMBER: _ClassVar[int]
    plan: SavePlan
    files: _containers.RepeatedCompositeFieldContainer[ShardFile]
    keep_last: int
    def __init__(self, plan: _Optional[_Union[SavePlan, _Mapping]] = ..., files: _Optional[_Iterable[_Union[ShardFile, _Mapping]]] = ..., keep_last: _Optional[int] = ...) -> None: ...

class FinishSaveReply(_message.Message):
    __slots__ = ("snapshot", "checksum", "num_rows")
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    NUM_ROWS_FIELD_NUMBER: _ClassVar[int]
    snapshot: str
    checksum: int
    num_rows: int
    def __init__(self, snapshot: _Optional[str] = ..., checksum: _Optional[int] = ..., num_rows: _Optional[int] = ...) -> None: ...

class EndSaveRequest(_message.Message):
    __slots__ = ("save_id", "committed", "checksum", "plan", "lacks_rows")
    SAVE_ID_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    LACKS_ROWS_FIELD_NUMBER: _ClassVar[int]
    save_id: str
    committed: bool
    checksum: int
    plan: SavePlan
    lacks_rows: bool
    def __init__(self, save_id: _Optional[str] = ..., committed: bool = ..., checksum: _Optional[int] = ..., plan: _Optional[_Union[SavePlan, _Mapping]] = ..., lacks_rows: bool = ...) -> None: ...

class EndSaveReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StageLoadRequest(_message.Message):
    __slots__ = ("dirname", "load_id", "tables", "missing_ok")
    DIRNAME_FIELD_NUMBER: _ClassVar[int]
    LOAD_ID_FIELD_NUMBER: _ClassVar[int]
    TABLES_FIELD_NUMBER: _ClassVar[int]
    MISSING_OK_FIELD_NUMBER: _ClassVar[int]
    dirname: str
    load_id: str
    tables: _containers.RepeatedScalarFieldContainer[str]
    missing_ok: bool
    def __init__(self, dirname: _Optional[str] = ..., load_id: _Optional[str] = ..., tables: _Optional[_Iterable[str]] = ..., missing_ok: bool = ...) -> None: ...

class StageLoadReply(_message.Message):
    __slots__ = ("num_rows", "is_missing")
    NUM_ROWS_FIELD_NUMBER: _ClassVar[int]
    IS_MISSING_FIELD_NUMBER: _ClassVar[int]
    num_rows: int
    is_missing: bool
    def __init__(self, num_rows: _Optional[int] = ..., is_missing: bool = ...) -> None: ...

class FinishLoadRequest(_message.Message):
    __slots__ = ("load_id", "keep", "resumes")
    LOAD_ID_FIELD_NUMBER: _ClassVar[int]
    KEEP_FIELD_NUMBER: _ClassVar[int]
    RESUMES_FIELD_NUMBER: _ClassVar[int]
    load_id: str
    keep: bool
    resumes: bool
    def __init__(self, load_id: _Optional[str] = ..., keep: bool = ..., resumes: bool = ...) -> None: ...

class FinishLoadReply(_message.Message):
    __slots__ = ("tables",)
    TABLES_FIELD_NUMBER: _ClassVar[int]
    tables: _containers.RepeatedCompositeFieldContainer[TableState]
    def __init__(self, tables: _Optional[_Iterable[_Union[TableState, _Mapping]]] = ...) -> None: ...

class ShrinkRequest(_message.Message):
    __slots__ = ("criteria", "decay", "tables", "dry_run", "shrink_id")
    CRITERIA_FIELD_NUMBER: _ClassVar[int]
    DECAY_FIELD_NUMBER: _ClassVar[int]
    TABLES_FIELD_NUMBER: _ClassVar[int]
    DRY_RUN_FIELD_NUMBER: _ClassVar[int]
    SHRINK_ID_FIELD_NUMBER: _ClassVar[int]
    criteria: _containers.RepeatedCompositeFieldContainer[ShrinkCriterion]
    decay: float
    tables: _containers.RepeatedScalarFieldContainer[str]
    dry_run: bool
    shrink_id: str
    def __init__(self, criteria: _Optional[_Iterable[_Union[ShrinkCriterion, _Mapping]]] = ..., decay: _Optional[float] = ..., tables: _Optional[_Iterable[str]] = ..., dry_run: bool = ..., shrink_id: _Optional[str] = ...) -> None: ...

class ShrinkCriterion(_message.Message):
    __slots__ = ("name", "value")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    name: str
    value: float
    def __init__(self, name: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...

class ShrinkReply(_message.Message):
    __slots__ = ("removals",)
    REMOVALS_FIELD_NUMBER: _ClassVar[int]
    removals: _containers.RepeatedCompositeFieldContainer[ShrinkRemoval]
    def __init__(self, removals: _Optional[_Iterable[_Union[ShrinkRemoval, _Mapping]]] = ...) -> None: ...

class ShrinkRemoval(_message.Message):
    __slots__ = ("table", "num_removed", "examples", "num_rows")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    NUM_REMOVED_FIELD_NUMBER: _ClassVar[int]
    EXAMPLES_FIELD_NUMBER: _ClassVar[int]
    NUM_ROWS_FIELD_NUMBER: _ClassVar[int]
    table: str
    num_removed: int
    examples: _containers.RepeatedScalarFieldContainer[int]
    num_rows: int
    def __init__(self, table: _Optional[str] = ..., num_removed: _Optional[int] = ..., examples: _Optional[_Iterable[int]] = ..., num_rows: _Optional[int] = ...) -> None: ...

class StatsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatsReply(_message.Message):
    __slots__ = ("shard", "incarnation", "num_requests", "bytes_received", "bytes_sent", "resident_bytes", "tables", "num_pulled_rows", "num_pushed_rows", "serving", "num_torn_bytes")
    SHARD_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    NUM_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    BYTES_RECEIVED_FIELD_NUMBER: _ClassVar[int]
    BYTES_SENT_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    TABLES_FIELD_NUMBER: _ClassVar[int]
    NUM_PULLED_ROWS_FIELD_NUMBER: _ClassVar[int]
    NUM_PUSHED_ROWS_FIELD_NUMBER: _ClassVar[int]
    SERVING_FIELD_NUMBER: _ClassVar[int]
    NUM_TORN_BYTES_FIELD_NUMBER: _ClassVar[int]
    shard: int
    incarnation: int
    num_requests: int
    bytes_received: int
    bytes_sent: int
    resident_bytes: int
    tables: _containers.RepeatedCompositeFieldContainer[TableState]
    num_pulled_rows: int
    num_pushed_rows: int
    serving: Serving
    num_torn_bytes: int
    def __init__(self, shard: _Optional[int] = ..., incarnation: _Optional[int] = ..., num_requests: _Optional[int] = ..., bytes_received: _Optional[int] = ..., bytes_sent: _Optional[int] = ..., resident_bytes: _Optional[int] = ..., tables: _Optional[_Iterable[_Union[TableState, _Mapping]]] = ..., num_pulled_rows: _Optional[int] = ..., num_pushed_rows: _Optional[int] = ..., serving: _Optional[_Union[Serving, _Mapping]] = ..., num_torn_bytes: _Optional[int] = ...) -> None: ...

class StopRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StopReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ExchangeRequest(_message.Message):
    __slots__ = ("name", "worker_index", "sequence", "client_id", "parts")
    NAME_FIELD_NUMBER: _ClassVar[int]
    WORKER_INDEX_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    name: str
    worker_index: int
    sequence: int
    client_id: bytes
    parts: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, name: _Optional[str] = ..., worker_index: _Optional[int] = ..., sequence: _Optional[int] = ..., client_id: _Optional[bytes] = ..., parts: _Optional[_Iterable[bytes]] = ...) -> None: ...

class ExchangeReply(_message.Message):
    __slots__ = ("parts", "opening", "copies_epoch")
    PARTS_FIELD_NUMBER: _ClassVar[int]
    OPENING_FIELD_NUMBER: _ClassVar[int]
    COPIES_EPOCH_FIELD_NUMBER: _ClassVar[int]
    parts: _containers.RepeatedScalarFieldContainer[bytes]
    opening: int
    copies_epoch: int
    def __init__(self, parts: _Optional[_Iterable[bytes]] = ..., opening: _Optional[int] = ..., copies_epoch: _Optional[int] = ...) -> None: ...

class Version(_message.Message):
    __slots__ = ("number", "checksum")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    number: int
    checksum: int
    def __init__(self, number: _Optional[int] = ..., checksum: _Optional[int] = ...) -> None: ...

class AttachRequest(_message.Message):
    __slots__ = ("protocol_version", "client_id", "specs")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    SPECS_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    client_id: bytes
    specs: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, protocol_version: _Optional[int] = ..., client_id: _Optional[bytes] = ..., specs: _Optional[_Iterable[str]] = ...) -> None: ...

class AttachReply(_message.Message):
    __slots__ = ("cluster_id", "shard", "num_shards", "incarnation", "placement_version", "data_endpoint", "stream_endpoint", "versions", "tables")
    CLUSTER_ID_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    NUM_SHARDS_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_VERSION_FIELD_NUMBER: _ClassVar[int]
    DATA_ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    STREAM_ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    TABLES_FIELD_NUMBER: _ClassVar[int]
    cluster_id: int
    shard: int
    num_shards: int
    incarnation: int
    placement_version: int
    data_endpoint: str
    stream_endpoint: str
    versions: _containers.RepeatedCompositeFieldContainer[Version]
    tables: _containers.RepeatedCompositeFieldContainer[TableState]
    def __init__(self, cluster_id: _Optional[int] = ..., shard: _Optional[int] = ..., num_shards: _Optional[int] = ..., incarnation: _Optional[int] = ..., placement_version: _Optional[int] = ..., data_endpoint: _Optional[str] = ..., stream_endpoint: _Optional[str] = ..., versions: _Optional[_Iterable[_Union[Version, _Mapping]]] = ..., tables: _Optional[_Iterable[_Union[TableState, _Mapping]]] = ...) -> None: ...

class AwaitVersionRequest(_message.Message):
    __slots__ = ("checksum", "last_failure")
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    LAST_FAILURE_FIELD_NUMBER: _ClassVar[int]
    checksum: int
    last_failure: str
    def __init__(self, checksum: _Optional[int] = ..., last_failure: _Optional[str] = ...) -> None: ...

class AwaitVersionReply(_message.Message):
    __slots__ = ("versions", "last_failure")
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    LAST_FAILURE_FIELD_NUMBER: _ClassVar[int]
    versions: _containers.RepeatedCompositeFieldContainer[Version]
    last_failure: str
    def __init__(self, versions: _Optional[_Iterable[_Union[Version, _Mapping]]] = ..., last_failure: _Optional[str] = ...) -> None: ...

class Serving(_message.Message):
    __slots__ = ("versions", "num_adopted", "num_failed", "last_failure")
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_ADOPTED_FIELD_NUMBER: _ClassVar[int]
    NUM_FAILED_FIELD_NUMBER: _ClassVar[int]
    LAST_FAILURE_FIELD_NUMBER: _ClassVar[int]
    versions: _containers.RepeatedCompositeFieldContainer[Version]
    num_adopted: int
    num_failed: int
    last_failure: str
    def __init__(self, versions: _Optional[_Iterable[_Union[Version, _Mapping]]] = ..., num_adopted: _Optional[int] = ..., num_failed: _Optional[int] = ..., last_failure: _Optional[str] = ...) -> None: ...
