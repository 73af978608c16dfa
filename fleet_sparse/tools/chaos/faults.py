"""Faults of a chaos run: which one is next, as a function of the seed. Pure."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from enum import StrEnum
from typing import NamedTuple


class FaultKind(StrEnum):
    """What happens to a job."""

    kill = "pserver killed"
    kill_all = "all pservers killed"
    delay = "pserver suspended for less than a second"
    suspend = "pserver suspended for seconds"
    connections = "all connections of a pserver cut"
    power = "power cut: records of the log that were not synced are lost"
    torn = "torn record at the end of the log"
    worker = "worker killed"
    disk = "disk of the logs full, and a pserver killed"
    coordinator = "coordinator suspended for seconds"
    coordinator_kill = "coordinator killed, and started again after seconds"
    frames = "frames delayed, doubled and reordered"


NEEDS_LOG = (FaultKind.power, FaultKind.torn, FaultKind.disk)
"""Faults of pservers that have logs."""
OF_COORDINATOR = (FaultKind.coordinator, FaultKind.coordinator_kill)
"""Faults of the server that keeps the leases of pservers."""
ON_REQUEST = (FaultKind.worker, FaultKind.disk, *OF_COORDINATOR, FaultKind.frames)
"""Faults that a run has only if it is asked for them: their jobs are set up in another way."""

_QUIET_S = (0.2, 2.0)
_LASTS_S = {
    FaultKind.delay: (0.05, 0.8),
    FaultKind.suspend: (1.0, 5.0),
    FaultKind.disk: (1.0, 5.0),
    FaultKind.coordinator: (1.0, 8.0),
    FaultKind.coordinator_kill: (0.5, 8.0),
    FaultKind.frames: (1.0, 5.0),
}


class Fault(NamedTuple):
    """One fault."""

    kind: FaultKind
    target: int
    """Index of the pserver or worker; without a meaning where all are meant."""
    lasts_s: float
    """Seconds for which it lasts; 0 where it is an instant."""
    quiet_s: float
    """Seconds until it begins, once all workers train."""
    seed: int = 0
    """Seed of all else that it chooses."""


def faults(seed: int, kinds: Sequence[FaultKind], num_targets: int) -> Iterator[Fault]:
    """Yields faults without end, in rounds that have each kind once. Equal arguments give equal faults.

    Args:
        seed: Seed of the choice.
        kinds: What may happen.
        num_targets: Number of pservers, and of workers.
    """
    rng = random.Random(seed)
    while True:
        for kind in rng.sample(kinds, len(kinds)):
            low_s, high_s = _LASTS_S.get(kind, (0.0, 0.0))
            target, lasts_s, quiet_s = rng.randrange(num_targets), rng.uniform(low_s, high_s), rng.uniform(*_QUIET_S)
            yield Fault(kind, target, lasts_s, quiet_s, rng.getrandbits(32))
