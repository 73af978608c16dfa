"""Criteria: which rows a shrink removes, decided from each row alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .columns import LAST_UPDATE_DAY
from .entries import CLICK, COUNTS, ENTRIES, SHOW
from .ids import hash_ids
from .table_spec import TableSpec

NUM_EXAMPLES = 5
"""Largest number of removed ids that a report names for each table and criterion."""

UNSEEN_DAYS, MIN_NORM, MIN_SCORE, HOTTEST = "unseen_days", "min_norm", "min_score", "hottest"


class Judged(NamedTuple):
    """Rows that criteria judge."""

    spec: TableSpec
    num_days: int
    """Age of the table in days."""
    rows: NDArray[np.float32]
    """`(n, dim)`."""
    columns: Mapping[str, NDArray[Any]]
    """The other columns of the rows, as far as the table has them."""
    least_shows: float = 0.0
    """Shows of a row that is among the hottest ones of the store."""


def _are_unseen(judged: Judged, max_days: float) -> NDArray[np.bool_]:
    days = judged.columns.get(LAST_UPDATE_DAY.name)
    last = np.zeros(len(judged.rows), np.int64) if days is None else days.astype(np.int64)
    goes: NDArray[np.bool_] = judged.num_days - last > max_days
    return goes


def _are_small(judged: Judged, norm: float) -> NDArray[np.bool_]:
    goes: NDArray[np.bool_] = np.linalg.norm(judged.rows.astype(np.float64), axis=1) < norm
    return goes


def has_scores(spec: TableSpec) -> bool:
    """True if rows of a table have the shows and clicks, or the counts, that a score is computed from."""
    return bool(spec.statistics)


def _are_low(judged: Judged, score: float) -> NDArray[np.bool_]:
    """Rows of a table without statistics stay."""
    columns, entry = judged.columns, judged.spec.entry
    if SHOW in columns and CLICK in columns:
        weights = dict(ENTRIES["show_click"].defaults) | dict(entry.settings if entry is not None else ())
        show, click = columns[SHOW].astype(np.float64), columns[CLICK].astype(np.float64)
        found = weights["nonclick_coeff"] * (show - click) + weights["click_coeff"] * click
    elif COUNTS in columns:
        found = columns[COUNTS].astype(np.float64)
    else:
        return np.zeros(len(judged.rows), np.bool_)
    goes: NDArray[np.bool_] = found < score
    return goes


def _are_not_hottest(judged: Judged, share: float) -> NDArray[np.bool_]:
    """Rows of a table without shows stay."""
    if SHOW not in judged.columns:
        return np.zeros(len(judged.rows), np.bool_)
    goes: NDArray[np.bool_] = judged.columns[SHOW] < judged.least_shows
    return goes


def least_shows(criteria: Sequence[Criterion], shows: NDArray[np.float32] | None) -> float:
    """Returns the fewest shows of the rows that `HOTTEST` keeps of a store with these; 0 without the criterion."""
    shares = [value for name, value in criteria if name == HOTTEST]
    if not shares or shows is None or not len(shows):
        return 0.0
    num_kept = max(math.ceil(min(shares) * len(shows)), 1)
    return float(np.partition(shows, len(shows) - num_kept)[len(shows) - num_kept])


class _Kind(NamedTuple):
    selects: Callable[[Judged, float], NDArray[np.bool_]]
    text: str


_KINDS = {
    UNSEEN_DAYS: _Kind(_are_unseen, "unseen for more than {:g} days"),
    MIN_NORM: _Kind(_are_small, "norm below {:g}"),
    MIN_SCORE: _Kind(_are_low, "score below {:g}"),
    HOTTEST: _Kind(_are_not_hottest, "not in the share {:g} with the most shows"),
}


class Criterion(NamedTuple):
    """A condition under which rows are removed; `checked` finds it valid."""

    name: str
    """`UNSEEN_DAYS`, `MIN_NORM`, `MIN_SCORE` or `HOTTEST`, whose value is a share of the rows."""
    value: float

    def __str__(self) -> str:
        return _KINDS[self.name].text.format(self.value)


class Removal(NamedTuple):
    """The rows of one table that one criterion removes. A row counts for the first criterion that selects it."""

    table: str
    criterion: str
    """Text of the criterion, such as `unseen for more than 30 days`."""
    num_removed: int
    examples: tuple[int, ...]
    """Some of their ids: those with the smallest hashes, in that order."""


def checked(criteria: Sequence[Criterion], decay: float = 1.0) -> tuple[Criterion, ...]:
    """Returns the criteria of a shrink, once they and the decay are found valid.

    Raises:
        ValueError: There is none, one is unknown, or a value is outside of its range.
    """
    if not criteria:
        raise ValueError(f"no criterion is given, should be at least one of {', '.join(_KINDS)}")
    for name, value in criteria:
        if name not in _KINDS:
            raise ValueError(f"criterion {name!r} is unknown, should be one of {', '.join(_KINDS)}")
        if not math.isfinite(value) or value < 0 or (name == UNSEEN_DAYS and value != int(value)):
            raise ValueError(f"{name} is {value:g}, should be {'0, 1, 2 ...' if name == UNSEEN_DAYS else 'at least 0'}")
        if name == HOTTEST and not 0 < value <= 1:
            raise ValueError(f"{name} is {value:g}, should be a share of the rows, above 0 and at most 1")
    if not 0 < decay <= 1:
        raise ValueError(f"decay is {decay:g}, should be above 0 and at most 1")
    return tuple(criteria)


def selected_by(criteria: Sequence[Criterion], judged: Judged) -> NDArray[np.int64]:
    """Returns the number of the first criterion that selects each row, `(n,)`; -1 if the row stays."""
    number = np.full(len(judged.rows), -1, np.int64)
    for index, (name, value) in reversed(list(enumerate(criteria))):
        number[_KINDS[name].selects(judged, value)] = index
    return number


def decayed(values: NDArray[np.float32], decay: float) -> NDArray[np.float32]:
    """Returns shows or clicks after a decay; the array itself if nothing changes."""
    return values if decay == 1.0 else values * np.float32(decay)


def smallest_ids(ids: NDArray[np.int64], salt: int) -> tuple[int, ...]:
    """Returns the ids with the smallest hashes, `NUM_EXAMPLES` at most, which a report names as examples.

    Those of a table are found from those of its parts.
    """
    order = np.argsort(hash_ids(ids, salt), kind="stable")[:NUM_EXAMPLES]
    return tuple(ids[order].tolist())
