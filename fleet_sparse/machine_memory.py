"""Memory of this machine, from /proc/meminfo, and of the control group of this process, from /sys/fs/cgroup."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

_PROC = Path("/proc")
_CGROUPS = Path("/sys/fs/cgroup")


def total_bytes() -> int:
    """Returns the size of physical memory and swap."""
    kib = _kib_by_field()
    return (kib["MemTotal"] + kib["SwapTotal"]) << 10


def available_bytes() -> int:
    """Returns the memory that is available without swapping, and the free swap."""
    kib = _kib_by_field()
    return (kib["MemAvailable"] + kib["SwapFree"]) << 10


def used_share() -> float:
    """Returns the share of memory that is in use, of the machine or of the control group, whichever is larger.

    Cached files count as free. A control group without a limit, or one that cannot be read, has no part in it.
    """
    kib = _kib_by_field()
    share = 1 - kib["MemAvailable"] / kib["MemTotal"]
    group = _use_of_cgroup()
    return share if group is None else max(share, group[0] / group[1])


def limit_bytes() -> int:
    """Returns the size of physical memory, or the limit of the control group if that is smaller."""
    physical = _kib_by_field()["MemTotal"] << 10
    group = _use_of_cgroup()
    return physical if group is None else min(physical, group[1])


def _use_of_cgroup() -> tuple[int, int] | None:
    """Returns the bytes in use and the limit of the control group; None if it has no limit or cannot be read."""
    try:
        lines = (_PROC / "self/cgroup").read_text().splitlines()
    except OSError:  # a system without control groups
        return None
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            names, prefix, root = ("memory.max", "memory.current"), "", _CGROUPS
        elif "memory" in controllers.split(","):
            names, prefix = ("memory.limit_in_bytes", "memory.usage_in_bytes"), "total_"
            root = _CGROUPS / "memory"
        else:
            continue
        for directory in (root / path.lstrip("/"), root):  # inside a container its own group may be the root
            with suppress(OSError, ValueError, KeyError):
                limit, used = (int((directory / name).read_text()) for name in names)  # "max" is no number
                statistics = dict(each.split() for each in (directory / "memory.stat").read_text().splitlines())
                cached = sum(int(statistics[f"{prefix}{kind}_file"]) for kind in ("active", "inactive"))
                return used - cached, limit
    return None


def _kib_by_field() -> dict[str, int]:
    with open(_PROC / "meminfo") as lines:
        return {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
