"""Mode: how pushes of several workers are combined on the shards. `docs/consistency.md` says what a worker observes."""

from __future__ import annotations

import json
from typing import Annotated, Final, Literal

import msgspec

SYNC: Final = "sync"
ASYNC: Final = "async"
GEO: Final = "geo"

AVG: Final = "avg"
SUM: Final = "sum"

Kind = Literal["sync", "async", "geo"]
Scale = Literal["avg", "sum"]
_Count = Annotated[int, msgspec.Meta(ge=0)]


class Mode(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of the steps of a job, on which all of its workers must agree.

    Attributes:
        kind: `SYNC`, `ASYNC` or `GEO`.
        scale: How contributions of the workers are combined, `AVG` or `SUM`: gradients in sync, changes of rows in geo.
            Async applies every push as it is.
        max_step_lag: Async: number of steps that a worker may be ahead of the slowest one; None for any number.
        k_steps: Geo: number of steps between two exchanges; else 0.

    Raises:
        ValueError: `max_step_lag` outside of async, or `k_steps` that does not fit the kind.
    """

    kind: Kind = ASYNC
    scale: Scale = AVG
    max_step_lag: _Count | None = None
    k_steps: _Count = 0

    def __post_init__(self) -> None:
        if self.max_step_lag is not None and self.kind != ASYNC:
            raise ValueError(f"max_step_lag is {self.max_step_lag} in {self.kind}, should be None")
        if (self.k_steps > 0) != (self.kind == GEO):
            raise ValueError(f"k_steps is {self.k_steps} in {self.kind}, should be above 0 in geo and 0 elsewhere")

    @property
    def is_step_synchronized(self) -> bool:
        """True if shards know the step of each worker and let pulls wait for slower workers."""
        return self.kind == SYNC or self.max_step_lag is not None

    def __str__(self) -> str:
        """The mode as messages name it: `sync (avg)`, `async (max_step_lag 4)`."""
        if self.kind == SYNC:
            return f"{self.kind} ({self.scale})"
        if self.kind == GEO:
            return f"{self.kind} (k_steps {self.k_steps}, {self.scale})"
        return self.kind if self.max_step_lag is None else f"{self.kind} (max_step_lag {self.max_step_lag})"

    def to_json(self) -> str:
        """The mode as one line of JSON; `parse_mode` reads it."""
        return json.dumps(msgspec.structs.asdict(self), sort_keys=True)


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
