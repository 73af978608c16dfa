"""What can be set by environment variable: the `FLEET_SPARSE_*` names, their defaults, units and trades.

fleetrun passes the environment on to pservers and workers alike, so one list serves both. `docs/running.md` shows
the same list; a test compares the two.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any, NamedTuple, get_args, get_type_hints

from fleet_sparse.errors import SettingError

PREFIX = "FLEET_SPARSE_"
CHANNELS = ("auto", "zmq", "stream")
ROWS_DTYPES = ("float32", "float16", "bfloat16")
LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")


class Range(NamedTuple):
    """What a number may be, both ends included; of what."""

    least: float
    most: float
    unit: str


Seconds = Annotated[float, Range(0.001, 1_000_000, "seconds")]
"""Every wait ends: none is endless, and none is over before it began."""
Bytes = Annotated[int, Range(1, 1 << 50, "bytes")]


@dataclass(frozen=True)
class Settings:
    """One value for each variable; `Settings.from_environment()` reads them."""

    deadline_s: Seconds = 30.0
    """Seconds after which a request that no pserver answered raises `ShardUnavailable`. Longer rides out slower
    restarts of the network; shorter tells of a dead pserver sooner."""

    connect_s: Seconds = 60.0
    """Seconds that a worker waits at `init_worker` for pservers to come up and for workers that never registered."""

    retry_s: Seconds = 2.0
    """Seconds without an answer after which a request is sent again. A repeated push is applied once."""

    heartbeat_s: Seconds = 1.0
    """Seconds between two heartbeats of a worker."""

    worker_lost_s: Seconds = 30.0
    """Seconds without a heartbeat after which a worker counts as lost, and those that wait for it are woken."""

    barrier_s: Seconds = 1800.0
    """Seconds that a worker waits for workers that are alive but slower: at a barrier, and in sync training for their
    push of a step."""

    max_inflight_pushes: Annotated[int, Range(1, 1 << 30, "pushes")] = 64
    """Pushes to one shard that may wait for their ack. More hides slower pservers; fewer bounds memory."""

    max_inflight_bytes: Bytes = 256 << 20
    """Bytes of pushes to one shard that may wait for their ack."""

    max_frame_bytes: Annotated[int, Range(1 << 20, 1 << 40, "bytes")] = 64 << 20
    """Largest frame a pserver accepts and a worker sends; larger requests are split. A row of any dim fits into one."""

    max_staged_bytes: Bytes = 4 << 30
    """Bytes of pushes that may wait on a pserver for their step to be complete, in sync training: about the push of one
    worker times the number of workers."""

    max_pre_image_bytes: Annotated[int, Range(0, 1 << 50, "bytes")] = 1 << 30
    """Bytes of rows that were pushed while a snapshot of a table is written, and are kept as they were; a save that
    would need more fails, and training goes on."""

    marks_s: Seconds = 30.0
    """Seconds that a save waits for every worker to end what it pushes, in async training with several workers."""

    seed: Annotated[int, Range(0, (1 << 64) - 1, "")] = 0
    """Seed of the initializers; with table and id it determines a new row."""

    strict_rules: bool = False
    """Refuse optimizers and regularizers with which plain Paddle also moves rows that no batch touched, where otherwise
    one warning says that tables are trained lazily."""

    rules: str = ""
    """Module whose top-level list `RULES` is added to the update rules, the same on workers and pservers."""

    root: str = "."
    """Directory of a pserver under which it saves and loads, relative to its working directory; or a URL that fsspec
    knows, as `s3://bucket/job`."""

    channel: str = "auto"
    """Transport of frames: `auto` or `stream` for streams (Unix sockets if all pservers are on this host, else TCP),
    `zmq` for ZeroMQ, which cannot bound the memory of an incomplete message."""

    rows_dtype: str = "float32"
    """In which rows of tables and their gradients travel between worker and pservers: `float32`, exactly, or half as
    long and rounded, `bfloat16` or `float16`. Pservers and programs compute in float32 all the same."""

    data_host: str = ""
    """Address that a pserver binds its data plane to, if its job runs on several machines; empty for the host of its
    control plane."""

    insecure: bool = False
    """Allow endpoints that other machines can reach, without keys. Said in the log every minute."""

    huge_pages: bool = True
    """Ask the kernel for 2 MB pages under rows and index. Faster on large tables; costs memory on tiny ones."""

    log_level: str = "INFO"
    """Level of the pserver's log: DEBUG, INFO, WARNING or ERROR."""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Settings:
        """The settings that the variables `FLEET_SPARSE_<NAME>` give; defaults for the rest.

        Raises:
            SettingError: A value cannot be read or is out of its range, or a `FLEET_SPARSE_*` variable has an unknown
                name; or a worker would be lost between two of its heartbeats.
        """
        environment = os.environ if environment is None else environment
        hints = get_type_hints(cls, include_extras=True)
        known = {PREFIX + field.name.upper(): field for field in fields(cls)}
        values: dict[str, Any] = {}
        for variable, text in environment.items():
            if not variable.startswith(PREFIX):
                continue
            if variable not in known:
                raise SettingError(f"{variable}: no such setting; there are {', '.join(sorted(known))}")
            field = known[variable]
            values[field.name] = _parse(variable, text, hints[field.name], field.default)
        settings = cls(**values)
        for name, choices in {"channel": CHANNELS, "rows_dtype": ROWS_DTYPES, "log_level": LOG_LEVELS}.items():
            if (value := getattr(settings, name)) not in choices:
                raise SettingError(f"{PREFIX}{name.upper()}: is {value!r}, should be one of {', '.join(choices)}")
        if settings.worker_lost_s < 2 * settings.heartbeat_s:
            raise SettingError(
                f"{PREFIX}WORKER_LOST_S: is {settings.worker_lost_s:g}, should be at least twice {PREFIX}HEARTBEAT_S, "
                f"which is {settings.heartbeat_s:g}"
            )
        return settings


_SWITCH = {"1": True, "true": True, "0": False, "false": False}


def _parse(variable: str, text: str, hint: Any, default: Any) -> Any:
    if hint is str:
        return text
    if hint is bool:
        if text.lower() not in _SWITCH:
            raise SettingError(f"{variable}: {text!r} is not a switch; write 1 or 0")
        return _SWITCH[text.lower()]
    kind, allowed = get_args(hint)
    try:
        value = kind(text)
        if not allowed.least <= value <= allowed.most:
            raise ValueError
    except ValueError:
        number = f"{'a whole number' if kind is int else 'a number'}{allowed.unit and ' of '}{allowed.unit}"
        raise SettingError(
            f"{variable}: is {text!r}, should be {number}, {allowed.least} to {allowed.most}. "
            f"Leave it out for {str(default).removesuffix('.0')}"
        ) from None
    return value
