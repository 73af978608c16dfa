"""CPU time of processes."""

from __future__ import annotations

import time
from collections.abc import Iterable

_CPUCLOCK_SCHED = 2  # all threads of the process; see clock_getcpuclockid(3) and the kernel's posix-timers.h


def cpu_seconds(pids: Iterable[int]) -> float:
    """Returns the CPU seconds of running processes together since their start, to the nanosecond."""
    return sum(time.clock_gettime(~pid << 3 | _CPUCLOCK_SCHED) for pid in pids)
