"""Memory of this machine, from /proc/meminfo."""

from __future__ import annotations


def total_bytes() -> int:
    """Returns the size of physical memory and swap."""
    kib = _kib_by_field()
    return (kib["MemTotal"] + kib["SwapTotal"]) << 10


def available_bytes() -> int:
    """Returns the memory that is available without swapping, and the free swap."""
    kib = _kib_by_field()
    return (kib["MemAvailable"] + kib["SwapFree"]) << 10


def _kib_by_field() -> dict[str, int]:
    with open("/proc/meminfo") as lines:
        return {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
