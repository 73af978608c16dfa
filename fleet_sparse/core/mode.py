"""Mode: how the pushes of several workers meet on the shards. `docs/consistency.md` says what a worker may observe."""

from __future__ import annotations

import json
from typing import NamedTuple

SYNC = "sync"
ASYNC = "async"
GEO = "geo"

AVG = "avg"
SUM = "sum"


class Mode(NamedTuple):
    """What all workers of a job must agree on about their steps.

    Attributes:
        kind: `SYNC`, `ASYNC` or `GEO`.
        scale: How the workers' shares are put together: `AVG` or `SUM`; of gradients in sync, of changes in geo. In
            async every push is applied as it is.
        max_step_lag: Async: how many steps a worker may be ahead of the slowest one; None for any number.
        k_steps: Geo: steps between two exchanges; else 0.
    """

    kind: str = ASYNC
    scale: str = AVG
    max_step_lag: int | None = None
    k_steps: int = 0

    @property
    def is_step_synchronized(self) -> bool:
        """Whether shards know the step of each worker, and let pulls wait for slower ones."""
        return self.kind == SYNC or self.max_step_lag is not None

    def __str__(self) -> str:
        """As messages name it: `sync (avg)`, `async (max_step_lag 4)`."""
        details = {
            SYNC: self.scale,
            GEO: f"k_steps {self.k_steps}, {self.scale}",
            ASYNC: None if self.max_step_lag is None else f"max_step_lag {self.max_step_lag}",
        }[self.kind]
        return self.kind if details is None else f"{self.kind} ({details})"

    def to_json(self) -> str:
        """One line of JSON; `parse_mode` reads it."""
        return json.dumps(self._asdict(), sort_keys=True)


def parse_mode(text: str) -> Mode:
    """The mode that `to_json` wrote.

    Raises:
        ValueError: The text is no such JSON.
    """
    try:
        mode = Mode(**json.loads(text))
        is_valid = (
            mode.kind in (SYNC, ASYNC, GEO)
            and mode.scale in (AVG, SUM)
            and (mode.max_step_lag is None or (mode.kind == ASYNC and _is_count(mode.max_step_lag)))
            and _is_count(mode.k_steps)
            and (mode.k_steps > 0) == (mode.kind == GEO)
        )
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"mode: {text!r} cannot be read ({error})") from None
    if not is_valid:
        raise ValueError(f"mode: {text!r} has a field of a value that it cannot have")
    return mode


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
