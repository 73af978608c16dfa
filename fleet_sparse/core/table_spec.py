"""TableSpec: everything that decides the values of a table's rows."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from . import entries
from .bounds import Bounds
from .decay import Decay
from .entries import ENTRIES, SKETCH, Entry, EntryPolicy
from .ids import table_salt
from .initializer import Initializer, checked, constant
from .rules import delta
from .spec import BOUNDS_DEFAULTS, DECAY_DEFAULTS, GRADIENT_DEFAULTS, Spec, check_bounds, is_int, unequal

MAX_DIM = 65535
COUNTERS_SUFFIX = "@entry"
"""Ends the name of the counters of a table, and of no other table."""


@dataclass(frozen=True, kw_only=True)
class TableSpec(Spec):
    """A table. Workers and pservers must agree on every field but `max_ids`.

    Attributes:
        hyperparameters: As `Spec` says; every rule also accepts `l1_decay`, `l2_decay`, `clip_min` and `clip_max`,
            which are left out if they change nothing.
        dim: Number of floats of a row, 1 to 65535.
        initializer: Distribution of the first value of a row.
        seed: Seed of the initializer, in `[0, 2^64)`.
        dtype: Type of a row's values; "float32".
        max_ids: Number of distinct ids that the user expects at most; None if there is no such promise.
        entry: Which ids get a row; None for all that are pushed.
        counts_for: Name of the table whose ids without a row are counted here; None for every table that a user
            declares. Ids, or the lines of a sketch, lie in the same buckets as those of that table.

    Raises:
        ValueError: A field has a value outside of these; the message names the table.
    """

    kind = "table"
    accepted = GRADIENT_DEFAULTS

    dim: int
    initializer: Initializer
    seed: int = 0
    dtype: str = "float32"
    max_ids: int | None = None
    entry: Entry | None = None
    counts_for: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not is_int(self.dim) or not 1 <= self.dim <= MAX_DIM:
            raise ValueError(f"{self.where}: dim is {self.dim!r}, should be 1 to {MAX_DIM}")
        if self.dtype != "float32":
            raise ValueError(f"{self.where}: dtype is {self.dtype!r}, should be 'float32', the only dtype of tables")
        if not is_int(self.seed) or not 0 <= self.seed < 1 << 64:
            raise ValueError(f"{self.where}: seed is {self.seed!r}, should be 0 to 2^64 - 1")
        if self.max_ids is not None and (not is_int(self.max_ids) or self.max_ids < 1):
            raise ValueError(f"{self.where}: max_ids is {self.max_ids!r}, should be None or at least 1")
        check_bounds(self.where, self.bounds)
        try:
            self._set("initializer", checked(Initializer(*self.initializer)))
        except (TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"{self.where}: {error}") from None
        self._check_entry()

    def _check_entry(self) -> None:
        if self.entry is not None:
            try:
                self._set("entry", entries.checked(Entry(*self.entry)))
            except (TypeError, ValueError) as error:
                raise ValueError(f"{self.where}: {error}") from None
        elif self.counts_for is not None:
            raise ValueError(f"{self.where}: counts_for is {self.counts_for!r}, should be None without an entry")
        counted = self.name.removesuffix(COUNTERS_SUFFIX)
        if self.counts_for != (None if counted == self.name else counted):
            raise ValueError(f"{self.where}: a name should not end with {COUNTERS_SUFFIX!r}, as those of counters do")
        if self.counts_for is None:
            _ = self.counters  # checks its name

    @property
    def entry_policy(self) -> EntryPolicy | None:
        """The policy that `entry` names; None without one."""
        return None if self.entry is None else ENTRIES[self.entry.policy]

    @property
    def read_initializer(self) -> Initializer:
        """Distribution of what an id without a row reads: zeros in a table with an entry."""
        return self.initializer if self.entry is None else constant(0.0)

    @cached_property
    def statistics(self) -> tuple[str, ...]:
        """Names of the statistics of each id that pushes carry, in the order of the columns on the wire."""
        policy = self.entry_policy
        return () if policy is None or self.counts_for is not None else policy.statistics

    @cached_property
    def counters(self) -> TableSpec | None:
        """The table that holds the totals of ids without a row; None if the entry policy reads none."""
        if not self.statistics:
            return None
        return TableSpec(
            name=f"{self.name}{COUNTERS_SUFFIX}",
            dim=len(self.statistics),
            rule=delta.name,
            initializer=constant(0.0),
            entry=self.entry,
            counts_for=self.name,
        )

    @property
    def is_sketch(self) -> bool:
        """True if this table holds the lines of a sketch."""
        return self.counts_for is not None and self.entry is not None and self.entry.counter == SKETCH

    @cached_property
    def salt(self) -> int:
        """The 64 bits that ids of the table are combined with before they are hashed."""
        return table_salt(self.counts_for or self.name)

    @cached_property
    def decay(self) -> Decay:
        """Weight decay that is added to gradients."""
        return Decay(*self._values_of(DECAY_DEFAULTS))

    @cached_property
    def bounds(self) -> Bounds:
        """Bounds that gradients are clipped to before weight decay is added."""
        return Bounds(*self._values_of(BOUNDS_DEFAULTS))

    def differences(self, other: Spec) -> list[str]:
        """Fields in which the two specs disagree, as `dim 8 and 16`, this one's value first; empty if they agree.

        `max_ids` may differ. Rule and hyperparameters may differ if one side only reads.
        """
        if not isinstance(other, TableSpec):
            return [f"kind {self.kind} and {other.kind}"]
        return unequal(
            [
                ("name", self.name, other.name),
                ("dim", self.dim, other.dim),
                ("dtype", self.dtype, other.dtype),
                *self._rule_pairs(other),
                ("initializer", self.initializer, other.initializer),
                ("seed", self.seed, other.seed),
                ("entry", self.entry, other.entry),
                ("counts_for", self.counts_for, other.counts_for),
            ]
        )

    def _values_of(self, defaults: dict[str, float]) -> list[float]:
        given = dict(self.hyperparameters)
        return [given.get(name, default) for name, default in defaults.items()]

    def _fields(self) -> dict[str, Any]:
        of_entry = {"entry": None if self.entry is None else list(self.entry), "counts_for": self.counts_for}
        return {
            "kind": self.kind,
            "name": self.name,
            "dim": self.dim,
            "dtype": self.dtype,
            "rule": self.rule,
            "hyperparameters": dict(self.hyperparameters),
            "initializer": list(self.initializer),
            "seed": self.seed,
            "max_ids": self.max_ids,
            # Left out, so that the hash of a table without an entry does not change.
            **{name: value for name, value in of_entry.items() if value is not None},
        }
