"""Settings: what environment variables `FLEET_SPARSE_*` can change, in two groups: behaviour and performance.

fleetrun passes its environment on to pservers and workers alike, so one list serves both. `docs/running.md` has the
same list; a test compares the two.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

import msgspec

from fleet_sparse.errors import SettingError

PREFIX = "FLEET_SPARSE_"


class Range(NamedTuple):
    """Values that a number may have, both ends included, and their unit."""

    least: float
    most: float
    unit: str


# All timeouts are finite and above 0.
Seconds = Annotated[float, Range(0.001, 1_000_000, "seconds")]
Bytes = Annotated[int, Range(1, 1 << 50, "bytes")]
Channel = Literal["auto", "zmq", "stream"]
RowsDtype = Literal["float32", "float16", "bfloat16"]
DenseGradsDtype = Literal["float32", "bfloat16"]
ClientRights = Literal["trainer", "reader", "watcher"]
Durability = Literal["none", "snapshot", "log", "sync"]
LOGGED: tuple[Durability, ...] = ("log", "sync")
"""Durabilities with a log."""
CHANNELS: tuple[Channel, ...] = get_args(Channel)
ROWS_DTYPES: tuple[RowsDtype, ...] = get_args(RowsDtype)


@dataclass(frozen=True)
class Behaviour:
    """Settings that decide what a job does, and when it gives up."""

    deadline_s: Seconds = 30.0
    """Seconds after which a request without an answer raises `ShardUnavailable`. A longer deadline survives longer
    outages of the network; a shorter one reports a dead pserver sooner."""

    connect_s: Seconds = 60.0
    """Seconds that a worker waits at `init_worker` for all pservers to start, and at a barrier for workers that never
    registered."""

    retry_s: Seconds = 2.0
    """Seconds without an answer after which a request is sent again. A push that arrives twice is applied once."""

    heartbeat_s: Seconds = 15.0
    """Seconds between two heartbeats on the connection of a worker to a pserver. If only `worker_lost_s` is given, they
    are at most half of it."""

    worker_lost_s: Seconds = 30.0
    """Seconds within which a worker that answers no heartbeats is disconnected. In async and geo training it may take
    as many more to register again before it is lost. At least twice `heartbeat_s`."""

    durability: Durability = "snapshot"
    """What survives the death of a pserver process. With `none` the job ends; with `snapshot` it is started again and,
    in async and geo training, continues from the newest snapshot of the job; with `log` every acked push survives it,
    and what is older than `log_sync_s` its machine; with `sync` every acked push survives both."""

    failover_s: Seconds = 300.0
    """Seconds that a worker waits for a pserver that is being started again, in place of `deadline_s`; and that a push
    waits for room on the disk of the log."""

    restarts: Annotated[int, Range(1, 1 << 30, "restarts")] = 10
    """Number of times that a pserver is started again within 10 minutes; after that it stays down. If it is set, the
    scripts of workers are started again, too."""

    standby: bool = True
    """Keep a process beside each pserver that takes its place when it dies, with modules and kernels loaded: workers
    wait about a second less, for 100 MB of memory."""

    stall_s: Seconds = 30.0
    """Seconds after which a pserver is killed and started again if the thread that serves its rows does nothing. Longer
    than its longest shrink."""

    orphaned_s: Seconds = 604_800.0
    """Seconds after which a pserver ends whose workers all died."""

    barrier_s: Seconds = 1800.0
    """Seconds that a worker waits for workers that are alive but slower: at a barrier, and in sync training for their
    push of a step. In a job of one worker, seconds that training and saves of several threads wait for each other."""

    positions_s: Seconds = 30.0
    """Seconds that a save waits for each worker to report its position, in async training with several workers."""

    read_try_s: Seconds = 0.1
    """Seconds without an answer after which a `Predictor` asks another replica of the shard, too."""

    version_keep_s: Seconds = 0.5
    """Least number of seconds for which a read-only pserver still answers reads of a version after it has adopted the
    next one. It adopts no further version before that time has passed."""

    pipe_s: Seconds = 600.0
    """Seconds that a data set waits for its `pipe_command`: for more output, and for its end after the last output."""

    seed: Annotated[int, Range(0, (1 << 64) - 1, "")] = 0
    """Seed of the initializers that have none of their own, and of the shuffles of data sets. Seed, table and id
    determine the first value of a row."""

    strict_rules: bool = False
    """Refuse optimizers and regularizers with which plain Paddle also moves rows that no batch touched. If off, one
    warning says that tables are trained lazily."""

    rules: str = ""
    """Module whose top-level list `RULES` is added to the update rules; the same on workers and pservers."""

    rows_dtype: RowsDtype = "float32"
    """Encoding of tables' rows and gradients between workers and pservers: `float32` is exact; `bfloat16` and `float16`
    take half the bytes and are rounded. Pservers and programs always compute in float32."""

    dense_grads_dtype: DenseGradsDtype = "float32"
    """Encoding of gradients of dense parameters in pushes: `bfloat16` takes half the bytes and is rounded. Values of
    dense parameters always travel in float32. The same on all workers of a job."""

    row_shards: Annotated[int, Range(0, 1 << 14, "pservers")] = 0
    """Number of pservers, from the first on, that have the rows of tables; all others have the dense parameters, as on
    the machines of the workers. 0 if all have both. The same on all pservers and workers of a job."""

    root: str = "."
    """Directory under which a pserver saves and loads, relative to its working directory; or a URL for fsspec, as
    `s3://bucket/job`."""

    job_id: str = ""
    """Identity of the job, the same on its workers and pservers; a process with another one is refused. If empty, only
    a worker of another fleetrun on the same machine is refused."""

    log: str = "log"
    """Directory of the logs, relative to `root` if that is a directory. The disk of a log writes every change: about
    1 MB for a step of a click model."""

    log_sync_s: Seconds = 1.0
    """Seconds between two syncs of the log to the disk."""

    coordinator: str = ""
    """Grants each shard to one pserver at a time: `zookeeper://host:port/path` or `etcd://host:port/prefix`. If empty,
    the directory of the log does, and nothing without a log."""

    lease_s: Annotated[float, Range(0.5, 1_000_000, "seconds")] = 10.0
    """Seconds after which another pserver may take the place of one that no longer renews its lease. A pserver that was
    suspended for longer ends."""

    data_host: str = ""
    """Address to which a pserver binds its data plane if the job runs on several machines; empty for the host of its
    control plane."""

    keys: str = ""
    """Directory of the keys that `fleet-sparse keys new` made, with which processes of a job know each other; relative
    to the working directory. The same keys on workers and pservers. Empty for none."""

    role: ClientRights = "trainer"
    """What a process may ask, unless it is a pserver: a `reader` pulls rows, a `watcher` asks for stats. With keys, it
    selects the certificate."""

    insecure: bool = False
    """Allow endpoints that other machines can reach, without keys. The log says so every minute."""

    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    """Lowest level of the messages in the pserver's log."""


@dataclass(frozen=True)
class Performance:
    """Settings that trade speed against memory. They change no result; past a limit a request, step or save fails."""

    max_inflight_pushes: Annotated[int, Range(1, 1 << 30, "pushes")] = 64
    """Largest number of pushes to one shard that wait for their ack. A larger window hides slow pservers; a smaller one
    bounds memory, and how far a worker is ahead."""

    max_inflight_bytes: Bytes = 256 << 20
    """Largest number of bytes of pushes to one shard that wait for their ack."""

    kept_bytes: Bytes = 512 << 20
    """Largest number of bytes of acked pushes that a worker keeps, with durability `log`, until they survive the
    machine of their pserver. At the bound the next push waits."""

    max_frame_bytes: Annotated[int, Range(1 << 20, 1 << 40, "bytes")] = 64 << 20
    """Size of the largest frame that a worker sends and a pserver accepts; larger requests are split. The least value
    holds a row of any dim. The same on workers and pservers."""

    max_receiving_bytes: Bytes = 1 << 30
    """Largest number of bytes of large frames, above 16 KB, that have arrived at a pserver in part, of all connections.
    More wait until there is room; while they wait, a connection whose frame is not complete after 30 s is ended."""

    max_rows: Annotated[int, Range(0, 1 << 50, "rows")] = 0
    """Largest number of rows of a table on one pserver; 0 for no bound. An id past it gets no row: it reads its initial
    value and is not trained. The same holds while 90 % of the memory of machine or control group are in use."""

    max_bytes: Annotated[int, Range(0, 1 << 50, "bytes")] = 0
    """As `max_rows`, for the memory of a table's rows, states and index on one pserver; 0 for no bound."""

    max_staged_bytes: Bytes = 4 << 30
    """Largest number of bytes of pushes that wait on a pserver for their step to be complete, in sync training: about
    one worker's push times the number of workers. Past it the step fails. With a bounded step lag, parts of steps that
    are too large for one frame."""

    max_pre_image_bytes: Annotated[int, Range(0, 1 << 50, "bytes")] = 1 << 30
    """Largest number of bytes of pre-images of one table: rows as they were before a push changed them while a snapshot
    is written. Past it the save fails, and training continues."""

    checkpoint_bytes: Bytes = 2 << 30
    """Bytes of the log after which a pserver writes a checkpoint, so that the log before it can be removed. A smaller
    number makes a restart faster."""

    channel: Channel = "auto"
    """Transport of frames: `auto` or `stream` for streams (Unix sockets if all pservers are on this host, else TCP),
    `zmq` for ZeroMQ, which cannot bound the memory of an incomplete message. The same on workers and pservers."""

    straight_path: bool = True
    """Write, send, receive and answer the frames of plain pulls and pushes in compiled code, on streams. If off, Python
    does it with the same bytes. Workers and pservers need not have the same."""

    huge_pages: bool = True
    """Ask the kernel for 2 MB pages under rows and index. Faster for large tables; wastes memory on tiny ones."""


@dataclass(frozen=True)
class Settings(Performance, Behaviour):
    """One value for each variable; `Settings.from_environment()` reads them."""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Settings:
        """Returns the settings that the variables `FLEET_SPARSE_<NAME>` give; the others have their defaults.

        Raises:
            SettingError: A variable has an unknown name, or a value that cannot be read or is out of its range; or
                `worker_lost_s` is less than twice `heartbeat_s`.
        """
        environment = os.environ if environment is None else environment
        hints = get_type_hints(cls, include_extras=True)
        known = {PREFIX + field.name.upper(): field for field in fields(cls)}
        values: dict[str, Any] = {}
        for variable, text in environment.items():
            if not variable.startswith(PREFIX):
                continue
            if variable not in known:
                # Without the prefix, which makes any two names similar.
                names = [name.removeprefix(PREFIX) for name in sorted(known)]
                closest = difflib.get_close_matches(variable.removeprefix(PREFIX), names, n=1)
                should = PREFIX + closest[0] if closest else f"one of {', '.join(sorted(known))}"
                raise SettingError(f"{variable}: unknown setting, should be {should}")
            field = known[variable]
            values[field.name] = _parse(variable, text, hints[field.name], field.default)
        values.setdefault("heartbeat_s", min(cls.heartbeat_s, values.get("worker_lost_s", cls.worker_lost_s) / 2))
        settings = cls(**values)
        if settings.worker_lost_s < 2 * settings.heartbeat_s:
            raise SettingError(
                f"{PREFIX}WORKER_LOST_S: is {settings.worker_lost_s:g}, should be at least twice {PREFIX}HEARTBEAT_S, "
                f"which is {settings.heartbeat_s:g}"
            )
        return settings


def _parse(variable: str, text: str, hint: Any, default: object) -> Any:
    kind, *allowed = get_args(hint) if get_origin(hint) is Annotated else (hint,)
    try:
        value = msgspec.convert(text, kind, strict=False)
    except msgspec.ValidationError:
        value = None
    if value is None or not all(each.least <= value <= each.most for each in allowed):
        # The form in which users write it into the environment: 30, not 30.0.
        usual = int(default) if isinstance(default, (bool, float)) else default
        raise SettingError(f"{variable}: is {text!r}, should be {_expected(kind, *allowed)}. Leave it out for {usual}")
    return value


def _expected(kind: Any, allowed: Range | None = None) -> str:
    if allowed is None:
        return "1 or 0" if kind is bool else f"one of {', '.join(get_args(kind))}"
    number = f"{'a whole number' if kind is int else 'a number'}{allowed.unit and ' of '}{allowed.unit}"
    return f"{number}, {allowed.least} to {allowed.most}"
