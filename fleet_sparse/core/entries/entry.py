"""Entry: the entry policy of one table, with its settings and the kind of its counters."""

from __future__ import annotations

import math
from typing import NamedTuple

from .count_filter import count_filter
from .policy import EntryPolicy
from .probability import probability
from .show_click import show_click

ENTRIES: dict[str, EntryPolicy] = {policy.name: policy for policy in (count_filter, probability, show_click)}
"""Entry policies by name."""

EXACT, SKETCH = "exact", "sketch"
LARGEST_IN_SKETCH = 255
MAX_IDS = 1 << 40


class Entry(NamedTuple):
    """Decides which ids of a table get a row.

    Attributes:
        policy: A key of `ENTRIES`.
        settings: (name, value) of every setting of the policy, sorted by name.
        counter: `EXACT`: a counter for each id without a row. `SKETCH`: counters that ids share, in one cache line for
            each id, whose number does not grow; a total may be too large, never too small.
        num_ids: Number of distinct ids without a row that a sketch is made for; 0 with `EXACT`.
    """

    policy: str
    settings: tuple[tuple[str, float], ...] = ()
    counter: str = EXACT
    num_ids: int = 0

    def __str__(self) -> str:
        values = [f"{name}={value:g}" for name, value in self.settings]
        kind = [f"counter={self.counter!r}", f"num_ids={self.num_ids}"] if self.counter != EXACT else []
        return f"{self.policy}({', '.join([*values, *kind])})"


def checked(entry: Entry) -> Entry:
    """Returns an entry with all settings, once it is found valid.

    Raises:
        ValueError: Policy, counter or a setting is unknown, or a value is out of its range.
    """
    if entry.policy not in ENTRIES:
        raise ValueError(f"entry policy {entry.policy!r} is unknown, should be one of {', '.join(sorted(ENTRIES))}")
    policy = ENTRIES[entry.policy]
    where = f"entry {entry.policy!r}"
    settings = dict(policy.defaults)
    for name, value in entry.settings:
        if name not in settings:
            names = ", ".join(name for name, _ in policy.defaults) or "none"
            raise ValueError(f"{where}: setting {name!r} is unknown, it has {names}")
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value):
            raise ValueError(f"{where}: {name} is {value!r}, should be a finite number")
        settings[name] = float(value)
    if fault := policy.find_fault(settings):
        raise ValueError(f"{where}: {fault}")
    _check_counter(where, policy, settings, entry)
    return entry._replace(settings=tuple(sorted(settings.items())))


def _check_counter(where: str, policy: EntryPolicy, settings: dict[str, float], entry: Entry) -> None:
    if entry.counter not in (EXACT, SKETCH):
        raise ValueError(f"{where}: counter is {entry.counter!r}, should be {EXACT!r} or {SKETCH!r}")
    if entry.counter == EXACT:
        if entry.num_ids != 0:
            raise ValueError(f"{where}: num_ids is {entry.num_ids!r}, only a sketch has it. Write counter={SKETCH!r}")
        return
    largest = math.inf if policy.largest_total is None else policy.largest_total(settings)
    if len(policy.statistics) != 1 or largest > LARGEST_IN_SKETCH:
        raise ValueError(
            f"{where}: a sketch counts one number up to {LARGEST_IN_SKETCH}, the policy needs more. "
            f"Write counter={EXACT!r}"
        )
    if not isinstance(entry.num_ids, int) or isinstance(entry.num_ids, bool) or not 1 <= entry.num_ids <= MAX_IDS:
        raise ValueError(f"{where}: num_ids is {entry.num_ids!r}, a sketch needs the number of ids, 1 to 2^40")
