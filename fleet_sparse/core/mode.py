"""Mode: how pushes of several workers are combined on the shards. `docs/consistency.md` says what a worker observes."""

from __future__ import annotations

import json
from typing import Annotated, Final, Literal

import msgspec

from .cache_limits import CacheLimits
from .row_bound import RowBound

SYNC: Final = "sync"
ASYNC: Final = "async"
GEO: Final = "geo"

AVG: Final = "avg"
SUM: Final = "sum"

PSERVERS: Final = "pservers"
ALL_REDUCE: Final = "all_reduce"

Kind = Literal["sync", "async", "geo"]
Scale = Literal["avg", "sum"]
Dense = Literal["pservers", "all_reduce"]
GradsDtype = Literal["float32", "bfloat16"]
_Count = Annotated[int, msgspec.Meta(ge=0)]
_LATER_FIELDS = (("dense", PSERVERS), ("dense_grads_dtype", "float32"), ("row_bound", None), ("cache_limits", None))


class Mode(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of the steps of a job, on which all of its workers must agree.

    Attributes:
        kind: `SYNC`, `ASYNC` or `GEO`.
        scale: How contributions of the workers are combined, `AVG` or `SUM`: gradients in sync, changes of rows in geo.
            Async applies every push as it is.
        max_step_lag: Async: number of steps that a worker may be ahead of the slowest one; None for any number.
        k_steps: Geo: number of steps between two exchanges; else 0.
        dense: Where gradients of dense parameters are merged in a job of several workers: on the `PSERVERS`, or, in
            sync, by the workers among themselves with `ALL_REDUCE`.
        dense_grads_dtype: Encoding of the gradients of dense parameters in pushes.
        row_bound: What rows that workers cache may lack; None if workers cache no rows.
        cache_limits: Sync with a `row_bound`: how much workers cache and hold back, from which follows in how many
            steps they send it. None in jobs of one worker and in other modes, in which each may have its own.

    Raises:
        ValueError: `max_step_lag` outside of async, `k_steps` that does not fit the kind, `ALL_REDUCE` outside of
            sync, a `row_bound` in geo, `cache_limits` without a `row_bound` or outside of sync, or a
            `dense_grads_dtype` where no gradients of dense parameters are pushed.
    """

    kind: Kind = ASYNC
    scale: Scale = AVG
    max_step_lag: _Count | None = None
    k_steps: _Count = 0
    dense: Dense = PSERVERS
    dense_grads_dtype: GradsDtype = "float32"
    row_bound: RowBound | None = None
    cache_limits: CacheLimits | None = None

    def __post_init__(self) -> None:
        if self.row_bound is not None and self.kind == GEO:
            raise ValueError(f"row_bound is {self.row_bound} in {self.kind}, should be None")
        if self.cache_limits is not None and (self.row_bound is None or self.kind != SYNC):
            raise ValueError(
                f"cache_limits is {self.cache_limits} in {self.kind} with row_bound {self.row_bound}, should be None"
            )
        if self.max_step_lag is not None and self.kind != ASYNC:
            raise ValueError(f"max_step_lag is {self.max_step_lag} in {self.kind}, should be None")
        if (self.k_steps > 0) != (self.kind == GEO):
            raise ValueError(f"k_steps is {self.k_steps} in {self.kind}, should be above 0 in geo and 0 elsewhere")
        if self.dense == ALL_REDUCE and self.kind != SYNC:
            raise ValueError(f"dense is {self.dense} in {self.kind}, should be {PSERVERS}")
        if self.dense_grads_dtype != "float32" and (self.kind == GEO or self.dense == ALL_REDUCE):
            raise ValueError(
                f"dense_grads_dtype is {self.dense_grads_dtype} in {self.kind} with dense {self.dense}, should be "
                "float32"
            )

    @property
    def is_step_synchronized(self) -> bool:
        """True if shards know the step of each worker and let pulls wait for slower workers."""
        return self.kind == SYNC or self.max_step_lag is not None

    @property
    def can_replace_workers(self) -> bool:
        """True if a job goes on when another process takes the place of a worker that died.

        A sync step lacks the share of the dead. Where steps are counted and workers cache rows, steps send what caches
        hold, so that another process would not make the same steps again.
        """
        return self.kind != SYNC and (self.max_step_lag is None or self.row_bound is None)

    def __str__(self) -> str:
        """The mode as messages name it: `sync (avg)`, `async (max_step_lag 4)`."""
        details = []
        if self.k_steps:
            details.append(f"k_steps {self.k_steps}")
        if self.max_step_lag is not None:
            details.append(f"max_step_lag {self.max_step_lag}")
        if self.kind != ASYNC:
            details.append(self.scale)
        if self.dense != PSERVERS:
            details.append(f"dense {self.dense}")
        if self.dense_grads_dtype != "float32":
            details.append(f"FLEET_SPARSE_DENSE_GRADS_DTYPE {self.dense_grads_dtype}")
        if self.row_bound is not None:
            details.append(str(self.row_bound))
        if self.cache_limits is not None:
            details.append(str(self.cache_limits))
        return f"{self.kind} ({', '.join(details)})" if details else self.kind

    def to_json(self) -> str:
        """The mode as one line of JSON; `parse_mode` reads it. Fields after `k_steps` are left out at defaults."""
        fields = msgspec.to_builtins(self)
        for name, default in _LATER_FIELDS:
            if fields[name] == default:
                del fields[name]
        return json.dumps(fields, sort_keys=True)


_decoder = msgspec.json.Decoder(Mode)


def parse_mode(text: str) -> Mode:
    """Returns the mode that `to_json` wrote.

    Raises:
        ValueError: The text is not JSON of a mode, or a field has a value that a mode cannot have.
    """
    try:
        return _decoder.decode(text)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ValueError(f"mode: {text!r} cannot be read ({error})") from None
