"""What can be set by environment variable: the `FLEET_SPARSE_*` names, their defaults, units and trades.

fleetrun passes the environment on to pservers and workers alike, so one list serves both. `docs/running.md` shows
the same list; a test compares the two.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import get_type_hints

from fleet_sparse.errors import SettingError

PREFIX = "FLEET_SPARSE_"
CHANNELS = ("auto", "zmq", "stream")
ROWS_DTYPES = ("float32", "float16", "bfloat16")


@dataclass(frozen=True)
class Settings:
    """One value for each variable; `Settings.from_environment()` reads them."""

    deadline_s: float = 30.0
    """Seconds after which a request that no pserver answered raises `ShardUnavailable`. Longer rides out slower
    restarts of the network; shorter tells of a dead pserver sooner."""

    connect_s: float = 60.0
    """Seconds that a worker waits at `init_worker` for pservers to come up and for workers that never registered."""

    retry_s: float = 2.0
    """Seconds without an answer after which a request is sent again. A repeated push is applied once."""

    heartbeat_s: float = 1.0
    """Seconds between two heartbeats of a worker."""

    worker_lost_s: float = 30.0
    """Seconds without a heartbeat after which a worker counts as lost, and those that wait for it are woken."""

    barrier_s: float = 1800.0
    """Seconds that a worker waits for workers that are alive but slower: at a barrier, and in sync training for their
    push of a step."""

    max_inflight_pushes: int = 64
    """Pushes to one shard that may wait for their ack. More hides slower pservers; fewer bounds memory."""

    max_inflight_bytes: int = 256 << 20
    """Bytes of pushes to one shard that may wait for their ack."""

    max_frame_bytes: int = 64 << 20
    """Largest frame a pserver accepts and a worker sends; larger requests are split."""

    max_staged_bytes: int = 4 << 30
    """Bytes of pushes that may wait on a pserver for their step to be complete, in sync training: about the push of one
    worker times the number of workers."""

    max_pre_image_bytes: int = 1 << 30
    """Bytes of rows that were pushed while a snapshot of a table is written, and are kept as they were; a save that
    would need more fails, and training goes on."""

    marks_s: float = 30.0
    """Seconds that a save waits for every worker to end what it pushes, in async training with several workers."""

    seed: int = 0
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
    """What carries frames: `zmq`, `stream` or `auto`: streams if all pservers are on this host, where they are faster,
    and ZeroMQ else."""

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
            SettingError: A value cannot be read, is negative, or a `FLEET_SPARSE_*` variable has an unknown name; or a
                worker would be lost between two of its heartbeats.
        """
        environment = os.environ if environment is None else environment
        types = get_type_hints(cls)
        known = {PREFIX + field.name.upper(): field.name for field in fields(cls)}
        values: dict[str, object] = {}
        for variable, text in environment.items():
            if not variable.startswith(PREFIX):
                continue
            if variable not in known:
                raise SettingError(f"{variable}: no such setting; there are {', '.join(sorted(known))}")
            values[known[variable]] = _parse(variable, text, types[known[variable]])
        settings = cls(**values)  # type: ignore[arg-type]  # each value was parsed to its field's type above
        for name, choices in {"channel": CHANNELS, "rows_dtype": ROWS_DTYPES}.items():
            if getattr(settings, name) not in choices:
                value = getattr(settings, name)
                raise SettingError(f"{PREFIX}{name.upper()}: {value!r} is none of {', '.join(choices)}")
        if settings.worker_lost_s < 2 * settings.heartbeat_s:
            raise SettingError(
                f"{PREFIX}WORKER_LOST_S: is {settings.worker_lost_s:g}, should be at least twice {PREFIX}HEARTBEAT_S, "
                f"which is {settings.heartbeat_s:g}"
            )
        return settings


_SWITCH = {"1": True, "true": True, "0": False, "false": False}


def _parse(variable: str, text: str, kind: type) -> object:
    if kind is bool:
        if text.lower() not in _SWITCH:
            raise SettingError(f"{variable}: {text!r} is not a switch; write 1 or 0")
        return _SWITCH[text.lower()]
    try:
        value: object = kind(text)
    except ValueError:
        raise SettingError(
            f"{variable}: {text!r} is not {'a number' if kind in (int, float) else kind.__name__}"
        ) from None
    if isinstance(value, (int, float)) and not value >= 0:
        raise SettingError(f"{variable}: {text!r} is negative")
    return value
