"""RowBound: by how much a cached copy of a row may lag, in whole numbers.

The numbers are updates or, with a bound in distance, units of `drift / DRIFT_UNITS`, rounded up. The other workers may
hold one part of a row's lag, and the pserver may be ahead of the copy by the rest; `kernels_row_bound` has the
equations.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

DRIFT_UNITS = 4096
"""Largest lag with a bound in distance."""
MAX_UNITS = (1 << 30) - 1
"""Largest distance of one update. Not a divisor of 2^32: several of them do not bring a clock back to where it was."""
MIN_DRIFT = 1e-5
"""Smallest bound in distance. A clock tells for certain how far a row moved up to 2^20 times the bound."""
ANY_AMOUNT = 1 << 62
"""More than any number of updates or units: so much the only worker of a job may hold, and so far its copies may be
behind, because nobody else reads or changes its rows."""
DEFAULT_SHARE = 0.25
NO_VERSION = np.uint32(0xFFFF_FFFF)
"""Version of a copy that there is not, or of which nothing is known. A clock may have this value: the copy of such a
row is sent once more than needed."""
ROW_FOLLOWS, STATES_FOLLOW = 254, 255
"""Answers to an ask. Smaller ones are numbers of steps for which the copy is leased."""

_MAX_LAG = (1 << 31) - 1


class BoundTerms(NamedTuple):
    """A bound as kernels take it."""

    lag: int
    """Largest number of updates or units."""
    share: float
    """Largest share of all updates; negative for any."""
    units_per_distance: float
    """Units of a distance of 1; 0 with a bound in updates."""


class RowBound(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a row that a step trains on may lack of the updates of the other workers.

    Attributes:
        lag: Largest number of updates; None with a bound in distance.
        share: Largest share of all updates that the row ever had; None for any.
        drift: Largest distance by which these updates may have moved a value; None with a bound in updates.

    Raises:
        ValueError: Not exactly one of `lag` and `drift` is given, a share comes with a drift, or a number is out of
            its range.
    """

    lag: int | None = None
    share: float | None = None
    drift: float | None = None

    def __post_init__(self) -> None:
        if (self.lag is None) == (self.drift is None):
            raise ValueError(f"lag is {self.lag} and drift is {self.drift}, exactly one should be a number")
        if self.lag is not None and not 1 <= self.lag <= _MAX_LAG:
            raise ValueError(f"lag is {self.lag}, should be 1 to {_MAX_LAG}")
        if self.share is not None and not 0 < self.share <= 1:
            raise ValueError(f"share is {self.share}, should be above 0 and at most 1")
        if self.share is not None and self.lag is None:
            raise ValueError(f"share is {self.share} with drift {self.drift}, should be None")
        if self.drift is not None and not 0 < self.drift < math.inf:
            raise ValueError(f"drift is {self.drift}, should be above 0 and finite")
        if self.drift is not None and self.drift < MIN_DRIFT:
            raise ValueError(
                f"drift is {self.drift:g}, should be at least {MIN_DRIFT:g}: a clock of 32 bits has no place for "
                "smaller units of distance. Write 1 to 2 times the learning rate, or train without a row cache"
            )

    def __str__(self) -> str:
        """The bound as the fields of `PserverStrategy` state it."""
        if self.drift is not None:
            return f"max_row_drift {self.drift:g}"
        return f"max_row_lag {self.lag}, max_row_lag_share {self.share}"

    @property
    def has_leases(self) -> bool:
        """True if the number of steps bounds what others can add: an update counts 1, but a distance can be any."""
        return self.drift is None

    @property
    def terms(self) -> BoundTerms:
        """The bound as kernels take it."""
        lag = DRIFT_UNITS if self.lag is None else self.lag
        per_distance = 0.0 if self.drift is None else DRIFT_UNITS / self.drift
        return BoundTerms(lag, -1.0 if self.share is None else self.share, per_distance)

    def units(self, distances: NDArray[np.float32] | NDArray[np.float64]) -> NDArray[np.uint32]:
        """Returns distances `(n,)`, none negative, in units of the drift, rounded up; `MAX_UNITS` if more, or NaN."""
        assert self.drift is not None, "a bound in distance"
        in_units = np.ceil(distances.astype(np.float64) * (DRIFT_UNITS / self.drift))
        return np.where(in_units < MAX_UNITS, in_units, MAX_UNITS).astype(np.uint32)


def steps_off_lease(max_step_lag: int | None) -> int:
    """Returns by how many steps leases are shorter because workers are in different steps.

    Args:
        max_step_lag: The bound on their lag in async mode; None in sync mode, where a pull sees the same step of all.
    """
    return 0 if max_step_lag is None else 2 * max_step_lag + 1
