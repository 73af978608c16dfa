"""How much memory this machine has, and has left."""

from __future__ import annotations


def total_bytes() -> int:
    """Physical memory and swap."""
    kib = _kib_by_field()
    return (kib["MemTotal"] + kib["SwapTotal"]) << 10


def available_bytes() -> int:
    """What may be asked for before something must be swapped or killed, and what is free of swap."""
    kib = _kib_by_field()
    return (kib["MemAvailable"] + kib["SwapFree"]) << 10


def _kib_by_field() -> dict[str, int]:
    with open("/proc/meminfo") as lines:
        return {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
