"""SizeLimit: refuses steps whose new ids would give a table more rows than its size."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from fleet_sparse.errors import PushRefused
from fleet_sparse.worker.control.control import ControlClient
from fleet_sparse.worker.net.table_client import TableClient
from fleet_sparse.worker.rows.row_batch import RowBatch


class _Allowance(NamedTuple):
    """Number of ids of a table that may be pushed before the pservers are asked again."""

    num_ids: int
    ends_at: float
    """Monotonic time."""


_NONE = _Allowance(0, math.inf)


class SizeLimit:
    """Checks a step before anything of it is pushed.

    Far below the size a check only counts: the ids of a step are an upper bound of its new ids. Once an allowance of
    ids is used up, the pservers are asked how many rows there are and how many ids of the step have none.

    With one worker no table ever exceeds its size. Other workers may add ids between the answer and the push, so with
    several workers an allowance is half of a worker's part of the room, and ends after `max_age_s`.

    Args:
        control: Client of the control plane.
        client: TableClient of the data plane.
        num_workers: Number of workers of the job.
        max_age_s: Seconds after which an allowance ends, with several workers.
    """

    def __init__(self, control: ControlClient, client: TableClient, num_workers: int, max_age_s: float) -> None:
        self._control = control
        self._client = client
        self._num_workers = num_workers
        self._max_age_s = max_age_s
        self._allowances: dict[str, _Allowance] = {}

    def reset(self) -> None:
        """Ends all allowances, because the pservers loaded a snapshot."""
        self._allowances.clear()

    def check(self, updates: Sequence[RowBatch], sizes: Mapping[str, int]) -> None:
        """Checks the ids of a step.

        Args:
            updates: The gradients of the step.
            sizes: Largest number of rows by table; tables that are not in it have no limit.

        Raises:
            PushRefused: A table would have more rows than its size.
        """
        for update in updates:
            name, num_ids = update.spec.name, len(update.unique.ids)
            if name not in sizes:
                continue
            left = self._allowances.get(name, _NONE)
            if num_ids <= left.num_ids and time.monotonic() < left.ends_at:
                self._allowances[name] = left._replace(num_ids=left.num_ids - num_ids)
            else:
                self._allowances[name] = self._ask(update, sizes[name])

    def _ask(self, update: RowBatch, size: int) -> _Allowance:
        self._client.flush()
        asked_at, name = time.monotonic(), update.spec.name
        tables = [table for reply in self._control.stats() for table in reply.tables]
        num_rows = sum(table.num_rows for table in tables if table.name == name)
        num_new = self._client.count_missing(update.spec, update.unique)
        if num_new and num_rows + num_new > size:
            raise PushRefused(
                f"table {name!r}: has {num_rows} rows and would get {num_new} more in this step, its size is {size}. "
                "Give the embedding a larger size, or leave refuse_ids_past_size out"
            )
        room = max(0, size - num_rows - num_new)
        if self._num_workers == 1:
            return _Allowance(room, math.inf)
        return _Allowance(room // (2 * self._num_workers), asked_at + self._max_age_s)
