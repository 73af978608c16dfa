"""Faults of a chaos run: which one is next, as a function of the seed. Pure."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from enum import StrEnum
from typing import NamedTuple


class FaultKind(StrEnum):
    """What happens to pservers."""

    kill = "pserver killed"
    kill_all = "all pservers killed"
    delay = "pserver suspended for less than a second"
    suspend = "pserver suspended for seconds"
    power = "power cut: half of the log that was not synced is lost"
    torn = "torn record at the end of the log"


WITH_LOG = (FaultKind.power, FaultKind.torn)
"""Faults of a pserver that has a log."""

_DELAYS_S, _SUSPENSIONS_S, _QUIET_S = (0.05, 0.8), (1.0, 5.0), (0.2, 2.0)


class Fault(NamedTuple):
    """One fault."""

    kind: FaultKind
    shard: int
    """The pserver; the first one where it is of all."""
    lasts_s: float
    """Seconds for which a pserver is suspended; 0 elsewhere."""
    quiet_s: float
    """Seconds until it begins, once all workers train."""


def faults(seed: int, kinds: Sequence[FaultKind], num_pservers: int) -> Iterator[Fault]:
    """Yields faults without end. Equal arguments give equal faults.

    Args:
        seed: Seed of the choice.
        kinds: What may happen; each kind is as likely as the others.
        num_pservers: Number of pservers.
    """
    rng = random.Random(seed)
    while True:
        kind = rng.choice(kinds)
        low_s, high_s = {FaultKind.delay: _DELAYS_S, FaultKind.suspend: _SUSPENSIONS_S}.get(kind, (0.0, 0.0))
        yield Fault(kind, rng.randrange(num_pservers), rng.uniform(low_s, high_s), rng.uniform(*_QUIET_S))
