"""CacheLimits: how much each worker of a job caches and holds back, and what its gradients weigh."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

_Positive = Annotated[int, msgspec.Meta(ge=1)]
_Count = Annotated[int, msgspec.Meta(ge=0)]


class CacheLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of row caches on which workers agree, if they send what they hold in steps that all of them make.

    Attributes:
        max_bytes: Memory of all copies of a worker.
        max_rows: Largest number of copies of one table; None for any.
        min_dim: Smallest dim of a table that is cached.
        hold_back: Largest number of updates of a row that a worker holds back; None for what the bound allows.
        merge: What a gradient weighs, as `RowCache.merge`; None for the default of the mode.
    """

    max_bytes: _Positive
    max_rows: _Positive | None = None
    min_dim: _Positive = 1
    hold_back: _Count | None = None
    merge: Literal["sum", "avg"] | None = None

    def __str__(self) -> str:
        """The limits as the fields of `RowCache` state them, but for those that are as by default."""
        named = [(field.name, getattr(self, field.name), field.default) for field in msgspec.structs.fields(self)]
        return ", ".join(f"RowCache.{name} {value}" for name, value, default in named if value != default)
