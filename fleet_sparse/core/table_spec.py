"""TableSpec: everything that decides the values of a table's rows."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from .bounds import Bounds
from .decay import Decay
from .initializer import Initializer, checked
from .spec import BOUNDS_DEFAULTS, DECAY_DEFAULTS, GRADIENT_DEFAULTS, Spec, check_bounds, is_int, unequal

MAX_DIM = 65535


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
            ]
        )

    def _values_of(self, defaults: dict[str, float]) -> list[float]:
        given = dict(self.hyperparameters)
        return [given.get(name, default) for name, default in defaults.items()]

    def _fields(self) -> dict[str, Any]:
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
        }
